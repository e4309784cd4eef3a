//! Which types exist, and which release of the apiserver has which of them built in.
//!
//! Plain sets, made without the filter's code: what the filter believes is compared with this.

use std::collections::BTreeSet;

/// Index into [`TYPES`].
pub type TypeId = usize;

/// How many releases there are; they are numbered from 0, the oldest.
pub const RELEASES: usize = 4;

/// A resource or subresource of one group-version.
#[derive(Debug)]
pub struct Kind {
    /// API group, empty for the core group.
    pub group: &'static str,
    /// Version of the group.
    pub version: &'static str,
    /// Plural name.
    pub resource: &'static str,
    /// Name of the subresource, empty for the resource itself.
    pub subresource: &'static str,
    /// Releases that have it built in.
    releases: [bool; RELEASES],
    /// Served by every apiserver alike while the definition of this number is in etcd.
    pub definition: Option<usize>,
}

const fn built_in(
    group: &'static str,
    version: &'static str,
    resource: &'static str,
    subresource: &'static str,
    releases: [u8; RELEASES],
) -> Kind {
    let releases = [releases[0] == 1, releases[1] == 1, releases[2] == 1, releases[3] == 1];
    Kind { group, version, resource, subresource, releases, definition: None }
}

const fn custom(group: &'static str, resource: &'static str, subresource: &'static str, definition: usize) -> Kind {
    Kind { group, version: "v1", resource, subresource, releases: [false; RELEASES], definition: Some(definition) }
}

/// How many custom resource definitions there are.
pub const DEFINITIONS: usize = 2;

/// All types that clients ask for. Groups and single resources and single subresources come and go between releases, and
/// the oldest release has something that no later one has.
pub static TYPES: &[Kind] = &[
    built_in("", "v1", "pods", "", [1, 1, 1, 1]),
    built_in("", "v1", "pods", "status", [1, 1, 1, 1]),
    built_in("", "v1", "pods", "resize", [0, 1, 1, 1]),
    built_in("", "v1", "configmaps", "", [1, 1, 1, 1]),
    built_in("", "v1", "services", "", [1, 1, 1, 1]),
    // What answers behind it is a backend, in whatever form it likes.
    built_in("", "v1", "services", "proxy", [1, 1, 1, 1]),
    built_in("", "v1", "nodefeatures", "", [0, 0, 1, 1]),
    built_in("", "v1", "componentstatuses", "", [1, 1, 0, 0]),
    built_in("apps", "v1", "deployments", "", [1, 1, 1, 1]),
    built_in("apps", "v1", "deployments", "scale", [1, 1, 1, 1]),
    built_in("storage.k8s.io", "v1", "csinodes", "", [1, 1, 1, 1]),
    built_in("storage.k8s.io", "v1", "csinodes", "status", [0, 0, 0, 1]),
    built_in("storage.k8s.io", "v1beta1", "volumeattributesclasses", "", [1, 1, 1, 0]),
    built_in("storage.k8s.io", "v1", "volumeattributesclasses", "", [0, 0, 1, 1]),
    built_in("resource.k8s.io", "v1beta1", "resourceclaims", "", [1, 1, 0, 0]),
    built_in("resource.k8s.io", "v1", "resourceclaims", "", [0, 1, 1, 1]),
    built_in("resource.k8s.io", "v1", "resourceclaims", "status", [0, 1, 1, 1]),
    built_in("certificates.k8s.io", "v1", "certificatesigningrequests", "", [1, 1, 1, 1]),
    built_in("certificates.k8s.io", "v1beta1", "clustertrustbundles", "", [0, 0, 1, 1]),
    built_in("storagemigration.k8s.io", "v1", "storageversionmigrations", "", [0, 0, 0, 1]),
    built_in("storagemigration.k8s.io", "v1", "storageversionmigrations", "status", [0, 0, 0, 1]),
    built_in("internal.apiserver.k8s.io", "v1alpha1", "storageversions", "", [1, 0, 0, 0]),
    // Nobody has this one: a 404 for it is the truth.
    built_in("depot.k8s.io", "v1", "crates", "", [0, 0, 0, 0]),
    custom("toys.example.com", "robots", "", 0),
    custom("toys.example.com", "robots", "status", 0),
    // A custom resource under a name that could be built in: only the list of APIServices tells.
    custom("hangar.k8s.io", "planes", "", 1),
];

impl Kind {
    /// Whether the release has it built in.
    pub fn is_built_into(&self, release: usize) -> bool {
        self.releases[release]
    }

    /// The collection's path.
    pub fn collection(&self) -> String {
        let prefix = if self.group.is_empty() { "/api".to_owned() } else { format!("/apis/{}", self.group) };
        format!("{prefix}/{}/namespaces/shop/{}", self.version, self.resource)
    }

    /// Whether an apiserver hands requests for it on to a backend.
    pub fn reaches_backend(&self) -> bool {
        self.subresource == "proxy"
    }

    /// Name for people.
    pub fn label(&self) -> String {
        let slash = if self.subresource.is_empty() { "" } else { "/" };
        format!("{}/{} {}{slash}{}", self.group, self.version, self.resource, self.subresource)
    }
}

/// What an apiserver of this release serves while these definitions are in etcd.
pub fn served(release: usize, definitions: [bool; DEFINITIONS]) -> BTreeSet<TypeId> {
    let is_served =
        |kind: &Kind| kind.is_built_into(release) || kind.definition.is_some_and(|index| definitions[index]);
    (0..TYPES.len()).filter(|id| is_served(&TYPES[*id])).collect()
}

/// Whether some releases have the type built in and others do not.
pub fn is_skewed(id: TypeId) -> bool {
    let have = (0..RELEASES).filter(|release| TYPES[id].is_built_into(*release)).count();
    have > 0 && have < RELEASES
}

//! What clients are told of the whole cluster: made by whoever leads when something has changed, published, and copied out
//! by all workers.

use std::collections::HashMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha512};

use crate::discovery::document::Half;
use crate::discovery::json::ShapeError;
use crate::discovery::legacy;
use crate::discovery::merge::{self, Group, INCOMPLETE_GROUP, Merged};
use crate::discovery::open_api::{self, MergedRoot, Root};
use crate::peers::documents::Kind;
use crate::peers::exclusions::Exclusions;
use crate::peers::table::Table;

/// Of the layout; raised with every change of it.
const LAYOUT: u8 = 1;

/// What it is made from.
#[derive(Debug)]
pub struct Sources<'s> {
    /// The apiservers in the order of the configuration.
    pub apiservers: Vec<Known<'s>>,
    /// The local one, in sidecar mode.
    pub local: Option<usize>,
    /// Group-versions that the local document alone tells about.
    pub exclusions: &'s Exclusions,
    /// Who lists how much.
    pub table: &'s Table,
    /// Something may be missing.
    pub is_incomplete: bool,
    /// See [`ClusterDiscovery::stamp`].
    pub stamp: Stamp,
}

/// What is known of an apiserver.
#[derive(Debug)]
pub struct Known<'s> {
    /// Its name: merges take them in the order of their names.
    pub name: &'s str,
    /// Its documents, in the order of [`Kind::ALL`].
    pub documents: [Option<&'s str>; 3],
    /// Entity tags of the first two.
    pub etags: [Option<&'s str>; 2],
}

/// From what something was made.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Stamp {
    /// Hash of the configuration it was made for: see [`crate::peers::election::Candidate::poll_set`].
    pub poll_set: u64,
    /// Hash of everything else that matters.
    pub content: u64,
    /// Version of each document of each apiserver, in the order of the configuration.
    pub versions: Vec<[Option<Duration>; 3]>,
}

impl Stamp {
    /// Whether it was made for the same configuration, and no document in it is older than in `other`.
    pub fn covers(&self, other: &Self) -> bool {
        let are_as_new = |ours: &[Option<Duration>; 3], theirs: &[Option<Duration>; 3]| {
            ours.iter().zip(theirs).all(|(ours, theirs)| ours >= theirs)
        };
        self.poll_set == other.poll_set
            && self.versions.len() == other.versions.len()
            && self.versions.iter().zip(&other.versions).all(|(ours, theirs)| are_as_new(ours, theirs))
    }
}

/// The answers.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterDiscovery<'s> {
    /// From what it was made.
    pub stamp: Stamp,
    /// `/api` and `/apis` in aggregated form.
    #[serde(borrow)]
    aggregated: [Aggregated<'s>; 2],
    /// `/apis` in legacy form.
    group_list: &'s str,
    /// `/api` in legacy form, unless the apiserver's own is right.
    versions: Option<&'s str>,
    /// `/apis/GROUP`, by the group's name, where the apiserver's own is not right.
    #[serde(borrow)]
    groups: Vec<(&'s str, &'s str)>,
    /// `/apis/GROUP/VERSION` and `/api/VERSION`, by `GROUP/VERSION` or `VERSION`, where the apiserver's own is not right.
    /// Empty: nobody can tell just now.
    #[serde(borrow)]
    group_versions: Vec<(&'s str, &'s str)>,
    /// `/openapi/v3`.
    #[serde(borrow)]
    open_api: Option<&'s str>,
    /// Who has the schema document of a key, best first; only where it is not to be had here.
    #[serde(borrow)]
    elsewhere: Vec<(&'s str, Vec<u32>)>,
}

/// A document with its entity tag.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Aggregated<'s> {
    /// The body.
    pub text: &'s str,
    /// Its tag, quoted.
    pub etag: &'s str,
}

/// The bytes are of another layout, or none at all.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("not cluster discovery of layout {LAYOUT}")]
pub struct Unreadable;

/// Makes it, in the bytes to publish.
///
/// # Errors
/// [`ShapeError`]: a document cannot be merged.
pub fn make(sources: &Sources<'_>) -> Result<Vec<u8>, ShapeError> {
    let [core, groups] = [Half::Core, Half::Groups].map(|half| HalfSources::of(half, sources));
    let (mut merged_core, merged_groups) = (core.merge(sources)?, groups.merge(sources)?);
    let (core_text, core_etag) = core.aggregated(&merged_core, sources);
    // In legacy form the core group has no place for the mark.
    merged_core.groups.retain(|group| group.name != INCOMPLETE_GROUP);
    let (groups_text, groups_etag) = groups.aggregated(&merged_groups, sources);
    let mut replaced = Replaced::default();
    let core_versions = replaced.compare(&merged_core, &core)?.then(|| legacy::versions(&merged_core.groups));
    replaced.compare(&merged_groups, &groups)?;
    replaced.groups.retain(|(name, _)| !name.is_empty());
    let open_api = open_api_root(sources);
    let elsewhere = open_api.iter().flat_map(|root| &root.elsewhere).map(|(key, apiservers)| {
        (key.as_str(), apiservers.iter().filter_map(|apiserver| u32::try_from(*apiserver).ok()).collect())
    });
    let discovery = ClusterDiscovery {
        stamp: sources.stamp.clone(),
        aggregated: [
            Aggregated { text: &core_text, etag: &core_etag },
            Aggregated { text: &groups_text, etag: &groups_etag },
        ],
        group_list: &if groups.texts.is_empty() { String::new() } else { legacy::group_list(&merged_groups.groups) },
        versions: core_versions.as_deref(),
        groups: replaced.groups.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect(),
        group_versions: replaced.group_versions.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect(),
        open_api: open_api.as_ref().map(|root| root.text.as_str()),
        elsewhere: elsewhere.collect(),
    };
    Ok(postcard::to_extend(&discovery, vec![LAYOUT]).unwrap_or_default())
}

impl<'s> ClusterDiscovery<'s> {
    /// Reads what was published.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn from_bytes(bytes: &'s [u8]) -> Result<Self, Unreadable> {
        let (layout, rest) = bytes.split_first().ok_or(Unreadable)?;
        if *layout != LAYOUT {
            return Err(Unreadable);
        }
        postcard::from_bytes(rest).map_err(|_| Unreadable)
    }

    /// `/api` or `/apis` in aggregated form; empty if no apiserver has told anything of it.
    pub const fn aggregated(&self, half: Half) -> Aggregated<'s> {
        let [core, groups] = self.aggregated;
        match half {
            Half::Core => core,
            Half::Groups => groups,
        }
    }

    /// `/api` or `/apis` in legacy form; `None` if the apiserver's own is right, empty if no apiserver has told anything.
    pub const fn legacy(&self, half: Half) -> Option<&'s str> {
        match half {
            Half::Core => self.versions,
            Half::Groups => Some(self.group_list),
        }
    }

    /// `/apis/GROUP`; `None` if the apiserver's own is right.
    pub fn group(&self, name: &str) -> Option<&'s str> {
        find(&self.groups, name).copied()
    }

    /// `/apis/GROUP/VERSION`, or `/api/VERSION` if the group has no name; `None` if the apiserver's own is right, empty if
    /// nobody can tell just now.
    pub fn group_version(&self, group: &str, version: &str) -> Option<&'s str> {
        find(&self.group_versions, &legacy::group_version(group, version)).copied()
    }

    /// `/openapi/v3`; `None` if no apiserver has one.
    pub const fn open_api(&self) -> Option<&'s str> {
        self.open_api
    }

    /// Who has the schema document of a key such as `apis/apps/v1`, best first; none if it is to be had here.
    pub fn schema_owners(&self, key: &str) -> impl Iterator<Item = usize> {
        find(&self.elsewhere, key).into_iter().flatten().filter_map(|apiserver| usize::try_from(*apiserver).ok())
    }
}

/// Such requests are rare and such lists short: what differs between apiservers.
fn find<'l, V>(list: &'l [(&str, V)], name: &str) -> Option<&'l V> {
    list.iter().find(|(have, _)| *have == name).map(|(_, value)| value)
}

/// The apiservers that have a document of some kind, and its text, sorted by their names.
fn in_order_of_names<'s>(sources: &Sources<'s>, kind: Kind) -> Vec<(usize, &'s str)> {
    let mut sorted: Vec<(usize, &str)> = Vec::new();
    for (index, known) in sources.apiservers.iter().enumerate() {
        let Some(text) = kind.of_all(&known.documents).copied().flatten() else { continue };
        let name_of = |index: usize| sources.apiservers.get(index).map(|known| known.name);
        let place = sorted.iter().position(|(other, _)| name_of(*other) > Some(known.name));
        sorted.insert(place.unwrap_or(sorted.len()), (index, text));
    }
    sorted
}

/// The documents of one half, sorted by the names of their apiservers, equal ones once.
struct HalfSources<'s> {
    half: Half,
    texts: Vec<&'s str>,
    /// Who has each of them.
    owners: Vec<usize>,
    /// Which is the local one's.
    local: Option<usize>,
}

impl<'s> HalfSources<'s> {
    fn of(half: Half, sources: &Sources<'s>) -> Self {
        let mut of_half = Self { half, texts: Vec::new(), owners: Vec::new(), local: None };
        for (index, text) in in_order_of_names(sources, Kind::of(half)) {
            let place = of_half.texts.iter().position(|have| *have == text).unwrap_or_else(|| {
                of_half.texts.push(text);
                of_half.owners.push(index);
                of_half.texts.len().saturating_sub(1)
            });
            if sources.local == Some(index) {
                of_half.local = Some(place);
            }
        }
        of_half
    }

    fn merge(&self, sources: &Sources<'_>) -> Result<Merged<'s>, ShapeError> {
        merge::merge(&merge::Sources {
            half: self.half,
            documents: &self.texts,
            local: self.local,
            is_local_matter: &|group, version| sources.exclusions.contain(group.as_bytes(), version.as_bytes()),
            // Both halves say so: they are read one after the other, and all may be known again in between.
            is_incomplete: sources.is_incomplete,
        })
    }

    /// The merge as it is served, and its tag: an apiserver's own if one says all. Empty if nobody has said anything.
    fn aggregated(&self, merged: &Merged<'_>, sources: &Sources<'_>) -> (String, String) {
        if self.texts.is_empty() {
            return Default::default();
        }
        let Some(place) = merged.equals else {
            let text = merged.to_text();
            let etag = etag_of(&text);
            return (text, etag);
        };
        let text = self.texts.get(place).copied().unwrap_or_default();
        let owner = self.owners.get(place).and_then(|owner| sources.apiservers.get(*owner));
        let etag = owner.and_then(|owner| Kind::of(self.half).of_all(&owner.etags).copied().flatten());
        (text.to_owned(), etag.map_or_else(|| etag_of(text), str::to_owned))
    }

    /// The documents of the apiservers that may answer here, each read alone.
    fn read_alone(&self) -> Result<Vec<Merged<'s>>, ShapeError> {
        let here = self.texts.iter().enumerate().filter(|(place, _)| self.local.is_none_or(|local| local == *place));
        here.map(|(_, text)| {
            merge::merge(&merge::Sources {
                half: self.half,
                documents: &[text],
                local: None,
                is_local_matter: &|_, _| false,
                is_incomplete: false,
            })
        })
        .collect()
    }
}

/// Quoted upper-hex SHA-512 of the body: apiservers write their tags so, of other bytes.
fn etag_of(text: &str) -> String {
    use std::fmt::Write as _;
    let mut etag = "\"".to_owned();
    for byte in Sha512::digest(text) {
        // Writing to a string does not fail.
        let _written = write!(etag, "{byte:02X}");
    }
    etag + "\""
}

/// Legacy documents that are served in the place of an apiserver's own.
#[derive(Default)]
struct Replaced {
    groups: Vec<(String, String)>,
    group_versions: Vec<(String, String)>,
}

impl Replaced {
    /// Adds what differs between the merge and any apiserver that may answer; whether a group has other versions.
    fn compare(&mut self, merged: &Merged<'_>, sources: &HalfSources<'_>) -> Result<bool, ShapeError> {
        let own = sources.read_alone()?;
        let own: Vec<HashMap<&str, &Group<'_>>> =
            own.iter().map(|own| own.groups.iter().map(|group| (&*group.name, group)).collect()).collect();
        let mut has_other_versions = false;
        for group in &merged.groups {
            let theirs: Vec<Option<&Group<'_>>> = own.iter().map(|own| own.get(&*group.name).copied()).collect();
            let has_same_versions = |theirs: &Option<&Group<'_>>| {
                theirs.is_some_and(|theirs| {
                    theirs.versions.len() == group.versions.len()
                        && theirs.versions.iter().zip(&group.versions).all(|(theirs, ours)| theirs.name == ours.name)
                })
            };
            if !theirs.iter().all(has_same_versions) {
                has_other_versions = true;
                self.groups.push((group.name.clone().into_owned(), legacy::group(group)));
            }
            for version in &group.versions {
                let is_the_same = |theirs: &Option<&Group<'_>>| {
                    let mut versions = theirs.iter().flat_map(|theirs| &theirs.versions);
                    versions.any(|theirs| theirs.name == version.name && theirs.resources == version.resources)
                };
                if theirs.iter().all(is_the_same) {
                    continue;
                }
                let text = match &version.resources {
                    Some(resources) => legacy::resource_list(&group.name, &version.name, resources)?,
                    None => String::new(),
                };
                self.group_versions.push((legacy::group_version(&group.name, &version.name), text));
            }
        }
        Ok(has_other_versions)
    }
}

fn open_api_root(sources: &Sources<'_>) -> Option<MergedRoot> {
    let roots = in_order_of_names(sources, Kind::OpenApi).into_iter();
    let roots: Vec<_> = roots.filter_map(|(index, text)| Some((index, Root::parse(text).ok()?))).collect();
    let mut types: HashMap<(&[u8], &[u8], usize), usize> = HashMap::new();
    for ([group, version, ..], listing) in sources.table.iter() {
        for apiserver in listing.servers.iter() {
            let count = types.entry((group, version, apiserver)).or_default();
            *count = count.saturating_add(1);
        }
    }
    let local = sources.local.filter(|local| roots.iter().any(|(index, _)| index == local));
    let rank = |key: &str, apiserver: usize| {
        let Some((group, version)) = open_api::group_version(key) else { return Some(0) };
        let (group, version) = (group.as_bytes(), version.as_bytes());
        match local {
            Some(local) if local != apiserver && sources.exclusions.contain(group, version) => None,
            _ => Some(types.get(&(group, version, apiserver)).copied().unwrap_or_default()),
        }
    };
    if roots.is_empty() { None } else { Some(open_api::merge(roots, local, rank)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use serde_json::Value;

    use crate::discovery::document::Document;
    use crate::discovery::merge::INCOMPLETE_GROUP;
    use crate::peers::table::Context;
    use crate::testing::{excluding, recorded};

    const OLD: [&str; 3] =
        [recorded!("1.34.4", "api.v2"), recorded!("1.34.4", "apis.v2"), recorded!("1.34.4", "openapi-v3-root")];
    const NEW: [&str; 3] =
        [recorded!("1.37.2", "api.v2"), recorded!("1.37.2", "apis.v2"), recorded!("1.37.2", "openapi-v3-root")];

    const V2: &[u8] = b"application/json;g=apidiscovery.k8s.io;v=v2";

    fn known<'s>(name: &'s str, documents: [&'s str; 3]) -> Known<'s> {
        Known { name, documents: documents.map(Some), etags: [Some("\"core\""), Some("\"groups\"")] }
    }

    fn made(apiservers: Vec<Known<'_>>, local: Option<usize>, is_incomplete: bool) -> Vec<u8> {
        let exclusions = excluding(&[]);
        let mut table = Table::default();
        for (index, known) in apiservers.iter().enumerate() {
            for half in Half::ALL {
                let text = Kind::of(half).of_all(&known.documents).copied().flatten().unwrap();
                let document = Document::parse(half, V2, text).unwrap();
                let context = Context { exclusions: &exclusions, now: Duration::ZERO };
                table = table.with_document(index, half, &document, context);
            }
        }
        let stamp = Stamp::default();
        make(&Sources { apiservers, local, exclusions: &exclusions, table: &table, is_incomplete, stamp }).unwrap()
    }

    fn json(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn a_stamp_covers_what_is_no_newer() {
        let stamp = |poll_set, versions: [u64; 3]| Stamp {
            poll_set,
            content: 0,
            versions: vec![versions.map(|version| (version > 0).then_some(Duration::from_secs(version)))],
        };
        let ours = stamp(1, [5, 5, 0]);
        for (other, expected, why) in [
            (stamp(1, [5, 5, 0]), true, "the same"),
            (stamp(1, [4, 0, 0]), true, "older"),
            (stamp(1, [4, 6, 0]), false, "one is newer, another one older"),
            (stamp(1, [5, 5, 1]), false, "one more"),
            (stamp(2, [5, 5, 0]), false, "another configuration"),
            (Stamp { versions: Vec::new(), ..stamp(1, [0; 3]) }, false, "other apiservers"),
        ] {
            assert_eq!(ours.covers(&other), expected, "{why}");
        }
    }

    #[test]
    fn an_old_apiserver_shows_what_the_newest_says() {
        let bytes = made(vec![known("cp-1", OLD), known("cp-2", NEW)], Some(0), false);
        let discovery = ClusterDiscovery::from_bytes(&bytes).unwrap();
        let newest = Aggregated { text: NEW[1], etag: "\"groups\"" };
        assert_eq!(discovery.aggregated(Half::Groups), newest, "its own bytes and its own tag");
        assert_eq!(discovery.aggregated(Half::Core), Aggregated { text: NEW[0], etag: "\"core\"" });
        assert_eq!(discovery.legacy(Half::Groups), Some(recorded!("1.37.2", "apis.legacy")));
        assert_eq!(discovery.legacy(Half::Core), None, "the apiserver's own is right");
        let (whole, changed, same) = ("storagemigration.k8s.io", "certificates.k8s.io", "apps");
        assert_eq!(discovery.group(whole), Some(recorded!("1.37.2", "apis-storagemigration.k8s.io.legacy")));
        assert_eq!((discovery.group(changed), discovery.group(same)), (None, None), "the same versions");
        let names = |group: &str| {
            let list = json(discovery.group_version(group, "v1")?);
            let names = list["resources"].as_array().unwrap().iter().map(|resource| resource["name"].to_string());
            Some(names.collect::<Vec<_>>().join(" "))
        };
        assert!(names(whole).unwrap().contains("\"storageversionmigrations/status\""));
        assert!(names(changed).unwrap().contains("\"clustertrustbundles\""), "in a version that both have");
        assert!(names("storage.k8s.io").unwrap().contains("\"csinodes/status\""), "a subresource alone");
        assert_eq!((names(same), names("")), (None, None), "the apiserver's own is right");
    }

    #[test]
    fn the_newest_apiserver_is_left_as_it_is() {
        let bytes = made(vec![known("cp-1", OLD), known("cp-2", NEW)], Some(1), false);
        let discovery = ClusterDiscovery::from_bytes(&bytes).unwrap();
        assert_eq!(discovery.aggregated(Half::Groups).text, NEW[1]);
        assert_eq!((discovery.groups.len(), discovery.group_versions.len()), (0, 0));
        assert_eq!(discovery.elsewhere, [], "it has all schemas");
        assert_eq!(json(discovery.open_api().unwrap()), json(NEW[2]));
    }

    #[test]
    fn all_nodes_say_the_same_whatever_the_order_of_the_configuration() {
        let all = recorded!("1.37.2-api-all", "apis.v2");
        let most = [NEW[0], all, NEW[2]];
        let of_node = |apiservers, local| {
            let bytes = made(apiservers, Some(local), false);
            let discovery = ClusterDiscovery::from_bytes(&bytes).unwrap();
            Half::ALL
                .map(|half| discovery.aggregated(half))
                .map(|document| (document.text.to_owned(), document.etag.to_owned()))
        };
        let first = of_node(vec![known("cp-1", OLD), known("cp-2", most)], 0);
        assert_eq!(of_node(vec![known("cp-1", OLD), known("cp-2", most)], 1), first);
        assert_eq!(of_node(vec![known("cp-2", most), known("cp-1", OLD)], 0), first);
    }

    #[test]
    fn a_merge_that_nobody_says_has_a_tag_of_its_own() {
        let cut = OLD[1].replace(
            "\"group\":\"\",\"version\":\"\",\"kind\":\"Deployment\"",
            "\"group\":\"\",\"version\":\"\",\"kind\":\"Other\"",
        );
        let bytes = made(vec![known("cp-1", [OLD[0], &cut, OLD[2]]), known("cp-2", NEW)], Some(0), false);
        let discovery = ClusterDiscovery::from_bytes(&bytes).unwrap();
        let Aggregated { text, etag } = discovery.aggregated(Half::Groups);
        assert!(text.contains("storagemigration.k8s.io") && text.contains("\"Other\""));
        assert_eq!(etag, etag_of(text));
        // SHA-512 of nothing, from FIPS 180-4's examples.
        assert!(etag_of("").starts_with("\"CF83E1357EEFB8BDF1542850D66D8007"));
        assert_eq!(etag.len(), 130);
    }

    #[test]
    fn a_gateway_replaces_what_differs_between_any() {
        let bytes = made(vec![known("cp-1", OLD), known("cp-2", NEW)], None, false);
        let discovery = ClusterDiscovery::from_bytes(&bytes).unwrap();
        assert!(discovery.group("storagemigration.k8s.io").is_some());
        assert!(discovery.group_version("certificates.k8s.io", "v1").is_some());
        assert_eq!(discovery.group_version("apps", "v1"), None);
        let owners: Vec<_> = discovery.schema_owners("apis/certificates.k8s.io/v1").collect();
        assert_eq!(owners, [1], "who lists most");
    }

    #[test]
    fn schemas_come_from_who_lists_most() {
        let bytes = made(vec![known("cp-1", OLD), known("cp-2", NEW), known("cp-3", NEW)], Some(0), false);
        let discovery = ClusterDiscovery::from_bytes(&bytes).unwrap();
        for (key, expected, why) in [
            ("apis/storagemigration.k8s.io/v1", &[1, 2][..], "a whole group"),
            ("apis/storage.k8s.io/v1", &[1, 2], "one more subresource"),
            ("apis/apps/v1", &[], "to be had here"),
            ("apis/nosuch/v1", &[], "nobody has it"),
        ] {
            assert_eq!(discovery.schema_owners(key).collect::<Vec<_>>(), expected, "{why}");
        }
        let (merged, new, old) = (json(discovery.open_api().unwrap()), json(NEW[2]), json(OLD[2]));
        let entry = |root: &Value, key: &str| root["paths"][key].clone();
        assert_eq!(entry(&merged, "apis/storage.k8s.io/v1"), entry(&new, "apis/storage.k8s.io/v1"));
        assert_eq!(entry(&merged, "apis/apps/v1"), entry(&old, "apis/apps/v1"));
    }

    #[test]
    fn what_is_incomplete_says_so_in_every_form() {
        let bytes = made(vec![known("cp-1", OLD)], Some(0), true);
        let discovery = ClusterDiscovery::from_bytes(&bytes).unwrap();
        for half in Half::ALL {
            assert!(discovery.aggregated(half).text.contains(INCOMPLETE_GROUP), "{half:?} may be read on its own");
        }
        assert_eq!(discovery.legacy(Half::Core), None, "there is no place for it");
        assert!(discovery.legacy(Half::Groups).unwrap().contains(INCOMPLETE_GROUP));
        assert!(discovery.group(INCOMPLETE_GROUP).is_some());
        assert_eq!(discovery.group_version(INCOMPLETE_GROUP, "v1"), Some(""), "nobody can tell");
    }

    #[test]
    fn where_nobody_has_told_anything_nothing_is_told() {
        let (exclusions, table) = (excluding(&[]), Table::default());
        let nobody = Known { name: "cp-1", documents: [None; 3], etags: [None; 2] };
        let sources = Sources {
            apiservers: vec![nobody],
            local: Some(0),
            exclusions: &exclusions,
            table: &table,
            is_incomplete: true,
            stamp: Stamp::default(),
        };
        let bytes = make(&sources).unwrap();
        let discovery = ClusterDiscovery::from_bytes(&bytes).unwrap();
        for half in Half::ALL {
            assert_eq!(discovery.aggregated(half).text, "", "no document without groups");
        }
        assert_eq!((discovery.legacy(Half::Groups), discovery.open_api()), (Some(""), None));
    }

    #[test]
    fn other_bytes_are_refused_and_kill_nothing() {
        let bytes = made(vec![known("cp-1", OLD), known("cp-2", NEW)], Some(0), false);
        assert_eq!(ClusterDiscovery::from_bytes(b""), Err(Unreadable));
        for cut in (0..bytes.len()).step_by(97) {
            assert!(ClusterDiscovery::from_bytes(&bytes[..cut]).is_err(), "cut at {cut}");
        }
        for position in (0..bytes.len()).step_by(89) {
            let mut changed = bytes.clone();
            changed[position] ^= 0xff;
            let _read_or_refused = ClusterDiscovery::from_bytes(&changed);
        }
    }
}

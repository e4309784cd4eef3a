//! Legacy discovery, made from merged documents: the form that kubectl before 1.26, Helm and most clients that are not
//! written in Go read, group by group.
//!
//! Not made from the apiservers' own legacy documents: an older apiserver that restarts deletes the APIService objects of
//! groups that it does not know, and then even the newer one's own root lacks them. What aggregated documents do not tell
//! is missing here: `storageVersionHash`, and the addresses in `APIVersions`.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::discovery::merge::Group;

/// The body of `/apis`: `APIGroupList`.
pub fn group_list(groups: &[Group<'_>]) -> Option<String> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct ApiGroupList<'g> {
        kind: &'static str,
        api_version: &'static str,
        groups: Vec<ApiGroup<'g>>,
    }
    text(&ApiGroupList { kind: "APIGroupList", api_version: "v1", groups: groups.iter().map(ApiGroup::of).collect() })
}

/// The body of `/apis/GROUP`: `APIGroup`.
pub fn group(group: &Group<'_>) -> Option<String> {
    let group = ApiGroup::of(group);
    text(&ApiGroup { kind: Some("APIGroup"), api_version: Some("v1"), ..group })
}

/// The body of `/api`: `APIVersions`.
pub fn versions(core: &[Group<'_>]) -> Option<String> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct ApiVersions<'g> {
        kind: &'static str,
        versions: Vec<&'g str>,
        #[serde(rename = "serverAddressByClientCIDRs")]
        addresses: [(); 0],
    }
    let versions = core.iter().flat_map(|group| &group.versions).map(|version| &*version.name);
    text(&ApiVersions { kind: "APIVersions", versions: versions.collect(), addresses: [] })
}

/// The body of `/apis/GROUP/VERSION`, or of `/api/VERSION` if the group has no name: `APIResourceList`. `resources` is the
/// list in an aggregated document; `None` if it cannot be read.
pub fn resource_list(group: &str, version: &str, resources: &str) -> Option<String> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct ApiResourceList<'g> {
        kind: &'static str,
        /// The core group's list has none.
        #[serde(skip_serializing_if = "Option::is_none")]
        api_version: Option<&'static str>,
        group_version: String,
        resources: Vec<ApiResource<'g>>,
    }
    let listed: Vec<Resource<'_>> = serde_json::from_str(resources).ok()?;
    text(&ApiResourceList {
        kind: "APIResourceList",
        api_version: (!group.is_empty()).then_some("v1"),
        group_version: group_version(group, version),
        resources: listed.iter().flat_map(ApiResource::with_subresources).collect(),
    })
}

/// As it stands in objects: `apps/v1`, or `v1` of the core group.
pub fn group_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") }
}

/// As apiservers write it, with a line end.
fn text(value: &impl Serialize) -> Option<String> {
    serde_json::to_string(value).ok().map(|text| text + "\n")
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ApiGroup<'g> {
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    api_version: Option<&'static str>,
    name: &'g str,
    versions: Vec<VersionForDiscovery<'g>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    preferred_version: Option<VersionForDiscovery<'g>>,
}

#[derive(Serialize, Clone)]
#[serde(rename_all = "camelCase")]
struct VersionForDiscovery<'g> {
    group_version: String,
    version: &'g str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct ApiResource<'r> {
    name: Cow<'r, str>,
    singular_name: &'r str,
    namespaced: bool,
    #[serde(skip_serializing_if = "str::is_empty")]
    group: &'r str,
    #[serde(skip_serializing_if = "str::is_empty")]
    version: &'r str,
    kind: &'r str,
    verbs: &'r [Text<'r>],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    short_names: &'r [Text<'r>],
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    categories: &'r [Text<'r>],
}

impl<'g> ApiGroup<'g> {
    fn of(group: &'g Group<'_>) -> Self {
        let versions: Vec<_> = group
            .versions
            .iter()
            .map(|version| VersionForDiscovery {
                group_version: group_version(&group.name, &version.name),
                version: &version.name,
            })
            .collect();
        let preferred_version = versions.first().cloned();
        Self { kind: None, api_version: None, name: &group.name, versions, preferred_version }
    }
}

impl<'r> ApiResource<'r> {
    fn with_subresources(resource: &'r Resource<'_>) -> impl Iterator<Item = Self> {
        let namespaced = resource.scope.as_ref().is_some_and(|Text(scope)| scope == "Namespaced");
        let own = Self {
            singular_name: text_of(resource.singular_resource.as_ref()),
            short_names: list_of(resource.short_names.as_ref()),
            categories: list_of(resource.categories.as_ref()),
            ..Self::new(
                text_of(resource.resource.as_ref()).into(),
                namespaced,
                &resource.response_kind,
                &resource.verbs,
            )
        };
        let below = resource.subresources.iter().flatten().map(move |subresource| {
            let names = [text_of(resource.resource.as_ref()), text_of(subresource.subresource.as_ref())];
            Self::new(names.join("/").into(), namespaced, &subresource.response_kind, &subresource.verbs)
        });
        std::iter::once(own).chain(below)
    }

    fn new(
        name: Cow<'r, str>,
        namespaced: bool,
        kind: &'r Option<ResponseKind<'_>>,
        verbs: &'r Option<Vec<Text<'_>>>,
    ) -> Self {
        let part =
            |part: for<'k> fn(&'k ResponseKind<'_>) -> Option<&'k Text<'k>>| text_of(kind.as_ref().and_then(part));
        Self {
            name,
            singular_name: "",
            namespaced,
            group: part(|kind| kind.group.as_ref()),
            version: part(|kind| kind.version.as_ref()),
            kind: part(|kind| kind.kind.as_ref()),
            verbs: list_of(verbs.as_ref()),
            short_names: &[],
            categories: &[],
        }
    }
}

fn text_of<'t>(text: Option<&'t Text<'_>>) -> &'t str {
    text.map_or("", |Text(text)| text)
}

fn list_of<'l, 't>(list: Option<&'l Vec<Text<'t>>>) -> &'l [Text<'t>] {
    list.map_or(&[], Vec::as_slice)
}

/// Borrows from the document unless something in it is escaped.
#[derive(Serialize, Deserialize)]
struct Text<'d>(#[serde(borrow)] Cow<'d, str>);

/// A resource in an aggregated document; every member may be absent or null.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Resource<'d> {
    #[serde(borrow)]
    resource: Option<Text<'d>>,
    #[serde(borrow)]
    response_kind: Option<ResponseKind<'d>>,
    #[serde(borrow)]
    scope: Option<Text<'d>>,
    #[serde(borrow)]
    singular_resource: Option<Text<'d>>,
    #[serde(borrow)]
    verbs: Option<Vec<Text<'d>>>,
    #[serde(borrow)]
    short_names: Option<Vec<Text<'d>>>,
    #[serde(borrow)]
    categories: Option<Vec<Text<'d>>>,
    #[serde(borrow)]
    subresources: Option<Vec<Subresource<'d>>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Subresource<'d> {
    #[serde(borrow)]
    subresource: Option<Text<'d>>,
    #[serde(borrow)]
    response_kind: Option<ResponseKind<'d>>,
    #[serde(borrow)]
    verbs: Option<Vec<Text<'d>>>,
}

#[derive(Deserialize)]
struct ResponseKind<'d> {
    #[serde(borrow)]
    group: Option<Text<'d>>,
    #[serde(borrow)]
    version: Option<Text<'d>>,
    #[serde(borrow)]
    kind: Option<Text<'d>>,
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use serde_json::Value;

    use crate::discovery::document::Half;
    use crate::discovery::merge::{Merged, Sources, merge};

    macro_rules! recorded {
        ($version:literal, $file:literal) => {
            include_str!(concat!("../../tests/fixtures/discovery/", $version, "/", $file, ".json"))
        };
    }

    fn read(half: Half, document: &str) -> Merged<'_> {
        let is_local_matter = &|_: &str, _: &str| false;
        merge(&Sources { half, documents: &[document], local: None, is_local_matter, is_incomplete: false }).unwrap()
    }

    /// Without what aggregated documents do not tell.
    fn without_hashes(recorded: &str) -> String {
        let mut rest = recorded;
        let mut kept = String::new();
        while let Some((before, behind)) = rest.split_once(",\"storageVersionHash\":\"") {
            kept += before;
            rest = behind.split_once('"').unwrap().1;
        }
        kept + rest
    }

    #[test]
    fn what_is_made_from_one_document_is_what_that_apiserver_says() {
        for (apis, list) in [
            (recorded!("1.34.4", "apis.v2"), recorded!("1.34.4", "apis.legacy")),
            (recorded!("1.36.3", "apis.v2"), recorded!("1.36.3", "apis.legacy")),
            (recorded!("1.37.2", "apis.v2"), recorded!("1.37.2", "apis.legacy")),
            (recorded!("1.37.2-api-all", "apis.v2"), recorded!("1.37.2-api-all", "apis.legacy")),
        ] {
            assert_eq!(group_list(&read(Half::Groups, apis).groups).unwrap(), list);
        }
        let (apis, core) = (recorded!("1.37.2", "apis.v2"), recorded!("1.37.2", "api.v2"));
        let (apis, core) = (read(Half::Groups, apis), read(Half::Core, core));
        let group_of = |name: &str| apis.groups.iter().find(|group| group.name == name).unwrap();
        assert_eq!(group(group_of("apps")).unwrap(), recorded!("1.37.2", "apis-apps.legacy"));
        let list = |group: &Group<'_>| {
            let version = &group.versions[0];
            resource_list(&group.name, &version.name, version.resources.as_ref().unwrap()).unwrap()
        };
        for (made, recorded) in [
            (list(group_of("apps")), recorded!("1.37.2", "apis-apps-v1.legacy")),
            (list(group_of("batch")), recorded!("1.37.2", "apis-batch-v1.legacy")),
            (list(&core.groups[0]), recorded!("1.37.2", "api-v1.legacy")),
        ] {
            assert_eq!(made, without_hashes(recorded));
        }
        let made: Value = serde_json::from_str(&versions(&core.groups).unwrap()).unwrap();
        let recorded: Value = serde_json::from_str(recorded!("1.37.2", "api.legacy")).unwrap();
        assert_eq!((&made["kind"], &made["versions"]), (&recorded["kind"], &recorded["versions"]));
    }

    #[test]
    fn what_is_missing_is_left_empty() {
        let made = resource_list("g", "v1", r#"[{"resource":"as","subresources":[{"subresource":null}]},{}]"#).unwrap();
        let names: Value = serde_json::from_str(&made).unwrap();
        assert_eq!(names["resources"][0]["name"], "as");
        assert_eq!(names["resources"][0]["verbs"], Value::Array(Vec::new()), "clients read the list without looking");
        assert_eq!(resource_list("g", "v1", "[1]"), None, "not resources");
    }
}

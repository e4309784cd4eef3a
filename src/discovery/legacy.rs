//! Legacy discovery, made from merged documents: the form that kubectl before 1.26, Helm and most clients that are not
//! written in Go read, group by group.
//!
//! Not made from the apiservers' own legacy documents: an older apiserver that restarts deletes the APIService objects of
//! groups that it does not know, and then even the newer one's own root lacks them. What aggregated documents do not tell
//! is missing here: `storageVersionHash`, and the addresses in `APIVersions`.

use crate::discovery::json::{Members, ShapeError, Text, quoted};
use crate::discovery::merge::Group;

/// The body of `/apis`: `APIGroupList`.
pub fn group_list(groups: &[Group<'_>]) -> String {
    let groups: Vec<_> = groups.iter().map(|group| object(&group_members(group))).collect();
    document("APIGroupList", "v1", &[("groups", array(&groups))])
}

/// The body of `/apis/GROUP`: `APIGroup`.
pub fn group(group: &Group<'_>) -> String {
    document("APIGroup", "v1", &group_members(group))
}

/// The body of `/api`: `APIVersions`.
pub fn versions(core: &[Group<'_>]) -> String {
    let versions: Vec<_> = core.iter().flat_map(|group| &group.versions).map(|version| quoted(&version.name)).collect();
    document("APIVersions", "", &[("versions", array(&versions)), ("serverAddressByClientCIDRs", array(&[]))])
}

/// The body of `/apis/GROUP/VERSION`, or of `/api/VERSION` if the group has no name: `APIResourceList`. `resources` is the
/// list in an aggregated document.
///
/// # Errors
/// [`ShapeError`]: it is none.
pub fn resource_list(group: &str, version: &str, resources: &str) -> Result<String, ShapeError> {
    let mut listed = Vec::new();
    for resource in Members::parse_list(resources)? {
        let namespaced = (resource.get("scope") == Some("\"Namespaced\"")).to_string();
        let (name, singular) = (resource.get("resource").unwrap_or(EMPTY), resource.get("singularResource"));
        listed.push(api_resource(name, singular, &namespaced, &resource)?);
        let Some(subresources) = resource.get("subresources") else { continue };
        let Text(name) = Text::parse(name)?;
        for subresource in Members::parse_list(subresources)? {
            let Text(below) = Text::parse(subresource.get("subresource").unwrap_or(EMPTY))?;
            listed.push(api_resource(&quoted(&format!("{name}/{below}")), None, &namespaced, &subresource)?);
        }
    }
    // The core group's list has no apiVersion.
    let api_version = if group.is_empty() { "" } else { "v1" };
    let group_version = quoted(&group_version(group, version));
    Ok(document("APIResourceList", api_version, &[("groupVersion", group_version), ("resources", array(&listed))]))
}

/// As it stands in objects: `apps/v1`, or `v1` of the core group.
pub fn group_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") }
}

/// JSON text of an empty string.
const EMPTY: &str = "\"\"";

type Written = Vec<(&'static str, String)>;

/// Members of an `APIGroup`.
fn group_members(group: &Group<'_>) -> Written {
    let version =
        |name: &str| object(&[("groupVersion", quoted(&group_version(&group.name, name))), ("version", quoted(name))]);
    let versions: Vec<_> = group.versions.iter().map(|listed| version(&listed.name)).collect();
    let preferred = versions.first().cloned();
    let mut members = vec![("name", quoted(&group.name)), ("versions", array(&versions))];
    members.extend(preferred.map(|preferred| ("preferredVersion", preferred)));
    members
}

/// An `APIResource` of a resource or subresource; all but the verbs is left out where it is empty.
fn api_resource(
    name: &str,
    singular: Option<&str>,
    namespaced: &str,
    listed: &Members<'_>,
) -> Result<String, ShapeError> {
    let kind = listed.get("responseKind").map(Members::parse).transpose()?.unwrap_or_default();
    let given = |text: Option<&str>| text.filter(|text| *text != EMPTY && *text != "[]").map(str::to_owned);
    let mut members = vec![
        ("name", name.to_owned()),
        ("singularName", singular.unwrap_or(EMPTY).to_owned()),
        ("namespaced", namespaced.to_owned()),
    ];
    members.extend(given(kind.get("group")).map(|group| ("group", group)));
    members.extend(given(kind.get("version")).map(|version| ("version", version)));
    members.push(("kind", kind.get("kind").unwrap_or(EMPTY).to_owned()));
    members.push(("verbs", listed.get("verbs").unwrap_or("[]").to_owned()));
    for member in ["shortNames", "categories"] {
        members.extend(given(listed.get(member)).map(|list| (member, list)));
    }
    Ok(object(&members))
}

/// A whole body as apiservers write it, with a line end.
fn document(kind: &str, api_version: &str, members: &[(&'static str, String)]) -> String {
    let mut all = vec![("kind", quoted(kind))];
    if !api_version.is_empty() {
        all.push(("apiVersion", quoted(api_version)));
    }
    all.extend_from_slice(members);
    object(&all) + "\n"
}

fn object(members: &[(&'static str, String)]) -> String {
    let members: Vec<_> = members.iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
    format!("{{{}}}", members.join(","))
}

fn array(elements: &[String]) -> String {
    format!("[{}]", elements.join(","))
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use serde_json::Value;

    use crate::discovery::document::Half;
    use crate::discovery::merge::{Merged, Sources, merge};
    use crate::testing::recorded;

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
            assert_eq!(group_list(&read(Half::Groups, apis).groups), list);
        }
        let (apis, core) = (recorded!("1.37.2", "apis.v2"), recorded!("1.37.2", "api.v2"));
        let (apis, core) = (read(Half::Groups, apis), read(Half::Core, core));
        let group_of = |name: &str| apis.groups.iter().find(|group| group.name == name).unwrap();
        assert_eq!(group(group_of("apps")), recorded!("1.37.2", "apis-apps.legacy"));
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
        let made: Value = serde_json::from_str(&versions(&core.groups)).unwrap();
        let recorded: Value = serde_json::from_str(recorded!("1.37.2", "api.legacy")).unwrap();
        assert_eq!((&made["kind"], &made["versions"]), (&recorded["kind"], &recorded["versions"]));
    }

    #[test]
    fn what_is_missing_is_left_empty() {
        let made = resource_list("g", "v1", r#"[{"resource":"as","subresources":[{"subresource":null}]},{}]"#).unwrap();
        let names: Value = serde_json::from_str(&made).unwrap();
        assert_eq!(names["resources"][0]["name"], "as");
        assert_eq!(names["resources"][0]["verbs"], Value::Array(Vec::new()), "clients read the list without looking");
        assert!(resource_list("g", "v1", "[1]").is_err(), "not resources");
    }
}

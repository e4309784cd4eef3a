//! The aggregated discovery documents of several apiservers as one.
//!
//! Follows Kubernetes' peer-aggregated discovery, and departs from it where it loses data or answers differently on
//! different nodes: see [`merge`]. Works on the documents' own text and parses only what differs, so that members that
//! nobody here knows survive, and what is equal everywhere stays as its apiserver wrote it.

use std::borrow::Cow;

use crate::discovery::document::Half;
use crate::discovery::json::{
    Members, Mention, Named, ShapeError, Text, all_alike, mentions_by_name, quoted, sorted_names, unique_names,
};
use crate::discovery::order::in_common_order;

/// Group that stands last in a merge that may lack something. Its one version is stale, on which clients know that they do
/// not see everything: the namespace controller waits, kubectl goes on with what there is.
pub const INCOMPLETE_GROUP: &str = "incomplete.mixed-version-proxy";

/// The version of [`INCOMPLETE_GROUP`].
pub const INCOMPLETE_VERSION: &str = "v1";

/// What is merged.
pub struct Sources<'s, 'd> {
    /// Which half the documents are.
    pub half: Half,
    /// Good documents of the apiservers, sorted by the apiservers' names so that all nodes come to the same result.
    pub documents: &'s [&'d str],
    /// Which of them is the local apiserver's; `None` in a gateway, or if there is none.
    pub local: Option<usize>,
    /// In a sidecar: whether a group-version lives in shared storage (CRDs, aggregated APIs), so that the local document
    /// alone tells about it.
    pub is_local_matter: &'s dyn Fn(&str, &str) -> bool,
    /// Something may be missing: [`INCOMPLETE_GROUP`] is added.
    pub is_incomplete: bool,
}

/// A merged document.
#[derive(Debug)]
pub struct Merged<'d> {
    /// Groups in their order.
    pub groups: Vec<Group<'d>>,
    /// The document that says the same already.
    pub equals: Option<usize>,
}

/// A group of a merged document.
#[derive(Debug)]
pub struct Group<'d> {
    /// Its name; empty for the core group.
    pub name: Cow<'d, str>,
    /// Its versions in their order.
    pub versions: Vec<Version<'d>>,
    /// Its text.
    text: Cow<'d, str>,
}

/// A version of a group.
#[derive(Debug)]
pub struct Version<'d> {
    /// Its name, such as `v1`.
    pub name: Cow<'d, str>,
    /// Text of its list of resources; `None` if nobody can tell: it is empty, and not everybody calls it `Current`.
    pub resources: Option<Cow<'d, str>>,
    text: Cow<'d, str>,
}

/// Merges documents.
///
/// As Kubernetes does: groups, versions and resources are united in a common order (`discovery::order`), groups over all
/// documents at once, versions and resources document after document; a resource that is the same everywhere stays as it
/// is; of one that is not, verbs and subresources are united and sorted, and all else is the first apiserver's.
///
/// Other than Kubernetes, so that the result is the same on every node: the order is that of whole documents, and what is
/// a local matter is taken out afterwards; freshness takes part in the merge (`Current` beats none beats `Stale`). And so
/// that nothing is lost: what one document lists twice is united first, verbs of a subresource are united, and members
/// that only a later apiserver has are kept. A group without versions is left out unless all list it so: clients refuse
/// such groups.
///
/// # Errors
/// [`ShapeError`]: a document is none.
pub fn merge<'d>(sources: &Sources<'_, 'd>) -> Result<Merged<'d>, ShapeError> {
    let mut lists = Vec::with_capacity(sources.documents.len());
    for text in sources.documents {
        lists.push(groups_of(text, sources.half)?);
    }
    let names: Vec<_> = lists.iter().map(|list| unique_names(list)).collect();
    let mentions_of = mentions_by_name(&lists);
    let mut groups = Vec::new();
    for mentions in in_common_order(&names).into_iter().filter_map(|name| mentions_of.get(name)) {
        let is_listed_by_all = (0..lists.len()).all(|list| mentions.iter().any(|mention| mention.list == list));
        let group = merge_group(mentions, sources)?;
        groups.extend(group.filter(|group| is_listed_by_all || !group.versions.is_empty()));
    }
    if sources.is_incomplete {
        groups.push(incomplete());
    }
    let is_equal = |list: &Vec<Named<'_>>| {
        groups.len() == list.len() && groups.iter().zip(list).all(|(group, named)| group.text == named.text)
    };
    let equals = lists.iter().position(is_equal);
    Ok(Merged { groups, equals })
}

impl Merged<'_> {
    /// The document, as an apiserver would write it.
    pub fn to_text(&self) -> String {
        let groups: Vec<_> = self.groups.iter().map(|group| &*group.text).collect();
        let (kind, version) = ("APIGroupDiscoveryList", "apidiscovery.k8s.io/v2");
        format!(
            "{{\"kind\":\"{kind}\",\"apiVersion\":\"{version}\",\"metadata\":{{}},\"items\":[{}]}}\n",
            groups.join(",")
        )
    }
}

/// The groups of a document that belong to its half.
fn groups_of(text: &str, half: Half) -> Result<Vec<Named<'_>>, ShapeError> {
    // The core group has no name.
    let mut groups = Members::parse(text)?.list("items", &["metadata", "name"], Some(""))?;
    groups.retain(|group| Half::of_group(group.name.as_bytes()) == half);
    Ok(groups)
}

/// The lists in a member of several objects.
fn lists_of<'d>(objects: &[Members<'d>], member: &str, name: &str) -> Result<Vec<Vec<Named<'d>>>, ShapeError> {
    let mut lists = Vec::with_capacity(objects.len());
    for object in objects {
        lists.push(object.list(member, &[name], None)?);
    }
    Ok(lists)
}

/// The mentions of each name; names in the order of one list united with the next, and so on. With three lists that is
/// another order than that of all at once, and it is Kubernetes'.
fn folded<'l, 'd>(lists: &'l [Vec<Named<'d>>]) -> Vec<Vec<Mention<'l, 'd>>> {
    let order = lists.iter().fold(Vec::new(), |order, list| in_common_order(&[order, unique_names(list)]));
    let mut mentions = mentions_by_name(lists);
    order.into_iter().filter_map(|name| mentions.remove(name)).collect()
}

fn texts_of<'d>(mentions: &[Mention<'_, 'd>]) -> Vec<&'d str> {
    mentions.iter().map(|mention| mention.named.text).collect()
}

/// `None` if nothing is left of it.
fn merge_group<'d>(mentions: &[Mention<'_, 'd>], sources: &Sources<'_, 'd>) -> Result<Option<Group<'d>>, ShapeError> {
    let Some(name) = mentions.first().map(|mention| mention.named.name.clone()) else { return Ok(None) };
    let texts = texts_of(mentions);
    let parsed = Members::parse_all(&texts)?;
    let lists = lists_of(&parsed, "versions", "version")?;
    let mut versions = Vec::new();
    for mut listed in folded(&lists) {
        if let Some(local) = sources.local
            && listed.first().is_some_and(|first| (sources.is_local_matter)(&name, &first.named.name))
        {
            let is_local = |place: usize| mentions.get(place).is_some_and(|mention| mention.list == local);
            listed.retain(|version| is_local(version.list));
        }
        versions.extend(merge_version(&listed)?);
    }
    if versions.is_empty() && lists.iter().any(|list| !list.is_empty()) {
        return Ok(None);
    }
    let list: Vec<_> = versions.iter().map(|version| &*version.text).collect();
    let made = unite(&parsed, &["metadata", "versions"], &[("versions", Some(format!("[{}]", list.join(","))))]);
    Ok(Some(Group { name, text: as_written(&texts, made), versions }))
}

/// `None` if nothing is left of it.
fn merge_version<'d>(mentions: &[Mention<'_, 'd>]) -> Result<Option<Version<'d>>, ShapeError> {
    let Some(name) = mentions.first().map(|mention| mention.named.name.clone()) else { return Ok(None) };
    let texts = texts_of(mentions);
    let parsed = Members::parse_all(&texts)?;
    if let Some((text, version)) = all_alike(&texts).zip(parsed.first()) {
        let list = version.get("resources").filter(|list| !is_empty_list(list));
        let resources = list.map(Cow::Borrowed).or_else(|| none_at_all(&parsed));
        return Ok(Some(Version { name, resources, text: Cow::Borrowed(text) }));
    }
    let lists = lists_of(&parsed, "resources", "resource")?;
    let mut list = Vec::new();
    for mentions in folded(&lists) {
        list.push(merge_resource(&mentions)?);
    }
    let resources = (!list.is_empty()).then(|| format!("[{}]", list.join(",")));
    let freshness = parsed.iter().map(|version| version.get("freshness")).max_by_key(|freshness| match freshness {
        Some("\"Current\"") => 2,
        Some("\"Stale\"") => 0,
        _ => 1,
    });
    let mut united = vec![("freshness", freshness.flatten().map(str::to_owned))];
    united.extend(resources.clone().map(|list| ("resources", Some(list))));
    let text = as_written(&texts, unite(&parsed, &["version", "resources", "freshness"], &united));
    let resources = resources.map(Cow::Owned).or_else(|| none_at_all(&parsed));
    Ok(Some(Version { name, resources, text }))
}

/// Kubernetes leaves out empty lists, but need not be the only one to write such documents.
fn is_empty_list(list: &str) -> bool {
    list.trim_matches(|character: char| matches!(character, '[' | ']') || character.is_ascii_whitespace()).is_empty()
}

/// The list of a version that has no resources, if all who have the version are sure of that.
fn none_at_all(versions: &[Members<'_>]) -> Option<Cow<'static, str>> {
    versions.iter().all(|version| version.get("freshness") == Some("\"Current\"")).then_some(Cow::Borrowed("[]"))
}

/// The text of a resource.
fn merge_resource<'d>(mentions: &[Mention<'_, 'd>]) -> Result<Cow<'d, str>, ShapeError> {
    const ORDER: [&str; 8] =
        ["resource", "responseKind", "scope", "singularResource", "verbs", "shortNames", "categories", "subresources"];
    let texts = texts_of(mentions);
    if let Some(first) = all_alike(&texts) {
        return Ok(Cow::Borrowed(first));
    }
    let parsed = Members::parse_all(&texts)?;
    let lists = lists_of(&parsed, "subresources", "subresource")?;
    let mentions_of = mentions_by_name(&lists);
    let mut subresources = Vec::new();
    for name in sorted_names(lists.iter().flatten().map(|named| &*named.name)) {
        subresources.push(merge_subresource(mentions_of.get(name).map(Vec::as_slice).unwrap_or_default())?);
    }
    let mut united = Vec::new();
    united.extend(united_verbs(&parsed).map(|verbs| ("verbs", Some(verbs))));
    if !subresources.is_empty() {
        united.push(("subresources", Some(format!("[{}]", subresources.join(",")))));
    }
    Ok(as_written(&texts, unite(&parsed, &ORDER, &united)))
}

/// The text of a subresource.
fn merge_subresource<'d>(mentions: &[Mention<'_, 'd>]) -> Result<Cow<'d, str>, ShapeError> {
    let texts = texts_of(mentions);
    if let Some(first) = all_alike(&texts) {
        return Ok(Cow::Borrowed(first));
    }
    let parsed = Members::parse_all(&texts)?;
    let united: Vec<_> = united_verbs(&parsed).map(|verbs| ("verbs", Some(verbs))).into_iter().collect();
    Ok(as_written(&texts, unite(&parsed, &["subresource", "responseKind", "acceptedTypes", "verbs"], &united)))
}

/// All verbs, sorted; `None` if nobody has a list of them.
fn united_verbs(things: &[Members<'_>]) -> Option<String> {
    let lists = things.iter().filter_map(|thing| serde_json::from_str::<Vec<Text<'_>>>(thing.get("verbs")?).ok());
    let lists: Vec<_> = lists.collect();
    let verbs = sorted_names(lists.iter().flatten().map(|Text(verb)| &**verb));
    let verbs: Vec<_> = verbs.into_iter().map(quoted).collect();
    if verbs.is_empty() { None } else { Some(format!("[{}]", verbs.join(","))) }
}

/// What was made, borrowed from one of those it was made from if that is the same.
fn as_written<'d>(texts: &[&'d str], made: String) -> Cow<'d, str> {
    let same = texts.iter().find(|text| **text == made);
    same.map_or(Cow::Owned(made), |text| Cow::Borrowed(text))
}

/// An object with the members of all: `united` as given (`None`: left out), the others as in the first that has more than
/// null there. `order` tells how Kubernetes orders the members that it knows; others follow.
fn unite(things: &[Members<'_>], order: &[&str], united: &[(&str, Option<String>)]) -> String {
    let mut names: Vec<&str> = order.to_vec();
    for member in things.iter().flat_map(|thing| &thing.0) {
        if !names.contains(&&*member.name) {
            names.push(&member.name);
        }
    }
    let mut members = Vec::new();
    for name in names {
        let value = match united.iter().find(|(have, _)| *have == name) {
            Some((_, value)) => value.as_deref(),
            None => things.iter().find_map(|thing| thing.get(name)).or_else(|| {
                let is_null = things.iter().any(|thing| thing.0.iter().any(|member| member.name == name));
                is_null.then_some("null")
            }),
        };
        members.extend(value.map(|value| format!("{}:{value}", quoted(name))));
    }
    format!("{{{}}}", members.join(","))
}

fn incomplete() -> Group<'static> {
    let version = format!("{{\"version\":\"{INCOMPLETE_VERSION}\",\"freshness\":\"Stale\"}}");
    let text = format!("{{\"metadata\":{{\"name\":\"{INCOMPLETE_GROUP}\"}},\"versions\":[{version}]}}");
    let version = Version { name: INCOMPLETE_VERSION.into(), resources: None, text: version.into() };
    Group { name: INCOMPLETE_GROUP.into(), versions: vec![version], text: text.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use serde_json::Value;

    /// Results of Kubernetes' own peer-aggregated discovery (see `tests/vectors/README.md`).
    const VECTORS: &str = include_str!("../../tests/vectors/merge.jsonl");

    /// Where ours is on purpose neither Kubernetes' result nor named in the vector: what must be in it, and why.
    const OTHERWISE: [(&str, &str, &str); 3] = [
        ("001", r#""x-future":{"a":[1,null]}"#, "a member that only a later apiserver has is kept"),
        ("068", r#""resource":"as""#, "what one document lists twice is united, not lost"),
        ("091", r#""kind":"ScaleA""#, "of a subresource all but verbs is the first apiserver's, as of a resource"),
    ];

    /// Without members that are null or empty: Kubernetes writes its own types anew, we keep what the server wrote.
    fn normal(value: &Value) -> Value {
        match value {
            Value::Array(values) => values.iter().map(normal).collect(),
            Value::Object(members) => {
                let is_empty = |value: &Value| match value {
                    Value::Null => true,
                    Value::String(text) => text.is_empty(),
                    Value::Array(values) => values.is_empty(),
                    Value::Object(members) => members.is_empty(),
                    _ => false,
                };
                let members = members.iter().map(|(name, value)| (name.clone(), normal(value)));
                members.filter(|(_, value)| !is_empty(value)).collect()
            }
            other => other.clone(),
        }
    }

    fn merged(documents: &[&str], local: Option<usize>, local_matters: &[&str]) -> (String, Option<usize>) {
        let sources = Sources {
            half: Half::Groups,
            documents,
            local,
            is_local_matter: &|group, _| local_matters.contains(&group),
            is_incomplete: false,
        };
        let merged = merge(&sources).unwrap();
        (merged.to_text(), merged.equals)
    }

    #[test]
    fn every_vector_is_merged_as_kubernetes_does_or_better() {
        let mut otherwise = OTHERWISE.to_vec();
        for line in VECTORS.lines() {
            let vector: Value = serde_json::from_str(line).unwrap();
            let mut servers: Vec<_> = vector["servers"].as_array().unwrap().iter().collect();
            servers.sort_by_key(|server| server["identity"].as_str().unwrap());
            let texts: Vec<_> = servers.iter().map(|server| server["apis"].to_string()).collect();
            let (text, _) = merged(&texts.iter().map(String::as_str).collect::<Vec<_>>(), None, &[]);
            let name = format!("{} {}", vector["id"], vector["name"]);
            if let Some(place) = otherwise.iter().position(|(id, ..)| vector["id"] == *id) {
                let (_, expected, why) = otherwise.remove(place);
                assert!(text.contains(expected), "{name}: {why}: {text}");
                continue;
            }
            let expected = if vector["design_merged"].is_null() { &vector["merged"] } else { &vector["design_merged"] };
            assert_eq!(normal(&serde_json::from_str(&text).unwrap()), normal(expected), "{name}");
        }
        assert!(otherwise.is_empty(), "not met: {otherwise:?}");
    }

    /// A document; groups as "name/version,version".
    fn document(groups: &[&str]) -> String {
        let version = |name: &str| {
            let resource = format!(r#"{{"resource":"{name}s","scope":"Namespaced","verbs":["get"]}}"#);
            format!(r#"{{"version":"{name}","resources":[{resource}],"freshness":"Current"}}"#)
        };
        let group = |group: &&str| {
            let (name, versions) = group.split_once('/').unwrap();
            let versions: Vec<_> = versions.split(',').filter(|name| !name.is_empty()).map(version).collect();
            format!(r#"{{"metadata":{{"name":"{name}"}},"versions":[{}]}}"#, versions.join(","))
        };
        let groups: Vec<_> = groups.iter().map(group).collect();
        let head = r#""kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","metadata":{}"#;
        format!("{{{head},\"items\":[{}]}}\n", groups.join(","))
    }

    #[test]
    fn local_matters_come_from_the_local_document_and_keep_their_place() {
        let (crd, other) = ("hangar.example.com", "toys.example.com");
        for (documents, local, expected, why) in [
            (
                &[
                    &["apps/v1", "hangar.example.com/v1"][..],
                    &["apps/v1", "storagemigration.k8s.io/v1", "hangar.example.com/v1"],
                ][..],
                Some(0),
                &["apps/v1", "storagemigration.k8s.io/v1", "hangar.example.com/v1"][..],
                "the same place on every node",
            ),
            (&[&["apps/v1"], &["apps/v1", "toys.example.com/v1"]], Some(0), &["apps/v1"], "not in the local document"),
            (
                &[&["apps/v1"], &["apps/v1", "toys.example.com/v1"]],
                None,
                &["apps/v1", "toys.example.com/v1"],
                "a gateway has no local document",
            ),
            (
                &[&["hangar.example.com/v1"], &["hangar.example.com/v1,v2"]],
                Some(0),
                &["hangar.example.com/v1"],
                "one version of it",
            ),
            (
                &[&["hangar.example.com/v1"], &["hangar.example.com/v1,v2"]],
                Some(1),
                &["hangar.example.com/v1,v2"],
                "seen from the other",
            ),
            (&[&["apps/v1"], &["apps/v1", "batch/"]], Some(0), &["apps/v1"], "a group without versions is none"),
            (
                &[&["apps/v1", "batch/"], &["apps/v1", "batch/v1"]],
                Some(0),
                &["apps/v1", "batch/v1"],
                "unless another has some",
            ),
        ] {
            let texts: Vec<_> = documents.iter().map(|groups| document(groups)).collect();
            let texts: Vec<_> = texts.iter().map(String::as_str).collect();
            assert_eq!(merged(&texts, local, &[crd, other]).0, document(expected), "{why}");
        }
    }

    #[test]
    fn a_document_that_says_all_is_the_merge() {
        for (documents, expected, why) in [
            (&[&["b/v1", "a/v1"][..]][..], Some(0), "the only one"),
            (&[&["a/v1"], &["a/v1", "b/v1"]], Some(1), "the newest"),
            (&[&["a/v1", "b/v1"], &["a/v1", "b/v1"]], Some(0), "two say all"),
            (&[&["a/v1"], &["b/v1"]], None, "nobody"),
            (&[&["b/v1", "a/v1"], &["a/v1", "b/v1"]], Some(0), "another order is another document"),
        ] {
            let texts: Vec<_> = documents.iter().map(|groups| document(groups)).collect();
            let (text, equals) = merged(&texts.iter().map(String::as_str).collect::<Vec<_>>(), None, &[]);
            assert_eq!(equals, expected, "{why}");
            assert_eq!(equals.map(|index| &texts[index]), equals.map(|_| &text), "{why}");
        }
    }

    #[test]
    fn what_may_lack_something_says_so() {
        let apps = document(&["apps/v1"]);
        let documents = [&*apps];
        let is_local_matter = &|_: &str, _: &str| false;
        let sources =
            Sources { half: Half::Groups, documents: &documents, local: None, is_local_matter, is_incomplete: true };
        let merged = merge(&sources).unwrap();
        assert_eq!(merged.equals, None);
        let value: Value = serde_json::from_str(&merged.to_text()).unwrap();
        assert_eq!(value["items"][1]["metadata"]["name"], INCOMPLETE_GROUP);
        assert_eq!(value["items"][1]["versions"][0]["freshness"], "Stale");
    }

    #[test]
    fn other_shapes_are_errors_and_kill_nothing() {
        for text in [
            "",
            "[]",
            "{\"items\":1}",
            "{\"items\":[1]}",
            "{\"items\":[{\"metadata\":1}]}",
            "{\"items\":[{\"metadata\":{\"name\":\"a\"},\"versions\":[{\"version\":1}]}]}",
        ] {
            let documents = [text, "{}"];
            let sources = Sources {
                half: Half::Groups,
                documents: &documents,
                local: None,
                is_local_matter: &|_, _| false,
                is_incomplete: false,
            };
            assert!(merge(&sources).is_err(), "{text}");
        }
    }

    #[test]
    fn a_version_without_resources_has_none_only_if_everybody_is_sure() {
        const STALE: &str = r#""freshness":"Stale""#;
        const CURRENT: &str = r#""freshness":"Current""#;
        for (lists, expected, why) in [
            (&[r#""resources":[],"freshness":"Current""#][..], Some("[]"), "it says so"),
            (&[CURRENT], Some("[]"), "as Kubernetes writes it"),
            (&[CURRENT, r#""resources":[ ],"freshness":"Current""#], Some("[]"), "both say so"),
            (&[STALE], None, "it cannot tell"),
            (&[r#""resources":[],"freshness":"Stale""#], None, "an empty list tells no more"),
            (&[r#""resources":[ ] ,"freshness":"Stale""#], None, "however it is written"),
            (&[r#""resources":null,"freshness":"Stale""#], None, "nor does null"),
            (&[r#""resources":[]"#], None, "who does not say that it is sure is not"),
            (&[CURRENT, STALE], None, "the other one may know of some"),
            (&[STALE, r#""resources":[],"freshness":"Stale""#], None, "neither can tell"),
            (
                &[STALE, r#""resources":[{"resource":"cats"}],"freshness":"Stale""#],
                Some(r#"[{"resource":"cats"}]"#),
                "one",
            ),
        ] {
            let version = |members: &&str| {
                let versions = format!(r#"[{{"version":"v1",{members}}}]"#);
                format!(r#"{{"items":[{{"metadata":{{"name":"pets.k8s.io"}},"versions":{versions}}}]}}"#)
            };
            let documents: Vec<_> = lists.iter().map(version).collect();
            let documents: Vec<_> = documents.iter().map(String::as_str).collect();
            let merged = merge(&Sources {
                half: Half::Groups,
                documents: &documents,
                local: None,
                is_local_matter: &|_, _| false,
                is_incomplete: false,
            });
            let merged = merged.unwrap();
            assert_eq!(merged.groups[0].versions[0].resources.as_deref(), expected, "{why}: {lists:?}");
        }
    }
}

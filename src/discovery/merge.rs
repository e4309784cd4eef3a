//! The aggregated discovery documents of several apiservers as one.
//!
//! Follows Kubernetes' peer-aggregated discovery, and departs from it where it loses data or answers differently on
//! different nodes: see [`merge`]. Works on the documents' own text and parses only what differs, so that members that
//! nobody here knows survive, and what is equal everywhere stays as its apiserver wrote it.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

use crate::discovery::document::{Half, MAX_REASON_CHARS};
use crate::discovery::order::in_common_order;
use crate::quote::clipped;

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
    /// Text of its list of resources; absent in most stale ones.
    pub resources: Option<Cow<'d, str>>,
    text: Cow<'d, str>,
}

/// A document that cannot be merged. Good documents can.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("a document cannot be merged: {reason}")]
pub struct MergeError {
    /// Where and why, clipped.
    reason: String,
}

impl From<serde_json::Error> for MergeError {
    fn from(error: serde_json::Error) -> Self {
        Self { reason: clipped(&error.to_string(), MAX_REASON_CHARS) }
    }
}

/// Merges documents.
///
/// As Kubernetes does: groups, versions and resources are united in [a common order](in_common_order), groups over all
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
/// See [`MergeError`].
pub fn merge<'d>(sources: &Sources<'_, 'd>) -> Result<Merged<'d>, MergeError> {
    let lists = sources.documents.iter().map(|text| groups_of(text, sources.half)).collect::<Result<Vec<_>, _>>()?;
    let names: Vec<_> = lists.iter().map(|list| unique_names(list)).collect();
    let entries_of = entries_by_name(&lists);
    let mut groups = Vec::new();
    for entries in in_common_order(&names).into_iter().filter_map(|name| entries_of.get(name)) {
        let documents: BTreeSet<_> = entries.iter().map(|entry| entry.list).collect();
        let is_listed_by_all = documents.len() == lists.len();
        let group = merge_group(entries, sources)?;
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

/// An element of a list, and what it is called.
#[derive(Debug)]
struct Named<'d> {
    name: Cow<'d, str>,
    text: &'d str,
}

/// One mention of a thing. Who lists it twice has two entries.
#[derive(Debug)]
struct Entry<'l, 'd> {
    /// The place of its list among those that are merged.
    list: usize,
    named: &'l Named<'d>,
}

/// The members of a JSON object in their order, each with its text.
#[derive(Debug, Default)]
struct Members<'d>(Vec<(Cow<'d, str>, &'d str)>);

/// Text that borrows from the document unless something in it is escaped.
#[derive(serde::Deserialize)]
struct Text<'d>(#[serde(borrow)] Cow<'d, str>);

impl<'de: 'd, 'd> Deserialize<'de> for Members<'d> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Members<'de>;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some((Text(name), value)) = map.next_entry::<Text<'de>, &'de RawValue>()? {
                    members.push((name, value.get()));
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(InOrder)
    }
}

impl<'d> Members<'d> {
    fn parse(text: &'d str) -> Result<Self, MergeError> {
        Ok(serde_json::from_str(text)?)
    }

    /// Text of a member; `None` also where it is null. Of doubles the last counts, as for Go.
    fn get(&self, name: &str) -> Option<&'d str> {
        let found = self.0.iter().rev().find(|(have, _)| have == name);
        found.map(|(_, text)| *text).filter(|text| *text != "null")
    }
}

/// The elements of the list in a text, with the member that names each; those without a name are left out.
fn named_list<'d>(list: Option<&'d str>, member: &str) -> Result<Vec<Named<'d>>, MergeError> {
    named_list_by(list, |element| Ok(element.get(member)))
}

fn named_list_by<'d>(
    list: Option<&'d str>,
    name_of: impl Fn(&Members<'d>) -> Result<Option<&'d str>, MergeError>,
) -> Result<Vec<Named<'d>>, MergeError> {
    let Some(list) = list else { return Ok(Vec::new()) };
    let elements: Vec<&'d RawValue> = serde_json::from_str(list)?;
    let mut named = Vec::with_capacity(elements.len());
    for text in elements.into_iter().map(RawValue::get) {
        if let Some(name) = name_of(&Members::parse(text)?)? {
            let Text(name) = serde_json::from_str(name)?;
            named.push(Named { name, text });
        }
    }
    Ok(named)
}

/// The groups of a document that belong to its half.
fn groups_of(text: &str, half: Half) -> Result<Vec<Named<'_>>, MergeError> {
    let mut groups = named_list_by(Members::parse(text)?.get("items"), |group| {
        let metadata = group.get("metadata").map(Members::parse).transpose()?;
        // The core group has no name.
        Ok(metadata.and_then(|metadata| metadata.get("name")).or(Some("\"\"")))
    })?;
    groups.retain(|group| Half::of_group(group.name.as_bytes()) == half);
    Ok(groups)
}

/// The names of a list, each at the place where it stands first.
fn unique_names<'n>(list: &'n [Named<'_>]) -> Vec<&'n str> {
    let mut seen = BTreeSet::new();
    list.iter().map(|named| &*named.name).filter(|name| seen.insert(*name)).collect()
}

/// All entries of each name, in the order of the lists.
fn entries_by_name<'l, 'd>(lists: &'l [Vec<Named<'d>>]) -> BTreeMap<&'l str, Vec<Entry<'l, 'd>>> {
    let mut entries: BTreeMap<&str, Vec<_>> = BTreeMap::new();
    for (list, elements) in lists.iter().enumerate() {
        for named in elements {
            entries.entry(&named.name).or_default().push(Entry { list, named });
        }
    }
    entries
}

/// The entries of each name; names in the order of one list united with the next, and so on. With three lists that is
/// another order than that of all at once, and it is Kubernetes'.
fn folded<'l, 'd>(lists: &'l [Vec<Named<'d>>]) -> impl Iterator<Item = Vec<Entry<'l, 'd>>> {
    let order = lists.iter().fold(Vec::new(), |order, list| in_common_order(&[order, unique_names(list)]));
    let mut entries = entries_by_name(lists);
    order.into_iter().filter_map(move |name| entries.remove(name))
}

/// `None` if nothing is left of it.
fn merge_group<'d>(entries: &[Entry<'_, 'd>], sources: &Sources<'_, 'd>) -> Result<Option<Group<'d>>, MergeError> {
    let Some(name) = entries.first().map(|entry| entry.named.name.clone()) else { return Ok(None) };
    let texts: Vec<_> = entries.iter().map(|entry| entry.named.text).collect();
    let parsed = texts.iter().map(|text| Members::parse(text)).collect::<Result<Vec<_>, _>>()?;
    let lists =
        parsed.iter().map(|group| named_list(group.get("versions"), "version")).collect::<Result<Vec<_>, _>>()?;
    let mut versions = Vec::new();
    for mut mentions in folded(&lists) {
        if let Some(local) = sources.local
            && mentions.first().is_some_and(|first| (sources.is_local_matter)(&name, &first.named.name))
        {
            let is_local = |list: usize| entries.get(list).is_some_and(|entry| entry.list == local);
            mentions.retain(|mention| is_local(mention.list));
        }
        versions.extend(merge_version(&mentions)?);
    }
    if versions.is_empty() && lists.iter().any(|list| !list.is_empty()) {
        return Ok(None);
    }
    let list: Vec<_> = versions.iter().map(|version| &*version.text).collect();
    let made = unite(&parsed, &["metadata", "versions"], &[("versions", Some(format!("[{}]", list.join(","))))]);
    Ok(Some(Group { name, text: as_written(&texts, made), versions }))
}

/// `None` if nothing is left of it.
fn merge_version<'d>(entries: &[Entry<'_, 'd>]) -> Result<Option<Version<'d>>, MergeError> {
    let Some(name) = entries.first().map(|entry| entry.named.name.clone()) else { return Ok(None) };
    let texts: Vec<_> = entries.iter().map(|entry| entry.named.text).collect();
    let parsed = texts.iter().map(|text| Members::parse(text)).collect::<Result<Vec<_>, _>>()?;
    if let Some((text, version)) = texts.first().zip(parsed.first()).filter(|_| are_same(&texts)) {
        let resources = version.get("resources").map(Cow::Borrowed);
        return Ok(Some(Version { name, resources, text: Cow::Borrowed(text) }));
    }
    let lists =
        parsed.iter().map(|version| named_list(version.get("resources"), "resource")).collect::<Result<Vec<_>, _>>()?;
    let list = folded(&lists).map(|entries| merge_resource(&entries)).collect::<Result<Vec<_>, _>>()?;
    let resources = (!list.is_empty()).then(|| format!("[{}]", list.join(",")));
    let freshness = parsed.iter().map(|version| version.get("freshness")).max_by_key(|freshness| match freshness {
        Some("\"Current\"") => 2,
        Some("\"Stale\"") => 0,
        _ => 1,
    });
    let mut united = vec![("freshness", freshness.flatten().map(str::to_owned))];
    united.extend(resources.clone().map(|list| ("resources", Some(list))));
    let text = as_written(&texts, unite(&parsed, &["version", "resources", "freshness"], &united));
    Ok(Some(Version { name, resources: resources.map(Cow::Owned), text }))
}

/// The text of a resource.
fn merge_resource<'d>(entries: &[Entry<'_, 'd>]) -> Result<Cow<'d, str>, MergeError> {
    const ORDER: [&str; 8] =
        ["resource", "responseKind", "scope", "singularResource", "verbs", "shortNames", "categories", "subresources"];
    let texts: Vec<_> = entries.iter().map(|entry| entry.named.text).collect();
    if let Some(first) = all_alike(&texts) {
        return Ok(Cow::Borrowed(first));
    }
    let parsed = texts.iter().map(|text| Members::parse(text)).collect::<Result<Vec<_>, _>>()?;
    let lists = parsed
        .iter()
        .map(|resource| named_list(resource.get("subresources"), "subresource"))
        .collect::<Result<Vec<_>, _>>()?;
    let subresources = entries_by_name(&lists).into_values().map(|entries| merge_subresource(&entries));
    let subresources = subresources.collect::<Result<Vec<_>, _>>()?;
    let mut united = Vec::new();
    united.extend(united_verbs(&parsed).map(|verbs| ("verbs", Some(verbs))));
    if !subresources.is_empty() {
        united.push(("subresources", Some(format!("[{}]", subresources.join(",")))));
    }
    Ok(as_written(&texts, unite(&parsed, &ORDER, &united)))
}

/// The text of a subresource.
fn merge_subresource<'d>(entries: &[Entry<'_, 'd>]) -> Result<Cow<'d, str>, MergeError> {
    let texts: Vec<_> = entries.iter().map(|entry| entry.named.text).collect();
    if let Some(first) = all_alike(&texts) {
        return Ok(Cow::Borrowed(first));
    }
    let parsed = texts.iter().map(|text| Members::parse(text)).collect::<Result<Vec<_>, _>>()?;
    let united: Vec<_> = united_verbs(&parsed).map(|verbs| ("verbs", Some(verbs))).into_iter().collect();
    Ok(as_written(&texts, unite(&parsed, &["subresource", "responseKind", "acceptedTypes", "verbs"], &united)))
}

/// All verbs, sorted; `None` if nobody has a list of them.
fn united_verbs(things: &[Members<'_>]) -> Option<String> {
    let lists = things.iter().filter_map(|thing| serde_json::from_str::<Vec<Text<'_>>>(thing.get("verbs")?).ok());
    let lists: Vec<_> = lists.collect();
    let verbs: BTreeSet<&str> = lists.iter().flatten().map(|Text(verb)| &**verb).collect();
    if verbs.is_empty() { None } else { serde_json::to_string(&verbs).ok() }
}

fn are_same(texts: &[&str]) -> bool {
    texts.windows(2).all(|pair| matches!(pair, [a, b] if a == b))
}

/// The first of several texts that are the same JSON.
fn all_alike<'d>(texts: &[&'d str]) -> Option<&'d str> {
    let (first, others) = texts.split_first()?;
    let parse = |text| serde_json::from_str::<Value>(text).ok();
    let is_alike = are_same(texts)
        || parse(first).is_some_and(|first| others.iter().all(|other| parse(other).as_ref() == Some(&first)));
    is_alike.then_some(first)
}

/// What was made, in the words of one of those it was made from if that says the same.
fn as_written<'d>(texts: &[&'d str], made: String) -> Cow<'d, str> {
    let same = texts.iter().find(|text| all_alike(&[text, &made]).is_some());
    same.map_or(Cow::Owned(made), |text| Cow::Borrowed(text))
}

/// An object with the members of all: `united` as given (`None`: left out), the others as in the first that has more than
/// null there. `order` tells how Kubernetes orders the members that it knows; others follow.
fn unite(things: &[Members<'_>], order: &[&str], united: &[(&str, Option<String>)]) -> String {
    let mut names: Vec<&str> = order.to_vec();
    for (name, _) in things.iter().flat_map(|thing| &thing.0) {
        if !names.contains(&&**name) {
            names.push(name);
        }
    }
    let mut members = Vec::new();
    for name in names {
        let value = match united.iter().find(|(have, _)| *have == name) {
            Some((_, value)) => value.as_deref(),
            None => things.iter().find_map(|thing| thing.get(name)).or_else(|| {
                let is_null = things.iter().any(|thing| thing.0.iter().any(|(have, _)| have == name));
                is_null.then_some("null")
            }),
        };
        if let (Some(value), Ok(name)) = (value, serde_json::to_string(name)) {
            members.push(format!("{name}:{value}"));
        }
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
}

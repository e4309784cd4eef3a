//! What must hold for the merge of any discovery documents.

#![cfg(not(target_family = "wasm"))]
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

use std::collections::BTreeSet;

use mixed_version_proxy::discovery::document::Half;
use mixed_version_proxy::discovery::merge::{Sources, merge};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::subsequence;
use serde_json::{Value, json};

const NAMES: [&str; 5] = ["a", "b", "c", "d.k8s.io", "10"];

/// Some names in some order.
fn names() -> impl Strategy<Value = Vec<&'static str>> {
    subsequence(NAMES.to_vec(), 0..=NAMES.len()).prop_shuffle()
}

fn resource(name: &'static str) -> impl Strategy<Value = Value> {
    (names(), names(), any::<bool>()).prop_map(move |(verbs, subresources, has_more)| {
        let subresources: Vec<_> =
            subresources.iter().map(|name| json!({"subresource": name, "verbs": ["get"]})).collect();
        let mut resource = json!({"resource": name, "verbs": verbs, "subresources": subresources});
        if has_more {
            resource["x-more"] = json!({"deep": [1, null]});
        }
        resource
    })
}

fn list<S: Strategy<Value = Value>>(element: fn(&'static str) -> S) -> impl Strategy<Value = Vec<Value>> {
    names().prop_flat_map(move |names| names.into_iter().map(element).collect::<Vec<_>>())
}

fn version(name: &'static str) -> impl Strategy<Value = Value> {
    (list(resource), prop_oneof![Just("Current"), Just("Stale")]).prop_map(
        move |(resources, freshness)| json!({"version": name, "resources": resources, "freshness": freshness}),
    )
}

fn group(name: &'static str) -> impl Strategy<Value = Value> {
    list(version).prop_map(move |versions| json!({"metadata": {"name": name}, "versions": versions}))
}

fn document() -> impl Strategy<Value = String> {
    list(group).prop_map(|groups| {
        // In the order of an apiserver; serde_json would sort the members.
        let head = r#""kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","metadata":{}"#;
        format!("{{{head},\"items\":{}}}", Value::from(groups))
    })
}

fn merged(documents: &[String]) -> String {
    let documents: Vec<_> = documents.iter().map(String::as_str).collect();
    let is_local_matter = &|_: &str, _: &str| false;
    let sources =
        Sources { half: Half::Groups, documents: &documents, local: None, is_local_matter, is_incomplete: false };
    merge(&sources).unwrap().to_text()
}

fn elements<'v>(value: &'v Value, list: &str, name: &str) -> Vec<(&'v str, &'v Value)> {
    let elements = value[list].as_array().into_iter().flatten();
    elements.map(|element| (element.pointer(name).and_then(Value::as_str).unwrap(), element)).collect()
}

/// Everything that a document says of what can be asked for: group, version, resource, subresource, verb; and the order
/// of what has one.
#[derive(Debug, Default, PartialEq)]
struct Said {
    types: BTreeSet<String>,
    orders: Vec<(String, Vec<String>)>,
}

fn said(document: &str) -> Said {
    let value: Value = serde_json::from_str(document).unwrap();
    let mut said = Said::default();
    let order = |path: &str, list: &[(&str, &Value)]| {
        (path.to_owned(), list.iter().map(|(name, _)| (*name).to_owned()).collect::<Vec<_>>())
    };
    let groups = elements(&value, "items", "/metadata/name");
    // Groups without versions too: they are left out of a merge, but their place counts.
    said.orders.push(order("", &groups));
    for (group, value) in groups {
        let versions = elements(value, "versions", "/version");
        said.orders.push(order(group, &versions));
        for (version, value) in versions {
            let path = format!("{group}/{version}");
            said.types.insert(path.clone());
            let resources = elements(value, "resources", "/resource");
            said.orders.push(order(&path, &resources));
            for (resource, value) in resources {
                let path = format!("{path}/{resource}");
                said.types.insert(path.clone());
                let verbs = value["verbs"].as_array().into_iter().flatten();
                said.types.extend(verbs.map(|verb| format!("{path} {verb}")));
                said.types.extend(value.get("x-more").map(|more| format!("{path} {more}")));
                let subresources = elements(value, "subresources", "/subresource");
                said.types.extend(subresources.iter().map(|(name, _)| format!("{path}/{name}")));
            }
        }
    }
    said
}

/// Whether the elements that both have stand in the same order.
fn agree(order: &[String], other: &[String]) -> bool {
    let shared = |list: &[String], other: &[String]| -> Vec<String> {
        list.iter().filter(|name| other.contains(name)).cloned().collect()
    };
    shared(order, other) == shared(other, order)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_lost_and_nothing_is_invented(documents in vec(document(), 1..4)) {
        let all: BTreeSet<_> = documents.iter().flat_map(|document| said(document).types).collect();
        prop_assert_eq!(said(&merged(&documents)).types, all);
    }

    #[test]
    fn a_merge_merged_again_stays_as_it_is(documents in vec(document(), 1..4)) {
        let once = merged(&documents);
        prop_assert_eq!(merged(std::slice::from_ref(&once)), once.clone());
        prop_assert_eq!(merged(&[once.clone(), once.clone()]), once);
    }

    #[test]
    fn a_document_that_nobody_contradicts_is_untouched(document in document(), times in 1_usize..4) {
        let alone = merged(std::slice::from_ref(&document));
        prop_assert_eq!(&alone.trim_end(), &document);
        prop_assert_eq!(merged(&vec![document; times]), alone);
    }

    #[test]
    fn an_order_that_all_share_is_kept(documents in vec(document(), 1..4)) {
        let all: Vec<_> = documents.iter().map(String::as_str).map(said).collect();
        for (path, order) in said(&merged(&documents)).orders {
            let lists: Vec<_> =
                all.iter().flat_map(|said| said.orders.iter().filter(|(have, _)| *have == path)).collect();
            let do_lists_agree = lists.iter().all(|(_, one)| lists.iter().all(|(_, other)| agree(one, other)));
            // Two lists agree, and with a third they may still go round in a circle.
            if do_lists_agree && lists.len() < 3 {
                prop_assert!(lists.iter().all(|(_, list)| agree(list, &order)), "{}: {:?} {:?}", path, order, lists);
            }
            let unique: BTreeSet<_> = order.iter().collect();
            prop_assert_eq!(unique.len(), order.len(), "each once");
        }
    }

    #[test]
    fn equal_documents_change_nothing(documents in vec(document(), 1..3)) {
        let mut doubled = documents.clone();
        doubled.extend(documents.iter().cloned());
        prop_assert_eq!(said(&merged(&doubled)).types, said(&merged(&documents)).types);
    }
}

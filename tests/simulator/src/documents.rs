//! Discovery documents and APIService lists as real apiservers write them, rendered as bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use serde_json::{Value, json};

use crate::catalogue::{TYPES, TypeId};
use crate::world::Stale;

/// A document with its entity tag.
#[derive(Debug, Clone)]
pub struct Document {
    /// Its bytes.
    pub body: Rc<[u8]>,
    /// Quoted tag: another one for other bytes.
    pub etag: String,
}

/// The aggregated discovery document of the core group (`/api`) or of all others (`/apis`), which lists these types and
/// this group-version as stale.
pub fn discovery(types: &BTreeSet<TypeId>, is_core: bool, stale: Option<Stale>) -> Document {
    let mut groups: BTreeMap<&str, BTreeMap<&str, BTreeMap<&str, Vec<&str>>>> = BTreeMap::new();
    let stale = stale.map(|stale| &TYPES[stale.kind]).filter(|kind| kind.group.is_empty() == is_core);
    if let Some(stale) = stale {
        groups.entry(stale.group).or_default().entry(stale.version).or_default();
    }
    for kind in types.iter().map(|id| &TYPES[*id]).filter(|kind| kind.group.is_empty() == is_core) {
        let resources = groups.entry(kind.group).or_default().entry(kind.version).or_default();
        let subresources = resources.entry(kind.resource).or_default();
        if !kind.subresource.is_empty() {
            subresources.push(kind.subresource);
        }
    }
    let version = |group: &str, version: &str, resources: &BTreeMap<&str, Vec<&str>>| {
        let resources: Vec<_> = resources.iter().map(|(name, subresources)| resource(name, subresources)).collect();
        let is_stale = stale.is_some_and(|stale| (stale.group, stale.version) == (group, version));
        let freshness = if is_stale { "Stale" } else { "Current" };
        json!({"version": version, "resources": resources, "freshness": freshness})
    };
    let group = |(name, versions): (&&str, &BTreeMap<&str, BTreeMap<&str, Vec<&str>>>)| {
        let metadata = if name.is_empty() { json!({"creationTimestamp": null}) } else { json!({"name": name}) };
        let versions: Vec<_> = versions.iter().map(|(named, resources)| version(name, named, resources)).collect();
        json!({"metadata": metadata, "versions": versions})
    };
    let items: Vec<_> = groups.iter().map(group).collect();
    tagged(&json!({
        "kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items
    }))
}

fn resource(name: &str, subresources: &[&str]) -> Value {
    let kind = json!({"group": "", "version": "", "kind": "Thing"});
    let subresource = |name: &&str| json!({"subresource": name, "responseKind": kind, "verbs": ["get", "update"]});
    let subresources: Vec<_> = subresources.iter().map(subresource).collect();
    json!({
        "resource": name, "responseKind": kind, "scope": "Namespaced", "singularResource": "thing",
        "verbs": ["create", "delete", "get", "list"], "subresources": subresources
    })
}

/// The list of APIServices: one for each group-version.
pub fn api_services(types: &BTreeSet<TypeId>) -> Document {
    let group_versions: BTreeSet<_> =
        types.iter().map(|id| &TYPES[*id]).map(|kind| (kind.group, kind.version, kind.definition.is_none())).collect();
    let item = |(group, version, is_built_in): &(&str, &str, bool)| {
        let automanaged = if *is_built_in { "onstart" } else { "true" };
        json!({"metadata": {
            "name": format!("{version}.{group}"), "labels": {"kube-aggregator.kubernetes.io/automanaged": automanaged}
        }})
    };
    let items: Vec<_> = group_versions.iter().map(item).collect();
    tagged(&json!({
        "kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": {}, "items": items
    }))
}

/// A document that says almost nothing: how a planted fault makes the filter forget an apiserver.
pub fn hardly_anything(is_core: bool) -> Document {
    let name = if is_core { "" } else { "nothing.k8s.io" };
    tagged(&json!({
        "kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {},
        "items": [{"metadata": {"name": name}, "versions": [{"version": "v0", "resources": []}]}]
    }))
}

fn tagged(document: &Value) -> Document {
    let body = document.to_string().into_bytes();
    let hash = body
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3));
    Document { body: body.into(), etag: format!("\"{hash:016X}\"") }
}

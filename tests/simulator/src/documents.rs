//! Discovery documents and APIService lists as real apiservers write them, rendered as bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use mixed_version_proxy::discovery::merge::INCOMPLETE_GROUP;
use serde_json::{Value, json};

use crate::catalogue::{Kind, TYPES, TypeId};
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

/// The root of OpenAPI v3: a schema for each group-version.
pub fn open_api(types: &BTreeSet<TypeId>) -> Document {
    let key = |kind: &Kind| match kind.group {
        "" => format!("api/{}", kind.version),
        group => format!("apis/{group}/{}", kind.version),
    };
    let keys = types.iter().map(|id| key(&TYPES[*id]));
    let url = |key: &str| json!({"serverRelativeURL": format!("/openapi/v3/{key}?hash=1")});
    let paths: BTreeMap<String, Value> = keys.map(|key| (key.clone(), url(&key))).collect();
    tagged(&json!({"paths": paths}))
}

/// What a merged discovery document lists.
#[derive(Debug, Default)]
pub struct Listed {
    /// Types, but for unknown names.
    pub types: BTreeSet<TypeId>,
    /// Of each resource that a group has in several versions, that in the first: what Kubernetes' controllers ask for.
    pub preferred: BTreeSet<TypeId>,
    /// Group-versions that are called stale.
    pub stale: BTreeSet<(String, String)>,
}

impl Listed {
    /// What one apiserver's document lists that has these types.
    pub fn of(types: &BTreeSet<TypeId>) -> Self {
        let mut sorted: Vec<TypeId> = types.iter().copied().filter(|id| TYPES[*id].subresource.is_empty()).collect();
        sorted.sort_by_key(|id| (TYPES[*id].group, TYPES[*id].version));
        let mut resources = BTreeSet::new();
        let is_first = |id: &TypeId| resources.insert((TYPES[*id].group, TYPES[*id].resource));
        Self { types: types.clone(), preferred: sorted.into_iter().filter(is_first).collect(), stale: BTreeSet::new() }
    }

    /// Whether the document says that it may not be all.
    pub fn is_incomplete(&self) -> bool {
        self.stale.iter().any(|(group, _)| group == INCOMPLETE_GROUP)
    }
}

/// Reads a discovery document as a client does.
pub fn read(document: &str) -> Listed {
    let document: Value = serde_json::from_str(document).unwrap_or_else(|error| panic!("{error}: {document}"));
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let array = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut listed = Listed::default();
    for group in array(&document["items"]) {
        let name = text(&group["metadata"]["name"]);
        let mut of_group = BTreeSet::new();
        for version in array(&group["versions"]) {
            let number = text(&version["version"]);
            if version["freshness"] == "Stale" {
                listed.stale.insert((name.clone(), number.clone()));
            }
            for resource in array(&version["resources"]) {
                let plural = text(&resource["resource"]);
                let is = |kind: &Kind| (kind.group, kind.version, kind.resource) == (&*name, &*number, &*plural);
                let subresources = array(&resource["subresources"]).into_iter();
                let subresources = [String::new()].into_iter().chain(subresources.map(|sub| text(&sub["subresource"])));
                for subresource in subresources {
                    let kind = TYPES.iter().position(|kind| is(kind) && kind.subresource == subresource);
                    listed.types.extend(kind);
                    if subresource.is_empty() && of_group.insert(plural.clone()) {
                        listed.preferred.extend(kind);
                    }
                }
            }
        }
    }
    listed
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

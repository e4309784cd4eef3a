//! Edits of aggregated discovery documents (`APIGroupDiscoveryList`), and their text as an apiserver writes it.
//!
//! ```
//! use lab::{discovery, fixtures};
//! let mut apis = fixtures::discovery_json("1.37.2", "apis.v2.json").unwrap();
//! discovery::add_resource(&mut apis, "hangar.example.com", "v1", discovery::Resource::new("planes", "Plane"));
//! discovery::remove_group(&mut apis, "storagemigration.k8s.io");
//! assert!(discovery::lists(&apis, "hangar.example.com", "v1", "planes", ""));
//! assert!(!discovery::lists(&apis, "storagemigration.k8s.io", "v1", "storageversionmigrations", ""));
//! ```

use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Value, json};

/// The verbs that most built-in resources have.
pub const ALL_VERBS: [&str; 8] = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];

/// A resource to add to a document.
#[derive(Debug, Clone)]
pub struct Resource {
    name: String,
    kind: String,
    namespaced: bool,
    verbs: Vec<String>,
    subresources: Vec<String>,
}

impl Resource {
    /// A namespaced resource with all verbs and no subresources.
    pub fn new(name: &str, kind: &str) -> Self {
        let verbs = ALL_VERBS.map(str::to_owned).to_vec();
        Self { name: name.to_owned(), kind: kind.to_owned(), namespaced: true, verbs, subresources: Vec::new() }
    }

    /// Makes it cluster-scoped.
    pub fn cluster_scoped(mut self) -> Self {
        self.namespaced = false;
        self
    }

    /// Sets its verbs.
    pub fn verbs(mut self, verbs: &[&str]) -> Self {
        self.verbs = verbs.iter().map(|verb| (*verb).to_owned()).collect();
        self
    }

    /// Adds a subresource with the verbs create, get, patch and update.
    pub fn subresource(mut self, name: &str) -> Self {
        self.subresources.push(name.to_owned());
        self
    }

    fn to_json(&self) -> Value {
        let kind = json!({"group": "", "version": "", "kind": self.kind});
        let mut resource = json!({
            "resource": self.name,
            "responseKind": kind,
            "scope": if self.namespaced { "Namespaced" } else { "Cluster" },
            "singularResource": self.kind.to_lowercase(),
            "verbs": self.verbs,
        });
        if !self.subresources.is_empty() {
            let subresource = |name: &String| {
                let verbs = ["create", "get", "patch", "update"];
                json!({"subresource": name, "responseKind": kind, "verbs": verbs})
            };
            resource["subresources"] = self.subresources.iter().map(subresource).collect();
        }
        resource
    }
}

/// A document without groups.
pub fn empty() -> Value {
    json!({"kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": []})
}

/// Adds a resource, and its group and version (`Current`) at the end where they are missing; a resource of that name
/// is replaced.
pub fn add_resource(document: &mut Value, group: &str, version: &str, resource: Resource) {
    let Some(items) = document["items"].as_array_mut() else { return };
    let position = items.iter().position(|item| group_name(item) == group).unwrap_or_else(|| {
        items.push(json!({"metadata": {"name": group}, "versions": []}));
        items.len() - 1
    });
    let Some(versions) = items[position]["versions"].as_array_mut() else { return };
    let position = versions.iter().position(|have| have["version"] == version).unwrap_or_else(|| {
        versions.push(json!({"version": version, "resources": [], "freshness": "Current"}));
        versions.len() - 1
    });
    let Some(resources) = versions[position]["resources"].as_array_mut() else { return };
    resources.retain(|have| have["resource"] != resource.name.as_str());
    resources.push(resource.to_json());
}

/// Removes a resource with its subresources, from one version.
pub fn remove_resource(document: &mut Value, group: &str, version: &str, resource: &str) {
    if let Some(version) = version_mut(document, group, version)
        && let Some(resources) = version["resources"].as_array_mut()
    {
        resources.retain(|have| have["resource"] != resource);
    }
}

/// Removes one subresource.
pub fn remove_subresource(document: &mut Value, group: &str, version: &str, resource: &str, subresource: &str) {
    let Some(version) = version_mut(document, group, version) else { return };
    let Some(resources) = version["resources"].as_array_mut() else { return };
    for have in resources.iter_mut().filter(|have| have["resource"] == resource) {
        if let Some(subresources) = have.get_mut("subresources").and_then(Value::as_array_mut) {
            subresources.retain(|have| have["subresource"] != subresource);
        }
    }
}

/// Removes one version of a group, and the group with its last version.
pub fn remove_version(document: &mut Value, group: &str, version: &str) {
    let Some(items) = document["items"].as_array_mut() else { return };
    for item in items.iter_mut().filter(|item| group_name(item) == group) {
        if let Some(versions) = item["versions"].as_array_mut() {
            versions.retain(|have| have["version"] != version);
        }
    }
    items.retain(|item| group_name(item) != group || item["versions"].as_array().is_some_and(|all| !all.is_empty()));
}

/// Removes a whole group.
pub fn remove_group(document: &mut Value, group: &str) {
    if let Some(items) = document["items"].as_array_mut() {
        items.retain(|item| group_name(item) != group);
    }
}

/// Sets a version's freshness: `Current` or `Stale`.
pub fn set_freshness(document: &mut Value, group: &str, version: &str, freshness: &str) {
    if let Some(version) = version_mut(document, group, version) {
        version["freshness"] = freshness.into();
    }
}

/// One version's entry, to edit it in other ways. The group's name is empty for the core group, as in a URL.
pub fn version_mut<'a>(document: &'a mut Value, group: &str, version: &str) -> Option<&'a mut Value> {
    let items = document["items"].as_array_mut()?;
    let item = items.iter_mut().find(|item| group_name(item) == group)?;
    item["versions"].as_array_mut()?.iter_mut().find(|have| have["version"] == version)
}

/// Whether a document lists a resource, or with a `subresource` that is not empty, that subresource.
pub fn lists(document: &Value, group: &str, version: &str, resource: &str, subresource: &str) -> bool {
    let Some(found) = find_resource(document, group, version, resource) else { return false };
    subresource.is_empty() || find_subresource(found, subresource).is_some()
}

pub(crate) fn find_group<'a>(document: &'a Value, group: &str) -> Option<&'a Value> {
    document["items"].as_array()?.iter().find(|item| group_name(item) == group)
}

pub(crate) fn find_version<'a>(document: &'a Value, group: &str, version: &str) -> Option<&'a Value> {
    find_group(document, group)?["versions"].as_array()?.iter().find(|have| have["version"] == version)
}

pub(crate) fn find_resource<'a>(document: &'a Value, group: &str, version: &str, resource: &str) -> Option<&'a Value> {
    let resources = find_version(document, group, version)?["resources"].as_array()?;
    resources.iter().find(|have| have["resource"] == resource)
}

pub(crate) fn find_subresource<'a>(resource: &'a Value, subresource: &str) -> Option<&'a Value> {
    resource["subresources"].as_array()?.iter().find(|have| have["subresource"] == subresource)
}

/// A group's name; the core group of `/api` has none.
pub(crate) fn group_name(item: &Value) -> &str {
    item["metadata"]["name"].as_str().unwrap_or_default()
}

/// A document's text as an apiserver writes it: compact, members in the order of the Go types, a final newline.
pub fn text(document: &Value) -> Vec<u8> {
    let mut text = serde_json::to_vec(&InGoOrder(document)).unwrap_or_default();
    text.push(b'\n');
    text
}

/// Members in the order of the apidiscovery Go types; unknown ones behind them in the order they are found in.
struct InGoOrder<'a>(&'a Value);

const GO_ORDER: [&str; 23] = [
    // responseKind and, since kind stands before apiVersion, the list itself
    "group",
    "version",
    "kind",
    "apiVersion",
    "metadata",
    "items",
    "versions",
    // a resource or subresource
    "resource",
    "subresource",
    "resources",
    "freshness",
    "responseKind",
    "acceptedTypes",
    "scope",
    "singularResource",
    "verbs",
    "shortNames",
    "categories",
    "subresources",
    // ObjectMeta
    "name",
    "creationTimestamp",
    "labels",
    "annotations",
];

impl Serialize for InGoOrder<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0 {
            Value::Array(values) => serializer.collect_seq(values.iter().map(InGoOrder)),
            Value::Object(members) => {
                let mut members: Vec<_> = members.iter().collect();
                members.sort_by_key(|(name, _)| GO_ORDER.iter().position(|have| have == name).unwrap_or(usize::MAX));
                let mut map = serializer.serialize_map(Some(members.len()))?;
                for (name, value) in members {
                    map.serialize_entry(name, &InGoOrder(value))?;
                }
                map.end()
            }
            other => other.serialize(serializer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures;

    #[test]
    fn a_recorded_document_survives_parsing_and_writing_byte_for_byte() {
        for version in fixtures::VERSIONS {
            for file in ["api.v2.json", "apis.v2.json"] {
                let recorded = fixtures::discovery(version, file).unwrap();
                let written = text(&serde_json::from_slice(&recorded).unwrap());
                assert_eq!(String::from_utf8_lossy(&written), String::from_utf8_lossy(&recorded), "{version} {file}");
            }
        }
    }

    #[test]
    fn edits_reach_down_to_the_subresource() {
        let mut apis = fixtures::discovery_json("1.37.2", "apis.v2.json").unwrap();
        let csi_nodes = ("storage.k8s.io", "v1", "csinodes");
        assert!(lists(&apis, csi_nodes.0, csi_nodes.1, csi_nodes.2, "status"));
        remove_subresource(&mut apis, csi_nodes.0, csi_nodes.1, csi_nodes.2, "status");
        assert!(!lists(&apis, csi_nodes.0, csi_nodes.1, csi_nodes.2, "status"));
        assert!(lists(&apis, csi_nodes.0, csi_nodes.1, csi_nodes.2, ""));
        remove_resource(&mut apis, csi_nodes.0, csi_nodes.1, csi_nodes.2);
        assert!(!lists(&apis, csi_nodes.0, csi_nodes.1, csi_nodes.2, ""));
        remove_version(&mut apis, "apps", "v1");
        assert!(find_group(&apis, "apps").is_none());
        add_resource(&mut apis, "apps", "v2", Resource::new("things", "Thing").subresource("scale"));
        assert!(lists(&apis, "apps", "v2", "things", "scale"));
    }
}

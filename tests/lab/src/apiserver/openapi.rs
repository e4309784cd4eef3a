//! OpenAPI v3 documents made from a discovery document: no more of a schema than `kubectl explain` needs, which looks for
//! the kind of a resource in the operations of its path, and for the schema of that kind.

use serde_json::{Map, Value, json};

use crate::discovery;

/// The document of a key of the root, such as `apis/apps/v1`; `half` is the aggregated document that lists its group.
/// Keys of other things (`version`, `apis/apps`) have documents without schemas.
pub(crate) fn document(half: &Value, key: &str) -> Value {
    let mut paths = Map::new();
    let mut schemas = Map::new();
    if let Some((group, version)) = group_version(key)
        && let Some(found) = discovery::find_version(half, group, version)
    {
        for resource in found["resources"].as_array().into_iter().flatten() {
            let text = |member: &str| resource[member].as_str().unwrap_or_default();
            let kind = resource["responseKind"]["kind"].as_str().unwrap_or_default();
            let described = json!({"group": group, "version": version, "kind": kind});
            let scope = if text("scope") == "Namespaced" { "/namespaces/{namespace}" } else { "" };
            let collection = format!("/{key}{scope}/{}", text("resource"));
            paths.insert(format!("{collection}/{{name}}"), operation("get", &described));
            paths.insert(collection, operation("list", &described));
            schemas.insert(schema_name(group, version, kind), schema(kind, group, version, &described));
        }
    }
    json!({
        "openapi": "3.0.0",
        "info": {"title": "Kubernetes", "version": "unversioned"},
        "paths": paths,
        "components": {"schemas": schemas},
    })
}

/// The group (empty: core) and the version of a key of the root; `None` if it is not a group-version's.
pub(crate) fn group_version(key: &str) -> Option<(&str, &str)> {
    match key.split('/').collect::<Vec<_>>()[..] {
        ["api", version] => Some(("", version)),
        ["apis", group, version] => Some((group, version)),
        _ => None,
    }
}

fn schema_name(group: &str, version: &str, kind: &str) -> String {
    let group = if group.is_empty() { "core" } else { group };
    format!("io.lab.{group}.{version}.{kind}")
}

fn operation(action: &str, kind: &Value) -> Value {
    json!({"get": {
        "responses": {"200": {"description": "OK"}},
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": kind,
    }})
}

fn schema(kind: &str, group: &str, version: &str, described: &Value) -> Value {
    let group_version = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    let field = |description: &str, of: &str| json!({"description": description, "type": of});
    json!({
        "description": format!("{kind} as {group_version} has it."),
        "type": "object",
        "properties": {
            "apiVersion": field("The group and the version.", "string"),
            "kind": field("The kind.", "string"),
            "metadata": field("What all objects have.", "object"),
            "spec": {
                "description": format!("What a {kind} shall be."),
                "type": "object",
                "properties": {"wish": field("The only one.", "string")},
            },
        },
        "x-kubernetes-group-version-kind": [described],
    })
}

//! `metav1.Status` in the four forms a kube-apiserver writes it.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Serialize;

use super::{
    accept::{self, Encoding},
    message::{Request, Response},
    route,
};

/// A `v1` `Status`, status `Failure`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The HTTP status code.
    pub code: u16,
    /// For programs, for instance `NotFound`.
    pub reason: String,
    /// For people.
    pub message: String,
    /// Absent: no member `details`; empty details are `{}`.
    pub details: Option<Details>,
}

/// What a [`Status`] is about.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Details {
    /// The object's name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// The API group.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub group: String,
    /// The resource (not the kind).
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kind: String,
    /// When to come again, in seconds; 0: not said.
    #[serde(rename = "retryAfterSeconds", skip_serializing_if = "is_zero")]
    pub retry_after_seconds: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

impl Status {
    /// A missing route: a version, resource or subresource that this apiserver does not have in a group it has.
    pub fn no_such_route() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource").details(Details::default())
    }

    /// A missing object.
    pub fn no_such_object(group: &str, resource: &str, name: &str) -> Self {
        let message = format!("{} \"{name}\" not found", qualified(group, resource));
        let details = Details { name: name.into(), group: group.into(), kind: resource.into(), ..Details::default() };
        Self::new(404, "NotFound", &message).details(details)
    }

    /// A bearer token that nobody issued.
    pub fn unauthorized() -> Self {
        Self::new(401, "Unauthorized", "Unauthorized")
    }

    /// A method that a known path lacks.
    pub fn method_not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        Self::new(405, "MethodNotAllowed", message).details(Details::default())
    }

    /// Any path of an unknown group while the apiserver starts. Send `Retry-After: 5` with it.
    pub fn starting() -> Self {
        let message = "the request has been made before all known HTTP paths have been installed, please try again";
        let details = Details { retry_after_seconds: 5, ..Details::default() };
        Self::new(503, "ServiceUnavailable", message).details(details)
    }

    /// Any other.
    pub fn new(code: u16, reason: &str, message: &str) -> Self {
        Self { code, reason: reason.to_owned(), message: message.to_owned(), details: None }
    }

    /// Sets the details.
    pub fn details(mut self, details: Details) -> Self {
        self.details = Some(details);
        self
    }

    /// Compact JSON with a final newline.
    pub fn json(&self) -> Bytes {
        let mut text = serde_json::to_vec(&self.members()).unwrap_or_default();
        text.push(b'\n');
        text.into()
    }

    /// JSON for people: indented, without a final newline.
    pub fn pretty_json(&self) -> Bytes {
        serde_json::to_vec_pretty(&self.members()).unwrap_or_default().into()
    }

    /// YAML with sorted members.
    pub fn yaml(&self) -> Bytes {
        let value = serde_yaml_ng::to_value(self.members()).unwrap_or_default();
        let members: BTreeMap<String, serde_yaml_ng::Value> = serde_yaml_ng::from_value(value).unwrap_or_default();
        let mut sorted = BTreeMap::new();
        for (name, value) in members {
            let details: Option<BTreeMap<String, serde_yaml_ng::Value>> = serde_yaml_ng::from_value(value.clone()).ok();
            sorted.insert(name, details.and_then(|details| serde_yaml_ng::to_value(details).ok()).unwrap_or(value));
        }
        serde_yaml_ng::to_string(&sorted).unwrap_or_default().into()
    }

    /// Kubernetes' protobuf envelope.
    pub fn protobuf(&self) -> Bytes {
        let mut status = Vec::new();
        // Go writes the strings of non-optional messages even where they are empty.
        field(&mut status, 1, &[0x0a, 0, 0x12, 0, 0x1a, 0]);
        field(&mut status, 2, b"Failure");
        field(&mut status, 3, self.message.as_bytes());
        field(&mut status, 4, self.reason.as_bytes());
        if let Some(details) = &self.details {
            let mut bytes = Vec::new();
            field(&mut bytes, 1, details.name.as_bytes());
            field(&mut bytes, 2, details.group.as_bytes());
            field(&mut bytes, 3, details.kind.as_bytes());
            bytes.push(5 << 3);
            varint(&mut bytes, details.retry_after_seconds);
            field(&mut bytes, 6, b"");
            field(&mut status, 5, &bytes);
        }
        status.push(6 << 3);
        varint(&mut status, u64::from(self.code));
        let mut type_meta = Vec::new();
        field(&mut type_meta, 1, b"v1");
        field(&mut type_meta, 2, b"Status");
        let mut envelope = b"k8s\0".to_vec();
        field(&mut envelope, 1, &type_meta);
        field(&mut envelope, 2, &status);
        field(&mut envelope, 3, b"");
        field(&mut envelope, 4, b"");
        envelope.into()
    }

    /// As the answer to a request: in the form that its Accept, User-Agent and `pretty` parameter ask for.
    pub fn response(&self, request: &Request) -> Response {
        let accept = request.header("accept").unwrap_or_default();
        let pretty = wants_pretty(request);
        let (content_type, body) = match accept::plain(&accept) {
            Some(Encoding::Json) if !pretty => ("application/json", self.json()),
            Some(Encoding::Json) | None => ("application/json", self.pretty_json()),
            Some(Encoding::Yaml) => ("application/yaml", self.yaml()),
            Some(Encoding::Protobuf) => ("application/vnd.kubernetes.protobuf", self.protobuf()),
        };
        let mut response = Response::new(self.code).header("Content-Type", content_type).body(body);
        if self.code == 403 {
            response = response.header("X-Content-Type-Options", "nosniff");
        }
        if self.code == 401 {
            response = response.without_flow_control();
        }
        match self.details.as_ref().map_or(0, |details| details.retry_after_seconds) {
            0 => response,
            seconds => response.header("Retry-After", seconds.to_string()),
        }
    }

    fn members(&self) -> Members<'_> {
        Members {
            kind: "Status",
            api_version: "v1",
            metadata: BTreeMap::new(),
            status: "Failure",
            message: &self.message,
            reason: &self.reason,
            details: self.details.as_ref(),
            code: self.code,
        }
    }
}

/// The members in Go's order.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Members<'a> {
    kind: &'a str,
    api_version: &'a str,
    metadata: BTreeMap<String, String>,
    status: &'a str,
    message: &'a str,
    reason: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<&'a Details>,
    code: u16,
}

/// `deployments.apps`, and `pods` for the core group.
pub(crate) fn qualified(group: &str, resource: &str) -> String {
    if group.is_empty() { resource.to_owned() } else { format!("{resource}.{group}") }
}

fn wants_pretty(request: &Request) -> bool {
    if let Some(pretty) = route::query_value(&request.target(), "pretty") {
        return matches!(pretty.as_str(), "1" | "t" | "T" | "true" | "TRUE" | "True");
    }
    let agent = request.header("user-agent").unwrap_or_default();
    ["curl", "Wget", "Mozilla/5.0"].iter().any(|people| agent.starts_with(people))
}

fn field(into: &mut Vec<u8>, number: u8, bytes: &[u8]) {
    into.push(number << 3 | 2);
    varint(into, bytes.len() as u64);
    into.extend_from_slice(bytes);
}

fn varint(into: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        into.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    into.push(number as u8);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::answer;

    #[test]
    fn every_form_equals_the_recorded_bytes() {
        let missing_object = Status::no_such_object("", "configmaps", "nope");
        let of_a_group = Status::no_such_object("apps", "deployments", "x");
        let version = "1.37.2";
        let rows = [
            ("404x.unknown-resource.no-accept.json", Status::no_such_route().json()),
            ("404x.unknown-resource.curl.json", Status::no_such_route().pretty_json()),
            ("404x.unknown-resource.protobuf.bin", Status::no_such_route().protobuf()),
            ("404x.unknown-resource.yaml.bin", Status::no_such_route().yaml()),
            ("404x.missing-object.no-accept.json", missing_object.json()),
            ("404x.missing-object.curl.json", missing_object.pretty_json()),
            ("404x.missing-object.protobuf.bin", missing_object.protobuf()),
            ("404x.missing-object.yaml.bin", missing_object.yaml()),
            ("404.subresource-of-missing-object.json", of_a_group.json()),
            ("401.badtoken-object.json", Status::unauthorized().json()),
            ("api.v2-badtoken.json", Status::unauthorized().pretty_json()),
            ("405.post-object.json", Status::method_not_allowed().json()),
        ];
        for (file, got) in rows {
            let want = answer(version, file).unwrap();
            assert_eq!(String::from_utf8_lossy(&got), String::from_utf8_lossy(&want), "{file}");
        }
        assert_eq!(Status::starting().json(), answer("special", "503.starting.json").unwrap());
    }
}

//! The filter on the in-process host: configured, polled and fed by tests. The tests themselves are in `tests/`.

// Links the filter, whose callbacks the host calls.
use mixed_version_proxy as _;

use std::time::Duration;

use host_emulator::{Answer, Headers, HttpCall, Outcome, RootId, Vm};

/// A sidecar beside `cp-0`, with two peers.
pub const SIDECAR: &str = r#"{"apiservers": [
    {"name": "cp-0", "cluster": "cp-0", "discoveryCluster": "cp-0-poll"},
    {"name": "cp-1", "cluster": "cp-1", "discoveryCluster": "cp-1-poll"},
    {"name": "cp-2", "cluster": "cp-2", "discoveryCluster": "cp-2-poll"}], "local": "cp-0"}"#;

/// The same without `local`, by request header.
pub const GATEWAY_HEADER: &str = r#"{"apiservers": [
    {"name": "cp-0", "cluster": "cp-0", "discoveryCluster": "cp-0-poll"},
    {"name": "cp-1", "cluster": "cp-1", "discoveryCluster": "cp-1-poll"},
    {"name": "cp-2", "cluster": "cp-2", "discoveryCluster": "cp-2-poll"}],
    "reroute": {"by": "Header", "key": "x-reroute"}}"#;

/// Every apiserver serves it.
pub const COMMON: &str = "/api/v1/namespaces/shop/pods";
/// Only `cp-1` serves it.
pub const NEW: &str = "/apis/depot.k8s.io/v1/crates";
/// Nobody serves it.
pub const NOBODY: &str = "/apis/depot.k8s.io/v1/nosuch";

/// Where APIService objects are listed.
pub const API_SERVICES: &str = "/apis/apiregistration.k8s.io/v1/apiservices";

/// Statuses that the ABI knows, and others that it does not.
pub const STATUSES: [u32; 12] = [1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 77, u32::MAX];

const AGGREGATED: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

/// A document with one resource.
pub fn document(group: &str, resource: &str) -> String {
    format!(
        r#"{{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","metadata":{{}},"items":[{{"metadata":{{"name":"{group}"}},
        "versions":[{{"version":"v1","resources":[{{"resource":"{resource}","verbs":["get"]}}],"freshness":"Current"}}]}}]}}"#
    )
}

/// What the apiservers say: all serve pods, `cp-1` also crates.
pub fn discovery(call: &HttpCall) -> Answer {
    let body = match (call.path(), call.upstream.as_str()) {
        (API_SERVICES, _) => r#"{"kind":"PartialObjectMetadataList","items":[]}"#.to_owned(),
        ("/api", _) => document("", "pods"),
        ("/openapi/v3", _) => r#"{"paths":{"version":{"serverRelativeURL":"/openapi/v3/version?hash=1"}}}"#.to_owned(),
        (_, "cp-1-poll") => document("depot.k8s.io", "crates"),
        _ => document("apps", "deployments"),
    };
    Answer::new(200, [("content-type", AGGREGATED), ("etag", "\"tag\"")], body)
}

/// Lets time pass until every apiserver has been polled and has answered.
pub fn poll(vm: &mut Vm) {
    vm.run_for_with(Duration::from_secs(6), |call| Some(discovery(call)));
}

/// A GET.
pub fn get(vm: &mut Vm, root: RootId, path: &str) -> Outcome {
    vm.request(root, request(path), true)
}

/// The headers of a GET.
pub fn request(path: &str) -> Headers {
    Headers::new().with(":method", "GET").with(":path", path).with(":authority", "kubernetes").with("accept", "*/*")
}

/// The headers of an apiserver's answer.
pub fn answer(status: u16, content_type: &str, length: usize) -> Headers {
    Headers::new()
        .with(":status", status.to_string())
        .with("audit-id", "1f1c7ea8")
        .with("content-type", content_type)
        .with("content-length", length.to_string())
}

/// The properties of an answer that came from a cluster.
pub fn from_cluster(cluster: &str) -> [(&'static str, Vec<u8>); 2] {
    [("response.code_details", b"via_upstream".to_vec()), ("xds.cluster_name", cluster.as_bytes().to_vec())]
}

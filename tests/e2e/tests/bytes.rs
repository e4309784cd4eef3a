//! What reaches an apiserver is what the client sent, and what the client sent decides nothing that it must not.

use e2e::{ControlPlane, GATEWAY_HEADER, PATIENCE, SIDECAR};
use lab::{
    StubApiserver,
    apiserver::{LOOP_HEADER, Request, Response},
    eventually,
};
use serde_json::json;

/// Only `cp-2` serves it.
const NEW_GROUP: &str = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";
/// All serve it.
const COMMON: &str = "/api/v1/namespaces/shop/pods";

/// The one client request that the apiservers have seen since the last look, with the index of the apiserver.
fn the_only_request(apiservers: &[StubApiserver]) -> (usize, Request) {
    let mut seen = Vec::new();
    for (index, apiserver) in apiservers.iter().enumerate() {
        seen.extend(apiserver.client_requests().into_iter().map(|request| (index, request)));
        apiserver.clear_requests();
    }
    assert_eq!(seen.len(), 1, "{seen:?}");
    seen.remove(0)
}

#[tokio::test]
async fn paths_go_upstream_byte_for_byte_and_to_whom_they_mean() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    plane.apiservers.iter().for_each(StubApiserver::clear_requests);
    let (here, peer) = (0, 1);
    for (path, expected, why) in [
        // Encoded, and meaning the same.
        ("/apis/storagemigration.k8s.io/v1/storageversionmigration%73", peer, "an encoded letter"),
        ("/apis/storagemigration%2ek8s.io/v1/storageversionmigrations", peer, "an encoded dot inside a name"),
        ("/apis%2Fstoragemigration.k8s.io%2fv1/storageversionmigrations", peer, "encoded slashes"),
        ("/%61pis/storagemigration.k8s.io/v1/storageversionmigrations/m%00%ff", peer, "odd bytes in a name"),
        ("/apis/storagemigration.k8s.io/v1/storageversionmigrations/?x=%2F..%zz", peer, "a query is left alone"),
        ("/apis/storagemigration.k8s.io/v1/watch/storageversionmigrations/m1/status", peer, "the watch prefix"),
        (
            "/apis/storagemigration.k8s.io/v1/storageversionmigrations/m/status/a/../b//c",
            peer,
            "behind the subresource",
        ),
        // Odd: left alone, and local answers as it likes.
        ("//apis/storagemigration.k8s.io/v1/storageversionmigrations", here, "a doubled slash in front"),
        ("/apis//storagemigration.k8s.io/v1/storageversionmigrations", here, "an empty segment"),
        ("/apis/storagemigration.k8s.io/v1/storageversionmigrations//", here, "two trailing slashes"),
        ("/apis/storagemigration.k8s.io/v1/./storageversionmigrations", here, "a dot segment"),
        ("/apis/apps/../storagemigration.k8s.io/v1/storageversionmigrations", here, "a dot-dot segment"),
        ("/apis/storagemigration.k8s.io/v1/storageversionmigrations/%2e%2e", here, "the same, encoded"),
        ("/apis/storagemigration.k8s.io/v1/storageversionmigrations/%2F", here, "an encoded empty segment"),
        ("/apis/storagemigration.k8s.io/v1/storageversionmigrations/%zz", here, "an invalid escape"),
        ("/apis/storagemigration.k8s.io/v1/storageversionmigrations%2", here, "a cut escape"),
        ("/apis/storagemigration.k8s.io/v1/%2573torageversionmigrations", here, "decoded once, not twice"),
        ("/apis/STORAGEMIGRATION.k8s.io/v1/storageversionmigrations", here, "case counts"),
        // The verb prefixes, and names that look like them.
        ("/api/v1/watch/namespaces/shop/pods?timeoutSeconds=1", here, "a watch of what local serves"),
        ("/api/v1/watch", here, "a bare prefix"),
        ("/api/v1/namespaces/watch/pods", here, "a namespace called watch"),
        ("/api/v1/namespaces/shop/pods/watch", here, "a pod called watch"),
        ("/apis/storagemigration.k8s.io/v1/storageversionmigrations/watch", peer, "an object called watch"),
    ] {
        // A watch has no end of its own, so only the head is awaited.
        plane.client.get(path).open().await.unwrap();
        let (asked, request) = the_only_request(&plane.apiservers);
        assert_eq!(asked, expected, "{path}: {why}");
        assert_eq!(request.target(), path, "{why}");
    }
}

#[tokio::test]
async fn headers_of_any_bytes_kill_nothing() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    for (name, value) in [
        ("user-agent", &b"tool/\xa1\xb1"[..]),
        ("accept", b"application/json\xff"),
        (LOOP_HEADER, b"\xc0"),
        ("x-anything", b"\x80\x81"),
    ] {
        for path in [COMMON, NEW_GROUP, "/apis", "/healthz"] {
            let answer = plane.client.get(path).header(name, value).send().await.unwrap();
            assert!(answer.status < 600, "{name} on {path}");
        }
    }
    // HTTP/2 carries a path with any byte; Envoy may refuse it, and the worker lives on.
    let http2 = plane.client.http2().await.unwrap();
    let _refused = plane.client.get(&b"/api/v1/pods/\xe9"[..]).send_over(&http2).await;
    plane.settled().await.unwrap();
    assert_eq!(plane.envoy.stat_sum("vm_reload").await.unwrap(), 0);
    let log = plane.envoy.log();
    assert!(!log.contains("panicked") && !log.contains("wasm_fail_stream"), "{log}");
}

#[tokio::test]
async fn a_client_cannot_choose_the_apiserver() {
    let names = ["x-mixed-version-proxy-cluster", "X-Mixed-Version-Proxy-Cluster", "mixed_version_proxy.cluster"];
    for file in [SIDECAR, GATEWAY_HEADER] {
        let plane = ControlPlane::builder(file).settled().await.unwrap();
        plane.apiservers.iter().for_each(StubApiserver::clear_requests);
        for name in names {
            for values in [&["cp-3"][..], &["cp-3", "cp-3"], &["cp-1-poll"], &["admin"], &["cp-3,cp-2"], &[""]] {
                for path in [COMMON, NEW_GROUP, "/healthz", "/apis"] {
                    let mut request = plane.client.get(path).header("accept", "application/json");
                    for value in values {
                        request = request.header(name, value);
                    }
                    let answer = request.send().await.unwrap();
                    let why = format!("{file}: {name}: {values:?} on {path}");
                    assert_eq!(answer.status, 200, "{why}");
                    let (asked, request) = the_only_request(&plane.apiservers);
                    match (path, file) {
                        (NEW_GROUP, _) => assert_eq!(asked, 1, "{why}"),
                        (_, SIDECAR) => assert_eq!(asked, 0, "{why}"),
                        _ => {}
                    }
                    if file == GATEWAY_HEADER {
                        let seen = request.header_values("x-mixed-version-proxy-cluster");
                        assert!(seen.is_empty(), "{why}: reached the apiserver as {seen:?}");
                    }
                }
            }
        }
        if file == GATEWAY_HEADER {
            // Balanced over all three: the spoofed value did not pin requests to one.
            let mut seen = Vec::new();
            for _ in 0..24 {
                let answer = plane.client.get(COMMON).header(names[0], "cp-3").send().await.unwrap();
                seen.push(answer.header("x-served-by").unwrap());
            }
            seen.sort();
            seen.dedup();
            assert_eq!(seen, ["cp-1", "cp-2", "cp-3"]);
        }
    }
}

#[tokio::test]
async fn the_loop_header_is_set_and_not_added() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    plane.apiservers.iter().for_each(StubApiserver::clear_requests);
    assert_eq!(plane.get(NEW_GROUP).await.unwrap().status, 200);
    let (asked, request) = the_only_request(&plane.apiservers);
    assert_eq!((asked, request.header_values(LOOP_HEADER)), (1, vec!["true".to_owned()]));
    assert_eq!(plane.get(COMMON).await.unwrap().status, 200);
    let (asked, request) = the_only_request(&plane.apiservers);
    assert_eq!((asked, request.header_values(LOOP_HEADER)), (0, Vec::new()), "not rerouted, not marked");
}

#[tokio::test]
async fn answers_pass_as_the_apiserver_gave_them() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    plane.discovered_as(1).await.unwrap();
    for status in [200, 201, 202, 204, 304, 400, 401, 403, 405, 406, 409, 410, 415, 422, 429, 500, 503, 504] {
        for apiserver in &plane.apiservers[..2] {
            apiserver.respond_with(move |request| {
                let answer = || Response::new(status).header("Warning", "299 - \"x\"").header("Retry-After", "9");
                let with_body = !matches!(status, 204 | 304);
                let respond = || if with_body { answer().json(&json!({"code": status})) } else { answer() };
                (request.path().contains("/probe") || request.path().ends_with("/x")).then(respond)
            });
        }
        for path in [format!("{COMMON}/probe"), format!("{NEW_GROUP}/probe"), "/probe".to_owned(), "/apis/x".to_owned()]
        {
            let answer = plane.get(&path).await.unwrap();
            assert_eq!(answer.status, status, "{path}");
            assert_eq!(answer.header("retry-after").as_deref(), Some("9"), "{status} {path}");
            assert_eq!(answer.header("warning").as_deref(), Some("299 - \"x\""), "{status} {path}");
        }
    }
}

#[tokio::test]
async fn polls_ask_for_the_apiservers_own_view_over_their_own_connections() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    let apiserver = &plane.apiservers[1];
    eventually(PATIENCE, "a conditional poll", async || {
        apiserver.polls().iter().any(|poll| poll.header("if-none-match") == Some(apiserver.apis_etag()))
    })
    .await
    .unwrap();
    for poll in apiserver.polls() {
        let accept = poll.header("accept").unwrap();
        assert!(
            accept.starts_with("application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList;profile=nopeer,")
        );
        assert_eq!(poll.header_values(LOOP_HEADER), ["true"]);
        assert_eq!(poll.header("host").as_deref(), Some("kubernetes.default.svc"));
        assert_eq!(poll.header("accept-encoding"), None);
        assert_eq!(poll.client_subject.as_ref().unwrap().common_name, "mixed-version-proxy-poller");
    }
    let of_polls: Vec<_> = apiserver.polls().iter().map(|request| request.connection).collect();
    for request in apiserver.client_requests() {
        assert!(!of_polls.contains(&request.connection), "a client's request on a connection of polls: {request:?}");
        assert!(request.client_subject.is_none(), "a client's request under the poller's certificate: {request:?}");
    }
}

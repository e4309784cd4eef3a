//! Who shows a bad token: what it costs those whose token is good, since an apiserver ends an HTTP/2 connection over it.

use std::collections::BTreeSet;

use e2e::{ControlPlane, GATEWAY, GATEWAY_HEADER, PATIENCE, SIDECAR};
use lab::{
    Client, StubApiserver,
    apiserver::{Fault, HttpVersion, Request, Response, Scope},
    client::Opened,
    eventually,
};
use serde_json::{Value, json};

/// Served by all.
const COMMON: &str = "/api/v1/namespaces/shop/pods";
/// Only `cp-2` serves it.
const NEW: &str = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";

const GOOD: &str = "good";
/// So many requests with a bad token.
const ATTEMPTS: usize = 50;

/// A client whose token nobody has issued.
async fn stranger(plane: &ControlPlane) -> Client {
    plane.client_of(&plane.envoy).await.unwrap().with_token("bad")
}

/// Watches of what stays and of what is rerouted.
async fn watches(plane: &ControlPlane) -> Vec<Opened> {
    let mut watches = Vec::new();
    for path in [COMMON, NEW] {
        let watch = plane.client.get(format!("{path}?watch=true")).open().await.unwrap();
        assert_eq!(watch.status, 200, "{path}");
        watches.push(watch);
    }
    watches
}

async fn assert_live(plane: &ControlPlane, watches: &mut [Opened], why: &str) {
    let event = json!({"type": "BOOKMARK", "object": {"why": why}});
    plane.apiservers.iter().for_each(|apiserver| apiserver.push_event(&event));
    for watch in watches {
        let chunk = watch.next_chunk().await.unwrap().unwrap_or_else(|| panic!("{why}: a watch has ended"));
        assert_eq!(serde_json::from_slice::<Value>(&chunk).unwrap(), event, "{why}");
    }
}

/// More polls of one apiserver, from now on.
async fn assert_polled(apiserver: &StubApiserver, why: &str) {
    let before = apiserver.polls().len();
    eventually(PATIENCE, "more polls", async || apiserver.polls().len() > before + 4).await.expect(why);
}

/// The connections of requests.
fn connections(requests: &[Request]) -> BTreeSet<u64> {
    requests.iter().map(|request| request.connection).collect()
}

/// Sends bad tokens, and between them good ones; how many of the good ones were told to come again.
async fn attempts(plane: &ControlPlane, why: &str) -> usize {
    let stranger = stranger(plane).await;
    let mut refused = 0;
    for _ in 0..ATTEMPTS {
        for path in [NEW, COMMON] {
            let answer = stranger.get(path).header("accept", "application/json").send().await.unwrap();
            assert_eq!(answer.status, 401, "{why}: {path}: {}", answer.text());
            assert_eq!(answer.json().unwrap()["reason"], "Unauthorized", "{why}: the apiserver's own answer");
            let answer = plane.get(path).await.unwrap();
            match answer.status {
                200 => {}
                // It was not executed.
                503 if answer.header("retry-after").is_some() => refused += 1,
                _ => panic!("{why}: {path}: {} {}", answer.status, answer.text()),
            }
        }
    }
    refused
}

#[tokio::test]
async fn bad_tokens_cost_nobody_else_anything() {
    for file in [SIDECAR, GATEWAY, GATEWAY_HEADER] {
        let plane = ControlPlane::builder(file).token(GOOD).settled().await.unwrap();
        let new = &plane.apiservers[1];
        let mut watches = watches(&plane).await;
        plane.apiservers.iter().for_each(StubApiserver::clear_requests);
        assert_eq!(attempts(&plane, file).await, 0, "{file}: no good token is told to come again");
        assert_live(&plane, &mut watches, file).await;
        assert_polled(new, file).await;

        let clients = new.client_requests();
        assert!(clients.len() >= 2 * ATTEMPTS, "{file}: {} requests", clients.len());
        assert!(clients.iter().all(|request| request.version == HttpVersion::Http1), "{file}");
        let shared: Vec<_> = connections(&clients).intersection(&connections(&new.polls())).copied().collect();
        assert_eq!(shared, [0; 0], "{file}: connections of polls and of clients");
    }
}

#[tokio::test]
async fn a_poll_without_credentials_costs_no_client_anything() {
    let plane = ControlPlane::builder(SIDECAR).token(GOOD).settled().await.unwrap();
    let mut watches = watches(&plane).await;
    let refused = |_: &Request| Response::new(401).header("Connection", "close").text("Unauthorized");
    let new = &plane.apiservers[1];
    new.fail(Scope::Polls, Fault::answer(refused));
    assert_polled(new, "an apiserver that refuses is asked again").await;
    assert_live(&plane, &mut watches, "polls are refused").await;
    for path in [COMMON, NEW] {
        assert_eq!(plane.get(path).await.unwrap().status, 200, "{path}");
    }
}

/// HTTP/2 to apiservers, which the shipped configurations advise against.
fn http2(config: &mut Value) {
    for cluster in config.pointer_mut("/static_resources/clusters").and_then(Value::as_array_mut).unwrap() {
        let http = "/typed_extension_protocol_options/envoy.extensions.upstreams.http.v3.HttpProtocolOptions";
        cluster.pointer_mut(http).unwrap()["explicit_http_config"] = json!({"http2_protocol_options": {}});
        cluster["transport_socket"]["typed_config"]["common_tls_context"]["alpn_protocols"] = json!(["h2"]);
    }
}

#[tokio::test]
async fn over_http2_each_bad_token_costs_a_connection_and_no_open_stream() {
    let plane = ControlPlane::builder(SIDECAR).edit(http2).token(GOOD).settled().await.unwrap();
    let new = &plane.apiservers[1];
    let mut watches = watches(&plane).await;
    let polls = connections(&new.polls());
    let before = new.connections();
    plane.apiservers.iter().for_each(StubApiserver::clear_requests);
    let refused = attempts(&plane, "HTTP/2").await;
    let made = new.connections() - before;
    println!("{ATTEMPTS} bad tokens made {made} connections; {refused} other requests were told to come again");
    assert!(new.client_requests().iter().all(|request| request.version == HttpVersion::Http2));
    assert!(made >= ATTEMPTS as u64 / 2, "the cost of HTTP/2: {made} connections");
    assert_live(&plane, &mut watches, "streams that were open go on").await;
    assert_polled(new, "polls go on").await;
    assert!(connections(&new.polls()).is_subset(&polls), "polls have kept their connections");
}

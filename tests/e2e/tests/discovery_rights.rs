//! Who may see discovery: the apiservers decide, and nothing that the filter knows reaches whom they refuse.
//!
//! `cp-1`, the local one, runs 1.34.4, `cp-2` 1.37.2 and `cp-3` 1.36.3.

use e2e::{ControlPlane, GATEWAY, PATIENCE, SIDECAR};
use lab::{
    Client, StubApiserver,
    apiserver::{AGGREGATED, Request, Response},
    client::Answer,
    eventually,
};
use serde_json::json;

/// Only `cp-2` has it.
const NEW_GROUP: &str = "storagemigration.k8s.io";
/// What stands in every document that tells of the new group.
const OF_NEW_GROUP: &str = "storageversionmigrations";

/// All that discovery has, in its forms.
const ALL: [(&str, &str); 10] = [
    ("/apis", AGGREGATED),
    ("/api", AGGREGATED),
    ("/apis", "application/json"),
    ("/api", "application/json"),
    ("/apis/storagemigration.k8s.io", "application/json"),
    ("/apis/storagemigration.k8s.io/v1", "application/json"),
    ("/apis/certificates.k8s.io/v1", "application/json"),
    ("/api/v1", "application/json"),
    ("/openapi/v3", "application/json"),
    ("/openapi/v3/apis/storagemigration.k8s.io/v1", "application/json"),
];

/// The filter's own questions come over connections with the poller's certificate; these are clients'.
fn is_by_client(request: &Request) -> bool {
    request.client_subject.is_none()
}

fn refuse(apiserver: &StubApiserver, status: u16) {
    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status});
    apiserver.respond_with(move |request| {
        let answer = || Response::new(status).header("X-Refused", "1").json(&body);
        (is_by_client(request) && request.header("authorization").as_deref() != Some("Bearer good")).then(answer)
    });
}

async fn ask(client: &Client, target: &str, accept: &str) -> Answer {
    client.get(target).header("accept", accept).send().await.unwrap()
}

#[tokio::test]
async fn whom_the_apiservers_refuse_is_told_nothing() {
    for file in [SIDECAR, GATEWAY] {
        let plane = ControlPlane::builder(file).settled().await.unwrap();
        plane.discovered_as(1).await.unwrap();
        let schemas = async || plane.get("/openapi/v3").await.unwrap().text().contains(NEW_GROUP);
        eventually(PATIENCE, "the merged schemas", schemas).await.unwrap();
        for status in [401, 403] {
            plane.apiservers.iter().for_each(|apiserver| refuse(apiserver, status));
            let good = plane.client.clone().with_token("good");
            for (target, accept) in ALL {
                // One that is known is told all by the same workers, before and after.
                for _ in 0..2 {
                    let answer = ask(&plane.client, target, accept).await;
                    let why = format!("{file} {target} {accept}: {}", answer.text());
                    assert_eq!((answer.status, answer.header("x-refused").as_deref()), (status, Some("1")), "{why}");
                    assert!(!answer.text().contains(OF_NEW_GROUP), "{why}");
                    assert_eq!(answer.header("etag"), None, "{why}");
                    let conditional = plane.client.get(target).header("accept", accept).header("if-none-match", "*");
                    assert_eq!(conditional.send().await.unwrap().status, status, "{why}: no 304 either");
                    let head = plane.client.request("HEAD", target).header("accept", accept).send().await.unwrap();
                    assert_eq!(head.status, status, "{why}: HEAD");
                    assert_eq!(ask(&good, target, accept).await.status, 200, "{why}");
                }
            }
        }
    }
}

#[tokio::test]
async fn the_client_s_own_credential_goes_to_the_apiserver_that_answers() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    plane.discovered_as(1).await.unwrap();
    let client = plane.client.clone().with_token("mine").with_header("impersonate-user", "jane");
    for (target, accept) in ALL {
        plane.apiservers.iter().for_each(StubApiserver::clear_requests);
        assert!(matches!(ask(&client, target, accept).await.status, 200 | 404), "{target}");
        let asked: Vec<_> =
            plane.apiservers.iter().flat_map(|apiserver| apiserver.requests_where(is_by_client)).collect();
        let [request] = &asked[..] else { panic!("{target}: one apiserver decides: {asked:?}") };
        assert_eq!(request.header_values("authorization"), ["Bearer mine"], "{target}");
        assert_eq!(request.header_values("impersonate-user"), ["jane"], "{target}");
    }
}

#[tokio::test]
async fn a_refusal_by_the_apiserver_that_has_the_schema_passes() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    let target = format!("/openapi/v3/apis/{NEW_GROUP}/v1");
    eventually(PATIENCE, "the schema", async || plane.get(&target).await.unwrap().status == 200).await.unwrap();
    refuse(&plane.apiservers[1], 403);
    let answer = plane.get(&target).await.unwrap();
    assert_eq!((answer.status, answer.header("x-refused").as_deref()), (403, Some("1")));
}

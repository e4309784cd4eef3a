//! OpenAPI v3 of the whole cluster, beyond what a sidecar's client usually asks: gateways, custom resources, apiservers that
//! are gone.
//!
//! `cp-1` runs 1.34.4, `cp-2` 1.37.2 and `cp-3` 1.36.3.

use std::collections::BTreeSet;

use e2e::{ControlPlane, EVERY_WORKER, GATEWAY, PATIENCE, SIDECAR};
use lab::{
    StubApiserver,
    apiserver::{ApiServiceOrigin, LOOP_HEADER},
    discovery::Resource,
    eventually,
};
use serde_json::Value;

const NEW: &str = "apis/storagemigration.k8s.io/v1";

/// Waits until all workers tell of a key in the merged root, or do not; the root.
async fn root_with(plane: &ControlPlane, key: &str) -> Value {
    eventually(PATIENCE, &format!("{key} in the root on all workers"), async || {
        let mut root = Value::Null;
        for _ in 0..EVERY_WORKER {
            let answer = plane.get("/openapi/v3").await.unwrap();
            root = answer.json().unwrap_or_default();
            if answer.status != 200 || root["paths"][key].is_null() {
                return Err((answer.status, root["paths"].as_object().map_or(0, serde_json::Map::len)));
            }
        }
        Ok(root)
    })
    .await
    .unwrap()
}

fn url<'a>(root: &'a Value, key: &str) -> &'a str {
    root["paths"][key]["serverRelativeURL"].as_str().unwrap_or_else(|| panic!("no {key}"))
}

#[tokio::test]
async fn a_gateway_s_root_names_only_schemas_that_are_there_and_the_same_ones_every_time() {
    let plane = ControlPlane::builder(GATEWAY).settled().await.unwrap();
    let root = root_with(&plane, NEW).await;
    for round in 0..EVERY_WORKER {
        assert_eq!(plane.get("/openapi/v3").await.unwrap().json().unwrap(), root, "{round}");
    }
    let keys: Vec<_> = root["paths"].as_object().unwrap().keys().cloned().collect();
    for key in keys {
        let first = plane.get(url(&root, &key)).await.unwrap();
        assert_eq!(first.status, 200, "{key}");
        // The hash in the root is that of the document, whoever is asked: no client is sent round in circles.
        for round in 0..4 {
            let again = plane.get(url(&root, &key)).await.unwrap();
            assert_eq!((again.status, &again.body), (200, &first.body), "{key} {round}");
        }
    }
    plane.apiservers.iter().for_each(StubApiserver::clear_requests);
    for _ in 0..10 {
        let answer = plane.get(url(&root, NEW)).await.unwrap();
        assert_eq!((answer.status, answer.header("x-served-by").as_deref()), (200, Some("cp-2")));
    }
    for request in plane.apiservers[1].client_requests() {
        assert_eq!(request.header_values(LOOP_HEADER), ["true"], "{request:?}");
    }
}

#[tokio::test]
async fn schemas_of_custom_resources_are_the_local_apiserver_s_matter() {
    let plane = ControlPlane::builder(SIDECAR)
        .prepare(|apiservers| {
            let [local, new, _] = apiservers else { panic!("three apiservers") };
            // A definition that only the peer has seen, one that only the local apiserver has, one of which the peer lists more.
            let planes = || Resource::new("planes", "Plane");
            new.add_api("hangar.example.com", "v1", planes(), ApiServiceOrigin::CustomResource);
            local.add_api("dock.example.com", "v1", Resource::new("ships", "Ship"), ApiServiceOrigin::CustomResource);
            local.add_api("yard.example.com", "v1", Resource::new("trains", "Train"), ApiServiceOrigin::CustomResource);
            for (name, kind) in [("trains", "Train"), ("trams", "Tram")] {
                let resource = Resource::new(name, kind);
                new.add_api("yard.example.com", "v1", resource, ApiServiceOrigin::CustomResource);
            }
        })
        .settled()
        .await
        .unwrap();
    let root = root_with(&plane, NEW).await;
    let told: BTreeSet<_> = root["paths"].as_object().unwrap().keys().map(String::as_str).collect();
    assert!(!told.contains("apis/hangar.example.com/v1"), "{told:?}");
    for key in ["apis/dock.example.com/v1", "apis/yard.example.com/v1"] {
        let answer = plane.get(url(&root, key)).await.unwrap();
        assert_eq!((answer.status, answer.header("x-served-by").as_deref()), (200, Some("cp-1")), "{key}");
    }
    let unknown = plane.get("/openapi/v3/apis/hangar.example.com/v1").await.unwrap();
    assert_eq!(
        (unknown.status, unknown.header("x-served-by").as_deref()),
        (404, Some("cp-1")),
        "as without the filter"
    );
}

#[tokio::test]
async fn a_rerouted_request_for_a_schema_is_not_rerouted_again() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    let root = root_with(&plane, NEW).await;
    plane.apiservers[1].clear_requests();
    let rerouted = plane.client.get(url(&root, NEW)).header(LOOP_HEADER, "true").send().await.unwrap();
    assert_eq!((rerouted.status, rerouted.header("x-served-by").as_deref()), (404, Some("cp-1")));
    assert!(plane.apiservers[1].client_requests().is_empty());
}

#[tokio::test]
async fn a_schema_whose_apiserver_is_down_is_a_503_and_no_404() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    let root = root_with(&plane, NEW).await;
    plane.apiservers[1].stop().await;
    for _ in 0..EVERY_WORKER {
        let answer = plane.get(url(&root, NEW)).await.unwrap();
        assert_eq!((answer.status, answer.json().unwrap()["kind"].as_str()), (503, Some("Status")));
        // And what it had told is told.
        let told = plane.get("/openapi/v3").await.unwrap();
        assert_eq!((told.status, told.json().unwrap()["paths"][NEW].is_object()), (200, true));
    }
    plane.apiservers[1].restart().await.unwrap();
    eventually(PATIENCE, "it to come back", async || plane.get(url(&root, NEW)).await.unwrap().status == 200)
        .await
        .unwrap();
}

#[tokio::test]
async fn head_is_get_without_the_body_for_schemas_too() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    let root = root_with(&plane, NEW).await;
    let http2 = plane.client.http2().await.unwrap();
    let mut connection = plane.client.connect().await.unwrap();
    for target in ["/openapi/v3", url(&root, NEW), url(&root, "apis/apps/v1")] {
        let get = plane.get(target).await.unwrap();
        let head = || plane.client.request("HEAD", target).header("accept", "application/json");
        for (answer, protocol) in [
            (head().send_on(&mut connection).await.unwrap(), "HTTP/1.1"),
            (head().send_over(&http2).await.unwrap(), "HTTP/2"),
        ] {
            assert_eq!((answer.status, answer.body.len()), (200, 0), "{target} {protocol}");
            assert_eq!(answer.header("content-length"), Some(get.body.len().to_string()), "{target} {protocol}");
            assert_eq!(answer.header("content-type"), get.header("content-type"), "{target} {protocol}");
        }
    }
}

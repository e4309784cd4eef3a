//! Group-versions that an apiserver calls stale: it knows of them, and cannot say at the moment what is in them.
//!
//! `cp-1`, the local one, runs 1.34.4, `cp-2` 1.37.2 and `cp-3` 1.36.3.

use e2e::{ControlPlane, EVERY_WORKER, PATIENCE, SIDECAR};
use lab::{
    StubApiserver,
    apiserver::{ApiServiceOrigin, Response},
    discovery::{self, Resource},
    eventually,
};
use serde_json::{Value, json};

/// Only `cp-2` has it.
const NEW_GROUP: &str = "storagemigration.k8s.io";
const INCOMPLETE: &str = "incomplete.mixed-version-proxy";

/// As an apiserver lists an aggregated API whose backend is down.
fn becomes_stale(apiserver: &StubApiserver, group: &str, version: &str) {
    apiserver.edit_apis(|apis| {
        discovery::set_freshness(apis, group, version, "Stale");
        discovery::version_mut(apis, group, version).unwrap()["resources"] = json!([]);
    });
}

/// Waits until what an apiserver says has been heard: two polls of `/apis` have been answered with its present tag.
async fn heard(apiserver: &StubApiserver) {
    let tag = apiserver.apis_etag();
    let polls = || {
        let is_repeated = |request: &lab::apiserver::Request| request.header("if-none-match") == Some(tag.clone());
        apiserver.polls().into_iter().filter(is_repeated).count()
    };
    eventually(PATIENCE, "its document to be known", async || polls() >= 2).await.unwrap();
}

async fn merged(plane: &ControlPlane) -> Value {
    plane.aggregated("/apis").await.unwrap().json().unwrap()
}

#[tokio::test]
async fn an_aggregated_api_whose_backend_is_down_is_the_local_apiserver_s_to_answer() {
    let plane = ControlPlane::builder(SIDECAR)
        .prepare(|apiservers| {
            for apiserver in apiservers {
                let meters = Resource::new("meters", "Meter");
                apiserver.add_api("meter.example", "v1", meters, ApiServiceOrigin::Aggregated);
            }
            becomes_stale(&apiservers[0], "meter.example", "v1");
        })
        .settled()
        .await
        .unwrap();
    plane.discovered("the whole cluster", |answer| answer.text().contains(NEW_GROUP)).await.unwrap();
    plane.apiservers[0].respond_with(|request| {
        let down = || Response::new(503).text("service unavailable\n");
        request.path().starts_with("/apis/meter.example/").then(down)
    });
    plane.apiservers.iter().for_each(StubApiserver::clear_requests);
    for target in
        ["/apis/meter.example/v1/namespaces/n/meters", "/apis/meter.example/v1/meters", "/apis/meter.example/v1"]
    {
        let answer = plane.get(target).await.unwrap();
        assert_eq!((answer.status, answer.text().as_str()), (503, "service unavailable\n"), "{target}");
        assert_eq!(answer.header("retry-after"), None, "{target}: it is the apiserver's own");
        assert!(answer.header("x-kubernetes-pf-flowschema-uid").is_some(), "{target}");
    }
    let by_clients = |apiserver: &StubApiserver| apiserver.client_requests().len();
    assert_eq!(plane.apiservers.iter().map(by_clients).collect::<Vec<_>>(), [3, 0, 0]);
}

#[tokio::test]
async fn what_is_current_here_stays_current_whatever_a_peer_says_of_it() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    plane.discovered_as(1).await.unwrap();
    let new = &plane.apiservers[1];
    becomes_stale(new, "batch", "v1");
    heard(new).await;
    for round in 0..EVERY_WORKER {
        let mut told = merged(&plane).await;
        assert!(discovery::lists(&told, "batch", "v1", "jobs", "status"), "{round}");
        assert_eq!(discovery::version_mut(&mut told, "batch", "v1").unwrap()["freshness"], "Current", "{round}");
        for target in ["/apis/batch/v1/namespaces/n/jobs", "/apis/batch/v1"] {
            let answer = plane.get(target).await.unwrap();
            assert_eq!((answer.status, answer.header("x-served-by").as_deref()), (200, Some("cp-1")), "{target}");
        }
    }
}

#[tokio::test]
async fn a_type_is_not_gone_because_the_only_one_that_has_it_calls_it_stale() {
    let plane = ControlPlane::builder(SIDECAR)
        // Long after anything that this test does.
        .plugin(&json!({"discovery": {"forgetAfter": "10m"}}))
        .settled()
        .await
        .unwrap();
    plane.discovered_as(1).await.unwrap();
    let new = &plane.apiservers[1];
    becomes_stale(new, NEW_GROUP, "v1");
    heard(new).await;
    // It is still served, as it was: only the list is not to be had.
    new.respond_with(|request| {
        let object = || Response::new(200).json(&json!({"kind": "StorageVersionMigration", "servedBy": "cp-2"}));
        request.path().starts_with("/apis/storagemigration.k8s.io/v1/storageversionmigrations").then(object)
    });
    for round in 0..EVERY_WORKER {
        for target in [
            "/apis/storagemigration.k8s.io/v1/storageversionmigrations",
            "/apis/storagemigration.k8s.io/v1/storageversionmigrations/m1",
        ] {
            for method in ["GET", "DELETE"] {
                let answer = plane.client.request(method, target).send().await.unwrap();
                assert!(matches!(answer.status, 200 | 503), "{round} {method} {target}: {} is a lie", answer.status);
            }
        }
        // Neither does discovery claim to be whole without it.
        let mut told = merged(&plane).await;
        let version = discovery::version_mut(&mut told, NEW_GROUP, "v1").map(|version| version["freshness"].clone());
        let is_listed = discovery::lists(&told, NEW_GROUP, "v1", "storageversionmigrations", "");
        let is_marked = version == Some(json!("Stale")) || told.to_string().contains(INCOMPLETE);
        assert!(is_listed || is_marked, "{round}: {told}");
        let group = plane.get("/apis/storagemigration.k8s.io").await.unwrap();
        let is_honest =
            group.status == 503 || group.status == 200 && group.text().contains("storagemigration.k8s.io/v1");
        assert!(is_honest, "{round}: {} {}", group.status, group.text());
        assert_ne!(plane.get("/apis/storagemigration.k8s.io/v1").await.unwrap().status, 404, "{round}");
    }
    // It can say again, and all is as before.
    new.set_version("1.37.2").unwrap();
    new.respond_as_usual();
    plane.discovered_as(1).await.unwrap();
    plane.settled().await.unwrap();
}

#[tokio::test]
async fn the_legacy_list_of_a_version_that_nobody_can_tell_is_a_503_and_not_empty() {
    for (resources, why) in [(Some(json!([])), "empty"), (Some(Value::Null), "null"), (None, "absent")] {
        let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
        plane.discovered_as(1).await.unwrap();
        let new = &plane.apiservers[1];
        new.edit_apis(|apis| {
            discovery::set_freshness(apis, NEW_GROUP, "v1", "Stale");
            let version = discovery::version_mut(apis, NEW_GROUP, "v1").unwrap().as_object_mut().unwrap();
            version.remove("resources");
            version.extend(resources.map(|resources| ("resources".to_owned(), resources)));
        });
        heard(new).await;
        for round in 0..EVERY_WORKER {
            let answer = plane.get("/apis/storagemigration.k8s.io/v1").await.unwrap();
            assert_eq!(answer.status, 503, "{why} {round}: {}", answer.text());
        }
    }
}

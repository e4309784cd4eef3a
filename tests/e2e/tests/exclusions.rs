//! What lives in shared storage is left alone: group-versions of CRDs and aggregated APIs, learned from APIService objects.

use e2e::{ControlPlane, EVERY_WORKER, PATIENCE, SIDECAR};
use lab::{
    StubApiserver,
    apiserver::{AGGREGATED, ApiServiceOrigin, Fault, Response, Scope},
    discovery::{self, Resource},
    eventually,
};
use serde_json::json;

/// Who answers a request on every worker: one answer of `x-served-by`, or of status, that all agree on.
async fn settles_on(plane: &ControlPlane, path: &str, expected: &str, why: &str) {
    eventually(PATIENCE, why, async || {
        for _ in 0..EVERY_WORKER {
            let answer = plane.get(path).await.map_err(|error| format!("{error:#}"))?;
            let server = answer.header("x-served-by").filter(|_| answer.status == 200);
            let seen = server.unwrap_or_else(|| answer.status.to_string());
            if seen != expected {
                return Err(seen);
            }
        }
        Ok(())
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn group_versions_of_crds_are_left_alone_by_group_and_version() {
    let plane = ControlPlane::builder(SIDECAR)
        .plugin(&json!({"exclusions": {"gracePeriod": "2s"}}))
        .prepare(|apiservers| {
            let [local, new, _] = apiservers else { panic!("three apiservers") };
            // v1 is a CRD's: its APIService is everywhere, only cp-2's document lists it already. v2 is built into cp-2.
            let planes = || Resource::new("planes", "Plane");
            new.add_api("hangar.k8s.io", "v1", planes(), ApiServiceOrigin::CustomResource);
            local.add_api_service("hangar.k8s.io", "v1", ApiServiceOrigin::CustomResource);
            new.edit_apis(|apis| discovery::add_resource(apis, "hangar.k8s.io", "v2", planes()));
            new.edit_apis(|apis| {
                discovery::add_resource(apis, "toys.example.com", "v1", Resource::new("widgets", "Widget"))
            });
        })
        .settled()
        .await
        .unwrap();
    let [local, new, _] = &plane.apiservers[..] else { panic!("three apiservers") };
    settles_on(&plane, "/apis/hangar.k8s.io/v2/namespaces/n/planes", "cp-2", "the built-in version to be rerouted")
        .await;
    settles_on(&plane, "/apis/hangar.k8s.io/v1/namespaces/n/planes", "404", "the CRD's version to stay here").await;
    settles_on(&plane, "/apis/toys.example.com/v1/widgets", "404", "a group that nobody builds in to stay here").await;
    new.clear_requests();
    for method in ["GET", "POST"] {
        let request = plane.client.request(method, "/apis/hangar.k8s.io/v1/namespaces/n/planes").body("{}");
        assert_eq!(request.send().await.unwrap().status, 404, "{method}: the local apiserver's own word");
    }
    assert!(new.client_requests().is_empty(), "whatever the polls say");

    // The local apiserver learns of the CRD: the very next request succeeds, for no negative answer is kept.
    local.edit_apis(|apis| discovery::add_resource(apis, "hangar.k8s.io", "v1", Resource::new("planes", "Plane")));
    assert_eq!(plane.get("/apis/hangar.k8s.io/v1/namespaces/n/planes").await.unwrap().status, 200);

    // The CRD is deleted, while cp-2's document still lists it. Only after the grace period is it an ordinary type.
    local.edit_apis(|apis| discovery::remove_version(apis, "hangar.k8s.io", "v1"));
    local.remove_api_service("v1.hangar.k8s.io");
    let polled = |apiserver: &StubApiserver| apiserver.requests_where(|request| request.is_api_services()).len();
    let before = polled(local);
    eventually(PATIENCE, "the list without it", async || polled(local) > before + 1).await.unwrap();
    assert_eq!(plane.get("/apis/hangar.k8s.io/v1/namespaces/n/planes").await.unwrap().status, 404, "still excluded");
    settles_on(&plane, "/apis/hangar.k8s.io/v1/namespaces/n/planes", "cp-2", "the grace period to end").await;
}

#[tokio::test]
async fn a_poller_without_rights_on_api_services_is_told_once_and_names_decide() {
    let plane = ControlPlane::builder(SIDECAR)
        .prepare(|apiservers| {
            for apiserver in apiservers {
                apiserver.fail(Scope::when(|request| request.is_api_services()), Fault::Status(403, None));
            }
            apiservers[1].edit_apis(|apis| {
                discovery::add_resource(apis, "toys.example.com", "v1", Resource::new("widgets", "Widget"))
            });
        })
        .settled()
        .await
        .unwrap();
    let local = &plane.apiservers[0];
    eventually(PATIENCE, "several refusals", async || {
        local.requests_where(|request| request.is_api_services()).len() >= 4
    })
    .await
    .unwrap();
    let told = |log: &str| log.matches("needs the verbs get and list on apiservices in apiregistration.k8s.io").count();
    eventually(PATIENCE, "the log to tell", async || told(&plane.envoy.log()) >= 1).await.unwrap();
    assert_eq!(told(&plane.envoy.log()), 1, "once");
    settles_on(&plane, "/apis/toys.example.com/v1/widgets", "404", "a group that nobody builds in to stay here").await;
}

#[tokio::test]
async fn an_apiserver_of_the_beta_form_is_understood() {
    let plane = ControlPlane::builder(SIDECAR)
        .prepare(|apiservers| {
            // As apiservers before 1.30: v2 is unknown to them.
            let apiserver = &apiservers[1];
            let documents = [("/api", apiserver.api_text()), ("/apis", apiserver.apis_text())];
            apiserver.fail(
                Scope::Polls,
                Fault::answer(move |request| {
                    let body = &documents.iter().find(|(path, _)| *path == request.path()).unwrap().1;
                    let body =
                        String::from_utf8_lossy(body).replace("apidiscovery.k8s.io/v2", "apidiscovery.k8s.io/v2beta1");
                    let content_type = AGGREGATED.replace("v=v2", "v=v2beta1");
                    Response::new(200).header("Content-Type", content_type).body(body)
                }),
            );
        })
        .settled()
        .await
        .unwrap();
    assert_eq!(plane.get("/apis/storage.k8s.io/v1/csinodes/n/status").await.unwrap().status, 200);
}

#[tokio::test]
async fn an_apiserver_that_serves_more_than_it_lists_is_still_asked() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    let [local, new, _] = &plane.apiservers[..] else { panic!("three apiservers") };
    let path = "/apis/silent.k8s.io/v1/things";
    local
        .respond_with(move |request| (request.path() == path).then(|| Response::new(200).json(&json!({"by": "cp-1"}))));
    let answer = plane.get(path).await.unwrap();
    assert_eq!(
        (answer.status, answer.json().unwrap()["by"].as_str()),
        (200, Some("cp-1")),
        "no list is proof of absence"
    );

    new.edit_apis(|apis| discovery::add_resource(apis, "silent.k8s.io", "v1", Resource::new("things", "Thing")));
    settles_on(&plane, path, "cp-2", "the one that lists it to be asked").await;
    new.fail(Scope::path(path), Fault::Reset);
    assert_eq!(plane.get(path).await.unwrap().status, 503, "and nobody else in its place");
}

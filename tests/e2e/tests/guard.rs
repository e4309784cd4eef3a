//! Which 404s reach clients, and what becomes of answers that Envoy makes for an apiserver that it cannot reach.

use e2e::{ControlPlane, GATEWAY, PATIENCE, SIDECAR};
use lab::{
    apiserver::{Fault, Response, Scope},
    client::Answer,
    eventually, fixtures,
};
use serde_json::json;

/// Only `cp-2` serves it, and the group is unknown to the others.
const NEW_GROUP: &str = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";
/// Only `cp-2` serves it, in a group-version that all have.
const NEW_RESOURCE: &str = "/apis/certificates.k8s.io/v1/clustertrustbundles";
/// All serve it.
const COMMON: &str = "/api/v1/namespaces/shop/configmaps";
/// Nobody serves it.
const NOBODY: &str = "/apis/apps/v1/namespaces/shop/nosuch";

/// Asserts that an answer is the filter's 503: a `v1` Status in JSON, with `Retry-After` or without.
fn assert_unavailable(answer: &Answer, retry_after: Option<&str>, why: &str) {
    assert_eq!(answer.status, 503, "{why}: {}", answer.text());
    assert_eq!(answer.header("content-type").as_deref(), Some("application/json"), "{why}");
    assert_eq!(answer.header("retry-after").as_deref(), retry_after, "{why}");
    let status = answer.json().unwrap();
    for (member, expected) in [
        ("kind", json!("Status")),
        ("apiVersion", json!("v1")),
        ("status", json!("Failure")),
        ("reason", json!("ServiceUnavailable")),
        ("code", json!(503)),
    ] {
        assert_eq!(status[member], expected, "{why}: {member}");
    }
}

#[tokio::test]
async fn nothing_that_is_unknown_becomes_a_404() {
    for file in [SIDECAR, GATEWAY] {
        let plane = ControlPlane::builder(file)
            .prepare(|apiservers| {
                for apiserver in apiservers {
                    apiserver.fail(Scope::Discovery, Fault::Status(503, None));
                }
            })
            .start()
            .await
            .unwrap();
        for path in [NEW_GROUP, NEW_RESOURCE, NOBODY] {
            for _ in 0..6 {
                let answer = plane.get(path).await.unwrap();
                let retry = Some("1");
                // In gateway mode the request may land on the one that serves it.
                if answer.status != 200 {
                    assert_unavailable(&answer, retry, &format!("{file} {path}: nothing is known"));
                }
            }
        }
        for (path, expected, why) in [
            (COMMON, 200, "what the apiserver serves passes"),
            ("/api/v1/namespaces/shop/configmaps/nope", 404, "a missing object is a missing object"),
            ("/apis/toys.example.com/v1/widgets", 404, "a group that nobody builds in"),
            ("/healthz", 200, "not a resource"),
        ] {
            assert_eq!(plane.get(path).await.unwrap().status, expected, "{file} {path}: {why}");
        }
        // One of them stays silent: what nobody lists may be served by that one.
        for apiserver in &plane.apiservers[..2] {
            apiserver.heal();
        }
        plane.settled().await.unwrap();
        for _ in 0..6 {
            assert_unavailable(&plane.get(NOBODY).await.unwrap(), Some("1"), &format!("{file}: cp-3 is unknown"));
        }
        plane.apiservers[2].heal();
        eventually(PATIENCE, "nobody's 404 to be believed on all workers", async || {
            for _ in 0..e2e::EVERY_WORKER {
                let status = plane.get(NOBODY).await.unwrap().status;
                if status != 404 {
                    return Err(status);
                }
            }
            Ok(())
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn every_form_of_a_false_404_becomes_a_503_and_every_missing_object_passes() {
    let plane = ControlPlane::builder(SIDECAR).plugin(&json!({"peerProxying": "Disabled"})).start().await.unwrap();
    eventually(PATIENCE, "nobody's 404 to be believed", async || plane.get(NOBODY).await.unwrap().status == 404)
        .await
        .unwrap();
    for (accept, query, agent, why) in [
        ("application/json", "", "kubectl", "JSON"),
        ("application/json", "?pretty=true", "kubectl", "pretty JSON"),
        ("*/*", "", "curl/8.0", "pretty JSON for curl"),
        ("application/vnd.kubernetes.protobuf", "", "kube-controller-manager", "protobuf"),
        ("application/vnd.kubernetes.protobuf,application/json", "", "client-go", "protobuf or JSON"),
        ("application/yaml", "", "kubectl", "YAML"),
        ("application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1", "", "client-go", "metadata"),
        ("text/xml", "", "client", "a type that cannot be met"),
    ] {
        for path in [NEW_GROUP, NEW_RESOURCE] {
            for method in ["GET", "DELETE", "POST", "HEAD"] {
                let target = format!("{path}/x{query}");
                let request =
                    plane.client.request(method, &target).header("accept", accept).header("user-agent", agent);
                let answer = request.send().await.unwrap();
                let why = format!("{method} {target}: {why}");
                assert_eq!((answer.status, answer.header("retry-after").as_deref()), (503, Some("1")), "{why}");
                if method != "HEAD" {
                    assert_unavailable(&answer, Some("1"), &why);
                }
            }
        }
        let through = |client: lab::Client| async move {
            let target = format!("/api/v1/namespaces/default/configmaps/nope{query}");
            client.get(&target).header("accept", accept).header("user-agent", agent).send().await.unwrap()
        };
        let (through, direct) = (through(plane.client.clone()).await, through(plane.direct(0).unwrap()).await);
        assert_eq!((through.status, &through.body), (direct.status, &direct.body), "{why}: the answer passes");
        assert_eq!(through.header("content-type"), direct.header("content-type"), "{why}");
        assert!(through.header("audit-id").is_some(), "{why}: it is the apiserver's own answer");
    }
    let recorded = fixtures::answer("1.34.4", "404.missing-object.json").unwrap();
    let answer = plane.get("/api/v1/namespaces/default/configmaps/nope").await.unwrap();
    assert_eq!(answer.body, recorded);
}

#[tokio::test]
async fn a_404_that_no_apiserver_made_is_not_believed() {
    let plane = ControlPlane::builder(SIDECAR)
        .edit(|config| {
            // A listener that has no route for a host: Envoy's own 404.
            let domains = config.pointer_mut(
                "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/virtual_hosts/0/domains",
            );
            *domains.unwrap() = json!(["kubernetes.default.svc"]);
        })
        .start()
        .await
        .unwrap();
    let no_route = |path: &'static str| plane.client.get(path).header("host", "elsewhere").send();
    assert_unavailable(&no_route(COMMON).await.unwrap(), Some("1"), "no route for a resource");
    assert_eq!(no_route("/version").await.unwrap().status, 404, "not a resource: left alone");

    plane.apiservers[0].respond_with(|request| {
        let path = request.path();
        path.contains("/configmaps/").then(|| Response::bare(404).json(&json!({"made by": "some load balancer"})))
    });
    let foreign = plane.client.get(format!("{COMMON}/x")).header("host", "kubernetes.default.svc").send();
    assert_unavailable(&foreign.await.unwrap(), Some("1"), "no Audit-Id");
    let toys = plane.client.get("/apis/toys.example.com/v1/configmaps/x").header("host", "kubernetes.default.svc");
    assert_unavailable(&toys.send().await.unwrap(), Some("1"), "not even for a group that nobody builds in");
}

#[tokio::test]
async fn an_apiserver_that_cannot_be_reached_is_a_503_and_never_a_404() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    let [local, new, _] = &plane.apiservers[..] else { panic!("three apiservers") };
    let send = async |method: &str, path: &str| {
        let body = if method == "GET" { "" } else { "{}" };
        plane.client.request(method, path).body(body).send().await.unwrap()
    };

    // Cut after the request was read: a write may have been executed.
    for (apiserver, path) in [(local, COMMON), (new, NEW_GROUP)] {
        apiserver.fail(Scope::path(path), Fault::Reset);
        for (method, retry_after) in
            [("GET", Some("1")), ("POST", None), ("PUT", None), ("PATCH", None), ("DELETE", None)]
        {
            apiserver.clear_requests();
            let answer = send(method, path).await;
            assert_unavailable(&answer, retry_after, &format!("{method} {path}: reset"));
            assert_eq!(apiserver.client_requests().len(), 1, "{method} {path}: nothing is replayed");
        }
        apiserver.heal();
    }

    // Cut after the headers: nothing is appended.
    new.fail(Scope::path(NEW_GROUP), Fault::ResetMidBody);
    assert!(plane.get(NEW_GROUP).await.is_err(), "the answer ends where the apiserver's did");
    new.heal();

    // The apiserver's own 503 passes.
    new.fail(Scope::path(NEW_GROUP), Fault::Status(503, Some(7)));
    let own = plane.get(NEW_GROUP).await.unwrap();
    assert_eq!((own.status, own.header("retry-after").as_deref()), (503, Some("7")));
    assert!(own.header("audit-id").is_some());
    new.heal();

    // Refused: no write can have been executed. The last document still counts, however long the peer is gone.
    new.stop().await;
    for method in ["GET", "POST", "DELETE"] {
        assert_unavailable(&send(method, NEW_GROUP).await, Some("1"), &format!("{method}: refused"));
    }
    assert_eq!(plane.get(COMMON).await.unwrap().status, 200, "the rest of the cluster works");
    new.restart().await.unwrap();
    plane.settled().await.unwrap();

    local.stop().await;
    for path in [COMMON, "/version"] {
        assert_unavailable(&send("POST", path).await, Some("1"), &format!("{path}: local refuses"));
    }
}

#[tokio::test]
async fn clusters_that_envoy_does_not_have_or_does_not_trust_are_a_503() {
    let plane = ControlPlane::builder(SIDECAR)
        .edit(|config| {
            let text = config.to_string();
            // The action for cp-2 names a cluster that does not exist, the one of cp-3 expects another certificate.
            let text = text.replacen(r#""cluster":"cp-2","#, r#""cluster":"nosuch","#, 1);
            *config = serde_json::from_str(&text).unwrap();
            let clusters = config.pointer_mut("/static_resources/clusters").unwrap().as_array_mut().unwrap();
            let third = clusters.iter_mut().find(|cluster| cluster["name"] == "cp-3").unwrap();
            let text = third.to_string().replace("kubernetes.default.svc", "someone.else.svc");
            *third = serde_json::from_str(&text).unwrap();
        })
        .versions(["1.34.4", "1.37.2", "1.37.2-api-all"])
        .start()
        .await
        .unwrap();
    let trust = "/apis/internal.apiserver.k8s.io/v1alpha1/storageversions";
    for (path, why) in
        [(trust, "cp-3 shows a certificate that is not trusted"), (NEW_GROUP, "no such cluster, or the same")]
    {
        eventually(PATIENCE, "a reroute that fails", async || {
            let answer = plane.get(path).await.unwrap();
            assert_unavailable(&answer, Some("1"), why);
            answer.text().contains("cannot be reached")
        })
        .await
        .unwrap();
    }
}

#[tokio::test]
async fn a_route_that_is_missing_is_named_and_does_no_harm() {
    let plane = ControlPlane::builder(SIDECAR)
        .edit(|config| {
            let plugin = config.pointer_mut(
                "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/route_config/cluster_specifier_plugins/0",
            );
            let map = plugin.unwrap().pointer_mut(
                "/extension/typed_config/cluster_matcher/matcher_tree/exact_match_map/map",
            );
            map.unwrap().as_object_mut().unwrap().remove("cp-2");
        })
        .start()
        .await
        .unwrap();
    eventually(PATIENCE, "the missing route to be logged", async || {
        assert_unavailable(&plane.get(NEW_GROUP).await.unwrap(), Some("1"), "cp-1 answered in cp-2's place");
        let log = plane.envoy.log();
        let line = log.lines().find(|line| line.contains("was answered by cluster")).map(str::to_owned);
        line.filter(|line| line.contains("meant for cp-2") && line.contains("\"cp-1\""))
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_redirect_of_a_rerouted_request_does_not_lead_past_the_proxy() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    for status in [301, 302, 303, 307, 308] {
        for apiserver in &plane.apiservers[..2] {
            let redirect = move || Response::new(status).header("Location", "https://192.0.2.1/elsewhere");
            apiserver.respond_with(move |request| request.path().ends_with("/moved").then(redirect));
        }
        let rerouted = plane.get(&format!("{NEW_GROUP}/moved")).await.unwrap();
        assert_unavailable(&rerouted, None, &format!("{status} from a peer"));
        let local = plane.get(&format!("{COMMON}/moved")).await.unwrap();
        assert_eq!(local.status, status, "the local apiserver's own redirect passes");
    }
}

#[tokio::test]
async fn an_apiserver_that_fails_its_polls_keeps_what_it_serves() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    let [_, new, _] = &plane.apiservers[..] else { panic!("three apiservers") };
    for (fault, why) in [
        (Fault::Status(500, None), "500"),
        (Fault::Status(429, Some(1)), "429"),
        (Fault::Status(403, None), "403"),
        (Fault::Reset, "reset"),
        (Fault::ResetMidBody, "cut in the middle"),
        (Fault::CutBody, "cut short"),
        (Fault::EmptyDocument, "an empty document"),
        (Fault::WrongKind, "another kind"),
        (Fault::NotJson, "no JSON"),
        (Fault::NotUtf8, "no UTF-8"),
        (Fault::Oversized(20_000_000), "too large"),
    ] {
        new.clear_requests();
        new.fail(Scope::Discovery, fault);
        // Two workers and the main thread poll for themselves, two documents each: all have failed at least once.
        eventually(PATIENCE, "polls to fail", async || new.polls().len() >= 12).await.unwrap();
        for _ in 0..6 {
            let answer = plane.get(NEW_GROUP).await.unwrap();
            assert_eq!((answer.status, answer.header("x-served-by").as_deref()), (200, Some("cp-2")), "{why}");
        }
        new.heal();
    }
    let log = plane.envoy.log();
    for expected in ["discovery of cp-2 (/apis) fails: status 500", "more than discovery.maxDocumentBytes", "no group"]
    {
        assert!(log.contains(expected), "{expected:?} is not in the log:\n{log}");
    }
}

#[tokio::test]
async fn what_may_have_been_executed_is_never_offered_for_another_try() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    let local = &plane.apiservers[0];
    let pods = "/api/v1/namespaces/shop/pods/p1";
    let exec = format!("{pods}/exec");
    local.fail(Scope::path(&exec), Fault::Reset);
    let upgrade = plane.client.get(format!("{exec}?command=rm")).header("connection", "Upgrade");
    let upgrade = upgrade.header("upgrade", "websocket").header("sec-websocket-version", "13");
    let answer = upgrade.header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==").send().await.unwrap();
    assert_unavailable(&answer, None, "a GET that runs a command");
    let proxied = "/api/v1/namespaces/shop/services/s/proxy/transfer";
    local.fail(Scope::path(proxied), Fault::Reset);
    assert_unavailable(&plane.get(proxied).await.unwrap(), None, "a GET that a backend may act upon");
    local.heal();

    // A backend's own 404, which did not pass through an apiserver's handlers: it has seen the request.
    local.respond_with(|request| request.path().starts_with("/api/v1/namespaces/shop/").then(|| Response::bare(404)));
    for (method, path, retry_after) in [
        ("POST", proxied, None),
        ("POST", &exec, None),
        ("POST", COMMON, None),
        ("GET", proxied, None),
        ("GET", COMMON, Some("1")),
    ] {
        let answer = plane.client.request(method, path).send().await.unwrap();
        assert_unavailable(&answer, retry_after, &format!("{method} {path}"));
        assert_eq!(answer.header("cache-control").as_deref(), Some("no-cache, private"));
    }
}

#[tokio::test]
async fn a_default_cluster_that_is_not_the_local_apiservers_is_told_and_does_no_harm() {
    // A sidecar that was copied to another node with half of the edits, and one before a balancer.
    for (file, local) in [(SIDECAR, "cp-2"), (GATEWAY, "cp-2")] {
        let plugin = json!({"local": local, "identity": {"frontProxyCluster": null}});
        let plane = ControlPlane::builder(file).plugin(&plugin).start().await.unwrap();
        eventually(PATIENCE, "the wrong route to be logged", async || {
            let answer = plane.get(NEW_GROUP).await.unwrap();
            assert_ne!(answer.status, 404, "{file}: cp-2 serves it, another one answered");
            plane.envoy.log().contains("a request meant for cp-2 was answered by cluster").then_some(())
        })
        .await
        .unwrap();
        for _ in 0..24 {
            assert_ne!(plane.get(NEW_RESOURCE).await.unwrap().status, 404, "{file}");
            assert_eq!(plane.get(&format!("{COMMON}/nope")).await.unwrap().status, 404, "{file}: a missing object");
        }
    }
}

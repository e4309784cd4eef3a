//! Discovery of the whole cluster when something is wrong: apiservers that do not answer, workers that die, odd requests,
//! older Envoys.
//!
//! `cp-1` runs 1.34.4, `cp-2` 1.37.2 and `cp-3` 1.36.3, so that the merge of `/apis` is what `cp-2` says.

use std::time::{Duration, Instant};

use e2e::{
    ControlPlane, EVERY_WORKER, GATEWAY, GATEWAY_HEADER, PATIENCE, SIDECAR, TRAP, merge, plugin_configuration, trapping,
};
use lab::{
    apiserver::{AGGREGATED, ApiServiceOrigin, Fault, Response, Scope},
    client::Answer,
    discovery::{self, Resource},
    envoy::EnvoyBuilder,
    eventually,
};
use serde_json::{Value, json};

const NEW_GROUP: &str = "storagemigration.k8s.io";
const INCOMPLETE: &str = "incomplete.mixed-version-proxy";

async fn settled() -> ControlPlane {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    plane.discovered_as(1).await.unwrap();
    plane
}

#[tokio::test]
async fn older_envoys_tell_the_same() {
    let releases: [fn(EnvoyBuilder) -> EnvoyBuilder; 2] =
        [|envoy| envoy.version("1.36.2"), |envoy| envoy.version("1.39.3")];
    for (file, envoy) in
        [SIDECAR, GATEWAY, GATEWAY_HEADER].into_iter().flat_map(|file| releases.map(|envoy| (file, envoy)))
    {
        let plane = ControlPlane::builder(file).envoy(envoy).settled().await.unwrap();
        let version = plane.envoy.admin_get("/server_info").await.unwrap().json().unwrap()["version"].to_string();
        let why = format!("{file} on {version}");
        plane.discovered_as(1).await.unwrap();
        let http2 = plane.client.http2().await.unwrap();
        let new = &plane.apiservers[1];
        for _ in 0..EVERY_WORKER {
            let ask = |method: &str| plane.client.request(method, "/apis").header("accept", AGGREGATED);
            for answer in [ask("GET").send().await.unwrap(), ask("GET").send_over(&http2).await.unwrap()] {
                assert_eq!((answer.status, &answer.body), (200, &new.apis_text()), "{why}");
                assert_eq!(answer.header("etag"), Some(new.apis_etag()), "{why}");
            }
            let condition = ask("GET").header("if-none-match", new.apis_etag()).send().await.unwrap();
            assert_eq!((condition.status, condition.body.len()), (304, 0), "{why}");
            let head = ask("HEAD").send().await.unwrap();
            assert_eq!(head.header("content-length"), Some(new.apis_text().len().to_string()), "{why}");
            assert_eq!(plane.get("/apis/storagemigration.k8s.io/v1").await.unwrap().status, 200, "{why}");
        }
        for apiserver in &plane.apiservers {
            let ships = Resource::new("ships", "Ship");
            apiserver.add_api("dock.example.com", "v1", ships, ApiServiceOrigin::CustomResource);
        }
        assert!(plane.aggregated("/apis").await.unwrap().text().contains("dock.example.com"), "{why}");
    }
}

#[tokio::test]
async fn nothing_but_kubernetes_own_headers_comes_with_it() {
    let plane = settled().await;
    for (target, accept) in
        [("/apis", AGGREGATED), ("/apis", "application/json"), ("/apis/storagemigration.k8s.io", "*/*")]
    {
        let answer = plane.client.get(target).header("accept", accept).send().await.unwrap();
        let known = [
            "audit-id",
            "cache-control",
            "content-length",
            "content-type",
            "date",
            "etag",
            "vary",
            "x-kubernetes-pf-flowschema-uid",
            "x-kubernetes-pf-prioritylevel-uid",
        ];
        for (name, _) in &answer.headers {
            let name = String::from_utf8_lossy(name).to_lowercase();
            assert!(known.contains(&name.as_str()), "{target} {accept}: {name}");
            assert_eq!(answer.header_values(&name).len(), 1, "{target} {accept}: {name}");
        }
    }
    eventually(PATIENCE, "a line in the access log", async || {
        plane.envoy.stdout().contains("GET /apis HTTP/1.1 code=200 details=mixed_version_proxy_discovery")
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn one_path_in_many_spellings_is_one_path() {
    let plane = settled().await;
    let new = &plane.apiservers[1];
    for target in ["/apis?timeout=32s", "/api%73", "/%61pis?x=%zz", "http://any.host/apis"] {
        let answer = plane.aggregated(target).await.unwrap();
        assert_eq!((answer.status, &answer.body), (200, &new.apis_text()), "{target}");
    }
    for target in ["/api/", "/api?timeout=32s"] {
        assert_eq!(plane.aggregated(target).await.unwrap().body, new.api_text(), "{target}");
    }
    for target in [
        "/apis/storagemigration%2Ek8s.io/v1",
        "/apis/storagemigration.k8s.io%2Fv1",
        "/apis/storagemigration.k8s.io/v1?x=y",
    ] {
        let answer = plane.get(target).await.unwrap();
        assert_eq!(
            (answer.status, answer.json().unwrap()["kind"].as_str()),
            (200, Some("APIResourceList")),
            "{target}"
        );
    }
    for target in ["//apis", "/apis//", "/apis/./", "/apis;x"] {
        let answer = plane.aggregated(target).await.unwrap();
        assert!(answer.body != new.apis_text(), "{target}: an apiserver does not know it either");
        assert_eq!(answer.header("x-served-by").as_deref(), Some("cp-1"), "{target}");
    }
}

#[tokio::test]
async fn head_is_get_without_the_body() {
    let plane = settled().await;
    let mut connection = plane.client.connect().await.unwrap();
    let http2 = plane.client.http2().await.unwrap();
    for target in [
        "/apis",
        "/apis/",
        "/apis/storagemigration.k8s.io",
        "/apis/storagemigration.k8s.io/v1",
        "/apis/storage.k8s.io/v1",
    ] {
        let get = plane.get(target).await.unwrap();
        let head = || plane.client.request("HEAD", target).header("accept", "application/json");
        for (head, protocol) in [
            (head().send_on(&mut connection).await.unwrap(), "HTTP/1.1"),
            (head().send_over(&http2).await.unwrap(), "HTTP/2"),
        ] {
            assert_eq!((head.status, head.body.len()), (200, 0), "{target} {protocol}");
            assert_eq!(head.header("content-length"), Some(get.body.len().to_string()), "{target} {protocol}");
            assert_eq!(head.header("content-type"), get.header("content-type"), "{target} {protocol}");
        }
    }
    let conditional = plane.client.get("/apis").header("accept", "application/json").header("if-none-match", "*");
    assert_eq!(conditional.send().await.unwrap().status, 200, "the legacy form has no tag");
}

#[tokio::test]
async fn a_local_apiserver_that_is_down_is_said_to_be_down() {
    let plane = settled().await;
    plane.apiservers[0].stop().await;
    for (target, accept) in [
        ("/apis", AGGREGATED),
        ("/api", AGGREGATED),
        ("/apis", "application/json"),
        ("/apis/storagemigration.k8s.io/v1", "application/json"),
        ("/openapi/v3", "application/json"),
    ] {
        let answer = plane.client.get(target).header("accept", accept).send().await.unwrap();
        assert_eq!(
            (answer.status, answer.json().unwrap()["reason"].as_str()),
            (503, Some("ServiceUnavailable")),
            "{target}"
        );
        assert_eq!(answer.header("retry-after").as_deref(), Some("1"), "{target}");
    }
    plane.apiservers[0].restart().await.unwrap();
    plane.discovered_as(1).await.unwrap();
}

#[tokio::test]
async fn who_waits_for_an_apiserver_that_hangs_waits_for_the_timeout_and_no_longer() {
    let plane = ControlPlane::builder(SIDECAR)
        .plugin(&json!({"discovery": {"refreshInterval": "1h", "timeout": "2s"}}))
        .settled()
        .await
        .unwrap();
    plane.discovered_as(1).await.unwrap();
    let known = plane.apiservers[1].apis_text();
    let old = &plane.apiservers[0];
    old.fail(Scope::Polls, Fault::Hang);
    old.add_api("hangar.example.com", "v1", Resource::new("planes", "Plane"), ApiServiceOrigin::CustomResource);
    // Clients that go away meanwhile harm nobody.
    let impatient = plane.client.clone().with_timeout(Duration::from_millis(100));
    assert!(impatient.get("/apis").header("accept", AGGREGATED).send().await.is_err(), "it waits");
    let start = Instant::now();
    for _ in 0..4 {
        let answer = plane.aggregated("/apis").await.unwrap();
        assert_eq!(answer.status, 200);
        // What was known, and that it is known to be outdated.
        let items = |text: &[u8]| serde_json::from_slice::<Value>(text).unwrap()["items"].as_array().unwrap().clone();
        let (told, known) = (items(&answer.body), items(&known));
        assert_eq!(told[..known.len()], known);
        assert_eq!(told[known.len()]["metadata"]["name"], "incomplete.mixed-version-proxy");
    }
    assert!(start.elapsed() < Duration::from_secs(8), "{:?}", start.elapsed());
    old.heal();
    plane.discovered("the local news", |answer| answer.text().contains("hangar.example.com")).await.unwrap();
}

#[tokio::test]
async fn a_worker_that_traps_comes_back_and_tells_the_same() {
    let plane = ControlPlane::builder(SIDECAR)
        .edit(trapping)
        .plugin(&json!({"discovery": {"refreshInterval": "10m"}}))
        .settled()
        .await
        .unwrap();
    plane.discovered_as(1).await.unwrap();
    for round in 0..4 {
        let trapped = plane.client.get("/api/v1/pods").header(TRAP, "now").send().await.unwrap();
        assert_eq!(trapped.status, 503, "the request that hit the defect");
        let start = Instant::now();
        eventually(PATIENCE, "all workers to tell the same again", async || {
            for _ in 0..EVERY_WORKER {
                let answer = plane.aggregated("/apis").await.unwrap();
                assert!(!answer.text().contains(INCOMPLETE), "{round}: it was known");
                if answer.body != plane.apiservers[1].apis_text() {
                    return Err((answer.status, answer.text()));
                }
            }
            Ok(())
        })
        .await
        .unwrap();
        assert!(start.elapsed() < Duration::from_secs(5), "round {round}: {:?}", start.elapsed());
    }
}

#[tokio::test]
async fn a_local_apiserver_that_the_poller_may_not_ask_is_unknown() {
    let plane = ControlPlane::builder(SIDECAR)
        .prepare(|apiservers| {
            apiservers[0].fail(Scope::Polls, Fault::Status(403, None));
        })
        .start()
        .await
        .unwrap();
    plane.discovered("the mark", |answer| answer.status == 200 && answer.text().contains(INCOMPLETE)).await.unwrap();
    let answer = plane.aggregated("/apis").await.unwrap();
    assert!(answer.text().contains(NEW_GROUP));
    let start = Instant::now();
    for _ in 0..EVERY_WORKER {
        assert_eq!(plane.aggregated("/apis").await.unwrap().status, 200);
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}: each waits for a poll that fails", start.elapsed());
}

#[tokio::test]
async fn a_resource_that_is_gone_from_all_is_missed_for_a_while_and_a_custom_one_is_not() {
    let plane = ControlPlane::builder(SIDECAR)
        .plugin(&json!({"discovery": {"forgetAfter": "4s"}}))
        .prepare(|apiservers| {
            for apiserver in apiservers {
                let planes = Resource::new("planes", "Plane");
                apiserver.add_api("hangar.example.com", "v1", planes, ApiServiceOrigin::CustomResource);
            }
        })
        .settled()
        .await
        .unwrap();
    plane.discovered_as(1).await.unwrap();
    for apiserver in &plane.apiservers {
        apiserver.edit_apis(|apis| discovery::remove_group(apis, "hangar.example.com"));
    }
    plane.discovered_as(1).await.unwrap();
    let new = &plane.apiservers[1];
    new.edit_apis(|apis| discovery::remove_resource(apis, "certificates.k8s.io", "v1", "clustertrustbundles"));
    plane.discovered("the mark", |answer| answer.text().contains(INCOMPLETE)).await.unwrap();
    plane.discovered_as(1).await.unwrap();
    new.edit_apis(|apis| discovery::remove_subresource(apis, "storage.k8s.io", "v1", "csinodes", "status"));
    plane.discovered("the mark of a subresource", |answer| answer.text().contains(INCOMPLETE)).await.unwrap();
    plane.discovered_as(1).await.unwrap();
}

/// Clients must never see less than what was there all the time, however often apiservers change.
#[tokio::test]
async fn while_apiservers_change_nothing_that_stays_is_ever_missing() {
    let plane = settled().await;
    let until = Instant::now() + Duration::from_secs(6);
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..8 {
        let client = plane.client.clone();
        let accept = if number % 2 == 0 { AGGREGATED } else { "application/json" };
        clients.spawn(async move {
            let mut seen: Vec<Answer> = Vec::new();
            while Instant::now() < until {
                seen.push(client.get("/apis").header("accept", accept).send().await.unwrap());
            }
            seen
        });
    }
    let mut round = 0;
    while Instant::now() < until {
        round += 1;
        let group = format!("hangar{}.example.com", round % 5);
        for apiserver in &plane.apiservers {
            if round % 10 < 5 {
                let planes = Resource::new("planes", "Plane");
                apiserver.add_api(&group, "v1", planes, ApiServiceOrigin::CustomResource);
            } else {
                apiserver.edit_apis(|apis| discovery::remove_group(apis, &group));
            }
            tokio::task::yield_now().await;
        }
        eventually(PATIENCE, "a client to ask", async || !plane.apiservers[0].client_requests().is_empty())
            .await
            .unwrap();
        plane.apiservers[0].clear_requests();
        assert!(plane.aggregated("/apis").await.unwrap().text().contains(&group) == (round % 10 < 5), "{round}");
    }
    let mut answers = 0;
    while let Some(seen) = clients.join_next().await {
        for answer in seen.unwrap() {
            assert_eq!(answer.status, 200, "{}", answer.text());
            assert!(answer.text().contains(NEW_GROUP), "{}", answer.text());
            assert!(!answer.text().contains(INCOMPLETE), "{}", answer.text());
            answers += 1;
        }
    }
    assert!(answers > 100, "only {answers}");
    println!("{answers} answers, {round} changes");
}

#[tokio::test]
async fn an_upgrade_and_its_rollback_are_told_at_once_and_honestly() {
    let plane = settled().await;
    let old = &plane.apiservers[0];
    old.set_version("1.37.2").unwrap();
    assert_eq!(plane.aggregated("/apis").await.unwrap().body, old.apis_text());
    old.set_version("1.34.4").unwrap();
    for _ in 0..EVERY_WORKER {
        let answer = plane.aggregated("/apis").await.unwrap();
        assert_eq!(answer.body, plane.apiservers[1].apis_text());
    }
    // Nobody has it any more: that is said, whoever is asked.
    old.set_version("1.37.2").unwrap();
    assert_eq!(plane.aggregated("/apis").await.unwrap().status, 200);
    plane.apiservers[1].set_version("1.36.3").unwrap();
    old.set_version("1.36.3").unwrap();
    plane.discovered("the mark", |answer| answer.text().contains(INCOMPLETE)).await.unwrap();
}

#[tokio::test]
async fn an_answer_with_another_tag_than_the_poll_s_is_not_asked_for_ever() {
    // Something between that changes each answer's tag: who asks is answered, with what the polls have found.
    let plane = settled().await;
    let old = &plane.apiservers[0];
    let text = old.apis_text();
    old.respond_with(move |request| {
        let answer = || {
            let head =
                Response::new(200).header("Content-Type", AGGREGATED).header("Etag", format!("\"{}\"", request.id));
            head.header("Vary", "Accept").header("Cache-Control", "public").chunked(text.clone())
        };
        (&request.target[..] == b"/apis").then(answer)
    });
    let polled = old.polls().len();
    for round in 0..EVERY_WORKER {
        let answer = plane.aggregated("/apis").await.unwrap();
        assert_eq!((answer.status, &answer.body), (200, &plane.apiservers[1].apis_text()), "{round}");
    }
    let asked = old.polls().len() - polled;
    println!("{asked} polls for {EVERY_WORKER} requests");
    assert!(asked <= 3 * EVERY_WORKER, "{asked}");
}

#[tokio::test]
async fn who_knows_nothing_does_not_say_that_there_is_nothing() {
    // The poller's credential has no rights, anywhere; clients have theirs.
    let plane = ControlPlane::builder(SIDECAR)
        .prepare(|apiservers| {
            for apiserver in apiservers {
                apiserver.fail(Scope::Polls, Fault::Status(403, None));
            }
        })
        .start()
        .await
        .unwrap();
    eventually(PATIENCE, "all to be tried", async || {
        plane.apiservers.iter().all(|apiserver| apiserver.polls().len() >= 4)
    })
    .await
    .unwrap();
    for _ in 0..EVERY_WORKER {
        for (target, accept, built_in) in [
            ("/api", AGGREGATED, "\"pods\""),
            ("/api", "application/json", "\"v1\""),
            ("/api/v1", "application/json", "\"pods\""),
            ("/apis/apps/v1", "application/json", "\"deployments\""),
            ("/apis", AGGREGATED, "\"deployments\""),
            ("/apis", "application/json", "\"apps\""),
        ] {
            let answer = plane.client.get(target).header("accept", accept).send().await.unwrap();
            let is_honest = answer.status == 503 || answer.text().contains(built_in);
            assert!(is_honest, "{target} {accept}: {} {}", answer.status, answer.text());
        }
    }
}

/// Replaces the running listeners by ones whose plugin configuration has these changes.
async fn push(plane: &ControlPlane, changes: &Value) {
    let mut config = plane.config.clone();
    merge(plugin_configuration(config.value_mut()), changes);
    let listeners = config.value()["static_resources"]["listeners"].clone();
    plane.envoy.push_listeners(listeners.as_array().unwrap()).await.unwrap();
}

#[tokio::test]
async fn another_configuration_is_followed_and_the_same_one_leaves_no_gap() {
    let plane = ControlPlane::builder(SIDECAR).envoy(EnvoyBuilder::listeners_by_lds).settled().await.unwrap();
    plane.discovered_as(1).await.unwrap();
    let apiserver = |name: &str| {
        let (poll, trusted) = (format!("{name}-poll"), format!("{name}-trusted"));
        json!({"name": name, "cluster": name, "discoveryCluster": poll, "frontProxyCluster": trusted})
    };
    let two = json!({"apiservers": [apiserver("cp-1"), apiserver("cp-3")]});
    let three = json!({"apiservers": [apiserver("cp-1"), apiserver("cp-2"), apiserver("cp-3")]});
    for (changes, apiserver) in
        [(&two, 2), (&three, 1), (&json!({"peerAggregatedDiscovery": "Disabled"}), 0), (&json!({}), 1)]
    {
        push(&plane, changes).await;
        plane
            .discovered(&changes.to_string(), |answer| {
                assert!(matches!(answer.status, 200 | 503), "{}", answer.status);
                answer.body == plane.apiservers[apiserver].apis_text()
            })
            .await
            .unwrap();
    }
    // Something else of the listener is another: nothing that is told changes, not for a moment.
    let mut config = plane.config.clone();
    let name = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/stat_prefix";
    *config.value_mut().pointer_mut(name).unwrap() = "other".into();
    let listeners = config.value()["static_resources"]["listeners"].clone();
    plane.envoy.push_listeners(listeners.as_array().unwrap()).await.unwrap();
    for round in 0..10 * EVERY_WORKER {
        let answer = plane.aggregated("/apis").await.unwrap();
        assert_eq!((answer.status, &answer.body), (200, &plane.apiservers[1].apis_text()), "{round}");
    }
}

#[tokio::test]
async fn a_peer_that_was_upgraded_since_its_last_poll_is_listed_as_it_is() {
    const ADDED: &str = "hangar.k8s.io";
    for file in [SIDECAR, GATEWAY, GATEWAY_HEADER] {
        let hourly = json!({"discovery": {"refreshInterval": "1h"}});
        let plane = ControlPlane::builder(file).plugin(&hourly).settled().await.unwrap();
        plane.discovered_as(1).await.unwrap();
        let peer = &plane.apiservers[2];
        let added = json!({"metadata": {"name": ADDED}, "versions": [{"version": "v1", "freshness": "Current",
            "resources": [{"resource": "planes", "responseKind": {"group": "", "version": "", "kind": "Plane"},
                "scope": "Cluster", "singularResource": "plane", "verbs": ["get", "list"]}]}]});
        peer.edit_apis(move |apis| apis["items"].as_array_mut().unwrap().push(added));
        // Nobody asks it again within 100 ms.
        eventually(PATIENCE, "a group-version that only the peer has", async || {
            let answer = plane.get(&format!("/apis/{ADDED}/v1")).await;
            answer.is_ok_and(|answer| answer.status == 200 && answer.text().contains("planes"))
        })
        .await
        .unwrap();
        plane.discovered(ADDED, |answer| answer.text().contains(ADDED)).await.unwrap();
        assert_eq!(plane.get(&format!("/apis/{ADDED}/v1/planes")).await.unwrap().status, 200, "{file}");
        peer.set_version("1.36.3").unwrap();
        plane.discovered("what has vanished", |answer| answer.text().contains(INCOMPLETE)).await.unwrap();
        // One that has died tells nothing more: its last word counts.
        peer.stop().await;
        plane.discovered("the others' word", |answer| answer.status == 200).await.unwrap();
    }
}

//! Discovery of the whole cluster, on a real Envoy: what a client of any form is told at the address of any apiserver.
//!
//! `cp-1` runs 1.34.4, `cp-2` 1.37.2 and `cp-3` 1.36.3 unless a test says otherwise, so that the merge of `/apis` is what
//! `cp-2` says, byte for byte.

use anyhow::Result;
use e2e::{ControlPlane, EVERY_WORKER, GATEWAY, PATIENCE, SIDECAR};
use lab::{
    Client,
    apiserver::{AGGREGATED, ApiServiceOrigin, Fault, Gate, LOOP_HEADER, Request, Response, Scope, etag},
    client::Answer,
    discovery::{self, Resource},
    eventually, fixtures,
};
use serde_json::{Value, json};

const PROTOBUF: &str = "application/vnd.kubernetes.protobuf;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
const NOPEER: &str = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList;profile=nopeer";
/// Only `cp-2` has it.
const NEW_GROUP: &str = "storagemigration.k8s.io";

/// The three forms in which the apiservers are asked when a client wants a merged root.
fn is_poll_accept(request: &Request) -> bool {
    request.header("accept").is_some_and(|accept| accept.starts_with(NOPEER) && accept.contains("q=0.9"))
}

/// The client's own requests for a root that reached an apiserver.
fn roots(requests: Vec<Request>) -> Vec<Request> {
    requests.into_iter().filter(|request| matches!(&request.target[..], b"/apis" | b"/api")).collect()
}

fn groups(document: &Value) -> Vec<String> {
    let items = document["items"].as_array().into_iter().flatten();
    items.map(|item| item["metadata"]["name"].as_str().unwrap_or_default().to_owned()).collect()
}

fn legacy_groups(document: &Value) -> Vec<String> {
    let groups = document["groups"].as_array().into_iter().flatten();
    groups.map(|group| group["name"].as_str().unwrap_or_default().to_owned()).collect()
}

/// Quoted upper-hex SHA-512 of what was served; but where one apiserver says all, its own tag.
fn upper_hex_sha512(bytes: &[u8]) -> String {
    use sha2::{Digest, Sha512};
    let hex: String = Sha512::digest(bytes).iter().map(|byte| format!("{byte:02X}")).collect();
    format!("\"{hex}\"")
}

async fn get(client: &Client, target: &str, accept: &str) -> Answer {
    client.get(target).header("accept", accept).send().await.unwrap()
}

async fn settled() -> ControlPlane {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    plane.discovered_as(1).await.unwrap();
    plane
}

#[tokio::test]
async fn the_oldest_apiserver_s_sidecar_tells_what_the_newest_tells() {
    let plane = settled().await;
    let [old, new, _] = &plane.apiservers[..] else { panic!("three apiservers") };
    old.clear_requests();
    for (target, text, tag) in [("/apis", new.apis_text(), new.apis_etag()), ("/api", new.api_text(), new.api_etag())] {
        let answer = plane.aggregated(target).await.unwrap();
        assert_eq!((answer.status, answer.text()), (200, String::from_utf8_lossy(&text).into_owned()), "{target}");
        for (name, expected) in [
            ("content-type", AGGREGATED),
            ("etag", &tag),
            ("vary", "Accept"),
            ("cache-control", "public"),
            ("content-length", &text.len().to_string()),
            ("x-kubernetes-pf-flowschema-uid", "d85f51d6-832f-43a8-a17d-419ef9d60f1c"),
            ("x-kubernetes-pf-prioritylevel-uid", "75f0d188-3ad5-43ff-a536-751170c199d2"),
        ] {
            assert_eq!(answer.header_values(name), [expected], "{target} {name}");
        }
        assert!(answer.header("audit-id").is_some_and(|id| id.len() == 36), "{target}: {:?}", answer.headers);
        let [ref asked] = roots(old.client_requests())[..] else { panic!("{target}: {:?}", old.client_requests()) };
        assert!(is_poll_accept(asked), "{asked:?}");
        let own = if target == "/apis" { old.apis_etag() } else { old.api_etag() };
        assert_eq!(asked.header_values("if-none-match"), [own], "{target}");
        assert_eq!(asked.header(LOOP_HEADER), None, "it stays here");
        old.clear_requests();
    }
    assert!(roots(new.client_requests()).is_empty());
}

#[tokio::test]
async fn what_an_apiserver_says_beside_its_document_reaches_the_client() {
    let plane = settled().await;
    let tag = plane.apiservers[0].apis_etag();
    plane.apiservers[0].respond_with(move |request| {
        let answer = || {
            let answer = Response::new(304).header("Etag", tag.as_str()).header("Warning", "299 - \"old\"");
            answer.header("Audit-Id", "00000000-0000-4000-a000-000000000000")
        };
        (&request.target[..] == b"/apis" && !request.is_poll()).then(answer)
    });
    for condition in [None, Some("*")] {
        let mut request = plane.client.get("/apis").header("accept", AGGREGATED);
        if let Some(condition) = condition {
            request = request.header("if-none-match", condition);
        }
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status, if condition.is_some() { 304 } else { 200 });
        assert_eq!(answer.header_values("warning"), ["299 - \"old\""], "{condition:?}");
        assert_eq!(answer.header_values("audit-id"), ["00000000-0000-4000-a000-000000000000"], "{condition:?}");
    }
}

#[tokio::test]
async fn each_accept_header_gets_its_form() {
    let plane = settled().await;
    let [old, new, _] = &plane.apiservers[..] else { panic!("three apiservers") };
    let direct = plane.direct(0).unwrap();
    let merged = String::from_utf8(new.apis_text().to_vec()).unwrap();
    let own = String::from_utf8(old.apis_text().to_vec()).unwrap();
    let legacy = String::from_utf8(fixtures::discovery("1.37.2", "apis.legacy.json").unwrap()).unwrap();
    let v2beta1 = AGGREGATED.replace("v=v2;", "v=v2beta1;");
    let shuffled = "application/json; profile=nopeer; as=APIGroupDiscoveryList; v=v2; g=apidiscovery.k8s.io";
    for (path, accept, expected) in [
        ("/apis", AGGREGATED.to_owned(), "merged"),
        ("/apis", format!("{AGGREGATED};profile=zzz"), "merged"),
        ("/apis", format!("{AGGREGATED},{v2beta1},application/json"), "merged"),
        ("/apis", format!("application/json,{AGGREGATED};q=0.1"), "merged"),
        ("/apis", format!("{PROTOBUF},{AGGREGATED};q=0.5"), "merged"),
        ("/apis", format!("{NOPEER},{AGGREGATED}"), "own"),
        ("/apis", shuffled.to_owned(), "own"),
        ("/apis", format!("{AGGREGATED};profile=zzz;profile=nopeer"), "own"),
        ("/apis", v2beta1.clone(), "refused"),
        ("/apis", PROTOBUF.to_owned(), "refused"),
        ("/apis", "application/yaml".to_owned(), "refused"),
        ("/apis", AGGREGATED.replace("json", "cbor"), "refused"),
        ("/apis", AGGREGATED.replace("v=v2", "v=\"v2\""), "refused"),
        ("/apis/", AGGREGATED.to_owned(), "refused"),
        ("/apis", "application/json".to_owned(), "legacy"),
        ("/apis", "*/*".to_owned(), "legacy"),
        ("/apis", String::new(), "legacy"),
        ("/apis/", "application/json".to_owned(), "legacy"),
        ("/apis/", format!("{AGGREGATED},application/json"), "legacy"),
        ("/apis", format!("{v2beta1},application/json"), "legacy"),
        ("/apis", "application/vnd.kubernetes.protobuf,application/json".to_owned(), "legacy"),
    ] {
        let answer = get(&plane.client, path, &accept).await;
        let seen = match answer.status {
            406 => "refused",
            200 if answer.text() == merged => "merged",
            200 if answer.text() == own => "own",
            200 if answer.text() == legacy => "legacy",
            _ => "something else",
        };
        assert_eq!(seen, expected, "{path} {accept}: {} {}", answer.status, answer.text());
        if matches!(expected, "own" | "refused") {
            let alone = get(&direct, path, &accept).await;
            let look = |answer: &Answer| {
                (answer.status, answer.text(), ["etag", "vary", "content-type"].map(|name| answer.header(name)))
            };
            assert_eq!(look(&answer), look(&alone), "{path} {accept}: the apiserver's own answer");
        }
        if expected == "legacy" {
            let headers = ["content-type", "cache-control", "etag"].map(|name| answer.header(name));
            let expected = ["application/json", "no-cache, private"].map(|value| Some(value.to_owned()));
            assert_eq!(headers[..2], expected, "{path} {accept}");
            assert_eq!(headers[2], None, "{path} {accept}");
        }
    }
    // Envoy joins several lines, so that the first of them goes before the others.
    let lines = plane.client.get("/apis").header("accept", NOPEER).header("accept", AGGREGATED).send().await.unwrap();
    assert_eq!(lines.text(), own, "two Accept lines");
}

#[tokio::test]
async fn a_post_is_not_ours_to_answer() {
    let plane = settled().await;
    let answer = plane.client.post("/apis", "").header("accept", AGGREGATED).send().await.unwrap();
    assert_eq!((answer.status, answer.body), (200, plane.apiservers[0].apis_text()));
}

#[tokio::test]
async fn conditions_are_about_what_was_served() {
    let plane = settled().await;
    let [old, new, _] = &plane.apiservers[..] else { panic!("three apiservers") };
    let (own, first) = (old.apis_etag(), new.apis_etag());
    let ask = async |condition: &str, accept: &str| {
        plane.client.get("/apis").header("accept", accept).header("if-none-match", condition).send().await.unwrap()
    };
    for (condition, expected, why) in [
        (first.clone(), 304, "the same"),
        (format!("W/{first}"), 304, "a weak tag"),
        (format!("\"E0\", {first}"), 304, "a list"),
        (format!("\"E0\",W/{first},\"E2\""), 304, "a list"),
        ("*".to_owned(), 304, "any"),
        (own.clone(), 200, "the local apiserver's tag is that of another document"),
        ("\"E0\"".to_owned(), 200, "unknown"),
        (first.trim_matches('"').to_owned(), 200, "no tag"),
    ] {
        let answer = ask(&condition, AGGREGATED).await;
        assert_eq!(answer.status, expected, "{condition}: {why}");
        assert_eq!(answer.body.is_empty(), expected == 304, "{condition}: {why}");
        let headers = ["etag", "vary", "cache-control"].map(|name| answer.header(name).unwrap_or_default());
        assert_eq!(headers, [first.as_str(), "Accept", "public"], "{condition}: {why}");
        assert_eq!(answer.header("content-type").is_some(), expected == 200, "{condition}: {why}");
        assert!(answer.header("audit-id").is_some(), "{condition}: {why}");
    }
    assert_eq!(ask(&first, NOPEER).await.status, 200, "the merge's tag says nothing of the apiserver's own document");
    assert_eq!(ask(&own, NOPEER).await.status, 304, "and that one's condition is its own business");
    assert_eq!(ask(&first, "application/json").await.status, 200, "nor of the legacy form");

    new.edit_apis(|apis| discovery::add_resource(apis, "apps", "v1", Resource::new("crates", "Crate")));
    plane.discovered_as(1).await.unwrap();
    let answer = ask(&first, AGGREGATED).await;
    assert_eq!((answer.status, answer.header("etag")), (200, Some(new.apis_etag())), "a peer has changed");
    assert_ne!(first, new.apis_etag());
    assert_eq!(ask(&new.apis_etag(), AGGREGATED).await.status, 304);
}

#[tokio::test]
async fn a_merge_that_nobody_says_alone_has_a_tag_of_its_own() {
    let plane = ControlPlane::builder(SIDECAR)
        .prepare(|apiservers| {
            apiservers[0].edit_apis(|apis| discovery::add_resource(apis, "apps", "v1", Resource::new("olds", "Old")));
        })
        .settled()
        .await
        .unwrap();
    plane.discovered("the type of the oldest too", |answer| answer.text().contains("\"olds\"")).await.unwrap();
    let answer = plane.aggregated("/apis").await.unwrap();
    assert_eq!(answer.header("etag"), Some(upper_hex_sha512(&answer.body)));
    let document = answer.json().unwrap();
    assert!(discovery::lists(&document, "apps", "v1", "olds", ""));
    assert!(discovery::lists(&document, NEW_GROUP, "v1", "storageversionmigrations", "status"));
    assert!(discovery::lists(&document, "storage.k8s.io", "v1", "csinodes", "status"));
}

#[tokio::test]
async fn the_core_group_stays_under_api() {
    let plane = settled().await;
    let [old, new, _] = &plane.apiservers[..] else { panic!("three apiservers") };
    new.edit_api(|api| discovery::add_resource(api, "", "v1", Resource::new("podplans", "PodPlan")));
    eventually(PATIENCE, "the new type on all workers", async || {
        for _ in 0..EVERY_WORKER {
            let answer = plane.aggregated("/api").await.unwrap();
            if answer.body != new.api_text() {
                return Err(answer.text());
            }
        }
        Ok(())
    })
    .await
    .unwrap();
    let apis = plane.aggregated("/apis").await.unwrap();
    assert_eq!(apis.body, new.apis_text());
    assert!(!groups(&apis.json().unwrap()).contains(&String::new()));
    let answer = plane.get("/api/v1/podplans").await.unwrap();
    assert_eq!((answer.status, answer.header("x-served-by").as_deref()), (200, Some("cp-2")));
    let legacy = plane.get("/api/v1").await.unwrap();
    assert!(legacy.text().contains("podplans"), "{}", legacy.text());
    assert_eq!(get(&plane.direct(0).unwrap(), "/api", AGGREGATED).await.body, old.api_text());
}

#[tokio::test]
async fn legacy_discovery_lists_nothing_that_it_cannot_show() {
    let plane = ControlPlane::builder(SIDECAR)
        .prepare(|apiservers| {
            for (apiserver, versions) in apiservers.iter().zip([&["v1"][..], &["v2", "v1"], &["v1"]]) {
                for version in versions {
                    let ledger = || Resource::new("entries", "Entry");
                    apiserver.add_api("ledger.example.k8s.io", version, ledger(), ApiServiceOrigin::BuiltIn);
                }
            }
        })
        .settled()
        .await
        .unwrap();
    plane.discovered_as(1).await.unwrap();
    let direct = plane.direct(1).unwrap();
    for target in [
        "/apis",
        "/apis/",
        "/apis/ledger.example.k8s.io",
        "/apis/ledger.example.k8s.io/",
        "/apis/ledger.example.k8s.io/v2",
        "/apis/ledger.example.k8s.io/v2/",
        "/apis/storagemigration.k8s.io",
        "/apis/storagemigration.k8s.io/v1",
        "/apis/certificates.k8s.io/v1",
        "/apis/storage.k8s.io/v1",
    ] {
        let (answer, expected) = (plane.get(target).await.unwrap(), direct.get(target).send().await.unwrap());
        assert_eq!((answer.status, answer.json().unwrap()), (200, expected.json().unwrap()), "{target}");
        let headers = ["content-type", "cache-control", "etag"].map(|name| answer.header(name).unwrap_or_default());
        assert_eq!(headers, ["application/json", "no-cache, private", ""], "{target}");
        assert_eq!(answer.header("x-served-by"), None, "{target}: made by the filter");
        assert!(answer.header("audit-id").is_some(), "{target}");
    }
    // What the local apiserver says as well, and what nobody says, it says itself.
    for (target, status) in [
        ("/apis/ledger.example.k8s.io/v1", 200),
        ("/apis/apps", 200),
        ("/apis/apps/v1", 200),
        ("/api/v1", 200),
        ("/api", 200),
        ("/apis/apps/v9", 404),
        ("/apis/nosuch.example.k8s.io", 404),
        ("/apis/nosuch.example.k8s.io/v1", 404),
        ("/apis/nosuch.example.com/v1", 404),
    ] {
        let answer = plane.get(target).await.unwrap();
        assert_eq!((answer.status, answer.header("x-served-by").as_deref()), (status, Some("cp-1")), "{target}");
    }
    let apis = plane.aggregated("/apis").await.unwrap().json().unwrap();
    assert!(discovery::lists(&apis, "ledger.example.k8s.io", "v2", "entries", ""));
}

/// A client of the legacy form asks for every list that it is told of; which of them are no 200.
async fn walk(client: &Client) -> Result<Vec<(String, u16)>> {
    let get = async |target: String| {
        let answer = client.get(&target).header("accept", "application/json").send().await?;
        let document = answer.json().unwrap_or_default();
        anyhow::Ok((answer.status, document))
    };
    let mut others = Vec::new();
    let mut lists = Vec::new();
    let (status, api) = get("/api".to_owned()).await?;
    assert_eq!((status, api["kind"].as_str()), (200, Some("APIVersions")));
    for version in api["versions"].as_array().into_iter().flatten() {
        lists.push(format!("/api/{}", version.as_str().unwrap_or_default()));
    }
    let (status, apis) = get("/apis".to_owned()).await?;
    assert_eq!((status, apis["kind"].as_str()), (200, Some("APIGroupList")));
    for group in apis["groups"].as_array().into_iter().flatten() {
        let name = group["name"].as_str().unwrap_or_default();
        let (status, alone) = get(format!("/apis/{name}")).await?;
        if status != 200 {
            others.push((format!("/apis/{name}"), status));
        }
        assert_eq!(alone["versions"], group["versions"], "{name} alone and in the list");
        for version in group["versions"].as_array().into_iter().flatten() {
            lists.push(format!("/apis/{}", version["groupVersion"].as_str().unwrap_or_default()));
        }
    }
    for list in lists {
        let (status, document) = get(list.clone()).await?;
        if status != 200 {
            others.push((list, status));
        } else if document["resources"].as_array().is_none_or(Vec::is_empty) {
            others.push((list, 0));
        }
    }
    Ok(others)
}

#[tokio::test]
async fn a_legacy_client_can_walk_all_that_it_is_told_of() {
    let plane = settled().await;
    assert_eq!(walk(&plane.client).await.unwrap(), []);
    let mixed = ControlPlane::builder(SIDECAR)
        .versions([fixtures::MIXED_PAIR[0], fixtures::MIXED_PAIR[1], "1.36.3"])
        .settled()
        .await
        .unwrap();
    mixed.discovered_as(1).await.unwrap();
    let old = mixed.direct(0).unwrap();
    let promised = [("/apis/storagemigration.k8s.io/v1".to_owned(), 404)];
    assert_eq!(walk(&old).await.unwrap(), promised, "what the old apiserver does alone");
    assert_eq!(walk(&mixed.client).await.unwrap(), []);
}

#[tokio::test]
async fn two_sidecars_tell_the_same() {
    let [old, new] = fixtures::MIXED_PAIR;
    let pair = json!([
        {"name": "cp-1", "cluster": "cp-1", "discoveryCluster": "cp-1-poll", "frontProxyCluster": "cp-1-trusted"},
        {"name": "cp-2", "cluster": "cp-2", "discoveryCluster": "cp-2-poll", "frontProxyCluster": "cp-2-trusted"},
    ]);
    let plane = ControlPlane::builder(SIDECAR)
        .versions([old, new, "1.36.3"])
        .plugin(&json!({"apiservers": pair}))
        .prepare(|apiservers| {
            for apiserver in &apiservers[..2] {
                let planes = Resource::new("planes", "Plane").subresource("status");
                apiserver.add_api("hangar.example.com", "v1", planes, ApiServiceOrigin::CustomResource);
                let metrics = Resource::new("nodes", "NodeMetrics").cluster_scoped().verbs(&["get", "list"]);
                apiserver.add_api("metrics.k8s.io", "v1beta1", metrics, ApiServiceOrigin::Aggregated);
            }
        })
        .settled()
        .await
        .unwrap();
    let other = plane.sidecar_of(1).await.unwrap();
    let clients = [plane.client.clone(), plane.client_of(&other).await.unwrap()];
    plane.discovered_as(1).await.unwrap();
    eventually(PATIENCE, "the second sidecar to know all", async || {
        for _ in 0..EVERY_WORKER {
            let answer = get(&clients[1], "/apis", AGGREGATED).await;
            if answer.body != plane.apiservers[1].apis_text() {
                return Err((answer.status, answer.text()));
            }
        }
        Ok(())
    })
    .await
    .unwrap();
    for (target, accept) in [
        ("/apis", AGGREGATED),
        ("/api", AGGREGATED),
        ("/apis", "application/json"),
        ("/apis/storagemigration.k8s.io", "application/json"),
        ("/apis/storagemigration.k8s.io/v1", "application/json"),
        ("/apis/certificates.k8s.io/v1", "application/json"),
        ("/apis/hangar.example.com/v1", "application/json"),
        ("/apis/metrics.k8s.io/v1beta1", "application/json"),
    ] {
        let [first, second] = [get(&clients[0], target, accept).await, get(&clients[1], target, accept).await];
        assert_eq!((first.status, second.status), (200, 200), "{target}");
        assert_eq!(first.json().unwrap(), second.json().unwrap(), "{target} {accept}");
        assert_eq!(first.header("etag"), second.header("etag"), "{target} {accept}");
        if accept == AGGREGATED {
            assert_eq!(first.body, second.body, "{target}");
        }
    }
    let groups = groups(&plane.aggregated("/apis").await.unwrap().json().unwrap());
    assert_eq!(groups[groups.len() - 2..], ["hangar.example.com", "metrics.k8s.io"]);
    for client in &clients {
        assert_eq!(walk(client).await.unwrap(), []);
    }
}

#[tokio::test]
async fn custom_resources_and_aggregated_apis_are_the_local_apiserver_s_matter() {
    let plane = settled().await;
    let [old, new, _] = &plane.apiservers[..] else { panic!("three apiservers") };
    // Only on a peer: an apiserver that has not seen the definition yet.
    let planes = || Resource::new("planes", "Plane");
    new.add_api("hangar.example.com", "v1", planes(), ApiServiceOrigin::CustomResource);
    new.edit_apis(|apis| discovery::add_resource(apis, "apps", "v1", Resource::new("crates", "Crate")));
    // Only here.
    old.add_api("dock.example.com", "v1", Resource::new("ships", "Ship"), ApiServiceOrigin::CustomResource);
    plane.discovered("the peer's news", |answer| answer.text().contains("\"crates\"")).await.unwrap();
    plane.discovered("what is here", |answer| answer.text().contains("dock.example.com")).await.unwrap();
    let apis = plane.aggregated("/apis").await.unwrap().json().unwrap();
    assert!(!groups(&apis).contains(&"hangar.example.com".to_owned()), "{:?}", groups(&apis));
    assert!(!legacy_groups(&plane.get("/apis").await.unwrap().json().unwrap()).contains(&"hangar.example.com".into()));
    assert_eq!(plane.get("/apis/hangar.example.com/v1").await.unwrap().status, 404);
    assert_eq!(plane.get("/apis/dock.example.com/v1").await.unwrap().header("x-served-by").as_deref(), Some("cp-1"));
}

#[tokio::test]
async fn what_is_stale_here_is_told_as_stale_unless_a_peer_knows_better() {
    let plane = ControlPlane::builder(SIDECAR)
        .prepare(|apiservers| {
            for apiserver in apiservers {
                let meters = || Resource::new("meters", "Meter");
                apiserver.add_api("meter.example", "v1", meters(), ApiServiceOrigin::Aggregated);
            }
            apiservers[0].edit_apis(|apis| {
                discovery::set_freshness(apis, "meter.example", "v1", "Stale");
                discovery::remove_resource(apis, "meter.example", "v1", "meters");
                discovery::set_freshness(apis, "batch", "v1", "Stale");
                discovery::version_mut(apis, "batch", "v1").unwrap()["resources"] = json!([]);
            });
        })
        .settled()
        .await
        .unwrap();
    plane.discovered("the whole cluster", |answer| answer.text().contains(NEW_GROUP)).await.unwrap();
    let mut apis = plane.aggregated("/apis").await.unwrap().json().unwrap();
    let meter = discovery::version_mut(&mut apis, "meter.example", "v1").unwrap();
    assert_eq!((&meter["freshness"], meter["resources"].as_array().map_or(0, Vec::len)), (&json!("Stale"), 0));
    let batch = discovery::version_mut(&mut apis, "batch", "v1").unwrap();
    assert_eq!(batch["freshness"], "Current");
    assert!(discovery::lists(&apis, "batch", "v1", "jobs", "status"));
}

#[tokio::test]
async fn an_empty_document_is_a_symptom_and_no_fact() {
    let plane = settled().await;
    let new = &plane.apiservers[1];
    let before = new.apis_text();
    let head = r#""kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","metadata":{}"#;
    for items in [r#","items":[]"#, "", r#","items":null"#] {
        let text = format!("{{{head}{items}}}\n");
        let seen = new.polls().len();
        let fault = new.fail(
            Scope::Apis,
            Fault::answer(move |_| Response::new(200).header("Content-Type", AGGREGATED).chunked(text.clone())),
        );
        eventually(PATIENCE, "more polls", async || new.polls().len() >= seen + 4).await.unwrap();
        for _ in 0..EVERY_WORKER {
            let answer = plane.aggregated("/apis").await.unwrap();
            assert_eq!((answer.status, &answer.body), (200, &before), "{items}");
        }
        new.heal_one(fault);
    }
    // Groups and versions that are empty add nothing; what else there is counts.
    new.edit_apis(|apis| {
        apis["items"].as_array_mut().unwrap().push(json!({"metadata": {"name": "void.k8s.io"}, "versions": []}));
        discovery::add_resource(apis, "hollow.k8s.io", "v1", Resource::new("x", "X"));
        discovery::remove_resource(apis, "hollow.k8s.io", "v1", "x");
        discovery::add_resource(apis, "apps", "v1", Resource::new("crates", "Crate"));
    });
    plane.discovered("the rest of it", |answer| answer.text().contains("\"crates\"")).await.unwrap();
    let told = groups(&plane.aggregated("/apis").await.unwrap().json().unwrap());
    assert!(!told.contains(&"void.k8s.io".to_owned()), "{told:?}");
    assert_eq!(walk(&plane.client).await.unwrap().iter().filter(|(_, status)| *status != 0).count(), 0);
}

#[tokio::test]
async fn a_refusal_by_an_older_apiserver_passes() {
    let plane = settled().await;
    plane.apiservers[0].respond_with(|request| {
        let refusal = || Response::new(400).json(&json!({"kind": "Status", "code": 400, "reason": "BadRequest"}));
        request.path().starts_with("/api/v1/services").then(refusal)
    });
    for request in [
        plane.client.get("/api/v1/services?fieldSelector=spec.clusterIP%21%3DNone"),
        plane.client.post("/api/v1/services?fieldValidation=Strict", "{}"),
    ] {
        plane.apiservers.iter().for_each(lab::StubApiserver::clear_requests);
        let answer = request.header("accept", "application/json").send().await.unwrap();
        assert_eq!((answer.status, answer.json().unwrap()["reason"].as_str()), (400, Some("BadRequest")));
        let reached: Vec<_> = plane.apiservers.iter().map(|apiserver| apiserver.client_requests().len()).collect();
        assert_eq!(reached, [1, 0, 0], "nothing is tried elsewhere");
    }
}

#[tokio::test]
async fn other_answers_pass_untouched() {
    let plane = settled().await;
    for status in [400, 401, 403, 404, 406, 410, 429, 500, 503] {
        plane.apiservers[0].respond_with(move |request| {
            let answer = || Response::new(status).header("X-Own", "1").json(&json!({"code": status}));
            (&request.target[..] == b"/apis" && !request.is_poll()).then(answer)
        });
        for accept in [AGGREGATED, "application/json"] {
            let answer = plane.client.get("/apis").header("accept", accept).header("if-none-match", "*");
            let answer = answer.send().await.unwrap();
            assert_eq!((answer.status, answer.json().unwrap()), (status, json!({"code": status})), "{accept}");
            assert_eq!(answer.header("x-own").as_deref(), Some("1"), "{status} {accept}");
        }
    }
}

#[tokio::test]
async fn bodies_of_all_lengths_arrive_whole_over_both_protocols() {
    let plane = settled().await;
    let [old, new, _] = &plane.apiservers[..] else { panic!("three apiservers") };
    let http2 = plane.client.http2().await.unwrap();
    let whole = new.apis_text();
    // What the apiserver itself sends before it is replaced: nothing, less, more, and more than Envoy buffers.
    for length in [None, Some(0), Some(2), Some(60_000), Some(3_000_000)] {
        let tag = old.apis_etag();
        old.respond_with(move |request| {
            let answer = || match length {
                None => Response::new(304).header("Etag", tag.as_str()),
                Some(length) => {
                    let head = Response::new(200).header("Etag", tag.as_str()).header("Content-Type", AGGREGATED);
                    head.chunked(vec![b'x'; length])
                }
            };
            (&request.target[..] == b"/apis" && !request.is_poll()).then(answer)
        });
        let ask = |method: &str| plane.client.request(method, "/apis").header("accept", AGGREGATED);
        for (protocol, answer, head, unchanged) in [
            (
                "HTTP/1.1",
                ask("GET").send().await,
                ask("HEAD").send().await,
                ask("GET").header("if-none-match", "*").send().await,
            ),
            (
                "HTTP/2",
                ask("GET").send_over(&http2).await,
                ask("HEAD").send_over(&http2).await,
                ask("GET").header("if-none-match", "*").send_over(&http2).await,
            ),
        ] {
            let (answer, head, unchanged) = (answer.unwrap(), head.unwrap(), unchanged.unwrap());
            assert_eq!((answer.status, answer.body.len()), (200, whole.len()), "{protocol} {length:?}");
            assert_eq!(answer.body, whole, "{protocol} {length:?}");
            let told = |answer: &Answer| (answer.header("content-length"), answer.header("etag"));
            assert_eq!(told(&answer), (Some(whole.len().to_string()), Some(new.apis_etag())), "{protocol} {length:?}");
            assert_eq!((head.status, head.body.len(), told(&head)), (200, 0, told(&answer)), "{protocol} {length:?}");
            assert_eq!((unchanged.status, unchanged.body.len()), (304, 0), "{protocol} {length:?}");
            assert_eq!(unchanged.header("transfer-encoding"), None, "{protocol} {length:?}");
            let length_of_304 = unchanged.header("content-length");
            assert!(length_of_304.is_none_or(|told| told == whole.len().to_string()), "{protocol} {length:?}");
        }
    }
    // One connection for all: an answer that was cut short would spoil the next.
    old.respond_as_usual();
    let mut connection = plane.client.connect().await.unwrap();
    for round in 0..10 {
        for method in ["GET", "HEAD", "GET"] {
            let request = plane.client.request(method, "/apis").header("accept", AGGREGATED);
            let answer = request.send_on(&mut connection).await.unwrap();
            assert_eq!(answer.body.is_empty(), method == "HEAD", "{round}");
            let request = plane.client.get("/apis").header("accept", AGGREGATED).header("if-none-match", "*");
            assert_eq!(request.send_on(&mut connection).await.unwrap().status, 304, "{round}");
        }
    }
}

#[tokio::test]
async fn big_documents_arrive_whole() {
    let plane = ControlPlane::builder(SIDECAR)
        // A stub takes its time with so much, on a busy machine seconds.
        .plugin(&json!({"discovery": {"refreshInterval": "1s", "timeout": "15s"}}))
        .prepare(|apiservers| {
            for apiserver in apiservers {
                apiserver.edit_apis(|apis| {
                    for number in 0..5_000 {
                        let name = format!("planes{number}");
                        discovery::add_resource(apis, "hangar.example.com", "v1", Resource::new(&name, "Plane"));
                    }
                });
                apiserver.add_api_service("hangar.example.com", "v1", ApiServiceOrigin::CustomResource);
            }
        })
        .settled()
        .await
        .unwrap();
    let whole = plane.apiservers[1].apis_text();
    assert!(whole.len() > 1 << 20, "only {} bytes", whole.len());
    plane.discovered_as(1).await.unwrap();
    let ask = || plane.client.get("/apis").header("accept", AGGREGATED).header("accept-encoding", "gzip");
    let http2 = plane.client.http2().await.unwrap();
    for answer in [ask().send().await.unwrap(), ask().send_over(&http2).await.unwrap()] {
        assert_eq!((answer.status, answer.gunzipped().unwrap()), (200, whole.clone()));
        assert_eq!(answer.header_values("vary").join(","), "Accept");
    }
    // A document that is cut on its way is not believed.
    let new = &plane.apiservers[1];
    new.edit_apis(|apis| discovery::add_resource(apis, "apps", "v1", Resource::new("crates", "Crate")));
    let fault = new.fail(Scope::Polls, Fault::CutBody);
    let seen = new.polls().len();
    eventually(PATIENCE, "more polls", async || new.polls().len() >= seen + 6).await.unwrap();
    assert_eq!(plane.aggregated("/apis").await.unwrap().body, whole);
    new.heal_one(fault);
    plane.discovered_as(1).await.unwrap();
}

#[tokio::test]
async fn a_304_keeps_the_connection_to_the_apiserver() {
    let plane = ControlPlane::builder(SIDECAR).envoy(|envoy| envoy.concurrency(1)).settled().await.unwrap();
    plane.discovered_as(1).await.unwrap();
    let old = &plane.apiservers[0];
    old.clear_requests();
    let before = old.connections();
    let http2 = plane.client.http2().await.unwrap();
    let tag = plane.apiservers[1].apis_etag();
    for round in 0..50 {
        let ask = |method: &str| plane.client.request(method, "/apis").header("accept", AGGREGATED);
        for (request, status) in [
            (ask("GET"), 200),
            (ask("HEAD"), 200),
            (ask("GET").header("if-none-match", &tag), 304),
            (ask("GET").header("if-none-match", "\"another\""), 200),
        ] {
            for answer in [request.clone().send().await.unwrap(), request.send_over(&http2).await.unwrap()] {
                assert_eq!((answer.status, answer.header("etag")), (status, Some(tag.clone())), "{round}");
            }
        }
        assert_eq!(plane.get("/apis").await.unwrap().status, 200, "{round}");
    }
    let asked = roots(old.client_requests());
    assert_eq!(asked.len(), 50 * 9);
    assert!(asked.iter().all(|request| request.header("if-none-match") == Some(old.apis_etag())));
    assert_eq!(old.connections(), before, "no new connections");
}

#[tokio::test]
async fn who_has_made_a_type_finds_it_at_once() {
    // No poll comes to help.
    let plane = ControlPlane::builder(SIDECAR)
        .plugin(&json!({"discovery": {"refreshInterval": "1h"}}))
        .settled()
        .await
        .unwrap();
    plane.discovered_as(1).await.unwrap();
    let old = &plane.apiservers[0];
    for (number, accept) in [AGGREGATED, "application/json", AGGREGATED, "application/json"].into_iter().enumerate() {
        let group = format!("hangar{number}.example.com");
        for apiserver in &plane.apiservers {
            let planes = Resource::new("planes", "Plane");
            apiserver.add_api(&group, "v1", planes, ApiServiceOrigin::CustomResource);
        }
        let polled = old.polls().len();
        for round in 0..EVERY_WORKER {
            let answer = get(&plane.client, "/apis", accept).await;
            assert_eq!(answer.status, 200, "{number} {round}");
            assert!(answer.text().contains(&group), "{number} {round}: {}", answer.text());
            assert!(answer.text().contains(NEW_GROUP), "{number} {round}: {}", answer.text());
        }
        let asked = old.polls().len() - polled;
        assert!((1..=4).contains(&asked), "{number}: asked {asked} times");
        assert_eq!(plane.get(&format!("/apis/{group}/v1")).await.unwrap().status, 200);
    }
    // And who has removed one does not.
    for apiserver in &plane.apiservers {
        apiserver.edit_apis(|apis| discovery::remove_group(apis, "hangar0.example.com"));
    }
    for round in 0..EVERY_WORKER {
        let answer = plane.aggregated("/apis").await.unwrap();
        assert!(!answer.text().contains("hangar0"), "{round}");
    }
}

#[tokio::test]
async fn many_who_wait_are_all_answered() {
    let plane = ControlPlane::builder(SIDECAR)
        .plugin(&json!({"discovery": {"refreshInterval": "1h"}}))
        .settled()
        .await
        .unwrap();
    plane.discovered_as(1).await.unwrap();
    let old = &plane.apiservers[0];
    let gate = Gate::closed();
    old.fail(Scope::Polls, Fault::Hold(gate.clone()));
    old.add_api("hangar.example.com", "v1", Resource::new("planes", "Plane"), ApiServiceOrigin::CustomResource);
    let mut waiting = tokio::task::JoinSet::new();
    for number in 0..40 {
        let client = plane.client.clone();
        let method = if number % 4 == 0 { "HEAD" } else { "GET" };
        waiting.spawn(async move { client.request(method, "/apis").header("accept", AGGREGATED).send().await });
    }
    eventually(PATIENCE, "an apiserver to be asked", async || gate.waiting() >= 1).await.unwrap();
    eventually(PATIENCE, "all to wait", async || roots(old.client_requests()).len() >= 40).await.unwrap();
    gate.open();
    while let Some(answer) = waiting.join_next().await {
        let answer = answer.unwrap().unwrap();
        assert_eq!(answer.status, 200);
        assert!(answer.body.is_empty() || answer.text().contains("hangar.example.com"), "{}", answer.text());
    }
    // An apiserver that changes and then does not answer the filter: who asks gets what was known, in the end.
    old.heal();
    old.fail(Scope::Polls, Fault::Reset);
    old.add_api("dock.example.com", "v1", Resource::new("ships", "Ship"), ApiServiceOrigin::CustomResource);
    let answer = plane.aggregated("/apis").await.unwrap();
    assert!(answer.status == 200 && answer.text().contains("hangar"), "{} {}", answer.status, answer.text());
}

const INCOMPLETE: &str = "incomplete.mixed-version-proxy";

#[tokio::test]
async fn what_may_be_incomplete_says_so() {
    let plane = ControlPlane::builder(SIDECAR).stopped(2).start().await.unwrap();
    plane.discovered("the mark", |answer| answer.status == 200 && answer.text().contains(INCOMPLETE)).await.unwrap();
    let answer = plane.aggregated("/apis").await.unwrap();
    assert_eq!(answer.header("etag"), Some(upper_hex_sha512(&answer.body)));
    let told = answer.json().unwrap();
    let mut expected: Value = serde_json::from_slice(&plane.apiservers[1].apis_text()).unwrap();
    let version = json!({"version": "v1", "freshness": "Stale", "resources": []});
    let mut last = told["items"].as_array().unwrap().last().unwrap().clone();
    assert_eq!(last["metadata"]["name"], INCOMPLETE);
    last["versions"][0].as_object_mut().unwrap().entry("resources").or_insert(json!([]));
    assert_eq!(last["versions"], json!([version]), "{last}");
    expected["items"].as_array_mut().unwrap().push(told["items"].as_array().unwrap().last().unwrap().clone());
    assert_eq!(told, expected, "the rest is what there is");
    let core = plane.aggregated("/api").await.unwrap();
    assert_eq!(groups(&core.json().unwrap()), ["", INCOMPLETE], "it may be read when all is known again");
    let versions = plane.get("/api").await.unwrap().json().unwrap();
    assert_eq!(versions["versions"], json!(["v1"]), "no place for the mark");

    let legacy = plane.get("/apis").await.unwrap().json().unwrap();
    assert_eq!(legacy_groups(&legacy).last().map(String::as_str), Some(INCOMPLETE));
    let unknown = format!("/apis/{INCOMPLETE}/v1");
    let group = plane.get(&format!("/apis/{INCOMPLETE}")).await.unwrap();
    assert_eq!((group.status, group.json().unwrap()["kind"].as_str()), (200, Some("APIGroup")), "{}", group.text());
    for target in [unknown.clone(), format!("{unknown}/")] {
        let answer = plane.get(&target).await.unwrap();
        assert_eq!((answer.status, answer.json().unwrap()["kind"].as_str()), (503, Some("Status")), "{target}");
    }
    assert_eq!(walk(&plane.client).await.unwrap(), [(unknown, 503)]);
    assert!(plane.aggregated("/apis").await.unwrap().text().contains(NEW_GROUP));

    let unchanged = plane.client.get("/apis").header("accept", AGGREGATED).header("if-none-match", "*");
    assert_eq!(unchanged.send().await.unwrap().status, 304);

    // It comes, and the mark goes; it goes again, and what it said counts.
    plane.apiservers[2].restart().await.unwrap();
    plane.discovered_as(1).await.unwrap();
    assert_eq!(walk(&plane.client).await.unwrap(), []);
    plane.apiservers[2].stop().await;
    let polls = plane.apiservers[1].polls().len();
    eventually(PATIENCE, "polls meanwhile", async || plane.apiservers[1].polls().len() >= polls + 10).await.unwrap();
    for _ in 0..EVERY_WORKER {
        assert_eq!(plane.aggregated("/apis").await.unwrap().body, plane.apiservers[1].apis_text());
    }
}

#[tokio::test]
async fn nothing_is_told_before_all_have_been_asked() {
    let plane = ControlPlane::builder(SIDECAR)
        .plugin(&json!({"discovery": {"timeout": "60s"}}))
        .prepare(|apiservers| {
            apiservers[2].fail(Scope::Polls, Fault::Hang);
        })
        .start()
        .await
        .unwrap();
    eventually(PATIENCE, "the others to be polled", async || {
        plane.apiservers[..2].iter().all(|apiserver| apiserver.polls().len() >= 6)
    })
    .await
    .unwrap();
    for _ in 0..EVERY_WORKER {
        for (target, accept) in [("/apis", AGGREGATED), ("/api", AGGREGATED), ("/apis", "application/json")] {
            let answer = get(&plane.client, target, accept).await;
            assert_eq!(answer.status, 503, "{target} {accept}");
            assert_eq!(answer.json().unwrap()["reason"], "ServiceUnavailable", "{target} {accept}");
            assert_eq!(answer.header("retry-after").as_deref(), Some("1"), "{target} {accept}");
        }
    }
    assert_eq!(get(&plane.client, "/apis", NOPEER).await.status, 200, "who asks for the local view gets it");
    assert_eq!(plane.get("/api/v1/pods").await.unwrap().status, 200);
    // Who may not ask is not told that it should come again.
    plane.apiservers[0].respond_with(|request| (!request.is_poll()).then(|| Response::new(403).json(&json!({}))));
    assert_eq!(plane.aggregated("/apis").await.unwrap().status, 403);
}

#[tokio::test]
async fn a_type_that_is_gone_from_all_is_missed_for_a_while() {
    let plane =
        ControlPlane::builder(SIDECAR).plugin(&json!({"discovery": {"forgetAfter": "4s"}})).settled().await.unwrap();
    plane.discovered_as(1).await.unwrap();
    plane.apiservers[1].set_version("1.36.3").unwrap();
    plane.discovered("the mark", |answer| answer.text().contains(INCOMPLETE)).await.unwrap();
    let told = groups(&plane.aggregated("/apis").await.unwrap().json().unwrap());
    assert_eq!(told.last().map(String::as_str), Some(INCOMPLETE));
    assert!(!told.contains(&NEW_GROUP.to_owned()), "{told:?}");
    plane.discovered_as(1).await.unwrap();
}

#[tokio::test]
async fn a_gateway_tells_the_same_whomever_it_asks() {
    let plane = ControlPlane::builder(GATEWAY)
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
    plane.apiservers.iter().for_each(lab::StubApiserver::clear_requests);
    let http2 = plane.client.http2().await.unwrap();
    for round in 0..30 {
        let ask = || plane.client.get("/apis").header("accept", AGGREGATED);
        for answer in [ask().send().await.unwrap(), ask().send_over(&http2).await.unwrap()] {
            assert_eq!((answer.status, &answer.body), (200, &plane.apiservers[1].apis_text()), "{round}");
            assert_eq!(answer.header("etag"), Some(plane.apiservers[1].apis_etag()), "{round}");
        }
        assert_eq!(ask().header("if-none-match", plane.apiservers[1].apis_etag()).send().await.unwrap().status, 304);
        assert_eq!(plane.get("/apis").await.unwrap().json().unwrap()["kind"], "APIGroupList");
        assert_eq!(plane.get("/apis/storagemigration.k8s.io/v1").await.unwrap().status, 200, "{round}");
        assert_eq!(plane.get("/apis/certificates.k8s.io/v1").await.unwrap().status, 200, "{round}");
    }
    for apiserver in &plane.apiservers {
        let asked = roots(apiserver.client_requests());
        assert!(!asked.is_empty(), "{} is asked too", apiserver.name());
        for request in asked {
            assert_eq!(request.header("if-none-match"), Some(apiserver.apis_etag()), "its own tag: {request:?}");
        }
    }
    assert_eq!(walk(&plane.client).await.unwrap(), []);

    // Who has made a type through one of them finds it, whichever is asked next.
    for apiserver in &plane.apiservers {
        apiserver.add_api("dock.example.com", "v1", Resource::new("ships", "Ship"), ApiServiceOrigin::CustomResource);
    }
    for round in 0..EVERY_WORKER {
        let answer = plane.aggregated("/apis").await.unwrap();
        assert!(answer.text().contains("dock.example.com"), "{round}");
    }
    // One is stopped: the others are asked.
    plane.apiservers[0].stop().await;
    eventually(PATIENCE, "it to be avoided", async || {
        for _ in 0..EVERY_WORKER {
            let answer = plane.aggregated("/apis").await.unwrap();
            if answer.status != 200 {
                return Err(answer.status);
            }
        }
        Ok(())
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_gateway_tells_of_types_that_only_some_have() {
    let plane = ControlPlane::builder(GATEWAY)
        .prepare(|apiservers| {
            let planes = Resource::new("planes", "Plane");
            apiservers[0].add_api("hangar.example.com", "v1", planes, ApiServiceOrigin::CustomResource);
        })
        .settled()
        .await
        .unwrap();
    plane.discovered("the type of one", |answer| answer.text().contains("hangar.example.com")).await.unwrap();
}

#[tokio::test]
async fn switched_off_it_leaves_everything_alone() {
    for (changes, why) in [
        (json!({"peerAggregatedDiscovery": "Disabled"}), "switched off"),
        (json!({"peerProxying": "DryRun"}), "only told what it would do"),
    ] {
        let plane = ControlPlane::builder(SIDECAR).plugin(&changes).start().await.unwrap();
        let old = &plane.apiservers[0];
        eventually(PATIENCE, "the apiservers to be polled", async || {
            plane.apiservers.iter().all(|apiserver| apiserver.polls().len() >= 6)
        })
        .await
        .unwrap();
        old.clear_requests();
        let direct = plane.direct(0).unwrap();
        for (target, accept) in [
            ("/apis", AGGREGATED),
            ("/api", AGGREGATED),
            ("/apis", "application/json"),
            ("/apis/storagemigration.k8s.io", "application/json"),
            ("/apis/storagemigration.k8s.io/v1", "application/json"),
            ("/apis/certificates.k8s.io/v1", "application/json"),
            ("/openapi/v3", "application/json"),
            ("/openapi/v3/apis/storagemigration.k8s.io/v1", "application/json"),
        ] {
            let (answer, alone) = (get(&plane.client, target, accept).await, get(&direct, target, accept).await);
            assert_eq!((answer.status, answer.text()), (alone.status, alone.text()), "{why}: {target}");
            assert_eq!(answer.header("etag"), alone.header("etag"), "{why}: {target}");
            let [ref first, ref second] = old.client_requests()[..] else { panic!("{why}: {target}") };
            assert_eq!(first.header_values("accept"), second.header_values("accept"), "{why}: {target}");
            old.clear_requests();
        }
        let condition = plane.client.get("/apis").header("accept", AGGREGATED).header("if-none-match", old.apis_etag());
        assert_eq!(condition.send().await.unwrap().status, 304, "{why}");
        for apiserver in &plane.apiservers {
            assert!(apiserver.requests_where(Request::is_openapi_poll).is_empty(), "{why}: nobody needs it");
        }
    }
}

#[tokio::test]
async fn schemas_come_from_who_lists_most() {
    let plane = settled().await;
    let [old, new, _] = &plane.apiservers[..] else { panic!("three apiservers") };
    let root = eventually(PATIENCE, "the merged root of OpenAPI on all workers", async || {
        let mut root = Value::Null;
        for _ in 0..EVERY_WORKER {
            let answer = plane.get("/openapi/v3").await.unwrap();
            root = answer.json().unwrap_or_default();
            if answer.status != 200 || root["paths"]["apis/storagemigration.k8s.io/v1"].is_null() {
                return Err(answer.status);
            }
        }
        Ok(root)
    })
    .await
    .unwrap();
    let answer = plane.get("/openapi/v3").await.unwrap();
    assert_eq!(answer.header("content-type").as_deref(), Some("text/plain; charset=utf-8"));
    assert_eq!(answer.header("etag"), None);
    let ranged = plane.client.get("/openapi/v3").header("range", "bytes=0-9").send().await.unwrap();
    assert_eq!(ranged.status, 200, "a part of one root is no part of another");
    let own: Value = get(&plane.direct(1).unwrap(), "/openapi/v3", "application/json").await.json().unwrap();
    let keys = |root: &Value| root["paths"].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&root), keys(&own));
    old.clear_requests();
    new.clear_requests();
    for (key, owner) in [
        ("apis/storagemigration.k8s.io/v1", "cp-2"),
        ("apis/certificates.k8s.io/v1", "cp-2"),
        ("apis/storage.k8s.io/v1", "cp-2"),
        ("apis/apps/v1", "cp-1"),
        ("api/v1", "cp-1"),
        ("version", "cp-1"),
    ] {
        let url = root["paths"][key]["serverRelativeURL"].as_str().unwrap().to_owned();
        let answer = plane.get(&url).await.unwrap();
        assert_eq!((answer.status, answer.header("x-served-by").as_deref()), (200, Some(owner)), "{key}");
        let tag = answer.header("etag").unwrap();
        let again = plane.client.get(&url).header("if-none-match", &tag).send().await.unwrap();
        assert_eq!((again.status, again.body.len()), (304, 0), "{key}");
        let wrong = plane.get(&format!("/openapi/v3/{key}?hash=00")).await.unwrap();
        assert_eq!((wrong.status, wrong.header("location").as_deref()), (301, Some(url.as_str())), "{key}");
        let bare = plane.get(&format!("/openapi/v3/{key}")).await.unwrap();
        assert_eq!((bare.status, bare.header("etag")), (200, Some(tag)), "{key}");
    }
    for request in new.client_requests() {
        assert_eq!(request.header_values(LOOP_HEADER), ["true"], "{request:?}");
    }
    for request in old.client_requests() {
        assert_eq!(request.header(LOOP_HEADER), None, "{request:?}");
    }
    let unknown = plane.get("/openapi/v3/apis/nosuch.example.k8s.io/v1").await.unwrap();
    assert_eq!((unknown.status, unknown.body.len(), unknown.header("content-type")), (404, 0, None));
    assert_eq!(plane.get("/openapi/v2").await.unwrap().header("x-served-by").as_deref(), Some("cp-1"));
    let all = keys(&root);
    for key in all {
        let url = root["paths"][&key]["serverRelativeURL"].as_str().unwrap().to_owned();
        assert_eq!(plane.get(&url).await.unwrap().status, 200, "{key}: {url}");
    }
}

#[tokio::test]
async fn a_new_custom_resource_s_schema_is_found_soon() {
    let plane = settled().await;
    let planes = || Resource::new("planes", "Plane");
    for apiserver in &plane.apiservers {
        apiserver.add_api("hangar.example.com", "v1", planes(), ApiServiceOrigin::CustomResource);
    }
    let key = "apis/hangar.example.com/v1";
    // Without anybody asking for other documents: the polls alone, or the client's own question.
    let url = eventually(PATIENCE, "its schema on all workers", async || {
        let mut url = String::new();
        for _ in 0..EVERY_WORKER {
            let root = plane.get("/openapi/v3").await.unwrap().json().unwrap_or_default();
            let found = root["paths"][key]["serverRelativeURL"].as_str().map(str::to_owned);
            url = found.ok_or_else(|| root["paths"].as_object().map_or(0, serde_json::Map::len))?;
        }
        Ok::<_, usize>(url)
    })
    .await
    .unwrap();
    let answer = plane.get(&url).await.unwrap();
    assert_eq!((answer.status, answer.header("x-served-by").as_deref()), (200, Some("cp-1")));
}

#[tokio::test]
async fn etags_of_the_laboratory_are_upstream_s() {
    let plane = settled().await;
    assert_eq!(etag(&plane.apiservers[1].apis_text()), plane.apiservers[1].apis_etag());
    assert_eq!(plane.aggregated("/apis").await.unwrap().header("etag"), Some(plane.apiservers[1].apis_etag()));
}

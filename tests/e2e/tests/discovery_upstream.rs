//! Discovery as Kubernetes itself does it: which form an Accept header gets, and the merge of a pair that Kubernetes' own
//! mixed version proxy has merged.

use std::collections::BTreeMap;

use e2e::{ControlPlane, EVERY_WORKER, GATEWAY, PATIENCE, SIDECAR};
use lab::{
    Client,
    apiserver::{AGGREGATED, LOOP_HEADER, Request},
    client::Answer,
    discovery::{self, Resource},
    eventually, fixtures,
};
use serde_json::{Value, json};

/// The parameters of an aggregated clause.
const V2: &str = "g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
/// Only the older apiserver of the pair has it.
const OLD_GROUP: &str = "internal.apiserver.k8s.io";

/// What a client sees of an answer.
fn look(answer: &Answer) -> (u16, String, [Option<String>; 3]) {
    (answer.status, answer.text(), ["content-type", "etag", "vary"].map(|name| answer.header(name)))
}

/// What a vector's client gets through the filter: `merged`, `legacy`, or `own`, the apiserver's answer as it is.
fn expected(vector: &Value) -> &'static str {
    let is_json = vector["contentType"].as_str().unwrap().starts_with("application/json");
    // An apiserver would answer in another encoding: who takes JSON too gets JSON, the only one that is merged.
    let accept = vector["accept"][0].as_str().unwrap_or_default();
    let takes = |parameters: &str| {
        accept.split(',').any(|clause| {
            let (media_type, rest) = clause.split_once(';').unwrap_or((clause, ""));
            matches!(media_type.trim(), "application/json" | "*/*") && rest.contains(parameters)
        })
    };
    match vector["representation"].as_str().unwrap() {
        "v2" if is_json || takes(V2) => "merged",
        "legacy" if is_json => "legacy",
        "v2" | "legacy" if takes("") => "legacy",
        "v2" | "v2-nopeer" | "legacy" | "406" => "own",
        other => panic!("no such form: {other}"),
    }
}

#[tokio::test]
async fn every_accept_header_gets_the_form_that_kubernetes_chooses() {
    let plane = ControlPlane::builder(SIDECAR)
        .prepare(|apiservers| {
            // Else all of them would say the same under /api.
            apiservers[1].edit_api(|api| discovery::add_resource(api, "", "v1", Resource::new("podplans", "PodPlan")));
        })
        .settled()
        .await
        .unwrap();
    plane.discovered_as(1).await.unwrap();
    let [old, new, _] = &plane.apiservers[..] else { panic!("three apiservers") };
    let direct = plane.direct(0).unwrap();
    let of_new = plane.direct(1).unwrap();
    eventually(PATIENCE, "the new type of the core group on all workers", async || {
        for _ in 0..EVERY_WORKER {
            if plane.aggregated("/api").await.unwrap().body != new.api_text() {
                return false;
            }
        }
        true
    })
    .await
    .unwrap();
    assert_ne!(old.api_text(), new.api_text());

    let mut seen = BTreeMap::new();
    for vector in fixtures::vectors("accept.jsonl").unwrap() {
        let path = vector["path"].as_str().unwrap();
        let ask = async |client: &Client, lines: &Value| {
            let mut request = client.get(path);
            for line in lines.as_array().unwrap() {
                request = request.header("accept", line.as_str().unwrap());
            }
            request.send().await.unwrap()
        };
        let answer = ask(&plane.client, &vector["accept"]).await;
        let lines: Vec<_> = vector["accept"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        if lines.len() > 1 {
            // Of several lines an apiserver reads the first; but Envoy joins them, whatever filters it has.
            let joined = ask(&plane.client, &json!([lines.join(",")])).await;
            assert_eq!(look(&answer), look(&joined), "{vector}");
            *seen.entry("joined").or_insert(0) += 1;
            continue;
        }
        if is_core_that_prefers_protobuf(&vector) {
            continue;
        }
        let expected = expected(&vector);
        *seen.entry(expected).or_insert(0) += 1;
        let same = match expected {
            "own" => ask(&direct, &vector["accept"]).await,
            // Under /api an apiserver's own address stands beside the versions, which all share.
            "legacy" if path.starts_with("/api/") || path == "/api" => ask(&direct, &json!(["application/json"])).await,
            "legacy" => ask(&of_new, &json!(["application/json"])).await,
            _ => ask(&of_new, &json!([AGGREGATED])).await,
        };
        let (mut answer, mut same) = (look(&answer), look(&same));
        if expected == "legacy" {
            // Written by somebody else: the same, not the same bytes.
            let value = |text: &str| serde_json::from_str::<Value>(text).unwrap().to_string();
            (answer.1, same.1) = (value(&answer.1), value(&same.1));
        }
        assert_eq!(answer, same, "{expected}: {vector}");
    }
    let at_least = [("merged", 50), ("legacy", 18), ("own", 50), ("joined", 7)];
    assert!(at_least.iter().all(|(form, rows)| seen.get(form).is_some_and(|seen| seen >= rows)), "{seen:?}");
}

/// `/api` asked for as aggregated protobuf by a client that would take plain JSON; see the test about it.
fn is_core_that_prefers_protobuf(vector: &Value) -> bool {
    let is_core = vector["path"] == "/api" && vector["representation"] == "v2";
    is_core && vector["contentType"] != AGGREGATED && expected(vector) == "legacy"
}

/// Removes, inside out, what one writer leaves out and another writes: members that are null, `""`, `[]` or `{}`.
fn without_empty_members(value: &mut Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(without_empty_members),
        Value::Object(members) => {
            members.values_mut().for_each(without_empty_members);
            members.retain(|_, member| match member {
                Value::Null => false,
                Value::String(text) => !text.is_empty(),
                Value::Array(items) => !items.is_empty(),
                Value::Object(members) => !members.is_empty(),
                _ => true,
            });
        }
        _ => {}
    }
}

#[tokio::test]
async fn the_merge_is_the_one_that_kubernetes_makes_of_the_same_pair() {
    let [old, new] = fixtures::UPSTREAM_PROXY_PAIR;
    let mut recorded = fixtures::discovery_json(new, "apis.v2.json").unwrap();
    without_empty_members(&mut recorded);
    let mut bodies = Vec::new();
    for file in [SIDECAR, GATEWAY] {
        // The third one says what the second one says.
        let plane = ControlPlane::builder(file).versions([old, new, new]).settled().await.unwrap();
        plane.discovered("both sides' types", |answer| answer.text().contains(OLD_GROUP)).await.unwrap();
        let mut clients = vec![plane.client.clone()];
        // The newer one's sidecar says the same, although its apiserver merges, too.
        let other = if file == SIDECAR { Some(plane.sidecar_of(1).await.unwrap()) } else { None };
        if let Some(other) = &other {
            clients.push(plane.client_of(other).await.unwrap());
        }
        plane.apiservers.iter().for_each(lab::StubApiserver::clear_requests);
        for client in clients {
            let answer = eventually(PATIENCE, "the merge", async || {
                let answer = client.get("/apis").header("accept", AGGREGATED).send().await.unwrap();
                if answer.status == 200 && answer.text().contains(OLD_GROUP) { Ok(answer) } else { Err(answer.status) }
            })
            .await
            .unwrap();
            let mut told = answer.json().unwrap();
            without_empty_members(&mut told);
            assert_eq!(told, recorded, "{file}");
            bodies.push((answer.body.clone(), answer.header("etag")));
        }
        // Which has not been taken from the one that merges: all are asked for their own view.
        for apiserver in &plane.apiservers {
            let asked = apiserver.requests_where(|request| &request.target[..] == b"/apis");
            let for_own_view =
                |request: &Request| request.header("accept").is_some_and(|accept| accept.contains("profile=nopeer"));
            assert!(asked.iter().all(for_own_view), "{file} {}: {asked:?}", apiserver.name());
        }
        // Each side's own types are reached, whichever apiserver is asked.
        for (target, servers) in [
            ("/apis/internal.apiserver.k8s.io/v1alpha1/storageversions", &["cp-1"][..]),
            ("/apis/networking.k8s.io/v1beta1/ipaddresses", &["cp-1"]),
            ("/apis/storagemigration.k8s.io/v1/storageversionmigrations", &["cp-2", "cp-3"]),
            ("/apis/certificates.k8s.io/v1/clustertrustbundles", &["cp-2", "cp-3"]),
        ] {
            let answer = plane.get(target).await.unwrap();
            let server = answer.header("x-served-by").unwrap_or_default();
            assert!(answer.status == 200 && servers.contains(&server.as_str()), "{file} {target}: {server}");
        }
    }
    let first = bodies[0].clone();
    assert!(bodies.iter().all(|body| *body == first), "the same bytes under the same tag, everywhere");
}

#[tokio::test]
async fn an_apiserver_that_merges_itself_is_the_same_to_clients() {
    // Beside the newer one, which would answer with its own merge, as long as nobody asks it not to.
    let [old, new] = fixtures::UPSTREAM_PROXY_PAIR;
    let plane = ControlPlane::builder(SIDECAR).versions([new, old, new]).settled().await.unwrap();
    plane.discovered("the other side's types", |answer| answer.text().contains(OLD_GROUP)).await.unwrap();
    let local = &plane.apiservers[0];
    local.clear_requests();
    for (accept, expected) in [
        (AGGREGATED.to_owned(), true),
        (format!("{AGGREGATED};profile=zzz"), true),
        (format!("{AGGREGATED};profile=nopeer"), false),
    ] {
        let answer = plane.client.get("/apis").header("accept", &accept).send().await.unwrap();
        assert_eq!((answer.status, answer.text().contains(OLD_GROUP)), (200, expected), "{accept}");
        assert_eq!(answer.body == local.apis_text(), !expected, "{accept}");
    }
    for request in local.client_requests() {
        assert_eq!(request.header(LOOP_HEADER), None, "{request:?}");
        let condition = request.header("if-none-match");
        assert!(condition.is_none_or(|condition| condition == local.apis_etag()), "its own tag: {request:?}");
    }
    // It forgets its peers: what clients see does not change.
    let before = plane.aggregated("/apis").await.unwrap();
    local.edit_apis(|_| {});
    for _ in 0..EVERY_WORKER {
        assert_eq!(plane.aggregated("/apis").await.unwrap().body, before.body);
    }
}

#[tokio::test]
async fn the_core_group_too_is_told_in_json_to_who_prefers_protobuf() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    plane.discovered_as(1).await.unwrap();
    let protobuf = format!("application/vnd.kubernetes.protobuf;{V2}");
    for accept in [format!("{protobuf},application/json"), format!("*/*,{protobuf}")] {
        for path in ["/apis", "/api", "/api/"] {
            // Else the apiserver answers in protobuf, of itself alone.
            let answer = plane.client.get(path).header("accept", &accept).send().await.unwrap();
            let content_type = answer.header("content-type");
            assert_eq!((answer.status, content_type.as_deref()), (200, Some("application/json")), "{path} {accept}");
        }
    }
}

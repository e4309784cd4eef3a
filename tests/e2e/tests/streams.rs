//! Streams: nothing is buffered, cut or held, however long or large.

use e2e::{ControlPlane, SIDECAR};
use lab::apiserver::BIG_LIST;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Only `cp-2` serves it.
const NEW_GROUP: &str = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";
/// All serve it.
const COMMON: &str = "/api/v1/namespaces/shop/pods";

const MEBIBYTE: u64 = 1 << 20;

#[tokio::test]
async fn upgrades_pass_and_are_rerouted_like_any_request() {
    let plane = ControlPlane::builder(SIDECAR)
        .prepare(|apiservers| {
            // A subresource for streams that only cp-2 has.
            apiservers[1].edit_api(|api| {
                let pods = lab::discovery::version_mut(api, "", "v1").unwrap()["resources"].as_array_mut().unwrap();
                let pods = pods.iter_mut().find(|resource| resource["resource"] == "pods").unwrap();
                let kind = json!({"group": "", "version": "", "kind": "PodAttachOptions"});
                let fresh = json!({"subresource": "console", "responseKind": kind, "verbs": ["create", "get"]});
                pods["subresources"].as_array_mut().unwrap().push(fresh);
            });
            for apiserver in apiservers {
                let name = apiserver.name().to_owned();
                apiserver.respond_with(move |request| {
                    let upgrade = request.header("upgrade")?;
                    let echo = lab::apiserver::Response {
                        status: 101,
                        headers: vec![
                            ("Connection".to_owned(), b"Upgrade".to_vec()),
                            ("Upgrade".to_owned(), upgrade.into_bytes()),
                            ("X-Served-By".to_owned(), name.clone().into_bytes()),
                        ],
                        body: lab::apiserver::Body::Echo,
                    };
                    request.path().contains("/pods/").then_some(echo)
                });
            }
        })
        .settled()
        .await
        .unwrap();
    let core = async || plane.get(&format!("{COMMON}/p1/console")).await.unwrap().header("x-served-by");
    lab::eventually(e2e::PATIENCE, "the subresource to be known", async || {
        for _ in 0..e2e::EVERY_WORKER {
            let server = core().await;
            if server.as_deref() != Some("cp-2") {
                return Err(server);
            }
        }
        Ok(())
    })
    .await
    .unwrap();
    for (method, subresource, upgrade, expected) in [
        ("GET", "exec?command=ls&command=-l&stdout=true", "websocket", "cp-1"),
        ("POST", "exec?command=ls&command=-l&stdout=true", "SPDY/3.1", "cp-1"),
        ("GET", "console", "websocket", "cp-2"),
        ("POST", "console", "SPDY/3.1", "cp-2"),
    ] {
        let why = format!("{method} {subresource} {upgrade}");
        let opened = plane
            .client
            .request(method, format!("{COMMON}/p1/{subresource}"))
            .header("connection", "Upgrade")
            .header("upgrade", upgrade)
            .header("sec-websocket-version", "13")
            .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
            .header("sec-websocket-protocol", "v5.channel.k8s.io")
            .open()
            .await
            .unwrap();
        assert_eq!((opened.status, opened.header("x-served-by").as_deref()), (101, Some(expected)), "{why}");
        let mut stream = opened.upgraded().unwrap();
        for message in [&b"ping"[..], &[0, 255, 13, 10]] {
            stream.write_all(message).await.unwrap();
            let mut echoed = vec![0; message.len()];
            stream.read_exact(&mut echoed).await.unwrap();
            assert_eq!(echoed, message, "{why}");
        }
    }
    let unknown =
        plane.client.get(format!("{COMMON}/p1/exec")).header("connection", "Upgrade").header("upgrade", "tcp");
    assert_eq!(unknown.send().await.unwrap().status, 403, "Envoy's own refusal is not rewritten");
}

#[tokio::test]
async fn a_list_of_60_mib_streams_through_and_a_body_of_3_mib_arrives_whole() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    for (path, server) in [(COMMON, "cp-1"), (NEW_GROUP, "cp-2")] {
        let bytes = 60 * MEBIBYTE;
        let list =
            plane.client.get(format!("{path}?labelSelector={}", BIG_LIST.replace('=', "%3D")) + &bytes.to_string());
        let opened = list.open().await.unwrap();
        assert_eq!((opened.status, opened.header("x-served-by").as_deref()), (200, Some(server)));
        let length = opened.count().await.unwrap();
        assert!(length >= bytes, "{path}: {length} bytes");

        let body = vec![b'x'; 3 * MEBIBYTE as usize];
        for chunked in [false, true] {
            let request = plane.client.post(path, body.clone()).header("content-type", "application/json");
            let request = if chunked { request.chunked() } else { request };
            let answer = request.send().await.unwrap();
            assert_eq!(answer.status, 201, "{path}");
            assert_eq!(answer.json().unwrap()["receivedBytes"], 3 * MEBIBYTE, "{path}");
        }

        // A client that goes away in the middle leaves nothing behind.
        let list =
            plane.client.get(format!("{path}?labelSelector={}", BIG_LIST.replace('=', "%3D")) + &bytes.to_string());
        let mut opened = list.open().await.unwrap();
        opened.next_chunk().await.unwrap();
        drop(opened);
    }
    lab::eventually(e2e::PATIENCE, "all streams to be gone", async || {
        let active = plane.envoy.stat_sum("upstream_rq_active").await.unwrap();
        // Polls may be on their way.
        if active <= 6 { Ok(()) } else { Err(active) }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn watches_live_through_refreshes_and_failures_of_discovery() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    let [local, new, _] = &plane.apiservers[..] else { panic!("three apiservers") };
    let open =
        async |path: &str| plane.client.get(format!("{path}?watch=true&timeoutSeconds=3000")).open().await.unwrap();
    let mut watches = [(local, open(COMMON).await), (new, open(NEW_GROUP).await)];

    let polls = |count| {
        let seen = new.polls().len();
        async move {
            lab::eventually(e2e::PATIENCE, "more polls", async || new.polls().len() >= seen + count).await.unwrap()
        }
    };
    polls(12).await;
    new.fail(lab::apiserver::Scope::Discovery, lab::apiserver::Fault::Status(503, None));
    polls(12).await;
    new.heal();
    // The type moves to another apiserver; the stream stays where it is.
    local.set_version("1.37.2").unwrap();
    new.set_version("1.34.4").unwrap();
    polls(12).await;

    for (apiserver, watch) in &mut watches {
        let event = json!({"type": "ADDED", "object": {"metadata": {"name": apiserver.name()}}});
        apiserver.push_event(&event);
        let chunk = watch.next_chunk().await.unwrap().expect("the watch was cut");
        assert_eq!(serde_json::from_slice::<serde_json::Value>(&chunk).unwrap(), event);
    }
    for (apiserver, watch) in &mut watches {
        apiserver.end_watches();
        assert_eq!(watch.next_chunk().await.unwrap(), None, "the server's own end is a normal end");
    }
}

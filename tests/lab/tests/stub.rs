//! The stub apiserver under the test's control: what it records, how it fails, TLS, watches, upgrades.

use std::time::Duration;

use anyhow::{Context, Result};
use lab::{
    Client, StubApiserver,
    apiserver::{Fault, Gate, HttpVersion, Response, Scope},
    certs::{Authority, ClientTls, SERVER_NAMES, ServerTls},
    eventually,
};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const SOON: Duration = Duration::from_secs(10);

async fn stub() -> (StubApiserver, Client) {
    let stub = StubApiserver::builder("cp-1", "1.37.2").start().await.unwrap();
    let client = Client::plain(stub.addr()).with_timeout(SOON);
    (stub, client)
}

#[tokio::test]
async fn requests_are_recorded_as_on_the_wire() -> Result<()> {
    let (stub, client) = stub().await;
    let mut connection = client.connect().await?;
    let bytes = b"GET /api%2Fv1/pods/%ff\xfe?x=%zz HTTP/1.1\r\nhOst: a\r\nX-B: 1\r\nx-a: \xff\r\nx-b: 2\r\n\r\n";
    assert_eq!(connection.exchange(bytes, b"GET").await?.status, 200);
    assert_eq!(client.get("/version").send_on(&mut connection).await?.status, 200);
    let requests = stub.requests();
    assert_eq!(&requests[0].target[..], b"/api%2Fv1/pods/%ff\xfe?x=%zz");
    let headers: Vec<_> = requests[0].headers.iter().map(|(name, value)| (&name[..], &value[..])).collect();
    assert_eq!(headers, [(&b"hOst"[..], &b"a"[..]), (b"X-B", b"1"), (b"x-a", b"\xff"), (b"x-b", b"2")]);
    assert_eq!(requests[0].connection, requests[1].connection);
    assert_eq!(stub.connections(), 1);
    Ok(())
}

#[tokio::test]
async fn polls_are_told_from_client_requests() -> Result<()> {
    let (stub, client) = stub().await;
    let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList;profile=nopeer,application/json";
    let rerouted = |path| client.get(path).header("accept", accept).header("x-kubernetes-peer-proxied", "true");
    for path in ["/apis", "/openapi/v3"] {
        rerouted(path).header("host", lab::apiserver::FILTER_AUTHORITY).send().await?;
    }
    rerouted("/apis").send().await?;
    client.get("/apis").header("accept", accept).send().await?;
    assert_eq!((stub.polls().len(), stub.client_requests().len()), (1, 2));
    stub.clear_requests();
    assert!(stub.requests().is_empty());
    Ok(())
}

#[tokio::test]
async fn faults_look_to_the_client_as_they_are_named() -> Result<()> {
    let (stub, client) = stub().await;
    let v2 = lab::apiserver::AGGREGATED;
    // What is left of an answer: nothing, a head, a part of the body, all of it.
    let look = async || match client.get("/apis").header("accept", v2).open().await {
        Err(_) => "nothing".to_owned(),
        Ok(mut opened) => {
            let status = opened.status;
            let mut length = 0;
            loop {
                match opened.next_chunk().await {
                    Ok(Some(chunk)) => length += chunk.len(),
                    Ok(None) => return format!("{status}, {length} bytes"),
                    Err(_) => return format!("{status}, {length} bytes, cut"),
                }
            }
        }
    };
    let rows = [
        (Fault::Reset, "nothing"),
        (Fault::ResetAfterHeaders, "200, 0 bytes, cut"),
        (Fault::ResetMidBody, "200, 9939 bytes, cut"),
        (Fault::CutBody, "200, 9939 bytes, cut"),
        (Fault::Status(429, Some(1)), "429, 163 bytes"),
        (Fault::EmptyDocument, "200, 96 bytes"),
        (Fault::WrongKind, "200, 67 bytes"),
        (Fault::NotJson, "200, 27 bytes"),
        (Fault::NotUtf8, "200, 41 bytes"),
        (Fault::Oversized(20_000_000), "200, 20000000 bytes"),
        (Fault::Delay(Duration::from_millis(1)), "200, 19879 bytes"),
        (Fault::answer(|_| Response::new(204)), "204, 0 bytes"),
    ];
    for (fault, want) in rows {
        let sentence = format!("{fault:?}");
        stub.fail_times(1, Scope::Apis, fault);
        assert_eq!(look().await, want, "{sentence}");
        assert_eq!(look().await, "200, 19879 bytes", "after {sentence}");
        assert_eq!(client.get("/version").send().await?.status, 200, "{sentence}");
    }
    stub.fail(Scope::All, Fault::Hang);
    let impatient = Client::plain(stub.addr()).with_timeout(Duration::from_millis(100));
    assert!(impatient.get("/version").send().await.is_err());
    stub.heal();
    assert_eq!(look().await, "200, 19879 bytes");
    Ok(())
}

#[tokio::test]
async fn a_gate_holds_answers_until_it_is_opened() -> Result<()> {
    let (stub, client) = stub().await;
    let gate = Gate::closed();
    stub.fail(Scope::path("/version"), Fault::Hold(gate.clone()));
    let asked = tokio::spawn(async move { client.get("/version").send().await });
    eventually(SOON, "the request to wait at the gate", async || gate.waiting() == 1).await?;
    assert!(!asked.is_finished());
    gate.open();
    assert_eq!(asked.await??.status, 200);
    assert_eq!(gate.waiting(), 0);
    Ok(())
}

#[tokio::test]
async fn a_stopped_stub_refuses_and_comes_back_on_its_port() -> Result<()> {
    let (stub, client) = stub().await;
    let mut kept = client.connect().await?;
    assert_eq!(client.get("/version").send_on(&mut kept).await?.status, 200);
    stub.refuse().await;
    assert!(client.connect().await.is_err());
    assert_eq!(client.get("/version").send_on(&mut kept).await?.status, 200, "open connections live on");
    stub.stop().await;
    assert!(client.get("/version").send_on(&mut kept).await.is_err());
    for _ in 0..3 {
        stub.restart().await?;
        assert_eq!(client.get("/version").send().await?.status, 200);
        stub.stop().await;
        assert!(client.connect().await.is_err());
    }
    Ok(())
}

#[tokio::test]
async fn a_hook_goes_before_everything() -> Result<()> {
    let (stub, client) = stub().await;
    stub.fail(Scope::All, Fault::Reset);
    stub.respond_with(|request| (request.path() == "/version").then(|| Response::bare(418).text("a teapot")));
    assert_eq!(client.get("/version").send().await?.text(), "a teapot");
    assert!(client.get("/healthz").send().await.is_err());
    stub.respond_as_usual();
    assert!(client.get("/version").send().await.is_err());
    Ok(())
}

#[tokio::test]
async fn watches_carry_what_the_test_pushes_and_end_when_told() -> Result<()> {
    let (stub, client) = stub().await;
    let mut pods = client.get("/api/v1/pods?watch=true").open().await?;
    let mut maps = client.get("/api/v1/watch/namespaces/default/configmaps").open().await?;
    assert_eq!(stub.watches(), 2);
    stub.push_event_to("configmaps", &json!({"type": "ADDED"}));
    stub.push_event(&json!({"type": "BOOKMARK"}));
    assert_eq!(pods.next_chunk().await?.unwrap(), "{\"type\":\"BOOKMARK\"}\n");
    assert_eq!(maps.next_chunk().await?.unwrap(), "{\"type\":\"ADDED\"}\n");
    drop(maps);
    eventually(SOON, "the stub to notice that one client is gone", async || stub.watches() == 1).await?;
    stub.end_watches();
    assert_eq!(pods.next_chunk().await?, None);
    Ok(())
}

#[tokio::test]
async fn upgrades_switch_protocols_and_echo() -> Result<()> {
    let (_stub, client) = stub().await;
    for (method, protocol) in [("GET", "websocket"), ("POST", "SPDY/3.1")] {
        let request = client.request(method, "/api/v1/namespaces/default/pods/web/exec?command=sh");
        let opened = request.header("Connection", "Upgrade").header("Upgrade", protocol).open().await?;
        assert_eq!((opened.status, opened.header("upgrade").as_deref()), (101, Some(protocol)));
        let mut stream = opened.upgraded()?;
        stream.write_all(b"hello").await?;
        let mut echo = [0; 5];
        stream.read_exact(&mut echo).await?;
        assert_eq!(&echo, b"hello");
    }
    Ok(())
}

#[tokio::test]
async fn http2_streams_and_resets_too() -> Result<()> {
    let (stub, client) = stub().await;
    let http2 = client.http2().await?;
    let big = client.get("/api/v1/pods?labelSelector=lab-bytes%3D3000000").open_over(&http2).await?;
    let mut watch = client.get("/api/v1/pods?watch=1").open_over(&http2).await?;
    assert_eq!(big.count().await?, 3_000_000);
    stub.push_event(&json!({"n": 1}));
    assert_eq!(watch.next_chunk().await?.unwrap(), "{\"n\":1}\n");
    stub.fail_times(1, Scope::All, Fault::Reset);
    assert!(client.get("/version").send_over(&http2).await.is_err());
    stub.fail_times(1, Scope::All, Fault::ResetMidBody);
    assert!(client.get("/apis").send_over(&http2).await.is_err());
    let answer = client.post("/api/v1/namespaces/a/pods", "body").send_over(&http2).await?;
    assert_eq!(answer.json()?["receivedBytes"], 4);
    let last = stub.requests().pop().unwrap();
    assert_eq!((last.version, last.header("host")), (HttpVersion::Http2, Some(stub.addr().to_string())));
    assert_eq!(stub.connections(), 1);
    Ok(())
}

#[tokio::test]
async fn who_is_nobody_ends_an_http2_connection_and_no_open_stream() -> Result<()> {
    let stub = StubApiserver::builder("cp-1", "1.37.2").token("t", "dev").start().await?;
    let client = Client::plain(stub.addr());
    let known = client.clone().with_token("t");
    for (what, stranger, path, status, ends) in [
        ("a known token", known.clone(), "/api/v1/pods", 200, false),
        ("an unknown token", client.clone().with_token("x"), "/api/v1/pods", 401, true),
        ("no token", client.clone(), "/api/v1/pods", 403, true),
        ("no token, for what is public", client.clone(), "/version", 200, true),
    ] {
        let http2 = client.http2().await?;
        let mut watch = known.get("/api/v1/pods?watch=true").open_over(&http2).await?;
        assert_eq!(stranger.get(path).send_over(&http2).await?.status, status, "{what}");
        let next = async || known.get("/api/v1/pods").send_over(&http2).await.is_err();
        if ends {
            eventually(SOON, "a connection that takes no other request", next).await.context(what)?;
        } else {
            assert!(!next().await, "{what}: a request that comes afterwards");
        }
        stub.push_event(&json!({"type": "BOOKMARK"}));
        assert!(watch.next_chunk().await?.is_some(), "{what}: the stream that was open");
        stub.end_watches();
        // HTTP/1.1 carries one request at a time: nobody else is concerned.
        let mut connection = client.connect().await?;
        assert_eq!(stranger.get(path).send_on(&mut connection).await?.status, status, "{what}");
        assert_eq!(known.get("/api/v1/pods").send_on(&mut connection).await?.status, 200, "{what}");
    }
    Ok(())
}

#[tokio::test]
async fn tls_shows_the_stub_who_asks() -> Result<()> {
    let (ca, other) = (Authority::new("ca")?, Authority::new("another ca")?);
    let server = ServerTls::new(&ca.server(&SERVER_NAMES)?)?;
    let admin = ca.client("admin", &["system:masters", "dev"])?;
    let stranger = other.client("admin", &["system:masters"])?;

    let optional = StubApiserver::builder("cp-1", "1.37.2").tls(server.optional_clients(&ca)?).token("t", "dev");
    let optional = optional.start().await?;
    let trusting = ClientTls::new(&ca, "localhost")?;
    let anonymous = Client::tls(optional.addr(), trusting.clone());
    let named = Client::tls(optional.addr(), trusting.clone().identity(&admin)?);
    let wrong = Client::tls(optional.addr(), trusting.clone().identity(&stranger)?);
    let pods = "/api/v1/pods";
    assert_eq!(anonymous.get(pods).send().await?.status, 403);
    assert_eq!(anonymous.clone().with_token("t").get(pods).send().await?.json()?["user"], "dev");
    assert_eq!(named.get(pods).send().await?.json()?["user"], "admin");
    assert!(wrong.get(pods).send().await.is_err());
    assert_eq!(optional.failed_handshakes(), 1);
    let http2 = named.http2().await?;
    named.get(pods).send_over(&http2).await?;
    let last = optional.requests().pop().unwrap();
    assert_eq!(last.client_subject.unwrap().organizations, ["system:masters", "dev"]);
    assert_eq!(last.server_name.as_deref(), Some("localhost"));

    let required = StubApiserver::builder("cp-2", "1.37.2").tls(server.required_clients(&ca)?).start().await?;
    assert!(Client::tls(required.addr(), trusting.clone()).get(pods).send().await.is_err());
    let front = ca.client("front-proxy-client", &[])?;
    let front = Client::tls(required.addr(), trusting.identity(&front)?);
    assert_eq!(front.get(pods).header("X-Remote-User", "jane").send().await?.json()?["user"], "jane");
    Ok(())
}

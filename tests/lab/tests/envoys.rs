//! A real Envoy in front of a stub apiserver.

use anyhow::Result;
use lab::{
    Client, Envoy, StubApiserver,
    certs::{Authority, ClientTls, SERVER_NAMES},
    envoy::{Config, FuncE, Pushed},
};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[tokio::test]
async fn requests_pass_through_an_envoy() -> Result<()> {
    let stub = StubApiserver::builder("cp-1", "1.37.2").start().await?;
    let envoy = Envoy::builder(Config::passing_to(stub.addr())).concurrency(1).start().await?;
    let client = envoy.client("main").await?;
    let answer = client.get("/apis/apps/v1/deployments/%77eb").header("X-Odd", b"\xc3\xbc").send().await?;
    assert_eq!(answer.json()?["servedBy"], "cp-1");
    assert_eq!(&stub.requests()[0].target[..], b"/apis/apps/v1/deployments/%77eb");
    assert_eq!(client.get("/api/v1/pods?labelSelector=lab-bytes%3D5000000").open().await?.count().await?, 5_000_000);

    let mut watch = client.get("/api/v1/pods?watch=1").open().await?;
    stub.push_event(&json!({"type": "ADDED"}));
    assert_eq!(watch.next_chunk().await?.unwrap(), "{\"type\":\"ADDED\"}\n");

    let exec = client.get("/api/v1/namespaces/a/pods/b/exec").header("Connection", "Upgrade");
    let mut stream = exec.header("Upgrade", "websocket").open().await?.upgraded()?;
    stream.write_all(b"ping").await?;
    let mut echo = [0; 4];
    stream.read_exact(&mut echo).await?;

    let http2 = client.http2().await?;
    assert_eq!(client.get("/version").send_over(&http2).await?.status, 200);
    assert_eq!(envoy.stat("cluster.upstream.upstream_rq_101").await?, Some(1));
    assert!(envoy.prometheus().await?.contains("envoy_cluster_upstream_rq"));
    assert!(envoy.pid()? > 0);
    envoy.stop().await
}

#[tokio::test]
async fn a_bad_configuration_is_told_with_envoys_own_words() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let good = Config::passing_to("127.0.0.1:9".parse()?);
    Envoy::validate(&good.write(&directory.path().join("good.json"))?).await?;
    let bad = good.edit(|config| config["static_resources"]["nonsense"] = 1.into());
    let error = Envoy::validate(&bad.write(&directory.path().join("bad.json"))?).await.unwrap_err().to_string();
    assert!(error.contains("nonsense"), "{error}");
    let error = Envoy::builder(bad).start().await.err().expect("Envoy started with nonsense");
    assert!(format!("{error:#}").contains("nonsense"), "{error:#}");
    Ok(())
}

#[tokio::test]
async fn listeners_can_be_replaced_and_refused_at_run_time() -> Result<()> {
    let stub = StubApiserver::builder("cp-1", "1.37.2").start().await?;
    let config = Config::passing_to(stub.addr());
    let listener = config.value()["static_resources"]["listeners"][0].clone();
    let envoy = Envoy::builder(config).concurrency(1).listeners_by_lds().start().await?;
    assert_eq!(envoy.client("main").await?.get("/version").send().await?.status, 200);
    let mut renamed = listener.clone();
    renamed["name"] = "other".into();
    assert_eq!(envoy.push_listeners(&[listener.clone(), renamed.clone()]).await?, Pushed::Accepted);
    assert_eq!(envoy.client("other").await?.get("/version").send().await?.status, 200);
    renamed["filter_chains"][0]["filters"][0]["typed_config"]["stat_prefix"] = "".into();
    assert_eq!(envoy.push_listeners(&[listener, renamed]).await?, Pushed::Rejected);
    assert_eq!(envoy.client("other").await?.get("/version").send().await?.status, 200);
    Ok(())
}

#[tokio::test]
async fn envoy_takes_the_labs_certificates() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let ca = Authority::new("ca")?;
    ca.write(directory.path(), "ca.crt")?;
    ca.server(&SERVER_NAMES)?.write(directory.path(), "server.crt", "server.key")?;
    let file = |name: &str| json!({"filename": directory.path().join(name)});
    let tls = json!({
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext",
        "require_client_certificate": true,
        "common_tls_context": {
            "alpn_protocols": ["h2", "http/1.1"],
            "tls_certificates": [{"certificate_chain": file("server.crt"), "private_key": file("server.key")}],
            "validation_context": {"trusted_ca": file("ca.crt")},
        },
    });
    let stub = StubApiserver::builder("cp-1", "1.37.2").start().await?;
    let config = Config::passing_to(stub.addr()).edit(|config| {
        let chain = &mut config["static_resources"]["listeners"][0]["filter_chains"][0];
        chain["transport_socket"] = json!({"name": "tls", "typed_config": tls});
        let manager = &mut chain["filters"][0]["typed_config"];
        manager["forward_client_cert_details"] = "SANITIZE_SET".into();
        manager["set_current_client_cert_details"] = json!({"subject": true});
    });
    let envoy = Envoy::builder(config).concurrency(1).start().await?;
    let trusting = ClientTls::new(&ca, "kubernetes.default.svc")?;
    let jane = trusting.clone().identity(&ca.client("jane", &["a", "b"])?)?;
    let address = envoy.listener_addr("main").await?;
    assert_eq!(Client::tls(address, jane.clone()).get("/version").send().await?.status, 200);
    let subject = stub.requests()[0].header("x-forwarded-client-cert").unwrap();
    assert!(subject.contains("CN=jane,O=b,O=a"), "{subject}");
    assert!(Client::tls(address, trusting).get("/version").send().await.is_err());
    let client = Client::tls(address, jane);
    let http2 = client.http2().await?;
    assert_eq!(client.get("/version").send_over(&http2).await?.status, 200);
    Ok(())
}

#[tokio::test]
async fn func_e_runs_an_envoy() -> Result<()> {
    let stub = StubApiserver::builder("cp-1", "1.37.2").start().await?;
    let directory = tempfile::tempdir()?;
    let config = Config::passing_to(stub.addr()).edit(|config| {
        let address = json!({"socket_address": {"address": "127.0.0.1", "port_value": 0}});
        config["admin"] = json!({"address": address});
    });
    let file = config.write(&directory.path().join("envoy.json"))?;
    let func_e = FuncE::run(&file, directory.path()).await?;
    let admin = func_e.admin();
    assert_eq!(Client::plain(admin).get("/ready").send().await?.status, 200);
    func_e.stop().await?;
    assert!(Client::plain(admin).connect().await.is_err());
    Ok(())
}

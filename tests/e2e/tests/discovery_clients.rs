//! Real clients find through Envoy what the newest apiserver has, although the oldest one answers them.
//!
//! `cp-1`, the local one, runs 1.34.4, `cp-2` 1.37.2 and `cp-3` 1.36.3.

use std::{net::SocketAddr, path::Path, process::Stdio};

use anyhow::{Context, Result};
use e2e::{ControlPlane, EVERY_WORKER, PATIENCE, SIDECAR};
use kube::{
    Api, Config,
    api::{DynamicObject, GroupVersionKind, ListParams},
    config::{KubeConfigOptions, Kubeconfig},
    discovery::Discovery,
};
use lab::{
    apiserver::{Fault, Scope},
    discovery::{self, Resource},
    envoy::kubectl_binary,
    eventually,
};
use serde_json::json;
use tokio::process::Command;

const NEW_GROUP: &str = "storagemigration.k8s.io";

/// What kubectl said.
#[derive(Debug, PartialEq, Eq)]
struct Said {
    code: Option<i32>,
    output: String,
    errors: String,
}

impl Said {
    /// The first words of the lines of the output.
    fn names(&self) -> Vec<&str> {
        self.output.lines().filter_map(|line| line.split_whitespace().next()).collect()
    }
}

/// A kubeconfig for an address, as JSON, which is YAML.
fn kubeconfig(plane: &ControlPlane, address: SocketAddr) -> String {
    let authority = plane.ca();
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "clusters": [{"name": "lab", "cluster": {
            "server": format!("https://{address}"),
            "certificate-authority": authority,
            "tls-server-name": "localhost",
        }}],
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "lab"}}],
        "users": [{"name": "lab", "user": {"token": "lab"}}],
    })
    .to_string()
}

/// Runs kubectl with nothing remembered from an earlier run.
async fn kubectl(plane: &ControlPlane, address: SocketAddr, arguments: &[&str]) -> Result<Said> {
    let home = tempfile::tempdir()?;
    let config = home.path().join("config");
    std::fs::write(&config, kubeconfig(plane, address))?;
    run(home.path(), &config, arguments).await
}

async fn run(home: &Path, config: &Path, arguments: &[&str]) -> Result<Said> {
    let mut command = Command::new(kubectl_binary().await?);
    command.env_clear().env("HOME", home).arg("--kubeconfig").arg(config).arg("--cache-dir").arg(home.join("cache"));
    command.args(["--request-timeout", "20s"]).args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    let output = tokio::time::timeout(PATIENCE, command.output()).await.context("kubectl does not end")??;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(Said { code: output.status.code(), output: text(&output.stdout), errors: text(&output.stderr) })
}

async fn envoy(plane: &ControlPlane) -> SocketAddr {
    plane.envoy.listener_addr("apiserver").await.unwrap()
}

/// Waits until all workers tell of the whole cluster, schemas included.
async fn told_all(plane: &ControlPlane) -> Result<()> {
    plane.discovered("the new group", |answer| answer.text().contains(NEW_GROUP)).await?;
    eventually(PATIENCE, "the schemas of the new group on all workers", async || {
        for _ in 0..EVERY_WORKER {
            let root = plane.get("/openapi/v3").await.and_then(|answer| answer.json());
            if root.is_ok_and(|root| root["paths"][format!("apis/{NEW_GROUP}/v1")].is_null()) {
                return false;
            }
        }
        true
    })
    .await
}

#[tokio::test]
async fn kubectl_sees_through_the_oldest_apiserver_what_the_newest_has() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    told_all(&plane).await.unwrap();
    let (here, new, old) = (envoy(&plane).await, plane.apiservers[1].addr(), plane.apiservers[0].addr());
    for (arguments, expected) in [
        (&["api-resources"][..], "storageversionmigrations"),
        (&["api-resources", "--sort-by=name", "-o", "wide"], "clustertrustbundles"),
        (&["api-resources", "--api-group=storagemigration.k8s.io"], "storageversionmigrations"),
        (&["api-versions"], "storagemigration.k8s.io/v1"),
        (&["explain", "storageversionmigrations"], "KIND:       StorageVersionMigration"),
        (&["explain", "clustertrustbundles.spec"], "FIELD: spec"),
        (&["explain", "deployments", "--recursive"], "KIND:       Deployment"),
        (&["get", "storageversionmigrations"], "cp-2"),
        (&["get", "storageversionmigrations", "sm-1"], "sm-1"),
        (&["get", "clustertrustbundles.v1.certificates.k8s.io"], "cp-2"),
        (&["get", "storageversionmigrations", "-o", "name"], "storageversionmigration.storagemigration.k8s.io/lab"),
    ] {
        let through = kubectl(&plane, here, arguments).await.unwrap();
        assert_eq!(through, kubectl(&plane, new, arguments).await.unwrap(), "{arguments:?}");
        assert_eq!((through.code, through.errors.as_str()), (Some(0), ""), "{arguments:?}");
        assert!(through.output.contains(expected), "{arguments:?}: {}", through.output);
        let alone = kubectl(&plane, old, arguments).await.unwrap();
        assert!(arguments[1..] == ["deployments", "--recursive"] || alone != through, "{arguments:?}: no difference");
    }
}

#[tokio::test]
async fn kubectl_remembers_and_asks_again() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    told_all(&plane).await.unwrap();
    let home = tempfile::tempdir().unwrap();
    let config = home.path().join("config");
    std::fs::write(&config, kubeconfig(&plane, envoy(&plane).await)).unwrap();
    let ask = async || run(home.path(), &config, &["api-resources", "--cached=false"]).await.unwrap();
    let first = ask().await;
    plane.apiservers[0].clear_requests();
    assert_eq!(ask().await, first);
    let tag = plane.apiservers[0].apis_etag();
    let asked = plane.apiservers[0].client_requests().into_iter().filter(|request| request.path() == "/apis");
    assert!(asked.into_iter().all(|request| request.header("if-none-match") == Some(tag.clone())));
    // A peer has another type: who remembers finds it out.
    plane.apiservers[1].edit_apis(|apis| {
        discovery::add_resource(apis, "apps", "v1", Resource::new("crates", "Crate"));
    });
    plane.discovered_as(1).await.unwrap();
    assert!(ask().await.names().contains(&"crates"));
}

#[tokio::test]
async fn kubectl_goes_on_working_while_an_apiserver_is_unknown_and_says_so() {
    let plane = ControlPlane::builder(SIDECAR).stopped(2).start().await.unwrap();
    told_all(&plane).await.unwrap();
    let (here, new) = (envoy(&plane).await, plane.apiservers[1].addr());

    // kubectl passes over the mark in silence, as it does over an aggregated API whose backend is down.
    let listed = kubectl(&plane, here, &["api-resources"]).await.unwrap();
    let expected = kubectl(&plane, new, &["api-resources"]).await.unwrap();
    assert_eq!(listed, expected, "what there is is listed");
    plane.apiservers[1].edit_apis(|apis| {
        discovery::add_resource(apis, "meter.example", "v1", Resource::new("meters", "Meter"));
        discovery::remove_resource(apis, "meter.example", "v1", "meters");
        discovery::set_freshness(apis, "meter.example", "v1", "Stale");
    });
    assert_eq!(kubectl(&plane, new, &["api-resources"]).await.unwrap(), expected, "so it does");

    for arguments in [
        &["get", "storageversionmigrations"][..],
        &["get", "pods"],
        &["get", "clustertrustbundles"],
        &["explain", "storageversionmigrations"],
    ] {
        let said = kubectl(&plane, here, arguments).await.unwrap();
        let expected =
            kubectl(&plane, if arguments[1] == "pods" { plane.apiservers[0].addr() } else { new }, arguments);
        assert_eq!((said.code, &said.output), (Some(0), &expected.await.unwrap().output), "{arguments:?}: {said:?}");
    }
    let versions = kubectl(&plane, here, &["api-versions"]).await.unwrap();
    assert_eq!(versions.code, Some(0), "{versions:?}");
    assert!(versions.names().contains(&"storagemigration.k8s.io/v1"), "{versions:?}");
    let unknown = kubectl(&plane, here, &["get", "nosuchthings"]).await.unwrap();
    let error = "error: the server doesn't have a resource type \"nosuchthings\"\n";
    assert_eq!((unknown.code, unknown.errors.as_str()), (Some(1), error), "kubectl asks nobody");
}

#[tokio::test]
async fn kubectl_waits_until_discovery_can_be_told() {
    // cp-3 holds the first question of the filter, so that nothing can be told of the whole cluster.
    let plane = ControlPlane::builder(SIDECAR)
        .plugin(&json!({"discovery": {"timeout": "60s"}}))
        .prepare(|apiservers| {
            apiservers[2].fail(Scope::Polls, Fault::Hang);
        })
        .start()
        .await
        .unwrap();
    let here = envoy(&plane).await;
    let new_type = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";
    eventually(PATIENCE, "the others to be known", async || plane.get(new_type).await.unwrap().status == 200)
        .await
        .unwrap();
    let asked_for_roots = || {
        let requests = plane.apiservers[0].client_requests();
        requests.into_iter().filter(|request| request.path() == "/apis" || request.path() == "/api").count()
    };
    plane.apiservers[0].clear_requests();
    let arguments = ["get", "storageversionmigrations"];
    let told = async {
        // Both roots, and both again: kubectl does as Retry-After says.
        eventually(PATIENCE, "kubectl to ask again", async || asked_for_roots() >= 4).await.unwrap();
        plane.apiservers[2].heal();
        plane.apiservers[2].close_connections().await;
    };
    let (said, ()) = tokio::join!(kubectl(&plane, here, &arguments), told);
    let said = said.unwrap();
    assert_eq!(said, kubectl(&plane, plane.apiservers[1].addr(), &arguments).await.unwrap());
    assert_eq!((said.code, said.errors.as_str()), (Some(0), ""));
    plane.discovered_as(1).await.unwrap();
}

async fn kube_client(plane: &ControlPlane, address: SocketAddr) -> kube::Client {
    let config: Kubeconfig = serde_json::from_str(&kubeconfig(plane, address)).unwrap();
    let mut config = Config::from_custom_kubeconfig(config, &KubeConfigOptions::default()).await.unwrap();
    // Else it would repeat for minutes what is answered with a 503.
    config.default_retry = false;
    kube::Client::try_from(config).unwrap()
}

#[tokio::test]
async fn kube_rs_finds_and_reads_what_only_the_newest_has() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    told_all(&plane).await.unwrap();
    let kind = GroupVersionKind::gvk(NEW_GROUP, "v1", "StorageVersionMigration");
    let old = kube_client(&plane, plane.apiservers[0].addr()).await;
    assert!(!Discovery::new(old).run_aggregated().await.unwrap().has_group(NEW_GROUP));
    let client = kube_client(&plane, envoy(&plane).await).await;
    for found in [
        Discovery::new(client.clone()).run_aggregated().await.unwrap(),
        Discovery::new(client.clone()).run().await.unwrap(),
    ] {
        let (resource, capabilities) = found.resolve_gvk(&kind).unwrap();
        assert_eq!(resource.plural, "storageversionmigrations");
        assert!(capabilities.subresources.iter().any(|(subresource, _)| subresource.plural.ends_with("status")));
        let listed =
            Api::<DynamicObject>::all_with(client.clone(), &resource).list(&ListParams::default()).await.unwrap();
        assert_eq!(listed.items[0].metadata.name.as_deref(), Some(lab::apiserver::THE_OBJECT));
    }
}

#[tokio::test]
async fn kube_rs_is_told_where_discovery_may_be_incomplete() {
    let plane = ControlPlane::builder(SIDECAR).stopped(2).start().await.unwrap();
    told_all(&plane).await.unwrap();
    let client = kube_client(&plane, envoy(&plane).await).await;
    let aggregated = Discovery::new(client.clone()).run_aggregated().await.unwrap();
    assert!(aggregated.has_group(NEW_GROUP) && aggregated.has_group("apps"));
    let error = Discovery::new(client).run().await.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("what all apiservers serve"), "the walk ends at the mark: {error}");
}

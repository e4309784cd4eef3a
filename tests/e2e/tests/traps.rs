//! A worker's VM that dies, in a build of the module that traps on command: what it costs, and that it ends.

use std::time::{Duration, Instant};

use e2e::{ControlPlane, EVERY_WORKER, PATIENCE, SIDECAR, TRAP};
use lab::{
    apiserver::{Fault, Gate, Response, Scope},
    eventually,
};
use serde_json::{Value, json};

/// Only `cp-2` serves it.
const NEW_GROUP: &str = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";
/// Nobody serves it.
const NOBODY: &str = "/apis/apps/v1/namespaces/shop/nosuch";

/// Loads the trapping module, and shortens the idle limit of ordinary routes.
fn trapping(config: &mut Value) {
    e2e::trapping(config);
    *config = serde_json::from_str(&config.to_string().replace("\"120s\"", "\"2s\"")).unwrap();
}

#[tokio::test]
async fn a_worker_that_traps_comes_back_with_what_was_known() {
    let plane = ControlPlane::builder(SIDECAR)
        .edit(trapping)
        .plugin(&json!({"discovery": {"refreshInterval": "10m"}}))
        .settled()
        .await
        .unwrap();
    for round in 0..4 {
        let trapped = plane.client.get("/api/v1/pods").header(TRAP, "now").send().await.unwrap();
        assert_eq!(trapped.status, 503, "the request that hit the defect");
        let start = Instant::now();
        eventually(PATIENCE, "all workers to answer again", async || {
            for _ in 0..EVERY_WORKER {
                let answer = plane.get(NEW_GROUP).await.unwrap();
                assert_ne!(answer.status, 404, "not even now");
                if answer.status != 200 {
                    return Err(answer.status);
                }
            }
            Ok(())
        })
        .await
        .unwrap();
        assert!(start.elapsed() < Duration::from_secs(5), "round {round}: {:?}", start.elapsed());
    }
    assert!(plane.envoy.stat_sum("vm_reload_success").await.unwrap() >= 1);
}

#[tokio::test]
async fn the_lead_moves_within_a_lease_and_requests_do_not_notice() {
    let plane = ControlPlane::builder(SIDECAR)
        .edit(trapping)
        .envoy(|envoy| envoy.concurrency(4))
        .plugin(&json!({"discovery": {"refreshInterval": "1s"}}))
        .settled()
        .await
        .unwrap();
    let apiserver = &plane.apiservers[1];
    let leads = |log: &str| log.matches("this worker polls for all").count();
    assert_eq!(leads(&plane.envoy.log()), 1);
    let command = apiserver.fail_times(
        1,
        Scope::Polls,
        Fault::answer(|_| Response::new(200).header(TRAP, "now").header("Content-Type", "application/json").body("{}")),
    );
    eventually(PATIENCE, "the leader to trap", async || plane.envoy.log().contains("trapped on command"))
        .await
        .unwrap();
    apiserver.heal_one(command);
    let start = Instant::now();
    eventually(PATIENCE, "another leader", async || {
        let answer = plane.get(NEW_GROUP).await.unwrap();
        assert_eq!(answer.status, 200, "requests do not notice: the leader is on Envoy's main thread");
        if leads(&plane.envoy.log()) >= 2 { Ok(()) } else { Err(plane.envoy.log()) }
    })
    .await
    .unwrap();
    // A lease of two seconds, a tick, the log's flush, and what a busy machine adds.
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
    apiserver.clear_requests();
    eventually(PATIENCE, "polls by the new leader", async || apiserver.polls().len() >= 4).await.unwrap();
}

#[tokio::test]
async fn an_answer_that_a_dead_worker_held_is_ended_by_the_routes_idle_limit() {
    let plane = ControlPlane::builder(SIDECAR)
        .edit(trapping)
        .envoy(|envoy| envoy.concurrency(1))
        .plugin(&json!({"discovery": {"refreshInterval": "10m", "timeout": "20s"}}))
        .settled()
        .await
        .unwrap();
    let gate = Gate::closed();
    plane.apiservers[1].fail(Scope::Polls, Fault::Hold(gate.clone()));
    let client = plane.client.clone();
    let held = tokio::spawn(async move { client.get(NOBODY).send().await });
    eventually(PATIENCE, "a question", async || gate.waiting() > 0).await.unwrap();
    let start = Instant::now();
    assert_eq!(plane.client.get("/api/v1/pods").header(TRAP, "now").send().await.unwrap().status, 503);
    match held.await.unwrap() {
        Ok(answer) => assert!(answer.status >= 500, "{}: never the 404 that was held", answer.status),
        Err(error) => println!("the stream was cut: {error:#}"),
    }
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    gate.open();
}

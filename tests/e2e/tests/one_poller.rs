//! One worker of a real Envoy polls for all of them, whatever is configured how often.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use e2e::{ControlPlane, EVERY_WORKER, PATIENCE, SIDECAR, plugin_configuration};
use lab::{StubApiserver, envoy::EnvoyBuilder, eventually};
use serde_json::json;

/// Only `cp-2` serves it.
const NEW_GROUP: &str = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";
/// Only 1.37.2 with all APIs switched on serves it.
const ALPHA: &str = "/apis/internal.apiserver.k8s.io/v1alpha1/storageversions";

#[tokio::test]
async fn four_workers_poll_like_one() {
    let start = Instant::now();
    let plane = ControlPlane::builder(SIDECAR)
        .envoy(|envoy| envoy.concurrency(4))
        .plugin(&json!({"discovery": {"refreshInterval": "1s"}}))
        .settled()
        .await
        .unwrap();
    println!("all workers knew all apiservers {:?} after the test began", start.elapsed());
    plane.apiservers.iter().for_each(StubApiserver::clear_requests);
    let begin = Instant::now();
    eventually(PATIENCE, "ten intervals", async || begin.elapsed() > Duration::from_secs(10)).await.unwrap();
    for apiserver in &plane.apiservers {
        let polls = apiserver.polls();
        let intervals = begin.elapsed().as_secs_f64().ceil() as usize;
        // Waits are jittered by 5 %, and the first and last interval are cut.
        assert!(polls.len() <= 2 * (intervals + 2), "{}: {} polls in {intervals} s", apiserver.name(), polls.len());
        assert!(polls.len() >= 2 * (intervals - 2), "{}: {} polls in {intervals} s", apiserver.name(), polls.len());
        assert!(
            polls.iter().all(|poll| poll.header("if-none-match").is_some()),
            "{}: all ask for changes",
            apiserver.name()
        );
    }
}

#[tokio::test]
async fn a_new_version_is_seen_by_all_workers_within_an_interval() {
    let plane = ControlPlane::builder(SIDECAR)
        .envoy(|envoy| envoy.concurrency(4))
        .plugin(&json!({"discovery": {"refreshInterval": "1s"}}))
        .settled()
        .await
        .unwrap();
    plane.apiservers[2].set_version("1.37.2-api-all").unwrap();
    let start = Instant::now();
    eventually(PATIENCE, "the new type on all workers", async || {
        for _ in 0..2 * EVERY_WORKER {
            let answer = plane.get(ALPHA).await.unwrap();
            // Before that it is doubt: the apiservers, asked, do list it.
            assert_ne!(answer.status, 404);
            if answer.status != 200 {
                return Err(answer.status);
            }
        }
        Ok(())
    })
    .await
    .unwrap();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

#[tokio::test]
async fn two_hundred_configurations_cause_no_404_and_reach_nobody_who_was_removed() {
    let plane = ControlPlane::builder(SIDECAR)
        .versions(["1.34.4", "1.37.2", "1.37.2-api-all"])
        .envoy(EnvoyBuilder::listeners_by_lds)
        .settled()
        .await
        .unwrap();
    let with = plane.config.value()["static_resources"]["listeners"].as_array().unwrap().clone();
    let mut without = with.clone();
    let plugin = plugin_configuration(&mut without[0]);
    plugin["apiservers"].as_array_mut().unwrap().retain(|apiserver| apiserver["name"] != "cp-3");

    let is_over = Arc::new(AtomicBool::new(false));
    let requests = {
        let (client, is_over) = (plane.client.clone(), Arc::clone(&is_over));
        tokio::spawn(async move {
            let mut seen = BTreeMap::<String, usize>::new();
            let mut ticks = tokio::time::interval(Duration::from_millis(5));
            while !is_over.load(Ordering::Relaxed) {
                ticks.tick().await;
                let outcome = match client.get(NEW_GROUP).header("accept", "application/json").send().await {
                    Ok(answer) => answer.status.to_string(),
                    // The listener that accepted the connection has just been replaced.
                    Err(error) => format!("{error:#}").split(':').next().unwrap_or_default().to_owned(),
                };
                *seen.entry(outcome).or_default() += 1;
            }
            seen
        })
    };
    for push in 0..200 {
        plane.envoy.push_listeners(if push % 2 == 0 { &without } else { &with }).await.unwrap();
    }
    plane.envoy.push_listeners(&without).await.unwrap();
    is_over.store(true, Ordering::Relaxed);
    let seen = requests.await.unwrap();
    println!("answers during 200 configurations: {seen:?}");
    assert!(seen.get("200").is_some_and(|count| *count > 100), "{seen:?}");
    assert_eq!(seen.get("404"), None, "{seen:?}");

    eventually(PATIENCE, "the removed apiserver to be out of reach on all workers", async || {
        plane.apiservers[2].clear_requests();
        for _ in 0..EVERY_WORKER {
            plane.get(ALPHA).await.map_err(|error| format!("{error:#}"))?;
        }
        let reached = plane.apiservers[2].client_requests().len();
        if reached == 0 { Ok(()) } else { Err(format!("{reached} requests")) }
    })
    .await
    .unwrap();
    plane.settled().await.unwrap();
}

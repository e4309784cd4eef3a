//! 404s that are held until the apiservers have been asked, on a real Envoy: who is asked, how long it takes, and that
//! nothing hangs.

use std::time::{Duration, Instant};

use e2e::{ControlPlane, GATEWAY, PATIENCE, SIDECAR, plugin_configuration};
use lab::{
    StubApiserver,
    apiserver::{Fault, Gate, Response, Scope},
    eventually,
};
use serde_json::json;

/// Only 1.37.2 serves it, in a group-version that all have.
const NEW_RESOURCE: &str = "/apis/certificates.k8s.io/v1/clustertrustbundles";
/// All serve it.
const COMMON: &str = "/api/v1/namespaces/shop/configmaps";
/// Nobody serves it.
const NOBODY: &str = "/apis/apps/v1/namespaces/shop/nosuch";

/// Polls that come so seldom that every further one is a question.
fn seldom() -> serde_json::Value {
    json!({"discovery": {"refreshInterval": "10m"}})
}

/// How often `/apis` was asked of each apiserver.
fn questions(plane: &ControlPlane) -> Vec<usize> {
    let asked = |apiserver: &StubApiserver| apiserver.polls().iter().filter(|poll| poll.path() == "/apis").count();
    plane.apiservers.iter().map(asked).collect()
}

#[tokio::test]
async fn an_answer_waits_for_the_apiservers_and_no_longer() {
    for file in [SIDECAR, GATEWAY] {
        let plane = ControlPlane::builder(file).plugin(&seldom()).settled().await.unwrap();
        let mut times = Vec::new();
        for _ in 0..10 {
            let before = questions(&plane);
            let start = Instant::now();
            assert_eq!(plane.get(NOBODY).await.unwrap().status, 404, "{file}: all have confirmed it");
            times.push(start.elapsed());
            let asked: Vec<_> = questions(&plane).iter().zip(before).map(|(now, before)| now - before).collect();
            assert!(asked.iter().all(|questions| *questions >= 1), "{file}: everybody was asked: {asked:?}");
        }
        // The spacing of questions is 100 ms for each worker; the rest is one round trip.
        let slowest = times.iter().max().unwrap();
        assert!(*slowest < Duration::from_secs(2), "{file}: {times:?}");
        let quickest = times.iter().min().unwrap();
        assert!(*quickest < Duration::from_millis(90), "{file}: it does not wait for the next regular tick: {times:?}");
    }
}

#[tokio::test]
async fn many_share_a_question() {
    let plane = ControlPlane::builder(SIDECAR).plugin(&seldom()).settled().await.unwrap();
    let before = questions(&plane);
    let gate = Gate::closed();
    plane.apiservers[2].fail(Scope::Polls, Fault::Hold(gate.clone()));
    let mut waiting = tokio::task::JoinSet::new();
    for number in 0..40 {
        let client = plane.client.clone();
        let abort = waiting.spawn(async move { client.get(NOBODY).send().await.map(|answer| answer.status) });
        if number == 0 {
            // The first one asks for all, and goes away.
            eventually(PATIENCE, "a question", async || gate.waiting() > 0).await.unwrap();
            abort.abort();
        }
    }
    eventually(PATIENCE, "all to be with the apiserver", async || {
        plane.apiservers[0].client_requests().iter().filter(|request| request.path() == NOBODY).count() >= 40
    })
    .await
    .unwrap();
    gate.open();
    let statuses = waiting.join_all_or_aborted().await;
    assert_eq!(statuses, vec![404; 39]);
    for (now, before) in questions(&plane).iter().zip(before) {
        // Each worker may need a second question for those that came after its first.
        assert!(now - before <= 8, "{} questions for forty requests", now - before);
    }
}

/// The results of tasks, without those that were aborted.
trait JoinAllOrAborted<T> {
    async fn join_all_or_aborted(self) -> Vec<T>;
}

impl<T: 'static, E: std::fmt::Debug + 'static> JoinAllOrAborted<T> for tokio::task::JoinSet<Result<T, E>> {
    async fn join_all_or_aborted(mut self) -> Vec<T> {
        let mut results = Vec::new();
        while let Some(joined) = self.join_next().await {
            results.extend(joined.ok().map(Result::unwrap));
        }
        results
    }
}

#[tokio::test]
async fn an_apiserver_that_does_not_answer_makes_it_a_503_and_never_a_hang() {
    for (fault, why) in [
        (Fault::Hang, "it hangs"),
        (Fault::Reset, "it resets"),
        (Fault::Status(403, None), "no rights"),
        (Fault::Status(429, Some(1)), "too many requests"),
        (Fault::NotJson, "nonsense"),
    ] {
        let plane = ControlPlane::builder(SIDECAR).plugin(&seldom()).settled().await.unwrap();
        plane.apiservers[1].fail(Scope::Polls, fault);
        let start = Instant::now();
        let answer = plane.get(NOBODY).await.unwrap();
        assert_eq!((answer.status, answer.header("retry-after").as_deref()), (503, Some("1")), "{why}");
        assert!(start.elapsed() < Duration::from_secs(4), "{why}: the timeout of a question is 2 s");
        assert_eq!(
            plane.get(&format!("{COMMON}/nope")).await.unwrap().status,
            404,
            "{why}: missing objects never wait"
        );
        assert_eq!(plane.get(COMMON).await.unwrap().status, 200, "{why}");
    }
}

#[tokio::test]
async fn a_backend_that_answers_plain_404s_all_day_keeps_them() {
    let plane = ControlPlane::builder(SIDECAR).settled().await.unwrap();
    for apiserver in &plane.apiservers {
        // What Go's http.NotFound answers, byte for byte what an apiserver says of an unknown group.
        apiserver.respond_with(|request| {
            request.path().contains("/services/").then(|| Response::new(404).text("404 page not found\n"))
        });
    }
    for _ in 0..30 {
        let answer = plane.get("/api/v1/namespaces/shop/services/web/proxy/favicon.ico").await.unwrap();
        assert_eq!((answer.status, answer.text().as_str()), (404, "404 page not found\n"));
    }
}

#[tokio::test]
async fn a_downgrade_tells_nobody_that_something_is_gone() {
    for (versions, may_be_rerouted) in [(["1.37.2", "1.34.4", "1.34.4"], false), (["1.37.2", "1.37.2", "1.34.4"], true)]
    {
        let plane = ControlPlane::builder(SIDECAR)
            .versions(versions)
            .plugin(&json!({"discovery": {"refreshInterval": "2s"}}))
            .start()
            .await
            .unwrap();
        eventually(PATIENCE, "the type to be served", async || plane.get(NEW_RESOURCE).await.unwrap().status == 200)
            .await
            .unwrap();
        let local = &plane.apiservers[0];
        let mut seen = std::collections::BTreeMap::<u16, usize>::new();
        for number in 0..1000 {
            match number {
                300 => {
                    local.stop().await;
                    local.set_version("1.34.4").unwrap();
                }
                320 => local.restart().await.unwrap(),
                _ => {}
            }
            let target = format!("{NEW_RESOURCE}/bundle-{number}");
            let answer = plane.client.get(target).header("accept", "application/json").send().await.unwrap();
            *seen.entry(answer.status).or_default() += 1;
            // Spreads the requests over the restart and two refreshes.
            tokio::time::sleep(Duration::from_millis(4)).await;
        }
        assert_eq!(seen.get(&404), None, "{versions:?}: {seen:?}");
        let last = plane.get(NEW_RESOURCE).await.unwrap();
        assert_eq!(last.status, if may_be_rerouted { 200 } else { 503 }, "{versions:?}: {seen:?}");
    }
}

#[tokio::test]
async fn a_configuration_that_is_pushed_meanwhile_leaves_nobody_waiting() {
    let plane = ControlPlane::builder(SIDECAR)
        .plugin(&seldom())
        .envoy(lab::envoy::EnvoyBuilder::listeners_by_lds)
        .settled()
        .await
        .unwrap();
    let gate = Gate::closed();
    plane.apiservers[1].fail(Scope::Polls, Fault::Hold(gate.clone()));
    let client = plane.client.clone();
    let waiting = tokio::spawn(async move { client.get(NOBODY).send().await });
    eventually(PATIENCE, "a question", async || gate.waiting() > 0).await.unwrap();
    let mut listeners = plane.config.value()["static_resources"]["listeners"].as_array().unwrap().clone();
    plugin_configuration(&mut listeners[0])["retryAfterSeconds"] = json!(2);
    plane.envoy.push_listeners(&listeners).await.unwrap();
    gate.open();
    assert_eq!(waiting.await.unwrap().unwrap().status, 404);
}

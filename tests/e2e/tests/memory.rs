//! The memory of a real Envoy with the compiled filter does not grow with requests and refreshes.
//!
//! What a VM keeps is measured to the byte in `tests/lifecycle/tests/memory.rs`; here the allocator in the module and Envoy's
//! own part are seen too, from outside and so less exactly. `scripts/soak` does the same with a million requests.

use std::{cell::Cell, fs, rc::Rc, time::Duration};

use e2e::{ControlPlane, SIDECAR};
use lab::{
    Client,
    apiserver::{AGGREGATED, Fault, Scope},
    client::Connection,
    discovery::{Resource, add_resource, remove_resource},
};
use serde_json::json;
use tokio::task::{JoinSet, LocalSet};

/// Requests after as many to warm up. `scripts/soak` sets another number.
const REQUESTS: u64 = 20_000;
/// Many, for answers that are held until an apiserver has been asked wait for each other.
const CONNECTIONS: u64 = 100;

/// Envoy's own memory comes and goes a little with its connections and the allocators' moods; a million requests added less
/// than a mebibyte.
const SLACK: u64 = 4 << 20;

/// Served by all; only by `cp-2`; by nobody.
const COMMON: &str = "/api/v1/namespaces/shop/pods";
const NEW: &str = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";
const NOBODY: &str = "/apis/storagemigration.k8s.io/v1/nosuch";

/// What an apiserver answers to polls when it does not answer well.
const FAULTS: [Fault; 5] =
    [Fault::Reset, Fault::CutBody, Fault::EmptyDocument, Fault::NotJson, Fault::Status(503, None)];

struct World {
    plane: ControlPlane,
    sent: Cell<u64>,
    enough: Cell<u64>,
    /// How often documents have changed.
    changes: Cell<u64>,
}

impl World {
    /// Resident memory of Envoy.
    fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.plane.envoy.pid().unwrap())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("resident memory");
        line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    /// Polls that were answered.
    async fn polls(&self) -> u64 {
        self.plane.envoy.stat_sum("-poll.upstream_rq_completed").await.unwrap()
    }

    /// Sends requests of all kinds, one after the other, until there were enough.
    async fn load(self: Rc<Self>) {
        let client = &self.plane.client;
        let mut connection = client.connect().await.unwrap();
        while self.sent.get() < self.enough.get() {
            let number = self.sent.get();
            self.sent.set(number + 1);
            if number % 100 == 99 {
                connection = give_up(client, connection, if number % 200 == 99 { COMMON } else { "/openapi/v3" }).await;
                continue;
            }
            let (path, accept, tag) = match number % 20 {
                0 => (NOBODY, "application/json", ""),
                1 => ("/api/v1/namespaces/shop/pods/nope", "application/json", ""),
                2 => ("/api/v1/namespaces/shop/nosuch", "application/json", ""),
                3 => ("/apis", AGGREGATED, "\"nonsense\""),
                4 => ("/apis", AGGREGATED, "*"),
                5 => ("/apis", "application/json", ""),
                6 => ("/api", AGGREGATED, ""),
                7 => ("/apis/storagemigration.k8s.io/v1", "application/json", ""),
                8 => ("/openapi/v3", "application/json", ""),
                9..=11 => (NEW, "application/json", ""),
                _ => (COMMON, "application/json", ""),
            };
            let answer = client.get(path).header("accept", accept).header("if-none-match", tag);
            let answer = answer.send_on(&mut connection).await.unwrap();
            assert!(matches!(answer.status, 200 | 304 | 404 | 503), "{path}: {}", answer.status);
            if answer.header("connection").is_some_and(|value| value.eq_ignore_ascii_case("close")) {
                connection = client.connect().await.unwrap();
            }
        }
    }

    /// Other documents with every refresh, and polls that fail.
    async fn change(self: Rc<Self>) {
        let [_, changing, failing] = &self.plane.apiservers[..] else { panic!("three apiservers") };
        loop {
            let number = self.changes.get();
            let name = |number: u64| format!("things{:06}", number % 1_000_000);
            changing.edit_apis(|document| {
                remove_resource(document, "storagemigration.k8s.io", "v1", &name(number));
                add_resource(document, "storagemigration.k8s.io", "v1", Resource::new(&name(number + 1), "Thing"));
            });
            if number.is_multiple_of(4) {
                failing.fail_times(1, Scope::Polls, FAULTS[(number / 4) as usize % FAULTS.len()].clone());
            }
            self.changes.set(number + 1);
            // The interval, with what jitter adds to it.
            tokio::time::sleep(Duration::from_millis(110)).await;
            self.plane.apiservers.iter().for_each(|apiserver| apiserver.clear_requests());
        }
    }

    async fn send(self: &Rc<Self>, requests: u64) {
        self.enough.set(self.sent.get() + requests);
        let mut load: JoinSet<()> =
            (0..CONNECTIONS).map(|_| self.clone().load()).fold(JoinSet::new(), |mut set, load| {
                set.spawn_local(load);
                set
            });
        while let Some(done) = load.join_next().await {
            done.unwrap();
        }
    }
}

/// Sends a request and does not wait for its answer; another connection.
async fn give_up(client: &Client, mut connection: Connection, path: &str) -> Connection {
    let request = format!("GET {path} HTTP/1.1\r\nhost: kubernetes\r\naccept: application/json\r\n\r\n");
    connection.write(request.as_bytes()).await.unwrap();
    drop(connection);
    client.connect().await.unwrap()
}

async fn envoy_stays_as_large_as_it_is() {
    let requests = std::env::var("MVP_SOAK_REQUESTS").map_or(REQUESTS, |number| number.parse().expect("a number"));
    let plane = ControlPlane::builder(SIDECAR)
        .envoy(|envoy| envoy.concurrency(2))
        .plugin(&json!({"discovery": {"refreshInterval": "100ms", "forgetAfter": "1s"}}))
        .settled()
        .await
        .unwrap();
    let world = Rc::new(World { plane, sent: Cell::new(0), enough: Cell::new(0), changes: Cell::new(0) });
    let changing = tokio::task::spawn_local(world.clone().change());
    world.send(REQUESTS).await;
    let (before, polls, changes) = (world.memory(), world.polls().await, world.changes.get());
    let mut most = before;
    for _ in 0..10 {
        world.send(requests / 10).await;
        let now = world.memory();
        most = most.max(now);
        println!("after {} requests and {} polls: {} KiB", world.sent.get(), world.polls().await, now >> 10);
    }
    changing.abort();
    let (polls, changes) = (world.polls().await - polls, world.changes.get() - changes);
    println!(
        "{requests} requests, {polls} polls, {changes} new documents: {} KiB before, {} at most, {} after",
        before >> 10,
        most >> 10,
        world.memory() >> 10
    );
    assert!(polls > changes && changes > requests / 2_000, "the world stands still");
    assert!(most < before + SLACK, "{before} bytes before, {most} at most");
    assert_eq!(world.plane.envoy.stat_sum("vm_reload").await.unwrap(), 0, "no VM was lost");
}

#[tokio::test]
async fn a_million_requests_leave_nothing_behind() {
    LocalSet::new().run_until(envoy_stays_as_large_as_it_is()).await;
}

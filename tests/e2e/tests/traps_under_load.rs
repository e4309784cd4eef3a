//! Workers that trap again and again under load, in the shipped configurations: who is on another worker notices nothing,
//! and nothing passes meanwhile that would not pass otherwise.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
    time::{Duration, Instant},
};

use e2e::{
    ControlPlane, GATEWAY, GATEWAY_HEADER, PATIENCE, SIDECAR, TRAP,
    sender::{forged, identity, is_believed, subject},
};
use lab::{
    Client,
    apiserver::{Fault, Request, Scope},
    client::{Connection, Opened},
    eventually,
};
use serde_json::json;
use tokio::task::{JoinSet, LocalSet};

/// Served by all.
const COMMON: &str = "/api/v1/namespaces/shop/pods";
/// Only `cp-2` serves it.
const NEW: &str = "/apis/storagemigration.k8s.io/v1/storageversionmigrations";

const WORKERS: usize = 3;
/// How often each worker is trapped.
const ROUNDS: usize = 3;
/// How long a worker may be away.
const A_SECOND: Duration = Duration::from_secs(1);

/// Where the clients would send their requests, if they could. With rerouting by filter state these are headers like any
/// other.
const REROUTING_KEYS: [&str; 3] =
    ["x-mixed-version-proxy-cluster", "X-Mixed-Version-Proxy-Cluster", "wasm.mixed_version_proxy.cluster"];
const CHOSEN: &str = "cp-3-poll";

/// What would make Envoy send a request again, give it up at once, or keep it apart.
const ORDERS: [(&str, &str); 9] = [
    ("x-envoy-retry-on", "5xx,reset,connect-failure"),
    ("X-Envoy-Max-Retries", "5"),
    ("x-envoy-upstream-rq-timeout-ms", "1"),
    ("x-envoy-upstream-rq-per-try-timeout-ms", "1"),
    ("x-envoy-upstream-stream-duration-ms", "1"),
    ("x-envoy-hedge-on-per-try-timeout", "true"),
    ("x-envoy-internal", "true"),
    ("x-envoy-force-trace", "true"),
    ("x-envoy-original-path", "/elsewhere"),
];

/// The one who comes with a certificate, where certificates count.
const CERTIFIED: &str = "kubernetes-admin";

/// A control plane whose workers can be told from each other.
struct World {
    plane: ControlPlane,
    by_header: bool,
    /// Held while it is seen which worker takes a connection.
    door: tokio::sync::Mutex<()>,
    /// For each worker, how often it was told to trap, and was back: odd while it may be away.
    traps: [Cell<u64>; WORKERS],
    is_over: Cell<bool>,
    statuses: RefCell<BTreeMap<u16, usize>>,
    /// Requests that ended without an answer.
    cut: Cell<u64>,
    writes: Cell<u64>,
}

impl World {
    async fn start(file: &'static str) -> Self {
        let plane = ControlPlane::builder(file)
            .edit(e2e::trapping)
            .envoy(|envoy| envoy.concurrency(WORKERS as u32))
            .plugin(&json!({"discovery": {"refreshInterval": "1s"}}))
            .settled()
            .await
            .unwrap();
        for apiserver in &plane.apiservers {
            // So that some are always on their way, and an order to give up after a millisecond would show.
            apiserver.fail(Scope::when(|request| request.method == "POST"), Fault::Delay(Duration::from_millis(5)));
            apiserver.clear_requests();
        }
        Self {
            plane,
            by_header: file == GATEWAY_HEADER,
            door: tokio::sync::Mutex::default(),
            traps: Default::default(),
            is_over: Cell::default(),
            statuses: RefCell::default(),
            cut: Cell::default(),
            writes: Cell::default(),
        }
    }

    /// How many connections each worker has taken.
    async fn taken(&self) -> [u64; WORKERS] {
        let stats = self.plane.envoy.admin_get("/stats?filter=worker_.*downstream_cx_total$").await.unwrap().text();
        let mut taken = [0; WORKERS];
        for line in stats.lines().filter(|line| line.starts_with("listener.127.0.0.1_")) {
            let (name, count) = line.split_once(": ").expect("a counter");
            let worker = (0..WORKERS).find(|worker| name.contains(&format!("worker_{worker}.")));
            taken[worker.expect("one of the workers")] += count.parse::<u64>().unwrap();
        }
        taken
    }

    /// A connection that this worker has taken.
    async fn connect(&self, client: &Client, worker: usize) -> Connection {
        let _alone = self.door.lock().await;
        loop {
            let before = self.taken().await;
            let connection = client.connect().await.unwrap();
            let by = eventually(PATIENCE, "a worker that takes the connection", async || {
                let after = self.taken().await;
                (0..WORKERS).find(|&worker| after[worker] > before[worker])
            });
            if by.await.unwrap() == worker {
                return connection;
            }
        }
    }

    /// Sends requests to one worker until all is over. None of them may fail while the worker was not told to trap.
    async fn load(self: Rc<Self>, client: Client, worker: usize, seed: u64) {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut connection = self.connect(&client, worker).await;
        while !self.is_over.get() {
            let (method, path) = [
                ("GET", COMMON),
                ("GET", NEW),
                ("POST", COMMON),
                ("POST", NEW),
                ("GET", "/apis"),
                ("GET", "/healthz"),
                ("DELETE", "/api/v1/namespaces/shop/pods/web"),
            ][random.usize(..7)];
            let mut request = client.request(method, path).header("accept", "application/json");
            if method == "POST" {
                self.writes.set(self.writes.get() + 1);
                request = request.body("{}").header("x-write", self.writes.get().to_string());
            }
            for _ in 0..random.usize(1..6) {
                let (name, value) = forged(&mut random);
                request = request.header(name, value);
            }
            for _ in 0..random.usize(..4) {
                let (name, value) = ORDERS[random.usize(..ORDERS.len())];
                request = request.header(name, value);
            }
            for name in REROUTING_KEYS.into_iter().filter(|_| random.bool()) {
                request = request.header(name, CHOSEN);
            }
            request = request.header("x-forwarded-client-cert", "Subject=\"CN=root\"");
            let traps = || self.traps[worker].get();
            let before = traps();
            let answer = request.send_on(&mut connection).await;
            let may_fail = before % 2 == 1 || traps() != before;
            let why = format!("{method} {path} on worker {worker}, seed {seed}");
            match answer {
                Ok(answer) => {
                    assert!(answer.status < 300 || answer.status == 503 && may_fail, "{why}: {}", answer.text());
                    *self.statuses.borrow_mut().entry(answer.status).or_default() += 1;
                    if answer.header("connection").is_some_and(|value| value.eq_ignore_ascii_case("close")) {
                        connection = self.connect(&client, worker).await;
                    }
                }
                Err(error) => {
                    assert!(may_fail, "{why}: {error:#}");
                    self.cut.set(self.cut.get() + 1);
                    connection = self.connect(&client, worker).await;
                }
            }
        }
    }

    /// A watch whose stream this worker carries.
    async fn watch(&self, worker: usize, path: &str) -> Opened {
        let connection = self.connect(&self.plane.client, worker).await;
        let watch = self.plane.client.get(format!("{path}?watch=true")).open_on(connection).await.unwrap();
        assert_eq!(watch.status, 200, "{path} on worker {worker}");
        watch
    }

    /// Makes a worker trap; how long it took until it answered a rerouted request and one that stays.
    async fn trap(&self, worker: usize) -> Duration {
        let client = &self.plane.client;
        let mut trapped = self.connect(client, worker).await;
        let mut next = self.connect(client, worker).await;
        self.traps[worker].set(self.traps[worker].get() + 1);
        let start = Instant::now();
        let answer = client.get(COMMON).header(TRAP, "now").send_on(&mut trapped).await.unwrap();
        assert_eq!(answer.status, 503, "the request that hit the defect");
        for path in [NEW, COMMON] {
            eventually(PATIENCE, "the worker to be back", async || {
                let answer = client.get(path).send_on(&mut next).await.unwrap();
                assert!(matches!(answer.status, 200 | 503), "{path}: {}", answer.text());
                if answer.status == 200 { Ok(()) } else { Err(answer.text()) }
            })
            .await
            .unwrap();
        }
        let away = start.elapsed();
        self.traps[worker].set(self.traps[worker].get() + 1);
        away
    }

    /// Every request of clients that has reached an apiserver is as it would be without any trap.
    fn assert_hygiene(&self, requests: &[Request]) {
        let mut writes = BTreeSet::new();
        for request in requests {
            let told = identity(request);
            if is_believed(request) {
                let users: Vec<_> = told.iter().filter(|(name, _)| name == "x-remote-user").collect();
                assert!(matches!(users[..], [(_, user)] if user == CERTIFIED), "{request:?}");
                let groups: Vec<_> = told.iter().filter(|(name, _)| name == "x-remote-group").collect();
                assert!(matches!(groups[..], [(_, group)] if group == "kubeadm:cluster-admins"), "{request:?}");
                let extras = told.iter().filter(|(name, _)| name.starts_with("x-remote-extra-"));
                assert_eq!(extras.count(), 1, "the credential id: {request:?}");
                assert_eq!(told.len(), 3, "{request:?}");
            } else {
                assert!(told.is_empty() && request.client_subject.is_none(), "{request:?}");
            }
            for (name, _) in &request.headers {
                let name = String::from_utf8_lossy(name).to_lowercase();
                assert!(!name.starts_with("x-envoy-") && name != "x-forwarded-client-cert", "{request:?}");
                assert!(name != REROUTING_KEYS[0] || !self.by_header, "a rerouting key: {request:?}");
            }
            if let Some(write) = request.header("x-write") {
                assert!(writes.insert(write), "a write that was sent twice: {request:?}");
            }
        }
        assert!(!writes.is_empty(), "no write has arrived");
    }
}

async fn a_configuration_under_load(file: &'static str) {
    let seed = fastrand::u64(..);
    println!("{file}: seed {seed}");
    let world = Rc::new(World::start(file).await);
    let mut clients = vec![world.plane.client.clone()];
    if file != GATEWAY_HEADER {
        clients.push(world.plane.client_with_certificate(&subject("kubeadm's admin")).await.unwrap().0);
    }
    let mut load = JoinSet::new();
    for worker in 0..WORKERS {
        for (number, client) in clients.iter().enumerate() {
            load.spawn_local(world.clone().load(
                client.clone(),
                worker,
                seed.wrapping_add((worker * 2 + number) as u64),
            ));
        }
    }
    let mut watches = Vec::new();
    for worker in 0..WORKERS {
        for path in [COMMON, NEW] {
            watches.push((worker, path, world.watch(worker, path).await));
        }
    }
    let mut longest = Duration::ZERO;
    for round in 0..ROUNDS * WORKERS {
        let trapped = round % WORKERS;
        // Twice: Envoy starts the first new VM at once, and lets the next one wait for a moment.
        for _ in 0..2 {
            let away = world.trap(trapped).await;
            println!("{file}: worker {trapped} was away for {away:?}");
            longest = longest.max(away);
        }
        let event = json!({"type": "BOOKMARK", "object": {"round": round}});
        world.plane.apiservers.iter().for_each(|apiserver| apiserver.push_event(&event));
        for (worker, path, watch) in &mut watches {
            let chunk = tokio::time::timeout(PATIENCE, watch.next_chunk()).await.expect("a chunk or an end");
            if *worker == trapped {
                assert!(!matches!(chunk, Ok(Some(_))), "streams of the trapped worker are cut");
                *watch = world.watch(trapped, path).await;
            } else {
                let chunk = chunk.unwrap().unwrap_or_else(|| panic!("round {round}: {path} on {worker} was cut"));
                assert_eq!(serde_json::from_slice::<serde_json::Value>(&chunk).unwrap(), event, "{path} on {worker}");
            }
        }
    }
    world.is_over.set(true);
    while let Some(client) = load.join_next().await {
        client.unwrap();
    }

    let mut requests = Vec::new();
    world.plane.apiservers.iter().for_each(|apiserver| requests.extend(apiserver.client_requests()));
    world.assert_hygiene(&requests);
    let statuses = world.statuses.borrow().clone();
    let cut = world.cut.get();
    println!("{file}: {statuses:?}, {cut} cut, {} at apiservers, away at most {longest:?}", requests.len());
    assert!(statuses.keys().all(|status| [200, 201, 503].contains(status)), "{statuses:?}");
    let believed = requests.iter().filter(|request| is_believed(request)).count();
    assert_eq!(believed > 0, file != GATEWAY_HEADER);
    assert!(longest < A_SECOND, "{file}: a worker was away for {longest:?}");
    let reloads = world.plane.envoy.stat_sum("vm_reload_success").await.unwrap();
    assert!(reloads >= (2 * ROUNDS * WORKERS) as u64, "{reloads} reloads");
}

#[tokio::test]
async fn a_sidecar_s_worker_that_traps_takes_nobody_with_it_and_lets_nothing_through() {
    LocalSet::new().run_until(a_configuration_under_load(SIDECAR)).await;
}

#[tokio::test]
async fn nor_does_a_gateway_s() {
    LocalSet::new().run_until(a_configuration_under_load(GATEWAY)).await;
}

#[tokio::test]
async fn nor_does_one_of_a_gateway_that_reroutes_by_header() {
    LocalSet::new().run_until(a_configuration_under_load(GATEWAY_HEADER)).await;
}

//! The story: who does what when. Submodules by actor: [apiservers](polls) polled and [asked](requests), [clients], what
//! they are told in [discovery], the controller of [namespaces], [faults], and the [peace] after them.

mod clients;
mod discovery;
mod faults;
mod namespaces;
mod peace;
mod polls;
mod requests;

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use fastrand::Rng;
use mixed_version_proxy::config::{Config, PeerProxying};
use mixed_version_proxy::peers::election::{LEASE, Lease};

use crate::catalogue::{DEFINITIONS, RELEASES, TYPES};
use crate::documents::Listed;
use crate::ledger::Ledger;
use crate::plant::Plant;
use crate::root::{Root, TICK};
use crate::shared::{Seen, SharedData};
use crate::sim::namespaces::Namespace;
use crate::sim::polls::Call;
use crate::streams::{Operation, Reply, Stream};
use crate::world::{Apiserver, Etcd, PollAnswer, Renderer};
use crate::{Broken, Summary, Violation};

/// How long a worker may be busy with something else, so that its tick is late.
const LONGEST_STALL: Duration = Duration::from_millis(800);

/// Something that happens at some time.
#[derive(Debug)]
enum Event {
    Tick { root: u64, timer: u64 },
    TickGoesOn { root: u64, timer: u64, seen: Seen<Lease>, seen_at: Duration },
    CallArrives(u64),
    CallReturns { call: u64, answer: PollAnswer, epoch: u64 },
    CallTimesOut(u64),
    Try(u64),
    Reaches(u32),
    ExecutedLate { operation: u64, apiserver: usize, epoch: u64 },
    Returns { stream: u32, reply: Reply, epoch: u64 },
    Aborts(u32),
    ClientActs,
    CollectorActs,
    NamespaceControllerActs,
    Fault,
    Starts { apiserver: usize, release: usize, epoch: u64 },
    Reloads { envoy: usize, worker: usize },
    ReloadsDraining { envoy: usize, worker: usize, config: Box<(Config, Vec<usize>)>, until: Duration },
    Configures { envoy: usize, worker: usize },
    Drained { root: u64 },
    HealthChecks(usize),
    Livez,
}

/// An Envoy process.
#[derive(Debug)]
struct Envoy {
    shared: SharedData,
    ledger: Ledger,
    /// Its monotonic clock runs ahead of the world's by this.
    clock: Duration,
    /// The apiserver beside it; `None`: a gateway.
    local: Option<usize>,
    /// Apiservers in its configuration, in its order.
    members: Vec<usize>,
    proxying: PeerProxying,
    /// Poll clusters have names of their own; raised when they are renamed.
    poll_cluster: Option<u32>,
    discovery: Discovery,
    workers: Vec<Worker>,
    /// A gateway's balancer leaves those alone that fail health checks.
    health_checks: Option<Vec<bool>>,
    two_lead_since: Option<Duration>,
    /// When something happened after which somebody else may have to lead.
    disturbed_at: Duration,
}

#[derive(Debug, Clone, Copy)]
struct Discovery {
    interval: u64,
    timeout: u64,
    forget_after: u64,
}

/// A worker thread.
#[derive(Debug, Default)]
struct Worker {
    /// The root of the newest configuration; `None` while the VM is dead.
    current: Option<u64>,
    /// Roots whose configuration has been replaced, kept while their listeners drain.
    draining: Vec<u64>,
}

/// A root with its place.
#[derive(Debug)]
struct Placed {
    root: Root,
    envoy: usize,
    worker: usize,
    /// The timer that a tick event is on its way for.
    armed: u64,
    /// For a draining root: until when.
    until: Option<Duration>,
}

/// One simulation.
pub struct Sim {
    /// How much has been seen.
    pub summary: Summary,
    /// At most so many lines of what happened last.
    pub trace: Option<(usize, VecDeque<String>)>,
    rng: Rng,
    now: Duration,
    queue: BTreeMap<(Duration, u64), Event>,
    last_number: u64,
    steps: u64,
    plant: Option<Plant>,
    etcd: Etcd,
    apiservers: Vec<Apiserver>,
    renderer: Renderer,
    envoys: Vec<Envoy>,
    roots: BTreeMap<u64, Placed>,
    calls: BTreeMap<u64, Call>,
    operations: BTreeMap<u64, Operation>,
    streams: BTreeMap<u32, Stream>,
    /// Namespaces that are being deleted.
    namespaces: BTreeMap<u64, Namespace>,
    /// Discovery documents that have been read, by their texts.
    read: BTreeMap<String, Rc<Listed>>,
    /// Between which Envoy and apiserver nothing passes until when, and whether connections fail quickly.
    partitions: BTreeMap<(usize, usize), (Duration, bool)>,
    /// Mean time between faults.
    fault_every: u64,
    is_peace: bool,
    violation: Option<Violation>,
}

impl Envoy {
    fn discovery_cluster(&self, apiserver: usize) -> String {
        self.poll_cluster.map_or_else(|| format!("cp-{apiserver}"), |version| format!("poll{version}-cp-{apiserver}"))
    }
}

macro_rules! tell {
    ($sim:expr, $($format:tt)*) => {
        if $sim.trace.is_some() {
            let line = format!($($format)*);
            $sim.note(line);
        }
    };
}
use tell;

const fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

impl Sim {
    /// The story of a seed, before anything has happened.
    pub fn new(seed: u64, steps: u64, plant: Option<Plant>, trace: Option<(usize, VecDeque<String>)>) -> Self {
        let mut rng = Rng::with_seed(seed);
        let fault_every = rng.u64(150..2_500);
        let mut sim = Self {
            summary: Summary::default(),
            trace,
            rng,
            now: Duration::from_secs(1),
            queue: BTreeMap::new(),
            last_number: 0,
            steps,
            plant,
            etcd: Etcd::default(),
            apiservers: Vec::new(),
            renderer: Renderer::default(),
            envoys: Vec::new(),
            roots: BTreeMap::new(),
            calls: BTreeMap::new(),
            operations: BTreeMap::new(),
            streams: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            read: BTreeMap::new(),
            partitions: BTreeMap::new(),
            fault_every,
            is_peace: false,
            violation: None,
        };
        (0..DEFINITIONS).for_each(|definition| sim.etcd.define(definition, true));
        sim.build();
        sim
    }

    /// Runs to the end, or to the first violation.
    pub fn run(&mut self) -> Option<Violation> {
        while self.summary.steps < self.steps && self.violation.is_none() {
            self.step();
        }
        if self.violation.is_none() {
            self.make_peace();
        }
        self.violation.take()
    }

    fn build(&mut self) {
        let count = self.rng.usize(2..5);
        let base = self.rng.usize(..RELEASES);
        for _ in 0..count {
            let release = if self.rng.bool() { base } else { self.rng.usize(..RELEASES) };
            let is_up = self.rng.u8(..10) > 0;
            let processes = vec![(Duration::ZERO, release)];
            let number = self.apiservers.len();
            self.apiservers.push(Apiserver { processes, is_up, ..Apiserver::default() });
            if !is_up {
                self.start_later(number, release, 5_000);
            }
        }
        for (kind, names) in TYPES.iter().enumerate() {
            if names.subresource.is_empty() {
                (0..2).for_each(|_| self.populate(kind));
            }
        }
        let discovery = Discovery {
            interval: [500, 1_000, 2_000, 5_000][self.rng.usize(..4)],
            timeout: [300, 1_000, 3_000][self.rng.usize(..3)],
            forget_after: [1_000, 5_000, 20_000, 60_000][self.rng.usize(..4)],
        };
        let sidecars = self.rng.usize(1..=count);
        for local in (0..sidecars).map(Some).chain([None]) {
            self.add_envoy(local, discovery);
        }
        self.at(millis(1), Event::ClientActs);
        self.at(millis(300), Event::CollectorActs);
        self.at(millis(600), Event::NamespaceControllerActs);
        let first = self.rng.u64(..self.fault_every * 2);
        self.at(millis(first), Event::Fault);
    }

    fn add_envoy(&mut self, local: Option<usize>, discovery: Discovery) {
        let mut members: Vec<usize> = (0..self.apiservers.len()).collect();
        self.rng.shuffle(&mut members);
        let checks_health = local.is_none() && self.rng.bool();
        let number = self.envoys.len();
        self.envoys.push(Envoy {
            shared: SharedData::default(),
            ledger: Ledger::default(),
            clock: millis(self.rng.u64(..1_000_000)),
            local,
            members,
            proxying: if self.rng.u8(..8) == 0 { PeerProxying::Disabled } else { PeerProxying::Enabled },
            poll_cluster: self.rng.bool().then_some(0),
            discovery,
            workers: Vec::new(),
            health_checks: checks_health.then(|| vec![true; self.apiservers.len()]),
            two_lead_since: None,
            disturbed_at: self.now,
        });
        for worker in 0..self.rng.usize(1..4) {
            self.envoys[number].workers.push(Worker::default());
            let after = millis(self.rng.u64(..50));
            self.at(after, Event::Configures { envoy: number, worker });
        }
        if checks_health {
            self.at(millis(1), Event::HealthChecks(number));
        }
    }

    fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Makes something happen after a while.
    fn at(&mut self, after: Duration, event: Event) {
        let number = self.number();
        self.queue.insert((self.now + after, number), event);
    }

    /// A random time.
    fn some_millis(&mut self, from: u64, to: u64) -> Duration {
        Duration::from_micros(self.rng.u64(from * 1_000..to * 1_000))
    }

    /// True in so many of a thousand cases.
    fn chance(&mut self, thousandths: u32) -> bool {
        self.rng.u32(..1_000) < thousandths
    }

    fn note(&mut self, line: String) {
        let now = self.now;
        if let Some((most, lines)) = &mut self.trace {
            if lines.len() == *most {
                lines.pop_front();
            }
            lines.push_back(format!("{:>10.4} {line}", now.as_secs_f64()));
        }
    }

    fn broke(&mut self, broken: Broken, story: String) {
        if self.violation.is_none() {
            tell!(self, "BROKEN {broken:?}: {story}");
            self.violation = Some(Violation { broken, story: format!("at {:.4} s: {story}", self.now.as_secs_f64()) });
        }
    }

    /// The monotonic clock of an Envoy process.
    fn clock(&self, envoy: usize) -> Duration {
        self.now + self.envoys[envoy].clock
    }

    fn step(&mut self) {
        let Some(((time, _), event)) = self.queue.pop_first() else { return };
        self.now = time;
        if !matches!(event, Event::Tick { .. } | Event::TickGoesOn { .. }) {
            self.summary.steps += 1;
        }
        match event {
            Event::Tick { root, timer } => self.tick(root, timer),
            Event::TickGoesOn { root, timer, seen, seen_at } => self.tick_goes_on(root, timer, &seen, seen_at),
            Event::CallArrives(call) => self.call_arrives(call),
            Event::CallReturns { call, answer, epoch } => self.call_returns(call, answer, epoch),
            Event::CallTimesOut(call) => self.call_ends(call, PollAnswer::bare(504)),
            Event::Try(operation) => self.try_once(operation),
            Event::Reaches(stream) => self.reaches(stream),
            Event::ExecutedLate { operation, apiserver, epoch } => self.executed_late(operation, apiserver, epoch),
            Event::Returns { stream, reply, epoch } => self.returns(stream, reply, epoch),
            Event::Aborts(stream) => self.aborts(stream),
            Event::ClientActs => self.client_acts(),
            Event::CollectorActs => self.collector_acts(),
            Event::NamespaceControllerActs => self.namespace_controller_acts(),
            Event::Fault => self.fault(),
            Event::Starts { apiserver, release, epoch } => self.starts(apiserver, release, epoch),
            Event::Reloads { envoy, worker } => self.reloads(envoy, worker),
            Event::ReloadsDraining { envoy, worker, config, until } => {
                self.reloads_draining(envoy, worker, *config, until);
            }
            Event::Configures { envoy, worker } => self.configures(envoy, worker),
            Event::Drained { root } => self.drained(root),
            Event::HealthChecks(envoy) => self.checks_health(envoy),
            Event::Livez => self.livez(),
        }
    }

    fn tick(&mut self, root: u64, timer: u64) {
        let Some(placed) = self.roots.get(&root) else { return };
        if placed.root.timer != timer {
            return;
        }
        let seen = self.envoys[placed.envoy].shared.lease();
        if self.chance(150) {
            // Another worker may write between this one's reading and writing.
            let after = Duration::from_micros(self.rng.u64(..500));
            self.at(after, Event::TickGoesOn { root, timer, seen, seen_at: self.now });
        } else {
            self.tick_goes_on(root, timer, &seen, self.now);
        }
    }

    fn tick_goes_on(&mut self, number: u64, timer: u64, seen: &Seen<Lease>, seen_at: Duration) {
        let Some(placed) = self.roots.get_mut(&number) else { return };
        let envoy = placed.envoy;
        let (now, clock) = (self.now, self.now + self.envoys[envoy].clock);
        let before = placed.root.role;
        placed.root.stand(&mut self.envoys[envoy].shared, seen, clock);
        placed.root.ticked_at = seen_at;
        placed.root.lose_patience(&self.envoys[envoy].shared, clock);
        if before != placed.root.role {
            let (worker, role) = (placed.worker, placed.root.role);
            tell!(self, "envoy {envoy} worker {worker} root {number} is a {role:?} now");
        }
        self.serve_waiting(number);
        for id in self.roots[&number].root.lost(clock) {
            self.lose(number, id);
        }
        let questions = self.roots.get_mut(&number).map(|placed| placed.root.due(clock)).unwrap_or_default();
        for question in questions {
            self.dispatch(number, question);
        }
        let Some(placed) = self.roots.get_mut(&number) else { return };
        if placed.root.publish(&mut self.envoys[envoy].shared, clock) {
            self.envoys[envoy].ledger.published(number, now);
        }
        self.see_who_leads(envoy);
        if self.roots[&number].root.timer == timer {
            let mut after = self.roots[&number].root.period;
            if !self.is_peace && self.chance(3) {
                after += self.some_millis(1, LONGEST_STALL.as_millis() as u64);
                self.envoys[envoy].disturbed_at = self.now + after;
            }
            self.at(after, Event::Tick { root: number, timer });
        } else {
            self.arm(number);
        }
    }

    /// Whoever asked for another period gets it.
    fn arm(&mut self, number: u64) {
        let Some(placed) = self.roots.get_mut(&number) else { return };
        let (timer, period) = (placed.root.timer, placed.root.period);
        if placed.armed != timer {
            placed.armed = timer;
            self.at(period, Event::Tick { root: number, timer });
        }
    }

    fn see_who_leads(&mut self, envoy: usize) {
        self.summary.checks += 1;
        let now = self.now;
        let recently = TICK + millis(100);
        let of_this = self.roots.iter().filter(|(_, placed)| placed.envoy == envoy);
        let leaders: Vec<u64> = of_this.filter(|(_, placed)| placed.root.leads()).map(|(number, _)| *number).collect();
        let polling = leaders.iter().filter(|number| self.roots[number].root.ticked_at + recently >= now).count();
        let process = &mut self.envoys[envoy];
        let since = if polling > 1 { Some(process.two_lead_since.unwrap_or(now)) } else { None };
        process.two_lead_since = since;
        let disturbed_at = process.disturbed_at;
        if since.is_some_and(|since| now > since + LEASE + TICK) {
            self.broke(Broken::TwoLeaders, format!("envoy {envoy}: roots {leaders:?} poll since {since:?}"));
        }
        if leaders.is_empty() && now > disturbed_at + LEASE + TICK * 4 {
            self.broke(Broken::NobodyPolls, format!("envoy {envoy}: no root polls since {disturbed_at:?}"));
        }
    }

    /// The configuration of an Envoy as its operator writes it.
    fn configuration(&self, envoy: usize) -> Config {
        let process = &self.envoys[envoy];
        let apiserver = |number: &usize| {
            let poll = process.discovery_cluster(*number);
            format!(r#"{{"name":"cp-{number}","cluster":"cp-{number}","discoveryCluster":"{poll}"}}"#)
        };
        let apiservers: Vec<_> = process.members.iter().map(apiserver).collect();
        let local = process.local.map(|local| format!(r#""local":"cp-{local}","#)).unwrap_or_default();
        let Discovery { interval, timeout, forget_after } = process.discovery;
        let text = format!(
            r#"{{"apiservers":[{}],{local}"peerProxying":"{:?}","discovery":{{"refreshInterval":"{interval}ms",
            "timeout":"{timeout}ms","forgetAfter":"{forget_after}ms"}},"exclusions":{{"gracePeriod":"5s"}}}}"#,
            apiservers.join(","),
            process.proxying
        );
        Config::parse(text.as_bytes()).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// A worker gets the newest configuration; the root of the one before goes on until its listener is drained.
    fn configures(&mut self, envoy: usize, worker: usize) {
        if let Some(old) = self.envoys[envoy].workers[worker].current.take() {
            // Envoy waits for ten minutes, by default, or until the last connection is gone.
            let longest = if self.rng.u8(..4) == 0 { 600_000 } else { 30_000 };
            let drain = self.some_millis(100, longest);
            if let Some(placed) = self.roots.get_mut(&old) {
                placed.until = Some(self.now + drain);
            }
            self.envoys[envoy].workers[worker].draining.push(old);
            self.at(drain, Event::Drained { root: old });
        }
        let (config, members) = (self.configuration(envoy), self.envoys[envoy].members.clone());
        let root = self.load(envoy, worker, config, members, None);
        self.envoys[envoy].workers[worker].current = Some(root);
    }

    fn load(
        &mut self,
        envoy: usize,
        worker: usize,
        config: Config,
        members: Vec<usize>,
        until: Option<Duration>,
    ) -> u64 {
        let (number, id) = (self.number(), self.rng.u64(..));
        let clock = self.clock(envoy);
        let mut root = Root::new(config, members, id, &self.envoys[envoy].shared, clock, self.plant);
        root.ticked_at = self.now;
        self.envoys[envoy].disturbed_at = self.envoys[envoy].disturbed_at.max(self.now);
        let polled: Vec<_> = root.config.apiservers.iter().map(|apiserver| &*apiserver.discovery_cluster).collect();
        tell!(self, "envoy {envoy} worker {worker} loads root {number}, which polls {polled:?}");
        self.roots.insert(number, Placed { root, envoy, worker, armed: 0, until });
        self.at(TICK, Event::Tick { root: number, timer: 0 });
        number
    }

    fn drained(&mut self, root: u64) {
        if self.roots.get(&root).is_some_and(|placed| placed.until.is_some_and(|until| until <= self.now)) {
            self.unload(root);
        }
    }

    /// A root is gone, with all that it held.
    fn unload(&mut self, number: u64) {
        let Some(placed) = self.roots.remove(&number) else { return };
        let worker = &mut self.envoys[placed.envoy].workers[placed.worker];
        worker.draining.retain(|root| *root != number);
        if worker.current == Some(number) {
            worker.current = None;
        }
        self.calls.retain(|_, call| call.root != number);
        let envoy = &mut self.envoys[placed.envoy];
        envoy.disturbed_at = envoy.disturbed_at.max(self.now);
        let cut: Vec<u32> =
            self.streams.iter().filter(|(_, stream)| stream.root == number).map(|(stream, _)| *stream).collect();
        for stream in cut {
            self.ends(stream, &clients::Outcome::Cut);
        }
    }
}

//! Faults, and the operators' doings that are faults to those who do not expect them.

use std::time::Duration;

use mixed_version_proxy::config::{Config, PeerProxying};

use super::{Event, Sim, millis, tell};
use crate::catalogue::{DEFINITIONS, RELEASES, TYPES};
use crate::world::{GARBAGE, Stale};

impl Sim {
    pub(super) fn fault(&mut self) {
        if self.is_peace {
            return;
        }
        self.summary.faults += 1;
        let apiserver = self.rng.usize(..self.apiservers.len());
        let envoy = self.rng.usize(..self.envoys.len());
        let worker = self.rng.usize(..self.envoys[envoy].workers.len());
        let now = self.now;
        match self.rng.u8(..26) {
            0..=5 => self.restarts(apiserver),
            6 => {
                self.apiservers[apiserver].hangs_until = now + self.some_millis(100, 6_000);
                tell!(self, "cp-{apiserver} hangs until {:?}", self.apiservers[apiserver].hangs_until);
            }
            7 | 8 => {
                let (until, by) = (self.some_millis(500, 8_000), self.some_millis(10, 2_500));
                let server = &mut self.apiservers[apiserver];
                (server.slow_until, server.slow_by) = (now + until, by);
                tell!(self, "cp-{apiserver} is slow by {by:?}");
            }
            9 | 10 => {
                let (until, which) = (self.some_millis(500, 10_000), self.rng.usize(..GARBAGE.len()));
                let server = &mut self.apiservers[apiserver];
                (server.garbage_until, server.garbage) = (now + until, Some(GARBAGE[which]));
                tell!(self, "cp-{apiserver} answers discovery with {:?}", GARBAGE[which]);
            }
            11 | 12 => {
                let (until, is_quick) = (now + self.some_millis(300, 8_000), self.rng.bool());
                self.partitions.insert((envoy, apiserver), (until, is_quick));
                tell!(self, "envoy {envoy} is cut off from cp-{apiserver}, quick: {is_quick}");
            }
            22..=25 => {
                let stale = Stale { kind: self.rng.usize(..TYPES.len()), is_empty: self.rng.bool() };
                let until = self.some_millis(500, 10_000);
                let server = &mut self.apiservers[apiserver];
                // One at a time.
                if server.stale_until <= now {
                    (server.stale_until, server.stale) = (now + until, Some(stale));
                    tell!(self, "cp-{apiserver} calls {} stale, {stale:?}", TYPES[stale.kind].label());
                }
            }
            13..=15 => self.traps(envoy, worker),
            16..=18 => self.pushes(envoy),
            19 => {
                let definition = self.rng.usize(..DEFINITIONS);
                let is_defined = !self.etcd.definitions[definition];
                self.etcd.define(definition, is_defined);
                tell!(self, "custom resource {definition} is defined: {is_defined}");
            }
            20 => {
                // The machine slept: to the process its timers are late all at once.
                let jump = self.some_millis(100, 8_000);
                self.envoys[envoy].clock += jump;
                self.envoys[envoy].disturbed_at = now;
                tell!(self, "the clock of envoy {envoy} jumps by {jump:?}");
            }
            _ => {
                // A fault that flaps.
                for _ in 0..self.rng.u8(2..5) {
                    self.restarts(apiserver);
                }
            }
        }
        let after = self.rng.u64(1..self.fault_every * 2);
        self.at(millis(after), Event::Fault);
    }

    /// An upgrade, a rollback, or the same again.
    fn restarts(&mut self, apiserver: usize) {
        let server = &self.apiservers[apiserver];
        let old = server.release().unwrap_or_default();
        let release = match self.rng.u8(..4) {
            0 => old,
            1 => self.rng.usize(..RELEASES),
            2 => (old + 1).min(RELEASES - 1),
            _ => old.saturating_sub(1),
        };
        let longest = if self.rng.u8(..4) == 0 { 25_000 } else { 3_500 };
        self.start_later(apiserver, release, longest);
    }

    /// Stops an apiserver, if it runs, and starts it later.
    pub(super) fn start_later(&mut self, apiserver: usize, release: usize, longest: u64) {
        let is_clean = self.rng.bool();
        let server = &mut self.apiservers[apiserver];
        if server.is_up {
            server.stopped_cleanly = is_clean;
        }
        server.is_up = false;
        server.epoch += 1;
        let epoch = server.epoch;
        tell!(self, "cp-{apiserver} stops (in order: {is_clean})");
        let after = self.some_millis(100, longest);
        self.at(after, Event::Starts { apiserver, release, epoch });
    }

    pub(super) fn starts(&mut self, apiserver: usize, release: usize, epoch: u64) {
        let now = self.now;
        let server = &mut self.apiservers[apiserver];
        if server.epoch != epoch {
            return;
        }
        server.epoch += 1;
        server.is_up = true;
        server.stopped_cleanly = false;
        server.hangs_until = now;
        server.processes.push((now, release));
        tell!(self, "cp-{apiserver} starts as release {release}");
        // Somebody tries at once what is new.
        self.terminate_namespace();
    }

    /// A worker's VM dies with all its roots, and is loaded again when Envoy needs it.
    fn traps(&mut self, envoy: usize, worker: usize) {
        tell!(self, "envoy {envoy} worker {worker} traps");
        let Some(current) = self.envoys[envoy].workers[worker].current else { return };
        let draining = self.envoys[envoy].workers[worker].draining.clone();
        for old in draining {
            let Some(placed) = self.roots.get(&old) else { continue };
            let config = Box::new((placed.root.config.clone(), placed.root.apiservers.clone()));
            let until = placed.until.unwrap_or_default();
            self.unload(old);
            if self.rng.bool() {
                let after = self.some_millis(10, 1_500);
                self.at(after, Event::ReloadsDraining { envoy, worker, config, until });
            }
        }
        self.unload(current);
        let after = self.some_millis(10, 1_500);
        self.at(after, Event::Reloads { envoy, worker });
    }

    pub(super) fn reloads(&mut self, envoy: usize, worker: usize) {
        if self.envoys[envoy].workers[worker].current.is_none() {
            self.configures(envoy, worker);
        }
    }

    /// A stream on a listener that is being drained loads the old configuration again.
    pub(super) fn reloads_draining(
        &mut self,
        envoy: usize,
        worker: usize,
        (config, members): (Config, Vec<usize>),
        until: Duration,
    ) {
        if until <= self.now {
            return;
        }
        let root = self.load(envoy, worker, config, members, Some(until));
        self.envoys[envoy].workers[worker].draining.push(root);
        self.at(until - self.now, Event::Drained { root });
    }

    /// The operator changes an Envoy's configuration.
    fn pushes(&mut self, envoy: usize) {
        let missing: Vec<usize> =
            (0..self.apiservers.len()).filter(|number| !self.envoys[envoy].members.contains(number)).collect();
        let choice = self.rng.u8(..6);
        let process = &mut self.envoys[envoy];
        let removable: Vec<usize> =
            process.members.iter().copied().filter(|member| Some(*member) != process.local).collect();
        match choice {
            0 | 1 if !missing.is_empty() => process.members.push(missing[0]),
            2 if process.members.len() > 1 && !removable.is_empty() => {
                let gone = removable[self.rng.usize(..removable.len())];
                process.members.retain(|member| *member != gone);
                process.ledger.removed(&process.discovery_cluster(gone));
            }
            3 => {
                let is_enabled = process.proxying == PeerProxying::Enabled;
                process.proxying = if is_enabled { PeerProxying::Disabled } else { PeerProxying::Enabled };
            }
            4 if process.poll_cluster.is_some() => {
                // The same name elsewhere is another apiserver: nothing of what it told counts.
                for member in process.members.clone() {
                    process.ledger.removed(&process.discovery_cluster(member));
                }
                process.poll_cluster = process.poll_cluster.map(|version| version + 1);
            }
            _ => {}
        }
        self.rng.shuffle(&mut process.members);
        tell!(self, "envoy {envoy} gets another configuration: {:?}", self.envoys[envoy].members);
        for worker in 0..self.envoys[envoy].workers.len() {
            if self.envoys[envoy].workers[worker].current.is_some() {
                let after = self.some_millis(0, 50);
                self.at(after, Event::Configures { envoy, worker });
            }
        }
    }
}

//! The faults are over: everything must come right by itself, and soon.

use std::time::Duration;

use mixed_version_proxy::config::PeerProxying;
use mixed_version_proxy::discovery::document::Half;
use mixed_version_proxy::peers::election::LEASE;
use mixed_version_proxy::peers::table::ApiserverSet;
use mixed_version_proxy::target::{DecodedPath, Target};

use super::clients::Outcome;
use super::{Discovery, Event, Sim, millis, tell};
use crate::Broken;
use crate::catalogue::{self, TYPES};
use crate::streams::{Operation, Origin, Purpose, Stream, Verb};

impl Sim {
    pub(super) fn make_peace(&mut self) {
        tell!(self, "the faults are over");
        self.is_peace = true;
        self.partitions.clear();
        for number in 0..self.apiservers.len() {
            let now = self.now;
            let server = &mut self.apiservers[number];
            (server.hangs_until, server.slow_until) = (now, now);
            (server.garbage_until, server.stale_until) = (now, now);
            if !server.is_up {
                let (release, epoch) = (server.release().unwrap_or_default(), server.epoch);
                self.at(millis(100), Event::Starts { apiserver: number, release, epoch });
            }
        }
        let Discovery { interval, timeout, forget_after } = self.envoys[0].discovery;
        self.livez();
        // A lease until somebody polls, what was on its way, a Retry-After, and three intervals. As many more, if it is a
        // reloaded older configuration that leads, until the current one sees what that one does not poll.
        let soon = LEASE + Duration::from_secs(3) + millis(timeout * 3 + interval * 6);
        self.pass(soon);
        self.check_tables(soon);
        // What vanished is forgotten, and so are custom resources.
        self.pass(millis(forget_after.max(5_000) + 1_000));
        self.check_tables(soon);
        self.probe();
        self.pass(millis(timeout * 2 + 6_000));
        if let Some((number, stream)) = self.streams.iter().next()
            && self.violation.is_none()
        {
            let story = format!("stream {number} waits since {:?}", stream.sent_at);
            self.broke(Broken::WaitsForEver, story);
        }
    }

    fn pass(&mut self, time: Duration) {
        if self.violation.is_some() {
            return;
        }
        let until = self.now + time;
        while self.violation.is_none() && self.queue.first_key_value().is_some_and(|((next, _), _)| *next <= until) {
            self.step();
        }
        self.now = until;
    }

    /// Each worker has something to do, but nothing for which it would have to ask.
    pub(super) fn livez(&mut self) {
        let current = self.envoys.iter().flat_map(|envoy| &envoy.workers).filter_map(|worker| worker.current);
        for root in current {
            if let Some(placed) = self.roots.get_mut(&root) {
                placed.root.request(b"/livez", "GET", false, 0);
            }
        }
        self.at(millis(500), Event::Livez);
    }

    /// Each worker's table says what its apiservers serve, unless its process had to find another leader just now: the
    /// old one was drained with its listener.
    fn check_tables(&mut self, soon: Duration) {
        let now = self.now;
        let quiet = self.envoys.iter().filter(|envoy| envoy.disturbed_at + soon <= now);
        let current: Vec<u64> = quiet.flat_map(|envoy| &envoy.workers).filter_map(|worker| worker.current).collect();
        for number in current {
            if let Some(story) = self.wrong_table(number) {
                return self.broke(Broken::StaysWrong, story);
            }
        }
    }

    fn wrong_table(&mut self, number: u64) -> Option<String> {
        self.summary.checks += TYPES.len() as u64;
        let placed = &self.roots[&number];
        let (view, envoy) = (placed.root.view(), placed.envoy);
        let all = ApiserverSet::first(placed.root.apiservers.len());
        for (half, health) in [("/api", view.core), ("/apis", view.groups)] {
            if health.known != all || health.fresh != all {
                return Some(format!("envoy {envoy} root {number}: {half} is not fresh everywhere: {health:?}"));
            }
        }
        for (id, kind) in TYPES.iter().enumerate() {
            let mut path = format!("{}/x", kind.collection());
            if !kind.subresource.is_empty() {
                path = format!("{path}/{}", kind.subresource);
            }
            let decoded = DecodedPath::new(path.as_bytes())?;
            let Target::Resource(resource) = decoded.target() else { return Some(format!("{path} is no resource")) };
            let listing = view.table.look_up(&resource);
            let serves = |member: &usize| {
                let release = self.apiservers[*member].release();
                release.is_some_and(|release| catalogue::served(release, self.etcd.definitions).contains(&id))
            };
            let members = placed.root.apiservers.iter().enumerate();
            let truth: ApiserverSet = members.filter(|(_, member)| serves(member)).map(|(index, _)| index).collect();
            if listing.servers != truth {
                let told = listing.servers;
                return Some(format!("envoy {envoy} root {number}: {}: {told:?}, really {truth:?}", kind.label()));
            }
        }
        None
    }

    fn probe(&mut self) {
        for envoy in 0..self.envoys.len() {
            for half in Half::ALL {
                self.wants(Verb::Discover(half), 0, String::new(), Purpose::Probe, Some(envoy));
            }
            for kind in 0..TYPES.len() {
                let name = self.etcd.names(kind).first().map(|name| (*name).clone());
                let names = name.into_iter().chain(["missing".to_owned()]);
                for name in names {
                    self.wants(Verb::Get, kind, name, Purpose::Probe, Some(envoy));
                }
            }
        }
    }

    /// As if there had never been a fault.
    pub(super) fn check_probe(&mut self, stream: &Stream, operation: &Operation, outcome: &Outcome) {
        self.summary.checks += 1;
        if let Verb::Discover(half) = operation.verb {
            return self.check_discovery_probe(stream, half, outcome);
        }
        let (kind, label) = (operation.kind, TYPES[operation.kind].label());
        let Some(placed) = self.roots.get(&stream.root) else { return };
        let is_served = |member: &usize| {
            let release = self.apiservers[*member].release();
            release.is_some_and(|release| catalogue::served(release, self.etcd.definitions).contains(&kind))
        };
        let members = &placed.root.apiservers;
        let (somewhere, everywhere) = (members.iter().any(is_served), members.iter().all(is_served));
        let here = self.envoys[stream.envoy].local.map_or(everywhere, |local| is_served(&local));
        let is_off = placed.root.config.peer_proxying == PeerProxying::Disabled;
        let is_right = match outcome {
            Outcome::Answered(reply) => match reply.origin {
                Origin::MissingRoute => !somewhere,
                Origin::Done | Origin::MissingObject | Origin::Backend => true,
                Origin::Refused | Origin::Between => false,
            },
            // Nobody may reroute, and here it is not served.
            Outcome::Unavailable { .. } => somewhere && !here && is_off,
            Outcome::Discovered(_) => false,
            Outcome::Cut => placed.until.is_some(),
        };
        if !is_right {
            let story = format!("envoy {} root {}: {label} is answered {outcome:?}", stream.envoy, stream.root);
            self.broke(Broken::StaysUnavailable, story);
        }
    }
}

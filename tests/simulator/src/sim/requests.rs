//! Requests: through the filter to an apiserver, executed there or not, and back through the filter.

use std::time::Duration;

use mixed_version_proxy::config::PeerProxying;
use mixed_version_proxy::decision::Decision;

use super::clients::Outcome;
use super::{Event, LONGEST_STALL, Sim, millis, namespaces, tell};
use crate::Broken;
use crate::catalogue::{self, TYPES};
use crate::root::{Fate, To};
use crate::streams::{Operation, Origin, Purpose, Reply, Stream, VIA_UPSTREAM, Verb};

impl Verb {
    const fn method(self, reaches_backend: bool) -> &'static str {
        match self {
            Self::Discover(_) | Self::Get | Self::List => "GET",
            Self::Create => "POST",
            Self::Delete | Self::DeleteAll => "DELETE",
            Self::Update if reaches_backend => "POST",
            Self::Update => "PUT",
        }
    }
}

fn path(operation: &Operation, is_encoded: bool) -> String {
    if let Verb::Discover(half) = operation.verb {
        return half.path().to_owned();
    }
    let kind = &TYPES[operation.kind];
    let mut path = kind.collection();
    if is_encoded && let Some(start) = path.rfind('/') {
        let letter = path.as_bytes()[start + 1];
        path.replace_range(start + 1..start + 2, &format!("%{letter:02x}"));
    }
    if !matches!(operation.verb, Verb::List | Verb::Create | Verb::DeleteAll) {
        path = format!("{path}/{}", operation.name);
        if !kind.subresource.is_empty() {
            path = format!("{path}/{}", kind.subresource);
        }
    }
    path
}

impl Sim {
    /// Sends an operation's request through its Envoy.
    pub(super) fn try_once(&mut self, number: u64) {
        let is_encoded = self.chance(50);
        let Some(operation) = self.operations.get_mut(&number) else { return };
        operation.tries += 1;
        let (envoy, kind, verb) = (operation.envoy, operation.kind, operation.verb);
        let has_loop_header = operation.has_loop_header;
        let method = operation.verb.method(TYPES[kind].reaches_backend());
        let path = path(operation, is_encoded);
        let Some(root) = self.pick_root(envoy) else {
            // The VM is dead: Envoy closes with a 503 of its own that the filter never sees.
            if let Some(operation) = self.operations.remove(&number) {
                self.namespace_hears(&operation, None, &Outcome::Cut);
            }
            return;
        };
        let random = self.rng.u32(..);
        let Some(placed) = self.roots.get_mut(&root) else { return };
        let (mut decision, mut if_none_match) = (None, None);
        let sent;
        if let Verb::Discover(half) = verb {
            (sent, if_none_match) = placed.root.request_discovery(half, random);
        } else {
            (sent, decision) = placed.root.request(path.as_bytes(), method, has_loop_header, random);
        }
        self.summary.requests += 1;
        if let Some(Decision::Reroute(peer)) = decision {
            self.check_reroute(root, peer, kind, has_loop_header);
        }
        let members = &self.roots[&root].root.apiservers;
        let (apiserver, cluster) = match (sent.to, self.envoys[envoy].local) {
            (To::Peer(peer), _) => (members[peer], format!("cp-{}", members[peer])),
            (To::Here, Some(local)) => (local, format!("cp-{local}")),
            (To::Here, None) => (self.balance(envoy, root), "apiservers".to_owned()),
        };
        let stream = self.number() as u32;
        tell!(self, "stream {stream}: {method} {path} at envoy {envoy} root {root}: {decision:?}, to cp-{apiserver}");
        let sent_at = self.now;
        let new =
            Stream { operation: number, envoy, root, sent, if_none_match, sent_at, apiserver, cluster, held: None };
        self.streams.insert(stream, new);
        let after = Duration::from_micros(self.rng.u64(100..2_000));
        self.at(after, Event::Reaches(stream));
        if !self.is_peace && self.chance(20) {
            let after = self.some_millis(1, 3_000);
            self.at(after, Event::Aborts(stream));
        }
    }

    /// A worker's root: the newest, or now and then one whose listener is being drained.
    fn pick_root(&mut self, envoy: usize) -> Option<u64> {
        let workers = self.envoys[envoy].workers.len();
        let worker = self.rng.usize(..workers);
        // After the faults, only the newest configuration has to be right.
        let drains = !self.is_peace && self.chance(150);
        let worker = &self.envoys[envoy].workers[worker];
        if drains && let Some(old) = worker.draining.last() {
            return Some(*old);
        }
        worker.current
    }

    /// The gateway's balancer.
    fn balance(&mut self, envoy: usize, root: u64) -> usize {
        let members = self.roots[&root].root.apiservers.clone();
        let healthy: Vec<usize> = match &self.envoys[envoy].health_checks {
            Some(seen) => members.iter().copied().filter(|member| seen[*member]).collect(),
            None => Vec::new(),
        };
        let among = if healthy.is_empty() { &members } else { &healthy };
        among[self.rng.usize(..among.len())]
    }

    pub(super) fn checks_health(&mut self, envoy: usize) {
        for number in 0..self.apiservers.len() {
            let is_cut = self.partitions.get(&(envoy, number)).is_some_and(|(until, _)| *until > self.now);
            let server = &self.apiservers[number];
            let is_healthy = server.is_up && server.hangs_until <= self.now && !is_cut;
            if let Some(seen) = &mut self.envoys[envoy].health_checks {
                seen[number] = is_healthy;
            }
        }
        self.at(millis(500), Event::HealthChecks(envoy));
    }

    fn check_reroute(&mut self, root: u64, peer: usize, kind: usize, has_loop_header: bool) {
        self.summary.reroutes += 1;
        self.summary.checks += 3;
        let placed = &self.roots[&root];
        let (apiserver, ticked_at) = (placed.root.apiservers[peer], placed.root.ticked_at);
        let ledger = &self.envoys[placed.envoy].ledger;
        let cluster = &placed.root.config.apiservers[peer].discovery_cluster;
        let label = TYPES[kind].label();
        let story = format!("root {root} reroutes {label} to cp-{apiserver}");
        let is_excluded = match TYPES[kind].definition {
            None => false,
            Some(0) => true,
            Some(_) => ledger.excludes(kind, root, ticked_at),
        };
        let is_off = placed.root.config.peer_proxying != PeerProxying::Enabled;
        if !ledger.lists(cluster, kind, root, ticked_at) {
            self.broke(Broken::ReroutedToStranger, format!("{story}, whose document does not list it"));
        } else if is_excluded {
            self.broke(Broken::ExclusionIgnored, story);
        } else if has_loop_header || is_off {
            self.broke(Broken::ReroutedAgain, format!("{story} (loop header: {has_loop_header})"));
        }
    }

    pub(super) fn reaches(&mut self, number: u32) {
        let Some(stream) = self.streams.get(&number) else { return };
        let (envoy, apiserver, operation) = (stream.envoy, stream.apiserver, stream.operation);
        let (mut reply, mut after) = (None, Duration::from_micros(self.rng.u64(200..3_000)));
        if let Some((until, is_quick)) = self.partitions.get(&(envoy, apiserver))
            && *until > self.now
        {
            let (details, wait) = if *is_quick {
                ("upstream_reset_before_response_started{connection_timeout}", 250)
            } else {
                ("response_timeout", 3_000)
            };
            (reply, after) = (Some(Reply::by_envoy(if *is_quick { 503 } else { 504 }, details)), millis(wait));
        } else if !self.apiservers[apiserver].is_up {
            let refused = "upstream_reset_before_response_started{remote_connection_failure|111}";
            reply = Some(Reply::by_envoy(503, refused));
        } else if self.apiservers[apiserver].hangs_until > self.now {
            if self.rng.bool() {
                // It may still do what nobody waits for any more.
                let epoch = self.apiservers[apiserver].epoch;
                let later = self.apiservers[apiserver].hangs_until - self.now;
                self.at(later, Event::ExecutedLate { operation, apiserver, epoch });
            }
            (reply, after) = (Some(Reply::by_envoy(504, "response_timeout")), millis(3_000));
        } else if !self.is_peace && self.chance(45) {
            reply = self.mishap(operation, apiserver);
        }
        let reply = match reply {
            Some(reply) => reply,
            None => {
                if self.apiservers[apiserver].slow_until > self.now {
                    after += self.apiservers[apiserver].slow_by;
                }
                match self.operations.get(&operation).map(|operation| operation.verb) {
                    Some(Verb::Discover(half)) => self.tells_client(number, half),
                    _ => self.executes(operation, apiserver),
                }
            }
        };
        let epoch = self.apiservers[apiserver].epoch;
        self.at(after, Event::Returns { stream: number, reply, epoch });
    }

    /// What happens to single requests now and then.
    fn mishap(&mut self, operation: u64, apiserver: usize) -> Option<Reply> {
        const BROKEN: &str = "upstream_reset_before_response_started{connection_termination}";
        self.summary.faults += 1;
        match self.rng.u8(..8) {
            0 | 1 => {
                self.executes(operation, apiserver);
                Some(Reply::by_envoy(503, BROKEN))
            }
            2 => Some(Reply::by_envoy(503, BROKEN)),
            3 => Some(Reply::by_envoy(503, "upstream_reset_before_response_started{overflow}")),
            4 => Some(Reply { retry_after: true, ..Reply::by_apiserver(429, 200, Origin::Refused) }),
            5 => Some(Reply::by_apiserver(503, 200, Origin::Refused)),
            // A balancer between Envoy and the apiserver.
            6 => Some(Reply { details: VIA_UPSTREAM, ..Reply::by_envoy(404, "") }),
            _ => Some(Reply::by_envoy(404, "route_not_found")),
        }
    }

    pub(super) fn executed_late(&mut self, operation: u64, apiserver: usize, epoch: u64) {
        if self.apiservers[apiserver].epoch == epoch {
            self.executes(operation, apiserver);
        }
    }

    /// An apiserver does what it was asked, as far as it knows how to.
    fn executes(&mut self, number: u64, apiserver: usize) -> Reply {
        let done = |status| Reply::by_apiserver(status, 512, Origin::Done);
        let server = &self.apiservers[apiserver];
        let (Some(release), Some(operation)) = (server.release(), self.operations.get(&number)) else {
            return Reply::by_apiserver(503, 200, Origin::Refused);
        };
        let operation = operation.clone();
        let kind = &TYPES[operation.kind];
        let served = catalogue::served(release, self.etcd.definitions);
        if !served.contains(&operation.kind) {
            let knows_group = served.iter().any(|id| TYPES[*id].group == kind.group);
            return self.missing_route(&operation, knows_group);
        }
        let exists = self.etcd.get(operation.kind, &operation.name).is_some();
        if !exists && !matches!(operation.verb, Verb::Discover(_) | Verb::List | Verb::Create | Verb::DeleteAll) {
            return self.missing_object(&operation);
        }
        match operation.verb {
            Verb::Get if kind.reaches_backend() => self.backend(),
            Verb::Discover(_) | Verb::Get | Verb::List => done(200),
            Verb::Create => {
                let name = format!("made-{}", self.number());
                self.etcd.create(operation.kind, &name, None);
                self.counts(number);
                done(201)
            }
            Verb::Delete => {
                self.etcd.delete(operation.kind, &operation.name);
                self.counts(number);
                self.check_collection(&operation);
                done(200)
            }
            Verb::DeleteAll => {
                if let Purpose::Empty { namespace } = operation.purpose {
                    self.etcd.delete_all(operation.kind, &namespaces::prefix(namespace));
                }
                self.counts(number);
                done(200)
            }
            Verb::Update => {
                self.counts(number);
                if kind.reaches_backend() { self.backend() } else { done(200) }
            }
        }
    }

    fn counts(&mut self, number: u64) {
        self.summary.checks += 1;
        let Some(operation) = self.operations.get_mut(&number) else { return };
        operation.executed += 1;
        if operation.executed > 1 {
            let story =
                format!("{:?} of {} through {} tries", operation.verb, TYPES[operation.kind].label(), operation.tries);
            self.broke(Broken::ExecutedTwice, story);
        }
    }

    /// A backend says what it likes, a plain 404 of Go's among it.
    fn backend(&mut self) -> Reply {
        let reply = Reply::by_apiserver(404, 19, Origin::Backend);
        match self.rng.u8(..3) {
            0 => Reply { content_type: Some("text/plain; charset=utf-8"), ..reply },
            1 => Reply { content_type: Some("text/html"), content_length: None, ..reply },
            _ => Reply::by_apiserver(200, 512, Origin::Done),
        }
    }

    fn missing_object(&mut self, operation: &Operation) -> Reply {
        let length = 180 + operation.name.len() as u32 * 2;
        let reply = Reply::by_apiserver(404, length, Origin::MissingObject);
        let reply = match self.rng.u8(..40) {
            // Exactly as long as the answer for a missing route.
            0 => Reply { content_length: Some(174), ..reply },
            1 => Reply { content_length: None, ..reply },
            2 => Reply { content_encoding: Some("gzip"), ..reply },
            _ => reply,
        };
        if !operation.wants_protobuf {
            return reply;
        }
        Reply {
            content_type: Some("application/vnd.kubernetes.protobuf"),
            content_length: reply.content_length.map(|length| if length == 174 { 116 } else { length - 58 }),
            ..reply
        }
    }

    fn missing_route(&mut self, operation: &Operation, knows_group: bool) -> Reply {
        if !knows_group {
            let reply = Reply::by_apiserver(404, 19, Origin::MissingRoute);
            return Reply { content_type: Some("text/plain; charset=utf-8"), ..reply };
        }
        let reply = Reply::by_apiserver(404, 174, Origin::MissingRoute);
        if !operation.wants_protobuf {
            return reply;
        }
        Reply { content_type: Some("application/vnd.kubernetes.protobuf"), content_length: Some(116), ..reply }
    }

    /// An answer reaches the filter.
    pub(super) fn returns(&mut self, number: u32, reply: Reply, epoch: u64) {
        let Some(stream) = self.streams.get_mut(&number) else { return };
        let is_cut = self.apiservers[stream.apiserver].epoch != epoch && reply.origin != Origin::Between;
        let reply = if is_cut {
            Reply::by_envoy(503, "upstream_reset_before_response_started{connection_termination}")
        } else {
            reply
        };
        let Some(placed) = self.roots.get_mut(&stream.root) else { return };
        let process = &mut self.envoys[stream.envoy];
        let clock = self.now + process.clock;
        let fate = placed.root.response(&mut process.shared, &stream.sent, &reply, &stream.cluster, number, clock);
        let root = stream.root;
        tell!(self, "stream {number}: {} ({:?}) comes back: {fate:?}", reply.status, reply.origin);
        self.check_exclusion(number, &reply, fate);
        if fate == Fate::Held {
            self.summary.held += 1;
            if let Some(stream) = self.streams.get_mut(&number) {
                stream.held = Some((reply, self.now));
            }
        } else {
            self.settles(number, reply, fate);
        }
        self.arm(root);
    }

    fn check_exclusion(&mut self, number: u32, reply: &Reply, fate: Fate) {
        let Some(operation) = self.operations.get(&self.streams[&number].operation) else { return };
        let is_by_apiserver = reply.origin != Origin::Between;
        if TYPES[operation.kind].definition == Some(0) && is_by_apiserver && fate != Fate::Passes {
            let story = format!("{} for {} was not left alone", reply.status, TYPES[operation.kind].label());
            self.broke(Broken::ExclusionIgnored, story);
        }
    }

    /// The client gets its answer.
    pub(super) fn settles(&mut self, number: u32, reply: Reply, fate: Fate) {
        let outcome = match fate {
            Fate::Replaced { retry, why } => {
                self.summary.guarded_404s += u64::from(reply.status == 404);
                tell!(self, "stream {number}: 503, retry: {retry} ({why})");
                Outcome::Unavailable { retry, why }
            }
            Fate::Served => match self.served(number) {
                Some(listed) => Outcome::Discovered(listed),
                None => Outcome::Cut,
            },
            Fate::Passes | Fate::Held => {
                tell!(self, "stream {number}: {}", reply.status);
                Outcome::Answered(reply)
            }
        };
        self.ends(number, &outcome);
    }

    /// A held answer has waited no longer than two questions and a late tick may take.
    pub(super) fn bound_wait(&mut self, number: u32, since: Duration) {
        self.summary.checks += 1;
        let Some(placed) = self.streams.get(&number).and_then(|stream| self.roots.get(&stream.root)) else { return };
        let question = placed.root.config.discovery.timeout + Duration::from_secs(1) + LONGEST_STALL;
        let waited = self.now - since;
        if waited > question * 2 + millis(500) {
            self.broke(Broken::WaitsForEver, format!("stream {number} was held for {waited:?}"));
        }
    }

    pub(super) fn aborts(&mut self, number: u32) {
        let Some(stream) = self.streams.get(&number) else { return };
        if stream.held.is_some()
            && let Some(placed) = self.roots.get_mut(&stream.root)
        {
            placed.root.drop_held(number);
        }
        tell!(self, "stream {number}: the client goes away");
        self.ends(number, &Outcome::Cut);
    }

    fn check_collection(&mut self, operation: &Operation) {
        let Purpose::Collect { owner: (kind, name, uid), was_served } = &operation.purpose else { return };
        self.summary.checks += 1;
        if *was_served && self.etcd.lives(*kind, name, *uid) {
            let story = format!("{} was deleted, its owner {} {name} lives", operation.name, TYPES[*kind].label());
            self.broke(Broken::OrphanedByMistake, story);
        }
    }
}

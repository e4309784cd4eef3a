//! Clients: what they want, how they try again, what they make of answers.

use std::rc::Rc;

use super::{Event, Sim, millis, tell};
use crate::Broken;
use crate::catalogue::{self, TYPES, TypeId};
use crate::documents::Listed;
use crate::streams::{Operation, Origin, Purpose, Reply, Stream, Verb};

/// client-go gives up after so many tries.
const TRIES: u32 = 10;

/// What a client gets.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The answer of an apiserver, or of something on the way to it.
    Answered(Reply),
    /// The filter's 503.
    Unavailable {
        /// It may try again.
        retry: bool,
        /// For stories.
        #[allow(dead_code, reason = "shown by Debug")]
        why: &'static str,
    },
    /// Discovery of the whole cluster.
    Discovered(Rc<Listed>),
    /// Nothing: the connection broke, or the client went away.
    Cut,
}

impl Sim {
    /// Somebody makes an object, and one that depends on it, without passing here.
    pub(super) fn populate(&mut self, kind: TypeId) {
        let name = format!("owner-{}", self.number());
        let Some(uid) = self.etcd.create(kind, &name, None) else { return };
        let dependent = format!("dependent-{}", self.number());
        let configmaps = Self::configmaps();
        self.etcd.create(configmaps, &dependent, Some((kind, name, uid)));
    }

    fn configmaps() -> TypeId {
        TYPES.iter().position(|kind| kind.resource == "configmaps").unwrap_or_default()
    }

    /// A type: more often one that not all releases have.
    fn pick_type(&mut self) -> TypeId {
        let kind = self.rng.usize(..TYPES.len());
        if catalogue::is_skewed(kind) || self.rng.u8(..3) == 0 { kind } else { self.rng.usize(..TYPES.len()) }
    }

    pub(super) fn client_acts(&mut self) {
        if self.is_peace {
            return;
        }
        let kind = self.pick_type();
        let has_subresource = !TYPES[kind].subresource.is_empty();
        if !has_subresource && self.rng.u8(..10) == 0 {
            let is_possible = TYPES[kind].definition.is_none_or(|definition| self.etcd.definitions[definition]);
            if is_possible {
                self.populate(kind);
            }
        }
        let verb = match self.rng.u8(..12) {
            0..=4 => Verb::Get,
            5 if !has_subresource => Verb::List,
            6 | 7 if !has_subresource => Verb::Create,
            8 if !has_subresource => Verb::Delete,
            _ => Verb::Update,
        };
        let names = self.etcd.names(kind);
        let existing = names.get(self.rng.usize(..names.len().max(1))).map(|name| (*name).clone());
        let is_missing = self.rng.u8(..4) == 0;
        let name = existing.filter(|_| !is_missing).unwrap_or_else(|| format!("missing-{}", self.rng.u16(..)));
        self.wants(verb, kind, name, Purpose::Own, None);
        let after = self.some_millis(1, 60);
        self.at(after, Event::ClientActs);
    }

    pub(super) fn wants(&mut self, verb: Verb, kind: TypeId, name: String, purpose: Purpose, envoy: Option<usize>) {
        let envoy = envoy.unwrap_or_else(|| self.rng.usize(..self.envoys.len()));
        let (wants_protobuf, has_loop_header) = (self.rng.bool(), purpose == Purpose::Own && self.chance(30));
        let operation =
            Operation { verb, kind, name, purpose, wants_protobuf, has_loop_header, envoy, tries: 0, executed: 0 };
        let number = self.number();
        self.operations.insert(number, operation);
        self.at(millis(0), Event::Try(number));
    }

    /// The garbage collector looks at a dependent, and asks for its owner.
    pub(super) fn collector_acts(&mut self) {
        if self.is_peace {
            return;
        }
        let configmaps = Self::configmaps();
        let names = self.etcd.names(configmaps);
        let dependent = names.get(self.rng.usize(..names.len().max(1))).map(|name| (*name).clone());
        if let Some(dependent) = dependent
            && let Some(object) = self.etcd.get(configmaps, &dependent)
            && let Some((kind, name, uid)) = object.owner.clone()
        {
            let dependent = (configmaps, dependent, object.uid);
            self.wants(Verb::Get, kind, name, Purpose::Owner { uid, dependent }, None);
        }
        let after = self.some_millis(20, 300);
        self.at(after, Event::CollectorActs);
    }

    /// A stream is over.
    pub(super) fn ends(&mut self, number: u32, outcome: &Outcome) {
        let Some(stream) = self.streams.remove(&number) else { return };
        let Some(operation) = self.operations.get(&stream.operation).cloned() else { return };
        let retries = match outcome {
            Outcome::Answered(reply) => reply.retry_after,
            Outcome::Unavailable { retry, .. } => *retry,
            Outcome::Discovered(_) | Outcome::Cut => false,
        };
        let is_unavailable = match outcome {
            Outcome::Answered(reply) => reply.status == 503,
            Outcome::Unavailable { .. } => true,
            Outcome::Discovered(_) | Outcome::Cut => false,
        };
        self.summary.unavailable += u64::from(is_unavailable);
        if operation.purpose == Purpose::Probe {
            self.check_probe(&stream, &operation, outcome);
        } else if retries && operation.tries < TRIES && !self.is_peace {
            return self.at(millis(1_000), Event::Try(stream.operation));
        }
        self.namespace_hears(&operation, Some(&stream), outcome);
        if let Outcome::Answered(reply) = outcome
            && reply.status == 404
            && !matches!(operation.verb, Verb::Discover(_))
        {
            self.gets_404(&stream, &operation, reply);
        }
        // What hangs may still execute it, and is counted.
        if !matches!(outcome, Outcome::Unavailable { .. } | Outcome::Cut) {
            self.operations.remove(&stream.operation);
        }
    }

    fn gets_404(&mut self, stream: &Stream, operation: &Operation, reply: &Reply) {
        self.summary.passed_404s += 1;
        let lie = self.lie(stream, operation, reply);
        let Purpose::Owner { uid, dependent: (dependent_kind, dependent, dependent_uid) } = &operation.purpose else {
            if let Some((broken, story)) = lie {
                self.broke(broken, story);
            }
            return;
        };
        if self.etcd.lives(*dependent_kind, dependent, *dependent_uid) {
            tell!(self, "the garbage collector takes {} {} for gone", TYPES[operation.kind].label(), operation.name);
            let was_served = matches!(lie, Some((Broken::ServedYetNotFound, _)));
            let owner = (operation.kind, operation.name.clone(), *uid);
            let purpose = Purpose::Collect { owner, was_served };
            self.wants(Verb::Delete, *dependent_kind, dependent.clone(), purpose, None);
        }
    }

    /// Whether a 404 tells something that is not so.
    fn lie(&mut self, stream: &Stream, operation: &Operation, reply: &Reply) -> Option<(Broken, String)> {
        self.summary.checks += 1;
        let (kind, label) = (operation.kind, TYPES[operation.kind].label());
        match reply.origin {
            Origin::Between => return Some((Broken::ForeignNotFound, format!("404 for {label} made by nobody"))),
            Origin::MissingRoute if TYPES[kind].definition.is_none() => {}
            _ => return None,
        }
        let placed = self.roots.get(&stream.root)?;
        let (config, ticked_at) = (&placed.root.config, placed.root.ticked_at);
        let clock = self.clock(stream.envoy);
        for (apiserver, configured) in placed.root.apiservers.iter().zip(&config.apiservers) {
            let told = || format!("404 for {label} through envoy {} root {}", stream.envoy, stream.root);
            let asked = stream.apiserver;
            if self.apiservers[*apiserver].had_throughout(kind, stream.sent_at, self.now) {
                return Some((
                    Broken::ServedYetNotFound,
                    format!("{}, asked cp-{asked}, cp-{apiserver} serves it", told()),
                ));
            }
            let listed = self.envoys[stream.envoy].ledger.listed_last(&configured.discovery_cluster, kind, ticked_at);
            if listed.is_some_and(|listed| listed + config.discovery.forget_after > clock) {
                return Some((
                    Broken::ForgottenTooSoon,
                    format!("{}, cp-{apiserver} listed it {:?} ago", told(), listed.map(|listed| clock - listed)),
                ));
            }
        }
        None
    }
}

//! The namespace controller: it reads discovery, deletes what there is of each type, and lets the namespace go. Whatever is
//! left in it is lost for ever.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use mixed_version_proxy::discovery::document::Half;

use super::clients::Outcome;
use super::discovery::SPACING;
use super::{Event, Sim, tell};
use crate::Broken;
use crate::catalogue::{self, TYPES, TypeId};
use crate::documents::Listed;
use crate::plant::Plant;
use crate::streams::{Operation, Purpose, Stream, Verb};

/// How many namespaces are being deleted at the same time.
const MOST: usize = 6;

/// A namespace that is being deleted.
#[derive(Debug, Default)]
pub(super) struct Namespace {
    /// Requests on their way; 0: the controller does something else.
    pending: usize,
    /// In this round something went wrong, or discovery says that it may not be all: the namespace stays.
    is_kept: bool,
    /// What the controller has read that there is.
    types: BTreeSet<TypeId>,
    /// When it began to read.
    since: Duration,
    /// Apiservers that the Envoys which it has read through know.
    known: Option<BTreeSet<usize>>,
    /// Types whose absence nobody can be blamed for: see [`Sim::check_document`]; or that are gone, as their apiservers say.
    excused: BTreeSet<TypeId>,
    is_reading: bool,
}

/// How the names of a namespace's objects begin.
pub(super) fn prefix(namespace: u64) -> String {
    format!("ns{namespace}-")
}

impl Sim {
    pub(super) fn namespace_controller_acts(&mut self) {
        if self.is_peace {
            return;
        }
        if self.namespaces.len() < MOST && self.rng.bool() {
            self.terminate_namespace();
        }
        let idle: Vec<u64> =
            self.namespaces.iter().filter(|(_, namespace)| namespace.pending == 0).map(|(number, _)| *number).collect();
        if !idle.is_empty() {
            let namespace = idle[self.rng.usize(..idle.len())];
            tell!(self, "the namespace controller looks what there is for namespace {namespace}");
            let pending = Half::ALL.len();
            let round = Namespace { pending, since: self.now, is_reading: true, ..Namespace::default() };
            self.namespaces.insert(namespace, round);
            let envoy = self.rng.usize(..self.envoys.len());
            for half in Half::ALL {
                self.wants(Verb::Discover(half), 0, String::new(), Purpose::Empty { namespace }, Some(envoy));
            }
        }
        let after = self.some_millis(20, 250);
        self.at(after, Event::NamespaceControllerActs);
    }

    /// Somebody deletes a namespace with some objects in it. Nobody can make others in it any more.
    pub(super) fn terminate_namespace(&mut self) {
        if self.is_peace {
            return;
        }
        let number = self.number();
        let running: Vec<usize> =
            self.apiservers.iter().filter(|server| server.is_up).filter_map(|server| server.release()).collect();
        let served = running.iter().flat_map(|release| catalogue::served(*release, self.etcd.definitions));
        let types: BTreeSet<TypeId> = served.filter(|kind| TYPES[*kind].subresource.is_empty()).collect();
        for kind in types {
            if self.rng.bool() {
                self.etcd.create(kind, &format!("{}{kind}", prefix(number)), None);
            }
        }
        self.namespaces.insert(number, Namespace::default());
    }

    /// An answer that the namespace controller waits for, if it is one.
    pub(super) fn namespace_hears(&mut self, operation: &Operation, stream: Option<&Stream>, outcome: &Outcome) {
        if let (Verb::Discover(half), Some(stream), Some(listed)) = (operation.verb, stream, listed(outcome)) {
            let excused = self.check_document(stream, half, &listed);
            let Purpose::Empty { namespace } = operation.purpose else { return };
            let members = self.roots.get(&stream.root).map(|placed| placed.root.apiservers.iter().copied().collect());
            let members: BTreeSet<usize> = members.unwrap_or_default();
            let is_believed = !listed.is_incomplete() || self.plant == Some(Plant::IgnoreMarks);
            let is_partial = !listed.stale.is_empty() && self.plant != Some(Plant::IgnoreMarks);
            let Some(round) = self.namespaces.get_mut(&namespace) else { return };
            round.is_kept |= !is_believed || is_partial;
            round.types.extend(&listed.preferred);
            round.excused.extend(excused);
            let known = round.known.get_or_insert_with(|| members.clone());
            known.retain(|member| members.contains(member));
        }
        let Purpose::Empty { namespace } = operation.purpose else { return };
        let Some(round) = self.namespaces.get_mut(&namespace) else { return };
        match (operation.verb, outcome) {
            (Verb::Discover(_), outcome) => round.is_kept |= listed(outcome).is_none(),
            (_, Outcome::Answered(reply)) if reply.status == 200 => {}
            (_, Outcome::Answered(reply)) if reply.status == 404 => {
                // Judged elsewhere.
                let is_same = |kind: &TypeId| is_same_resource(*kind, operation.kind);
                round.excused.extend((0..TYPES.len()).filter(is_same));
            }
            _ => round.is_kept = true,
        }
        round.pending -= 1;
        if round.pending > 0 {
            return;
        }
        if std::mem::take(&mut round.is_reading) && !round.types.is_empty() {
            let types = std::mem::take(&mut round.types);
            round.pending = types.len();
            let envoy = self.rng.usize(..self.envoys.len());
            for kind in types {
                self.wants(Verb::DeleteAll, kind, String::new(), Purpose::Empty { namespace }, Some(envoy));
            }
        } else if !round.is_kept {
            self.lets_namespace_go(namespace);
        }
    }

    fn lets_namespace_go(&mut self, number: u64) {
        let Some(round) = self.namespaces.remove(&number) else { return };
        tell!(self, "namespace {number} is gone");
        self.summary.namespaces += 1;
        self.summary.checks += 1;
        let (prefix, from) = (prefix(number), round.since.saturating_sub(SPACING));
        for (kind, names) in TYPES.iter().enumerate() {
            let is_left = self.etcd.names(kind).iter().any(|name| name.starts_with(&prefix));
            let has_kind = |member: &usize| self.apiservers[*member].had_throughout(kind, from, self.now);
            if is_left
                && names.subresource.is_empty()
                && !(0..TYPES.len()).any(|other| is_same_resource(kind, other) && round.excused.contains(&other))
                && let Some(member) = round.known.iter().flatten().find(|member| has_kind(member))
            {
                let story = format!("{} was left in namespace {number}, cp-{member} serves it", names.label());
                return self.broke(Broken::NamespaceGoneTooSoon, story);
            }
        }
        (0..TYPES.len()).for_each(|kind| self.etcd.delete_all(kind, &prefix));
    }

    /// Under the plant that leaves documents incomplete, what comes of them is to be seen.
    pub(super) fn judges_documents(&self) -> bool {
        self.plant != Some(Plant::DiscoveryFromLastPoll)
    }
}

/// Versions of a resource are ways to look at the same objects.
fn is_same_resource(one: TypeId, other: TypeId) -> bool {
    (TYPES[one].group, TYPES[one].resource) == (TYPES[other].group, TYPES[other].resource)
}

/// What a client has read: the merge, or an apiserver's own document.
fn listed(outcome: &Outcome) -> Option<Rc<Listed>> {
    match outcome {
        Outcome::Discovered(listed) => Some(Rc::clone(listed)),
        Outcome::Answered(reply) => reply.says.as_ref().map(|says| Rc::new(Listed::of(says))),
        Outcome::Unavailable { .. } | Outcome::Cut => None,
    }
}

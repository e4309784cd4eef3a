//! What each Envoy process has really been told, written down by the world and not by the filter.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use crate::catalogue::{TYPES, TypeId};
use crate::world::Polled;

/// Longer than a busy worker goes without a tick: what a leader has published for so long has reached every root.
const SURELY_SEEN: Duration = Duration::from_secs(1);

/// How long something has stood in the record that leaders publish and others adopt. A leader publishes what its own
/// configuration names, in the place of all that stood there.
#[derive(Debug, Clone, Copy)]
struct Standing {
    from: Duration,
    until: Option<Duration>,
}

impl Standing {
    /// It has, or had, stood for long enough to have reached whatever root there was.
    fn is_surely_seen(self, now: Duration) -> bool {
        self.from + SURELY_SEEN <= self.until.unwrap_or(now)
    }

    /// A root whose latest tick was at this time must have seen it, unless it was loaded too late.
    fn must_be_seen(self, ticked_at: Duration) -> bool {
        self.from <= ticked_at && self.until.is_none_or(|until| self.is_surely_seen(until))
    }
}

/// A document that has reached a root.
#[derive(Debug, Clone)]
struct Told {
    /// When the question was sent: later questions tell newer things.
    asked_at: Duration,
    /// Which root got it.
    root: u64,
    /// Since that root published it; only leaders do.
    published: Option<Standing>,
    says: Rc<BTreeSet<TypeId>>,
}

/// The ledger of one Envoy process. All times are the world's, but for what is named *on the Envoy's clock*.
#[derive(Debug, Default)]
pub struct Ledger {
    /// By the cluster that the apiserver is polled through: the same apiserver elsewhere is another one to the filter.
    told: BTreeMap<(String, Polled), Vec<Told>>,
    /// When a document that lists a type last reached a leader that went on to publish it, on the Envoy's clock.
    listed: BTreeMap<(String, TypeId), (Duration, Standing)>,
    /// The same, not yet published, by root.
    unpublished: BTreeMap<u64, Vec<(String, TypeId, Duration)>>,
}

/// APIServices are the same everywhere, whoever tells of them.
const ANY: &str = "";

fn polled(kind: TypeId) -> Polled {
    if TYPES[kind].group.is_empty() { Polled::Core } else { Polled::Groups }
}

impl Ledger {
    /// A believable answer of an apiserver has reached a root.
    pub fn told(
        &mut self,
        cluster: &str,
        document: Polled,
        root: (u64, bool),
        (asked_at, now): (Duration, Duration),
        on_its_clock: Duration,
        says: &Rc<BTreeSet<TypeId>>,
    ) {
        let (root, leads) = root;
        let cluster = if document == Polled::ApiServices { ANY } else { cluster };
        let history = self.told.entry((cluster.to_owned(), document)).or_default();
        history.retain(|told| told.root != root || told.published.is_some());
        let seen_by_all =
            history.iter().filter(|told| told.published.is_some_and(|standing| standing.is_surely_seen(now)));
        if let Some(newest) = seen_by_all.map(|told| told.asked_at).max() {
            history.retain(|told| told.asked_at >= newest);
        }
        history.push(Told { asked_at, root, published: None, says: Rc::clone(says) });
        if leads && document != Polled::ApiServices {
            let listed = says.iter().filter(|kind| polled(**kind) == document);
            let listed = listed.map(|kind| (cluster.to_owned(), *kind, on_its_clock));
            self.unpublished.entry(root).or_default().extend(listed);
        }
    }

    /// A root has published all that it knows, which is of the apiservers that it polls through these clusters.
    pub fn published(&mut self, root: u64, clusters: &[&str], now: Duration) {
        let is_gone = |cluster: &str| cluster != ANY && !clusters.contains(&cluster);
        let told = self.told.iter_mut().filter(|((cluster, _), _)| is_gone(cluster));
        let told = told.flat_map(|(_, history)| history).filter_map(|told| told.published.as_mut());
        let listed = self.listed.iter_mut().filter(|((cluster, _), _)| is_gone(cluster));
        for standing in told.chain(listed.map(|(_, (_, standing))| standing)) {
            standing.until = standing.until.or(Some(now));
        }
        let standing = Standing { from: now, until: None };
        for told in self.told.values_mut().flatten().filter(|told| told.root == root) {
            told.published = told.published.or(Some(standing));
        }
        for (cluster, kind, on_its_clock) in self.unpublished.remove(&root).unwrap_or_default() {
            self.listed.insert((cluster, kind), (on_its_clock, standing));
        }
    }

    /// Nothing is polled through this cluster any more: what was learned through it is not remembered.
    pub fn removed(&mut self, cluster: &str) {
        self.listed.retain(|(of, _), _| of != cluster);
        for unpublished in self.unpublished.values_mut() {
            unpublished.retain(|(of, ..)| of != cluster);
        }
    }

    /// The newest that a root has been told of an apiserver: itself, or by the leader before its latest tick.
    fn newest(&self, cluster: &str, document: Polled, root: u64, ticked_at: Duration) -> Option<&Told> {
        let must_be_seen = |standing: Standing| standing.must_be_seen(ticked_at);
        let reached = |told: &&Told| told.root == root || told.published.is_some_and(must_be_seen);
        self.told.get(&(cluster.to_owned(), document))?.iter().filter(reached).max_by_key(|told| told.asked_at)
    }

    /// Whether an apiserver's newest document that a root must know lists the type, or a newer one that it may know.
    pub fn lists(&self, cluster: &str, kind: TypeId, root: u64, ticked_at: Duration) -> bool {
        let newest = self.newest(cluster, polled(kind), root, ticked_at);
        let told = self.told.get(&(cluster.to_owned(), polled(kind))).into_iter().flatten();
        let is_older = |told: &Told| newest.is_some_and(|newest| told.asked_at < newest.asked_at);
        let mut may_be_known =
            newest.into_iter().chain(told.filter(|told| told.published.is_some() && !is_older(told)));
        may_be_known.any(|told| told.says.contains(&kind))
    }

    /// Whether the newest list of APIServices that a root can know has the custom resource's group-version.
    pub fn excludes(&self, kind: TypeId, root: u64, ticked_at: Duration) -> bool {
        let newest = self.newest(ANY, Polled::ApiServices, root, ticked_at);
        newest.is_some_and(|told| told.says.contains(&kind))
    }

    /// When a document with the type last reached the process that a root must know of which was loaded and has last looked
    /// at these times; on the Envoy's clock.
    pub fn listed_last(
        &self,
        cluster: &str,
        kind: TypeId,
        loaded_at: Duration,
        ticked_at: Duration,
    ) -> Option<Duration> {
        let (listed, standing) = self.listed.get(&(cluster.to_owned(), kind))?;
        let was_there = standing.until.is_none_or(|until| loaded_at < until);
        (was_there && standing.must_be_seen(ticked_at)).then_some(*listed)
    }
}

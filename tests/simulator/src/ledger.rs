//! What each Envoy process has really been told, written down by the world and not by the filter.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use crate::catalogue::{TYPES, TypeId};
use crate::world::{Polled, Stale};

/// Longer than a busy worker goes without a tick: what a leader has published for so long has reached every root.
const SURELY_SEEN: Duration = Duration::from_secs(1);

/// A document that has reached a root.
#[derive(Debug, Clone)]
struct Told {
    /// When the question was sent: later questions tell newer things.
    asked_at: Duration,
    /// Which root got it.
    root: u64,
    /// When that root published it; only leaders do, and keep what others published of apiservers that they do not poll.
    published_at: Option<Duration>,
    /// What it lists, and what the root may have known before of a group-version that it calls stale.
    says: Rc<BTreeSet<TypeId>>,
    /// The group-version that it calls stale.
    stale: Option<Stale>,
}

/// The ledger of one Envoy process. All times are the world's, but for what is named *on the Envoy's clock*.
#[derive(Debug, Default)]
pub struct Ledger {
    /// By the cluster that the apiserver is polled through: the same apiserver elsewhere is another one to the filter.
    told: BTreeMap<(String, Polled), Vec<Told>>,
    /// When a document that lists a type last reached a leader that went on to publish it: on the Envoy's clock, and when
    /// it was published.
    listed: BTreeMap<(String, TypeId), (Duration, Duration)>,
    /// The same, not yet published, by root.
    unpublished: BTreeMap<u64, Vec<(String, TypeId, Duration)>>,
    /// Until when an apiserver need not be asked again for a document that it has not told.
    failed: BTreeMap<(String, Polled), Duration>,
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
        (root, leads, ticked_at): (u64, bool, Duration),
        (asked_at, now): (Duration, Duration),
        on_its_clock: Duration,
        (lists, stale): (&Rc<BTreeSet<TypeId>>, Option<Stale>),
    ) {
        let is_kept = |stale: Stale, kind: TypeId| stale.concerns(kind) && self.lists(cluster, kind, root, ticked_at);
        let says = stale.map_or_else(
            || Rc::clone(lists),
            |stale| Rc::new((0..TYPES.len()).filter(|kind| lists.contains(kind) || is_kept(stale, *kind)).collect()),
        );
        let cluster = if document == Polled::ApiServices { ANY } else { cluster };
        let history = self.told.entry((cluster.to_owned(), document)).or_default();
        history.retain(|told| told.root != root || told.published_at.is_some());
        let seen_by_all = history.iter().filter(|told| told.published_at.is_some_and(|at| at + SURELY_SEEN <= now));
        if let Some(newest) = seen_by_all.map(|told| told.asked_at).max() {
            history.retain(|told| told.asked_at >= newest);
        }
        history.push(Told { asked_at, root, published_at: None, says, stale });
        if leads && document != Polled::ApiServices {
            let listed = lists.iter().filter(|kind| polled(**kind) == document);
            let listed = listed.map(|kind| (cluster.to_owned(), *kind, on_its_clock));
            self.unpublished.entry(root).or_default().extend(listed);
        }
    }

    /// A root has published all that it knows.
    pub fn published(&mut self, root: u64, now: Duration) {
        for told in self.told.values_mut().flatten().filter(|told| told.root == root) {
            told.published_at = told.published_at.or(Some(now));
        }
        for (cluster, kind, on_its_clock) in self.unpublished.remove(&root).unwrap_or_default() {
            self.listed.insert((cluster, kind), (on_its_clock, now));
        }
    }

    /// A question has brought nothing, and need not be asked again for a while.
    pub fn failed(&mut self, cluster: &str, document: Polled, in_peace_until: Duration) {
        let until = self.failed.entry((cluster.to_owned(), document)).or_default();
        *until = in_peace_until.max(*until);
    }

    /// Whether a question of this moment, or a later one, has brought nothing; or need not have been sent.
    pub fn has_failed_since(&self, cluster: &str, document: Polled, moment: Duration) -> bool {
        self.failed.get(&(cluster.to_owned(), document)).is_some_and(|until| *until >= moment)
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
        let reached = |told: &&Told| told.root == root || told.published_at.is_some_and(|at| at <= ticked_at);
        self.told.get(&(cluster.to_owned(), document))?.iter().filter(reached).max_by_key(|told| told.asked_at)
    }

    /// Whether an apiserver's newest document that a root must know lists the type, or a newer one that it may know.
    pub fn lists(&self, cluster: &str, kind: TypeId, root: u64, ticked_at: Duration) -> bool {
        let newest = self.newest(cluster, polled(kind), root, ticked_at);
        let told = self.told.get(&(cluster.to_owned(), polled(kind))).into_iter().flatten();
        let is_older = |told: &Told| newest.is_some_and(|newest| told.asked_at < newest.asked_at);
        let mut may_be_known =
            newest.into_iter().chain(told.filter(|told| told.published_at.is_some() && !is_older(told)));
        may_be_known.any(|told| told.says.contains(&kind))
    }

    /// Whether a document that may count calls the type's group-version stale.
    pub fn may_be_stale(&self, cluster: &str, kind: TypeId) -> bool {
        let mut told = self.told.get(&(cluster.to_owned(), polled(kind))).into_iter().flatten();
        told.any(|told| told.stale.is_some_and(|stale| stale.concerns(kind)))
    }

    /// Whether the newest list of APIServices that a root can know has the custom resource's group-version.
    pub fn excludes(&self, kind: TypeId, root: u64, ticked_at: Duration) -> bool {
        let newest = self.newest(ANY, Polled::ApiServices, root, ticked_at);
        newest.is_some_and(|told| told.says.contains(&kind))
    }

    /// When a document with the type last reached the process and was published before a moment; on the Envoy's clock.
    pub fn listed_last(&self, cluster: &str, kind: TypeId, published_by: Duration) -> Option<Duration> {
        let (listed, published) = self.listed.get(&(cluster.to_owned(), kind))?;
        (*published <= published_by).then_some(*listed)
    }
}

//! What the root and all streams of one configuration share on one worker.

use std::cell::{Cell, RefCell};
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;
use std::time::Duration;

use foldhash::fast::FixedState;

use super::discovery::{Awaiting, Told};
use super::host::{self, Counter};
use super::reply::{Reply, Retry};
use super::shared::SharedData;
use crate::config::Config;
use crate::discovery::document::Half;
use crate::guard::held::{Held, Released, Waiting};
use crate::guard::{Asked, Verdict, WhyRefused};
use crate::metrics;
use crate::peers::cluster_discovery::{self, ClusterDiscovery};
use crate::peers::documents::{Documents, Kind};
use crate::peers::election::{Candidate, Step};
use crate::peers::exclusions::Exclusions;
use crate::peers::refresh::{Answer, Asking, Change, Peers, Question, QuestionId, Role, Settings, Subject, Word};
use crate::peers::snapshot::{Snapshot, SnapshotError};
use crate::peers::table::{ApiserverSet, View};
use crate::quote::quoted_bytes;

/// How often the root looks whether a poll is due: as often as questions may follow each other. An idle worker's ten
/// wake-ups a second cost nothing that could be measured.
const TICK: Duration = Duration::from_millis(100);

/// When a stream waits for a question, the root comes as soon as Envoy's timers allow.
const AT_ONCE: Duration = Duration::from_millis(1);

/// The generation of what is too large to be published.
const EACH_FOR_ITSELF: u64 = u64::MAX;

/// State of one configuration on one worker. No borrow outlives the method that takes it, so none meets another.
pub(super) struct Shared {
    pub(super) config: Config,
    root_id: u32,
    data: SharedData,
    candidate: Candidate,
    role: Cell<Role>,
    has_requests: Cell<bool>,
    /// The generation that was read or published last.
    generation: Cell<u64>,
    /// The leader knows more than it has published.
    has_news: Cell<bool>,
    peers: RefCell<Peers>,
    held: RefCell<Held>,
    /// Discovery of the whole cluster.
    told: RefCell<Told>,
    /// It was made here and not published.
    has_news_to_tell: Cell<bool>,
    /// When it was last seen that all documents are published.
    verified: Cell<Duration>,
    /// Answers to discovery requests that wait for what their apiserver says now.
    pub(super) awaiting: RefCell<Vec<Awaiting>>,
    pub(super) no_peer_requests: Counter,
    pub(super) unmerged_requests: Counter,
    view: RefCell<Rc<View>>,
    random: Cell<u64>,
    is_called_at_once: Cell<bool>,
    /// Apiservers whose missing route has been logged.
    misrouted: Cell<ApiserverSet>,
}

impl Shared {
    pub(super) fn new(config: Config, root_id: u32) -> Self {
        let exclusions = Exclusions::new(&config.exclusions.group_versions);
        let peers = Peers::new(Settings::from(&config), exclusions);
        // The standard library's hasher is seeded by the host's random numbers.
        let random = RandomState::new();
        let candidate = Candidate {
            id: random.hash_one("candidate"),
            configured_at: host::monotonic_now(),
            poll_set: poll_set(&config),
        };
        let shared = Self {
            config,
            root_id,
            data: SharedData::of_this_plugin(),
            candidate,
            role: Cell::default(),
            has_requests: Cell::default(),
            generation: Cell::default(),
            has_news: Cell::default(),
            view: RefCell::new(Rc::new(peers.view())),
            peers: RefCell::new(peers),
            held: RefCell::default(),
            told: RefCell::default(),
            has_news_to_tell: Cell::default(),
            verified: Cell::default(),
            awaiting: RefCell::default(),
            no_peer_requests: Counter::of(metrics::NO_PEER_REQUESTS),
            unmerged_requests: Counter::of(metrics::UNMERGED_REQUESTS),
            random: Cell::new(random.hash_one("pick")),
            is_called_at_once: Cell::default(),
            misrouted: Cell::default(),
        };
        shared.tick_every(TICK);
        // Never from nothing, if another worker or an older configuration has known something.
        shared.adopt();
        shared
    }

    /// What is known now.
    pub(super) fn view(&self) -> Rc<View> {
        Rc::clone(&self.view.borrow())
    }

    pub(super) fn random(&self) -> u32 {
        let mut generator = fastrand::Rng::with_seed(self.random.get());
        let number = generator.u32(..);
        self.random.set(generator.get_seed());
        number
    }

    pub(super) fn apiservers(&self) -> ApiserverSet {
        ApiserverSet::first(self.config.apiservers.len())
    }

    pub(super) fn name_of(&self, apiserver: usize) -> &str {
        self.config.apiservers.get(apiserver).map_or("", |apiserver| apiserver.name.as_str())
    }

    /// Runs `judge` with the exclusions of now.
    pub(super) fn with_exclusions<R>(&self, judge: impl FnOnce(&Exclusions) -> R) -> R {
        judge(self.peers.borrow().exclusions())
    }

    /// A type that vanished after this moment counts as served.
    pub(super) fn vanished_after(&self) -> Duration {
        host::monotonic_now().saturating_sub(self.config.discovery.forget_after)
    }

    /// The number of the latest question: see [`Peers::mark`].
    pub(super) fn mark(&self) -> u64 {
        self.peers.borrow().mark()
    }

    /// Most of a body that need be read.
    pub(super) fn read_limit(&self) -> usize {
        self.peers.borrow().read_limit()
    }

    /// Looks who leads, and takes over what that one has published.
    pub(super) fn stand(&self) {
        let (seen, now) = (self.data.lease(), host::monotonic_now());
        let published = seen.value.map_or(0, |lease| lease.generation);
        let role = match self.candidate.step(seen.value, now) {
            Step::Lead => Role::Leader,
            Step::Write(lease) if self.data.write_lease(&lease, &seen) => Role::Leader,
            Step::Follow | Step::Stray if published == EACH_FOR_ITSELF => Role::Leader,
            Step::Write(_) | Step::Follow => Role::Follower,
            Step::Stray => Role::Stray,
        };
        if published != self.generation.get() && published != EACH_FOR_ITSELF {
            self.adopt();
            self.generation.set(published);
        }
        let leads = role == Role::Leader;
        let has_led = self.role.replace(role) == Role::Leader;
        if leads != has_led {
            log::info!("this worker {}", if leads { "polls for all" } else { "leaves polling to another" });
        }
        if leads {
            let woken = self.data.woken(self.candidate.poll_set);
            woken.iter().for_each(|apiserver| self.peers.borrow_mut().hurry(apiserver, now));
        }
    }

    fn leads(&self) -> bool {
        self.role.get() == Role::Leader
    }

    /// A request has come. The clock is read with the next tick.
    pub(super) fn note_request(&self) {
        self.has_requests.set(true);
    }

    /// The questions to send now.
    pub(super) fn due(&self) -> Vec<Question> {
        if self.is_called_at_once.replace(false) {
            self.tick_every(TICK);
        }
        let now = host::monotonic_now();
        let is_another_view = self.peers.borrow_mut().forget(now);
        if is_another_view {
            self.show();
            self.has_news.set(true);
        }
        let mut peers = self.peers.borrow_mut();
        if self.has_requests.replace(false) {
            peers.note_request(now);
        }
        peers.due(now, self.role.get())
    }

    /// Tells the other workers what they do not know yet.
    pub(super) fn publish(&self) {
        if !self.leads() || !self.has_news.replace(false) {
            return;
        }
        let holds_lease = self.data.lease().value.is_some_and(|lease| lease.holder == self.candidate.id);
        if !holds_lease {
            // It has lost the lead since it looked, and must not overwrite what its successor has told; or each polls for
            // itself.
            return self.merge();
        }
        // Before what refers to them, so that a leader that dies in between leaves too much and never too little.
        self.publish_documents();
        self.merge();
        // Maybe it was made before, for a client.
        if self.has_news_to_tell.replace(false)
            && let Told::Merged { bytes, .. } = &*self.told.borrow()
            && !self.data.publish_discovery(bytes)
        {
            log::error!("Envoy does not take the discovery of the whole cluster");
        }
        let bytes = self.snapshot_to_publish();
        let generation = match bytes {
            Ok(bytes) if self.data.publish(&bytes) => next_generation(self.generation.get()),
            Ok(_) => return log::error!("Envoy does not take what there is to publish"),
            Err(error) => {
                log::error!("each worker polls for itself: {error}");
                EACH_FOR_ITSELF
            }
        };
        let (seen, now) = (self.data.lease(), host::monotonic_now());
        // If another worker has taken the lead meanwhile, it publishes what it knows.
        if seen.value.is_some_and(|lease| lease.holder == self.candidate.id)
            && self.data.write_lease(&self.candidate.lease(now, generation), &seen)
        {
            self.generation.set(generation);
        }
    }

    fn snapshot_to_publish(&self) -> Result<Vec<u8>, SnapshotError> {
        let (peers, previous) = (self.peers.borrow(), self.data.snapshot().unwrap_or_default());
        let mut snapshot = peers.snapshot(self.names());
        if let Ok(previous) = Snapshot::from_bytes(&previous) {
            snapshot.keep_others(&previous, self.config.discovery.forget_after, host::monotonic_now());
        }
        snapshot.to_bytes()
    }

    fn adopt(&self) {
        let Some(bytes) = self.data.snapshot() else { return };
        let is_another_view = match Snapshot::from_bytes(&bytes) {
            Ok(snapshot) => self.peers.borrow_mut().adopt(&snapshot, self.names(), host::monotonic_now()),
            Err(error) => return log::error!("what another worker has published: {error}"),
        };
        if is_another_view {
            self.show();
        }
        match self.published_discovery() {
            Some(told) => {
                *self.told.borrow_mut() = told;
                self.has_news_to_tell.set(false);
            }
            // Who leads has another configuration, cannot merge, or knows less: maybe not that something is missing.
            None => self.merge(),
        }
    }

    /// What the leader tells clients, unless it was made for another configuration, or from less than is known here.
    fn published_discovery(&self) -> Option<Told> {
        let bytes = self.data.discovery().filter(|_| self.config.merges_discovery())?;
        let stamp = match ClusterDiscovery::from_bytes(&bytes) {
            Ok(discovery) => discovery.stamp,
            Err(error) => {
                log::error!("what another worker has published: {error}");
                return None;
            }
        };
        let peers = self.peers.borrow();
        let ours = peers.stamp(self.candidate.poll_set).filter(|_| !peers.is_outdated())?;
        stamp.covers(&ours).then(|| Told::Merged { bytes: Rc::new(bytes), stamp })
    }

    /// Puts the bodies of new documents where all workers find them.
    fn publish_documents(&self) {
        if self.generation.get() == EACH_FOR_ITSELF || !self.peers.borrow().has_bodies() {
            return;
        }
        let seen = self.data.documents();
        let published = Documents::from_bytes(seen.value.as_deref().unwrap_or_default()).unwrap_or_default();
        let bytes = Documents::of(self.peers.borrow().bodies(self.names(), &published).into_iter()).to_bytes();
        match bytes {
            Ok(bytes) if self.data.publish_documents(&bytes, &seen) => self.peers.borrow_mut().forget_bodies(),
            // Another worker was quicker, or Envoy does not take it: once more when there is news.
            Ok(_) => log::warn!("the documents of the apiservers were not published"),
            // Merged here alone, from what has not been published.
            Err(error) => log::error!("{error}"),
        }
    }

    /// What clients are told now.
    pub(super) fn told(&self) -> Told {
        self.told.borrow().clone()
    }

    /// Makes anew what clients are told, if anything that matters is another than it was.
    pub(super) fn merge(&self) {
        if !self.config.merges_discovery() {
            return;
        }
        let is_current = |peers: &Peers| {
            let stamp = peers.stamp(self.candidate.poll_set);
            stamp.is_none_or(|stamp| self.told.borrow().stamp() == Some(&stamp))
        };
        // Who leads looks now and then whether all documents are there: one that had just lost the lead may have dropped
        // those of apiservers that it does not know.
        let is_to_verify = self.leads() && self.is_time_to_verify();
        if is_current(&self.peers.borrow()) && !is_to_verify {
            return;
        }
        let published = self.data.documents().value.unwrap_or_default();
        let published = Documents::from_bytes(&published).unwrap_or_default();
        self.peers.borrow_mut().note_missing_bodies(self.names(), &published);
        let peers = self.peers.borrow();
        if is_current(&peers) {
            return;
        }
        let Some(stamp) = peers.stamp(self.candidate.poll_set) else { return };
        let documents = Documents::of(peers.bodies(self.names(), &published).into_iter());
        let made = cluster_discovery::make(&peers.cluster_sources(self.names(), &documents, stamp.clone()));
        *self.told.borrow_mut() = match made {
            Ok(bytes) => Told::Merged { bytes: Rc::new(bytes), stamp },
            Err(error) => {
                log::error!("clients see each apiserver's own discovery: {error}");
                Told::Unmergeable { stamp }
            }
        };
        self.has_news_to_tell.set(true);
    }

    /// Once a refresh interval.
    fn is_time_to_verify(&self) -> bool {
        let (now, verified) = (host::monotonic_now(), self.verified.get());
        let is_time = verified.saturating_add(self.config.discovery.refresh_interval) <= now;
        if is_time {
            self.verified.set(now);
        }
        is_time
    }

    /// Entity tag and version of a document: see [`Peers::document`].
    pub(super) fn document(&self, apiserver: usize, kind: Kind) -> (Option<String>, Option<Duration>) {
        let peers = self.peers.borrow();
        let (etag, version) = peers.document(apiserver, kind);
        (etag.map(str::to_owned), version)
    }

    /// See [`Peers::was_just_asked`].
    pub(super) fn was_just_asked(&self, apiserver: usize, half: Half) -> bool {
        self.peers.borrow().was_just_asked(apiserver, half, host::monotonic_now())
    }

    /// Asks an apiserver for a document; whether an answer will come.
    pub(super) fn ask(&self, apiserver: usize, subject: Subject, mark: u64) -> bool {
        let asking = self.peers.borrow_mut().ask(apiserver, subject, mark, host::monotonic_now());
        self.is_awaited(asking)
    }

    /// The same, even of one that fails its polls.
    pub(super) fn insist(&self, apiserver: usize, subject: Subject, mark: u64) -> bool {
        let asking = self.peers.borrow_mut().insist(apiserver, subject, mark, host::monotonic_now());
        self.is_awaited(asking)
    }

    fn is_awaited(&self, asking: Asking) -> bool {
        if asking == Asking::Awaited {
            self.call_root();
        }
        asking == Asking::Awaited
    }

    /// Clients are told that something may be missing: see [`Peers::note_outdated`].
    pub(super) fn note_outdated(&self, apiserver: usize, subject: Subject) {
        self.peers.borrow_mut().note_outdated(apiserver, subject);
        self.merge();
    }

    /// Name and discovery cluster of each apiserver.
    fn names(&self) -> impl Iterator<Item = (&str, &str)> {
        let apiservers = self.config.apiservers.iter();
        apiservers.map(|apiserver| (apiserver.name.as_str(), apiserver.discovery_cluster.as_str()))
    }

    /// Makes whoever leads poll apiservers soon.
    fn wake_leader(&self, whom: ApiserverSet) {
        if !self.leads() {
            self.data.wake(self.candidate.poll_set, whom);
        }
    }

    /// The questions whose answer will not come any more.
    pub(super) fn lost(&self) -> Vec<QuestionId> {
        self.peers.borrow().lost(host::monotonic_now())
    }

    /// Takes the answer to a question, and lets go the held answers that it settles.
    pub(super) fn answered(&self, id: QuestionId, answer: Answer<'_>) -> Change {
        let (now, random) = (host::monotonic_now(), self.random());
        let change = self.peers.borrow_mut().answered(id, answer, now, random);
        self.has_news.set(true);
        if change.view {
            self.show();
            self.wake_leader(ApiserverSet::only(id.apiserver));
        }
        if let (Subject::Half(half), Some(word)) = (id.subject, change.word) {
            let (view, vanished_after) = (self.view(), self.vanished_after());
            let (peers, mut held) = (self.peers.borrow(), self.held.borrow_mut());
            let stale = (word == Word::Good).then(|| peers.stale(id.apiserver, half));
            let released = held.answered(id.apiserver, half, id.number, stale, &view, vanished_after);
            drop((peers, held));
            released.into_iter().for_each(|released| self.release(released));
        }
        if let Some(word) = change.word {
            if self.role.get() == Role::Stray {
                // What the leader makes is for another configuration.
                self.merge();
            }
            self.discovery_answered(id, word);
        }
        change
    }

    /// Runs something as if in a callback of a stream, if that still lives.
    pub(super) fn on_stream(&self, stream: u32, act: impl FnOnce()) {
        if host::set_effective_context(stream).is_ok() {
            act();
            host::log_failure("returning to the root context", host::set_effective_context(self.root_id));
        }
    }

    /// Holds an answer until the apiservers in `waiting.pending` have been asked. `Err`: one of them is being left in
    /// peace, so the question cannot be settled now.
    pub(super) fn hold(&self, waiting: Waiting) -> Result<(), WhyRefused> {
        let now = host::monotonic_now();
        let mut peers = self.peers.borrow_mut();
        for apiserver in waiting.pending.iter() {
            if peers.ask(apiserver, Subject::Half(waiting.half), waiting.mark, now) == Asking::BackingOff {
                return Err(WhyRefused::Unconfirmed);
            }
        }
        drop(peers);
        self.held.borrow_mut().hold(waiting);
        self.call_root();
        Ok(())
    }

    /// Only the root may send questions: those of a stream would end with it, and leave all others waiting.
    fn call_root(&self) {
        if !self.is_called_at_once.replace(true) {
            self.tick_every(AT_ONCE);
        }
    }

    /// A stream is over, or has been answered otherwise.
    pub(super) fn drop_held(&self, stream: u32) {
        self.held.borrow_mut().drop_stream(stream);
        self.awaiting.borrow_mut().retain(|awaiting| awaiting.stream != stream);
    }

    /// A 404 is not believed, or a request has failed: whoever was asked is not what the table says.
    pub(super) fn hurry(&self, asked: Asked) {
        let whom = match asked {
            Asked::One(apiserver) => ApiserverSet::only(apiserver),
            Asked::AnyOne | Asked::Stranger => self.apiservers(),
        };
        let now = host::monotonic_now();
        whom.iter().for_each(|apiserver| self.peers.borrow_mut().hurry(apiserver, now));
        self.wake_leader(whom);
    }

    /// A request to an apiserver has failed: others are preferred until it has answered a poll.
    pub(super) fn avoid(&self, apiserver: usize) {
        let is_another_view = self.peers.borrow_mut().avoid(apiserver);
        if is_another_view {
            self.show();
        }
    }

    /// Once for each apiserver: a route that is missing is missing for every request.
    pub(super) fn log_misrouted(&self, meant: usize, answered: &[u8]) {
        let logged = self.misrouted.get();
        if logged.contains(meant) {
            return;
        }
        self.misrouted.set(logged.union(ApiserverSet::only(meant)));
        log::error!(
            "a request meant for {} was answered by cluster {}: the Envoy configuration has no route for it",
            self.name_of(meant),
            quoted_bytes(answered)
        );
    }

    fn show(&self) {
        let view = self.peers.borrow().view();
        *self.view.borrow_mut() = Rc::new(view);
    }

    fn release(&self, released: Released) {
        let retry = Retry::unless(released.may_be_executed);
        self.on_stream(released.stream, || match released.verdict {
            Verdict::Pass => host::log_failure("letting an answer go", host::continue_response()),
            Verdict::Refuse(why) => {
                let audit_id = host::response_header("audit-id").ok().flatten();
                Reply::guarded(why, audit_id, retry).send(self.config.retry_after_seconds);
            }
            // A held answer has been asked about already.
            Verdict::Ask { .. } => {
                Reply::guarded(WhyRefused::Unconfirmed, None, retry).send(self.config.retry_after_seconds)
            }
        });
    }

    fn tick_every(&self, period: Duration) {
        host::log_failure("asking for ticks", host::set_tick_period(period));
    }
}

/// What a configuration wants to be polled, as a number that all VMs of a process compute alike.
fn poll_set(config: &Config) -> u64 {
    let polled: Vec<_> =
        config.apiservers.iter().map(|apiserver| (&apiserver.name, &apiserver.discovery_cluster)).collect();
    FixedState::default().hash_one((
        polled,
        &config.discovery,
        &config.exclusions,
        config.local,
        config.merges_discovery(),
    ))
}

/// Another number than before, and neither of the special ones.
const fn next_generation(generation: u64) -> u64 {
    match generation.wrapping_add(1) {
        0 | EACH_FOR_ITSELF => 1,
        next => next,
    }
}

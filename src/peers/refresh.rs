//! What is known of the apiservers, and how it is kept current: whom to ask when, and what an answer changes.
//!
//! A state machine without I/O. Time comes in as a [`Duration`] since any fixed moment of a monotonic clock; questions
//! come out and somebody else sends them. A poll that fails never takes away what an earlier one told: while an
//! apiserver is configured, its last good document counts and its silence is doubt.

use std::hash::BuildHasher;
use std::rc::Rc;
use std::time::Duration;

use foldhash::fast::FixedState;

use crate::config::Config;
use crate::discovery::api_services::{self, ApiServicesError, GroupVersionName};
use crate::discovery::document::{self, Document, DocumentError, Half};
use crate::discovery::json::ShapeError;
use crate::discovery::open_api;
use crate::peers::backoff;
use crate::peers::cluster_discovery::{self, Known, Stamp};
use crate::peers::documents::{Documents, Kept, Kind};
use crate::peers::exclusions::{Excluded, Exclusions};
use crate::peers::snapshot::{ApiserverState, ExcludedState, PollState, Snapshot, TypeState};
use crate::peers::table::{ApiserverSet, Context, Health, Listing, Table, View};

/// How much longer than the call's own timeout we wait before we take an answer for lost. Envoy answers every call at its
/// timeout at the latest; this is for the day when it does not, and must only be longer than a busy worker's delay.
const LOST_ANSWER_GRACE: Duration = Duration::from_secs(1);

/// Between two questions about one document of one apiserver. Clients that ask for types that nobody serves must not turn
/// into a load of discovery requests.
const SPACING: Duration = Duration::from_millis(100);

/// The root of OpenAPI v3 has no entity tag, so it is polled once in so many intervals: and at once when the apiserver's
/// discovery has changed. A hash that is out of date costs a client one redirect.
const OPEN_API_INTERVALS: u32 = 12;

/// How long clients wait for an apiserver that fails its polls: one that is back answers sooner, and one that hangs must not
/// cost each of them the whole timeout.
pub const PATIENCE_WITH_FAILING: Duration = Duration::from_secs(1);

/// Between two polls that come early for a reason (a guarded 404, a failed request). Reasons come by the hundred.
const EARLY_SPACING: Duration = Duration::from_secs(1);

/// How often, and how much.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Number of apiservers.
    pub apiservers: usize,
    /// The local one, in sidecar mode: APIServices are asked of it.
    pub local: Option<usize>,
    /// See `discovery.refreshInterval`.
    pub interval: Duration,
    /// See `discovery.timeout`.
    pub timeout: Duration,
    /// See `discovery.forgetAfter`.
    pub forget_after: Duration,
    /// See `discovery.maxDocumentBytes`.
    pub max_document_bytes: usize,
    /// See `exclusions.apiServices`.
    pub api_services: bool,
    /// See `exclusions.gracePeriod`.
    pub grace_period: Duration,
    /// Documents are merged: their bodies are wanted, and the roots of OpenAPI v3.
    pub merges: bool,
}

/// What is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// A discovery document.
    Half(Half),
    /// The root of OpenAPI v3.
    OpenApi,
    /// The APIService objects.
    ApiServices,
}

/// All that is known of the apiservers.
#[derive(Debug)]
pub struct Peers {
    settings: Settings,
    /// Both halves of each apiserver, in the order of the configuration.
    apiservers: Vec<[Poll; 2]>,
    /// The root of OpenAPI v3 of each.
    open_api: Vec<Poll>,
    api_services: Poll,
    table: Rc<Table>,
    exclusions: Exclusions,
    avoided: ApiserverSet,
    /// See [`Self::note_request`].
    requested_at: Option<Duration>,
    /// How many questions have been sent.
    sent: u64,
}

/// One document of one apiserver.
#[derive(Debug, Default)]
struct Poll {
    is_known: bool,
    is_fresh: bool,
    etag: Option<String>,
    /// How many polls have failed in a row.
    failures: u32,
    /// The words of the last failure, so that the log tells a change and not every repetition.
    failure: Option<String>,
    next_due: Duration,
    sent_at: Option<Duration>,
    /// When the question was sent whose answer, or want of one, made this state. Maybe another worker's.
    heard: Option<Duration>,
    /// When whoever leads sent its latest question that is known of here.
    covered: Option<Duration>,
    /// When the question was sent whose answer is the latest good one: how old what we know is.
    told: Option<Duration>,
    /// When the question was sent that brought the document which counts: tells a newer one from an older.
    version: Option<Duration>,
    /// Of the body, so that one that comes again without an entity tag is no news.
    digest: Option<u64>,
    /// Group-versions that the document calls stale: of these it says nothing.
    stale: Vec<GroupVersionName>,
    /// The body, until it has been published.
    body: Option<Rc<str>>,
    /// The body is nowhere to be had: the next poll must not be answered with a 304.
    lacks_body: bool,
    /// The apiserver serves another document than the one that counts, and a question about it has failed.
    is_outdated: bool,
    /// Until when the apiserver has asked to be left in peace (`Retry-After`).
    in_peace_until: Duration,
    /// To be sent as soon as spacing allows.
    is_wanted: bool,
    in_flight: Option<InFlight>,
}

#[derive(Debug, Clone, Copy)]
struct InFlight {
    id: QuestionId,
    /// Until when the answer is awaited.
    deadline: Duration,
    /// Another document was adopted from another worker meanwhile.
    is_overtaken: bool,
}

/// What a root polls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// All, for all workers.
    Leader,
    /// Nothing: the leader wants the same.
    #[default]
    Follower,
    /// For itself, what the leader does not: that one's configuration is another.
    Stray,
}

/// A question that is due: a GET of [`Subject::path`] from an apiserver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question {
    /// Which question this is; to be handed back with the answer.
    pub id: QuestionId,
    /// Entity tag of the document that we have: an unchanged one is answered with a 304 without a body.
    pub if_none_match: Option<String>,
}

/// Names one question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuestionId {
    /// Index of the apiserver in the configuration.
    pub apiserver: usize,
    /// What is asked for.
    pub subject: Subject,
    /// Counts all questions: a later one has a higher number. See [`Peers::mark`].
    pub number: u64,
}

/// What came back.
#[derive(Debug)]
pub enum Answer<'a> {
    /// An HTTP answer.
    Response {
        /// Status code.
        status: u16,
        /// Header `content-type`, empty if absent.
        content_type: &'a [u8],
        /// Header `etag`.
        etag: Option<&'a [u8]>,
        /// Header `retry-after`.
        retry_after: Option<&'a [u8]>,
        /// The whole body.
        body: &'a [u8],
    },
    /// No answer at all.
    Failed(PollError),
}

/// Why a poll brought nothing.
#[derive(Debug, thiserror::Error)]
pub enum PollError {
    /// Envoy did not take the call: no such cluster, no host, circuit breaker.
    #[error("Envoy does not take calls to cluster {cluster:?} (status {host_status})")]
    NotDispatched {
        /// The cluster that was named.
        cluster: String,
        /// Envoy's proxy-wasm status.
        host_status: u32,
    },
    /// The call was reset, or its answer was too large for Envoy.
    #[error("the call was reset before its answer was complete")]
    Reset,
    /// Envoy never came back with an answer.
    #[error("no answer and no timeout came back")]
    Lost,
    /// A header or the body could not be read from Envoy.
    #[error("Envoy does not hand over the answer (status {host_status})")]
    Unreadable {
        /// Envoy's proxy-wasm status.
        host_status: u32,
    },
    /// Another status than 200 and 304. Envoy's own answers for a dead apiserver are 503 and 504.
    #[error("status {status}{hint}")]
    Status {
        /// The status code; 0 if there was none.
        status: u16,
        /// What an operator should look at first.
        hint: &'static str,
    },
    /// A 304 although nothing is there that could be unchanged.
    #[error("304 without a document to keep")]
    NothingToKeep,
    /// Larger than `discovery.maxDocumentBytes`.
    #[error("{bytes} bytes, more than discovery.maxDocumentBytes")]
    TooLarge {
        /// How much of the body was read.
        bytes: usize,
    },
    /// A 200 that is no discovery document.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// A 200 that is no root of OpenAPI v3.
    #[error("the root of OpenAPI v3 is {0}")]
    OpenApi(#[from] ShapeError),
    /// A 200 that is no list of APIServices.
    #[error(transparent)]
    ApiServices(#[from] ApiServicesError),
}

/// What an answer, or its absence, has changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// What was said; `None` if the answer was not awaited, or came out of order and will be asked for again.
    pub word: Option<Word>,
    /// The [view](Peers::view) is another one than before.
    pub view: bool,
    /// What there is to log.
    pub event: Option<Event>,
}

/// What an answer is worth to those who wait for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// The [view](Peers::view) holds what the apiserver has said.
    Good,
    /// It has not said what it serves.
    Failed,
}

/// A turn worth a log line: the first failure of a kind, and the end of failing.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// Polls began to fail, or fail for another reason than before.
    Failing(String),
    /// A document is there for the first time, or again.
    Recovered,
}

/// What becomes of a wish to know what an apiserver serves now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asking {
    /// An answer will come.
    Awaited,
    /// The apiserver fails its polls and is not asked again just now.
    BackingOff,
}

impl From<Kind> for Subject {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Core => Self::Half(Half::Core),
            Kind::Groups => Self::Half(Half::Groups),
            Kind::OpenApi => Self::OpenApi,
        }
    }
}

impl From<&Config> for Settings {
    fn from(config: &Config) -> Self {
        Self {
            apiservers: config.apiservers.len(),
            local: config.local,
            interval: config.discovery.refresh_interval,
            timeout: config.discovery.timeout,
            forget_after: config.discovery.forget_after,
            max_document_bytes: config.discovery.max_document_bytes,
            api_services: config.exclusions.api_services,
            grace_period: config.exclusions.grace_period,
            merges: config.merges_discovery(),
        }
    }
}

impl Subject {
    /// Where an apiserver answers it.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Half(half) => half.path(),
            Self::OpenApi => open_api::PATH,
            Self::ApiServices => api_services::PATH,
        }
    }

    /// In which form it is asked for.
    pub const fn accept(self) -> &'static str {
        match self {
            Self::Half(_) => document::POLL_ACCEPT,
            Self::OpenApi => "application/json",
            Self::ApiServices => api_services::ACCEPT,
        }
    }

    const fn hint(self, status: u16) -> &'static str {
        match (status, self) {
            (401, _) => ": the poll cluster's credential is not valid",
            (403, Self::Half(_) | Self::OpenApi) => {
                ": the poll cluster's credential may not read discovery (bind it to ClusterRole system:discovery)"
            }
            (403, Self::ApiServices) => {
                ": the poll cluster's credential needs the verbs get and list on apiservices in apiregistration.k8s.io; \
                 until it has them, group-versions of CRDs and aggregated APIs are told by their names alone"
            }
            (406, _) => ": the apiserver has no aggregated discovery in JSON",
            (503 | 504, _) => {
                ": the apiserver cannot be reached, is not ready, or is not trusted (trusted_ca of its cluster)"
            }
            _ => "",
        }
    }
}

impl Peers {
    /// Nothing is known and all is due at once.
    pub fn new(settings: Settings, exclusions: Exclusions) -> Self {
        let apiservers = (0..settings.apiservers).map(|_| <[Poll; 2]>::default()).collect();
        let open_api = (0..settings.apiservers).map(|_| Poll::default()).collect();
        Self {
            settings,
            apiservers,
            open_api,
            api_services: Poll::default(),
            table: Rc::default(),
            exclusions,
            avoided: ApiserverSet::EMPTY,
            requested_at: None,
            sent: 0,
        }
    }

    /// All that decisions are made from.
    pub fn view(&self) -> View {
        View {
            table: Rc::clone(&self.table),
            core: self.health(Half::Core),
            groups: self.health(Half::Groups),
            avoided: self.avoided,
        }
    }

    /// Group-versions that are left alone.
    pub const fn exclusions(&self) -> &Exclusions {
        &self.exclusions
    }

    /// At most this much of a body need be read: a longer one is refused.
    pub const fn read_limit(&self) -> usize {
        self.settings.max_document_bytes.saturating_add(1)
    }

    /// The number of the latest question. A question with a higher number was sent later than now.
    pub const fn mark(&self) -> u64 {
        self.sent
    }

    /// The questions that are due, each of which counts as sent from now on. A tick that comes late finds each due once.
    /// Whatever the role, what was [asked](Self::ask) for is sent.
    pub fn due(&mut self, now: Duration, role: Role) -> Vec<Question> {
        // A replaced configuration that serves no more requests falls silent. What it polled for the last of them stays
        // fresh for as long again.
        let is_idle = is_over(self.requested_at, self.patience(self.settings.interval), now);
        let role = if role == Role::Stray && is_idle { Role::Follower } else { role };
        let mut questions = Vec::new();
        for apiserver in 0..self.apiservers.len() {
            for half in Half::ALL {
                questions.extend(self.send(apiserver, Subject::Half(half), now, role));
            }
            if self.settings.merges {
                questions.extend(self.send(apiserver, Subject::OpenApi, now, role));
            }
        }
        if self.settings.api_services {
            let apiserver = self.settings.local.unwrap_or_else(|| self.whom_to_ask_for_api_services());
            questions.extend(self.send(apiserver, Subject::ApiServices, now, role));
        }
        questions
    }

    /// In a gateway: one that answers, or each in turn while none does.
    fn whom_to_ask_for_api_services(&self) -> usize {
        let fresh = self.health(Half::Groups).fresh.iter().next();
        let in_turn = usize::try_from(self.api_services.failures).unwrap_or_default();
        fresh.or_else(|| in_turn.checked_rem(self.apiservers.len())).unwrap_or_default()
    }

    fn send(&mut self, apiserver: usize, subject: Subject, now: Duration, role: Role) -> Option<Question> {
        let interval = self.interval_of(subject);
        let (lost_after, patience) = (self.settings.timeout.saturating_add(LOST_ANSWER_GRACE), self.patience(interval));
        let number = self.sent.saturating_add(1);
        let poll = self.poll_mut(apiserver, subject)?;
        let polls = match role {
            Role::Leader => true,
            Role::Follower => false,
            Role::Stray => is_over(poll.covered, patience, now),
        };
        if !poll.is_due(now, polls) {
            return None;
        }
        if role == Role::Leader {
            poll.covered = Some(now);
        }
        let id = QuestionId { apiserver, subject, number };
        poll.is_wanted = false;
        poll.sent_at = Some(now);
        poll.next_due = now.saturating_add(interval);
        poll.in_flight = Some(InFlight { id, deadline: now.saturating_add(lost_after), is_overtaken: false });
        let if_none_match = poll.etag.clone().filter(|_| !(polls && poll.lacks_body));
        self.sent = number;
        Some(Question { id, if_none_match })
    }

    /// How long what is polled once an interval may not have been heard of: two polls may get lost.
    const fn patience(&self, interval: Duration) -> Duration {
        interval.saturating_mul(3).saturating_add(self.settings.timeout)
    }

    fn interval_of(&self, subject: Subject) -> Duration {
        match subject {
            Subject::OpenApi => self.settings.interval.saturating_mul(OPEN_API_INTERVALS),
            Subject::Half(_) | Subject::ApiServices => self.settings.interval,
        }
    }

    /// The questions whose answer should have come long ago.
    pub fn lost(&self, now: Duration) -> Vec<QuestionId> {
        let polls = self.apiservers.iter().flatten().chain(&self.open_api).chain([&self.api_services]);
        polls.filter_map(|poll| poll.in_flight).filter(|awaited| awaited.deadline <= now).map(|lost| lost.id).collect()
    }

    /// Takes an answer. One that comes after its question was given up changes nothing: older data never replaces newer.
    /// `random` is any number.
    pub fn answered(&mut self, id: QuestionId, answer: Answer<'_>, now: Duration, random: u32) -> Change {
        let awaited = self.poll_mut(id.apiserver, id.subject);
        let Some(poll) = awaited.filter(|poll| poll.in_flight.is_some_and(|in_flight| in_flight.id == id)) else {
            return Change::default();
        };
        if poll.is_out_of_order(&answer) {
            poll.in_flight = None;
            poll.is_wanted = true;
            return Change::default();
        }
        let retry_after = match &answer {
            Answer::Response { status: 429 | 503, retry_after: Some(header), .. } => backoff::retry_after(header),
            _ => None,
        };
        let taken = self.take(id, answer, now);
        let interval = self.interval_of(id.subject);
        let is_discovery = matches!(id.subject, Subject::Half(_));
        let Some(poll) = self.poll_mut(id.apiserver, id.subject) else { return Change::default() };
        poll.in_flight = None;
        poll.heard = poll.sent_at;
        if taken.is_ok() {
            poll.told = poll.sent_at;
            poll.is_outdated = false;
        }
        let was_fresh = std::mem::replace(&mut poll.is_fresh, taken.is_ok());
        poll.is_known |= taken.is_ok();
        poll.failures = if taken.is_ok() { 0 } else { poll.failures.saturating_add(1) };
        poll.in_peace_until = retry_after.map_or(Duration::ZERO, |wait| now.saturating_add(wait));
        let since = if taken.is_ok() { poll.sent_at.unwrap_or(now) } else { now };
        poll.next_due = since.saturating_add(backoff::wait(interval, poll.failures, retry_after, random));
        let is_another_health = is_discovery && was_fresh != poll.is_fresh;
        match taken {
            Ok(is_another) => {
                poll.failure = None;
                let event = (!was_fresh).then_some(Event::Recovered);
                let was_avoided = is_discovery && self.is_back(id.apiserver);
                Change { word: Some(Word::Good), view: is_another || is_another_health || was_avoided, event }
            }
            Err(error) => {
                let failure = format!("{error}");
                let is_news = poll.failure.as_ref() != Some(&failure);
                let event = is_news.then(|| Event::Failing(failure.clone()));
                poll.failure = Some(failure);
                Change { word: Some(Word::Failed), view: is_another_health, event }
            }
        }
    }

    /// Wants to know what an apiserver serves, asked after the question number `mark`. An answer to such a question comes
    /// by [`Self::answered`], good or not, unless the apiserver is being left in peace.
    pub fn ask(&mut self, apiserver: usize, subject: Subject, mark: u64, now: Duration) -> Asking {
        let is_backing_off = |poll: &mut Poll| poll.in_flight.is_none() && poll.failures > 0 && now < poll.next_due;
        if self.poll_mut(apiserver, subject).is_none_or(is_backing_off) {
            return Asking::BackingOff;
        }
        self.insist(apiserver, subject, mark, now)
    }

    /// The same, but an apiserver that fails its polls may be back: it is left in peace only if it has asked for that
    /// (`Retry-After`), or has been silent to a question for as long as clients [wait](PATIENCE_WITH_FAILING).
    pub fn insist(&mut self, apiserver: usize, subject: Subject, mark: u64, now: Duration) -> Asking {
        let Some(poll) = self.poll_mut(apiserver, subject) else { return Asking::BackingOff };
        match poll.in_flight {
            Some(in_flight) if in_flight.id.number > mark => {}
            None if now < poll.in_peace_until => return Asking::BackingOff,
            Some(_) if poll.failures > 0 && is_over(poll.sent_at, PATIENCE_WITH_FAILING, now) => {
                return Asking::BackingOff;
            }
            _ => poll.is_wanted = true,
        }
        Asking::Awaited
    }

    /// Whether an apiserver was asked so short a time ago that it says the same still, for none is replaced within a tenth
    /// of a second. Shared by those that read discovery one request after the other.
    pub fn was_just_asked(&self, apiserver: usize, half: Half, now: Duration) -> bool {
        let heard = self.apiservers.get(apiserver).and_then(|halves| poll_of(halves, half).heard);
        heard.is_some_and(|heard| now < heard.saturating_add(SPACING))
    }

    /// A request has come, or several: see [`Role::Stray`].
    pub const fn note_request(&mut self, now: Duration) {
        self.requested_at = Some(now);
    }

    /// There is a reason to believe that an apiserver says something else by now: it is polled soon, unless it is being
    /// left in peace.
    pub fn hurry(&mut self, apiserver: usize, now: Duration) {
        for half in Half::ALL {
            if let Some(poll) = self.poll_mut(apiserver, Subject::Half(half))
                && poll.failures == 0
            {
                let soon = poll.sent_at.map_or(now, |sent_at| sent_at.saturating_add(EARLY_SPACING).max(now));
                poll.next_due = poll.next_due.min(soon);
            }
        }
    }

    /// A request could not be sent to an apiserver, or its answer broke: until it has answered a poll, it is asked only
    /// where nobody else can be. Whether the view is another one now.
    pub fn avoid(&mut self, apiserver: usize) -> bool {
        let before = self.avoided;
        self.avoided = before.union(ApiserverSet::only(apiserver));
        self.avoided != before
    }

    /// An apiserver has answered; whether it was avoided until now.
    fn is_back(&mut self, apiserver: usize) -> bool {
        let was_avoided = self.avoided.contains(apiserver);
        self.avoided = self.avoided.without(ApiserverSet::only(apiserver));
        was_avoided
    }

    /// Forgets types and exclusions that vanished long enough ago, and doubts what nobody has confirmed for long; whether
    /// the view is another one now.
    pub fn forget(&mut self, now: Duration) -> bool {
        let patience = self.patience(self.settings.interval);
        let mut is_another = false;
        for poll in self.apiservers.iter_mut().flatten().filter(|poll| poll.is_fresh) {
            let is_old = is_over(poll.heard, patience, now);
            poll.is_fresh = !is_old;
            is_another |= is_old;
        }
        if self.exclusions.forget_before(now.saturating_sub(self.settings.grace_period)) {
            self.table = Rc::new(self.table.with_exclusions(&self.exclusions));
            is_another = true;
        }
        if let Some(table) = self.table.without_vanished_before(now.saturating_sub(self.settings.forget_after)) {
            self.table = Rc::new(table);
            is_another = true;
        }
        is_another
    }

    /// What there is to tell other workers; `names` are the name and the discovery cluster of each apiserver.
    pub fn snapshot<'s>(&'s self, names: impl Iterator<Item = (&'s str, &'s str)>) -> Snapshot<'s> {
        let polls = self.apiservers.iter().zip(&self.open_api);
        let apiservers =
            names.zip(polls).map(|((name, discovery_cluster), ([core, groups], open_api))| ApiserverState {
                name,
                discovery_cluster,
                halves: [core.state(), groups.state()],
                open_api: open_api.state(),
            });
        let types = self.table.iter().map(|(names, listing)| TypeState {
            names,
            servers: listing.servers.bits(),
            vanished_at: listing.vanished_at,
        });
        let excluded = self.exclusions.learned().iter().map(|excluded| ExcludedState {
            group: &excluded.name.group,
            version: &excluded.name.version,
            vanished_at: excluded.vanished_at,
        });
        Snapshot {
            apiservers: apiservers.collect(),
            types: types.collect(),
            excluded: excluded.collect(),
            api_services: self.api_services.state(),
        }
    }

    /// Takes over what another worker has told, where it is newer than what is known here. Apiservers are matched by name
    /// and discovery cluster; what was told of others is left. Whether the view is another one now.
    pub fn adopt<'s>(
        &mut self,
        snapshot: &Snapshot<'_>,
        names: impl Iterator<Item = (&'s str, &'s str)>,
        now: Duration,
    ) -> bool {
        let before = (Rc::clone(&self.table), self.health(Half::Core), self.health(Half::Groups), self.avoided);
        let mut believed = [ApiserverSet::EMPTY; 2];
        let mut ours = Vec::new();
        for (index, (name, discovery_cluster)) in names.enumerate() {
            let mut theirs = snapshot.apiservers.iter();
            let theirs = theirs.position(|state| state.name == name && state.discovery_cluster == discovery_cluster);
            if let Some(state) = theirs.and_then(|theirs| snapshot.apiservers.get(theirs)) {
                self.adopt_polls(index, state, &mut believed);
            }
            ours.push(theirs);
        }
        if self.api_services.adopt(&snapshot.api_services) {
            let excluded = snapshot.excluded.iter().map(|state| Excluded {
                name: GroupVersionName::new(state.group, state.version),
                vanished_at: state.vanished_at,
            });
            self.exclusions.adopt(excluded.collect());
            self.table = Rc::new(self.table.with_exclusions(&self.exclusions));
        }
        let types = snapshot.types.iter().map(|state| {
            let servers = ApiserverSet::from_bits(state.servers);
            let is_server = |theirs: &Option<usize>| theirs.is_some_and(|theirs| servers.contains(theirs));
            let ours = ours.iter().enumerate().filter(|(_, theirs)| is_server(theirs)).map(|(index, _)| index);
            (state.names, Listing { servers: ours.collect(), is_excluded: false, vanished_at: state.vanished_at })
        });
        let context = Context { exclusions: &self.exclusions, now };
        let table = self.table.adopting(types, believed, context);
        self.replace_table(table);
        let after = (&self.table, self.health(Half::Core), self.health(Half::Groups), self.avoided);
        (&before.0, before.1, before.2, before.3) != after
    }

    /// Takes over what was told of one apiserver; adds it to `believed` for each half that is newer than what is known here.
    fn adopt_polls(&mut self, index: usize, state: &ApiserverState<'_>, believed: &mut [ApiserverSet; 2]) {
        if let Some(poll) = self.open_api.get_mut(index) {
            poll.adopt(&state.open_api);
        }
        let (Some(polls), only) = (self.apiservers.get_mut(index), ApiserverSet::only(index)) else { return };
        for ((poll, state), believed) in polls.iter_mut().zip(&state.halves).zip(believed) {
            if poll.adopt(state) {
                *believed = believed.union(only);
                if poll.is_fresh {
                    self.avoided = self.avoided.without(only);
                }
            }
        }
    }

    /// Group-versions of which an apiserver's document says nothing.
    pub fn stale(&self, apiserver: usize, half: Half) -> &[GroupVersionName] {
        self.apiservers.get(apiserver).map(|halves| &*poll_of(halves, half).stale).unwrap_or_default()
    }

    /// Entity tag and version of the document that is known of an apiserver. Equal versions are the same document, a later
    /// one is newer.
    pub fn document(&self, apiserver: usize, kind: Kind) -> (Option<&str>, Option<Duration>) {
        let poll = self.polls_of(apiserver).and_then(|polls| kind.of_all(&polls).copied());
        poll.map_or((None, None), |poll| (poll.etag.as_deref(), poll.version))
    }

    /// From what discovery of the whole cluster would be made now; `None` until each apiserver has been tried.
    pub fn stamp(&self, poll_set: u64) -> Option<Stamp> {
        if self.apiservers.iter().flatten().any(|poll| poll.heard.is_none()) {
            return None;
        }
        let polls = (0..self.apiservers.len()).filter_map(|apiserver| self.polls_of(apiserver));
        let versions = polls.map(|polls| polls.map(|poll| poll.version)).collect();
        let learned: Vec<_> = self.exclusions.learned().iter().map(|excluded| &excluded.name).collect();
        let content = FixedState::default().hash_one((self.is_incomplete(), learned));
        Some(Stamp { poll_set, content, versions })
    }

    /// Whether clients must be told that something may be missing: an apiserver has never told what it serves or now
    /// serves something else, or a type that one listed until a moment ago is gone.
    fn is_incomplete(&self) -> bool {
        self.apiservers.iter().flatten().any(|poll| !poll.is_known || poll.lacks_body || poll.is_outdated)
            || self.table.has_vanished_types()
    }

    /// An apiserver serves another document to clients than the one that counts, and does not tell us which.
    pub fn note_outdated(&mut self, apiserver: usize, subject: Subject) {
        if let Some(poll) = self.poll_mut(apiserver, subject) {
            poll.is_outdated = true;
        }
    }

    /// Whether there is a document that is known to be [outdated](Self::note_outdated).
    pub fn is_outdated(&self) -> bool {
        self.apiservers.iter().flatten().any(|poll| poll.is_outdated)
    }

    /// The bodies that have not been published yet, and those in `published` that still count.
    pub fn bodies<'s>(
        &'s self,
        names: impl Iterator<Item = (&'s str, &'s str)>,
        published: &Documents<'s>,
    ) -> Vec<Kept<'s>> {
        let mut bodies = Vec::new();
        for (apiserver, (name, discovery_cluster)) in names.enumerate() {
            let Some(polls) = self.polls_of(apiserver) else { continue };
            for (kind, poll) in Kind::ALL.into_iter().zip(polls) {
                let found = match (&poll.body, poll.version) {
                    (Some(body), Some(version)) => Some((version, &**body)),
                    _ => published.find(name, discovery_cluster, kind).filter(|(version, _)| poll.is_met_by(*version)),
                };
                bodies.extend(found.map(|(version, body)| Kept { name, discovery_cluster, kind, version, body }));
            }
        }
        bodies
    }

    /// Whether there are bodies that have not been published.
    pub fn has_bodies(&self) -> bool {
        self.apiservers.iter().flatten().chain(&self.open_api).any(|poll| poll.body.is_some())
    }

    /// The bodies have been published, where whoever merges finds them.
    pub fn forget_bodies(&mut self) {
        self.apiservers.iter_mut().flatten().chain(&mut self.open_api).for_each(|poll| poll.body = None);
    }

    /// Notes which documents are neither here nor in `published`: the next polls ask for all of them.
    pub fn note_missing_bodies<'n>(
        &mut self,
        names: impl Iterator<Item = (&'n str, &'n str)>,
        published: &Documents<'_>,
    ) {
        let polls = self.apiservers.iter_mut().zip(&mut self.open_api);
        for ((name, discovery_cluster), (halves, open_api)) in names.zip(polls) {
            for (kind, poll) in Kind::ALL.into_iter().zip(halves.iter_mut().chain([open_api])) {
                let found = published.find(name, discovery_cluster, kind);
                let is_there = poll.body.is_some() || found.is_some_and(|(version, _)| poll.is_met_by(version));
                poll.lacks_body = poll.is_known && !is_there;
            }
        }
    }

    /// What discovery of the whole cluster is made from; `documents` holds all that count.
    pub fn cluster_sources<'s>(
        &'s self,
        names: impl Iterator<Item = (&'s str, &'s str)>,
        documents: &Documents<'s>,
        stamp: Stamp,
    ) -> cluster_discovery::Sources<'s> {
        let apiservers = names.zip(&self.apiservers).map(|((name, discovery_cluster), [core, groups])| Known {
            name,
            documents: Kind::ALL.map(|kind| documents.find(name, discovery_cluster, kind).map(|(_, body)| body)),
            etags: [core.etag.as_deref(), groups.etag.as_deref()],
        });
        cluster_discovery::Sources {
            apiservers: apiservers.collect(),
            local: self.settings.local,
            exclusions: &self.exclusions,
            table: &self.table,
            is_incomplete: self.is_incomplete(),
            stamp,
        }
    }

    /// Polls of an apiserver's documents, in the order of [`Kind::ALL`].
    fn polls_of(&self, apiserver: usize) -> Option<[&Poll; 3]> {
        let ([core, groups], open_api) = (self.apiservers.get(apiserver)?, self.open_api.get(apiserver)?);
        Some([core, groups, open_api])
    }

    /// How far the documents of a half can be relied upon. No request comes here, and inlined it would take kilobytes.
    #[inline(never)]
    fn health(&self, half: Half) -> Health {
        let set = |is_member: fn(&Poll) -> bool| -> ApiserverSet {
            let members = self.apiservers.iter().enumerate().filter(|(_, halves)| is_member(poll_of(halves, half)));
            members.map(|(index, _)| index).collect()
        };
        Health { known: set(|poll| poll.is_known), fresh: set(|poll| poll.is_fresh) }
    }

    /// Stores what a good answer says; whether the table is another one than before.
    fn take(&mut self, id: QuestionId, answer: Answer<'_>, now: Duration) -> Result<bool, PollError> {
        let (status, content_type, etag, body) = match answer {
            Answer::Response { status, content_type, etag, body, .. } => (status, content_type, etag, body),
            Answer::Failed(error) => return Err(error),
        };
        let is_known = self.poll_mut(id.apiserver, id.subject).is_some_and(|poll| poll.is_known);
        match (status, id.subject) {
            (200, _) if body.len() > self.settings.max_document_bytes => Err(PollError::TooLarge { bytes: body.len() }),
            (200, Subject::Half(half)) => {
                let text = document::text(body)?;
                let document = Document::parse(half, content_type, text)?;
                self.keep(id, etag, text);
                if let Some(poll) = self.poll_mut(id.apiserver, id.subject) {
                    poll.stale = document.stale().collect();
                }
                let context = Context { exclusions: &self.exclusions, now };
                let table = self.table.with_document(id.apiserver, half, &document, context);
                Ok(self.replace_table(table))
            }
            (200, Subject::ApiServices) => {
                self.exclusions.learn(api_services::not_built_in(body)?, now);
                let table = self.table.with_exclusions(&self.exclusions);
                Ok(self.replace_table(table))
            }
            (200, Subject::OpenApi) => {
                let text = document::text(body)?;
                open_api::Root::parse(text)?;
                self.keep(id, etag, text);
                Ok(false)
            }
            (304, _) if is_known => Ok(false),
            (304, _) => Err(PollError::NothingToKeep),
            (status, subject) => Err(PollError::Status { status, hint: subject.hint(status) }),
        }
    }

    fn replace_table(&mut self, table: Table) -> bool {
        let is_another = *self.table != table;
        if is_another {
            self.table = Rc::new(table);
        }
        is_another
    }

    fn poll_mut(&mut self, apiserver: usize, subject: Subject) -> Option<&mut Poll> {
        let half = match subject {
            Subject::Half(half) => half,
            Subject::OpenApi => return self.open_api.get_mut(apiserver),
            Subject::ApiServices => return Some(&mut self.api_services),
        };
        let [core, groups] = self.apiservers.get_mut(apiserver)?;
        Some(match half {
            Half::Core => core,
            Half::Groups => groups,
        })
    }

    /// Notes the body of a good answer, if it is another one than before.
    fn keep(&mut self, id: QuestionId, etag: Option<&[u8]>, body: &str) {
        let merges = self.settings.merges;
        let Some(poll) = self.poll_mut(id.apiserver, id.subject) else { return };
        // A tag that is not text could not be sent back; the next poll then gets the whole document.
        poll.etag = etag.and_then(|etag| String::from_utf8(etag.to_vec()).ok());
        let digest = Some(FixedState::default().hash_one(body));
        if poll.digest == digest && !poll.lacks_body {
            return;
        }
        let is_first = poll.version.is_none();
        poll.digest = digest;
        poll.version = poll.sent_at;
        poll.lacks_body = false;
        // Also where nothing is merged: the next configuration may, and finds what this one has published.
        poll.body = Some(Rc::from(body));
        if merges && !is_first && id.subject != Subject::OpenApi {
            // A new document of one kind: most likely there is a new one of the other kind too.
            self.hurry_open_api(id.apiserver);
        }
    }

    fn hurry_open_api(&mut self, apiserver: usize) {
        if let Some(poll) = self.open_api.get_mut(apiserver) {
            poll.next_due = Duration::ZERO;
            poll.is_wanted |= poll.in_flight.is_some();
        }
    }
}

impl Poll {
    fn state(&self) -> PollState<'_> {
        PollState {
            is_known: self.is_known,
            is_fresh: self.is_fresh,
            heard: self.heard,
            told: self.told,
            next_due: self.next_due,
            failures: self.failures,
            etag: self.etag.as_deref(),
            version: self.version,
            digest: self.digest,
            stale: self.stale.iter().map(|name| (&*name.group, &*name.version)).collect(),
        }
    }

    /// Whether a published body of this `version` counts still: nothing newer is known here.
    fn is_met_by(&self, version: Duration) -> bool {
        self.version.is_some_and(|needed| version >= needed)
    }

    /// Whether the answer to the question on its way says nothing about what is known here: "unchanged" since a document
    /// that was replaced, or a document older than the one that replaced it. It is to be asked again.
    fn is_out_of_order(&self, answer: &Answer<'_>) -> bool {
        let is_overtaken = self.in_flight.is_some_and(|in_flight| in_flight.is_overtaken);
        let is_older = self.told > self.sent_at;
        match answer {
            Answer::Response { status: 304, .. } => is_overtaken,
            Answer::Response { status: 200, .. } => is_overtaken && is_older,
            _ => false,
        }
    }

    /// Takes over what is newer of another worker's state: how the polls went, and, on its own, what was told. Whether
    /// something else was told.
    fn adopt(&mut self, state: &PollState<'_>) -> bool {
        if state.heard > self.heard {
            self.is_fresh = state.is_fresh;
            self.heard = state.heard;
            self.next_due = state.next_due;
            self.failures = state.failures;
        }
        self.covered = self.covered.max(state.heard);
        // A poll that failed later says nothing of a document: an older one must not replace a newer.
        let is_newer = state.told > self.told;
        if is_newer {
            let is_same_document = state.etag.is_some() && state.etag == self.etag.as_deref();
            if let Some(in_flight) = &mut self.in_flight {
                in_flight.is_overtaken |= !is_same_document;
            }
            self.is_known = state.is_known;
            self.is_outdated = false;
            self.told = state.told;
            self.etag = state.etag.map(str::to_owned);
            let stale = state.stale.iter();
            self.stale = stale.map(|(group, version)| GroupVersionName::new(group, version)).collect();
            if self.version != state.version {
                (self.version, self.digest) = (state.version, state.digest);
                (self.body, self.lacks_body) = (None, false);
            }
        }
        is_newer
    }

    fn is_due(&self, now: Duration, polls: bool) -> bool {
        let is_spaced = self.sent_at.is_none_or(|sent_at| sent_at.saturating_add(SPACING) <= now);
        self.in_flight.is_none() && is_spaced && (self.is_wanted || (polls && self.next_due <= now))
    }
}

/// Whether more than a while has passed since a moment that may never have been.
fn is_over(moment: Option<Duration>, a_while: Duration, now: Duration) -> bool {
    moment.is_none_or(|moment| moment.saturating_add(a_while) < now)
}

const fn poll_of(halves: &[Poll; 2], half: Half) -> &Poll {
    let [core, groups] = halves;
    match half {
        Half::Core => core,
        Half::Groups => groups,
    }
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;

    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    use crate::peers::table::Names;

    const INTERVAL: Duration = Duration::from_secs(5);
    const TIMEOUT: Duration = Duration::from_secs(3);
    const V2: &[u8] = b"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn document(group: &str, resource: &str) -> String {
        format!(
            r#"{{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","items":[{{"metadata":{{"name":"{group}"}},
            "versions":[{{"version":"v1","resources":[{{"resource":"{resource}"}}],"freshness":"Current"}}]}}]}}"#
        )
    }

    /// The random number that moves no wait.
    const EVEN: u32 = 50;

    fn peers(apiservers: usize) -> Peers {
        let settings = Settings {
            apiservers,
            local: Some(0),
            interval: INTERVAL,
            timeout: TIMEOUT,
            forget_after: seconds(300),
            max_document_bytes: 10_000,
            api_services: false,
            grace_period: seconds(300),
            merges: false,
        };
        Peers::new(settings, Exclusions::default())
    }

    fn response(status: u16, body: &str) -> Answer<'_> {
        Answer::Response { status, content_type: V2, etag: Some(b"\"tag\""), retry_after: None, body: body.as_bytes() }
    }

    /// One apiserver whose documents have been read at second 0.
    fn with_documents() -> Peers {
        let mut peers = peers(1);
        for question in peers.due(seconds(0), Role::Leader) {
            let group = if question.id.subject == Subject::Half(Half::Core) { "" } else { "depot.k8s.io" };
            let change = peers.answered(question.id, response(200, &document(group, "crates")), seconds(0), EVEN);
            assert_eq!(change, Change { word: Some(Word::Good), view: true, event: Some(Event::Recovered) });
        }
        peers
    }

    /// The question about `/apis`, which must be due.
    fn groups(peers: &mut Peers, now: u64) -> QuestionId {
        let due = peers.due(seconds(now), Role::Leader);
        let groups = due.iter().find(|question| question.id.subject == Subject::Half(Half::Groups));
        groups.unwrap_or_else(|| panic!("nothing is due at {now}")).id
    }

    fn serves(peers: &Peers, resource: &str) -> bool {
        let names: Names<'_> = [b"depot.k8s.io", b"v1", resource.as_bytes(), b""];
        peers.table.iter().any(|(have, listing)| have == names && !listing.servers.is_empty())
    }

    #[test]
    fn each_half_of_each_apiserver_is_due_once_an_interval() {
        let mut peers = peers(2);
        let first = peers.due(seconds(0), Role::Leader);
        let asked: Vec<_> = first.iter().map(|question| (question.id.apiserver, question.id.subject)).collect();
        let (core, groups) = (Subject::Half(Half::Core), Subject::Half(Half::Groups));
        assert_eq!(asked, [(0, core), (0, groups), (1, core), (1, groups)]);
        assert_eq!(peers.due(seconds(1), Role::Leader), [], "all are on their way");
        for question in first {
            let half = question.id.subject;
            let body = document(if half == core { "" } else { "apps" }, "things");
            peers.answered(question.id, response(200, &body), seconds(1), EVEN);
        }
        assert_eq!(peers.due(seconds(4), Role::Leader), [], "not before the interval is over");
        assert_eq!(peers.due(seconds(95), Role::Leader).len(), 4, "a late tick causes one poll each");
        assert_eq!(peers.due(seconds(95), Role::Leader), [], "and no burst");
    }

    #[test]
    fn no_failure_takes_a_document_away() {
        let oversized = document("depot.k8s.io", &"x".repeat(10_000));
        let other_half = document("", "pods");
        for (answer, expected, why) in [
            (response(503, ""), "status 503: the apiserver cannot be reached", "unreachable or not ready"),
            (response(403, "{}"), "status 403: the poll cluster's credential may not", "no rights"),
            (response(401, "{}"), "status 401: the poll cluster's credential is not", "a bad credential"),
            (response(404, "{}"), "status 404", "no such path"),
            (response(406, "{}"), "status 406: the apiserver has no aggregated", "an old apiserver"),
            (response(429, "{}"), "status 429", "too many requests"),
            (response(200, ""), "cannot be read", "an empty body"),
            (response(200, "{\"kind\":"), "cannot be read", "a cut body"),
            (response(200, "{\"kind\":\"Status\"}"), "is a \"Status\"", "another kind"),
            (response(200, &other_half), "no group", "the other half's document"),
            (response(200, &oversized), "more than discovery.maxDocumentBytes", "too large"),
            (Answer::Failed(PollError::Reset), "reset", "cut by the network"),
            (Answer::Failed(PollError::Lost), "no answer", "an answer that never came"),
        ] {
            let mut peers = with_documents();
            let id = groups(&mut peers, 6);
            let change = peers.answered(id, answer, seconds(6), EVEN);
            let Some(Event::Failing(message)) = change.event else { panic!("{why}: nothing to log") };
            assert!(message.contains(expected), "{why}: {message}");
            assert_eq!((change.view, change.word), (true, Some(Word::Failed)), "{why}");
            assert!(serves(&peers, "crates"), "{why}: the last good document stays");
            let (only, nobody) = (ApiserverSet::only(0), ApiserverSet::EMPTY);
            assert_eq!(peers.view().groups, Health { known: only, fresh: nobody }, "{why}: failing");
            assert_eq!(peers.view().core, Health { known: only, fresh: only }, "{why}: the other half is untouched");
        }
    }

    #[test]
    fn a_304_keeps_the_document_and_makes_it_fresh() {
        let mut peers = with_documents();
        let due = peers.due(seconds(6), Role::Leader);
        assert!(due.iter().all(|question| question.if_none_match.as_deref() == Some("\"tag\"")));
        peers.answered(due[1].id, response(503, ""), seconds(6), EVEN);
        let id = groups(&mut peers, 7);
        let change = peers.answered(id, response(304, ""), seconds(7), EVEN);
        assert_eq!(change, Change { word: Some(Word::Good), view: true, event: Some(Event::Recovered) });

        let mut nothing_yet = self::peers(1);
        let id = groups(&mut nothing_yet, 0);
        let change = nothing_yet.answered(id, response(304, ""), seconds(0), EVEN);
        assert!(matches!(change.event, Some(Event::Failing(message)) if message.contains("304 without")));
        assert_eq!(nothing_yet.view().groups, Health::default());
    }

    #[test]
    fn a_failure_is_told_once_until_it_changes() {
        let mut peers = with_documents();
        let mut told = Vec::new();
        for (second, status) in [(10, 503), (20, 503), (30, 403), (40, 304), (50, 304)] {
            let id = groups(&mut peers, second);
            told.push(match peers.answered(id, response(status, ""), seconds(second), EVEN).event {
                Some(Event::Failing(_)) => "failing",
                Some(Event::Recovered) => "recovered",
                None => "-",
            });
        }
        assert_eq!(told, ["failing", "-", "failing", "recovered", "-"]);
    }

    #[test]
    fn failures_are_retried_soon_and_never_later_than_the_interval() {
        let mut peers = with_documents();
        let mut now = seconds(6);
        let mut waits = Vec::new();
        for _ in 0..6 {
            let question = peers
                .due(now, Role::Leader)
                .into_iter()
                .find(|question| question.id.subject == Subject::Half(Half::Groups));
            peers.answered(question.unwrap().id, response(503, ""), now, EVEN);
            let sent = now;
            while !peers
                .due(now, Role::Leader)
                .iter()
                .any(|question| question.id.subject == Subject::Half(Half::Groups))
            {
                now += Duration::from_millis(100);
            }
            waits.push((now - sent).as_millis());
            let again = peers.lost(seconds(1_000)).into_iter().find(|id| id.subject == Subject::Half(Half::Groups));
            peers.answered(again.unwrap(), response(503, ""), now, EVEN);
            now += Duration::from_secs(60);
        }
        assert_eq!(waits, [500, 2000, 5000, 5000, 5000, 5000], "every second failure is seen here");

        let id = groups(&mut peers, 2_000);
        let busy = Answer::Response { status: 429, content_type: b"", etag: None, retry_after: Some(b"20"), body: b"" };
        peers.answered(id, busy, seconds(2_000), EVEN);
        assert!(
            peers
                .due(seconds(2_019), Role::Leader)
                .iter()
                .all(|question| question.id.subject != Subject::Half(Half::Groups))
        );
        groups(&mut peers, 2_020);
    }

    #[test]
    fn an_answer_that_never_comes_does_not_block_the_next_poll() {
        let mut peers = with_documents();
        let late = groups(&mut peers, 6);
        assert!(peers.lost(seconds(9)).is_empty(), "still in time");
        for id in peers.lost(seconds(10)) {
            peers.answered(id, Answer::Failed(PollError::Lost), seconds(10), EVEN);
        }
        let newer = groups(&mut peers, 11);
        let (newer_body, older_body) = (document("depot.k8s.io", "newer"), document("depot.k8s.io", "older"));
        let given_up = peers.answered(late, response(200, &older_body), seconds(11), EVEN);
        assert_eq!(given_up, Change::default(), "given up");
        assert!(peers.answered(newer, response(200, &newer_body), seconds(11), EVEN).view);
        let twice = peers.answered(newer, response(200, &older_body), seconds(11), EVEN);
        assert_eq!(twice, Change::default(), "answered twice");
        assert!(serves(&peers, "newer") && !serves(&peers, "older"));
    }

    #[test]
    fn a_document_that_says_the_same_is_no_change() {
        let mut peers = with_documents();
        let id = groups(&mut peers, 6);
        let change = peers.answered(id, response(200, &document("depot.k8s.io", "crates")), seconds(6), EVEN);
        assert_eq!(change, Change { word: Some(Word::Good), view: false, event: None });
    }

    #[test]
    fn asking_is_shared_spaced_and_given_up_while_an_apiserver_fails() {
        let mut peers = with_documents();
        let millis = |millis| seconds(1) + Duration::from_millis(millis);
        let ask = |peers: &mut Peers, mark, now| peers.ask(0, Subject::Half(Half::Groups), mark, now);
        let mark = peers.mark();
        assert_eq!(ask(&mut peers, mark, millis(0)), Asking::Awaited);
        let due = peers.due(millis(0), Role::Leader);
        assert_eq!(due.len(), 1, "asked at once, and only for the half concerned");
        assert_eq!(ask(&mut peers, mark, millis(10)), Asking::Awaited);
        assert_eq!(peers.due(millis(10), Role::Leader), [], "shared: the question was sent after both requests");

        let later = peers.mark();
        assert_eq!(ask(&mut peers, later, millis(20)), Asking::Awaited, "sent before this request");
        assert_eq!(peers.due(millis(150), Role::Leader), [], "one at a time");
        peers.answered(due[0].id, response(304, ""), millis(150), EVEN);
        let again = peers.due(millis(150), Role::Leader);
        assert_eq!(again.len(), 1, "and asked again for the later one");

        peers.answered(again[0].id, response(304, ""), millis(151), EVEN);
        let mark = peers.mark();
        ask(&mut peers, mark, millis(160));
        assert_eq!(peers.due(millis(249), Role::Leader), [], "100 ms apart");
        let third = peers.due(millis(250), Role::Leader);
        peers.answered(third[0].id, response(503, ""), millis(250), EVEN);
        let mark = peers.mark();
        assert_eq!(ask(&mut peers, mark, millis(300)), Asking::BackingOff);
        assert_eq!(ask(&mut peers, mark, millis(750)), Asking::Awaited, "due again");
    }

    #[test]
    fn reasons_bring_the_next_poll_forward_and_never_cause_a_storm() {
        let mut peers = with_documents();
        assert_eq!(peers.due(seconds(2), Role::Leader), [], "an idle second");
        for _ in 0..100 {
            peers.hurry(0, seconds(2));
        }
        let due = peers.due(seconds(2), Role::Leader);
        assert_eq!(due.len(), 2, "both halves, once");
        for question in due {
            peers.answered(question.id, response(304, ""), seconds(2), EVEN);
        }
        peers.hurry(0, seconds(2));
        assert_eq!(peers.due(seconds(2) + Duration::from_millis(900), Role::Leader), [], "a second apart");
        assert_eq!(peers.due(seconds(3), Role::Leader).len(), 2, "deferred, not dropped");
    }

    #[test]
    fn an_apiserver_that_failed_a_request_is_avoided_until_it_answers() {
        let mut peers = with_documents();
        assert!(peers.avoid(0));
        assert!(!peers.avoid(0), "no news");
        assert_eq!(peers.view().avoided, ApiserverSet::only(0));
        let id = groups(&mut peers, 6);
        assert!(peers.answered(id, response(304, ""), seconds(6), EVEN).view);
        assert_eq!(peers.view().avoided, ApiserverSet::EMPTY);
    }

    const NAMES: [(&str, &str); 2] = [("cp-0", "poll-0"), ("cp-1", "poll-1")];

    fn tell(from: &Peers, to: &mut Peers, names: &[(&str, &str)], now: u64) -> bool {
        let bytes = from.snapshot(NAMES.into_iter()).to_bytes().unwrap();
        to.adopt(&Snapshot::from_bytes(&bytes).unwrap(), names.iter().copied(), seconds(now))
    }

    #[test]
    fn what_a_document_calls_stale_is_known_until_another_one_comes() {
        let (mut leader, mut follower) = (with_documents(), peers(1));
        let stale = |peers: &Peers| peers.stale(0, Half::Groups).to_vec();
        let current = document("depot.k8s.io", "crates");
        let is_stale = current.replace("Current", "Stale");
        let name = GroupVersionName::new("depot.k8s.io", "v1");
        for (second, status, body, expected, why) in [
            (6, 200, &*is_stale, vec![name.clone()], "it says so"),
            (12, 304, "", vec![name.clone()], "unchanged"),
            (18, 503, "", vec![name], "the last document counts"),
            (24, 200, &*current, vec![], "it is current again"),
        ] {
            let id = groups(&mut leader, second);
            leader.answered(id, response(status, body), seconds(second), EVEN);
            tell(&leader, &mut follower, &NAMES[..1], second);
            assert_eq!((stale(&leader), stale(&follower)), (expected.clone(), expected), "{why}");
        }
        assert!(leader.stale(0, Half::Core).is_empty() && leader.stale(7, Half::Core).is_empty());
    }

    #[test]
    fn a_worker_knows_what_the_leader_told() {
        let leader = with_documents();
        let mut follower = peers(1);
        assert_eq!(follower.due(seconds(1), Role::Follower), [], "it polls nobody");
        assert!(tell(&leader, &mut follower, &NAMES[..1], 1));
        assert!(!tell(&leader, &mut follower, &NAMES[..1], 1), "the same again is no news");
        assert!(serves(&follower, "crates"));
        assert_eq!((follower.view().core, follower.view().groups), (leader.view().core, leader.view().groups));
        assert_eq!(
            follower.due(seconds(2), Role::Leader),
            [],
            "one that becomes the leader goes on where the last one stopped"
        );
        let next = follower.due(seconds(6), Role::Leader);
        assert!(next.iter().all(|question| question.if_none_match.as_deref() == Some("\"tag\"")));
    }

    #[test]
    fn older_news_never_replace_newer() {
        let leader = with_documents();
        let mut follower = peers(1);
        tell(&leader, &mut follower, &NAMES[..1], 1);
        follower.ask(0, Subject::Half(Half::Groups), follower.mark(), seconds(2));
        let question = follower.due(seconds(2), Role::Follower).remove(0);
        follower.answered(question.id, response(200, &document("depot.k8s.io", "newer")), seconds(2), EVEN);
        assert!(!tell(&leader, &mut follower, &NAMES[..1], 3));
        assert!(serves(&follower, "newer") && !serves(&follower, "crates"), "its own answer is newer");
    }

    /// A follower's question and a leader's poll cross; the leader's news arrive before the answer. What the answer is
    /// worth, and whether the follower then knows the newer type.
    fn crossed(status: u16, body: &str, asked_at: u64, polled_at: u64, tag: &[u8]) -> (Option<Word>, bool) {
        let newer = document("depot.k8s.io", "newer");
        let (mut leader, mut follower) = (with_documents(), peers(1));
        tell(&leader, &mut follower, &NAMES[..1], 1);
        let id = groups(&mut leader, polled_at);
        let (news, etag) = if tag == b"\"tag\"" { (document("depot.k8s.io", "crates"), tag) } else { (newer, tag) };
        let answer = Answer::Response {
            status: 200,
            content_type: V2,
            etag: Some(etag),
            retry_after: None,
            body: news.as_bytes(),
        };
        leader.answered(id, answer, seconds(polled_at), EVEN);
        follower.ask(0, Subject::Half(Half::Groups), follower.mark(), seconds(asked_at));
        let question = follower.due(seconds(asked_at), Role::Follower).remove(0);
        tell(&leader, &mut follower, &NAMES[..1], 8);
        let change = follower.answered(question.id, response(status, body), seconds(9), EVEN);
        let is_asked_again = !follower.due(seconds(9), Role::Follower).is_empty();
        assert_eq!(is_asked_again, change.word.is_none(), "what settles nothing is asked again");
        (change.word, serves(&follower, "newer"))
    }

    #[test]
    fn an_answer_that_another_worker_has_overtaken_is_asked_for_again() {
        let older = document("depot.k8s.io", "older");
        let (same, other) = (b"\"tag\"".as_slice(), b"\"other\"".as_slice());
        for (status, body, asked_at, polled_at, tag, expected, why) in [
            (304, "", 5, 6, same, (Some(Word::Good), false), "the same document: unchanged is unchanged"),
            (304, "", 5, 6, other, (None, true), "unchanged since what?"),
            (200, older.as_str(), 5, 6, other, (None, true), "the other worker asked later"),
            (200, older.as_str(), 7, 6, other, (Some(Word::Good), false), "the other worker asked earlier"),
            (503, "", 5, 6, other, (Some(Word::Failed), true), "no answer is no answer"),
        ] {
            assert_eq!(crossed(status, body, asked_at, polled_at, tag), expected, "{status}: {why}");
        }
    }

    #[test]
    fn the_removal_of_an_apiserver_does_not_hide_what_another_has_just_dropped() {
        let mut leader = peers(2);
        for question in leader.due(seconds(0), Role::Leader) {
            let group = if question.id.subject == Subject::Half(Half::Core) { "" } else { "depot.k8s.io" };
            let resource = if question.id.apiserver == 0 { "shared" } else { "alone" };
            leader.answered(question.id, response(200, &document(group, resource)), seconds(0), EVEN);
        }
        let due = leader.due(seconds(6), Role::Leader).into_iter();
        for question in due.filter(|question| question.id.subject == Subject::Half(Half::Groups)) {
            let resource = if question.id.apiserver == 0 { "other" } else { "shared" };
            leader.answered(question.id, response(200, &document("depot.k8s.io", resource)), seconds(6), EVEN);
        }
        // Now cp-1 alone lists what cp-0 listed a moment ago, and cp-1 is removed.
        let mut follower = peers(1);
        tell(&leader, &mut follower, &NAMES[..1], 7);
        let vanished_at = |resource: &str| {
            let names: Names<'_> = [b"depot.k8s.io", b"v1", resource.as_bytes(), b""];
            follower.table.iter().find(|(have, _)| *have == names).and_then(|(_, listing)| listing.vanished_at)
        };
        assert_eq!(vanished_at("shared"), Some(seconds(6)));
        assert!(!serves(&follower, "shared"));
    }

    #[test]
    fn a_later_failure_does_not_bring_an_older_document_back() {
        let (mut leader, mut follower) = (with_documents(), peers(1));
        tell(&leader, &mut follower, &NAMES[..1], 1);
        follower.ask(0, Subject::Half(Half::Groups), follower.mark(), seconds(2));
        let question = follower.due(seconds(2), Role::Follower).remove(0);
        follower.answered(question.id, response(200, &document("depot.k8s.io", "newer")), seconds(2), EVEN);
        let id = groups(&mut leader, 6);
        leader.answered(id, response(503, ""), seconds(6), EVEN);
        assert!(tell(&leader, &mut follower, &NAMES[..1], 7), "it is failing now");
        assert_eq!(follower.view().groups.fresh, ApiserverSet::EMPTY);
        assert!(serves(&follower, "newer") && !serves(&follower, "crates"), "and its latest document counts");
    }

    #[test]
    fn apiservers_are_matched_by_name_and_place() {
        let mut leader = peers(2);
        for question in leader.due(seconds(0), Role::Leader) {
            let group = if question.id.subject == Subject::Half(Half::Core) { "" } else { "depot.k8s.io" };
            let resource = if question.id.apiserver == 0 { "zero" } else { "one" };
            leader.answered(question.id, response(200, &document(group, resource)), seconds(0), EVEN);
        }
        for (names, expected, why) in [
            (&[("cp-0", "poll-0"), ("cp-1", "poll-1")][..], (vec![0], vec![1]), "the same"),
            (&[("cp-1", "poll-1"), ("cp-0", "poll-0")], (vec![1], vec![0]), "another order"),
            (&[("cp-9", "poll-9"), ("cp-1", "poll-1")], (vec![], vec![1]), "one is not configured here"),
            (&[("cp-0", "poll-0"), ("cp-1", "elsewhere")], (vec![0], vec![]), "one is elsewhere"),
        ] {
            let mut follower = peers(2);
            tell(&leader, &mut follower, names, 1);
            let servers = |resource: &str| {
                let names: Names<'_> = [b"depot.k8s.io", b"v1", resource.as_bytes(), b""];
                let found = follower.table.iter().find(|(have, _)| *have == names);
                found.map(|(_, listing)| listing.servers.iter().collect::<Vec<_>>()).unwrap_or_default()
            };
            assert_eq!((servers("zero"), servers("one")), expected, "{why}");
        }
    }

    #[test]
    fn what_nobody_confirms_any_more_becomes_doubt() {
        let mut peers = with_documents();
        assert!(!peers.forget(seconds(18)));
        assert!(peers.forget(seconds(19)), "three intervals and a timeout after it was last confirmed");
        assert_eq!((peers.view().core.fresh, peers.view().core.known), (ApiserverSet::EMPTY, ApiserverSet::only(0)));
        assert!(serves(&peers, "crates"), "and still counts");
    }

    #[test]
    fn api_services_are_asked_of_one_apiserver() {
        let list = |names: &[&str]| {
            let items: Vec<_> = names.iter().map(|name| format!(r#"{{"metadata":{{"name":"{name}"}}}}"#)).collect();
            format!(r#"{{"kind":"PartialObjectMetadataList","items":[{}]}}"#, items.join(","))
        };
        let mut peers = peers(2);
        peers.settings.api_services = true;
        peers.settings.local = None;
        let due = peers.due(seconds(0), Role::Leader);
        assert_eq!(due.iter().filter(|question| question.id.subject == Subject::ApiServices).count(), 1);
        let id = due[4].id;
        let refused = peers.answered(id, response(403, "{}"), seconds(0), EVEN);
        let Some(Event::Failing(message)) = refused.event else { panic!("nothing to log") };
        assert!(message.contains("get and list on apiservices in apiregistration.k8s.io"), "{message}");
        assert!(!refused.view, "nothing is learned, nothing is lost");

        let next = peers.due(seconds(5), Role::Leader).pop().unwrap().id;
        assert_eq!((next.subject, next.apiserver), (Subject::ApiServices, 1), "another one, while none has answered");
        peers.answered(next, response(200, &list(&["v1.hangar.k8s.io"])), seconds(5), EVEN);
        assert!(
            peers.exclusions().contain(b"hangar.k8s.io", b"v1") && !peers.exclusions().contain(b"hangar.k8s.io", b"v2")
        );
        let next = peers.due(seconds(20), Role::Leader).pop().unwrap().id;
        peers.answered(next, response(200, &list(&[])), seconds(20), EVEN);
        assert!(!peers.forget(seconds(319)) && peers.exclusions().contain(b"hangar.k8s.io", b"v1"));
        assert!(peers.forget(seconds(321)) && !peers.exclusions().contain(b"hangar.k8s.io", b"v1"));
    }
    /// The seconds of the first forty in which `/api` is polled by a root that another configuration leads, while that one
    /// polls it too in the seconds `covered`, and requests come in the seconds `requested`.
    fn strays_polls(mut peers: Peers, covered: RangeInclusive<u64>, requested: RangeInclusive<u64>) -> Vec<u64> {
        let mut leader = with_documents();
        let mut polled = Vec::new();
        for second in 1..40 {
            if covered.contains(&second) {
                for question in leader.due(seconds(second), Role::Leader) {
                    leader.answered(question.id, response(304, ""), seconds(second), EVEN);
                }
                tell(&leader, &mut peers, &NAMES[..1], second);
            }
            if requested.contains(&second) {
                peers.note_request(seconds(second));
            }
            for question in peers.due(seconds(second), Role::Stray) {
                let is_core = question.id.subject == Subject::Half(Half::Core);
                let body = document(if is_core { "" } else { "depot.k8s.io" }, "crates");
                peers.answered(question.id, response(200, &body), seconds(second), EVEN);
                polled.extend(is_core.then_some(second));
            }
        }
        polled
    }

    #[test]
    fn what_the_leader_of_another_configuration_leaves_is_polled_by_whoever_serves_requests() {
        let (always, never) = (0..=40, 41..=41);
        let (new, led) = (false, true);
        for (has_led, covered, requested, expected, why) in [
            (new, &never, &always, vec![1, 6, 11, 16, 21, 26, 31, 36], "never heard of: at once"),
            (new, &always, &always, vec![], "the leader polls it too"),
            (led, &never, &always, vec![19, 24, 29, 34, 39], "it led itself: three intervals and a timeout later"),
            (led, &(1..=12), &always, vec![29, 34, 39], "the leader polled it last at second 10"),
            (led, &(25..=40), &always, vec![19, 24], "the leader polls it again"),
            (new, &never, &never, vec![], "no request has ever come"),
            (new, &never, &(0..=3), vec![1, 6, 11, 16, 21], "no more requests: three intervals and a timeout longer"),
            (new, &never, &(30..=30), vec![30, 35], "a request after a long silence"),
        ] {
            let peers = if has_led { with_documents() } else { peers(1) };
            assert_eq!(strays_polls(peers, covered.clone(), requested.clone()), expected, "{why}");
        }
    }
}

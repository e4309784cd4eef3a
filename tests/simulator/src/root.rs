//! One configuration of the filter on one worker: the pure code of the crate, driven as the module `filter` drives it.
//!
//! What `filter` gets from Envoy comes in as arguments here, and what it asks of Envoy is handed back. This is the one
//! place where [upstream's behaviours](Plant) are planted: the crate itself has no switch for them.

mod discovery;

use std::collections::BTreeMap;
use std::time::Duration;

use mixed_version_proxy::config::Config;
use mixed_version_proxy::decision::{Decision, decide};
use mixed_version_proxy::discovery::document::Half;
use mixed_version_proxy::guard::held::{Held, Released, Waiting};
use mixed_version_proxy::guard::{Asked, NotFound, Verdict, WhyRefused, judge, looks_like_missing_route};
use mixed_version_proxy::local_reply::{Effect, UpstreamFailure};
use mixed_version_proxy::peers::election::{Candidate, Lease, Step};
use mixed_version_proxy::peers::exclusions::Exclusions;
use mixed_version_proxy::peers::refresh::{
    Answer, Asking, Change, Peers, PollError, Question, QuestionId, Role, Settings, Subject, Word,
};
use mixed_version_proxy::peers::snapshot::Snapshot;
use mixed_version_proxy::peers::table::{ApiserverSet, View};
use mixed_version_proxy::target::{DecodedPath, Target};

use crate::documents;
use crate::plant::Plant;
use crate::root::discovery::{Awaiting, Told};
use crate::shared::{Seen, SharedData};
use crate::streams::{Reply, VIA_UPSTREAM};
use crate::world::PollAnswer;

/// How often a root looks what is due.
pub const TICK: Duration = Duration::from_millis(100);

/// How soon it comes when a stream waits.
const AT_ONCE: Duration = Duration::from_millis(1);

/// State of one configuration on one worker.
#[derive(Debug)]
pub struct Root {
    /// Its configuration.
    pub config: Config,
    /// Which apiserver of the world each configured one is.
    pub apiservers: Vec<usize>,
    /// What it polls.
    pub role: Role,
    /// The latest tick, by the world's clock.
    pub ticked_at: Duration,
    /// When the next tick is due after this one.
    pub period: Duration,
    /// Raised when another period is asked for: timers of before are void.
    pub timer: u64,
    /// Questions on their way, by call.
    pub calls: BTreeMap<u64, QuestionId>,
    candidate: Candidate,
    generation: u64,
    has_requests: bool,
    has_news: bool,
    peers: Peers,
    held: Held,
    told: Told,
    has_news_to_tell: bool,
    verified: Duration,
    awaiting: Vec<Awaiting>,
    /// Requests for discovery that have waited and can be answered now.
    over: Vec<(u32, Fate)>,
    view: View,
    is_called_at_once: bool,
    plant: Option<Plant>,
}

/// Where a request was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum To {
    /// It stays.
    Here,
    /// To an apiserver (index in the configuration).
    Peer(usize),
}

/// What the answer needs to know of its request.
#[derive(Debug, Clone)]
pub struct Sent {
    /// Path, if it is a resource's.
    pub path: Option<Vec<u8>>,
    /// The discovery document that is to be replaced.
    pub discovery: Option<Half>,
    /// Where it went.
    pub to: To,
    mark: u64,
    effect: Effect,
}

/// What becomes of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// The client gets it.
    Passes,
    /// The client gets a 503.
    Replaced {
        /// With `Retry-After`.
        retry: bool,
        /// For the trace.
        why: &'static str,
    },
    /// It waits for a question.
    Held,
    /// The client gets [discovery of the whole cluster](Root::told).
    Served,
}

impl Root {
    /// A root that has just been configured.
    pub fn new(
        config: Config,
        apiservers: Vec<usize>,
        id: u64,
        shared: &SharedData,
        now: Duration,
        plant: Option<Plant>,
    ) -> Self {
        let peers = Peers::new(Settings::from(&config), Exclusions::new(&config.exclusions.group_versions));
        let candidate = Candidate { id, configured_at: now, poll_set: poll_set(&config) };
        let mut root = Self {
            view: peers.view(),
            config,
            apiservers,
            role: Role::default(),
            ticked_at: Duration::ZERO,
            period: TICK,
            timer: 0,
            calls: BTreeMap::new(),
            candidate,
            generation: 0,
            has_requests: false,
            has_news: false,
            peers,
            held: Held::default(),
            told: Told::default(),
            has_news_to_tell: false,
            verified: Duration::ZERO,
            awaiting: Vec::new(),
            over: Vec::new(),
            is_called_at_once: false,
            plant,
        };
        root.adopt(shared, now);
        root
    }

    /// What is known now.
    pub fn view(&self) -> &View {
        &self.view
    }

    /// It polls for all workers.
    pub fn leads(&self) -> bool {
        self.role == Role::Leader
    }

    /// Most of a body that is read.
    pub fn read_limit(&self) -> usize {
        self.peers.read_limit()
    }

    /// The first half of a tick: who leads? `seen` may have been overtaken by another worker.
    pub fn stand(&mut self, shared: &mut SharedData, seen: &Seen<Lease>, now: Duration) {
        self.role = match self.candidate.step(seen.value, now) {
            Step::Lead => Role::Leader,
            Step::Write(lease) if shared.write_lease(&lease, seen) => Role::Leader,
            Step::Write(_) | Step::Follow => Role::Follower,
            Step::Stray => Role::Stray,
        };
        let published = seen.value.map_or(0, |lease| lease.generation);
        if published != self.generation {
            self.adopt(shared, now);
            self.generation = published;
        }
        if self.leads() {
            let woken = shared.woken(self.candidate.poll_set);
            woken.iter().for_each(|apiserver| self.peers.hurry(apiserver, now));
        }
    }

    /// Questions whose answer will not come.
    pub fn lost(&self, now: Duration) -> Vec<QuestionId> {
        self.peers.lost(now)
    }

    /// Questions to send.
    pub fn due(&mut self, now: Duration) -> Vec<Question> {
        if std::mem::take(&mut self.is_called_at_once) {
            self.tick_every(TICK);
        }
        if self.peers.forget(now) {
            self.view = self.peers.view();
            self.has_news = true;
        }
        if std::mem::take(&mut self.has_requests) {
            self.peers.note_request(now);
        }
        self.peers.due(now, self.role)
    }

    /// Publishes what is new; whether it has.
    pub fn publish(&mut self, shared: &mut SharedData, now: Duration) -> bool {
        if !self.leads() || !std::mem::take(&mut self.has_news) {
            return false;
        }
        if shared.lease().value.is_none_or(|lease| lease.holder != self.candidate.id) {
            self.merge(shared, now);
            return false;
        }
        self.publish_discovery(shared, now);
        let names = names(&self.config);
        let mut snapshot = self.peers.snapshot(names);
        if let Some(Ok(previous)) = shared.snapshot.as_deref().map(Snapshot::from_bytes) {
            snapshot.keep_others(&previous, self.config.discovery.forget_after, now);
        }
        let Ok(bytes) = snapshot.to_bytes() else { return false };
        shared.snapshot = Some(bytes);
        let generation = match self.generation.wrapping_add(1) {
            0 | u64::MAX => 1,
            next => next,
        };
        let seen = shared.lease();
        if shared.write_lease(&self.candidate.lease(now, generation), &seen) {
            self.generation = generation;
        }
        true
    }

    fn adopt(&mut self, shared: &SharedData, now: Duration) {
        let Some(bytes) = &shared.snapshot else { return };
        let Ok(snapshot) = Snapshot::from_bytes(bytes) else { return };
        if self.peers.adopt(&snapshot, names(&self.config), now) {
            self.view = self.peers.view();
        }
        self.adopt_discovery(shared, now);
    }

    /// Takes an answer to a question; held answers that it settles are let go.
    pub fn answered(
        &mut self,
        shared: &mut SharedData,
        id: QuestionId,
        answer: Result<&PollAnswer, PollError>,
        was_stopped_cleanly: bool,
        now: Duration,
        random: u32,
    ) -> (Change, Vec<Released>) {
        let is_failure = answer.as_ref().map_or(true, |answer| answer.says.is_none());
        let forgets = match self.plant {
            Some(Plant::DropOnFailedPoll) => is_failure,
            Some(Plant::ForgetCleanlyStopped) => is_failure && was_stopped_cleanly,
            _ => false,
        };
        let forgotten;
        let answer = match (answer, id.subject) {
            (_, Subject::Half(half)) if forgets => {
                forgotten = documents::hardly_anything(half == Half::Core);
                Answer::Response {
                    status: 200,
                    content_type: b"application/json",
                    etag: None,
                    retry_after: None,
                    body: &forgotten.body,
                }
            }
            (Ok(answer), _) => Answer::Response {
                status: answer.status,
                content_type: answer.content_type.as_bytes(),
                etag: answer.etag.as_deref().map(str::as_bytes),
                retry_after: answer.retry_after.map(str::as_bytes),
                body: &answer.body,
            },
            (Err(error), _) => Answer::Failed(error),
        };
        let change = self.peers.answered(id, answer, now, random);
        self.has_news = true;
        if change.view {
            self.view = self.peers.view();
            self.wake_leader(shared, ApiserverSet::only(id.apiserver));
        }
        let Some(word) = change.word else { return (change, Vec::new()) };
        if self.role == Role::Stray {
            self.merge(shared, now);
        }
        self.discovery_answered(shared, id, word, now);
        let Subject::Half(half) = id.subject else { return (change, Vec::new()) };
        let vanished_after = self.vanished_after(now);
        let stale = (word == Word::Good).then(|| match self.plant {
            Some(Plant::BelieveStale) => &[],
            _ => self.peers.stale(id.apiserver, half),
        });
        let released = self.held.answered(id.apiserver, half, id.number, stale, &self.view, vanished_after);
        (change, released)
    }

    /// Decides about a request.
    pub fn request(
        &mut self,
        path: &[u8],
        method: &str,
        has_loop_header: bool,
        random: u32,
    ) -> (Sent, Option<Decision>) {
        self.has_requests = true;
        let path =
            if self.plant == Some(Plant::IgnoreSubresources) { without_subresource(path) } else { path.to_vec() };
        let mark = self.peers.mark();
        let mut sent = Sent { path: None, discovery: None, to: To::Here, mark, effect: Effect::Possible };
        let Some(decoded) = DecodedPath::new(&path) else { return (sent, None) };
        let Target::Resource(resource) = decoded.target() else { return (sent, None) };
        sent.effect = Effect::of_request(method.as_bytes(), method != "POST", resource.reaches_backend());
        let decision = decide(&resource, &self.view, &self.config, || has_loop_header, random);
        if let Decision::Reroute(peer) = decision {
            sent.to = To::Peer(peer);
        }
        drop(decoded);
        sent.path = Some(path);
        (sent, Some(decision))
    }

    /// Looks at an answer that came from `cluster`.
    pub fn response(
        &mut self,
        shared: &mut SharedData,
        sent: &Sent,
        reply: &Reply,
        cluster: &str,
        stream: u32,
        now: Duration,
    ) -> Fate {
        let asked = self.asked(sent.to, cluster);
        if let (Some(half), ..500) = (sent.discovery, reply.status) {
            return self.discovery_response(shared, (half, sent), asked, reply, stream, now);
        }
        let fate = match (reply.status, &sent.path) {
            (404, Some(path)) => self.guard(shared, path.clone(), sent, asked, reply, stream, now),
            (500.., _) => {
                let fate = failure(reply, sent.effect);
                if fate != Fate::Passes {
                    self.doubt(shared, asked, now);
                }
                fate
            }
            _ => Fate::Passes,
        };
        self.twisted(fate)
    }

    /// A held answer that has been let go.
    pub fn released(&self, released: &Released) -> Fate {
        let retry = !released.may_be_executed;
        self.twisted(match released.verdict {
            Verdict::Pass => Fate::Passes,
            Verdict::Refuse(why) => Fate::Replaced { retry, why: why.word() },
            Verdict::Ask { .. } => Fate::Replaced { retry, why: "asked twice" },
        })
    }

    const fn twisted(&self, fate: Fate) -> Fate {
        match (fate, self.plant) {
            (Fate::Replaced { why, .. }, Some(Plant::RetryAlways)) => Fate::Replaced { why, retry: true },
            (fate, _) => fate,
        }
    }

    /// A stream is over.
    pub fn drop_held(&mut self, stream: u32) {
        self.held.drop_stream(stream);
        self.awaiting.retain(|awaiting| awaiting.stream != stream);
    }

    #[allow(clippy::too_many_arguments, reason = "what Envoy is asked for, one by one")]
    fn guard(
        &mut self,
        shared: &mut SharedData,
        path: Vec<u8>,
        sent: &Sent,
        asked: Asked,
        reply: &Reply,
        stream: u32,
        now: Duration,
    ) -> Fate {
        let Some(decoded) = DecodedPath::new(&path) else { return Fate::Passes };
        let Target::Resource(resource) = decoded.target() else { return Fate::Passes };
        let half = Half::of_group(resource.group);
        let all = ApiserverSet::first(self.config.apiservers.len());
        let is_unguarded = match self.plant {
            Some(Plant::NoGuard) => true,
            Some(Plant::PassWhileUnsynced) => !self.view.health(resource.group).known.contains_all(all),
            _ => false,
        };
        if is_unguarded {
            return Fate::Passes;
        }
        let came_from_upstream = reply.details == VIA_UPSTREAM;
        let is_by_another = !reply.has_audit_id || resource.reaches_backend();
        let may_be_executed = came_from_upstream && is_by_another && sent.effect == Effect::Possible;
        let length = reply.content_length.map(|length| length.to_string());
        let not_found = NotFound {
            is_by_apiserver: came_from_upstream && reply.has_audit_id,
            looks_like_missing_route: looks_like_missing_route(
                reply.content_type.map(str::as_bytes),
                length.as_deref().map(str::as_bytes),
                reply.content_encoding.map(str::as_bytes),
            ),
        };
        let vanished_after = self.vanished_after(now);
        let verdict = judge(not_found, &resource, asked, &self.view, all, self.peers.exclusions(), vanished_after);
        let why = match verdict {
            Verdict::Pass => return Fate::Passes,
            Verdict::Refuse(why) => why,
            Verdict::Ask { .. } if self.plant == Some(Plant::NotFoundFromLastPoll) => return Fate::Passes,
            Verdict::Ask { whom, expected } => {
                drop(decoded);
                let mark = sent.mark;
                match self.hold(Waiting { stream, path, mark, half, pending: whom, expected, may_be_executed }, now) {
                    Ok(()) => return Fate::Held,
                    Err(why) => why,
                }
            }
        };
        self.hurry(shared, asked, now);
        Fate::Replaced { retry: !may_be_executed, why: why.word() }
    }

    fn hold(&mut self, waiting: Waiting, now: Duration) -> Result<(), WhyRefused> {
        for apiserver in waiting.pending.iter() {
            if self.peers.ask(apiserver, Subject::Half(waiting.half), waiting.mark, now) == Asking::BackingOff {
                return Err(WhyRefused::Unconfirmed);
            }
        }
        self.held.hold(waiting);
        self.call_at_once();
        Ok(())
    }

    fn call_at_once(&mut self) {
        if !std::mem::replace(&mut self.is_called_at_once, true) {
            self.tick_every(AT_ONCE);
        }
    }

    /// Whoever was asked is not what the table says.
    fn hurry(&mut self, shared: &mut SharedData, asked: Asked, now: Duration) {
        let whom = match asked {
            Asked::One(apiserver) => ApiserverSet::only(apiserver),
            Asked::AnyOne | Asked::Stranger => ApiserverSet::first(self.apiservers.len()),
        };
        whom.iter().for_each(|apiserver| self.peers.hurry(apiserver, now));
        self.wake_leader(shared, whom);
    }

    fn doubt(&mut self, shared: &mut SharedData, asked: Asked, now: Duration) {
        if let Asked::One(apiserver) = asked
            && self.peers.avoid(apiserver)
        {
            self.view = self.peers.view();
        }
        self.hurry(shared, asked, now);
    }

    fn wake_leader(&self, shared: &mut SharedData, whom: ApiserverSet) {
        if !self.leads() {
            shared.wake(self.candidate.poll_set, whom);
        }
    }

    fn asked(&self, to: To, cluster: &str) -> Asked {
        let To::Peer(meant) = to else { return self.config.local.map_or(Asked::AnyOne, Asked::One) };
        if self.config.apiservers[meant].cluster == cluster {
            return Asked::One(meant);
        }
        let owner = self.config.apiservers.iter().position(|apiserver| apiserver.cluster == cluster);
        owner.map_or(Asked::Stranger, Asked::One)
    }

    fn vanished_after(&self, now: Duration) -> Duration {
        match self.plant {
            // Upstream remembers nothing of a peer that it has dropped.
            Some(Plant::DropOnFailedPoll | Plant::ForgetCleanlyStopped) => Duration::MAX,
            _ => now.saturating_sub(self.config.discovery.forget_after),
        }
    }

    fn tick_every(&mut self, period: Duration) {
        self.period = period;
        self.timer += 1;
    }
}

fn failure(reply: &Reply, effect: Effect) -> Fate {
    match UpstreamFailure::from_details(reply.details.as_bytes()) {
        None => Fate::Passes,
        Some(failure) => Fate::Replaced { retry: failure.allows_retry(effect), why: reply.details },
    }
}

fn names(config: &Config) -> impl Iterator<Item = (&str, &str)> {
    config.apiservers.iter().map(|apiserver| (apiserver.name.as_str(), apiserver.discovery_cluster.as_str()))
}

/// `/prefix/namespaces/shop/RESOURCE/NAME/SUBRESOURCE`: five or six segments precede the subresource.
fn without_subresource(path: &[u8]) -> Vec<u8> {
    let has_group = path.starts_with(b"/apis/");
    let keep = if has_group { 8 } else { 7 };
    path.split(|byte| *byte == b'/').take(keep).collect::<Vec<_>>().join(&b'/')
}

/// What a configuration wants to be polled, as a number: FNV-1a of all that matters to polling.
fn poll_set(config: &Config) -> u64 {
    let polled: Vec<_> =
        config.apiservers.iter().map(|apiserver| (&apiserver.name, &apiserver.discovery_cluster)).collect();
    let text = format!("{polled:?} {:?} {:?} {:?}", config.discovery, config.exclusions, config.local);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

//! Requests for discovery: they go to an apiserver like all others, and its answer is replaced by that of the whole
//! cluster.
//!
//! So authentication and authorization are the apiserver's. It is asked on the condition that its document is another one
//! than we know, and usually answers with a 304 that has no body to throw away. If it is another one, the answer waits
//! until the apiserver has told us too: who has just made a custom resource definition finds it. And the answer waits until
//! the peers have been asked whether they serve what they served at their last poll: a namespace controller takes a type
//! that is not listed for one without objects, and deletes the namespace.

use std::rc::Rc;
use std::time::Duration;

use super::host;
use super::http::{Fate, Sent, came_from_upstream};
use super::reply::{Reply, Retry};
use super::state::Shared;
use crate::config::PeerProxying;
use crate::decision::LOOP_HEADER;
use crate::discovery::document::{Half, POLL_ACCEPT};
use crate::discovery::merge::INCOMPLETE_GROUP;
use crate::discovery::negotiate::{self, AGGREGATED, Form, Wanted};
use crate::discovery::open_api;
use crate::guard::Asked;
use crate::peers::cluster_discovery::{Aggregated, ClusterDiscovery, Stamp};
use crate::peers::documents::Kind;
use crate::peers::exclusions::can_be_built_in;
use crate::peers::refresh::{PATIENCE_WITH_FAILING, QuestionId, Subject, Word};
use crate::peers::table::ApiserverSet;
use crate::target::Discovery;

/// What clients are told of the whole cluster.
#[derive(Clone, Default)]
pub(super) enum Told {
    /// Nothing yet: some apiserver has not been tried once.
    #[default]
    NotYet,
    /// A [`ClusterDiscovery`].
    Merged {
        /// Its bytes.
        bytes: Rc<Vec<u8>>,
        /// From what it was made.
        stamp: Stamp,
    },
    /// Each apiserver's own: a document is not of a shape that could be merged.
    Unmergeable {
        /// From what it should have been made.
        stamp: Stamp,
    },
}

impl Told {
    pub(super) const fn stamp(&self) -> Option<&Stamp> {
        match self {
            Self::NotYet => None,
            Self::Merged { stamp, .. } | Self::Unmergeable { stamp } => Some(stamp),
        }
    }
}

/// A request for discovery whose answer is to be replaced.
pub(super) struct Request {
    what: What,
    /// The client's own condition, which is about what we serve.
    if_none_match: Option<Vec<u8>>,
}

/// What is asked for.
enum What {
    Root(Half, Form),
    Group(String),
    GroupVersion(String, String),
    OpenApiRoot,
}

/// An answer that waits until apiservers have told what they serve now.
pub(super) struct Awaiting {
    pub(super) stream: u32,
    /// Who gave it, if it tells something else than we know.
    changed: Option<usize>,
    /// Who is still to tell.
    pending: ApiserverSet,
    /// Until when those of them are waited for that fail their polls.
    patient_until: Duration,
    subject: Subject,
    /// A question with a higher number was sent after the request.
    mark: u64,
    request: Request,
    status: u16,
}

/// What takes an answer's place.
struct Document<'d> {
    body: &'d [u8],
    content_type: &'static str,
    cache_control: &'static str,
    etag: Option<&'d str>,
}

impl Shared {
    /// Prepares a request for discovery. What is not for us to answer stays as it is.
    pub(super) fn discovery_request(&self, target: Discovery<'_>, sent: &mut Sent) {
        let told = self.told();
        let is_read = || matches!(host::request_header(":method").ok().flatten().as_deref(), Some(b"GET" | b"HEAD"));
        if !self.config.merges_discovery() || matches!(told, Told::Unmergeable { .. }) || !is_read() {
            return;
        }
        let accept = || host::request_header("accept").ok().flatten();
        let name = |name: &[u8]| String::from_utf8(name.to_vec()).ok();
        let what = match target {
            Discovery::OpenApiSchema(key) => return self.route_schema(key, &told, sent),
            Discovery::OpenApiRoot if self.config.peer_proxying == PeerProxying::Disabled => return,
            // A question of another Envoy, which wants this apiserver's own.
            Discovery::OpenApiRoot if !matches!(host::request_header(LOOP_HEADER), Ok(None)) => return,
            Discovery::OpenApiRoot => {
                host::log_failure("removing range", host::remove_request_header("range"));
                Some(What::OpenApiRoot)
            }
            Discovery::Root { is_core, has_trailing_slash } => {
                let half = if is_core { Half::Core } else { Half::Groups };
                match negotiate::wanted(half, accept().as_deref(), has_trailing_slash) {
                    // Whoever prefers what is not merged would get that.
                    Wanted::Merged(Form::Legacy) if told.leaves_legacy(half) => {
                        host::log_failure("asking for JSON", host::set_request_header("accept", "application/json"));
                        None
                    }
                    // Not one apiserver lets itself be polled: clients see what they would see without the filter.
                    Wanted::Merged(_) if told.knows_nothing_of(half) => None,
                    Wanted::Merged(form) => Some(What::Root(half, form)),
                    Wanted::Own => {
                        self.no_peer_requests.increment();
                        None
                    }
                    Wanted::Unmergeable => {
                        self.unmerged_requests.increment();
                        None
                    }
                }
            }
            Discovery::Group(group) => {
                let is_ours = can_be_merged(group) && negotiate::takes_json(accept().as_deref());
                name(group).filter(|_| is_ours).map(What::Group)
            }
            Discovery::GroupVersion { group, version } => {
                let is_excluded = || self.with_exclusions(|exclusions| exclusions.contain(group, version));
                let is_ours = (group == INCOMPLETE_GROUP.as_bytes() || !is_excluded())
                    && negotiate::takes_json(accept().as_deref());
                name(group)
                    .zip(name(version))
                    .filter(|_| is_ours)
                    .map(|(group, version)| What::GroupVersion(group, version))
            }
        };
        let Some(what) = what else { return };
        let mut request = Request { what, if_none_match: None };
        if let What::Root(half, _) = request.what {
            request.if_none_match = host::request_header("if-none-match").ok().flatten();
            self.ask_for_own_document(half, &told, sent);
        }
        sent.discovery = Some(Box::new(request));
    }

    /// Makes the request for a root one that an apiserver answers with a 304 if we know its document.
    fn ask_for_own_document(&self, half: Half, told: &Told, sent: &mut Sent) {
        let whom = self.config.local.or_else(|| {
            // Of an apiserver that the balancer picks nobody knows the tag.
            let view = self.view();
            let fresh = view.health_of(half).fresh.without(view.avoided);
            let may_pick = self.config.peer_proxying == PeerProxying::Enabled;
            fresh.pick(self.random()).filter(|_| may_pick).inspect(|apiserver| self.reroute(*apiserver, sent))
        });
        host::log_failure("asking for JSON", host::set_request_header("accept", POLL_ACCEPT));
        let known = whom.and_then(|apiserver| {
            let (etag, version) = self.document(apiserver, Kind::of(half));
            etag.filter(|_| told.holds(apiserver, Kind::of(half), version))
        });
        let condition = match known {
            Some(etag) => host::set_request_header("if-none-match", &etag),
            None => host::remove_request_header("if-none-match"),
        };
        host::log_failure("asking on a condition", condition);
    }

    /// Sends a request for a schema document to an apiserver that has it.
    fn route_schema(&self, key: &[u8], told: &Told, sent: &mut Sent) {
        let may_reroute =
            self.config.peer_proxying == PeerProxying::Enabled && matches!(host::request_header(LOOP_HEADER), Ok(None));
        if let (Some(discovery), Ok(key), true) = (told.read(), str::from_utf8(key), may_reroute) {
            let avoided = self.view().avoided;
            let mut owners = discovery.schema_owners(key).peekable();
            let first = owners.peek().copied();
            // The first one's hash is the one that clients know; another's costs a redirect.
            if let Some(owner) = owners.find(|owner| !avoided.contains(*owner)).or(first) {
                self.reroute(owner, sent);
            }
        }
    }

    /// Looks at the answer to a request for discovery.
    pub(super) fn discovery_response(
        &self,
        status: u16,
        request: Request,
        sent: &Sent,
        asked: Asked,
        stream: u32,
    ) -> Fate {
        let is_replaced = match request.what {
            What::Root(..) => matches!(status, 200 | 304),
            What::Group(_) | What::GroupVersion(..) => matches!(status, 200 | 404),
            What::OpenApiRoot => status == 200,
        };
        // Others have authorized nobody. A 404 may also be that of something between here and an apiserver.
        let is_by_apiserver =
            || came_from_upstream() && (status != 404 || matches!(host::response_header("audit-id"), Ok(Some(_))));
        if !is_replaced || !is_by_apiserver() {
            return Fate::Passes;
        }
        let told = self.told();
        if matches!(told, Told::NotYet) {
            // While an apiserver has not been tried, one answer more tells too little.
            return self.serve(&request, status);
        }
        let (half, has_tag) = match &request.what {
            What::Root(half, _) => (Some(*half), true),
            What::Group(group) | What::GroupVersion(group, _) => (Some(Half::of_group(group.as_bytes())), false),
            What::OpenApiRoot => (None, true),
        };
        let kind = half.map_or(Kind::OpenApi, Kind::of);
        let apiserver = match asked {
            // Whether it says something else than we know can only be told by the tag.
            _ if !has_tag => None,
            Asked::One(apiserver) => Some(apiserver),
            // In a gateway any of them will do to ask for schemas, which all share but for their own types.
            Asked::AnyOne if kind == Kind::OpenApi => self.view().groups.fresh.iter().next(),
            Asked::AnyOne | Asked::Stranger => None,
        };
        let subject = Subject::from(kind);
        let mut pending = ApiserverSet::EMPTY;
        if let Some(half) = half {
            // A peer that was upgraded since its last poll serves more than it has told, one that failed it too. Of one
            // that has never told anything the mark says enough.
            let others = self.view().health_of(half).known.without(apiserver.into_iter().collect());
            let will_tell = |peer: &usize| !self.was_just_asked(*peer, half) && self.insist(*peer, subject, sent.mark);
            pending = others.iter().filter(will_tell).collect();
        }
        let mut changed = None;
        if let Some(apiserver) = apiserver {
            let (etag, version) = self.document(apiserver, kind);
            let is_unchanged = status == 304 || {
                let answered = host::response_header("etag").ok().flatten();
                answered.is_some() && answered.as_deref() == etag.as_deref().map(str::as_bytes)
            };
            let is_told = is_unchanged && told.holds(apiserver, kind, version);
            if !is_told && self.ask(apiserver, subject, sent.mark) {
                changed = Some(apiserver);
                pending = pending.union(ApiserverSet::only(apiserver));
            } else if !is_unchanged {
                self.note_outdated(apiserver, subject);
            }
        }
        if pending.is_empty() {
            // There may be news since the last tick.
            self.merge();
            return self.serve(&request, status);
        }
        let patient_until = host::monotonic_now().saturating_add(PATIENCE_WITH_FAILING);
        let awaiting = Awaiting { stream, changed, pending, patient_until, subject, mark: sent.mark, request, status };
        self.awaiting.borrow_mut().push(awaiting);
        Fate::Held(sent.effect())
    }

    /// Serves those that have waited long enough for apiservers that fail their polls.
    pub(super) fn lose_patience(&self) {
        if self.awaiting.borrow().is_empty() {
            return;
        }
        let (now, view) = (host::monotonic_now(), self.view());
        let mut is_over = |awaiting: &mut Awaiting| {
            if let (Subject::Half(half), true) = (awaiting.subject, awaiting.patient_until <= now) {
                let awaited = view.health_of(half).fresh.union(awaiting.changed.into_iter().collect());
                awaiting.pending = awaiting.pending.intersection(awaited);
            }
            awaiting.pending.is_empty()
        };
        let over: Vec<_> = self.awaiting.borrow_mut().extract_if(.., &mut is_over).collect();
        self.serve_held(&over);
    }

    /// An apiserver has told what it serves, or has failed to: those that waited for it are answered.
    pub(super) fn discovery_answered(&self, id: QuestionId, word: Word) {
        let mut is_changed = false;
        let mut is_over = |awaiting: &mut Awaiting| {
            let is_meant =
                awaiting.subject == id.subject && awaiting.mark < id.number && awaiting.pending.contains(id.apiserver);
            is_changed |= is_meant && awaiting.changed == Some(id.apiserver);
            if is_meant {
                awaiting.pending = awaiting.pending.without(ApiserverSet::only(id.apiserver));
            }
            awaiting.pending.is_empty()
        };
        let over: Vec<_> = self.awaiting.borrow_mut().extract_if(.., &mut is_over).collect();
        if word == Word::Failed && is_changed {
            // It has told its client something else than us.
            self.note_outdated(id.apiserver, id.subject);
        }
        self.serve_held(&over);
    }

    fn serve_held(&self, over: &[Awaiting]) {
        if over.is_empty() {
            return;
        }
        self.merge();
        for awaiting in over {
            self.on_stream(awaiting.stream, || match self.serve(&awaiting.request, awaiting.status) {
                Fate::Replaced(reply) => reply.send(self.config.retry_after_seconds),
                Fate::Passes => host::log_failure("letting an answer go", host::continue_response()),
                Fate::Answered | Fate::Held(_) => {}
            });
        }
    }

    /// Answers with the document of the whole cluster in the place of an apiserver's answer.
    fn serve(&self, request: &Request, status: u16) -> Fate {
        let told = self.told();
        // The answer to a request for a root is in another form than the client wants, or to another condition.
        let own = || match request.what {
            What::Root(..) => Fate::Replaced(Reply::discovery_in_doubt(Retry::Yes)),
            What::Group(_) | What::GroupVersion(..) | What::OpenApiRoot => Fate::Passes,
        };
        let discovery = match (&told, told.read()) {
            (_, Some(discovery)) => discovery,
            (Told::NotYet, _) => return Fate::Replaced(Reply::discovery_not_yet()),
            (Told::Merged { .. } | Told::Unmergeable { .. }, None) => return own(),
        };
        let document = match &request.what {
            What::Root(half, Form::Aggregated) => Some(Document::aggregated(discovery.aggregated(*half))),
            What::Root(half, Form::Legacy) => discovery.legacy(*half).map(Document::legacy),
            What::Group(group) => discovery.group(group).map(Document::legacy),
            What::GroupVersion(group, version) => discovery.group_version(group, version).map(Document::legacy),
            What::OpenApiRoot => discovery.open_api().map(Document::open_api),
        };
        let Some(document) = document else {
            return if status == 404 && self.may_be_served(request) {
                Fate::Replaced(Reply::discovery_in_doubt(Retry::Yes))
            } else {
                own()
            };
        };
        if document.body.is_empty() {
            // Whoever reads the mark may as well go on.
            let is_mark = matches!(&request.what, What::GroupVersion(group, _) if group == INCOMPLETE_GROUP);
            return Fate::Replaced(Reply::discovery_in_doubt(if is_mark { Retry::No } else { Retry::Yes }));
        }
        document.send(request.if_none_match.as_deref());
        Fate::Answered
    }

    /// A group or version that an apiserver does not know: another one does, this one did until a moment ago, or one that
    /// does not answer just now may have it.
    fn may_be_served(&self, request: &Request) -> bool {
        let (group, version) = match &request.what {
            What::Group(group) => (group.as_bytes(), None),
            What::GroupVersion(group, version) => (group.as_bytes(), Some(version.as_bytes())),
            What::Root(..) | What::OpenApiRoot => return false,
        };
        let view = self.view();
        !view.health(group).fresh.contains_all(self.apiservers()) || view.table.has_types_of(group, version)
    }
}

/// Whether there may be anything about a group that its apiserver's own documents do not tell.
fn can_be_merged(group: &[u8]) -> bool {
    can_be_built_in(group) || group == INCOMPLETE_GROUP.as_bytes()
}

impl Told {
    fn read(&self) -> Option<ClusterDiscovery<'_>> {
        match self {
            Self::Merged { bytes, .. } => ClusterDiscovery::from_bytes(bytes).ok(),
            Self::NotYet | Self::Unmergeable { .. } => None,
        }
    }

    /// Whether it was made from this version of a document, or a newer one.
    fn holds(&self, apiserver: usize, kind: Kind, version: Option<Duration>) -> bool {
        let held = self.stamp().and_then(|stamp| stamp.versions.get(apiserver)).and_then(|all| kind.of_all(all));
        held.is_some_and(|held| *held >= version && version.is_some())
    }

    /// Whether all apiservers have been tried, and none has told anything.
    fn knows_nothing_of(&self, half: Half) -> bool {
        self.read().is_some_and(|discovery| discovery.aggregated(half).text.is_empty())
    }

    /// Whether an apiserver's own legacy root is right.
    fn leaves_legacy(&self, half: Half) -> bool {
        self.read().is_some_and(|discovery| discovery.legacy(half).is_none())
    }
}

impl<'d> Document<'d> {
    fn aggregated(document: Aggregated<'d>) -> Self {
        let body = document.text.as_bytes();
        Self { body, content_type: AGGREGATED, cache_control: "public", etag: Some(document.etag) }
    }

    const fn legacy(text: &'d str) -> Self {
        let (content_type, cache_control) = ("application/json", "no-cache, private");
        Self { body: text.as_bytes(), content_type, cache_control, etag: None }
    }

    const fn open_api(text: &'d str) -> Self {
        let (content_type, cache_control) = (open_api::CONTENT_TYPE, "no-cache, private");
        Self { body: text.as_bytes(), content_type, cache_control, etag: None }
    }

    /// Sends it in the place of the answer, with those of its headers that say something of the request.
    fn send(&self, if_none_match: Option<&[u8]>) {
        /// For the apiserver's audit log, its priority and fairness, and what it warns of.
        const KEPT: [&str; 4] =
            ["audit-id", "x-kubernetes-pf-flowschema-uid", "x-kubernetes-pf-prioritylevel-uid", "warning"];
        let kept = KEPT.map(|name| (name, host::response_header(name).ok().flatten()));
        let mut headers: Vec<(&str, &[u8])> = vec![("cache-control", self.cache_control.as_bytes())];
        headers.extend(kept.iter().filter_map(|(name, value)| Some((*name, value.as_deref()?))));
        if let Some(etag) = self.etag {
            headers.extend([("etag", etag.as_bytes()), ("vary", b"Accept")]);
            if if_none_match.is_some_and(|condition| negotiate::is_unchanged(condition, etag)) {
                return answer(304, &headers, &[]);
            }
        }
        headers.push(("content-type", self.content_type.as_bytes()));
        answer(200, &headers, self.body);
    }
}

fn answer(status: u32, headers: &[(&str, &[u8])], body: &[u8]) {
    let sent = host::send_local_response(status, "mixed_version_proxy_discovery", headers, body);
    host::log_failure("answering with discovery", sent);
}

//! One request: request headers in, response headers out. Bodies never come here.

use std::cell::{Cell, RefCell};
use std::hash::{BuildHasher, RandomState};
use std::rc::Rc;

use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

use super::host;
use super::root::parse_status;
use crate::config::{Config, PeerProxying, Reroute};
use crate::decision::{Decision, LOOP_HEADER, decide};
use crate::guard::{Asked, NotFound, Verdict, WhyRefused, judge, looks_like_missing_route};
use crate::local_reply::{UpstreamFailure, service_unavailable};
use crate::peers::exclusions::Exclusions;
use crate::peers::table::{ApiserverSet, View};
use crate::target::{DecodedPath, Target};

/// Where the shipped configurations keep the request's method (filter `set_filter_state`). Envoy forgets the request's
/// headers once they have passed, and to copy the method into the VM for every request, in case the answer should fail,
/// costs more than all the rest. Where it is missing, a request counts as a write.
const METHOD: &str = "filter_state\0mixed_version_proxy.method";

/// What all streams of one configuration on one worker share with their root.
pub(super) struct Shared {
    pub(super) config: Config,
    pub(super) exclusions: Exclusions,
    view: RefCell<Rc<View>>,
    random: Cell<u64>,
    /// Apiservers whose missing route has been logged.
    misrouted: Cell<ApiserverSet>,
}

impl Shared {
    pub(super) fn new(config: Config) -> Self {
        let exclusions = Exclusions::new(&config.exclusions.group_versions);
        // The standard library's hasher is seeded by the host's random numbers.
        let random = Cell::new(RandomState::new().hash_one(0));
        Self { config, exclusions, view: RefCell::default(), random, misrouted: Cell::default() }
    }

    /// The newest view. Never borrowed beyond this line, so it cannot be borrowed twice.
    pub(super) fn view(&self) -> Rc<View> {
        Rc::clone(&self.view.borrow())
    }

    pub(super) fn set_view(&self, view: View) {
        *self.view.borrow_mut() = Rc::new(view);
    }

    fn random(&self) -> u32 {
        let mut generator = fastrand::Rng::with_seed(self.random.get());
        let number = generator.u32(..);
        self.random.set(generator.get_seed());
        number
    }

    fn apiservers(&self) -> ApiserverSet {
        ApiserverSet::first(self.config.apiservers.len())
    }
}

/// One stream.
pub(super) struct Http {
    /// `None` if Envoy starts a stream without an accepted configuration: it then passes untouched.
    shared: Option<Rc<Shared>>,
    state: State,
}

/// What the response headers need to know of the request.
enum State {
    /// Not about a resource, or left alone for another reason: only Envoy's own failures are reshaped.
    Untouched,
    /// A request for a resource: its path as sent, and where it went.
    Resource { path: Vec<u8>, sent_to: SentTo },
    /// The filter has answered by itself; that answer passes here once more.
    Answered,
}

/// Where a request for a resource was sent.
#[derive(Clone, Copy)]
enum SentTo {
    Here,
    Peer(usize),
}

impl Http {
    pub(super) fn new(shared: Option<Rc<Shared>>) -> Self {
        Self { shared, state: State::Untouched }
    }
}

impl Context for Http {}

impl HttpContext for Http {
    fn on_http_request_headers(&mut self, _headers: usize, _end_of_stream: bool) -> Action {
        if let Some(shared) = &self.shared {
            self.state = shared.request();
        }
        Action::Continue
    }

    fn on_http_response_headers(&mut self, _headers: usize, _end_of_stream: bool) -> Action {
        let state = std::mem::replace(&mut self.state, State::Answered);
        if let Some(shared) = &self.shared
            && let Some(reply) = shared.response(state)
        {
            reply.send(shared.config.retry_after_seconds);
        }
        Action::Continue
    }
}

impl Shared {
    /// Decides about a request and carries the decision out.
    fn request(&self) -> State {
        if let Reroute::Header { name } = &self.config.reroute {
            // A client must not choose the cluster.
            log_refusal("removing the rerouting header", host::remove_request_header(name));
        }
        let Ok(Some(path)) = host::request_header(":path") else {
            return State::Untouched;
        };
        let Some(decoded) = DecodedPath::new(&path) else {
            return State::Untouched;
        };
        let Target::Resource(resource) = decoded.target() else {
            return State::Untouched;
        };
        let has_loop_header = || !matches!(host::request_header(LOOP_HEADER), Ok(None));
        let decision = decide(&resource, &self.view(), &self.config, has_loop_header, self.random());
        let sent_to = match decision {
            Decision::Here(_) => SentTo::Here,
            Decision::Reroute(peer) => self.reroute(peer, &path),
        };
        State::Resource { path, sent_to }
    }

    fn reroute(&self, peer: usize, path: &[u8]) -> SentTo {
        let Some(apiserver) = self.config.apiservers.get(peer) else {
            return SentTo::Here;
        };
        if self.config.peer_proxying == PeerProxying::DryRun {
            log::info!("dry run: {:?} would go to {}", String::from_utf8_lossy(path), apiserver.name);
            return SentTo::Here;
        }
        let cluster = apiserver.cluster.as_str();
        let chosen = host::set_request_header(LOOP_HEADER, "true").and_then(|()| match &self.config.reroute {
            Reroute::FilterState { key } => host::set_filter_state(key, cluster),
            Reroute::Header { name } => host::set_request_header(name, cluster),
        });
        let picked_again = chosen.and_then(|()| host::clear_route_cache());
        log_refusal("rerouting", picked_again);
        // Envoy may have taken half of it, so the answer is looked at as a peer's: the cluster that answered is compared.
        SentTo::Peer(peer)
    }

    /// Looks at an answer; `None`: it passes.
    fn response(&self, state: State) -> Option<Reply> {
        let (path, sent_to) = match &state {
            State::Answered => return None,
            State::Untouched => (None, SentTo::Here),
            State::Resource { path, sent_to } => (Some(path.as_slice()), *sent_to),
        };
        if self.config.peer_proxying == PeerProxying::DryRun {
            return self.dry_run_response(path, sent_to);
        }
        let asked = self.asked(sent_to);
        self.reply_to(response_status()?, path, sent_to, asked)
    }

    fn dry_run_response(&self, path: Option<&[u8]>, sent_to: SentTo) -> Option<Reply> {
        let status = response_status()?;
        if let Some(reply) = self.reply_to(status, path, sent_to, self.asked(sent_to)) {
            let path = String::from_utf8_lossy(path.unwrap_or_default());
            log::info!("dry run: the {status} for {path:?} would become a 503 ({})", reply.details);
        }
        None
    }

    fn reply_to(&self, status: u16, path: Option<&[u8]>, sent_to: SentTo, asked: Asked) -> Option<Reply> {
        match (status, path, sent_to) {
            (404, Some(path), _) => self.guard(path, asked),
            (301 | 302 | 303 | 307 | 308, Some(_), SentTo::Peer(_)) => Some(Reply::redirect()),
            (500.., _, _) => {
                let details = host::property("response\0code_details").ok().flatten()?;
                UpstreamFailure::from_details(&details).map(Reply::failure)
            }
            _ => None,
        }
    }

    fn guard(&self, path: &[u8], asked: Asked) -> Option<Reply> {
        let decoded = DecodedPath::new(path)?;
        let Target::Resource(resource) = decoded.target() else {
            return None;
        };
        let header = |name| host::response_header(name).ok().flatten();
        let details = host::property("response\0code_details").ok().flatten();
        let audit_id = header("audit-id");
        let not_found = NotFound {
            is_by_apiserver: details.as_deref() == Some(b"via_upstream") && audit_id.is_some(),
            looks_like_missing_route: looks_like_missing_route(
                header("content-type").as_deref(),
                header("content-length").as_deref(),
                header("content-encoding").as_deref(),
            ),
        };
        match judge(not_found, &resource, asked, &self.view(), self.apiservers(), &self.exclusions) {
            Verdict::Pass => None,
            Verdict::Refuse(why) => Some(Reply::guarded(why, audit_id)),
        }
    }

    /// Which apiserver has answered. For a reroute this is looked up rather than believed: a filter-state value without
    /// a route of its own falls to the default cluster unnoticed.
    fn asked(&self, sent_to: SentTo) -> Asked {
        let SentTo::Peer(meant) = sent_to else {
            return self.config.local.map_or(Asked::AnyOne, Asked::One);
        };
        let Ok(Some(answered)) = host::property("xds\0cluster_name") else {
            return Asked::One(meant);
        };
        let apiservers = &self.config.apiservers;
        if answered.is_empty() || apiservers.get(meant).is_some_and(|peer| peer.cluster.as_bytes() == answered) {
            return Asked::One(meant);
        }
        self.log_misrouted(meant, &answered);
        let owner = apiservers.iter().position(|peer| peer.cluster.as_bytes() == answered);
        owner.map_or(Asked::Stranger, Asked::One)
    }

    /// Once for each apiserver: a route that is missing is missing for every request.
    fn log_misrouted(&self, meant: usize, answered: &[u8]) {
        let logged = self.misrouted.get();
        if logged.contains(meant) {
            return;
        }
        self.misrouted.set(logged.union(ApiserverSet::only(meant)));
        let name = self.config.apiservers.get(meant).map_or("", |peer| peer.name.as_str());
        let answered = String::from_utf8_lossy(answered);
        log::error!(
            "a request meant for {name} was answered by cluster {answered:?}: the Envoy configuration has no route for it"
        );
    }
}

fn response_status() -> Option<u16> {
    parse_status(&host::response_header(":status").ok().flatten()?)
}

fn log_refusal(what: &str, outcome: Result<(), host::HostStatus>) {
    if let Err(status) = outcome {
        log::error!("{what}: {status}");
    }
}

/// A 503 in an answer's place.
struct Reply {
    /// For the client.
    message: &'static str,
    /// For the access log.
    details: String,
    retry: Retry,
    /// Of the apiserver's answer that is replaced, so that its audit log can be found.
    audit_id: Option<Vec<u8>>,
}

/// Whether the client may be told to try again.
enum Retry {
    Yes,
    No,
}

impl Reply {
    fn guarded(why: WhyRefused, audit_id: Option<Vec<u8>>) -> Self {
        let message = match why {
            WhyRefused::NotByApiserver => "the 404 was not made by an apiserver",
            WhyRefused::ListedByAnother => "the apiserver that answered does not serve this resource, another one does",
            WhyRefused::Unconfirmed => "it cannot be told whether some apiserver serves this resource",
        };
        let details = format!("mixed_version_proxy_guarded_404{{{}}}", why.word());
        Self { message, details, retry: Retry::Yes, audit_id }
    }

    fn redirect() -> Self {
        Self {
            message: "the apiserver that serves this resource answered with a redirect, which would lead past the proxy",
            details: "mixed_version_proxy_redirect".to_owned(),
            retry: Retry::No,
            audit_id: None,
        }
    }

    fn failure(failure: UpstreamFailure) -> Self {
        let (message, word) = match failure {
            UpstreamFailure::NotSent => ("the apiserver cannot be reached", "not_sent"),
            UpstreamFailure::MaybeSent => ("the connection to the apiserver broke before its answer", "maybe_sent"),
        };
        let method = host::property(METHOD).ok().flatten().unwrap_or_default();
        let retry = if failure.allows_retry(&method) { Retry::Yes } else { Retry::No };
        Self { message, details: format!("mixed_version_proxy_upstream_failure{{{word}}}"), retry, audit_id: None }
    }

    fn send(&self, retry_after_seconds: u32) {
        let retry_after = match self.retry {
            Retry::Yes => Some(retry_after_seconds),
            Retry::No => None,
        };
        let body = service_unavailable(self.message, retry_after);
        let retry_after = retry_after.map(|seconds| seconds.to_string());
        let mut headers: Vec<(&str, &[u8])> =
            vec![("content-type", b"application/json"), ("cache-control", b"no-cache, private")];
        headers.extend(retry_after.iter().map(|seconds| ("retry-after", seconds.as_bytes())));
        headers.extend(self.audit_id.iter().map(|id| ("audit-id", id.as_slice())));
        log_refusal("answering with a 503", host::send_local_response(503, &self.details, &headers, &body));
    }
}

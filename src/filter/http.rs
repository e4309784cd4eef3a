//! One request: request headers in, response headers out. Bodies never come here.

use std::rc::Rc;

use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

use super::host;
use super::reply::Reply;
use super::root::parse_status;
use super::state::Shared;
use crate::config::{PeerProxying, Reroute};
use crate::decision::{Decision, LOOP_HEADER, decide};
use crate::discovery::document::Half;
use crate::guard::held::Waiting;
use crate::guard::{Asked, NotFound, Verdict, judge, looks_like_missing_route};
use crate::local_reply::UpstreamFailure;
use crate::target::{DecodedPath, Target};

/// Where the shipped configurations keep the request's method (filter `set_filter_state`). Envoy forgets the request's
/// headers once they have passed, and to copy the method into the VM for every request, in case the answer should fail,
/// costs more than all the rest. Where it is missing, a request counts as a write.
const METHOD: &str = "filter_state\0mixed_version_proxy.method";

/// One stream.
pub(super) struct Http {
    id: u32,
    /// `None` if Envoy starts a stream without an accepted configuration: it then passes untouched.
    shared: Option<Rc<Shared>>,
    state: State,
}

/// What the response headers need to know of the request.
enum State {
    /// Not about a resource, or left alone for another reason: only Envoy's own failures are reshaped.
    Untouched,
    /// A request for a resource.
    Resource(Sent),
    /// Its answer is held. What passes here next is our own answer, or Envoy's if it has waited too long.
    Held,
    /// The answer has passed.
    Done,
}

/// A request for a resource that was sent to an apiserver.
struct Sent {
    /// Its path as the client sent it.
    path: Vec<u8>,
    to: To,
    /// The latest question at that time: an answer to a later one tells what is true now.
    mark: u64,
}

/// Where a request for a resource was sent.
#[derive(Clone, Copy)]
enum To {
    Here,
    Peer(usize),
}

/// What becomes of an answer.
enum Fate {
    Passes,
    Replaced(Reply),
    Held,
}

impl Http {
    pub(super) fn new(id: u32, shared: Option<Rc<Shared>>) -> Self {
        Self { id, shared, state: State::Untouched }
    }
}

impl Context for Http {}

impl HttpContext for Http {
    fn on_http_request_headers(&mut self, _headers: usize, _end_of_stream: bool) -> Action {
        #[cfg(feature = "trap-on-command")]
        host::trap_if(host::request_header(host::TRAP_HEADER));
        if let Some(shared) = &self.shared {
            self.state = shared.request();
        }
        Action::Continue
    }

    fn on_http_response_headers(&mut self, _headers: usize, _end_of_stream: bool) -> Action {
        let Some(shared) = &self.shared else { return Action::Continue };
        let fate = match std::mem::replace(&mut self.state, State::Done) {
            State::Done => Fate::Passes,
            State::Untouched => shared.response(None, self.id),
            State::Resource(sent) => shared.response(Some(sent), self.id),
            State::Held => {
                shared.drop_held(self.id);
                shared.response(None, self.id)
            }
        };
        match fate {
            Fate::Passes => Action::Continue,
            Fate::Replaced(reply) => {
                reply.send(shared.config.retry_after_seconds);
                Action::Continue
            }
            Fate::Held => {
                self.state = State::Held;
                Action::Pause
            }
        }
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        if let (State::Held, Some(shared)) = (&self.state, &self.shared) {
            shared.drop_held(self.id);
        }
    }
}

impl Shared {
    /// Decides about a request and carries the decision out.
    fn request(&self) -> State {
        if let Reroute::Header { name } = &self.config.reroute {
            // A client must not choose the cluster.
            host::log_failure("removing the rerouting header", host::remove_request_header(name));
        }
        let Ok(Some(path)) = host::request_header(":path") else { return State::Untouched };
        let Some(decoded) = DecodedPath::new(&path) else { return State::Untouched };
        let Target::Resource(resource) = decoded.target() else { return State::Untouched };
        let has_loop_header = || !matches!(host::request_header(LOOP_HEADER), Ok(None));
        let to = match decide(&resource, &self.view(), &self.config, has_loop_header, self.random()) {
            Decision::Here(_) => To::Here,
            Decision::Reroute(peer) => self.reroute(peer, &path),
        };
        State::Resource(Sent { path, to, mark: self.mark() })
    }

    fn reroute(&self, peer: usize, path: &[u8]) -> To {
        let Some(apiserver) = self.config.apiservers.get(peer) else { return To::Here };
        if self.config.peer_proxying == PeerProxying::DryRun {
            log::info!("dry run: {:?} would go to {}", String::from_utf8_lossy(path), apiserver.name);
            return To::Here;
        }
        let cluster = apiserver.cluster.as_str();
        let chosen = host::set_request_header(LOOP_HEADER, "true").and_then(|()| match &self.config.reroute {
            Reroute::FilterState { key } => host::set_filter_state(key, cluster),
            Reroute::Header { name } => host::set_request_header(name, cluster),
        });
        let picked_again = chosen.and_then(|()| host::clear_route_cache());
        host::log_failure("rerouting", picked_again);
        // Envoy may have taken half of it, so the answer is looked at as a peer's: the cluster that answered is compared.
        To::Peer(peer)
    }

    /// Looks at an answer; `sent` is the request if it was about a resource.
    fn response(&self, sent: Option<Sent>, stream: u32) -> Fate {
        let to = sent.as_ref().map_or(To::Here, |sent| sent.to);
        let asked = self.asked(to);
        let Some(status) = response_status() else { return Fate::Passes };
        match (status, sent, to) {
            (404, Some(sent), _) => self.guard(sent, asked, stream),
            (301 | 302 | 303 | 307 | 308, Some(_), To::Peer(_)) => self.unless_dry_run(status, Reply::redirect()),
            (500.., _, _) => self.failure(status, asked),
            _ => Fate::Passes,
        }
    }

    fn unless_dry_run(&self, status: u16, reply: Reply) -> Fate {
        if self.config.peer_proxying == PeerProxying::DryRun {
            log::info!("dry run: a {status} would become a 503 ({})", reply.details);
            return Fate::Passes;
        }
        Fate::Replaced(reply)
    }

    fn failure(&self, status: u16, asked: Asked) -> Fate {
        let details = host::property("response\0code_details").ok().flatten().unwrap_or_default();
        let Some(failure) = UpstreamFailure::from_details(&details) else { return Fate::Passes };
        if let Asked::One(apiserver) = asked {
            self.avoid(apiserver);
        }
        self.hurry(asked);
        let method = host::property(METHOD).ok().flatten().unwrap_or_default();
        self.unless_dry_run(status, Reply::failure(failure, &method))
    }

    fn guard(&self, sent: Sent, asked: Asked, stream: u32) -> Fate {
        let Some(decoded) = DecodedPath::new(&sent.path) else { return Fate::Passes };
        let Target::Resource(resource) = decoded.target() else { return Fate::Passes };
        let half = Half::of_group(resource.group);
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
        let (view, all, vanished_after) = (self.view(), self.apiservers(), self.vanished_after());
        let verdict = self
            .with_exclusions(|exclusions| judge(not_found, &resource, asked, &view, all, exclusions, vanished_after));
        let why = match verdict {
            Verdict::Pass => return Fate::Passes,
            Verdict::Refuse(why) => why,
            Verdict::Ask { .. } if self.config.peer_proxying == PeerProxying::DryRun => {
                log::info!("dry run: the 404 for {:?} would be asked about", String::from_utf8_lossy(&sent.path));
                return Fate::Passes;
            }
            Verdict::Ask { whom, expected } => {
                let Sent { path, mark, .. } = sent;
                match self.hold(Waiting { stream, path, mark, half, pending: whom, expected }) {
                    Ok(()) => return Fate::Held,
                    Err(why) => why,
                }
            }
        };
        self.hurry(asked);
        self.unless_dry_run(404, Reply::guarded(why, audit_id))
    }

    /// Which apiserver has answered. For a reroute this is looked up rather than believed: a filter-state value without
    /// a route of its own falls to the default cluster unnoticed.
    fn asked(&self, to: To) -> Asked {
        let To::Peer(meant) = to else { return self.config.local.map_or(Asked::AnyOne, Asked::One) };
        let Ok(Some(answered)) = host::property("xds\0cluster_name") else { return Asked::One(meant) };
        let apiservers = &self.config.apiservers;
        if answered.is_empty() || apiservers.get(meant).is_some_and(|peer| peer.cluster.as_bytes() == answered) {
            return Asked::One(meant);
        }
        self.log_misrouted(meant, &answered);
        let owner = apiservers.iter().position(|peer| peer.cluster.as_bytes() == answered);
        owner.map_or(Asked::Stranger, Asked::One)
    }
}

fn response_status() -> Option<u16> {
    parse_status(&host::response_header(":status").ok().flatten()?)
}

//! One request: request headers in, response headers out. Bodies never come here.

use std::rc::Rc;

use proxy_wasm::traits::{Context, HttpContext};
use proxy_wasm::types::Action;

use super::discovery;
use super::host;
use super::reply::{Reply, Retry};
use super::root::parse_status;
use super::state::Shared;
use crate::config::{PeerProxying, Reroute};
use crate::decision::{Decision, LOOP_HEADER, decide};
use crate::discovery::document::Half;
use crate::guard::held::Waiting;
use crate::guard::{Asked, NotFound, Verdict, judge, looks_like_missing_route};
use crate::local_reply::{Effect, UpstreamFailure};
use crate::quote::quoted_bytes;
use crate::target::{DecodedPath, Resource, Target, without_query};

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

/// How far the stream has come.
enum State {
    /// The request has not passed here. If an answer does, another filter made it.
    New,
    /// The request has been sent.
    Sent(Sent),
    /// Its answer is held. What passes here next is our own answer, or Envoy's if it has waited too long.
    Held(Effect),
    /// The answer has passed.
    Done,
}

/// What the answer needs to know of the request.
pub(super) struct Sent {
    /// If it is about a resource: its path as the client sent it, without the query.
    path: Option<Vec<u8>>,
    /// If it is about discovery that is answered for the whole cluster. Boxed: it is rare.
    pub(super) discovery: Option<Box<discovery::Request>>,
    /// It carries an identity that was set here, and may go over clusters that have it believed.
    pub(super) has_identity: bool,
    pub(super) to: To,
    /// The latest question at that time: an answer to a later one tells what is true now.
    pub(super) mark: u64,
    ended_with_headers: bool,
    reaches_backend: bool,
}

/// Where a request was sent.
#[derive(Clone, Copy)]
pub(super) enum To {
    Here,
    Peer(usize),
}

/// What becomes of an answer.
pub(super) enum Fate {
    Passes,
    Replaced(Reply),
    /// Something else has been sent in its place.
    Answered,
    Held(Effect),
}

impl Http {
    pub(super) fn new(id: u32, shared: Option<Rc<Shared>>) -> Self {
        Self { id, shared, state: State::New }
    }
}

impl Context for Http {}

impl HttpContext for Http {
    fn on_http_request_headers(&mut self, _headers: usize, end_of_stream: bool) -> Action {
        #[cfg(feature = "trap-on-command")]
        host::trap_if(host::request_header(host::TRAP_HEADER));
        let Some(shared) = &self.shared else { return Action::Continue };
        match shared.request(end_of_stream) {
            Ok(sent) => {
                self.state = State::Sent(sent);
                Action::Continue
            }
            Err(reply) => {
                self.state = State::Done;
                reply.send(shared.config.retry_after_seconds);
                Action::Pause
            }
        }
    }

    fn on_http_response_headers(&mut self, _headers: usize, _end_of_stream: bool) -> Action {
        let Some(shared) = &self.shared else { return Action::Continue };
        let fate = match std::mem::replace(&mut self.state, State::Done) {
            State::New | State::Done => Fate::Passes,
            State::Sent(sent) => shared.response(sent, self.id),
            State::Held(effect) => {
                shared.drop_held(self.id);
                response_status().map_or(Fate::Passes, |status| shared.failure(status, || effect))
            }
        };
        match fate {
            Fate::Passes | Fate::Answered => Action::Continue,
            Fate::Replaced(reply) => {
                reply.send(shared.config.retry_after_seconds);
                Action::Continue
            }
            Fate::Held(effect) => {
                self.state = State::Held(effect);
                Action::Pause
            }
        }
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        if let (State::Held(_), Some(shared)) = (&self.state, &self.shared) {
            shared.drop_held(self.id);
        }
    }
}

impl Shared {
    /// Decides about a request and carries the decision out. `Err`: it goes nowhere and is answered with this.
    fn request(&self, ended_with_headers: bool) -> Result<Sent, Reply> {
        if let Reroute::Header { name } = &self.config.reroute {
            // A client must not choose the cluster.
            host::log_failure("removing the rerouting header", host::remove_request_header(name));
        }
        let mut sent = Sent {
            path: None,
            discovery: None,
            has_identity: self.assert_identity()?,
            to: To::Here,
            mark: self.mark(),
            ended_with_headers,
            reaches_backend: false,
        };
        self.route(&mut sent);
        if let (true, To::Here) = (sent.has_identity, sent.to)
            && let Some(cluster) = self.trusted_here()
        {
            host::log_failure("handing on an identity", self.choose(cluster));
        }
        Ok(sent)
    }

    /// Where "here" is for a request that carries an identity set by the filter.
    fn trusted_here(&self) -> Option<&str> {
        match self.config.local {
            Some(local) => self.config.apiservers.get(local)?.front_proxy_cluster.as_deref(),
            None => self.config.identity.front_proxy_cluster.as_deref(),
        }
    }

    fn route(&self, sent: &mut Sent) {
        let Ok(Some(path)) = host::request_header(":path") else { return };
        let path = without_query(path);
        let Some(decoded) = DecodedPath::new(&path) else { return };
        let resource = match decoded.target() {
            Target::Resource(resource) => resource,
            Target::Discovery(target) => return self.discovery_request(target, sent),
            Target::Other => return,
        };
        sent.reaches_backend = resource.reaches_backend();
        let has_loop_header = || !matches!(host::request_header(LOOP_HEADER), Ok(None));
        match decide(&resource, &self.view(), &self.config, has_loop_header, self.random()) {
            Decision::Reroute(peer) if self.config.peer_proxying == PeerProxying::DryRun => {
                // Its answer is not judged either: it would have been another one.
                log::info!("dry run: a request for {} would go to {}", name_of(&resource), self.name_of(peer));
                return;
            }
            Decision::Reroute(peer) => self.reroute(peer, sent),
            Decision::Here(_) => {}
        }
        drop(decoded);
        sent.path = Some(path);
    }

    pub(super) fn reroute(&self, peer: usize, sent: &mut Sent) {
        let Some(apiserver) = self.config.apiservers.get(peer) else { return };
        let trusted = apiserver.front_proxy_cluster.as_deref().filter(|_| sent.has_identity);
        let cluster = trusted.unwrap_or(&apiserver.cluster);
        let marked = host::set_request_header(LOOP_HEADER, "true");
        host::log_failure("rerouting", marked.and_then(|()| self.choose(cluster)));
        // Envoy may have taken half of it, so the answer is looked at as a peer's: the cluster that answered is compared.
        sent.to = To::Peer(peer);
    }

    /// Makes Envoy send the request to a cluster.
    fn choose(&self, cluster: &str) -> Result<(), host::HostStatus> {
        match &self.config.reroute {
            Reroute::FilterState { key } => host::set_filter_state(key, cluster),
            Reroute::Header { name } => host::set_request_header(name, cluster),
        }?;
        host::clear_route_cache()
    }

    /// Looks at an answer.
    fn response(&self, mut sent: Sent, stream: u32) -> Fate {
        // Always of a reroute, for it may have had no effect: a filter-state value without a route of its own falls to
        // the default cluster unnoticed. Of other requests only where it matters.
        let asked_peer = matches!(sent.to, To::Peer(_)).then(|| self.asked(sent.to));
        let asked = || asked_peer.unwrap_or_else(|| self.asked(To::Here));
        let Some(status) = response_status() else { return Fate::Passes };
        if let Some(request) = sent.discovery.take_if(|_| status < 500) {
            return self.discovery_response(status, *request, &sent, asked(), stream);
        }
        match (status, sent.path.take(), sent.to) {
            (404, Some(path), _) => self.guard(path, &sent, asked(), stream),
            (301 | 302 | 303 | 307 | 308, Some(_), To::Peer(_)) => self.unless_dry_run(status, Reply::redirect()),
            (500.., _, _) => {
                let fate = self.failure(status, || sent.effect());
                if matches!(fate, Fate::Replaced(_)) {
                    self.doubt(asked());
                }
                fate
            }
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

    /// Replaces Envoy's own answer for an apiserver that could not be reached.
    fn failure(&self, status: u16, effect: impl FnOnce() -> Effect) -> Fate {
        let details = code_details().unwrap_or_default();
        let Some(failure) = UpstreamFailure::from_details(&details) else { return Fate::Passes };
        self.unless_dry_run(status, Reply::failure(failure, effect()))
    }

    /// A request has failed.
    fn doubt(&self, asked: Asked) {
        if let Asked::One(apiserver) = asked {
            self.avoid(apiserver);
        }
        self.hurry(asked);
    }

    fn guard(&self, path: Vec<u8>, sent: &Sent, asked: Asked, stream: u32) -> Fate {
        let Some(decoded) = DecodedPath::new(&path) else { return Fate::Passes };
        let Target::Resource(resource) = decoded.target() else { return Fate::Passes };
        let half = Half::of_group(resource.group);
        let header = |name| host::response_header(name).ok().flatten();
        let came_from_upstream = came_from_upstream();
        let audit_id = header("audit-id");
        let not_found = NotFound {
            is_by_apiserver: came_from_upstream && audit_id.is_some(),
            looks_like_missing_route: looks_like_missing_route(
                header("content-type").as_deref(),
                header("content-length").as_deref(),
                header("content-encoding").as_deref(),
            ),
        };
        let (view, all, vanished_after) = (self.view(), self.apiservers(), self.vanished_after());
        let verdict = self
            .with_exclusions(|exclusions| judge(not_found, &resource, asked, &view, all, exclusions, vanished_after));
        // An apiserver that knows no route has executed nothing, and Envoy's own 404 was never sent. Something else that
        // has answered may have: what stands between, or a backend that an apiserver hands requests on to.
        let is_by_another = audit_id.is_none() || sent.reaches_backend;
        let may_be_executed = || came_from_upstream && is_by_another && sent.effect() == Effect::Possible;
        let why = match verdict {
            Verdict::Pass => return Fate::Passes,
            Verdict::Refuse(why) => why,
            Verdict::Ask { .. } if self.config.peer_proxying == PeerProxying::DryRun => {
                log::info!("dry run: the apiservers would be asked about {}", name_of(&resource));
                return Fate::Passes;
            }
            Verdict::Ask { whom, expected } => {
                drop(decoded);
                match self.hold(Waiting {
                    stream,
                    path,
                    mark: sent.mark,
                    half,
                    pending: whom,
                    expected,
                    may_be_executed: may_be_executed(),
                }) {
                    Ok(()) => return Fate::Held(sent.effect()),
                    Err(why) => why,
                }
            }
        };
        self.hurry(asked);
        self.unless_dry_run(404, Reply::guarded(why, audit_id, Retry::unless(may_be_executed())))
    }

    /// Which apiserver has answered. The cluster that did is looked up rather than believed: routes can be wrong.
    fn asked(&self, to: To) -> Asked {
        let meant = match to {
            To::Peer(peer) => Some(peer),
            To::Here => self.config.local,
        };
        let believed = meant.map_or(Asked::AnyOne, Asked::One);
        let Some(answered) = answering_cluster() else { return believed };
        let owner = (0..self.config.apiservers.len()).find(|index| self.is_cluster_of(*index, &answered));
        if let Some(meant) = meant.filter(|meant| owner != Some(*meant)) {
            self.log_misrouted(meant, &answered);
        }
        match (owner, to) {
            (Some(owner), _) => Asked::One(owner),
            (None, To::Peer(_)) => Asked::Stranger,
            // The default cluster of a gateway; or of a sidecar whose routes name something else than `local`.
            (None, To::Here) => Asked::AnyOne,
        }
    }

    fn is_cluster_of(&self, apiserver: usize, cluster: &[u8]) -> bool {
        self.config.apiservers.get(apiserver).is_some_and(|apiserver| {
            apiserver.cluster.as_bytes() == cluster
                || apiserver.front_proxy_cluster.as_ref().is_some_and(|trusted| trusted.as_bytes() == cluster)
        })
    }
}

/// The cluster that has answered; `None` where there was none.
fn answering_cluster() -> Option<Vec<u8>> {
    host::property("xds\0cluster_name").ok().flatten().filter(|cluster| !cluster.is_empty())
}

impl Sent {
    /// Asks for the method, which costs a host call.
    pub(super) fn effect(&self) -> Effect {
        let method = host::property(METHOD).ok().flatten().unwrap_or_default();
        Effect::of_request(&method, self.ended_with_headers, self.reaches_backend)
    }
}

/// Whether the answer is not one of Envoy's own, as `%RESPONSE_CODE_DETAILS%` has it.
pub(super) fn came_from_upstream() -> bool {
    code_details().as_deref() == Some(b"via_upstream")
}

fn code_details() -> Option<Vec<u8>> {
    host::property("response\0code_details").ok().flatten()
}

fn response_status() -> Option<u16> {
    parse_status(&host::response_header(":status").ok().flatten()?)
}

/// The type, for a log line: never the path, whose query can hold commands and secrets.
fn name_of(resource: &Resource<'_>) -> String {
    let names = [resource.group, resource.version, resource.resource, resource.subresource].map(quoted_bytes);
    format!("group {} version {} resource {} subresource {}", names[0], names[1], names[2], names[3])
}

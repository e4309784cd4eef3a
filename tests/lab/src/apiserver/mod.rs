//! Stub apiservers: they answer as the recorded kube-apiservers do, from their recorded documents.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! use lab::{Client, StubApiserver, apiserver::{Fault, Scope}};
//!
//! let stub = StubApiserver::builder("cp-1", "1.37.2").start().await.unwrap();
//! let client = Client::plain(stub.addr());
//! let answer = client.get("/apis/apps/v1/namespaces/default/deployments/web").send().await.unwrap();
//! assert_eq!((answer.status, answer.json().unwrap()["servedBy"].as_str()), (200, Some("cp-1")));
//!
//! stub.fail(Scope::Apis, Fault::Status(503, Some(7)));
//! let answer = client.get("/apis").send().await.unwrap();
//! assert_eq!((answer.status, answer.header("retry-after").as_deref()), (503, Some("7")));
//! assert_eq!(stub.requests().len(), 2);
//! # });
//! ```
//!
//! | a request | is answered with |
//! |---|---|
//! | `/api`, `/apis`, aggregated or legacy by Accept; `/apis/G`, `/apis/G/V`, `/api/V`, `/openapi/v3`, `/version` | the recorded documents, or ones made from the edited aggregated documents |
//! | `/openapi/v3/KEY` | a small schema document made from the aggregated document; the wrong `hash`: 301 to the right one; unknown: 404 |
//! | a resource that the stub's own aggregated document lists | 200 (POST: 201) and JSON that names the stub: `servedBy`, also in the header `x-served-by`, the `user` seen, and `receivedBytes` of the request's body; a list has one object, [`THE_OBJECT`]; a GET that accepts a Table gets one |
//! | an object whose name begins with `nope` | 404 Status, "not found" |
//! | a group, version, resource or subresource that it does not list | the 404 of a real apiserver, byte for byte |
//! | a verb that the document does not list | 405 Status |
//! | `watch=true` or the `/watch/` prefix | a stream that the test feeds: [`StubApiserver::push_event`] |
//! | `labelSelector=lab-bytes%3DN` on a collection | a list of N bytes |
//! | exec, attach, portforward, proxy with `Upgrade: websocket` or `SPDY/3.1` | 101, then every byte comes back |
//!
//! Only JSON is spoken (a Status also in YAML and protobuf): other encodings of documents get 406, objects come as JSON
//! whatever is asked.

mod accept;
mod answer;
mod auth;
mod documents;
mod fault;
mod http1;
mod http2;
mod message;
mod openapi;
mod route;
mod server;
mod status;

use std::{
    collections::{HashMap, HashSet},
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use anyhow::{Context, Result};
use bytes::Bytes;
use serde_json::Value;
use tokio_rustls::TlsAcceptor;

pub use answer::{AGGREGATED, BIG_LIST, MISSING, THE_OBJECT};
pub use auth::{ANONYMOUS, FRONT_PROXY};
pub use documents::{ApiServiceOrigin, etag};
pub use fault::{Fault, Gate, Scope};
pub use message::{Body, FILTER_AUTHORITY, HttpVersion, LOOP_HEADER, Request, Response, Subject};
pub use status::{Details, Status};

use crate::{certs::ServerTls, discovery, lock};
use documents::Documents;
use fault::ActiveFault;

type Hook = Arc<dyn Fn(&Request) -> Option<Response> + Send + Sync>;

/// A running stub apiserver; dropping it ends it and its connections.
pub struct StubApiserver {
    shared: Arc<Shared>,
    server: server::Server,
    tls: bool,
}

/// How to start a [`StubApiserver`].
pub struct Builder {
    name: String,
    version: String,
    address: SocketAddr,
    tls: Option<ServerTls>,
    tokens: Option<HashMap<String, String>>,
    without_rights: HashSet<String>,
    starting: bool,
    recording: bool,
}

impl Builder {
    /// Listens on a given address instead of a free port of 127.0.0.1.
    pub fn address(mut self, address: SocketAddr) -> Self {
        self.address = address;
        self
    }

    /// Speaks TLS, and HTTP/2 as well as HTTP/1.1 by ALPN; without it plaintext HTTP/1.1, and HTTP/2 with prior
    /// knowledge.
    pub fn tls(mut self, tls: ServerTls) -> Self {
        self.tls = Some(tls);
        self
    }

    /// Knows this bearer token. Once one is known, unknown ones get 401, and who shows neither token nor certificate
    /// gets 403 (but for `/version` and health); over HTTP/2 either of them also gets a GOAWAY.
    pub fn token(mut self, token: &str, user: &str) -> Self {
        self.tokens.get_or_insert_default().insert(token.to_owned(), user.to_owned());
        self
    }

    /// This user may read discovery roots, `/version` and health, and gets 403 for all else.
    pub fn without_rights(mut self, user: &str) -> Self {
        self.without_rights.insert(user.to_owned());
        self
    }

    /// Starts in the starting mode; see [`StubApiserver::set_starting`].
    pub fn starting(mut self) -> Self {
        self.starting = true;
        self
    }

    /// Records no requests: for benchmarks, where millions of them would fill the memory.
    pub fn without_recording(mut self) -> Self {
        self.recording = false;
        self
    }

    /// Starts it.
    ///
    /// # Errors
    /// The version was not recorded, or the address cannot be had.
    pub async fn start(self) -> Result<StubApiserver> {
        let state = State {
            documents: Documents::recorded(&self.version)?,
            starting: self.starting,
            tokens: self.tokens,
            without_rights: self.without_rights,
            faults: Vec::new(),
            hook: None,
            watches: Vec::new(),
        };
        let shared = Arc::new(Shared {
            name: self.name,
            state: Mutex::new(state),
            recording: self.recording,
            requests: Mutex::new(Vec::new()),
            counter: AtomicU64::new(0),
            failed_handshakes: AtomicU64::new(0),
        });
        let tls = self.tls.is_some();
        let acceptor = self.tls.map(|tls| TlsAcceptor::from(tls.config));
        let server = server::Server::bind(self.address, shared.clone(), acceptor)
            .with_context(|| format!("{} cannot listen on {}", shared.name, self.address))?;
        Ok(StubApiserver { shared, server, tls })
    }
}

impl StubApiserver {
    /// A stub apiserver with a name and a recorded version (one of [`crate::fixtures::VERSIONS`]).
    pub fn builder(name: &str, version: &str) -> Builder {
        Builder {
            name: name.to_owned(),
            version: version.to_owned(),
            address: (Ipv4Addr::LOCALHOST, 0).into(),
            tls: None,
            tokens: None,
            without_rights: HashSet::new(),
            starting: false,
            recording: true,
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Where it listens, or listened while it is stopped.
    pub fn addr(&self) -> SocketAddr {
        self.server.addr()
    }

    /// Whether it speaks TLS.
    pub fn is_tls(&self) -> bool {
        self.tls
    }

    // ---- what reached it ----

    /// All requests so far, oldest first. A request is here as soon as its head has come, answered or not.
    pub fn requests(&self) -> Vec<Request> {
        lock(&self.shared.requests).clone()
    }

    /// The requests for which `wanted` is true.
    pub fn requests_where(&self, mut wanted: impl FnMut(&Request) -> bool) -> Vec<Request> {
        lock(&self.shared.requests).iter().filter(|request| wanted(request)).cloned().collect()
    }

    /// What clients sent: all requests that are neither the filter's polls, nor its questions for APIServices, nor Envoy's
    /// health checks.
    pub fn client_requests(&self) -> Vec<Request> {
        let is_health_check = |request: &Request| request.header("user-agent").as_deref() == Some("Envoy/HC");
        self.requests_where(|request| {
            let is_by_filter = request.is_poll() || request.is_openapi_poll() || request.is_api_services();
            !is_by_filter && !is_health_check(request)
        })
    }

    /// The filter's polls of `/api` and `/apis`.
    pub fn polls(&self) -> Vec<Request> {
        self.requests_where(Request::is_poll)
    }

    /// Forgets all requests so far.
    pub fn clear_requests(&self) {
        lock(&self.shared.requests).clear();
    }

    /// TLS handshakes that failed so far.
    pub fn failed_handshakes(&self) -> u64 {
        self.shared.failed_handshakes.load(Ordering::SeqCst)
    }

    /// Connections accepted so far.
    pub fn connections(&self) -> u64 {
        self.server.connections()
    }

    // ---- what it says ----

    /// Answers as another recorded version from now on; edits are lost.
    ///
    /// # Errors
    /// The version was not recorded.
    pub fn set_version(&self, version: &str) -> Result<()> {
        let documents = Documents::recorded(version)?;
        self.shared.with(|state| state.documents = documents);
        Ok(())
    }

    /// Replaces the aggregated document of `/apis`; everything else follows from it.
    pub fn set_apis(&self, document: Value) {
        self.shared.with(|state| state.documents.set_apis(document));
    }

    /// Replaces the aggregated document of `/api`; everything else follows from it.
    pub fn set_api(&self, document: Value) {
        self.shared.with(|state| state.documents.set_api(document));
    }

    /// Edits the aggregated document of `/apis`; [`crate::discovery`] has the usual edits.
    pub fn edit_apis(&self, edit: impl FnOnce(&mut Value)) {
        self.shared.with(|state| {
            let mut document = state.documents.apis.value.clone();
            edit(&mut document);
            state.documents.set_apis(document);
        });
    }

    /// Edits the aggregated document of `/api`.
    pub fn edit_api(&self, edit: impl FnOnce(&mut Value)) {
        self.shared.with(|state| {
            let mut document = state.documents.api.value.clone();
            edit(&mut document);
            state.documents.set_api(document);
        });
    }

    /// The aggregated document of `/apis` as it is served.
    pub fn apis_text(&self) -> Bytes {
        self.shared.with(|state| state.documents.apis.text.clone())
    }

    /// The ETag, with its quotes, of the aggregated document of `/apis`.
    pub fn apis_etag(&self) -> String {
        self.shared.with(|state| state.documents.apis.etag.clone())
    }

    /// The ETag, with its quotes, of the aggregated document of `/api`.
    pub fn api_etag(&self) -> String {
        self.shared.with(|state| state.documents.api.etag.clone())
    }

    /// The aggregated document of `/api` as it is served.
    pub fn api_text(&self) -> Bytes {
        self.shared.with(|state| state.documents.api.text.clone())
    }

    /// Adds a resource to the group-version of `/apis` as a CustomResourceDefinition or an aggregated API does: to the
    /// document and, where its group-version is new, to the list of APIServices.
    pub fn add_api(&self, group: &str, version: &str, resource: discovery::Resource, origin: ApiServiceOrigin) {
        self.edit_apis(|apis| discovery::add_resource(apis, group, version, resource));
        self.shared.with(|state| state.documents.add_api_service(group, version, origin));
    }

    /// Adds an APIService without touching the documents.
    pub fn add_api_service(&self, group: &str, version: &str, origin: ApiServiceOrigin) {
        self.shared.with(|state| state.documents.add_api_service(group, version, origin));
    }

    /// Removes an APIService, for instance `v1.storagemigration.k8s.io`, without touching the documents.
    pub fn remove_api_service(&self, name: &str) {
        self.shared.with(|state| state.documents.remove_api_service(name));
    }

    /// While starting, an apiserver answers for unknown groups with 503 and `Retry-After: 5`, and is not ready.
    pub fn set_starting(&self, starting: bool) {
        self.shared.with(|state| state.starting = starting);
    }

    // ---- watches ----

    /// Sends an event to all open watches.
    pub fn push_event(&self, event: &Value) {
        self.push_event_where(event, |_| true);
    }

    /// Sends an event to the open watches of one resource, for instance `configmaps`.
    pub fn push_event_to(&self, resource: &str, event: &Value) {
        self.push_event_where(event, |have| have == resource);
    }

    /// How many watches are open; a watch whose client is gone is open until that is noticed.
    pub fn watches(&self) -> usize {
        self.shared.with(|state| {
            state.watches.retain(|watch| !watch.sender.is_closed());
            state.watches.len()
        })
    }

    /// Ends all open watches in an orderly way.
    pub fn end_watches(&self) {
        self.shared.with(|state| state.watches.clear());
    }

    fn push_event_where(&self, event: &Value, wanted: impl Fn(&str) -> bool) {
        let line = Bytes::from(format!("{event}\n"));
        self.shared.with(|state| {
            state.watches.retain(|watch| !wanted(&watch.resource) || watch.sender.send(line.clone()).is_ok());
        });
    }

    // ---- failing ----

    /// Asked before everything else, faults included; `None` lets the request pass on to them. Replaces the hook that
    /// was set before.
    pub fn respond_with(&self, hook: impl Fn(&Request) -> Option<Response> + Send + Sync + 'static) {
        self.shared.with(|state| state.hook = Some(Arc::new(hook)));
    }

    /// Removes the hook.
    pub fn respond_as_usual(&self) {
        self.shared.with(|state| state.hook = None);
    }

    /// Fails from now on. Of several faults the one set first goes before. Returns a number for [`Self::heal_one`].
    pub fn fail(&self, scope: Scope, fault: Fault) -> u64 {
        self.add_fault(scope, fault, None)
    }

    /// Fails the next `times` requests of that scope.
    pub fn fail_times(&self, times: u32, scope: Scope, fault: Fault) -> u64 {
        self.add_fault(scope, fault, Some(times))
    }

    /// Ends all faults. Requests that already hang go on hanging.
    pub fn heal(&self) {
        self.shared.with(|state| state.faults.clear());
    }

    /// Ends one fault.
    pub fn heal_one(&self, fault: u64) {
        self.shared.with(|state| state.faults.retain(|have| have.id != fault));
    }

    fn add_fault(&self, scope: Scope, fault: Fault, left: Option<u32>) -> u64 {
        let id = self.shared.next_id();
        self.shared.with(|state| state.faults.push(ActiveFault { id, scope, fault, left }));
        id
    }

    /// Refuses new connections; open ones live on. The port stays its own.
    pub async fn refuse(&self) {
        self.server.refuse().await;
    }

    /// Refuses new connections and ends the open ones, as a killed process does. The port stays its own.
    pub async fn stop(&self) {
        self.server.refuse().await;
        self.server.close_connections().await;
    }

    /// Ends the open connections; new ones are welcome.
    pub async fn close_connections(&self) {
        self.server.close_connections().await;
    }

    /// Listens again after [`Self::stop`] or [`Self::refuse`], on the same port.
    ///
    /// # Errors
    /// The port cannot be had again.
    pub async fn restart(&self) -> Result<()> {
        self.server.listen().with_context(|| format!("{} cannot listen again on {}", self.name(), self.addr()))
    }
}

/// What a connection knows of its client.
#[derive(Debug, Clone, Default)]
pub(crate) struct Peer {
    pub(crate) connection: u64,
    pub(crate) subject: Option<Subject>,
    pub(crate) server_name: Option<String>,
}

/// What the test and the connections share.
pub(crate) struct Shared {
    name: String,
    state: Mutex<State>,
    recording: bool,
    requests: Mutex<Vec<Request>>,
    counter: AtomicU64,
    failed_handshakes: AtomicU64,
}

pub(crate) struct State {
    documents: Documents,
    starting: bool,
    tokens: Option<HashMap<String, String>>,
    without_rights: HashSet<String>,
    faults: Vec<ActiveFault>,
    hook: Option<Hook>,
    watches: Vec<answer::Watch>,
}

impl Shared {
    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut lock(&self.state))
    }

    fn next_id(&self) -> u64 {
        self.counter.fetch_add(1, Ordering::SeqCst)
    }

    fn record(&self, request: &Request) {
        if self.recording {
            lock(&self.requests).push(request.clone());
        }
    }

    fn note_body(&self, request: &Request) {
        if !self.recording {
            return;
        }
        let mut requests = lock(&self.requests);
        if let Some(recorded) = requests.iter_mut().rev().find(|recorded| recorded.id == request.id) {
            recorded.body_length = request.body_length;
            recorded.body = request.body.clone();
        }
    }

    /// `None`: reset.
    async fn answer(&self, request: &Request) -> Option<Response> {
        let hook = self.with(|state| state.hook.clone());
        if let Some(response) = hook.and_then(|hook| hook(request)) {
            return Some(response);
        }
        let mut outcome = None;
        for fault in self.faults_of(request) {
            match fault {
                Fault::Delay(time) => tokio::time::sleep(time).await,
                Fault::Hold(gate) => gate.pass().await,
                fault => outcome = outcome.or(Some(fault)),
            }
        }
        let usual = || self.with(|state| answer::answer(&self.name, state, request));
        match outcome {
            None => Some(usual()),
            Some(Fault::Reset) => None,
            Some(Fault::Hang) => std::future::pending().await,
            Some(fault) => Some(broken(fault, request, usual)),
        }
    }

    fn faults_of(&self, request: &Request) -> Vec<Fault> {
        self.with(|state| {
            let mut found = Vec::new();
            for active in state.faults.iter_mut().filter(|active| active.scope.concerns(request)) {
                match &mut active.left {
                    Some(0) => continue,
                    Some(left) => *left -= 1,
                    None => {}
                }
                found.push(active.fault.clone());
            }
            found
        })
    }
}

/// The answer of a fault that has one.
fn broken(fault: Fault, request: &Request, usual: impl FnOnce() -> Response) -> Response {
    match fault {
        Fault::ResetAfterHeaders => cut(usual(), 0, true),
        Fault::ResetMidBody => cut(usual(), 2, true),
        Fault::CutBody => cut(usual(), 2, false),
        Fault::Status(code, retry_after) => {
            let reason = if code == 429 { "TooManyRequests" } else { "ServiceUnavailable" };
            let response = Status::new(code, reason, "the lab says so").response(request);
            match retry_after {
                Some(seconds) => response.header("Retry-After", seconds.to_string()).sorted(),
                None => response.sorted(),
            }
        }
        Fault::EmptyDocument => answer::broken_document(discovery::text(&discovery::empty())),
        Fault::WrongKind => {
            answer::broken_document(r#"{"kind":"ConfigMapList","apiVersion":"v1","metadata":{},"items":[]}"#)
        }
        Fault::NotJson => answer::broken_document("<html>no JSON at all</html>"),
        Fault::NotUtf8 => answer::broken_document(&b"{\"kind\":\"APIGroupDiscoveryList\",\"x\":\"\xff\xfe\"}"[..]),
        Fault::Oversized(length) => {
            let before = br#"{"kind":"APIGroupDiscoveryList","apiVersion":"apidiscovery.k8s.io/v2","metadata":{},"items":[],"filling":""#;
            let body = Body::Filled { before: Bytes::from_static(before), length, after: Bytes::from_static(b"\"}\n") };
            Response { body, ..answer::broken_document("") }
        }
        Fault::Answer(answer) => answer(request),
        // Handled before.
        Fault::Reset | Fault::Hang | Fault::Hold(_) | Fault::Delay(_) => usual(),
    }
}

/// Of the body the part `1/divisor` is sent; 0: nothing.
fn cut(response: Response, divisor: usize, reset: bool) -> Response {
    let (body, announced) = match &response.body {
        Body::Full(body) => (body.clone(), Some(body.len() as u64)),
        Body::Chunked(body) => (body.clone(), None),
        Body::Filled { before, .. } => (before.clone(), None),
        _ => (Bytes::new(), None),
    };
    let sent = body.slice(..body.len().checked_div(divisor).unwrap_or(0));
    Response { body: Body::Cut { sent, announced, reset }, ..response }
}

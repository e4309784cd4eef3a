//! The state of one VM, and what its host functions do to it.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::Duration;

use crate::headers::Headers;
use crate::process::{Host, Metric, MetricKind, RepeatedHeaders, VmOptions};

/// The statuses of host functions.
///
/// The SDK declares its imports with an enum of those marked (SDK) only: any other status answered to one of ITS
/// imports is undefined behaviour. Imports of a guest's own that return `u32` can be answered anything.
pub mod status {
    /// Done (SDK).
    pub const OK: u32 = 0;
    /// There is no such thing (SDK).
    pub const NOT_FOUND: u32 = 1;
    /// The arguments are wrong, or not in this phase (SDK).
    pub const BAD_ARGUMENT: u32 = 2;
    /// A value could not be serialized (SDK).
    pub const SERIALIZATION_FAILURE: u32 = 3;
    /// A value could not be parsed (SDK).
    pub const PARSE_FAILURE: u32 = 4;
    /// Memory of the guest could not be read or written.
    pub const INVALID_MEMORY_ACCESS: u32 = 6;
    /// The queue is empty (SDK).
    pub const EMPTY: u32 = 7;
    /// The value was changed by another (SDK).
    pub const CAS_MISMATCH: u32 = 8;
    /// Anything else that failed (SDK).
    pub const INTERNAL_FAILURE: u32 = 10;
    /// The connection broke; also the code that `proxy_get_status` gives after a failed call.
    pub const BROKEN_CONNECTION: u32 = 11;
    /// The function is not implemented.
    pub const UNIMPLEMENTED: u32 = 12;
}

/// A plugin's root context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RootId(pub u32);

/// A stream's context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(pub u32);

/// What a callback let Envoy do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Go on.
    Continue,
    /// Hold the stream. A callback that sent a local reply holds it, whatever it returned.
    Pause,
}

/// How far the request, or the response, of a stream has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It has not reached the filter.
    Waiting,
    /// The filter holds it.
    Held,
    /// The filter let it pass.
    Passed,
    /// The filter replaced it by a local reply.
    Replied,
}

/// A response that the filter made itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalReply {
    /// The status.
    pub status: u32,
    /// The headers that the filter gave.
    pub headers: Headers,
    /// The body.
    pub body: Vec<u8>,
    /// The details, which go to `response.code_details`.
    pub details: Vec<u8>,
    /// The gRPC status; -1 is none.
    pub grpc_status: i32,
}

impl LocalReply {
    /// The body as text, with what is not UTF-8 replaced.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// A stream as it is after a callback.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The stream.
    pub stream: StreamId,
    /// What the last headers callback of the stream let Envoy do.
    pub action: Action,
    /// How far the request has come.
    pub request: Progress,
    /// How far the response has come.
    pub response: Progress,
    /// The reply of the filter, if there is one.
    pub local_reply: Option<LocalReply>,
    /// The request headers, as the filter left them.
    pub request_headers: Headers,
    /// The response headers, as the filter left them; of a local reply only what went through the response callback.
    pub response_headers: Headers,
    /// The properties that the filter set: filter state, without the prefix `wasm.`.
    pub filter_state: BTreeMap<String, Vec<u8>>,
    /// How often the route was cleared: by the foreign function, and by every change of the request headers.
    pub route_cache_cleared: usize,
    /// Whether the filter reset the stream.
    pub reset: bool,
}

impl Outcome {
    /// A property that the filter set, if it is text.
    pub fn filter_state_text(&self, key: &str) -> Option<&str> {
        self.filter_state.get(key).and_then(|value| std::str::from_utf8(value).ok())
    }
}

/// A call of the filter to a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpCall {
    /// Its token.
    pub token: u32,
    /// The cluster.
    pub upstream: String,
    /// The request headers, with the content length that Envoy adds.
    pub headers: Headers,
    /// The request body.
    pub body: Vec<u8>,
    /// The request trailers.
    pub trailers: Headers,
    /// The timeout; zero is none.
    pub timeout: Duration,
    /// The root context that owns the call.
    pub root: RootId,
    /// The context whose callback made the call: the root's own id, or a stream's. The SDK forgets a call from a stream
    /// when the stream ends.
    pub context: u32,
    /// When it was made.
    pub at: Duration,
}

impl HttpCall {
    /// The request path.
    pub fn path(&self) -> &str {
        self.headers.text(":path").unwrap_or_default()
    }

    /// When it times out.
    pub fn deadline(&self) -> Option<Duration> {
        (!self.timeout.is_zero()).then(|| self.at.saturating_add(self.timeout))
    }
}

/// One call of a host function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostCall {
    /// The function.
    pub function: &'static str,
    /// What was asked for: the header, property path (dotted), key, queue, cluster, metric or message.
    pub subject: String,
    /// What it answered.
    pub status: u32,
    /// The size of what was copied into memory allocated in the guest, if anything was.
    pub copied: Option<usize>,
}

/// A log level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// 0
    Trace,
    /// 1
    Debug,
    /// 2
    Info,
    /// 3
    Warn,
    /// 4
    Error,
    /// 5
    Critical,
}

/// A line that the filter logged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLine {
    /// Its level.
    pub level: Level,
    /// Its text.
    pub message: String,
}

pub(crate) const MAP_REQUEST_HEADERS: u32 = 0;
pub(crate) const MAP_RESPONSE_HEADERS: u32 = 2;
pub(crate) const MAP_CALL_HEADERS: u32 = 6;
pub(crate) const MAP_CALL_TRAILERS: u32 = 7;

pub(crate) struct Root {
    pub(crate) configuration: Vec<u8>,
    pub(crate) tick: Option<Tick>,
    /// `proxy_on_done` answered false: it is deleted when the guest says so.
    pub(crate) pending_done: bool,
    properties: HashMap<Vec<u8>, Vec<u8>>,
}

#[derive(Clone, Copy)]
pub(crate) struct Tick {
    pub(crate) period: Duration,
    pub(crate) due: Duration,
}

pub(crate) struct Stream {
    pub(crate) root: u32,
    pub(crate) action: Action,
    pub(crate) request: Progress,
    pub(crate) response: Progress,
    pub(crate) request_headers: Headers,
    pub(crate) response_headers: Headers,
    /// Whether the guest can see the map now.
    pub(crate) request_visible: bool,
    pub(crate) response_visible: bool,
    pub(crate) properties: HashMap<Vec<u8>, Vec<u8>>,
    filter_state: BTreeMap<Vec<u8>, Vec<u8>>,
    cleared: usize,
    pub(crate) reply_asked: bool,
    pub(crate) reply: Option<LocalReply>,
    pub(crate) reset: bool,
}

pub(crate) struct CallAnswer {
    pub(crate) root: u32,
    pub(crate) headers: Headers,
    pub(crate) body: Vec<u8>,
    pub(crate) trailers: Headers,
}

pub(crate) enum Deferred {
    Reply(u32, LocalReply),
    Continue(u32, bool),
    Delete(u32),
}

struct Forced {
    status: u32,
    left: Option<usize>,
}

const HOST_CALLS_KEPT: usize = 65_536;

pub(crate) struct State {
    pub(crate) host: Host,
    pub(crate) vm: u64,
    pub(crate) options: VmOptions,
    last_context: u32,
    last_token: u32,
    /// The context whose callback runs, and the one that the guest has put in its place; 0 is none.
    pub(crate) current: u32,
    pub(crate) effective: u32,
    pub(crate) roots: BTreeMap<u32, Root>,
    pub(crate) streams: BTreeMap<u32, Stream>,
    /// The root that is being configured.
    pub(crate) configuring: Option<u32>,
    /// The stream that is being logged.
    pub(crate) logging: Option<u32>,
    pub(crate) calls: BTreeMap<u32, HttpCall>,
    pub(crate) answer: Option<CallAnswer>,
    pub(crate) call_status: (u32, Vec<u8>),
    pub(crate) known_clusters: Option<BTreeSet<String>>,
    pub(crate) refused: BTreeSet<String>,
    metric_ids: HashMap<u32, (MetricKind, String)>,
    forced: HashMap<&'static str, Forced>,
    pub(crate) host_calls: VecDeque<HostCall>,
    pub(crate) logs: Vec<LogLine>,
    pub(crate) log_level: Level,
    pub(crate) deferred: VecDeque<Deferred>,
    /// A local reply was sent in this callback.
    pub(crate) stop_iteration: bool,
    pub(crate) misuse: Vec<String>,
    pub(crate) tolerant: bool,
}

thread_local! {
    static STATE: RefCell<Option<State>> = const { RefCell::new(None) };
}

/// Makes this thread a VM.
pub(crate) fn install(state: State) {
    STATE.with(|slot| *slot.borrow_mut() = Some(state));
}

/// The state of the VM of this thread, if it is one.
pub(crate) fn with<R>(run: impl FnOnce(&mut State) -> R) -> Option<R> {
    STATE.try_with(|slot| slot.try_borrow_mut().ok()?.as_mut().map(run)).ok().flatten()
}

impl State {
    pub(crate) fn new(host: Host, options: VmOptions) -> Self {
        let vm = host.process().allocate_vm();
        Self {
            host,
            vm,
            options,
            last_context: 0,
            last_token: 0,
            current: 0,
            effective: 0,
            roots: BTreeMap::new(),
            streams: BTreeMap::new(),
            configuring: None,
            logging: None,
            calls: BTreeMap::new(),
            answer: None,
            call_status: (0, Vec::new()),
            known_clusters: None,
            refused: BTreeSet::new(),
            metric_ids: HashMap::new(),
            forced: HashMap::new(),
            host_calls: VecDeque::new(),
            logs: Vec::new(),
            log_level: Level::Trace,
            deferred: VecDeque::new(),
            stop_iteration: false,
            misuse: Vec::new(),
            tolerant: false,
        }
    }

    pub(crate) fn add_root(&mut self, configuration: Vec<u8>) -> u32 {
        self.last_context += 1;
        let root = Root { configuration, tick: None, pending_done: false, properties: HashMap::new() };
        self.roots.insert(self.last_context, root);
        self.last_context
    }

    pub(crate) fn add_stream(&mut self, root: u32) -> u32 {
        self.last_context += 1;
        let stream = Stream {
            root,
            action: Action::Continue,
            request: Progress::Waiting,
            response: Progress::Waiting,
            request_headers: Headers::new(),
            response_headers: Headers::new(),
            request_visible: false,
            response_visible: false,
            properties: HashMap::new(),
            filter_state: BTreeMap::new(),
            cleared: 0,
            reply_asked: false,
            reply: None,
            reset: false,
        };
        self.streams.insert(self.last_context, stream);
        self.last_context
    }

    /// A root is gone: its timer and its calls go with it.
    pub(crate) fn drop_root(&mut self, root: u32) {
        self.roots.remove(&root);
        self.calls.retain(|_, call| call.root.0 != root);
    }

    pub(crate) fn outcome(&self, id: u32) -> Option<Outcome> {
        let stream = self.streams.get(&id)?;
        Some(Outcome {
            stream: StreamId(id),
            action: stream.action,
            request: stream.request,
            response: stream.response,
            local_reply: stream.reply.clone(),
            request_headers: stream.request_headers.clone(),
            response_headers: stream.response_headers.clone(),
            filter_state: stream
                .filter_state
                .iter()
                .map(|(key, value)| (String::from_utf8_lossy(key).into_owned(), value.clone()))
                .collect(),
            route_cache_cleared: stream.cleared,
            reset: stream.reset,
        })
    }

    pub(crate) fn force(&mut self, function: &'static str, status: u32, left: Option<usize>) {
        self.forced.insert(function, Forced { status, left });
    }

    pub(crate) fn unforce(&mut self) {
        self.forced.clear();
    }

    /// The status that the test wants of the next call.
    pub(crate) fn forced(&mut self, function: &str) -> Option<u32> {
        let forced = self.forced.get_mut(function)?;
        match &mut forced.left {
            None => Some(forced.status),
            Some(0) => None,
            Some(left) => {
                *left -= 1;
                Some(forced.status)
            }
        }
    }

    pub(crate) fn record(&mut self, call: HostCall) {
        if self.host_calls.len() == HOST_CALLS_KEPT {
            self.host_calls.pop_front();
        }
        self.host_calls.push_back(call);
    }

    pub(crate) fn set_root_property(&mut self, root: u32, path: &str, value: &[u8]) {
        if let Some(root) = self.roots.get_mut(&root) {
            root.properties.insert(path_bytes(path), value.to_vec());
        }
    }

    pub(crate) fn set_stream_property(&mut self, stream: u32, path: &str, value: &[u8]) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.properties.insert(path_bytes(path), value.to_vec());
        }
    }

    /// The context that host functions work on.
    fn context(&self) -> u32 {
        if self.effective != 0
            && (self.roots.contains_key(&self.effective) || self.streams.contains_key(&self.effective))
        {
            self.effective
        } else {
            self.current
        }
    }

    fn root_of(&self, context: u32) -> u32 {
        self.streams.get(&context).map_or(context, |stream| stream.root)
    }

    fn stream(&mut self) -> Option<&mut Stream> {
        let context = self.context();
        self.streams.get_mut(&context)
    }

    // Header maps.

    fn map(&self, kind: u32) -> Option<&Headers> {
        let context = self.context();
        let stream = self.streams.get(&context);
        let logging = self.logging == Some(context);
        match kind {
            MAP_REQUEST_HEADERS => {
                stream.filter(|stream| stream.request_visible || logging).map(|stream| &stream.request_headers)
            }
            MAP_RESPONSE_HEADERS => {
                stream.filter(|stream| stream.response_visible || logging).map(|stream| &stream.response_headers)
            }
            MAP_CALL_HEADERS | MAP_CALL_TRAILERS => {
                let root = self.root_of(context);
                let answer = self.answer.as_ref().filter(|answer| answer.root == root)?;
                if kind == MAP_CALL_HEADERS {
                    Some(&answer.headers)
                } else {
                    Some(&answer.trailers).filter(|trailers| !trailers.is_empty())
                }
            }
            _ => None,
        }
    }

    fn change_map(&mut self, kind: u32, change: impl FnOnce(&mut Headers)) -> Result<(), u32> {
        let stream = self.stream().ok_or(status::BAD_ARGUMENT)?;
        match kind {
            MAP_REQUEST_HEADERS if stream.request_visible => {
                change(&mut stream.request_headers);
                stream.cleared += 1;
                Ok(())
            }
            MAP_RESPONSE_HEADERS if stream.response_visible => {
                change(&mut stream.response_headers);
                Ok(())
            }
            _ => Err(status::BAD_ARGUMENT),
        }
    }

    pub(crate) fn header_get(&self, kind: u32, name: &str) -> Result<Vec<u8>, u32> {
        let Some(map) = self.map(kind) else {
            let logging = self.logging == Some(self.context()) && kind < 4;
            return Err(if logging { status::NOT_FOUND } else { status::BAD_ARGUMENT });
        };
        let joined = self.host.process().repeated == RepeatedHeaders::Joined;
        let value = if joined { map.joined(name) } else { map.get(name).map(<[u8]>::to_vec) };
        value.ok_or(status::NOT_FOUND)
    }

    pub(crate) fn header_pairs(&self, kind: u32) -> Result<Vec<u8>, u32> {
        // Envoy gives an empty list for a map that it does not have.
        if kind > 8 {
            Err(status::BAD_ARGUMENT)
        } else {
            Ok(self.map(kind).map(Headers::serialize).unwrap_or_default())
        }
    }

    pub(crate) fn header_pairs_set(&mut self, kind: u32, pairs: &[u8]) -> Result<(), u32> {
        self.change_map(kind, |map| *map = Headers::deserialize(pairs))
    }

    pub(crate) fn header_set(&mut self, kind: u32, name: &str, value: &[u8]) -> Result<(), u32> {
        self.change_map(kind, |map| map.set(name, value))
    }

    pub(crate) fn header_add(&mut self, kind: u32, name: &str, value: &[u8]) -> Result<(), u32> {
        self.change_map(kind, |map| map.add(name, value))
    }

    pub(crate) fn header_remove(&mut self, kind: u32, name: &str) -> Result<(), u32> {
        self.change_map(kind, |map| map.remove(name))
    }

    // Buffers.

    pub(crate) fn buffer(&self, kind: u32, start: usize, max: usize) -> Result<Vec<u8>, u32> {
        let root = self.root_of(self.context());
        let bytes: &[u8] = match kind {
            // No bodies are modelled.
            0..=3 | 5 | 8 => &[],
            4 => match &self.answer {
                Some(answer) if answer.root == root => &answer.body,
                _ => return Err(status::NOT_FOUND),
            },
            6 => &self.options.vm_configuration,
            7 => match self.configuring.and_then(|id| self.roots.get(&id)) {
                Some(root) => &root.configuration,
                None => return Err(status::NOT_FOUND),
            },
            _ => return Err(status::BAD_ARGUMENT),
        };
        let end = start.checked_add(max).ok_or(status::BAD_ARGUMENT)?.min(bytes.len());
        Ok(bytes.get(start..end).unwrap_or_default().to_vec())
    }

    // Properties.

    pub(crate) fn property(&self, path: &[u8]) -> Result<Vec<u8>, u32> {
        let path = path.strip_suffix(&[0]).unwrap_or(path);
        let context = self.context();
        let stream = self.streams.get(&context);
        let root = self.roots.get(&self.root_of(context));
        if let Some(value) = stream.and_then(|stream| stream.properties.get(path)) {
            return Ok(value.clone());
        }
        if let Some(value) = root.and_then(|root| root.properties.get(path)) {
            return Ok(value.clone());
        }
        match path {
            b"plugin_vm_id" => return Ok(self.options.vm_id.clone().into_bytes()),
            b"plugin_name" | b"plugin_root_id" => return Ok(Vec::new()),
            _ => {}
        }
        let stream = stream.ok_or(status::NOT_FOUND)?;
        let state = path.strip_prefix(b"filter_state\0wasm.".as_slice()).unwrap_or(path);
        if let Some(value) = stream.filter_state.get(state) {
            return Ok(value.clone());
        }
        let header = |name: &str| {
            let seen = stream.request_visible || self.logging == Some(context);
            stream.request_headers.get(name).filter(|_| seen).map(<[u8]>::to_vec)
        };
        let code = || stream.response_headers.text(":status")?.parse::<i64>().ok();
        match path {
            b"request\0method" => header(":method"),
            b"request\0path" => header(":path"),
            b"request\0host" => header(":authority"),
            b"request\0scheme" => header(":scheme"),
            b"request\0id" => header("x-request-id"),
            b"request\0useragent" => header("user-agent"),
            b"response\0code" => code().map(|code| code.to_le_bytes().to_vec()),
            b"response\0flags" => Some(0i64.to_le_bytes().to_vec()),
            _ => None,
        }
        .ok_or(status::NOT_FOUND)
    }

    pub(crate) fn property_set(&mut self, path: &[u8], value: &[u8]) -> Result<(), u32> {
        let stream = self.stream().ok_or(status::NOT_FOUND)?;
        stream.filter_state.insert(path.to_vec(), value.to_vec());
        Ok(())
    }

    pub(crate) fn foreign(&mut self, name: &str) -> Result<Vec<u8>, u32> {
        if name != "clear_route_cache" {
            return Err(status::NOT_FOUND);
        }
        // Foreign functions go by the context of the callback, not by the effective one.
        if let Some(stream) = self.streams.get_mut(&self.current) {
            stream.cleared += 1;
        }
        Ok(Vec::new())
    }

    // Shared data and queues.

    pub(crate) fn shared_get(&self, key: &[u8]) -> Result<(Vec<u8>, u32), u32> {
        self.host.process().shared_get(&self.options.vm_id, key)
    }

    pub(crate) fn shared_set(&mut self, key: &[u8], value: &[u8], cas: u32) -> Result<(), u32> {
        self.host.process().shared_set(&self.options.vm_id, key, value, cas)
    }

    pub(crate) fn queue_register(&mut self, name: &[u8]) -> Result<u32, u32> {
        let root = self.root_of(self.context());
        Ok(self.host.process().queue_register(&self.options.vm_id, name, self.vm, root))
    }

    pub(crate) fn queue_resolve(&self, vm_id: &str, name: &[u8]) -> Result<u32, u32> {
        let vm_id = if vm_id.is_empty() { &self.options.vm_id } else { vm_id };
        self.host.process().queue_resolve(vm_id, name)
    }

    // Calls.

    pub(crate) fn http_call(
        &mut self,
        upstream: String,
        headers: Headers,
        body: Vec<u8>,
        trailers: Headers,
        timeout: u32,
    ) -> Result<u32, u32> {
        let known = self.known_clusters.as_ref().is_none_or(|known| known.contains(&upstream));
        let root = self.root_of(self.context());
        let required = [":method", ":path", ":authority"];
        if !known || i32::try_from(timeout).is_err() || !self.roots.contains_key(&root) {
            return Err(status::BAD_ARGUMENT);
        }
        if required.iter().any(|name| headers.get(name).is_none()) {
            return Err(status::BAD_ARGUMENT);
        }
        if self.refused.contains(&upstream) {
            return Err(status::INTERNAL_FAILURE);
        }
        let mut headers = headers;
        if !body.is_empty() {
            headers.set("content-length", body.len().to_string().as_bytes());
        }
        self.last_token += 1;
        let call = HttpCall {
            token: self.last_token,
            upstream,
            headers,
            body,
            trailers,
            timeout: Duration::from_millis(timeout.into()),
            root: RootId(root),
            context: self.current,
            at: self.host.time(),
        };
        self.calls.insert(self.last_token, call);
        Ok(self.last_token)
    }

    // Streams.

    pub(crate) fn local_reply(&mut self, reply: LocalReply) -> Result<(), u32> {
        let context = self.context();
        self.stop_iteration = true;
        match self.streams.get_mut(&context) {
            Some(stream) if stream.reply_asked => {
                self.misuse.push(format!("a second local reply ({}) on stream {context}", reply.status));
            }
            Some(stream) => {
                stream.reply_asked = true;
                self.deferred.push_back(Deferred::Reply(context, reply));
            }
            None => self.misuse.push(format!("a local reply ({}) with no stream", reply.status)),
        }
        Ok(())
    }

    pub(crate) fn continue_stream(&mut self, kind: u32) -> Result<(), u32> {
        if kind > 1 {
            return Err(status::BAD_ARGUMENT);
        }
        let context = self.context();
        match self.streams.get_mut(&context) {
            Some(stream) => {
                // Envoy forgets the request headers with either kind.
                stream.request_visible = false;
                self.deferred.push_back(Deferred::Continue(context, kind == 1));
            }
            None => self.misuse.push("a continuation with no stream".to_owned()),
        }
        Ok(())
    }

    pub(crate) fn close_stream(&mut self, kind: u32) -> Result<(), u32> {
        if kind > 3 {
            return Err(status::BAD_ARGUMENT);
        }
        if let Some(stream) = self.stream() {
            stream.reset = true;
        }
        Ok(())
    }

    pub(crate) fn set_effective(&mut self, context: u32) -> Result<(), u32> {
        if !self.roots.contains_key(&context) && !self.streams.contains_key(&context) {
            return Err(status::BAD_ARGUMENT);
        }
        self.effective = context;
        Ok(())
    }

    pub(crate) fn done(&mut self) -> Result<(), u32> {
        let id = self.root_of(self.context());
        let root = self.roots.get_mut(&id).filter(|root| root.pending_done).ok_or(status::NOT_FOUND)?;
        root.pending_done = false;
        self.deferred.push_back(Deferred::Delete(id));
        Ok(())
    }

    pub(crate) fn tick_period(&mut self, period: u32) -> Result<(), u32> {
        let now = self.host.time();
        let id = self.root_of(self.context());
        let root = self.roots.get_mut(&id).ok_or(status::BAD_ARGUMENT)?;
        let period = Duration::from_millis(period.into());
        root.tick = (!period.is_zero()).then(|| Tick { period, due: now + period });
        Ok(())
    }

    // Metrics. The kind is in the low bits of an id, as in Envoy; every definition gives a new id.

    pub(crate) fn metric_define(&mut self, kind: u32, name: &str) -> Result<u32, u32> {
        let code = kind;
        let kind = match kind {
            0 => MetricKind::Counter,
            1 => MetricKind::Gauge,
            2 => MetricKind::Histogram,
            _ => return Err(status::BAD_ARGUMENT),
        };
        let id = (self.metric_ids.len() as u32 + 1) * 4 + code;
        self.metric_ids.insert(id, (kind, name.to_owned()));
        self.host.process().metrics.entry((kind, name.to_owned())).or_insert_with(|| Metric {
            name: name.to_owned(),
            kind,
            value: 0,
            samples: Vec::new(),
        });
        Ok(id)
    }

    fn metric<R>(&mut self, id: u32, run: impl FnOnce(&mut Metric) -> Result<R, u32>) -> Result<R, u32> {
        if id % 4 == 3 {
            return Err(status::BAD_ARGUMENT);
        }
        let key = self.metric_ids.get(&id).ok_or(status::NOT_FOUND)?;
        run(self.host.process().metrics.get_mut(key).ok_or(status::NOT_FOUND)?)
    }

    pub(crate) fn metric_increment(&mut self, id: u32, by: i64) -> Result<(), u32> {
        self.metric(id, |metric| match metric.kind {
            MetricKind::Counter if by > 0 => {
                metric.value = metric.value.wrapping_add_signed(by);
                Ok(())
            }
            MetricKind::Gauge => {
                metric.value = metric.value.wrapping_add_signed(by);
                Ok(())
            }
            _ => Err(status::BAD_ARGUMENT),
        })
    }

    pub(crate) fn metric_record(&mut self, id: u32, value: u64) -> Result<(), u32> {
        self.metric(id, |metric| {
            match metric.kind {
                MetricKind::Counter => metric.value = metric.value.wrapping_add(value),
                MetricKind::Gauge => metric.value = value,
                MetricKind::Histogram => metric.samples.push(value),
            }
            Ok(())
        })
    }

    pub(crate) fn metric_get(&mut self, id: u32) -> Result<u64, u32> {
        self.metric(id, |metric| match metric.kind {
            MetricKind::Histogram => Err(status::BAD_ARGUMENT),
            _ => Ok(metric.value),
        })
    }

    // Log.

    pub(crate) fn log(&mut self, level: u32, message: &str) -> Result<(), u32> {
        let level = match level {
            0 => Level::Trace,
            1 => Level::Debug,
            2 => Level::Info,
            3 => Level::Warn,
            4 => Level::Error,
            5 => Level::Critical,
            _ => return Err(status::BAD_ARGUMENT),
        };
        if level >= self.log_level {
            self.logs.push(LogLine { level, message: message.to_owned() });
        }
        Ok(())
    }
}

/// A dotted path as the ABI writes it.
fn path_bytes(path: &str) -> Vec<u8> {
    path.replace('.', "\0").into_bytes()
}

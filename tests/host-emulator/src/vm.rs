//! Driving a VM.

use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::time::Duration;

use crate::abi::{FUNCTIONS, guest};
use crate::headers::{Headers, Properties};
use crate::process::{Host, Metric};
use crate::state::{
    self, Action, CallAnswer, Deferred, HostCall, HttpCall, Level, LocalReply, LogLine, Outcome, Progress, RootId,
    State, StreamId, status,
};
use crate::worker;

/// How many queue events in a row are taken for an endless loop.
const QUEUE_EVENTS_MAX: usize = 100_000;

/// What an upstream answers to a call of the filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A response.
    Response {
        /// Its headers, with `:status`.
        headers: Headers,
        /// Its body.
        body: Vec<u8>,
    },
    /// None: the stream was reset, or the response was too long.
    Failure,
}

impl Answer {
    /// A response.
    pub fn new(status: u16, headers: impl Into<Headers>, body: impl AsRef<[u8]>) -> Self {
        let mut all = Headers::new().with(":status", status.to_string());
        for (name, value) in headers.into().iter() {
            all.add(name, value);
        }
        Self::Response { headers: all, body: body.as_ref().to_vec() }
    }

    /// What Envoy itself answers for an upstream: plain text.
    pub fn local(status: u16, body: &str) -> Self {
        Self::new(status, [("content-length", body.len().to_string()), ("content-type", "text/plain".to_owned())], body)
    }
}

/// The VM of the thread that a closure runs on.
///
/// Methods that call the guest panic when the test is wrong (an unknown stream, say) or when the guest did what Envoy
/// takes badly; see [`Vm::tolerate_misuse`].
pub struct Vm {
    /// It stays on its thread.
    thread: PhantomData<*const ()>,
}

fn with<R>(run: impl FnOnce(&mut State) -> R) -> R {
    match state::with(run) {
        Some(result) => result,
        None => panic!("this thread is no VM"),
    }
}

impl Vm {
    pub(crate) fn new() -> Self {
        Self { thread: PhantomData }
    }

    /// The process.
    pub fn host(&self) -> Host {
        with(|state| state.host.clone())
    }

    // Plugins.

    /// Starts a plugin: creates its root context, then calls `on_vm_start` and `on_configure`. None if one of them
    /// refused; the root is dropped then. A second plugin, or a new configuration, is a second root beside the first.
    pub fn configure(&mut self, configuration: impl AsRef<[u8]>) -> Option<RootId> {
        let configuration = configuration.as_ref();
        let id = with(|state| state.add_root(configuration.to_vec()));
        self.call(id, || guest::context_create(id, 0));
        let vm_configuration = with(|state| {
            state.configuring = Some(id);
            state.options.vm_configuration.len()
        });
        let configured = self.call(id, || guest::vm_start(id, vm_configuration))
            && self.call(id, || guest::configure(id, configuration.len()));
        with(|state| state.configuring = None);
        worker::keep_hook();
        if !configured {
            with(|state| state.drop_root(id));
        }
        self.check();
        configured.then_some(RootId(id))
    }

    /// Ends a plugin: `on_done`, and `on_delete` at once if it agrees; if it does not, when it calls `done`. Returns
    /// whether the root is gone.
    pub fn shutdown(&mut self, root: RootId) -> bool {
        self.expect_root(root);
        if self.call(root.0, || guest::done(root.0)) {
            self.delete_root(root.0);
        } else {
            with(|state| {
                if let Some(root) = state.roots.get_mut(&root.0) {
                    root.pending_done = true;
                }
            });
        }
        self.check();
        !with(|state| state.roots.contains_key(&root.0))
    }

    /// The root contexts there are.
    pub fn roots(&self) -> Vec<RootId> {
        with(|state| state.roots.keys().copied().map(RootId).collect())
    }

    /// Sets a property that the root and all its streams see: dotted path, bytes.
    pub fn set_root_property(&mut self, root: RootId, path: &str, value: impl AsRef<[u8]>) {
        self.expect_root(root);
        with(|state| state.set_root_property(root.0, path, value.as_ref()));
    }

    // Time.

    /// The time since 1970; the clock is the process's.
    pub fn time(&self) -> Duration {
        self.host().time()
    }

    /// Sets the clock. Nothing is run.
    pub fn set_time(&mut self, now: Duration) {
        self.host().set_time(now);
    }

    /// Moves the clock on. Nothing is run; see [`Vm::run_for`].
    pub fn advance(&mut self, by: Duration) {
        self.host().advance(by);
    }

    /// The tick period that the root has set.
    pub fn tick_period(&self, root: RootId) -> Option<Duration> {
        with(|state| state.roots.get(&root.0)?.tick.map(|tick| tick.period))
    }

    /// When the root's next tick is due.
    pub fn next_tick(&self, root: RootId) -> Option<Duration> {
        with(|state| state.roots.get(&root.0)?.tick.map(|tick| tick.due))
    }

    /// Ticks the root now, due or not. Its next tick is due a period later.
    pub fn tick(&mut self, root: RootId) {
        self.expect_root(root);
        self.tick_root(root.0);
        self.check();
    }

    /// Lets time pass until then, for this VM: ticks come when they are due, with the clock set so, calls time out, and
    /// queue events are delivered. A time gone by leaves the clock alone and runs what is overdue.
    pub fn run_until(&mut self, until: Duration) {
        self.run_until_with(until, |_| None);
    }

    /// [`Vm::run_until`] from now on.
    pub fn run_for(&mut self, time: Duration) {
        self.run_until(self.time() + time);
    }

    /// [`Vm::run_until`] with upstreams: each call is shown once, as soon as it is made, and answered at once or, with
    /// None, left open.
    pub fn run_until_with(&mut self, until: Duration, mut upstream: impl FnMut(&HttpCall) -> Option<Answer>) {
        let host = self.host();
        let mut shown = BTreeSet::new();
        loop {
            self.deliver();
            while let Some(call) = self.calls().into_iter().find(|call| shown.insert(call.token)) {
                if let Some(answer) = upstream(&call) {
                    self.respond(call.token, answer);
                }
            }
            if with(|state| state.host.process().mail_count(state.vm)) > 0 {
                continue;
            }
            let tick = with(|state| {
                let ticks = state.roots.iter().filter_map(|(id, root)| Some((root.tick?.due, *id)));
                ticks.min().filter(|(due, _)| *due <= until)
            });
            let deadline = with(|state| {
                let deadlines = state.calls.values().filter_map(|call| Some((call.deadline()?, call.token)));
                deadlines.min().filter(|(due, _)| *due <= until)
            });
            match (tick, deadline) {
                (Some((due, root)), deadline) if deadline.is_none_or(|(other, _)| due < other) => {
                    host.set_time(due.max(host.time()));
                    self.tick_root(root);
                }
                (_, Some((due, token))) => {
                    host.set_time(due.max(host.time()));
                    self.time_out(token);
                }
                _ => break,
            }
            self.check();
        }
        host.set_time(until.max(host.time()));
        self.check();
    }

    /// [`Vm::run_until_with`] from now on.
    pub fn run_for_with(&mut self, time: Duration, upstream: impl FnMut(&HttpCall) -> Option<Answer>) {
        self.run_until_with(self.time() + time, upstream);
    }

    /// Delivers the queue events that wait for this VM, and those that come up meanwhile. Returns how many there were.
    pub fn deliver(&mut self) -> usize {
        let mut count = 0;
        while let Some((root, queue)) = with(|state| state.host.process().next_mail(state.vm)) {
            count += 1;
            assert!(count < QUEUE_EVENTS_MAX, "queue events without end");
            if with(|state| state.roots.contains_key(&root)) {
                self.call(root, || guest::queue_ready(root, queue));
            }
        }
        self.check();
        count
    }

    /// How many queue events wait for this VM.
    pub fn undelivered(&self) -> usize {
        with(|state| state.host.process().mail_count(state.vm))
    }

    // Calls of the filter.

    /// The calls that are not answered, oldest first.
    pub fn calls(&self) -> Vec<HttpCall> {
        with(|state| state.calls.values().cloned().collect())
    }

    /// Answers a call.
    pub fn answer(&mut self, token: u32, status: u16, headers: impl Into<Headers>, body: impl AsRef<[u8]>) {
        self.respond(token, Answer::new(status, headers, body));
    }

    /// Fails a call as Envoy does when a response breaks off or is too long: with no headers.
    pub fn fail(&mut self, token: u32) {
        self.respond(token, Answer::Failure);
    }

    /// Answers a call as Envoy does after its timeout: 504.
    pub fn time_out(&mut self, token: u32) {
        self.respond(token, Answer::local(504, "upstream request timeout"));
    }

    /// Answers or fails a call.
    pub fn respond(&mut self, token: u32, answer: Answer) {
        match answer {
            Answer::Response { headers, body } => {
                let counts = (headers.len(), body.len(), 0);
                self.complete(token, Some((headers, body, Headers::new())), counts);
            }
            Answer::Failure => self.complete(token, None, (0, 0, 0)),
        }
    }

    /// Answers a call with any headers, body, trailers and with any counts of them (headers, bytes, trailers).
    pub fn answer_raw(
        &mut self,
        token: u32,
        headers: impl Into<Headers>,
        body: impl AsRef<[u8]>,
        trailers: impl Into<Headers>,
        counts: (usize, usize, usize),
    ) {
        self.complete(token, Some((headers.into(), body.as_ref().to_vec(), trailers.into())), counts);
    }

    /// From now on only these clusters are known: a call to another is a bad argument.
    pub fn know_clusters<N: Into<String>>(&mut self, clusters: impl IntoIterator<Item = N>) {
        with(|state| state.known_clusters = Some(clusters.into_iter().map(Into::into).collect()));
    }

    /// Refuses calls to a cluster, as with no healthy endpoint: an internal failure.
    pub fn refuse_calls_to(&mut self, cluster: &str) {
        with(|state| state.refused.insert(cluster.to_owned()));
    }

    /// The reverse of [`Vm::refuse_calls_to`].
    pub fn accept_calls_to(&mut self, cluster: &str) {
        with(|state| state.refused.remove(cluster));
    }

    // Streams.

    /// A request arrives.
    pub fn request(&mut self, root: RootId, headers: impl Into<Headers>, end_of_stream: bool) -> Outcome {
        self.request_with(root, headers, (), end_of_stream)
    }

    /// [`Vm::request`] with properties of the stream.
    pub fn request_with(
        &mut self,
        root: RootId,
        headers: impl Into<Headers>,
        properties: impl Into<Properties>,
        end_of_stream: bool,
    ) -> Outcome {
        let stream = self.open(root);
        for (path, value) in properties.into().iter() {
            self.set_property(stream, path, value);
        }
        with(|state| {
            if let Some(stream) = state.streams.get_mut(&stream.0) {
                stream.request_headers = headers.into();
                stream.request_visible = true;
                stream.request = Progress::Held;
            }
        });
        self.headers_callback(stream.0, false, end_of_stream);
        self.check();
        self.stream(stream)
    }

    /// Only creates a stream's context, as Envoy does for a request that it answers before the filter sees it; with
    /// [`Vm::finish`] that is all the filter hears of it.
    pub fn open(&mut self, root: RootId) -> StreamId {
        self.expect_root(root);
        let id = with(|state| state.add_stream(root.0));
        self.call(id, || guest::context_create(id, root.0));
        self.check();
        StreamId(id)
    }

    /// The response headers of a stream arrive, with a body to follow; from an upstream or from Envoy itself, as the
    /// properties say (`response.code_details` is `via_upstream` for the former). May come again while it is held, as
    /// when Envoy times the stream out.
    pub fn response(
        &mut self,
        stream: StreamId,
        headers: impl Into<Headers>,
        properties: impl Into<Properties>,
    ) -> Outcome {
        self.response_with(stream, headers, properties, false)
    }

    /// [`Vm::response`] that may have no body.
    pub fn response_with(
        &mut self,
        stream: StreamId,
        headers: impl Into<Headers>,
        properties: impl Into<Properties>,
        end_of_stream: bool,
    ) -> Outcome {
        let response = self.stream(stream).response;
        assert!(
            matches!(response, Progress::Waiting | Progress::Held),
            "{stream:?} has its response already: {response:?}"
        );
        for (path, value) in properties.into().iter() {
            self.set_property(stream, path, value);
        }
        self.respond_stream(stream.0, headers.into(), end_of_stream);
        self.check();
        self.stream(stream)
    }

    /// The stream as it is now.
    pub fn stream(&self, stream: StreamId) -> Outcome {
        match with(|state| state.outcome(stream.0)) {
            Some(outcome) => outcome,
            None => panic!("{stream:?} is gone"),
        }
    }

    /// The streams that are not finished.
    pub fn streams(&self) -> Vec<StreamId> {
        with(|state| state.streams.keys().copied().map(StreamId).collect())
    }

    /// Sets a property of a stream: dotted path, bytes.
    pub fn set_property(&mut self, stream: StreamId, path: &str, value: impl AsRef<[u8]>) {
        with(|state| state.set_stream_property(stream.0, path, value.as_ref()));
    }

    /// Ends a stream, whatever has become of it: log, done, delete. Returns how it was last.
    pub fn finish(&mut self, stream: StreamId) -> Outcome {
        let outcome = self.stream(stream);
        let id = stream.0;
        with(|state| {
            state.logging = Some(id);
            if let Some(stream) = state.streams.get_mut(&id) {
                // It is too late for a reply.
                stream.response = Progress::Passed;
            }
        });
        self.call(id, || guest::log(id));
        with(|state| state.logging = None);
        self.call(id, || guest::done(id));
        self.call(id, || guest::delete(id));
        with(|state| state.streams.remove(&id));
        self.check();
        outcome
    }

    // What is seen from outside.

    /// What the filter has logged.
    pub fn logs(&self) -> Vec<LogLine> {
        with(|state| state.logs.clone())
    }

    /// [`Vm::logs`] since the last time.
    pub fn take_logs(&mut self) -> Vec<LogLine> {
        with(|state| std::mem::take(&mut state.logs))
    }

    /// Sets the lowest level that is logged; the guest can ask for it.
    pub fn set_log_level(&mut self, level: Level) {
        with(|state| state.log_level = level);
    }

    /// The metrics of the process.
    pub fn metrics(&self) -> Vec<Metric> {
        self.host().metrics()
    }

    /// The value of a counter or gauge of the process.
    pub fn metric(&self, name: &str) -> u64 {
        self.host().metric(name)
    }

    /// The calls of host functions, oldest first; of very many the last.
    pub fn host_calls(&self) -> Vec<HostCall> {
        with(|state| state.host_calls.iter().cloned().collect())
    }

    /// [`Vm::host_calls`] since the last time.
    pub fn take_host_calls(&mut self) -> Vec<HostCall> {
        with(|state| std::mem::take(&mut state.host_calls).into())
    }

    /// How often a host function was called; of very many calls, the last are counted.
    pub fn count(&self, function: &str) -> usize {
        let function = known(function);
        with(|state| state.host_calls.iter().filter(|call| call.function == function).count())
    }

    // Faults.

    /// Lets a host function answer this status from now on, and do nothing. [`status::OK`] is an empty success: what
    /// the guest wants written stays as it was. See [`status`] for what may be answered to the SDK.
    pub fn force_status(&mut self, function: &str, status: u32) {
        let function = known(function);
        with(|state| state.force(function, status, None));
    }

    /// [`Vm::force_status`] for the next `count` calls only.
    pub fn force_status_times(&mut self, function: &str, status: u32, count: usize) {
        let function = known(function);
        with(|state| state.force(function, status, Some(count)));
    }

    /// Ends all forced statuses.
    pub fn clear_forced(&mut self) {
        with(State::unforce);
    }

    /// From now on, what Envoy takes badly only goes to [`Vm::misuse`].
    pub fn tolerate_misuse(&mut self) {
        with(|state| state.tolerant = true);
    }

    /// What the guest did that Envoy takes badly.
    pub fn misuse(&self) -> Vec<String> {
        with(|state| state.misuse.clone())
    }

    // Below: calls into the guest, none of which checks for misuse.

    fn check(&self) {
        let misuse = with(|state| if state.tolerant { Vec::new() } else { std::mem::take(&mut state.misuse) });
        assert!(misuse.is_empty(), "Envoy would take this badly: {}", misuse.join("; "));
    }

    fn expect_root(&self, root: RootId) {
        assert!(with(|state| state.roots.contains_key(&root.0)), "{root:?} is gone");
    }

    /// Calls the guest in a context; without the actions that it defers.
    fn enter<R>(&mut self, context: u32, callback: impl FnOnce() -> R) -> (R, bool) {
        let saved = with(|state| {
            let saved = (state.current, state.effective);
            (state.current, state.effective) = (context, 0);
            saved
        });
        let result = worker::in_guest(callback);
        let stopped = with(|state| {
            (state.current, state.effective) = saved;
            std::mem::take(&mut state.stop_iteration)
        });
        (result, stopped)
    }

    fn call<R>(&mut self, context: u32, callback: impl FnOnce() -> R) -> R {
        let (result, _) = self.enter(context, callback);
        self.run_deferred();
        result
    }

    fn run_deferred(&mut self) {
        while let Some(deferred) = with(|state| state.deferred.pop_front()) {
            match deferred {
                Deferred::Reply(id, reply) => self.reply(id, reply),
                Deferred::Continue(id, response) => with(|state| {
                    let Some(stream) = state.streams.get_mut(&id) else {
                        return;
                    };
                    let progress = if response { &mut stream.response } else { &mut stream.request };
                    if *progress == Progress::Held {
                        *progress = Progress::Passed;
                    } else {
                        let what = if response { "response" } else { "request" };
                        state.misuse.push(format!("a continuation of a {what} that is not held, on stream {id}"));
                    }
                }),
                Deferred::Delete(root) => self.delete_root(root),
            }
        }
    }

    /// Calls the guest for the headers that are in the stream, and takes its answer.
    fn headers_callback(&mut self, id: u32, response: bool, end_of_stream: bool) {
        let count = with(|state| {
            let stream = state.streams.get(&id);
            let headers =
                stream.map(|stream| if response { &stream.response_headers } else { &stream.request_headers });
            headers.map_or(0, Headers::len)
        });
        let (action, stopped) = self.enter(id, || {
            if response {
                guest::response_headers(id, count, end_of_stream)
            } else {
                guest::request_headers(id, count, end_of_stream)
            }
        });
        self.run_deferred();
        let action = if stopped || action != 0 { Action::Pause } else { Action::Continue };
        with(|state| {
            let Some(stream) = state.streams.get_mut(&id) else {
                return;
            };
            stream.action = action;
            let (visible, progress) = if response {
                (&mut stream.response_visible, &mut stream.response)
            } else {
                (&mut stream.request_visible, &mut stream.request)
            };
            if action == Action::Continue {
                *visible = false;
            }
            if *progress != Progress::Replied {
                *progress = if action == Action::Continue { Progress::Passed } else { Progress::Held };
            }
        });
    }

    fn respond_stream(&mut self, id: u32, headers: Headers, end_of_stream: bool) {
        with(|state| {
            if let Some(stream) = state.streams.get_mut(&id) {
                stream.response_headers = headers;
                stream.response_visible = true;
                stream.response = Progress::Held;
            }
        });
        self.headers_callback(id, true, end_of_stream);
    }

    /// A local reply: through the response callback if no response has come, else in place of it.
    fn reply(&mut self, id: u32, reply: LocalReply) {
        let through = with(|state| {
            let stream = state.streams.get_mut(&id)?;
            match stream.response {
                Progress::Waiting => {
                    if stream.request == Progress::Held {
                        stream.request = Progress::Replied;
                    }
                    stream.reply = Some(reply.clone());
                    stream.properties.remove(b"response\0flags".as_slice());
                    stream.properties.remove(b"response\0code".as_slice());
                    stream.properties.insert(b"response\0code_details".to_vec(), reply.details.clone());
                    Some(reply)
                }
                Progress::Held => {
                    stream.response = Progress::Replied;
                    stream.reply = Some(reply);
                    None
                }
                Progress::Passed | Progress::Replied => {
                    let status = reply.status;
                    state.misuse.push(format!("a local reply ({status}) on stream {id}, whose response is on its way"));
                    None
                }
            }
        });
        let Some(reply) = through else { return };
        let mut headers = Headers::new().with(":status", reply.status.to_string());
        for (name, value) in reply.headers.iter() {
            headers.add(name, value);
        }
        if !reply.body.is_empty() {
            headers.set("content-length", reply.body.len().to_string().as_bytes());
            if headers.get("content-type").is_none() {
                headers.add("content-type", b"text/plain");
            }
        }
        let action = with(|state| state.streams.get(&id).map(|stream| stream.action));
        self.respond_stream(id, headers, reply.body.is_empty());
        with(|state| {
            let Some(stream) = state.streams.get_mut(&id) else {
                return;
            };
            if stream.response == Progress::Passed {
                stream.response = Progress::Replied;
            }
            stream.action = action.unwrap_or(Action::Pause);
        });
    }

    fn tick_root(&mut self, id: u32) {
        self.call(id, || guest::tick(id));
        with(|state| {
            let now = state.host.time();
            if let Some(tick) = state.roots.get_mut(&id).and_then(|root| root.tick.as_mut()) {
                tick.due = now + tick.period;
            }
        });
    }

    fn delete_root(&mut self, id: u32) {
        self.call(id, || guest::delete(id));
        with(|state| state.drop_root(id));
    }

    fn complete(
        &mut self,
        token: u32,
        answer: Option<(Headers, Vec<u8>, Headers)>,
        (headers, body, trailers): (usize, usize, usize),
    ) {
        let Some(call) = with(|state| state.calls.remove(&token)) else { panic!("there is no open call {token}") };
        let root = call.root.0;
        with(|state| match answer {
            Some((headers, body, trailers)) => state.answer = Some(CallAnswer { root, headers, body, trailers }),
            None => state.call_status = (status::BROKEN_CONNECTION, b"reset".to_vec()),
        });
        self.enter(root, || guest::http_call_response(root, token, headers, body, trailers));
        with(|state| {
            state.answer = None;
            state.call_status.1.clear();
        });
        self.run_deferred();
        self.check();
    }
}

fn known(function: &str) -> &'static str {
    match FUNCTIONS.iter().find(|known| **known == function) {
        Some(known) => known,
        None => panic!("there is no host function {function}"),
    }
}

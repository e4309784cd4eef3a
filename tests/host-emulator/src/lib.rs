//! An in-process proxy-wasm host for lifecycle tests.
//!
//! The crate defines natively every `proxy_*` function that proxy-wasm SDK 0.2.5 imports, and drives a filter through
//! the callbacks that the SDK exports (`proxy_on_*`, `_initialize`). So the whole filter runs in an ordinary test:
//! with no Envoy, no WebAssembly and no sleeping, under a clock that the test sets.
//!
//! ```ignore
//! use host_emulator::{Action, Headers, Host};
//! use my_filter as _; // links the guest: exactly one crate with `proxy_wasm::main!`
//!
//! #[test]
//! fn polls_and_reroutes() {
//!     let host = Host::new();
//!     host.vm(|vm| {
//!         let root = vm.configure(r#"{"peers": ["b"]}"#).expect("configured");
//!         vm.run_for(std::time::Duration::from_secs(1));
//!         for call in vm.calls() {
//!             vm.answer(call.token, 200, [("content-type", "application/json")], "{}");
//!         }
//!         let outcome = vm.request(root, [(":method", "GET"), (":path", "/apis"), (":authority", "a")], true);
//!         assert_eq!(outcome.action, Action::Continue);
//!         assert_eq!(outcome.filter_state_text("cluster"), Some("b"));
//!         assert_eq!(outcome.route_cache_cleared, 1);
//!         let outcome = vm.response(outcome.stream, [(":status", "200")], [("xds.cluster_name", "b")]);
//!         assert!(outcome.local_reply.is_none());
//!         vm.finish(outcome.stream);
//!     })
//!     .unwrap();
//! }
//! ```
//!
//! # Threads, VMs, traps
//!
//! A [`Host`] is one Envoy process: its VMs share the clock, shared data, queues and metrics. A VM is a thread of its
//! own, because the SDK keeps its contexts in thread-local storage: [`Host::vm`] runs one closure on a fresh one,
//! [`Host::worker`] starts one that takes a closure at a time, so that a test can step several VMs in turn.
//!
//! A panic of the guest is a trap: the closure's caller gets a [`Trap`] with the message and the last host calls, and
//! the VM is gone. A panic outside the guest, such as a failed assertion of a test, goes on in the closure's caller.
//! (A guest's panic cannot be caught, for the callbacks are `extern "C"`, where it aborts the process. The panic hook
//! of this crate takes note of it, and a handler of the abort's signal stops the thread for good instead. The standard
//! library prints a line about a non-unwinding panic meanwhile.) From this follows:
//! - a test must leave the panic hook and SIGABRT alone; the hook that the SDK's `set_log_level` sets is overruled,
//! - a lock of the process (a `static` mutex of the guest) held in a callback that traps may stay locked; `static`s of
//!   the guest are shared between VMs here, which they are not in Envoy,
//! - a panic in `_initialize`, or in a destructor when a VM's thread ends, aborts the process: loudly, which will do;
//!   so does any panic of the guest where there is no SIGABRT.
//!
//! # What is faithful to Envoy, and what is not
//!
//! Header maps are available in the callbacks in which Envoy has them; local replies, continuations and queue events
//! come after the callback that asked for them; a local reply before the response re-enters the response callback; a
//! failed call has no headers; a call times out with Envoy's 504. Host functions answer Envoy's statuses. Not modelled:
//! bodies and trailers of requests and responses (the buffers are empty, and setting them fails as for a stream without
//! a body), TCP, gRPC (calls are refused), other filters, routes and clusters. Resetting a stream is only recorded.
//!
//! What Envoy would take badly (a second local reply on a stream, a continuation of a stream that is not held) fails
//! the test at the end of the driving call; see [`Vm::tolerate_misuse`].

mod abi;
mod headers;
mod process;
mod state;
mod vm;
mod worker;

pub use abi::FUNCTIONS;
pub use headers::{Headers, Properties};
pub use process::{Host, Metric, MetricKind, RepeatedHeaders, VmOptions};
pub use state::{Action, HostCall, HttpCall, Level, LocalReply, LogLine, Outcome, Progress, RootId, StreamId, status};
pub use vm::{Answer, Vm};
pub use worker::{Trap, Worker};

//! A laboratory for tests of the filter: everything around it, on loopback, under the test's control.
//!
//! ```text
//!   client::Client  ->  envoy::Envoy (a real one, the filter inside)  ->  apiserver::StubApiserver, one per apiserver
//! ```
//!
//! - [`apiserver`]: stub apiservers that answer as recorded kube-apiservers do, record what reaches them byte by byte,
//!   and fail in every way an apiserver can fail.
//! - [`envoy`]: finds, validates and runs Envoy (and func-e); fills in shipped configurations for a test.
//! - [`client`]: a raw HTTP/1.1 client that sends exactly the bytes it is given, and an HTTP/2 one.
//! - [`certs`]: certificate authorities, server and client certificates, as files and as TLS configurations.
//! - [`discovery`]: edits of discovery documents. [`fixtures`]: the recorded documents themselves.
//! - [`wait`]: waiting for a condition, never for a time.
//!
//! Everything runs on tokio; what is dropped is stopped.

pub mod apiserver;
pub mod certs;
pub mod client;
pub mod discovery;
pub mod envoy;
pub mod fixtures;
mod socket;
pub mod wait;
mod wire;

pub use apiserver::StubApiserver;
pub use client::Client;
pub use envoy::Envoy;
pub use fixtures::{repository, wasm_path};
pub use wait::eventually;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks although another thread may have panicked meanwhile: one failing test must not hide behind a second message.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

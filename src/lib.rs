//! An Envoy HTTP filter that keeps a Kubernetes control plane honest while its apiservers run different versions.
//!
//! # The life of a request
//!
//! 1. [`target`] reads the path: is this about a resource, and which? Everything else passes untouched.
//! 2. [`decision`] looks the resource up in the [table](peers::table): it stays *here* (the local apiserver in sidecar
//!    mode, the load-balanced default cluster in gateway mode), or it is rerouted to an apiserver that serves it. The
//!    filter hands the cluster to Envoy as filter state, which no client can set, and marks the request as rerouted.
//! 3. The apiserver answers. [`guard`] looks at each 404: "no such object" passes, but "no such route" from an apiserver
//!    that does not know the type, while another one does or might, becomes a 503. What cannot be told is
//!    [held](guard::held) until the apiservers have been asked. Nobody is told that something is gone because the request
//!    met the wrong apiserver.
//! 4. Where Envoy could not reach an apiserver, [`local_reply`] turns its answer into one that Kubernetes clients can
//!    read, and says "try again" only where nothing can have been executed.
//!
//! # The life of a discovery request
//!
//! It goes to an apiserver too, and its answer is replaced by that of the whole cluster: the documents of all apiservers
//! [merged](discovery::merge), in the form that the client [wants](discovery::negotiate), made
//! [once for each change](peers::cluster_discovery).
//!
//! # The life of the table
//!
//! [`peers::refresh`] says which apiserver is to be asked now, for which of its two [discovery documents]; the answers
//! make the [table](peers::table). A poll that fails takes nothing away: as long as an apiserver is
//! [configured](config), its last good document counts and its silence is doubt. One of Envoy's workers is
//! [elected](peers::election) to poll for all; the others adopt its [snapshots](peers::snapshot).
//!
//! All of that is pure: time, random numbers and bytes come in as arguments. Only the module `filter` knows proxy-wasm.
//!
//! [discovery documents]: discovery::document

// Tests may fail by panicking; what they run may not.
#![cfg_attr(
    test,
    allow(
        clippy::arithmetic_side_effects,
        clippy::indexing_slicing,
        clippy::panic,
        clippy::unwrap_used,
        unreachable_pub
    )
)]

pub mod config;
pub mod decision;
pub mod discovery;
pub mod guard;
pub mod hex;
pub mod identity;
pub mod local_reply;
pub mod metrics;
pub mod peers;
pub mod quote;
pub mod target;

// Test binaries for wasm have no host that defines the imports, and could not start with them.
#[cfg(not(any(all(target_arch = "wasm32", test), all(target_arch = "wasm32", target_os = "unknown"))))]
mod filter;
#[cfg(test)]
mod testing;

//! What the workers of one Envoy share: five records in its shared data.
//!
//! Keys cannot be deleted, so there are five for ever, whatever is configured how often. They carry the plugin's root id:
//! plugins with different ones have nothing to do with each other.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::host;
use crate::peers::election::Lease;
use crate::peers::table::ApiserverSet;

/// Part of the keys; raised when the meaning of a record changes.
const LAYOUT: u32 = 1;

/// The records of one plugin.
pub(super) struct SharedData {
    lease: String,
    snapshot: String,
    documents: String,
    discovery: String,
    wake: String,
}

/// Apiservers that the leader should poll soon.
#[derive(Serialize, Deserialize)]
struct Wake {
    /// Whose indexes they are: see [`crate::peers::election::Candidate::poll_set`].
    poll_set: u64,
    apiservers: u64,
}

/// A record as it was read, to be written only if nobody has written meanwhile.
pub(super) struct Seen<T> {
    pub(super) value: Option<T>,
    cas: Option<u32>,
}

impl SharedData {
    /// The records of the plugin that runs now.
    pub(super) fn of_this_plugin() -> Self {
        let root_id = host::property("plugin_root_id").ok().flatten().unwrap_or_default();
        let root_id = String::from_utf8_lossy(&root_id);
        let key = |record: &str| format!("mixed-version-proxy/{LAYOUT}/{root_id}/{record}");
        Self {
            lease: key("lease"),
            snapshot: key("snapshot"),
            documents: key("documents"),
            discovery: key("discovery"),
            wake: key("wake"),
        }
    }

    /// The lease; one that cannot be read counts as none.
    pub(super) fn lease(&self) -> Seen<Lease> {
        read(&self.lease)
    }

    /// Writes a lease; whether nobody else was quicker.
    pub(super) fn write_lease(&self, lease: &Lease, seen: &Seen<Lease>) -> bool {
        let cas = match seen.cas {
            Some(cas) => cas,
            None => {
                // The first one: a record that has expired, for there is nothing yet to compare with.
                let expired = Lease { expires_at: Duration::ZERO, ..*lease };
                write(&self.lease, &expired, None);
                let Some(cas) = self.lease().cas else { return false };
                cas
            }
        };
        write(&self.lease, lease, Some(cas))
    }

    /// What the leader has published last.
    pub(super) fn snapshot(&self) -> Option<Vec<u8>> {
        read_bytes(&self.snapshot).value
    }

    /// Publishes; whether Envoy has taken it.
    pub(super) fn publish(&self, snapshot: &[u8]) -> bool {
        write_bytes(&self.snapshot, snapshot, None)
    }

    /// The bodies of the apiservers' documents.
    pub(super) fn documents(&self) -> Seen<Vec<u8>> {
        read_bytes(&self.documents)
    }

    /// Publishes bodies; whether Envoy took them, and nobody else was quicker.
    pub(super) fn publish_documents(&self, documents: &[u8], seen: &Seen<Vec<u8>>) -> bool {
        write_bytes(&self.documents, documents, seen.cas)
    }

    /// What clients are told of the whole cluster.
    pub(super) fn discovery(&self) -> Option<Vec<u8>> {
        read_bytes(&self.discovery).value
    }

    /// Publishes what clients are told; whether Envoy took it.
    pub(super) fn publish_discovery(&self, discovery: &[u8]) -> bool {
        write_bytes(&self.discovery, discovery, None)
    }

    /// Asks the leader to poll apiservers soon.
    pub(super) fn wake(&self, poll_set: u64, whom: ApiserverSet) {
        let seen: Seen<Wake> = read(&self.wake);
        let others = seen.value.filter(|wake| wake.poll_set == poll_set).map_or(0, |wake| wake.apiservers);
        let apiservers = ApiserverSet::from_bits(others).union(whom).bits();
        if apiservers != others {
            // Lost if another worker writes at this very moment; the next reason is not far.
            write(&self.wake, &Wake { poll_set, apiservers }, seen.cas);
        }
    }

    /// Takes what other workers have asked for.
    pub(super) fn woken(&self, poll_set: u64) -> ApiserverSet {
        let seen: Seen<Wake> = read(&self.wake);
        let Some(wake) = &seen.value else { return ApiserverSet::EMPTY };
        let taken = wake.apiservers != 0 && write(&self.wake, &Wake { poll_set, apiservers: 0 }, seen.cas);
        if taken && wake.poll_set == poll_set { ApiserverSet::from_bits(wake.apiservers) } else { ApiserverSet::EMPTY }
    }
}

fn read<T: for<'de> Deserialize<'de>>(key: &str) -> Seen<T> {
    let Seen { value, cas } = read_bytes(key);
    Seen { value: value.and_then(|bytes| postcard::from_bytes(&bytes).ok()), cas }
}

fn write<T: Serialize>(key: &str, value: &T, cas: Option<u32>) -> bool {
    let Ok(bytes) = postcard::to_allocvec(value) else { return false };
    write_bytes(key, &bytes, cas)
}

/// A record that cannot be read counts as none.
fn read_bytes(key: &str) -> Seen<Vec<u8>> {
    let (value, cas) = host::shared_data(key).ok().flatten().unzip();
    Seen { value, cas }
}

/// Whether Envoy took it, and nobody has written since `cas`.
fn write_bytes(key: &str, bytes: &[u8], cas: Option<u32>) -> bool {
    matches!(host::set_shared_data(key, bytes, cas), Ok(true))
}

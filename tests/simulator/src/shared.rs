//! What the workers of one Envoy process share: Envoy's shared data, with its compare-and-swap numbers.

use mixed_version_proxy::peers::election::Lease;
use mixed_version_proxy::peers::table::ApiserverSet;

/// The five records of one plugin.
#[derive(Debug, Default)]
pub struct SharedData {
    lease: Option<Lease>,
    cas: u32,
    /// What the leader has published last.
    pub snapshot: Option<Vec<u8>>,
    /// What it tells clients of the whole cluster.
    pub discovery: Option<Vec<u8>>,
    documents: Vec<u8>,
    documents_cas: u32,
    wake: Option<(u64, ApiserverSet)>,
}

/// A record as it was read.
#[derive(Debug, Clone, Copy)]
pub struct Seen<T> {
    /// The record.
    pub value: Option<T>,
    cas: u32,
}

impl SharedData {
    /// The lease now.
    pub fn lease(&self) -> Seen<Lease> {
        Seen { value: self.lease, cas: self.cas }
    }

    /// Writes the lease unless somebody has written since it was seen.
    pub fn write_lease(&mut self, lease: &Lease, seen: &Seen<Lease>) -> bool {
        let is_unchanged = seen.cas == self.cas;
        if is_unchanged {
            self.lease = Some(*lease);
            self.cas += 1;
        }
        is_unchanged
    }

    /// The bodies of the apiservers' documents.
    pub fn documents(&self) -> Seen<Vec<u8>> {
        Seen { value: Some(self.documents.clone()), cas: self.documents_cas }
    }

    /// Writes the bodies unless somebody has written since they were seen.
    pub fn write_documents(&mut self, documents: Vec<u8>, seen: &Seen<Vec<u8>>) -> bool {
        let is_unchanged = seen.cas == self.documents_cas;
        if is_unchanged {
            self.documents = documents;
            self.documents_cas += 1;
        }
        is_unchanged
    }

    /// Asks the leader to poll apiservers soon.
    pub fn wake(&mut self, poll_set: u64, whom: ApiserverSet) {
        let others = self.wake.filter(|(theirs, _)| *theirs == poll_set).map(|(_, apiservers)| apiservers);
        self.wake = Some((poll_set, others.unwrap_or_default().union(whom)));
    }

    /// Takes what other workers have asked for.
    pub fn woken(&mut self, poll_set: u64) -> ApiserverSet {
        let taken = self.wake.take();
        taken.filter(|(theirs, _)| *theirs == poll_set).map(|(_, apiservers)| apiservers).unwrap_or_default()
    }
}

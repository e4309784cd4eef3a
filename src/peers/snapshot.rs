//! What the leader publishes and the others adopt: all that is known of the apiservers, in bytes.
//!
//! Entries carry names, never indexes of a configuration: a worker with another configuration takes what it knows the
//! names of. Times are of the monotonic clock, which all VMs of a process share.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Of the layout; raised with every change of it, so that two versions of the filter in one process do not misread each
/// other.
const LAYOUT: u8 = 2;

/// The largest snapshot that is published: hundreds of thousands of types, far beyond any cluster.
pub const MAX_BYTES: usize = 16 << 20;

/// All that is known, or what a reader borrows of its bytes.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot<'s> {
    /// The apiservers; bit `n` of a set means the `n`th of these.
    #[serde(borrow)]
    pub apiservers: Vec<ApiserverState<'s>>,
    /// All types.
    #[serde(borrow)]
    pub types: Vec<TypeState<'s>>,
    /// Group-versions that were learned to be excluded.
    #[serde(borrow)]
    pub excluded: Vec<ExcludedState<'s>>,
    /// State of the list that those come from.
    #[serde(borrow)]
    pub api_services: PollState<'s>,
}

/// An apiserver, and how well it is known.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApiserverState<'s> {
    /// Its name.
    pub name: &'s str,
    /// Where it is polled. The same name elsewhere is another apiserver.
    pub discovery_cluster: &'s str,
    /// State of `/api` and `/apis`.
    #[serde(borrow)]
    pub halves: [PollState<'s>; 2],
    /// State of the root of OpenAPI v3.
    #[serde(borrow)]
    pub open_api: PollState<'s>,
}

/// What the polls of one document have come to.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PollState<'s> {
    /// There is a good document.
    pub is_known: bool,
    /// The latest poll was answered.
    pub is_fresh: bool,
    /// When the question was sent whose answer, or want of one, made this state; `None`: there was none yet.
    pub heard: Option<Duration>,
    /// When the question was sent whose answer is the latest good one.
    pub told: Option<Duration>,
    /// When the next poll is due.
    pub next_due: Duration,
    /// Failures in a row.
    pub failures: u32,
    /// Entity tag of the document.
    pub etag: Option<&'s str>,
    /// When the question was sent that brought the document.
    pub version: Option<Duration>,
    /// Hash of its body.
    pub digest: Option<u64>,
}

/// A type.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TypeState<'s> {
    /// Group, version, resource, subresource.
    #[serde(borrow)]
    pub names: [&'s [u8]; 4],
    /// Who lists it.
    pub servers: u64,
    /// When it vanished from the last document.
    pub vanished_at: Option<Duration>,
}

/// A group-version that is excluded.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExcludedState<'s> {
    /// Group.
    pub group: &'s str,
    /// Version.
    pub version: &'s str,
    /// When it vanished from the list.
    pub vanished_at: Option<Duration>,
}

/// Why a snapshot is not used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SnapshotError {
    /// More than [`MAX_BYTES`].
    #[error("{0} bytes are too many to publish")]
    TooLarge(usize),
    /// Another layout, or not a snapshot at all.
    #[error("not a snapshot of layout {LAYOUT}")]
    Unreadable,
}

impl<'s> Snapshot<'s> {
    /// The bytes to publish.
    ///
    /// # Errors
    /// [`SnapshotError::TooLarge`].
    pub fn to_bytes(&self) -> Result<Vec<u8>, SnapshotError> {
        let bytes = postcard::to_extend(self, vec![LAYOUT]).map_err(|_| SnapshotError::Unreadable)?;
        if bytes.len() > MAX_BYTES { Err(SnapshotError::TooLarge(bytes.len())) } else { Ok(bytes) }
    }

    /// Reads what was published.
    ///
    /// # Errors
    /// [`SnapshotError::Unreadable`].
    pub fn from_bytes(bytes: &'s [u8]) -> Result<Self, SnapshotError> {
        let (layout, rest) = bytes.split_first().ok_or(SnapshotError::Unreadable)?;
        if *layout != LAYOUT {
            return Err(SnapshotError::Unreadable);
        }
        postcard::from_bytes(rest).map_err(|_| SnapshotError::Unreadable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    fn snapshot() -> Snapshot<'static> {
        let poll = PollState {
            is_known: true,
            is_fresh: false,
            heard: Some(Duration::from_millis(1234)),
            told: Some(Duration::from_millis(1000)),
            next_due: Duration::from_secs(9),
            failures: 3,
            etag: Some("\"tag\""),
            version: Some(Duration::from_millis(900)),
            digest: Some(u64::MAX),
        };
        Snapshot {
            apiservers: vec![ApiserverState {
                name: "cp-1",
                discovery_cluster: "cp-1-poll",
                halves: [poll.clone(), PollState::default()],
                open_api: PollState::default(),
            }],
            types: vec![TypeState { names: [b"", b"v1", b"p\xffds", b"log"], servers: 1 << 63, vanished_at: None }],
            excluded: vec![ExcludedState { group: "g", version: "v1", vanished_at: Some(Duration::from_secs(5)) }],
            api_services: poll,
        }
    }

    #[test]
    fn bytes_come_back_as_they_were() {
        let bytes = snapshot().to_bytes().unwrap();
        assert_eq!(Snapshot::from_bytes(&bytes), Ok(snapshot()));
    }

    #[test]
    fn other_bytes_are_refused_and_kill_nothing() {
        let bytes = snapshot().to_bytes().unwrap();
        assert_eq!(Snapshot::from_bytes(b""), Err(SnapshotError::Unreadable));
        let mut other_layout = bytes.clone();
        other_layout[0] = LAYOUT + 1;
        assert_eq!(Snapshot::from_bytes(&other_layout), Err(SnapshotError::Unreadable));
        for cut in 0..bytes.len() {
            assert_eq!(Snapshot::from_bytes(&bytes[..cut]), Err(SnapshotError::Unreadable), "cut at {cut}");
        }
        for position in 1..bytes.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = bytes.clone();
                changed[position] = value;
                let _read_or_refused = Snapshot::from_bytes(&changed);
            }
        }
        // A length that no memory holds.
        let _refused = Snapshot::from_bytes(&[LAYOUT, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01]);
    }
}

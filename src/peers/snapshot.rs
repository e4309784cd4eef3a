//! What the leader publishes and the others adopt: all that is known of the apiservers, in bytes.
//!
//! Entries carry names, never indexes of a configuration: a worker with another configuration takes what it knows the
//! names of. Times are of the monotonic clock, which all VMs of a process share.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::peers::table::{ApiserverSet, MAX_APISERVERS};

/// Of the layout; raised with every change of it, so that two versions of the filter in one process do not misread each
/// other.
const LAYOUT: u8 = 3;

/// The largest snapshot that is published: hundreds of thousands of types, far beyond any cluster.
pub const MAX_BYTES: usize = 16 << 20;

/// How long a leader keeps what was told of apiservers that its configuration does not name, unless types are remembered
/// for longer: it may be an older one that is being drained, for ten minutes if Envoy is not told otherwise.
const KEEP_OTHERS: Duration = Duration::from_secs(15 * 60);

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
    /// Group-versions that it calls stale.
    #[serde(borrow)]
    pub stale: Vec<(&'s str, &'s str)>,
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
    /// Adds what `previous` tells of apiservers that this one does not name. Whoever takes over from a leader with another
    /// configuration then knows what was known before that one led.
    pub fn keep_others(&mut self, previous: &Self, forget_after: Duration, now: Duration) {
        let since = now.saturating_sub(forget_after.max(KEEP_OTHERS));
        let is_named = |other: &ApiserverState<'_>| self.apiservers.iter().any(|state| state.is_about(other));
        let (places, others): (Vec<_>, Vec<_>) = previous
            .apiservers
            .iter()
            .enumerate()
            .filter(|(_, other)| other.halves.iter().any(|half| half.heard >= Some(since)) && !is_named(other))
            .take(MAX_APISERVERS.saturating_sub(self.apiservers.len()))
            .unzip();
        let first = self.apiservers.len();
        self.apiservers.extend(others.into_iter().map(ApiserverState::unconfirmed));
        for state in &previous.types {
            let theirs = ApiserverSet::from_bits(state.servers);
            let is_server = |(_, place): &(usize, &usize)| theirs.contains(**place);
            let servers = places.iter().enumerate().filter(is_server).map(|(nth, _)| first.saturating_add(nth));
            let servers = servers.collect::<ApiserverSet>().bits();
            if servers != 0 {
                // Of a type that stands here twice both entries count.
                self.types.push(TypeState { names: state.names, servers, vanished_at: None });
            }
        }
    }

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

impl ApiserverState<'_> {
    fn is_about(&self, other: &ApiserverState<'_>) -> bool {
        self.name == other.name && self.discovery_cluster == other.discovery_cluster
    }

    /// The same, which nobody polls any more.
    fn unconfirmed(&self) -> Self {
        let halves = self.halves.clone().map(|half| PollState { is_fresh: false, ..half });
        Self { halves, open_api: self.open_api.clone(), ..*self }
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
            stale: vec![("depot.k8s.io", "v1")],
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
    fn a_table_that_is_too_large_is_not_published() {
        let names = "x".repeat(MAX_BYTES);
        let kind =
            |length| TypeState { names: [b"", b"v1", &names.as_bytes()[..length], b""], servers: 1, vanished_at: None };
        let published = |length| Snapshot { types: vec![kind(length)], ..snapshot() }.to_bytes();
        let bytes = published(MAX_BYTES / 2).unwrap().len();
        let rest = bytes - MAX_BYTES / 2;
        assert_eq!(published(MAX_BYTES - rest).map(|bytes| bytes.len()), Ok(MAX_BYTES));
        assert_eq!(published(MAX_BYTES - rest + 1), Err(SnapshotError::TooLarge(MAX_BYTES + 1)));
    }

    const MINUTE: Duration = Duration::from_secs(60);

    /// A snapshot of apiservers, each heard of at minute 60, and of types with those that serve them.
    fn telling(names: &[(&'static str, &'static str)], types: &[(&'static [u8], u64)]) -> Snapshot<'static> {
        let heard = PollState { is_known: true, is_fresh: true, heard: Some(MINUTE * 60), ..PollState::default() };
        let apiserver = |(name, discovery_cluster)| ApiserverState {
            name,
            discovery_cluster,
            halves: [heard.clone(), heard.clone()],
            open_api: heard.clone(),
        };
        let kind = |(resource, servers)| TypeState { names: [b"", b"v1", resource, b""], servers, vanished_at: None };
        Snapshot {
            apiservers: names.iter().copied().map(apiserver).collect(),
            types: types.iter().copied().map(kind).collect(),
            excluded: Vec::new(),
            api_services: PollState::default(),
        }
    }

    #[test]
    fn what_was_told_of_apiservers_that_a_leader_does_not_name_is_kept() {
        let (zero, one, two) = (("cp-0", "poll-0"), ("cp-1", "poll-1"), ("cp-2", "poll-2"));
        let elsewhere = ("cp-1", "elsewhere");
        let previous = telling(&[two, one, zero], &[(b"pods", 0b111), (b"crates", 0b010), (b"boxes", 0b100)]);
        let own = [(&b"pods"[..], 0b1)];
        for (named, forget_after, now, names, types, why) in [
            (&[zero][..], 5, 61, &[zero, two, one][..], &[(&b"pods"[..], 0b110), (b"crates", 0b100)][..], "both"),
            (&[one], 5, 61, &[one, two, zero], &[(b"pods", 0b110), (b"boxes", 0b100)], "in another order"),
            (&[zero, one, two], 5, 61, &[zero, one, two], &[], "all are named"),
            (
                &[zero, elsewhere, two],
                5,
                61,
                &[zero, elsewhere, two, one],
                &[(b"pods", 0b1000), (b"crates", 0b1000)],
                "the same name elsewhere is another one",
            ),
            (
                &[zero],
                5,
                75,
                &[zero, two, one],
                &[(b"pods", 0b110), (b"crates", 0b100)],
                "as long as one may be drained",
            ),
            (&[zero], 5, 76, &[zero], &[], "not for ever"),
            (&[zero], 30, 76, &[zero, two, one], &[(b"pods", 0b110), (b"crates", 0b100)], "as long as types are kept"),
        ] {
            let mut snapshot = telling(named, &own);
            snapshot.keep_others(&previous, MINUTE * forget_after, MINUTE * now);
            let kept: Vec<_> = snapshot.apiservers.iter().map(|state| (state.name, state.discovery_cluster)).collect();
            assert_eq!(kept, names, "{why}");
            assert_eq!(snapshot.types, telling(&[], &[&own[..], types].concat()).types, "{why}");
            for (place, state) in snapshot.apiservers.iter().enumerate() {
                let is_fresh = place < named.len();
                assert!(state.halves.iter().all(|half| half.is_known && half.is_fresh == is_fresh), "{why}");
            }
        }
    }

    #[test]
    fn a_set_holds_no_more_apiservers_than_it_has_bits() {
        let mut snapshot = telling(&[("cp-0", "poll-0"); MAX_APISERVERS - 1], &[]);
        let previous = telling(&[("cp-1", "poll-1"), ("cp-2", "poll-2")], &[(b"pods", 0b11)]);
        snapshot.keep_others(&previous, MINUTE, MINUTE * 60);
        assert_eq!(snapshot.apiservers.len(), MAX_APISERVERS);
        assert_eq!(snapshot.types[0].servers, 1 << 63);
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

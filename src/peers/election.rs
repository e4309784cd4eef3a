//! Who of an Envoy's workers polls the apiservers for all of them.
//!
//! Each worker has a VM of its own, and all of them see one small record in Envoy's shared data: the [`Lease`]. Whoever
//! holds it polls and publishes; the others read, and poll for themselves what its configuration leaves out. It is renewed
//! long before it ends, so a holder that dies is replaced within one lease. Pure: the record comes in, and what to write
//! comes out; the caller writes it only if nobody else has written meanwhile (compare and swap).

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How long a holder is believed to live without a sign. Longer than a busy worker may be away from its timers, shorter
/// than a refresh interval.
pub const LEASE: Duration = Duration::from_secs(2);

/// A holder renews its lease when less than this is left: half of it is for the renewal to be late.
const RENEW: Duration = Duration::from_secs(1);

/// How much longer a configuration that has been replaced waits before it leads again: the newer one may be drained or
/// rolled back, and its workers gone. Candidates with the newer one claim at the end of the lease, some ticks earlier, and
/// take the lead back whenever they come.
const REPLACED_PATIENCE: Duration = Duration::from_millis(200);

/// The record. Times are of the monotonic clock, which all VMs of a process share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Who leads: see [`Candidate::id`].
    pub holder: u64,
    /// When the holder's configuration was loaded.
    pub configured_at: Duration,
    /// What the holder's configuration wants to be polled: see [`Candidate::poll_set`].
    pub poll_set: u64,
    /// Until when the lease holds.
    pub expires_at: Duration,
    /// Changes with everything that the holder publishes; 0: nothing yet.
    pub generation: u64,
}

/// A root context that could lead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// A random number of its own.
    pub id: u64,
    /// When its configuration was loaded. Of two that want different things the newer one counts: the current one, or an
    /// older one that a trapped VM has loaded again while its listener is being drained. Nothing tells them apart, for a
    /// rollback looks the same.
    pub configured_at: Duration,
    /// Hash of what the configuration wants to be polled. Candidates with the same one can stand in for each other.
    pub poll_set: u64,
}

/// What a candidate does now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It leads, until the next look at least.
    Lead,
    /// It leads if it can write this lease before anybody else writes another.
    Write(Lease),
    /// Another one leads that wants the same to be polled.
    Follow,
    /// Another one leads that wants something else to be polled.
    Stray,
}

impl Candidate {
    /// Decides from the lease as it stands; `None`: there is none yet.
    pub fn step(self, lease: Option<Lease>, now: Duration) -> Step {
        let Some(lease) = lease else { return Step::Write(self.lease(now, 0)) };
        let is_mine = lease.holder == self.id;
        let left = lease.expires_at.saturating_sub(now);
        if is_mine {
            return if left > RENEW { Step::Lead } else { Step::Write(self.lease(now, lease.generation)) };
        }
        let wants_the_same = lease.poll_set == self.poll_set;
        let is_newer = self.configured_at > lease.configured_at;
        let may_claim = match (wants_the_same, is_newer) {
            (true, _) => left.is_zero(),
            (false, true) => true,
            (false, false) => lease.expires_at.saturating_add(REPLACED_PATIENCE) <= now,
        };
        match (may_claim, wants_the_same) {
            (true, _) => Step::Write(self.lease(now, lease.generation)),
            (false, true) => Step::Follow,
            (false, false) => Step::Stray,
        }
    }

    /// The lease that it would hold from now on.
    pub fn lease(self, now: Duration, generation: u64) -> Lease {
        Lease {
            holder: self.id,
            configured_at: self.configured_at,
            poll_set: self.poll_set,
            expires_at: now.saturating_add(LEASE),
            generation,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(all(target_family = "wasm", target_os = "unknown"))]
    use wasm_bindgen_test::wasm_bindgen_test as test;

    fn millis(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    const fn candidate(id: u64, configured_at: u64, poll_set: u64) -> Candidate {
        Candidate { id, configured_at: Duration::from_secs(configured_at), poll_set }
    }

    #[test]
    fn a_lease_is_taken_renewed_and_inherited() {
        let (one, two) = (candidate(1, 5, 7), candidate(2, 6, 7));
        let (old, new) = (candidate(3, 1, 8), candidate(4, 9, 9));
        let held = one.lease(millis(10_000), 42);
        for (candidate, lease, now, expected, why) in [
            (one, None, 10_000, Step::Write(one.lease(millis(10_000), 0)), "nobody leads"),
            (one, Some(held), 10_900, Step::Lead, "its own, still good"),
            (one, Some(held), 11_100, Step::Write(one.lease(millis(11_100), 42)), "its own, to be renewed"),
            (one, Some(held), 60_000, Step::Write(one.lease(millis(60_000), 42)), "its own, and nobody took it"),
            (two, Some(held), 11_999, Step::Follow, "another's"),
            (two, Some(held), 12_000, Step::Write(two.lease(millis(12_000), 42)), "another's, and that one is dead"),
            (
                new,
                Some(held),
                10_001,
                Step::Write(new.lease(millis(10_001), 42)),
                "a newer configuration leads at once",
            ),
            (old, Some(held), 10_001, Step::Stray, "an older one has been replaced"),
            (old, Some(held), 12_199, Step::Stray, "and keeps quiet for a while longer"),
            (
                old,
                Some(held),
                12_200,
                Step::Write(old.lease(millis(12_200), 42)),
                "until the newer one is gone for good",
            ),
        ] {
            assert_eq!(candidate.step(Some(lease).flatten(), millis(now)), expected, "{why}");
        }
    }

    #[test]
    fn of_many_one_leads_and_a_dead_leader_is_replaced_within_a_lease() {
        let candidates: Vec<_> = (1..9).map(|id| candidate(id, 1, 7)).collect();
        let (mut lease, mut dead) = (None, None);
        let mut led_last = Vec::new();
        for tick in 0..200_u64 {
            let now = millis(5_000 + tick * 100);
            let mut leaders = Vec::new();
            for candidate in candidates.iter().filter(|candidate| Some(candidate.id) != dead) {
                match candidate.step(lease, now) {
                    Step::Lead => leaders.push(candidate.id),
                    Step::Write(next) => {
                        lease = Some(next);
                        leaders.push(candidate.id);
                    }
                    Step::Follow | Step::Stray => {}
                }
            }
            assert!(leaders.len() <= 1, "tick {tick}: {leaders:?}");
            if tick == 100 {
                dead = leaders.first().copied();
            }
            led_last = leaders;
            if tick > 100 + 20 {
                assert_eq!(led_last.len(), 1, "tick {tick}: nobody leads a lease after the leader died");
            }
        }
        assert_ne!(led_last.first().copied(), dead);
    }
}

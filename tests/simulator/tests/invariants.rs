//! Many short stories, and the proof that the simulator would notice.

use std::thread;

use simulator::plant::Plant;
use simulator::{Broken, Summary, run, trace};

/// Length of a story here; `scripts/simulate` tells longer ones.
const STEPS: u64 = 2_000;

/// How many.
const SEEDS: u64 = 200;

#[test]
fn nothing_breaks() {
    const THREADS: u64 = 2;
    let share = |first: u64| {
        let mut summary = Summary::default();
        for seed in (first..=SEEDS).step_by(THREADS as usize) {
            let (seen, violation) = run(seed, STEPS, None);
            summary += seen;
            if let Some(violation) = violation {
                let story = trace(seed, STEPS, None, 40).join("\n");
                panic!("seed {seed}: {:?}: {}\n{story}", violation.broken, violation.story);
            }
        }
        summary
    };
    let mut summary = Summary::default();
    thread::scope(|scope| {
        let shares: Vec<_> = (1..=THREADS).map(|first| scope.spawn(move || share(first))).collect();
        shares.into_iter().for_each(|share| summary += share.join().unwrap());
    });
    // A simulator in which nothing happens proves nothing.
    assert!(summary.requests > 30_000 && summary.reroutes > 3_000 && summary.faults > 1_000, "{summary}");
    assert!(summary.passed_404s > 5_000 && summary.guarded_404s > 5_000 && summary.held > 3_000, "{summary}");
    assert!(summary.documents > 1_500 && summary.marked > 200 && summary.namespaces > 200, "{summary}");
}

#[test]
fn the_same_seed_tells_the_same_story() {
    for seed in [1, 2, 3] {
        let (first, again) = (trace(seed, STEPS, None, usize::MAX), trace(seed, STEPS, None, usize::MAX));
        assert!(first.len() > 1_000 && first == again, "seed {seed}");
    }
}

/// What upstream does wrong breaks what we promise, and the simulator sees it: sooner or later.
fn is_found(plant: Plant, expected: &[Broken]) {
    const MANY_SEEDS: u64 = 10 * SEEDS;
    let mut others = Vec::new();
    for seed in 1..=MANY_SEEDS {
        match run(seed, 3 * STEPS, Some(plant)).1 {
            Some(violation) if expected.contains(&violation.broken) => return,
            Some(violation) => others.push((seed, violation.broken)),
            None => {}
        }
    }
    panic!("{plant:?} is not found; what is: {others:?}");
}

/// False 404s, and what garbage collectors make of them.
const LIES: &[Broken] =
    &[Broken::ServedYetNotFound, Broken::ForgottenTooSoon, Broken::ForeignNotFound, Broken::OrphanedByMistake];

#[test]
fn a_peer_that_is_dropped_on_a_failed_poll_is_found() {
    is_found(Plant::DropOnFailedPoll, LIES);
}

#[test]
fn a_peer_that_is_forgotten_when_it_stops_cleanly_is_found() {
    is_found(Plant::ForgetCleanlyStopped, LIES);
}

#[test]
fn a_404_that_passes_while_peers_are_unknown_is_found() {
    is_found(Plant::PassWhileUnsynced, LIES);
}

#[test]
fn ignored_subresources_are_found() {
    is_found(Plant::IgnoreSubresources, LIES);
}

#[test]
fn a_stale_group_version_that_is_believed_is_found() {
    is_found(Plant::BelieveStale, LIES);
}

#[test]
fn a_retry_after_on_every_503_is_found() {
    is_found(Plant::RetryAlways, &[Broken::ExecutedTwice]);
}

#[test]
fn a_missing_guard_is_found() {
    is_found(Plant::NoGuard, LIES);
}

#[test]
fn two_envoys_one_poll_apart_are_found() {
    is_found(Plant::NotFoundFromLastPoll, LIES);
}

#[test]
fn a_namespace_that_goes_by_discovery_one_poll_old_is_found() {
    is_found(Plant::DiscoveryFromLastPoll, &[Broken::NamespaceGoneTooSoon]);
}

#[test]
fn discovery_that_lacks_something_is_found() {
    is_found(Plant::PassWhileUnsynced, &[Broken::IncompletePassedForComplete]);
}

#[test]
fn a_namespace_controller_that_does_not_heed_the_mark_is_found() {
    is_found(Plant::IgnoreMarks, &[Broken::NamespaceGoneTooSoon]);
}

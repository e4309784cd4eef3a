//! Several workers of one Envoy: one polls for all, and what it knows outlives it.

use std::collections::BTreeSet;
use std::time::Duration;

use host_emulator::{Host, RootId, Vm, Worker};
use lifecycle::{NEW, SIDECAR, discovery, get};

/// The same apiservers but for `cp-2`.
const SMALLER: &str = r#"{"apiservers": [
    {"name": "cp-0", "cluster": "cp-0", "discoveryCluster": "cp-0-poll"},
    {"name": "cp-1", "cluster": "cp-1", "discoveryCluster": "cp-1-poll"}], "local": "cp-0"}"#;

/// Without the only one that serves [`NEW`].
const WITHOUT_CP_1: &str = r#"{"apiservers": [
    {"name": "cp-0", "cluster": "cp-0", "discoveryCluster": "cp-0-poll"},
    {"name": "cp-2", "cluster": "cp-2", "discoveryCluster": "cp-2-poll"}], "local": "cp-0"}"#;

fn configure(worker: &Worker, configuration: &'static str) -> RootId {
    worker.run(move |vm| vm.configure(configuration).unwrap()).unwrap()
}

/// One tick of a worker's root, in which apiservers answer at once; how many polls it sent.
fn tick(worker: &Worker, root: RootId) -> usize {
    polled_in_a_tick(worker, root).len()
}

/// The same; the clusters that it polled.
fn polled_in_a_tick(worker: &Worker, root: RootId) -> Vec<String> {
    worker
        .run(move |vm| {
            vm.tick(root);
            let calls = vm.calls();
            for call in &calls {
                vm.respond(call.token, discovery(call));
            }
            calls.into_iter().map(|call| call.upstream).collect()
        })
        .unwrap()
}

fn rerouted_to(worker: &Worker, root: RootId) -> Option<String> {
    let look = move |vm: &mut Vm| {
        let outcome = get(vm, root, NEW);
        outcome.filter_state_text("mixed_version_proxy.cluster").map(str::to_owned)
    };
    worker.run(look).unwrap()
}

#[test]
fn one_of_many_polls_and_all_know() {
    let host = Host::new();
    let workers: Vec<_> = (0..5).map(|_| host.worker()).collect();
    let roots: Vec<_> = workers.iter().map(|worker| configure(worker, SIDECAR)).collect();
    let mut polls = [0; 5];
    for _ in 0..300 {
        host.advance(Duration::from_millis(100));
        for (index, worker) in workers.iter().enumerate() {
            polls[index] += tick(worker, roots[index]);
        }
    }
    assert_eq!(polls.iter().filter(|count| **count > 0).count(), 1, "one polls: {polls:?}");
    let all: usize = polls.iter().sum();
    assert!((35..=49).contains(&all), "{all} questions in six intervals, seven each");
    for (worker, root) in workers.iter().zip(roots) {
        assert_eq!(rerouted_to(worker, root).as_deref(), Some("cp-1"));
    }
}

#[test]
fn a_leader_that_dies_is_replaced_within_a_lease() {
    let host = Host::new();
    let (first, second) = (host.worker(), host.worker());
    let (first_root, second_root) = (configure(&first, SIDECAR), configure(&second, SIDECAR));
    // Tenths of a second until the second one polls, once the first one never ticks again.
    let first_poll = || {
        (1..=70).find(|_| {
            host.advance(Duration::from_millis(100));
            tick(&second, second_root) > 0
        })
    };
    host.advance(Duration::from_millis(100));
    assert!(tick(&first, first_root) > 0 && tick(&second, second_root) == 0);
    assert_eq!(first_poll(), Some(20), "it died before it told anything: the lease ends, and all is asked again");

    let (first, first_root) = (second, second_root);
    let second = host.worker();
    let second_root = configure(&second, SIDECAR);
    host.advance(Duration::from_millis(100));
    assert_eq!((tick(&first, first_root), tick(&second, second_root)), (0, 0), "all is told");
    let after = (1..=70).find(|_| {
        host.advance(Duration::from_millis(100));
        tick(&second, second_root) > 0
    });
    assert!(matches!(after, Some(45..=52)), "the successor keeps the schedule: {after:?} tenths of a second");
}

#[test]
fn a_new_worker_and_a_new_configuration_start_from_what_is_known() {
    let host = Host::new();
    let leader = host.worker();
    let root = configure(&leader, SIDECAR);
    for _ in 0..3 {
        host.advance(Duration::from_millis(100));
        tick(&leader, root);
    }
    // A VM that was loaded again, and one with a configuration that was pushed: no tick yet, no poll.
    for configuration in [SIDECAR, SMALLER] {
        let fresh = host.worker();
        let root = configure(&fresh, configuration);
        assert_eq!(rerouted_to(&fresh, root).as_deref(), Some("cp-1"), "{configuration}");
    }
    let without = host.worker();
    let root = configure(&without, WITHOUT_CP_1);
    assert_eq!(rerouted_to(&without, root), None, "never to an apiserver that is not configured");
}

#[test]
fn the_newest_configuration_leads_and_an_older_one_falls_silent() {
    let host = Host::new();
    let worker = host.worker();
    let old = configure(&worker, SIDECAR);
    for _ in 0..3 {
        host.advance(Duration::from_millis(100));
        tick(&worker, old);
    }
    let new = configure(&worker, SMALLER);
    let (mut of_old, mut of_new) = (0, 0);
    for _ in 0..200 {
        host.advance(Duration::from_millis(100));
        of_new += tick(&worker, new);
        of_old += tick(&worker, old);
    }
    assert_eq!(of_old, 0, "the replaced configuration polls nobody");
    assert!((15..=25).contains(&of_new), "{of_new} polls in four intervals, five each");
    assert_eq!(rerouted_to(&worker, old).as_deref(), Some("cp-1"), "and goes on serving until it is drained");
}

#[test]
fn what_only_the_current_configuration_names_is_polled_while_an_older_one_leads_again() {
    let host = Host::new();
    let (current, trapped) = (host.worker(), host.worker());
    let current_root = configure(&current, SIDECAR);
    host.advance(Duration::from_millis(100));
    tick(&current, current_root);
    // Its listener is being drained, its VM has trapped, and a stream has loaded it again.
    let old_root = configure(&trapped, WITHOUT_CP_1);
    // Whom the current configuration polls in a minute.
    let polled = |has_requests: bool| -> BTreeSet<String> {
        let mut polled = BTreeSet::new();
        for tenth in 0..600 {
            host.advance(Duration::from_millis(100));
            tick(&trapped, old_root);
            if has_requests && tenth % 50 == 0 {
                assert_eq!(rerouted_to(&current, current_root).as_deref(), Some("cp-1"), "at tenth {tenth}");
            }
            polled.extend(polled_in_a_tick(&current, current_root));
        }
        polled
    };
    assert_eq!(polled(false), BTreeSet::new(), "nobody needs it");
    assert_eq!(polled(true), BTreeSet::from(["cp-1-poll".to_owned()]), "the others are polled by the leader");
    assert!(!polled(false).is_empty(), "for a while yet");
    assert_eq!(polled(false), BTreeSet::new(), "nobody needs it any more");
}

#[test]
fn what_was_known_outlives_a_leader_with_another_configuration() {
    let host = Host::new();
    let (worker, trapped) = (host.worker(), host.worker());
    let root = configure(&worker, SIDECAR);
    for _ in 0..3 {
        host.advance(Duration::from_millis(100));
        tick(&worker, root);
    }
    let old_root = configure(&trapped, WITHOUT_CP_1);
    for _ in 0..200 {
        host.advance(Duration::from_millis(100));
        tick(&trapped, old_root);
    }
    let fresh = host.worker();
    let root = configure(&fresh, SIDECAR);
    assert_eq!(rerouted_to(&fresh, root).as_deref(), Some("cp-1"));
}

#[test]
fn two_hundred_configurations_leave_three_records() {
    let host = Host::new();
    let worker = host.worker();
    let mut previous = None;
    for push in 0..200 {
        let root = configure(&worker, if push % 2 == 0 { SIDECAR } else { SMALLER });
        host.advance(Duration::from_millis(100));
        tick(&worker, root);
        assert!(rerouted_to(&worker, root).is_some() || push == 0, "push {push}");
        if let Some(previous) = previous.replace(root) {
            worker.run(move |vm| vm.shutdown(previous)).unwrap();
        }
    }
    let keys: Vec<_> = host.all_shared_data().into_iter().map(|(_, key, _)| String::from_utf8(key).unwrap()).collect();
    assert!(keys.len() <= 3, "{keys:?}");
}

#[test]
fn a_worker_that_sees_a_reason_reaches_the_leader() {
    let host = Host::new();
    let (leader, other) = (host.worker(), host.worker());
    let (leader_root, other_root) = (configure(&leader, SIDECAR), configure(&other, SIDECAR));
    for _ in 0..20 {
        host.advance(Duration::from_millis(100));
        tick(&leader, leader_root);
        tick(&other, other_root);
    }
    let fail = move |vm: &mut Vm| {
        let stream = get(vm, other_root, NEW).stream;
        let details = "upstream_reset_before_response_started{connection_termination}";
        vm.response(stream, [(":status", "503")], [("response.code_details", details), ("xds.cluster_name", "cp-1")]);
    };
    other.run(fail).unwrap();
    host.advance(Duration::from_millis(100));
    assert_eq!(tick(&leader, leader_root), 2, "both documents of cp-1");
}

#[test]
fn records_of_any_bytes_are_survived() {
    for bytes in [
        &b""[..],
        b"\x00",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        &[1; 64],
    ] {
        let host = Host::new();
        let worker = host.worker();
        let root = configure(&worker, SIDECAR);
        host.advance(Duration::from_millis(100));
        tick(&worker, root);
        host.advance(Duration::from_millis(100));
        tick(&worker, root);
        for (_, key, _) in host.all_shared_data() {
            host.set_shared_data(key, bytes);
        }
        let second = host.worker();
        let second_root = configure(&second, SIDECAR);
        for _ in 0..100 {
            host.advance(Duration::from_millis(100));
            tick(&worker, root);
            tick(&second, second_root);
        }
        assert_eq!(rerouted_to(&worker, root).as_deref(), Some("cp-1"), "{bytes:?}");
        assert_eq!(rerouted_to(&second, second_root).as_deref(), Some("cp-1"), "{bytes:?}");
    }
}

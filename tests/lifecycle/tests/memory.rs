//! What a VM keeps: the same after many requests and refreshes as after a few.

use std::alloc::System;
use std::time::Duration;

use host_emulator::{Answer, Host, HttpCall, RootId, Vm};
use lifecycle::{COMMON, NEW, NOBODY, SIDECAR, answer, discovery, document, from_cluster, get, poll};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// More than this is a leak: a refresh or a request that kept a hundred bytes would show.
const SLACK: isize = 64 << 10;

/// How often: a thousand rounds make 12,000 requests and 1,000 refreshes. `ROUNDS` in the environment sets another number.
const ROUNDS: usize = 1_000;

/// One refresh, with other documents in every other round, and a dozen requests of all kinds.
fn round(vm: &mut Vm, root: RootId, number: usize) {
    let upstream = |call: &HttpCall| match (call.path(), number % 2) {
        ("/apis", 1) if call.upstream == "cp-2-poll" => {
            let etag = if number % 4 == 1 { "\"one\"" } else { "\"other\"" };
            let resource = if number % 4 == 1 { "ones" } else { "others" };
            Answer::new(200, [("content-type", "application/json"), ("etag", etag)], document("apps", resource))
        }
        _ => discovery(call),
    };
    vm.run_for_with(Duration::from_millis(5_100), |call| Some(upstream(call)));
    for path in [COMMON, NEW, NOBODY, "/apis", "/apis/depot.k8s.io/v1", "/openapi/v3"] {
        for status in [200, 404] {
            let stream = get(vm, root, path).stream;
            vm.response(stream, answer(status, "text/plain", 19), from_cluster("cp-0"));
            vm.run_for_with(Duration::from_millis(3), |call| Some(upstream(call)));
            vm.finish(stream);
        }
    }
    vm.take_logs();
    vm.take_host_calls();
}

#[test]
fn a_vm_keeps_nothing_of_what_is_over() {
    let rounds = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(ROUNDS);
    Host::new()
        .vm(move |vm| {
            let root = vm.configure(SIDECAR).unwrap();
            poll(vm);
            // Until all buffers have grown to their size, and what vanished is forgotten as often as it comes.
            (0..200).for_each(|number| round(vm, root, number));
            let region = Region::new(ALLOCATOR);
            (0..rounds).for_each(|number| round(vm, root, number));
            let change = region.change();
            let kept = change.bytes_allocated as isize - change.bytes_deallocated as isize;
            println!("{rounds} refreshes and {} requests keep {kept} bytes", rounds * 12);
            assert!(kept < SLACK, "{kept} bytes more after {rounds} rounds");
        })
        .unwrap();
}

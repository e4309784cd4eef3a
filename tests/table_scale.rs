//! The table at its largest: a look-up costs what it costs in a small one, and it fits every worker's memory.

#![cfg(not(target_family = "wasm"))]
#![allow(clippy::unwrap_used, clippy::panic, clippy::arithmetic_side_effects, reason = "a test fails by panicking")]

use std::alloc::System;
use std::hint::black_box;
use std::time::{Duration, Instant};

use mixed_version_proxy::discovery::document::{ApiResource, Document, GroupVersion, Half};
use mixed_version_proxy::peers::exclusions::Exclusions;
use mixed_version_proxy::peers::table::{Context, Table};
use mixed_version_proxy::target::{DecodedPath, Target};
use stats_alloc::{INSTRUMENTED_SYSTEM, Region, StatsAlloc};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// A document of `types` types, each fifth a subresource, in groups of twenty.
fn document(types: usize) -> Document {
    let resource = |number: usize| ApiResource {
        name: format!("storageversionmigrations{number}"),
        subresources: ["status", "scale", "approval", "finalizers"].map(str::to_owned).to_vec(),
    };
    let group_version = |group: usize| GroupVersion {
        group: format!("group{group}.storagemigration.k8s.io"),
        version: "v1".to_owned(),
        is_stale: false,
        resources: (group * 4..group * 4 + 4).map(resource).collect(),
    };
    Document { group_versions: (0..types / 20).map(group_version).collect() }
}

fn table(apiservers: usize, types: usize) -> Table {
    let (document, exclusions) = (document(types), Exclusions::default());
    let context = Context { exclusions: &exclusions, now: Duration::ZERO };
    (0..apiservers)
        .fold(Table::default(), |table, apiserver| table.with_document(apiserver, Half::Groups, &document, context))
}

/// Paths of all types of a table.
fn paths(types: usize) -> Vec<String> {
    let path = |number: usize| {
        let group = number / 4;
        format!(
            "/apis/group{group}.storagemigration.k8s.io/v1/namespaces/shop/storageversionmigrations{number}/m1/status"
        )
    };
    (0..types / 5).map(path).collect()
}

/// The time of one look-up, path and all: the best of many rounds, for machines are noisy.
fn time_of_look_up(table: &Table, paths: &[String], apiservers: usize) -> f64 {
    let rounds = (0..40).map(|_| {
        let start = Instant::now();
        for path in paths {
            let decoded = DecodedPath::new(path.as_bytes()).unwrap();
            let Target::Resource(resource) = decoded.target() else { panic!("{path}") };
            assert_eq!(black_box(table.look_up(&resource)).servers.iter().count(), apiservers);
        }
        start.elapsed().as_secs_f64() / paths.len() as f64
    });
    rounds.fold(f64::INFINITY, f64::min)
}

#[test]
fn the_largest_table_is_as_quick_as_a_small_one_and_fits_every_worker() {
    let small = table(3, 300);
    let region = Region::new(ALLOCATOR);
    let large = table(64, 5_000);
    let stats = region.change();
    let bytes = stats.bytes_allocated - stats.bytes_deallocated;
    println!("64 apiservers x 5,000 types: {bytes} bytes");
    assert_eq!((small.len(), large.len()), (300, 5_000));
    assert!(bytes < 8 << 20, "{bytes} bytes");

    // The same number of members is counted in both, so that only the look-up differs.
    let large = table(3, 5_000);
    let (small_paths, large_paths) = (paths(300), paths(5_000));
    let region = Region::new(ALLOCATOR);
    for path in &small_paths {
        let decoded = DecodedPath::new(path.as_bytes()).unwrap();
        let Target::Resource(resource) = decoded.target() else { panic!("{path}") };
        black_box(small.look_up(&resource));
    }
    assert_eq!(region.change().allocations, 0, "a look-up allocates nothing");
    let small_time = time_of_look_up(&small, &small_paths, 3);
    let large_time = time_of_look_up(&large, &large_paths, 3);
    println!("look-up: {:.0} ns in 300 types, {:.0} ns in 5,000", small_time * 1e9, large_time * 1e9);
    assert!(large_time <= 1.5 * small_time, "{large_time} s against {small_time} s");
}

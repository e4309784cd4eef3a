//! The fuzz targets without a fuzzer: their seeds, and what becomes of those by chance. `scripts/fuzz` goes deeper.

#![cfg(not(target_family = "wasm"))]
#![allow(
    clippy::arithmetic_side_effects,
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

use std::panic;
use std::path::Path;

use fastrand::Rng;

#[path = "../fuzz/seeds.rs"]
mod seeds;
#[path = "../fuzz/targets.rs"]
mod targets;

/// For each target; a few seconds for all in a build without optimisation.
const INPUTS: usize = 3000;

/// Larger seeds are run as they are: a change in a hundred kilobytes of text finds little, slowly.
const MAX_CHANGED_BYTES: usize = 4 << 10;

/// What means something to one of the parsers.
const WORDS: &[&[u8]] = &[
    b"\0", b"\"", b"\\", b"\\u0000", b"{", b"}", b"[", b"]", b",", b":", b"null", b"%2f", b"/", b"#", b"=", b"\xff",
    b"\x80",
];

fn changed(seeds: &[&Vec<u8>], random: &mut Rng) -> Vec<u8> {
    let mut input = seeds[random.usize(..seeds.len())].clone();
    for _ in 0..random.usize(1..6) {
        let place = random.usize(..=input.len());
        let end = random.usize(place..=(place + 16).min(input.len()));
        match random.u8(..6) {
            0 if place < input.len() => input[place] = random.u8(..),
            1 if place < input.len() => input[place] ^= 1 << random.u8(..8),
            2 => drop(input.drain(place..end)),
            3 => drop(input.splice(place..end, WORDS[random.usize(..WORDS.len())].iter().copied())),
            4 => {
                let other = seeds[random.usize(..seeds.len())];
                let from = random.usize(..=other.len());
                input.splice(place..end, other[from..(from + 64).min(other.len())].iter().copied());
            }
            _ => {
                let twice = input[place..end].to_vec();
                input.splice(place..place, twice);
            }
        }
    }
    input
}

#[test]
fn seeds_and_what_chance_makes_of_them_are_survived() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests");
    for (name, target) in targets::ALL {
        let seeds = seeds::of(name, &tests);
        let small: Vec<_> = seeds.iter().filter(|seed| seed.len() <= MAX_CHANGED_BYTES).collect();
        let mut random = Rng::with_seed(0);
        let changed = (0..INPUTS).map(|_| changed(&small, &mut random));
        for input in seeds.iter().cloned().chain(changed) {
            if let Err(failure) = panic::catch_unwind(|| target(&input)) {
                eprintln!("{name}: {:?}", String::from_utf8_lossy(&input));
                panic::resume_unwind(failure);
            }
        }
    }
}

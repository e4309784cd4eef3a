//! What the fuzzers have in common; `tests/fuzz_smoke.rs` runs the same targets without one.

use std::fs;
use std::path::Path;

pub mod seeds;
pub mod targets;

/// Puts the seeds of a target into its corpus, from where the fuzzer reads them next.
pub fn write_seeds(target: &str) {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let corpus = here.join("corpus").join(target);
    fs::create_dir_all(&corpus).expect("a corpus that can be written");
    for (index, seed) in seeds::of(target, &here.join("../tests")).into_iter().enumerate() {
        fs::write(corpus.join(format!("seed-{index:04}")), seed).expect("a corpus that can be written");
    }
}

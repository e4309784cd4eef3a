//! `scripts/simulate`: many seeds, and the whole story of the first one that goes wrong.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::thread;

use simulator::{Summary, Violation, run, trace};

const USAGE: &str = "usage: scripts/simulate [--seeds N] [--steps M] [--seed S] [--lines L]";

/// What was asked for on the command line.
struct Wanted {
    first: u64,
    seeds: u64,
    steps: u64,
    lines: usize,
}

fn wanted() -> Result<Wanted, String> {
    let mut wanted = Wanted { first: 1, seeds: 1_000, steps: 5_000, lines: 60 };
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let value = arguments.next().and_then(|value| value.parse::<u64>().ok()).ok_or(USAGE)?;
        match name.as_str() {
            "--seeds" => wanted.seeds = value,
            "--steps" => wanted.steps = value,
            "--seed" => (wanted.first, wanted.seeds) = (value, 1),
            "--lines" => wanted.lines = usize::try_from(value).map_err(|error| error.to_string())?,
            _ => return Err(USAGE.to_owned()),
        }
    }
    Ok(wanted)
}

/// All seeds, on all processors; the summary, and the failing seed with the lowest number.
fn simulate(wanted: &Wanted) -> (Summary, Vec<(u64, Violation)>) {
    let threads = thread::available_parallelism().map_or(1, usize::from) as u64;
    let share = |first: u64| {
        let mut summary = Summary::default();
        let mut failed = Vec::new();
        for seed in (first..wanted.first + wanted.seeds).step_by(threads as usize) {
            let (seen, violation) = run(seed, wanted.steps, None);
            summary += seen;
            failed.extend(violation.map(|violation| (seed, violation)));
        }
        (summary, failed)
    };
    thread::scope(|scope| {
        let shares: Vec<_> = (0..threads).map(|offset| scope.spawn(move || share(wanted.first + offset))).collect();
        let mut all = (Summary::default(), Vec::new());
        for (summary, failed) in shares.into_iter().filter_map(|share| share.join().ok()) {
            all.0 += summary;
            all.1.extend(failed);
        }
        all.1.sort_by_key(|(seed, _)| *seed);
        all
    })
}

fn main() -> ExitCode {
    let wanted = match wanted() {
        Ok(wanted) => wanted,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let (summary, failed) = simulate(&wanted);
    println!("seeds:               {}\n{summary}", wanted.seeds);
    let Some((seed, violation)) = failed.first() else {
        println!("every invariant held");
        return ExitCode::SUCCESS;
    };
    println!("\n{} seeds went wrong:", failed.len());
    let mut kinds: BTreeMap<String, Vec<&(u64, Violation)>> = BTreeMap::new();
    for failure in &failed {
        kinds.entry(format!("{:?}", failure.1.broken)).or_default().push(failure);
    }
    for (kind, failures) in kinds {
        println!("  {kind}: {} seeds", failures.len());
        for (seed, violation) in failures.iter().take(5) {
            println!("    seed {seed} {}", violation.story);
        }
    }
    println!("\nthe end of seed {seed} ({:?}):", violation.broken);
    for line in trace(*seed, wanted.steps, None, wanted.lines) {
        println!("{line}");
    }
    println!("\nagain: scripts/simulate --seed {seed} --steps {}", wanted.steps);
    ExitCode::FAILURE
}

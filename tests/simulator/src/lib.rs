//! A deterministic simulator: the filter's own poller, table, decision, election and guard against a world of faults.
//!
//! One seed is one story: a control plane of several apiservers that are upgraded, rolled back, cut off and broken in
//! other ways; several Envoys with workers that die and configurations that change; clients that try again as client-go
//! does, a garbage collector that deletes what it takes for orphaned, and a namespace controller that reads discovery through
//! one Envoy and deletes through another. Time is a number, chance is one generator, and
//! the same seed tells the same story again.
//!
//! The [world] knows by itself what each apiserver serves, and a [ledger] of its own notes what each Envoy has been told.
//! From these the [simulation](sim) judges what the filter does: see [`Broken`] for what must never happen. That it would
//! be seen is shown by [planting](plant) what upstream's own proxy does wrong.
//!
//! What is left out: legacy discovery and schemas (polled, but not read by anybody), which are made in the same go as the
//! documents that are read here; and `DryRun`, which changes nothing.

pub mod catalogue;
pub mod documents;
pub mod ledger;
pub mod plant;
pub mod root;
pub mod shared;
pub mod sim;
pub mod streams;
pub mod world;

use std::collections::VecDeque;
use std::fmt;
use std::ops::AddAssign;

use plant::Plant;
use sim::Sim;

/// What must never happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// The garbage collector has deleted what a living object owns.
    OrphanedByMistake,
    /// A write that a client asked for once was executed twice.
    ExecutedTwice,
    /// A client was told 404 for a type that a configured apiserver serves.
    ServedYetNotFound,
    /// A client was told 404 for a type that this Envoy has seen served not longer than `forgetAfter` ago.
    ForgottenTooSoon,
    /// A namespace is gone, and with it the way to objects of types that somebody served all along.
    NamespaceGoneTooSoon,
    /// A document that does not say that something may be missing lacks a type that an apiserver serves.
    IncompletePassedForComplete,
    /// A 404 passed that no apiserver has made.
    ForeignNotFound,
    /// A request went to an apiserver whose document does not list the type.
    ReroutedToStranger,
    /// A request went to an apiserver although rerouting is off, or the request has been rerouted before.
    ReroutedAgain,
    /// A custom resource was not left alone.
    ExclusionIgnored,
    /// Two workers of one process polled for longer than a lease.
    TwoLeaders,
    /// No worker of a process polled for longer than a lease.
    NobodyPolls,
    /// An answer was held for longer than questions may take.
    WaitsForEver,
    /// The faults are over, and a table is still wrong.
    StaysWrong,
    /// The faults are over, and a request is still refused.
    StaysUnavailable,
}

/// A story that went wrong.
#[derive(Debug, Clone)]
pub struct Violation {
    /// What must never happen, and has.
    pub broken: Broken,
    /// Who, when and what.
    pub story: String,
}

/// How much a simulation has seen.
#[derive(Debug, Clone, Copy, Default)]
pub struct Summary {
    /// Events but for the ticks of idle workers.
    pub steps: u64,
    /// Requests that reached an Envoy.
    pub requests: u64,
    /// Rerouted ones.
    pub reroutes: u64,
    /// 404s that clients got.
    pub passed_404s: u64,
    /// 404s that became 503s.
    pub guarded_404s: u64,
    /// Answers that were held until apiservers had been asked.
    pub held: u64,
    /// 503s that clients got, for whatever reason.
    pub unavailable: u64,
    /// Merged discovery documents that clients got.
    pub documents: u64,
    /// Those of them that said that something may be missing.
    pub marked: u64,
    /// Documents that lacked a served type because its apiserver did not answer questions, or called it stale.
    pub unanswered: u64,
    /// Namespaces that were deleted.
    pub namespaces: u64,
    /// Polls and questions.
    pub polls: u64,
    /// Faults injected.
    pub faults: u64,
    /// Times that something was compared with the truth.
    pub checks: u64,
}

impl AddAssign for Summary {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.requests += other.requests;
        self.reroutes += other.reroutes;
        self.passed_404s += other.passed_404s;
        self.guarded_404s += other.guarded_404s;
        self.held += other.held;
        self.unavailable += other.unavailable;
        self.documents += other.documents;
        self.marked += other.marked;
        self.unanswered += other.unanswered;
        self.namespaces += other.namespaces;
        self.polls += other.polls;
        self.faults += other.faults;
        self.checks += other.checks;
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "steps:               {}", self.steps)?;
        writeln!(f, "requests:            {}", self.requests)?;
        writeln!(f, "  rerouted:          {}", self.reroutes)?;
        writeln!(f, "  404 passed:        {}", self.passed_404s)?;
        writeln!(f, "  404 made a 503:    {}", self.guarded_404s)?;
        writeln!(f, "  held and asked:    {}", self.held)?;
        writeln!(f, "  503 in all:        {}", self.unavailable)?;
        writeln!(f, "discovery documents: {}", self.documents)?;
        writeln!(f, "  marked incomplete: {}", self.marked)?;
        writeln!(f, "  of mute ones:      {}", self.unanswered)?;
        writeln!(f, "namespaces deleted:  {}", self.namespaces)?;
        writeln!(f, "polls and questions: {}", self.polls)?;
        writeln!(f, "faults:              {}", self.faults)?;
        write!(f, "checks:              {}", self.checks)
    }
}

/// Tells the story of a seed: `steps` events of faults, then peace. The violation, if there is one, ends it.
pub fn run(seed: u64, steps: u64, plant: Option<Plant>) -> (Summary, Option<Violation>) {
    let mut sim = Sim::new(seed, steps, plant, None);
    let violation = sim.run();
    (sim.summary, violation)
}

/// Tells the story again and keeps its last `lines` lines.
pub fn trace(seed: u64, steps: u64, plant: Option<Plant>, lines: usize) -> Vec<String> {
    let mut sim = Sim::new(seed, steps, plant, Some((lines, VecDeque::new())));
    sim.run();
    sim.trace.map(|(_, lines)| lines.into()).unwrap_or_default()
}

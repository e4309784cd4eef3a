//! Behaviours of upstream's own mixed version proxy, planted to show that the simulator sees their harm.

/// What is done wrong on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plant {
    /// A failed poll makes the filter forget all that an apiserver serves.
    DropOnFailedPoll,
    /// So does the poll that fails because the apiserver was told to stop: every upgrade.
    ForgetCleanlyStopped,
    /// As long as one apiserver has not told what it serves, 404s pass, and an apiserver's own discovery.
    PassWhileUnsynced,
    /// A subresource counts as served where its resource is.
    IgnoreSubresources,
    /// An apiserver that calls a group-version stale counts as one that has said what is in it.
    BelieveStale,
    /// Every 503 carries `Retry-After`.
    RetryAlways,
    /// All 404s pass.
    NoGuard,
    /// Nobody is asked about a 404, so that two Envoys which poll at different times know different things.
    NotFoundFromLastPoll,
    /// Nobody is asked before discovery is served, so that two Envoys which poll at different times list different things.
    DiscoveryFromLastPoll,
    /// The namespace controller takes discovery for complete that says that it is not.
    IgnoreMarks,
}

/// All of them.
pub const PLANTS: [Plant; 10] = [
    Plant::DropOnFailedPoll,
    Plant::ForgetCleanlyStopped,
    Plant::PassWhileUnsynced,
    Plant::IgnoreSubresources,
    Plant::BelieveStale,
    Plant::RetryAlways,
    Plant::NoGuard,
    Plant::NotFoundFromLastPoll,
    Plant::DiscoveryFromLastPoll,
    Plant::IgnoreMarks,
];

//! What we know of the apiservers: their documents, how current those are, and who serves what.

pub mod backoff;
pub mod cluster_discovery;
pub mod documents;
pub mod election;
pub mod exclusions;
pub mod refresh;
pub mod snapshot;
pub mod table;

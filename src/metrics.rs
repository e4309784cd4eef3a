//! Names of the metrics. Where upstream has a metric of the same meaning, its name is used.

/// Requests for an apiserver's own discovery (`profile=nopeer`), which pass untouched. Upstream's name.
pub const NO_PEER_REQUESTS: &str = "aggregator_discovery_nopeer_requests_total";

/// Requests for discovery in a form that is not merged (protobuf, YAML, v2beta1), which pass untouched: their clients see
/// one apiserver alone.
pub const UNMERGED_REQUESTS: &str = "mixed_version_proxy_discovery_unmerged_requests_total";

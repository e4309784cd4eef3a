//! The plugin's configuration: JSON text or a serialized `google.protobuf.Struct` in, validated types out.
//!
//! Three steps, one module each: `node` reads either form into one tree, `raw` gives it the shape of the known keys,
//! `validate` turns keys into types that cannot be wrong. Every error begins with the path of the key. What each key
//! means for operators stands in `docs/configuration.md`, whose table a test compares with the code.

use std::time::Duration;

pub use self::error::ConfigError;

mod duration;
mod error;
mod node;
mod raw;
#[cfg(test)]
mod tests;
mod validate;

/// A valid configuration.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Config {
    /// All apiservers of the control plane, 1 to 64, in configuration order. No two share a name or a cluster.
    pub apiservers: Vec<Apiserver>,
    /// The apiserver beside this Envoy, an index into [`Config::apiservers`]: sidecar mode. `None`: gateway mode.
    pub local: Option<usize>,
    /// What happens to a request that the apiserver *here* does not serve.
    pub peer_proxying: PeerProxying,
    /// Whether discovery shows the whole cluster.
    pub peer_aggregated_discovery: PeerAggregatedDiscovery,
    /// How apiservers are asked what they serve.
    pub discovery: Discovery,
    /// Group-versions that no apiserver serves by itself: CRDs and aggregated APIs.
    pub exclusions: Exclusions,
    /// How a request's cluster is handed to Envoy's routes.
    pub reroute: Reroute,
    /// What becomes of clients' certificates.
    pub identity: Identity,
    /// The `Retry-After` of the filter's own 503 answers, 1 to 300.
    pub retry_after_seconds: u32,
}

/// One apiserver process, and the Envoy clusters that lead to it and to no other.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Apiserver {
    /// Sort key of merges and log field.
    pub name: String,
    /// Where requests are rerouted to.
    pub cluster: String,
    /// Where discovery is polled; [`Apiserver::cluster`] unless configured.
    pub discovery_cluster: String,
    /// The same apiserver over the front-proxy client certificate.
    pub front_proxy_cluster: Option<String>,
}

/// What happens to a request that another apiserver serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PeerProxying {
    /// It is rerouted.
    Enabled,
    /// It is never rerouted; a 503 takes the place of a 404 where a peer could serve it.
    Disabled,
    /// It is only logged.
    DryRun,
}

/// Whether discovery answers are merged over all apiservers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PeerAggregatedDiscovery {
    /// Clients see the whole cluster.
    Enabled,
    /// Clients see the apiserver that they reached.
    Disabled,
}

/// How apiservers are asked what they serve.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Discovery {
    /// Time between two polls of one apiserver, at least 100 ms.
    pub refresh_interval: Duration,
    /// How long a poll may take, at least 1 ms.
    pub timeout: Duration,
    /// How long a type that has vanished from every document is still missed.
    pub forget_after: Duration,
    /// Larger documents are refused; 1 KiB to 32 MiB.
    pub max_document_bytes: usize,
    /// `:authority` of polls: `host` or `host:port`.
    pub authority: String,
}

/// Group-versions that are never rerouted and never merged from peers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Exclusions {
    /// Whether they are learned from APIService objects.
    pub api_services: bool,
    /// Those that are excluded in any case.
    pub group_versions: Vec<GroupVersionPattern>,
    /// How long one stays excluded after it has vanished.
    pub grace_period: Duration,
}

/// A group, or one version of it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GroupVersionPattern {
    /// Never empty: the core group is built in.
    pub group: String,
    /// `None`: every version.
    pub version: Option<String>,
}

/// How a request's cluster is handed to Envoy's routes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Reroute {
    /// As filter state, which no client can set.
    FilterState {
        /// The key; routes see it as `wasm.<key>`.
        key: String,
    },
    /// As a request header.
    Header {
        /// The name, in lower case.
        name: String,
    },
}

/// What becomes of clients' certificates.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Whether the identity in a verified certificate is handed on.
    pub client_certificates: ClientCertificates,
    /// In a gateway: where "here" is for a request that carries such an identity. Set if it is handed on.
    pub front_proxy_cluster: Option<String>,
    /// The headers of the apiservers' `--requestheader-*` flags.
    pub headers: IdentityHeaders,
}

/// Where the identity of a client certificate goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ClientCertificates {
    /// Nowhere.
    Ignore,
    /// Into request headers, over a connection with the front-proxy certificate. Every apiserver has such a cluster.
    RequestHeader,
}

/// Names of headers that hold an identity, in lower case, at least one of each. The first of each is set; clients' own
/// are removed, whichever of them it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct IdentityHeaders {
    /// User name.
    pub user: Vec<String>,
    /// Groups, one header each.
    pub group: Vec<String>,
    /// UID.
    pub uid: Vec<String>,
    /// What the names of extra headers begin with.
    pub extra_prefix: Vec<String>,
}

impl Config {
    /// Reads and validates what Envoy hands to the plugin.
    ///
    /// ```
    /// use mixed_version_proxy::config::Config;
    ///
    /// let config = Config::parse(br#"{"apiservers": [{"name": "cp-1", "cluster": "cp-1"}], "local": "cp-1"}"#)?;
    /// assert_eq!(config.local, Some(0));
    ///
    /// let error = Config::parse(br#"{"apiservers": [{"name": "cp-1"}]}"#).unwrap_err();
    /// assert_eq!(error.to_string(), "apiservers[0].cluster: missing");
    /// # Ok::<(), mixed_version_proxy::config::ConfigError>(())
    /// ```
    pub fn parse(bytes: &[u8]) -> Result<Self, ConfigError> {
        validate::config(node::Node::read(bytes)?.shape()?)
    }

    /// Whether clients are shown the discovery of the whole cluster.
    pub fn merges_discovery(&self) -> bool {
        self.peer_aggregated_discovery == PeerAggregatedDiscovery::Enabled && self.peer_proxying != PeerProxying::DryRun
    }
}

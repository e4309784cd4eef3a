//! The keys of the configuration and their defaults, before their values are understood.
//!
//! Everything has a default here, so that a missing key is reported by its own path and not by its parent's.

use serde::Deserialize;

use super::duration::DurationText;

/// The default `reroute.key`. A name for filter state, where Envoy prepends `wasm.`; never a header.
pub(super) const DEFAULT_FILTER_STATE_KEY: &str = "mixed_version_proxy.cluster";

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default, expecting = "an object")]
pub(super) struct RawConfig {
    pub(super) apiservers: Option<Vec<RawApiserver>>,
    pub(super) local: Option<String>,
    pub(super) peer_proxying: String,
    pub(super) peer_aggregated_discovery: String,
    pub(super) discovery: RawDiscovery,
    pub(super) exclusions: RawExclusions,
    pub(super) reroute: RawReroute,
    pub(super) identity: RawIdentity,
    pub(super) retry_after_seconds: u64,
    pub(super) status: RawStatus,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default, expecting = "an object")]
pub(super) struct RawApiserver {
    pub(super) name: Option<String>,
    pub(super) cluster: Option<String>,
    pub(super) discovery_cluster: Option<String>,
    pub(super) front_proxy_cluster: Option<String>,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default, expecting = "an object")]
pub(super) struct RawDiscovery {
    pub(super) refresh_interval: DurationText,
    pub(super) timeout: DurationText,
    pub(super) forget_after: DurationText,
    pub(super) max_document_bytes: u64,
    pub(super) authority: String,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default, expecting = "an object")]
pub(super) struct RawExclusions {
    pub(super) api_services: bool,
    pub(super) group_versions: Vec<String>,
    pub(super) grace_period: DurationText,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default, expecting = "an object")]
pub(super) struct RawReroute {
    pub(super) by: String,
    pub(super) key: String,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default, expecting = "an object")]
pub(super) struct RawIdentity {
    pub(super) client_certificates: String,
    pub(super) front_proxy_cluster: Option<String>,
    pub(super) headers: RawIdentityHeaders,
}

#[derive(Debug, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default, expecting = "an object")]
pub(super) struct RawIdentityHeaders {
    pub(super) user: Vec<String>,
    pub(super) group: Vec<String>,
    pub(super) uid: Vec<String>,
    pub(super) extra_prefix: Vec<String>,
}

#[derive(Debug, Default, Deserialize)]
#[cfg_attr(test, derive(serde::Serialize))]
#[serde(rename_all = "camelCase", deny_unknown_fields, default, expecting = "an object")]
pub(super) struct RawStatus {
    pub(super) path: Option<String>,
}

impl Default for RawConfig {
    fn default() -> Self {
        Self {
            apiservers: None,
            local: None,
            peer_proxying: "Enabled".to_owned(),
            peer_aggregated_discovery: "Enabled".to_owned(),
            discovery: RawDiscovery::default(),
            exclusions: RawExclusions::default(),
            reroute: RawReroute::default(),
            identity: RawIdentity::default(),
            // The shortest wait there is: when client-go tries again, a refresh may have told who serves the type.
            retry_after_seconds: 1,
            status: RawStatus::default(),
        }
    }
}

impl Default for RawDiscovery {
    fn default() -> Self {
        Self {
            // An upgraded apiserver's new types are routable within one interval; an unchanged document costs a 304.
            refresh_interval: "5s".into(),
            // Shorter than the interval: an apiserver that hangs misses one poll, not two.
            timeout: "3s".into(),
            // Controllers refresh their own picture of discovery within minutes; then nobody asks for the old type.
            forget_after: "5m".into(),
            // The document of a control plane with a thousand CRDs has a few megabytes.
            max_document_bytes: 16 << 20,
            // In the certificate of every apiserver, whatever the cluster is called.
            authority: "kubernetes.default.svc".to_owned(),
        }
    }
}

impl Default for RawExclusions {
    fn default() -> Self {
        Self {
            api_services: true,
            group_versions: Vec::new(),
            // An APIService that is deleted and made again, as an upgrade of its operator does, leaves no gap.
            grace_period: "5m".into(),
        }
    }
}

impl Default for RawReroute {
    fn default() -> Self {
        // Filter state cannot be set from outside, a header can.
        Self { by: "FilterState".to_owned(), key: DEFAULT_FILTER_STATE_KEY.to_owned() }
    }
}

impl Default for RawIdentity {
    fn default() -> Self {
        Self {
            client_certificates: "Ignore".to_owned(),
            front_proxy_cluster: None,
            headers: RawIdentityHeaders::default(),
        }
    }
}

impl Default for RawIdentityHeaders {
    /// The values that kubeadm gives to the apiservers' `--requestheader-*` flags, and the customary UID header.
    fn default() -> Self {
        let only = |name: &str| vec![name.to_owned()];
        Self {
            user: only("X-Remote-User"),
            group: only("X-Remote-Group"),
            uid: only("X-Remote-Uid"),
            extra_prefix: only("X-Remote-Extra-"),
        }
    }
}

//! The rules: raw keys in, a configuration that cannot be wrong out.

use std::net::Ipv6Addr;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::duration::{self, DurationText};
use super::error::ConfigError;
use super::raw::{
    DEFAULT_FILTER_STATE_KEY, RawApiserver, RawConfig, RawDiscovery, RawExclusions, RawIdentity, RawIdentityHeaders,
    RawReroute, RawStatus,
};
use super::{
    Apiserver, ClientCertificates, Config, Discovery, Exclusions, GroupVersionPattern, Identity, IdentityHeaders,
    PeerAggregatedDiscovery, PeerProxying, Reroute,
};
use crate::quote::quoted;

/// Who serves a type is kept as one bit for each apiserver in a `u64`.
const MAX_APISERVERS: usize = 64;

/// A Kubernetes node name, which most apiservers are called after, has 253 characters at most. Names become metric
/// labels and log fields; the same bound fits filter state keys, header names, group names and hosts.
const MAX_NAME_BYTES: usize = 253;

/// Envoy sets no bound to cluster names. Generated ones (`outbound|6443|subset|host`) hold a whole host name and more.
const MAX_CLUSTER_BYTES: usize = 1024;

/// Two polls for each apiserver and interval: more often is load without any use, and most likely a typing error.
const MIN_REFRESH_INTERVAL: Duration = Duration::from_millis(100);

/// Envoy counts the timeout of a call in milliseconds.
const MIN_TIMEOUT: Duration = Duration::from_millis(1);

/// Thirty days. Its milliseconds fit the 32 bits of Envoy's timeouts, and no sum of it and a clock overflows.
const MAX_DURATION: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// From below any useful document to the most that Envoy buffers for the answer of a call (32 MiB).
const DOCUMENT_BYTES: RangeInclusive<u64> = 1 << 10..=32 << 20;

/// Zero would make clients hammer. After minutes without a retry, leader leases and node heartbeats are long lost.
const RETRY_AFTER_SECONDS: RangeInclusive<u32> = 1..=300;

/// The filter's own entries in filter state begin so; the default key is the one exception.
const OWN_FILTER_STATE_PREFIX: &str = "mixed_version_proxy.";

/// Headers that mean something to Envoy, to apiservers or to clients; the filter overwrites the rerouting header.
#[rustfmt::skip]
const TAKEN_HEADERS: &[&str] = &[
    "audit-id", "authorization", "cache-control", "connection", "cookie", "date", "etag", "expect", "forwarded",
    "host", "http2-settings", "keep-alive", "location", "origin", "pragma", "range", "referer", "retry-after",
    "server", "te", "traceparent", "tracestate", "trailer", "transfer-encoding", "upgrade", "user-agent", "vary",
    "via", "warning", "x-request-id",
];

/// Families of such headers: content negotiation, conditions, the loop header, identities.
#[rustfmt::skip]
const TAKEN_HEADER_PREFIXES: &[&str] = &[
    "accept", "access-control-", "content-", "if-", "impersonate-", "kubectl-", "proxy-", "sec-", "x-envoy-",
    "x-forwarded-",
    "x-kubernetes-", "x-remote-", "x-stream-protocol-",
];

/// How requests are rerouted, before the key is understood.
#[derive(Clone, Copy)]
enum RerouteBy {
    FilterState,
    Header,
}

pub(super) fn config(raw: RawConfig) -> Result<Config, ConfigError> {
    let apiservers = apiservers(raw.apiservers)?;
    let local = raw.local.map(|name| local(&name, &apiservers)).transpose()?;
    let peer_proxying = choice(
        "peerProxying",
        &raw.peer_proxying,
        &[("Enabled", PeerProxying::Enabled), ("Disabled", PeerProxying::Disabled), ("DryRun", PeerProxying::DryRun)],
    )?;
    let peer_aggregated_discovery = choice(
        "peerAggregatedDiscovery",
        &raw.peer_aggregated_discovery,
        &[("Enabled", PeerAggregatedDiscovery::Enabled), ("Disabled", PeerAggregatedDiscovery::Disabled)],
    )?;
    let identity = identity(raw.identity)?;
    identity_has_clusters(&identity, &apiservers, local)?;
    status(raw.status)?;
    let reroute = reroute(raw.reroute)?;
    if let Reroute::Header { name } = &reroute {
        reroute_header_is_harmless(name, &identity)?;
    }
    Ok(Config {
        apiservers,
        local,
        peer_proxying,
        peer_aggregated_discovery,
        discovery: discovery(raw.discovery)?,
        exclusions: exclusions(raw.exclusions)?,
        reroute,
        identity,
        retry_after_seconds: retry_after_seconds(raw.retry_after_seconds)?,
    })
}

fn apiservers(raw: Option<Vec<RawApiserver>>) -> Result<Vec<Apiserver>, ConfigError> {
    let raw = raw.ok_or_else(|| missing("apiservers"))?;
    if raw.is_empty() || raw.len() > MAX_APISERVERS {
        let count = raw.len();
        let problem = format!("{count} apiservers, expected 1 to {MAX_APISERVERS}");
        return Err(ConfigError::invalid("apiservers", problem));
    }
    let apiservers: Vec<Apiserver> =
        raw.into_iter().enumerate().map(|(index, raw)| apiserver(index, raw)).collect::<Result<_, _>>()?;
    names_are_unique(&apiservers)?;
    clusters_are_unique(&apiservers)?;
    Ok(apiservers)
}

fn apiserver(index: usize, raw: RawApiserver) -> Result<Apiserver, ConfigError> {
    let path = |key: &str| format!("apiservers[{index}].{key}");
    let required = |key: &str, value: Option<String>, max_bytes| match value {
        Some(value) => name(&path(key), value, max_bytes),
        None => Err(missing(&path(key))),
    };
    let optional =
        |key: &str, value: Option<String>| value.map(|value| name(&path(key), value, MAX_CLUSTER_BYTES)).transpose();
    let name = required("name", raw.name, MAX_NAME_BYTES)?;
    let cluster = required("cluster", raw.cluster, MAX_CLUSTER_BYTES)?;
    Ok(Apiserver {
        name,
        discovery_cluster: optional("discoveryCluster", raw.discovery_cluster)?.unwrap_or_else(|| cluster.clone()),
        front_proxy_cluster: optional("frontProxyCluster", raw.front_proxy_cluster)?,
        cluster,
    })
}

fn names_are_unique(apiservers: &[Apiserver]) -> Result<(), ConfigError> {
    for (index, apiserver) in apiservers.iter().enumerate() {
        let mut before = apiservers.iter().take(index);
        if let Some(owner) = before.position(|other| other.name == apiserver.name) {
            let problem = format!("{} is already the name of apiservers[{owner}]", quoted(&apiserver.name));
            return Err(ConfigError::conflict(&format!("apiservers[{index}].name"), problem));
        }
    }
    Ok(())
}

/// Only `cluster` and `discoveryCluster` of one apiserver may be the same cluster.
fn clusters_are_unique(apiservers: &[Apiserver]) -> Result<(), ConfigError> {
    const FRONT_PROXY: &str = "frontProxyCluster";
    let mut owners: Vec<(&str, usize, &str)> = Vec::new();
    for (index, apiserver) in apiservers.iter().enumerate() {
        let front_proxy = apiserver.front_proxy_cluster.as_deref().map(|cluster| (FRONT_PROXY, cluster));
        let clusters = [("cluster", apiserver.cluster.as_str()), ("discoveryCluster", &apiserver.discovery_cluster)];
        for (key, cluster) in clusters.into_iter().chain(front_proxy) {
            let Some((_, owner, owner_key)) = owners.iter().find(|(owned, ..)| *owned == cluster) else {
                owners.push((cluster, index, key));
                continue;
            };
            let trusted = key == FRONT_PROXY || *owner_key == FRONT_PROXY;
            if *owner == index && !trusted {
                continue;
            }
            let reason = if trusted {
                "a cluster with the front-proxy certificate, whose identity headers are believed, has no other use"
            } else {
                "each cluster leads to exactly one apiserver process"
            };
            let problem = format!("{} is already apiservers[{owner}].{owner_key}; {reason}", quoted(cluster));
            return Err(ConfigError::conflict(&format!("apiservers[{index}].{key}"), problem));
        }
    }
    Ok(())
}

fn local(local: &str, apiservers: &[Apiserver]) -> Result<usize, ConfigError> {
    apiservers.iter().position(|apiserver| apiserver.name == local).ok_or_else(|| {
        let names: Vec<String> = apiservers.iter().map(|apiserver| quoted(&apiserver.name)).collect();
        let problem = format!("{} is not among the apiservers: {}", quoted(local), names.join(", "));
        ConfigError::conflict("local", problem)
    })
}

fn discovery(raw: RawDiscovery) -> Result<Discovery, ConfigError> {
    let max_document_bytes = raw.max_document_bytes;
    if !DOCUMENT_BYTES.contains(&max_document_bytes) {
        let problem = format!(
            "{max_document_bytes} is not between {} (1 KiB) and {} (32 MiB, the most that Envoy keeps of an answer)",
            DOCUMENT_BYTES.start(),
            DOCUMENT_BYTES.end()
        );
        return Err(ConfigError::invalid("discovery.maxDocumentBytes", problem));
    }
    Ok(Discovery {
        refresh_interval: duration("discovery.refreshInterval", &raw.refresh_interval, MIN_REFRESH_INTERVAL)?,
        timeout: duration("discovery.timeout", &raw.timeout, MIN_TIMEOUT)?,
        forget_after: duration("discovery.forgetAfter", &raw.forget_after, Duration::ZERO)?,
        // In range, so it fits the 32 bits of a wasm usize.
        max_document_bytes: usize::try_from(max_document_bytes).unwrap_or(usize::MAX),
        authority: authority("discovery.authority", raw.authority)?,
    })
}

fn exclusions(raw: RawExclusions) -> Result<Exclusions, ConfigError> {
    let group_version = |(index, text): (usize, &String)| {
        group_version(text).map_err(|problem| {
            let problem = format!("{} {problem}", quoted(text));
            ConfigError::invalid(&format!("exclusions.groupVersions[{index}]"), problem)
        })
    };
    Ok(Exclusions {
        api_services: raw.api_services,
        group_versions: raw.group_versions.iter().enumerate().map(group_version).collect::<Result<_, _>>()?,
        grace_period: duration("exclusions.gracePeriod", &raw.grace_period, Duration::ZERO)?,
    })
}

/// `group` or `group/version`. The error continues a sentence that begins with the text.
fn group_version(text: &str) -> Result<GroupVersionPattern, &'static str> {
    let (group, version) = match text.split_once('/') {
        Some((group, version)) => (group, Some(version)),
        None => (text, None),
    };
    if !is_dns_name(group) {
        return Err("does not begin with a group name (lower-case letters, digits, '-' and '.')");
    }
    if version.is_some_and(|version| version.contains('.') || !is_dns_name(version)) {
        return Err("is neither group nor group/version");
    }
    if version.is_none() && is_version(group) {
        return Err("reads as a group, but is a version; the core group is built in and never excluded");
    }
    Ok(GroupVersionPattern { group: group.to_owned(), version: version.map(str::to_owned) })
}

fn reroute(raw: RawReroute) -> Result<Reroute, ConfigError> {
    const PATH: &str = "reroute.key";
    let by = choice("reroute.by", &raw.by, &[("FilterState", RerouteBy::FilterState), ("Header", RerouteBy::Header)])?;
    match by {
        RerouteBy::FilterState => {
            let key = name(PATH, raw.key, MAX_NAME_BYTES)?;
            let problem = if key.starts_with("wasm.") {
                "begins with wasm., which Envoy prepends by itself"
            } else if key.starts_with(OWN_FILTER_STATE_PREFIX) && key != DEFAULT_FILTER_STATE_KEY {
                "begins as the filter's own filter state does; choose another name or leave the key out"
            } else {
                return Ok(Reroute::FilterState { key });
            };
            Err(ConfigError::invalid(PATH, format!("{} {problem}", quoted(&key))))
        }
        RerouteBy::Header if raw.key == DEFAULT_FILTER_STATE_KEY => {
            Err(ConfigError::invalid(PATH, "by: Header needs the name of a header, there is no default"))
        }
        RerouteBy::Header => reroute_header(&raw.key)
            .map(|name| Reroute::Header { name })
            .map_err(|problem| ConfigError::invalid(PATH, format!("{} {problem}", quoted(&raw.key)))),
    }
}

/// The name in lower case. The error continues a sentence that begins with the name.
fn reroute_header(key: &str) -> Result<String, &'static str> {
    let name = key.to_ascii_lowercase();
    if !is_header_name(&name) {
        return Err("is not a header name");
    }
    if name.contains('_') {
        return Err("contains an underscore, and many proxies drop such headers or read it as a dash");
    }
    if TAKEN_HEADERS.contains(&name.as_str()) || TAKEN_HEADER_PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
        return Err("already has a meaning; choose a name that nothing else uses");
    }
    Ok(name)
}

fn identity(raw: RawIdentity) -> Result<Identity, ConfigError> {
    let client_certificates = choice(
        "identity.clientCertificates",
        &raw.client_certificates,
        &[("Ignore", ClientCertificates::Ignore), ("RequestHeader", ClientCertificates::RequestHeader)],
    )?;
    let front_proxy_cluster =
        raw.front_proxy_cluster.map(|cluster| name(FRONT_PROXY_CLUSTER, cluster, MAX_CLUSTER_BYTES)).transpose()?;
    let RawIdentityHeaders { user, group, uid, extra_prefix } = raw.headers;
    Ok(Identity {
        client_certificates,
        front_proxy_cluster,
        headers: IdentityHeaders {
            user: header_names("identity.headers.user", user)?,
            group: header_names("identity.headers.group", group)?,
            uid: header_names("identity.headers.uid", uid)?,
            extra_prefix: header_names("identity.headers.extraPrefix", extra_prefix)?,
        },
    })
}

const FRONT_PROXY_CLUSTER: &str = "identity.frontProxyCluster";

/// An identity needs a cluster that carries it, wherever a request may go.
fn identity_has_clusters(
    identity: &Identity,
    apiservers: &[Apiserver],
    local: Option<usize>,
) -> Result<(), ConfigError> {
    if let Some(cluster) = &identity.front_proxy_cluster {
        if local.is_some() {
            let problem = "a sidecar's here is the local apiserver, whose frontProxyCluster counts";
            return Err(ConfigError::conflict(FRONT_PROXY_CLUSTER, problem));
        }
        let is_used = |apiserver: &&Apiserver| {
            [&apiserver.cluster, &apiserver.discovery_cluster].contains(&cluster)
                || apiserver.front_proxy_cluster.as_ref() == Some(cluster)
        };
        if let Some(apiserver) = apiservers.iter().find(is_used) {
            let problem = format!("{} is already a cluster of {}", quoted(cluster), quoted(&apiserver.name));
            return Err(ConfigError::conflict(FRONT_PROXY_CLUSTER, problem));
        }
    }
    if identity.client_certificates == ClientCertificates::Ignore {
        return Ok(());
    }
    const NEEDED: &str = "missing, and needed with identity.clientCertificates: RequestHeader";
    if let Some(index) = apiservers.iter().position(|apiserver| apiserver.front_proxy_cluster.is_none()) {
        return Err(ConfigError::conflict(&format!("apiservers[{index}].frontProxyCluster"), NEEDED));
    }
    if local.is_none() && identity.front_proxy_cluster.is_none() {
        return Err(ConfigError::conflict(FRONT_PROXY_CLUSTER, NEEDED));
    }
    Ok(())
}

/// Whom a client says it is, and a cluster where that is believed, must be out of its reach.
fn reroute_header_is_harmless(name: &str, identity: &Identity) -> Result<(), ConfigError> {
    if identity.headers.may_hold(name) {
        let problem = format!("{} is one of identity.headers, which say who a client is", quoted(name));
        return Err(ConfigError::conflict("reroute.key", problem));
    }
    if identity.client_certificates == ClientCertificates::RequestHeader {
        let problem =
            "Header does not go with identity.clientCertificates: RequestHeader, for a client can send headers";
        return Err(ConfigError::conflict("reroute.by", problem));
    }
    Ok(())
}

/// The names in lower case.
fn header_names(path: &str, names: Vec<String>) -> Result<Vec<String>, ConfigError> {
    if names.is_empty() {
        return Err(ConfigError::invalid(path, "lists no header"));
    }
    match names.iter().enumerate().find(|(_, name)| !is_header_name(name)) {
        Some((index, name)) => {
            Err(ConfigError::invalid(&format!("{path}[{index}]"), format!("{} is not a header name", quoted(name))))
        }
        None => Ok(names.into_iter().map(|name| name.to_ascii_lowercase()).collect()),
    }
}

fn status(raw: RawStatus) -> Result<(), ConfigError> {
    const PATH: &str = "status.path";
    let Some(path) = raw.path else { return Ok(()) };
    let is_plain = |c: char| c.is_ascii_graphic() && !matches!(c, '?' | '#' | '%' | '\\');
    if path.starts_with('/') && path.chars().all(is_plain) {
        Err(ConfigError::unsupported(PATH, quoted(&path)))
    } else {
        Err(ConfigError::invalid(PATH, format!("{} is not a path such as /mixed-version-proxy", quoted(&path))))
    }
}

fn retry_after_seconds(raw: u64) -> Result<u32, ConfigError> {
    u32::try_from(raw).ok().filter(|seconds| RETRY_AFTER_SECONDS.contains(seconds)).ok_or_else(|| {
        let (least, most) = (RETRY_AFTER_SECONDS.start(), RETRY_AFTER_SECONDS.end());
        let problem = format!("{raw} is not between {least} and {most}: clients would hammer, or wait for too long");
        ConfigError::invalid("retryAfterSeconds", problem)
    })
}

fn missing(path: &str) -> ConfigError {
    ConfigError::Missing { path: path.to_owned() }
}

/// The value that one of a few names stands for.
fn choice<T: Copy>(path: &str, text: &str, allowed: &[(&str, T)]) -> Result<T, ConfigError> {
    allowed.iter().find(|(name, _)| *name == text).map(|(_, value)| *value).ok_or_else(|| {
        let names: Vec<&str> = allowed.iter().map(|(name, _)| *name).collect();
        ConfigError::invalid(path, format!("{} is not one of {}", quoted(text), names.join(", ")))
    })
}

/// A name that can be printed, used as a header's value and compared by eye.
fn name(path: &str, text: String, max_bytes: usize) -> Result<String, ConfigError> {
    let problem = if text.is_empty() {
        "is empty".to_owned()
    } else if text.len() > max_bytes {
        format!("is longer than {max_bytes} bytes")
    } else if text.chars().any(char::is_control) {
        "contains a control character".to_owned()
    } else if text.trim() != text {
        "begins or ends with a space".to_owned()
    } else {
        return Ok(text);
    };
    Err(ConfigError::invalid(path, format!("{} {problem}", quoted(&text))))
}

fn duration(path: &str, text: &DurationText, least: Duration) -> Result<Duration, ConfigError> {
    let invalid = |problem: String| ConfigError::invalid(path, format!("{} {problem}", quoted(&text.0)));
    let duration = duration::parse(&text.0).map_err(|error| invalid(format!("{error}")))?;
    if duration < least {
        return Err(invalid(format!("is shorter than {least:?}")));
    }
    if duration > MAX_DURATION {
        return Err(invalid("is longer than 30 days".to_owned()));
    }
    Ok(duration)
}

/// `host`, `host:port` or `[IPv6]:port`.
fn authority(path: &str, text: String) -> Result<String, ConfigError> {
    if is_authority(&text) {
        return Ok(text);
    }
    Err(ConfigError::invalid(path, format!("{} is neither host nor host:port", quoted(&text))))
}

fn is_authority(text: &str) -> bool {
    let (is_host, port) = match text.strip_prefix('[').map(|rest| rest.split_once(']')) {
        Some(None) => return false,
        Some(Some((address, ""))) => (address.parse::<Ipv6Addr>().is_ok(), None),
        Some(Some((address, after))) => match after.strip_prefix(':') {
            Some(port) => (address.parse::<Ipv6Addr>().is_ok(), Some(port)),
            None => return false,
        },
        None => match text.split_once(':') {
            Some((host, port)) => (is_host(host), Some(port)),
            None => (is_host(text), None),
        },
    };
    is_host && port.is_none_or(is_port)
}

fn is_host(text: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_'))
}

fn is_port(text: &str) -> bool {
    // Rust's parser takes a plus sign too.
    text.bytes().all(|b| b.is_ascii_digit()) && text.parse::<u16>().is_ok_and(|port| port != 0)
}

/// A DNS-1123 subdomain, as API groups are.
fn is_dns_name(text: &str) -> bool {
    let is_label = |label: &str| {
        !label.is_empty()
            && !label.starts_with('-')
            && !label.ends_with('-')
            && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    };
    text.len() <= MAX_NAME_BYTES && text.split('.').all(is_label)
}

/// `v1`, `v2beta1`: what no group is called.
fn is_version(text: &str) -> bool {
    let Some(rest) = text.strip_prefix('v') else {
        return false;
    };
    let mut numbers = rest.splitn(2, "alpha").flat_map(|part| part.splitn(2, "beta"));
    numbers.all(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

/// A token of RFC 9110, section 5.6.2.
fn is_header_name(text: &str) -> bool {
    (1..=MAX_NAME_BYTES).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b))
}

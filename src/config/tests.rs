//! The same tables run through JSON and through Struct, natively and as wasm.

use prost::Message;
use prost_types::{ListValue, Struct, value::Kind};
use serde_json::{Value, json};
#[cfg(all(target_family = "wasm", target_os = "unknown"))]
use wasm_bindgen_test::wasm_bindgen_test as test;

use super::raw::{RawApiserver, RawConfig};
use super::*;

const DOCS: &str = include_str!("../../docs/configuration.md");
const README: &str = include_str!("../../README.md");

fn message(value: &Value) -> Struct {
    let fields = value.as_object().expect("a configuration is an object");
    Struct { fields: fields.iter().map(|(key, value)| (key.clone(), message_value(value))).collect() }
}

/// As Envoy makes it of YAML or JSON: every number is a double.
fn message_value(value: &Value) -> prost_types::Value {
    let kind = match value {
        Value::Null => Kind::NullValue(0),
        Value::Bool(value) => Kind::BoolValue(*value),
        Value::Number(number) => Kind::NumberValue(number.as_f64().expect("a finite number")),
        Value::String(text) => Kind::StringValue(text.clone()),
        Value::Array(items) => Kind::ListValue(ListValue { values: items.iter().map(message_value).collect() }),
        Value::Object(_) => Kind::StructValue(message(value)),
    };
    prost_types::Value { kind: Some(kind) }
}

/// Parses the same configuration in both forms, which must agree.
fn parse(config: &Value) -> Result<Config, ConfigError> {
    let from_json = Config::parse(config.to_string().as_bytes());
    let from_struct = Config::parse(&message(config).encode_to_vec());
    assert_eq!(from_json, from_struct, "JSON and Struct disagree about {config}");
    from_json
}

fn minimal() -> Value {
    json!({"apiservers": [{"name": "cp-1", "cluster": "one"}, {"name": "cp-2", "cluster": "two"}]})
}

/// The minimal configuration with some top-level keys set.
fn with(keys: Value) -> Value {
    let mut config = minimal();
    for (key, value) in keys.as_object().expect("keys are an object") {
        config[key] = value.clone();
    }
    config
}

fn ignored() -> Identity {
    let only = |name: &str| vec![name.to_owned()];
    Identity {
        client_certificates: ClientCertificates::Ignore,
        front_proxy_cluster: None,
        headers: IdentityHeaders {
            user: only("x-remote-user"),
            group: only("x-remote-group"),
            uid: only("x-remote-uid"),
            extra_prefix: only("x-remote-extra-"),
        },
    }
}

fn defaults() -> Config {
    let apiserver = |name: &str, cluster: &str| Apiserver {
        name: name.to_owned(),
        cluster: cluster.to_owned(),
        discovery_cluster: cluster.to_owned(),
        front_proxy_cluster: None,
    };
    Config {
        apiservers: vec![apiserver("cp-1", "one"), apiserver("cp-2", "two")],
        local: None,
        peer_proxying: PeerProxying::Enabled,
        peer_aggregated_discovery: PeerAggregatedDiscovery::Enabled,
        discovery: Discovery {
            refresh_interval: Duration::from_secs(5),
            timeout: Duration::from_secs(3),
            forget_after: Duration::from_secs(300),
            max_document_bytes: 16_777_216,
            authority: "kubernetes.default.svc".to_owned(),
        },
        exclusions: Exclusions { api_services: true, group_versions: vec![], grace_period: Duration::from_secs(300) },
        reroute: Reroute::FilterState { key: "mixed_version_proxy.cluster".to_owned() },
        identity: ignored(),
        retry_after_seconds: 1,
    }
}

fn filter_state(key: &str) -> Reroute {
    Reroute::FilterState { key: key.to_owned() }
}

fn header(name: &str) -> Reroute {
    Reroute::Header { name: name.to_owned() }
}

fn pattern(group: &str, version: Option<&str>) -> GroupVersionPattern {
    GroupVersionPattern { group: group.to_owned(), version: version.map(str::to_owned) }
}

/// Every key that exists, with its default; null where there is none. Made from the code itself.
fn schema() -> Vec<(String, Value)> {
    fn walk(path: &str, value: &Value, keys: &mut Vec<(String, Value)>) {
        match value {
            Value::Object(members) => {
                for (key, member) in members {
                    let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                    walk(&path, member, keys);
                }
            }
            Value::Array(items) if items.iter().any(Value::is_object) => {
                keys.push((path.to_owned(), Value::Null));
                for item in items {
                    walk(&format!("{path}[]"), item, keys);
                }
            }
            leaf => keys.push((path.to_owned(), leaf.clone())),
        }
    }
    let raw = RawConfig { apiservers: Some(vec![RawApiserver::default()]), ..RawConfig::default() };
    let mut keys = Vec::new();
    walk("", &serde_json::to_value(raw).expect("plain data"), &mut keys);
    keys
}

/// The value behind a path of [`schema`]; the first element stands for a list.
fn value_at<'a>(config: &'a mut Value, path: &str) -> Option<&'a mut Value> {
    config.pointer_mut(&format!("/{}", path.replace("[]", ".0").replace('.', "/")))
}

fn is_required(path: &str) -> bool {
    let mut config = minimal();
    let (parent, key) = path.rsplit_once('.').unwrap_or(("", path));
    let parent = if parent.is_empty() { Some(&mut config) } else { value_at(&mut config, parent) };
    if let Some(members) = parent.and_then(Value::as_object_mut) {
        members.remove(key);
    }
    matches!(parse(&config), Err(ConfigError::Missing { .. }))
}

#[test]
fn defaults_are_the_documented_ones() {
    assert_eq!(parse(&minimal()), Ok(defaults()));
}

#[test]
fn every_key_reaches_its_field_in_both_forms() {
    let mut every_key = json!({
        "apiservers": [
            {"name": "cp-2", "cluster": "b", "discoveryCluster": "b-poll", "frontProxyCluster": "b-trusted"},
            {"name": "cp-1", "cluster": "a"},
        ],
        "local": "cp-1",
        "peerProxying": "DryRun",
        "peerAggregatedDiscovery": "Disabled",
        "discovery": {
            "refreshInterval": "1m30s",
            "timeout": "1.5s",
            "forgetAfter": "0",
            "maxDocumentBytes": 33_554_432,
            "authority": "10.0.0.1:6443",
        },
        "exclusions": {"apiServices": false, "groupVersions": ["example.com/v1", "sample"], "gracePeriod": "1h"},
        "reroute": {"by": "Header", "key": "X-Mixed-Version-Cluster"},
        "identity": {
            "clientCertificates": "Ignore",
            "headers": {
                "user": ["X-Remote-User"],
                "group": ["X-Remote-Group"],
                "uid": ["X-Remote-Uid"],
                "extraPrefix": ["X-Remote-Extra-"],
            },
        },
        "retryAfterSeconds": 300,
        "status": {},
    });
    let expected = Config {
        apiservers: vec![
            Apiserver {
                name: "cp-2".to_owned(),
                cluster: "b".to_owned(),
                discovery_cluster: "b-poll".to_owned(),
                front_proxy_cluster: Some("b-trusted".to_owned()),
            },
            Apiserver {
                name: "cp-1".to_owned(),
                cluster: "a".to_owned(),
                discovery_cluster: "a".to_owned(),
                front_proxy_cluster: None,
            },
        ],
        local: Some(1),
        peer_proxying: PeerProxying::DryRun,
        peer_aggregated_discovery: PeerAggregatedDiscovery::Disabled,
        discovery: Discovery {
            refresh_interval: Duration::from_secs(90),
            timeout: Duration::from_millis(1500),
            forget_after: Duration::ZERO,
            max_document_bytes: 32 << 20,
            authority: "10.0.0.1:6443".to_owned(),
        },
        exclusions: Exclusions {
            api_services: false,
            group_versions: vec![pattern("example.com", Some("v1")), pattern("sample", None)],
            grace_period: Duration::from_secs(3600),
        },
        reroute: header("x-mixed-version-cluster"),
        identity: ignored(),
        retry_after_seconds: 300,
    };
    assert_eq!(parse(&every_key), Ok(expected));

    // What is refused whatever its value has its rows among the refusals.
    let refused = ["identity.frontProxyCluster", "status.path"]; // the first goes only with a gateway
    for (path, _) in schema() {
        let is_set = value_at(&mut every_key, &path).is_some();
        assert!(is_set != refused.contains(&path.as_str()), "{path} is not tested");
    }
}

#[test]
fn values_are_accepted() {
    type Change = fn(&mut Config);
    let rows: Vec<(&str, Value, Change)> = vec![
        ("empty objects change nothing", json!({"discovery": {}, "exclusions": {}, "reroute": {}}), |_| ()),
        ("empty objects inside change nothing", json!({"identity": {"headers": {}}, "status": {}}), |_| ()),
        ("the first apiserver is local", json!({"local": "cp-1"}), |c| c.local = Some(0)),
        ("proxying enabled", json!({"peerProxying": "Enabled"}), |_| ()),
        ("proxying disabled", json!({"peerProxying": "Disabled"}), |c| c.peer_proxying = PeerProxying::Disabled),
        ("discovery enabled", json!({"peerAggregatedDiscovery": "Enabled"}), |_| ()),
        ("the shortest interval", json!({"discovery": {"refreshInterval": "100ms"}}), |c| {
            c.discovery.refresh_interval = Duration::from_millis(100);
        }),
        ("the shortest timeout", json!({"discovery": {"timeout": "1ms"}}), |c| {
            c.discovery.timeout = Duration::from_millis(1);
        }),
        ("the longest duration", json!({"discovery": {"forgetAfter": "720h"}}), |c| {
            c.discovery.forget_after = Duration::from_secs(2_592_000);
        }),
        ("no grace", json!({"exclusions": {"gracePeriod": "0s"}}), |c| c.exclusions.grace_period = Duration::ZERO),
        ("the smallest document", json!({"discovery": {"maxDocumentBytes": 1024}}), |c| {
            c.discovery.max_document_bytes = 1024;
        }),
        ("an integer written as a double", json!({"retryAfterSeconds": 7.0}), |c| c.retry_after_seconds = 7),
        ("an IPv6 authority", json!({"discovery": {"authority": "[fd00::1]"}}), |c| {
            c.discovery.authority = "[fd00::1]".to_owned();
        }),
        ("an IPv6 authority with a port", json!({"discovery": {"authority": "[fd00::1]:6443"}}), |c| {
            c.discovery.authority = "[fd00::1]:6443".to_owned();
        }),
        ("filter state without a key", json!({"reroute": {"by": "FilterState"}}), |_| ()),
        ("filter state with a key", json!({"reroute": {"key": "to"}}), |c| c.reroute = filter_state("to")),
        ("a header", json!({"reroute": {"by": "Header", "key": "x.to"}}), |c| c.reroute = header("x.to")),
        ("a group that begins like a version", json!({"exclusions": {"groupVersions": ["v1x", "v1.io"]}}), |c| {
            c.exclusions.group_versions = vec![pattern("v1x", None), pattern("v1.io", None)];
        }),
        (
            "an apiserver polled over its own cluster, said aloud",
            json!({"apiservers": [
                {"name": "cp-1", "cluster": "one", "discoveryCluster": "one"},
                {"name": "cp-2", "cluster": "two"},
            ]}),
            |_| (),
        ),
        (
            "a cluster name as Istio makes it, and one that is not ASCII",
            json!({"apiservers": [
                {"name": "cp-1", "cluster": "outbound|6443|cp-1|kubernetes.default.svc.cluster.local"},
                {"name": "knoten-zwölf", "cluster": "zwölf"},
            ]}),
            |c| {
                let cluster = "outbound|6443|cp-1|kubernetes.default.svc.cluster.local".to_owned();
                c.apiservers[0].discovery_cluster = cluster.clone();
                c.apiservers[0].cluster = cluster;
                c.apiservers[1].name = "knoten-zwölf".to_owned();
                c.apiservers[1].cluster = "zwölf".to_owned();
                c.apiservers[1].discovery_cluster = "zwölf".to_owned();
            },
        ),
    ];
    for (sentence, keys, change) in rows {
        let mut expected = defaults();
        change(&mut expected);
        assert_eq!(parse(&with(keys)), Ok(expected), "{sentence}");
    }
}

fn assert_refused(rows: Vec<(&str, Value, &str)>) {
    for (sentence, keys, message) in rows {
        let error = parse(&with(keys)).expect_err(sentence);
        assert_eq!(error.to_string(), message, "{sentence}");
        assert!(message.starts_with(&format!("{}: ", error.path())), "{sentence}: {}", error.path());
    }
}

#[test]
fn unknown_keys_are_refused_by_path() {
    let apiserver = "name, cluster, discoveryCluster, frontProxyCluster";
    let top = "apiservers, local, peerProxying, peerAggregatedDiscovery, discovery, exclusions, reroute, identity, \
               retryAfterSeconds, status";
    let discovery = "refreshInterval, timeout, forgetAfter, maxDocumentBytes, authority";
    assert_refused(vec![
        ("at the top", json!({"locl": "cp-1"}), &format!("locl: unknown key, expected one of {top}")),
        ("the empty key", json!({"": 1}), &format!("configuration: unknown key, expected one of {top}")),
        ("in snake case", json!({"peer_proxying": "x"}), &format!("peer_proxying: unknown key, expected one of {top}")),
        (
            "in an object",
            json!({"discovery": {"refreshIntervall": "5s"}}),
            &format!("discovery.refreshIntervall: unknown key, expected one of {discovery}"),
        ),
        (
            "in an element of a list",
            json!({"apiservers": [{"name": "a", "cluster": "a"}, {"name": "b", "clusterr": "b"}]}),
            &format!("apiservers[1].clusterr: unknown key, expected one of {apiserver}"),
        ),
        (
            "two levels down",
            json!({"identity": {"headers": {"name": []}}}),
            "identity.headers.name: unknown key, expected one of user, group, uid, extraPrefix",
        ),
        ("even without a value", json!({"status": {"pfad": null}}), "status.pfad: unknown key, expected one of path"),
        (
            "with a control character, escaped",
            json!({"reroute": {"a\nb": 1}}),
            "reroute.a\\nb: unknown key, expected one of by, key",
        ),
        (
            "endless, clipped",
            json!({"reroute": {"k".repeat(1000): 1}}),
            &format!("reroute.{}…: unknown key, expected one of by, key", "k".repeat(192)),
        ),
    ]);
}

#[test]
fn missing_keys_are_named() {
    assert_refused(vec![
        ("no name", json!({"apiservers": [{"cluster": "a"}]}), "apiservers[0].name: missing"),
        (
            "no cluster",
            json!({"apiservers": [{"name": "a", "cluster": "a"}, {"name": "b"}]}),
            "apiservers[1].cluster: missing",
        ),
        ("nothing", json!({"apiservers": [{}]}), "apiservers[0].name: missing"),
    ]);
    let error = parse(&json!({"local": "cp-1"})).expect_err("no apiservers");
    assert_eq!(error.to_string(), "apiservers: missing");
}

#[test]
fn wrong_types_are_refused() {
    let duration = "expected a duration such as \"500ms\", \"5s\" or \"1h30m\"";
    let integer = "expected a whole, non-negative number";
    assert_refused(vec![
        ("a list for an object", json!({"discovery": ["5s"]}), "discovery: expected an object, found a list"),
        (
            "a list for an object in a list",
            json!({"apiservers": [["a", "a"]]}),
            "apiservers[0]: expected an object, found a list",
        ),
        ("nothing for an object", json!({"status": null}), "status: expected an object, found null"),
        ("nothing for a string", json!({"local": null}), "local: expected a string, found null"),
        (
            "nothing for a list",
            json!({"exclusions": {"groupVersions": null}}),
            "exclusions.groupVersions: expected a sequence, found null",
        ),
        (
            "an object for a list",
            json!({"apiservers": {"cp-1": {}}}),
            "apiservers: expected a sequence, found an object",
        ),
        (
            "a number for a name",
            json!({"apiservers": [{"name": 1, "cluster": "a"}]}),
            "apiservers[0].name: expected a string, found the number 1",
        ),
        ("a YAML boolean for a name", json!({"local": true}), "local: expected a string, found the boolean true"),
        (
            "an object for a choice",
            json!({"peerProxying": {"Enabled": null}}),
            "peerProxying: expected a string, found an object",
        ),
        (
            "a string for a boolean",
            json!({"exclusions": {"apiServices": "true"}}),
            "exclusions.apiServices: expected a boolean, found the string \"true\"",
        ),
        (
            "a number for a duration",
            json!({"discovery": {"refreshInterval": 5}}),
            &format!("discovery.refreshInterval: {duration}, found the number 5"),
        ),
        (
            "a string for an integer",
            json!({"retryAfterSeconds": "1s"}),
            &format!("retryAfterSeconds: {integer}, found the string \"1s\""),
        ),
        (
            "a fraction for an integer",
            json!({"retryAfterSeconds": 1.5}),
            &format!("retryAfterSeconds: {integer}, found the number 1.5"),
        ),
        (
            "a negative integer",
            json!({"discovery": {"maxDocumentBytes": -1024}}),
            &format!("discovery.maxDocumentBytes: {integer}, found the number -1024"),
        ),
        (
            "an integer that no double holds",
            json!({"discovery": {"maxDocumentBytes": u64::MAX}}),
            &format!("discovery.maxDocumentBytes: {integer}, found the number 1.8446744073709552e19"),
        ),
    ]);
}

#[test]
fn apiservers_are_checked_against_each_other() {
    let process = "each cluster leads to exactly one apiserver process";
    let trusted = "a cluster with the front-proxy certificate, whose identity headers are believed, has no other use";
    let many = |count: usize| -> Vec<Value> {
        (0..count).map(|n| json!({"name": format!("cp-{n}"), "cluster": format!("c-{n}")})).collect()
    };
    assert_eq!(parse(&with(json!({"apiservers": many(64)}))).expect("64 are fine").apiservers.len(), 64);
    assert_refused(vec![
        ("none", json!({"apiservers": []}), "apiservers: 0 apiservers, expected 1 to 64"),
        ("65", json!({"apiservers": many(65)}), "apiservers: 65 apiservers, expected 1 to 64"),
        (
            "the same name twice",
            json!({"apiservers": [{"name": "a", "cluster": "a"}, {"name": "a", "cluster": "b"}]}),
            "apiservers[1].name: \"a\" is already the name of apiservers[0]",
        ),
        (
            "the same cluster twice",
            json!({"apiservers": [{"name": "a", "cluster": "x"}, {"name": "b", "cluster": "x"}]}),
            &format!("apiservers[1].cluster: \"x\" is already apiservers[0].cluster; {process}"),
        ),
        (
            "polled over another one's cluster",
            json!({"apiservers": [
                {"name": "a", "cluster": "a"},
                {"name": "b", "cluster": "b", "discoveryCluster": "a"},
            ]}),
            &format!("apiservers[1].discoveryCluster: \"a\" is already apiservers[0].cluster; {process}"),
        ),
        (
            "one poll cluster for two",
            json!({"apiservers": [
                {"name": "a", "cluster": "a", "discoveryCluster": "poll"},
                {"name": "b", "cluster": "b", "discoveryCluster": "poll"},
            ]}),
            &format!("apiservers[1].discoveryCluster: \"poll\" is already apiservers[0].discoveryCluster; {process}"),
        ),
        (
            "the ordinary cluster trusted",
            json!({"apiservers": [{"name": "a", "cluster": "a", "frontProxyCluster": "a"}]}),
            &format!("apiservers[0].frontProxyCluster: \"a\" is already apiservers[0].cluster; {trusted}"),
        ),
        (
            "a trusted cluster used as an ordinary one",
            json!({"apiservers": [
                {"name": "a", "cluster": "a", "frontProxyCluster": "t"},
                {"name": "b", "cluster": "t"},
            ]}),
            &format!("apiservers[1].cluster: \"t\" is already apiservers[0].frontProxyCluster; {trusted}"),
        ),
        (
            "a local one that does not exist",
            json!({"local": "cp-3"}),
            "local: \"cp-3\" is not among the apiservers: \"cp-1\", \"cp-2\"",
        ),
        ("an empty local one", json!({"local": ""}), "local: \"\" is not among the apiservers: \"cp-1\", \"cp-2\""),
    ]);
}

#[test]
fn names_are_printable() {
    let one = |key: &str, value: &str| {
        let mut apiserver = json!({"name": "a", "cluster": "a"});
        apiserver[key] = json!(value);
        json!({"apiservers": [apiserver]})
    };
    let (long, clipped) = ("x".repeat(1025), "x".repeat(80));
    assert_refused(vec![
        ("an empty name", one("name", ""), "apiservers[0].name: \"\" is empty"),
        ("an empty cluster", one("cluster", ""), "apiservers[0].cluster: \"\" is empty"),
        ("an empty poll cluster", one("discoveryCluster", ""), "apiservers[0].discoveryCluster: \"\" is empty"),
        ("an empty trusted cluster", one("frontProxyCluster", ""), "apiservers[0].frontProxyCluster: \"\" is empty"),
        ("a newline in a name", one("name", "a\nb"), "apiservers[0].name: \"a\\nb\" contains a control character"),
        ("a NUL in a cluster", one("cluster", "a\0"), "apiservers[0].cluster: \"a\\0\" contains a control character"),
        ("a space behind", one("name", "a "), "apiservers[0].name: \"a \" begins or ends with a space"),
        (
            "a very long name",
            one("name", &long),
            &format!("apiservers[0].name: \"{clipped}…\" is longer than 253 bytes"),
        ),
        (
            "a very long cluster",
            one("cluster", &long),
            &format!("apiservers[0].cluster: \"{clipped}…\" is longer than 1024 bytes"),
        ),
    ]);
}

#[test]
fn choices_and_ranges_are_checked() {
    let bytes = "is not between 1024 (1 KiB) and 33554432 (32 MiB, the most that Envoy keeps of an answer)";
    let seconds = "is not between 1 and 300: clients would hammer, or wait for too long";
    assert_refused(vec![
        (
            "a choice that does not exist",
            json!({"peerProxying": "enabled"}),
            "peerProxying: \"enabled\" is not one of Enabled, Disabled, DryRun",
        ),
        (
            "a dry run of discovery",
            json!({"peerAggregatedDiscovery": "DryRun"}),
            "peerAggregatedDiscovery: \"DryRun\" is not one of Enabled, Disabled",
        ),
        (
            "a duration without a unit",
            json!({"discovery": {"forgetAfter": "300"}}),
            "discovery.forgetAfter: \"300\" has no unit: write 500ms, 5s or 1h30m",
        ),
        (
            "a negative duration",
            json!({"exclusions": {"gracePeriod": "-5m"}}),
            "exclusions.gracePeriod: \"-5m\" is negative",
        ),
        (
            "polls too often",
            json!({"discovery": {"refreshInterval": "99.999ms"}}),
            "discovery.refreshInterval: \"99.999ms\" is shorter than 100ms",
        ),
        ("no time to answer", json!({"discovery": {"timeout": "0"}}), "discovery.timeout: \"0\" is shorter than 1ms"),
        (
            "a very long duration",
            json!({"discovery": {"forgetAfter": "720h1ns"}}),
            "discovery.forgetAfter: \"720h1ns\" is longer than 30 days",
        ),
        (
            "documents too small",
            json!({"discovery": {"maxDocumentBytes": 1023}}),
            &format!("discovery.maxDocumentBytes: 1023 {bytes}"),
        ),
        (
            "documents too large",
            json!({"discovery": {"maxDocumentBytes": 33_554_433}}),
            &format!("discovery.maxDocumentBytes: 33554433 {bytes}"),
        ),
        ("no pause", json!({"retryAfterSeconds": 0}), &format!("retryAfterSeconds: 0 {seconds}")),
        ("a long pause", json!({"retryAfterSeconds": 301}), &format!("retryAfterSeconds: 301 {seconds}")),
        (
            "an endless pause",
            json!({"retryAfterSeconds": 1_u64 << 32}),
            &format!("retryAfterSeconds: 4294967296 {seconds}"),
        ),
    ]);
}

#[test]
fn implausible_authorities_are_refused() {
    let hosts = [
        "",
        " ",
        "a b",
        "a\n",
        "a/b",
        "https://a",
        "user@a",
        "a:",
        ":443",
        "a:0",
        "a:65536",
        "a:+1",
        "a:1:2",
        "::1",
        "[::1",
        "[::1]443",
        "[::1]:",
        "[a]",
        "[]",
        "ä",
    ];
    for host in hosts {
        let error = parse(&with(json!({"discovery": {"authority": host}}))).expect_err(host);
        assert_eq!(error.to_string(), format!("discovery.authority: {host:?} is neither host nor host:port"));
    }
}

#[test]
fn implausible_group_versions_are_refused() {
    let group = "does not begin with a group name (lower-case letters, digits, '-' and '.')";
    let shape = "is neither group nor group/version";
    let version = "reads as a group, but is a version; the core group is built in and never excluded";
    let rows = [
        ("", group),
        ("/", group),
        ("/v1", group),
        ("*", group),
        ("Example.com", group),
        ("example..com", group),
        ("-a", group),
        ("a ", group),
        ("example.com/", shape),
        ("example.com/v1/", shape),
        ("example.com/v1/widgets", shape),
        ("example.com/*", shape),
        ("example.com/v1.2", shape),
        ("v1", version),
        ("v2beta1", version),
        ("v1alpha12", version),
    ];
    for (text, problem) in rows {
        let keys = json!({"exclusions": {"groupVersions": ["fine.example.com", text]}});
        let error = parse(&with(keys)).expect_err(text);
        assert_eq!(error.to_string(), format!("exclusions.groupVersions[1]: {text:?} {problem}"));
    }
}

#[test]
fn unusable_reroute_keys_are_refused() {
    let taken = "already has a meaning; choose a name that nothing else uses";
    let rows = [
        ("FilterState", "", "\"\" is empty"),
        ("FilterState", "a\0b", "\"a\\0b\" contains a control character"),
        ("FilterState", "wasm.a", "\"wasm.a\" begins with wasm., which Envoy prepends by itself"),
        (
            "FilterState",
            "mixed_version_proxy.decision",
            "\"mixed_version_proxy.decision\" begins as the filter's own filter state does; choose another name or \
             leave the key out",
        ),
        ("Header", "", "\"\" is not a header name"),
        ("Header", ":path", "\":path\" is not a header name"),
        ("Header", "a b", "\"a b\" is not a header name"),
        ("Header", "x-ä", "\"x-ä\" is not a header name"),
        (
            "Header",
            "x_cluster",
            "\"x_cluster\" contains an underscore, and many proxies drop such headers or read it as a dash",
        ),
        ("Header", "mixed_version_proxy.cluster", "by: Header needs the name of a header, there is no default"),
    ];
    for (by, key, problem) in rows {
        let error = parse(&with(json!({"reroute": {"by": by, "key": key}}))).expect_err(key);
        assert_eq!(error.to_string(), format!("reroute.key: {problem}"));
    }
    let headers = [
        "host",
        "Content-Length",
        "content-type",
        "transfer-encoding",
        "connection",
        "upgrade",
        "te",
        "authorization",
        "Accept",
        "accept-encoding",
        "if-none-match",
        "x-kubernetes-peer-proxied",
        "X-Remote-User",
        "cookie",
        "impersonate-user",
        "x-envoy-original-path",
        "x-forwarded-for",
        "proxy-authorization",
        "sec-websocket-key",
        "access-control-request-method",
        "audit-id",
    ];
    for key in headers {
        let error = parse(&with(json!({"reroute": {"by": "Header", "key": key}}))).expect_err(key);
        assert_eq!(error.to_string(), format!("reroute.key: {key:?} {taken}"));
    }
    assert_refused(vec![
        (
            "a header without a name",
            json!({"reroute": {"by": "Header"}}),
            "reroute.key: by: Header needs the name of a header, there is no default",
        ),
        (
            "another way",
            json!({"reroute": {"by": "Cookie", "key": "a"}}),
            "reroute.by: \"Cookie\" is not one of FilterState, Header",
        ),
    ]);
}

/// With clusters that carry the front-proxy certificate.
fn trusting(changes: Value) -> Value {
    let mut config = with(json!({
        "apiservers": [
            {"name": "cp-1", "cluster": "cp-1", "frontProxyCluster": "cp-1-trusted"},
            {"name": "cp-2", "cluster": "cp-2", "frontProxyCluster": "cp-2-trusted"},
        ],
        "local": "cp-1",
        "identity": {"clientCertificates": "RequestHeader"},
    }));
    let members = config.as_object_mut().unwrap();
    members.extend(changes.as_object().unwrap().clone());
    members.retain(|_, value| !value.is_null());
    config
}

#[test]
fn an_identity_is_handed_on_over_clusters_that_are_believed() {
    let identity = parse(&trusting(json!({}))).unwrap().identity;
    assert_eq!(identity.client_certificates, ClientCertificates::RequestHeader);
    assert_eq!(identity.headers.user, ["x-remote-user"], "in lower case");
    let gateway = json!({
        "local": null,
        "identity": {"clientCertificates": "RequestHeader", "frontProxyCluster": "trusted",
            "headers": {"user": ["X-Remote-User", "X-User"]}},
    });
    let identity = parse(&trusting(gateway)).unwrap().identity;
    assert_eq!(identity.front_proxy_cluster.as_deref(), Some("trusted"));
    assert_eq!(identity.headers.user, ["x-remote-user", "x-user"]);
    let refused = |changes: Value| parse(&trusting(changes)).unwrap_err().to_string();
    for (changes, expected, why) in [
        (
            json!({"apiservers": [
                {"name": "cp-1", "cluster": "cp-1", "frontProxyCluster": "cp-1-trusted"},
                {"name": "cp-2", "cluster": "cp-2"},
            ]}),
            "apiservers[1].frontProxyCluster: missing, and needed with identity.clientCertificates: RequestHeader",
            "an apiserver that nobody can be handed on to",
        ),
        (
            json!({"local": null}),
            "identity.frontProxyCluster: missing, and needed with identity.clientCertificates: RequestHeader",
            "a gateway without a place for those that stay",
        ),
        (
            json!({"identity": {"frontProxyCluster": "trusted"}}),
            "identity.frontProxyCluster: a sidecar's here is the local apiserver, whose frontProxyCluster counts",
            "a sidecar with two",
        ),
        (
            json!({"local": null, "identity": {"frontProxyCluster": "cp-2"}}),
            "identity.frontProxyCluster: \"cp-2\" is already a cluster of \"cp-2\"",
            "a cluster that all requests reach",
        ),
        (
            json!({"reroute": {"by": "Header", "key": "x-reroute"}}),
            "reroute.by: Header does not go with identity.clientCertificates: RequestHeader, for a client can send headers",
            "a client could choose the believed cluster",
        ),
        (
            json!({
                "identity": {"headers": {"extraPrefix": ["X-Who-"]}},
                "reroute": {"by": "Header", "key": "x-who-reroute"},
            }),
            "reroute.key: \"x-who-reroute\" is one of identity.headers, which say who a client is",
            "one header for two things",
        ),
    ] {
        assert_eq!(refused(changes), expected, "{why}");
    }
}

#[test]
fn identity_and_status_are_checked() {
    let unsupported = "is not supported by this version; leave the key out";
    assert_refused(vec![
        (
            "no such way",
            json!({"identity": {"clientCertificates": "Trust"}}),
            "identity.clientCertificates: \"Trust\" is not one of Ignore, RequestHeader",
        ),
        (
            "a trusted cluster without a name",
            json!({"identity": {"frontProxyCluster": ""}}),
            "identity.frontProxyCluster: \"\" is empty",
        ),
        ("no header", json!({"identity": {"headers": {"user": []}}}), "identity.headers.user: lists no header"),
        (
            "a header that is none",
            json!({"identity": {"headers": {"uid": ["X-Remote-Uid", "X Uid"]}}}),
            "identity.headers.uid[1]: \"X Uid\" is not a header name",
        ),
        (
            "a prefix that is none",
            json!({"identity": {"headers": {"extraPrefix": [""]}}}),
            "identity.headers.extraPrefix[0]: \"\" is not a header name",
        ),
        (
            "a status page",
            json!({"status": {"path": "/mixed-version-proxy"}}),
            &format!("status.path: \"/mixed-version-proxy\" {unsupported}"),
        ),
        (
            "a status page nowhere",
            json!({"status": {"path": "status?x"}}),
            "status.path: \"status?x\" is not a path such as /mixed-version-proxy",
        ),
    ]);
}

#[test]
fn both_forms_are_told_apart() {
    let json = minimal().to_string();
    assert_eq!(Config::parse(format!("\n\r\n\t {json}\n").as_bytes()), Ok(defaults()), "white space around JSON");

    // A Struct begins with 0x0a, a newline, and the length of its first entry, for some lengths a brace or a space.
    let mut second_bytes = Vec::new();
    for length in 1..=100 {
        let config = json!({"apiservers": [{"name": "n".repeat(length), "cluster": "c"}]});
        let bytes = message(&config).encode_to_vec();
        second_bytes.push(bytes[1]);
        assert_eq!(bytes[0], b'\n');
        assert_eq!(Config::parse(&bytes), Config::parse(config.to_string().as_bytes()));
        assert!(Config::parse(&bytes).is_ok(), "a name of {length} bytes");
    }
    assert!(second_bytes.contains(&b'{'), "{second_bytes:?}");
}

#[test]
fn bytes_that_are_no_configuration_are_refused() {
    let nested_json = format!("{{\"apiservers\": {}", "[".repeat(100_000));
    let neither = "configuration: neither a JSON object nor a google.protobuf.Struct";
    let twice = r#"{"apiservers": [], "apiservers": []}"#;
    let twice_inside = r#"{"apiservers": [{"name": "a", "cluster": "a", "name": "b"}]}"#;
    let large = " ".repeat(1 << 21);
    let whole_struct = message(&minimal()).encode_to_vec();
    let rows: Vec<(&str, &[u8], &str)> = vec![
        ("nothing", b"", "apiservers: missing"),
        ("an empty object", b"{}", "apiservers: missing"),
        ("white space", b" \n", neither),
        ("a newline", b"\n", neither),
        ("a list", b"[]", neither),
        ("YAML", b"apiservers:\n- name: cp-1\n", neither),
        ("not UTF-8", b"{\"local\": \"\xff\"}", neither),
        ("another message", &[0x12, 0x00], neither),
        ("a cut Struct", &whole_struct[..20], neither),
        ("broken JSON", b"{\"local\": }", "configuration: broken JSON: expected value at line 1 column 11"),
        ("a cut object", b"\n{\"local\": ", "configuration: broken JSON: EOF while parsing a value at line 2"),
        ("two objects", b"{} {}", "configuration: broken JSON: trailing characters"),
        ("an infinite number", b"{\"retryAfterSeconds\": 1e999}", "configuration: broken JSON: number out of range"),
        ("a key twice", twice.as_bytes(), "apiservers: given twice"),
        ("a key twice, inside", twice_inside.as_bytes(), "apiservers[0].name: given twice"),
        ("a deep JSON", nested_json.as_bytes(), "configuration: broken JSON: recursion limit exceeded"),
        ("a large text", large.as_bytes(), "configuration: 2097152 bytes long, more than the 1048576 that are read"),
    ];
    for (sentence, bytes, message) in rows {
        let error = Config::parse(bytes).expect_err(sentence).to_string();
        assert!(error.starts_with(message), "{sentence}: {error}");
    }
}

#[test]
fn deep_structs_are_refused_and_dropped() {
    // Each level wraps the bytes below in ListValue.values and Value.list_value.
    fn wrapped(tag: u8, inner: &[u8]) -> Vec<u8> {
        let mut bytes = vec![tag];
        prost::encoding::encode_varint(inner.len() as u64, &mut bytes);
        bytes.extend_from_slice(inner);
        bytes
    }
    for levels in [10, 40, 200, 2000] {
        let mut value = vec![0x08, 0x00];
        for _ in 0..levels {
            value = wrapped(0x32, &wrapped(0x0a, &value));
        }
        let entry = [wrapped(0x0a, b"local"), wrapped(0x12, &value)].concat();
        let error = Config::parse(&wrapped(0x0a, &entry)).expect_err("a list is no name").to_string();
        let expected = if levels > 100 { "configuration: neither" } else { "local: expected a string, found a list" };
        assert!(error.starts_with(expected), "{levels}: {error}");
    }
}

#[test]
fn a_struct_can_hold_what_json_cannot() {
    let number = |number: f64| prost_types::Value { kind: Some(Kind::NumberValue(number)) };
    let integer = "retryAfterSeconds: expected a whole, non-negative number, found the number";
    let rows = [
        ("not a number", number(f64::NAN), format!("{integer} NaN")),
        ("infinity", number(f64::INFINITY), format!("{integer} inf")),
        ("minus infinity", number(f64::NEG_INFINITY), format!("{integer} -inf")),
        ("huge", number(1e300), format!("{integer} 1e300")),
        (
            "a value without a kind",
            prost_types::Value { kind: None },
            "retryAfterSeconds: expected a whole, non-negative number, found null".to_owned(),
        ),
    ];
    for (sentence, value, expected) in rows {
        let mut config = message(&minimal());
        config.fields.insert("retryAfterSeconds".to_owned(), value);
        let error = Config::parse(&config.encode_to_vec()).expect_err(sentence);
        assert_eq!(error.to_string(), expected, "{sentence}");
    }
    let mut config = message(&minimal());
    config.fields.insert("local".to_owned(), number(f64::NAN));
    let error = Config::parse(&config.encode_to_vec()).expect_err("a number for a name");
    assert_eq!(error.to_string(), "local: expected a string, found the number NaN");
}

/// The rows of a document's tables that begin with a key: the key and its default.
fn documented(text: &str) -> Vec<(String, String)> {
    let mut rows: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` | "))
        .map(|(key, rest)| (key.to_owned(), rest.split(" | ").next().unwrap_or_default().to_owned()))
        .collect();
    rows.sort();
    rows
}

#[test]
fn the_documented_tables_are_the_code() {
    let mut expected: Vec<(String, String)> = schema()
        .into_iter()
        .map(|(path, default)| {
            let default = match default {
                Value::Null if is_required(&path) => "required".to_owned(),
                Value::Null => "none".to_owned(),
                Value::String(text) => format!("`{text}`"),
                Value::Array(items) => {
                    let items: Vec<&str> = items.iter().filter_map(Value::as_str).collect();
                    format!("`[{}]`", items.join(", "))
                }
                other => format!("`{other}`"),
            };
            (path, default)
        })
        .collect();
    expected.sort();
    assert_eq!(documented(DOCS), expected, "docs/configuration.md against src/config/raw.rs");
    assert_eq!(documented(README), expected, "README.md against src/config/raw.rs");
}

#[test]
fn the_documented_json_is_accepted() {
    let examples: Vec<&str> = DOCS.split("```json\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(examples.len(), 1);
    for text in examples {
        assert_eq!(Config::parse(text.as_bytes()).map(|config| config.apiservers.len()), Ok(3), "{text}");
    }
}

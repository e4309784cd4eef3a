//! What the shipped Envoy configurations promise: property by property, and request by request on a real Envoy.

use std::{collections::BTreeSet, fs};

use e2e::{ControlPlane, GATEWAY, GATEWAY_HEADER, Pki, SIDECAR};
use lab::{
    Envoy,
    apiserver::Request,
    client::Opened,
    envoy::{Config, EnvoyBuilder},
    repository, wasm_path,
};
use serde_json::{Value, json};

/// All of them.
const FILES: [&str; 3] = [SIDECAR, GATEWAY, GATEWAY_HEADER];

/// Routes of requests that may be silent for hours.
const STREAMING_ROUTES: [&str; 7] =
    ["upgrade", "verb-prefix", "subresource", "profile", "node-proxy", "watch", "follow"];
/// The route of all others.
const OTHER_ROUTE: &str = "other";

/// The user that polls, and the role that it has.
const POLLER: &str = "mixed-version-proxy-poller";

// ---- properties of the text ----

/// A property: the sentence, what offends it in a configuration, and an edit that has to offend it. A property that
/// nothing offends would be no property.
type Property = (&'static str, fn(&Shipped) -> Vec<String>, fn(&mut Shipped));

/// A shipped configuration as it is.
#[derive(Clone)]
struct Shipped(Value);

const MANAGER: &str = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config";

impl Shipped {
    fn new(file: &str) -> Self {
        Self(Config::shipped(file).unwrap().value().clone())
    }

    /// The HTTP connection manager.
    fn manager(&self) -> &Value {
        self.0.pointer(MANAGER).expect("an HTTP connection manager")
    }

    fn manager_mut(&mut self) -> &mut Value {
        self.0.pointer_mut(MANAGER).expect("an HTTP connection manager")
    }

    fn route_config(&self) -> &Value {
        &self.manager()["route_config"]
    }

    /// The routes of the only virtual host.
    fn routes(&self) -> &[Value] {
        list(&self.route_config()["virtual_hosts"][0]["routes"])
    }

    fn route_mut(&mut self, name: &str) -> &mut Value {
        let routes = &mut self.manager_mut()["route_config"]["virtual_hosts"][0]["routes"];
        routes.as_array_mut().unwrap().iter_mut().find(|route| route["name"] == name).expect("a route")
    }

    /// The one cluster specifier, whether the routes name it or hold it.
    fn specifier(&self) -> &Value {
        let action = &self.routes()[0]["route"];
        let inline = action.get("inline_cluster_specifier_plugin");
        let named = || {
            let plugins = list(&self.route_config()["cluster_specifier_plugins"]);
            plugins.iter().find(|plugin| plugin["extension"]["name"] == action["cluster_specifier_plugin"])
        };
        &inline.or_else(named).expect("a cluster specifier")["extension"]["typed_config"]
    }

    fn filters(&self) -> &[Value] {
        list(&self.manager()["http_filters"])
    }

    /// The wasm filter's `config`.
    fn wasm(&self) -> &Value {
        let filter = self.filters().iter().find(|filter| filter["name"] == "mixed_version_proxy");
        &filter.expect("the filter")["typed_config"]["config"]
    }

    fn wasm_mut(&mut self) -> &mut Value {
        let filters = self.manager_mut()["http_filters"].as_array_mut().unwrap();
        let filter = filters.iter_mut().find(|filter| filter["name"] == "mixed_version_proxy");
        &mut filter.expect("the filter")["typed_config"]["config"]
    }

    /// The filter's own configuration.
    fn plugin(&self) -> &Value {
        &self.wasm()["configuration"]["value"]
    }

    /// A key of all apiservers of the filter's configuration, in their order.
    fn apiservers(&self, key: &str) -> Vec<&str> {
        list(&self.plugin()["apiservers"]).iter().map(|apiserver| text(&apiserver[key])).collect()
    }

    fn clusters(&self) -> &[Value] {
        list(&self.0["static_resources"]["clusters"])
    }

    fn cluster(&self, name: &str) -> Option<&Value> {
        self.clusters().iter().find(|cluster| cluster["name"] == name)
    }

    fn cluster_mut(&mut self, name: &str) -> &mut Value {
        let clusters = self.0["static_resources"]["clusters"].as_array_mut().unwrap();
        clusters.iter_mut().find(|cluster| cluster["name"] == name).expect("a cluster")
    }

    /// The clusters of the filter's polls.
    fn poll_clusters(&self) -> Vec<&Value> {
        let polls = self.apiservers("discoveryCluster");
        self.clusters().iter().filter(|cluster| polls.contains(&text(&cluster["name"]))).collect()
    }

    fn listener(&self) -> &Value {
        &self.0["static_resources"]["listeners"][0]
    }

    /// The names of the clusters where the filter's word for who a client is counts.
    fn trusted(&self) -> Vec<&str> {
        let apiservers = list(&self.plugin()["apiservers"]).iter().map(|apiserver| &apiserver["frontProxyCluster"]);
        apiservers.chain([&self.plugin()["identity"]["frontProxyCluster"]]).filter_map(Value::as_str).collect()
    }

    fn trusted_clusters(&self) -> Vec<&Value> {
        let trusted = self.trusted();
        self.clusters().iter().filter(|cluster| trusted.contains(&text(&cluster["name"]))).collect()
    }

    /// What clients' requests go over whose sender the filter does not vouch for.
    fn ordinary_clusters(&self) -> Vec<&Value> {
        let trusted = self.trusted();
        self.client_clusters().into_iter().filter(|cluster| !trusted.contains(&text(&cluster["name"]))).collect()
    }

    /// All others: what clients' requests go over.
    fn client_clusters(&self) -> Vec<&Value> {
        let polls = self.apiservers("discoveryCluster");
        self.clusters().iter().filter(|cluster| !polls.contains(&text(&cluster["name"]))).collect()
    }

    /// Where requests go that are not rerouted.
    fn here(&self) -> &str {
        text(&self.specifier()["cluster_matcher"]["on_no_match"]["action"]["typed_config"]["cluster"])
    }

    /// Where in the configuration one of these keys stands.
    fn mentions(&self, keys: &[&str]) -> Vec<String> {
        let mut found = Vec::new();
        walk(&self.0, "", &mut |path, key, _| {
            if keys.contains(&key) {
                found.push(path.to_owned());
            }
        });
        found
    }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Visits all members of objects with their paths.
fn walk(value: &Value, path: &str, visit: &mut impl FnMut(&str, &str, &Value)) {
    match value {
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                walk(item, &format!("{path}/{index}"), visit);
            }
        }
        Value::Object(members) => {
            for (key, member) in members {
                let path = format!("{path}/{key}");
                visit(&path, key, member);
                walk(member, &path, visit);
            }
        }
        _ => {}
    }
}

/// What does not satisfy a condition, each with its name.
fn unlike<'a>(items: impl IntoIterator<Item = &'a Value>, mut is_good: impl FnMut(&Value) -> bool) -> Vec<String> {
    let mut items = items.into_iter().peekable();
    if items.peek().is_none() {
        return vec!["there is none".to_owned()];
    }
    items.filter(|item| !is_good(item)).map(Value::to_string).collect()
}

/// A value that is not what it should be.
fn other_than(found: &Value, expected: &Value) -> Vec<String> {
    if found == expected { Vec::new() } else { vec![format!("{found} instead of {expected}")] }
}

/// Two sets that should be equal.
fn different<'a>(one: impl IntoIterator<Item = &'a str>, other: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let (one, other): (BTreeSet<_>, BTreeSet<_>) = (one.into_iter().collect(), other.into_iter().collect());
    one.symmetric_difference(&other).map(|&name| name.to_owned()).collect()
}

/// A route's action without its limits.
fn destination(route: &Value) -> Value {
    let mut action = route["route"].clone();
    if let Some(action) = action.as_object_mut() {
        action.remove("timeout");
        action.remove("idle_timeout");
    }
    action
}

fn common_tls(cluster: &Value) -> &Value {
    &cluster["transport_socket"]["typed_config"]["common_tls_context"]
}

fn has_client_certificate(cluster: &Value) -> bool {
    let tls = common_tls(cluster);
    ["tls_certificates", "tls_certificate_sds_secret_configs", "tls_certificate_provider_instance"]
        .iter()
        .any(|key| tls.get(key).is_some())
}

/// The addresses and ports that a cluster leads to.
fn endpoints(cluster: &Value) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    walk(&cluster["load_assignment"], "", &mut |_, key, value| {
        if key == "socket_address" {
            found.insert(value.to_string());
        }
    });
    found
}

fn http_options(cluster: &Value) -> &Value {
    &cluster["typed_extension_protocol_options"]["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]
}

/// The key that the cluster specifier reads, as the filter's configuration calls it.
fn specifier_key(shipped: &Shipped) -> Option<&str> {
    let input = &shipped.specifier()["cluster_matcher"]["matcher_tree"]["input"]["typed_config"];
    match text(&input["@type"]) {
        "type.googleapis.com/envoy.extensions.matching.common_inputs.network.v3.FilterStateInput" => {
            text(&input["key"]).strip_prefix("wasm.")
        }
        "type.googleapis.com/envoy.type.matcher.v3.HttpRequestHeaderMatchInput" => input["header_name"].as_str(),
        _ => None,
    }
}

const ROUTES: &[Property] = &[
    (
        "there is one listener, one filter chain, one virtual host, and it is for all hosts",
        |shipped| {
            let mut found = Vec::new();
            walk(&shipped.0, "", &mut |path, key, value| {
                let several = matches!(key, "listeners" | "filter_chains" | "filters" | "virtual_hosts");
                if several && list(value).len() != 1 || key == "domains" && *value != json!(["*"]) {
                    found.push(path.to_owned());
                }
            });
            found
        },
        |shipped| shipped.manager_mut()["route_config"]["virtual_hosts"][0]["domains"] = json!(["*.example.com"]),
    ),
    (
        "no route limits how long an answer takes",
        |shipped| unlike(shipped.routes(), |route| route["route"]["timeout"] == "0s"),
        |shipped| shipped.route_mut(OTHER_ROUTE)["route"]["timeout"] = "15s".into(),
    ),
    (
        "routes of streams do not limit silence",
        |shipped| {
            let streaming = |route: &&Value| route["name"] != OTHER_ROUTE;
            unlike(shipped.routes().iter().filter(streaming), |route| route["route"]["idle_timeout"] == "0s")
        },
        |shipped| shipped.route_mut("watch")["route"]["idle_timeout"] = "120s".into(),
    ),
    (
        "the route of all other requests limits silence to 120s",
        |shipped| {
            let other = |route: &&Value| route["name"] == OTHER_ROUTE;
            unlike(shipped.routes().iter().filter(other), |route| route["route"]["idle_timeout"] == "120s")
        },
        |shipped| shipped.route_mut(OTHER_ROUTE)["route"]["idle_timeout"] = "0s".into(),
    ),
    (
        "the routes are those that the tests know",
        |shipped| {
            let names = shipped.routes().iter().map(|route| text(&route["name"]));
            different(names, STREAMING_ROUTES.into_iter().chain([OTHER_ROUTE]))
        },
        |shipped| shipped.route_mut("follow")["name"] = "log".into(),
    ),
    (
        "the last route takes whatever is left",
        |shipped| unlike(shipped.routes().last(), |route| route["match"] == json!({"prefix": "/"})),
        |shipped| shipped.route_mut(OTHER_ROUTE)["match"] = json!({"prefix": "/api"}),
    ),
    (
        "all routes lead to the same cluster specifier and differ in nothing but limits of time",
        |shipped| {
            let first = destination(&shipped.routes()[0]);
            unlike(shipped.routes(), |route| {
                let keys = route.as_object().into_iter().flatten().map(|(key, _)| key.as_str());
                destination(route) == first && different(keys, ["name", "match", "route"]).is_empty()
            })
        },
        |shipped| shipped.route_mut("watch")["route"]["cluster_specifier_plugin"] = "another".into(),
    ),
    (
        "all routes lead to a cluster specifier and do nothing else to a request",
        |shipped| {
            unlike(shipped.routes(), |route| {
                let action = destination(route);
                let action: Vec<_> = action.as_object().into_iter().flatten().map(|(key, _)| key.as_str()).collect();
                matches!(action[..], ["cluster_specifier_plugin" | "inline_cluster_specifier_plugin"])
            })
        },
        |shipped| shipped.route_mut("watch")["route"]["prefix_rewrite"] = "/".into(),
    ),
    (
        "the cluster specifier knows exactly the filter's clusters, each under its own name",
        |shipped| {
            let map = &shipped.specifier()["cluster_matcher"]["matcher_tree"]["exact_match_map"]["map"];
            let map = map.as_object().expect("a map");
            let known = [shipped.apiservers("cluster"), shipped.trusted()].concat();
            let mut found = different(map.keys().map(String::as_str), known);
            for (name, entry) in map {
                found.extend(other_than(&entry["action"]["typed_config"]["cluster"], &json!(name)));
            }
            found
        },
        |shipped| {
            let plugins = &mut shipped.manager_mut()["route_config"]["cluster_specifier_plugins"];
            let matcher = &mut plugins[0]["extension"]["typed_config"]["cluster_matcher"];
            let action = &mut matcher["matcher_tree"]["exact_match_map"]["map"]["cp-2"]["action"];
            action["typed_config"]["cluster"] = "cp-3".into();
        },
    ),
    (
        "the cluster specifier reads what the filter writes",
        |shipped| other_than(&json!(specifier_key(shipped)), &shipped.plugin()["reroute"]["key"]),
        |shipped| shipped.wasm_mut()["configuration"]["value"]["reroute"]["key"] = "another".into(),
    ),
    (
        "a request that is not rerouted goes to the local apiserver, or is balanced over all of them",
        |shipped| {
            let here = shipped.cluster(shipped.here()).expect("a cluster for requests that are not rerouted");
            let apiservers = list(&shipped.plugin()["apiservers"]);
            if let Some(local) = shipped.plugin().get("local") {
                let local = apiservers.iter().find(|apiserver| apiserver["name"] == *local);
                return other_than(&here["name"], &local.expect("the local apiserver")["cluster"]);
            }
            let clusters = shipped.apiservers("cluster").into_iter().filter_map(|name| shipped.cluster(name));
            let all: BTreeSet<_> = clusters.flat_map(endpoints).collect();
            endpoints(here).symmetric_difference(&all).cloned().collect()
        },
        |shipped| {
            let plugins = &mut shipped.manager_mut()["route_config"]["cluster_specifier_plugins"];
            let matcher = &mut plugins[0]["extension"]["typed_config"]["cluster_matcher"];
            matcher["on_no_match"]["action"]["typed_config"]["cluster"] = "cp-3".into();
        },
    ),
    (
        "nothing is sent twice, nothing is sent elsewhere",
        |shipped| {
            shipped.mentions(&[
                "retry_policy",
                "retry_policy_typed_config",
                "hedge_policy",
                "request_mirror_policies",
                "internal_redirect_policy",
                "internal_redirect_action",
                "max_internal_redirects",
            ])
        },
        |shipped| {
            shipped.manager_mut()["route_config"]["virtual_hosts"][0]["retry_policy"] = json!({"retry_on": "5xx"})
        },
    ),
    (
        "nothing rewrites what the filter answers",
        |shipped| shipped.mentions(&["local_reply_config", "direct_response", "custom_response"]),
        |shipped| shipped.manager_mut()["local_reply_config"] = json!({}),
    ),
    (
        "nothing leaves the filter out",
        |shipped| shipped.mentions(&["typed_per_filter_config", "filter_enabled", "disabled", "is_optional"]),
        |shipped| shipped.route_mut("watch")["typed_per_filter_config"] = json!({"mixed_version_proxy": {}}),
    ),
];

const MANAGER_PROPERTIES: &[Property] = &[
    (
        "a path's bytes stay what they are",
        |shipped| {
            let manager = shipped.manager();
            [
                other_than(&manager["normalize_path"], &json!(false)),
                other_than(&manager["merge_slashes"], &json!(false)),
                other_than(&manager["path_with_escaped_slashes_action"], &json!("KEEP_UNCHANGED")),
                shipped.mentions(&[
                    "path_normalization_options",
                    "prefix_rewrite",
                    "regex_rewrite",
                    "path_rewrite_policy",
                ]),
            ]
            .concat()
        },
        |shipped| shipped.manager_mut()["path_with_escaped_slashes_action"] = "UNESCAPE_AND_FORWARD".into(),
    ),
    (
        "websocket and SPDY/3.1 are upgraded, and pass through the same filters as all else",
        |shipped| {
            let expected = json!([{"upgrade_type": "websocket"}, {"upgrade_type": "SPDY/3.1"}]);
            other_than(&shipped.manager()["upgrade_configs"], &expected)
        },
        |shipped| shipped.manager_mut()["upgrade_configs"][0]["filters"] = json!([]),
    ),
    (
        "no connection or stream is limited in time but by its route",
        |shipped| {
            let mut limits = shipped.mentions(&["max_stream_duration", "max_connection_duration", "request_timeout"]);
            // But those with the front-proxy certificate, below.
            limits.retain(|place| !(place.starts_with("/static_resources/clusters/") && place.ends_with("_duration")));
            [limits, other_than(&shipped.manager()["stream_idle_timeout"], &json!("0s"))].concat()
        },
        |shipped| shipped.manager_mut()["stream_idle_timeout"] = "300s".into(),
    ),
    (
        "the filter stands directly before the router, which is the last",
        |shipped| {
            let kinds: Vec<_> = shipped.filters().iter().map(|filter| text(&filter["typed_config"]["@type"])).collect();
            let expected = [
                "type.googleapis.com/envoy.extensions.filters.http.wasm.v3.Wasm",
                "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router",
            ];
            let wasm = kinds.iter().filter(|kind| **kind == expected[0]).count();
            if kinds.ends_with(&expected) && wasm == 1 { Vec::new() } else { vec![format!("{kinds:?}")] }
        },
        |shipped| shipped.manager_mut()["http_filters"].as_array_mut().unwrap().reverse(),
    ),
    (
        "the request's method is kept where the filter looks for it when an apiserver fails",
        |shipped| {
            let kept = json!([{
                "object_key": "mixed_version_proxy.method",
                "factory_key": "envoy.string",
                "format_string": {"text_format_source": {"inline_string": "%REQ(:METHOD)%"}},
            }]);
            let method = shipped.filters().iter().filter(|filter| filter["name"] == "request_method");
            unlike(method, |filter| filter["typed_config"]["on_request_headers"] == kept)
        },
        |shipped| {
            shipped.manager_mut()["http_filters"].as_array_mut().unwrap().retain(|f| f["name"] != "request_method")
        },
    ),
    (
        "a crashed filter fails requests for a moment only, and never lets one pass by",
        |shipped| {
            let reload =
                unlike([&shipped.wasm()["reload_config"]], |reload| reload["backoff"]["base_interval"].is_string());
            [other_than(&shipped.wasm()["failure_policy"], &json!("FAIL_RELOAD")), reload].concat()
        },
        |shipped| shipped.wasm_mut()["failure_policy"] = "FAIL_OPEN".into(),
    ),
    (
        "labels of metrics are read out of their names",
        |shipped| {
            let tags = list(&shipped.0["stats_config"]["stats_tags"]);
            let expected = |label: &str| json!({"tag_name": label, "regex": format!(r"({label}=\.=(.*?);\.;)")});
            let labels = ["code", "group", "version", "resource", "type"];
            let missing = labels.into_iter().filter(|label| !tags.contains(&expected(label)));
            missing.map(|label| format!("{label} in {tags:?}")).collect()
        },
        |shipped| shipped.0["stats_config"]["stats_tags"][0]["regex"] = "(code=(.*?);)".into(),
    ),
    (
        "no client steers Envoy by headers",
        |shipped| {
            let manager = shipped.manager();
            let mutations = list(&manager["early_header_mutation_extensions"][0]["typed_config"]["mutations"]);
            let removed = mutations.contains(&json!({"remove_on_match": {"key_matcher": {"prefix": "x-envoy-"}}}));
            let internal = other_than(
                &manager["internal_address_config"],
                &json!({"cidr_ranges": [{"address_prefix": "255.255.255.255", "prefix_len": 32}]}),
            );
            let removed = if removed { Vec::new() } else { vec![format!("{mutations:?}")] };
            [removed, internal, other_than(&manager["forward_client_cert_details"], &json!("SANITIZE"))].concat()
        },
        |shipped| shipped.manager_mut()["early_header_mutation_extensions"] = json!([]),
    ),
    (
        "a header that reroutes is removed from what clients send, before anything reads it, and never goes upstream",
        |shipped| {
            let reroute = &shipped.plugin()["reroute"];
            let manager = shipped.manager();
            let mutations = list(&manager["early_header_mutation_extensions"][0]["typed_config"]["mutations"]);
            let removed: Vec<_> = mutations.iter().filter_map(|mutation| mutation["remove"].as_str()).collect();
            let kept_here = list(&shipped.route_config()["request_headers_to_remove"]).iter().map(text);
            let kept_here: Vec<_> = kept_here.filter(|name| !name.starts_with("x-envoy-")).collect();
            let expected: Vec<_> = if reroute["by"] == "Header" { vec![text(&reroute["key"])] } else { Vec::new() };
            [different(removed, expected.clone()), different(kept_here, expected)].concat()
        },
        |shipped| {
            shipped.wasm_mut()["configuration"]["value"]["reroute"] = json!({"by": "Header", "key": "x-another"});
        },
    ),
];

const CLUSTERS: &[Property] = &[
    (
        "every cluster that the filter names is there",
        |shipped| {
            let named = [shipped.apiservers("cluster"), shipped.apiservers("discoveryCluster"), vec![shipped.here()]];
            let missing = named.concat().into_iter().filter(|name| shipped.cluster(name).is_none());
            missing.map(str::to_owned).collect()
        },
        |shipped| shipped.cluster_mut("cp-2-poll")["name"] = "cp-2-polls".into(),
    ),
    (
        "every apiserver is polled over a cluster of its own, which leads to the same address as its other cluster",
        |shipped| {
            unlike(list(&shipped.plugin()["apiservers"]), |apiserver| {
                let clusters = ["cluster", "discoveryCluster"].map(|key| shipped.cluster(text(&apiserver[key])));
                let [Some(cluster), Some(poll)] = clusters else { return false };
                cluster["name"] != poll["name"]
                    && endpoints(cluster).len() == 1
                    && endpoints(cluster) == endpoints(poll)
            })
        },
        |shipped| {
            shipped.wasm_mut()["configuration"]["value"]["apiservers"][1]["discoveryCluster"] = "cp-2".into();
        },
    ),
    (
        "no two apiservers have the same address",
        |shipped| {
            let mut seen = BTreeSet::new();
            let clusters = shipped.apiservers("cluster").into_iter().filter_map(|name| shipped.cluster(name));
            unlike(clusters, |cluster| endpoints(cluster).into_iter().all(|address| seen.insert(address)))
        },
        |shipped| {
            let other = shipped.cluster("cp-3").unwrap()["load_assignment"].clone();
            shipped.cluster_mut("cp-2")["load_assignment"] = other;
        },
    ),
    (
        "clients' requests go upstream without a client certificate, but where the filter vouches for them",
        |shipped| unlike(shipped.ordinary_clusters(), |cluster| !has_client_certificate(cluster)),
        |shipped| {
            let tls = common_tls(shipped.cluster("cp-2-poll").unwrap()).clone();
            shipped.cluster_mut("cp-2")["transport_socket"]["typed_config"]["common_tls_context"] = tls;
        },
    ),
    (
        "connections with the front-proxy certificate, which comes by SDS, end in bounded time; no others do",
        |shipped| {
            let is_bounded = |cluster: &Value| {
                http_options(cluster)["common_http_protocol_options"].get("max_connection_duration").is_some()
            };
            let trusted = shipped.trusted_clusters();
            let trusted = trusted.iter().filter(|cluster| {
                !is_bounded(cluster) || common_tls(cluster).get("tls_certificate_sds_secret_configs").is_none()
            });
            let mut found: Vec<_> = trusted.map(|cluster| cluster["name"].to_string()).collect();
            found.extend(unlike(shipped.ordinary_clusters(), |cluster| !is_bounded(cluster)));
            found.extend(unlike(shipped.poll_clusters(), |cluster| !is_bounded(cluster)));
            found
        },
        |shipped| {
            let options = &mut shipped.cluster_mut("cp-1")["typed_extension_protocol_options"];
            let options = &mut options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"];
            options["common_http_protocol_options"]["max_connection_duration"] = "1s".into();
        },
    ),
    (
        "Envoy itself removes what clients say of who they are",
        |shipped| {
            let mutations =
                list(&shipped.manager()["early_header_mutation_extensions"][0]["typed_config"]["mutations"]);
            let pattern = "x[-_]remote[-_](user|group|uid|extra[-_].*)";
            let removes = json!({"remove_on_match": {"key_matcher": {"safe_regex": {"regex": pattern}}}});
            if mutations.contains(&removes) { Vec::new() } else { vec![format!("{mutations:?}")] }
        },
        |shipped| shipped.manager_mut()["early_header_mutation_extensions"] = json!([]),
    ),
    (
        "identities are believed only where filter state chooses the cluster, and of certificates that Envoy verifies",
        |shipped| {
            if shipped.trusted().is_empty() {
                return Vec::new();
            }
            let tls = &shipped.listener()["filter_chains"][0]["transport_socket"]["typed_config"]["common_tls_context"];
            let validation = tls["validation_context"].as_object().expect("a CA for clients");
            let keys: Vec<_> = validation.keys().collect();
            [
                other_than(&shipped.plugin()["reroute"]["by"], &json!("FilterState")),
                if keys == ["trusted_ca"] { Vec::new() } else { vec![format!("{keys:?}")] },
            ]
            .concat()
        },
        |shipped| {
            if shipped.trusted().is_empty() {
                shipped.wasm_mut()["configuration"]["value"]["identity"] = json!({"frontProxyCluster": "trusted"});
            }
            shipped.wasm_mut()["configuration"]["value"]["reroute"]["by"] = "Header".into();
            let tls = &mut shipped.0["static_resources"]["listeners"][0]["filter_chains"][0]["transport_socket"];
            let tls = &mut tls["typed_config"]["common_tls_context"];
            tls["validation_context"]["trust_chain_verification"] = "ACCEPT_UNTRUSTED".into();
        },
    ),
    (
        "polls have a client certificate",
        |shipped| unlike(shipped.poll_clusters(), has_client_certificate),
        |shipped| {
            let tls = common_tls(shipped.cluster("cp-2").unwrap()).clone();
            shipped.cluster_mut("cp-2-poll")["transport_socket"]["typed_config"]["common_tls_context"] = tls;
        },
    ),
    (
        "every cluster verifies by TLS that it reached an apiserver of this cluster",
        |shipped| {
            let names = json!([{"san_type": "DNS", "matcher": {"exact": "kubernetes.default.svc"}}]);
            unlike(shipped.clusters(), |cluster| {
                let validation = &common_tls(cluster)["validation_context"];
                cluster["transport_socket"]["name"] == "envoy.transport_sockets.tls"
                    && text(&cluster["transport_socket"]["typed_config"]["@type"]).ends_with(".UpstreamTlsContext")
                    && !text(&validation["trusted_ca"]["filename"]).is_empty()
                    && validation["match_typed_subject_alt_names"] == names
                    && validation.as_object().is_some_and(|keys| keys.len() == 2)
            })
        },
        |shipped| {
            let tls = &mut shipped.cluster_mut("cp-3")["transport_socket"]["typed_config"]["common_tls_context"];
            tls["validation_context"]["trust_chain_verification"] = "ACCEPT_UNTRUSTED".into();
        },
    ),
    (
        "every apiserver is spoken to in HTTP/1.1",
        |shipped| {
            let http1 = json!({"http_protocol_options": {}});
            unlike(shipped.clusters(), |cluster| http_options(cluster)["explicit_http_config"] == http1)
        },
        |shipped| {
            let options = &mut shipped.cluster_mut("cp-1")["typed_extension_protocol_options"];
            let options = &mut options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"];
            options["explicit_http_config"] = json!({"http2_protocol_options": {}});
        },
    ),
    (
        "connections to apiservers close before the apiserver closes them (90s)",
        |shipped| {
            unlike(shipped.clusters(), |cluster| {
                http_options(cluster)["common_http_protocol_options"]["idle_timeout"] == "60s"
            })
        },
        |shipped| {
            let options = &mut shipped.cluster_mut("cp-1")["typed_extension_protocol_options"];
            let options = &mut options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"];
            options["common_http_protocol_options"] = json!({});
        },
    ),
    (
        "no circuit breaker stands in the way of clients, and none allows a retry",
        |shipped| {
            unlike(shipped.client_clusters(), |cluster| {
                let thresholds = list(&cluster["circuit_breakers"]["thresholds"]);
                let enough = |limit: &Value| limit.as_u64().is_some_and(|limit| limit >= 100_000);
                let [threshold] = thresholds else { return false };
                threshold.get("priority").is_none()
                    && threshold["max_retries"] == 0
                    && ["max_connections", "max_pending_requests", "max_requests"]
                        .iter()
                        .all(|key| enough(&threshold[key]))
            })
        },
        |shipped| shipped.cluster_mut("cp-1")["circuit_breakers"]["thresholds"][0]["max_requests"] = 1024.into(),
    ),
    (
        "no apiserver that a request was rerouted to is replaced by none",
        |shipped| {
            let mut found = shipped.mentions(&["outlier_detection"]);
            for name in shipped.apiservers("cluster") {
                found.extend(
                    shipped.cluster(name).filter(|cluster| cluster.get("health_checks").is_some()).map(|_| name.into()),
                );
            }
            found
        },
        |shipped| shipped.cluster_mut("cp-2")["health_checks"] = json!([]),
    ),
];

#[test]
fn every_shipped_configuration_has_every_property() {
    let properties = || [ROUTES, MANAGER_PROPERTIES, CLUSTERS].into_iter().flatten();
    let mut failures = Vec::new();
    for file in FILES {
        let shipped = Shipped::new(file);
        for (property, offenders, offend) in properties() {
            let found = offenders(&shipped);
            if !found.is_empty() {
                failures.push(format!("{file}: {property}; but {}", found.join(", ")));
            }
            let mut offending = shipped.clone();
            offend(&mut offending);
            assert!(!offenders(&offending).is_empty(), "{file}: the test does not notice the contrary of: {property}");
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn the_pollers_rights_are_those_it_needs_and_no_more() {
    let text = fs::read_to_string(repository().join("envoy/rbac.yaml")).unwrap();
    let documents: Vec<_> =
        text.split("\n---\n").map(|text| Config::from_yaml(text).unwrap().value().clone()).collect();
    let [role, binding] = &documents[..] else { panic!("a role and its binding") };
    assert_eq!((&role["kind"], &binding["kind"]), (&json!("ClusterRole"), &json!("ClusterRoleBinding")));

    let rules = list(&role["rules"]);
    let [discovery, api_services] = rules else { panic!("{rules:?}") };
    let urls = &discovery["nonResourceURLs"];
    for url in ["/api", "/apis"] {
        assert!(list(urls).contains(&json!(url)), "{urls}");
    }
    let is_discovery = |url: &Value| ["/api", "/apis", "/openapi/v3"].iter().any(|root| text_begins(url, root));
    assert_eq!(unlike(list(urls), is_discovery), [""; 0]);
    assert_eq!(discovery["verbs"], json!(["get"]));
    let expected =
        json!({"apiGroups": ["apiregistration.k8s.io"], "resources": ["apiservices"], "verbs": ["get", "list"]});
    assert_eq!(*api_services, expected);

    let group = "rbac.authorization.k8s.io";
    let expected = json!({"apiGroup": group, "kind": "ClusterRole", "name": role["metadata"]["name"]});
    assert_eq!(binding["roleRef"], expected);
    assert_eq!(binding["subjects"], json!([{"apiGroup": group, "kind": "User", "name": POLLER}]));
}

/// Whether it is a URL path or all paths below one.
fn text_begins(url: &Value, root: &str) -> bool {
    text(url).strip_prefix(root).is_some_and(|rest| rest.is_empty() || rest == "/*")
}

// ---- on a real Envoy ----

#[tokio::test]
async fn envoy_finds_every_file_valid() {
    let pki = Pki::new().unwrap();
    let address = "127.0.0.1:6443".parse().unwrap();
    let directory = pki.directory.path().to_str().unwrap();
    for file in FILES {
        // As people run it: the file itself, with nothing but its paths replaced.
        let text = fs::read_to_string(repository().join("envoy").join(file)).unwrap();
        let wasm = wasm_path().unwrap().to_str().unwrap().to_owned();
        let text = text
            .replace("/etc/mixed-version-proxy/mixed-version-proxy.wasm", &wasm)
            .replace("/etc/kubernetes/pki", directory)
            .replace("/etc/mixed-version-proxy", directory);
        let yaml = pki.directory.path().join(file);
        fs::write(&yaml, text).unwrap();
        // As the tests run it.
        let config = pki.fill_in(file, &[address, address, address]).unwrap();
        let json = config.write(&pki.directory.path().join(file).with_extension("json")).unwrap();
        for path in [yaml, json] {
            Envoy::validate(&path).await.unwrap_or_else(|error| panic!("{file}: {error:#}"));
        }
    }
}

/// Only 1.37.2 serves it, so these are rerouted.
const NEW: &str = "/apis/storagemigration.k8s.io/v1";

/// Requests: method, target, value of an `Upgrade` header, and the route they take.
#[rustfmt::skip]
const REQUESTS: &[(&str, &str, Option<&str>, &str)] = &[
    // Watches, as an apiserver reads a flag of the query: any value but "0" and "false", in any case, and the first.
    ("GET", "/api/v1/pods?watch=true", None, "watch"),
    ("GET", "/api/v1/pods?watch=1", None, "watch"),
    ("GET", "/api/v1/pods?watch", None, "watch"),
    ("GET", "/api/v1/pods?watch=", None, "watch"),
    ("GET", "/api/v1/pods?watch=True", None, "watch"),
    ("GET", "/api/v1/pods?watch=t", None, "watch"),
    ("GET", "/api/v1/pods?watch=f", None, "watch"),
    ("GET", "/api/v1/pods?watch=00", None, "watch"),
    ("GET", "/api/v1/namespaces/n/pods?limit=5&watch=true&resourceVersion=7", None, "watch"),
    ("GET", "/api/v1/namespaces/n/pods?watch=true&watch=false", None, "watch"),
    ("GET", "/apis/apps/v1/deployments?allowWatchBookmarks=true&watch=true", None, "watch"),
    ("GET", "/debug/pprof/profile?seconds=300", None, "profile"),
    ("GET", "/api/v1/pods?watch=false", None, "other"),
    ("GET", "/api/v1/pods?watch=False", None, "other"),
    ("GET", "/api/v1/pods?watch=FALSE", None, "other"),
    ("GET", "/api/v1/pods?watch=0", None, "other"),
    ("GET", "/api/v1/pods?watch=false&watch=true", None, "other"),
    ("GET", "/api/v1/pods?labelSelector=watch%3Dtrue", None, "other"),
    ("GET", "/api/v1/pods?xwatch=true", None, "other"),
    ("GET", "/apis/storagemigration.k8s.io/v1/storageversionmigrations?watch=true", None, "watch"),
    ("GET", "/apis/storagemigration.k8s.io/v1/storageversionmigrations?watch=false", None, "other"),
    // The old verb prefixes.
    ("GET", "/api/v1/watch/pods", None, "verb-prefix"),
    ("GET", "/api/v1/watch/namespaces/n/pods/p", None, "verb-prefix"),
    ("GET", "/apis/apps/v1/watch/namespaces/a/deployments", None, "verb-prefix"),
    ("GET", "/apis/storagemigration.k8s.io/v1/watch/storageversionmigrations", None, "verb-prefix"),
    ("GET", "/api/v1/namespaces/watch/pods", None, "other"),
    ("GET", "/apis/apps/v1/namespaces/n/deployments/watch", None, "other"),
    // Logs, and other subresources that stream.
    ("GET", "/api/v1/namespaces/n/pods/p/log?follow=true", None, "subresource"),
    ("GET", "/api/v1/namespaces/n/pods/p/log", None, "subresource"),
    ("POST", "/api/v1/namespaces/n/pods/p/exec?command=sh", None, "subresource"),
    ("GET", "/api/v1/namespaces/n/pods/p/attach?container=c", None, "subresource"),
    ("GET", "/api/v1/namespaces/n/pods/p/portforward?ports=80", None, "subresource"),
    ("GET", "/api/v1/namespaces/n/pods/p/proxy/metrics?watch=false", None, "subresource"),
    ("POST", "/api/v1/namespaces/n/services/https:s:443/proxy/a%2Fb//c", None, "subresource"),
    ("GET", "/api/v1/nodes/n/proxy/logs/", None, "node-proxy"),
    ("GET", "/api/v1/nodes/n/proxy", None, "node-proxy"),
    ("GET", "/api/v1/namespaces/n/pods/log", None, "other"),
    ("GET", "/api/v1/namespaces/n/pods/exec", None, "other"),
    ("GET", "/api/v1/namespaces/n/pods/p/status", None, "other"),
    ("GET", "/apis/example.com/v1/namespaces/n/builds/b/log?follow=true", None, "follow"),
    ("GET", "/apis/storagemigration.k8s.io/v1/storageversionmigrations?follow=1", None, "follow"),
    ("GET", "/apis/example.com/v1/namespaces/n/builds/b/log?follow=0", None, "other"),
    // Upgrades, wherever they lead.
    ("GET", "/api/v1/namespaces/n/pods/p/exec?command=sh", Some("websocket"), "upgrade"),
    ("POST", "/api/v1/namespaces/n/pods/p/exec?command=sh", Some("SPDY/3.1"), "upgrade"),
    ("GET", "/api/v1/namespaces/n/services/s/proxy/live", Some("websocket"), "upgrade"),
    ("GET", "/apis/subresources.kubevirt.io/v1/namespaces/n/virtualmachines/v/console", Some("websocket"), "upgrade"),
    ("GET", "/api/v1/pods?watch=true", Some("websocket"), "upgrade"),
    ("GET", "/apis/storagemigration.k8s.io/v1/storageversionmigrations", Some("websocket"), "upgrade"),
    // All else.
    ("GET", "/api/v1/pods", None, "other"),
    ("GET", "/api/v1/namespaces/n/pods/p", None, "other"),
    ("POST", "/api/v1/namespaces/n/pods", None, "other"),
    ("DELETE", "/api/v1/namespaces/n/pods/p", None, "other"),
    ("GET", "/apis/storagemigration.k8s.io/v1/storageversionmigrations", None, "other"),
    ("POST", "/apis/storagemigration.k8s.io/v1/storageversionmigrations", None, "other"),
    ("GET", "/apis/nosuch.k8s.io/v1/things", None, "other"),
    ("GET", "/apis", None, "other"),
    ("GET", "/version", None, "other"),
    ("GET", "/readyz?verbose", None, "other"),
    ("GET", "/", None, "other"),
];

/// Lets answers tell the name of the route that their requests took.
fn tell_route(config: &mut Value) {
    let mut shipped = Shipped(config.take());
    let header = json!([{"header": {"key": "x-route", "value": "%ROUTE_NAME%"}}]);
    shipped.manager_mut()["route_config"]["virtual_hosts"][0]["response_headers_to_add"] = header;
    *config = shipped.0;
}

async fn open(plane: &ControlPlane, method: &str, target: &str, upgrade: Option<&str>) -> Opened {
    let mut request = plane.client.request(method, target).header("accept", "application/json");
    if let Some(protocol) = upgrade {
        request = request.header("connection", "Upgrade").header("upgrade", protocol);
    }
    if method == "POST" {
        request = request.body("");
    }
    request.open().await.unwrap_or_else(|error| panic!("{method} {target}: {error:#}"))
}

#[tokio::test]
async fn every_request_takes_its_route_and_a_reroute_does_not_change_it() {
    for file in FILES {
        let plane = ControlPlane::builder(file).edit(tell_route).settled().await.unwrap();
        for (method, target, upgrade, route) in REQUESTS {
            let answer = open(&plane, method, target, *upgrade).await;
            let request = format!("{file}: {method} {target}, upgrade {upgrade:?}, answered {}", answer.status);
            assert_eq!(answer.header("x-route").as_deref(), Some(*route), "{request}");
            if target.starts_with(NEW) {
                assert!(answer.status < 300, "{request}");
                assert_eq!(answer.header("x-served-by").as_deref(), Some("cp-2"), "{request}");
            }
        }
        assert_identities(file, &plane);
    }
}

/// Polls come as the poller, clients as nobody: their connections are never each other's.
fn assert_identities(file: &str, plane: &ControlPlane) {
    let user = |request: &Request| request.client_subject.clone().map(|subject| subject.common_name);
    for apiserver in &plane.apiservers {
        let polls = apiserver.polls();
        assert!(!polls.is_empty(), "{file}: {}", apiserver.name());
        for poll in polls {
            assert_eq!(user(&poll).as_deref(), Some(POLLER), "{file}: {poll:?}");
        }
        for request in apiserver.client_requests() {
            assert_eq!(user(&request), None, "{file}: {request:?}");
        }
    }
}

/// Removes the filter, as if its module did not run.
fn without_filter(config: &mut Value) {
    let mut shipped = Shipped(config.take());
    let filters = shipped.manager_mut()["http_filters"].as_array_mut().unwrap();
    filters.retain(|filter| filter["name"] != "mixed_version_proxy");
    *config = shipped.0;
}

#[tokio::test]
async fn no_client_chooses_its_apiserver_with_or_without_the_filter() {
    let key = text(&Shipped::new(GATEWAY_HEADER).plugin()["reroute"]["key"]).to_owned();
    for (what, edit) in [("with the filter", (|_| {}) as fn(&mut Value)), ("without the filter", without_filter)] {
        let envoy = |envoy: EnvoyBuilder| envoy.concurrency(1);
        let plane = ControlPlane::builder(GATEWAY_HEADER).edit(edit).envoy(envoy).start().await.unwrap();
        let mut seen = BTreeSet::new();
        for _ in 0..32 {
            let request = plane.client.get("/api/v1/namespaces/shop/pods").header(&key, "cp-2");
            let answer = request.header("accept", "application/json").send().await.unwrap();
            assert_eq!(answer.status, 200, "{what}: {}", answer.text());
            seen.extend(answer.header("x-served-by"));
        }
        assert!(seen.iter().any(|server| server != "cp-2"), "{what}: balanced over all, and not {seen:?}");
        for apiserver in &plane.apiservers {
            for request in apiserver.client_requests() {
                assert_eq!(request.header(&key), None, "{what}: {request:?}");
            }
        }
    }
}

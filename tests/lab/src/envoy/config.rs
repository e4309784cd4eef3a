//! Envoy configurations: the shipped files, filled in for a test.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::fixtures::repository;

const NETWORK_FILTERS: &str = "type.googleapis.com/envoy.extensions.filters.network";

/// An Envoy bootstrap configuration. Written as JSON: Envoy's YAML reader takes `n`, `on`, `yes` and `off` for
/// booleans.
///
/// ```
/// use lab::envoy::Config;
/// let config = Config::passing_to("127.0.0.1:6443".parse().unwrap()).replace("127.0.0.1", "localhost");
/// assert_eq!(config.listeners(), ["main"]);
/// assert_eq!(config.clusters(), ["upstream"]);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Config(Value);

impl Config {
    /// A file of the repository's folder `envoy`, for instance `sidecar.yaml`.
    ///
    /// # Errors
    /// No such file, or it is not YAML.
    pub fn shipped(file: &str) -> Result<Self> {
        let path = repository().join("envoy").join(file);
        let text = fs::read_to_string(&path).with_context(|| format!("no configuration {}", path.display()))?;
        Self::from_yaml(&text).with_context(|| format!("{} is no configuration", path.display()))
    }

    /// From YAML (or JSON) text.
    ///
    /// # Errors
    /// It is neither, or has keys that are no strings.
    pub fn from_yaml(text: &str) -> Result<Self> {
        Ok(Self(serde_yaml_ng::from_str(text)?))
    }

    /// From a value.
    pub fn new(value: Value) -> Self {
        Self(value)
    }

    /// The smallest useful one: listener `main` on a free port of 127.0.0.1, HTTP/1.1 and HTTP/2, everything passes to
    /// the one plaintext cluster `upstream`; websocket and SPDY upgrades too.
    pub fn passing_to(upstream: SocketAddr) -> Self {
        let router = json!({
            "name": "router",
            "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
        });
        let manager = json!({
            "@type": format!("{NETWORK_FILTERS}.http_connection_manager.v3.HttpConnectionManager"),
            "stat_prefix": "main",
            "route_config": {"virtual_hosts": [{
                "name": "all", "domains": ["*"],
                "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "upstream", "timeout": "0s"}}],
            }]},
            "upgrade_configs": [{"upgrade_type": "websocket"}, {"upgrade_type": "SPDY/3.1"}],
            "http_filters": [router],
        });
        let listener = json!({
            "name": "main",
            "address": socket_address("127.0.0.1:0".parse().unwrap_or(upstream)),
            "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
        });
        Self(json!({"static_resources": {"listeners": [listener], "clusters": []}})).with_cluster("upstream", upstream)
    }

    /// Adds a plaintext HTTP/1.1 cluster of one endpoint.
    pub fn with_cluster(self, name: &str, address: SocketAddr) -> Self {
        let endpoint = json!({"endpoint": {"address": socket_address(address)}});
        let cluster = json!({
            "name": name,
            "type": "STATIC",
            "connect_timeout": "1s",
            "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]},
        });
        self.edit(|config| {
            if let Some(clusters) = config["static_resources"]["clusters"].as_array_mut() {
                clusters.push(cluster);
            }
        })
    }

    /// Puts an HTTP filter before the last one (the router) of every HTTP connection manager.
    pub fn with_http_filter(self, filter: &Value) -> Self {
        self.edit(|config| {
            each_array(config, "http_filters", &mut |filters| {
                filters.insert(filters.len().saturating_sub(1), filter.clone());
            });
        })
    }

    /// The value.
    pub fn value(&self) -> &Value {
        &self.0
    }

    /// The value, to be edited.
    pub fn value_mut(&mut self) -> &mut Value {
        &mut self.0
    }

    /// Edits it in passing.
    pub fn edit(mut self, edit: impl FnOnce(&mut Value)) -> Self {
        edit(&mut self.0);
        self
    }

    /// Replaces a piece of text in all strings, at any depth: certificate paths, the module's path, names.
    pub fn replace(mut self, from: &str, to: &str) -> Self {
        each_string(&mut self.0, &mut |text| {
            if text.contains(from) {
                *text = text.replace(from, to);
            }
        });
        self
    }

    /// [`Self::replace`] for each pair, in their order.
    pub fn replace_all<'a>(self, pairs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        pairs.into_iter().fold(self, |config, (from, to)| config.replace(from, to))
    }

    /// Lets all listeners, and the admin interface, listen on a free port of 127.0.0.1.
    pub fn on_free_ports(mut self) -> Self {
        let listeners = self.0.pointer_mut("/static_resources/listeners").and_then(Value::as_array_mut);
        for listener in listeners.into_iter().flatten() {
            set_address(&mut listener["address"], "127.0.0.1", 0);
        }
        if let Some(address) = self.0.pointer_mut("/admin/address") {
            set_address(address, "127.0.0.1", 0);
        }
        self
    }

    /// Sets the address of all endpoints of a cluster.
    ///
    /// # Errors
    /// No such cluster, or one without endpoints.
    pub fn cluster_address(mut self, cluster: &str, address: SocketAddr) -> Result<Self> {
        let clusters = self.0.pointer_mut("/static_resources/clusters").and_then(Value::as_array_mut);
        let found = clusters.into_iter().flatten().find(|have| have["name"] == cluster);
        let found = found.with_context(|| format!("no cluster {cluster}"))?;
        let mut set = 0;
        let localities = found.pointer_mut("/load_assignment/endpoints").and_then(Value::as_array_mut);
        for locality in localities.into_iter().flatten() {
            for endpoint in locality["lb_endpoints"].as_array_mut().into_iter().flatten() {
                set_address(&mut endpoint["endpoint"]["address"], &address.ip().to_string(), address.port());
                set += 1;
            }
        }
        ensure!(set > 0, "cluster {cluster} has no endpoints");
        Ok(self)
    }

    /// The listeners' names.
    pub fn listeners(&self) -> Vec<String> {
        self.names("listeners")
    }

    /// The clusters' names.
    pub fn clusters(&self) -> Vec<String> {
        self.names("clusters")
    }

    /// Writes it to a file that ends in `.json`.
    ///
    /// # Errors
    /// The file cannot be written, or ends otherwise: Envoy reads by extension.
    pub fn write(&self, path: &Path) -> Result<PathBuf> {
        ensure!(path.extension().is_some_and(|extension| extension == "json"), "{} is no .json", path.display());
        fs::write(path, serde_json::to_vec_pretty(&self.0)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path.to_owned())
    }

    fn names(&self, kind: &str) -> Vec<String> {
        let found = self.0["static_resources"][kind].as_array().into_iter().flatten();
        found.filter_map(|item| item["name"].as_str()).map(str::to_owned).collect()
    }
}

fn socket_address(address: SocketAddr) -> Value {
    json!({"socket_address": {"address": address.ip().to_string(), "port_value": address.port()}})
}

fn set_address(address: &mut Value, host: &str, port: u16) {
    if let Some(socket) = address.get_mut("socket_address") {
        socket["address"] = host.into();
        socket["port_value"] = port.into();
    }
}

fn each_array(value: &mut Value, name: &str, act: &mut impl FnMut(&mut Vec<Value>)) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| each_array(value, name, act)),
        Value::Object(members) => {
            for (have, value) in members {
                match value {
                    Value::Array(values) if have == name => act(values),
                    value => each_array(value, name, act),
                }
            }
        }
        _ => {}
    }
}

fn each_string(value: &mut Value, act: &mut impl FnMut(&mut String)) {
    match value {
        Value::String(text) => act(text),
        Value::Array(values) => values.iter_mut().for_each(|value| each_string(value, act)),
        Value::Object(members) => members.values_mut().for_each(|value| each_string(value, act)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> Config {
        Config::passing_to("127.0.0.1:1".parse().unwrap()).with_cluster("cp-2", "127.0.0.1:2".parse().unwrap())
    }

    #[test]
    fn addresses_are_set_by_name() {
        let moved = config().cluster_address("cp-2", "127.0.0.2:99".parse().unwrap()).unwrap();
        let text = moved.value()["static_resources"]["clusters"].to_string();
        assert!(text.contains(r#""address":"127.0.0.2","port_value":99"#), "{text}");
        assert!(text.contains(r#""address":"127.0.0.1","port_value":1"#), "{text}");
        let error = config().cluster_address("cp-3", "127.0.0.2:99".parse().unwrap()).unwrap_err();
        assert_eq!(error.to_string(), "no cluster cp-3");
    }

    #[test]
    fn listeners_of_a_yaml_file_get_free_ports_and_texts_are_replaced() {
        let yaml = "admin: {address: {socket_address: {address: 0.0.0.0, port_value: 9901}}}\n\
                    static_resources:\n  listeners:\n  - name: a\n    \
                    address: {socket_address: {address: 0.0.0.0, port_value: 6443}}\n    file: /etc/kubernetes/x\n";
        let config = Config::from_yaml(yaml).unwrap().on_free_ports().replace_all([("/etc/kubernetes", "/tmp/y")]);
        let free = json!({"socket_address": {"address": "127.0.0.1", "port_value": 0}});
        assert_eq!(config.value()["admin"]["address"], free);
        assert_eq!(config.value()["static_resources"]["listeners"][0]["address"], free);
        assert_eq!(config.value()["static_resources"]["listeners"][0]["file"], "/tmp/y/x");
    }

    #[test]
    fn filters_stand_before_the_router() {
        let config = config().with_http_filter(&json!({"name": "mine"}));
        let text = config.value().to_string();
        assert!(text.find("\"mine\"").unwrap() < text.find("\"router\"").unwrap(), "{text}");
    }
}

//! A control plane for tests: three stub apiservers of mixed versions, and a real Envoy with the compiled filter in front
//! of them, started from the configurations that this project ships.
//!
//! The tests themselves are in `tests/`, one file for each thing that must hold.

pub mod sender;

use std::{fs, net::SocketAddr, path::PathBuf, time::Duration};

use anyhow::{Context, Result, ensure};
use lab::{
    Client, Envoy, StubApiserver,
    apiserver::{AGGREGATED, FRONT_PROXY},
    certs::{Authority, ClientTls, Identity, SERVER_NAMES, ServerTls},
    client::Answer,
    envoy::{Config, EnvoyBuilder},
    eventually, fixtures, repository, wasm_path,
};
use serde_json::{Value, json};
use tempfile::TempDir;

/// How long a condition is awaited: far longer than it takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// So many connections meet every worker: the kernel deals each to one of two, so that all meet the same one once in eight
/// million times.
pub const EVERY_WORKER: usize = 24;

/// The shipped configurations.
pub const SIDECAR: &str = "sidecar.yaml";
/// The shipped configuration of a gateway.
pub const GATEWAY: &str = "gateway.yaml";
/// The same with a request header in filter state's place.
pub const GATEWAY_HEADER: &str = "gateway-header.yaml";

/// What stands for the addresses of the apiservers in the shipped configurations, in the order `cp-1`, `cp-2`, `cp-3`.
const PLACEHOLDERS: [&[&str]; 3] = [&["127.0.0.1", "192.0.2.11"], &["192.0.2.12"], &["192.0.2.13"]];

/// A running control plane.
pub struct ControlPlane {
    /// `cp-1`, `cp-2` and `cp-3`; the first is the sidecar's local one.
    pub apiservers: Vec<StubApiserver>,
    /// The Envoy in front of them.
    pub envoy: Envoy,
    /// Comes in through Envoy's listener.
    pub client: Client,
    /// As it was given to Envoy.
    pub config: Config,
    pki: Pki,
}

/// How to start a [`ControlPlane`].
pub struct Builder {
    file: &'static str,
    versions: [&'static str; 3],
    plugin: Value,
    edit: Box<dyn FnOnce(&mut Value)>,
    envoy: fn(EnvoyBuilder) -> EnvoyBuilder,
    prepare: fn(&[StubApiserver]),
    stopped: Vec<usize>,
    token: Option<&'static str>,
}

/// Certificates, and where the shipped configurations find them.
pub struct Pki {
    authority: Authority,
    /// The directory that holds the files.
    pub directory: TempDir,
}

impl Pki {
    /// A new authority, a server certificate and the poller's client certificate.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let authority = Authority::new("kubernetes")?;
        authority.write(directory.path(), "ca.crt")?;
        let server = authority.server(&SERVER_NAMES)?;
        server.write(directory.path(), "apiserver.crt", "apiserver.key")?;
        server.write(directory.path(), "server.crt", "server.key")?;
        let poller = authority.client("mixed-version-proxy-poller", &[])?;
        poller.write(directory.path(), "poller.crt", "poller.key")?;
        let pki = Self { authority, directory };
        pki.renew_front_proxy()?;
        let secret = fs::read_to_string(fixtures::repository().join("envoy/front-proxy-client.sds.yaml"))?;
        let secret = secret.replace("/etc/kubernetes/pki", pki.path()?);
        fs::write(pki.directory.path().join("front-proxy-client.sds.yaml"), secret)?;
        Ok(pki)
    }

    /// A new front-proxy certificate in the place of the old one, moved there as Envoy expects it.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn renew_front_proxy(&self) -> Result<()> {
        let directory = self.directory.path();
        let front_proxy = self.authority.client(FRONT_PROXY, &[])?;
        front_proxy.write(directory, "front-proxy-client.crt.new", "front-proxy-client.key.new")?;
        for file in ["front-proxy-client.key", "front-proxy-client.crt"] {
            fs::rename(directory.join(format!("{file}.new")), directory.join(file))?;
        }
        Ok(())
    }

    /// TLS of a client that shows a certificate with this subject, in DER.
    ///
    /// # Errors
    /// The cryptographic library refuses.
    pub fn client_of(&self, subject: &[u8]) -> Result<(ClientTls, Identity)> {
        let identity = self.authority.client_with_subject(subject)?;
        Ok((self.client()?.identity(&identity)?, identity))
    }

    fn path(&self) -> Result<&str> {
        self.directory.path().to_str().context("a path that is not UTF-8")
    }

    /// TLS of an apiserver that takes client certificates of this authority.
    ///
    /// # Errors
    /// The cryptographic library refuses.
    pub fn server(&self) -> Result<ServerTls> {
        ServerTls::new(&self.authority.server(&SERVER_NAMES)?)?.optional_clients(&self.authority)
    }

    /// TLS of a client that shows no certificate.
    ///
    /// # Errors
    /// The cryptographic library refuses.
    pub fn client(&self) -> Result<ClientTls> {
        ClientTls::new(&self.authority, "localhost")
    }

    /// A shipped configuration with certificates, addresses and the module filled in, as a user would.
    ///
    /// # Errors
    /// The module has not been built, or the file is not as expected.
    pub fn fill_in(&self, file: &str, apiservers: &[SocketAddr]) -> Result<Config> {
        let directory = self.directory.path().to_str().context("a path that is not UTF-8")?;
        let wasm = wasm_path()?;
        let wasm = wasm.to_str().context("a path that is not UTF-8")?;
        let mut config = Config::shipped(file)?.on_free_ports().replace_all([
            ("/etc/mixed-version-proxy/mixed-version-proxy.wasm", wasm),
            ("/etc/kubernetes/pki", directory),
            ("/etc/mixed-version-proxy", directory),
        ]);
        let clusters = config.value_mut().pointer_mut("/static_resources/clusters").context("no clusters")?;
        let replaced = fill_in_addresses(clusters, apiservers);
        ensure!(replaced > 0, "{file} holds none of the placeholder addresses");
        Ok(config)
    }
}

/// Replaces the placeholder addresses of endpoints; how many there were.
fn fill_in_addresses(value: &mut Value, apiservers: &[SocketAddr]) -> usize {
    if let Some(socket) = value.get_mut("socket_address") {
        let found = PLACEHOLDERS.iter().position(|names| names.iter().any(|name| socket["address"] == *name));
        let Some(address) = found.and_then(|index| apiservers.get(index)) else { return 0 };
        socket["address"] = address.ip().to_string().into();
        socket["port_value"] = address.port().into();
        return 1;
    }
    match value {
        Value::Array(items) => items.iter_mut().map(|item| fill_in_addresses(item, apiservers)).sum(),
        Value::Object(members) => members.values_mut().map(|member| fill_in_addresses(member, apiservers)).sum(),
        _ => 0,
    }
}

/// The plugin's configuration inside a listener or a bootstrap configuration.
///
/// # Panics
/// There is no filter called `mixed_version_proxy`.
pub fn plugin_configuration(value: &mut Value) -> &mut Value {
    fn find(value: &mut Value) -> Option<&mut Value> {
        if value["name"] == "mixed_version_proxy" && value.get("configuration").is_some() {
            return value.pointer_mut("/configuration/value");
        }
        match value {
            Value::Array(items) => items.iter_mut().find_map(find),
            Value::Object(members) => members.values_mut().find_map(find),
            _ => None,
        }
    }
    find(value).expect("a filter called mixed_version_proxy")
}

/// Header that makes the trapping module trap, in a request or in the answer to a poll.
pub const TRAP: &str = "x-mixed-version-proxy-trap";

/// Puts the trapping module in the shipped one's place.
///
/// # Panics
/// It has not been built.
pub fn trapping(config: &mut Value) {
    let module = repository().join("dist/mixed-version-proxy-trapping.wasm");
    assert!(module.is_file(), "{} is missing: run scripts/build --trapping", module.display());
    let text = config.to_string().replace("dist/mixed-version-proxy.wasm", "dist/mixed-version-proxy-trapping.wasm");
    *config = serde_json::from_str(&text).expect("the same configuration");
}

/// Merges `changes` into `value`: objects member by member, everything else replaced; null removes.
pub fn merge(value: &mut Value, changes: &Value) {
    match (value, changes) {
        (Value::Object(members), Value::Object(changes)) => {
            for (key, change) in changes {
                if change.is_null() {
                    members.remove(key);
                } else {
                    merge(members.entry(key.as_str()).or_insert(Value::Null), change);
                }
            }
        }
        (value, changes) => *value = changes.clone(),
    }
}

impl ControlPlane {
    /// A control plane behind a shipped configuration: `cp-1` runs 1.34.4, `cp-2` 1.37.2, `cp-3` 1.36.3, and polls come
    /// every 200 ms.
    pub fn builder(file: &'static str) -> Builder {
        Builder {
            file,
            versions: ["1.34.4", "1.37.2", "1.36.3"],
            plugin: json!({"discovery": {"refreshInterval": "200ms", "timeout": "2s"}}),
            edit: Box::new(|_| {}),
            envoy: |envoy| envoy,
            prepare: |_| {},
            stopped: Vec::new(),
            token: None,
        }
    }

    /// The file of the authority's certificate.
    pub fn ca(&self) -> PathBuf {
        self.pki.directory.path().join("ca.crt")
    }

    /// Sends a GET through Envoy that asks for the aggregated form.
    ///
    /// # Errors
    /// No answer.
    pub async fn aggregated(&self, target: &str) -> Result<Answer> {
        self.client.get(target).header("accept", AGGREGATED).send().await
    }

    /// Waits until a gateway's balancer has found all apiservers healthy; in a sidecar there is nothing to wait for.
    ///
    /// # Errors
    /// It takes longer than [`PATIENCE`].
    async fn balanced(&self) -> Result<()> {
        let healthy = async || -> Result<bool> {
            let total = self.envoy.stat("cluster.apiservers.membership_total").await?;
            Ok(total == self.envoy.stat("cluster.apiservers.membership_healthy").await?)
        };
        eventually(PATIENCE, "all apiservers to be healthy", async || healthy().await.unwrap_or_default()).await
    }

    /// Sends a GET through Envoy.
    ///
    /// # Errors
    /// No answer.
    pub async fn get(&self, target: &str) -> Result<Answer> {
        self.client.get(target).header("accept", "application/json").send().await
    }

    /// A client that shows a certificate with this subject, in DER; and its certificate.
    ///
    /// # Errors
    /// Envoy has no listener, or the cryptographic library refuses.
    pub async fn client_with_certificate(&self, subject: &[u8]) -> Result<(Client, Identity)> {
        let (tls, identity) = self.pki.client_of(subject)?;
        Ok((Client::tls(listener(&self.envoy).await?, tls), identity))
    }

    /// Gives Envoy a new front-proxy certificate; its file.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn renew_front_proxy(&self) -> Result<()> {
        self.pki.renew_front_proxy()
    }

    /// A client that comes past Envoy, straight to an apiserver.
    ///
    /// # Errors
    /// There is no such apiserver.
    pub fn direct(&self, apiserver: usize) -> Result<Client> {
        let apiserver = self.apiservers.get(apiserver).context("no such apiserver")?;
        Ok(Client::tls(apiserver.addr(), self.pki.client()?))
    }

    /// A client of another Envoy that was started from this control plane's configuration.
    ///
    /// # Errors
    /// It has no listener.
    pub async fn client_of(&self, envoy: &Envoy) -> Result<Client> {
        Ok(Client::tls(listener(envoy).await?, self.pki.client()?))
    }

    /// Waits until every worker knows what the apiservers serve under `/apis`: a type that only `cp-2` serves is reached on
    /// all of them, and discovery is told.
    ///
    /// # Errors
    /// It takes longer than [`PATIENCE`].
    pub async fn settled(&self) -> Result<()> {
        eventually(PATIENCE, "all workers to know all apiservers", async || {
            for _ in 0..EVERY_WORKER {
                for target in ["/apis/storagemigration.k8s.io/v1/storageversionmigrations", "/apis"] {
                    match self.get(target).await {
                        Ok(answer) if answer.status == 200 => {}
                        other => return Err(other.map(|answer| (answer.status, answer.text()))),
                    }
                }
                // Until all have been tried once, discovery is a 503.
                match self.get("/apis").await {
                    Ok(answer) if answer.status == 200 => {}
                    other => return Err(other.map(|answer| (answer.status, answer.text()))),
                }
            }
            Ok(())
        })
        .await
    }

    /// Waits until every worker answers `/apis` (aggregated) as `wanted` says.
    ///
    /// # Errors
    /// It takes longer than [`PATIENCE`].
    pub async fn discovered(&self, awaited: &str, wanted: impl Fn(&Answer) -> bool) -> Result<()> {
        eventually(PATIENCE, awaited, async || {
            for _ in 0..EVERY_WORKER {
                match self.aggregated("/apis").await {
                    Ok(answer) if wanted(&answer) => {}
                    other => return Err(other.map(|answer| (answer.status, answer.text()))),
                }
            }
            Ok(())
        })
        .await
        .with_context(|| format!("Envoy's log:\n{}", self.envoy.log()))
    }

    /// Waits until every worker answers `/apis` with what one apiserver says, byte for byte.
    ///
    /// # Errors
    /// There is no such apiserver, or it takes longer than [`PATIENCE`].
    pub async fn discovered_as(&self, apiserver: usize) -> Result<()> {
        let apiserver = self.apiservers.get(apiserver).context("no such apiserver")?;
        let text = apiserver.apis_text();
        self.discovered(&format!("the discovery of {}", apiserver.name()), |answer| answer.body == text).await
    }

    /// A second Envoy, which stands beside another of the apiservers. For the shipped sidecar.
    ///
    /// # Errors
    /// There is no such apiserver, or Envoy does not start.
    pub async fn sidecar_of(&self, apiserver: usize) -> Result<Envoy> {
        fn here(value: &mut Value, cluster: &str) {
            if let Some(here) = value.pointer_mut("/on_no_match/action/typed_config/cluster") {
                *here = cluster.into();
            }
            match value {
                Value::Array(items) => items.iter_mut().for_each(|item| here(item, cluster)),
                Value::Object(members) => members.values_mut().for_each(|member| here(member, cluster)),
                _ => {}
            }
        }
        let name = self.apiservers.get(apiserver).context("no such apiserver")?.name();
        let mut config = self.config.clone();
        here(config.value_mut(), name);
        plugin_configuration(config.value_mut())["local"] = name.into();
        Envoy::builder(config).start().await
    }
}

impl Builder {
    /// Other versions of `cp-1`, `cp-2` and `cp-3`.
    #[must_use]
    pub fn versions(mut self, versions: [&'static str; 3]) -> Self {
        self.versions = versions;
        self
    }

    /// Changes of the plugin's configuration, merged over what is shipped; null removes a key.
    #[must_use]
    pub fn plugin(mut self, changes: &Value) -> Self {
        merge(&mut self.plugin, changes);
        self
    }

    /// A change of the filled-in Envoy configuration.
    #[must_use]
    pub fn edit(mut self, edit: impl FnOnce(&mut Value) + 'static) -> Self {
        self.edit = Box::new(edit);
        self
    }

    /// How Envoy is started.
    #[must_use]
    pub fn envoy(mut self, envoy: fn(EnvoyBuilder) -> EnvoyBuilder) -> Self {
        self.envoy = envoy;
        self
    }

    /// What happens to the stub apiservers before Envoy starts.
    #[must_use]
    pub fn prepare(mut self, prepare: fn(&[StubApiserver])) -> Self {
        self.prepare = prepare;
        self
    }

    /// This apiserver is not running when Envoy starts.
    #[must_use]
    pub fn stopped(mut self, apiserver: usize) -> Self {
        self.stopped.push(apiserver);
        self
    }

    /// All apiservers know this bearer token, and so ask whoever comes for one; the client shows it.
    #[must_use]
    pub fn token(mut self, token: &'static str) -> Self {
        self.token = Some(token);
        self
    }

    /// Starts all of it; Envoy is ready, the table need not be.
    ///
    /// # Errors
    /// Something does not start.
    pub async fn start(self) -> Result<ControlPlane> {
        let pki = Pki::new()?;
        let mut apiservers = Vec::new();
        for (name, version) in ["cp-1", "cp-2", "cp-3"].into_iter().zip(self.versions) {
            let mut apiserver = StubApiserver::builder(name, version).tls(pki.server()?);
            if let Some(token) = self.token {
                apiserver = apiserver.token(token, "dev");
            }
            apiservers.push(apiserver.start().await?);
        }
        (self.prepare)(&apiservers);
        for apiserver in self.stopped {
            apiservers.get(apiserver).context("no such apiserver")?.stop().await;
        }
        let addresses: Vec<_> = apiservers.iter().map(StubApiserver::addr).collect();
        let mut config = pki.fill_in(self.file, &addresses)?;
        merge(plugin_configuration(config.value_mut()), &self.plugin);
        (self.edit)(config.value_mut());
        let envoy = (self.envoy)(Envoy::builder(config.clone())).start().await?;
        let mut client = Client::tls(listener(&envoy).await?, pki.client()?);
        if let Some(token) = self.token {
            client = client.with_token(token);
        }
        Ok(ControlPlane { apiservers, envoy, client, config, pki })
    }

    /// [`Builder::start`], and then waits until the table is complete.
    ///
    /// # Errors
    /// Something does not start, or the table does not become complete.
    pub async fn settled(self) -> Result<ControlPlane> {
        let plane = self.start().await?;
        plane.settled().await.with_context(|| format!("Envoy's log:\n{}", plane.envoy.log()))?;
        plane.balanced().await?;
        Ok(plane)
    }
}

/// A second Envoy in front of the same apiservers, the same but for the filter.
///
/// # Errors
/// It does not start.
pub async fn without_filter(plane: &ControlPlane) -> Result<Envoy> {
    let mut config = plane.config.clone();
    let filters = "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
    let filters = config.value_mut().pointer_mut(filters).and_then(Value::as_array_mut).context("no HTTP filters")?;
    filters.retain(|filter| filter["name"] != "mixed_version_proxy");
    Envoy::builder(config).start().await
}

/// Where the shipped configurations' one listener listens.
async fn listener(envoy: &Envoy) -> Result<SocketAddr> {
    envoy.listener_addr("apiserver").await
}

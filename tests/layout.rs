//! Who may import whom. The pure logic stays free of the host, and a reader finds a behaviour by file name alone.

#![cfg(not(target_family = "wasm"))]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Module, and the modules of this crate that it may name. `filter` is above all of them.
const ARROWS: &[(&str, &[&str])] = &[
    ("config", &["identity", "quote"]),
    ("decision", &["config", "peers", "target"]),
    ("discovery", &["quote"]),
    (
        "filter",
        &["config", "decision", "discovery", "guard", "identity", "local_reply", "metrics", "peers", "quote", "target"],
    ),
    ("guard", &["discovery", "peers", "target"]),
    ("hex", &[]),
    ("identity", &["config", "hex"]),
    ("lib", &[]),
    ("local_reply", &[]),
    ("metrics", &[]),
    ("peers", &["config", "discovery", "peers", "quote", "target"]),
    ("quote", &[]),
    ("target", &["hex"]),
];

/// All sources by top-level module, without their tests (which stand last in a file) and without comments.
fn sources() -> BTreeMap<String, Vec<(PathBuf, String)>> {
    fn visit(directory: &Path, files: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { visit(&path, files) } else { files.push(path) }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    visit(&root, &mut files);
    let mut modules: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for file in files {
        let relative = file.strip_prefix(&root).unwrap().to_owned();
        let first = relative.components().next().unwrap().as_os_str().to_str().unwrap();
        let module = first.trim_end_matches(".rs").to_owned();
        let is_test = module == "testing" || relative.file_stem().is_some_and(|stem| stem == "tests");
        if is_test {
            continue;
        }
        let text = fs::read_to_string(&file).unwrap();
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
        let code = code.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n");
        modules.entry(module).or_default().push((relative, code));
    }
    modules
}

#[test]
fn imports_follow_the_arrows() {
    let sources = sources();
    let modules: BTreeSet<_> = sources.keys().map(String::as_str).collect();
    assert_eq!(modules, ARROWS.iter().map(|(module, _)| *module).collect(), "every module has its arrows");
    for (module, allowed) in ARROWS {
        for (file, code) in &sources[*module] {
            for import in code.split("crate::").skip(1) {
                let named: String = import.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
                assert!(
                    named == *module || allowed.contains(&named.as_str()),
                    "{} names crate::{named}",
                    file.display()
                );
            }
        }
    }
}

#[test]
fn only_the_filter_knows_the_host_and_only_its_boundary_is_unsafe() {
    for (module, files) in sources() {
        for (file, code) in files {
            let knows_host = code.contains("proxy_wasm") || code.contains("extern \"C\"");
            assert!(!knows_host || module == "filter", "{} knows the host", file.display());
            let is_boundary = file == Path::new("filter/host.rs");
            assert!(!code.contains("unsafe") || is_boundary, "{} is unsafe", file.display());
        }
    }
}

#[test]
fn pinned_versions_agree() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |file: &str| fs::read_to_string(root.join(file)).unwrap();
    let toolchain = read("rust-toolchain.toml");
    let channel = toolchain.lines().find_map(|line| line.strip_prefix("channel = ")).unwrap().trim_matches('"');
    let minimum = channel.rsplit_once('.').unwrap().0;
    assert!(read("Cargo.toml").contains(&format!("rust-version = \"{minimum}\"")), "rust-version is {channel}'s");
    let lock = read("Cargo.lock");
    // wasm-bindgen's test harness and its runner speak a private protocol: one release of both.
    for (package, version) in [("wasm-bindgen-test", "0.3.80"), ("wasm-bindgen-cli", "0.2.130")] {
        assert!(lock.contains(&format!("name = \"{package}\"\nversion = \"{version}\"")), "{package} {version}");
    }
}

//! No panic that nobody has thought about: whoever can end a VM stands on a list, with the reason why it does not.
//!
//! The machinery that ends a VM is found rather than named: functions that never return. Whoever calls one of them, and is
//! reached from an export, must be in `allowed.txt`. That holds for dependencies and the standard library too, and for what
//! the compiler has made of all of them: what it could prove to be impossible is not there any more.

mod call_graph;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use call_graph::{CallGraph, Function};
use lab::{repository, wasm_path};
use wasmparser::{Parser, Payload};

const ALLOWED: &str = include_str!("allowed.txt");

/// What an allocation ends in that fails. Anything may allocate; what bounds memory stands in docs/architecture.md, "Limits".
const OUT_OF_MEMORY: [&str; 2] = ["alloc::alloc::handle_alloc_error", "alloc::raw_vec::handle_error"];

/// A line of `allowed.txt`.
struct Allowance {
    caller: &'static str,
    end: &'static str,
    reason: &'static str,
}

fn allowances() -> Vec<Allowance> {
    let lines = ALLOWED.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let parse = |line: &'static str| {
        let parts: Vec<_> = line.splitn(3, " | ").map(str::trim).collect();
        let [caller, end, reason] = parts[..] else { panic!("caller | end | reason: {line}") };
        Allowance { caller, end, reason }
    };
    lines.map(parse).collect()
}

/// Whether `pattern`, in which `*` stands for anything, describes the whole of `text`.
fn matches(pattern: &str, text: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == text,
        Some((start, pattern)) => text
            .strip_prefix(start)
            .is_some_and(|text| (0..=text.len()).any(|at| text.get(at..).is_some_and(|text| matches(pattern, text)))),
    }
}

/// The methods that the SDK's traits offer to filters. They are in the tables of the filter's contexts, but nobody calls them
/// there: the SDK calls what is named `on_...`, and `src/filter` makes its host calls itself.
fn is_sdk_convenience(function: &Function) -> bool {
    let method = function.name.strip_prefix("proxy_wasm::traits::").and_then(|path| path.split("::").nth(1));
    method.is_some_and(|method| !method.starts_with("on_") && !method.starts_with("create_") && method != "get_type")
}

/// Who calls whom to end the VM, and the way there from the export that comes nearest.
fn ends(module: &CallGraph) -> BTreeMap<(String, String), String> {
    let mut ways: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for (export, entry) in &module.exports {
        let reached = module.reachable(*entry, |function| !is_sdk_convenience(function));
        for (index, way) in &reached {
            let function = &module.functions[*index];
            let path = module.path(&reached, *index);
            assert!(!is_sdk_convenience(function), "{path}: calls the SDK's own wrapper");
            // Of two guesses that are as good the one that leads to the callback of that name is right.
            let is_guessed_badly = !path[export.len()..].contains(export.trim_start_matches("proxy_on_"));
            for end in &function.ends {
                let end = end.map_or("trap", |end| &module.functions[end].name);
                if !OUT_OF_MEMORY.contains(&end) {
                    let ways = ways.entry((function.name.clone(), end.to_owned())).or_default();
                    ways.insert(((way.guesses, way.steps), is_guessed_badly, path.clone()));
                }
            }
        }
    }
    ways.into_iter().map(|(ends, mut ways)| (ends, ways.pop_first().unwrap().2)).collect()
}

fn built(module: &str) -> Vec<u8> {
    let path = repository().join("dist").join(module);
    fs::read(&path).unwrap_or_else(|_| panic!("{} is missing: run scripts/build, with --trapping too", path.display()))
}

fn code(module: &[u8]) -> Vec<&[u8]> {
    let payloads = Parser::new(0).parse_all(module).map(Result::unwrap);
    payloads
        .filter_map(|payload| if let Payload::CodeSectionEntry(body) = payload { Some(body.as_bytes()) } else { None })
        .collect()
}

/// What `allowed.txt` and a module disagree about.
fn complaints(module: &[u8]) -> Vec<String> {
    let (ends, allowances) = (ends(&CallGraph::of(module).unwrap()), allowances());
    let mut unused: BTreeSet<_> = (0..allowances.len()).collect();
    let mut complaints = Vec::new();
    for ((caller, end), path) in &ends {
        let found = allowances.iter().position(|allowed| matches(allowed.caller, caller) && matches(allowed.end, end));
        match found {
            Some(found) => drop(unused.remove(&found)),
            None => complaints.push(format!(
                "{caller} can end the VM by {end}, and tests/e2e/tests/panics/allowed.txt does not say why that cannot \
                 happen. A way there: {path}"
            )),
        }
    }
    for unused in unused {
        let Allowance { caller, end, reason } = &allowances[unused];
        complaints.push(format!("nobody needs this line any more: {caller} | {end} | {reason}"));
    }
    complaints
}

#[test]
fn whoever_can_end_a_vm_has_a_reason_why_it_does_not() {
    let module = built("mixed-version-proxy.named.wasm");
    assert!(code(&module) == code(&fs::read(wasm_path().unwrap()).unwrap()), "dist/ holds another build's names");
    let complaints = complaints(&module);
    assert!(complaints.is_empty(), "{}\n", complaints.join("\n\n"));
}

#[test]
fn a_panic_that_is_not_on_the_list_is_found() {
    let complaints = complaints(&built("mixed-version-proxy-trapping.named.wasm"));
    for callback in ["on_http_request_headers", "on_http_call_response"] {
        let sentence = format!("::{callback} can end the VM by core::panicking::panic_fmt, and ");
        assert!(complaints.iter().any(|complaint| complaint.contains(&sentence)), "{callback}: {complaints:#?}");
    }
}

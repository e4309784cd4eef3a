//! `wasm-exports IN OUT NAME...`: copies a wasm module with only the named exports and `memory`.
//!
//! The proxy-wasm SDK exports every callback of the ABI, and Envoy calls each one that it finds, whether the filter
//! does anything there or not. Callbacks that are not exported cost nothing, and without a body callback Envoy never
//! hands a body to the filter.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let input = args.next().context("usage: wasm-exports IN OUT NAME...")?;
    let output = args.next().context("usage: wasm-exports IN OUT NAME...")?;
    let wanted: BTreeSet<String> = args.collect();

    let mut module = walrus::Module::from_file(&input).with_context(|| format!("{input}: not a wasm module"))?;
    let present: BTreeSet<String> = module.exports.iter().map(|export| export.name.clone()).collect();
    let missing: Vec<_> = wanted.difference(&present).collect();
    ensure!(missing.is_empty(), "{input}: no export named {missing:?}");

    let unwanted: Vec<_> = module
        .exports
        .iter()
        .filter(|export| export.name != "memory" && !wanted.contains(&export.name))
        .map(|export| export.id())
        .collect();
    for id in unwanted {
        module.exports.delete(id);
    }
    walrus::passes::gc::run(&mut module);
    module.emit_wasm_file(&output).with_context(|| format!("{output}: cannot write"))
}

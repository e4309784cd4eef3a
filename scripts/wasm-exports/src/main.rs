//! `wasm-exports IN OUT NAMED NAME...`: copies a wasm module with only the named exports and `memory`, to OUT without the
//! names of functions and to NAMED with them. The code of both is the same.
//!
//! The proxy-wasm SDK exports every callback of the ABI, and Envoy calls each one that it finds, whether the filter
//! does anything there or not. Callbacks that are not exported cost nothing, and without a body callback Envoy never
//! hands a body to the filter.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};

const USAGE: &str = "usage: wasm-exports IN OUT NAMED NAME...";

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let input = args.next().context(USAGE)?;
    let (output, named) = (args.next().context(USAGE)?, args.next().context(USAGE)?);
    let wanted: BTreeSet<String> = args.collect();
    copy(&input, &output, &wanted, false)?;
    copy(&input, &named, &wanted, true)
}

fn copy(input: &str, output: &str, wanted: &BTreeSet<String>, with_names: bool) -> Result<()> {
    let mut config = walrus::ModuleConfig::new();
    config.generate_name_section(with_names);
    let mut module = config.parse_file(input).with_context(|| format!("{input}: not a wasm module"))?;
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
    if !with_names {
        // What the linker says of itself.
        module.producers.clear();
        let others: Vec<_> = module.customs.iter().map(|(id, _)| id).collect();
        for id in others {
            module.customs.delete(id);
        }
    }
    walrus::passes::gc::run(&mut module);
    module.emit_wasm_file(output).with_context(|| format!("{output}: cannot write"))
}

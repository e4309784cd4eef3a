//! The compiled module: small, and open to Envoy only where it must be.

use std::collections::BTreeSet;
use std::fs;

use lab::wasm_path;
use wasmparser::{Parser, Payload};

#[test]
fn the_module_is_small_and_exports_only_the_callbacks_in_use() {
    let module = fs::read(wasm_path().unwrap()).unwrap();
    assert!(module.len() < 600 * 1024, "{} bytes", module.len());
    let mut exports = BTreeSet::new();
    for payload in Parser::new(0).parse_all(&module) {
        if let Payload::ExportSection(section) = payload.unwrap() {
            exports.extend(section.into_iter().map(|export| export.unwrap().name.to_owned()));
        }
    }
    let expected = [
        "_initialize",
        "memory",
        "proxy_abi_version_0_2_1",
        "proxy_on_configure",
        "proxy_on_context_create",
        "proxy_on_delete",
        "proxy_on_http_call_response",
        "proxy_on_memory_allocate",
        "proxy_on_request_headers",
        "proxy_on_response_headers",
        "proxy_on_tick",
        "proxy_on_vm_start",
    ];
    assert_eq!(exports, expected.map(str::to_owned).into(), "a body callback would make Envoy hand over every body");
}

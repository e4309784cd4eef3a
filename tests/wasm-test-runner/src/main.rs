//! The runner that wasm-bindgen's own command-line tool would be, built from its library: it starts node on a
//! wasm32-unknown-unknown test binary. A member of the workspace so that Cargo.lock pins it.

fn main() -> anyhow::Result<()> {
    wasm_bindgen_cli::wasm_bindgen_test_runner::run_cli_with_args(std::env::args_os())
}

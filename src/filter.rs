//! The filter in Envoy: the only code that knows proxy-wasm.
//!
//! One [`root`] context for each configuration and worker polls and keeps the table; one [`http`] context for each
//! request decides and guards; [`discovery`] answers for the whole cluster. All reach Envoy through [`host`] alone.

use proxy_wasm::traits::RootContext;

mod discovery;
mod host;
mod http;
mod identity;
mod reply;
mod root;
mod shared;
mod state;

proxy_wasm::main! {{
    host::install_logger();
    proxy_wasm::set_root_context(|id| -> Box<dyn RootContext> { Box::new(root::Root::new(id)) });
}}

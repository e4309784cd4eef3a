//! See `targets::open_api`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mixed_version_proxy_fuzz::{targets, write_seeds};

fuzz_target!(init: write_seeds("open_api"), |data: &[u8]| targets::open_api(data));

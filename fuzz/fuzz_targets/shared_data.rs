//! See `targets::shared_data`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mixed_version_proxy_fuzz::{targets, write_seeds};

fuzz_target!(init: write_seeds("shared_data"), |data: &[u8]| targets::shared_data(data));

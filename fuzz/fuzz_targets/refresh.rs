//! See `targets::refresh`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use mixed_version_proxy_fuzz::{targets, write_seeds};

fuzz_target!(init: write_seeds("refresh"), |data: &[u8]| targets::refresh(data));

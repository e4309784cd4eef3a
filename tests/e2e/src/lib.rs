//! Tests of the compiled filter in a real Envoy: see `tests/`.

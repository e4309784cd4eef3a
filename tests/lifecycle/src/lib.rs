//! Lifecycle tests of the filter on the in-process host: see `tests/`.

//! A whole world in one process, naive oracles and process helpers for tests and benches.

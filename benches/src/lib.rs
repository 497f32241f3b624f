//! Shared code of the microbenchmarks.

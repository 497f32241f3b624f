//! Whole worlds in one process: each rank is a thread with an engine of its own.
//!
//! All are one program, because linking takes longer than most of its tests. Under nextest each test runs in a process
//! of its own. Tests that count threads or descriptors of their process are in another program.

mod by_reference;
mod calls;
mod collectives;
mod concurrency;
mod cores;
mod counters;
mod departures;
mod encoded;
mod error_probe;
mod external;
mod failures;
mod lanes;
mod links;
mod messages;
mod offloads;
mod panics;
mod parked_driver;
mod rendezvous;
mod sums;
mod tensor_coder;

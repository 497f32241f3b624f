//! What whole worlds in one process do: every rank an engine of its own, threads as ranks.
//!
//! One program, since linking takes longer than most of its tests; each runs in a process of its own under nextest. What counts
//! threads or descriptors of its process is another program.

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
mod panics;
mod parked_driver;
mod rendezvous;

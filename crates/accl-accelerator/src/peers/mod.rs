//! Calls by reference on GPUs: ranks of a host read each other's device memory.
//!
//! `windows` owns the memory that this process publishes, and what it has imported of others. `reference` owns the bytes of a
//! reference. `route` decides, with all ranks of a group, whether their GPUs allow it. `launcher` enqueues the copies and
//! kernels of one task. No stream waits for another rank: the executor sends a reference when an event has come behind the
//! memory that it names. Read [`GroupRoute`] first.

mod launcher;
mod reference;
mod route;
mod windows;

pub(crate) use launcher::{PeerCall, PeerLauncher};
pub use route::{Complete, GroupRoute, PeerRoute};
pub(crate) use windows::AllGpuPeers;

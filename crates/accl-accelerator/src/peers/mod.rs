//! Calls by reference on GPUs: ranks of a host read each other's device memory.
//!
//! `windows` owns the memory that this process publishes, and what it has imported of others. `reference` owns the bytes of a
//! reference. `route` decides whether a call is by reference, and `trial` finds, with all ranks of a
//! group, whether their GPUs allow it. `launcher` enqueues the copies and
//! kernels of one task. No stream waits for another rank: the executor sends a reference when an event has come behind the
//! memory that it names. Read [`GroupRoute`] first.

mod launcher;
mod reference;
mod route;
mod trial;
mod windows;

pub(crate) use launcher::{PeerCall, PeerLauncher, SeenWindows};
pub use route::{GroupRoute, Issuing, PeerRoute};
pub(crate) use windows::AllGpuPeers;

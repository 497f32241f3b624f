//! A group's side of the collectives that a transport's library does for it.
//!
//! Owns which calls go to the library, and the creation of the library's group. From then on `worker` calls the
//! library. Read [`LibraryOffload::takes`] first.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use accl_executor::call::{CallDesc, External, ExternalTask};
use accl_transport::collectives::{Collectives, Opened};
use accl_types::config::{Config, OffloadTo};
use accl_types::{Collective, Error, Result};

use super::route::kept_by_host;
use super::running::{Membership, Order};
use super::worker::{Worker, Workers};

/// Name of the transport whose library the setting names.
const MPI: &str = "mpi";

/// Has a library do some of a group's collectives as a whole.
pub(crate) struct LibraryOffload {
    named: Vec<Collective>,
    /// Key under which the worker knows the group.
    key: u64,
    /// Fork generation of the process that created this value.
    generation: u64,
    world: u32,
    worker: Arc<Worker>,
    done: Arc<AtomicU64>,
}

/// Returns the collectives that MPI is to do according to these settings.
pub(crate) fn named(config: &Config, world: u32) -> Vec<Collective> {
    // A group of one rank needs no library. Deterministic results must not depend on which library is installed.
    if world == 1 || config.deterministic {
        return Vec::new();
    }
    let is_for_mpi = config.offload.iter().filter(|entry| entry.to == OffloadTo::Mpi);
    is_for_mpi.map(|entry| entry.collective).collect()
}

/// Returns the library of this process; `None` if its transport was not registered or has no collectives.
fn library() -> Option<&'static dyn Collectives> {
    accl_transport::find(MPI)?.collectives
}

fn refused(named: &[Collective], why: impl fmt::Display) -> Error {
    let all: Vec<String> = named.iter().map(|collective| format!("{collective}={MPI}")).collect();
    Error::configuration(format!("sidestep (ACCL_SIDESTEP): `{}` is not possible: {why}", all.join(",")))
}

impl LibraryOffload {
    /// Name that is reported for calls done by the library.
    pub(crate) const NAME: &'static str = MPI;

    /// Returns whether a call was given to a library.
    pub(crate) fn has(desc: &CallDesc) -> bool {
        desc.offload.as_ref().is_some_and(|by| by.name() == MPI)
    }

    /// Returns the library's address of this rank, as text. All ranks need it before the group is created.
    ///
    /// # Errors
    /// `Configuration` when there is no such library in this process.
    pub(crate) fn address(named: &[Collective]) -> Result<String> {
        let library = library().ok_or_else(|| {
            refused(
                named,
                "the transport mpi is not registered or has no collectives; install torch-accl[mpi] of this version, \
                 or choose the host",
            )
        })?;
        let address = library.address().map_err(|why| refused(named, why))?;
        Ok(address.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Creates the library's group from the addresses of all ranks, which `texts` lists in rank order. Returns `None`
    /// if the library does not do this group's collectives. That result is the same on all ranks, and rank 0 logs a
    /// warning.
    ///
    /// # Errors
    /// `Configuration` when the ranks do not belong to one job of the library.
    pub(crate) fn open(
        named: Vec<Collective>,
        (group, name): (u64, &str),
        rank: u32,
        texts: &[String],
        workers: &Workers,
    ) -> Result<Option<Arc<Self>>> {
        let addresses: Option<Vec<Vec<u8>>> = texts.iter().map(|text| bytes_of(text)).collect();
        let addresses = addresses.ok_or_else(|| Error::internal("a rank sent an invalid address"))?;
        let library =
            library().ok_or_else(|| Error::internal("the library of the transport mpi is no longer registered"))?;
        let opened = match library.open(rank, &addresses, group).map_err(|why| refused(&named, why))? {
            Opened::Group(opened) => opened,
            Opened::LeftToHost(why) => {
                if rank == 0 {
                    tracing::warn!("group {name}: collectives run on the host although sidestep requests {MPI}: {why}");
                }
                return Ok(None);
            }
        };
        let world = addresses.len() as u32;
        let (worker, done) = (workers.worker()?, Arc::<AtomicU64>::default());
        let key = workers.next_key();
        let membership = Membership { key, rank, world, name: MPI, group: opened, done: done.clone() };
        worker.put(Order::Open(membership));
        Ok(Some(Arc::new(Self { named, key, generation: accl_transport::fork_generation(), world, worker, done })))
    }

    /// Returns the same call, done by the library; `None` if the host does it.
    pub(crate) fn takes(self: &Arc<Self>, desc: &CallDesc) -> Option<CallDesc> {
        if !self.named.contains(&desc.collective) {
            return None;
        }
        if let Some(why) = kept_by_host(desc, self.world) {
            tracing::debug!(
                collective = desc.collective.name(),
                why,
                "the host runs a call that sidestep assigns to {MPI}"
            );
            return None;
        }
        Some(CallDesc { offload: Some(self.clone()), ..desc.clone() })
    }

    /// Closes the library's group: it was left after a failure or cleanly, or its creation failed.
    pub(crate) fn close(&self, has_failed: bool) {
        // A forked child has only a copy of its parent's values, including the locks, and must not touch them.
        if self.generation == accl_transport::fork_generation() {
            self.worker.put(Order::Close { group: self.key, has_failed });
        }
    }

    /// Returns the worker, so that a waiting thread can help it.
    pub(crate) fn worker(&self) -> Arc<Worker> {
        self.worker.clone()
    }

    /// Returns a readable description: what the library does, and how many collectives it has done.
    pub(crate) fn describe(&self) -> String {
        let named: Vec<&str> = self.named.iter().map(|collective| collective.name()).collect();
        format!("{MPI} does {}: {} so far\n", named.join(", "), self.done.load(Ordering::Relaxed))
    }
}

/// Decodes hexadecimal digits; `None` for other text.
fn bytes_of(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    if digits.len().is_multiple_of(2) { digits.chunks(2).map(pair).collect() } else { None }
}

impl External for LibraryOffload {
    fn name(&self) -> &str {
        MPI
    }

    fn begin(&self, task: ExternalTask) {
        self.worker.put(Order::Do { group: self.key, task });
    }
}

impl fmt::Debug for LibraryOffload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{MPI} of group {}", self.key)
    }
}

impl Drop for LibraryOffload {
    fn drop(&mut self) {
        self.close(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_hexadecimal_digits_are_bytes() {
        assert_eq!(bytes_of("00ff7a"), Some(vec![0, 255, 122]));
        assert_eq!(bytes_of(""), Some(Vec::new()));
        assert_eq!((bytes_of("0"), bytes_of("0g")), (None, None));
    }
}

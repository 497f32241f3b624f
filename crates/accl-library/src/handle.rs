//! A group's side of the collectives that a library executes for it.
//!
//! Owns which collectives go to the library, and the creation of the library's group. From then on `worker` calls the
//! library. Read [`LibraryKind`] first.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use accl_engine::offload::{Offload, OffloadGroup, OffloadKind, Opening, Poll, Progress, Route};
use accl_engine::{CallDesc, External, ExternalTask, GroupSpec};
use accl_transport::collectives::{Collectives, Opened};
use accl_types::config::{Config, RedirectTo};
use accl_types::{Collective, Error, Result};

use super::route::kept_by_host;
use super::running::{Membership, Order};
use super::worker::{Worker, Workers};

/// The collectives of the library behind a transport, for the groups of one engine.
pub struct LibraryKind {
    /// Name of the transport, and of the kind.
    name: &'static str,
    workers: Arc<Workers>,
}

/// The library for one group.
#[derive(Debug)]
struct LibraryOffload {
    named: Vec<Collective>,
    world: u32,
    membership: Arc<LibraryGroup>,
}

/// A group of the library. It is left when the last call and the group itself are gone.
struct LibraryGroup {
    name: &'static str,
    /// Key under which the worker knows the group.
    key: u64,
    /// Fork generation of the process that created this value.
    generation: u64,
    worker: Arc<Worker>,
    done: Arc<AtomicU64>,
}

impl LibraryKind {
    /// Returns the kind for the transport of this name, which must be registered before a group uses it.
    pub fn new(name: &'static str) -> Arc<Self> {
        Arc::new(Self { name, workers: Arc::default() })
    }

    /// Returns the collectives that the settings give to the library.
    fn named(&self, config: &Config, world: u32) -> Vec<Collective> {
        // A group of one rank needs no library. Deterministic results must not depend on which library is installed.
        if world == 1 || config.deterministic {
            return Vec::new();
        }
        let is_ours = |to: &RedirectTo| matches!(to, RedirectTo::Offload(name) if name == self.name);
        config.redirects.iter().filter(|redirect| is_ours(&redirect.to)).map(|redirect| redirect.collective).collect()
    }
}

impl OffloadKind for LibraryKind {
    fn name(&self) -> &'static str {
        self.name
    }

    fn is_named_by_sidestep(&self) -> bool {
        true
    }

    fn open(&self, group: &OffloadGroup<'_>, _poll: Poll<'_>) -> Result<Opening> {
        let &GroupSpec { ref name, rank, world, ref config, .. } = group.spec;
        let named = self.named(config, world);
        if named.is_empty() {
            return Ok(Opening::Unused);
        }
        let own = address(self.name, &named)?;
        let (library, group_name, id, workers) = (self.name, name.clone(), group.id, self.workers.clone());
        let join =
            move |texts: Vec<String>, _: Poll<'_>| join(library, named, (id, &group_name), rank.0, &texts, &workers);
        Ok(Opening::Exchange(own, Box::new(join)))
    }
}

/// Returns the library of a transport; `None` if the transport was not registered or has no collectives.
fn library_of(name: &str) -> Option<&'static dyn Collectives> {
    accl_transport::find(name)?.collectives
}

fn refused(name: &str, named: &[Collective], why: impl fmt::Display) -> Error {
    let all: Vec<String> = named.iter().map(|collective| format!("{collective}={name}")).collect();
    Error::configuration(format!("sidestep (ACCL_SIDESTEP): `{}` is not possible: {why}", all.join(",")))
}

/// Returns the library's address of this rank, as text. All ranks need it before the group is created.
///
/// # Errors
/// `Configuration` when there is no such library in this process.
fn address(name: &str, named: &[Collective]) -> Result<String> {
    let library = library_of(name).ok_or_else(|| {
        refused(
            name,
            named,
            format!(
                "the transport {name} is not registered or has no collectives; install torch-accl[{name}] of this \
                 version, or choose the host"
            ),
        )
    })?;
    let address = library.address().map_err(|why| refused(name, named, why))?;
    Ok(address.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Creates the library's group from the addresses of all ranks, which `texts` lists in rank order. If the library does
/// not execute this group's collectives, all ranks learn that, and rank 0 logs a warning.
///
/// # Errors
/// `Configuration` when the ranks do not belong to one job of the library.
fn join(
    library_name: &'static str,
    named: Vec<Collective>,
    (group, name): (u64, &str),
    rank: u32,
    texts: &[String],
    workers: &Workers,
) -> Result<Opening> {
    let addresses: Option<Vec<Vec<u8>>> = texts.iter().map(|text| bytes_of(text)).collect();
    let addresses = addresses.ok_or_else(|| Error::internal("a rank sent an invalid address"))?;
    let gone = || Error::internal(format!("the library of the transport {library_name} is no longer registered"));
    let library = library_of(library_name).ok_or_else(gone)?;
    let opened = library.open(rank, &addresses, group).map_err(|why| refused(library_name, &named, why))?;
    let opened = match opened {
        Opened::Group(opened) => opened,
        Opened::LeftToHost(why) => {
            if rank == 0 {
                tracing::warn!(
                    "group {name}: collectives run on the host although sidestep requests {library_name}: {why}"
                );
            }
            return Ok(Opening::Unused);
        }
    };
    let world = addresses.len() as u32;
    let (worker, done) = (workers.worker()?, Arc::<AtomicU64>::default());
    let key = workers.next_key();
    let generation = accl_transport::fork_generation();
    worker.put(Order::Open(Membership { key, rank, world, name: library_name, group: opened, done: done.clone() }));
    let membership = Arc::new(LibraryGroup { name: library_name, key, generation, worker, done });
    Ok(Opening::Open(Arc::new(LibraryOffload { named, world, membership })))
}

impl Offload for LibraryOffload {
    fn name(&self) -> &'static str {
        self.membership.name
    }

    fn route(&self, desc: &CallDesc) -> Route {
        if !self.named.contains(&desc.collective) {
            return Route::Host("`sidestep` does not name it");
        }
        if let Some(why) = kept_by_host(desc, self.world) {
            tracing::debug!(
                collective = desc.collective.name(),
                why,
                "the host runs a call that sidestep assigns to {}",
                self.membership.name
            );
            return Route::Host(why);
        }
        Route::Offload(self.membership.clone())
    }

    fn needs_help(&self) -> bool {
        true
    }

    fn begin_help(&self) {
        self.membership.worker.begin_help();
    }

    fn help(&self) -> Progress {
        self.membership.worker.help()
    }

    fn end_help(&self) {
        self.membership.worker.end_help();
    }

    fn describe(&self) -> String {
        let named: Vec<&str> = self.named.iter().map(|collective| collective.name()).collect();
        let LibraryGroup { name, done, .. } = &*self.membership;
        format!("{name} does {}: {} so far\n", named.join(", "), done.load(Ordering::Relaxed))
    }

    fn close(&self, has_failed: bool) {
        self.membership.close(has_failed);
    }
}

impl LibraryGroup {
    /// Closes the library's group: it was left after a failure or cleanly, or its creation failed.
    fn close(&self, has_failed: bool) {
        // A forked child has only a copy of its parent's values, including the locks, and must not touch them.
        if self.generation == accl_transport::fork_generation() {
            self.worker.put(Order::Close { group: self.key, has_failed });
        }
    }
}

impl External for LibraryGroup {
    fn name(&self) -> &str {
        self.name
    }

    fn begin(&self, task: ExternalTask) {
        self.worker.put(Order::Do { group: self.key, task });
    }
}

impl fmt::Debug for LibraryGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of group {}", self.name, self.key)
    }
}

impl Drop for LibraryGroup {
    fn drop(&mut self) {
        self.close(false);
    }
}

/// Decodes hexadecimal digits; `None` for other text.
fn bytes_of(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    if digits.len().is_multiple_of(2) { digits.chunks(2).map(pair).collect() } else { None }
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

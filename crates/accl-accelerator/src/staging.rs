//! The copies of one call between its tensors and host memory.
//!
//! This module owns which memory they use, and who enqueues them. Copies to host memory are enqueued when the call is
//! issued, in its caller's thread. Copies back are enqueued by the thread of `worker`, as results become final. Read
//! [`Accelerators::staging`] first.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use accl_engine::{External, ExternalCopy, ExternalTask, LentMemory, Staging};
use accl_types::Result;
use parking_lot::Mutex;

use crate::copies::{Copier, Issued};
use crate::pinned::{PinnedCounts, PinnedMemory};
use crate::streams::{CallStreams, Direction, Pinning};
use crate::worker::{Follower, Job};

/// The accelerators of this process: pinned memory, and the thread that follows copies.
#[derive(Debug)]
pub struct Accelerators {
    pinned: Arc<PinnedMemory>,
    follower: Arc<Follower>,
    /// Maximum bytes that one call may pin.
    most_pinned: usize,
}

impl Accelerators {
    /// Creates the part of a process without a thread. Calls with tensors of accelerators start one. `most_idle` is the
    /// number of bytes of pinned memory that is kept for later calls. A call that would pin more than `most_pinned` bytes
    /// uses memory that is not pinned.
    pub fn new(pinning: Arc<dyn Pinning>, most_idle: usize, most_pinned: usize) -> Arc<Self> {
        let pinned = PinnedMemory::new(pinning, most_idle);
        let follower = Follower::new(pinned.clone());
        Arc::new(Self { pinned, follower, most_pinned })
    }

    /// Returns what stages the tensors of one call, which are copied on `streams`.
    pub fn staging(self: &Arc<Self>, streams: Box<dyn CallStreams>) -> Arc<dyn Staging> {
        let device = streams.device();
        let streams = Arc::new(Mutex::new(streams));
        Arc::new(CallStaging { accelerators: self.clone(), device, streams, is_pinned: Mutex::new(true) })
    }

    /// Returns the bytes of pinned memory.
    pub fn pinned(&self) -> PinnedCounts {
        self.pinned.counts()
    }

    /// Returns how often the thread has asked whether events have come.
    pub fn polls(&self) -> u64 {
        self.follower.polls()
    }

    /// Ends the thread, and frees idle pinned memory. Copies in flight are left alone, and their calls fail when they are
    /// asked to stop. Afterwards no call to a device is made.
    pub fn close(&self) {
        self.follower.close();
        self.pinned.free_idle();
    }
}

/// Stages the tensors of one call.
#[derive(Debug)]
struct CallStaging {
    accelerators: Arc<Accelerators>,
    device: String,
    streams: Arc<Mutex<Box<dyn CallStreams>>>,
    /// Whether the memory of the copies is pinned.
    is_pinned: Mutex<bool>,
}

impl CallStaging {
    fn worker(&self, direction: Direction) -> Worker {
        let copier = Copier::new(self.streams.clone(), direction, *self.is_pinned.lock());
        let issued = Mutex::new(None);
        Worker { name: self.device.clone(), follower: self.accelerators.follower.clone(), copier, issued }
    }
}

impl Staging for CallStaging {
    fn lend(&self, len_bytes: usize) -> Result<Option<LentMemory>> {
        let Accelerators { pinned, follower, most_pinned } = &*self.accelerators;
        let follower = follower.clone();
        let lent = match len_bytes <= *most_pinned {
            true => pinned.lend(len_bytes, move || follower.wake()),
            false => None,
        };
        if lent.is_none() {
            tracing::warn!(
                bytes = len_bytes,
                device = self.device,
                "no pinned memory for the copies of a call, which are slower without it"
            );
            *self.is_pinned.lock() = false;
        }
        Ok(lent)
    }

    fn copy_in(
        &self,
        copies: &[ExternalCopy],
        ready: usize,
        keeps: &Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn External>> {
        let worker = self.worker(Direction::In);
        let mut issued = Issued::keeping(keeps.clone());
        let result = worker.copier.issue(copies, ready, &mut issued);
        // Even after an error, copies may be in flight.
        *worker.issued.lock() = Some(issued);
        result.map(|()| Arc::new(worker) as Arc<dyn External>)
    }

    fn copy_out(&self) -> Arc<dyn External> {
        let worker = self.worker(Direction::Out);
        *worker.issued.lock() = Some(Issued::default());
        Arc::new(worker)
    }
}

/// Worker of one direction of one part of a call.
struct Worker {
    name: String,
    follower: Arc<Follower>,
    copier: Copier,
    /// Copies enqueued before the task begins; `None` once it has begun.
    issued: Mutex<Option<Issued>>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("name", &self.name).field("copier", &self.copier).finish_non_exhaustive()
    }
}

impl External for Worker {
    fn name(&self) -> &str {
        &self.name
    }

    fn begin(&self, task: ExternalTask) {
        let issued = self.issued.lock().take().unwrap_or_default();
        self.follower.follow(Job { task: Some(task), copier: self.copier.clone(), issued });
    }

    fn cancel(&self) {
        self.follower.wake();
    }

    fn copies_are_ready(&self) {
        self.follower.wake();
    }
}

impl Drop for Worker {
    /// Keeps the memory of a refused call until its copies have been made.
    fn drop(&mut self) {
        let issued = self.issued.get_mut().take();
        if let Some(issued) = issued.filter(|issued| !issued.events.is_empty()) {
            self.follower.follow(Job { task: None, copier: self.copier.clone(), issued });
        }
    }
}

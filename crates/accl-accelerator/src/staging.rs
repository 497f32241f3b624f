//! The copies of one call between its tensors and host memory.
//!
//! This module owns which memory they use, and who enqueues them. Copies to host memory are enqueued when the call is
//! issued, in its caller's thread. Copies back are enqueued by the thread of `worker`, as results become final. Read
//! [`Accelerators::staging`] first.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use accl_engine::{
    CallDesc, Codecs, CoderNeeds, Enqueued, External, ExternalCopy, ExternalTask, Group, LentMemory, Publisher,
    PublishingNeeds, Staging,
};
use accl_types::{Dtype, Error, Result};
use parking_lot::Mutex;

use crate::check::Checker;
use crate::copies::{Copier, CopiesOut, Issued, SharedStreams};
use crate::figures::Figures;
use crate::gpu_codecs::{AllGpuCodecs, CallKernels, GpuCodecs, warn};
use crate::peers::{AllGpuPeers, GroupRoute, Issuing, PeerCall, PeerLauncher, PeerRoute, SeenWindows};
use crate::pinned::{PinnedCounts, PinnedMemory};
use crate::streams::{CallStreams, GpuDevice, Pinning};
use crate::tiles::{LaunchTarget, SUMS_BYTES, TileLauncher};
use crate::worker::{Follower, Issuer, Job};

/// The accelerators of this process: pinned memory, and the thread that follows copies.
#[derive(Debug)]
pub struct Accelerators {
    pinned: Arc<PinnedMemory>,
    follower: Arc<Follower>,
    /// Maximum bytes that one call may pin.
    most_pinned: usize,
    has_warned: AtomicBool,
    gpu_codecs: AllGpuCodecs,
    figures: Arc<Figures>,
    gpu_peers: AllGpuPeers,
}

impl Accelerators {
    /// Creates the part of a process without a thread. Calls with tensors of accelerators start one. `most_idle` is the
    /// number of bytes of pinned memory that is kept for later calls. A call that would pin more than `most_pinned` bytes
    /// uses memory that is not pinned.
    pub fn new(pinning: Arc<dyn Pinning>, most_idle: usize, most_pinned: usize) -> Arc<Self> {
        let pinned = PinnedMemory::new(pinning, most_idle);
        let follower = Follower::new(pinned.clone());
        let ((has_warned, gpu_codecs, gpu_peers), figures) = (Default::default(), Figures::new(pinned.clone()));
        Arc::new(Self { pinned, follower, most_pinned, has_warned, gpu_codecs, figures, gpu_peers })
    }

    /// Returns what stages the tensors of one call, which are copied on `streams`. With `releases_early`, threads that wait
    /// for the call continue when all copies are enqueued. `route` is the way of a call by reference.
    pub fn staging(
        self: &Arc<Self>,
        streams: Box<dyn CallStreams>,
        releases_early: bool,
        route: Option<PeerRoute>,
    ) -> Arc<dyn Staging> {
        let device = streams.device();
        Arc::new(CallStaging {
            accelerators: self.clone(),
            device,
            streams: Arc::new(Mutex::new(streams)),
            is_pinned: AtomicBool::new(true),
            copies_out: CopiesOut::new(),
            releases_early,
            route,
        })
    }

    /// Returns the way of a call, if it is by reference: see [`GroupRoute::of_call`].
    ///
    /// # Errors
    /// The errors of [`GroupRoute::of_call`].
    pub fn route_of(
        &self,
        route: &GroupRoute,
        group: &Group,
        desc: &CallDesc,
        device: Option<&GpuDevice>,
        issuing: Issuing<'_>,
    ) -> Result<Option<PeerRoute>> {
        route.of_call(group, desc, device, &self.gpu_peers, issuing)
    }

    /// Returns the bytes of device memory that other processes may read: all, and those that no call uses.
    pub fn window_bytes(&self) -> (u64, u64) {
        let counts = self.gpu_peers.counts();
        (counts.bytes, counts.idle_bytes)
    }

    pub(crate) fn pinned_memory(&self) -> &Arc<PinnedMemory> {
        &self.pinned
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
    streams: SharedStreams,
    /// Whether the memory of the copies is pinned.
    is_pinned: AtomicBool,
    copies_out: Arc<CopiesOut>,
    releases_early: bool,
    route: Option<PeerRoute>,
}

impl CallStaging {
    fn worker(&self, copier: Copier, issued: Issued) -> Worker {
        let (name, follower) = (self.device.clone(), self.accelerators.follower.clone());
        Worker { name, follower, given: Mutex::new(Some((copier, issued))) }
    }

    /// Returns where the kernels of the call run.
    fn target(&self, gpu: &GpuCodecs) -> Result<LaunchTarget> {
        let mut streams = self.streams.lock();
        let stream = streams.native_stream()?;
        Ok(LaunchTarget { stream, sums: gpu.room(stream, || streams.allocate(SUMS_BYTES))? })
    }

    fn is_pinned(&self) -> bool {
        self.is_pinned.load(Ordering::Relaxed)
    }
}

impl Staging for CallStaging {
    fn lend(&self, len_bytes: usize) -> Result<Option<LentMemory>> {
        let Accelerators { pinned, follower, most_pinned, .. } = &*self.accelerators;
        let follower = follower.clone();
        let lent = match len_bytes <= *most_pinned {
            true => pinned.lend(len_bytes, move || follower.wake()),
            false => None,
        };
        if lent.is_none() {
            self.is_pinned.store(false, Ordering::Relaxed);
            if !self.accelerators.has_warned.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    bytes = len_bytes,
                    device = self.device,
                    "memory cannot be pinned for the copies of a call, so that they are slower; later calls do not say so"
                );
            }
        }
        Ok(lent)
    }

    fn copy_in(
        &self,
        copies: &[ExternalCopy],
        ready: usize,
        keeps: &Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn External>> {
        let mut copier = Copier::into_host(self.streams.clone(), self.is_pinned());
        let mut issued = Issued::keeping(keeps.clone());
        let result = copier.issue(copies, ready, &mut issued);
        if result.is_err() {
            issued.follow_unknown(|| copier.record());
        }
        // Even after an error, copies may be in flight. The worker's drop follows them.
        let worker = self.worker(copier, issued);
        result.map(|()| Arc::new(worker) as Arc<dyn External>)
    }

    fn copy_out(&self) -> Arc<dyn External> {
        let copier = Copier::to_tensors(self.streams.clone(), self.copies_out.add_part(), self.is_pinned());
        Arc::new(self.worker(copier, Issued::default()))
    }

    fn coder(&self, codecs: &Codecs, dtype: Dtype, needs: CoderNeeds) -> Option<Arc<dyn External>> {
        let Accelerators { gpu_codecs, figures, pinned, follower, .. } = &*self.accelerators;
        let device = self.streams.lock().gpu()?;
        let gpu = gpu_codecs.of(&device)?;
        let target = self.target(&gpu).inspect_err(warn).ok()?;
        let check = |kernels: &CallKernels, codec: &_, purpose| {
            Checker { streams: &mut **self.streams.lock(), pinned, target, kernels, codec, dtype }.check(purpose)
        };
        let kernels = Arc::new(gpu.kernels(codecs, dtype, needs, check)?);
        if needs.figures && !figures.reserve() {
            return None;
        }
        let (name, streams) = (self.device.clone(), Some(self.streams.clone()));
        let (follower, figures, may_launch) = (follower.clone(), figures.clone(), Arc::default());
        Some(Arc::new(TileWorker { name, follower, streams, target, kernels, figures, may_launch }))
    }

    fn publisher(&self, needs: PublishingNeeds) -> Result<Publisher> {
        let Some(route) = &self.route else {
            return Err(Error::internal("a call by reference has no route"));
        };
        let stream = self.streams.lock().native_stream()?;
        let call = Arc::new(PeerCall::new(&route.peers, &route.seen, needs, stream)?);
        let scratch = call.scratch();
        let (name, follower) = (self.device.clone(), self.accelerators.follower.clone());
        let used = Some((self.streams.clone(), route.seen.clone()));
        let worker = PeerWorker { name, follower, call: Some(call), used };
        Ok(Publisher { worker: Arc::new(worker), scratch })
    }

    fn enqueued(&self) -> Option<Arc<dyn Enqueued>> {
        self.releases_early.then(|| self.copies_out.enqueued.clone() as Arc<dyn Enqueued>)
    }
}

/// Worker of one direction of one part of a call.
struct Worker {
    name: String,
    follower: Arc<Follower>,
    /// Copies enqueued before the task begins, and what enqueues the others; `None` once it has begun.
    given: Mutex<Option<(Copier, Issued)>>,
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("name", &self.name).finish_non_exhaustive()
    }
}

impl External for Worker {
    fn name(&self) -> &str {
        &self.name
    }

    fn begin(&self, task: ExternalTask) {
        if let Some((copier, issued)) = self.given.lock().take() {
            self.follower.follow(Job { task: Some(task), issuer: Issuer::Copies(copier), issued });
        }
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
        if let Some((copier, issued)) = self.given.get_mut().take().filter(|(_, issued)| issued.may_be_in_flight()) {
            self.follower.follow(Job { task: None, issuer: Issuer::Copies(copier), issued });
        }
    }
}

/// Worker of the combinations of one call.
struct TileWorker {
    name: String,
    follower: Arc<Follower>,
    /// `None` only while the worker is dropped.
    streams: Option<SharedStreams>,
    target: LaunchTarget,
    kernels: Arc<CallKernels>,
    figures: Arc<Figures>,
    may_launch: Arc<AtomicBool>,
}

impl Drop for TileWorker {
    /// Lets the thread drop the streams: that may wait for a lock of the device, and this may run under the engine's lock.
    fn drop(&mut self) {
        self.streams.take().into_iter().for_each(|streams| self.follower.dispose(Box::new(streams)));
    }
}

impl fmt::Debug for TileWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TileWorker").field("name", &self.name).finish_non_exhaustive()
    }
}

impl External for TileWorker {
    fn name(&self) -> &str {
        &self.name
    }

    fn begin(&self, task: ExternalTask) {
        let Some(streams) = self.streams.clone() else { return };
        let (kernels, figures, may_launch) = (self.kernels.clone(), self.figures.clone(), self.may_launch.clone());
        let launcher = TileLauncher::new(streams, kernels, self.target, figures, may_launch);
        self.follower.follow(Job { task: Some(task), issuer: Issuer::Tiles(launcher), issued: Issued::default() });
    }

    fn cancel(&self) {
        self.follower.wake();
    }

    fn copies_are_ready(&self) {
        self.follower.wake();
    }
}

/// Worker of one call by reference.
struct PeerWorker {
    name: String,
    follower: Arc<Follower>,
    /// `None` only while the worker is dropped.
    call: Option<Arc<PeerCall>>,
    used: Option<(SharedStreams, Arc<SeenWindows>)>,
}

impl Drop for PeerWorker {
    /// Gives the window back, and lets the thread drop the streams and the imported windows: that may wait for a lock of the
    /// device, and this may run under the engine's lock.
    fn drop(&mut self) {
        // The call has the imported windows, too, so it must not be the last one.
        self.call = None;
        self.used.take().into_iter().for_each(|used| self.follower.dispose(Box::new(used)));
    }
}

impl fmt::Debug for PeerWorker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerWorker").field("name", &self.name).finish_non_exhaustive()
    }
}

impl External for PeerWorker {
    fn name(&self) -> &str {
        &self.name
    }

    fn begin(&self, task: ExternalTask) {
        let Some((call, (streams, _))) = self.call.clone().zip(self.used.clone()) else { return };
        let launcher = PeerLauncher::new(streams, call);
        self.follower.follow(Job { task: Some(task), issuer: Issuer::Peers(launcher), issued: Issued::default() });
    }

    fn cancel(&self) {
        self.follower.wake();
    }

    fn copies_are_ready(&self) {
        self.follower.wake();
    }
}

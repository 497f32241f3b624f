//! The copies and kernels of tasks by reference.
//!
//! Owns which of them make a tile, and where published chunks lie in the window of their call. `worker` decides when tiles are
//! due. Tiles that follow each other in all memories are made together. Read [`PeerLauncher::issue`] first.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use accl_engine::{
    ExternalReduction, PUBLISHED_ALIGN, PublishedOperand, PublishedResult, PublishingNeeds, REFERENCE_BYTES,
    ReducedTile,
};
use accl_gpu::kernels::{MOST_OPERANDS, ReductionPart, ReductionSet};
use accl_gpu::{Argument, DeviceMemory, Grid, Module, Stream};
use accl_types::{DtypeClass, Error, Result};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::reference::{Reference, WindowId};
use super::windows::{GpuPeers, Lease, Seen};
use crate::copies::{Issued, SharedStreams};
use crate::streams::{Direction, StreamEvent};

/// Bytes after which an event is recorded, so that other ranks can follow.
const EVENT_BYTES: u64 = 8 << 20;

/// Windows that a group has seen, by number. They stay imported as long as the group.
pub(crate) type SeenWindows = Mutex<HashMap<u64, Seen>>;

/// Window, kernel and stream that the tasks of one call share.
pub(crate) struct PeerCall {
    peers: Arc<GpuPeers>,
    seen: Arc<SeenWindows>,
    /// Published chunks, followed by the temporary memory.
    window: Option<Lease>,
    published_bytes: u64,
    /// Bytes of the window that tasks have taken for their chunks.
    taken: AtomicU64,
    kernel: Option<(ReductionSet, Module)>,
    /// Native handle of the stream on which everything runs.
    stream: u64,
    /// Number of tasks that write tensors and have not enqueued everything.
    writing: AtomicU32,
    /// Whether the call's stream has come to the call.
    may_launch: AtomicBool,
}

impl fmt::Debug for PeerCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PeerCall").field("published_bytes", &self.published_bytes).finish_non_exhaustive()
    }
}

impl PeerCall {
    /// Lends a window to a call, and loads the kernel that it needs.
    ///
    /// # Errors
    /// The errors of [`GpuPeers::lend`] and [`GpuPeers::reduction`].
    pub(crate) fn new(
        peers: &Arc<GpuPeers>,
        seen: &Arc<SeenWindows>,
        needs: PublishingNeeds,
        stream: u64,
    ) -> Result<Self> {
        let kernel = needs.op.map(|op| peers.reduction(op, needs.dtype)).transpose()?;
        Ok(Self {
            peers: peers.clone(),
            seen: seen.clone(),
            window: match needs.published_bytes + needs.scratch_bytes {
                0 => None,
                bytes => Some(peers.lend(bytes)?),
            },
            published_bytes: needs.published_bytes,
            taken: AtomicU64::new(0),
            kernel,
            stream,
            writing: AtomicU32::new(needs.writing_tasks),
            may_launch: AtomicBool::new(false),
        })
    }

    /// Returns the address of the temporary memory.
    pub(crate) fn scratch(&self) -> *mut u8 {
        // Only the device uses the address.
        let base = self.window.as_ref().map_or(0, Lease::address);
        std::ptr::without_provenance_mut((base + self.published_bytes) as usize)
    }

    /// Takes room in the window for the chunk of a task.
    fn place(&self, len_bytes: u64) -> Result<u64> {
        let len_bytes = len_bytes.next_multiple_of(PUBLISHED_ALIGN);
        let at = self.taken.fetch_add(len_bytes, Ordering::Relaxed);
        match at + len_bytes <= self.published_bytes {
            true => Ok(at),
            false => Err(Error::internal("a call publishes more than it said")),
        }
    }

    /// Returns the address of a published chunk of `len_bytes` bytes.
    fn find(&self, reference: Reference, len_bytes: u64) -> Result<u64> {
        let WindowId { number, .. } = reference.window;
        if !reference.has(len_bytes) {
            return Err(Error::protocol(
                "a rank refers to memory outside of its window; check that all ranks run the same version",
            ));
        }
        let known = self.seen.lock().get(&number).cloned();
        let seen = match known {
            Some(seen) => seen,
            None => {
                // Without the lock, because the driver may take long.
                let seen = self.peers.see(reference.window)?;
                self.seen.lock().entry(number).or_insert(seen).clone()
            }
        };
        Ok(seen.address() + reference.offset)
    }
}

/// Enqueues the work of one task.
#[derive(Debug)]
pub(crate) struct PeerLauncher {
    streams: SharedStreams,
    call: Arc<PeerCall>,
    /// First byte of the task's chunk in the window, once it has room there.
    placed: Option<u64>,
}

/// Consecutive tiles that one copy or launch makes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Stretch {
    to: u64,
    operands: SmallVec<[u64; 2]>,
    elems: u64,
}

impl Stretch {
    /// Adds a tile that follows in all memories. Returns `false` if it does not.
    fn extend(&mut self, next: &Stretch, size: u64) -> bool {
        let bytes = self.elems * size;
        let follows = |(before, after): (&u64, &u64)| before + bytes == *after;
        let all_follow = self.to + bytes == next.to
            && self.operands.len() == next.operands.len()
            && self.operands.iter().zip(&next.operands).all(follows);
        if all_follow {
            self.elems += next.elems;
        }
        all_follow
    }
}

impl PeerLauncher {
    pub(crate) fn new(streams: SharedStreams, call: Arc<PeerCall>) -> Self {
        Self { streams, call, placed: None }
    }

    /// Records an event behind everything that was enqueued.
    pub(crate) fn record(&mut self) -> Result<Box<dyn StreamEvent>> {
        self.streams.lock().record(Direction::Out)
    }

    /// Enqueues what makes the tiles up to number `ready`, writes their references, and records events behind them. Until the
    /// call's stream has come to the call it enqueues nothing, and [`Issued::is_held_up`] is set.
    ///
    /// # Errors
    /// The error of the device. Work may be in flight nevertheless.
    pub(crate) fn issue(&mut self, task: &ExternalReduction, ready: usize, issued: &mut Issued) -> Result<()> {
        let (streams, call) = (self.streams.clone(), self.call.clone());
        let mut streams = streams.lock();
        let may_launch = call.may_launch.load(Ordering::Relaxed) || streams.may_copy(Direction::Out)?;
        call.may_launch.store(may_launch, Ordering::Relaxed);
        issued.is_held_up = !may_launch && ready > issued.count;
        if !may_launch {
            return Ok(());
        }
        while issued.count < ready {
            let size = task.dtype.size_bytes() as u64;
            let mut bytes = 0;
            let fits = |tile: &&ReducedTile| {
                let is_first = bytes == 0;
                bytes += tile.elems * size;
                is_first || bytes <= EVENT_BYTES
            };
            let count = task.tiles[issued.count..ready].iter().take_while(fits).count();
            let end = issued.count + count;
            let stretches = self.stretches(task, issued.count..end)?;
            issued.has_unknown = true;
            if let Some(first) = &task.first {
                first.make_once(|copies| {
                    self.copy(copies.iter().map(|copy| (copy.to.addr(), copy.from.addr(), copy.elems)))
                })?;
            }
            self.enqueue(task, &stretches)?;
            if end == task.tiles.len() && self.is_last_writer(task) {
                // Tensors that are not dense are written from dense copies.
                streams.finish()?;
            }
            issued.events.push_back((end, streams.record(Direction::Out)?));
            (issued.count, issued.has_unknown) = (end, false);
        }
        Ok(())
    }

    /// Returns whether everything that writes tensors of the call is enqueued, now that this task is.
    fn is_last_writer(&self, task: &ExternalReduction) -> bool {
        let writes = matches!(task.tiles.first(), Some(ReducedTile { result: PublishedResult::Values(to), .. })
            if !self.call.is_scratch(*to));
        // Relaxed: one thread enqueues the work of all tasks.
        writes && self.call.writing.fetch_sub(1, Ordering::Relaxed) == 1
    }

    /// Translates tiles to addresses, and writes their references.
    fn stretches(&mut self, task: &ExternalReduction, tiles: Range<usize>) -> Result<Vec<Stretch>> {
        let size = task.dtype.size_bytes() as u64;
        let mut stretches: Vec<Stretch> = Vec::new();
        let mut before: u64 = task.tiles[..tiles.start].iter().map(|tile| tile.elems * size).sum();
        for tile in &task.tiles[tiles] {
            let bytes = tile.elems * size;
            let operand = |operand: &PublishedOperand| match *operand {
                PublishedOperand::Values(at) => Ok(at.addr() as u64),
                PublishedOperand::Reference(at) => {
                    let mut reference = [0; REFERENCE_BYTES];
                    // SAFETY: the task names host memory of this length, which is complete as the tile is ready.
                    unsafe { at.copy_to_nonoverlapping(reference.as_mut_ptr(), REFERENCE_BYTES) };
                    self.call.find(Reference::from_bytes(&reference), bytes)
                }
            };
            let operands = tile.operands.iter().map(operand).collect::<Result<SmallVec<[u64; 2]>>>()?;
            let to = match tile.result {
                PublishedResult::Values(to) => to.addr() as u64,
                PublishedResult::Reference(at) => {
                    let offset = self.room(task)? + before;
                    let Some(lease) = &self.call.window else {
                        return Err(Error::internal("a call publishes more than it said"));
                    };
                    let window = lease.id();
                    let reference = Reference { window, offset }.to_bytes();
                    // SAFETY: the task names host memory of this length, which is its own until it reports the tile.
                    unsafe { at.copy_from_nonoverlapping(reference.as_ptr(), REFERENCE_BYTES) };
                    lease.address() + offset
                }
            };
            let stretch = Stretch { to, operands, elems: tile.elems };
            if !stretches.last_mut().is_some_and(|last| last.extend(&stretch, size)) {
                stretches.push(stretch);
            }
            before += bytes;
        }
        Ok(stretches)
    }

    /// Returns the first byte of the task's chunk in the window.
    fn room(&mut self, task: &ExternalReduction) -> Result<u64> {
        if let Some(placed) = self.placed {
            return Ok(placed);
        }
        let elems: u64 = task.tiles.iter().map(|tile| tile.elems).sum();
        let placed = self.call.place(elems * task.dtype.size_bytes() as u64)?;
        self.placed = Some(placed);
        Ok(placed)
    }

    /// Enqueues copies of bytes: to, from, and how many.
    fn copy(&self, copies: impl Iterator<Item = (usize, usize, u64)>) -> Result<()> {
        // In place, a tensor may be copied to itself.
        for (to, from, bytes) in copies.filter(|&(to, from, bytes)| to != from && bytes > 0) {
            // SAFETY: the addresses belong to tiles of a task that are ready, or to contributions of its call. The task is not given
            // back before an event behind the copy has come, and what it reads is not written before its call ends on all ranks.
            let [to, from] = [to, from].map(|at| unsafe { DeviceMemory::new(at as u64, bytes) });
            self.call.peers.gpu.copy(to, from, self.stream())?;
        }
        Ok(())
    }

    fn stream(&self) -> Stream {
        // SAFETY: the stream belongs to the call's device and lives as long as the process.
        unsafe { Stream::new(self.call.stream) }
    }

    fn enqueue(&self, task: &ExternalReduction, stretches: &[Stretch]) -> Result<()> {
        let PeerCall { kernel, .. } = &*self.call;
        let size = task.dtype.size_bytes() as u64;
        let is_copy = task.tiles.first().is_some_and(|tile| tile.operands.len() == 1);
        if is_copy {
            let copy = |stretch: &Stretch| {
                let [to, from] = [stretch.to, stretch.operands[0]].map(|at| at as usize);
                (to, from, stretch.elems * size)
            };
            return self.copy(stretches.iter().map(copy));
        }
        let Some((set, module)) = kernel else { return Err(Error::internal("a call that reduces has no kernel")) };
        let dtype_align = match task.dtype.class() {
            DtypeClass::Complex => size / 2,
            _ => size,
        };
        let is_aligned = |stretch: &Stretch| {
            stretch.operands.iter().chain([&stretch.to]).all(|address| address.is_multiple_of(dtype_align))
        };
        if !stretches.iter().all(is_aligned) {
            return Err(Error::invalid_argument(
                "the address of a tensor is not a multiple of its element's size; pass a copy of it",
            ));
        }
        let operands = stretches.first().map_or(0, |stretch| stretch.operands.len());
        if operands > MOST_OPERANDS {
            return Err(Error::unsupported(format!(
                "a kernel reduces at most {MOST_OPERANDS} operands, got {operands}"
            )));
        }
        for stretches in stretches.chunks(ReductionSet::capacity(operands)) {
            let parts: Vec<ReductionPart<'_>> = stretches
                .iter()
                .map(|Stretch { to, operands, elems }| ReductionPart { to: *to, operands, elements: *elems })
                .collect();
            let launch = set.launch(&parts, task.finishes.then_some(task.world));
            let grid = Grid::line(launch.blocks, launch.threads);
            // SAFETY: as for a copy. The module lives as long as the process, and the kernel has one parameter of this type.
            unsafe { module.launch(set.entry(), grid, &[Argument::of(&launch.args)], self.stream()) }?;
        }
        Ok(())
    }
}

impl PeerCall {
    /// Returns whether an address lies in the temporary memory.
    fn is_scratch(&self, at: *mut u8) -> bool {
        let is_in =
            |lease: &Lease| (lease.address()..lease.address() + lease.id().len_bytes).contains(&(at.addr() as u64));
        self.window.as_ref().is_some_and(is_in)
    }
}

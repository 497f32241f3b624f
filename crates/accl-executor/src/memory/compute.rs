//! The part of a call that this rank does alone: moving and reducing bytes between tensors, scratch and frames.
//!
//! This module accesses the caller's memory while a call runs. It knows operations by their regions; the executor
//! decides when each is due.

use std::ops::Range;
use std::sync::Arc;

use accl_kernels::Reducer;
use accl_schedule::{Finish, Order};
use accl_types::Rank;
use smallvec::SmallVec;

use super::buffers::Buffers;
use super::coder::{Coder, InFrames, TileMemory};
use super::references::References;
use super::tile::BadTile;
use super::tile_runs;
use crate::call::{CallDesc, ExternalCombination, ExternalHandle, ExternalWork, Meeting, Stopwatch, Wake};
use crate::plan::{Coded, Combination, ExternalStep, PlanOpKind, Region};

/// Memory and arithmetic of one call.
#[derive(Default)]
pub(crate) struct Compute {
    buffers: Buffers,
    /// Reducer and element size in bytes; `None` for calls that only move data or are encoded.
    reducer: Option<(Reducer, usize)>,
    /// Coder of an encoded call.
    coder: Option<Box<Coder>>,
    /// Settings of a call by reference.
    references: Option<References>,
    /// Stopwatch of a call whose caller requested phase timing.
    watch: Option<Box<Stopwatch>>,
}

impl Compute {
    /// Creates the compute state of a call. `reducer` comes with the element size in bytes.
    pub(crate) fn new(buffers: Buffers, reducer: Option<(Reducer, usize)>) -> Self {
        Self { buffers, reducer, coder: None, references: None, watch: None }
    }

    /// Returns this state for a call that is encoded.
    pub(crate) fn encoding(self, coder: Coder) -> Self {
        Self { coder: Some(Box::new(coder)), ..self }
    }

    /// Returns this state for a call by reference.
    pub(crate) fn referencing(self, references: References) -> Self {
        Self { references: Some(references), ..self }
    }

    /// Returns this state for a call that is timed.
    pub(crate) fn watched(self, watch: Stopwatch) -> Self {
        Self { watch: Some(Box::new(watch)), ..self }
    }

    /// Returns the stopwatch, if the call is timed.
    #[inline]
    pub(crate) fn watch(&self) -> Option<&Stopwatch> {
        self.watch.as_deref()
    }

    #[inline]
    fn timed(&self, work: impl FnOnce(&Self)) {
        timed(self.watch(), || work(self));
    }

    /// Computes tiles of a combination. `come` holds received tiles that are still in their frame: a region, the byte
    /// of the region at which they start, and the tiles. `go` is room in the frame in which the results are sent.
    pub(crate) fn combine(
        &mut self,
        op: &Combination,
        tiles: Range<u64>,
        come: Option<(&Region, u64, &[u8])>,
        go: Option<&mut [u8]>,
    ) {
        let Some(coder) = &mut self.coder else { unreachable!("an encoded call has a coder") };
        let home = |region: &Region, at| self.buffers.address(&region.at(at));
        let frames = InFrames {
            come: come.map(|(region, at, bytes)| (home(region, at), bytes)),
            go: op.code.as_ref().zip(go).map(|(code, bytes)| (home(&code.region, code.bytes_of(tiles.start)), bytes)),
        };
        let mut memory = TileMemory { buffers: &self.buffers, frames };
        let make = || tiles.clone().for_each(|tile| coder.combine(&mut memory, op, tile as usize));
        timed(self.watch.as_deref(), make);
    }

    /// Begins to let a worker compute a combination where the tensors lie. Returns `None` if the call has no such worker.
    pub(crate) fn begin_combine(&self, op: &Combination, wake: &Wake) -> Option<ExternalHandle> {
        let work = match (&self.references, &self.coder) {
            (Some(references), _) => ExternalWork::Reduce(Arc::new(references.reduction(&self.buffers, op))),
            (None, Some(coder)) => ExternalWork::Combine(Arc::new(tile_runs::combination(coder, &self.buffers, op))),
            (None, None) => return None,
        };
        self.buffers.begin_combine(work, wake)
    }

    /// Adds the figures of a worker to the measurements of the call.
    pub(crate) fn add_measurements(&mut self, combination: &ExternalCombination) {
        if let Some(coder) = &mut self.coder {
            coder.add_measurements(combination);
        }
    }

    /// Writes the headers of tiles that a worker has computed.
    pub(crate) fn seal(&self, op: &Combination, tiles: Range<u64>) {
        let Some(code) = &op.code else { return };
        let frames = InFrames { come: None, go: None };
        let mut memory = TileMemory { buffers: &self.buffers, frames };
        match (&self.references, &self.coder) {
            (Some(references), _) => references.seal(&mut memory, code, tiles),
            (None, Some(coder)) => coder.seal(&mut memory, code, tiles),
            (None, None) => {}
        }
    }

    /// Checks tiles that have arrived. They lie in `frame`, or in the call's memory if that is `None`.
    ///
    /// # Errors
    /// The first bad tile.
    pub(crate) fn check_tiles(&self, coded: &Coded, tiles: Range<u64>, frame: Option<&[u8]>) -> Result<(), BadTile> {
        let home = || self.buffers.address(&coded.region.at(coded.bytes_of(tiles.start)));
        let frames = InFrames { come: frame.map(|bytes| (home(), bytes)), go: None };
        let memory = TileMemory { buffers: &self.buffers, frames };
        let check = || match (&self.references, &self.coder) {
            (Some(references), _) => references.check(&memory, coded, tiles),
            (None, Some(coder)) => coder.check(&memory, coded, tiles).map_err(BadTile::Damaged),
            (None, None) => unreachable!("a call with tiles is encoded or by reference"),
        };
        timed(self.watch(), check)
    }

    /// Reports the measurements of an encoded call whose results are final, unless that was done.
    pub(crate) fn end(&mut self) {
        let Some(coder) = &mut self.coder else { return };
        timed(self.watch.as_deref(), || coder.end(&self.buffers));
    }

    /// Takes the addresses of the call's tensors, in place of [`Compute::new`]. Returns `false` if the call needs more
    /// memory.
    #[inline]
    pub(crate) fn take_addresses(&mut self, desc: &CallDesc, rank: Rank, reducer: Option<(Reducer, usize)>) -> bool {
        self.reducer = reducer;
        self.buffers.take_addresses(desc, rank.index())
    }

    /// Returns the bytes of one element; 1 for calls that only move data.
    pub(crate) fn elem_bytes(&self) -> usize {
        self.reducer.as_ref().map_or(1, |(_, elem)| *elem)
    }

    /// Begins an external operation. Returns `None` if this call has no work for it.
    pub(crate) fn begin_external(&mut self, step: ExternalStep, wake: &Wake) -> Option<ExternalHandle> {
        self.buffers.begin_external(step, wake)
    }

    /// Returns whether something may happen only when all parts of the call have copied in their bytes: the sample is
    /// taken from them, or results are written over them.
    pub(crate) fn needs_all_parts_in(&self) -> bool {
        self.has_overlap() || self.coder.as_ref().is_some_and(|coder| coder.has_sample())
    }

    /// Returns whether tensors that are copied out share memory with tensors that are copied in.
    pub(crate) fn has_overlap(&self) -> bool {
        self.buffers.has_overlap()
    }

    /// Returns where the parts of the call meet, if it has several.
    pub(crate) fn meeting(&self) -> Option<&Arc<dyn Meeting>> {
        self.buffers.meeting()
    }

    /// Fills the sample of a measured call whose tensors have been copied in, if this part has it.
    pub(crate) fn fill_sample(&self) {
        if let Some(coder) = &self.coder {
            coder.fill_sample(&self.buffers);
        }
    }

    /// Returns the memory of the call, to be changed before the call begins.
    pub(crate) fn buffers_mut(&mut self) -> &mut Buffers {
        &mut self.buffers
    }

    /// Copies staged outputs back. This is the last access to the caller's memory.
    pub(crate) fn unpack(&mut self) {
        let buffers = &mut self.buffers;
        timed(self.watch.as_deref(), || buffers.unpack());
    }

    /// Fills `payload` from a region, starting at byte `at` of the region.
    #[inline]
    pub(crate) fn read(&self, src: &Region, mut at: u64, mut payload: &mut [u8]) {
        while !payload.is_empty() {
            let extent = src.at(at);
            let len = (extent.len as usize).min(payload.len());
            let (head, tail) = payload.split_at_mut(len);
            // SAFETY: the extent lies in a piece that the caller keeps readable until the call completes, and `len` is
            // at most the rest of the extent. `head` is frame memory and overlaps no tensor.
            unsafe { accl_kernels::copy(head.as_mut_ptr(), self.buffers.address(&extent), len) };
            payload = tail;
            at += len as u64;
        }
    }

    /// Writes or reduces received bytes into place, starting at byte `at` of the operation.
    #[inline]
    pub(crate) fn place(&self, op: &PlanOpKind, at: u64, payload: &[u8]) {
        match op {
            PlanOpKind::Recv { dst, .. } => self.write(dst, at, payload),
            PlanOpKind::RecvReduce { dst, local, order, finish, .. } => {
                self.timed(|this| this.reduce_incoming(dst, local, *order, *finish, at, payload));
            }
            PlanOpKind::Send { .. }
            | PlanOpKind::Copy { .. }
            | PlanOpKind::Reduce { .. }
            | PlanOpKind::Combine(_)
            | PlanOpKind::External(_) => {
                unreachable!("only receives have payload to place")
            }
        }
    }

    /// Does `n` bytes of an operation without a peer, starting at its byte `at`.
    #[inline]
    pub(crate) fn execute(&self, op: &PlanOpKind, at: u64, n: u64) {
        match op {
            PlanOpKind::Copy { dst, src } => self.timed(|this| this.copy(dst, src, at, n)),
            PlanOpKind::Reduce { dst, srcs, finish } => self.timed(|this| this.reduce(dst, srcs, *finish, at, n)),
            PlanOpKind::Send { .. }
            | PlanOpKind::Recv { .. }
            | PlanOpKind::RecvReduce { .. }
            | PlanOpKind::Combine(_)
            | PlanOpKind::External(_) => {
                unreachable!("operations with a peer or on tiles are not executed by bytes")
            }
        }
    }

    fn write(&self, dst: &Region, mut at: u64, mut payload: &[u8]) {
        while !payload.is_empty() {
            let extent = dst.at(at);
            let len = (extent.len as usize).min(payload.len());
            // SAFETY: the extent lies in a piece that the caller keeps writable until the call completes. `payload` is
            // link memory or a copy, and overlaps no tensor.
            unsafe { accl_kernels::copy(self.buffers.address(&extent), payload.as_ptr(), len) };
            payload = &payload[len..];
            at += len as u64;
        }
    }

    fn reduce_incoming(
        &self,
        dst: &Region,
        local: &Region,
        order: Order,
        finish: Finish,
        mut at: u64,
        mut payload: &[u8],
    ) {
        let Some((reducer, elem)) = &self.reducer else { unreachable!("a reduction has a reducer") };
        while !payload.is_empty() {
            let (to, mine) = (dst.at(at), local.at(at));
            let len = (to.len.min(mine.len) as usize).min(payload.len());
            let (to, mine) = (self.buffers.address(&to), self.buffers.address(&mine));
            let (a, b) = match order {
                Order::IncomingFirst => (payload.as_ptr(), mine.cast_const()),
                Order::LocalFirst => (mine.cast_const(), payload.as_ptr()),
            };
            // SAFETY: both extents hold at least `len` bytes in pieces that stay valid until the call completes. Chunks
            // and segments are whole elements. By the schedule's checker, `to` equals `mine` or does not overlap it.
            unsafe { reducer.pair(to, a, b, len / elem, kernel_finish(finish)) };
            payload = &payload[len..];
            at += len as u64;
        }
    }

    fn copy(&self, dst: &Region, src: &Region, mut at: u64, n: u64) {
        let end = at + n;
        while at < end {
            let (to, from) = (dst.at(at), src.at(at));
            let len = to.len.min(from.len).min(end - at);
            let (from, to, n) = (self.buffers.address(&from), self.buffers.address(&to), len as usize);
            // SAFETY: both extents hold `len` bytes that stay valid until the call completes. If they overlap, the copy
            // that allows overlap is used.
            unsafe {
                if from.addr().abs_diff(to.addr()) < n {
                    std::ptr::copy(from, to, n);
                } else {
                    accl_kernels::copy(to, from, n);
                }
            }
            at += len;
        }
    }

    fn reduce(&self, dst: &Region, srcs: &[Region], finish: Finish, mut at: u64, n: u64) {
        let Some((reducer, elem)) = &self.reducer else { unreachable!("a reduction has a reducer") };
        let end = at + n;
        while at < end {
            let to = dst.at(at);
            let mut len = to.len.min(end - at);
            let mut operands: SmallVec<[*const u8; 16]> = SmallVec::with_capacity(srcs.len());
            for src in srcs {
                let extent = src.at(at);
                len = len.min(extent.len);
                operands.push(self.buffers.address(&extent));
            }
            // SAFETY: every operand and the result hold `len` bytes that stay valid until the call completes. By the
            // schedule's checker, the result is one of the operands or overlaps none.
            unsafe {
                reducer.many(self.buffers.address(&to), &operands, len as usize / elem, kernel_finish(finish));
            }
            at += len;
        }
    }
}

/// Runs a piece of arithmetic, and times it if there is a stopwatch.
#[inline]
fn timed<T>(watch: Option<&Stopwatch>, work: impl FnOnce() -> T) -> T {
    match watch {
        None => work(),
        Some(watch) => watch.time(work),
    }
}

fn kernel_finish(finish: Finish) -> accl_kernels::Finish {
    match finish {
        Finish::No => accl_kernels::Finish::No,
        Finish::Yes => accl_kernels::Finish::Yes,
    }
}

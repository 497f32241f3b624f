//! External operations: work on a call's memory that a device, another library or a thread does.
//!
//! The executor begins an operation when it is due, continues, and never waits for it. The worker has an
//! [`ExternalTask`], which is the permission to access the memory that the task names. The end of the task sets a flag
//! and wakes the driver, which checks the flag on its next pass.
//!
//! A call that fails meanwhile requests the task back. The call does not complete, and its caller keeps the memory,
//! until the task has ended or the memory of its collective is back (`access`). Work that nothing can stop is
//! abandoned: the call completes, and its memory must stay for as long as the process lives.
//!
//! This module owns the task and its flag. `exec::run` decides when an operation is due, and `group::stopping` decides
//! how long a failed call waits. Read [`External`] first.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use accl_types::{Collective, Dtype, Error, ErrorKind, Moment, Rank, ReduceOp, Result};

use super::access::Access;
use super::combination::ExternalCombination;
use super::external_copy::ExternalCopy;
use super::published::ExternalReduction;
use super::tensor::Blocks;

/// Function that wakes the thread that makes progress.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// Worker for external operations. The last reference may be dropped under the engine's lock, so `drop` must not wait
/// for another thread.
pub trait External: Send + Sync + fmt::Debug {
    /// Returns a name for messages, for example of a device or library.
    fn name(&self) -> &str;

    /// Begins a task and returns. Runs under the engine's lock: it must neither block nor call the engine. The task may
    /// end before this returns.
    fn begin(&self, task: ExternalTask);

    /// Notifies the worker that tasks are wanted back: each task whose [`ExternalTask::is_cancelled`] returns `true`.
    /// Runs under the engine's lock, like [`External::begin`]. Workers that check their tasks themselves do not need
    /// it. A worker that waits for [`External::copies_are_ready`] does.
    fn cancel(&self) {}

    /// Notifies the worker that more copies of a task may be made, or more tiles: see [`ExternalTask::ready_copies`]. Runs under the
    /// engine's lock, like [`External::begin`].
    fn copies_are_ready(&self) {}
}

/// A collective that an external operation does as a whole. All ranks have issued it: their signatures are equal.
#[derive(Clone, Debug)]
pub struct ExternalCollective {
    /// The collective.
    pub collective: Collective,
    /// Element type. If a call only moves data and mixes types, this is the type of its first tensor.
    pub dtype: Dtype,
    /// Reduce operator.
    pub op: ReduceOp,
    /// Root rank, if the collective has one.
    pub root: Rank,
    /// Sequence number in the group. Every rank of a group begins its tasks in the order of these numbers.
    pub seq: u64,
    /// Time at which the call was submitted.
    pub started: Moment,
    /// Time at which the collective should be done. The worker enforces this deadline; the engine itself waits a little
    /// longer.
    pub deadline: Option<Moment>,
    /// Contributions of this rank, dense, by block. A call in place contributes the contents of its outputs.
    pub inputs: Blocks,
    /// Buffers for what this rank receives, dense, by block.
    pub outputs: Blocks,
}

/// Work on the host memory of copies that have been made, before the call uses them.
pub(crate) type AfterCopy = Arc<dyn Fn(&[ExternalCopy]) -> Result<()> + Send + Sync>;

/// Copies of a task.
#[derive(Clone, Default)]
pub(crate) struct ExternalCopies {
    pub(crate) copies: Vec<ExternalCopy>,
    /// Number of copies that may be made at once. Others follow as [`ExternalHandle::set_ready`] says.
    pub(crate) ready: u32,
    pub(crate) after: Option<AfterCopy>,
}

impl fmt::Debug for ExternalCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalCopies").field("copies", &self.copies).finish_non_exhaustive()
    }
}

/// Work of a task.
#[derive(Clone, Debug)]
pub(crate) enum ExternalWork {
    CopyIn(ExternalCopies),
    CopyOut(ExternalCopies),
    Collective(Box<ExternalCollective>),
    Combine(Arc<ExternalCombination>),
    Reduce(Arc<ExternalReduction>),
    /// The parts of the call that other lanes do.
    Parts,
}

impl ExternalWork {
    fn copies(&self) -> Option<&ExternalCopies> {
        match self {
            ExternalWork::CopyIn(copies) | ExternalWork::CopyOut(copies) => Some(copies),
            ExternalWork::Collective(_) | ExternalWork::Combine(_) | ExternalWork::Reduce(_) | ExternalWork::Parts => {
                None
            }
        }
    }

    /// Returns the number of copies, or of tiles.
    fn units(&self) -> usize {
        match self {
            ExternalWork::CopyIn(copies) | ExternalWork::CopyOut(copies) => copies.copies.len(),
            ExternalWork::Combine(combination) => combination.tiles() as usize,
            ExternalWork::Reduce(reduction) => reduction.tiles.len(),
            ExternalWork::Collective(_) | ExternalWork::Parts => 0,
        }
    }
}

const UNDER_WAY: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;
const PANICKED: &str = "the worker panicked when it began the operation or learned of more copies";

struct TaskState {
    state: AtomicU8,
    /// Access to the memory. The task is cancelled once the memory is wanted back.
    access: Access,
    /// Whether the worker panicked in `begin`. Its results are then not used, but the executor still waits for the task
    /// to end.
    has_panicked: AtomicBool,
    /// Number of copies that have been made, or of tiles.
    made: AtomicU32,
    /// Number of copies that may be made, or of tiles.
    ready: AtomicU32,
    why: OnceLock<Error>,
    wake: Wake,
}

/// One external operation in flight.
///
/// The worker that has the task has exclusive access to the tensors of its copies. It also has access to the host memory
/// of each copy: of a copy-in until it reports the copy, of a copy-out from the time at which the copy is ready. The same holds
/// for the tiles of a combination: the worker reads and writes them from the time at which they are ready until it reports them. The
/// memory of a collective is accessed only through [`CollectiveMemory`](crate::memory::CollectiveMemory). The task is given back by
/// [`ExternalTask::done`], [`ExternalTask::fail`], or a drop. A drop counts as a failure unless the task was cancelled.
pub struct ExternalTask {
    work: ExternalWork,
    shared: Arc<TaskState>,
    /// Memory of the engine that lives as long as the task, whatever happens to the call.
    _keeps: Arc<dyn Any + Send + Sync>,
}

impl ExternalTask {
    /// Returns the copies to make, in order.
    pub fn copies(&self) -> &[ExternalCopy] {
        self.work.copies().map_or(&[], |copies| &copies.copies)
    }

    /// Returns the number of copies, or of tiles of a combination.
    pub fn units(&self) -> usize {
        self.work.units()
    }

    /// Returns whether the copies go from host memory to the tensors.
    pub fn is_copy_out(&self) -> bool {
        matches!(self.work, ExternalWork::CopyOut(_))
    }

    /// Returns how many copies may be made, or tiles of a combination: the first ones. When the number rises,
    /// [`External::copies_are_ready`] is called.
    pub fn ready_copies(&self) -> usize {
        // Acquire: the bytes of a copy that is ready are visible to this thread.
        self.shared.ready.load(Ordering::Acquire) as usize
    }

    /// Returns how many copies were reported as made, or tiles.
    pub fn made_copies(&self) -> usize {
        // Relaxed: only the owner of the task changes the number.
        self.shared.made.load(Ordering::Relaxed) as usize
    }

    /// Reports that the first `count` copies have been made, or tiles, so that the call may go on behind them. A number that
    /// does not rise changes nothing. Takes no lock of the engine.
    ///
    /// # Panics
    /// Panics if fewer are ready.
    pub fn note_made(&self, count: usize) {
        let (before, ready) = (self.made_copies(), self.ready_copies());
        assert!(count <= ready, "{count} copies or tiles are reported as made, and {ready} are ready");
        if count <= before {
            return;
        }
        if let Some(ExternalCopies { copies, after: Some(after), .. }) = self.work.copies()
            && let Err(error) = after(&copies[before..count])
        {
            let _ = self.shared.why.set(error);
            return;
        }
        // Release: a thread that sees the number also sees the bytes.
        self.shared.made.store(count as u32, Ordering::Release);
        (self.shared.wake)();
    }

    /// Returns the collective to do, if the task is one.
    pub fn collective(&self) -> Option<&ExternalCollective> {
        if let ExternalWork::Collective(collective) = &self.work { Some(collective) } else { None }
    }

    /// Returns the combination to compute, if the task is one.
    pub fn combination(&self) -> Option<&Arc<ExternalCombination>> {
        if let ExternalWork::Combine(combination) = &self.work { Some(combination) } else { None }
    }

    /// Returns the chunk to copy or reduce, if the task is part of a call by reference.
    pub fn reduction(&self) -> Option<&Arc<ExternalReduction>> {
        if let ExternalWork::Reduce(reduction) = &self.work { Some(reduction) } else { None }
    }

    /// Returns whether the call has failed and wants its memory back. Anything written from then on is unused.
    pub fn is_cancelled(&self) -> bool {
        self.shared.access.is_wanted_back()
    }

    /// Returns permission to access the memory of the collective until the result is dropped; `None` once the task is
    /// cancelled.
    pub(crate) fn touch(&self) -> Option<Touch<'_>> {
        self.shared.access.begin().then_some(Touch(&self.shared))
    }

    /// Acquires permission to access the memory of the collective until the task ends, whatever happens to the call.
    /// Returns `false` once the task is cancelled. While it is held, no other access (such as by
    /// [`CollectiveMemory`](crate::memory::CollectiveMemory)) is allowed.
    pub fn hold(&self) -> bool {
        self.shared.access.begin()
    }

    /// Ends the task as successful: all outputs are written, and all copies made. The worker no longer accesses the
    /// task's memory.
    pub fn done(self) {
        let (ready, all) = (self.ready_copies(), self.units());
        if ready < all {
            return self
                .fail_with(Error::internal(format!("{ready} of {all} copies or tiles were ready when it ended")));
        }
        self.note_made(all);
        self.end(if self.shared.why.get().is_some() { FAILED } else { DONE });
    }

    /// Ends the task as failed, for the reason `why`. The worker no longer accesses the task's memory.
    pub fn fail(self, why: impl Into<String>) {
        self.fail_as(ErrorKind::Device, why);
    }

    /// Fails the task like [`ExternalTask::fail`], with an error of this kind.
    pub fn fail_as(self, kind: ErrorKind, why: impl Into<String>) {
        self.fail_with(Error::new(kind, why));
    }

    /// Fails the task like [`ExternalTask::fail`], with an error that has more context than a reason.
    pub fn fail_with(self, error: Error) {
        let _ = self.shared.why.set(error);
        self.end(FAILED);
    }

    /// Abandons a task that has failed or was cancelled, while unstoppable work still uses the memory that it
    /// [holds](ExternalTask::hold). The call completes. The memory must stay for as long as the process lives, and the
    /// call's error says so.
    pub fn abandon(self, error: Error) {
        let _ = self.shared.why.set(error.leaking_memory());
        self.end(FAILED);
        // Forgetting the task also leaks the engine's memory in which its tensors lie.
        std::mem::forget(self);
    }

    fn end(&self, state: u8) {
        // Release: a thread that sees the end also sees what the worker wrote.
        self.shared.state.store(state, Ordering::Release);
        (self.shared.wake)();
    }
}

/// Permission returned by [`ExternalTask::touch`].
pub(crate) struct Touch<'task>(&'task TaskState);

impl Drop for Touch<'_> {
    fn drop(&mut self) {
        if self.0.access.end() {
            (self.0.wake)();
        }
    }
}

impl Drop for ExternalTask {
    fn drop(&mut self) {
        // Relaxed: only the owner of the task, which drops it here, can end it.
        if self.shared.state.load(Ordering::Relaxed) == UNDER_WAY {
            self.end(FAILED);
        }
    }
}

impl fmt::Debug for ExternalTask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalTask").field("work", &self.work).finish_non_exhaustive()
    }
}

/// The executor's side of a task.
pub(crate) struct ExternalHandle {
    by: Arc<dyn External>,
    shared: Arc<TaskState>,
    /// Whether the worker accesses the memory only between `Access::begin` and `Access::end`.
    asks_first: bool,
    /// The combination that is computed, if the task is one.
    combination: Option<Arc<ExternalCombination>>,
}

/// State of a task, from its flag.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ExternalState {
    UnderWay,
    Done,
    /// The task failed with this error.
    Failed(Error),
}

impl ExternalHandle {
    /// Begins a task. `keeps` owns the memory of the engine in which the task's tensors lie.
    pub(crate) fn begin(
        by: &Arc<dyn External>,
        work: ExternalWork,
        keeps: Arc<dyn Any + Send + Sync>,
        wake: Wake,
    ) -> Self {
        let ready = work.copies().map_or(0, |copies| copies.ready);
        let shared = Arc::new(TaskState {
            made: AtomicU32::new(0),
            ready: AtomicU32::new(ready),
            state: AtomicU8::new(UNDER_WAY),
            access: Access::default(),
            has_panicked: AtomicBool::new(false),
            why: OnceLock::new(),
            wake,
        });
        // The handle exists before the worker's code runs. Whatever that code does, the call does not complete while
        // the task is in flight.
        let asks_first = matches!(work, ExternalWork::Collective(_));
        let combination = if let ExternalWork::Combine(combination) = &work { Some(combination.clone()) } else { None };
        let handle = Self { by: by.clone(), shared: shared.clone(), asks_first, combination };
        let task = ExternalTask { work, shared, _keeps: keeps };
        if catch_unwind(AssertUnwindSafe(|| by.begin(task))).is_err() {
            // The worker may have passed the task on before it panicked, so the executor still waits for the task to
            // end.
            let _ = handle.shared.why.set(Error::device(PANICKED));
            handle.shared.has_panicked.store(true, Ordering::Relaxed);
        }
        handle
    }

    /// Returns whether the task has ended.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        // Acquire: the thread that continues sees what the task has written.
        self.shared.state.load(Ordering::Acquire) != UNDER_WAY
    }

    pub(crate) fn state(&self) -> ExternalState {
        match self.shared.state.load(Ordering::Acquire) {
            UNDER_WAY => ExternalState::UnderWay,
            DONE if !self.shared.has_panicked.load(Ordering::Relaxed) => ExternalState::Done,
            _ => {
                let silent = || Error::device("the worker dropped the task without a result");
                ExternalState::Failed(self.shared.why.get().cloned().unwrap_or_else(silent))
            }
        }
    }

    /// Returns how many copies have been made.
    #[inline]
    pub(crate) fn made(&self) -> u32 {
        // Acquire: the thread that goes on sees the bytes.
        self.shared.made.load(Ordering::Acquire)
    }

    /// Returns the combination that is computed, if the task is one.
    pub(crate) fn combination(&self) -> Option<&Arc<ExternalCombination>> {
        self.combination.as_ref()
    }

    /// Returns how many copies may be made, or tiles.
    pub(crate) fn ready(&self) -> u32 {
        self.shared.ready.load(Ordering::Relaxed)
    }

    /// Returns whether the worker has yet to make a copy that is ready, or a tile.
    pub(crate) fn owes_copies(&self) -> bool {
        self.made() < self.ready()
    }

    /// Lets the first `count` copies be made, or tiles, as their bytes are final.
    ///
    /// # Errors
    /// The worker has panicked. The task ends nevertheless.
    pub(crate) fn set_ready(&self, count: u32) -> Result<()> {
        // Release: a worker that sees the number also sees the bytes.
        self.shared.ready.store(count, Ordering::Release);
        if catch_unwind(AssertUnwindSafe(|| self.by.copies_are_ready())).is_err() {
            self.shared.has_panicked.store(true, Ordering::Relaxed);
            return Err(Error::device(PANICKED));
        }
        Ok(())
    }

    /// Requests the task back.
    pub(crate) fn cancel(&self) {
        if !self.has_ended() && self.shared.access.want_back() {
            // A panic of the worker is ignored: the call waits for the task as if it had not been requested back.
            let _ = catch_unwind(AssertUnwindSafe(|| self.by.cancel()));
        }
    }

    /// Returns whether the task accesses no memory of the call, now or later. It has ended, or it can reach only its
    /// own memory.
    pub(crate) fn is_away(&self) -> bool {
        self.has_ended() || self.asks_first && self.shared.access.is_back()
    }

    /// Returns the reason, if the task was abandoned.
    pub(crate) fn abandoned(&self) -> Option<&Error> {
        self.shared.why.get().filter(|why| self.has_ended() && why.context.must_leak_memory)
    }

    /// Returns the name of the worker.
    pub(crate) fn name(&self) -> &str {
        catch_unwind(AssertUnwindSafe(|| self.by.name())).unwrap_or("an operation whose name panics")
    }
}

impl Drop for ExternalHandle {
    /// Requests the task back, because the executor no longer waits for it.
    fn drop(&mut self) {
        self.cancel();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Worker that stores its tasks.
    #[derive(Debug, Default)]
    struct Shelf {
        tasks: Mutex<Vec<ExternalTask>>,
        cancels: AtomicUsize,
    }

    impl External for Shelf {
        fn name(&self) -> &str {
            "shelf"
        }

        fn begin(&self, task: ExternalTask) {
            self.tasks.lock().unwrap().push(task);
        }

        fn cancel(&self) {
            self.cancels.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn begin() -> (Arc<Shelf>, ExternalHandle, ExternalTask, Arc<AtomicUsize>) {
        let (shelf, wakes): (Arc<Shelf>, Arc<AtomicUsize>) = Default::default();
        let (by, counter): (Arc<dyn External>, _) = (shelf.clone(), wakes.clone());
        let wake: Wake = Arc::new(move || {
            counter.fetch_add(1, Ordering::Relaxed);
        });
        let handle = ExternalHandle::begin(&by, ExternalWork::CopyIn(ExternalCopies::default()), Arc::new(()), wake);
        let task = shelf.tasks.lock().unwrap().pop().unwrap();
        (shelf, handle, task, wakes)
    }

    #[test]
    fn the_end_of_a_task_sets_its_flag_and_wakes_once() {
        let failed = |kind, why: &str| ExternalState::Failed(Error::new(kind, why));
        let ends: [(fn(ExternalTask), ExternalState); 4] = [
            (ExternalTask::done, ExternalState::Done),
            (|task| task.fail("no power"), failed(ErrorKind::Device, "no power")),
            (|task| task.fail_as(ErrorKind::Timeout, "no answer"), failed(ErrorKind::Timeout, "no answer")),
            (drop, failed(ErrorKind::Device, "the worker dropped the task without a result")),
        ];
        for (end, state) in ends {
            let (_shelf, handle, task, wakes) = begin();
            assert!(!handle.has_ended() && handle.state() == ExternalState::UnderWay);
            end(task);
            assert!(handle.has_ended());
            assert_eq!((handle.state(), wakes.load(Ordering::Relaxed)), (state, 1));
        }
    }

    #[test]
    fn a_task_is_asked_back_once_and_not_when_it_has_ended() {
        let (shelf, handle, task, _) = begin();
        handle.cancel();
        handle.cancel();
        assert!(task.is_cancelled());
        assert_eq!(shelf.cancels.load(Ordering::Relaxed), 1);
        task.done();
        assert_eq!(handle.state(), ExternalState::Done, "to have ended before the request was seen is an end");
        let (shelf, handle, task, _) = begin();
        task.done();
        drop(handle);
        assert_eq!(shelf.cancels.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_is_abandoned_says_that_the_memory_stays_and_so_does_what_it_lies_in() {
        let shelf: Arc<Shelf> = Arc::default();
        let by: Arc<dyn External> = shelf.clone();
        let keeps = Arc::new(7);
        let alive = Arc::downgrade(&keeps);
        let handle =
            ExternalHandle::begin(&by, ExternalWork::CopyIn(ExternalCopies::default()), keeps, Arc::new(|| {}));
        assert!(handle.abandoned().is_none());
        let task = shelf.tasks.lock().unwrap().pop().unwrap();
        assert!(task.hold() && !task.hold());
        handle.cancel();
        assert!(!handle.is_away(), "it holds the memory");
        task.abandon(Error::device("it goes on for ever"));
        assert!(handle.is_away() && handle.abandoned().unwrap().message.contains("for ever"));
        let ExternalState::Failed(error) = handle.state() else { panic!("it is over") };
        assert!(error.context.must_leak_memory);
        drop(handle);
        assert!(alive.upgrade().is_some());
    }

    #[test]
    fn who_forgets_a_handle_asks_for_the_task_back() {
        let (_shelf, handle, task, _) = begin();
        drop(handle);
        assert!(task.is_cancelled());
    }
}

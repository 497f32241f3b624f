//! External operations: work on a call's memory that is done elsewhere, by a device, another library or a thread.
//!
//! The executor begins one when its operation is due, and goes on; it never waits for it. Whoever does the work has an
//! [`ExternalTask`], which is the right to touch the memory that it names. The end of the task sets a flag and wakes the driver, which
//! looks at the flag on its next pass. A call that fails meanwhile asks for the task back: it does not end, and its caller keeps the
//! memory, before the task has ended, or before the memory of its collective is back (`access`). Work that nothing can stop is abandoned: the
//! call ends, and its memory stays for as long as the process lives. Owns the task and its flag; when an operation is due is the matter of
//! `exec::run`, and how long a failed call waits that of `group::stopping`. Read [`External`] first.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use accl_types::{Collective, Dtype, Error, ErrorKind, Moment, Rank, ReduceOp};

use super::access::Access;
use super::tensor::{Blocks, TensorDesc};

/// Wakes whoever makes progress.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// Does external operations. The last reference to one may be dropped under the engine's lock: its `drop` must not wait for anybody.
pub trait External: Send + Sync + fmt::Debug {
    /// A name for messages, such as that of a device or library.
    fn name(&self) -> &str;

    /// Begins a task and returns. Runs under the engine's lock: it must neither block nor call the engine. The task may end before this
    /// returns.
    fn begin(&self, task: ExternalTask);

    /// Tasks are wanted back: those of which [`ExternalTask::is_cancelled`] says so. Runs under the engine's lock, as
    /// [`External::begin`]. For work that does not look at its task by itself.
    fn cancel(&self) {}
}

/// What goes from one tensor to another of the same dtype and number of elements.
#[derive(Clone, Debug)]
pub struct ExternalCopy {
    /// The source.
    pub from: TensorDesc,
    /// The destination.
    pub to: TensorDesc,
}

/// A collective that is done elsewhere as a whole. All ranks have made it: each has shown that its call is the same.
#[derive(Clone, Debug)]
pub struct ExternalCollective {
    /// What it does.
    pub collective: Collective,
    /// What its elements are; of a call that only moves data and mixes types, the first one's.
    pub dtype: Dtype,
    /// How it combines contributions.
    pub op: ReduceOp,
    /// Its root, if it has one.
    pub root: Rank,
    /// Its number in the group. A group begins its tasks in the order of their numbers, on all ranks.
    pub seq: u64,
    /// When it was made.
    pub started: Moment,
    /// Until when it should be done. Whoever does the task sees to that; the engine itself waits a little longer.
    pub deadline: Option<Moment>,
    /// What this rank contributes, dense, by block. What a call in place contributes is that of its outputs.
    pub inputs: Blocks,
    /// What this rank receives, dense, by block.
    pub outputs: Blocks,
}

/// What a task is about.
#[derive(Clone, Debug)]
pub(crate) enum ExternalWork {
    Copies(Vec<ExternalCopy>),
    Collective(Box<ExternalCollective>),
    /// The parts of the call that other lanes do.
    Parts,
}

const UNDER_WAY: u8 = 0;
const DONE: u8 = 1;
const FAILED: u8 = 2;
const PANICKED: &str = "it panicked when it was begun";

struct Shared {
    state: AtomicU8,
    /// Once it is wanted back, the task is cancelled.
    access: Access,
    /// Whoever began it has panicked: what it does is not to be trusted, and its end is awaited all the same.
    has_panicked: AtomicBool,
    why: OnceLock<Error>,
    wake: Wake,
}

/// One external operation that is under way. Whoever has it may touch the memory of its copies, and nobody else does; that of a collective
/// is touched through [`CollectiveMemory`](crate::memory::CollectiveMemory) alone. It is given back by [`ExternalTask::done`],
/// [`ExternalTask::fail`], or by dropping it, which is a failure unless it was cancelled.
pub struct ExternalTask {
    work: ExternalWork,
    shared: Arc<Shared>,
    /// Memory of the engine that lives as long as the task, whatever becomes of the call.
    _keeps: Arc<dyn Any + Send + Sync>,
}

impl ExternalTask {
    /// What is to be copied.
    pub fn copies(&self) -> &[ExternalCopy] {
        match &self.work {
            ExternalWork::Copies(copies) => copies,
            ExternalWork::Collective(_) | ExternalWork::Parts => &[],
        }
    }

    /// The collective that is to be done.
    pub fn collective(&self) -> Option<&ExternalCollective> {
        match &self.work {
            ExternalWork::Copies(_) | ExternalWork::Parts => None,
            ExternalWork::Collective(collective) => Some(collective),
        }
    }

    /// Whether the call has failed and wants its memory back: nothing that is written from here on is of use.
    pub fn is_cancelled(&self) -> bool {
        self.shared.access.is_wanted_back()
    }

    /// The right to touch the memory of the collective until it is dropped; `None` once the task is cancelled.
    pub(crate) fn touch(&self) -> Option<Touch<'_>> {
        self.shared.access.begin().then_some(Touch(&self.shared))
    }

    /// The right to touch the memory of the collective until the task ends, whatever becomes of the call; `false` once the task is cancelled.
    /// Nobody else may touch it meanwhile, as [`CollectiveMemory`](crate::memory::CollectiveMemory) would.
    pub fn hold(&self) -> bool {
        self.shared.access.begin()
    }

    /// All is written. The task's memory is touched no more.
    pub fn done(self) {
        self.end(DONE);
    }

    /// It cannot be done, for this reason. The task's memory is touched no more.
    pub fn fail(self, why: impl Into<String>) {
        self.fail_as(ErrorKind::Device, why);
    }

    /// As [`ExternalTask::fail`], for a reason of this kind.
    pub fn fail_as(self, kind: ErrorKind, why: impl Into<String>) {
        self.fail_with(Error::new(kind, why));
    }

    /// As [`ExternalTask::fail`], for an error that says more than its reason.
    pub fn fail_with(self, error: Error) {
        let _ = self.shared.why.set(error);
        self.end(FAILED);
    }

    /// It has failed or was cancelled, and nothing stops what still works on the memory that it [holds](ExternalTask::hold): the call ends,
    /// and the memory must stay for as long as the process lives, which the call's error says.
    pub fn abandon(self, error: Error) {
        let _ = self.shared.why.set(error.holding_memory());
        self.end(FAILED);
        // With it goes what the tensors lie in besides the caller's memory.
        std::mem::forget(self);
    }

    fn end(&self, state: u8) {
        // Release: whoever sees the end also sees what was written.
        self.shared.state.store(state, Ordering::Release);
        (self.shared.wake)();
    }
}

/// See [`ExternalTask::touch`].
pub(crate) struct Touch<'task>(&'task Shared);

impl Drop for Touch<'_> {
    fn drop(&mut self) {
        if self.0.access.end() {
            (self.0.wake)();
        }
    }
}

impl Drop for ExternalTask {
    fn drop(&mut self) {
        // Nobody else ends it: whoever has the task drops it.
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
    shared: Arc<Shared>,
    /// Its memory is touched by nobody who has not asked first.
    asks_first: bool,
}

/// What the flag of a task says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ExternalState {
    UnderWay,
    Done,
    /// For this reason.
    Failed(Error),
}

impl ExternalHandle {
    /// Begins a task. `keeps` is what its tensors lie in besides the memory of the caller.
    pub(crate) fn begin(
        by: &Arc<dyn External>,
        work: ExternalWork,
        keeps: Arc<dyn Any + Send + Sync>,
        wake: Wake,
    ) -> Self {
        let shared = Arc::new(Shared {
            state: AtomicU8::new(UNDER_WAY),
            access: Access::default(),
            has_panicked: AtomicBool::new(false),
            why: OnceLock::new(),
            wake,
        });
        // There before anybody else's code runs: whatever that does, the call does not end while the task is under way.
        let asks_first = matches!(work, ExternalWork::Collective(_));
        let handle = Self { by: by.clone(), shared: shared.clone(), asks_first };
        let task = ExternalTask { work, shared, _keeps: keeps };
        if catch_unwind(AssertUnwindSafe(|| by.begin(task))).is_err() {
            // The task may have been handed on before, and then its end is waited for.
            let _ = handle.shared.why.set(Error::device(PANICKED));
            handle.shared.has_panicked.store(true, Ordering::Relaxed);
        }
        handle
    }

    /// Whether it has ended.
    #[inline]
    pub(crate) fn has_ended(&self) -> bool {
        // Acquire: what the task has written is seen by whoever goes on.
        self.shared.state.load(Ordering::Acquire) != UNDER_WAY
    }

    pub(crate) fn state(&self) -> ExternalState {
        match self.shared.state.load(Ordering::Acquire) {
            UNDER_WAY => ExternalState::UnderWay,
            DONE if !self.shared.has_panicked.load(Ordering::Relaxed) => ExternalState::Done,
            _ => {
                let silent = || Error::device("it gave the task up without a word");
                ExternalState::Failed(self.shared.why.get().cloned().unwrap_or_else(silent))
            }
        }
    }

    /// Asks for the task back.
    pub(crate) fn cancel(&self) {
        if !self.has_ended() && self.shared.access.want_back() {
            // A panic is its own matter: the call waits for the task as if nobody had been asked.
            let _ = catch_unwind(AssertUnwindSafe(|| self.by.cancel()));
        }
    }

    /// Whether it touches no memory of the call, now and later: it has ended, or does no more than it has memory of its own for.
    pub(crate) fn is_away(&self) -> bool {
        self.has_ended() || self.asks_first && self.shared.access.is_back()
    }

    /// Why it was abandoned, if it was.
    pub(crate) fn abandoned(&self) -> Option<&Error> {
        self.shared.why.get().filter(|why| self.has_ended() && why.context.holds_memory)
    }

    /// Who does it.
    pub(crate) fn name(&self) -> &str {
        catch_unwind(AssertUnwindSafe(|| self.by.name())).unwrap_or("an operation whose name panics")
    }
}

impl Drop for ExternalHandle {
    /// Nobody waits for it any more.
    fn drop(&mut self) {
        self.cancel();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// Keeps its tasks.
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
        let handle = ExternalHandle::begin(&by, ExternalWork::Copies(Vec::new()), Arc::new(()), wake);
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
            (drop, failed(ErrorKind::Device, "it gave the task up without a word")),
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
        let handle = ExternalHandle::begin(&by, ExternalWork::Copies(Vec::new()), keeps, Arc::new(|| {}));
        assert!(handle.abandoned().is_none());
        let task = shelf.tasks.lock().unwrap().pop().unwrap();
        assert!(task.hold() && !task.hold());
        handle.cancel();
        assert!(!handle.is_away(), "it holds the memory");
        task.abandon(Error::device("it goes on for ever"));
        assert!(handle.is_away() && handle.abandoned().unwrap().message.contains("for ever"));
        let ExternalState::Failed(error) = handle.state() else { panic!("it is over") };
        assert!(error.context.holds_memory);
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

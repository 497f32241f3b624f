//! A call in flight as the shim holds it: an engine call, or a task that issues several calls.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use accl_engine::{Call, Engine, Phases, Waited as EngineWaited};
use accl_types::{Error, Result};
use cxx::UniquePtr;

use crate::bridge::ffi::{self, Numbered, Outcome, PhaseNanos, Status, Waited};
use crate::calls::millis;
use crate::guard::{FromError, bridged};

/// Interval at which a waiting thread checks for Python signals.
const SIGNAL_CHECK: Duration = Duration::from_millis(50);

/// Returned instead of nanoseconds if the call failed but its group did not.
const FAILED_ALONE: i64 = -2;

/// Pause before a completion task tries again.
const AGAIN: Duration = Duration::from_millis(2);

/// A call, empty until it is submitted.
#[derive(Default)]
pub struct Ticket {
    group: Option<Arc<accl_engine::Group>>,
    entry: Entry,
    /// The times of the call's phases, if requested.
    phases: Option<Arc<Phases>>,
}

#[derive(Default)]
enum Entry {
    #[default]
    None,
    Call(Call),
    Task(Arc<RunningTask>),
}

/// Returns an empty ticket.
pub(crate) fn new_ticket() -> Box<Ticket> {
    Box::default()
}

impl Ticket {
    /// Fills the ticket with an engine call.
    pub(crate) fn set_call(&mut self, group: Arc<accl_engine::Group>, call: Call, phases: Option<Arc<Phases>>) {
        self.group = Some(group);
        self.entry = Entry::Call(call);
        self.phases = phases;
    }

    /// Fills the ticket with a task and runs the task on a completion thread.
    pub(crate) fn spawn(
        &mut self,
        engine: &Arc<Engine>,
        group: Arc<accl_engine::Group>,
        task: UniquePtr<ffi::Task>,
    ) -> Result<()> {
        let running =
            Arc::new(RunningTask { state: Mutex::default(), changed: Condvar::new(), engine: engine.clone() });
        let finisher = Finisher { task: running.clone(), status: None };
        engine.spawn_blocking(Box::new(move || {
            let mut task = task;
            let status = task.pin_mut().run();
            // Before this one ends, so that no native thread holds its tensors then.
            drop(task);
            finisher.end(status);
        }))?;
        self.group = Some(group);
        self.entry = Entry::Task(running);
        Ok(())
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // C++ destroys tickets outside any guard, and a panic must not reach C++.
        let entry = std::mem::take(&mut self.entry);
        let group = self.group.take();
        let _ = catch_unwind(AssertUnwindSafe(move || drop((entry, group))));
    }
}

/// Runs a completion task, on a completion thread, until it is finished.
fn run_completion(mut task: UniquePtr<ffi::CompletionTask>) {
    while !task.pin_mut().run() {
        std::thread::sleep(AGAIN);
    }
}

/// A task in flight.
struct RunningTask {
    state: Mutex<TaskState>,
    changed: Condvar,
    engine: Arc<Engine>,
}

#[derive(Default)]
struct TaskState {
    ended: Option<Result<()>>,
    callback: Option<UniquePtr<ffi::CompletionTask>>,
}

impl RunningTask {
    fn lock(&self) -> MutexGuard<'_, TaskState> {
        // The state is plain data and consistent at every step, so a panic of an earlier holder does not matter.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn outcome(&self) -> Option<Result<()>> {
        self.lock().ended.clone()
    }

    fn wait(&self, timeout: Option<Duration>) -> Waited {
        let start = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(ended) = &state.ended {
                return ended_as_waited(ended.clone());
            }
            let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
            if left == Some(Duration::ZERO) {
                let error = Error::timeout(format!(
                    "Timed out waiting {}ms for sparse all_reduce",
                    start.elapsed().as_millis()
                ));
                return Waited { how: Outcome::Running, status: Status::from_error(error) };
            }
            let pause = left.unwrap_or(SIGNAL_CHECK).min(SIGNAL_CHECK);
            state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
            drop(state);
            if ffi::python_interrupted() {
                return Waited::interrupted();
            }
            state = self.lock();
        }
    }
}

/// Ends a task on every path, including a panic or an engine that drops it without running it.
struct Finisher {
    task: Arc<RunningTask>,
    status: Option<Status>,
}

impl Finisher {
    fn end(mut self, status: Status) {
        self.status = Some(status);
    }
}

impl Drop for Finisher {
    fn drop(&mut self) {
        let ended = match self.status.take() {
            Some(status) => status.to_error().map_or(Ok(()), Err),
            None => Err(Error::aborted("the engine was shut down before the call ran")),
        };
        let mut state = self.task.lock();
        state.ended = Some(ended);
        let callback = state.callback.take();
        drop(state);
        self.task.changed.notify_all();
        if let Some(task) = callback {
            // This is a completion thread, so one exists; an engine that has shut down runs nothing more.
            let _ = self.task.engine.spawn_blocking(Box::new(move || run_completion(task)));
        }
    }
}

fn ended_as_waited(ended: Result<()>) -> Waited {
    match ended {
        Ok(()) => Waited::plain(Outcome::Done),
        Err(error) => Waited { how: Outcome::Failed, status: Status::from_error(error) },
    }
}

/// The outcome of a call that has ended or still runs, without its error.
fn done(is_done: bool) -> Waited {
    Waited::plain(if is_done { Outcome::Done } else { Outcome::Running })
}

/// Nanoseconds from submission to the last byte, or -1 if they were not recorded.
fn nanos(entry: &Entry) -> i64 {
    let duration = match entry {
        Entry::Call(call) => call.duration(),
        Entry::None | Entry::Task(_) => None,
    };
    duration.map_or(-1, |duration| i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX))
}

fn empty() -> Error {
    Error::internal("a call was used before it was submitted")
}

bridged! {
    /// Whether the call has ended, with or without an error. Does not block and makes no progress.
    fn ticket_done(ticket: &Ticket) -> Waited {
        match &ticket.entry {
            Entry::None => Err(empty()),
            Entry::Call(call) => Ok(done(call.is_done())),
            Entry::Task(task) => Ok(done(task.outcome().is_some())),
        }
    }

    /// Makes one progress pass, then returns whether the call has ended.
    fn ticket_poll(ticket: &Ticket) -> Waited {
        match &ticket.entry {
            Entry::None => Err(empty()),
            Entry::Call(call) => Ok(done(call.test())),
            Entry::Task(task) => Ok(done(task.outcome().is_some())),
        }
    }

    /// Waits; a negative timeout means the call's own timeout. Python's signal handlers run meanwhile.
    fn ticket_wait(ticket: &Ticket, timeout_ms: i64) -> Waited {
        match &ticket.entry {
            Entry::None => Err(empty()),
            Entry::Call(call) => Ok(match call.wait(millis(timeout_ms), &mut ffi::python_interrupted) {
                EngineWaited::Done => Waited::plain(Outcome::Done),
                EngineWaited::Failed(error) => Waited { how: Outcome::Failed, status: Status::from_error(error) },
                EngineWaited::TimedOut(error) => Waited { how: Outcome::Running, status: Status::from_error(error) },
                EngineWaited::Interrupted => Waited::interrupted(),
            }),
            Entry::Task(task) => Ok(task.wait(millis(timeout_ms))),
        }
    }

    /// The error of a call that failed.
    fn ticket_error(ticket: &Ticket) -> Status {
        let error = match &ticket.entry {
            Entry::None => return Err(empty()),
            Entry::Call(call) => call.error(),
            Entry::Task(task) => task.outcome().and_then(Result::err),
        };
        Ok(error.map_or_else(Status::ok, Status::from_error))
    }

    /// Whether the memory of the call's tensors must be kept after the call is dropped. That is so if the call has not
    /// ended, or if its error says so. This status reports nothing else.
    fn ticket_held(ticket: &Ticket) -> Status {
        let must_leak_memory = match &ticket.entry {
            Entry::None | Entry::Task(_) => false,
            Entry::Call(call) => !call.is_done() || call.error().is_some_and(|error| error.context.must_leak_memory),
        };
        Ok(Status { must_leak_memory, ..Status::ok() })
    }

    /// The report about an ended call for hooks: its nanoseconds, or -1 if they were not recorded. Returns -2 if the
    /// call failed but its group did not, and the group's error if the group failed.
    fn ticket_report(ticket: &Ticket) -> Numbered {
        let failed = match &ticket.entry {
            Entry::None => return Ok(Numbered::of(FAILED_ALONE)),
            Entry::Call(call) => call.error().is_some(),
            Entry::Task(task) => task.outcome().is_some_and(|ended| ended.is_err()),
        };
        if failed {
            return ticket.group.as_ref().and_then(|group| group.error()).map_or(Ok(Numbered::of(FAILED_ALONE)), Err);
        }
        Ok(Numbered::of(nanos(&ticket.entry)))
    }

    /// Aborts the call's group.
    fn ticket_abort(ticket: &Ticket, reason: &str) -> Status {
        ticket.group.as_ref().ok_or_else(empty)?.abort(reason);
        Ok(Status::ok())
    }

    /// The call's sequence number in its group.
    fn ticket_seq(ticket: &Ticket) -> Numbered {
        match &ticket.entry {
            Entry::None => Err(empty()),
            Entry::Call(call) => Ok(Numbered::of(call.seq() as i64)),
            Entry::Task(_) => Ok(Numbered::of(-1)),
        }
    }

    /// The rank that a receive's data came from, or -1.
    fn ticket_source(ticket: &Ticket) -> Numbered {
        match &ticket.entry {
            Entry::None => Err(empty()),
            Entry::Call(call) => Ok(Numbered::of(call.source_rank().map_or(-1, |rank| i64::from(rank.0)))),
            Entry::Task(_) => Ok(Numbered::of(-1)),
        }
    }

    /// Nanoseconds from submission to the last byte, or -1 if they were not recorded.
    fn ticket_nanos(ticket: &Ticket) -> Numbered {
        match &ticket.entry {
            Entry::None => Err(empty()),
            entry @ (Entry::Call(_) | Entry::Task(_)) => Ok(Numbered::of(nanos(entry))),
        }
    }

    /// The times of the phases of an ended call, if its arguments requested them.
    fn ticket_phases(ticket: &Ticket) -> PhaseNanos {
        Ok(PhaseNanos::of(ticket.phases.as_deref()))
    }

    /// Makes a completion thread run a task once the call has completed, also if its waiters continue before.
    fn ticket_when_through(ticket: &Ticket, task: UniquePtr<ffi::CompletionTask>) -> Status {
        match &ticket.entry {
            Entry::None | Entry::Task(_) => return Err(empty()),
            Entry::Call(call) => call.when_through(Box::new(move || run_completion(task)))?,
        }
        Ok(Status::ok())
    }

    /// Makes a completion thread complete the call once it has ended.
    fn ticket_when_done(ticket: &Ticket, task: UniquePtr<ffi::CompletionTask>) -> Status {
        match &ticket.entry {
            Entry::None => return Err(empty()),
            Entry::Call(call) => call.when_done(Box::new(move || run_completion(task)))?,
            Entry::Task(running) => {
                let mut state = running.lock();
                if state.ended.is_none() {
                    state.callback = Some(task);
                } else {
                    drop(state);
                    running.engine.spawn_blocking(Box::new(move || run_completion(task)))?;
                }
            }
        }
        Ok(Status::ok())
    }
}

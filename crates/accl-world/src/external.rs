//! A stand-in for the external operations of a simulated world: it copies after random delays, or breaks.
//!
//! Owns the tasks in flight. A task writes once when it begins and once when it ends. A write to memory that was
//! released too early is therefore detected. Read [`ExternalTasks::turn`] first.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use accl_testkit::Rng;

use super::clock::{Agenda, Event};
use super::scenario::Breaks;
use accl_engine::sync::Mutex;
use accl_executor::call::{External, ExternalCopy, ExternalTask};

/// Maximum nanoseconds that a task takes.
const MOST: u64 = 300_000;
/// Maximum nanoseconds until a task that was asked to stop does so.
const MOST_STOPPING: u64 = 400_000;

/// Tasks of all processes.
#[derive(Default)]
pub(super) struct ExternalTasks {
    tasks: BTreeMap<u64, Running>,
    begun: u64,
}

struct Running {
    task: ExternalTask,
    breaks: Option<Breaks>,
    /// The task was asked to stop, and an event at which it stops is on the agenda.
    stops: bool,
}

/// Runs the external operations of one call.
pub(super) struct Device {
    external_tasks: Arc<Mutex<ExternalTasks>>,
    agenda: Arc<Mutex<Agenda>>,
    process: usize,
    breaks: Option<Breaks>,
    rng: Mutex<Rng>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device of process {}", self.process)
    }
}

impl Device {
    pub(super) fn new(
        external_tasks: &Arc<Mutex<ExternalTasks>>,
        agenda: &Arc<Mutex<Agenda>>,
        process: usize,
        breaks: Option<Breaks>,
        seed: u64,
    ) -> Self {
        let rng = Mutex::new(Rng::new(seed));
        Self { external_tasks: external_tasks.clone(), agenda: agenda.clone(), process, breaks, rng }
    }

    fn below(&self, bound: u64) -> u64 {
        self.rng.lock().below(bound)
    }
}

impl External for Device {
    fn name(&self) -> &str {
        "simulated"
    }

    fn begin(&self, task: ExternalTask) {
        if self.breaks.is_none() && self.below(4) == 0 {
            write(task.copies(), Half::Both);
            return task.done();
        }
        write(task.copies(), Half::First);
        let mut external_tasks = self.external_tasks.lock();
        let number = external_tasks.begun;
        external_tasks.begun += 1;
        external_tasks.tasks.insert(number, Running { task, breaks: self.breaks, stops: false });
        match self.breaks {
            None | Some(Breaks::Fails | Breaks::Drops) => {
                let wait = self.below(MOST);
                self.agenda.lock().enter(wait, Event::External { process: self.process, task: number });
            }
            // The task waits until it is asked to stop.
            Some(Breaks::Hangs | Breaks::AllHang | Breaks::NeverStops) => {}
        }
    }

    fn cancel(&self) {
        for (&number, running) in &mut self.external_tasks.lock().tasks {
            if !running.task.is_cancelled() || running.breaks == Some(Breaks::NeverStops) || running.stops {
                continue;
            }
            running.stops = true;
            let wait = self.below(MOST_STOPPING);
            self.agenda.lock().enter(wait, Event::External { process: self.process, task: number });
        }
    }
}

impl ExternalTasks {
    /// Handles an [`Event::External`]: the task ends. The task of a dead process writes nothing.
    pub(super) fn turn(this: &Mutex<Self>, number: u64, is_alive: bool) {
        let Some(Running { task, breaks, .. }) = this.lock().tasks.remove(&number) else { return };
        if !is_alive {
            return;
        }
        write(task.copies(), Half::Second);
        // A task that was asked to stop may complete before it notices.
        match breaks {
            None => task.done(),
            Some(Breaks::Fails) => task.fail("the world wants it"),
            Some(Breaks::Drops | Breaks::Hangs | Breaks::AllHang | Breaks::NeverStops) => drop(task),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Half {
    First,
    Second,
    Both,
}

fn write(copies: &[ExternalCopy], half: Half) {
    for ExternalCopy { from, to } in copies {
        let len = to.len_bytes() as usize;
        let range = match half {
            Half::First => 0..len / 2,
            Half::Second => len / 2..len,
            Half::Both => 0..len,
        };
        // SAFETY: both tensors are dense and have `len` bytes, and only this task may access them until it ends.
        unsafe {
            let (source, target) = (from.address().add(range.start), to.address().add(range.start));
            std::ptr::copy(source, target, range.len());
        }
    }
}

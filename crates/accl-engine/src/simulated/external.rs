//! A stand-in for what does external operations in a simulated world: it copies, at moments of its own, or does not.
//!
//! Owns the tasks that are under way. A task writes when it begins and when it ends, so that memory which was given back too early is
//! seen to be written. Read [`Elsewhere::turn`] first.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use accl_testkit::Rng;

use super::clock::{Agenda, Event};
use super::scenario::Breaks;
use crate::sync::Mutex;
use accl_executor::call::{External, ExternalCopy, ExternalTask};

/// A task takes up to so many nanoseconds.
const MOST: u64 = 300_000;
/// Until one that is asked to stop does so, at most.
const MOST_STOPPING: u64 = 400_000;

/// The tasks of all processes.
#[derive(Default)]
pub(super) struct Elsewhere {
    tasks: BTreeMap<u64, Running>,
    begun: u64,
}

struct Running {
    task: ExternalTask,
    breaks: Option<Breaks>,
    /// It is asked to stop, and has a turn for that.
    stops: bool,
}

/// What one call has its external operations done by.
pub(super) struct Device {
    elsewhere: Arc<Mutex<Elsewhere>>,
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
        elsewhere: &Arc<Mutex<Elsewhere>>,
        agenda: &Arc<Mutex<Agenda>>,
        process: usize,
        breaks: Option<Breaks>,
        seed: u64,
    ) -> Self {
        let rng = Mutex::new(Rng::new(seed));
        Self { elsewhere: elsewhere.clone(), agenda: agenda.clone(), process, breaks, rng }
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
        let mut elsewhere = self.elsewhere.lock();
        let number = elsewhere.begun;
        elsewhere.begun += 1;
        elsewhere.tasks.insert(number, Running { task, breaks: self.breaks, stops: false });
        match self.breaks {
            None | Some(Breaks::Fails | Breaks::Drops) => {
                let wait = self.below(MOST);
                self.agenda.lock().enter(wait, Event::External { process: self.process, task: number });
            }
            // It waits until it is asked to stop.
            Some(Breaks::Hangs | Breaks::AllHang | Breaks::NeverStops) => {}
        }
    }

    fn cancel(&self) {
        for (&number, running) in &mut self.elsewhere.lock().tasks {
            if !running.task.is_cancelled() || running.breaks == Some(Breaks::NeverStops) || running.stops {
                continue;
            }
            running.stops = true;
            let wait = self.below(MOST_STOPPING);
            self.agenda.lock().enter(wait, Event::External { process: self.process, task: number });
        }
    }
}

impl Elsewhere {
    /// A task's turn has come; of a process that is dead it writes nothing.
    pub(super) fn turn(this: &Mutex<Self>, number: u64, is_alive: bool) {
        let Some(Running { task, breaks, .. }) = this.lock().tasks.remove(&number) else { return };
        if !is_alive {
            return;
        }
        write(task.copies(), Half::Second);
        // One that is asked to stop may be done before it has heard of it.
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
        // SAFETY: both tensors are dense and of this length, and this task alone may touch them until it ends.
        unsafe {
            let (source, target) = (from.address().add(range.start), to.address().add(range.start));
            std::ptr::copy(source, target, range.len());
        }
    }
}

//! The virtual clock of a simulated world, and the agenda of its events.
//!
//! Owns time and the order of events. Events of one moment happen in the order in which they were entered. Read
//! [`Agenda`] first.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use accl_types::Moment;

/// Nanoseconds that pass while a waiting thread polls a link once and yields its core.
const YIELD: u64 = 500;

thread_local! {
    static NOW: Cell<u64> = const { Cell::new(0) };
}

/// Current time of the world that this thread simulates.
pub(super) fn now() -> Moment {
    Moment::from_nanos(nanos())
}

/// Nanoseconds since the beginning of the world.
pub(super) fn nanos() -> u64 {
    NOW.get()
}

/// Sets the clock to 0 for a new world.
pub(super) fn reset() {
    NOW.set(0);
}

/// Advances the clock to at least `nanos`.
pub(super) fn reach(nanos: u64) {
    NOW.set(NOW.get().max(nanos));
}

/// Lets time pass while a thread waits for a frame on the fast path.
pub(super) fn yield_now() {
    reach(nanos() + YIELD);
}

/// An entry of the [`Agenda`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// A thread continues its program.
    Run { process: usize, thread: usize },
    /// A thread of the process becomes the progress driver.
    Drive { process: usize },
    /// The process is woken if it sleeps in the poller.
    Ring { process: usize },
    /// The deadline of a sleep in the poller has passed.
    TimeIsUp { process: usize, sleep: u64 },
    /// A frame or a notification reaches one end of a wire.
    Arrive { wire: usize, end: usize, is_quiet: bool },
    /// One end of a wire learns that the other end is closed.
    Ended { wire: usize, end: usize, process: usize },
    /// A timed fault of the scenario occurs.
    Fault { index: usize },
    /// A lane runs a job that was given to it.
    Job { index: usize },
    /// A lane learns that a group has failed on another lane.
    Failed { index: usize },
    /// A process tries to create a link.
    Dial { wire: usize, process: usize },
    /// One end of a wire becomes a link of its process.
    Attach { wire: usize, end: usize },
    /// A process learns that another process cannot be reached.
    Refused { process: usize, peer: usize },
    /// A note is to be delivered.
    Note { index: usize },
    /// An external operation of a process ends.
    External { process: usize, task: u64 },
    /// A task of a rank's device ends.
    Device { group: usize, rank: usize, job: u64 },
    /// The deadline of a task of a rank's device has passed.
    DeviceIsLate { group: usize, rank: usize, job: u64 },
    /// A process asks others about peers that it cannot reach, if that is due.
    Inquire { process: usize },
    /// A question reaches the process that is asked.
    Question { index: usize },
    /// The answer reaches the process that asked.
    Answer { index: usize },
}

impl Event {
    /// Whether only the passing of time causes this event.
    fn is_deadline(&self) -> bool {
        matches!(self, Event::TimeIsUp { .. } | Event::DeviceIsLate { .. })
    }
}

/// Future events, ordered by time.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    entered: u64,
    /// Number of entries that are not deadlines. While it is not 0, the world makes progress without a timer.
    busy: usize,
}

impl Agenda {
    /// Enters an event that happens `wait` nanoseconds from now.
    pub(super) fn enter(&mut self, wait: u64, event: Event) {
        self.enter_at(nanos().saturating_add(wait), event);
    }

    /// Enters an event that happens `at` nanoseconds after the beginning of the world.
    pub(super) fn enter_at(&mut self, at: u64, event: Event) {
        self.busy += usize::from(!event.is_deadline());
        self.events.push(Reverse((at, self.entered, event)));
        self.entered += 1;
    }

    /// Removes the next event and advances the clock to its time.
    pub(super) fn next(&mut self) -> Option<Event> {
        let Reverse((at, _, event)) = self.events.pop()?;
        self.busy -= usize::from(!event.is_deadline());
        reach(at);
        Some(event)
    }

    /// Whether only deadlines are left.
    pub(super) fn is_quiet(&self) -> bool {
        self.busy == 0
    }
}

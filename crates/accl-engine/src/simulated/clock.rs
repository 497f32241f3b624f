//! The virtual clock of a simulated world, and what is to happen in it when.
//!
//! Owns time and the order of events: those of one moment happen in the order in which they were entered. Read [`Agenda`] first.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use accl_types::Moment;

/// What a look at a link costs a thread that gives its core away, in nanoseconds.
const YIELD: u64 = 500;

thread_local! {
    static NOW: Cell<u64> = const { Cell::new(0) };
}

/// Now, in the world that this thread simulates.
pub(super) fn now() -> Moment {
    Moment::from_nanos(nanos())
}

/// As [`now`], in nanoseconds since the beginning of the world.
pub(super) fn nanos() -> u64 {
    NOW.get()
}

/// A new world begins.
pub(super) fn reset() {
    NOW.set(0);
}

/// It is at least so late.
pub(super) fn reach(nanos: u64) {
    NOW.set(NOW.get().max(nanos));
}

/// Time passes while a thread waits for a frame on the fast path.
pub(super) fn yield_now() {
    reach(nanos() + YIELD);
}

/// What happens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Event {
    /// A thread goes on.
    Run { process: usize, thread: usize },
    /// Somebody in the process takes over the driving.
    Drive { process: usize },
    /// Something came up for which the process would be woken.
    Ring { process: usize },
    /// The time of a sleep in the poller is up.
    TimeIsUp { process: usize, sleep: u64 },
    /// Something reaches one end of a wire.
    Arrive { wire: usize, end: usize, is_quiet: bool },
    /// One end of a wire learns that the other is closed.
    Ended { wire: usize, end: usize, process: usize },
    /// Something goes wrong.
    Fault { index: usize },
    /// A lane does something that it was given.
    Job { index: usize },
    /// A lane learns that a group has failed on another one.
    Failed { index: usize },
    /// A process tries to make a link.
    Dial { wire: usize, process: usize },
    /// One end of a wire becomes a link of its process.
    Attach { wire: usize, end: usize },
    /// A process learns that another cannot be reached.
    Refused { process: usize, peer: usize },
    /// A note is due.
    Note { index: usize },
    /// An external operation of a process goes on.
    External { process: usize, task: u64 },
    /// A task of a rank's device goes on.
    Device { group: usize, rank: usize, job: u64 },
    /// The deadline of a task of a rank's device has come.
    DeviceIsLate { group: usize, rank: usize, job: u64 },
    /// A process asks others what has become of one, if it is time for that.
    Inquire { process: usize },
    /// A question comes to whom it is asked.
    Question { index: usize },
    /// The answer comes back.
    Answer { index: usize },
}

impl Event {
    /// Whether it comes of nothing but time.
    fn is_deadline(&self) -> bool {
        matches!(self, Event::TimeIsUp { .. } | Event::DeviceIsLate { .. })
    }
}

/// What is to happen when.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    entered: u64,
    /// Entries that are no deadlines: while there are any, the world moves by itself.
    busy: usize,
}

impl Agenda {
    /// Enters an event for so many nanoseconds from now.
    pub(super) fn enter(&mut self, wait: u64, event: Event) {
        self.enter_at(nanos().saturating_add(wait), event);
    }

    /// As [`Agenda::enter`], at a moment.
    pub(super) fn enter_at(&mut self, at: u64, event: Event) {
        self.busy += usize::from(!event.is_deadline());
        self.events.push(Reverse((at, self.entered, event)));
        self.entered += 1;
    }

    /// The next event; the clock is there.
    pub(super) fn next(&mut self) -> Option<Event> {
        let Reverse((at, _, event)) = self.events.pop()?;
        self.busy -= usize::from(!event.is_deadline());
        reach(at);
        Some(event)
    }

    /// Whether nothing will happen but that deadlines pass.
    pub(super) fn is_quiet(&self) -> bool {
        self.busy == 0
    }
}

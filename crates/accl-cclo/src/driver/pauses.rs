//! The pauses of whoever waits for a call that sets something.
//!
//! Owns how long they are: they grow, so that what takes microseconds is seen at once, and what waits for other ranks costs no core. Those between
//! looks at a collective are its host's. Read [`Pauses::next_pause`] first.

use std::time::{Duration, Instant};

const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// The pauses of a wait.
pub(super) struct Pauses {
    begin: Instant,
    next: Duration,
}

impl Pauses {
    /// The wait begins.
    pub(super) fn begin() -> Self {
        Self { begin: Instant::now(), next: SHORTEST }
    }

    /// The next one, at most.
    pub(super) fn next_pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(LONGEST);
        pause
    }

    /// How long it has taken.
    pub(super) fn took(&self) -> Duration {
        self.begin.elapsed()
    }
}

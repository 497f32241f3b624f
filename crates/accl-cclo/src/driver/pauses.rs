//! Pauses between polls of a call.
//!
//! Owns the length of the pauses. They grow, so that a short call is noticed at once and a long wait uses little CPU time. The caller limits the
//! total wait. Read [`Pauses::next_pause`] first.

use std::time::Duration;

const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// Pauses of one wait.
#[derive(Debug)]
pub struct Pauses(Duration);

impl Default for Pauses {
    /// Starts a wait with the shortest pause.
    fn default() -> Self {
        Self(SHORTEST)
    }
}

impl Pauses {
    /// Returns the next pause. The caller may sleep for less.
    pub fn next_pause(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(LONGEST);
        pause
    }
}

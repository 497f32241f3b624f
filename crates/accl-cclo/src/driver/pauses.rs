//! The pauses between looks at a call.
//!
//! Owns how long they are: they grow, so that what takes microseconds is seen at once, and what takes long costs no core. How long anybody waits in
//! all is not known here. Read [`Pauses::next_pause`] first.

use std::time::Duration;

const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST: Duration = Duration::from_millis(1);

/// The pauses of a wait.
#[derive(Debug)]
pub struct Pauses(Duration);

impl Default for Pauses {
    /// The wait begins.
    fn default() -> Self {
        Self(SHORTEST)
    }
}

impl Pauses {
    /// The next one, at most.
    pub fn next_pause(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(LONGEST);
        pause
    }
}

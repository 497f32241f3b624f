//! When a call may begin while earlier ones are in flight.
//!
//! A call begins once the earlier ones have little left to do: their tensors share the cache then, and none of them waits for the
//! others' turns. Owns that limit, and the moment from which on nobody waits any more. Read [`Admission`] first.

use std::time::Duration;

use accl_types::Moment;

/// How much earlier calls may have left, in bytes of all their operations. Within a host the links need no more to be busy; between
/// hosts a lot must be under way.
const INTRA_NODE: u64 = 64 << 10;
const INTER_NODE: u64 = 8 << 20;
/// A call begins anyway when the group has stood still for so long: another rank may wait for it first.
const STANDSTILL: Duration = Duration::from_millis(1);

/// What one group knows of its own progress.
#[derive(Default)]
pub(super) struct Admission {
    moved_at: Moment,
    /// A call has yet to begin.
    withholds: bool,
}

impl Admission {
    /// A call in flight has moved, or the first is there.
    pub(super) fn note_move(&mut self, now: Moment) {
        self.moved_at = now;
    }

    /// How much the calls in flight may have left to do while others begin.
    pub(super) fn limit(&self, now: Moment, is_intra_node: bool) -> u64 {
        match is_intra_node {
            _ if now >= self.moved_at + STANDSTILL => u64::MAX,
            true => INTRA_NODE,
            false => INTER_NODE,
        }
    }

    /// Whether a call was found that may not begin yet, in the pass that is over.
    pub(super) fn set_withholds(&mut self, withholds: bool) {
        self.withholds = withholds;
    }

    /// When calls that may not begin yet do so at the latest.
    pub(super) fn begin_by(&self) -> Option<Moment> {
        self.withholds.then(|| self.moved_at + STANDSTILL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_is_withheld_begins_when_the_group_stands_still() {
        let mut admission = Admission::default();
        let start = Moment::from_nanos(5_000_000);
        admission.note_move(start);
        assert_eq!(admission.begin_by(), None);
        admission.set_withholds(true);
        let until = start + STANDSTILL;
        assert_eq!(admission.begin_by(), Some(until));
        assert_eq!(admission.limit(start, true), INTRA_NODE);
        assert_eq!(admission.limit(start, false), INTER_NODE);
        assert_eq!(admission.limit(until, true), u64::MAX);
        // Progress puts it off.
        admission.note_move(until);
        assert_eq!(admission.limit(until, false), INTER_NODE);
    }
}

//! Decides when a call may begin while earlier calls are in flight.
//!
//! A call begins once the earlier calls have little left to do. Their tensors then share the cache, and no call waits
//! for the turns of the others. This module owns that limit, and the time after which no call is held back. Read
//! [`Admission`] first.

use std::time::Duration;

use accl_types::Moment;

/// Maximum remaining work of earlier calls, in bytes of all their operations. Within a host, the links need no more to
/// be busy. Between hosts, much more must be in flight.
const INTRA_NODE: u64 = 64 << 10;
const INTER_NODE: u64 = 8 << 20;
/// Time without progress in the group after which a held-back call begins anyway, because another rank may wait for it
/// first.
const STANDSTILL: Duration = Duration::from_millis(1);

/// Progress record of one group.
#[derive(Default)]
pub(super) struct Admission {
    moved_at: Moment,
    /// Whether a call is held back.
    withholds: bool,
}

impl Admission {
    /// Records that a call in flight has made progress, or that the first call was added.
    pub(super) fn note_move(&mut self, now: Moment) {
        self.moved_at = now;
    }

    /// Returns the maximum remaining work, in bytes, of the calls in flight with which another call may begin.
    pub(super) fn limit(&self, now: Moment, is_intra_node: bool) -> u64 {
        match is_intra_node {
            _ if now >= self.moved_at + STANDSTILL => u64::MAX,
            true => INTRA_NODE,
            false => INTER_NODE,
        }
    }

    /// Records whether the last pass found a call that may not begin yet.
    pub(super) fn set_withholds(&mut self, withholds: bool) {
        self.withholds = withholds;
    }

    /// Returns the time by which calls that are held back begin at the latest; `None` if there are none.
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
        // Progress postpones the time.
        admission.note_move(until);
        assert_eq!(admission.limit(until, false), INTER_NODE);
    }
}

//! Groups that have ended on this rank, to answer peers that still refer to them.
//!
//! This module limits how many are remembered, because a process may create any number of groups. Read [`Ended`] first.

use std::collections::{HashMap, VecDeque};

/// Maximum number of groups that are remembered. A frame of an older group is kept as a frame of a future group. The
/// memory of such frames is limited as well.
const MOST: usize = 1 << 16;

/// The latest groups that this rank left or gave up.
#[derive(Default)]
pub(super) struct Ended {
    order: VecDeque<u64>,
    /// Ended groups, with the cause if they failed, as the payload of a frame.
    groups: HashMap<u64, Option<Box<[u8]>>>,
}

impl Ended {
    /// Adds a group that has ended. `cause` is the cause of its failure, as the payload of a frame; `None` if it had
    /// not failed.
    pub(super) fn add(&mut self, group: u64, cause: Option<Box<[u8]>>) {
        if self.groups.insert(group, cause).is_some() {
            return;
        }
        self.order.push_back(group);
        if self.order.len() > MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.groups.remove(&oldest);
        }
    }

    pub(super) fn contains(&self, group: u64) -> bool {
        self.groups.contains_key(&group)
    }

    /// Returns the cause of a group that has ended; the inner `None` means that it had not failed. Returns `None` if
    /// the group has not ended, or is too old.
    pub(super) fn cause(&self, group: u64) -> Option<Option<&[u8]>> {
        self.groups.get(&group).map(Option::as_deref)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_are_remembered_and_no_more() {
        let mut ended = Ended::default();
        let most = MOST as u64;
        (0..most).chain([0, 1]).for_each(|group| ended.add(group, None));
        assert!(ended.contains(0) && ended.contains(most - 1));
        ended.add(most, Some(Box::new([7])));
        assert!(!ended.contains(0) && ended.contains(1));
        assert_eq!((ended.cause(0), ended.cause(1), ended.cause(most)), (None, Some(None), Some(Some(&[7][..]))));
        assert_eq!((ended.order.len(), ended.groups.len()), (MOST, MOST));
    }
}

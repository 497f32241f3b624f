//! Groups that have ended here, for whoever still speaks of them.
//!
//! Owns how many are remembered: a process may make groups without end. Read [`Ended`] first.

use std::collections::{HashMap, VecDeque};

/// How many are remembered. A frame of one that ended before so many others is kept as one of a group that is yet to come, of
/// which there is a limit, too.
const MOST: usize = 1 << 16;

/// The latest groups that were left or given up here.
#[derive(Default)]
pub(super) struct Ended {
    order: VecDeque<u64>,
    /// With why it had failed, if it had, as the payload of a frame.
    groups: HashMap<u64, Option<Box<[u8]>>>,
}

impl Ended {
    /// A group has ended; the cause is that of its failure, as the payload of a frame.
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

    /// The cause of a group that has ended, if it had failed. `None`: it has not ended, or not lately.
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

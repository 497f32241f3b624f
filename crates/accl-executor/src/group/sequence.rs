//! The numbers of a group's collectives: which is next, which are promised, and what must be over before a barrier is.
//!
//! Owns the numbering; ranks make the same calls in the same order, so equal numbers are the same call. Read [`Sequence`] first.

use std::collections::BTreeSet;
use std::ops::Range;

use accl_types::{Error, Result};

/// The numbers of one group's collectives.
#[derive(Default)]
pub(super) struct Sequence {
    next: u64,
    /// Promised to calls that are made later.
    reserved: BTreeSet<u64>,
    /// First numbers of operations of several calls that have not been concluded.
    composed: BTreeSet<u64>,
}

impl Sequence {
    /// The number of the next call that has none reserved.
    #[inline]
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// The number of a call that is made now.
    #[inline]
    pub(super) fn take(&mut self) -> u64 {
        self.next += 1;
        self.next - 1
    }

    /// The number of a call that was promised it.
    ///
    /// # Errors
    /// `Internal` when it was not, or has been taken.
    pub(super) fn take_reserved(&mut self, seq: u64) -> Result<u64> {
        let was_reserved = self.reserved.remove(&seq);
        was_reserved.then_some(seq).ok_or_else(|| Error::internal(format!("call number {seq} was not reserved")))
    }

    /// Promises `count` numbers to the calls of one operation, and returns the first.
    pub(super) fn reserve(&mut self, count: u64) -> u64 {
        let first = self.next;
        self.next += count;
        self.reserved.extend(first..self.next);
        self.composed.insert(first);
        first
    }

    /// The operation that these numbers were reserved for is over; with `gives_up` it makes no more of its calls. Returns the first
    /// number that stays unused then.
    pub(super) fn conclude(&mut self, seqs: Range<u64>, gives_up: bool) -> Option<u64> {
        self.composed.remove(&seqs.start);
        if !gives_up {
            return None;
        }
        let first = self.reserved.range(seqs.clone()).next().copied();
        self.reserved.retain(|seq| !seqs.contains(seq));
        first
    }

    /// Whether the call has yet to be made on this rank.
    #[inline]
    pub(super) fn is_to_come(&self, seq: u64) -> bool {
        seq >= self.next || self.reserved.contains(&seq)
    }

    /// Whether an operation of several calls is under way.
    #[inline]
    pub(super) fn has_composed(&self) -> bool {
        !self.composed.is_empty()
    }

    /// Whether such an operation began before a call.
    pub(super) fn has_composed_before(&self, seq: u64) -> bool {
        self.composed.first().is_some_and(|&first| first < seq)
    }

    /// Whether a number before this one is promised to a call that has yet to be made.
    pub(super) fn has_reserved_before(&self, seq: u64) -> bool {
        self.reserved.first().is_some_and(|&first| first < seq)
    }

    /// Numbers that are promised.
    pub(super) fn promised(&self) -> usize {
        self.reserved.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_promised_are_taken_once_and_in_any_order() {
        let mut sequence = Sequence::default();
        assert_eq!((sequence.take(), sequence.reserve(3), sequence.take()), (0, 1, 4));
        assert!(sequence.is_to_come(2) && sequence.is_to_come(5) && !sequence.is_to_come(4) && !sequence.is_to_come(0));
        assert_eq!(sequence.take_reserved(3).unwrap(), 3);
        assert!(sequence.take_reserved(3).is_err() && sequence.take_reserved(4).is_err());
        assert!(!sequence.is_to_come(3) && sequence.is_to_come(1));
        assert_eq!(sequence.next(), 5);
    }

    #[test]
    fn an_operation_is_under_way_until_it_is_concluded() {
        let mut sequence = Sequence::default();
        sequence.take();
        let first = sequence.reserve(2);
        assert!(sequence.has_composed() && sequence.has_composed_before(2) && !sequence.has_composed_before(first));
        assert_eq!(sequence.conclude(first..first + 2, false), None);
        assert!(!sequence.has_composed() && sequence.promised() == 2);
    }

    #[test]
    fn who_gives_up_leaves_no_promise_and_hears_of_the_first_that_it_breaks() {
        let mut sequence = Sequence::default();
        let (first, other) = (sequence.reserve(3), sequence.reserve(1));
        sequence.take_reserved(first).unwrap();
        assert_eq!(sequence.conclude(first..first + 3, true), Some(first + 1));
        assert_eq!((sequence.promised(), sequence.is_to_come(other)), (1, true));
        assert_eq!(sequence.conclude(first..first + 3, true), None);
    }
}

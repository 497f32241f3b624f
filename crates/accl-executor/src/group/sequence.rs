//! Sequence numbers of a group's collectives: the next number, reserved numbers, and the calls that a barrier must wait
//! for.
//!
//! This module owns the numbering. Ranks issue the same calls in the same order, so equal numbers denote the same call.
//! Read [`Sequence`] first.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use accl_types::{Error, Result};

use super::lanes::LaneNumbers;

/// Role of this lane in the numbering.
#[derive(Default)]
enum Lanes {
    /// The group has only one lane.
    #[default]
    One,
    /// This is the first of several lanes.
    First(Arc<dyn LaneNumbers>),
    /// This is another lane with this index, which takes the numbers of the first.
    Other(u32, Arc<dyn LaneNumbers>),
}

/// The sequence numbers of one group's collectives.
#[derive(Default)]
pub(super) struct Sequence {
    lanes: Lanes,
    next: u64,
    /// Numbers reserved for calls that are issued later.
    reserved: BTreeSet<u64>,
    /// First numbers of operations of several calls that are not concluded.
    composed: BTreeSet<u64>,
}

impl Sequence {
    /// Creates the numbers of lane `lane`. Lanes other than 0 follow lane 0.
    pub(super) fn of_lane(lane: u32, numbers: Arc<dyn LaneNumbers>) -> Self {
        let lanes = if lane == 0 { Lanes::First(numbers) } else { Lanes::Other(lane, numbers) };
        Self { lanes, ..Self::default() }
    }

    /// Returns whether the group has other lanes.
    pub(super) fn has_lanes(&self) -> bool {
        !matches!(self.lanes, Lanes::One)
    }

    /// Returns whether this lane is the first to see that the group fails because a rank is gone.
    pub(super) fn claims_loss(&self) -> bool {
        match &self.lanes {
            Lanes::One => true,
            Lanes::First(numbers) | Lanes::Other(_, numbers) => numbers.claims_loss(),
        }
    }

    /// Returns whether this lane is not the first one of several.
    pub(super) fn follows(&self) -> bool {
        matches!(self.lanes, Lanes::Other(..))
    }

    /// Returns the number of the next call without a reserved number.
    #[inline]
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Takes the number of a call of `parts` parts that is issued now.
    #[inline]
    pub(super) fn take(&mut self, parts: u32) -> u64 {
        self.next += 1;
        if let Lanes::First(numbers) = &self.lanes {
            numbers.take(self.next - 1, parts);
        }
        self.next - 1
    }

    /// Takes the reserved number `seq` for a call of `parts` parts. On a lane other than the first, records that its
    /// part of call `seq` has arrived.
    ///
    /// # Errors
    /// `Internal` if the number was not reserved, or is already taken.
    pub(super) fn take_reserved(&mut self, seq: u64, parts: u32) -> Result<u64> {
        if let Lanes::Other(lane, numbers) = &self.lanes {
            self.next = self.next.max(seq + 1);
            numbers.arrive(*lane, seq);
            return Ok(seq);
        }
        if !self.reserved.remove(&seq) {
            return Err(Error::internal(format!("sequence number {seq} was not reserved")));
        }
        if let Lanes::First(numbers) = &self.lanes {
            numbers.take_reserved(seq, parts);
        }
        Ok(seq)
    }

    /// Reserves `count` numbers for the calls of one operation, and returns the first.
    pub(super) fn reserve(&mut self, count: u64) -> u64 {
        let first = self.next;
        self.next += count;
        self.reserved.extend(first..self.next);
        if let Lanes::First(numbers) = &self.lanes {
            numbers.reserve(first..self.next);
        }
        self.composed.insert(first);
        first
    }

    /// Concludes the operation for which `seqs` were reserved. With `gives_up`, the operation issues no more calls, and
    /// the first unused number is returned, if any.
    pub(super) fn conclude(&mut self, seqs: Range<u64>, gives_up: bool) -> Option<u64> {
        self.composed.remove(&seqs.start);
        if !gives_up {
            return None;
        }
        let first = self.reserved.range(seqs.clone()).next().copied();
        self.reserved.retain(|seq| !seqs.contains(seq));
        if let Lanes::First(numbers) = &self.lanes {
            numbers.forget(seqs);
        }
        first
    }

    /// Returns whether the call has yet to be issued on this rank.
    #[inline]
    pub(super) fn is_to_come(&self, seq: u64) -> bool {
        match &self.lanes {
            Lanes::One | Lanes::First(_) => seq >= self.next || self.reserved.contains(&seq),
            Lanes::Other(lane, numbers) => numbers.is_to_come(*lane, seq),
        }
    }

    /// Returns whether an operation of several calls is in flight.
    #[inline]
    pub(super) fn has_composed(&self) -> bool {
        !self.composed.is_empty()
    }

    /// Returns whether an operation of several calls began before call `seq`.
    pub(super) fn has_composed_before(&self, seq: u64) -> bool {
        self.composed.first().is_some_and(|&first| first < seq)
    }

    /// Returns whether a number before `seq` is reserved for a call that has yet to be issued.
    pub(super) fn has_reserved_before(&self, seq: u64) -> bool {
        self.reserved.first().is_some_and(|&first| first < seq)
    }

    /// Returns the number of reserved sequence numbers.
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
        assert_eq!((sequence.take(1), sequence.reserve(3), sequence.take(1)), (0, 1, 4));
        assert!(sequence.is_to_come(2) && sequence.is_to_come(5) && !sequence.is_to_come(4) && !sequence.is_to_come(0));
        assert_eq!(sequence.take_reserved(3, 1).unwrap(), 3);
        assert!(sequence.take_reserved(3, 1).is_err() && sequence.take_reserved(4, 1).is_err());
        assert!(!sequence.is_to_come(3) && sequence.is_to_come(1));
        assert_eq!(sequence.next(), 5);
    }

    #[test]
    fn an_operation_is_under_way_until_it_is_concluded() {
        let mut sequence = Sequence::default();
        sequence.take(1);
        let first = sequence.reserve(2);
        assert!(sequence.has_composed() && sequence.has_composed_before(2) && !sequence.has_composed_before(first));
        assert_eq!(sequence.conclude(first..first + 2, false), None);
        assert!(!sequence.has_composed() && sequence.promised() == 2);
    }

    #[test]
    fn concluding_early_leaves_no_promise_and_returns_the_first_broken_one() {
        let mut sequence = Sequence::default();
        let (first, other) = (sequence.reserve(3), sequence.reserve(1));
        sequence.take_reserved(first, 1).unwrap();
        assert_eq!(sequence.conclude(first..first + 3, true), Some(first + 1));
        assert_eq!((sequence.promised(), sequence.is_to_come(other)), (1, true));
        assert_eq!(sequence.conclude(first..first + 3, true), None);
    }
}

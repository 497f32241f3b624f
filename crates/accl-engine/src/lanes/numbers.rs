//! Sequence numbers of a group's calls, shared by its lanes.
//!
//! Owns the lock over the outstanding parts; calls of one part do not take it. Read [`Numbers`] first.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use accl_executor::group::LaneNumbers;

use crate::sync::Mutex;

/// The sequence numbers of one group on one rank.
#[derive(Default)]
pub struct Numbers {
    /// The first sequence number that the first lane has not assigned yet.
    next: AtomicU64,
    /// For lower numbers: a bit for each of at most 64 lanes that has yet to receive its part. A reserved number has
    /// all bits set.
    outstanding: Mutex<BTreeMap<u64, u64>>,
    /// Whether a lane has seen the group fail because a rank was lost.
    is_lost: AtomicBool,
}

impl LaneNumbers for Numbers {
    fn claims_loss(&self) -> bool {
        !self.is_lost.swap(true, Ordering::Relaxed)
    }

    fn take(&self, seq: u64, parts: u32) {
        if parts > 1 {
            self.outstanding.lock().insert(seq, lanes(parts));
        }
        // Release: a thread that sees the assigned number also sees its outstanding parts.
        self.next.store(seq + 1, Ordering::Release);
    }

    fn reserve(&self, seqs: Range<u64>) {
        let end = seqs.end;
        self.outstanding.lock().extend(seqs.map(|seq| (seq, u64::MAX)));
        self.next.store(end, Ordering::Release);
    }

    fn take_reserved(&self, seq: u64, parts: u32) {
        match parts {
            0 | 1 => self.outstanding.lock().remove(&seq),
            parts => self.outstanding.lock().insert(seq, lanes(parts)),
        };
    }

    fn forget(&self, seqs: Range<u64>) {
        // Keep the numbers that were taken: their calls have parts that have yet to arrive.
        self.outstanding.lock().retain(|seq, lanes| !(seqs.contains(seq) && *lanes == u64::MAX));
    }

    fn arrive(&self, lane: u32, seq: u64) {
        let mut outstanding = self.outstanding.lock();
        if let Some(left) = outstanding.get_mut(&seq) {
            *left &= !(1 << lane);
            if *left == 0 {
                outstanding.remove(&seq);
            }
        }
    }

    fn is_to_come(&self, lane: u32, seq: u64) -> bool {
        seq >= self.next.load(Ordering::Acquire)
            || self.outstanding.lock().get(&seq).is_some_and(|lanes| lanes & 1 << lane != 0)
    }
}

/// Returns the bits of the lanes, except the first, that do the parts of a call. A call has as many lanes as parts.
fn lanes(parts: u32) -> u64 {
    (u64::MAX >> (u64::BITS - parts)) & !1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_expects_what_it_may_be_given_and_nothing_else() {
        let numbers = Numbers::default();
        assert!(numbers.is_to_come(1, 0) && numbers.is_to_come(2, 7));
        numbers.take(0, 1);
        numbers.take(1, 3);
        let expected = |lane| (0..4).filter(|&seq| numbers.is_to_come(lane, seq)).collect::<Vec<_>>();
        assert_eq!([expected(1), expected(2), expected(3)], [vec![1, 2, 3], vec![1, 2, 3], vec![2, 3]]);
        numbers.arrive(2, 1);
        assert_eq!([expected(1), expected(2)], [vec![1, 2, 3], vec![2, 3]]);
        numbers.arrive(1, 1);
        assert_eq!(expected(1), vec![2, 3]);
        assert!(numbers.outstanding.lock().is_empty());
    }

    #[test]
    fn a_number_that_is_promised_may_become_a_call_of_any_parts_or_none() {
        let numbers = Numbers::default();
        numbers.reserve(0..4);
        assert!((0..4).all(|seq| numbers.is_to_come(5, seq)));
        numbers.take_reserved(0, 1);
        numbers.take_reserved(1, 2);
        assert_eq!([0, 1, 2].map(|seq| numbers.is_to_come(1, seq)), [false, true, true]);
        assert!(!numbers.is_to_come(2, 1), "it has two parts");
        numbers.forget(2..4);
        numbers.arrive(1, 1);
        assert_eq!((numbers.is_to_come(1, 3), numbers.is_to_come(1, 4)), (false, true));
        assert!(numbers.outstanding.lock().is_empty());
    }

    #[test]
    fn a_call_has_a_part_on_as_many_lanes_as_there_are() {
        assert_eq!([1, 2, 3, 64].map(lanes), [0, 0b10, 0b110, u64::MAX - 1]);
    }
}

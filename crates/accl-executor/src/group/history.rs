//! Signatures of a group's latest calls, for the error message of a late disagreement. The frame of a rank that issued
//! another call may arrive long after this rank's call is done.

use std::collections::VecDeque;
use std::sync::Arc;

use accl_wire::frame::{CHECKS_SIGNATURES, Signature};

use crate::plan::Shape;

/// Maximum number of stretches kept.
const STRETCHES: usize = 64;

/// Consecutive calls with equal signatures.
struct Stretch {
    first: u64,
    last: u64,
    signature: Signature,
}

/// The signatures of the latest calls.
#[derive(Default)]
pub(crate) struct History {
    stretches: VecDeque<Stretch>,
    /// Shape of the last added call, if that call took the fast path.
    fast_shape: Option<Arc<Shape>>,
}

impl History {
    /// Adds a call that has started.
    #[inline]
    pub(crate) fn add(&mut self, seq: u64, signature: &Signature) {
        self.fast_shape = None;
        if !CHECKS_SIGNATURES {
            return;
        }
        match self.stretches.back_mut() {
            Some(stretch) if stretch.last + 1 == seq && stretch.signature == *signature => stretch.last = seq,
            Some(_) | None => self.begin(seq, signature),
        }
    }

    /// Adds a call that took the fast path. Equal shapes have equal signatures, and comparing addresses is faster.
    #[inline]
    pub(crate) fn add_fast(&mut self, seq: u64, shape: &Arc<Shape>) {
        let is_alike = self.fast_shape.as_ref().is_some_and(|latest| Arc::ptr_eq(latest, shape));
        if !(is_alike && self.add_alike(seq)) {
            self.add(seq, &shape.signature);
            self.fast_shape = Some(shape.clone());
        }
    }

    /// Adds a call with the signature of the last added call. Returns `false` if its number is not the next one; then
    /// nothing was added.
    #[inline]
    fn add_alike(&mut self, seq: u64) -> bool {
        if !CHECKS_SIGNATURES {
            return true;
        }
        let latest = self.stretches.back_mut().filter(|stretch| stretch.last + 1 == seq);
        latest.map(|stretch| stretch.last = seq).is_some()
    }

    fn begin(&mut self, seq: u64, signature: &Signature) {
        if self.stretches.len() == STRETCHES {
            self.stretches.pop_front();
        }
        self.stretches.push_back(Stretch { first: seq, last: seq, signature: *signature });
    }

    /// Returns the signature of a call, unless the call is too old.
    pub(crate) fn signature(&self, seq: u64) -> Option<Signature> {
        let found = self.stretches.iter().find(|stretch| (stretch.first..=stretch.last).contains(&seq));
        found.map(|stretch| stretch.signature)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::shape::tests::{shape_of, sum};

    fn signature(count: u64) -> Signature {
        Signature { count, ..Signature::default() }
    }

    #[test]
    fn calls_are_found_until_as_many_changes_have_followed() {
        let mut history = History::default();
        for seq in 0..1000 {
            history.add(seq, &signature(4));
        }
        for seq in 1000..1000 + STRETCHES as u64 - 1 {
            history.add(seq, &signature(seq));
        }
        assert_eq!(history.signature(0), Some(signature(4)));
        assert_eq!(history.signature(999), Some(signature(4)));
        assert_eq!(history.signature(1001), Some(signature(1001)));
        assert_eq!(history.signature(5000), None);
        history.add(5000, &signature(4));
        assert_eq!(history.signature(999), None);
        assert_eq!(history.signature(5000), Some(signature(4)));
    }

    #[test]
    fn a_call_is_like_the_one_before_it_only() {
        let mut history = History::default();
        assert!(!history.add_alike(0));
        history.add(4, &signature(7));
        assert!(history.add_alike(5) && !history.add_alike(7) && !history.add_alike(5));
        assert_eq!([4, 5, 6].map(|seq| history.signature(seq)), [Some(signature(7)), Some(signature(7)), None]);
    }

    #[test]
    fn a_fast_call_after_another_call_has_its_own_signature() {
        let (small, large) = (shape_of(&sum(4)), shape_of(&sum(8)));
        let mut history = History::default();
        history.add_fast(0, &small);
        history.add_fast(1, &small);
        history.add(2, &large.signature);
        history.add_fast(3, &small);
        history.add_fast(4, &large);
        history.add_fast(6, &large);
        let expected = [&small, &small, &large, &small, &large].map(|shape| Some(shape.signature));
        assert_eq!([0, 1, 2, 3, 4].map(|seq| history.signature(seq)), expected);
        assert_eq!([5, 6].map(|seq| history.signature(seq)), [None, Some(large.signature)]);
    }

    #[test]
    fn calls_made_out_of_turn_are_found_too() {
        let mut history = History::default();
        for seq in [3, 5, 4, 6] {
            history.add(seq, &signature(7));
        }
        assert!((3..7).all(|seq| history.signature(seq) == Some(signature(7))));
        assert_eq!(history.signature(2), None);
        assert_eq!(history.signature(7), None);
    }
}

//! The numbers of a group's calls, as far as its lanes have to know them.
//!
//! A lane is a core of its own, with its own links and its own state of the group. The first one numbers the calls; the others do parts of some of
//! them, under the same numbers, and are given them in any order, since nobody holds the locks of two lanes. A frame that comes to a lane may be
//! of a call that has yet to be made, or of one whose part this lane has yet to be given. Owns the words for what tells these from calls of which the
//! lane never has a part; whoever makes lanes has the numbers. Read [`LaneNumbers::is_to_come`] first.

use std::ops::Range;

/// The numbers of one group on one rank, which all its lanes share: each asks and tells under its own lock.
pub trait LaneNumbers: Send + Sync {
    /// A call of so many parts has this number, and all those before have been given.
    fn take(&self, seq: u64, parts: u32);

    /// These are promised to calls whose parts are not known yet; all those before have been given.
    fn reserve(&self, seqs: Range<u64>);

    /// A call of so many parts has a number that was promised.
    fn take_reserved(&self, seq: u64, parts: u32);

    /// No calls are made under those of these numbers that are still promised.
    fn forget(&self, seqs: Range<u64>);

    /// Whether this lane is the first that sees the group fail because a rank has gone.
    fn claims_loss(&self) -> bool;

    /// A lane has its part of a call.
    fn arrive(&self, lane: u32, seq: u64);

    /// Whether a lane may yet be given a part of the call with this number.
    fn is_to_come(&self, lane: u32, seq: u64) -> bool;
}

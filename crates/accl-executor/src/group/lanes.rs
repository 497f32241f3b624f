//! Interface to the sequence numbers of a group's calls that its lanes share.
//!
//! A lane is a `Core` of its own, with its own links and its own state of the group. The first lane numbers the calls.
//! The other lanes do parts of some calls, under the same numbers. They receive the parts in any order, because no
//! thread holds the locks of two lanes.
//!
//! A frame may arrive on a lane before its call is issued, or before this lane has received its part of the call. It
//! may also belong to a call of which this lane never gets a part. This module owns the interface that distinguishes
//! these cases; the engine, which creates lanes, implements it. Read [`LaneNumbers::is_to_come`] first.

use std::ops::Range;

/// The sequence numbers of one group on one rank, shared by all its lanes. Each lane calls this under its own lock.
pub trait LaneNumbers: Send + Sync {
    /// Records that a call of `parts` parts has this number. All earlier numbers must be recorded already.
    fn take(&self, seq: u64, parts: u32);

    /// Reserves numbers for calls whose parts are not known yet. All earlier numbers must be recorded already.
    fn reserve(&self, seqs: Range<u64>);

    /// Records that a call of `parts` parts takes a reserved number.
    fn take_reserved(&self, seq: u64, parts: u32);

    /// Records that numbers in `seqs` that are still reserved will not be used.
    fn forget(&self, seqs: Range<u64>);

    /// Returns whether this lane is the first that sees the group fail because a rank is gone. Only one call returns
    /// `true`.
    fn claims_loss(&self) -> bool;

    /// Records that a lane has received its part of a call.
    fn arrive(&self, lane: u32, seq: u64);

    /// Returns whether a lane may yet receive a part of the call with this number.
    fn is_to_come(&self, lane: u32, seq: u64) -> bool;
}

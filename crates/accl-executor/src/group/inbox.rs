//! Unexpected frames: frames of calls that this rank has not issued yet, and of groups that it has not added yet.
//!
//! This module owns these queues and their limit. The code that takes a frame out interprets it. Read [`Inbox`] first,
//! then [`EarlyFrames`].

use std::collections::{BTreeMap, HashMap, HashSet};

use accl_types::Rank;
use accl_wire::frame::{Header, Signature};

use crate::peers::PeerId;

/// Maximum bytes of frames kept for groups that are being created on this rank.
pub(super) const MAX_EARLY_BYTES: usize = 64 << 20;

/// A frame of a call that this rank has not issued yet.
pub(super) struct Unexpected {
    pub(super) from: Rank,
    pub(super) header: Header,
    pub(super) signature: Option<Signature>,
    pub(super) data: Vec<u8>,
}

/// The unexpected frames of one group, by sequence number of their call. The eager window limits how many there can be.
#[derive(Default)]
pub(super) struct Inbox(BTreeMap<u64, Vec<Unexpected>>);

impl Inbox {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn push(&mut self, frame: Unexpected) {
        self.0.entry(frame.header.seq).or_default().push(frame);
    }

    /// Takes the frames of a call that is issued now, in order of arrival.
    pub(super) fn take(&mut self, seq: u64) -> Vec<Unexpected> {
        self.0.remove(&seq).unwrap_or_default()
    }

    /// Drops all frames, because no more calls will be issued.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the number of calls with frames.
    pub(super) fn calls(&self) -> usize {
        self.0.len()
    }
}

/// A frame of a group that this rank has not added yet.
#[derive(Debug, PartialEq)]
pub(super) struct Early {
    pub(super) peer: PeerId,
    pub(super) header: Header,
    pub(super) payload: Vec<u8>,
}

impl Early {
    /// Returns the approximate bytes of memory that the frame occupies.
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.payload.len()
    }
}

/// The frames of groups that this rank has not added yet.
#[derive(Default)]
pub(super) struct EarlyFrames {
    frames: HashMap<u64, Vec<Early>>,
    bytes: usize,
    /// Groups whose frames were dropped because there were too many.
    overrun: HashSet<u64>,
}

impl EarlyFrames {
    /// Keeps a frame of a group if there is room. Otherwise the frame is dropped, and [`EarlyFrames::take`] reports it.
    pub(super) fn push(&mut self, group: u64, frame: Early) {
        let bytes = frame.bytes();
        if self.bytes + bytes > MAX_EARLY_BYTES {
            self.overrun.insert(group);
            return;
        }
        self.bytes += bytes;
        self.frames.entry(group).or_default().push(frame);
    }

    /// Takes the frames of a group that is added or given up, in order of arrival. The flag is `true` if these are all
    /// its frames.
    pub(super) fn take(&mut self, group: u64) -> (Vec<Early>, bool) {
        let frames = self.frames.remove(&group).unwrap_or_default();
        self.bytes -= frames.iter().map(Early::bytes).sum::<usize>();
        (frames, !self.overrun.remove(&group))
    }

    /// Returns the number of frames kept, and their bytes.
    pub(super) fn kept(&self) -> (usize, usize) {
        (self.frames.values().map(Vec::len).sum(), self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use accl_wire::frame::Kind;

    use super::*;
    use crate::peers::Net;

    fn unexpected(seq: u64, from: u32) -> Unexpected {
        Unexpected {
            from: Rank(from),
            header: Header { seq, ..Header::new(Kind::Begin) },
            signature: None,
            data: vec![from as u8],
        }
    }

    #[test]
    fn frames_are_taken_by_call_in_the_order_in_which_they_came() {
        let mut inbox = Inbox::default();
        for (seq, from) in [(4, 1), (5, 2), (4, 3)] {
            inbox.push(unexpected(seq, from));
        }
        let from: Vec<u32> = inbox.take(4).iter().map(|frame| frame.from.0).collect();
        assert_eq!(from, [1, 3]);
        assert!(inbox.take(4).is_empty() && !inbox.is_empty());
        inbox.clear();
        assert!(inbox.is_empty() && inbox.take(5).is_empty());
    }

    #[test]
    fn what_finds_no_room_is_remembered_of_its_group_alone() {
        let mut net = Net::default();
        let peer = net.add_stranger();
        let frame = |bytes: usize| Early { peer, header: Header::new(Kind::Begin), payload: vec![1; bytes] };
        let mut early_frames = EarlyFrames::default();
        early_frames.push(7, frame(10));
        early_frames.push(8, frame(MAX_EARLY_BYTES));
        early_frames.push(7, frame(20));
        assert_eq!(early_frames.take(8), (Vec::new(), false));
        assert_eq!(early_frames.take(7), (vec![frame(10), frame(20)], true));
        assert_eq!(early_frames.kept(), (0, 0));
        // `take` also clears the record of dropped frames.
        assert_eq!(early_frames.take(8), (Vec::new(), true));
    }
}

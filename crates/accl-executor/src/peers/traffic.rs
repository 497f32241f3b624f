//! Counters of frames sent to and received from a peer, over its link or for one group.
//!
//! This module owns the counters. Read [`Traffic`] first.

/// Frames and payload bytes in each direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Number of frames sent.
    pub frames_sent: u64,
    /// Payload bytes of the frames sent.
    pub bytes_sent: u64,
    /// Number of frames received.
    pub frames_received: u64,
    /// Payload bytes of the frames received.
    pub bytes_received: u64,
    /// Number of times that a frame found no room.
    pub stalls: u64,
}

impl Traffic {
    #[inline]
    pub(super) fn add_sent(&mut self, payload_bytes: u64) {
        self.frames_sent += 1;
        self.bytes_sent += payload_bytes;
    }

    #[inline]
    pub(super) fn add_received(&mut self, payload_bytes: u64) {
        self.frames_received += 1;
        self.bytes_received += payload_bytes;
    }

    /// Returns the sum of both counters.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            frames_sent: self.frames_sent + other.frames_sent,
            bytes_sent: self.bytes_sent + other.bytes_sent,
            frames_received: self.frames_received + other.frames_received,
            bytes_received: self.bytes_received + other.bytes_received,
            stalls: self.stalls + other.stalls,
        }
    }
}

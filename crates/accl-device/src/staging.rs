//! The buffers through which tensors are copied to a device and back.
//!
//! Owns two segments, each with an operand and a result buffer, that exist as long as the device is open. While a call
//! works on one segment, the next piece is copied into the other, and the previous piece out of it. Knows pieces, but
//! no calls. Read [`Staging::give`] first.

use std::time::Instant;

use accl_cclo::bus::{Bus, Memory};
use accl_cclo::offload::{Piece, PieceBuffer};
use accl_engine::CollectiveMemory;
use accl_types::Result;

/// Bytes copied between two checks whether the copy is still wanted.
const STEP_BYTES: usize = 256 << 10;

/// Bytes of each buffer.
pub(super) const STAGING_BYTES: u64 = 4 << 20;

/// The device buffers of a piece, between tensor and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Segment {
    /// Address of operand 0.
    pub(super) first: u64,
    /// Address of the result.
    pub(super) result: u64,
}

/// Deadline of requests to the device; `None` means no deadline.
#[derive(Clone, Copy, Debug)]
pub(super) struct Until(pub(super) Option<Instant>);

/// The buffers of a device, and host memory in which pieces are assembled.
pub(super) struct Staging {
    memory: Memory,
    segments: [Segment; 2],
    room: Vec<u8>,
}

impl Staging {
    /// Allocates the buffers.
    ///
    /// # Errors
    /// The device has no room for the buffers.
    pub(super) fn new(bus: &mut dyn Bus, memory: Memory) -> Result<Self> {
        let mut segment = || -> Result<Segment> {
            let mut buffer = || bus.allocate(memory, STAGING_BYTES);
            Ok(Segment { first: buffer()?, result: buffer()? })
        };
        Ok(Self { memory, segments: [segment()?, segment()?], room: Vec::new() })
    }

    /// Returns the segment of the piece with this number.
    pub(super) fn segment(&self, piece: usize) -> Segment {
        self.segments[piece % self.segments.len()]
    }

    /// Copies a piece's input into its segment, for as long as `until` returns a deadline. Returns whether the copy is
    /// complete.
    ///
    /// # Errors
    /// The errors of [`Bus::write_memory`].
    pub(super) fn give(
        &mut self,
        bus: &mut dyn Bus,
        tensors: &CollectiveMemory<'_>,
        piece: &Piece,
        segment: Segment,
        until: &dyn Fn() -> Option<Until>,
    ) -> Result<bool> {
        if piece.gives.is_empty() {
            return Ok(true);
        }
        self.room.resize(piece.given_bytes as usize, 0);
        let mut end = 0;
        for span in &piece.gives {
            let at = span.staging as usize;
            // Gaps between spans are padding, which the device reduces as well.
            self.room[end..at].fill(0);
            end = at + span.bytes as usize;
            if !tensors.read_input(span.tensor, &mut self.room[at..end]) {
                return Ok(false);
            }
        }
        self.room[end..].fill(0);
        for (bytes, at) in self.room.chunks(STEP_BYTES).zip((segment.first..).step_by(STEP_BYTES)) {
            let Some(Until(until)) = until() else { return Ok(false) };
            bus.set_deadline(until);
            bus.write_memory(self.memory, at, bytes)?;
        }
        Ok(true)
    }

    /// Copies a piece's output to its destination, for as long as `until` returns a deadline. Returns whether the copy
    /// is complete.
    ///
    /// # Errors
    /// The errors of [`Bus::read_memory`].
    pub(super) fn take(
        &mut self,
        bus: &mut dyn Bus,
        tensors: &mut CollectiveMemory<'_>,
        piece: &Piece,
        segment: Segment,
        until: &dyn Fn() -> Option<Until>,
    ) -> Result<bool> {
        let from = match piece.takes_from {
            PieceBuffer::First => segment.first,
            PieceBuffer::Result => segment.result,
        };
        let Some(end) = piece.takes.iter().map(|span| span.staging + span.bytes).max() else { return Ok(true) };
        self.room.resize(end as usize, 0);
        for (bytes, at) in self.room.chunks_mut(STEP_BYTES).zip((from..).step_by(STEP_BYTES)) {
            let Some(Until(until)) = until() else { return Ok(false) };
            bus.set_deadline(until);
            bus.read_memory(self.memory, at, bytes)?;
        }
        // The reads may have taken long, and nothing may write into the tensors of a failed call.
        if until().is_none() {
            return Ok(false);
        }
        for span in &piece.takes {
            let at = span.staging as usize;
            if !tensors.write_output(span.tensor, &self.room[at..at + span.bytes as usize]) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

//! State that the executor borrows from a group and from the engine while it works, and the frames that it builds with
//! it.
//!
//! This module owns nothing. Read [`RunContext`] first.

use accl_types::Rank;
use accl_wire::frame::{Header, SIGNATURE_BYTES, Signature, WANTS_GRANT};

use super::transfer::Fragment;
use crate::peers::{Members, Net};

/// The parts of a group that a run needs while it works.
pub(crate) struct RunContext<'a> {
    pub(crate) net: &'a mut Net,
    pub(crate) members: &'a mut Members,
    pub(crate) segment: u64,
}

impl RunContext<'_> {
    /// Sends a fragment of a message in one frame, after the signature if there is one; `fill` writes its bytes.
    /// Returns `false` if the link has no room; then nothing has changed.
    #[inline]
    pub(crate) fn send_fragment(
        &mut self,
        to: Rank,
        fragment: &Fragment,
        header: &Header,
        signature: Option<&Signature>,
        fill: impl FnOnce(&mut [u8]),
    ) -> bool {
        let peer = self.members.peer(to);
        let signature_bytes = if signature.is_some() { SIGNATURE_BYTES } else { 0 };
        let Some(frame) = self.net.reserve(peer, signature_bytes + fragment.bytes as usize) else {
            self.members.note_stall(to);
            return false;
        };
        header.emit(frame.head);
        let (head, bytes) = frame.payload.split_at_mut(signature_bytes);
        if let Some(signature) = signature {
            signature.emit(head);
        }
        fill(bytes);
        self.net.commit(peer);
        if let Some(credit) = fragment.credit {
            self.members.take_eager(to, credit);
        }
        self.members.note_sent(to, signature_bytes as u64 + fragment.bytes);
        true
    }
}

/// Returns the header flags of a fragment's frame.
pub(super) fn flags(fragment: &Fragment) -> u8 {
    if fragment.wants_grant { WANTS_GRANT } else { 0 }
}

/// Limit of the wait for a frame.
#[derive(Clone, Copy)]
pub struct SpinLimit {
    /// Number of consecutive polls without yielding the core.
    pub spins: u32,
    /// Number of times to yield the core, each followed by `spins` polls.
    pub yields: u32,
    /// Function that yields the core.
    pub yield_now: fn(),
}

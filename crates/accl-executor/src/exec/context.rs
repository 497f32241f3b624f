//! What the executor borrows of a group and of the engine while it works, and the frames that it makes with them.
//!
//! Owns nothing. Read [`RunContext`] first.

use accl_types::Rank;
use accl_wire::frame::{Header, SIGNATURE_BYTES, Signature, WANTS_GRANT};

use super::transfer::Fragment;
use crate::peers::{Members, Net};

/// What a run needs of its group while it works.
pub(crate) struct RunContext<'a> {
    pub(crate) net: &'a mut Net,
    pub(crate) members: &'a mut Members,
    pub(crate) segment: u64,
}

impl RunContext<'_> {
    /// Sends a fragment of a message in one frame, with the signature in front if there is one; `fill` writes its bytes. `false`:
    /// the link has no room, and nothing has happened.
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

/// The flags of a fragment's frame.
pub(super) fn flags(fragment: &Fragment) -> u8 {
    if fragment.wants_grant { WANTS_GRANT } else { 0 }
}

/// How long to wait for a frame before giving up.
#[derive(Clone, Copy)]
pub struct SpinLimit {
    /// Looks one after the other, without giving the core away.
    pub spins: u32,
    /// How often to give the core away, and look as often again.
    pub yields: u32,
    /// Gives it away.
    pub yield_now: fn(),
}

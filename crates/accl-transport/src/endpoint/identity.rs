//! What both halves of the handshake need to know of this process.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::Waker;
use crate::shm::budget::Budget;

/// Code of a transport in the handshake: its place in [`crate::TRANSPORTS`].
pub(super) const SHM: u8 = 0;
pub(super) const TCP: u8 = 1;

/// What both halves of the handshake need to know of this process.
pub(super) struct Identity {
    pub(super) uuid: [u8; 16],
    pub(super) uid: u32,
    pub(super) host_id: String,
    pub(super) hostname: String,
    pub(super) max_payload_bytes: usize,
    pub(super) waker: Arc<Waker>,
    pub(super) nonces: AtomicU64,
    /// Of shared memory.
    pub(super) budget: Budget,
}

impl Identity {
    /// A number that this process has not used in a handshake before.
    pub(super) fn nonce(&self) -> u64 {
        self.nonces.fetch_add(1, Ordering::Relaxed)
    }
}

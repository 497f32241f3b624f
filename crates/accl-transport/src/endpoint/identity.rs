//! What both halves of the handshake need to know of this process.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::transport::{Carrier, Provider, Transport};

/// A transport that this process uses.
pub(super) struct Opened {
    pub(super) row: &'static Transport,
    pub(super) provider: Box<dyn Provider>,
}

/// What both halves of the handshake need to know of this process.
pub(super) struct Identity {
    pub(super) uuid: [u8; 16],
    pub(super) uid: u32,
    pub(super) host_id: String,
    pub(super) hostname: String,
    pub(super) max_payload_bytes: usize,
    pub(super) nonces: AtomicU64,
    /// In the order in which they are tried.
    pub(super) transports: Vec<Opened>,
}

impl Identity {
    /// A number that this process has not used in a handshake before.
    pub(super) fn nonce(&self) -> u64 {
        self.nonces.fetch_add(1, Ordering::Relaxed)
    }

    /// The provider of a transport, if this process uses it.
    pub(super) fn provider(&self, name: &str) -> Option<&Opened> {
        self.transports.iter().find(|opened| opened.row.name == name)
    }

    /// Names of the transports in use that begin over this carrier.
    pub(super) fn names_over(&self, carrier: Carrier) -> Vec<&'static str> {
        self.transports
            .iter()
            .map(|opened| opened.row)
            .filter(|row| row.carrier == carrier)
            .map(|row| row.name)
            .collect()
    }
}

//! Facts about this process that both halves of the handshake need.

use std::sync::atomic::{AtomicU64, Ordering};

use accl_wire::lane_uuid;

use crate::transport::{Bootstrap, Provider, Transport};

/// A transport that this process uses.
pub(super) struct Opened {
    pub(super) row: &'static Transport,
    pub(super) provider: Box<dyn Provider>,
}

/// Facts about this process that both halves of the handshake need.
pub(super) struct Identity {
    pub(super) uuid: [u8; 16],
    pub(super) uid: u32,
    pub(super) host_id: String,
    pub(super) hostname: String,
    pub(super) max_payload_bytes: usize,
    pub(super) nonces: AtomicU64,
    /// The transports of each lane, in the order in which they are tried.
    pub(super) lanes: Vec<Vec<Opened>>,
}

impl Identity {
    /// Returns a number that this process has not used in a handshake before.
    pub(super) fn nonce(&self) -> u64 {
        self.nonces.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the identity of a lane.
    pub(super) fn uuid_of(&self, lane: u32) -> [u8; 16] {
        lane_uuid(&self.uuid, lane)
    }

    /// Returns the lane with this identity, if it is a lane of this process.
    pub(super) fn lane_of(&self, uuid: &[u8; 16]) -> Option<u32> {
        (0..self.lanes.len() as u32).find(|&lane| self.uuid_of(lane) == *uuid)
    }

    /// Returns the provider of a transport for a lane, if this process uses the transport.
    pub(super) fn provider(&self, lane: u32, name: &str) -> Option<&Opened> {
        self.lanes.get(lane as usize)?.iter().find(|opened| opened.row.name == name)
    }

    /// Returns the names of the transports in use whose bootstrap connection is of this kind.
    pub(super) fn names_over(&self, bootstrap: Bootstrap) -> Vec<&'static str> {
        self.lanes
            .iter()
            .take(1)
            .flatten()
            .map(|opened| opened.row)
            .filter(|row| row.bootstrap == bootstrap)
            .map(|row| row.name)
            .collect()
    }
}

//! Parameters with which a device is set up, and the tables that follow from them.

mod tables;

use std::net::Ipv4Addr;

use accl_types::{Error, ErrorKind, Result};

use crate::memory::Memory;
use crate::memory_map::{Communicator, NO_SESSION, Network, RankEntry};

pub(crate) use tables::{Ranks, Tables};

/// Maximum number of rx buffers that firmware supports.
pub const MAX_RX_BUFFERS: u32 = 512;
/// The size of a segment is a multiple of this many bytes.
const SEGMENT_UNIT: u32 = 64;

/// Address of a rank's engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// IPv4 address of the engine.
    pub ip: Ipv4Addr,
    /// Port of the engine.
    pub port: u16,
    /// Socket index, session or queue pair; for the emulator, the rank.
    pub session: u32,
}

/// Parameters with which a device is set up. All ranks use the same values, except for `rank` and the values that depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Network between the engines.
    pub network: Network,
    /// Whether a device of any network is accepted, because the user named no design. `network` then stands for what all networks support.
    pub suits_any_network: bool,
    /// This rank.
    pub rank: u32,
    /// Addresses of all ranks, by rank.
    pub peers: Vec<Peer>,
    /// Number of eager rx buffers.
    pub rx_buffers: u32,
    /// Size of each rx buffer in bytes.
    pub rx_bytes: u32,
    /// Size of the largest eager message in bytes.
    pub max_eager_bytes: u32,
    /// Size of the largest rendezvous message in bytes, which is also the size of a spare buffer.
    pub max_rendezvous_bytes: u32,
    /// Memory that holds the buffers of calls, on all ranks.
    pub memory: Memory,
}

impl Settings {
    /// Returns the defaults of ACCL's own driver, except for the eager limit, which is the total size of the rx buffers.
    pub fn new(network: Network, rank: u32, peers: Vec<Peer>) -> Self {
        Self {
            network,
            suits_any_network: false,
            rank,
            peers,
            rx_buffers: 16,
            rx_bytes: 1024,
            max_eager_bytes: 16 << 10,
            max_rendezvous_bytes: 32 << 10,
            memory: Memory::Device,
        }
    }

    /// Returns the number of ranks.
    pub fn world(&self) -> u32 {
        self.peers.len() as u32
    }

    /// Checks that every peer has a session.
    ///
    /// # Errors
    /// A peer has no session.
    pub fn check_sessions(&self) -> Result<()> {
        let others = (0..).zip(&self.peers).filter(|(rank, _)| *rank != self.rank);
        let without: Vec<String> =
            others.filter(|(_, peer)| peer.session == NO_SESSION).map(|(rank, _)| rank.to_string()).collect();
        if without.is_empty() {
            return Ok(());
        }
        let text = format!("the device of rank {} has no session to ranks {}", self.rank, without.join(", "));
        Err(Error::new(ErrorKind::Configuration, text))
    }

    /// Returns the communicator of all ranks.
    pub fn communicator(&self) -> Communicator {
        let entry = |peer: &Peer| RankEntry::new(peer.ip, peer.port, peer.session, self.rx_bytes);
        Communicator { local: self.rank, ranks: self.peers.iter().map(entry).collect() }
    }

    /// Checks that firmware accepts the settings.
    ///
    /// # Errors
    /// The value that firmware would refuse, or would hang on, in a sentence.
    pub fn check(&self) -> Result<()> {
        let refused = |text: String| Err(Error::new(ErrorKind::Configuration, text));
        let (world, rx_bytes) = (self.world(), self.rx_bytes);
        if self.rank >= world {
            return refused(format!("rank {} is not among the {world} ranks of the device", self.rank));
        }
        if self.rx_buffers == 0 || self.rx_buffers > MAX_RX_BUFFERS {
            return refused(format!(
                "rx buffers: expected from 1 to about 280, fewer with more ranks, got {}",
                self.rx_buffers
            ));
        }
        if rx_bytes == 0 || !rx_bytes.is_multiple_of(SEGMENT_UNIT) {
            return refused(format!(
                "size of an rx buffer: expected a multiple of {SEGMENT_UNIT} bytes, got {rx_bytes}"
            ));
        }
        // A segment without elements would never end.
        let least = world.saturating_mul(8).next_multiple_of(SEGMENT_UNIT);
        if rx_bytes < least {
            return refused(format!(
                "an rx buffer must hold an element for each of {world} ranks: expected at least {least} bytes, got {rx_bytes}"
            ));
        }
        if self.max_eager_bytes < rx_bytes {
            return refused(format!(
                "largest eager message: expected at least the {rx_bytes} bytes of an rx buffer, got {}",
                self.max_eager_bytes
            ));
        }
        if self.max_rendezvous_bytes <= self.max_eager_bytes {
            return refused(format!(
                "largest rendezvous message: expected more than the {} bytes of the largest eager message, got {}",
                self.max_eager_bytes, self.max_rendezvous_bytes
            ));
        }
        Ok(())
    }
}

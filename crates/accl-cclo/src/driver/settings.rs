//! How a device is set up.

use std::net::Ipv4Addr;

use accl_types::{Error, ErrorKind, Result};

use crate::memory::Memory;
use crate::memory_map::{Communicator, NO_SESSION, Network, RankEntry};

/// Most rx buffers that firmware looks after.
pub const MAX_RX_BUFFERS: u32 = 512;
/// What segments are a multiple of.
const SEGMENT_UNIT: u32 = 64;

/// Where a rank's engine is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its address.
    pub ip: Ipv4Addr,
    /// Its port.
    pub port: u16,
    /// Socket index, session or queue pair; the emulator takes the rank.
    pub session: u32,
}

/// How a device is set up: the same on all ranks, but for who they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How engines reach one another.
    pub network: Network,
    /// Nobody has said so, and `network` stands for what all of them do: a device of any is taken.
    pub suits_any_network: bool,
    /// Which of the ranks this one is.
    pub rank: u32,
    /// All ranks.
    pub peers: Vec<Peer>,
    /// Eager rx buffers.
    pub rx_buffers: u32,
    /// Size of each in bytes.
    pub rx_bytes: u32,
    /// The largest eager message in bytes.
    pub max_eager_bytes: u32,
    /// The largest rendezvous message in bytes, which is also the size of a spare buffer.
    pub max_rendezvous_bytes: u32,
    /// Where the buffers of calls lie, on all ranks.
    pub memory: Memory,
}

impl Settings {
    /// What ACCL's own driver takes, but for an eager limit that is what the rx buffers hold.
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

    /// How many ranks.
    pub fn world(&self) -> u32 {
        self.peers.len() as u32
    }

    /// Whether each rank is known to be reached.
    ///
    /// # Errors
    /// One has no session.
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

    /// The communicator of all ranks.
    pub fn communicator(&self) -> Communicator {
        let entry = |peer: &Peer| RankEntry::new(peer.ip, peer.port, peer.session, self.rx_bytes);
        Communicator { local: self.rank, ranks: self.peers.iter().map(entry).collect() }
    }

    /// The communicator of some of the ranks, in this order.
    ///
    /// # Errors
    /// A rank that there is not, or that stands there twice, or this rank is not among them.
    pub fn communicator_of(&self, members: &[u32]) -> Result<Communicator> {
        let refused = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text));
        let Communicator { ranks, .. } = self.communicator();
        let mut chosen = Vec::with_capacity(members.len());
        for (index, member) in members.iter().enumerate() {
            if members[..index].contains(member) {
                return refused(format!("rank {member} stands twice in a communicator"));
            }
            let Some(entry) = ranks.get(*member as usize) else {
                return refused(format!("rank {member} is none of the {} ranks of the device", self.world()));
            };
            chosen.push(*entry);
        }
        match members.iter().position(|member| *member == self.rank) {
            Some(local) => Ok(Communicator { local: local as u32, ranks: chosen }),
            None => refused(format!("rank {} is not among the {} ranks of its communicator", self.rank, members.len())),
        }
    }

    /// Whether firmware takes them.
    ///
    /// # Errors
    /// What it would refuse, or never come back from, in a sentence.
    pub fn check(&self) -> Result<()> {
        let refused = |text: String| Err(Error::new(ErrorKind::Configuration, text));
        let (world, rx_bytes) = (self.world(), self.rx_bytes);
        if self.rank >= world {
            return refused(format!("rank {} is none of the {world} ranks of the device", self.rank));
        }
        if self.rx_buffers == 0 || self.rx_buffers > MAX_RX_BUFFERS {
            return refused(format!(
                "a device has from 1 to about 280 rx buffers, fewer with more ranks, and not {}",
                self.rx_buffers
            ));
        }
        if rx_bytes == 0 || !rx_bytes.is_multiple_of(SEGMENT_UNIT) {
            return refused(format!("an rx buffer has a multiple of {SEGMENT_UNIT} bytes, not {rx_bytes}"));
        }
        // A segment of no element at all would never end.
        let least = world.saturating_mul(8).next_multiple_of(SEGMENT_UNIT);
        if rx_bytes < least {
            return refused(format!(
                "an rx buffer must hold an element for each of {world} ranks: at least {least} bytes, not {rx_bytes}"
            ));
        }
        if self.max_eager_bytes < rx_bytes {
            return refused(format!(
                "the largest eager message has at least the {rx_bytes} bytes of an rx buffer, not {}",
                self.max_eager_bytes
            ));
        }
        if self.max_rendezvous_bytes <= self.max_eager_bytes {
            return refused(format!(
                "the largest rendezvous message is larger than the {} bytes of the largest eager one, not {}",
                self.max_eager_bytes, self.max_rendezvous_bytes
            ));
        }
        Ok(())
    }
}

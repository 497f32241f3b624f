//! The network design of an engine, by the name that users know.

use crate::memory_map::Network;

/// Network design that engines were built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Design {
    /// Datagrams (UDP).
    Udp,
    /// Streams (TCP).
    Tcp,
    /// Queue pairs of Coyote (RDMA).
    CytRdma,
}

impl Design {
    /// Returns the value of the key `design`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
            Self::CytRdma => "cyt_rdma",
        }
    }

    /// Returns the design whose engines use this network.
    pub fn of(network: Network) -> Self {
        match network {
            Network::Udp => Self::Udp,
            Network::Tcp => Self::Tcp,
            Network::Rdma => Self::CytRdma,
        }
    }

    /// Returns the network of the design.
    pub fn network(self) -> Network {
        match self {
            Self::Udp => Network::Udp,
            Self::Tcp => Network::Tcp,
            Self::CytRdma => Network::Rdma,
        }
    }
}

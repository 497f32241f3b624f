//! What an engine was built with.

/// The word at `hardware_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HardwareId(pub u32);

/// How engines reach one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Network {
    /// Datagrams, by a socket index for each peer.
    Udp,
    /// Streams, by a session for each peer.
    Tcp,
    /// Queue pairs: the only one that rendezvous works over.
    Rdma,
}

/// What an engine may have been built with: bit, and in words.
const PARTS: [(u32, &str); 6] = [
    (2, "internal DMA"),
    (3, "reduction"),
    (4, "compression"),
    (5, "kernel streams"),
    (6, "debug"),
    (7, "external DMA"),
];
const NETWORK_MASK: u32 = 0b11;
const COMMIT_SHIFT: u32 = 8;

impl Network {
    /// As settings and messages name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

impl HardwareId {
    /// The emulator has no id, and nothing can be read from it.
    pub fn is_known(self) -> bool {
        self.0 != 0
    }

    /// How it reaches its peers.
    pub fn network(self) -> Option<Network> {
        let all = [Network::Udp, Network::Tcp, Network::Rdma];
        all.get((self.0 & NETWORK_MASK) as usize).copied().filter(|_| self.is_known())
    }

    /// What it was built with, in words.
    pub fn parts(self) -> impl Iterator<Item = &'static str> {
        PARTS.iter().filter(move |(bit, _)| self.0 >> bit & 1 == 1).map(|(_, name)| *name)
    }

    /// The first 24 bits of the commit that it was built from.
    pub fn commit(self) -> u32 {
        self.0 >> COMMIT_SHIFT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_told_apart() {
        let id = HardwareId(0x0072_3d8e << 8 | 0b0001_1010);
        assert_eq!(id.network(), Some(Network::Rdma));
        assert_eq!(id.parts().collect::<Vec<_>>(), ["reduction", "compression"]);
        assert_eq!(id.commit(), 0x0072_3d8e);
        assert_eq!(HardwareId(0).network(), None);
        assert_eq!(HardwareId(3).network(), None);
    }
}

//! Build options of an engine.

/// Value of the register `hardware_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HardwareId(pub u32);

/// Network by which engines reach one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Network {
    /// Datagrams, with one socket index per peer.
    Udp,
    /// Streams, with one session per peer.
    Tcp,
    /// Queue pairs. Rendezvous works over RDMA only.
    Rdma,
}

/// Optional parts of an engine: the bit and the name of each.
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
    /// Returns the network's name in settings and messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

impl HardwareId {
    /// Returns whether the id is known. The emulator has no id; its register reads zero.
    pub fn is_known(self) -> bool {
        self.0 != 0
    }

    /// Returns the network of the engine, or `None` if the id is unknown or names no network.
    pub fn network(self) -> Option<Network> {
        let all = [Network::Udp, Network::Tcp, Network::Rdma];
        all.get((self.0 & NETWORK_MASK) as usize).copied().filter(|_| self.is_known())
    }

    /// Returns the names of the parts that the engine was built with.
    pub fn parts(self) -> impl Iterator<Item = &'static str> {
        PARTS.iter().filter(move |(bit, _)| self.0 >> bit & 1 == 1).map(|(_, name)| *name)
    }

    /// Returns the first 24 bits of the commit that the engine was built from.
    pub fn commit(self) -> u32 {
        self.0 >> COMMIT_SHIFT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_decoded() {
        let id = HardwareId(0x0072_3d8e << 8 | 0b0001_1010);
        assert_eq!(id.network(), Some(Network::Rdma));
        assert_eq!(id.parts().collect::<Vec<_>>(), ["reduction", "compression"]);
        assert_eq!(id.commit(), 0x0072_3d8e);
        assert_eq!(HardwareId(0).network(), None);
        assert_eq!(HardwareId(3).network(), None);
    }
}

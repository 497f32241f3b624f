//! Where the buffers of a kernel's call lie.

/// Where the buffers of a call lie.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// All buffers of a call in the L2 cache.
    L2,
    /// None in any cache.
    Dram,
}

impl Place {
    /// All of them.
    pub const ALL: [Place; 2] = [Place::L2, Place::Dram];

    /// As in ids.
    pub fn name(self) -> &'static str {
        match self {
            Place::L2 => "L2",
            Place::Dram => "DRAM",
        }
    }

    /// Bytes of one buffer. Five of the first lie in an L2 cache of half a MiB; one of the others in no cache.
    pub fn bytes(self) -> usize {
        match self {
            Place::L2 => 64 << 10,
            Place::Dram => 32 << 20,
        }
    }
}

//! Where the buffers of a kernel's call are: in a cache or in memory.

/// Location of the buffers of a call.
#[derive(Clone, Copy, Debug)]
pub enum MemoryLevel {
    /// All buffers of a call are in the L2 cache.
    L2,
    /// The buffers exceed every cache.
    Dram,
}

impl MemoryLevel {
    /// All levels.
    pub const ALL: [MemoryLevel; 2] = [MemoryLevel::L2, MemoryLevel::Dram];

    /// Returns the name in ids.
    pub fn name(self) -> &'static str {
        match self {
            MemoryLevel::L2 => "L2",
            MemoryLevel::Dram => "DRAM",
        }
    }

    /// Returns the bytes of one buffer. Five `L2` buffers fit into an L2 cache of half a MiB; one `Dram` buffer fits
    /// into no cache.
    pub fn bytes(self) -> usize {
        match self {
            MemoryLevel::L2 => 64 << 10,
            MemoryLevel::Dram => 32 << 20,
        }
    }
}

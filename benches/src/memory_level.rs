//! Where the buffers of a kernel's call are: in a cache or in memory.

/// Location of the buffers of a call.
#[derive(Clone, Copy, Debug)]
pub enum Place {
    /// All buffers of a call are in the L2 cache.
    L2,
    /// The buffers exceed every cache.
    Dram,
}

impl Place {
    /// All places.
    pub const ALL: [Place; 2] = [Place::L2, Place::Dram];

    /// Returns the name in ids.
    pub fn name(self) -> &'static str {
        match self {
            Place::L2 => "L2",
            Place::Dram => "DRAM",
        }
    }

    /// Returns the bytes of one buffer. Five `L2` buffers fit into an L2 cache of half a MiB; one `Dram` buffer fits
    /// into no cache.
    pub fn bytes(self) -> usize {
        match self {
            Place::L2 => 64 << 10,
            Place::Dram => 32 << 20,
        }
    }
}

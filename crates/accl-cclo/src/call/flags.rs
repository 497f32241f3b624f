//! Flags of a descriptor: which parts of a call are compressed, use kernel streams, or lie in host memory.

/// Which parts of a call are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compression {
    /// Operand 0 is compressed in memory.
    pub first: bool,
    /// Operand 1 is compressed in memory.
    pub second: bool,
    /// The result is compressed in memory.
    pub result: bool,
    /// All data is compressed on the wire.
    pub wire: bool,
}

/// Which ends of a call are kernel streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Operand 0 comes from a kernel stream.
    pub first: bool,
    /// The result goes to a kernel stream.
    pub result: bool,
}

/// Which buffers of a call lie in host memory instead of device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hosts {
    /// Operand 0 lies in host memory.
    pub first: bool,
    /// Operand 1 lies in host memory.
    pub second: bool,
    /// The result lies in host memory.
    pub result: bool,
}

/// Implements the conversions between named flags and the bits of a word.
macro_rules! bits {
    ($name:ident { $($bit:literal $field:ident),+ }) => {
        impl $name {
            /// Returns the flags as bits.
            pub fn bits(self) -> u32 {
                0 $(| u32::from(self.$field) << $bit)+
            }

            /// Returns the flags for these bits, or `None` if an unknown bit is set.
            pub fn from_bits(bits: u32) -> Option<Self> {
                let flags = Self { $($field: bits >> $bit & 1 == 1),+ };
                (flags.bits() == bits).then_some(flags)
            }
        }
    };
}

bits!(Compression { 0 first, 1 second, 2 result, 3 wire });
bits!(Streams { 0 first, 1 result });
bits!(Hosts { 0 first, 1 second, 2 result });

impl Compression {
    /// Returns whether anything is compressed.
    pub fn is_any(self) -> bool {
        self.bits() != 0
    }
}

impl Streams {
    /// Returns whether any end is a kernel stream.
    pub fn is_any(self) -> bool {
        self.bits() != 0
    }
}

impl Hosts {
    /// Returns flags for all buffers in host memory or all in device memory, since a group uses one kind of memory.
    pub fn all(are_in_host: bool) -> Self {
        Self { first: are_in_host, second: are_in_host, result: are_in_host }
    }
}

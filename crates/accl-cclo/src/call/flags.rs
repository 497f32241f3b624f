//! The flags of a descriptor: what of a call is compressed, comes from a kernel stream, or lies in host memory.

/// What of a call is compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Compression {
    /// Operand 0 is, in memory.
    pub first: bool,
    /// Operand 1 is, in memory.
    pub second: bool,
    /// The result is, in memory.
    pub result: bool,
    /// Everything is, on the wire.
    pub wire: bool,
}

/// Which ends of a call are kernel streams.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    /// Operand 0 comes from one.
    pub first: bool,
    /// The result goes to one.
    pub result: bool,
}

/// Which buffers of a call lie in host memory, and not in that of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hosts {
    /// Operand 0 does.
    pub first: bool,
    /// Operand 1 does.
    pub second: bool,
    /// The result does.
    pub result: bool,
}

/// Both directions between named flags and the bits of a word.
macro_rules! bits {
    ($name:ident { $($bit:literal $field:ident),+ }) => {
        impl $name {
            /// As bits.
            pub fn bits(self) -> u32 {
                0 $(| u32::from(self.$field) << $bit)+
            }

            /// From bits; `None` if others are set.
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
    /// Whether anything is.
    pub fn is_any(self) -> bool {
        self.bits() != 0
    }
}

impl Streams {
    /// Whether any end is.
    pub fn is_any(self) -> bool {
        self.bits() != 0
    }
}

impl Hosts {
    /// All buffers of a call in host memory, or none: a group has one kind of memory.
    pub fn all(are_in_host: bool) -> Self {
        Self { first: are_in_host, second: are_in_host, result: are_in_host }
    }
}

//! Kinds of memory.

/// A memory that a device can access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// Memory of the card.
    Device,
    /// Memory of the host.
    Host,
}

impl Memory {
    /// Returns whether this is host memory.
    pub fn is_host(self) -> bool {
        self == Self::Host
    }
}

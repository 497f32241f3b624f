//! Which memories there are.

/// A memory that a device reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// That of the card.
    Device,
    /// That of the host.
    Host,
}

impl Memory {
    /// Whether it is the host's.
    pub fn is_host(self) -> bool {
        self == Self::Host
    }
}

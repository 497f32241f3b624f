//! What carries packets between engines.

/// What carries packets to other engines.
pub trait Fabric {
    /// Sends a packet to the engine with this session; it is these parts one behind the other.
    fn send(&mut self, session: u32, packet: [&[u8]; 3]);
}

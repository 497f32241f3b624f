//! What carries packets between engines.

/// What carries packets to other engines.
pub trait Fabric {
    /// Sends a packet to the engine with this session; it is these parts one behind the other.
    fn send(&mut self, session: u32, packet: [&[u8]; 3]);
}

/// Keeps what is sent, with the session that it goes to, for whoever carries it.
impl Fabric for Vec<(u32, Vec<u8>)> {
    fn send(&mut self, session: u32, packet: [&[u8]; 3]) {
        self.push((session, packet.concat()));
    }
}

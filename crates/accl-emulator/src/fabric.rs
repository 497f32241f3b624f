//! What carries packets between engines.

/// Packets that a list of them takes before whoever carries it must have carried some.
const MOST_PACKETS: usize = 1024;

/// What carries packets to other engines.
pub trait Fabric {
    /// Sends a packet to the engine with this session; it is these parts one behind the other.
    fn send(&mut self, session: u32, packet: [&[u8]; 3]);

    /// Whether it takes data for this engine now. An engine that hears no waits: whoever runs it lets it go on once there is room. What is no
    /// data, an address or that all data are there, is sent in any case.
    fn has_room(&self, session: u32) -> bool;
}

/// Keeps what is sent, with the session that it goes to, for whoever carries it.
impl Fabric for Vec<(u32, Vec<u8>)> {
    fn send(&mut self, session: u32, packet: [&[u8]; 3]) {
        self.push((session, packet.concat()));
    }

    fn has_room(&self, _session: u32) -> bool {
        self.len() < MOST_PACKETS
    }
}

//! Transport of packets between engines.

/// Number of packets in a list at which it accepts no more until some are delivered.
const MOST_PACKETS: usize = 1024;

/// Transport of packets to other engines.
pub trait Fabric {
    /// Sends a packet to the engine with this session. The packet consists of the three parts in order.
    fn send(&mut self, session: u32, packet: [&[u8]; 3]);

    /// Returns whether the fabric accepts data for this engine now. If not, the sending engine waits, and its owner lets it advance once there is
    /// room. Messages without data (addresses and completion reports) are sent in any case.
    fn has_room(&self, session: u32) -> bool;
}

/// Stores the packets with their destination sessions, to be delivered by the owner of the list.
impl Fabric for Vec<(u32, Vec<u8>)> {
    fn send(&mut self, session: u32, packet: [&[u8]; 3]) {
        self.push((session, packet.concat()));
    }

    fn has_room(&self, _session: u32) -> bool {
        self.len() < MOST_PACKETS
    }
}

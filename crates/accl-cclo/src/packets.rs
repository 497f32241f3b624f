//! Transport of packets between software engines in different processes.

use std::time::Duration;

/// Sends and receives the packets of one engine. Only the thread that runs the engine calls these functions.
pub trait Packets: Send + Sync {
    /// Sends a packet to the engine of rank `to`, after all packets sent to it earlier.
    fn send(&self, to: u32, packet: &[u8]);

    /// Returns whether more packets can be sent to a rank. The number of packets that the rank has yet to take is bounded.
    fn has_room(&self, to: u32) -> bool;

    /// Flushes: puts all packets sent so far in flight.
    fn flush(&self);

    /// Returns the next packet that arrived, with its sender's rank, from ranks for which `is_wanted` is true. Packets of one rank come in the order
    /// in which that rank sent them.
    fn receive(&self, is_wanted: &dyn Fn(u32) -> bool) -> Option<(u32, Vec<u8>)>;

    /// Waits up to `at_most` for a packet or for room to send.
    fn wait(&self, at_most: Duration);
}

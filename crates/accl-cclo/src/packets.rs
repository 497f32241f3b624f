//! What carries packets between engines in software that run in several processes.

use std::time::Duration;

/// Carries packets of one engine. All functions are of the thread that runs the engine.
pub trait Packets: Send + Sync {
    /// Sends a packet to the engine of a rank, behind those that were sent to it before.
    fn send(&self, to: u32, packet: &[u8]);

    /// Whether there is room for more packets to a rank: what it has yet to take is bounded.
    fn has_room(&self, to: u32) -> bool;

    /// What was sent is on its way from here on.
    fn flush(&self);

    /// The next packet that has come from a rank of which packets are wanted, with the rank; each rank's in the order in which it sent them.
    fn receive(&self, is_wanted: &dyn Fn(u32) -> bool) -> Option<(u32, Vec<u8>)>;

    /// Waits until a packet or room may have come, at most so long.
    fn wait(&self, at_most: Duration);
}

//! Packets between the devices of ranks. They are sent alongside calls and belong to none.

use accl_types::{Rank, Result};

/// Receiver of packets from the devices of other ranks for the device of this rank.
pub trait PacketSink: Send + Sync {
    /// Receives packets. `taken` is the total number of bytes of this rank's packets that the other rank has taken.
    /// Runs under the engine's lock: it must neither block nor call the engine.
    ///
    /// # Errors
    /// `Protocol` for bytes that no device sends. The group then fails.
    fn arrive(&self, from: Rank, taken: u64, packets: &[u8]) -> Result<()>;
}

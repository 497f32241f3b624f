//! Packets between the devices of ranks, which travel beside calls and belong to none.

use accl_types::{Rank, Result};

/// Takes what devices of other ranks send to that of this one.
pub trait PacketSink: Send + Sync {
    /// Packets have come; the other rank has taken so many bytes of this one's packets, in all. Runs under the engine's lock: it must neither
    /// block nor call the engine.
    ///
    /// # Errors
    /// `Protocol` for what no device sends, which the group fails with.
    fn arrive(&self, from: Rank, taken: u64, packets: &[u8]) -> Result<()>;
}

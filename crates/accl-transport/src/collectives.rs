//! Collective offload: whole collectives that a transport's library runs instead of this engine's schedules.
//!
//! Owns the interface to such a library. The engine decides which calls the library gets, and ensures that all ranks
//! have issued them before. `table_collectives` holds the implementation for libraries of other packages. Read
//! [`Collectives`] first.

use accl_wire::table::CollectiveV1;

/// Runs collectives for groups of processes.
pub trait Collectives: Send + Sync {
    /// Returns what the other ranks of a new group need to know of this process.
    ///
    /// # Errors
    /// A clause with the reason why this process can be in no group.
    fn address(&self) -> Result<Vec<u8>, String>;

    /// Creates a group from all ranks' addresses, in rank order. `key` is the same on all ranks, and usually differs
    /// from the keys of other groups.
    ///
    /// # Errors
    /// A clause with the reason why there is no group.
    fn open(&self, rank: u32, addresses: &[Vec<u8>], key: u64) -> Result<Opened, String>;
}

/// Result of [`Collectives::open`].
pub enum Opened {
    /// The group was created.
    Group(Box<dyn CollectiveGroup>),
    /// The library runs no collectives for such a group, for this reason. The result is the same on all ranks.
    LeftToHost(String),
}

/// A group of such a library.
pub trait CollectiveGroup: Send {
    /// Starts a collective that all ranks have issued. All ranks start the collectives of a group in one order.
    ///
    /// # Errors
    /// A clause with the reason why it was not started; no memory is in use.
    ///
    /// # Safety
    /// The collective's memory has the sizes that `collective` states. No other code touches it until the collective is
    /// done, or ever again if the collective is abandoned.
    unsafe fn start(&mut self, collective: &CollectiveV1) -> Result<Box<dyn CollectiveCall>, String>;

    /// Leaves the group; collectives in flight were abandoned. `has_failed`: ranks may have abandoned collectives that
    /// others have not.
    fn close(self: Box<Self>, has_failed: bool);
}

/// A collective in flight.
pub trait CollectiveCall: Send {
    /// Makes progress. Returns `true` once the collective is done; then it is not tested again.
    ///
    /// # Errors
    /// A clause with the reason why it failed. Its memory may be in use: the caller abandons it and starts nothing more
    /// in its group.
    fn test(&mut self) -> Result<bool, String>;

    /// Gives the collective up: it is not tested any more, and nothing more is started in its group. The library may
    /// continue to access its memory.
    fn abandon(self: Box<Self>);
}

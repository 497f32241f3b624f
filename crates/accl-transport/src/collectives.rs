//! Whole collectives that a transport's library does instead of this engine's schedules.
//!
//! Owns what such a library is asked for. Which calls it is given, and that all ranks have made them before, is the engine's matter; a
//! library of another package is in `table_collectives`. Read [`Collectives`] first.

use accl_wire::table::CollectiveV1;

/// Does collectives of groups of processes.
pub trait Collectives: Send + Sync {
    /// What the other ranks of a group that is about to be made need to know of this process.
    ///
    /// # Errors
    /// A clause that says why it can be of no group.
    fn address(&self) -> Result<Vec<u8>, String>;

    /// A group of all ranks' addresses, in rank order. `key` is the same on all ranks, and mostly another one than those of other groups.
    ///
    /// # Errors
    /// A clause that says why there is none.
    fn open(&self, rank: u32, addresses: &[Vec<u8>], key: u64) -> Result<Opened, String>;
}

/// What [`Collectives::open`] has come to.
pub enum Opened {
    /// There is a group.
    Group(Box<dyn CollectiveGroup>),
    /// The library does no collectives of such a group, for this reason, on all ranks alike.
    LeftToHost(String),
}

/// A group of such a library.
pub trait CollectiveGroup: Send {
    /// Starts a collective that all ranks have made. They start those of a group in one order.
    ///
    /// # Errors
    /// A clause that says why it was not started: no memory is in use.
    ///
    /// # Safety
    /// Its memory has the room that the collective says, and is left alone until the collective is done, or for ever if it is abandoned.
    unsafe fn start(&mut self, collective: &CollectiveV1) -> Result<Box<dyn CollectiveCall>, String>;

    /// The group is left; what was under way was abandoned. `has_failed`: ranks may have abandoned collectives that others have not.
    fn close(self: Box<Self>, has_failed: bool);
}

/// A collective that is under way.
pub trait CollectiveCall: Send {
    /// Moves it on. `true`: it is done, and is not tested again.
    ///
    /// # Errors
    /// A clause that says how it has failed. Its memory may be in use: it is abandoned, and nothing more is started in its group.
    fn test(&mut self) -> Result<bool, String>;

    /// It is not tested any more, and nothing more is started in its group. Whatever works on its memory goes on.
    fn abandon(self: Box<Self>);
}

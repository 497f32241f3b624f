//! What the executor borrows of a group and of the engine while it works.
//!
//! Owns nothing. Read [`RunContext`] first.

use crate::peers::{Members, Net};

/// What a run needs of its group while it works.
pub(crate) struct RunContext<'a> {
    pub(crate) net: &'a mut Net,
    pub(crate) members: &'a mut Members,
    pub(crate) segment: u64,
}

/// How long to wait for a frame before giving up.
#[derive(Clone, Copy)]
pub(crate) struct SpinLimit {
    /// Looks one after the other, without giving the core away.
    pub(crate) spins: u32,
    /// How often to give the core away, and look as often again.
    pub(crate) yields: u32,
    /// Gives it away.
    pub(crate) yield_now: fn(),
}

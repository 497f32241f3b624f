//! What the engine provides to a group while it works.
//!
//! Owns nothing. Read [`Context`] first.

use accl_types::Moment;

use crate::call::Callback;
use crate::peers::Net;

/// What the engine provides to a group while it works.
pub(crate) struct Context<'a> {
    pub(crate) net: &'a mut Net,
    /// Callbacks of calls that have ended: the driver has them run, without its lock.
    pub(crate) completed: &'a mut Vec<Callback>,
    pub(crate) segment: u64,
    pub(crate) now: Moment,
}

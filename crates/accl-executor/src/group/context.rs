//! What the engine provides to a group while it works.
//!
//! Owns nothing. Read [`Context`] first.

use accl_types::Moment;

use super::completed::Completed;
use super::stopping::Stopping;
use crate::peers::Net;

/// What the engine provides to a group while it works.
pub struct Context<'a> {
    /// The peers and the links to them.
    pub net: &'a mut Net,
    /// Calls that have ended: the driver tells of them, without its lock.
    pub(crate) completed: &'a mut Completed,
    /// Calls that have failed and whose external operations have yet to stop.
    pub(crate) stopping: &'a mut Stopping,
    pub(crate) segment: u64,
    /// The time of this pass.
    pub now: Moment,
}

//! The parts of the engine that a group uses while it works.
//!
//! This module owns nothing. Read [`Context`] first.

use accl_types::Moment;

use super::completed::Completed;
use super::stopping::Stopping;
use crate::exec::RunContext;
use crate::peers::{Members, Net};

/// The parts of the engine that a group uses while it works.
pub struct Context<'a> {
    /// The peers and the links to them.
    pub net: &'a mut Net,
    /// Completed calls, which the driver reports after it has released its lock.
    pub(crate) completed: &'a mut Completed,
    /// Failed calls whose external operations have yet to stop.
    pub(crate) stopping: &'a mut Stopping,
    pub(crate) segment: u64,
    /// Time of this pass.
    pub now: Moment,
}

impl Context<'_> {
    /// Returns the parts of a group that a run needs, apart from the collection of runs.
    pub(super) fn of_run<'a>(&'a mut self, members: &'a mut Members) -> RunContext<'a> {
        RunContext { net: self.net, members, segment: self.segment }
    }
}

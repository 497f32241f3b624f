//! Calls on the fast path: a small call of a known shape runs on its caller's thread until it is done or has to wait.
//!
//! Owns the conditions of the fast path, and the state of a call that stopped on it. A run continues such a call.
//! Read [`GroupState::start_fast`] first.

use std::sync::Arc;

use accl_types::{Collective, Error, Moment};
use accl_wire::frame::{CHECKS_SIGNATURES, Header, Kind};

use super::fast_shapes::FastShapes;
use super::state::GroupState;
use crate::call::{CallDesc, CallState};
use crate::exec::{FastPath, Run, RunContext, SpinLimit};
use crate::memory::Compute;
use crate::peers::Net;
use crate::plan::Shape;

/// How far a call came on the fast path.
pub enum FastStart {
    /// The call is done.
    Done {
        /// Sequence number of the call in the group.
        seq: u64,
        /// Whether a frame of another rank has arrived for the call. False only if the call receives nothing.
        has_received: bool,
    },
    /// The call stopped, and a run must continue it.
    Stopped(Box<Stopped>),
    /// The call panicked, and all groups have failed.
    Failed(Box<Error>),
}

/// A call that stopped on the fast path.
pub struct Stopped {
    shape: Arc<Shape>,
    compute: Compute,
    pub(crate) seq: u64,
    /// Number of operations that are done, in the plan's order for the fast path.
    finished: usize,
}

impl Stopped {
    /// Returns the name of the call's algorithm.
    pub fn algorithm(&self) -> &'static str {
        self.shape.plan.name
    }

    /// Creates the run that continues the call.
    pub(crate) fn into_run(self, call: Arc<CallState>, deadline: Option<Moment>) -> Run {
        let order = self.shape.plan.fast_path.as_deref().unwrap_or_default();
        Run::new(call, &self.shape, self.compute, order.get(..self.finished).unwrap_or_default(), deadline)
    }
}

impl GroupState {
    /// Starts a call on the fast path, and runs it as far as possible. Returns `None` if the call cannot take it; then
    /// nothing has changed.
    #[inline]
    pub(crate) fn start_fast(
        &mut self,
        desc: &CallDesc,
        spin_limit: SpinLimit,
        net: &mut Net,
        segment: u64,
    ) -> Option<FastStart> {
        let is_quiet = !self.failure.has_come() && self.runs.is_empty() && self.inbox.is_empty() && !self.is_timed;
        let waits_for_composed = desc.collective == Collective::Barrier && self.sequence.has_composed();
        if !is_quiet || waits_for_composed || desc.bytes() > self.fast.most_bytes || !self.all_poll_without_syscall(net)
        {
            return None;
        }
        let FastShapes { shapes, compute, scratch, .. } = &mut self.fast;
        let shape = shapes.find(desc, self.members.world())?;
        let order = shape.plan.fast_path.as_deref()?;
        let header = shape.whole?;
        // Tensors that overlap or are invalid are left to the regular path.
        if !compute.take_addresses(desc, self.rank, shape.reducer) {
            return None;
        }
        if shape.plan.scratch_bytes > 0 {
            scratch.grow(shape.plan.scratch_bytes as usize).ok()?;
            compute.buffers_mut().borrow_scratch(scratch);
        }
        let seq = self.sequence.take(1);
        let header = if CHECKS_SIGNATURES { header } else { Header::new(Kind::BeginWhole) };
        let head = Header { group: self.id, seq, ..header }.to_bytes();
        let fast_path = FastPath { plan: &shape.plan, compute, head, group: self.id, seq, spin_limit };
        let finished = fast_path.advance(order, &mut RunContext { net, members: &mut self.members, segment });
        if finished == order.len() {
            self.history.add_fast(seq, shape);
            return Some(FastStart::Done { seq, has_received: shape.plan.has_receives });
        }
        let mut compute = std::mem::take(compute);
        if shape.plan.scratch_bytes > 0 {
            compute.buffers_mut().own_scratch(std::mem::take(scratch));
        }
        Some(FastStart::Stopped(Box::new(Stopped { shape: shape.clone(), compute, finished, seq })))
    }
}

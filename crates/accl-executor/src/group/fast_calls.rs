//! Calls on the fast path: a small call of a known shape runs on its caller's thread until it is done or has to wait.
//!
//! Owns the conditions of the fast path, and the state of a call that stopped on it. A run continues such a call. Read
//! [`GroupState::run_fast_path`] first.

use std::sync::Arc;

use accl_types::{Collective, Error, Moment};
use accl_wire::frame::{CHECKS_SIGNATURES, Header, Kind};

use super::state::GroupState;
use crate::call::{CallDesc, CallState};
use crate::exec::{FastPath, Run, RunContext, SpinLimit};
use crate::memory::Compute;
use crate::peers::Net;
use crate::plan::Shape;

/// Result of a call on the fast path.
pub enum FastPathEnd {
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
    /// Runs a call on the fast path as far as possible. Returns `None` if the call cannot take it; then nothing has
    /// changed.
    #[inline]
    pub(crate) fn run_fast_path(
        &mut self,
        desc: &CallDesc,
        spin_limit: SpinLimit,
        net: &mut Net,
        segment: u64,
    ) -> Option<FastPathEnd> {
        let is_quiet = !self.failure.has_come() && self.runs.is_empty() && self.inbox.is_empty() && !self.is_timed;
        let waits_for_composed = desc.collective == Collective::Barrier && self.sequence.has_composed();
        if !is_quiet || waits_for_composed || !self.is_near(net) {
            return None;
        }
        let shape = self.fast_shapes.find(desc, self.members.world())?;
        let order = shape.plan.fast_path.as_deref().filter(|_| shape.plan.longest <= segment)?;
        let header = shape.whole?;
        // Tensors that overlap or are invalid are left to the regular path.
        if !self.compute.take_addresses(desc, self.rank, shape.reducer) {
            return None;
        }
        if shape.plan.scratch_bytes > 0 {
            self.scratch.grow(shape.plan.scratch_bytes as usize).ok()?;
            self.compute.buffers_mut().borrow_scratch(&mut self.scratch);
        }
        let seq = self.sequence.take(1);
        let header = if CHECKS_SIGNATURES { header } else { Header::new(Kind::BeginWhole) };
        let head = Header { group: self.id, seq, ..header }.to_bytes();
        let fast_path = FastPath { plan: &shape.plan, compute: &self.compute, head, group: self.id, seq, spin_limit };
        let finished = fast_path.go(order, &mut RunContext { net, members: &mut self.members, segment });
        if finished == order.len() {
            let has_received = shape.plan.has_receives;
            // Equal shapes have equal signatures, and comparing addresses is faster.
            let is_alike = self.latest.as_ref().is_some_and(|latest| Arc::ptr_eq(latest, shape));
            if !(is_alike && self.history.add_alike(seq)) {
                self.history.add(seq, &shape.signature);
                self.latest = Some(shape.clone());
            }
            return Some(FastPathEnd::Done { seq, has_received });
        }
        let mut compute = std::mem::take(&mut self.compute);
        if shape.plan.scratch_bytes > 0 {
            compute.buffers_mut().own_scratch(std::mem::take(&mut self.scratch));
        }
        Some(FastPathEnd::Stopped(Box::new(Stopped { shape: shape.clone(), compute, finished, seq })))
    }

    /// Lets later calls with this description take the fast path, if the shape allows it.
    pub(crate) fn keep_shape(&mut self, desc: &CallDesc, shape: &Arc<Shape>) {
        if shape.plan.fast_path.is_some() && self.fast_shapes.find(desc, self.members.world()).is_none() {
            self.fast_shapes.keep(shape.clone());
        }
    }
}

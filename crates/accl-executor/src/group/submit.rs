//! Submission of calls: a checked description with its plan and its memory becomes a call in flight.
//!
//! This module owns the caller's identity, the sequence number and deadline of a call, and its first steps. The engine
//! provides plans, and drives the call from then on. Read [`Caller::start`] first.

use std::sync::Arc;

use accl_types::{Collective, Error, Moment, Rank, Result};
use accl_wire::frame::Signature;

use super::context::Context;
use super::core::Core;
use super::fast_calls::Stopped;
use super::state::GroupState;
use crate::call::{CallDesc, CallInfo, CallObserver, CallState, External, Mode, Stopwatch, Wake};
use crate::exec::{Message, PRIVATE_TAGS, PROBE_AFTER, Run};
use crate::memory::{
    BY_REFERENCE, Buffers, Coder, Compute, MessageMemory, References, Sample, publishing_needs, tensor_coder,
};
use crate::plan::Shape;

/// A rank of one group that issues calls.
pub struct Caller {
    /// Number of the group.
    pub group: u64,
    /// Name of the group, for messages.
    pub name: Arc<str>,
    /// Rank of the caller in the group.
    pub rank: Rank,
    /// Number of ranks.
    pub world: u32,
    /// Rank of the caller in the job, for random numbers. Callers with equal ranks in different groups differ in it.
    pub global_rank: u64,
}

/// A call that is ready to start.
pub struct Prepared {
    /// Shape of a collective; `None` for point-to-point calls.
    shape: Option<Arc<Shape>>,
    buffers: Buffers,
}

impl Prepared {
    /// Returns whether results are copied to other memory.
    pub fn copies_out(&self) -> bool {
        self.buffers.copies_out()
    }

    /// Returns the name of a collective's algorithm; `None` for point-to-point calls.
    pub fn algorithm(&self) -> Option<&'static str> {
        self.shape.as_ref().map(|shape| shape.plan.name)
    }
}

/// A call that has started.
pub struct Started {
    /// State of the call, which shows its completion.
    pub call: Arc<CallState>,
    /// Whether a sleeping driver must be woken to check the call.
    pub wakes_driver: bool,
}

impl Caller {
    /// Returns the worker that can compute the combinations of a checked call where its tensors lie; `None` if the host does.
    /// With such a worker, the caller sets [`CallDesc::tensor_coder`] before it asks for the shape.
    pub fn tensor_coder(&self, desc: &CallDesc) -> Option<Arc<dyn External>> {
        tensor_coder(desc, self.rank, self.world)
    }

    /// Prepares the memory of a checked call; a collective comes with its shape. The caller should hold no lock,
    /// because this may copy tensors.
    ///
    /// # Errors
    /// `Exhausted` if there is no memory for the call. `InvalidArgument` for tensors that cannot be written.
    pub fn prepare(&self, desc: &CallDesc, shape: Option<Arc<Shape>>) -> Result<Prepared> {
        let mut buffers = Buffers::prepare(desc, self.rank.index())?;
        if desc.collective == Collective::Reduce && self.rank != desc.root {
            buffers.discard_outputs();
        }
        if let Some(shape) = &shape {
            Self::add_memory(&mut buffers, desc, shape)?;
        }
        buffers.offload(desc);
        buffers.join(desc);
        Self::begin_copies(&mut buffers, desc, shape.as_deref())?;
        Ok(Prepared { shape, buffers })
    }

    /// Prepares another part `desc` of a call whose first part is prepared, like [`Caller::prepare`].
    ///
    /// # Errors
    /// `Exhausted` if there is no memory for the part.
    pub fn prepare_part(&self, first: &Prepared, desc: &CallDesc, shape: Arc<Shape>) -> Result<Prepared> {
        let mut buffers = first.buffers.share();
        Self::add_memory(&mut buffers, desc, &shape)?;
        Self::begin_copies(&mut buffers, desc, Some(&shape))?;
        Ok(Prepared { shape: Some(shape), buffers })
    }

    /// Adds scratch memory, and memory for encoded chunks that a worker shares.
    fn add_memory(buffers: &mut Buffers, desc: &CallDesc, shape: &Shape) -> Result<()> {
        if desc.is_by_reference {
            return buffers.add_publisher(desc, publishing_needs(desc, &shape.plan), shape.plan.code_bytes);
        }
        buffers.add_scratch(shape.plan.scratch_bytes)?;
        match shape.plan.combines_elsewhere && shape.plan.code_bytes > 0 {
            true => buffers.lend_codes(desc, shape.plan.code_bytes as usize),
            false => Ok(()),
        }
    }

    /// Begins the copies of tensors that only external operations can access.
    fn begin_copies(buffers: &mut Buffers, desc: &CallDesc, shape: Option<&Shape>) -> Result<()> {
        match shape {
            Some(shape) => shape.plan.staging.as_ref().map_or(Ok(()), |plan| buffers.begin_copies(desc, plan)),
            None => buffers.begin_message(desc),
        }
    }

    /// Starts a call, and does everything that can be done at once. `sample` is the additional tensor of a measured
    /// call. `observer` is notified when the call completes.
    ///
    /// # Errors
    /// `Aborted` if the group has failed or was destroyed, or the kind of the cause if no call has raised it; `Exhausted`
    /// or `Internal`. In each case, no sequence number
    /// was consumed.
    pub fn start(
        &self,
        core: &mut Core,
        desc: &CallDesc,
        prepared: Prepared,
        sample: Option<Sample>,
        observer: Arc<dyn CallObserver>,
        now: Moment,
    ) -> Result<Started> {
        let clock = core.clock();
        let wake =
            (desc.staging.is_some() || desc.offload.is_some() || desc.joins.is_some()).then(|| core.wake().clone());
        let Prepared { shape, mut buffers } = prepared;
        self.start_with(core, desc, now, |group, context| {
            if let Some(error) = group.aborted(Some(desc.collective)) {
                return Err(error);
            }
            let Some(shape) = shape else { return self.start_message(desc, buffers, observer, group, context, wake) };
            if shape.plan.code_bytes > 0 && !shape.plan.combines_elsewhere {
                buffers.add_codes(group.take_codes(shape.plan.code_bytes as usize)?);
            }
            if desc.may_take_fast_path() {
                group.fast.keep(desc, &shape, context.segment);
            }
            let seq = group.take_seq(desc.seq, desc.part.of)?;
            let call = self.call(desc, seq, observer, group, now);
            let deadline = deadline(desc, group, now);
            buffers.number(seq, now, deadline);
            let coder = desc.encoding(self.world).map(|encoding| {
                let has_checksums = group.has_checksums(context.net);
                let ranks = (self.global_rank, self.rank);
                let coder = Coder::new(encoding, desc, ranks, self.world, has_checksums, clock);
                match &encoding.probe {
                    Some(probe) => coder.probed(probe, sample, desc.part.index == 0, &buffers),
                    None => coder,
                }
            });
            let mut compute = Compute::new(buffers, shape.reducer);
            if desc.is_by_reference {
                compute = compute.referencing(References::new(desc, self.world, group.has_checksums(context.net)));
            }
            if let Some(coder) = coder {
                compute = compute.encoding(coder);
            }
            if let Some(phases) = &desc.phases {
                compute = compute.watched(Stopwatch::new(phases.clone(), clock));
            }
            let mut run = Run::new(call.clone(), &shape, compute, &[], deadline);
            if let Some(wake) = wake {
                run.set_wake(wake);
                run.begin_externals();
            }
            group.start_collective(run, context);
            Ok(call)
        })
    }

    /// Resumes a call that stopped on the fast path: adds it to the calls in flight.
    ///
    /// # Errors
    /// Returns the errors of [`Caller::start`]. The call had taken its sequence number before.
    pub fn resume(
        &self,
        core: &mut Core,
        desc: &CallDesc,
        stopped: Stopped,
        observer: Arc<dyn CallObserver>,
        now: Moment,
    ) -> Result<Started> {
        self.start_with(core, desc, now, |group, context| {
            let call = self.call(desc, stopped.seq, observer, group, now);
            let deadline = deadline(desc, group, now);
            group.start_collective(stopped.into_run(call.clone(), deadline), context);
            Ok(call)
        })
    }

    /// Starts a call with `start`, and does everything that can be done at once.
    fn start_with(
        &self,
        core: &mut Core,
        desc: &CallDesc,
        now: Moment,
        start: impl FnOnce(&mut GroupState, &mut Context<'_>) -> Result<Arc<CallState>>,
    ) -> Result<Started> {
        let started = core.guarded(|core| {
            let started = core.with_group(self.group, now, |group, context| {
                let call = start(group, context)?;
                group.advance(context);
                group.check_absentees(context);
                let probe_at = (!desc.collective.is_point_to_point()).then(|| now + PROBE_AFTER);
                let check_by = deadline(desc, group, now).into_iter().chain(probe_at).chain(group.begin_by());
                Ok((call, check_by.min()))
            });
            core.net.flush_all();
            started
        })?;
        let (call, check_by) = started.unwrap_or_else(|| Err(self.destroyed(Some(desc.collective))))?;
        if call.is_done() {
            core.ended_at_once();
        }
        let wakes_driver = match desc.mode {
            // The progress may have completed the call for which the driver sleeps.
            _ if call.is_done() => core.take_driver_unnotified() | core.must_wake_driver(None),
            Mode::Async => core.must_wake_driver(check_by),
            // The caller polls for the call itself first, and wakes the driver before it sleeps.
            Mode::Blocking => false,
        };
        Ok(Started { call, wakes_driver })
    }

    fn start_message(
        &self,
        desc: &CallDesc,
        buffers: Buffers,
        observer: Arc<dyn CallObserver>,
        group: &mut GroupState,
        context: &mut Context<'_>,
        wake: Option<Wake>,
    ) -> Result<Arc<CallState>> {
        let blocks = if desc.collective == Collective::Send { &desc.inputs } else { &desc.outputs };
        let [tensor] = blocks.pieces() else {
            return Err(Error::invalid_argument("a point-to-point message takes exactly one tensor"));
        };
        let count = tensor.count_elems();
        let signature = Signature {
            collective: desc.collective as u8,
            dtype: tensor.dtype as u8,
            count,
            shape_hash: if desc.is_by_reference { BY_REFERENCE } else { 0 },
            reserved: desc.note,
            ..Signature::default()
        };
        let wake = || wake.map_or_else(|| Arc::new(|| ()) as Wake, |wake| group.p2p.wake(&wake));
        let memory = MessageMemory::new(buffers, desc, tensor, context.segment, wake)?;
        let number = group.take_message_number();
        let call = self.call(desc, number, observer, group, context.now);
        let message = Message {
            call: call.clone(),
            deadline: deadline(desc, group, context.now),
            peer: desc.peer,
            tag: desc.tag,
            signature,
            memory,
            is_private: desc.tag >= PRIVATE_TAGS,
        };
        let to = if desc.collective == Collective::Send { desc.peer } else { None };
        group.start_message(message, to, context);
        Ok(call)
    }

    fn call(
        &self,
        desc: &CallDesc,
        seq: u64,
        observer: Arc<dyn CallObserver>,
        group: &GroupState,
        now: Moment,
    ) -> Arc<CallState> {
        let info = CallInfo {
            group_id: self.group,
            group: self.name.clone(),
            rank: self.rank,
            collective: desc.collective,
            seq,
            is_async: desc.mode == Mode::Async,
            is_cut: desc.part.of > 1,
            is_timed: group.is_timed(),
            phases: desc.phases.clone(),
            waits: group.waits().clone(),
        };
        CallState::new(info, observer, now)
    }

    /// Returns the error of a call on a group that no longer exists.
    pub fn destroyed(&self, collective: Option<Collective>) -> Error {
        let error = self.in_context(Error::aborted("the group was destroyed; create a new one"));
        match collective {
            Some(collective) => error.of(collective),
            None => error,
        }
    }

    /// Adds this rank's group and rank to an error.
    pub fn in_context(&self, error: Error) -> Error {
        error.in_group(&self.name).on_rank(self.rank)
    }
}

/// Returns the deadline of a call. Private messages have none: the code that issues them decides how long to wait, and
/// takes them back.
fn deadline(desc: &CallDesc, group: &GroupState, now: Moment) -> Option<Moment> {
    if desc.tag >= PRIVATE_TAGS {
        return None;
    }
    Some(now + desc.timeout.unwrap_or(group.timeout()))
}

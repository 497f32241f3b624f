//! A group as its users hold it: submission of calls, and the end.
//!
//! Owns the turning of a checked description into a call in flight; the state lives in `state`, under the engine's lock.
//! Read [`Group::submit`] first.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use accl_kernels::Reducer;
use accl_transport::frame::Signature;
use accl_types::config::Config;
use accl_types::{Collective, Elems, Error, Rank, ReduceOp, Result};

use crate::buffers::{Buffers, block_elems};
use crate::call::{Call, CallPlace};
use crate::desc::CallDesc;
use crate::engine::Engine;
use crate::hash::hash_words;
use crate::p2p::{Message, PRIVATE_TAGS};
use crate::plan::PlanKey;
use crate::run::{INQUIRE_AFTER, Run};
use crate::state::{GroupState, Hands};

/// What a group is made from.
#[derive(Clone, Debug)]
pub struct GroupSpec {
    /// Name for messages.
    pub name: String,
    /// This process's rank.
    pub rank: Rank,
    /// Number of ranks.
    pub world: u32,
    /// How long a call may take, and the making of the group.
    pub timeout: Duration,
    /// Settings; those of process scope must equal the first group's.
    pub config: Config,
    /// Address of the store's master, if known: the interface with the route to it is offered to peers first.
    pub master: Option<IpAddr>,
    /// Ranks in the job of this group's ranks, for messages; may be empty.
    pub global_ranks: Vec<u64>,
}

/// A set of ranks that make calls together. Dropping it leaves the group.
pub struct Group {
    pub(crate) engine: Arc<Engine>,
    pub(crate) id: u64,
    pub(crate) name: Arc<str>,
    pub(crate) rank: Rank,
    pub(crate) world: u32,
    closed: AtomicBool,
}

impl Group {
    pub(crate) fn new(engine: Arc<Engine>, id: u64, name: Arc<str>, rank: Rank, world: u32) -> Arc<Self> {
        Arc::new(Self { engine, id, name, rank, world, closed: AtomicBool::new(false) })
    }

    /// Starts a call. Its tensors must stay valid and untouched until the call is done or failed.
    ///
    /// Any thread may submit; calls of one group are numbered in the order of submission, which must be the same on all
    /// ranks.
    ///
    /// # Errors
    /// `InvalidArgument`, `InvalidType`, `Unsupported`, `Configuration`, `Exhausted`: refused, no number was consumed,
    /// the group is usable. `Aborted`: the group failed earlier or was destroyed. Everything later comes through the
    /// call.
    pub fn submit(&self, desc: CallDesc) -> Result<Arc<Call>> {
        self.start(desc).map_err(|error| error.in_group(&self.name).on_rank(self.rank))
    }

    fn start(&self, desc: CallDesc) -> Result<Arc<Call>> {
        self.check_usable(desc.collective)?;
        desc.check(self.world)?;
        let placed = |error: Error| error.of(desc.collective);
        let mut buffers = Buffers::prepare(&desc, self.rank.index()).map_err(placed)?;
        if desc.collective == Collective::Reduce && self.rank != desc.root {
            buffers.discard_outputs();
        }
        let now = Instant::now();
        let mode = desc.mode;
        let result = self.engine.with_core(|core| {
            let started = core.with_group(self.id, now, |group, hands| {
                if let Some(error) = group.aborted(Some(desc.collective)) {
                    return Err(error);
                }
                let call = if desc.collective.is_point_to_point() {
                    self.start_message(&desc, buffers, group, hands)
                } else {
                    self.start_run(&desc, buffers, group, hands)
                }?;
                group.advance(hands);
                Ok((call, deadline(&desc, group, now).map(|deadline| deadline.min(now + INQUIRE_AFTER))))
            });
            let (call, look_by) = started.unwrap_or_else(|| Err(self.destroyed(Some(desc.collective))))?;
            core.net.flush_all();
            Ok((call, core.must_wake_driver(look_by)))
        });
        let (call, wake) = result.map_err(placed)?;
        if wake {
            self.engine.kick();
        }
        self.engine.submitted(&call, mode);
        Ok(call)
    }

    fn start_run(
        &self,
        desc: &CallDesc,
        mut buffers: Buffers,
        group: &mut GroupState,
        hands: &mut Hands<'_>,
    ) -> Result<Arc<Call>> {
        let reduces = desc.collective.reduces();
        let elem = if reduces { desc.dtype.size_bytes() } else { 1 };
        let outputs = block_elems(&desc.outputs, elem as u64);
        let in_place = desc.inputs.is_empty();
        let inputs = match desc.collective {
            Collective::AllReduce | Collective::Reduce if in_place => outputs.clone(),
            _ => block_elems(&desc.inputs, elem as u64),
        };
        let key = PlanKey {
            collective: desc.collective,
            root: desc.root,
            elem_bytes: elem as u64,
            equal_blocks: equal_blocks(desc, &inputs, &outputs),
            inputs,
            outputs,
        };
        check_kept_block(desc.collective, &key, self.rank)?;
        let plan = group.plans.get(&key, &group.config)?;
        let reducer =
            if reduces { Some((Reducer::new(kernel_op(desc.op), desc.dtype, self.world)?, elem)) } else { None };
        buffers.add_scratch(plan.scratch_bytes)?;
        let signature = signature(desc, &key, plan.algorithm.id);
        let seq = group.take_seq(desc.seq)?;
        let call = self.call(desc, seq, group, hands.now);
        let deadline = deadline(desc, group, hands.now);
        let run = Run::new(call.clone(), plan, signature, buffers, reducer, deadline);
        group.start(run, hands);
        Ok(call)
    }

    fn start_message(
        &self,
        desc: &CallDesc,
        buffers: Buffers,
        group: &mut GroupState,
        hands: &mut Hands<'_>,
    ) -> Result<Arc<Call>> {
        let blocks = if desc.collective == Collective::Send { &desc.inputs } else { &desc.outputs };
        let [tensor] = blocks.pieces() else {
            return Err(Error::invalid_argument("a message has one tensor"));
        };
        let count = tensor.count_elems();
        let signature =
            Signature { collective: desc.collective as u8, dtype: tensor.dtype as u8, count, ..Signature::default() };
        let call = self.call(desc, group.next_p2p, group, hands.now);
        group.next_p2p += 1;
        let message = Message {
            call: call.clone(),
            deadline: deadline(desc, group, hands.now),
            peer: desc.peer,
            tag: desc.tag,
            signature,
            buffers,
            total: tensor.len_bytes(),
            is_private: desc.tag >= PRIVATE_TAGS,
        };
        let to = if desc.collective == Collective::Send { desc.peer } else { None };
        group.start_message(message, to, hands);
        Ok(call)
    }

    fn call(&self, desc: &CallDesc, seq: u64, group: &GroupState, now: Instant) -> Arc<Call> {
        let place = CallPlace {
            engine: Arc::downgrade(&self.engine),
            group_id: self.id,
            group: self.name.clone(),
            rank: self.rank,
            collective: desc.collective,
            seq,
            timed: group.timing,
        };
        Call::new(place, now)
    }

    /// Takes `count` consecutive numbers for collectives that are submitted later with [`CallDesc::seq`].
    ///
    /// # Errors
    /// `Aborted` when the group failed or was destroyed.
    pub fn reserve_seqs(&self, count: u64) -> Result<u64> {
        self.with_state(|group, _| match group.aborted(None) {
            Some(error) => Err(error),
            None => Ok(group.reserve_seqs(count)),
        })?
    }

    /// Number of the next collective.
    pub fn next_seq(&self) -> u64 {
        self.with_state(|group, _| group.next_seq).unwrap_or(0)
    }

    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.rank.0
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// Name for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// For a person: name, rank and world, then a line for each other rank with its process and the link to it.
    pub fn describe(&self) -> String {
        let head = format!("group {}\nrank {}\nworld {}\n", self.name, self.rank, self.world);
        let links = self.with_state(|group, hands| {
            let others = group.members.ranks().filter(|&rank| rank != group.rank);
            let line = |rank: Rank| {
                let link = hands.net.describe(group.members.peer(rank));
                format!("{}: {link}\n", group.members.describe(rank, hands.net))
            };
            others.map(line).collect::<String>()
        });
        head + &links.unwrap_or_default()
    }

    /// The first cause, when the group has failed.
    pub fn error(&self) -> Option<Error> {
        self.with_state(|group, _| group.poison().cloned()).ok().flatten()
    }

    /// The deadline of calls made from now on.
    pub fn set_timeout(&self, timeout: Duration) {
        let _ = self.with_state(|group, _| group.timeout = timeout);
    }

    /// Calls made from now on record their duration.
    pub fn enable_timing(&self) {
        let _ = self.with_state(|group, _| group.timing = true);
    }

    /// Ends the group here and on all ranks: calls in flight fail at once, later ones are refused. Any thread may.
    pub fn abort(&self, reason: &str) {
        let error = Error::aborted(format!("abort was called: {reason}")).in_group(&self.name).on_rank(self.rank);
        let _ = self.with_state(|group, hands| group.fail(error, hands, crate::state::Tell::Peers));
        self.engine.flush();
        self.engine.kick();
    }

    /// Leaves the group: calls in flight fail, the other ranks are told. Again and again is fine.
    ///
    /// # Errors
    /// A disagreement about calls that ended before it could be seen, when no later call could say so.
    pub fn shutdown(&self) -> Result<()> {
        if self.closed.swap(true, Ordering::AcqRel) || self.engine.is_forked() {
            return Ok(());
        }
        // One look at the links: a disagreement that calls could not see may lie there.
        self.engine.pass_now();
        let unsaid = self.with_state(|group, hands| {
            let unsaid = group.unsaid();
            group.leave(hands);
            unsaid
        });
        self.engine.with_core(|core| core.remove_group(self.id));
        self.engine.flush();
        self.engine.kick();
        match unsaid {
            Ok(Some(error)) => Err(error),
            Ok(None) | Err(_) => Ok(()),
        }
    }

    pub(crate) fn with_state<R>(&self, f: impl FnOnce(&mut GroupState, &mut Hands<'_>) -> R) -> Result<R> {
        let now = Instant::now();
        self.engine.with_core(|core| core.with_group(self.id, now, f)).ok_or_else(|| self.destroyed(None))
    }

    fn check_usable(&self, collective: Collective) -> Result<()> {
        if self.engine.is_forked() {
            return Err(Error::aborted(
                "this process was forked from the one that made the group, and a group does not survive a fork; \
                 make a group of its own in the child, or start the child with spawn",
            )
            .of(collective));
        }
        if self.closed.load(Ordering::Acquire) {
            return Err(self.destroyed(Some(collective)));
        }
        Ok(())
    }

    fn destroyed(&self, collective: Option<Collective>) -> Error {
        let error = Error::aborted("the group was destroyed; make a new one").in_group(&self.name).on_rank(self.rank);
        match collective {
            Some(collective) => error.of(collective),
            None => error,
        }
    }

    /// An error with this group's place.
    pub(crate) fn placed(&self, error: Error) -> Error {
        error.in_group(&self.name).on_rank(self.rank)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A cause that nobody asked for has nowhere to go.
        let _ = self.shutdown();
    }
}

/// Factors are applied while the buffers are prepared; what remains is a sum.
fn kernel_op(op: ReduceOp) -> ReduceOp {
    if op == ReduceOp::PremulSum { ReduceOp::Sum } else { op }
}

fn deadline(desc: &CallDesc, group: &GroupState, now: Instant) -> Option<Instant> {
    now.checked_add(desc.timeout.unwrap_or(group.timeout))
}

/// Whether every rank knows from its own arguments that all blocks are equal.
fn equal_blocks(desc: &CallDesc, inputs: &[Vec<Elems>], outputs: &[Vec<Elems>]) -> bool {
    let all_same = |blocks: &[Vec<Elems>]| blocks.windows(2).all(|pair| pair[0] == pair[1]);
    match desc.collective {
        Collective::AllToAll => desc.equal_blocks,
        Collective::AllGather => all_same(outputs),
        Collective::ReduceScatter => all_same(inputs),
        Collective::AllReduce
        | Collective::Broadcast
        | Collective::Reduce
        | Collective::Gather
        | Collective::Scatter
        | Collective::Barrier
        | Collective::Send
        | Collective::Recv => true,
    }
}

/// The block that a rank keeps must be as large on both sides. (What goes between ranks is compared there.)
fn check_kept_block(collective: Collective, key: &PlanKey, rank: Rank) -> Result<()> {
    let own = |blocks: &[Vec<Elems>]| {
        if blocks.len() == 1 { blocks.first().cloned() } else { blocks.get(rank.index()).cloned() }
    };
    let (input, output) = match collective {
        Collective::AllGather
        | Collective::ReduceScatter
        | Collective::AllToAll
        | Collective::Gather
        | Collective::Scatter => (own(&key.inputs), own(&key.outputs)),
        Collective::AllReduce
        | Collective::Broadcast
        | Collective::Reduce
        | Collective::Barrier
        | Collective::Send
        | Collective::Recv => return Ok(()),
    };
    let (Some(input), Some(output)) = (input, output) else { return Ok(()) };
    if input == output {
        return Ok(());
    }
    let bytes = |block: &[Elems]| block.iter().map(|elems| elems.0).sum::<u64>() * key.elem_bytes;
    Err(Error::invalid_argument(format!(
        "the block that rank {rank} keeps has {} bytes as input and {} as output",
        bytes(&input),
        bytes(&output)
    )))
}

fn signature(desc: &CallDesc, key: &PlanKey, algorithm: u8) -> Signature {
    let total = |blocks: &[Vec<Elems>]| blocks.iter().flatten().map(|elems| elems.0).sum::<u64>();
    let (count, shape) = match desc.collective {
        Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::AllGather => {
            (total(&key.outputs), Some(&key.outputs))
        }
        Collective::ReduceScatter => (total(&key.inputs), Some(&key.inputs)),
        Collective::Gather => (total(&key.inputs), None),
        Collective::Scatter => (total(&key.outputs), None),
        // With splits the sizes differ from rank to rank; each message is checked by its own length.
        Collective::AllToAll | Collective::Barrier | Collective::Send | Collective::Recv => (0, None),
    };
    // Elements, not the bytes that calls without arithmetic are planned in.
    let count = count * key.elem_bytes / desc.dtype.size_bytes() as u64;
    let reduces = desc.collective.reduces();
    Signature {
        collective: desc.collective as u8,
        dtype: desc.dtype as u8,
        op: if reduces { desc.op as u8 } else { 0 },
        algorithm,
        root: if desc.collective.is_rooted() { desc.root.0 } else { 0 },
        count,
        shape_hash: shape.map_or(0, |blocks| hash_blocks(blocks)),
        reserved: 0,
    }
}

/// Over the sizes, with a mark between blocks.
fn hash_blocks(blocks: &[Vec<Elems>]) -> u64 {
    hash_words(blocks.iter().flat_map(|block| block.iter().map(|elems| elems.0).chain([u64::MAX])))
}

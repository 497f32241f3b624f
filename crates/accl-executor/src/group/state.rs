//! One group inside the engine: its calls in flight, unexpected frames, signatures, and its failure.
//!
//! Everything here runs under the driver's lock. The state is composed of `sequence`, `inbox`, `admission` and
//! `failure`. The caller's side is the `api::group` module of accl-engine, and `core` takes frames off links. Read
//! [`GroupState`] first.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use accl_types::{Collective, Error, Moment, Rank, Result, Seq};
use accl_wire::frame::{CHECKS_SIGNATURES, Cause, Header, Kind, OVERHEAD_BYTES, Signature};
use smallvec::SmallVec;

use super::admission::Admission;
use super::completed::{FailedGroup, Notes, Notify};
use super::context::Context;
use super::failure::Failure;
use super::history::History;
use super::inbox::{Inbox, Unexpected};
use super::lanes::LaneNumbers;
use super::packets::PacketSink;
use super::sequence::Sequence;
use crate::call::{CallDesc, CallState, Waits};
use crate::exec::{FastPath, FromAny, Message, OFFLOAD_GRACE, P2p, PROBE, Run, RunContext, SpinLimit, answer_probe};
use crate::memory::{BufferPool, Compute, Storage};
use crate::peers::{Gone, Mark, Members, Net, PeerId};
use crate::plan::signature::disagreement;
use crate::plan::{Shape, Shapes};

/// Maximum bytes of a report that the group has failed.
const MAX_CAUSE_BYTES: usize = 1024;

/// One group on one of its ranks: its calls in flight, frames of calls that are not issued yet, and its failure.
pub struct GroupState {
    id: u64,
    name: Arc<str>,
    rank: Rank,
    /// Timeout of calls issued from now on.
    timeout: Duration,
    /// Whether calls issued from now on record their duration.
    is_timed: bool,
    members: Members,
    p2p: P2p,
    /// Recent shapes that may take the fast path.
    fast_shapes: Shapes,
    runs: BTreeMap<u64, Run>,
    /// Highest sequence number of a call that has begun.
    newest_begun: u64,
    admission: Admission,
    inbox: Inbox,
    history: History,
    /// Shape of the last call in `history`, if that call took the fast path.
    latest: Option<Arc<Shape>>,
    sequence: Sequence,
    /// Number of the next point-to-point call, used on this rank only.
    next_message: u64,
    /// Number of the latest monitored barrier.
    latest_monitored: u32,
    failure: Failure,
    /// Cached result of `is_near`.
    near: Option<bool>,
    /// Memory and arithmetic of calls on the fast path, one after the other.
    compute: Compute,
    scratch: Storage,
    code_pool: BufferPool,
    /// Whether the group is in the list of groups that a pass advances.
    is_listed: bool,
    /// Whether any rank has left or is lost.
    has_absentees: bool,
    calls_failed: u64,
    /// Receiver of packets for the device of this rank, if it has one.
    packets: Option<Arc<dyn PacketSink>>,
    /// Wait counters of the group's callers.
    waits: Arc<Waits>,
}

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

/// Borrows the parts of a group that a run needs, apart from the collection of runs.
macro_rules! env {
    ($group:expr, $context:expr) => {
        RunContext { net: &mut *$context.net, members: &mut $group.members, segment: $context.segment }
    };
}

/// A call in flight, and the ranks or operations for which it waits.
pub struct CallInFlight {
    /// State of the call.
    pub call: Arc<CallState>,
    /// The ranks for which the call waits; empty if it waits for any rank, or for its turn.
    pub awaits: Vec<Rank>,
    /// Description of an external operation in flight.
    pub external: Option<String>,
}

impl CallInFlight {
    pub(super) fn of(run: &Run, awaits: Vec<Rank>) -> Self {
        Self { call: run.call.clone(), awaits, external: run.external_under_way() }
    }
}

impl GroupState {
    /// Creates the state of a new group. Its calls have `timeout` unless they specify their own.
    pub fn new(id: u64, name: Arc<str>, rank: Rank, timeout: Duration, members: Members) -> Self {
        let world = members.world();
        Self {
            id,
            name,
            rank,
            is_timed: false,
            timeout,
            members,
            p2p: P2p::new(world),
            fast_shapes: Shapes::default(),
            runs: BTreeMap::new(),
            newest_begun: 0,
            admission: Admission::default(),
            inbox: Inbox::default(),
            history: History::default(),
            latest: None,
            sequence: Sequence::default(),
            next_message: 0,
            latest_monitored: 0,
            failure: Failure::default(),
            near: None,
            compute: Compute::default(),
            scratch: Storage::default(),
            code_pool: BufferPool::default(),
            is_listed: false,
            packets: None,
            has_absentees: false,
            calls_failed: 0,
            waits: Arc::default(),
        }
    }

    /// Returns the number of the group, which is the same on all ranks.
    #[inline]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the name of the group, for messages.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Returns the rank of this process.
    #[inline]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Returns the ranks of the group.
    #[inline]
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// Returns the timeout of calls issued from now on, counted from their submission.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sets the timeout of calls issued from now on.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Makes calls issued from now on record their duration.
    pub fn enable_timing(&mut self) {
        self.is_timed = true;
    }

    pub(super) fn is_timed(&self) -> bool {
        self.is_timed
    }

    /// Returns the wait counters of the group's callers.
    pub fn waits(&self) -> &Arc<Waits> {
        &self.waits
    }

    /// Takes a number for a point-to-point call. The number is used on this rank only, for example in error messages.
    pub(super) fn take_message_number(&mut self) -> u64 {
        let number = self.next_message;
        self.next_message += 1;
        number
    }

    /// Takes a number for a monitored barrier, within the bits of `mask`.
    pub fn take_monitored_number(&mut self, mask: u32) -> u32 {
        self.latest_monitored = self.latest_monitored.wrapping_add(1) & mask;
        self.latest_monitored
    }

    /// Takes memory for encoded chunks of a call. The call gives it back when it completes.
    pub(super) fn take_codes(&mut self, len_bytes: usize) -> Result<Storage> {
        self.code_pool.take(len_bytes)
    }

    /// Returns whether a message with this tag waits for a receive.
    pub fn has_unexpected_message(&self, from: Rank, tag: u32) -> bool {
        self.p2p.has_unexpected(from, tag)
    }

    /// Returns how often a point-to-point message was examined so far, for tests.
    pub fn message_steps(&self) -> u64 {
        self.p2p.steps()
    }

    /// Takes back a private receive that has not been matched, and completes it with `error` without running its
    /// callback. Returns `false` if it was matched.
    pub fn take_back(&mut self, call: &CallState, error: Error, now: Moment) -> bool {
        let Some(message) = self.p2p.cancel(call) else { return false };
        drop(message.call.finish(now, Some(error)));
        true
    }

    /// Returns the reason why the group accepts no more calls; `None` if it accepts calls.
    pub fn failure(&self) -> Option<&Error> {
        self.failure.cause()
    }

    /// Adds this group and rank to an error.
    pub(crate) fn in_context(&self, error: Error) -> Error {
        error.in_group(&self.name).on_rank(self.rank)
    }

    /// Makes this state a lane of the group. The first lane numbers the calls of all lanes.
    pub fn set_lane(&mut self, lane: u32, numbers: Arc<dyn LaneNumbers>) {
        self.sequence = Sequence::of_lane(lane, numbers);
    }

    /// Sets the receiver of packets for the device of this rank.
    pub fn take_packets_with(&mut self, sink: Arc<dyn PacketSink>) {
        self.packets = Some(sink);
    }

    /// Sends packets to the device of another rank. `taken` is the total number of bytes of that device's packets that
    /// this rank has taken.
    pub fn send_packets(&self, to: Rank, taken: u64, packets: &[u8], context: &mut Context<'_>) {
        if !self.failure.has_come() {
            let header = Header { group: self.id, value: taken, ..Header::new(Kind::Packets) };
            context.net.send_control(self.members.peer(to), header, packets);
        }
    }

    /// Returns whether no call is in flight.
    pub fn is_idle(&self) -> bool {
        self.runs.is_empty() && self.p2p.is_idle()
    }

    /// Sets whether the group is in the list of groups that a pass advances. Returns the previous value.
    pub(super) fn set_listed(&mut self, is_listed: bool) -> bool {
        std::mem::replace(&mut self.is_listed, is_listed)
    }

    /// Returns the earliest deadline of a call in flight.
    pub(crate) fn next_deadline(&self) -> Option<Moment> {
        let due = self.due();
        let runs = self.runs.values().filter_map(|run| [due(run), run.probe_at].into_iter().flatten().min());
        runs.chain(self.p2p.next_deadline()).chain(self.begin_by()).chain(self.failure.due()).min()
    }

    /// Returns a function that computes when a call is late. An external worker enforces its own deadline. A call with
    /// such an operation, and later calls that may wait for it, therefore get extra time.
    fn due(&self) -> impl Fn(&Run) -> Option<Moment> + use<> {
        let external = self.runs.values().filter(|run| run.has_external_deadline());
        let first = external.filter_map(|run| run.deadline).min();
        move |run| {
            let deadline = run.deadline?;
            let waits_longer = first.is_some_and(|first| first <= deadline);
            Some(if waits_longer { deadline + OFFLOAD_GRACE } else { deadline })
        }
    }

    /// Returns the shortest timeout of a call in flight, if `peer` is in this group.
    pub(crate) fn least_allowance(&self, peer: PeerId) -> Option<Duration> {
        self.members.rank_of(peer)?;
        let runs = self.runs.values().map(|run| (&run.call, run.deadline));
        let calls = runs.chain(self.p2p.messages().map(|message| (&message.call, message.deadline)));
        calls.filter_map(|(call, deadline)| Some(deadline?.since(call.started()))).min()
    }

    /// Returns the time by which calls that are held back begin at the latest.
    pub fn begin_by(&self) -> Option<Moment> {
        self.admission.begin_by()
    }

    // ---- submission

    /// Reserves `count` sequence numbers for calls to be issued later, each with `take_seq(Some(..))`. Returns the
    /// first number. Later barriers wait until these numbers are concluded.
    pub fn reserve_seqs(&mut self, count: u64) -> u64 {
        self.sequence.reserve(count)
    }

    /// Returns the sequence number of the next collective.
    pub fn next_seq(&self) -> u64 {
        self.sequence.next()
    }

    /// Concludes reserved sequence numbers, as `Group::conclude_seqs` in accl-engine describes. If the operation has
    /// failed and left numbers unused, the group fails.
    pub fn conclude_seqs(&mut self, seqs: Range<u64>, failed: Option<&Error>, context: &mut Context<'_>) {
        let unused = self.sequence.conclude(seqs, failed.is_some());
        let (Some(why), Some(first)) = (failed, unused) else { return };
        let error = Error::new(why.kind, format!("call {first} could not be issued on this rank: {}", why.message));
        self.fail(self.in_context(error), context, Notify::Peers);
    }

    /// Takes the sequence number of a collective that is being issued in `parts` parts.
    pub(crate) fn take_seq(&mut self, reserved: Option<u64>, parts: u32) -> Result<u64> {
        match reserved {
            Some(seq) => self.sequence.take_reserved(seq, parts),
            None => Ok(self.sequence.take(parts)),
        }
    }

    /// Returns whether all ranks' links can be polled without a system call, as far as they are known. The result is
    /// cached until there is a new link.
    fn is_near(&mut self, net: &Net) -> bool {
        *self
            .near
            .get_or_insert_with(|| self.members.ranks().all(|rank| net.polls_without_syscall(self.members.peer(rank))))
    }

    /// Returns whether tiles are sent with checksums: unless all ranks share memory.
    pub(crate) fn has_checksums(&mut self, net: &Net) -> bool {
        !self.is_near(net)
    }

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

    /// Starts a collective: passes it the frames that arrived before it, and adds it to the calls in flight.
    pub(crate) fn start(&mut self, mut run: Run, context: &mut Context<'_>) {
        let seq = run.call.seq;
        self.history.add(seq, &run.signature);
        self.latest = None;
        let unexpected = self.inbox.take(seq);
        let mut failure = None;
        for frame in unexpected {
            if let Some(theirs) = frame.signature.filter(|theirs| *theirs != run.signature) {
                failure = Some(disagreement(seq, (self.rank, &run.signature), (frame.from, &theirs)));
                break;
            }
            let result = if frame.header.edge == PROBE {
                run.on_probe(frame.from, &frame.header, &mut env!(self, context));
                Ok(())
            } else if frame.header.kind == Kind::Grant {
                run.on_grant(frame.from, frame.header.edge, frame.header.value);
                Ok(())
            } else {
                run.on_data(frame.from, &frame.header, &frame.data, &mut env!(self, context))
            };
            if let Err(error) = result {
                failure = Some(error.with_peer(frame.from));
                break;
            }
        }
        let call = run.call.clone();
        if context.net.has_unlinked() {
            run.plan.peers.iter().for_each(|&rank| context.net.want(self.members.peer(rank)));
        }
        if self.runs.is_empty() {
            self.admission.note_move(context.now);
        }
        self.runs.insert(seq, run);
        if let Some(error) = failure {
            self.fail(call.in_context(error), context, Notify::Peers);
        }
    }

    /// Starts a send or receive.
    pub(crate) fn start_message(&mut self, message: Message, to: Option<Rank>, context: &mut Context<'_>) {
        let call = message.call.clone();
        match message.peer {
            Some(rank) => context.net.want(self.members.peer(rank)),
            // Any rank may send. This rank must learn when all others have left, because then none will send.
            None if context.net.has_unlinked() => {
                self.members.ranks().for_each(|rank| context.net.want(self.members.peer(rank)));
            }
            None => {}
        }
        let result = match to {
            Some(to) => {
                self.p2p.post_send(message, to);
                Ok(())
            }
            None => self.p2p.post_receive(message, &mut env!(self, context)),
        };
        if let Err(error) = result {
            self.fail(call.in_context(error), context, Notify::Peers);
        }
    }

    // ---- frames

    /// Returns whether a frame belongs to a call that is not issued here yet, so that it would have to be copied.
    pub(crate) fn is_early(&self, header: &Header) -> bool {
        matches!(header.kind, Kind::Begin | Kind::BeginWhole)
            && !self.failure.has_come()
            && self.sequence.is_to_come(header.seq)
    }

    /// Handles a frame of this group.
    pub(crate) fn on_frame(&mut self, from: Rank, header: &Header, payload: &[u8], context: &mut Context<'_>) {
        if header.kind.carries_data() {
            self.members.note_received(from, payload.len() as u64);
        }
        if header.kind == Kind::Cause {
            self.members.set_knows(from);
        }
        if self.failure.has_come() {
            return;
        }
        if let Err(error) = self.dispatch(from, header, payload, context) {
            let error = error.with_peer(from);
            let error = match self.runs.get(&header.seq) {
                Some(run) if matches!(header.kind, Kind::Begin | Kind::BeginWhole | Kind::Data | Kind::Grant) => {
                    run.call.in_context(error)
                }
                _ => self.in_context(error),
            };
            self.fail(error, context, Notify::Peers);
        }
    }

    fn dispatch(&mut self, from: Rank, header: &Header, payload: &[u8], context: &mut Context<'_>) -> Result<()> {
        match header.kind {
            Kind::Begin => {
                let (signature, data) = Signature::parse(payload)?;
                self.members.saw(from, header.seq);
                self.on_run_frame(from, header, CHECKS_SIGNATURES.then_some(signature), data, context)
            }
            Kind::BeginWhole => {
                self.members.saw(from, header.seq);
                let begin = Header { kind: Kind::Begin, value: payload.len() as u64, ..*header };
                self.on_run_frame(from, &begin, CHECKS_SIGNATURES.then(|| header.whole_signature()), payload, context)
            }
            Kind::Data | Kind::Grant => self.on_run_frame(from, header, None, payload, context),
            Kind::Window => {
                self.members.on_window(from, header.value);
                Ok(())
            }
            Kind::Cause => {
                let cause = Cause::parse(payload)?;
                // Frames that arrived before the report may complete calls successfully.
                self.advance(context);
                let report = format!("rank {} reported: ", cause.origin);
                // A rank may forward a report that it has received.
                let text = if cause.text.contains(&report) { cause.text } else { report + &cause.text };
                let error = Error::new(cause.kind, text);
                let error = self.in_context(error.with_peer(cause.origin));
                let is_first_hand = from == cause.origin || cause.origin.0 >= self.members.world();
                // A follower lane without calls ignores a forwarded report. The first lane receives it as well, and may
                // fail the group.
                if !is_first_hand && self.sequence.follows() && self.is_idle() {
                    return Ok(());
                }
                if is_first_hand || self.is_idle() || self.members.is_absent(cause.origin, context.net) {
                    self.fail(error, context, Notify::Neighbours);
                } else {
                    self.failure.learn(error, cause.origin, context.now);
                }
                Ok(())
            }
            Kind::Disconnect => {
                self.members.set_left(from);
                Ok(())
            }
            Kind::P2pBegin => {
                let (signature, data) = Signature::parse(payload)?;
                self.p2p.on_begin(from, header, signature, data, &mut env!(self, context))
            }
            Kind::P2pData => self.p2p.on_data(from, header.seq, payload, &mut env!(self, context)),
            Kind::P2pGrant => {
                self.p2p.on_grant(from, header.seq, header.value);
                Ok(())
            }
            Kind::Packets => match &self.packets {
                Some(sink) => sink.arrive(from, header.value, payload),
                None => {
                    Err(Error::protocol(format!("rank {from} sent packets for a device, but this rank has no device")))
                }
            },
            // These frames never belong to a single group.
            Kind::Hello | Kind::PeerFate => Err(Error::protocol("received a frame of a kind that belongs to no group")),
        }
    }

    fn on_run_frame(
        &mut self,
        from: Rank,
        header: &Header,
        signature: Option<Signature>,
        data: &[u8],
        context: &mut Context<'_>,
    ) -> Result<()> {
        let seq = header.seq;
        if let Some(run) = self.runs.get_mut(&seq) {
            if let Some(theirs) = signature.filter(|theirs| *theirs != run.signature) {
                let mine = run.signature;
                return Err(disagreement(seq, (self.rank, &mine), (from, &theirs)));
            }
            if header.edge == PROBE {
                run.on_probe(from, header, &mut env!(self, context));
                return Ok(());
            }
            if header.kind == Kind::Grant {
                run.on_grant(from, header.edge, header.value);
                return Ok(());
            }
            // The call's sends go first, because it may send from the memory in which the data is to be placed. A
            // barrier has no data, and may have to wait for earlier calls.
            if !run.begun && run.call.collective != Collective::Barrier {
                self.newest_begun = self.newest_begun.max(seq);
                run.advance(&mut env!(self, context));
            }
            self.admission.note_move(context.now);
            return run.on_data(from, header, data, &mut env!(self, context));
        }
        if self.sequence.is_to_come(seq) {
            // The rest of a message is sent only after a grant.
            if header.kind == Kind::Data {
                return Err(Error::protocol(format!("rank {from} sent part of call {seq}, which has not begun")));
            }
            self.inbox.push(Unexpected { from, header: *header, signature, data: data.to_vec() });
            return Ok(());
        }
        match signature {
            // A grant for a completed send, or the rest of a message whose beginning already failed the group.
            None => Ok(()),
            // This rank's part is done without a frame from this sender, so the two calls differ.
            Some(theirs) => {
                let mine = self.history.signature(seq);
                // The call has no part on this lane. The first lane, which takes part in all calls, detects the
                // difference.
                if mine.is_none() && self.sequence.follows() {
                    return Ok(());
                }
                if header.edge == PROBE && mine.is_none_or(|mine| mine == theirs) {
                    if let Some(mine) = &mine {
                        answer_probe(header, mine, from, &mut env!(self, context));
                    }
                    return Ok(());
                }
                Err(disagreement(seq, (self.rank, &mine.unwrap_or(theirs)), (from, &theirs)))
            }
        }
    }

    // ---- progress

    /// Advances the calls in flight, early ones first, and completes those that are done. Returns whether there was
    /// progress.
    pub(crate) fn advance(&mut self, context: &mut Context<'_>) -> bool {
        let mut moved = false;
        let mut ended: Vec<u64> = Vec::new();
        let is_near = self.is_near(context.net);
        let at_once = self.admission.limit(context.now, is_near);
        let mut before = 0;
        let mut withholds = false;
        let mut failure = None;
        // Offloaded calls run in sequence order, which is the same on all ranks. One begins when all ranks have
        // completed the earlier ones. Otherwise the messages of a rank that is ahead could displace what other ranks
        // need for the current call.
        let mut is_in_turn = true;
        for (index, (&seq, run)) in self.runs.iter_mut().enumerate() {
            if run.plan.is_offloaded && is_in_turn && !self.sequence.has_reserved_before(seq) {
                run.offload();
            }
            // A barrier guarantees on every rank that the calls issued before it are done. An operation of several
            // calls counts as in flight from the reservation of its numbers until it is concluded.
            let awaits_earlier = ended.len() < index || self.sequence.has_composed_before(seq);
            if run.call.collective == Collective::Barrier && awaits_earlier {
                continue;
            }
            // A call that another rank has caused to begin is not held back.
            if before > at_once && !run.begun {
                withholds = true;
                is_in_turn &= !run.plan.is_offloaded;
                // If hundreds of calls are outstanding, few have begun. The pass then stops at the first that has not,
                // so that the others cost nothing.
                if seq > self.newest_begun {
                    break;
                }
                continue;
            }
            if run.is_busy() {
                self.newest_begun = self.newest_begun.max(seq);
                moved |= run.advance(&mut env!(self, context));
                if let Some(error) = run.take_failure() {
                    failure.get_or_insert_with(|| run.call.in_context(error));
                }
            }
            is_in_turn &= !run.plan.is_offloaded || run.is_complete();
            if run.is_complete() {
                ended.push(seq);
            } else {
                before += run.plan.work;
            }
        }
        self.admission.set_withholds(withholds);
        if moved {
            self.admission.note_move(context.now);
        }
        for seq in ended {
            // The call is still in `runs`, because a panic fails the calls that are recorded there.
            self.runs.get_mut(&seq).into_iter().for_each(Run::end);
            if let Some(mut run) = self.runs.remove(&seq) {
                self.code_pool.give(run.take_codes());
                context.completed.end(&run.call, None, context.now);
                moved = true;
            }
        }
        if !self.p2p.is_idle() {
            moved |= self.p2p.advance(&mut env!(self, context));
        }
        for message in self.p2p.take_done() {
            context.completed.end(&message.call, None, context.now);
            moved = true;
        }
        if let Some(error) = failure {
            self.fail(error, context, Notify::Peers);
            moved = true;
        }
        moved
    }

    /// Fails the group if a call's deadline has passed, or a rank that a call needs is gone.
    pub(crate) fn check(&mut self, context: &mut Context<'_>) {
        if self.failure.has_come() || self.is_idle() {
            return;
        }
        let (members, net) = (&self.members, &*context.net);
        if let Some(error) = self.failure.take_rumour(context.now, |origin| members.is_absent(origin, net)) {
            self.fail(error, context, Notify::Neighbours);
            return;
        }
        self.check_private(context);
        for run in self.runs.values_mut().filter(|run| run.probe_at.is_some_and(|at| at <= context.now)) {
            run.probe(&mut env!(self, context));
        }
        if let Some(error) = self.overdue(context).or_else(|| self.departed(context)) {
            // The forwarded report came first: a rank may have left because of it.
            match self.failure.take_rumour(context.now, |_| true) {
                Some(first) => self.fail(first, context, Notify::Neighbours),
                None => {
                    // A rank that has left cleanly is not logged: other ranks may have expected it.
                    let is_lost = error.context.peer.is_some_and(|rank| self.is_lost(rank, context.net));
                    if is_lost && self.sequence.claims_loss() {
                        context.completed.note_loss(error.clone());
                    }
                    self.fail(error, context, Notify::Peers);
                }
            }
        }
    }

    /// Returns whether a rank was lost without a disconnect message.
    fn is_lost(&self, rank: Rank, net: &Net) -> bool {
        matches!(net.peer(self.members.peer(rank)).gone(), Some(Gone::Lost(_))) && !self.members.has_left(rank)
    }

    /// Records that a peer has a new link. Returns the group's number if the peer is in the group.
    pub(super) fn note_link(&mut self, peer: PeerId) -> Option<u64> {
        self.members.rank_of(peer)?;
        self.near = None;
        Some(self.id)
    }

    /// Reports the group's failure to a peer, if the group has failed.
    pub(super) fn notify_of_failure(&self, peer: PeerId, context: &mut Context<'_>) {
        if let Some((origin, cause)) = self.announced_cause(cause_bytes(context.segment))
            && self.members.rank_of(peer) != Some(origin)
        {
            context.net.send_control(peer, Header { group: self.id, ..Header::new(Kind::Cause) }, &cause);
        }
    }

    /// Returns the rank where the failure began, and the payload that reports it.
    pub(super) fn announced_cause(&self, most: usize) -> Option<(Rank, Box<[u8]>)> {
        let error = self.failure.cause()?;
        let origin = self.failure.announcement().map_or(self.rank, |(origin, _)| origin);
        Some((origin, announcement(origin, error, most).into()))
    }

    /// Checks which ranks are absent.
    pub(crate) fn note_absentees(&mut self, net: &Net) {
        self.has_absentees = self.members.ranks().any(|rank| self.members.is_absent(rank, net));
    }

    /// Runs [`GroupState::check`] for a call that was just issued, because no event announces ranks that left earlier.
    pub(crate) fn check_absentees(&mut self, context: &mut Context<'_>) {
        if self.has_absentees {
            self.check(context);
        }
    }

    /// Fails private messages whose peer is gone. The code that issued them continues without them.
    fn check_private(&mut self, context: &mut Context<'_>) {
        let (members, net) = (&self.members, &*context.net);
        for message in self.p2p.take_private(|rank| members.is_absent(rank, net)) {
            let why = message.peer.and_then(|rank| self.absence(rank, context.net)).unwrap_or_default();
            let error = message.call.in_context(Error::peer_lost(why));
            context.completed.end(&message.call, Some(error), context.now);
        }
    }

    /// Returns why a rank sends nothing more; `None` while it is present.
    pub fn absence(&self, rank: Rank, net: &Net) -> Option<String> {
        if !self.members.is_absent(rank, net) {
            return None;
        }
        let who = self.members.describe(rank, net);
        Some(match net.peer(self.members.peer(rank)).gone() {
            Some(Gone::Lost(error)) if !self.members.has_left(rank) => {
                format!("{who} is lost: {}; see that rank's own output for the reason", error.message)
            }
            Some(Gone::Lost(_) | Gone::Left) | None => {
                format!("{who} has left the group and issues no more calls")
            }
        })
    }

    fn overdue(&self, context: &Context<'_>) -> Option<Error> {
        let due = self.due();
        let late = |run: &&Run| due(run).is_some_and(|due| due <= context.now);
        let mut under_way = None;
        let (call, deadline, awaited) = match self.runs.values().find(late) {
            Some(run) => {
                under_way = run.external_under_way();
                (&run.call, run.deadline, run.awaited(&self.members))
            }
            None => {
                let message = self.p2p.overdue(context.now)?;
                (&message.call, message.deadline, message.peer.into_iter().collect())
            }
        };
        // The error states the allowed time, and not the time that passed until the check.
        let allowed = deadline.unwrap_or(context.now).since(call.started());
        let text = match under_way {
            // Other ranks may wait for this operation, and it waits for none of them.
            Some(what) => format!(
                "Timed out waiting {}ms for {}: {what} on this rank has not completed; check its own output, or raise \
                 the timeout",
                allowed.as_millis(),
                call.collective
            ),
            None => self.timeout_text(call, &awaited, allowed, context.net),
        };
        Some(call.in_context(Error::timeout(text)))
    }

    /// Returns the numbers of collectives and of messages issued here, and how many of these calls have failed.
    pub fn counts(&self) -> (u64, u64, u64) {
        (self.sequence.next(), self.next_message, self.calls_failed)
    }

    /// Returns the calls in flight that have not failed.
    pub(super) fn in_flight(&self) -> Vec<CallInFlight> {
        let messages = self.p2p.messages().map(|message| CallInFlight {
            call: message.call.clone(),
            awaits: message.peer.into_iter().collect(),
            external: None,
        });
        self.runs.values().map(|run| CallInFlight::of(run, run.awaited(&self.members))).chain(messages).collect()
    }

    /// Returns the ranks for which a call in flight waits.
    pub fn awaited(&self, call: &CallState) -> Vec<Rank> {
        if let Some(run) = self.runs.get(&call.seq).filter(|run| std::ptr::eq(&*run.call, call)) {
            return run.awaited(&self.members);
        }
        self.p2p.peer_of(call).flatten().into_iter().collect()
    }

    /// Returns the peers that a call in flight sends to or receives from, as far as they are known.
    pub(super) fn peers_of(&self, call: &CallState) -> SmallVec<[PeerId; 4]> {
        if call.collective.is_point_to_point() {
            return self.p2p.peer_of(call).flatten().into_iter().map(|rank| self.members.peer(rank)).collect();
        }
        let run = self.runs.get(&call.seq);
        run.into_iter().flat_map(|run| &run.plan.peers).map(|&rank| self.members.peer(rank)).collect()
    }

    /// Returns the message of a timeout: which ranks are missing, and what is known about them.
    pub fn timeout_text(&self, call: &CallState, awaited: &[Rank], waited: Duration, net: &Net) -> String {
        let mut text = format!("Timed out waiting {}ms for {}", waited.as_millis(), call.collective);
        if awaited.is_empty() {
            let external = self.runs.get(&call.seq).and_then(Run::external_under_way);
            match external {
                Some(what) => text.push_str(&format!("; {what} is still in flight")),
                None if call.collective.is_point_to_point() => {
                    text.push_str(" from any rank: no rank sent a message with this tag");
                }
                None => text.push_str(
                    "; no rank is missing: an earlier call has not completed, or an operation did not stop when asked",
                ),
            }
        }
        for (index, &rank) in awaited.iter().filter(|&&rank| rank != self.rank).take(8).enumerate() {
            text.push_str(if index == 0 { "; missing: " } else { ", " });
            text.push_str(&self.members.describe(rank, net));
            if let Some(why) = net.trouble(self.members.peer(rank)) {
                text.push_str(&format!(" with no link yet: {why}"));
            }
            if let Some(silence) = net.peer(self.members.peer(rank)).silent_for() {
                text.push_str(&format!(" whose host has not answered for {} ms", silence.as_millis()));
            }
            if !call.collective.is_point_to_point() {
                match self.members.last_seq(rank) {
                    Some(seq) if seq >= call.seq => text.push_str(" which has entered this call"),
                    Some(seq) => text.push_str(&format!(" whose last call seen here was seq {seq}")),
                    None => text.push_str(" with no call on this group seen here"),
                }
            }
        }
        text.push_str("; check whether these ranks are stuck or skip the call, or raise the timeout");
        text
    }

    /// Returns the error if a rank that a call in flight needs is absent.
    fn departed(&self, context: &Context<'_>) -> Option<Error> {
        if !self.has_absentees {
            return None;
        }
        let mut others = self.members.ranks().filter(|&rank| rank != self.rank);
        let is_alone = others.all(|rank| self.members.is_absent(rank, context.net));
        for rank in self.members.ranks() {
            if !self.members.is_absent(rank, context.net) {
                continue;
            }
            let is_lost = self.is_lost(rank, context.net);
            // A call that needs nothing more from the rank may still succeed. A call that needs it fails, and all other
            // ranks are notified.
            let any_run = self
                .runs
                .values()
                .find(|run| run.needs(rank) || is_lost && run.offload_in_flight())
                .map(|run| &run.call);
            // A receive from any source may still be matched by another rank, as long as one is present.
            let from_any = if is_lost || is_alone { FromAny::Counts } else { FromAny::DoesNot };
            let any_message = || self.p2p.needs(rank, from_any).map(|message| &message.call);
            let Some(call) = any_run.or_else(any_message) else { continue };
            let why = self.absence(rank, context.net).unwrap_or_default();
            return Some(call.in_context(Error::peer_lost(why).with_peer(rank)));
        }
        None
    }

    /// Returns whether a call is in flight whose caller has continued and relies on it. This is a collective, or a send
    /// for which there is no link yet. With a link, a small message is already in flight when the send was issued.
    pub fn has_async_calls(&self, net: &Net) -> bool {
        if !self.failure.has_come() && self.p2p.has_sends_to(|rank| net.is_unlinked(self.members.peer(rank))) {
            return true;
        }
        self.sequence.has_composed() && !self.failure.has_come() || self.runs.values().any(|run| run.call.is_async)
    }

    // ---- failure and departure

    /// Fails the group with its first cause. Every call in flight fails. `notify` specifies which ranks are notified.
    pub fn fail(&mut self, error: Error, context: &mut Context<'_>, notify: Notify) {
        if self.failure.has_come() {
            return;
        }
        let failed = FailedGroup { group: self.id, error, notify };
        self.fail_on_lane(&failed, Notes::Sent, context);
        if self.sequence.has_lanes() {
            context.completed.fail_on_other_lanes(failed);
        }
    }

    /// Returns the failure that other lanes must adopt, if this lane has failed.
    pub fn failed(&self) -> Option<FailedGroup> {
        let error = self.failure.cause()?.clone();
        let notify = if self.failure.announcement().is_some() { Notify::Neighbours } else { Notify::NoRank };
        Some(FailedGroup { group: self.id, error, notify })
    }

    /// Fails the group like [`GroupState::fail`], on this lane alone. The lane that failed first passes the failure on
    /// to each other lane.
    pub(super) fn fail_on_lane(&mut self, failed: &FailedGroup, notes: Notes, context: &mut Context<'_>) {
        if self.failure.has_come() {
            return;
        }
        let error = failed.error.clone();
        let origin = match failed.notify {
            Notify::Peers => {
                self.notify_cause(self.members.ranks(), self.rank, &error, context);
                Some(self.rank)
            }
            Notify::Neighbours => {
                // The rank that detected the failure notifies all ranks, but may not reach all of them. A link between
                // two ranks can break alone.
                let origin = error.context.peer.unwrap_or(self.rank);
                self.notify_cause(self.members.neighbours(self.rank), origin, &error, context);
                Some(origin)
            }
            Notify::NoRank => None,
        };
        if let Some(origin) = origin.filter(|_| notes == Notes::Sent) {
            self.note_cause(origin, &error, context);
        }
        self.failure.set(error.clone(), failed.announced_by());
        self.inbox.clear();
        let own_error = |call: &CallState| {
            let is_own = error.context.seq == Some(Seq(call.seq)) && error.context.collective == Some(call.collective);
            if is_own { error.clone() } else { call.in_context(Error::new(error.kind, brief(&error))) }
        };
        // Memory of external operations is not given back before they have stopped.
        let under_way = self.runs.iter().filter_map(|(&seq, run)| run.cancel_externals().then_some(seq));
        for seq in under_way.collect::<Vec<_>>() {
            if let Some(run) = self.runs.remove(&seq) {
                self.failure.raise();
                self.calls_failed += 1;
                let own = own_error(&run.call);
                context.stopping.add(run, own, context.now);
            }
        }
        let runs = std::mem::take(&mut self.runs).into_values().map(|run| run.call.clone());
        let calls: Vec<Arc<CallState>> = runs.chain(self.p2p.take_all().into_iter().map(|m| m.call)).collect();
        if !calls.is_empty() {
            self.failure.raise();
        }
        self.calls_failed += calls.len() as u64;
        for call in calls {
            let own = own_error(&call);
            context.completed.end(&call, Some(own), context.now);
        }
    }

    /// Reports the first cause to `ranks`, except this rank and the rank where it began.
    fn notify_cause(&self, ranks: impl Iterator<Item = Rank>, origin: Rank, error: &Error, context: &mut Context<'_>) {
        let cause = announcement(origin, error, cause_bytes(context.segment));
        let header = Header { group: self.id, ..Header::new(Kind::Cause) };
        for rank in ranks.filter(|&rank| rank != self.rank && rank != origin) {
            // A rank without a link receives the report from its neighbours, or when it makes a link.
            context.net.send_if_linked(self.members.peer(rank), header, &cause);
        }
    }

    /// Queues out-of-band reports of the first cause to the neighbours, which arrive even if they poll no link. A
    /// report is not sent if the neighbour reports the failure first. Neighbours do the same, so waiting ranks learn of
    /// the failure even if the ranks between them and its origin are computing.
    fn note_cause(&self, origin: Rank, error: &Error, context: &mut Context<'_>) {
        let cause = announcement(origin, error, cause_bytes(context.segment));
        let header = Header { group: self.id, ..Header::new(Kind::Cause) };
        for rank in self.members.neighbours(self.rank).filter(|&rank| rank != self.rank && rank != origin) {
            context.net.note(self.members.peer(rank), header, &cause);
        }
    }

    /// Returns whether a peer may not know yet that this group has failed.
    pub(super) fn may_not_know(&self, peer: PeerId, net: &Net) -> bool {
        let rank = self.members.rank_of(peer);
        rank.is_some_and(|rank| !self.members.knows(rank) && !self.members.is_absent(rank, net))
    }

    /// Returns a disagreement about calls of this rank that no call of this rank can raise any more.
    fn unreported_mismatch(&self) -> Option<Error> {
        let has_made_calls = self.sequence.next() + self.next_message > 0;
        self.failure.unreported_mismatch().filter(|_| has_made_calls).cloned()
    }

    /// Returns the error for calls issued after the group failed; `None` if it has not failed. The first call to learn of
    /// the failure gets the kind of its cause, later calls get `Aborted`.
    pub fn aborted(&mut self, collective: Option<Collective>) -> Option<Error> {
        let kind = self.failure.kind_of_refusal();
        let cause = self.failure.raise()?;
        let text = format!(
            "the group failed earlier and accepts no more calls; destroy it and create a new one. First cause: {}",
            brief(cause)
        );
        let mut error = Error::new(kind, text).in_group(&self.name).on_rank(self.rank);
        if let Some(collective) = collective {
            error = error.of(collective);
        }
        Some(error)
    }

    /// Returns the calls in flight that need something from a rank, or have something to send to it.
    pub fn calls_that_need(&self, rank: Rank) -> Vec<Arc<CallState>> {
        let runs = self.runs.values().filter(|run| run.needs(rank)).map(|run| run.call.clone());
        runs.chain(self.p2p.needs(rank, FromAny::DoesNot).map(|message| message.call.clone())).collect()
    }

    /// Returns the offloaded calls whose external operation is in flight. They cannot succeed if a rank is lost without
    /// a disconnect message.
    pub fn offloaded_calls(&self) -> impl Iterator<Item = &Arc<CallState>> {
        self.runs.values().filter(|run| run.offload_in_flight()).map(|run| &run.call)
    }

    /// Returns the receives in flight that accept a message from any rank.
    pub fn receives_from_any(&self) -> impl Iterator<Item = &Arc<CallState>> {
        self.p2p.messages().filter(|message| message.peer.is_none() && !message.is_private).map(|message| &message.call)
    }

    /// Describes what still exists in this group, like [`super::core::Core::residue`].
    pub(crate) fn residue(&self) -> Vec<String> {
        let counts = [
            ("calls", self.runs.len()),
            ("calls that other ranks have begun", self.inbox.calls()),
            ("messages", self.p2p.messages().count()),
            ("reserved numbers", self.sequence.promised()),
        ];
        let left = counts.into_iter().filter(|(_, count)| *count > 0);
        left.map(|(what, count)| format!("{count} {what} of group {}", self.name)).collect()
    }

    /// Returns marks for everything sent to the other ranks so far. In a failed group, no rank relies on frames without
    /// room or link.
    fn marks(&self, net: &Net) -> Vec<Mark> {
        let marks = self.members.ranks().map(|rank| net.mark(self.members.peer(rank)));
        marks.map(|mark| if self.failure.has_come() { mark.of_link_alone() } else { mark }).collect()
    }

    /// Leaves the group like [`GroupState::leave`]. Returns what remains to be done without the group.
    pub(super) fn depart(&mut self, context: &mut Context<'_>) -> Departure {
        let departure = Departure {
            has_failed: self.failure.has_come(),
            // The marks exclude the disconnect messages: waiting for these would mean waiting for ranks that do not
            // need them.
            sent: self.marks(context.net),
            unreported_mismatch: self.unreported_mismatch(),
            timeout: self.timeout,
        };
        self.leave(context);
        departure
    }

    /// Sends a disconnect message to all linked ranks. Calls that are still in flight fail.
    pub fn leave(&mut self, context: &mut Context<'_>) {
        // Internal messages that were not received. The code that issued them has continued.
        for message in self.p2p.take_private(|_| true) {
            let error = message.call.in_context(Error::aborted("the group was destroyed"));
            context.completed.end(&message.call, Some(error), context.now);
        }
        let in_flight = !self.is_idle();
        if in_flight {
            let error = Error::aborted("the group was destroyed while calls were in flight");
            self.fail(self.in_context(error), context, Notify::Peers);
        }
        // A rank that does not know the cause would take the disconnect message as the cause. It may have been linked
        // after the group failed, or still wait for the origin's own report.
        if let Some(cause) = self.failure.cause() {
            let origin = self.failure.announcement().map_or(self.rank, |(origin, _)| origin);
            self.notify_cause(self.members.ranks().filter(|&rank| !self.members.knows(rank)), origin, cause, context);
        }
        let mut header = Header::new(Kind::Disconnect);
        header.group = self.id;
        for rank in self.members.ranks().filter(|&rank| rank != self.rank) {
            context.net.send_if_linked(self.members.peer(rank), header, &[]);
        }
    }
}

/// Returns the payload that reports a group's failure and its cause.
fn announcement(origin: Rank, error: &Error, most: usize) -> Vec<u8> {
    Cause { kind: error.kind, origin, text: brief(error) }.to_bytes(most)
}

/// Returns the maximum bytes of a failure report for this segment size.
pub(super) fn cause_bytes(segment: u64) -> usize {
    MAX_CAUSE_BYTES.min(segment as usize + OVERHEAD_BYTES)
}

/// Remaining duties after a rank has left a group.
pub struct Departure {
    /// A disagreement about calls that no call could raise.
    pub unreported_mismatch: Option<Error>,
    /// Marks of the frames on which the group's calls rely.
    pub sent: Vec<Mark>,
    /// Whether the group had failed before.
    pub has_failed: bool,
    /// Timeout of the group's calls.
    pub timeout: Duration,
}

/// Returns the text of an error with its call, but without rank and group. The code that quotes it adds its own rank
/// and group in front.
fn brief(error: &Error) -> String {
    match (error.context.collective, error.context.seq) {
        (Some(collective), Some(seq)) => format!("{collective} seq {seq}: {}", error.message),
        (Some(collective), None) => format!("{collective}: {}", error.message),
        (None, _) => error.message.clone(),
    }
}

//! One collective call in flight.
//!
//! A run executes the operations of a plan over links and memory, a segment at a time, without blocking. This module
//! owns the progress of each operation by its dependencies, and the placing of bytes. `transfer` owns the protocol of
//! one message, and `group` finds the call of a frame. `externals` decides when external operations may begin. Read
//! [`Run`] first.
//!
//! This file is long because each kind of operation is a state machine over the same fields of a run.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use accl_types::{Error, Moment, Rank, Result};
use accl_wire::frame::{Header, Kind, Signature, WANTS_GRANT};

use super::context::{RunContext, flags};
use super::externals::Externals;
use super::transfer::{Ahead, Arrival, Excess, Fragment, Incoming, Outgoing, Part, Window};
use crate::call::{CallState, Wake};
use crate::memory::{BadTile, Compute, Storage};
use crate::peers::Members;
use crate::plan::{Coded, Combination, ExternalStep, FinalSegments, Plan, PlanOp, PlanOpKind, Region, Shape};

/// Bytes of local work per step, so that receiving and sending alternate with it.
const LOCAL_STEP: u64 = 256 << 10;

/// Limit like `LOCAL_STEP`, in elements of tiles.
const ELEMS_STEP: u64 = LOCAL_STEP / 4;

/// Limit like `ELEMS_STEP`, for tiles that lie in a frame. At two bits an element, a segment has this many.
const ELEMS_IN_FRAME: u64 = 4 * ELEMS_STEP;

/// Segments granted beyond what can be placed; their bytes would be copied. Without such segments, two ranks that both
/// send before they receive into the same memory would wait for each other. Within a host, one segment suffices.
/// Between hosts a grant takes longer to arrive, and more segments in flight keep the connection busy.
const AHEAD_INTRA_NODE: u64 = 1;
const AHEAD_INTER_NODE: u64 = 8;

/// Bytes that are placed and forwarded in turns: few enough for the first-level cache, together with their source.
const TILE: usize = 8 << 10;

/// Time that a call waits before it probes the ranks with which its messages are not complete.
pub(crate) const PROBE_AFTER: Duration = Duration::from_millis(100);
/// Extra time after its deadline for an offloaded call, and for other calls of its group meanwhile. At the deadline,
/// the worker itself reports why it is late.
pub const OFFLOAD_GRACE: Duration = Duration::from_secs(2);
/// Edge of a frame that only shows a call's signature.
pub(crate) const PROBE: u32 = u32::MAX;

/// Returns the error for a tile that arrived damaged, or of another size.
fn bad_tile(from: Rank, bad: BadTile) -> Error {
    let why = match bad {
        BadTile::Damaged(why) => why,
        BadTile::OtherSize { published, expected } => {
            return Error::mismatch(format!(
                "rank {from} sends {published} bytes, but this rank expects {expected}; make the split sizes agree"
            ));
        }
    };
    Error::protocol(format!(
        "data from rank {from} is corrupted: {why}; check the network between the two ranks, and that both run the \
         same version"
    ))
}

/// Progress of one operation.
enum Progress {
    /// An operation without a peer. `done` counts bytes, or tiles of a combination; an external operation has 0.
    Local {
        done: u64,
    },
    Send(Outgoing),
    Receive(Incoming),
}

impl Progress {
    /// Creates the progress of an operation that has not begun, or is done.
    fn new(op: &PlanOp, is_over: bool) -> Self {
        // The number of users' calls is unlimited, so each message counts.
        let window = Window::Counted;
        match &op.kind {
            PlanOpKind::Send { .. } if is_over => Self::Send(Outgoing::finished(op.total, window)),
            PlanOpKind::Send { .. } => Self::Send(Outgoing::new(op.total, window)),
            PlanOpKind::Recv { .. } | PlanOpKind::RecvReduce { .. } => {
                let ahead = if op.coded.is_some() { Ahead::Refused } else { Ahead::Kept };
                Self::Receive(match is_over {
                    true => Incoming::finished(op.total, window, ahead),
                    false => Incoming::new(op.total, window, ahead),
                })
            }
            PlanOpKind::Copy { .. } | PlanOpKind::Reduce { .. } | PlanOpKind::Combine(_) | PlanOpKind::External(_) => {
                Self::Local { done: if is_over { op.total } else { 0 } }
            }
        }
    }

    /// Returns the bytes placed, sent or computed; for a combination, the tiles.
    #[inline]
    fn done(&self) -> u64 {
        match self {
            Self::Local { done } => *done,
            Self::Send(outgoing) => outgoing.sent(),
            Self::Receive(incoming) => incoming.placed(),
        }
    }
}

/// State of one operation.
struct OpState {
    progress: Progress,
    complete: bool,
    /// Whether the operation is in the work queue.
    queued: bool,
}

impl OpState {
    /// Returns the message of a send operation. Callers know the kind from the plan.
    fn outgoing(&mut self) -> &mut Outgoing {
        match &mut self.progress {
            Progress::Send(outgoing) => outgoing,
            Progress::Receive(_) | Progress::Local { .. } => {
                unreachable!("only a send has an outgoing message")
            }
        }
    }

    /// Returns the message of a receive operation, like [`OpState::outgoing`].
    fn incoming(&mut self) -> &mut Incoming {
        match &mut self.progress {
            Progress::Receive(incoming) => incoming,
            Progress::Send(_) | Progress::Local { .. } => {
                unreachable!("only a receive has an incoming message")
            }
        }
    }
}

/// Bytes that have just arrived for a receive and still lie in their frame. The receive counts them as done.
struct Fresh<'a> {
    op: u32,
    at: u64,
    payload: &'a [u8],
}

/// Places bytes, and fills `data` from byte `done` of `src`, which depends on these bytes. If both are the same range,
/// placing and reading alternate, so that the bytes read were written just before.
fn place_and_read(compute: &Compute, plan: &Plan, fresh: &Fresh<'_>, src: &Region, done: u64, data: &mut [u8]) {
    let kind = &plan.ops[fresh.op as usize].kind;
    let tile = if fresh.at == done && fresh.payload.len() == data.len() { TILE } else { usize::MAX };
    let mut at = done;
    let mut targets = data.chunks_mut(tile);
    for part in fresh.payload.chunks(tile) {
        compute.place(kind, fresh.at + (at - done), part);
        if let Some(target) = targets.next() {
            compute.read(src, at, target);
            at += target.len() as u64;
        }
    }
}

/// Bytes that still lie in their frame: the region of their receive, the byte of that region at which they start, and
/// the bytes.
type Come<'a> = (&'a Region, u64, &'a [u8]);

fn come<'a>(plan: &'a Plan, fresh: &Fresh<'a>) -> Come<'a> {
    let PlanOpKind::Recv { dst, .. } = &plan.ops[fresh.op as usize].kind else {
        unreachable!("tiles arrive by a receive without a reduction")
    };
    (dst, fresh.at, fresh.payload)
}

/// One collective call in flight on this rank.
pub(crate) struct Run {
    pub(crate) call: Arc<CallState>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) signature: Signature,
    /// Header of a message that fits one frame: see [`Shape`].
    whole: Option<Header>,
    pub(crate) deadline: Option<Moment>,
    /// Time at which to probe the ranks for which the call waits: see [`Run::probe`]. `None` once that is done.
    pub(crate) probe_at: Option<Moment>,
    compute: Compute,
    ops: Vec<OpState>,
    remaining: usize,
    /// Whether the run has had a pass.
    pub(crate) begun: bool,
    work: VecDeque<u32>,
    /// Sends that found no room.
    stalled: Vec<u32>,
    externals: Externals,
    /// Number of segments of the copy-in that operations may use.
    copied_in: u32,
    /// Segments of the copy-out that are final.
    finals: FinalSegments,
    /// Number of segments that the worker may copy out.
    ready_out: u32,
    /// Whether this part of a call has reported to the others that its bytes are copied in.
    has_met: bool,
    /// Whether an offloaded call may begin: see [`Run::offload`].
    may_be_offloaded: bool,
}

impl Run {
    /// Returns whether other code enforces the deadline. An external operation does the call, or only parts on other
    /// lanes are missing. This still holds when that operation has ended and its result was not checked yet.
    pub(crate) fn has_external_deadline(&self) -> bool {
        // The other lanes themselves report which ranks they wait for.
        self.externals.has(ExternalStep::Offload) || self.awaits_parts_alone() && self.externals.has(ExternalStep::Join)
    }

    /// Returns whether this lane has done its part of a call, apart from waiting for the parts of other lanes.
    fn awaits_parts_alone(&self) -> bool {
        let is_join = |op: &PlanOp| matches!(op.kind, PlanOpKind::External(ExternalStep::Join));
        self.plan.is_joined && self.ops.iter().zip(&self.plan.ops).all(|(state, op)| state.complete || is_join(op))
    }

    /// Returns whether the external operation of an offloaded call is in flight. During that time the call needs all
    /// ranks.
    pub(crate) fn offload_in_flight(&self) -> bool {
        self.externals.is_under_way(ExternalStep::Offload)
    }

    /// Lets an offloaded call begin, as it is its turn: it starts as soon as all ranks have reached the call. Before
    /// this, none of its messages is sent.
    pub(crate) fn offload(&mut self) {
        if !std::mem::replace(&mut self.may_be_offloaded, true) {
            (0..self.ops.len() as u32).for_each(|op| self.queue(op));
        }
    }

    /// Creates a run whose operations in `finished` are already done.
    pub(crate) fn new(
        call: Arc<CallState>,
        shape: &Shape,
        compute: Compute,
        finished: &[u32],
        deadline: Option<Moment>,
    ) -> Self {
        let (plan, signature) = (shape.plan.clone(), shape.signature);
        let mut ops: Vec<OpState> = plan
            .ops
            .iter()
            .map(|op| OpState { progress: Progress::new(op, false), complete: false, queued: false })
            .collect();
        for &op in finished {
            let progress = Progress::new(&plan.ops[op as usize], true);
            ops[op as usize] = OpState { progress, complete: true, queued: false };
        }
        let remaining = ops.len() - finished.len();
        let probe_at = Some(call.started() + PROBE_AFTER);
        let mut run = Self {
            call,
            plan,
            signature,
            whole: shape.whole,
            deadline,
            probe_at,
            compute,
            ops,
            remaining,
            begun: false,
            work: VecDeque::new(),
            stalled: Vec::new(),
            externals: Externals::default(),
            copied_in: 0,
            finals: FinalSegments::default(),
            ready_out: 0,
            has_met: false,
            may_be_offloaded: false,
        };
        for op in 0..run.ops.len() as u32 {
            run.queue(op);
        }
        run
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.remaining == 0
    }

    /// Returns whether there is something to try: new work, or a send that waits for room.
    pub(crate) fn is_busy(&self) -> bool {
        !self.work.is_empty()
            || !self.stalled.is_empty()
            || self.externals.has_ended()
            || self.externals.has_failed()
            || self.plan.combines_elsewhere && self.externals.has_tiles(|op| self.ops[op as usize].progress.done())
            || self.plan.copy_in.is_some_and(|op| self.externals.made(op) > self.copied_in)
            || self.awaits_parts_in() && self.compute.meeting().is_some_and(|meeting| meeting.has_news())
    }

    /// Takes back the memory for encoded chunks.
    pub(crate) fn take_codes(&mut self) -> Option<Storage> {
        self.compute.buffers_mut().take_codes()
    }

    /// Reports the measurements, unless `note_finals` has, and copies outputs that are not dense back. This is the last
    /// access to the caller's memory.
    pub(crate) fn end(&mut self) {
        self.compute.end();
        self.compute.unpack();
        if let Some(watch) = self.compute.watch() {
            watch.end();
        }
    }

    /// Does everything that can be done now. Returns whether anything was done.
    pub(crate) fn advance(&mut self, env: &mut RunContext<'_>) -> bool {
        self.begun = true;
        if let Some(watch) = self.compute.watch() {
            watch.begin();
        }
        // Later operations are tried first: their data was accessed most recently, and peers can complete with it.
        let mut stalled = std::mem::take(&mut self.stalled);
        stalled.sort_unstable_by(|a, b| b.cmp(a));
        for op in stalled.drain(..) {
            self.queue(op);
        }
        if let Some(op) = self.plan.copy_in {
            self.note_copied_in(self.externals.made(op));
        } else if self.awaits_parts_in() {
            self.note_copied_in(0);
        }
        if self.externals.has_ended() {
            self.externals.ended().into_iter().for_each(|op| self.queue(op));
        }
        if self.plan.combines_elsewhere {
            let made = self.externals.with_tiles(|op| self.ops[op as usize].progress.done());
            made.into_iter().for_each(|op| self.queue(op));
        }
        let mut progressed = false;
        // Local work is cut into steps. An operation that queues itself again waits for the next pass, so that frames
        // are taken off the links in between.
        for _ in 0..self.work.len().max(64) {
            let Some(op) = self.work.pop_front() else { break };
            self.ops[op as usize].queued = false;
            progressed |= self.step(op, &mut None, env);
        }
        self.note_finals();
        progressed
    }

    fn queue(&mut self, op: u32) {
        let state = &mut self.ops[op as usize];
        if !state.queued && !state.complete {
            state.queued = true;
            self.work.push_back(op);
        }
    }

    /// Returns how far an operation may go by its dependencies; `None` if it may not even begin.
    fn limit(&self, op: u32) -> Option<u64> {
        if self.plan.is_offloaded && !self.may_be_offloaded {
            return None;
        }
        let plan_op = &self.plan.ops[op as usize];
        let mut limit = plan_op.total;
        for &(on, stream) in &plan_op.deps {
            let state = &self.ops[on as usize];
            if state.complete {
                continue;
            }
            if !stream || plan_op.total == 0 {
                return None;
            }
            limit = limit.min(self.plan.ops[on as usize].reach(state.progress.done(), plan_op));
        }
        if let Some(staging) = &self.plan.staging {
            let reach = staging.reach(op, self.copied_in);
            if plan_op.total == 0 && reach == 0 {
                return None;
            }
            limit = limit.min(reach);
        }
        Some(limit)
    }

    /// Does what an operation can do now. If it made progress, queues the operations that depend on it.
    fn step(&mut self, op: u32, fresh: &mut Option<Fresh<'_>>, env: &mut RunContext<'_>) -> bool {
        if self.ops[op as usize].complete {
            return false;
        }
        let before = (self.ops[op as usize].progress.done(), self.ops[op as usize].complete);
        let plan = self.plan.clone();
        let mut progressed = false;
        match &plan.ops[op as usize].kind {
            PlanOpKind::Send { src, to } => self.step_send(&plan, op, (src, *to), fresh, env),
            PlanOpKind::Recv { from, .. } | PlanOpKind::RecvReduce { from, .. } => self.step_receive(op, *from, env),
            PlanOpKind::Copy { .. } | PlanOpKind::Reduce { .. } => self.step_local(op),
            PlanOpKind::Combine(combination) if plan.combines_elsewhere => self.follow_combine(op, combination),
            PlanOpKind::Combine(combination) => match plan.ops[op as usize].partner {
                // Its tiles are computed when they are sent.
                Some(send) => progressed = self.step(send, fresh, env),
                None => self.step_combine(op, combination, fresh),
            },
            PlanOpKind::External(step) => self.step_external(op, *step, false),
        }
        let state = &self.ops[op as usize];
        let has_moved = (state.progress.done(), state.complete) != before;
        if has_moved {
            for &dependent in &plan.ops[op as usize].dependents {
                self.queue(dependent);
            }
        }
        progressed | has_moved
    }

    fn complete(&mut self, op: u32) {
        self.ops[op as usize].complete = true;
        self.remaining -= 1;
        if let Some(watch) = self.compute.watch()
            && self.plan.copy_out.is_some_and(|op| !self.ops[op as usize].complete)
            && self.awaits_copies_alone()
        {
            watch.hand_over();
        }
    }

    // ---- sending

    fn step_send(
        &mut self,
        plan: &Plan,
        op: u32,
        (src, to): (&Region, Rank),
        fresh: &mut Option<Fresh<'_>>,
        env: &mut RunContext<'_>,
    ) {
        let plan_op = &plan.ops[op as usize];
        loop {
            let Some(made) = self.limit(op) else { return };
            let limit = plan_op.partner.map_or(made, |maker| self.can_be_made(maker, plan_op));
            let outgoing = self.ops[op as usize].outgoing();
            if outgoing.is_complete() {
                return self.complete(op);
            }
            let segment = plan_op.frame_bytes(outgoing.sent(), env.segment);
            let next = outgoing.next(limit, segment, |bytes| env.members.has_eager_room(to, bytes));
            let Some(fragment) = next else { return };
            let has_left = match plan_op.partner {
                Some(maker) if made < outgoing.sent() + fragment.bytes => {
                    let PlanOpKind::Combine(combination) = &plan.ops[maker as usize].kind else {
                        unreachable!("a combination makes the tiles that its partner sends")
                    };
                    let come = fresh.as_ref().map(|fresh| come(plan, fresh));
                    self.make_and_send(op, (maker, combination), (src, to), &fragment, come, env)
                }
                Some(_) => self.send_fragment(op, to, &fragment, env, |compute, at, data| compute.read(src, at, data)),
                None => self.pass_on(plan, op, (src, to), &fragment, fresh, env),
            };
            if !has_left {
                return;
            }
            let outgoing = self.ops[op as usize].outgoing();
            outgoing.note_sent(&fragment);
            // After the first frame, only one frame is sent per step, so that other sends get their turn.
            if !fragment.is_first && !outgoing.is_complete() {
                return self.queue(op);
            }
        }
    }

    /// Sends the next bytes in one frame. `fill` writes them, given the position of the first byte in the message.
    /// Returns `false` if there is no room; the next pass tries the send again.
    fn send_fragment(
        &mut self,
        op: u32,
        to: Rank,
        fragment: &Fragment,
        env: &mut RunContext<'_>,
        fill: impl FnOnce(&mut Compute, u64, &mut [u8]),
    ) -> bool {
        let at = self.ops[op as usize].outgoing().sent();
        // A message that fits one frame has its signature in the header.
        let whole = self.whole.filter(|_| fragment.is_first && !fragment.wants_grant);
        let signature = (fragment.is_first && whole.is_none()).then_some(&self.signature);
        let mut header = whole.unwrap_or_else(|| {
            let mut header = Header::new(if fragment.is_first { Kind::Begin } else { Kind::Data });
            header.flags = flags(fragment);
            header.value = self.plan.ops[op as usize].total;
            header
        });
        header.group = self.call.group_id;
        header.seq = self.call.seq;
        header.edge = self.plan.ops[op as usize].edge;
        let compute = &mut self.compute;
        let has_left = env.send_fragment(to, fragment, &header, signature, |data| fill(compute, at, data));
        if !has_left && !self.stalled.contains(&op) {
            self.stalled.push(op);
        }
        has_left
    }

    /// Sends like [`Run::send_fragment`], for bytes that lie in the call's memory or have just arrived.
    fn pass_on(
        &mut self,
        plan: &Plan,
        op: u32,
        (src, to): (&Region, Rank),
        fragment: &Fragment,
        fresh: &mut Option<Fresh<'_>>,
        env: &mut RunContext<'_>,
    ) -> bool {
        self.send_fragment(op, to, fragment, env, |compute, at, data| {
            match fresh.take_if(|fresh| fresh.at < at + fragment.bytes && !fresh.payload.is_empty()) {
                Some(fresh) => place_and_read(compute, plan, &fresh, src, at, data),
                None => compute.read(src, at, data),
            }
        })
    }

    // ---- tiles

    /// Returns how many bytes of the message `send` its combination could have computed by now.
    fn can_be_made(&self, maker: u32, send: &PlanOp) -> u64 {
        let tiles = self.limit(maker).unwrap_or(0);
        send.coded.as_ref().map_or(0, |coded| coded.bytes_of(tiles))
    }

    /// Sends like [`Run::send_fragment`], for tiles that are not all computed yet. They are computed in their frame if
    /// the frame holds whole tiles, starting with the next uncomputed one. Otherwise they are computed in the call's
    /// memory.
    fn make_and_send(
        &mut self,
        op: u32,
        (maker, combination): (u32, &Combination),
        (src, to): (&Region, Rank),
        fragment: &Fragment,
        come: Option<Come<'_>>,
        env: &mut RunContext<'_>,
    ) -> bool {
        let Some(coded) = &combination.code else { unreachable!("a combination that has a send makes tiles") };
        let sent = self.ops[op as usize].outgoing().sent();
        let end = sent + fragment.bytes;
        let tiles = self.ops[maker as usize].progress.done()..coded.tiles_to(end);
        if coded.bytes_of(tiles.start) != sent || coded.bytes_of(tiles.end) != end {
            self.compute.combine(combination, tiles.clone(), come, None);
            self.note_made(maker, tiles.end);
            return self.send_fragment(op, to, fragment, env, |compute, at, data| compute.read(src, at, data));
        }
        let made = tiles.end;
        let has_left = self.send_fragment(op, to, fragment, env, |compute, _, data| {
            compute.combine(combination, tiles, come, Some(data));
        });
        if has_left {
            self.note_made(maker, made);
        }
        has_left
    }

    /// Checks tiles that have arrived. If one combination alone reads them and they begin in their frame, it takes them
    /// from there. The rest is placed.
    ///
    /// # Errors
    /// `Protocol` if a tile is damaged.
    fn place_tiles(
        &mut self,
        coded: &Coded,
        taker: Option<u32>,
        (op, at, payload): (u32, u64, &[u8]),
        fresh: &mut Option<Fresh<'_>>,
        from: Rank,
        env: &mut RunContext<'_>,
    ) -> Result<()> {
        let end = at + payload.len() as u64;
        let tiles = coded.tiles_in(at)..coded.tiles_in(end);
        let damaged = |bad: BadTile| bad_tile(from, bad);
        let Some(taker) = taker.filter(|_| coded.bytes_of(tiles.start) == at && !tiles.is_empty()) else {
            // A send may have placed them already.
            self.place(fresh);
            return self.compute.check_tiles(coded, tiles, None).map_err(damaged);
        };
        self.compute.check_tiles(coded, tiles, Some(payload)).map_err(damaged)?;
        self.step(taker, fresh, env);
        let taken = coded.bytes_of(self.ops[taker as usize].progress.done()).clamp(at, end);
        self.place(&mut Some(Fresh { op, at: taken, payload: &payload[(taken - at) as usize..] }));
        Ok(())
    }

    /// Computes tiles of a combination in the call's memory, if no send or several sends use them.
    fn step_combine(&mut self, op: u32, combination: &Combination, fresh: &Option<Fresh<'_>>) {
        let Some(limit) = self.limit(op) else { return };
        let at = self.ops[op as usize].progress.done();
        // At its limit, only a combination without tiles still has something to do: it completes.
        if at == limit && !combination.tiles.is_empty() {
            return;
        }
        // Tiles that still lie in their frame are used at once, unless too many are due.
        let most = if fresh.is_some() { ELEMS_IN_FRAME } else { ELEMS_STEP };
        let step = combination.tiles.get(at as usize).map_or(0, |tile| (most / tile.elems.max(1)).max(1));
        let n = (limit - at).min(step);
        let come = fresh.as_ref().map(|fresh| come(&self.plan, fresh));
        self.compute.combine(combination, at..at + n, come, None);
        self.note_made(op, at + n);
        if at + n < limit {
            self.queue(op);
        }
    }

    /// Lets the worker compute the tiles of a combination that are due, and takes the tiles that it has computed.
    fn follow_combine(&mut self, op: u32, combination: &Combination) {
        let Some(limit) = self.limit(op).filter(|_| !self.externals.has_failed()) else { return };
        if combination.tiles.is_empty() {
            return self.complete(op);
        }
        if limit > 0 && !self.externals.has_begun(op) {
            let compute = &self.compute;
            if !self.externals.begin(op, ExternalStep::Combine, |wake| compute.begin_combine(combination, wake)) {
                unreachable!("a call whose combinations a worker computes has the worker");
            }
        }
        self.externals.set_ready(op, limit as u32);
        // The end is read before the number of tiles: a task that ends later may report more.
        let has_ended = self.externals.has_ended_one(op);
        let (taken, made) = (self.ops[op as usize].progress.done(), u64::from(self.externals.made(op)));
        let step = combination.tiles.get(taken as usize).map_or(1, |tile| (ELEMS_STEP / tile.elems.max(1)).max(1));
        let end = made.min(taken + step);
        if end > taken {
            if let Some(watch) = self.compute.watch() {
                watch.arrive();
            }
            self.compute.seal(combination, taken..end);
            self.ops[op as usize].progress = Progress::Local { done: end };
        }
        if end < made {
            return self.queue(op);
        }
        // The task ends after its last tile, and only then is its memory free.
        let computed = self.externals.combination(op).cloned();
        if has_ended && self.externals.settle(op) {
            if let Some(computed) = computed {
                self.compute.add_measurements(&computed);
            }
            self.complete(op);
        }
    }

    /// Records that a combination has computed its first `tiles` tiles.
    fn note_made(&mut self, op: u32, tiles: u64) {
        let plan = self.plan.clone();
        let plan_op = &plan.ops[op as usize];
        self.ops[op as usize].progress = Progress::Local { done: tiles };
        if tiles == plan_op.total {
            self.complete(op);
        }
        plan_op.dependents.iter().for_each(|&dependent| self.queue(dependent));
    }

    // ---- bytes that have just arrived

    fn place(&self, fresh: &mut Option<Fresh<'_>>) {
        if let Some(Fresh { op, at, payload }) = fresh.take() {
            self.compute.place(&self.plan.ops[op as usize].kind, at, payload);
        }
    }

    /// Handles a grant for message `edge` to `to`.
    pub(crate) fn on_grant(&mut self, to: Rank, edge: u32, value: u64) {
        self.note_peer();
        // A grant can outlive its send only within a run. The signature detects an unknown edge.
        if let Some(op) = self.plan.send(to, edge) {
            self.ops[op as usize].outgoing().on_grant(value);
            self.queue(op);
        }
    }

    // ---- receiving

    /// Records that a frame of this call has arrived from a peer.
    #[inline]
    fn note_peer(&self) {
        if let Some(watch) = self.compute.watch() {
            watch.meet();
        }
    }

    /// Handles a frame of message `header.edge` from `from`; `payload` excludes the signature.
    ///
    /// # Errors
    /// `Mismatch` if this call expects no such message, or one of another size. `Protocol` if there are too many bytes,
    /// or part of an element.
    pub(crate) fn on_data(
        &mut self,
        from: Rank,
        header: &Header,
        payload: &[u8],
        env: &mut RunContext<'_>,
    ) -> Result<()> {
        self.note_peer();
        let op = self.plan.receive(from, header.edge).ok_or_else(|| {
            Error::mismatch(format!("unexpected message from rank {from}; check that all ranks issue the same call"))
        })?;
        let total = self.plan.ops[op as usize].total;
        if header.value != total {
            return Err(Error::mismatch(format!(
                "rank {from} sends {} bytes, but this rank expects {total}; make the split sizes agree",
                header.value
            )));
        }
        if !payload.len().is_multiple_of(self.compute.elem_bytes()) {
            return Err(Error::protocol(format!("rank {from} sent an incomplete element in message {}", header.edge)));
        }
        let part = match header.kind {
            Kind::Begin => Part::First { wants_grant: header.flags & WANTS_GRANT != 0 },
            _ => Part::Next,
        };
        let limit = self.limit(op);
        match self.ops[op as usize].incoming().arrive(part, payload, limit) {
            Ok(Arrival::Place { at }) => {
                self.place_arrived(Fresh { op, at, payload }, from, env)?;
                self.note_finals();
                Ok(())
            }
            Ok(Arrival::Kept) => {
                self.queue(op);
                Ok(())
            }
            Ok(Arrival::Refused) => Err(Error::internal("an encoded message arrived before its destination was ready")),
            Err(Excess) => Err(Error::protocol(format!("rank {from} sent too many bytes of message {}", header.edge))),
        }
    }

    /// Places bytes that count as placed, and forwards them at once while they are in the cache.
    ///
    /// # Errors
    /// `Protocol` if a tile is damaged.
    fn place_arrived(&mut self, fresh: Fresh<'_>, from: Rank, env: &mut RunContext<'_>) -> Result<()> {
        let Fresh { op, at, payload } = fresh;
        let plan = self.plan.clone();
        let mut fresh = Some(fresh);
        let sends = |dependent: &u32| matches!(plan.ops[*dependent as usize].kind, PlanOpKind::Send { .. });
        let dependents = &plan.ops[op as usize].dependents;
        for &dependent in dependents.iter().filter(|dependent| sends(dependent)) {
            self.step(dependent, &mut fresh, env);
        }
        match &plan.ops[op as usize].coded {
            Some(coded) => {
                self.place_tiles(coded, plan.ops[op as usize].partner, (op, at, payload), &mut fresh, from, env)?
            }
            None => self.place(&mut fresh),
        }
        self.settle_receive(op, from, env);
        for &dependent in dependents {
            self.queue(dependent);
        }
        Ok(())
    }

    /// Places bytes that were kept, then grants more and completes.
    fn step_receive(&mut self, op: u32, from: Rank, env: &mut RunContext<'_>) {
        if let Some(limit) = self.limit(op) {
            let (kind, compute) = (&self.plan.ops[op as usize].kind, &self.compute);
            self.ops[op as usize].incoming().place_unexpected(limit, |at, bytes| compute.place(kind, at, bytes));
        }
        self.settle_receive(op, from, env);
    }

    /// Follows the progress of a receive: returns credit, grants, completes.
    fn settle_receive(&mut self, op: u32, from: Rank, env: &mut RunContext<'_>) {
        let limit = self.limit(op);
        let ahead = || match env.net.polls_without_syscall(env.members.peer(from)) {
            true => AHEAD_INTRA_NODE,
            false => AHEAD_INTER_NODE,
        };
        let state = &mut self.ops[op as usize];
        let incoming = state.incoming();
        let (credit, grant) = (incoming.due_credit(), incoming.due_grant(limit, env.segment, ahead));
        // Even an empty message completes only after its dependencies.
        let completes = incoming.is_complete() && limit.is_some() && !state.complete;
        if let Some(credit) = credit {
            env.members.return_credit(from, credit, self.call.group_id, env.net);
        }
        if completes {
            self.complete(op);
        }
        if let Some(value) = grant {
            self.send_grant(op, from, value, env);
        }
    }

    fn send_grant(&self, op: u32, from: Rank, value: u64, env: &mut RunContext<'_>) {
        let mut header = Header::new(Kind::Grant);
        header.group = self.call.group_id;
        header.seq = self.call.seq;
        header.edge = self.plan.ops[op as usize].edge;
        header.value = value;
        env.net.send_control(env.members.peer(from), header, &[]);
    }

    // ---- local work

    fn step_local(&mut self, op: u32) {
        let Some(limit) = self.limit(op) else { return };
        let plan_op = &self.plan.ops[op as usize];
        let at = self.ops[op as usize].progress.done();
        let n = (limit - at).min(LOCAL_STEP);
        if n > 0 {
            self.compute.execute(&plan_op.kind, at, n);
        }
        self.ops[op as usize].progress = Progress::Local { done: at + n };
        if at + n == plan_op.total {
            self.complete(op);
        } else if at + n < limit {
            self.queue(op);
        }
    }

    // ---- external operations

    /// Sets the function that wakes the driver at the end of an external operation.
    pub(crate) fn set_wake(&mut self, wake: Wake) {
        self.externals.set_wake(wake);
    }

    /// Begins an external operation if it is due, or completes it if it has ended. `is_final` says that bytes may be
    /// copied out.
    fn step_external(&mut self, op: u32, step: ExternalStep, is_final: bool) {
        if !self.externals.has_begun(op) {
            let is_due = match step {
                ExternalStep::CopyIn => true,
                // Begun by `note_finals` alone.
                ExternalStep::CopyOut => is_final,
                // Begun by `follow_combine` alone.
                ExternalStep::Combine => false,
                ExternalStep::Offload | ExternalStep::Join => self.limit(op).is_some(),
            };
            if !is_due {
                return;
            }
            let compute = &mut self.compute;
            if !self.externals.begin(op, step, |wake| compute.begin_external(step, wake)) {
                return self.complete(op);
            }
            if step == ExternalStep::CopyOut {
                self.externals.set_ready(op, self.ready_out);
            }
        }
        if self.externals.settle(op) {
            self.complete(op);
            if step == ExternalStep::CopyIn {
                self.note_copied_in(self.copies_in());
            }
        }
    }

    /// Number of segments to copy in.
    fn copies_in(&self) -> u32 {
        self.plan.staging.as_ref().map_or(0, |staging| staging.copy_in.len() as u32)
    }

    /// Returns whether everything of this part was copied in, but the call may still wait for other parts.
    fn awaits_parts_in(&self) -> bool {
        self.plan.staging.is_some() && self.copied_in == self.copies_in()
    }

    /// Meets the other parts of the call, if something needs the bytes that they copy in. Returns whether all parts have
    /// their bytes, and the sample is filled. Otherwise the driver is woken later.
    fn meet(&mut self) -> bool {
        if !self.compute.needs_all_parts_in() {
            return true;
        }
        let Some(meeting) = self.compute.meeting().cloned() else {
            self.compute.fill_sample();
            return true;
        };
        let Some(wake) = self.externals.wake() else { return false };
        if !std::mem::replace(&mut self.has_met, true) {
            meeting.note_copied_in(wake);
        }
        if !meeting.is_open() && self.plan.is_joined && meeting.are_copied_in() {
            self.compute.fill_sample();
            meeting.open();
        }
        meeting.is_open()
    }

    /// Lets operations use the first `count` segments of the copy-in.
    fn note_copied_in(&mut self, count: u32) {
        let plan = self.plan.clone();
        let Some(staging) = &plan.staging else { return };
        let before = self.copied_in;
        self.copied_in = before.max(count);
        if before == 0
            && count > 0
            && let Some(watch) = self.compute.watch()
        {
            watch.arrive();
        }
        if self.awaits_parts_in() && self.meet() {
            self.copied_in = staging.all_in();
        }
        (before..self.copied_in).flat_map(|segment| staging.readers(segment)).for_each(|&op| self.queue(op));
        if before != self.copied_in && self.compute.has_overlap() {
            self.note_finals();
        }
    }

    /// Lets the worker copy out the segments that have become final. The last one follows when this rank has nothing
    /// else to do for the call: see [`Enqueued`](crate::call::Enqueued).
    fn note_finals(&mut self) {
        let Some((op, staging)) = self.plan.copy_out.zip(self.plan.staging.as_ref()) else { return };
        let ops = &self.ops;
        staging.advance(&mut self.finals, |op, at| {
            let state = &ops[op as usize];
            state.complete || state.progress.done() >= at
        });
        let is_last = self.finals.count as usize == staging.copy_out.len();
        let holds_last = is_last && !self.awaits_copies_alone();
        let ready = self.finals.count - u32::from(holds_last);
        // Tensors that share memory with contributions are written when all contributions have been copied in.
        let may_write = !self.compute.has_overlap() || self.copied_in == staging.all_in();
        if ready == self.ready_out || !may_write || self.ops[op as usize].complete || self.externals.has_failed() {
            return;
        }
        if is_last && !holds_last {
            // A thread that continues when the last copy is enqueued finds the measurements of the call.
            self.compute.end();
        }
        self.ready_out = ready;
        if self.externals.has_begun(op) {
            self.externals.set_ready(op, self.ready_out);
        } else {
            self.step_external(op, ExternalStep::CopyOut, true);
        }
    }

    /// Returns whether nothing is left but copies. The caller may have continued.
    pub(crate) fn awaits_copies(&self) -> bool {
        self.plan.staging.is_some() && self.awaits_copies_alone()
    }

    /// Returns whether nothing is left but the copies of this part of a call, and the parts of other lanes.
    fn awaits_copies_alone(&self) -> bool {
        let is_left = |op: &PlanOp| {
            matches!(op.kind, PlanOpKind::External(ExternalStep::CopyIn | ExternalStep::CopyOut | ExternalStep::Join))
        };
        self.remaining == 1
            || self.remaining <= 3
                && self.ops.iter().zip(&self.plan.ops).all(|(state, op)| state.complete || is_left(op))
    }

    /// Takes the reason why the call cannot continue, if an external operation has failed.
    pub(crate) fn take_failure(&mut self) -> Option<Error> {
        self.externals.take_failure()
    }

    /// Asks the external operations in flight to stop. Returns whether the call must wait for that, or must report that
    /// its memory stays in use.
    pub(crate) fn cancel_externals(&self) -> bool {
        self.externals.cancel();
        self.may_be_touched() || self.abandoned().is_some()
    }

    /// Begins the external operations that begin with the call, whether or not this lane has begun its own part: the
    /// copy into host memory, and the parts that other lanes do. From then on, the call's memory is not given back
    /// before they have ended.
    pub(crate) fn begin_externals(&mut self) {
        let plan = self.plan.clone();
        for (op, plan_op) in (0..).zip(&plan.ops) {
            if let PlanOpKind::External(step @ (ExternalStep::CopyIn | ExternalStep::Join)) = plan_op.kind {
                self.step_external(op, step, false);
            }
        }
        if plan.copy_in.is_none() {
            self.note_copied_in(0);
        }
    }

    /// Returns whether an external operation may access the call's memory.
    pub(crate) fn may_be_touched(&self) -> bool {
        self.externals.may_touch()
    }

    /// Returns why an external operation was abandoned, if one was. The memory of the call must then stay.
    pub(crate) fn abandoned(&self) -> Option<&Error> {
        self.externals.abandoned()
    }

    /// Describes an external operation that has not ended, for messages.
    pub(crate) fn external_under_way(&self) -> Option<String> {
        // While this lane has work left, the call does not wait for the parts of other lanes.
        let awaits_peers = !self.awaited_messages().is_empty();
        self.externals.under_way(self.plan.is_joined && !self.awaits_parts_alone(), awaits_peers)
    }

    /// Describes any external operation that has not ended, including parts on other lanes.
    pub(crate) fn any_external_under_way(&self) -> Option<String> {
        self.externals.under_way(false, false)
    }

    // ---- waiting

    /// Sends this call's signature to the ranks from which a message has not fully arrived, or to which one is not
    /// fully sent. They may be in another call that sends nothing to this rank (two roots that wait for each other).
    /// They then detect the disagreement.
    pub(crate) fn probe(&mut self, env: &mut RunContext<'_>) {
        self.probe_at = None;
        for rank in self.awaited_messages() {
            self.send_probe(rank, env);
        }
    }

    /// Handles the signature of a rank, which equals this call's.
    pub(crate) fn on_probe(&mut self) {
        self.note_peer();
    }

    fn send_probe(&self, to: Rank, env: &mut RunContext<'_>) {
        let (group, seq) = (self.call.group_id, self.call.seq);
        let header = Header { group, seq, edge: PROBE, ..Header::new(Kind::Begin) };
        env.net.send_control(env.members.peer(to), header, &self.signature.to_bytes());
    }

    // ---- for messages

    /// Returns the ranks for which this call still waits, without repetition. While the operation of an offloaded call
    /// is in flight, these are all other ranks.
    pub(crate) fn awaited(&self, members: &Members) -> Vec<Rank> {
        match self.offload_in_flight() {
            true => members.ranks().filter(|&rank| rank != self.call.rank).collect(),
            false => self.awaited_messages(),
        }
    }

    fn awaited_messages(&self) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = self
            .plan
            .ops
            .iter()
            .zip(&self.ops)
            .filter(|(_, state)| !state.complete)
            .filter_map(|(op, state)| match &op.kind {
                // A message that has arrived may wait for other ranks before it is placed, or before it counts.
                PlanOpKind::Recv { from, .. } | PlanOpKind::RecvReduce { from, .. } => {
                    let has_arrived = matches!(&state.progress, Progress::Receive(incoming) if incoming.has_arrived());
                    (!has_arrived).then_some(*from)
                }
                PlanOpKind::Send { to, .. } => Some(*to),
                PlanOpKind::Copy { .. }
                | PlanOpKind::Reduce { .. }
                | PlanOpKind::Combine(_)
                | PlanOpKind::External(_) => None,
            })
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Returns whether something has yet to arrive from `peer`, or to be sent to it.
    pub(crate) fn needs(&self, peer: Rank) -> bool {
        self.plan.ops.iter().zip(&self.ops).any(|(op, state)| match &op.kind {
            // A message that has arrived may wait for other ranks before it is placed.
            PlanOpKind::Recv { from, .. } | PlanOpKind::RecvReduce { from, .. } => {
                *from == peer && !matches!(&state.progress, Progress::Receive(incoming) if incoming.has_arrived())
            }
            PlanOpKind::Send { to, .. } => *to == peer && !state.complete,
            PlanOpKind::Copy { .. } | PlanOpKind::Reduce { .. } | PlanOpKind::Combine(_) | PlanOpKind::External(_) => {
                false
            }
        })
    }
}

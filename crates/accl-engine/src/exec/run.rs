//! The executor: one collective call in flight.
//!
//! Runs the operations of a plan over links and memory, a segment at a time, never blocking. Owns the progress of each
//! operation, credits and early segments of its messages. Which call a frame belongs to is found by `group`. Read
//! [`Run`] first.
//!
//! Credits: the first segment of a message goes with its `Begin` frame if the eager window has room; everything else
//! needs a grant. A receiver grants what it can place now plus one segment, which it would copy aside; so whatever
//! arrives can be taken off its link at once, and links never block each other.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use accl_transport::frame::{Header, Kind, SIGNATURE_BYTES, Signature, WANTS_GRANT};
use accl_types::{Error, Moment, Rank, Result};

use super::context::RunContext;
use crate::call::CallState;
use crate::memory::{Compute, Storage};
use crate::plan::{Plan, PlanOpKind, Region, Shape};

/// Local work done per step, so that receiving and sending alternate with it. In bytes.
const LOCAL_STEP: u64 = 256 << 10;

/// As `LOCAL_STEP`, in tiles.
const TILES_STEP: u64 = 4;

/// Segments granted beyond what can be placed. Within a host one suffices; between hosts a grant takes its time, and what
/// is under way meanwhile keeps the connection busy.
const AHEAD_NEAR: u64 = 1;
const AHEAD_FAR: u64 = 8;

/// Bytes that are placed and passed on in turns: few enough for the innermost cache, with room for what they come from.
const TILE: usize = 8 << 10;

/// How long a call waits before it asks.
pub(crate) const INQUIRE_AFTER: Duration = Duration::from_millis(100);
/// The edge of a frame that only shows a call's signature.
pub(crate) const INQUIRY: u32 = u32::MAX;

/// A message that is not what its sender sent.
fn corrupted(from: Rank, why: &str) -> Error {
    Error::protocol(format!(
        "what came from rank {from} is damaged: {why}; look at the network between the two ranks, and whether both run the \
         same version"
    ))
}

/// Progress of one operation.
#[derive(Default)]
struct OpState {
    /// Bytes placed, sent or computed.
    done: u64,
    complete: bool,
    /// The operation is in the work queue.
    queued: bool,
    /// Of a send: its first frame has left. Of a receive: its first frame has arrived.
    begun: bool,
    /// Of a send: bytes it may have sent. Of a receive: bytes it has granted.
    granted: u64,
    /// Of a receive: bytes that have arrived.
    arrived: u64,
    /// Of a receive: the sender cannot go on without a grant.
    grant_wanted: bool,
    /// Of a receive: segments that came before they could be placed.
    stash: VecDeque<Vec<u8>>,
    /// Bytes of the first stashed segment that are placed already.
    stash_used: usize,
    /// Of a receive: eager bytes to be given back once they are placed, if any came.
    eager: Option<u64>,
    /// Of a send: the window had room for it, or its receiver has agreed to it. An empty one is over then.
    admitted: bool,
}

/// Bytes that have just come for a receive and lie in their frame still; the receive counts them as done.
struct Fresh<'a> {
    op: u32,
    at: u64,
    payload: &'a [u8],
}

/// One collective call in flight on this rank.
pub(crate) struct Run {
    pub(crate) call: Arc<CallState>,
    pub(crate) plan: Arc<Plan>,
    pub(crate) signature: Signature,
    /// See [`Shape`].
    whole: Option<Header>,
    pub(crate) deadline: Option<Moment>,
    /// When to ask silent ranks what they are doing.
    pub(crate) inquire_at: Option<Moment>,
    compute: Compute,
    ops: Vec<OpState>,
    remaining: usize,
    /// It has had a pass.
    pub(crate) begun: bool,
    work: VecDeque<u32>,
    /// Sends that found no room.
    stalled: Vec<u32>,
}

impl Run {
    /// A run of which the operations in `finished` are over already.
    pub(crate) fn new(
        call: Arc<CallState>,
        shape: &Shape,
        compute: Compute,
        finished: &[u32],
        deadline: Option<Moment>,
    ) -> Self {
        let (plan, signature) = (shape.plan.clone(), shape.signature);
        let mut ops: Vec<OpState> = plan.ops.iter().map(|_| OpState::default()).collect();
        for &op in finished {
            let (state, total) = (&mut ops[op as usize], plan.ops[op as usize].total);
            (state.done, state.arrived, state.granted) = (total, total, total);
            (state.begun, state.complete) = (true, true);
        }
        let remaining = ops.len() - finished.len();
        let inquire_at = Some(call.started + INQUIRE_AFTER);
        let mut run = Self {
            call,
            plan,
            signature,
            whole: shape.whole,
            deadline,
            inquire_at,
            compute,
            ops,
            remaining,
            begun: false,
            work: VecDeque::new(),
            stalled: Vec::new(),
        };
        for op in 0..run.ops.len() as u32 {
            run.queue(op);
        }
        run
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.remaining == 0
    }

    /// Whether there is something to try: new work, or a send that waits for room.
    pub(crate) fn is_busy(&self) -> bool {
        !self.work.is_empty() || !self.stalled.is_empty()
    }

    /// Takes back the room for encoded chunks.
    pub(crate) fn take_codes(&mut self) -> Option<Storage> {
        self.compute.buffers_mut().take_codes()
    }

    /// Enters what was measured, and writes staged outputs back. The last thing that touches the caller's memory.
    pub(crate) fn end(&mut self) {
        self.compute.end();
        self.compute.unpack();
    }

    /// Does all that can be done now. Returns whether anything was.
    pub(crate) fn advance(&mut self, env: &mut RunContext<'_>) -> bool {
        self.begun = true;
        // Later operations first: what they send has been touched last, and it is what peers can finish with.
        let mut stalled = std::mem::take(&mut self.stalled);
        stalled.sort_unstable_by(|a, b| b.cmp(a));
        for op in stalled.drain(..) {
            self.queue(op);
        }
        let mut progressed = false;
        // Local work is cut into steps: what an operation queues again waits for the next pass, so that frames are
        // taken off the links in between.
        for _ in 0..self.work.len().max(64) {
            let Some(op) = self.work.pop_front() else { break };
            self.ops[op as usize].queued = false;
            progressed |= self.step(op, &mut None, env);
        }
        progressed
    }

    fn queue(&mut self, op: u32) {
        let state = &mut self.ops[op as usize];
        if !state.queued && !state.complete {
            state.queued = true;
            self.work.push_back(op);
        }
    }

    /// How far an operation may go by its dependencies; `None`: it may not even begin.
    fn limit(&self, op: u32) -> Option<u64> {
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
            limit = limit.min(self.plan.ops[on as usize].reach(state.done, plan_op));
        }
        Some(limit)
    }

    /// Does what an operation can do now, and queues those that wait for it when that was something.
    fn step(&mut self, op: u32, fresh: &mut Option<Fresh<'_>>, env: &mut RunContext<'_>) -> bool {
        if self.ops[op as usize].complete {
            return false;
        }
        let before = (self.ops[op as usize].done, self.ops[op as usize].complete);
        let plan = self.plan.clone();
        match &plan.ops[op as usize].kind {
            PlanOpKind::Send { src, to } => self.step_send(op, src, *to, fresh, env),
            PlanOpKind::Recv { from, .. } | PlanOpKind::RecvReduce { from, .. } => self.step_receive(op, *from, env),
            PlanOpKind::Copy { .. } | PlanOpKind::Reduce { .. } | PlanOpKind::Combine(_) => self.step_local(op),
        }
        let state = &self.ops[op as usize];
        let progressed = (state.done, state.complete) != before;
        if progressed {
            for &dependent in &plan.ops[op as usize].dependents {
                self.queue(dependent);
            }
        }
        progressed
    }

    fn complete(&mut self, op: u32) {
        self.ops[op as usize].complete = true;
        self.remaining -= 1;
    }

    // ---- sending

    fn step_send(&mut self, op: u32, src: &Region, to: Rank, fresh: &mut Option<Fresh<'_>>, env: &mut RunContext<'_>) {
        let Some(limit) = self.limit(op) else { return };
        let total = src.len;
        if !self.ops[op as usize].begun {
            let first = total.min(env.segment);
            if limit < first {
                return;
            }
            let is_eager = env.members.has_eager_room(to, first);
            let n = if is_eager { first } else { 0 };
            // Without room in the window an empty message, too, waits for its receiver.
            self.ops[op as usize].admitted = is_eager;
            if !self.send_frame(op, (src, to), Kind::Begin, n, fresh, env) {
                return;
            }
            if is_eager {
                env.members.take_eager(to, n);
            }
            let state = &mut self.ops[op as usize];
            state.begun = true;
            state.granted = state.granted.max(n);
        }
        loop {
            let state = &self.ops[op as usize];
            if state.done == total {
                if total > 0 || state.admitted {
                    self.complete(op);
                }
                return;
            }
            let allowed = limit.min(state.granted);
            let n = env.segment.min(total - state.done);
            // Whole segments only, unless the grant itself ends within one.
            let n = if allowed >= state.done + n {
                n
            } else if state.granted <= limit {
                allowed - state.done
            } else {
                0
            };
            if n == 0 || !self.send_frame(op, (src, to), Kind::Data, n, fresh, env) {
                return;
            }
            // One frame a step: other sends have their turn.
            if self.ops[op as usize].done < total {
                self.queue(op);
                return;
            }
        }
    }

    /// Sends the next `n` payload bytes in one frame. `false`: no room; the send is tried again with the next pass.
    fn send_frame(
        &mut self,
        op: u32,
        (src, to): (&Region, Rank),
        kind: Kind,
        n: u64,
        fresh: &mut Option<Fresh<'_>>,
        env: &mut RunContext<'_>,
    ) -> bool {
        let done = self.ops[op as usize].done;
        let wants_grant = done + n < src.len || (src.len == 0 && !self.ops[op as usize].admitted);
        // A message of one frame has its signature in the header.
        let whole = self.whole.filter(|_| kind == Kind::Begin && !wants_grant);
        let signature_len = if kind == Kind::Begin && whole.is_none() { SIGNATURE_BYTES } else { 0 };
        let Some(place) = env.net.reserve(env.members.peer(to), signature_len + n as usize) else {
            if !self.stalled.contains(&op) {
                self.stalled.push(op);
            }
            env.members.note_stall(to);
            return false;
        };
        let mut header = whole.unwrap_or_else(|| {
            let mut header = Header::new(kind);
            header.flags = if wants_grant { WANTS_GRANT } else { 0 };
            header.value = src.len;
            header
        });
        header.group = self.call.group_id;
        header.seq = self.call.seq;
        header.edge = self.plan.ops[op as usize].edge;
        header.emit(place.head);
        let (signature, data) = place.payload.split_at_mut(signature_len);
        if !signature.is_empty() {
            self.signature.emit(signature);
        }
        match fresh.take_if(|fresh| fresh.at < done + n && !fresh.payload.is_empty()) {
            Some(fresh) => self.place_and_read(&fresh, src, done, data),
            None => self.compute.read(src, done, data),
        }
        env.net.commit(env.members.peer(to));
        env.members.note_sent(to, signature_len as u64 + n);
        self.ops[op as usize].done += n;
        true
    }

    // ---- bytes that have just come

    fn place(&self, fresh: &mut Option<Fresh<'_>>) {
        if let Some(Fresh { op, at, payload }) = fresh.take() {
            self.compute.place(&self.plan.ops[op as usize].kind, at, payload);
        }
    }

    /// Places bytes, and fills `data` from byte `done` of `src`, which depends on them. Where both are the same range, in
    /// turns, so that what is read was written just before.
    fn place_and_read(&self, fresh: &Fresh<'_>, src: &Region, done: u64, data: &mut [u8]) {
        let kind = &self.plan.ops[fresh.op as usize].kind;
        let tile = if fresh.at == done && fresh.payload.len() == data.len() { TILE } else { usize::MAX };
        let mut at = done;
        let mut targets = data.chunks_mut(tile);
        for part in fresh.payload.chunks(tile) {
            self.compute.place(kind, fresh.at + (at - done), part);
            if let Some(target) = targets.next() {
                self.compute.read(src, at, target);
                at += target.len() as u64;
            }
        }
    }

    /// A grant for message `edge` to `to` arrived.
    pub(crate) fn on_grant(&mut self, to: Rank, edge: u32, value: u64) {
        // A grant may outlive the send that it was for only within a run; an unknown edge is caught by the signature.
        if let Some(op) = self.plan.send(to, edge) {
            let state = &mut self.ops[op as usize];
            state.granted = state.granted.max(value);
            state.admitted = true;
            self.queue(op);
        }
    }

    // ---- receiving

    /// A frame of message `edge` from `from` arrived; `payload` is without signature.
    ///
    /// # Errors
    /// `Mismatch` when this call expects no such message; `Protocol` when there are more bytes than it has.
    pub(crate) fn on_data(
        &mut self,
        from: Rank,
        header: &Header,
        payload: &[u8],
        env: &mut RunContext<'_>,
    ) -> Result<()> {
        let op = self.plan.receive(from, header.edge).ok_or_else(|| {
            Error::mismatch(format!("rank {from} sent a message that this rank's part in the call does not have"))
        })?;
        let total = self.plan.ops[op as usize].total;
        if header.value != total {
            return Err(Error::mismatch(format!(
                "rank {from} sends {} bytes where this rank expects {total}; make the split sizes agree",
                header.value
            )));
        }
        let limit = self.limit(op);
        let state = &mut self.ops[op as usize];
        if state.arrived + payload.len() as u64 > total || (header.kind == Kind::Begin) == state.begun {
            return Err(Error::protocol(format!("rank {from} sent too much of message {}", header.edge)));
        }
        if !payload.len().is_multiple_of(self.compute.elem_bytes()) {
            return Err(Error::protocol(format!("rank {from} sent part of an element in message {}", header.edge)));
        }
        if header.kind == Kind::Begin {
            state.begun = true;
            state.grant_wanted = header.flags & WANTS_GRANT != 0;
            state.eager = (!payload.is_empty() || !state.grant_wanted).then_some(payload.len() as u64);
        }
        state.arrived += payload.len() as u64;
        let at = state.done;
        let fits = limit.is_some_and(|limit| at + payload.len() as u64 <= limit);
        if fits && state.stash.is_empty() {
            state.done += payload.len() as u64;
            let mut fresh = Some(Fresh { op, at, payload });
            let plan = self.plan.clone();
            let sends = |dependent: &u32| matches!(plan.ops[*dependent as usize].kind, PlanOpKind::Send { .. });
            let dependents = &plan.ops[op as usize].dependents;
            for &dependent in dependents.iter().filter(|dependent| sends(dependent)) {
                // At once, while the bytes are still near.
                self.step(dependent, &mut fresh, env);
            }
            self.place(&mut fresh);
            if let Some(coded) = &plan.ops[op as usize].coded {
                let tiles = coded.tiles_in(at)..coded.tiles_in(at + payload.len() as u64);
                self.compute.check_tiles(coded, tiles).map_err(|why| corrupted(from, &why))?;
            }
            self.settle_receive(op, from, env);
            for &dependent in dependents {
                self.queue(dependent);
            }
        } else if self.plan.ops[op as usize].coded.is_some() {
            // Bytes of encoded chunks are written once, and so can be placed when they come; here they would go unchecked.
            return Err(Error::internal("an encoded message came before it could be placed"));
        } else {
            state.stash.push_back(payload.to_vec());
            self.queue(op);
        }
        Ok(())
    }

    /// Places what was copied aside, grants more, completes.
    fn step_receive(&mut self, op: u32, from: Rank, env: &mut RunContext<'_>) {
        let limit = self.limit(op);
        while let Some(limit) = limit {
            let state = &mut self.ops[op as usize];
            let room = (limit - state.done) as usize;
            let Some(segment) = state.stash.front_mut() else { break };
            let rest = segment.len() - state.stash_used;
            // Elements are not split: dependencies move in whole elements.
            let n = rest.min(room);
            if n == 0 && rest > 0 {
                break;
            }
            let at = state.done;
            state.done += n as u64;
            let used = state.stash_used;
            let segment = if n == rest {
                state.stash_used = 0;
                state.stash.pop_front().unwrap_or_default()
            } else {
                state.stash_used += n;
                segment[used..used + n].to_vec()
            };
            let part = if n == rest { &segment[used..] } else { &segment[..] };
            self.compute.place(&self.plan.ops[op as usize].kind, at, part);
        }
        self.settle_receive(op, from, env);
    }

    /// After progress of a receive: gives eager bytes back, grants, completes.
    fn settle_receive(&mut self, op: u32, from: Rank, env: &mut RunContext<'_>) {
        let total = self.plan.ops[op as usize].total;
        let limit = self.limit(op);
        let state = &mut self.ops[op as usize];
        if let Some(eager) = state.eager.take_if(|eager| state.done >= *eager) {
            env.members.give_eager_back(from, eager, self.call.group_id, env.net);
        }
        if state.begun && state.done == total {
            if !state.complete {
                let is_awaited = total == 0 && state.grant_wanted;
                self.complete(op);
                if is_awaited {
                    self.send_grant(op, from, 0, env);
                }
            }
            return;
        }
        let wanted = state.grant_wanted || (total > env.segment && limit.is_some());
        if !wanted {
            return;
        }
        // More than can be placed: it would be copied aside. Without that, two ranks that both send before they receive into
        // the same place would wait for each other.
        let ahead = if env.net.is_cheap_to_look_at(env.members.peer(from)) { AHEAD_NEAR } else { AHEAD_FAR };
        let grant = total.min(limit.unwrap_or(0) + ahead * env.segment);
        let worth = grant == total || grant >= state.granted + env.segment;
        if grant > state.granted && grant > state.arrived && worth {
            state.granted = grant;
            self.send_grant(op, from, grant, env);
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
        let at = self.ops[op as usize].done;
        let n = match &plan_op.kind {
            PlanOpKind::Combine(combination) => {
                let n = (limit - at).min(TILES_STEP);
                self.compute.combine(combination, at, n);
                n
            }
            kind => {
                let n = (limit - at).min(LOCAL_STEP);
                if n > 0 {
                    self.compute.execute(kind, at, n);
                }
                n
            }
        };
        self.ops[op as usize].done += n;
        if at + n == plan_op.total {
            self.complete(op);
        } else if at + n < limit {
            self.queue(op);
        }
    }

    // ---- waiting

    /// Shows this call's signature to the ranks that it has heard nothing of. They may be in another call that sends
    /// nothing to this rank (two roots that wait for each other): then they find that they disagree.
    pub(crate) fn inquire(&mut self, env: &mut RunContext<'_>) {
        self.inquire_at = None;
        let mut header = Header::new(Kind::Begin);
        header.group = self.call.group_id;
        header.seq = self.call.seq;
        header.edge = INQUIRY;
        for rank in self.awaited() {
            env.net.send_control(env.members.peer(rank), header, &self.signature.to_bytes());
        }
    }

    // ---- for messages

    /// The ranks that this call still waits for, without repetition.
    pub(crate) fn awaited(&self) -> Vec<Rank> {
        let mut ranks: Vec<Rank> = self
            .plan
            .ops
            .iter()
            .zip(&self.ops)
            .filter(|(_, state)| !state.complete)
            .filter_map(|(op, _)| match &op.kind {
                PlanOpKind::Recv { from, .. } | PlanOpKind::RecvReduce { from, .. } => Some(*from),
                PlanOpKind::Send { to, .. } => Some(*to),
                PlanOpKind::Copy { .. } | PlanOpKind::Reduce { .. } | PlanOpKind::Combine(_) => None,
            })
            .collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    /// Whether something has yet to come from `peer` or to go to it.
    pub(crate) fn needs(&self, peer: Rank) -> bool {
        self.plan.ops.iter().zip(&self.ops).any(|(op, state)| match &op.kind {
            // What has arrived may wait for other ranks before it is placed.
            PlanOpKind::Recv { from, .. } | PlanOpKind::RecvReduce { from, .. } => {
                *from == peer && !(state.begun && state.arrived == op.total)
            }
            PlanOpKind::Send { to, .. } => *to == peer && !state.complete,
            PlanOpKind::Copy { .. } | PlanOpKind::Reduce { .. } | PlanOpKind::Combine(_) => false,
        })
    }
}

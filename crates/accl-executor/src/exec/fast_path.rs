//! The fast path of a small call whose caller waits. It runs the operations one after the other on the caller's thread,
//! with no call object, no queue and no allocation.
//!
//! The fast path runs the plan that `run` would execute, in the order of [`Plan::fast_path`](crate::plan::Plan). It
//! stops at the first unexpected event: a peer is late, a frame of another call comes first, or a ring is full. A run
//! then continues from there and handles the event. Read [`FastPath::advance`] first.

use accl_types::Rank;
use accl_wire::frame::{is_same_head, with_edge};
use accl_wire::{Frame, HEAD_BYTES};

use super::context::{RunContext, SpinLimit};
use super::transfer::{Fragment, Incoming};
use crate::memory::Compute;
use crate::peers::{Net, PeerId};
use crate::plan::{Plan, PlanOp, PlanOpKind, Region};

/// Returns the next frame of a peer if it arrives within `polls` polls. Errors are left to a pass.
#[inline]
fn await_frame(net: &mut Net, peer: PeerId, polls: u32) -> Option<Frame<'_>> {
    net.link(peer)?.await_frame(polls).ok()?
}

/// A call on the fast path.
pub(crate) struct FastPath<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) compute: &'a Compute,
    /// Head of all frames, apart from the edge. Each message fits one frame.
    pub(crate) head: [u8; HEAD_BYTES],
    pub(crate) group: u64,
    pub(crate) seq: u64,
    pub(crate) spin_limit: SpinLimit,
}

impl FastPath<'_> {
    /// Executes operations in `order` until one has to wait. Returns how many of them are done.
    pub(crate) fn advance(&self, order: &[u32], env: &mut RunContext<'_>) -> usize {
        let done = self.execute(order, env);
        // Done once for everything that was sent and released. The check whether a peer sleeps waits until our writes
        // are visible, which they are by now.
        self.wake_peers(env);
        done
    }

    fn wake_peers(&self, env: &mut RunContext<'_>) {
        for &rank in &self.plan.peers {
            if let Some(link) = env.net.link(env.members.peer(rank)) {
                link.wake_peer();
            }
        }
    }

    /// Yields the core, because the sending rank may wait for this core, or sleep. Returns whether its frame has
    /// arrived.
    #[cold]
    fn yield_for_frame(&self, peer: PeerId, env: &mut RunContext<'_>) -> bool {
        if self.spin_limit.yields > 0 {
            self.wake_peers(env);
        }
        (0..self.spin_limit.yields).any(|_| {
            (self.spin_limit.yield_now)();
            await_frame(env.net, peer, self.spin_limit.spins).is_some()
        })
    }

    fn execute(&self, order: &[u32], env: &mut RunContext<'_>) -> usize {
        for (position, &index) in order.iter().enumerate() {
            let op = &self.plan.ops[index as usize];
            let done = match &op.kind {
                PlanOpKind::Send { src, to } => self.send(op, src, *to, env),
                PlanOpKind::Recv { from, .. } | PlanOpKind::RecvReduce { from, .. } => self.receive(op, *from, env),
                PlanOpKind::Copy { .. } | PlanOpKind::Reduce { .. } => {
                    self.compute.execute(&op.kind, 0, op.total);
                    true
                }
                PlanOpKind::Combine(_) | PlanOpKind::External(_) => {
                    unreachable!("an encoded or staged call has no fast path")
                }
            };
            if !done {
                return position;
            }
        }
        order.len()
    }

    #[inline]
    fn send(&self, op: &PlanOp, src: &Region, to: Rank, env: &mut RunContext<'_>) -> bool {
        let Some(fragment) = Fragment::whole(op.total, |bytes| env.members.has_eager_room(to, bytes)) else {
            return false;
        };
        let peer = env.members.peer(to);
        let Some(slot) = env.net.reserve(peer, op.total as usize) else { return false };
        *slot.head = with_edge(&self.head, op.edge);
        self.compute.read(src, 0, slot.payload);
        if let Some(link) = env.net.link(peer) {
            link.commit_quietly();
        }
        if let Some(credit) = fragment.credit {
            env.members.take_eager(to, credit);
        }
        env.members.note_sent(to, op.total);
        true
    }

    #[inline]
    fn receive(&self, op: &PlanOp, from: Rank, env: &mut RunContext<'_>) -> bool {
        let peer = env.members.peer(from);
        let place = |frame: Frame<'_>| {
            let is_it = is_same_head(frame.head, &with_edge(&self.head, op.edge));
            let fits = is_it && frame.payload.len() as u64 == op.total;
            if fits {
                self.compute.place(&op.kind, 0, frame.payload);
            }
            fits
        };
        let placed = await_frame(env.net, peer, self.spin_limit.spins).map(place);
        if !placed
            .unwrap_or_else(|| self.yield_for_frame(peer, env) && await_frame(env.net, peer, 1).is_some_and(place))
        {
            return false;
        }
        if let Some(link) = env.net.link(peer) {
            link.release_quietly();
        }
        env.members.note_received(from, op.total);
        env.members.saw(from, self.seq);
        env.members.return_credit(from, Incoming::credit_of_whole(op.total), self.group, env.net);
        true
    }
}

//! The short way of a small call whose caller waits: its operations one after the other on the caller's thread, with no
//! call object, no queue and no allocation.
//!
//! It is the plan that `run` executes, in the order of [`Plan::straight`](crate::plan::Plan). As soon as something is not
//! as expected (a peer is late, a frame of another call comes first, a ring is full), it stops, and a run goes on from
//! there. So nothing unusual is handled here. Read [`Straight::go`] first.

use accl_transport::frame::{HEADER_BYTES, Header, Kind, SIGNATURE_BYTES};
use accl_types::Rank;

use crate::local::Local;
use crate::plan::{PlanOp, PlanOpKind, Region};
use crate::run::RunEnv;
use crate::shape::Shape;

/// A call on its short way.
pub(crate) struct Straight<'a> {
    pub(crate) shape: &'a Shape,
    pub(crate) local: &'a Local,
    pub(crate) group: u64,
    pub(crate) seq: u64,
    /// How often to look for a frame before giving up.
    pub(crate) looks: u32,
}

impl Straight<'_> {
    /// Runs operations in `order`; returns how many of them are done.
    pub(crate) fn go(&self, order: &[u32], env: &mut RunEnv<'_>) -> usize {
        let done = self.run(order, env);
        // Once for all that was sent and taken: looking whether a peer sleeps waits for our writes to be visible, which
        // they are by now.
        for &rank in &self.shape.plan.peers {
            env.net.wake(env.members.peer(rank));
        }
        done
    }

    fn run(&self, order: &[u32], env: &mut RunEnv<'_>) -> usize {
        for (position, &index) in order.iter().enumerate() {
            let op = &self.shape.plan.ops[index as usize];
            let done = match &op.kind {
                PlanOpKind::Send { src, to } => self.send(op, src, *to, env),
                PlanOpKind::Recv { from, .. } | PlanOpKind::RecvReduce { from, .. } => self.receive(op, *from, env),
                PlanOpKind::Copy { .. } | PlanOpKind::Reduce { .. } => {
                    self.local.work(&op.kind, 0, op.total);
                    true
                }
            };
            if !done {
                return position;
            }
        }
        order.len()
    }

    #[inline]
    fn send(&self, op: &PlanOp, src: &Region, to: Rank, env: &mut RunEnv<'_>) -> bool {
        if env.members.eager_left(to) < op.total {
            return false;
        }
        let peer = env.members.peer(to);
        let payload_len = SIGNATURE_BYTES + op.total as usize;
        let Some(frame) = env.net.reserve(peer, HEADER_BYTES + payload_len) else { return false };
        let mut header = Header::new(Kind::Begin);
        header.payload_len = payload_len as u32;
        header.group = self.group;
        header.seq = self.seq;
        header.edge = op.edge;
        header.value = op.total;
        header.emit(frame);
        let (signature, data) = frame[HEADER_BYTES..].split_at_mut(SIGNATURE_BYTES);
        signature.copy_from_slice(&self.shape.signature_bytes);
        self.local.read(src, 0, data);
        env.net.commit_quietly(peer);
        env.members.take_eager(to, op.total);
        true
    }

    #[inline]
    fn receive(&self, op: &PlanOp, from: Rank, env: &mut RunEnv<'_>) -> bool {
        let peer = env.members.peer(from);
        let Some(frame) = env.net.await_frame(peer, self.looks) else { return false };
        let Ok((header, payload)) = Header::parse(frame) else { return false };
        let Some((signature, data)) = payload.split_first_chunk::<SIGNATURE_BYTES>() else { return false };
        let is_expected = header.kind == Kind::Begin
            && header.flags == 0
            && (header.group, header.seq, header.edge) == (self.group, self.seq, op.edge)
            && header.value == op.total
            && data.len() as u64 == op.total
            && *signature == self.shape.signature_bytes;
        if !is_expected {
            return false;
        }
        self.local.place(&op.kind, 0, data);
        env.net.release_quietly(peer);
        env.members.saw(from, self.seq);
        env.members.give_eager_back(from, op.total, self.group, env.net);
        true
    }
}

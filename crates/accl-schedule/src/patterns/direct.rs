//! Exchanges in which every member communicates with every other. Each starts with its neighbour, so that no member is
//! the first target of all.
//!
//! Block b belongs to member b. Only the first `owners` members own a block, so that members without a block can take
//! part.

use super::Team;
use crate::ir::{Buf, Finish, Order, Schedule, Span};

/// Owner b ends with block b, reduced, in `acc(b)`. Contributions are in `src`, which is not written. Operands are
/// combined in the order in which the staggered sends arrive.
pub fn reduce_scatter(
    schedule: &mut Schedule,
    team: &Team,
    owners: u32,
    src: impl Fn(u32) -> Span,
    acc: impl Fn(u32) -> Span,
    finish: Finish,
) {
    let index = team.index();
    for step in 1..team.size() {
        let (to, from) = (team.after(step), team.before(step));
        if to < owners {
            schedule.send(team.rank(to), src(to));
        }
        if index < owners {
            let local = if step == 1 { src(index) } else { acc(index) };
            // Contributions arrive in descending order from this member, then from the last one. After the wrap the
            // partial sum contains member 0.
            let order = if from < index { Order::IncomingFirst } else { Order::LocalFirst };
            let finish = if step + 1 == team.size() { finish } else { Finish::No };
            schedule.recv_reduce(team.rank(from), acc(index), local, order, finish);
        }
    }
}

/// Like [`reduce_scatter`] among members that each own a block, but an owner first collects all contributions and then
/// adds them in member order. Each is stored in scratch of the size of chunk `like`. Requires at least two members.
pub fn reduce_scatter_collected(
    schedule: &mut Schedule,
    team: &Team,
    src: impl Fn(u32) -> Span,
    like: (Buf, u32),
    out: Span,
) {
    let mut operands = vec![src(team.index()); team.size() as usize];
    for step in 1..team.size() {
        let (to, from) = (team.after(step), team.before(step));
        let slot = Span::chunk(Buf::Scratch, schedule.scratch_like(like.0, like.1));
        schedule.send(team.rank(to), src(to));
        schedule.recv(team.rank(from), slot.clone());
        operands[from as usize] = slot;
    }
    schedule.reduce(out, operands, Finish::Yes);
}

/// Every member ends with the blocks of all owners in `at`; `own` is an owner's own block.
pub fn all_gather(schedule: &mut Schedule, team: &Team, owners: u32, own: Span, at: impl Fn(u32) -> Span) {
    for step in 1..team.size() {
        let (to, from) = (team.after(step), team.before(step));
        if team.index() < owners {
            schedule.send(team.rank(to), own.clone());
        }
        if from < owners {
            schedule.recv(team.rank(from), at(from));
        }
    }
}

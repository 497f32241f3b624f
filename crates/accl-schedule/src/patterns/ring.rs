//! Exchanges around a ring: every member receives from the member before it and sends to the member after it.
//!
//! The reduction of block b starts at member b + 1 and ends at member b. Every partial sum, except the first, contains
//! member 0's contribution once it has passed member 0. This determines the order of operands.

use super::Team;
use crate::ir::{Finish, Order, Schedule, Span};

/// Member b ends with block b, reduced, in `acc(b)`; partial sums of another block pass through that block's `acc`.
/// Contributions are in `src`, which is not written.
pub fn reduce_scatter(
    schedule: &mut Schedule,
    team: &Team,
    src: impl Fn(u32) -> Span,
    acc: impl Fn(u32) -> Span,
    finish: Finish,
) {
    let n = team.size();
    let (before, after) = (team.rank(team.before(1)), team.rank(team.after(1)));
    // The arriving sum was accumulated from a higher-numbered member upwards, so only member 0 comes before all of it.
    let order = if team.index() == 0 { Order::LocalFirst } else { Order::IncomingFirst };
    schedule.send(after, src(team.before(1)));
    for step in 2..n {
        let block = team.before(step);
        schedule.recv_reduce_send(before, after, acc(block), src(block), order, Finish::No);
    }
    schedule.recv_reduce(before, acc(team.index()), src(team.index()), order, finish);
}

/// Every member ends with all blocks in `at`; `own` is its own block.
pub fn all_gather(schedule: &mut Schedule, team: &Team, own: Span, at: impl Fn(u32) -> Span) {
    let n = team.size();
    let (before, after) = (team.rank(team.before(1)), team.rank(team.after(1)));
    schedule.send(after, own);
    for step in 1..n {
        let to = (step + 1 < n).then_some(after);
        schedule.recv_copy_send(before, to, at(team.before(step)));
    }
}

//! Recursive halving and doubling among a power of two of members. In each step two members at half the previous
//! distance exchange halves of what they still share (reduce_scatter). In reverse, they double what they have
//! (all_gather).

use super::{Strip, Team, by_rank};
use crate::algorithms::Fraction;
use crate::cost::{Among, Arriving, Phase};
use crate::ir::{Finish, Schedule, Span};

/// One exchange. Ranges are aligned powers of two in the numbering of the members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PairExchange {
    /// Position of the partner.
    pub peer: u32,
    /// First block this member keeps.
    pub keep: u32,
    /// First block the partner keeps.
    pub give: u32,
    /// Number of blocks each keeps.
    pub len: u32,
}

/// The exchanges of the member at `index`, the largest first: halving uses this order, doubling the opposite order.
pub fn steps(index: u32, size: u32) -> impl DoubleEndedIterator<Item = PairExchange> {
    (0..size.ilog2()).rev().map(move |bit| {
        let len = 1 << bit;
        let keep = index & !(len - 1);
        PairExchange { peer: index ^ len, keep, give: keep ^ len, len }
    })
}

/// The exchanges as counts, the largest first. `part` returns the message size of a step with the given number of
/// blocks.
pub fn phases(
    among: Among<'_>,
    size: u32,
    part: impl Fn(u32) -> Fraction,
    arriving: Arriving,
) -> impl DoubleEndedIterator<Item = Phase> {
    let paired = among.size() - size;
    // The representatives of folded pairs, or the members themselves if none were folded.
    let member = move |index: u32| index + index.min(paired);
    steps(0, size).map(move |step| {
        let pairs = (0..size).map(|index| (member(index), member(index ^ step.len)));
        Phase::exchange(1, among.pairs(pairs), part(step.len), arriving)
    })
}

/// Every member ends with its own block, reduced, in `acc`; contributions are in `src`, which is not written.
pub fn reduce_scatter(schedule: &mut Schedule, team: &Team, src: Strip, acc: Strip) {
    reduce_scatter_of(schedule, team, |first, len| src.blocks(first, len), |first, len| acc.blocks(first, len));
}

/// Like [`reduce_scatter`], for blocks at any locations: `src` and `acc` return the given number of blocks from a first
/// one on.
pub fn reduce_scatter_of(
    schedule: &mut Schedule,
    team: &Team,
    src: impl Fn(u32, u32) -> Span,
    acc: impl Fn(u32, u32) -> Span,
) {
    let mut reduced = false;
    for step in steps(team.index(), team.size()) {
        let peer = team.rank(step.peer);
        let local = |first| if reduced { acc(first, step.len) } else { src(first, step.len) };
        let (given, kept) = (local(step.give), local(step.keep));
        schedule.send(peer, given);
        let finish = if step.len == 1 { Finish::Yes } else { Finish::No };
        let order = by_rank(step.peer, team.index());
        schedule.recv_reduce(peer, acc(step.keep, step.len), kept, order, finish);
        reduced = true;
    }
}

/// Every member ends with all blocks; its own block is there at the start.
pub fn all_gather(schedule: &mut Schedule, team: &Team, at: Strip) {
    all_gather_of(schedule, team, |first, len| at.blocks(first, len));
}

/// Like [`all_gather`], for blocks at any locations.
pub fn all_gather_of(schedule: &mut Schedule, team: &Team, at: impl Fn(u32, u32) -> Span) {
    for step in steps(team.index(), team.size()).rev() {
        let peer = team.rank(step.peer);
        schedule.send(peer, at(step.keep, step.len));
        schedule.recv(peer, at(step.give, step.len));
    }
}

//! Bruck's all_gather among any number of members: each member's blocks double in every step and are received in place.

use super::{Team, ceil_log2, floor_log2, floor_power_of_two};
use crate::algorithms::Fraction;
use crate::cost::{Among, Arriving, Phase};
use crate::ir::{Buf, Schedule, Span};

/// Every member ends with all chunks of a buffer that has one chunk per member; its own chunk is there at the start.
pub fn all_gather(schedule: &mut Schedule, team: &Team, at: Buf) {
    let n = team.size();
    let mut have = 1;
    while have < n {
        let len = have.min(n - have);
        let (to, from) = (team.before(have), team.after(have));
        schedule.send(team.rank(to), Span::cyclic(at, team.index(), len, n));
        schedule.recv(team.rank(from), Span::cyclic(at, from, len, n));
        have += len;
    }
}

/// The exchanges as counts; a block is `1 / blocks` of the largest buffer.
pub fn phases(among: Among<'_>, blocks: u32) -> Vec<Phase> {
    let n = among.size();
    let (mut have, mut phases, chain) = (1, Vec::new(), steps(n));
    while have < n {
        let len = have.min(n - have);
        let step = u32::from((phases.len() as u32) < chain);
        phases.push(Phase::linked(step, among.shift(have), Fraction::new(len, blocks), Arriving::Copied));
        have += len;
    }
    phases
}

/// Longest chain of messages in Bruck's exchanges among `n`. The last step depends on other messages only for the part
/// of the world beyond the power of two.
pub fn steps(n: u32) -> u32 {
    let beyond = n - floor_power_of_two(n);
    if beyond == 0 { floor_log2(n) } else { floor_log2(n).max(ceil_log2(beyond) + 1) }
}

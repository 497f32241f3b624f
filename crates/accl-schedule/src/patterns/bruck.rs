//! Bruck's all_gather among any number of members: what each has doubles in every step, and goes straight to its place.

use super::{Team, ceil_log2, floor_log2, floor_power_of_two};
use crate::ir::{Buf, Schedule, Span};

/// Every member ends with all chunks of a buffer that has one each; its own is there at the start.
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

/// Longest chain of messages in Bruck's exchanges among `n`: the last step depends on others only for the part of the
/// world beyond the power of two.
pub fn steps(n: u32) -> u32 {
    let beyond = n - floor_power_of_two(n);
    if beyond == 0 { floor_log2(n) } else { floor_log2(n).max(ceil_log2(beyond) + 1) }
}

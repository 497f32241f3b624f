//! Reduce_scatter over a circulant graph: a logarithmic number of steps and minimal volume for any number of members.
//!
//! A block is `distance` members away from its owner, counted backwards from the owner. In each step every member
//! forwards the farther half of the blocks that it still holds, which belong to members that far ahead. The
//! contributions in a partial sum depend only on the distance. J. L. Träff, arXiv 2410.14234 (2024).

use super::{Team, by_rank};
use crate::algorithms::Fraction;
use crate::cost::{Among, Arriving, Phase};
use crate::ir::{Buf, Finish, Order, Schedule, Span};

/// Member b ends with block b, reduced, in `acc(b)`; partial sums of another block pass through that block's `acc`.
/// Contributions are in `src`, which is not written. Both functions return one chunk.
pub fn reduce_scatter(
    schedule: &mut Schedule,
    team: &Team,
    src: impl Fn(u32) -> (Buf, u32),
    acc: impl Fn(u32) -> (Buf, u32),
) {
    // For the block at each distance: how far back the members are whose contributions it contains here.
    let mut parts: Vec<Vec<u32>> = vec![vec![0]; team.size() as usize];
    for BlockExchange { held, skip } in steps(team.size()) {
        let (to, from) = (team.after(skip), team.before(skip));
        let place = |distance: u32| {
            let block = team.after(distance);
            if parts[distance as usize].len() > 1 { acc(block) } else { src(block) }
        };
        let order = |receiver: u32, distance: u32| {
            let sender = (receiver + team.size() - skip) % team.size();
            let incoming = lowest(team, sender, &parts[(distance + skip) as usize]);
            by_rank(incoming, lowest(team, receiver, &parts[distance as usize]))
        };
        // Blocks that differ in the order of operands, because of the wrap after the last member, are sent separately.
        for wanted in [Order::IncomingFirst, Order::LocalFirst] {
            let sent = (skip..held).filter(|distance| order(to, distance - skip) == wanted).map(place);
            let sent: Span = sent.collect();
            if !sent.is_empty() {
                schedule.send(team.rank(to), sent);
            }
            let kept: Vec<u32> = (0..held - skip).filter(|&distance| order(team.index(), distance) == wanted).collect();
            if !kept.is_empty() {
                let local = kept.iter().map(|&distance| place(distance)).collect();
                let dst = kept.iter().map(|&distance| acc(team.after(distance))).collect();
                let finish = if skip == 1 { Finish::Yes } else { Finish::No };
                schedule.recv_reduce(team.rank(from), dst, local, wanted, finish);
            }
        }
        for distance in 0..held - skip {
            let passed = std::mem::take(&mut parts[(distance + skip) as usize]);
            parts[distance as usize].extend(passed.into_iter().map(|back| back + skip));
        }
    }
}

/// The exchanges as counts, ignoring the split at the wrap; a block is `1 / n` of the largest buffer.
pub fn phases(among: Among<'_>) -> Vec<Phase> {
    let n = among.size();
    let chain = chain(n) as usize;
    let phase = |(index, BlockExchange { held, skip }): (usize, BlockExchange)| {
        let part = Fraction::new(held - skip, n);
        Phase::linked(u32::from(index < chain), among.shift(skip), part, Arriving::Reduced)
    };
    steps(n).enumerate().map(phase).collect()
}

/// Longest chain of messages among `n`.
pub fn chain(n: u32) -> u32 {
    let mut levels = vec![0; n as usize];
    for BlockExchange { held, skip } in steps(n) {
        let (kept, passed) = levels.split_at_mut(skip as usize);
        let passed = &passed[..(held - skip) as usize];
        let kept = &mut kept[..passed.len()];
        let sent = passed.iter().copied().max().unwrap_or(0) + 1;
        let level = kept.iter().copied().max().unwrap_or(0).max(sent);
        kept.fill(level);
    }
    levels.first().copied().unwrap_or(0)
}

/// One exchange: blocks at distances `skip..held` are sent to the member `skip` positions after this one.
struct BlockExchange {
    held: u32,
    skip: u32,
}

fn steps(n: u32) -> impl Iterator<Item = BlockExchange> {
    let step = |held: u32| (held > 1).then(|| BlockExchange { held, skip: held.div_ceil(2) });
    std::iter::successors(step(n), move |last| step(last.skip))
}

/// The lowest position among the positions `back` before `index`.
fn lowest(team: &Team, index: u32, back: &[u32]) -> u32 {
    back.iter().map(|back| (index + team.size() - back) % team.size()).min().unwrap_or(index)
}

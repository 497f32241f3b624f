//! Recursive halving reduce_scatter: in each step two ranks at half the previous distance exchange halves of the blocks
//! that they still share. Steps log2(n). If n is not a power of two, the first ranks are folded in pairs. This adds one
//! or two steps, and the whole input once more for a rank that acts for a partner. Wins for small blocks in large
//! worlds.
//! R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19 (2005).

use std::ops::Range;

use crate::algorithms::prelude::*;
use crate::patterns::fold::{self, Fold, added_steps};
use crate::patterns::{by_rank, halving};

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 21,
    name: "recursive_halving",
    collective: Collective::ReduceScatter,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Often,
    sums: Sums::InTurn,
    steps: |n, _| floor_log2(n) + added_steps(n),
    bytes: busiest,
    steps_formula: "log2 n; floor(log2 n) + 1 for p < n <= 3p/2, + 2 above",
    bytes_formula: "(n-1)/n; 1 + (sum of k + min(k, n-p) for k = 1, 2, 4 ... p/2)/n if n is not a power of two",
    cost: |n, topology| {
        let (among, p) = (Among::World(topology), floor_power_of_two(n));
        let kept = |blocks: u32| Fraction::new(blocks + blocks.min(n - p), n);
        let core = halving::phases(among, p, kept, Arriving::Reduced);
        let leave = fold::leave(among, added_steps(n).saturating_sub(1), Fraction::new(1, n));
        Cost::of([fold::enter(among, Fraction::WHOLE)].into_iter().chain(core).chain([leave]))
    },
    wins: "small blocks in large worlds, best with a power of two",
    source: "Thakur, Rabenseifner, Gropp 2005",
};

/// Rank 0 keeps most: what it receives from its guest, and in each halving step the kept half.
fn busiest(n: u32, _: &Topology) -> Fraction {
    let paired = n - floor_power_of_two(n);
    let kept = (0..floor_log2(n)).map(|step| (1 << step) + paired.min(1 << step)).sum::<u32>();
    Fraction::new(kept + if paired > 0 { n } else { 0 }, n)
}

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Blocks, Division::Whole);
    let world = Team::world(request);
    let all = 0..world.size();
    match Fold::of(&world) {
        Fold::Guest { host } => {
            schedule.send(world.rank(host), inputs(all));
            schedule.recv(world.rank(host), whole(Buf::Out));
        }
        Fold::Member { guest, core } => {
            let team = &core.team;
            // This rank's own block is reduced in place; the other blocks are reduced in scratch.
            let held = match halving::steps(team.index(), team.size()).next() {
                Some(first) if guest.is_none() => core.start(first.keep)..core.start(first.keep + first.len),
                Some(_) | None => all.clone(),
            };
            for block in held.clone() {
                schedule.scratch_like(Buf::In, block);
            }
            let own = request.rank.0;
            let acc = |blocks: Range<u32>| {
                let mut span = Span::empty();
                for block in blocks {
                    let (buf, chunk) = if block == own { (Buf::Out, 0) } else { (Buf::Scratch, block - held.start) };
                    span.push(buf, chunk, 1);
                }
                span
            };
            let mut reduced = false;
            if let Some(guest) = guest {
                let guest = world.rank(guest);
                schedule.recv_reduce(guest, acc(all.clone()), inputs(all), Order::LocalFirst, Finish::No);
                reduced = true;
            }
            for step in halving::steps(team.index(), team.size()) {
                let peer = team.rank(step.peer);
                let blocks = |first: u32| core.start(first)..core.start(first + step.len);
                let local = |blocks| if reduced { acc(blocks) } else { inputs(blocks) };
                schedule.send(peer, local(blocks(step.give)));
                let finish = if step.len == 1 { Finish::Yes } else { Finish::No };
                let keep = blocks(step.keep);
                let order = by_rank(step.peer, team.index());
                schedule.recv_reduce(peer, acc(keep.clone()), local(keep), order, finish);
                reduced = true;
            }
            if let Some(guest) = guest {
                schedule.send(world.rank(guest), acc(guest..guest + 1));
            }
            if world.size() == 1 {
                schedule.copy(whole(Buf::Out), Span::chunk(Buf::In, 0));
            }
        }
    }
    schedule
}

fn inputs(blocks: Range<u32>) -> Span {
    Span::range(Buf::In, blocks.start, blocks.len() as u32)
}

//! Ring reduce_scatter: the partial sum of each block is passed once around the ring, ending at the block's rank.
//! Steps n-1; bytes per rank (n-1)/n of the input, the minimum. Wins for large buffers in larger worlds.

use crate::algorithms::prelude::*;
use crate::patterns::ring;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 22,
    name: "ring",
    collective: Collective::ReduceScatter,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Often,
    sums: Sums::InTurn,
    steps: |n, _| n - 1,
    bytes: |n, _| Fraction::new(n - 1, n),
    steps_formula: "n-1",
    bytes_formula: "(n-1)/n",
    cost: |n, topology| Cost::of([Phase::around(Among::World(topology), Fraction::new(1, n), Arriving::Reduced)]),
    wins: "large buffers in larger worlds",
    source: "Patarasuk, Yuan 2009",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Blocks, Division::Whole);
    let team = Team::world(request);
    if team.size() == 1 {
        schedule.copy(whole(Buf::Out), Span::chunk(Buf::In, 0));
        return schedule;
    }
    // Partial sums for the ranks two or more steps before this one. The partial sum for the rank one step before starts
    // here.
    for steps in 2..team.size() {
        schedule.scratch_like(Buf::In, team.before(steps));
    }
    let acc = |block| match (team.index() + team.size() - block) % team.size() {
        0 => whole(Buf::Out),
        steps => Span::chunk(Buf::Scratch, steps - 2),
    };
    ring::reduce_scatter(&mut schedule, &team, |block| Span::chunk(Buf::In, block), acc, Finish::Yes);
    schedule
}

//! Direct reduce_scatter: every rank sends block r to rank r, which reduces as the staggered sends arrive.
//! Steps 1; bytes per rank (n-1)/n of the input. Wins if a rank can communicate with all others at once.

use crate::algorithms::prelude::*;
use crate::patterns::direct;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 20,
    name: "direct",
    collective: Collective::ReduceScatter,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Twice,
    sums: Sums::InTurn,
    steps: |n, _| u32::from(n > 1),
    bytes: |n, _| Fraction::new(n - 1, n),
    steps_formula: "1",
    bytes_formula: "(n-1)/n",
    cost: |n, topology| Cost::of([Phase::to_owners(Among::World(topology), n, Fraction::new(1, n))]),
    wins: "small worlds, any size",
    source: "folklore",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Blocks, Division::Whole);
    let team = Team::world(request);
    if team.size() == 1 {
        schedule.copy(whole(Buf::Out), Span::chunk(Buf::In, 0));
        return schedule;
    }
    let input = |block| Span::chunk(Buf::In, block);
    direct::reduce_scatter(&mut schedule, &team, team.size(), input, |_| whole(Buf::Out), Finish::Yes);
    schedule
}

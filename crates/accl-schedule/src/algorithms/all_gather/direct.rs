//! Direct all_gather: every rank sends its block to every other rank, starting with its neighbour.
//! Steps 1; bytes per rank (n-1)/n of the output. Wins if a rank can communicate with all others at once.

use crate::algorithms::prelude::*;
use crate::patterns::direct;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 40,
    name: "direct",
    collective: Collective::AllGather,
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
    cost: |n, topology| {
        let part = Fraction::new(1, n);
        Cost::of([Phase::from_owners(Among::World(topology), n, part, Arriving::Copied)]).copies(part)
    },
    wins: "small worlds, any size",
    source: "folklore",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Blocks);
    let team = Team::world(request);
    let output = |block| Span::chunk(Buf::Out, block);
    direct::all_gather(&mut schedule, &team, team.size(), whole(Buf::In), output);
    schedule.copy(output(team.index()), whole(Buf::In));
    schedule
}

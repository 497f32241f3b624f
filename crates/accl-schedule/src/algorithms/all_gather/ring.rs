//! Ring all_gather: every block is passed once around the ring.
//! Steps n-1; bytes per rank (n-1)/n of the output. Wins for large buffers in larger worlds, where communicating with
//! two neighbours costs less than with all ranks.

use crate::algorithms::prelude::*;
use crate::patterns::ring;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 42,
    name: "ring",
    collective: Collective::AllGather,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Twice,
    sums: Sums::InTurn,
    steps: |n, _| n - 1,
    bytes: |n, _| Fraction::new(n - 1, n),
    steps_formula: "n-1",
    bytes_formula: "(n-1)/n",
    cost: |n, topology| {
        let part = Fraction::new(1, n);
        Cost::of([Phase::around(Among::World(topology), part, Arriving::Copied)]).copies(part)
    },
    wins: "large buffers in larger worlds",
    source: "Patarasuk, Yuan 2009",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Blocks);
    let team = Team::world(request);
    let output = |block| Span::chunk(Buf::Out, block);
    if team.size() > 1 {
        ring::all_gather(&mut schedule, &team, whole(Buf::In), output);
    }
    schedule.copy(output(team.index()), whole(Buf::In));
    schedule
}

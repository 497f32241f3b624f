//! Flat gather: every rank sends its block to the root.
//! Steps 1; the root receives (n-1)/n of the output. Wins for large blocks and small worlds; blocks may differ in size.

use crate::algorithms::prelude::*;
use crate::patterns::flat;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 100,
    name: "flat",
    collective: Collective::Gather,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::No,
    sums: Sums::InTurn,
    steps: |n, _| u32::from(n > 1),
    bytes: |n, _| Fraction::new(n - 1, n),
    steps_formula: "1",
    bytes_formula: "(n-1)/n",
    cost: |n, topology| {
        let part = Fraction::new(1, n);
        Cost::of([flat::to_root(Among::World(topology), part, Arriving::Copied)]).copies(part)
    },
    wins: "large blocks, small worlds",
    source: "folklore",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Blocks);
    if request.rank != request.root {
        schedule.send(request.root, whole(Buf::In));
        return schedule;
    }
    let team = Team::world(request);
    for step in 1..team.size() {
        let from = team.after(step);
        schedule.recv(team.rank(from), Span::chunk(Buf::Out, from));
    }
    schedule.copy(Span::chunk(Buf::Out, team.index()), whole(Buf::In));
    schedule
}

//! Flat scatter: the root sends every rank its block.
//! Steps 1; the root sends (n-1)/n of the input. Wins for large blocks and small worlds; blocks may differ in size.

use crate::algorithms::prelude::*;
use crate::patterns::flat;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 120,
    name: "flat",
    collective: Collective::Scatter,
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
        Cost::of([flat::from_root(Among::World(topology), part)]).copies(part)
    },
    wins: "large blocks, small worlds",
    source: "folklore",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Blocks, Division::Whole);
    if request.rank != request.root {
        schedule.recv(request.root, whole(Buf::Out));
        return schedule;
    }
    let team = Team::world(request);
    for step in 1..team.size() {
        let to = team.after(step);
        schedule.send(team.rank(to), Span::chunk(Buf::In, to));
    }
    schedule.copy(whole(Buf::Out), Span::chunk(Buf::In, team.index()));
    schedule
}

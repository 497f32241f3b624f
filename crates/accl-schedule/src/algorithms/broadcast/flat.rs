//! Flat broadcast: the root sends to every rank.
//! Steps 1; the root sends n-1 buffers. Wins for small buffers in small worlds.

use crate::algorithms::prelude::*;
use crate::patterns::flat;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 60,
    name: "flat",
    collective: Collective::Broadcast,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::No,
    sums: Sums::InTurn,
    steps: |n, _| u32::from(n > 1),
    bytes: |n, _| Fraction::new(n - 1, 1),
    steps_formula: "1",
    bytes_formula: "n-1",
    cost: |_, topology| Cost::of([flat::from_root(Among::World(topology), Fraction::WHOLE)]),
    wins: "small buffers in small worlds",
    source: "folklore",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Whole);
    if request.rank == request.root {
        let team = Team::world(request);
        for step in 1..team.size() {
            schedule.send(team.rank(team.after(step)), whole(Buf::Out));
        }
    } else {
        schedule.recv(request.root, whole(Buf::Out));
    }
    schedule
}

//! Flat reduce: every rank sends to the root, which reduces the messages one after the other.
//! Steps 1; the root receives n-1 buffers. Wins for small buffers in small worlds.

use crate::algorithms::prelude::*;
use crate::patterns::{by_rank, flat};

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 80,
    name: "flat",
    collective: Collective::Reduce,
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
    cost: |_, topology| Cost::of([flat::to_root(Among::World(topology), Fraction::WHOLE, Arriving::Reduced)]),
    wins: "small buffers in small worlds",
    source: "folklore",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Whole);
    if request.rank != request.root {
        schedule.send(request.root, whole(Buf::In));
        return schedule;
    }
    let root = request.root.0;
    let mut local = whole(Buf::In);
    let mut lowest = root;
    let mut left = request.world - 1;
    for rank in (0..request.world).filter(|&rank| rank != root) {
        left -= 1;
        let finish = if left == 0 { Finish::Yes } else { Finish::No };
        schedule.recv_reduce(Rank(rank), whole(Buf::Out), local, by_rank(rank, lowest), finish);
        local = whole(Buf::Out);
        lowest = lowest.min(rank);
    }
    if request.world == 1 {
        schedule.copy(whole(Buf::Out), local);
    }
    schedule
}

//! Flat reduce that collects: every rank sends to the root. When all contributions have arrived, the root adds them in
//! rank order.
//! Steps 1; the root receives n-1 buffers into scratch. Wins if sums of 16-bit floats must be rounded only once.

use crate::algorithms::prelude::*;
use crate::patterns::flat;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 83,
    name: "flat_collected",
    collective: Collective::Reduce,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::No,
    sums: Sums::Together,
    steps: |n, _| u32::from(n > 1),
    bytes: |n, _| Fraction::new(n - 1, 1),
    steps_formula: "1",
    bytes_formula: "n-1",
    cost: |n, topology| {
        let arriving = flat::to_root(Among::World(topology), Fraction::WHOLE, Arriving::Copied);
        Cost::of([arriving]).reduces(n)
    },
    wins: "small sums of 16-bit floats in small worlds; rounds once",
    source: "folklore",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Whole);
    if request.rank != request.root {
        schedule.send(request.root, whole(Buf::In));
        return schedule;
    }
    if request.world == 1 {
        schedule.copy(whole(Buf::Out), whole(Buf::In));
        return schedule;
    }
    let mut operands = Vec::with_capacity(request.world as usize);
    for rank in 0..request.world {
        if rank == request.root.0 {
            operands.push(whole(Buf::In));
            continue;
        }
        let slot = Span::chunk(Buf::Scratch, schedule.scratch_like(Buf::In, 0));
        schedule.recv(Rank(rank), slot.clone());
        operands.push(slot);
    }
    schedule.reduce(whole(Buf::Out), operands, Finish::Yes);
    schedule
}

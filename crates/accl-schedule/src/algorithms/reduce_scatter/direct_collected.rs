//! Direct reduce_scatter that collects: every rank sends block r to rank r. When all contributions have arrived, rank r
//! adds them in rank order.
//! Steps 1; bytes per rank (n-1)/n of the input. Wins if sums of 16-bit floats must be rounded only once. Unlike
//! `direct` it writes arriving data to memory and reads it again.

use crate::algorithms::prelude::*;
use crate::patterns::direct;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 25,
    name: "direct_collected",
    collective: Collective::ReduceScatter,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Twice,
    sums: Sums::Together,
    steps: |n, _| u32::from(n > 1),
    bytes: |n, _| Fraction::new(n - 1, n),
    steps_formula: "1",
    bytes_formula: "(n-1)/n",
    cost: |n, topology| {
        let part = Fraction::new(1, n);
        Cost::of([Phase::to_owners(Among::World(topology), n, part).copied()]).reduces_part(n, part)
    },
    wins: "small sums of 16-bit floats in small worlds; rounds once",
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
    direct::reduce_scatter_collected(&mut schedule, &team, input, (Buf::In, team.index()), whole(Buf::Out));
    schedule
}

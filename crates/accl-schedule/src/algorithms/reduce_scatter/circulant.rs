//! Circulant reduce_scatter: in each step every rank forwards the farther half of the partial sums that it holds.
//! Steps about log2(n) and bytes per rank (n-1)/n of the input, for any n: no ranks are folded. Wins for small and
//! medium blocks in large worlds.

use crate::algorithms::prelude::*;
use crate::patterns::circulant;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 23,
    name: "circulant",
    collective: Collective::ReduceScatter,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Often,
    sums: Sums::InTurn,
    steps: |n, _| circulant::chain(n),
    bytes: |n, _| Fraction::new(n - 1, n),
    steps_formula: "log2 n; at most ceil(log2 n) if n is not a power of two",
    bytes_formula: "(n-1)/n",
    cost: |_, topology| Cost::of(circulant::phases(Among::World(topology))),
    wins: "small and medium blocks in large worlds",
    source: "Träff 2024",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Blocks, Division::Whole);
    let team = Team::world(request);
    if team.size() == 1 {
        schedule.copy(whole(Buf::Out), Span::chunk(Buf::In, 0));
        return schedule;
    }
    // Partial sums for other ranks: for the nearer half of the ranks after this one.
    for distance in 1..team.size() / 2 {
        schedule.scratch_like(Buf::In, team.after(distance));
    }
    let acc = |block| match (block + team.size() - team.index()) % team.size() {
        0 => (Buf::Out, 0),
        distance => (Buf::Scratch, distance - 1),
    };
    circulant::reduce_scatter(&mut schedule, &team, |block| (Buf::In, block), acc);
    schedule
}

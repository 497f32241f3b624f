//! Bruck's all_gather: in step k every rank sends what it has, up to 2^k blocks, to the rank 2^k before it.
//! Steps log2(n), rounded, for any n; bytes per rank (n-1)/n of the output. Wins for small blocks in large worlds.
//! Blocks are received at their final positions, so there is no final rotation. J. Bruck et al., IEEE TPDS 8 (1997).

use crate::algorithms::prelude::*;
use crate::patterns::bruck;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 41,
    name: "bruck",
    collective: Collective::AllGather,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Twice,
    sums: Sums::InTurn,
    steps: |n, _| bruck::steps(n),
    bytes: |n, _| Fraction::new(n - 1, n),
    steps_formula: "floor(log2 n), + 1 for n > 3p/2",
    bytes_formula: "(n-1)/n",
    cost: |n, topology| Cost::of(bruck::phases(Among::World(topology), n)).copies(Fraction::new(1, n)),
    wins: "small blocks in large worlds",
    source: "Bruck et al. 1997",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Blocks);
    let team = Team::world(request);
    schedule.copy(Span::chunk(Buf::Out, team.index()), whole(Buf::In));
    bruck::all_gather(&mut schedule, &team, Buf::Out);
    schedule
}

//! Circulant all_reduce: reduce_scatter over a circulant graph, then Bruck's all_gather.
//! Steps about 2 log2(n) and bytes per rank 2(n-1)/n of the buffer, for any n: no ranks are folded. Wins for
//! medium buffers in large worlds. J. L. Träff, arXiv 2410.14234 (2024).

use crate::algorithms::prelude::*;
use crate::patterns::{bruck, circulant};

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 8,
    name: "circulant",
    collective: Collective::AllReduce,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Often,
    sums: Sums::InTurn,
    steps: |n, _| circulant::chain(n) + bruck::steps(n),
    bytes: |n, _| Fraction::new(2 * (n - 1), n),
    steps_formula: "2 log2 n; at most 2 ceil(log2 n) if n is not a power of two",
    bytes_formula: "2(n-1)/n",
    cost: |n, topology| {
        let among = Among::World(topology);
        Cost::of(circulant::phases(among).into_iter().chain(bruck::phases(among, n)))
    },
    wins: "medium buffers in large worlds",
    source: "Träff 2024",
};

fn build(request: &Request) -> Schedule {
    let team = Team::world(request);
    let division = Division::Even { chunks: team.size() };
    let mut schedule = Schedule::new(division, division);
    if team.size() == 1 {
        schedule.copy(whole(Buf::Out), whole(Buf::In));
        return schedule;
    }
    circulant::reduce_scatter(&mut schedule, &team, |chunk| (Buf::In, chunk), |chunk| (Buf::Out, chunk));
    bruck::all_gather(&mut schedule, &team, Buf::Out);
    schedule
}

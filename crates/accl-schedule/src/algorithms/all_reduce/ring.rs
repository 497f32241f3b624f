//! Ring all_reduce: reduce_scatter, then all_gather, over one ring.
//! Steps 2(n-1); bytes per rank 2(n-1)/n of the buffer, the minimum. Wins for large buffers in larger worlds, where
//! communicating with two neighbours costs less than with all ranks. P. Patarasuk, X. Yuan, JPDC 69 (2009).

use crate::algorithms::prelude::*;
use crate::patterns::ring;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 5,
    name: "ring",
    collective: Collective::AllReduce,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Often,
    sums: Sums::InTurn,
    steps: |n, _| 2 * (n - 1),
    bytes: |n, _| Fraction::new(2 * (n - 1), n),
    steps_formula: "2(n-1)",
    bytes_formula: "2(n-1)/n",
    cost: |n, topology| {
        let around = |arriving| Phase::around(Among::World(topology), Fraction::new(1, n), arriving);
        Cost::of([around(Arriving::Reduced), around(Arriving::Copied)])
    },
    wins: "large buffers in larger worlds",
    source: "Patarasuk, Yuan 2009",
};

fn build(request: &Request) -> Schedule {
    let team = Team::world(request);
    let division = Division::Even { chunks: team.size() };
    let mut schedule = Schedule::new(division, division);
    if team.size() == 1 {
        schedule.copy(whole(Buf::Out), whole(Buf::In));
        return schedule;
    }
    let input = |chunk| Span::chunk(Buf::In, chunk);
    let output = |chunk| Span::chunk(Buf::Out, chunk);
    ring::reduce_scatter(&mut schedule, &team, input, output, Finish::Yes);
    ring::all_gather(&mut schedule, &team, output(team.index()), output);
    schedule
}

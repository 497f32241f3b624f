//! Two-phase all_reduce: every rank sends chunk r to rank r, which reduces it and sends the result to all.
//! Steps 2; bytes per rank 2(n-1)/n of the buffer. Wins for all but tiny buffers while a rank can communicate with all
//! others at once. It moves as few bytes as a ring, in two steps instead of 2(n-1).

use crate::algorithms::prelude::*;
use crate::patterns::direct;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 2,
    name: "direct_two_phase",
    collective: Collective::AllReduce,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Twice,
    sums: Sums::InTurn,
    steps: |n, _| if n > 1 { 2 } else { 0 },
    bytes: |n, _| Fraction::new(2 * (n - 1), n),
    steps_formula: "2",
    bytes_formula: "2(n-1)/n",
    cost: |n, topology| {
        let (among, part) = (Among::World(topology), Fraction::new(1, n));
        Cost::of([Phase::to_owners(among, n, part), Phase::from_owners(among, n, part, Arriving::Copied)])
    },
    wins: "large buffers on one host, small worlds",
    source: "composition: reduce_scatter direct, all_gather direct",
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
    direct::reduce_scatter(&mut schedule, &team, team.size(), input, output, Finish::Yes);
    direct::all_gather(&mut schedule, &team, team.size(), output(team.index()), output);
    schedule
}

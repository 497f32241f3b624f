//! Two-phase all_reduce that collects: every rank sends chunk r to rank r. When all contributions have arrived, rank r
//! adds them in rank order and sends the result to all.
//! Steps 2; bytes per rank 2(n-1)/n of the buffer. Wins if sums of 16-bit floats must be rounded only once and the
//! buffer is too large for `direct`. Unlike `direct_two_phase` it writes arriving data to memory and reads it again.

use crate::algorithms::prelude::*;
use crate::patterns::direct;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 9,
    name: "direct_two_phase_collected",
    collective: Collective::AllReduce,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Twice,
    sums: Sums::Together,
    steps: |n, _| if n > 1 { 2 } else { 0 },
    bytes: |n, _| Fraction::new(2 * (n - 1), n),
    steps_formula: "2",
    bytes_formula: "2(n-1)/n",
    cost: |n, topology| {
        let (among, part) = (Among::World(topology), Fraction::new(1, n));
        let [to, from] = [Phase::to_owners(among, n, part), Phase::from_owners(among, n, part, Arriving::Copied)];
        Cost::of([to.copied(), from]).reduces_part(n, part)
    },
    wins: "small sums of 16-bit floats in small worlds; rounds once",
    source: "composition: reduce_scatter direct_collected, all_gather direct",
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
    let own = team.index();
    direct::reduce_scatter_collected(&mut schedule, &team, input, (Buf::In, own), output(own));
    direct::all_gather(&mut schedule, &team, team.size(), output(own), output);
    schedule
}

//! Dissemination barrier: in step k every rank notifies the rank 2^k after it, once all earlier notifications have
//! arrived.
//! Steps ceil(log2 n) for any n; messages have no payload.
//! D. Hensgen, R. Finkel, U. Manber, Int. J. Parallel Programming 17 (1988).

use crate::algorithms::prelude::*;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 160,
    name: "dissemination",
    collective: Collective::Barrier,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::No,
    sums: Sums::InTurn,
    steps: |n, _| ceil_log2(n),
    bytes: |_, _| Fraction::new(0, 1),
    steps_formula: "ceil(log2 n)",
    bytes_formula: "0",
    cost: |n, topology| {
        let step = |bit: u32| {
            let all = Among::World(topology).shift(1 << bit);
            Phase::exchange(1, all, Fraction::default(), Arriving::Copied)
        };
        Cost::of((0..ceil_log2(n)).map(step))
    },
    wins: "always",
    source: "Hensgen, Finkel, Manber 1988",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Whole);
    let team = Team::world(request);
    let mut distance = 1;
    while distance < team.size() {
        schedule.send(team.rank(team.after(distance)), Span::empty());
        schedule.recv(team.rank(team.before(distance)), Span::empty());
        schedule.fence();
        distance *= 2;
    }
    schedule
}

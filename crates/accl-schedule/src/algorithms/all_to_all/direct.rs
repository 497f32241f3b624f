//! Direct all_to_all: every rank sends every other rank its block at once, starting with its neighbour.
//! Steps 1; bytes per rank (n-1)/n of the input. Wins if a rank can communicate with all others at once; blocks may
//! differ in size.

use crate::algorithms::prelude::*;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 140,
    name: "direct",
    collective: Collective::AllToAll,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Twice,
    sums: Sums::InTurn,
    steps: |n, _| u32::from(n > 1),
    bytes: |n, _| Fraction::new(n - 1, n),
    steps_formula: "1",
    bytes_formula: "(n-1)/n",
    cost: |n, topology| {
        let part = Fraction::new(1, n);
        Cost::of([Phase::from_owners(Among::World(topology), n, part, Arriving::Copied)]).copies(part)
    },
    wins: "small worlds, any size",
    source: "folklore",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Blocks, Division::Blocks);
    let team = Team::world(request);
    for step in 1..team.size() {
        let (to, from) = (team.after(step), team.before(step));
        schedule.send(team.rank(to), Span::chunk(Buf::In, to));
        schedule.recv(team.rank(from), Span::chunk(Buf::Out, from));
    }
    schedule.copy(Span::chunk(Buf::Out, team.index()), Span::chunk(Buf::In, team.index()));
    schedule
}

//! Pairwise all_to_all: one exchange after the other, with one peer to send to and one to receive from at a time.
//! Steps n-1; bytes per rank (n-1)/n of the input. Wins for large blocks in large worlds, where all messages at once
//! would overload the network; blocks may differ in size. If n is a power of two, both peers of a step are the same
//! rank.

use crate::algorithms::prelude::*;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 141,
    name: "pairwise",
    collective: Collective::AllToAll,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Twice,
    sums: Sums::InTurn,
    steps: |n, _| n - 1,
    bytes: |n, _| Fraction::new(n - 1, n),
    steps_formula: "n-1",
    bytes_formula: "(n-1)/n",
    cost: |n, topology| {
        let part = Fraction::new(1, n);
        Cost::of([Phase::in_turn(Among::World(topology), part, Arriving::Copied)]).copies(part)
    },
    wins: "large blocks in large worlds",
    source: "Thakur, Rabenseifner, Gropp 2005",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Blocks, Division::Blocks);
    let team = Team::world(request);
    schedule.copy(Span::chunk(Buf::Out, team.index()), Span::chunk(Buf::In, team.index()));
    for step in 1..team.size() {
        let (to, from) = match team.size().is_power_of_two() {
            true => (team.index() ^ step, team.index() ^ step),
            false => (team.after(step), team.before(step)),
        };
        schedule.send(team.rank(to), Span::chunk(Buf::In, to));
        schedule.recv(team.rank(from), Span::chunk(Buf::Out, from));
        schedule.fence();
    }
    schedule
}

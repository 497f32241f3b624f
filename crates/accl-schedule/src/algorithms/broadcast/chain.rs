//! Pipelined chain broadcast: every rank forwards the data to the next rank while it arrives.
//! Steps n-1, overlapped segment by segment; every rank sends the buffer once. Wins for large buffers.

use crate::algorithms::prelude::*;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 62,
    name: "chain",
    collective: Collective::Broadcast,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::No,
    sums: Sums::InTurn,
    steps: |n, _| n - 1,
    bytes: |n, _| Fraction::new((n - 1).min(1), 1),
    steps_formula: "n-1, overlapped",
    bytes_formula: "1",
    cost: |n, topology| {
        let relay = Phase::chain(Among::World(topology), Arriving::Copied);
        Cost::of([relay.busiest(1, u32::from(n > 2))])
    },
    wins: "large buffers",
    source: "folklore (pipelined chain)",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Whole);
    let team = Team::world(request);
    let (before, after) = (team.rank(team.before(1)), team.rank(team.after(1)));
    let next = if after == request.root { Vec::new() } else { vec![after] };
    if request.rank != request.root {
        schedule.recv_copy_send(before, next, whole(Buf::Out));
    } else if let [next] = next[..] {
        schedule.send(next, whole(Buf::Out));
    }
    schedule
}

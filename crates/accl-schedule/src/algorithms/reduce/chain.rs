//! Pipelined chain reduce: every rank reduces what the rank after it sends, and forwards the result while data arrives.
//! Steps n-1, overlapped segment by segment; every rank receives the buffer once. Wins for large buffers.

use crate::algorithms::prelude::*;
use crate::patterns::binomial::Node;
use crate::patterns::by_rank;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 82,
    name: "chain",
    collective: Collective::Reduce,
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
        let relay = Phase::chain(Among::World(topology), Arriving::Reduced);
        Cost::of([relay.busiest(u32::from(n > 2), 1)])
    },
    wins: "large buffers",
    source: "folklore (pipelined chain)",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Whole);
    // Positions count from the root; the data comes from the last position.
    let node = Node::of(request);
    let position = node.position();
    let behind = request.world - 1 - position;
    if behind == 0 {
        match node.parent() {
            Some(_) => schedule.send(node.rank(position - 1), whole(Buf::In)),
            None => schedule.copy(whole(Buf::Out), whole(Buf::In)),
        }
        return schedule;
    }
    let from = node.rank(position + 1);
    let order = by_rank(node.lowest_rank(position + 1, behind), request.rank.0);
    if position == 0 {
        schedule.recv_reduce(from, whole(Buf::Out), whole(Buf::In), order, Finish::Yes);
    } else {
        let acc = Span::chunk(Buf::Scratch, schedule.scratch_like(Buf::In, 0));
        schedule.recv_reduce_send(from, node.rank(position - 1), acc, whole(Buf::In), order, Finish::No);
    }
    schedule
}

//! Binomial reduce: every rank reduces its children's messages, smallest subtree first, and sends the result to its
//! parent.
//! Steps floor(log2 n); the root receives ceil(log2 n) buffers. Wins for small and medium buffers.

use crate::algorithms::prelude::*;
use crate::patterns::binomial::{self, Node};
use crate::patterns::by_rank;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 81,
    name: "binomial",
    collective: Collective::Reduce,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::No,
    sums: Sums::InTurn,
    steps: |n, _| floor_log2(n),
    bytes: |n, _| Fraction::new(ceil_log2(n), 1),
    steps_formula: "floor(log2 n)",
    bytes_formula: "ceil(log2 n)",
    cost: |n, topology| {
        Cost::of([binomial::phase(Among::World(topology), Arriving::Reduced).busiest(0, ceil_log2(n))])
    },
    wins: "small and medium buffers",
    source: "folklore",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Whole);
    let node = Node::of(request);
    let mut local = whole(Buf::In);
    let mut reduced = 1;
    let children: Vec<u32> = node.children().collect();
    let acc = match node.parent() {
        None => whole(Buf::Out),
        Some(_) if children.is_empty() => whole(Buf::In),
        Some(_) => Span::chunk(Buf::Scratch, schedule.scratch_like(Buf::In, 0)),
    };
    for child in children {
        let len = node.subtree_len(child);
        let order = by_rank(node.lowest_rank(child, len), node.lowest_rank(node.position(), reduced));
        reduced += len;
        let finish = if reduced == request.world { Finish::Yes } else { Finish::No };
        schedule.recv_reduce(node.rank(child), acc.clone(), local, order, finish);
        local = acc.clone();
    }
    if let Some(parent) = node.parent() {
        schedule.send(node.rank(parent), local);
    } else if request.world == 1 {
        schedule.copy(acc, local);
    }
    schedule
}

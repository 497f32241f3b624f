//! Binomial broadcast: a rank that has the data sends it to its children, the largest subtree first.
//! Steps floor(log2 n); the root sends ceil(log2 n) buffers. Wins for small and medium buffers.

use crate::algorithms::prelude::*;
use crate::patterns::binomial::{self, Node};

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 61,
    name: "binomial",
    collective: Collective::Broadcast,
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
        Cost::of([binomial::phase(Among::World(topology), Arriving::Copied).busiest(ceil_log2(n), 0)])
    },
    wins: "small and medium buffers",
    source: "folklore",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Whole);
    let node = Node::of(request);
    let children: Vec<Rank> = node.children().rev().map(|child| node.rank(child)).collect();
    match node.parent() {
        Some(parent) => schedule.recv_copy_send(node.rank(parent), children, whole(Buf::Out)),
        None => children.into_iter().for_each(|child| schedule.send(child, whole(Buf::Out))),
    }
    schedule
}

//! Binomial gather: every rank sends the blocks of its subtree to its parent in one message.
//! Steps floor(log2 n); the root receives (n-1)/n of the output in log2(n) messages. Wins for small blocks in large
//! worlds.

use crate::algorithms::prelude::*;
use crate::patterns::binomial::{self, Node};

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 101,
    name: "binomial",
    collective: Collective::Gather,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: true,
    encodes: Encodes::No,
    sums: Sums::InTurn,
    steps: |n, _| floor_log2(n),
    bytes: |n, _| Fraction::new(n - 1, n),
    steps_formula: "floor(log2 n)",
    bytes_formula: "(n-1)/n",
    cost: |n, topology| {
        let levels = binomial::subtree_phases(Among::World(topology)).map(|level| level.busiest(0, 1));
        Cost::of(levels).copies(Fraction::new(1, n))
    },
    wins: "small blocks in large worlds",
    source: "folklore",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Whole, Division::Blocks);
    let node = Node::of(request);
    let position = node.position();
    let Some(parent) = node.parent() else {
        for child in node.children() {
            let blocks = Span::cyclic(Buf::Out, node.rank(child).0, node.subtree_len(child), request.world);
            schedule.recv(node.rank(child), blocks);
        }
        schedule.copy(Span::chunk(Buf::Out, request.rank.0), whole(Buf::In));
        return schedule;
    };
    // Scratch chunk k is the block of the rank k + 1 positions after this one.
    let below = node.subtree_len(position) - 1;
    for _ in 0..below {
        schedule.scratch_like(Buf::In, 0);
    }
    for child in node.children() {
        let blocks = Span::range(Buf::Scratch, child - position - 1, node.subtree_len(child));
        schedule.recv(node.rank(child), blocks);
    }
    let mut subtree = whole(Buf::In);
    subtree.push(Buf::Scratch, 0, below);
    schedule.send(node.rank(parent), subtree);
    schedule
}

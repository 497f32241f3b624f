//! Binomial scatter: every rank gets the blocks of its subtree in one message and sends each child its part.
//! Steps floor(log2 n); the root sends (n-1)/n of the input in log2(n) messages. Wins for small blocks in large worlds.

use crate::algorithms::prelude::*;
use crate::patterns::binomial::{self, Node};

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 121,
    name: "binomial",
    collective: Collective::Scatter,
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
        let levels = binomial::subtree_phases(Among::World(topology)).map(|level| level.busiest(1, 0));
        Cost::of(levels).copies(Fraction::new(1, n))
    },
    wins: "small blocks in large worlds",
    source: "folklore",
};

fn build(request: &Request) -> Schedule {
    let mut schedule = Schedule::new(Division::Blocks, Division::Whole);
    let node = Node::of(request);
    let position = node.position();
    let Some(parent) = node.parent() else {
        for child in node.children().rev() {
            let blocks = Span::cyclic(Buf::In, node.rank(child).0, node.subtree_len(child), request.world);
            schedule.send(node.rank(child), blocks);
        }
        schedule.copy(whole(Buf::Out), Span::chunk(Buf::In, request.rank.0));
        return schedule;
    };
    // Scratch chunk k is the block of the rank k + 1 positions after this one.
    let below = node.subtree_len(position) - 1;
    for _ in 0..below {
        schedule.scratch_like(Buf::Out, 0);
    }
    let mut subtree = whole(Buf::Out);
    subtree.push(Buf::Scratch, 0, below);
    schedule.recv(node.rank(parent), subtree);
    for child in node.children().rev() {
        let blocks = Span::range(Buf::Scratch, child - position - 1, node.subtree_len(child));
        schedule.send(node.rank(child), blocks);
    }
    schedule
}

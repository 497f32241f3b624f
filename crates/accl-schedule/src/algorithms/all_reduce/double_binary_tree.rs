//! Double binary tree all_reduce: each half of the buffer is reduced up one binary tree and sent down again. A rank is
//! an inner node in at most one of the two trees, so that all links are used both ways.
//! Steps 2 log2(n), pipelined by segments; bytes per rank 2 buffers. Wins for medium buffers in large worlds whose size
//! is not a power of two. P. Sanders, J. Speck, J. Träff, Parallel Computing 35 (2009).

use crate::algorithms::prelude::*;
use crate::patterns::binary_tree::Tree;
use crate::patterns::by_rank;

/// The table row.
pub const ROW: Algorithm = Algorithm {
    id: 6,
    name: "double_binary_tree",
    collective: Collective::AllReduce,
    build,
    applies: always,
    requires: "",
    needs_equal_blocks: false,
    encodes: Encodes::Often,
    sums: Sums::InTurn,
    steps: |n, _| 2 * floor_log2(n),
    bytes: |n, _| match n {
        1 => Fraction::new(0, 1),
        2 => Fraction::new(1, 1),
        3 => Fraction::new(3, 2),
        _ => Fraction::new(2, 1),
    },
    steps_formula: "2 floor(log2 n)",
    bytes_formula: "2 (1 for n = 2, 3/2 for n = 3)",
    cost,
    wins: "medium buffers in large worlds, if n is not a power of two",
    source: "Sanders, Speck, Träff 2009",
};

/// The cost: a rank is an inner node of one tree, with two children in worlds of three or more, and a leaf of the
/// other.
fn cost(n: u32, topology: &Topology) -> Cost {
    let (among, half) = (Among::World(topology), Fraction::new(1, 2));
    let children = n.min(3) - 1;
    let parent = |tree: Tree| move |rank: u32| tree.node(n, rank).parent;
    // The second tree is the mirror image of the first, so one of them determines the longest path.
    let both = among.pairs([Tree::First, Tree::Second].into_iter().flat_map(|tree| {
        (0..n).filter_map(move |rank| Some((parent(tree)(rank)?, rank)))
    }));
    let tree = |arriving| {
        Phase { all: both, ..Phase::tree(among, parent(Tree::First), floor_log2(n), half, arriving) }
    };
    let root_above = u32::from(n > 3);
    let up = tree(Arriving::Reduced).busiest(1 + root_above, children);
    let down = tree(Arriving::Copied).busiest(children, 1 + root_above);
    Cost::of([up, down])
}

fn build(request: &Request) -> Schedule {
    let division = Division::Even { chunks: 2 };
    let mut schedule = Schedule::new(division, division);
    if request.world == 1 {
        schedule.copy(Span::range(Buf::Out, 0, 2), Span::range(Buf::In, 0, 2));
        return schedule;
    }
    let rank = request.rank.0;
    let nodes = [Tree::First, Tree::Second].map(|tree| tree.node(request.world, rank));
    for (chunk, node) in (0..).zip(&nodes) {
        let mut local = Span::chunk(Buf::In, chunk);
        let mut lowest = rank;
        let out = Span::chunk(Buf::Out, chunk);
        for (index, child) in node.children.iter().enumerate() {
            let last = index + 1 == node.children.len() && node.parent.is_none();
            let finish = if last { Finish::Yes } else { Finish::No };
            schedule.recv_reduce(Rank(child.rank), out.clone(), local, by_rank(child.lowest, lowest), finish);
            local = out.clone();
            lowest = lowest.min(child.lowest);
        }
        if let Some(parent) = node.parent {
            schedule.send(Rank(parent), local);
        }
    }
    for (chunk, node) in (0..).zip(&nodes) {
        let out = Span::chunk(Buf::Out, chunk);
        let children: Vec<Rank> = node.children.iter().map(|child| Rank(child.rank)).collect();
        match node.parent {
            Some(parent) => schedule.recv_copy_send(Rank(parent), children, out),
            None => children.into_iter().for_each(|child| schedule.send(child, out.clone())),
        }
    }
    schedule
}

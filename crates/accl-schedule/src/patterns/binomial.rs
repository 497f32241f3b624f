//! The binomial tree on positions 0 to n - 1. A position's parent is the position without its lowest bit, so a subtree
//! is an interval. Positions are ranks counted from the root, cyclically.

use accl_types::Rank;

use super::{ceil_log2, floor_log2};
use crate::algorithms::Fraction;
use crate::cost::{Among, Arriving, Phase};
use crate::ir::Request;

/// One rank's node in the tree.
#[derive(Clone, Debug)]
pub struct Node {
    world: u32,
    root: u32,
    position: u32,
}

impl Node {
    /// The node of the request's rank in the tree of the request's root.
    pub fn of(request: &Request) -> Node {
        Node::at(request.world, request.root.0, request.rank.0)
    }

    /// The node of `rank` among `world` ranks in the tree of `root`.
    pub fn at(world: u32, root: u32, rank: u32) -> Node {
        Node { world, root, position: (rank + world - root) % world }
    }

    /// Distance from the root, cyclically.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// The rank at a position.
    pub fn rank(&self, position: u32) -> Rank {
        Rank((self.root + position) % self.world)
    }

    /// The parent's position; `None` for the root.
    pub fn parent(&self) -> Option<u32> {
        (self.position > 0).then(|| self.position & (self.position - 1))
    }

    /// Positions of the children, nearest (and smallest subtree) first.
    pub fn children(&self) -> impl DoubleEndedIterator<Item = u32> + '_ {
        let bits = if self.position == 0 { self.world.ilog2() + 1 } else { self.position.trailing_zeros() };
        (0..bits).map(|bit| self.position + (1 << bit)).filter(|&child| child < self.world)
    }

    /// Number of positions in the subtree of `position`: the position itself and the ones directly after it.
    pub fn subtree_len(&self, position: u32) -> u32 {
        let rest = self.world - position;
        if position == 0 { rest } else { rest.min(1 << position.trailing_zeros()) }
    }

    /// The lowest rank among `len` positions from `position` on.
    pub fn lowest_rank(&self, position: u32, len: u32) -> u32 {
        let first = self.rank(position).0;
        if first + len > self.world { 0 } else { first }
    }
}

/// A message from every parent to each of its children, or back, as counts. Each message has the whole largest buffer.
pub fn phase(among: Among, arriving: Arriving) -> Phase {
    let parent = |position: u32| Node::at(among.size(), 0, position).parent();
    Phase::tree(among, parent, floor_log2(among.size()), Fraction::WHOLE, arriving)
}

/// A message from every parent to each of its children with the blocks of the child's subtree, or back, as counts. The
/// phases go level by level, the smallest first.
pub fn subtree_phases(among: Among<'_>) -> impl Iterator<Item = Phase> {
    let n = among.size();
    (0..ceil_log2(n)).map(move |level| {
        let len = 1 << level;
        let pairs = (1..n).filter(move |position: &u32| position.trailing_zeros() == level);
        let all = among.pairs(pairs.map(|position| (position - len, position)));
        let part = Fraction::new(len.min(n - len), n);
        Phase::linked(u32::from(level < floor_log2(n)), all, part, Arriving::Copied)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subtree_is_the_node_and_the_subtrees_of_its_children() {
        for world in 1..40 {
            for rank in 0..world {
                let node = Node::at(world, 0, rank);
                let below: u32 = node.children().map(|child| node.subtree_len(child)).sum();
                assert_eq!(node.subtree_len(rank), 1 + below);
                assert!(node.children().all(|child| Node::at(world, 0, child).parent() == Some(rank)));
            }
        }
    }

    #[test]
    fn the_lowest_rank_is_the_minimum() {
        for (world, root) in [(5, 3), (8, 7), (1, 0), (6, 0)] {
            let node = Node::at(world, root, 0);
            for position in 0..world {
                for len in 1..=world - position {
                    let lowest = (position..position + len).map(|p| node.rank(p).0).min();
                    assert_eq!(Some(node.lowest_rank(position, len)), lowest);
                }
            }
        }
    }
}

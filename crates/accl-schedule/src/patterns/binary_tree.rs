//! Two binary trees over the same ranks, in which no rank is an inner node twice.
//!
//! Positions run from 1 to n in order (left subtree, node, right subtree). A position's height is its number of
//! trailing zeros, so odd positions are leaves. The second tree numbers the ranks so that odd and even positions are
//! swapped.

/// One of the two trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tree {
    /// Rank r is at position r + 1.
    First,
    /// Mirrored if n is even, shifted by one if n is odd.
    Second,
}

/// A child and the lowest rank in its subtree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Child {
    /// The child's rank.
    pub rank: u32,
    /// The lowest rank in the child's subtree, including the child.
    pub lowest: u32,
}

/// One rank's neighbours in a tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The parent; `None` for the root.
    pub parent: Option<u32>,
    /// At most two, the left one first.
    pub children: Vec<Child>,
}

impl Tree {
    /// The neighbours of `rank` in a tree of `world` ranks.
    pub fn node(self, world: u32, rank: u32) -> Node {
        let position = self.position(world, rank);
        // Walk down from the root; `first..=last` is the subtree of `at`.
        let (mut at, mut first, mut last) = (1 << world.ilog2(), 1, world);
        let mut parent = None;
        while at != position {
            parent = Some(self.rank(world, at));
            if position < at {
                last = at - 1;
                at = left(at);
            } else {
                first = at + 1;
                at = right(at, world);
            }
        }
        let child = |at, first, last| Child { rank: self.rank(world, at), lowest: self.lowest(world, first, last) };
        let mut children = Vec::new();
        if first < at {
            children.push(child(left(at), first, at - 1));
        }
        if at < last {
            children.push(child(right(at, world), at + 1, last));
        }
        Node { parent, children }
    }

    fn position(self, world: u32, rank: u32) -> u32 {
        match self {
            Tree::First => rank + 1,
            Tree::Second if world.is_multiple_of(2) => world - rank,
            Tree::Second => (rank + 1) % world + 1,
        }
    }

    fn rank(self, world: u32, position: u32) -> u32 {
        match self {
            Tree::First => position - 1,
            Tree::Second if world.is_multiple_of(2) => world - position,
            Tree::Second => (position + world - 2) % world,
        }
    }

    /// The lowest rank at positions `first..=last`.
    fn lowest(self, world: u32, first: u32, last: u32) -> u32 {
        let (a, b) = (self.rank(world, first), self.rank(world, last));
        // Ranks are monotonic in position, except that the shifted tree wraps once, after position 1.
        let wrapped = self == Tree::Second && world % 2 == 1 && first == 1 && last > 1;
        if wrapped { 0 } else { a.min(b) }
    }
}

/// The left child of an even position: half its height lower.
fn left(at: u32) -> u32 {
    at - (1 << at.trailing_zeros()) / 2
}

/// The right child of an even position that has positions after it in a tree of `world` ranks.
fn right(at: u32, world: u32) -> u32 {
    let mut step = (1 << at.trailing_zeros()) / 2;
    while at + step > world {
        step /= 2;
    }
    at + step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_trees_span_all_ranks_and_no_rank_is_inside_twice() {
        for world in 1..200 {
            let mut inner = vec![0; world as usize];
            for tree in [Tree::First, Tree::Second] {
                let nodes: Vec<Node> = (0..world).map(|rank| tree.node(world, rank)).collect();
                assert_eq!(nodes.iter().filter(|node| node.parent.is_none()).count(), 1);
                for (rank, node) in nodes.iter().enumerate() {
                    inner[rank] += u32::from(!node.children.is_empty());
                    for child in &node.children {
                        assert_eq!(nodes[child.rank as usize].parent, Some(rank as u32), "{tree:?} of {world}");
                        assert_eq!(lowest_below(&nodes, child.rank), child.lowest, "{tree:?} of {world}");
                    }
                }
                let mut count = 0;
                let mut open: Vec<u32> = (0..world).filter(|&r| nodes[r as usize].parent.is_none()).collect();
                while let Some(rank) = open.pop() {
                    count += 1;
                    open.extend(nodes[rank as usize].children.iter().map(|child| child.rank));
                }
                assert_eq!(count, world);
            }
            assert!(inner.iter().all(|&times| times <= 1), "{world}: {inner:?}");
        }
    }

    fn lowest_below(nodes: &[Node], rank: u32) -> u32 {
        let below = nodes[rank as usize].children.iter().map(|child| lowest_below(nodes, child.rank)).min();
        below.map_or(rank, |lowest| lowest.min(rank))
    }
}

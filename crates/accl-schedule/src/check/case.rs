//! What is checked, and what is found: the vocabulary of the checker.
//!
//! Read [`Case`] first.

use std::fmt;

use accl_types::{Collective, Rank};

use crate::algorithms::Fraction;
use crate::ir::{Request, Schedule};
use crate::program::{OpKind, Program};
use crate::topology::Topology;

/// The call to check.
#[derive(Clone, Copy, Debug)]
pub struct Case<'a> {
    /// The collective.
    pub collective: Collective,
    /// Ranks in the group.
    pub world: u32,
    /// The root; rank 0 where there is none.
    pub root: Rank,
    /// Who shares a host.
    pub topology: &'a Topology,
    /// Whether the blocks of the call are known to be equal. Otherwise every block has a size of its own.
    pub blocks: BlockSizes,
}

/// What is known of the sizes of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockSizes {
    /// All are equal.
    Equal,
    /// Every block has a size of its own.
    Different,
}

impl<'a> Case<'a> {
    /// What rank `rank` is asked to build.
    pub fn request(&self, rank: u32) -> Request<'a> {
        Request {
            collective: self.collective,
            world: self.world,
            rank: Rank(rank),
            root: self.root,
            topology: self.topology,
        }
    }

    /// The schedules of all ranks, lowered.
    pub fn programs(&self, build: impl Fn(&Request) -> Schedule) -> Vec<Program> {
        (0..self.world).map(|rank| build(&self.request(rank)).lower(&self.request(rank))).collect()
    }
}

/// What was measured on the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Longest chain of messages.
    pub steps: u32,
    /// What the busiest rank sends or receives, as a fraction of the largest buffer, if chunks are of equal size.
    pub bytes: Fraction,
    /// How often an element is encoded at most; 0 for programs that are not encoded.
    pub encodings: u32,
    /// How often the sum of a type that is narrower than the arithmetic is rounded at most.
    pub roundings: u32,
}

/// Why a schedule is refused: rank, operation and reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation(pub(super) String);

impl Violation {
    pub(super) fn new(reason: impl Into<String>) -> Violation {
        Violation(reason.into())
    }

    /// Adds the operation to the reason.
    pub(super) fn at(self, rank: u32, op: usize, kind: &OpKind) -> Violation {
        Violation(format!("rank {rank} operation {op} ({kind:?}): {}", self.0))
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Violation {}

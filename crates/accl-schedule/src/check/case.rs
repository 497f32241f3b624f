//! The checker's input and output types.
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
    /// The root; rank 0 for collectives without a root.
    pub root: Rank,
    /// The ranks of each host.
    pub topology: &'a Topology,
    /// Whether the call's blocks are known to be equal. Otherwise every block has its own size.
    pub blocks: BlockSizes,
}

/// The known facts about block sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockSizes {
    /// All are equal.
    Equal,
    /// Every block has its own size.
    Different,
}

impl<'a> Case<'a> {
    /// The request for which rank `rank` builds its schedule.
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

/// The measured properties of a schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// Longest chain of messages.
    pub steps: u32,
    /// Bytes that the busiest rank sends or receives, as a fraction of the largest buffer, if all chunks have equal
    /// size.
    pub bytes: Fraction,
    /// Maximum number of times that an element is encoded; 0 for programs that are not encoded.
    pub encodings: u32,
    /// Maximum number of times that a sum is rounded, in a type narrower than the arithmetic.
    pub roundings: u32,
}

/// The reason why a schedule is refused: rank, operation and defect.
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

//! The table of algorithms and the choice between them.

use accl_types::config::AlgorithmRule;
use accl_types::{Collective, Error, Result};

use crate::{Request, Schedule, Topology};

/// A non-negative rational number, for costs.
#[derive(Clone, Copy, Debug)]
pub struct Fraction {
    /// Numerator.
    pub num: u64,
    /// Denominator, not 0.
    pub den: u64,
}

/// One row of the table.
pub struct Algorithm {
    /// Stable and unique: travels in the signature of a call.
    pub id: u8,
    /// The name a user types.
    pub name: &'static str,
    /// What it implements.
    pub collective: Collective,
    /// The schedule of one rank.
    pub build: fn(&Request) -> Schedule,
    /// Whether it can run in a world with this topology.
    pub applies: fn(u32, &Topology) -> bool,
    /// When it applies, in words; empty when it always does.
    pub requires: &'static str,
    /// It can run only if all blocks of the call have the same size.
    pub needs_equal_blocks: bool,
    /// Longest chain of messages.
    pub steps: fn(u32, &Topology) -> u32,
    /// Bytes that the busiest rank sends or receives, whichever is more, as a fraction of the largest buffer of the call.
    pub bytes: fn(u32, &Topology) -> Fraction,
    /// `steps` as a formula of the world n.
    pub steps_formula: &'static str,
    /// `bytes` as a formula of the world n.
    pub bytes_formula: &'static str,
    /// When it is the one to take.
    pub wins: &'static str,
    /// Where it comes from.
    pub source: &'static str,
}

/// Every algorithm.
pub const ALGORITHMS: &[Algorithm] = &[];

/// The algorithm of a call. All ranks of a group get the same answer from the same arguments.
///
/// `bytes` is the size of the largest buffer of the call (`Out` of all_gather, `In` of reduce_scatter). The first rule
/// that fits wins.
///
/// # Errors
/// `Configuration` for a rule that names an unknown algorithm (with the nearest name) or one that does not apply here.
pub fn choose(
    collective: Collective,
    world: u32,
    bytes: u64,
    equal_blocks: bool,
    topology: &Topology,
    rules: &[AlgorithmRule],
    deterministic: bool,
) -> Result<&'static Algorithm> {
    let _ = (collective, world, bytes, equal_blocks, topology, rules, deterministic);
    Err(Error::internal("no algorithm"))
}

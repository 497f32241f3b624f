//! The table of algorithms.
//!
//! Owns the list of files and rows, not their content: an algorithm is one file `<collective>/<name>.rs` with a `ROW`,
//! and one line here. [`crate::choose`] chooses between rows; [`crate::algorithms_page`] writes the page that shows
//! them.

use accl_types::Collective;

use crate::cost::Cost;
use crate::{Request, Schedule, Topology};

/// One row of the table.
#[derive(Debug)]
pub struct Algorithm {
    /// Stable unique number, sent as part of a call's signature.
    pub id: u8,
    /// The name that a user types, and the name of the file.
    pub name: &'static str,
    /// The collective that it implements.
    pub collective: Collective,
    /// Builds the schedule of one rank.
    pub build: fn(&Request) -> Schedule,
    /// Whether it can run in a world with this topology.
    pub applies: fn(u32, &Topology) -> bool,
    /// The condition of `applies` in words; empty if it always applies.
    pub requires: &'static str,
    /// Whether it can run only if all blocks of the call have the same size.
    pub needs_equal_blocks: bool,
    /// Whether its messages can be encoded.
    pub encodes: Encodes,
    /// How contributions are added.
    pub sums: Sums,
    /// Length of the longest chain of messages.
    pub steps: fn(u32, &Topology) -> u32,
    /// Bytes that the busiest rank sends or receives, whichever is larger, as a fraction of the call's largest buffer.
    pub bytes: fn(u32, &Topology) -> Fraction,
    /// `steps` as a formula of the world n.
    pub steps_formula: &'static str,
    /// `bytes` as a formula of the world n.
    pub bytes_formula: &'static str,
    /// Counts of messages and bytes, from which the time is predicted.
    pub cost: fn(u32, &Topology) -> Cost,
    /// The situations in which it is the best choice.
    pub wins: &'static str,
    /// The publication that describes it.
    pub source: &'static str,
}

impl Algorithm {
    /// Whether it treats ranks of one host differently from ranks of other hosts.
    pub fn composes_over_hosts(&self) -> bool {
        !self.requires.is_empty()
    }
}

/// The way contributions are added. It determines how often a sum is rounded in a type narrower than the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// One after the other as they arrive, or in parts on several ranks: each addition rounds. Also for rows that add
    /// nothing.
    InTurn,
    /// All at once in rank order, on a rank that has collected them: the sum is rounded once.
    Together,
}

/// How often elements are encoded when messages are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encodes {
    /// Messages cannot be encoded, because ranks would end with different bits.
    No,
    /// An element is encoded at most as a contribution and as a finished sum. If the algorithm composes over hosts,
    /// this holds for the exchange between hosts.
    Twice,
    /// Partial sums are also encoded, and more often in larger worlds. Used only if requested by name.
    Often,
}

/// A non-negative rational number, used in costs.
#[derive(Clone, Copy, Debug)]
pub struct Fraction {
    /// Numerator.
    pub num: u64,
    /// Denominator, not 0.
    pub den: u64,
}

impl Fraction {
    /// `num / den`
    pub fn new(num: u32, den: u32) -> Fraction {
        Fraction { num: u64::from(num), den: u64::from(den) }
    }

    /// The number 1: all of a buffer.
    pub const WHOLE: Fraction = Fraction { num: 1, den: 1 };

    /// This fraction of `bytes`, rounded up.
    pub fn of_bytes(self, bytes: u64) -> u64 {
        (u128::from(bytes) * u128::from(self.num)).div_ceil(u128::from(self.den)).try_into().unwrap_or(u64::MAX)
    }

    /// The number, rounded.
    pub fn to_f64(self) -> f64 {
        self.num as f64 / self.den as f64
    }

    fn cross(self, other: Fraction) -> (u128, u128) {
        (u128::from(self.num) * u128::from(other.den), u128::from(other.num) * u128::from(self.den))
    }
}

/// The number 0.
impl Default for Fraction {
    fn default() -> Fraction {
        Fraction { num: 0, den: 1 }
    }
}

impl PartialEq for Fraction {
    fn eq(&self, other: &Fraction) -> bool {
        let (ours, theirs) = self.cross(*other);
        ours == theirs
    }
}

impl Eq for Fraction {}

impl PartialOrd for Fraction {
    fn partial_cmp(&self, other: &Fraction) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Fraction {
    fn cmp(&self, other: &Fraction) -> std::cmp::Ordering {
        let (ours, theirs) = self.cross(*other);
        ours.cmp(&theirs)
    }
}

/// Declares each file as a module and lists its row, so that an algorithm needs one line here.
macro_rules! table {
    ($($collective:ident: [$($name:ident,)*])*) => {
        $(
            #[doc = concat!("Algorithms for `", stringify!($collective), "`.")]
            pub mod $collective {
                $(pub mod $name;)*
            }
        )*
        /// All algorithms, by collective, the simplest first.
        pub const ALGORITHMS: &[Algorithm] = &[$($($collective::$name::ROW,)*)*];
    };
}

table! {
    all_reduce: [
        direct,
        direct_two_phase,
        recursive_doubling,
        rabenseifner,
        ring,
        double_binary_tree,
        two_level,
        circulant,
        direct_two_phase_collected,
    ]
    reduce_scatter: [
        direct,
        recursive_halving,
        ring,
        two_level,
        circulant,
        direct_collected,
    ]
    all_gather: [
        direct,
        bruck,
        ring,
        two_level,
    ]
    broadcast: [
        flat,
        binomial,
        chain,
        two_level,
    ]
    reduce: [
        flat,
        binomial,
        chain,
        flat_collected,
    ]
    gather: [
        flat,
        binomial,
    ]
    scatter: [
        flat,
        binomial,
    ]
    all_to_all: [
        direct,
        pairwise,
        bruck,
    ]
    barrier: [
        dissemination,
    ]
}

/// The row with this name for a collective, or `None`.
pub fn find(collective: Collective, name: &str) -> Option<&'static Algorithm> {
    ALGORITHMS.iter().find(|row| row.collective == collective && row.name == name)
}

/// The row with this id, or `None`.
pub fn by_id(id: u8) -> Option<&'static Algorithm> {
    ALGORITHMS.iter().find(|row| row.id == id)
}

/// The imports of algorithm files.
pub mod prelude {
    pub use accl_types::{Collective, Rank};

    pub use super::{Algorithm, Encodes, Fraction, Sums};
    pub use crate::cost::{Among, Arriving, Cost, Phase};
    pub use crate::patterns::{Strip, Team, ceil_log2, floor_log2, floor_power_of_two};
    pub use crate::{Buf, Division, Finish, Order, Request, Schedule, Span, Topology};

    /// Condition of rows that always apply.
    pub fn always(_: u32, _: &Topology) -> bool {
        true
    }

    /// Condition of rows that compose over hosts.
    pub fn several_hosts(_: u32, topology: &Topology) -> bool {
        topology.host_count() > 1
    }

    /// The span of a whole undivided buffer.
    pub fn whole(buf: Buf) -> Span {
        Span::chunk(buf, 0)
    }
}

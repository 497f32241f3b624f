//! The table of algorithms.
//!
//! Owns the list of files and rows, nothing of their content: an algorithm is one file `<collective>/<name>.rs` with a
//! `ROW`, and one line here. The choice between rows is in [`crate::choose`], the page that shows them in
//! [`crate::algorithms_page`].

use accl_types::Collective;

use crate::cost::Cost;
use crate::{Request, Schedule, Topology};

/// One row of the table.
#[derive(Debug)]
pub struct Algorithm {
    /// Stable and unique: travels in the signature of a call.
    pub id: u8,
    /// The name a user types; also that of the file.
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
    /// Whether its messages can be encoded.
    pub encodes: Encodes,
    /// How contributions are added up.
    pub sums: Sums,
    /// Longest chain of messages.
    pub steps: fn(u32, &Topology) -> u32,
    /// Bytes that the busiest rank sends or receives, whichever is more, as a fraction of the largest buffer of the call.
    pub bytes: fn(u32, &Topology) -> Fraction,
    /// `steps` as a formula of the world n.
    pub steps_formula: &'static str,
    /// `bytes` as a formula of the world n.
    pub bytes_formula: &'static str,
    /// Counts of messages and bytes, from which its time is predicted.
    pub cost: fn(u32, &Topology) -> Cost,
    /// When it is the one to take.
    pub wins: &'static str,
    /// Where it comes from.
    pub source: &'static str,
}

impl Algorithm {
    /// Whether it treats ranks of one host differently from those of others.
    pub fn composes_over_hosts(&self) -> bool {
        !self.requires.is_empty()
    }
}

/// How contributions are added up, which says how often a sum is rounded in a type that is narrower than the arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// One after the other as they arrive, or in parts by several ranks: each addition rounds. Also of rows that add nothing.
    InTurn,
    /// All at once, in the order of ranks, by a rank that has collected them: the sum is rounded once.
    Together,
}

/// What becomes of an element when messages are encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encodes {
    /// Messages cannot be: ranks would end with different bits.
    No,
    /// It is encoded at most as a contribution and as a finished sum; between hosts, where the algorithm composes over them,
    /// as what these exchange.
    Twice,
    /// Sums on their way are encoded, too, the more the larger the world: taken only if asked for by name.
    Often,
}

/// A non-negative rational number, for costs.
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

    /// All of it.
    pub const WHOLE: Fraction = Fraction { num: 1, den: 1 };

    /// This part of so many bytes, rounded up.
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

/// Nothing.
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

/// Declares each file as a module and lists its row, so that an algorithm is one line.
macro_rules! table {
    ($($collective:ident: [$($name:ident,)*])*) => {
        $(
            #[doc = concat!("Algorithms for `", stringify!($collective), "`.")]
            pub mod $collective {
                $(pub mod $name;)*
            }
        )*
        /// Every algorithm, by collective, the simplest first.
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

/// The row of a collective with this name.
pub fn find(collective: Collective, name: &str) -> Option<&'static Algorithm> {
    ALGORITHMS.iter().find(|row| row.collective == collective && row.name == name)
}

/// The row with this id.
pub fn by_id(id: u8) -> Option<&'static Algorithm> {
    ALGORITHMS.iter().find(|row| row.id == id)
}

/// What an algorithm file needs.
pub mod prelude {
    pub use accl_types::{Collective, Rank};

    pub use super::{Algorithm, Encodes, Fraction, Sums};
    pub use crate::cost::{Among, Arriving, Cost, Phase};
    pub use crate::patterns::{Strip, Team, ceil_log2, floor_log2, floor_power_of_two};
    pub use crate::{Buf, Division, Finish, Order, Request, Schedule, Span, Topology};

    /// For rows that have no condition.
    pub fn always(_: u32, _: &Topology) -> bool {
        true
    }

    /// For rows that compose over hosts.
    pub fn several_hosts(_: u32, topology: &Topology) -> bool {
        topology.host_count() > 1
    }

    /// All of a buffer that is not cut.
    pub fn whole(buf: Buf) -> Span {
        Span::chunk(buf, 0)
    }
}

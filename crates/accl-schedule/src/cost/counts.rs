//! Counts of a schedule: the work of its busiest rank, phase by phase, and the messages of all ranks together.
//!
//! Owns the vocabulary in which an algorithm file states its cost. Knows no bytes and no time. Read [`Phase`] first.

use crate::algorithms::Fraction;
use crate::cost::reach::{Among, Ends, Reach};

/// The treatment of arriving bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arriving {
    /// Written into place.
    Copied,
    /// Reduced with the existing contents.
    Reduced,
}

/// Messages of one size that ranks exchange in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// Messages on the longest chain, one after the other.
    pub chain: Ends,
    /// Number of times that the busiest rank does the following sends and receives, one after the other.
    pub times: u32,
    /// The messages that it sends each time.
    pub sends: Ends,
    /// The messages that it receives each time.
    pub recvs: Ends,
    /// Size of a message as a fraction of the call's largest buffer; if messages differ, the size of the largest.
    pub part: Fraction,
    /// The treatment of the received bytes.
    pub arriving: Arriving,
    /// Total number of messages of all ranks.
    pub all: Reach,
    /// Whether received data replaces data that is being sent. Then its segments are granted one by one.
    pub swaps: bool,
}

impl Phase {
    /// `times` exchanges one after the other; in each, a rank sends one message and receives one.
    pub fn exchange(times: u32, all: Reach, part: Fraction, arriving: Arriving) -> Phase {
        let one = Ends::of(1, all);
        let (chain, all) = (Ends::of(times, all), all.times(times));
        Phase { chain, times, sends: one, recvs: one, part, arriving, all, swaps: false }
    }

    /// One [`Phase::exchange`], with `chain` steps on the longest chain.
    pub fn linked(chain: u32, all: Reach, part: Fraction, arriving: Arriving) -> Phase {
        Phase { chain: Ends::of(chain, all), ..Phase::exchange(1, all, part, arriving) }
    }

    /// One round of a ring: n-1 steps, in each of which every member sends to the next.
    pub fn around(among: Among, part: Fraction, arriving: Arriving) -> Phase {
        let all = among.shift(1);
        let steps = among.size() - 1;
        let inter_node = all.inter_node.min(u64::from(steps)) as u32;
        Phase {
            chain: Ends { intra_node: steps - inter_node, inter_node },
            ..Phase::exchange(steps, all, part, arriving)
        }
    }

    /// Messages along a chain from member 0 to the last member, or back; each member relays the whole largest buffer.
    pub fn chain(among: Among, arriving: Arriving) -> Phase {
        let n = among.size();
        let all = among.pairs((1..n).map(|member| (member - 1, member)));
        let inter_node = all.inter_node as u32;
        Phase {
            chain: Ends { intra_node: n - 1 - inter_node, inter_node },
            ..Phase::exchange(1, all, Fraction::WHOLE, arriving)
        }
    }

    /// Exchanges of every member with every other, one after the other.
    pub fn in_turn(among: Among, part: Fraction, arriving: Arriving) -> Phase {
        let all = among.all_pairs(among.size());
        Phase { all, ..Phase::exchange(among.size() - 1, all, part, arriving) }
    }

    /// A message from each member except the root to its parent, or back; `depth` is the depth of the tree.
    pub fn tree(
        among: Among,
        parent: impl Fn(u32) -> Option<u32>,
        depth: u32,
        part: Fraction,
        arriving: Arriving,
    ) -> Phase {
        let all = among.pairs((0..among.size()).filter_map(|member| Some((parent(member)?, member))));
        let chain =
            if all.inter_node > 0 { among.longest_path(&parent) } else { Ends { intra_node: depth, inter_node: 0 } };
        Phase { chain, ..Phase::exchange(1, all, part, arriving) }
    }

    /// Replaces the number of messages that the busiest rank sends and receives each time.
    #[must_use]
    pub fn busiest(self, sends: u32, recvs: u32) -> Phase {
        Phase { sends: Ends::of(sends, self.all), recvs: Ends::of(recvs, self.all), ..self }
    }

    /// Marks the phase as in place: received data overwrites sent data.
    #[must_use]
    pub fn swapping(self) -> Phase {
        Phase { swaps: true, ..self }
    }

    /// A message from every member to each of the first `owners` members.
    pub fn to_owners(among: Among, owners: u32, part: Fraction) -> Phase {
        Phase::all_pairs(among, owners, owners - 1, among.size() - 1, part, Arriving::Reduced)
    }

    /// Each of the first `owners` members sends a message to every member.
    pub fn from_owners(among: Among, owners: u32, part: Fraction, arriving: Arriving) -> Phase {
        Phase::all_pairs(among, owners, among.size() - 1, owners - 1, part, arriving)
    }

    fn all_pairs(among: Among, owners: u32, sends: u32, recvs: u32, part: Fraction, arriving: Arriving) -> Phase {
        let all = among.all_pairs(owners);
        let inter_node = |count: u32| {
            let inter_node = if all.inter_node > 0 { count.min(among.strangers()) } else { 0 };
            Ends { intra_node: count - inter_node, inter_node }
        };
        let chain = Ends::of(u32::from(all.sum() > 0), all);
        let (sends, recvs) = (inter_node(sends), inter_node(recvs));
        Phase { chain, times: 1, sends, recvs, part, arriving, all, swaps: false }
    }

    /// Changes the phase so that received data is written into place, to be reduced later.
    #[must_use]
    pub fn copied(self) -> Phase {
        Phase { arriving: Arriving::Copied, ..self }
    }

    /// Total messages of the busiest rank: sent and received.
    pub fn messages(&self) -> (u32, u32) {
        (self.times * self.sends.sum(), self.times * self.recvs.sum())
    }
}

/// The cost of an algorithm in a world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// The phases, one after the other, without those that have no messages.
    pub phases: Vec<Phase>,
    /// Bytes that a rank copies within itself, as a fraction of the largest buffer.
    pub copied: Fraction,
    /// Number of operands of a rank's own reduction; 0 if there is none.
    pub operands: u32,
    /// Size of each operand as a fraction of the largest buffer.
    pub operand: Fraction,
}

impl Cost {
    /// A cost with these phases.
    pub fn of(phases: impl IntoIterator<Item = Phase>) -> Cost {
        let phases = phases.into_iter().filter(|phase| phase.all.sum() > 0).collect();
        Cost { phases, ..Cost::default() }
    }

    /// Adds a copy of this fraction of the largest buffer.
    #[must_use]
    pub fn copies(self, copied: Fraction) -> Cost {
        Cost { copied, ..self }
    }

    /// Adds a reduction of `operands` whole buffers.
    #[must_use]
    pub fn reduces(self, operands: u32) -> Cost {
        self.reduces_part(operands, Fraction::WHOLE)
    }

    /// Adds a reduction of `operands` operands, each this fraction of the largest buffer.
    #[must_use]
    pub fn reduces_part(self, operands: u32, operand: Fraction) -> Cost {
        Cost { operands, operand, ..self }
    }
}

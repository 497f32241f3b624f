//! Counts of a schedule: what its busiest rank does, phase by phase, and what all ranks do together.
//!
//! Owns the vocabulary in which an algorithm file states its cost. Knows no bytes and no time. Read [`Phase`] first.

use crate::algorithms::Fraction;
use crate::cost::reach::{Among, Ends, Reach};

/// What becomes of the bytes that arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arriving {
    /// They are written into place.
    Copied,
    /// They are reduced with what is there.
    Reduced,
}

/// Messages of one size that ranks exchange in the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Phase {
    /// Messages on the longest chain, one after the other.
    pub chain: Ends,
    /// How often the busiest rank does the following, one after the other.
    pub times: u32,
    /// What it sends each time.
    pub sends: Ends,
    /// What it receives each time.
    pub recvs: Ends,
    /// Size of a message as a fraction of the largest buffer of the call; of the largest message where they differ.
    pub part: Fraction,
    /// What becomes of them.
    pub arriving: Arriving,
    /// Messages of all ranks in all.
    pub all: Reach,
    /// What arrives takes the place of what is being sent: its segments are granted one by one.
    pub swaps: bool,
}

impl Phase {
    /// One exchange after the other, in each of which a rank sends one message and receives one.
    pub fn exchange(times: u32, all: Reach, part: Fraction, arriving: Arriving) -> Phase {
        let one = Ends::of(1, all);
        let (chain, all) = (Ends::of(times, all), all.times(times));
        Phase { chain, times, sends: one, recvs: one, part, arriving, all, swaps: false }
    }

    /// As [`Phase::exchange`] of one time, with so many steps on the longest chain.
    pub fn linked(chain: u32, all: Reach, part: Fraction, arriving: Arriving) -> Phase {
        Phase { chain: Ends::of(chain, all), ..Phase::exchange(1, all, part, arriving) }
    }

    /// Once around a ring: in each of all but one step every member sends to the next.
    pub fn around(among: Among, part: Fraction, arriving: Arriving) -> Phase {
        let all = among.shift(1);
        let steps = among.size() - 1;
        let inter_node = all.inter_node.min(u64::from(steps)) as u32;
        Phase {
            chain: Ends { intra_node: steps - inter_node, inter_node },
            ..Phase::exchange(steps, all, part, arriving)
        }
    }

    /// From member to member along a chain that begins with member 0, or back: each relays all of the largest buffer.
    pub fn chain(among: Among, arriving: Arriving) -> Phase {
        let n = among.size();
        let all = among.pairs((1..n).map(|member| (member - 1, member)));
        let inter_node = all.inter_node as u32;
        Phase {
            chain: Ends { intra_node: n - 1 - inter_node, inter_node },
            ..Phase::exchange(1, all, Fraction::WHOLE, arriving)
        }
    }

    /// Every member exchanges with every other, one exchange after the other.
    pub fn in_turn(among: Among, part: Fraction, arriving: Arriving) -> Phase {
        let all = among.all_pairs(among.size());
        Phase { all, ..Phase::exchange(among.size() - 1, all, part, arriving) }
    }

    /// A message from each member but the root to its parent, or back; `depth` is that of the tree.
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

    /// The same with what the busiest rank sends and receives each time.
    #[must_use]
    pub fn busiest(self, sends: u32, recvs: u32) -> Phase {
        Phase { sends: Ends::of(sends, self.all), recvs: Ends::of(recvs, self.all), ..self }
    }

    /// The same in place: what a rank receives overwrites what it sends.
    #[must_use]
    pub fn swapping(self) -> Phase {
        Phase { swaps: true, ..self }
    }

    /// Every member sends a message to each of the first `owners` members, or gets one from each.
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

    /// The same where what arrives is written into place, to be reduced later.
    #[must_use]
    pub fn copied(self) -> Phase {
        Phase { arriving: Arriving::Copied, ..self }
    }

    /// Messages of the busiest rank in all: sent and received.
    pub fn messages(&self) -> (u32, u32) {
        (self.times * self.sends.sum(), self.times * self.recvs.sum())
    }
}

/// What an algorithm does in a world.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// One after the other; those without messages are left out.
    pub phases: Vec<Phase>,
    /// Bytes that a rank copies within itself, as a fraction of the largest buffer.
    pub copied: Fraction,
    /// Operands of a reduction of a rank's own; 0: there is none.
    pub operands: u32,
    /// Size of each as a fraction of the largest buffer.
    pub operand: Fraction,
}

impl Cost {
    /// Of these phases.
    pub fn of(phases: impl IntoIterator<Item = Phase>) -> Cost {
        let phases = phases.into_iter().filter(|phase| phase.all.sum() > 0).collect();
        Cost { phases, ..Cost::default() }
    }

    /// The same with a copy of this part of the largest buffer.
    #[must_use]
    pub fn copies(self, copied: Fraction) -> Cost {
        Cost { copied, ..self }
    }

    /// The same with a reduction of so many whole buffers.
    #[must_use]
    pub fn reduces(self, operands: u32) -> Cost {
        self.reduces_part(operands, Fraction::WHOLE)
    }

    /// The same with a reduction of so many operands of this part of the largest buffer.
    #[must_use]
    pub fn reduces_part(self, operands: u32, operand: Fraction) -> Cost {
        Cost { operands, operand, ..self }
    }
}

//! Folding a team to a power of two: the first ranks are paired. The second of a pair (the guest) sends its
//! contribution to the first and gets the result from it.

use super::{Team, floor_power_of_two};
use crate::algorithms::Fraction;
use crate::cost::{Among, Arriving, Phase};

/// The part of a member during the exchange among a power of two.
#[derive(Debug)]
pub enum Fold<'a> {
    /// Waits: its partner, given as a position in the whole team, acts for it.
    Guest {
        /// The partner's position.
        host: u32,
    },
    /// Takes part.
    Member {
        /// The position of the guest that it acts for, or `None`.
        guest: Option<u32>,
        /// The power of two.
        core: Core<'a>,
    },
}

/// The members of a folded team. Positions are numbered within the power of two.
#[derive(Clone, Debug)]
pub struct Core<'a> {
    /// The representatives.
    pub team: Team<'a>,
}

impl Core<'_> {
    /// Position in the whole team of the representative at `index`. It represents the positions up to the next
    /// representative's start.
    pub fn start(&self, index: u32) -> u32 {
        self.team.start(index)
    }
}

impl<'a> Fold<'a> {
    /// The part of this member.
    pub fn of(team: &Team<'a>) -> Fold<'a> {
        let size = floor_power_of_two(team.size);
        let paired = team.size - size;
        let index = team.index;
        if index >= 2 * paired {
            let team = Team { ranks: team.ranks, paired, size, index: index - paired };
            Fold::Member { guest: None, core: Core { team } }
        } else if index.is_multiple_of(2) {
            let team = Team { ranks: team.ranks, paired, size, index: index / 2 };
            Fold::Member { guest: Some(index + 1), core: Core { team } }
        } else {
            Fold::Guest { host: index - 1 }
        }
    }
}

/// Every guest's contribution, sent to its partner, as counts.
pub fn enter(among: Among, part: Fraction) -> Phase {
    let guests = (0..among.size() - floor_power_of_two(among.size())).map(|pair| (2 * pair + 1, 2 * pair));
    Phase::linked(1, among.pairs(guests), part, Arriving::Reduced).busiest(0, 1)
}

/// Every guest's result, sent by its partner, as counts. `chain` is the number of steps that this adds to the longest
/// chain.
pub fn leave(among: Among, chain: u32, part: Fraction) -> Phase {
    let guests = (0..among.size() - floor_power_of_two(among.size())).map(|pair| (2 * pair, 2 * pair + 1));
    Phase::linked(chain, among.pairs(guests), part, Arriving::Copied).busiest(1, 0)
}

/// Messages that folding `n` members adds to the longest chain of an exchange that crosses each distance once. Such a
/// chain leads from position a to p - 1 - a. Only if more than half of the p positions represent pairs does it both
/// begin and end at a guest.
pub fn added_steps(n: u32) -> u32 {
    let p = floor_power_of_two(n);
    u32::from(n > p) + u32::from(p > 2 && n - p > p / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_position_is_stood_for_by_exactly_one_representative() {
        for world in 1..70u32 {
            let ranks: Vec<u32> = (0..world).collect();
            let mut seen = 0;
            for index in 0..world {
                match Fold::of(&Team::of(&ranks, index)) {
                    Fold::Guest { host } => assert_eq!(host + 1, index),
                    Fold::Member { guest, core } => {
                        let at = core.team.index();
                        assert_eq!(core.team.rank(at).0, index);
                        let end = core.start(at + 1);
                        assert_eq!(end - core.start(at), 1 + u32::from(guest.is_some()));
                        seen += end - core.start(at);
                    }
                }
            }
            assert_eq!(seen, world);
        }
    }
}

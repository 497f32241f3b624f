//! Messages from one member to all others or from all others to one member, as counts.

use crate::algorithms::Fraction;
use crate::cost::{Among, Arriving, Ends, Phase};

/// The first member sends a message to every other.
pub fn from_root(among: Among, part: Fraction) -> Phase {
    let pairs = (1..among.size()).map(|member| (0, member));
    let all = among.pairs(pairs);
    let inter_node = all.uplink as u32;
    let sends = Ends { intra_node: among.size() - 1 - inter_node, inter_node };
    Phase { sends, recvs: Ends::default(), ..Phase::exchange(1, all, part, Arriving::Copied) }
}

/// The first member gets a message from every other.
pub fn to_root(among: Among, part: Fraction, arriving: Arriving) -> Phase {
    let phase = from_root(among, part);
    Phase { sends: phase.recvs, recvs: phase.sends, arriving, ..phase }
}

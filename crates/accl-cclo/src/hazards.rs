//! Table of firmware defects ("hazards") and the way that emulator and driver handle each. The emulator either reproduces a hazard or repairs it. The
//! driver always works round it.

/// A defect of current firmware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hazard {
    /// Number of the hazard in the reference and in `--faithful`.
    pub number: u8,
    /// Condition under which the hazard occurs.
    pub condition: &'static str,
    /// Behaviour of firmware in that case.
    pub faithful: &'static str,
    /// Behaviour of the repaired emulator in that case.
    pub repaired: &'static str,
    /// The driver's behaviour that avoids the hazard.
    pub way_round: &'static str,
    /// Whether the repair changes the data on the wire, so that all peers must have it.
    pub is_on_wire: bool,
}

/// All hazards, by number.
pub const HAZARDS: [Hazard; 13] = [
    Hazard {
        number: 1,
        condition: "the last segment of an eager all_reduce has so few elements that the last rank's share is empty",
        faithful: "it hangs",
        repaired: "an empty share is not sent, and not waited for",
        way_round: "counts are padded to a multiple of the ranks",
        is_on_wire: true,
    },
    Hazard {
        number: 2,
        condition: "a message is larger than the largest eager one, and the network is UDP or TCP",
        faithful: "it hangs",
        repaired: "it is sent eagerly, and goes round a ring in pieces that rx buffers hold",
        way_round: "calls are cut to the largest eager message",
        is_on_wire: true,
    },
    Hazard {
        number: 3,
        condition: "a rendezvous gather has a root that is neither the first nor the last rank",
        faithful: "the root sends its address to itself, and hangs",
        repaired: "it sends it to each other rank",
        way_round: "blocks are cut to the largest eager message",
        is_on_wire: true,
    },
    Hazard {
        number: 4,
        condition: "a rendezvous reduction goes up a binomial tree, and the number of ranks is a power of two",
        faithful: "the last sum stays in a spare buffer, and the result is not written",
        repaired: "the last sum goes to the result",
        way_round: "reductions are flat among any number of ranks",
        is_on_wire: false,
    },
    Hazard {
        number: 5,
        condition: "what all ranks contribute to a flat rendezvous reduction is larger than a spare buffer",
        faithful: "memory behind the spare buffer is overwritten",
        repaired: "the call ends with an error of its size",
        way_round: "reductions are cut to what a spare buffer holds of all ranks",
        is_on_wire: false,
    },
    Hazard {
        number: 6,
        condition: "a rendezvous reduce_scatter",
        faithful: "the source of rank 0 is overwritten",
        repaired: "the sum is kept in a spare buffer",
        way_round: "sources are copies in memory of the device",
        is_on_wire: false,
    },
    Hazard {
        number: 7,
        condition: "sender and receiver of a message name different tags, and one of them is `any`",
        faithful: "the receiver hangs, unless the sender of an eager message said `any`",
        repaired: "a receiver that says `any` takes every tag",
        way_round: "both ends of a message name the same tag, which is not `any`",
        is_on_wire: false,
    },
    Hazard {
        number: 8,
        condition: "ranks start sends and receives in different orders",
        faithful: "they wait for each other",
        repaired: "the same: a call holds the engine until it ends",
        way_round: "calls are started in the order of their numbers, which is the same on all ranks",
        is_on_wire: false,
    },
    Hazard {
        number: 9,
        condition: "a fourth call is started before the end of the first was asked for",
        faithful: "the emulator answers the host of the rank no more",
        repaired: "calls wait for their turn",
        way_round: "one call is started at a time",
        is_on_wire: false,
    },
    Hazard {
        number: 10,
        condition: "a message goes to a kernel stream over RDMA",
        faithful: "the call of its sender hangs now and then, by seed",
        repaired: "it arrives",
        way_round: "no message does",
        is_on_wire: false,
    },
    Hazard {
        number: 11,
        condition: "some buffers of a rendezvous collective lie in host memory and some in that of the device",
        faithful: "data are written to the other memory",
        repaired: "they are written where they should be",
        way_round: "all buffers of a group lie in one kind of memory",
        is_on_wire: false,
    },
    Hazard {
        number: 12,
        condition: "two communicators of the same engines are in use at once",
        faithful: "messages of one are taken for those of the other",
        repaired: "a message belongs to the communicator that its header names; one that names none belongs to any",
        way_round: "a device serves one group",
        is_on_wire: true,
    },
    Hazard {
        number: 13,
        condition: "a device is reset while a call is under way, as one that waits for a rank which was killed",
        faithful: "the reset waits for the end of the call, if need be for ever",
        repaired: "the call ends, and calls that wait behind it do, too: with return code bit 31 for hosts other than the one that resets, which hears of the reset alone",
        way_round: "after 5 s it is said that a call holds the device",
        is_on_wire: false,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hazards_are_numbered_from_one() {
        assert!(HAZARDS.iter().zip(1..).all(|(hazard, number)| hazard.number == number));
        assert!(HAZARDS.iter().all(|hazard| !hazard.way_round.is_empty() && hazard.faithful != hazard.repaired));
    }
}

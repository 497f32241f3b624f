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
    pub workaround: &'static str,
    /// Whether the repair changes the data on the wire, so that all peers must have it.
    pub is_on_wire: bool,
}

/// All hazards, by number.
pub const HAZARDS: [Hazard; 13] = [
    Hazard {
        number: 1,
        condition: "the last segment of an eager all_reduce has so few elements that the last rank's share is empty",
        faithful: "it hangs",
        repaired: "an empty share is neither sent nor expected",
        workaround: "counts are padded to a multiple of the ranks",
        is_on_wire: true,
    },
    Hazard {
        number: 2,
        condition: "a message is larger than the largest eager message, and the network is UDP or TCP",
        faithful: "it hangs",
        repaired: "it is sent eagerly, and passes a ring in pieces that fit into rx buffers",
        workaround: "calls are split to the size of the largest eager message",
        is_on_wire: true,
    },
    Hazard {
        number: 3,
        condition: "a rendezvous gather has a root that is neither the first nor the last rank",
        faithful: "the root sends its address to itself and hangs",
        repaired: "the root sends its address to each other rank",
        workaround: "blocks are split to the size of the largest eager message",
        is_on_wire: true,
    },
    Hazard {
        number: 4,
        condition: "a rendezvous reduction uses a binomial tree, and the number of ranks is a power of two",
        faithful: "the last sum stays in a spare buffer, and the result is not written",
        repaired: "the last sum is written to the result",
        workaround: "reductions are flat for any number of ranks",
        is_on_wire: false,
    },
    Hazard {
        number: 5,
        condition: "the contributions of all ranks to a flat rendezvous reduction are larger than a spare buffer",
        faithful: "memory behind the spare buffer is overwritten",
        repaired: "the call fails with an error about its size",
        workaround: "reductions are split so that the contributions of all ranks fit into a spare buffer",
        is_on_wire: false,
    },
    Hazard {
        number: 6,
        condition: "a rendezvous reduce_scatter runs",
        faithful: "the source of rank 0 is overwritten",
        repaired: "the sum is kept in a spare buffer",
        workaround: "sources are copies in device memory",
        is_on_wire: false,
    },
    Hazard {
        number: 7,
        condition: "sender and receiver of a message use different tags, and one tag is `any`",
        faithful: "the receiver hangs, unless the message is eager and its sender used `any`",
        repaired: "a receiver with the tag `any` accepts every tag",
        workaround: "both ends of a message use the same tag, which is not `any`",
        is_on_wire: false,
    },
    Hazard {
        number: 8,
        condition: "ranks start sends and receives in different orders",
        faithful: "they wait for each other",
        repaired: "the same: a call holds the engine until it ends",
        workaround: "calls are started in the order of their sequence numbers, which is the same on all ranks",
        is_on_wire: false,
    },
    Hazard {
        number: 9,
        condition: "a fourth call is started before the end of the first call was polled",
        faithful: "the emulator no longer answers the host of the rank",
        repaired: "calls wait for their turn",
        workaround: "one call is started at a time",
        is_on_wire: false,
    },
    Hazard {
        number: 10,
        condition: "a message goes to a kernel stream over RDMA",
        faithful: "the call of its sender sometimes hangs, depending on the seed",
        repaired: "it arrives",
        workaround: "no message goes to a kernel stream over RDMA",
        is_on_wire: false,
    },
    Hazard {
        number: 11,
        condition: "some buffers of a rendezvous collective lie in host memory and some in device memory",
        faithful: "data is written to the wrong memory",
        repaired: "data is written to the right memory",
        workaround: "all buffers of a group lie in one kind of memory",
        is_on_wire: false,
    },
    Hazard {
        number: 12,
        condition: "two communicators of the same engines are in use at once",
        faithful: "a message of one communicator is taken for a message of the other",
        repaired: "a message belongs to the communicator in its header; a message without one belongs to any",
        workaround: "a device serves one group",
        is_on_wire: true,
    },
    Hazard {
        number: 13,
        condition: "a device is reset during a call, for example a call that waits for a killed rank",
        faithful: "the reset waits for the end of the call, possibly forever",
        repaired: "the call and all waiting calls end, with return code bit 31 for other hosts than the resetting one. The resetting host receives only the end of the reset",
        workaround: "after 5 s the driver reports that a call holds the device",
        is_on_wire: false,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hazards_are_numbered_from_one() {
        assert!(HAZARDS.iter().zip(1..).all(|(hazard, number)| hazard.number == number));
        assert!(HAZARDS.iter().all(|hazard| !hazard.workaround.is_empty() && hazard.faithful != hazard.repaired));
    }
}

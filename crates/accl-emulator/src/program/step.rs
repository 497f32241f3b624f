//! Steps of a program, and the parameters of a program.

use accl_cclo::call::Descriptor;
use accl_cclo::memory_map::Network;
use accl_cclo::return_code::ReturnCode;

/// Location of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElementLocation {
    /// Address in the memory that `is_host` selects.
    pub address: u64,
    /// Whether the elements lie in host memory.
    pub is_host: bool,
    /// Whether the elements are compressed there.
    pub is_compressed: bool,
}

/// Source of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A memory.
    Memory(ElementLocation),
    /// Eager messages of a rank with this tag.
    Rank {
        /// Rank of the sender.
        rank: u32,
        /// Tag of the messages.
        tag: u32,
    },
    /// A kernel stream.
    Kernel,
}

/// Destination of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sink {
    /// A memory.
    Memory(ElementLocation),
    /// Eager messages to a rank.
    Rank {
        /// Rank of the receiver.
        rank: u32,
        /// Tag of the messages.
        tag: u32,
        /// Address that firmware puts into the headers; no engine uses it.
        address: u64,
    },
    /// Kernel stream of another rank, for which that rank starts no call.
    RemoteKernel {
        /// Rank of the receiver.
        rank: u32,
        /// Number of the stream.
        stream: u32,
    },
    /// A kernel stream of this engine.
    Kernel(u32),
}

/// Command of the data mover: one source or two that are reduced, and one or two destinations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Number of elements.
    pub count: u32,
    /// Operand 0.
    pub first: Source,
    /// Operand 1, and the index of the reduction function in the arithmetic config.
    pub second: Option<(Source, u32)>,
    /// Destinations.
    pub to: Vec<Sink>,
}

/// Address that is announced to a peer, for the peer's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Say {
    /// Rank of the peer.
    pub to: u32,
    /// Address for the peer's data.
    pub address: u64,
    /// Whether the address is in host memory.
    pub is_host: bool,
    /// Number of elements.
    pub count: u32,
}

/// Memory of a peer into which data is written after the peer has announced an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The memory that the peer has named.
    Said,
    /// Host memory, even if the peer has named the other.
    Host,
    /// Host memory for the first peer that has named it and for all later ones.
    Sticky {
        /// Whether a peer has named host memory.
        is_host: bool,
    },
    /// Swapped memories: data goes to the kind of memory that holds the sender's data, and is read from the kind that the peer has named.
    Exchanged,
}

/// A step of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Moves elements.
    Move(Move),
    /// Announces an address to a peer.
    Say(Say),
    /// Waits for an address from each of these ranks, and writes each rank's data there, in the order in which the addresses arrive.
    Serve {
        /// Ranks, and the location of each rank's data.
        writes: Vec<(u32, ElementLocation)>,
        /// Number of elements for each rank.
        count: u32,
        /// Memory of the peers.
        side: Side,
    },
    /// Waits for an address from a rank, and keeps it.
    KeepAddress {
        /// The rank.
        from: u32,
    },
    /// Writes at an offset from the address that was kept.
    WriteBehind {
        /// Rank that announced the address.
        to: u32,
        /// Location of the elements.
        source: ElementLocation,
        /// Offset in elements.
        behind: u64,
        /// Number of elements.
        count: u32,
    },
    /// Waits until a rank reports that all data was sent.
    AwaitDone {
        /// The rank.
        from: u32,
    },
    /// Announces addresses to ranks, a limited number at a time, and waits until all data was sent.
    Collect {
        /// Addresses to announce, in this order.
        says: Vec<Say>,
        /// Maximum number of announced addresses whose data has not arrived.
        at_a_time: usize,
    },
    /// Adds the data of ranks as it arrives.
    Sum {
        /// Ranks, and the slot into which each writes.
        slots: Vec<(u32, ElementLocation)>,
        /// Location of the initial operand.
        own: ElementLocation,
        /// Locations of intermediate sums, used in turn.
        between: [ElementLocation; 2],
        /// Location of the last sum.
        last: ElementLocation,
        /// Number of elements.
        count: u32,
        /// Index of the reduction function in the arithmetic config.
        function: u32,
    },
    /// Waits for an address message of a rank, and ignores its content.
    AwaitWord {
        /// The rank.
        from: u32,
    },
    /// Waits forever, as firmware does.
    Hang,
    /// Ends the call with this return code.
    Fail(ReturnCode),
}

/// Set of hazards that are reproduced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faithful(u16);

impl Faithful {
    /// Returns the set of all hazards.
    pub fn all() -> Self {
        accl_cclo::hazards::HAZARDS.iter().fold(Self::default(), |all, hazard| all.with(hazard.number))
    }

    /// Adds a hazard to the set.
    #[must_use]
    pub fn with(self, hazard: u8) -> Self {
        Self(self.0 | 1 << hazard)
    }

    /// Returns the numbers of the hazards in the set.
    pub fn numbers(self) -> Vec<u8> {
        let all = accl_cclo::hazards::HAZARDS.iter().map(|hazard| hazard.number);
        all.filter(|&number| self.to(number)).collect()
    }

    /// Returns whether a hazard is reproduced.
    pub fn to(self, hazard: u8) -> bool {
        self.0 >> hazard & 1 == 1
    }
}

/// Parameters of a program other than its call.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Number of ranks in the communicator.
    pub world: u32,
    /// Rank of this engine.
    pub rank: u32,
    /// Network between the engines.
    pub network: Network,
    /// Size of an element in memory, in bytes.
    pub element_bytes: u64,
    /// Size of an element that is compressed in memory, in bytes.
    pub compressed_bytes: u64,
    /// Size of an rx buffer in bytes.
    pub rx_bytes: u64,
    /// Number of rx buffers.
    pub rx_count: u32,
    /// Size of the largest eager message in bytes.
    pub max_eager_bytes: u64,
    /// Size of the largest rendezvous message, and of a spare buffer, in bytes.
    pub max_rendezvous_bytes: u64,
    /// Addresses of the spare buffers.
    pub spares: [u64; 3],
    /// Value of the register `gather_fan_in`.
    pub gather_fan_in: u32,
    /// Value of the register `gather_fan_in_bytes`.
    pub gather_fan_in_bytes: u32,
    /// Value of the register `broadcast_flat_ranks`.
    pub broadcast_flat_ranks: u32,
    /// Value of the register `reduce_flat_ranks`.
    pub reduce_flat_ranks: u32,
    /// Value of the register `reduce_flat_bytes`.
    pub reduce_flat_bytes: u32,
    /// Hazards that are reproduced.
    pub faithful: Faithful,
    /// Whether the call loses the race that firmware has.
    pub loses_race: bool,
}

/// Steps of a call.
pub type Program = Box<dyn Iterator<Item = Step> + Send>;

pub(super) fn steps<const COUNT: usize>(all: [Step; COUNT]) -> Program {
    Box::new(all.into_iter())
}

pub(super) fn fail(code: ReturnCode) -> Program {
    steps([Step::Fail(code)])
}

impl Setup {
    /// Returns the rank `hops` steps ahead on the ring.
    pub(super) fn next(&self, hops: u32) -> u32 {
        (self.rank + hops) % self.world
    }

    /// Returns the rank `hops` steps back on the ring.
    pub(super) fn previous(&self, hops: u32) -> u32 {
        (self.rank + self.world - hops % self.world) % self.world
    }

    /// Returns the other ranks, in rank order.
    pub(super) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let rank = self.rank;
        (0..self.world).filter(move |&other| other != rank)
    }
}

/// Buffers of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct CallBuffers {
    pub(super) first: ElementLocation,
    pub(super) second: ElementLocation,
    pub(super) result: ElementLocation,
    element_bytes: u64,
    compressed_bytes: u64,
}

impl CallBuffers {
    pub(super) fn of(call: &Descriptor, setup: &Setup) -> Self {
        let location = |address, is_host, is_compressed| ElementLocation { address, is_host, is_compressed };
        Self {
            first: location(call.first, call.hosts.first, call.compression.first),
            second: location(call.second, call.hosts.second, call.compression.second),
            result: location(call.result, call.hosts.result, call.compression.result),
            element_bytes: setup.element_bytes,
            compressed_bytes: setup.compressed_bytes,
        }
    }

    /// Returns the location `elements` elements after another location.
    pub(super) fn behind(&self, location: ElementLocation, elements: u64) -> ElementLocation {
        let bytes = if location.is_compressed { self.compressed_bytes } else { self.element_bytes };
        // A saturated address lies outside of memory, so the data mover rejects it.
        ElementLocation { address: location.address.saturating_add(elements.saturating_mul(bytes)), ..location }
    }
}

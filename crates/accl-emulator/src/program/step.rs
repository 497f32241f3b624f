//! The steps of a program, and what a program depends on.

use accl_cclo::call::Descriptor;
use accl_cclo::memory_map::Network;
use accl_cclo::return_code::ReturnCode;

/// Where elements lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// In which memory is said by the next field.
    pub address: u64,
    /// They lie in host memory.
    pub is_host: bool,
    /// They are compressed there.
    pub is_compressed: bool,
}

/// Where elements come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A memory.
    Memory(Place),
    /// Eager messages of a rank with this tag.
    Rank {
        /// Which one.
        rank: u32,
        /// Their tag.
        tag: u32,
    },
    /// A kernel stream.
    Kernel,
}

/// Where elements go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sink {
    /// A memory.
    Memory(Place),
    /// Eager messages to a rank.
    Rank {
        /// Which one.
        rank: u32,
        /// Their tag.
        tag: u32,
        /// An address that firmware leaves in their headers; nobody looks at it.
        address: u64,
    },
    /// A kernel stream of a rank, which posts nothing for it.
    RemoteKernel {
        /// Which rank.
        rank: u32,
        /// Which stream.
        stream: u32,
    },
    /// A kernel stream of this engine.
    Kernel(u32),
}

/// A command of the data mover: up to two sources, added if there are two, to one or two places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// Elements.
    pub count: u32,
    /// Operand 0.
    pub first: Source,
    /// Operand 1, and how the two become one: the index of a function of the arithmetic config.
    pub second: Option<(Source, u32)>,
    /// Where the elements go.
    pub to: Vec<Sink>,
}

/// An address that a peer is told, for its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Say {
    /// To whom.
    pub to: u32,
    /// Where its data are to go.
    pub address: u64,
    /// That lies in host memory.
    pub is_host: bool,
    /// Elements.
    pub count: u32,
}

/// In which memory of a peer data go that it has said an address for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// In that which it has said.
    Said,
    /// In host memory, whatever it has said.
    Host,
    /// In host memory from the first peer on that has said so.
    Sticky {
        /// One has.
        is_host: bool,
    },
    /// In the one that the sender's data are in, which are looked for in that which the peer has said.
    Exchanged,
}

/// A step of a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Moves elements.
    Move(Move),
    /// Tells a peer an address.
    Say(Say),
    /// Waits until each of these ranks has said an address, and writes there what it gets, in the order in which they do.
    Serve {
        /// The ranks, and where what they get lies.
        writes: Vec<(u32, Place)>,
        /// Elements for each.
        count: u32,
        /// In which memory.
        side: Side,
    },
    /// Waits until a rank has said an address, which is kept.
    KeepAddress {
        /// The rank.
        from: u32,
    },
    /// Writes behind the address that was kept.
    WriteBehind {
        /// Whose it is.
        to: u32,
        /// Where the elements lie.
        source: Place,
        /// So many elements behind.
        behind: u64,
        /// How many.
        count: u32,
    },
    /// Waits until a rank says that all data are there.
    AwaitDone {
        /// The rank.
        from: u32,
    },
    /// Tells ranks addresses, so many at a time, and waits until all data are there.
    Collect {
        /// What is said, in this order.
        says: Vec<Say>,
        /// Most of them that are under way at a time.
        at_a_time: usize,
    },
    /// Adds what ranks write as it comes.
    Sum {
        /// The ranks, and where each writes.
        slots: Vec<(u32, Place)>,
        /// What the first is added to.
        own: Place,
        /// Where sums go in turn.
        between: [Place; 2],
        /// Where the last goes.
        last: Place,
        /// Elements.
        count: u32,
        /// How they are added.
        function: u32,
    },
    /// Waits until a rank has said anything.
    AwaitWord {
        /// The rank.
        from: u32,
    },
    /// Waits for ever, as firmware does.
    Hang,
    /// Ends the call.
    Fail(ReturnCode),
}

/// Whether firmware's defects are kept, by hazard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faithful(u16);

impl Faithful {
    /// All of them.
    pub fn all() -> Self {
        accl_cclo::hazards::HAZARDS.iter().fold(Self::default(), |all, hazard| all.with(hazard.number))
    }

    /// This one as well.
    #[must_use]
    pub fn with(self, hazard: u8) -> Self {
        Self(self.0 | 1 << hazard)
    }

    /// The numbers of those that are kept.
    pub fn numbers(self) -> Vec<u8> {
        let all = accl_cclo::hazards::HAZARDS.iter().map(|hazard| hazard.number);
        all.filter(|&number| self.to(number)).collect()
    }

    /// Whether it does as firmware does.
    pub fn to(self, hazard: u8) -> bool {
        self.0 >> hazard & 1 == 1
    }
}

/// What a program depends on besides its call.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// Ranks of the communicator.
    pub world: u32,
    /// Which of them this engine is.
    pub rank: u32,
    /// How engines reach one another.
    pub network: Network,
    /// Bytes of an element in memory.
    pub element_bytes: u64,
    /// Bytes of an element that is compressed in memory.
    pub compressed_bytes: u64,
    /// Size of an rx buffer.
    pub rx_bytes: u64,
    /// How many rx buffers there are.
    pub rx_count: u32,
    /// The largest eager message.
    pub max_eager_bytes: u64,
    /// The largest rendezvous message: what a spare buffer holds.
    pub max_rendezvous_bytes: u64,
    /// Addresses of the spare buffers.
    pub spares: [u64; 3],
    /// See the registers of the same names.
    pub gather_fan_in: u32,
    /// As above.
    pub gather_fan_in_bytes: u32,
    /// As above.
    pub broadcast_flat_ranks: u32,
    /// As above.
    pub reduce_flat_ranks: u32,
    /// As above.
    pub reduce_flat_bytes: u32,
    /// Which defects are kept.
    pub faithful: Faithful,
    /// A race goes the wrong way, where firmware has one.
    pub loses_race: bool,
}

/// The steps of a call.
pub type Program = Box<dyn Iterator<Item = Step> + Send>;

pub(super) fn steps<const COUNT: usize>(all: [Step; COUNT]) -> Program {
    Box::new(all.into_iter())
}

pub(super) fn fail(code: ReturnCode) -> Program {
    steps([Step::Fail(code)])
}

impl Setup {
    /// So many hops further round the ring.
    pub(super) fn next(&self, hops: u32) -> u32 {
        (self.rank + hops) % self.world
    }

    /// So many hops back.
    pub(super) fn previous(&self, hops: u32) -> u32 {
        (self.rank + self.world - hops % self.world) % self.world
    }

    /// The others, in rank order.
    pub(super) fn others(&self) -> impl Iterator<Item = u32> + use<> {
        let rank = self.rank;
        (0..self.world).filter(move |&other| other != rank)
    }
}

/// The buffers of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Buffers {
    pub(super) first: Place,
    pub(super) second: Place,
    pub(super) result: Place,
    element_bytes: u64,
    compressed_bytes: u64,
}

impl Buffers {
    pub(super) fn of(call: &Descriptor, setup: &Setup) -> Self {
        let place = |address, is_host, is_compressed| Place { address, is_host, is_compressed };
        Self {
            first: place(call.first, call.hosts.first, call.compression.first),
            second: place(call.second, call.hosts.second, call.compression.second),
            result: place(call.result, call.hosts.result, call.compression.result),
            element_bytes: setup.element_bytes,
            compressed_bytes: setup.compressed_bytes,
        }
    }

    /// So many elements behind a place.
    pub(super) fn behind(&self, place: Place, elements: u64) -> Place {
        let bytes = if place.is_compressed { self.compressed_bytes } else { self.element_bytes };
        // What lies beyond all addresses is found to be nobody's when it is moved.
        Place { address: place.address.saturating_add(elements.saturating_mul(bytes)), ..place }
    }
}

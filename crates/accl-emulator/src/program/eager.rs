//! Eager calls: data is sent at once, and waits in rx buffers until a call takes it.

use accl_cclo::call::{Descriptor, Operation};
use accl_cclo::return_code::ReturnCode;

use super::step::{CallBuffers, Move, Program, Setup, Sink, Source, Step, fail, steps};

/// Returns the program of a call on a single rank.
pub(super) fn alone(call: &Descriptor, setup: &Setup) -> Program {
    match call.operation {
        Operation::Barrier | Operation::Nop | Operation::Broadcast => Box::new(std::iter::empty()),
        Operation::Combine | Operation::Copy => program(call, setup),
        Operation::Send | Operation::Recv => program(call, setup),
        Operation::Config => fail(ReturnCode::NOT_IMPLEMENTED),
        Operation::Reduce
        | Operation::AllReduce
        | Operation::ReduceScatter
        | Operation::AllToAll
        | Operation::Scatter
        | Operation::Gather
        | Operation::AllGather => {
            let buffers = CallBuffers::of(call, setup);
            steps([copy(call.count, Source::Memory(buffers.first), Sink::Memory(buffers.result))])
        }
    }
}

fn copy(count: u32, from: Source, to: Sink) -> Step {
    Step::Move(Move { count, first: from, second: None, to: vec![to] })
}

/// Returns the program of an eager call.
pub(super) fn program(call: &Descriptor, setup: &Setup) -> Program {
    let eager = Eager { call: *call, setup: *setup, buffers: CallBuffers::of(call, setup) };
    match call.operation {
        Operation::Nop => Box::new(std::iter::empty()),
        Operation::Config => fail(ReturnCode::NOT_IMPLEMENTED),
        Operation::Copy => steps([copy(call.count, eager.operand(0), eager.result(0))]),
        Operation::Combine => steps([Step::Move(Move {
            count: call.count,
            first: Source::Memory(eager.buffers.first),
            second: Some((Source::Memory(eager.buffers.second), call.function)),
            to: vec![eager.result(0)],
        })]),
        Operation::Send => Box::new(eager.segments().map(move |(at, count)| eager.send(at, count))),
        Operation::Recv => Box::new(
            eager.segments().map(move |(at, count)| copy(count, eager.from(eager.call.root), eager.result(at))),
        ),
        Operation::Broadcast => eager.broadcast(),
        Operation::Scatter => eager.scatter(),
        Operation::Gather => eager.gather(),
        Operation::AllGather => eager.all_gather(),
        Operation::Reduce => Box::new(eager.segments().map(move |(at, count)| eager.reduce(at, count))),
        Operation::ReduceScatter => eager.reduce_scatter(),
        Operation::AllReduce => eager.all_reduce(),
        Operation::AllToAll => eager.all_to_all(),
        Operation::Barrier => steps([Step::Hang]),
    }
}

#[derive(Clone, Copy)]
struct Eager {
    call: Descriptor,
    setup: Setup,
    buffers: CallBuffers,
}

impl Eager {
    /// Returns the number of elements that an rx buffer holds.
    fn segment(&self) -> u32 {
        (self.setup.rx_bytes / self.setup.element_bytes.max(1)).max(1) as u32
    }

    /// Returns the first element and the number of elements of each segment.
    fn segments(&self) -> impl Iterator<Item = (u64, u32)> + use<> {
        segments(self.call.count, self.segment())
    }

    /// Returns the pieces of each rank's block that go round the ring one after the other. A rank that sent a whole block before receiving any would
    /// wait forever once rx buffers are full, as would the next rank. Firmware does that.
    fn pieces(&self) -> impl Iterator<Item = (u64, u32)> + use<> {
        let room = u64::from(self.setup.rx_count).saturating_mul(self.setup.rx_bytes);
        let most = (room / self.setup.element_bytes.max(1)).clamp(1, u64::from(u32::MAX)) as u32;
        segments(self.call.count, if self.setup.faithful.to(2) { u32::MAX } else { most })
    }

    fn tag(&self) -> u32 {
        self.call.tag
    }

    fn operand(&self, at: u64) -> Source {
        match self.call.streams.first {
            true => Source::Kernel,
            false => Source::Memory(self.buffers.behind(self.buffers.first, at)),
        }
    }

    fn result(&self, at: u64) -> Sink {
        match self.call.streams.result {
            true => Sink::Kernel(self.call.tag),
            false => Sink::Memory(self.buffers.behind(self.buffers.result, at)),
        }
    }

    fn from(&self, rank: u32) -> Source {
        Source::Rank { rank, tag: self.tag() }
    }

    fn to(&self, rank: u32) -> Sink {
        Sink::Rank { rank, tag: self.tag(), address: 0 }
    }

    fn own(&self, at: u64) -> Source {
        Source::Memory(self.buffers.behind(self.buffers.first, at))
    }

    fn kept(&self, at: u64) -> Sink {
        Sink::Memory(self.buffers.behind(self.buffers.result, at))
    }

    fn send(&self, at: u64, count: u32) -> Step {
        let rank = self.call.root;
        let to = if self.call.streams.result { Sink::RemoteKernel { rank, stream: self.tag() } } else { self.to(rank) };
        copy(count, self.operand(at), to)
    }

    /// The root sends each segment to every rank in turn.
    fn broadcast(self) -> Program {
        if self.setup.rank != self.call.root {
            return Box::new(self.segments().map(move |(at, count)| {
                let buffer = self.buffers.behind(self.buffers.first, at);
                copy(count, self.from(self.call.root), Sink::Memory(buffer))
            }));
        }
        let each = move |(at, count)| self.setup.others().map(move |rank| copy(count, self.operand(at), self.to(rank)));
        Box::new(self.segments().flat_map(each))
    }

    /// The root sends to each rank in rank order.
    fn scatter(self) -> Program {
        let Self { call, setup, .. } = self;
        if setup.rank != call.root {
            return steps([copy(call.count, self.from(call.root), self.result(0))]);
        }
        Box::new((0..setup.world).map(move |rank| {
            let from = self.own(u64::from(rank) * u64::from(call.count));
            match rank == call.root {
                true => copy(call.count, from, self.kept(0)),
                false => copy(call.count, from, Sink::Rank { rank, tag: self.tag(), address: call.result }),
            }
        }))
    }

    /// A chain along the ring to the root. Each rank sends its own block and then forwards the blocks that arrive from the previous rank.
    fn gather(self) -> Program {
        let Self { call, setup, .. } = self;
        let (next, previous) = (setup.next(1), setup.previous(1));
        let block = move |rank: u32| u64::from(rank) * u64::from(call.count);
        if setup.rank == call.root {
            let own = copy(call.count, self.own(0), self.kept(block(setup.rank)));
            let others = (1..setup.world)
                .map(move |hops| copy(call.count, self.from(previous), self.kept(block(setup.previous(hops)))));
            return Box::new(std::iter::once(own).chain(others));
        }
        let hops_to_root = (call.root + setup.world - setup.rank) % setup.world;
        let behind = setup.world - 1 - hops_to_root;
        let own = copy(call.count, self.own(0), self.to(next));
        Box::new(
            std::iter::once(own).chain((0..behind).map(move |_| copy(call.count, self.from(previous), self.to(next)))),
        )
    }

    /// A ring: each rank keeps the blocks that arrive, and forwards them.
    fn all_gather(self) -> Program {
        let Self { call, setup, .. } = self;
        let (next, previous) = (setup.next(1), setup.previous(1));
        Box::new(self.pieces().flat_map(move |(at, count)| {
            let location = move |rank: u32| u64::from(rank) * u64::from(call.count) + at;
            let own =
                [copy(count, self.own(at), self.kept(location(setup.rank))), copy(count, self.own(at), self.to(next))];
            let others = (1..setup.world).map(move |hops| {
                let mut to = vec![self.kept(location(setup.previous(hops)))];
                if hops + 1 < setup.world {
                    to.push(self.to(next));
                }
                Step::Move(Move { count, first: self.from(previous), second: None, to })
            });
            own.into_iter().chain(others)
        }))
    }

    /// Returns the step for one segment along the chain that ends at the root.
    fn reduce(&self, at: u64, count: u32) -> Step {
        let (call, setup) = (&self.call, &self.setup);
        let (next, previous) = (setup.next(1), setup.previous(1));
        let is_root = setup.rank == call.root;
        let is_first = previous == call.root;
        let second = (!is_first || is_root && setup.world == 1).then(|| (self.from(previous), call.function));
        let to = if is_root { self.result(at) } else { self.to(next) };
        Step::Move(Move { count, first: self.operand(at), second, to: vec![to] })
    }

    /// Returns one step of a ring reduction, after `hops` ranks have contributed.
    fn add(&self, count: u32, at: u64, hops: u32, to: Sink) -> Step {
        let second = (hops > 0).then(|| (self.from(self.setup.previous(1)), self.call.function));
        Step::Move(Move { count, first: self.own(at), second, to: vec![to] })
    }

    fn reduce_scatter(self) -> Program {
        let Self { call, setup, .. } = self;
        Box::new(self.pieces().flat_map(move |(behind, count)| {
            (0..setup.world).map(move |hops| {
                // The block of this step belongs to the rank that is as many hops ahead as hops remain.
                let at = u64::from(setup.previous(hops + 1)) * u64::from(call.count) + behind;
                let to = if hops + 1 == setup.world { self.result(behind) } else { self.to(setup.next(1)) };
                self.add(count, at, hops, to)
            })
        }))
    }

    /// Each segment is reduced round the ring in one part per rank, and the parts then go round once more.
    fn all_reduce(self) -> Program {
        let Self { call, setup, .. } = self;
        let world = setup.world;
        let whole = self.segment() / world * world;
        if whole == 0 {
            return steps([Step::Hang]);
        }
        Box::new(segments(call.count, whole).flat_map(move |(at, count)| self.all_reduce_segment(at, count)))
    }

    fn all_reduce_segment(self, at: u64, count: u32) -> Box<dyn Iterator<Item = Step> + Send> {
        let Self { setup, .. } = self;
        let world = setup.world;
        let part = count.div_ceil(world);
        let last = u64::from(count).checked_sub(u64::from(part) * u64::from(world - 1));
        if last.is_none_or(|last| last == 0) && setup.faithful.to(1) {
            return Box::new(std::iter::once(Step::Hang));
        }
        let share = move |rank: u32| {
            let begin = (u64::from(part) * u64::from(rank)).min(u64::from(count));
            let end = (begin + u64::from(part)).min(u64::from(count));
            (at + begin, (end - begin) as u32)
        };
        let added = (0..world).map(move |hops| {
            let (at, count) = share(setup.previous(hops));
            let to = if hops + 1 == world { self.kept(at) } else { self.to(setup.next(1)) };
            self.add(count, at, hops, to)
        });
        // The part that this rank has reduced last belongs to the next rank.
        let own = setup.next(1);
        let sent = std::iter::once(own).map(move |rank| {
            let (at, count) = share(rank);
            copy(count, Source::Memory(self.buffers.behind(self.buffers.result, at)), self.to(setup.next(1)))
        });
        let passed = (1..world).map(move |hops| {
            let (at, count) = share((own + world - hops) % world);
            let mut to = vec![self.kept(at)];
            if hops + 1 < world {
                to.push(self.to(setup.next(1)));
            }
            Step::Move(Move { count, first: self.from(setup.previous(1)), second: None, to })
        });
        let is_empty = |step: &Step| matches!(step, Step::Move(Move { count: 0, .. }));
        Box::new(added.chain(sent).chain(passed).filter(move |step| !is_empty(step)))
    }

    /// Sends a message from each rank to each other rank. Firmware lacks this program; it replaces rendezvous where that does not work. No rank runs
    /// more than a segment ahead, since data that no call has taken occupies rx buffers.
    fn all_to_all(self) -> Program {
        let Self { call, setup, .. } = self;
        let block = move |rank: u32| u64::from(rank) * u64::from(call.count);
        let own = copy(call.count, self.own(block(setup.rank)), self.kept(block(setup.rank)));
        let others = (1..setup.world).flat_map(move |hops| {
            let (next, previous) = (setup.next(hops), setup.previous(hops));
            self.segments().flat_map(move |(at, count)| {
                [
                    copy(count, self.own(block(next) + at), self.to(next)),
                    copy(count, self.from(previous), self.kept(block(previous) + at)),
                ]
            })
        });
        Box::new(std::iter::once(own).chain(others))
    }
}

fn segments(count: u32, segment: u32) -> impl Iterator<Item = (u64, u32)> {
    (0..count).step_by(segment as usize).map(move |at| (u64::from(at), segment.min(count - at)))
}

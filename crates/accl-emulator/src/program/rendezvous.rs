//! Rendezvous calls: a receiver announces the address for its data, and the sender writes the data there and reports completion.

use accl_cclo::call::{Descriptor, Operation};
use accl_cclo::return_code::ReturnCode;

use super::step::{CallBuffers, ElementLocation, Move, Program, Say, Setup, Side, Sink, Source, Step, fail};

/// Return code for a message that is larger than a spare buffer.
const TOO_LARGE: ReturnCode = ReturnCode(1 << 18);

/// Returns the program of a rendezvous call.
pub(super) fn program(call: &Descriptor, setup: &Setup) -> Program {
    let rendezvous = Rendezvous { call: *call, setup: *setup, buffers: CallBuffers::of(call, setup) };
    let steps = match call.operation {
        Operation::Send => vec![rendezvous.serve(vec![(call.root, rendezvous.buffers.first)], call.count)],
        Operation::Recv => rendezvous.receive(call.root, rendezvous.buffers.result, call.count),
        Operation::Broadcast => rendezvous.broadcast(rendezvous.buffers.first),
        Operation::Scatter => rendezvous.scatter(rendezvous.buffers.first),
        Operation::Gather => rendezvous.gather(),
        Operation::AllGather => rendezvous.all_gather(),
        Operation::Reduce => rendezvous.reduce(call.root, call.count, rendezvous.buffers.result),
        Operation::AllReduce => {
            let mut steps = rendezvous.reduce(0, call.count, rendezvous.buffers.result);
            steps.extend(rendezvous.at_root(0).broadcast(rendezvous.buffers.result));
            steps
        }
        Operation::ReduceScatter => rendezvous.reduce_scatter(),
        Operation::AllToAll => rendezvous.all_to_all(),
        Operation::Barrier => rendezvous.barrier(),
        Operation::Config | Operation::Copy | Operation::Combine | Operation::Nop => {
            return fail(ReturnCode::NOT_IMPLEMENTED);
        }
    };
    Box::new(steps.into_iter())
}

#[derive(Clone, Copy)]
struct Rendezvous {
    call: Descriptor,
    setup: Setup,
    buffers: CallBuffers,
}

impl Rendezvous {
    fn at_root(&self, root: u32) -> Self {
        Self { call: Descriptor { root, ..self.call }, ..*self }
    }

    fn is_root(&self) -> bool {
        self.setup.rank == self.call.root
    }

    /// Returns the rank `hops` steps ahead of the root on the ring.
    fn at_hops(&self, hops: u32) -> u32 {
        (self.call.root + hops) % self.setup.world
    }

    fn own_hops(&self) -> u32 {
        (self.setup.rank + self.setup.world - self.call.root) % self.setup.world
    }

    fn block(&self, location: ElementLocation, rank: u32) -> ElementLocation {
        self.buffers.behind(location, u64::from(rank) * u64::from(self.call.count))
    }

    fn spare(&self, index: usize) -> ElementLocation {
        ElementLocation { address: self.setup.spares[index], is_host: false, is_compressed: false }
    }

    fn serve(&self, writes: Vec<(u32, ElementLocation)>, count: u32) -> Step {
        Step::Serve { writes, count, side: Side::Said }
    }

    fn say(&self, to: u32, location: ElementLocation, count: u32) -> Say {
        Say { to, address: location.address, is_host: location.is_host, count }
    }

    fn receive(&self, from: u32, location: ElementLocation, count: u32) -> Vec<Step> {
        vec![Step::Say(self.say(from, location, count)), Step::AwaitDone { from }]
    }

    fn copy(&self, from: ElementLocation, to: ElementLocation, count: u32) -> Step {
        Step::Move(Move { count, first: Source::Memory(from), second: None, to: vec![Sink::Memory(to)] })
    }

    fn broadcast(&self, buffer: ElementLocation) -> Vec<Step> {
        let (count, world) = (self.call.count, self.setup.world);
        if world <= self.setup.broadcast_flat_ranks {
            return match self.is_root() {
                true => {
                    // Firmware never clears the root's own host flag.
                    let is_stuck = self.setup.faithful.to(11) && self.call.hosts.result;
                    let side = if is_stuck { Side::Host } else { Side::Said };
                    let writes = self.setup.others().map(|rank| (rank, buffer)).collect();
                    vec![Step::Serve { writes, count, side }]
                }
                false => self.receive(self.call.root, buffer, count),
            };
        }
        // A binomial tree, from the largest distance to the smallest.
        let own = self.own_hops();
        let mut steps = Vec::new();
        let mut distance = world.next_power_of_two() / 2;
        while distance > 0 {
            if own.is_multiple_of(2 * distance) && own + distance < world {
                let side = if self.setup.faithful.to(11) { Side::Exchanged } else { Side::Said };
                let writes = vec![(self.at_hops(own + distance), buffer)];
                steps.push(Step::Serve { writes, count, side });
            } else if own % (2 * distance) == distance {
                steps.extend(self.receive(self.at_hops(own - distance), buffer, count));
            }
            distance /= 2;
        }
        steps
    }

    fn scatter(&self, source: ElementLocation) -> Vec<Step> {
        let count = self.call.count;
        if !self.is_root() {
            return self.receive(self.call.root, self.buffers.result, count);
        }
        let writes = self.setup.others().map(|rank| (rank, self.block(source, rank))).collect();
        vec![self.copy(self.block(source, self.setup.rank), self.buffers.result, count), self.serve(writes, count)]
    }

    fn gather(&self) -> Vec<Step> {
        let count = self.call.count;
        if !self.is_root() {
            return vec![self.serve(vec![(self.call.root, self.buffers.first)], count)];
        }
        let own = self.copy(self.buffers.first, self.block(self.buffers.result, self.setup.rank), count);
        let is_between = self.call.root > 0 && self.call.root + 1 < self.setup.world;
        if is_between && self.setup.faithful.to(3) {
            return vec![own, Step::Hang];
        }
        let says: Vec<Say> =
            self.setup.others().map(|rank| self.say(rank, self.block(self.buffers.result, rank), count)).collect();
        let is_large = u64::from(count) * self.setup.element_bytes > u64::from(self.setup.gather_fan_in_bytes);
        let at_a_time = if is_large { self.setup.gather_fan_in.max(1) as usize } else { says.len() };
        vec![own, Step::Collect { says, at_a_time }]
    }

    /// A ring: each block is written to its position in the next rank's result.
    fn all_gather(&self) -> Vec<Step> {
        let Self { call, setup, buffers } = self;
        let (next, previous) = (setup.next(1), setup.previous(1));
        let mut steps = vec![
            Step::Say(self.say(previous, buffers.result, call.count)),
            self.copy(buffers.first, self.block(buffers.result, setup.rank), call.count),
            Step::KeepAddress { from: next },
        ];
        for hops in 0..setup.world - 1 {
            let rank = setup.previous(hops);
            steps.push(Step::WriteBehind {
                to: next,
                source: self.block(buffers.result, rank),
                behind: u64::from(rank) * u64::from(call.count),
                count: call.count,
            });
            steps.push(Step::AwaitDone { from: previous });
        }
        steps
    }

    fn reduce(&self, root: u32, count: u32, result: ElementLocation) -> Vec<Step> {
        let this = self.at_root(root);
        let bytes = u64::from(count) * self.setup.element_bytes;
        let is_flat =
            self.setup.world <= self.setup.reduce_flat_ranks || bytes <= u64::from(self.setup.reduce_flat_bytes);
        if is_flat { this.reduce_flat(count, result) } else { this.reduce_tree(count, result) }
    }

    /// Every rank writes into a slot of the root's spare buffer 1, and the root adds the slots as they arrive.
    fn reduce_flat(&self, count: u32, result: ElementLocation) -> Vec<Step> {
        let slots_bytes = (u64::from(self.setup.world) * u64::from(count)).saturating_mul(self.setup.element_bytes);
        if slots_bytes > self.setup.max_rendezvous_bytes && !self.setup.faithful.to(5) {
            return vec![Step::Fail(TOO_LARGE)];
        }
        if !self.is_root() {
            return vec![self.serve(vec![(self.call.root, self.buffers.first)], count)];
        }
        let slot = |rank: u32| self.buffers.behind(self.spare(0), u64::from(rank) * u64::from(count));
        let says = self.setup.others().map(|rank| Step::Say(self.say(rank, slot(rank), count)));
        let sum = Step::Sum {
            slots: self.setup.others().map(|rank| (rank, slot(rank))).collect(),
            own: self.buffers.first,
            // Spare buffer 3 comes first. With this order the recorded sums are right, although slots reached into spare buffer 2.
            between: [self.spare(2), self.spare(1)],
            last: result,
            count,
            function: self.call.function,
        };
        says.chain([sum]).collect()
    }

    /// Sums go up a binomial tree through the spare buffers of every rank.
    fn reduce_tree(&self, count: u32, result: ElementLocation) -> Vec<Step> {
        let (own, world) = (self.own_hops(), self.setup.world);
        let is_too_large = u64::from(count) * self.setup.element_bytes > self.setup.max_rendezvous_bytes;
        if is_too_large && !self.setup.faithful.to(5) {
            return vec![Step::Fail(TOO_LARGE)];
        }
        let mut steps = Vec::new();
        let mut sum = self.buffers.first;
        let mut received: Option<ElementLocation> = None;
        for step in 0.. {
            let distance = 1u32 << step;
            let is_over = distance >= world;
            let sends = !is_over && own % (2 * distance) == distance;
            if let Some(slot) = received.take() {
                let is_result = self.is_root() && (distance > world || (is_over && !self.setup.faithful.to(4)));
                let to = if is_result { result } else { self.spare((step as usize + 1) % 3) };
                steps.push(Step::Move(Move {
                    count,
                    first: Source::Memory(sum),
                    second: Some((Source::Memory(slot), self.call.function)),
                    to: vec![Sink::Memory(to)],
                }));
                sum = to;
            }
            if is_over {
                break;
            }
            if sends {
                steps.push(self.serve(vec![(self.at_hops(own - distance), sum)], count));
                break;
            }
            if own + distance < world {
                let slot = self.spare(step as usize % 3);
                steps.extend(self.receive(self.at_hops(own + distance), slot, count));
                received = Some(slot);
            }
        }
        steps
    }

    /// All blocks are reduced at rank 0, and scattered from there.
    fn reduce_scatter(&self) -> Vec<Step> {
        let this = self.at_root(0);
        let Some(count) = self.call.count.checked_mul(self.setup.world) else { return vec![Step::Fail(TOO_LARGE)] };
        // Firmware stores the sum in the source of rank 0. The repaired emulator uses the spare buffer that does not hold the previous sum.
        let sum = match self.setup.faithful.to(6) {
            true => self.buffers.first,
            false => self.spare(if self.setup.world.is_multiple_of(2) { 2 } else { 1 }),
        };
        let mut steps = this.reduce(0, count, sum);
        steps.extend(this.scatter(sum));
        steps
    }

    fn all_to_all(&self) -> Vec<Step> {
        let Self { call, setup, buffers } = self;
        let own = self.copy(self.block(buffers.first, setup.rank), self.block(buffers.result, setup.rank), call.count);
        let says = setup.others().map(|rank| Step::Say(self.say(rank, self.block(buffers.result, rank), call.count)));
        let writes = setup.others().map(|rank| (rank, self.block(buffers.first, rank))).collect();
        let dones = setup.others().map(|from| Step::AwaitDone { from });
        let side = if setup.faithful.to(11) { Side::Sticky { is_host: false } } else { Side::Said };
        let serve = Step::Serve { writes, count: call.count, side };
        std::iter::once(own).chain(says).chain([serve]).chain(dones).collect()
    }

    /// Every rank sends a message to rank 0, which then sends one to every rank.
    fn barrier(&self) -> Vec<Step> {
        let nowhere = ElementLocation { address: 0, is_host: false, is_compressed: false };
        if self.setup.rank > 0 {
            return vec![Step::Say(self.say(0, nowhere, 0)), Step::AwaitWord { from: 0 }];
        }
        let awaited = self.setup.others().map(|from| Step::AwaitWord { from });
        awaited.chain(self.setup.others().map(|rank| Step::Say(self.say(rank, nowhere, 0)))).collect()
    }
}

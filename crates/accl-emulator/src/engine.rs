//! An engine: registers, memories, calls on its control streams, and the program of the one that runs.
//!
//! Owns the order of calls and how far the running one has come. Firmware's programs are in `program`, data in `mover`, what comes in
//! `receiver`. Read [`Engine::advance`] first.

use std::collections::VecDeque;

use accl_cclo::call::{ANY_TAG, ConfigFunction, Descriptor, Operation};
use accl_cclo::control::{Reply, Request, Status};
use accl_cclo::memory_map as map;
use accl_cclo::memory_map::Network;
use accl_cclo::return_code::ReturnCode;
use accl_cclo::wire::{Header, MessageKind};

use crate::exchange::{Elements, Exchange};
use crate::fabric::Fabric;
use crate::memory::Memory;
use crate::mover::{Moving, NO_ADDRESS, Parts, Progress};
use crate::program::{Faithful, Move, Place, Program, Say, Setup, Sink, Source, Step, program};
use crate::receiver::{Memories, Notice, Receiver};
use crate::time::{Counted, Speed};

/// Control streams of an engine.
const CONTROLS: usize = 3;
/// Firmware's limits before anybody has set them.
const FIRST_LIMIT: u32 = 32 << 10;

/// A control stream: the calls on it, and those that have ended and that nobody has asked for.
#[derive(Default)]
struct Control {
    calls: VecDeque<Descriptor>,
    ended: usize,
}

/// The call that runs.
struct Running {
    control: usize,
    call: Descriptor,
    elements: Elements,
    rank: u32,
    program: Program,
    step: Option<UnderWay>,
    /// See [`Step::KeepAddress`].
    kept: Option<Notice>,
    counted: Counted,
}

/// A step that has begun.
enum UnderWay {
    Moving(Moving),
    Step(Step),
    Collecting { says: VecDeque<Say>, under_way: Vec<u32>, at_a_time: usize },
    Summing { slots: Vec<(u32, Place)>, sum: Place, turns: usize, step: Step },
}

/// An engine.
pub struct Engine {
    network: Network,
    faithful: Faithful,
    exchange: Exchange,
    device: Memory,
    host: Memory,
    controls: [Control; CONTROLS],
    /// Control streams of calls that have yet to run, in the order in which they were started.
    order: VecDeque<usize>,
    running: Option<Running>,
    receiver: Receiver,
    kernel_in: VecDeque<u8>,
    kernel_out: VecDeque<(u32, Vec<u8>)>,
    max_eager: u32,
    max_rendezvous: u32,
    takes_packets: bool,
    speed: Speed,
}

impl Engine {
    /// An engine on such a network, with firmware's defects or without.
    pub fn new(network: Network, faithful: Faithful) -> Self {
        Self {
            network,
            faithful,
            exchange: Exchange::default(),
            device: Memory::default(),
            host: Memory::default(),
            controls: Default::default(),
            order: VecDeque::new(),
            running: None,
            receiver: Receiver::new(network),
            kernel_in: VecDeque::new(),
            kernel_out: VecDeque::new(),
            max_eager: FIRST_LIMIT,
            max_rendezvous: FIRST_LIMIT,
            takes_packets: false,
            speed: Speed::default(),
        }
    }

    /// The same, as fast as this by its counter register.
    #[must_use]
    pub fn with_speed(self, speed: Speed) -> Self {
        Self { speed, ..self }
    }

    /// Answers a host.
    pub fn answer(&mut self, request: &Request) -> Reply {
        let status = |is_good| Reply::Status(if is_good { Status::Good } else { Status::Not });
        match request {
            Request::ReadRegister { offset } => {
                self.exchange.word(*offset).map_or(Reply::Status(Status::Not), Reply::Register)
            }
            Request::WriteRegister { offset, value } => status(self.exchange.set_word(*offset, *value)),
            Request::ReadMemory { address, bytes, is_host } => {
                let bytes = self.memory(*is_host).read(*address, *bytes as usize);
                bytes.map_or(Reply::Status(Status::Not), |bytes| Reply::Memory(bytes.to_vec()))
            }
            Request::WriteMemory { address, data, is_host } => {
                let memory = self.memory(*is_host);
                let has_grown = memory.grow(*address, data.len() as u64);
                if let Some(place) = memory.read_mut(*address, data.len()).filter(|_| has_grown) {
                    place.copy_from_slice(data);
                }
                status(has_grown)
            }
            Request::Allocate { address, bytes, is_host } => {
                status(self.memory(*is_host).grow(*address, u64::from(*bytes)))
            }
            Request::Call { control, call } => match self.start(*control, *call) {
                true => Reply::Status(Status::Good),
                false => Reply::Status(Status::NoControl),
            },
            Request::Poll { control } => match self.controls.get_mut(*control as usize) {
                Some(control) if control.ended > 0 => {
                    control.ended -= 1;
                    Reply::Status(Status::Good)
                }
                Some(_) => Reply::Status(Status::Not),
                None => Reply::Status(Status::NoControl),
            },
            Request::About => Reply::Status(Status::Not),
        }
    }

    /// A memory of its own, or of its host.
    pub fn memory(&mut self, is_host: bool) -> &mut Memory {
        if is_host { &mut self.host } else { &mut self.device }
    }

    /// Starts a call on a control stream. `false`: there is no such stream.
    pub fn start(&mut self, control: u32, call: Descriptor) -> bool {
        let Some(stream) = self.controls.get_mut(control as usize) else { return false };
        stream.calls.push_back(call);
        self.order.push_back(control as usize);
        true
    }

    /// Takes a packet of the engine with this number.
    pub fn take(&mut self, sender: u32, packet: &[u8]) {
        // Nothing gets in before the host has let it.
        if self.takes_packets {
            let mut memories = Memories { device: &mut self.device, host: &mut self.host };
            self.receiver.take(sender, packet, &mut self.exchange, &mut memories);
        }
    }

    /// Gives the engine bytes of a kernel.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.kernel_in.extend(bytes);
    }

    /// What has come for kernels, with the number of the stream of each.
    pub fn take_fed(&mut self) -> Option<(u32, Vec<u8>)> {
        self.kernel_out.pop_front().or_else(|| self.receiver.kernel.pop_front())
    }

    /// Why nothing more can be understood of a peer.
    pub fn broken(&self) -> Option<(u32, &'static str)> {
        self.receiver.broken
    }

    /// The call that runs, if one does.
    pub fn running(&self) -> Option<&Descriptor> {
        self.running.as_ref().map(|running| &running.call)
    }

    /// Goes on as far as it can without anybody else. `true`: something has moved.
    pub fn advance(&mut self, fabric: &mut impl Fabric) -> bool {
        let mut moved = false;
        loop {
            let mut memories = Memories { device: &mut self.device, host: &mut self.host };
            let mut has_moved = self.receiver.take_all_held(&mut self.exchange, &mut memories);
            if self.running.is_none() {
                has_moved |= self.begin_next();
            }
            has_moved |= self.run(fabric);
            if !has_moved {
                return moved;
            }
            moved = true;
        }
    }

    /// The next call that was started runs, if there is one.
    fn begin_next(&mut self) -> bool {
        let Some(control) = self.order.pop_front() else { return false };
        let Some(call) = self.controls[control].calls.pop_front() else { return false };
        if call.operation == Operation::Config {
            let code = self.configure(&call);
            self.end(control, code, &Counted::default());
            return true;
        }
        match self.prepare(&call) {
            Ok((program, elements, rank)) => {
                self.running = Some(Running {
                    control,
                    call,
                    elements,
                    rank,
                    program,
                    step: None,
                    kept: None,
                    counted: Counted::default(),
                });
            }
            Err(code) => self.end(control, code, &Counted::default()),
        }
        true
    }

    fn configure(&mut self, call: &Descriptor) -> ReturnCode {
        let Some(function) = ConfigFunction::from_number(call.function) else { return ReturnCode::NOT_IMPLEMENTED };
        match function {
            ConfigFunction::Reset => {
                self.receiver.reset();
                (self.max_eager, self.max_rendezvous) = (FIRST_LIMIT, FIRST_LIMIT);
                self.takes_packets = false;
                self.exchange.set(map::RX_BUFFER_COUNT, 0);
                self.exchange.set(map::IS_CONFIGURED, 0);
            }
            ConfigFunction::EnablePackets => self.takes_packets = true,
            // Firmware stores it, and never looks at it.
            ConfigFunction::Timeout => {}
            ConfigFunction::MaxEagerBytes if call.count < self.exchange.get(map::RX_BUFFER_BYTES) => {
                return ReturnCode::EAGER_TOO_SMALL;
            }
            ConfigFunction::MaxEagerBytes => self.max_eager = call.count,
            ConfigFunction::MaxRendezvousBytes if call.count <= self.max_eager => {
                return ReturnCode::RENDEZVOUS_TOO_SMALL;
            }
            ConfigFunction::MaxRendezvousBytes => self.max_rendezvous = call.count,
        }
        ReturnCode::default()
    }

    /// The program of a call, its elements, and the rank of this engine.
    fn prepare(&self, call: &Descriptor) -> Result<(Program, Elements, u32), ReturnCode> {
        let has_ranks = !matches!(call.operation, Operation::Nop | Operation::Copy | Operation::Combine);
        let communicator = self.exchange.communicator(call.communicator).filter(|_| has_ranks);
        let (world, rank) =
            communicator.map_or((1, 0), |communicator| (communicator.ranks.len() as u32, communicator.local));
        let has_elements = !matches!(call.operation, Operation::Nop | Operation::Barrier);
        let elements = self.exchange.elements(call.arithmetic).filter(|_| has_elements).unwrap_or_default();
        if has_ranks && (rank >= world || call.root >= world) {
            return Err(NO_ADDRESS);
        }
        let get = |register| self.exchange.get(register);
        let setup = Setup {
            world,
            rank,
            network: self.network,
            element_bytes: elements.uncompressed as u64,
            compressed_bytes: elements.compressed as u64,
            rx_bytes: u64::from(get(map::RX_BUFFER_BYTES)),
            max_eager_bytes: u64::from(self.max_eager),
            max_rendezvous_bytes: u64::from(self.max_rendezvous),
            spares: [0, 1, 2].map(|index| self.exchange.spare_buffer(index)),
            gather_fan_in: get(map::GATHER_FAN_IN),
            gather_fan_in_bytes: get(map::GATHER_FAN_IN_BYTES),
            broadcast_flat_ranks: get(map::BROADCAST_FLAT_RANKS),
            reduce_flat_ranks: get(map::REDUCE_FLAT_RANKS),
            reduce_flat_bytes: get(map::REDUCE_FLAT_BYTES),
            faithful: self.faithful,
        };
        Ok((program(call, &setup), elements, rank))
    }

    fn end(&mut self, control: usize, code: ReturnCode, counted: &Counted) {
        self.exchange.set(map::CYCLES, counted.cycles(&self.speed));
        self.exchange.set(map::RETURN_CODE, code.0);
        self.controls[control].ended += 1;
        self.running = None;
    }

    fn run(&mut self, fabric: &mut impl Fabric) -> bool {
        let Some(mut running) = self.running.take() else { return false };
        let mut moved = false;
        let control = running.control;
        loop {
            let Some(step) = running.step.take().or_else(|| running.program.next().map(UnderWay::from)) else {
                self.end(control, ReturnCode::default(), &running.counted);
                return true;
            };
            let hops = step.hops();
            match self.take_step(&mut running, step, fabric) {
                Ok(None) => {
                    running.counted.hops += hops;
                    moved = true;
                }
                Ok(Some((step, has_moved))) => {
                    running.step = Some(step);
                    self.running = Some(running);
                    return moved || has_moved;
                }
                Err(code) => {
                    self.end(control, code, &running.counted);
                    return true;
                }
            }
        }
    }

    /// Goes on with a step. `None`: it is over; else what is left of it, and whether something has moved.
    fn take_step(
        &mut self,
        running: &mut Running,
        step: UnderWay,
        fabric: &mut impl Fabric,
    ) -> Result<Option<(UnderWay, bool)>, ReturnCode> {
        let tag = running.call.tag;
        let mut parts = Parts {
            exchange: &mut self.exchange,
            memories: Memories { device: &mut self.device, host: &mut self.host },
            kernel_in: &mut self.kernel_in,
            kernel_out: &mut self.kernel_out,
            fabric,
            network: self.network,
            communicator: running.call.communicator,
            rank: running.rank,
            elements: running.elements,
            compresses_wire: running.call.compression.wire,
            any_takes_all: running.call.operation == Operation::Recv && !self.faithful.to(7),
            counted: &mut running.counted,
        };
        let any_takes_all = parts.any_takes_all;
        let receiver = &mut self.receiver;
        let mut heard = |kind: MessageKind, from: &dyn Fn(u32) -> bool| {
            let takes = |theirs: u32| theirs == tag || (tag == ANY_TAG && any_takes_all);
            receiver.take_notice(|notice| notice.kind == kind && takes(notice.tag) && from(notice.from))
        };
        Ok(match step {
            UnderWay::Moving(mut moving) => match moving.advance(&mut parts)? {
                Progress::Done => None,
                Progress::Waits { has_moved } => Some((UnderWay::Moving(moving), has_moved)),
            },
            UnderWay::Step(step) => match step {
                Step::Move(what) => Some((UnderWay::Moving(Moving::new(what)), true)),
                Step::Say(what) => {
                    say(&mut parts, tag, &what)?;
                    None
                }
                Step::Serve { mut writes, count } => {
                    let mut has_moved = false;
                    while let Some(notice) =
                        heard(MessageKind::Address, &|from| writes.iter().any(|(rank, _)| *rank == from))
                    {
                        let at = writes.iter().position(|(rank, _)| *rank == notice.from).unwrap_or_default();
                        let (rank, place) = writes.swap_remove(at);
                        parts.write(rank, notice.address, notice.is_host, notice.tag, place, count)?;
                        has_moved = true;
                    }
                    (!writes.is_empty()).then_some((UnderWay::Step(Step::Serve { writes, count }), has_moved))
                }
                Step::KeepAddress { from } => match heard(MessageKind::Address, &|rank| rank == from) {
                    Some(notice) => {
                        running.kept = Some(notice);
                        None
                    }
                    None => Some((UnderWay::Step(step), false)),
                },
                Step::WriteBehind { to, source, behind, count } => {
                    let Some(kept) = running.kept else { return Err(NO_ADDRESS) };
                    let address = kept.address + behind * parts.elements.uncompressed as u64;
                    parts.write(to, address, kept.is_host, tag, source, count)?;
                    None
                }
                Step::AwaitDone { from } => match heard(MessageKind::Done, &|rank| rank == from) {
                    Some(done) => {
                        parts.counted.received_bytes += u64::from(done.count);
                        None
                    }
                    None => Some((UnderWay::Step(step), false)),
                },
                Step::AwaitWord { from } => match heard(MessageKind::Address, &|rank| rank == from) {
                    Some(_) => None,
                    None => Some((UnderWay::Step(step), false)),
                },
                Step::Collect { says, at_a_time } => {
                    parts.counted.hops += says.len().div_ceil(at_a_time.max(1)) as u64;
                    Some((UnderWay::Collecting { says: says.into(), under_way: Vec::new(), at_a_time }, true))
                }
                Step::Sum { ref slots, own, .. } => {
                    Some((UnderWay::Summing { slots: slots.clone(), sum: own, turns: 0, step }, true))
                }
                Step::Hang => Some((UnderWay::Step(step), false)),
                Step::Fail(code) => return Err(code),
            },
            UnderWay::Collecting { mut says, mut under_way, at_a_time } => {
                let mut has_moved = false;
                loop {
                    while under_way.len() < at_a_time
                        && let Some(next) = says.pop_front()
                    {
                        say(&mut parts, tag, &next)?;
                        under_way.push(next.to);
                        has_moved = true;
                    }
                    let Some(done) = heard(MessageKind::Done, &|rank| under_way.contains(&rank)) else { break };
                    parts.counted.received_bytes += u64::from(done.count);
                    under_way.retain(|rank| *rank != done.from);
                    has_moved = true;
                }
                (!under_way.is_empty()).then_some((UnderWay::Collecting { says, under_way, at_a_time }, has_moved))
            }
            UnderWay::Summing { mut slots, mut sum, mut turns, step } => {
                let mut has_moved = false;
                while let Some(done) = heard(MessageKind::Done, &|from| slots.iter().any(|(rank, _)| *rank == from)) {
                    let at = slots.iter().position(|(rank, _)| *rank == done.from).unwrap_or_default();
                    let (_, slot) = slots.swap_remove(at);
                    parts.counted.received_bytes += u64::from(done.count);
                    let Step::Sum { between, last, count, function, .. } = &step else { return Err(NO_ADDRESS) };
                    let to = if slots.is_empty() { *last } else { between[turns % between.len()] };
                    let what = Move {
                        count: *count,
                        first: Source::Memory(sum),
                        second: Some((Source::Memory(slot), *function)),
                        to: vec![Sink::Memory(to)],
                    };
                    Moving::new(what).advance(&mut parts)?;
                    (sum, turns, has_moved) = (to, turns + 1, true);
                }
                (!slots.is_empty()).then_some((UnderWay::Summing { slots, sum, turns, step }, has_moved))
            }
        })
    }
}

impl From<Step> for UnderWay {
    fn from(step: Step) -> Self {
        Self::Step(step)
    }
}

impl UnderWay {
    /// How often it waits for a peer until it is over; moves and collections count for themselves.
    fn hops(&self) -> u64 {
        match self {
            Self::Moving(_) | Self::Collecting { .. } => 0,
            Self::Summing { .. } => 1,
            Self::Step(step) => match step {
                Step::Serve { .. } | Step::KeepAddress { .. } | Step::AwaitDone { .. } | Step::AwaitWord { .. } => 1,
                Step::Move(_)
                | Step::Say(_)
                | Step::WriteBehind { .. }
                | Step::Collect { .. }
                | Step::Sum { .. }
                | Step::Hang
                | Step::Fail(_) => 0,
            },
        }
    }
}

/// Tells a peer an address.
fn say<F: Fabric>(parts: &mut Parts<'_, F>, tag: u32, what: &Say) -> Result<(), ReturnCode> {
    let peer = parts.exchange.rank(parts.communicator, what.to).ok_or(NO_ADDRESS)?;
    let header = Header {
        count: what.count,
        tag,
        kind: MessageKind::Address,
        is_host: what.is_host,
        address: what.address,
        ..parts.header(&peer, 0)
    };
    parts.send(&peer, &header, &[]);
    Ok(())
}

//! An engine: registers, memories, calls on its control streams, and the program of the running call.
//!
//! Owns the order of calls, and the state of peers. Firmware's programs are in `program`, the progress of the running program in `running`, data
//! movement in `mover`, and received packets in `receiver`. Read [`Engine::advance`] first.
//!
//! This file is long because registers, the queue of calls and the peers change together, in one step of an engine.

mod running;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use accl_cclo::call::{ConfigFunction, Descriptor, Operation};
use accl_cclo::control::{About, Reply, Request, Status};
use accl_cclo::memory_map as map;
use accl_cclo::memory_map::{Communicator, Network};
use accl_cclo::return_code::ReturnCode;
use accl_cclo::wire::WORD_BYTES;

use crate::exchange::Exchange;
use crate::fabric::Fabric;
use crate::memory::Memory;
use crate::mover::{EngineParts, NO_ADDRESS, Progress};
use crate::program::{Faithful, Setup, program};
use crate::receiver::{Memories, Receiver};
use crate::time::{Counted, Speed};
use running::{Prepared, Running};

/// Number of control streams of an engine.
const CONTROLS: usize = 3;
/// Function number that no config call has.
const NO_FUNCTION: u32 = u32::MAX;
/// Return code if a peer has disconnected.
const PEER_LOST: ReturnCode = ReturnCode(1 << 11);
/// Return code if packets do not reach all peers.
const NOT_SENT: ReturnCode = ReturnCode(1 << 20);
/// Return code of calls that a reset has dropped.
const DROPPED: ReturnCode = ReturnCode(1 << 31);
/// Return code for elements of size zero, or larger than the data path takes at once.
const NO_ELEMENTS: ReturnCode = ReturnCode(1 << 18);
/// Maximum bytes of memory in one reply, which takes up to five characters per byte. The original takes minutes for a reply of this size.
const MOST_READ_BYTES: u32 = 32 << 20;
/// Number of unfinished or uncollected calls on a control stream at which the original's command server blocks on the next call.
const MOST_UNCOLLECTED: usize = 3;
/// Number of such calls at which this engine refuses the next one.
const MOST_CALLS: usize = 1024;
/// One of this many messages to a kernel stream hangs over RDMA. In the reference, two of three runs hang, each with several messages.
const RACE_ODDS: u64 = 4;
/// Bytes from kernels that no call has taken, above which no more should be fed.
const MOST_FED_BYTES: usize = 16 << 20;
/// Constants of FNV-1a, which is applied to words here.
const HASH_BASIS: u64 = 0xCBF2_9CE4_8422_2325;
const HASH_PRIME: u64 = 0x100_0000_01B3;
/// Firmware's limits on eager and rendezvous messages before a host sets them, in bytes.
const FIRST_LIMIT: u32 = 32 << 10;

/// Identifier of a host, unique among all hosts that the engine has ever had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Caller(pub u64);

/// A call, and the host that started it, or `None` if that host has disconnected.
type Started = (Option<Caller>, Descriptor);

/// End of a call: the host that started the call, and the values of the end registers.
#[derive(Clone, Copy)]
struct CallEnd {
    caller: Option<Caller>,
    code: ReturnCode,
    cycles: u32,
    /// Host that has reset the engine since. This end is not reported to that host, which receives only the end of its reset.
    hidden_from: Option<Caller>,
}

/// Control stream: its waiting calls, and the ends that no host has collected.
#[derive(Default)]
struct Control {
    calls: VecDeque<Started>,
    ended: VecDeque<CallEnd>,
}

/// Ends that are reported to a polling host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// The host's own ends first. If none of its calls is in progress, the ends of all other hosts follow. A client may poll over another connection
    /// than the one on which it starts calls.
    OfAll,
    /// The host's own ends first. If none of its calls is in progress, the ends of disconnected hosts follow.
    OfGone,
    /// The host's own ends only.
    Own,
}

/// Returns whether a register describes the end of the last call.
fn is_of_ends(offset: u32) -> bool {
    [map::RETURN_CODE, map::CYCLES].iter().any(|register| register.offset == offset)
}

/// Whether the engines from which the host wants packets are connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Peers {
    /// All peers are connected, or the code that runs the engine does not track peers.
    #[default]
    There,
    /// Some peers are not connected yet. The call that lets packets in does not end before they are.
    Awaited,
    /// The wait for peers has timed out. The call that lets packets in ends with an error.
    Missing,
}

/// An emulated engine.
pub struct Engine {
    network: Network,
    faithful: Faithful,
    exchange: Exchange,
    device: Memory,
    host: Memory,
    controls: [Control; CONTROLS],
    /// Control stream of each waiting call, in the order in which the calls were started.
    order: VecDeque<usize>,
    running: Option<Running>,
    /// Host that started the running call.
    runs_for: Option<Caller>,
    /// Last end reported to each host. The end registers return it to that host until the host starts another call, since all hosts share the
    /// registers.
    reported: BTreeMap<Caller, CallEnd>,
    receiver: Receiver,
    kernel_in: VecDeque<u8>,
    kernel_out: VecDeque<(u32, Vec<u8>)>,
    max_eager: u32,
    max_rendezvous: u32,
    takes_packets: bool,
    peers: Peers,
    /// Sessions of engines that have disconnected.
    lost: BTreeSet<u32>,
    is_hung: bool,
    session: Option<u32>,
    /// Job that the engine works for, and the job from the next reset on. Zero means that the host has named no job.
    job: u32,
    next_job: u32,
    /// Number of packets of other jobs that have arrived since the last reset, by sender.
    strays: BTreeMap<u32, u64>,
    /// Number of the next packet to each session.
    next_packet: BTreeMap<u32, u32>,
    speed: Speed,
    /// State of the random number generator.
    random: u64,
}

impl Engine {
    /// Creates an engine on this network that reproduces the given defects.
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
            runs_for: None,
            reported: BTreeMap::new(),
            receiver: Receiver::new(network),
            kernel_in: VecDeque::new(),
            kernel_out: VecDeque::new(),
            max_eager: FIRST_LIMIT,
            max_rendezvous: FIRST_LIMIT,
            takes_packets: false,
            peers: Peers::There,
            lost: BTreeSet::new(),
            is_hung: false,
            session: None,
            job: 0,
            next_job: 0,
            strays: BTreeMap::new(),
            next_packet: BTreeMap::new(),
            speed: Speed::default(),
            random: 0,
        }
    }

    /// Sets the session by which other engines reach this one. Without it, the session that the host writes to the communicator is used.
    #[must_use]
    pub fn with_session(self, session: u32) -> Self {
        Self { session: Some(session), ..self }
    }

    /// Sets the seed of the random number generator.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { random: seed, ..self }
    }

    /// Sets the speed on which the counter register is based.
    #[must_use]
    pub fn with_speed(self, speed: Speed) -> Self {
        Self { speed, ..self }
    }

    /// Answers a request of the engine's only host.
    pub fn answer(&mut self, request: &Request) -> Reply {
        self.answer_to(Caller::default(), Ends::OfAll, request)
    }

    /// Answers a request of a host, to which the given ends are reported.
    pub fn answer_to(&mut self, caller: Caller, ends: Ends, request: &Request) -> Reply {
        let status = |is_good| Reply::Status(if is_good { Status::Good } else { Status::Not });
        match request {
            Request::ReadRegister { offset } => {
                let word = self.reported_to(caller, *offset).or_else(|| self.exchange.word(*offset));
                word.map_or(Reply::Status(Status::Not), Reply::Register)
            }
            Request::WriteRegister { offset, value } => {
                if is_of_ends(*offset) {
                    self.reported.clear();
                }
                status(self.exchange.set_word(*offset, *value))
            }
            Request::ReadMemory { address, bytes, is_host } => {
                let fits = *bytes <= MOST_READ_BYTES;
                let bytes = self.memory(*is_host).read(*address, *bytes as usize).filter(|_| fits);
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
            Request::Call { control, call } => match self.start_of(caller, *control, *call) {
                true => Reply::Status(Status::Good),
                false => Reply::Status(Status::NoControl),
            },
            Request::Poll { control } => match self.take_end(caller, ends, *control) {
                Some(Some(end)) => {
                    self.reported.insert(caller, end);
                    Reply::Status(Status::Good)
                }
                Some(None) => Reply::Status(Status::Not),
                None => Reply::Status(Status::NoControl),
            },
            // The engine knows neither its rank nor its owner: see [`Engine::about`].
            Request::About | Request::Claim { .. } => Reply::Status(Status::Not),
        }
    }

    /// Returns the engine's self-description as rank `rank` of `ranks`.
    pub fn about(&self, rank: u32, ranks: u32) -> About {
        About {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ranks,
            rank,
            network: self.network,
            hazards: self.faithful.numbers(),
            clock_hz: self.speed.clock_hz,
            link_bits_per_second: self.speed.link_bits_per_second,
            hop_ps: self.speed.hop_ps,
            missing: Vec::new(),
            trouble: String::new(),
            owner: String::new(),
            owner_s: 0,
            process: 0,
            served: [rank, 1],
        }
    }

    /// Returns the host memory or the device memory.
    pub fn memory(&mut self, is_host: bool) -> &mut Memory {
        if is_host { &mut self.host } else { &mut self.device }
    }

    /// Removes and returns the next end to report to a host: `Some(None)` if there is none, `None` if there is no such control stream.
    fn take_end(&mut self, caller: Caller, ends: Ends, control: u32) -> Option<Option<CallEnd>> {
        let of_stream = control as usize;
        let runs =
            self.runs_for == Some(caller) && self.running.as_ref().is_some_and(|running| running.control == of_stream);
        let stream = self.controls.get_mut(of_stream)?;
        let is_under_way = runs || stream.calls.iter().any(|(started_by, _)| *started_by == Some(caller));
        let own = stream.ended.iter().position(|end| end.caller == Some(caller));
        let place = own.or_else(|| match ends {
            // The end would be taken for the end of the host's own call.
            _ if is_under_way => None,
            Ends::OfAll => stream.ended.iter().position(|end| end.hidden_from != Some(caller)),
            Ends::OfGone => stream.ended.iter().position(|end| end.caller.is_none()),
            Ends::Own => None,
        });
        Some(place.and_then(|place| stream.ended.remove(place)))
    }

    /// Returns the value of an end register for the end last reported to a host.
    fn reported_to(&self, caller: Caller, offset: u32) -> Option<u32> {
        let end = self.reported.get(&caller)?;
        let registers = [(map::RETURN_CODE, end.code.0), (map::CYCLES, end.cycles)];
        registers.into_iter().find(|(register, _)| register.offset == offset).map(|(_, word)| word)
    }

    /// Discards a host's ends, because the host will not ask for them or is answered no more. Also forgets the host.
    pub fn discard_ends(&mut self, caller: Caller) {
        self.controls.iter_mut().for_each(|control| control.ended.retain(|end| end.caller != Some(caller)));
        self.forget(caller);
    }

    /// Forgets a host that has disconnected; its calls and ends have no owner from then on.
    pub fn forget(&mut self, caller: Caller) {
        self.reported.remove(&caller);
        self.runs_for.take_if(|started_by| *started_by == caller);
        for control in &mut self.controls {
            let calls = control.calls.iter_mut().map(|(started_by, _)| started_by);
            for of in calls.chain(control.ended.iter_mut().map(|end| &mut end.caller)) {
                of.take_if(|of| *of == caller);
            }
        }
    }

    /// Returns whether there is a control stream with this number.
    pub fn has_control(&self, control: u32) -> bool {
        (control as usize) < CONTROLS
    }

    /// Starts a call on a control stream. Returns `false` if there is no such stream, or if too many calls are on it.
    pub fn start(&mut self, control: u32, call: Descriptor) -> bool {
        self.start_of(Caller::default(), control, call)
    }

    fn start_of(&mut self, caller: Caller, control: u32, call: Descriptor) -> bool {
        if self.has_control(control) && call.sets(ConfigFunction::Reset) && !self.faithful.to(13) {
            self.drop_calls(caller);
        }
        let Some(stream) = self.controls.get_mut(control as usize) else { return false };
        let runs = self.running.as_ref().is_some_and(|running| running.control == control as usize);
        // Uncollected ends of other hosts do not count against this host.
        let is_its_own = |end: &&CallEnd| end.caller.is_none_or(|of| of == caller);
        let ended = stream.ended.iter().filter(is_its_own).count();
        let uncollected = stream.calls.len() + ended + usize::from(runs);
        if uncollected >= MOST_UNCOLLECTED && self.faithful.to(9) {
            self.is_hung = true;
            return true;
        }
        if uncollected >= MOST_CALLS {
            return false;
        }
        self.reported.remove(&caller);
        stream.calls.push_back((Some(caller), call));
        self.order.push_back(control as usize);
        true
    }

    /// Starts a call whose words have no meaning. The call waits for its turn like any other, and ends with the return code for an operation that
    /// firmware does not have. The original was seen to do so for an unknown operation. Unknown flags are treated in the same way, not ignored.
    pub fn start_unknown(&mut self, caller: Caller, control: u32) -> bool {
        self.start_of(
            caller,
            control,
            Descriptor { function: NO_FUNCTION, ..Descriptor::config(ConfigFunction::Reset, 0) },
        )
    }

    /// Drops all calls, because host `by` resets the engine. Other hosts receive their calls' ends with the code [`DROPPED`], and `by` receives only
    /// the end of its reset. Uncollected ends of `by` and of disconnected hosts are discarded, since they would be taken for the ends of later calls.
    fn drop_calls(&mut self, by: Caller) {
        let running = self.running.take().map(|running| (running.control, self.runs_for.take()));
        let waiting = std::mem::take(&mut self.order).into_iter();
        let waiting = waiting.filter_map(|control| Some((control, self.controls[control].calls.pop_front()?.0)));
        let dropped: Vec<(usize, Option<Caller>)> = running.into_iter().chain(waiting).collect();
        for (control, caller) in dropped {
            self.controls[control].ended.push_back(CallEnd { caller, code: DROPPED, cycles: 0, hidden_from: None });
        }
        for control in &mut self.controls {
            control.ended.retain(|end| end.caller.is_some_and(|caller| caller != by));
            control.ended.iter_mut().for_each(|end| end.hidden_from = Some(by));
        }
    }

    /// Takes a packet of the engine with number `sender`.
    pub fn take(&mut self, sender: u32, packet: &[u8]) {
        // Packets are dropped until the host lets them in.
        if self.takes_packets {
            let mut memories = Memories { device: &mut self.device, host: &mut self.host };
            self.receiver.take(sender, packet, &mut self.exchange, &mut memories);
        }
    }

    /// Gives the engine bytes from a kernel.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.kernel_in.extend(bytes);
    }

    /// Removes and returns the next bytes for a kernel, with the number of their stream.
    pub fn take_fed(&mut self) -> Option<(u32, Vec<u8>)> {
        self.kernel_out.pop_front().or_else(|| self.receiver.kernel.pop_front())
    }

    /// Returns why calls of this engine fail or do not end; empty if no fault is known.
    pub fn trouble(&self) -> String {
        let lost = self.lost.iter().map(|sender| format!("rank {sender} disconnected"));
        let broken = self.receiver.broken().map(|(sender, why)| format!("cannot receive from rank {sender}: {why}"));
        let strays = self.strays.iter().map(|(sender, count)| {
            format!(
                "packets of another job arrived from rank {sender} and were dropped, {count} in total; reset the devices of all ranks"
            )
        });
        broken.chain(lost).chain(strays).collect::<Vec<_>>().join("; ")
    }

    /// Returns the job that the engine works for; zero if the host has named none.
    pub fn job(&self) -> u32 {
        self.job
    }

    /// Sets the job that the engine works for from the next reset on. A running call belongs to the job before.
    pub fn set_next_job(&mut self, job: u32) {
        self.next_job = job;
    }

    /// Ends the job from the next reset on, because its host has left; at once if no packets are let in.
    pub fn end_job(&mut self) {
        self.next_job = 0;
        if !self.takes_packets {
            self.job = 0;
        }
    }

    /// Counts a packet of another job from engine `sender`, which was dropped.
    pub fn miss(&mut self, sender: u32) {
        if self.takes_packets {
            *self.strays.entry(sender).or_default() += 1;
        }
    }

    /// Sets whether the peers are connected. By default they are.
    pub fn set_peers(&mut self, peers: Peers) {
        self.peers = peers;
    }

    /// Returns whether the peers are connected.
    pub fn peers(&self) -> Peers {
        self.peers
    }

    /// Returns whether the host has caused a hang from which the original does not recover. Such a host is answered no more.
    pub fn is_hung(&self) -> bool {
        self.is_hung
    }

    /// Returns whether the next call waits for peers to connect.
    pub fn awaits_peers(&self) -> bool {
        let next = self.order.front().and_then(|&control| self.controls[control].calls.front());
        self.peers == Peers::Awaited
            && self.running.is_none()
            && next.is_some_and(|(_, call)| call.sets(ConfigFunction::EnablePackets))
    }

    /// Marks engine `sender` as disconnected. A call that waits for it ends with an error.
    pub fn lose(&mut self, sender: u32) {
        self.lost.insert(sender);
        self.receiver.forget(sender, &mut self.exchange);
    }

    /// Marks engine `sender` as connected again, with a new stream of packets.
    pub fn find(&mut self, sender: u32) {
        if self.lost.remove(&sender) {
            self.receiver.forget(sender, &mut self.exchange);
        }
    }

    /// Returns whether more packets of engine `sender` should be taken now. If far more are taken, the engine ignores the sender from then on.
    pub fn has_room(&self, sender: u32) -> bool {
        self.receiver.has_room(sender)
    }

    /// Returns the number of packets of engine `sender` that wait for an rx buffer.
    pub fn held(&self, sender: u32) -> usize {
        self.receiver.held(sender)
    }

    /// Returns whether more bytes from kernels should be fed now.
    pub fn is_hungry(&self) -> bool {
        self.kernel_in.len() < MOST_FED_BYTES
    }

    /// Returns the running call, or `None`.
    pub fn running(&self) -> Option<&Descriptor> {
        self.running.as_ref().map(|running| &running.call)
    }

    /// Advances as far as possible without input from others. Returns `true` if anything has moved.
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

    /// Begins the next waiting call, if there is one.
    fn begin_next(&mut self) -> bool {
        if self.awaits_peers() {
            return false;
        }
        let Some(control) = self.order.pop_front() else { return false };
        let Some((started_by, call)) = self.controls[control].calls.pop_front() else { return false };
        self.runs_for = started_by;
        if call.operation == Operation::Config {
            let code = self.configure(&call);
            self.end(control, code, &Counted::default());
            return true;
        }
        match self.prepare(&call) {
            Ok(prepared) => self.running = Some(Running::new(control, call, prepared)),
            Err(code) => self.end(control, code, &Counted::default()),
        }
        true
    }

    fn configure(&mut self, call: &Descriptor) -> ReturnCode {
        let Some(function) = ConfigFunction::from_number(call.function) else { return ReturnCode::NOT_IMPLEMENTED };
        match function {
            ConfigFunction::Reset => {
                self.receiver.reset();
                self.job = self.next_job;
                self.strays.clear();
                (self.max_eager, self.max_rendezvous) = (FIRST_LIMIT, FIRST_LIMIT);
                self.takes_packets = false;
                self.exchange.set(map::RX_BUFFER_COUNT, 0);
                self.exchange.set(map::IS_CONFIGURED, 0);
            }
            ConfigFunction::EnablePackets if self.peers != Peers::There => return NOT_SENT,
            ConfigFunction::EnablePackets => self.takes_packets = true,
            // Firmware stores the value and never uses it.
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

    fn prepare(&mut self, call: &Descriptor) -> Result<Prepared, ReturnCode> {
        let has_ranks = has_ranks(call);
        let communicator = self.exchange.communicator(call.communicator).filter(|_| has_ranks);
        let (world, rank) =
            communicator.as_ref().map_or((1, 0), |communicator| (communicator.ranks.len() as u32, communicator.local));
        let identified = communicator.filter(|_| !self.faithful.to(12));
        let communicator_id = identified
            .map(|communicator| communicator_id(&self.exchange, call.communicator, &communicator, self.session));
        let has_elements = !matches!(call.operation, Operation::Nop | Operation::Barrier);
        let elements = self.exchange.elements(call.arithmetic).filter(|_| has_elements).unwrap_or_default();
        let sizes = [elements.uncompressed, elements.compressed];
        if has_elements && call.count > 0 && sizes.iter().any(|size| !(1..=WORD_BYTES).contains(size)) {
            return Err(NO_ELEMENTS);
        }
        if has_ranks && (rank >= world || call.root >= world) {
            return Err(NO_ADDRESS);
        }
        let is_race = call.operation == Operation::Send && call.streams.result && self.faithful.to(10);
        let loses_race = is_race && draw(&mut self.random).is_multiple_of(RACE_ODDS);
        let get = |register| self.exchange.get(register);
        let setup = Setup {
            world,
            rank,
            network: self.network,
            element_bytes: elements.uncompressed as u64,
            compressed_bytes: elements.compressed as u64,
            rx_bytes: u64::from(get(map::RX_BUFFER_BYTES)),
            rx_count: get(map::RX_BUFFER_COUNT),
            max_eager_bytes: u64::from(self.max_eager),
            max_rendezvous_bytes: u64::from(self.max_rendezvous),
            spares: [0, 1, 2].map(|index| self.exchange.spare_buffer(index)),
            gather_fan_in: get(map::GATHER_FAN_IN),
            gather_fan_in_bytes: get(map::GATHER_FAN_IN_BYTES),
            broadcast_flat_ranks: get(map::BROADCAST_FLAT_RANKS),
            reduce_flat_ranks: get(map::REDUCE_FLAT_RANKS),
            reduce_flat_bytes: get(map::REDUCE_FLAT_BYTES),
            faithful: self.faithful,
            loses_race,
        };
        Ok(Prepared { program: program(call, &setup), elements, rank, communicator_id })
    }

    fn end(&mut self, control: usize, code: ReturnCode, counted: &Counted) {
        let cycles = counted.cycles(&self.speed);
        self.exchange.set(map::CYCLES, cycles);
        self.exchange.set(map::RETURN_CODE, code.0);
        self.controls[control].ended.push_back(CallEnd {
            caller: self.runs_for.take(),
            code,
            cycles,
            hidden_from: None,
        });
        self.running = None;
    }

    fn run(&mut self, fabric: &mut impl Fabric) -> bool {
        let Some(mut running) = self.running.take() else { return false };
        let mut counted = running.counted;
        let mut parts = EngineParts {
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
            communicator_id: running.communicator_id,
            next_packet: &mut self.next_packet,
            receiver: &mut self.receiver,
            counted: &mut counted,
        };
        let progress = running.advance(&mut parts);
        running.counted = counted;
        let (control, code) = match progress {
            Ok(Progress::Waits { has_moved }) => match self.why_in_vain(&running.call) {
                Some(code) if !has_moved => (running.control, code),
                _ => {
                    self.running = Some(running);
                    return has_moved;
                }
            },
            Ok(Progress::Done) => (running.control, ReturnCode::default()),
            Err(code) => (running.control, code),
        };
        self.end(control, code, &running.counted);
        true
    }

    /// Returns the code with which a waiting call ends if a peer that it needs has disconnected or sends invalid packets.
    fn why_in_vain(&self, call: &Descriptor) -> Option<ReturnCode> {
        let is_quiet = self.lost.is_empty() && self.receiver.broken().next().is_none();
        let communicator = self.exchange.communicator(call.communicator).filter(|_| !is_quiet && has_ranks(call))?;
        let is_one = matches!(call.operation, Operation::Send | Operation::Recv);
        let ranks = (0u32..).zip(&communicator.ranks).filter(|(rank, _)| !is_one || *rank == call.root);
        let sessions: BTreeSet<u32> = ranks.map(|(_, entry)| entry.session).collect();
        if self.receiver.broken().any(|(sender, _)| sessions.contains(&sender)) {
            return Some(ReturnCode::WRONG_SEQUENCE);
        }
        (!self.lost.is_disjoint(&sessions)).then_some(PEER_LOST)
    }
}

/// Returns the next number of the SplitMix64 generator.
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ *state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

/// Returns whether a call involves several ranks.
fn has_ranks(call: &Descriptor) -> bool {
    !matches!(call.operation, Operation::Nop | Operation::Copy | Operation::Combine | Operation::Config)
}

/// Returns an identifier that distinguishes a communicator from others of the same engines. All its ranks compute the same value. It depends on their
/// sessions, and on how many communicators of the same ranks each rank has laid out before this one.
fn communicator_id(exchange: &Exchange, at: u32, communicator: &Communicator, own: Option<u32>) -> u32 {
    let who = |of: &Communicator| of.ranks.iter().map(|rank| (rank.ip, rank.port, rank.session)).collect::<Vec<_>>();
    let is_same = |other: &Communicator| other.local == communicator.local && who(other) == who(communicator);
    let ranks = communicator.ranks.len() as u32;
    // The table of rx buffers is skipped, since its content changes with every message.
    let begin = exchange.rx_buffers_end().clamp(map::TABLES_BEGIN, map::TABLES_END);
    let before = (begin..at.min(map::TABLES_END)).step_by(4).filter(|&offset| {
        exchange.word(offset) == Some(ranks) && exchange.communicator(offset).is_some_and(|other| is_same(&other))
    });
    // A rank never sends to itself, so a host may have left out the session of its own rank.
    let sessions = (0u32..).zip(&communicator.ranks).map(|(rank, entry)| match own {
        Some(own) if rank == communicator.local => own,
        _ => entry.session,
    });
    let words = [before.count() as u32, ranks].into_iter().chain(sessions);
    let hash = words.fold(HASH_BASIS, |hash, word| (hash ^ u64::from(word)).wrapping_mul(HASH_PRIME));
    // Zero means that a header names no communicator.
    ((hash ^ hash >> 32) as u32).max(1)
}

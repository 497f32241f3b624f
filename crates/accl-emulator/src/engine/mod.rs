//! An engine: registers, memories, calls on its control streams, and the program of the one that runs.
//!
//! Owns the order of calls and which peers there are. Firmware's programs are in `program`, how far the running one has come in `running`, data
//! in `mover`, what comes in `receiver`. Read [`Engine::advance`] first.

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
use crate::mover::{NO_ADDRESS, Parts, Progress};
use crate::program::{Faithful, Setup, program};
use crate::receiver::{Memories, Receiver};
use crate::time::{Counted, Speed};
use running::{Prepared, Running};

/// Control streams of an engine.
const CONTROLS: usize = 3;
/// A function of a config call that there is not.
const NO_FUNCTION: u32 = u32::MAX;
/// A peer has gone.
const NOT_HEARD: ReturnCode = ReturnCode(1 << 11);
/// Packets do not reach all peers.
const NOT_SENT: ReturnCode = ReturnCode(1 << 20);
/// A reset has come.
const DROPPED: ReturnCode = ReturnCode(1 << 31);
/// Elements of no size, or of more than the data path takes at once.
const NO_ELEMENTS: ReturnCode = ReturnCode(1 << 18);
/// Most bytes of a memory in one reply, which has up to five characters for each. The original takes minutes for as many.
const MOST_READ_BYTES: u32 = 32 << 20;
/// Calls of a control stream whose end nobody has asked for, with which the command server of the original blocks at the next.
const MOST_UNCOLLECTED: usize = 3;
/// The same, before no more are taken.
const MOST_CALLS: usize = 1024;
/// One message of so many to a kernel stream hangs over RDMA. The reference has two of three runs, of several messages each.
const RACE_ODDS: u64 = 4;
/// Bytes of kernels that no call has taken, before no more should be fed.
const MOST_FED_BYTES: usize = 16 << 20;
/// FNV-1a, which takes words here.
const HASH_BASIS: u64 = 0xCBF2_9CE4_8422_2325;
const HASH_PRIME: u64 = 0x100_0000_01B3;
/// Firmware's limits before anybody has set them.
const FIRST_LIMIT: u32 = 32 << 10;

/// One of the hosts of an engine, among all that it has ever had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Caller(pub u64);

/// A call, and who started it, unless that one has gone.
type Started = (Option<Caller>, Descriptor);

/// How a call has ended: whose it was, and what the registers say of it.
#[derive(Clone, Copy)]
struct End {
    caller: Option<Caller>,
    code: ReturnCode,
    cycles: u32,
    /// Who has reset the engine since, and is told of its reset alone.
    hidden_from: Option<Caller>,
}

/// A control stream: the calls on it, and those that have ended and that nobody has asked for.
#[derive(Default)]
struct Control {
    calls: VecDeque<Started>,
    ended: VecDeque<End>,
}

/// Which ends a host is told of that asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// Its own first; if none of its calls is under way, those of all others after them: a client may ask over another connection than it calls
    /// by.
    OfAll,
    /// Its own first; if none of its calls is under way, those of hosts that have gone.
    OfGone,
    /// Its own.
    Own,
}

/// Whether a register says how the last call has ended.
fn is_of_ends(offset: u32) -> bool {
    [map::RETURN_CODE, map::CYCLES].iter().any(|register| register.offset == offset)
}

/// Whether the engines are there that the host wants packets from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Peers {
    /// They are, or who runs the engine does not know.
    #[default]
    There,
    /// Not all yet: the call that lets packets in does not end before.
    Awaited,
    /// They were waited for long enough: that call ends with an error.
    Missing,
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
    /// Who started it.
    runs_for: Option<Caller>,
    /// What each host was told of last, which the registers say to it until it starts another call: they are one for all hosts.
    told: BTreeMap<Caller, End>,
    receiver: Receiver,
    kernel_in: VecDeque<u8>,
    kernel_out: VecDeque<(u32, Vec<u8>)>,
    max_eager: u32,
    max_rendezvous: u32,
    takes_packets: bool,
    peers: Peers,
    /// Sessions of engines that have gone.
    lost: BTreeSet<u32>,
    is_deaf: bool,
    session: Option<u32>,
    /// The job that the engine works for, and the one from the next reset on; zero: its host has said nothing of jobs.
    job: u32,
    next_job: u32,
    /// How many packets of other jobs have come since the last reset, by sender.
    strays: BTreeMap<u32, u64>,
    /// Number of the next packet to each session.
    next_packet: BTreeMap<u32, u32>,
    speed: Speed,
    /// State of the generator of what only chance decides.
    random: u64,
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
            runs_for: None,
            told: BTreeMap::new(),
            receiver: Receiver::new(network),
            kernel_in: VecDeque::new(),
            kernel_out: VecDeque::new(),
            max_eager: FIRST_LIMIT,
            max_rendezvous: FIRST_LIMIT,
            takes_packets: false,
            peers: Peers::There,
            lost: BTreeSet::new(),
            is_deaf: false,
            session: None,
            job: 0,
            next_job: 0,
            strays: BTreeMap::new(),
            next_packet: BTreeMap::new(),
            speed: Speed::default(),
            random: 0,
        }
    }

    /// The same, with the session that others reach it by. Who says nothing has the one that its host has written down.
    #[must_use]
    pub fn with_session(self, session: u32) -> Self {
        Self { session: Some(session), ..self }
    }

    /// The same, with chance from this seed.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        Self { random: seed, ..self }
    }

    /// The same, as fast as this by its counter register.
    #[must_use]
    pub fn with_speed(self, speed: Speed) -> Self {
        Self { speed, ..self }
    }

    /// Answers a host that has no other beside it.
    pub fn answer(&mut self, request: &Request) -> Reply {
        self.answer_to(Caller::default(), Ends::OfAll, request)
    }

    /// Answers a host, who is told of these ends.
    pub fn answer_to(&mut self, caller: Caller, ends: Ends, request: &Request) -> Reply {
        let status = |is_good| Reply::Status(if is_good { Status::Good } else { Status::Not });
        match request {
            Request::ReadRegister { offset } => {
                let word = self.told_to(caller, *offset).or_else(|| self.exchange.word(*offset));
                word.map_or(Reply::Status(Status::Not), Reply::Register)
            }
            Request::WriteRegister { offset, value } => {
                if is_of_ends(*offset) {
                    self.told.clear();
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
                    self.told.insert(caller, end);
                    Reply::Status(Status::Good)
                }
                Some(None) => Reply::Status(Status::Not),
                None => Reply::Status(Status::NoControl),
            },
            // Which of how many engines it is and who has it, it does not know: see [`Engine::about`].
            Request::About | Request::Claim { .. } => Reply::Status(Status::Not),
        }
    }

    /// What it says of itself as this one of so many ranks.
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

    /// A memory of its own, or of its host.
    pub fn memory(&mut self, is_host: bool) -> &mut Memory {
        if is_host { &mut self.host } else { &mut self.device }
    }

    /// The next end that a host is told of, if there is one; `None`: there is no such control stream.
    fn take_end(&mut self, caller: Caller, ends: Ends, control: u32) -> Option<Option<End>> {
        let of_stream = control as usize;
        let runs =
            self.runs_for == Some(caller) && self.running.as_ref().is_some_and(|running| running.control == of_stream);
        let stream = self.controls.get_mut(of_stream)?;
        let is_under_way = runs || stream.calls.iter().any(|(started_by, _)| *started_by == Some(caller));
        let own = stream.ended.iter().position(|end| end.caller == Some(caller));
        let place = own.or_else(|| match ends {
            // It would be taken for the end of that call.
            _ if is_under_way => None,
            Ends::OfAll => stream.ended.iter().position(|end| end.hidden_from != Some(caller)),
            Ends::OfGone => stream.ended.iter().position(|end| end.caller.is_none()),
            Ends::Own => None,
        });
        Some(place.and_then(|place| stream.ended.remove(place)))
    }

    /// What a register says of the end that a host was told of last.
    fn told_to(&self, caller: Caller, offset: u32) -> Option<u32> {
        let end = self.told.get(&caller)?;
        let registers = [(map::RETURN_CODE, end.code.0), (map::CYCLES, end.cycles)];
        registers.into_iter().find(|(register, _)| register.offset == offset).map(|(_, word)| word)
    }

    /// A host will not ask for its ends, or is not answered: they are nobody's any more.
    pub fn discard_ends(&mut self, caller: Caller) {
        self.controls.iter_mut().for_each(|control| control.ended.retain(|end| end.caller != Some(caller)));
        self.forget(caller);
    }

    /// A host asks no more.
    pub fn forget(&mut self, caller: Caller) {
        self.told.remove(&caller);
        self.runs_for.take_if(|started_by| *started_by == caller);
        for control in &mut self.controls {
            let calls = control.calls.iter_mut().map(|(started_by, _)| started_by);
            for of in calls.chain(control.ended.iter_mut().map(|end| &mut end.caller)) {
                of.take_if(|of| *of == caller);
            }
        }
    }

    /// Whether there is such a control stream.
    pub fn has_control(&self, control: u32) -> bool {
        (control as usize) < CONTROLS
    }

    /// Starts a call on a control stream. `false`: there is no such stream, or more calls are on it than anybody waits for.
    pub fn start(&mut self, control: u32, call: Descriptor) -> bool {
        self.start_of(Caller::default(), control, call)
    }

    fn start_of(&mut self, caller: Caller, control: u32, call: Descriptor) -> bool {
        if self.has_control(control) && call.sets(ConfigFunction::Reset) && !self.faithful.to(13) {
            self.drop_calls(caller);
        }
        let Some(stream) = self.controls.get_mut(control as usize) else { return false };
        let runs = self.running.as_ref().is_some_and(|running| running.control == control as usize);
        // Ends that others have left uncollected are none of this host's.
        let is_its_own = |end: &&End| end.caller.is_none_or(|of| of == caller);
        let ended = stream.ended.iter().filter(is_its_own).count();
        let uncollected = stream.calls.len() + ended + usize::from(runs);
        if uncollected >= MOST_UNCOLLECTED && self.faithful.to(9) {
            self.is_deaf = true;
            return true;
        }
        if uncollected >= MOST_CALLS {
            return false;
        }
        self.told.remove(&caller);
        stream.calls.push_back((Some(caller), call));
        self.order.push_back(control as usize);
        true
    }

    /// Starts a call whose words mean nothing: it has its turn as any other, and ends with the return code of what firmware does not have. The
    /// original was seen to do so with an unknown operation; flags that there are not are treated in the same way, rather than left out.
    pub fn start_unknown(&mut self, caller: Caller, control: u32) -> bool {
        self.start_of(
            caller,
            control,
            Descriptor { function: NO_FUNCTION, ..Descriptor::config(ConfigFunction::Reset, 0) },
        )
    }

    /// Ends all calls, since this host resets the engine. It hears of its reset alone, and others that theirs have not been done. Ends that it, or a
    /// host that has gone, has not asked for would be taken for those of later calls.
    fn drop_calls(&mut self, by: Caller) {
        let running = self.running.take().map(|running| (running.control, self.runs_for.take()));
        let waiting = std::mem::take(&mut self.order).into_iter();
        let waiting = waiting.filter_map(|control| Some((control, self.controls[control].calls.pop_front()?.0)));
        let dropped: Vec<(usize, Option<Caller>)> = running.into_iter().chain(waiting).collect();
        for (control, caller) in dropped {
            self.controls[control].ended.push_back(End { caller, code: DROPPED, cycles: 0, hidden_from: None });
        }
        for control in &mut self.controls {
            control.ended.retain(|end| end.caller.is_some_and(|caller| caller != by));
            control.ended.iter_mut().for_each(|end| end.hidden_from = Some(by));
        }
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

    /// Why calls of this engine fail, or do not go on; empty if nothing is known to be wrong.
    pub fn trouble(&self) -> String {
        let lost = self.lost.iter().map(|sender| format!("rank {sender} has gone"));
        let broken = self.receiver.broken().map(|(sender, why)| format!("rank {sender} is not understood: {why}"));
        let strays = self.strays.iter().map(|(sender, count)| {
            format!(
                "packets of another job have come from rank {sender}, {count} in all, and went nowhere; reset the devices of all ranks"
            )
        });
        broken.chain(lost).chain(strays).collect::<Vec<_>>().join("; ")
    }

    /// The job that it works for.
    pub fn job(&self) -> u32 {
        self.job
    }

    /// From the next reset on it works for this job. A call that is under way is one of the job before.
    pub fn set_next_job(&mut self, job: u32) {
        self.next_job = job;
    }

    /// Nobody says any more which job it works for.
    pub fn end_job(&mut self) {
        self.next_job = 0;
        if !self.takes_packets {
            self.job = 0;
        }
    }

    /// A packet of another job came from the engine with this number, and went nowhere.
    pub fn miss(&mut self, sender: u32) {
        if self.takes_packets {
            *self.strays.entry(sender).or_default() += 1;
        }
    }

    /// Says whether its peers are there. Who says nothing has them all from the beginning.
    pub fn set_peers(&mut self, peers: Peers) {
        self.peers = peers;
    }

    /// Whether its peers are there.
    pub fn peers(&self) -> Peers {
        self.peers
    }

    /// Its host has done what an original does not come back from, and is answered no more.
    pub fn is_deaf(&self) -> bool {
        self.is_deaf
    }

    /// A call waits for peers to be there.
    pub fn awaits_peers(&self) -> bool {
        let next = self.order.front().and_then(|&control| self.controls[control].calls.front());
        self.peers == Peers::Awaited
            && self.running.is_none()
            && next.is_some_and(|(_, call)| call.sets(ConfigFunction::EnablePackets))
    }

    /// The engine with this number has gone: a call that waits for it ends with an error.
    pub fn lose(&mut self, sender: u32) {
        self.lost.insert(sender);
        self.receiver.forget(sender, &mut self.exchange);
    }

    /// It is back, and begins anew.
    pub fn find(&mut self, sender: u32) {
        if self.lost.remove(&sender) {
            self.receiver.forget(sender, &mut self.exchange);
        }
    }

    /// Whether more packets of this engine should be taken now. Too many more, and it is not listened to any more.
    pub fn has_room(&self, sender: u32) -> bool {
        self.receiver.has_room(sender)
    }

    /// Packets of this engine that wait for an rx buffer.
    pub fn held(&self, sender: u32) -> usize {
        self.receiver.held(sender)
    }

    /// Whether more bytes of kernels should be fed now.
    pub fn is_hungry(&self) -> bool {
        self.kernel_in.len() < MOST_FED_BYTES
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

    fn prepare(&mut self, call: &Descriptor) -> Result<Prepared, ReturnCode> {
        let has_ranks = has_ranks(call);
        let communicator = self.exchange.communicator(call.communicator).filter(|_| has_ranks);
        let (world, rank) =
            communicator.as_ref().map_or((1, 0), |communicator| (communicator.ranks.len() as u32, communicator.local));
        let told_apart = communicator.filter(|_| !self.faithful.to(12));
        let communicator_id = told_apart
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
        self.controls[control].ended.push_back(End { caller: self.runs_for.take(), code, cycles, hidden_from: None });
        self.running = None;
    }

    fn run(&mut self, fabric: &mut impl Fabric) -> bool {
        let Some(mut running) = self.running.take() else { return false };
        let mut counted = running.counted;
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

    /// With what a call ends that waits for somebody who cannot be heard any more.
    fn why_in_vain(&self, call: &Descriptor) -> Option<ReturnCode> {
        let is_quiet = self.lost.is_empty() && self.receiver.broken().next().is_none();
        let communicator = self.exchange.communicator(call.communicator).filter(|_| !is_quiet && has_ranks(call))?;
        let is_one = matches!(call.operation, Operation::Send | Operation::Recv);
        let ranks = (0u32..).zip(&communicator.ranks).filter(|(rank, _)| !is_one || *rank == call.root);
        let sessions: BTreeSet<u32> = ranks.map(|(_, entry)| entry.session).collect();
        if self.receiver.broken().any(|(sender, _)| sessions.contains(&sender)) {
            return Some(ReturnCode::WRONG_SEQUENCE);
        }
        (!self.lost.is_disjoint(&sessions)).then_some(NOT_HEARD)
    }
}

/// The next number of a generator: SplitMix64.
fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ *state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

/// Whether a call is one of several ranks.
fn has_ranks(call: &Descriptor) -> bool {
    !matches!(call.operation, Operation::Nop | Operation::Copy | Operation::Combine | Operation::Config)
}

/// What tells a communicator from others of the same engines. All its ranks come to the same: it follows from their sessions, and from how
/// many communicators of the same ranks each of them has laid out before this one.
fn communicator_id(exchange: &Exchange, at: u32, communicator: &Communicator, own: Option<u32>) -> u32 {
    let who = |of: &Communicator| of.ranks.iter().map(|rank| (rank.ip, rank.port, rank.session)).collect::<Vec<_>>();
    let is_same = |other: &Communicator| other.local == communicator.local && who(other) == who(communicator);
    let ranks = communicator.ranks.len() as u32;
    // What stands in the table of rx buffers changes with every message.
    let begin = exchange.rx_buffers_end().clamp(map::TABLES_BEGIN, map::TABLES_END);
    let before = (begin..at.min(map::TABLES_END)).step_by(4).filter(|&offset| {
        exchange.word(offset) == Some(ranks) && exchange.communicator(offset).is_some_and(|other| is_same(&other))
    });
    // Nobody sends to itself, so a host may have left its own out.
    let sessions = (0u32..).zip(&communicator.ranks).map(|(rank, entry)| match own {
        Some(own) if rank == communicator.local => own,
        _ => entry.session,
    });
    let words = [before.count() as u32, ranks].into_iter().chain(sessions);
    let hash = words.fold(HASH_BASIS, |hash, word| (hash ^ u64::from(word)).wrapping_mul(HASH_PRIME));
    // Zero says nothing.
    ((hash ^ hash >> 32) as u32).max(1)
}

//! One history of a simulated world, from its first event to its last, and what must hold in all of them.
//!
//! Owns the processes: the threads that make calls and wait, who drives, and what a sleep in the poller is. The protocol that they
//! run is the engine's own; only the lock, the threads and the poller are played here, in the way of `driver`. Read [`run`] first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use accl_schedule::cost::{Machine, Near, Placement};
use accl_schedule::{Basis, Chooser, Topology};
use accl_transport::Card;
use accl_types::{Collective, Dtype, Error, ErrorKind, Moment, Rank, ReduceOp};

use super::clock::{self, Agenda, Event};
use super::link::{SimulatedLink, Wire, self_link};
use super::oracle::Tensors;
use super::scenario::{Fault, Linking, Matter, Scenario, Step, TIMEOUT_MS};
use crate::api::planning::Planning;
use crate::call::{CallDesc, CallState, Codecs, Encoding, Mode, TensorCodecs, Waited};
use crate::exec::SpinLimit;
use crate::group::{Caller, Core, FastPathEnd, GroupState, Launched, Relief, Tell};
use crate::peers::{Members, Note, neighbours};
use crate::plan::Planner;
use crate::sync::Mutex;

/// What a pass takes, in nanoseconds.
const PASS: u64 = 300;
/// A world in which more happens than this does not end.
const MOST_EVENTS: u64 = 500_000;
/// As in `session::connector`, in nanoseconds.
const NOTE_DELAY: u64 = 100_000_000;
/// A call may end so much later than its deadline: somebody is in the middle of something.
const SLACK: Duration = Duration::from_millis(3);
const TIMEOUT: Duration = Duration::from_millis(TIMEOUT_MS);

/// What was wrong in a history.
pub(super) type Violation = String;

/// What a history has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) events: u64,
    pub(super) done: u64,
    pub(super) failed: u64,
    /// Calls that were over on the fast path.
    pub(super) fast: u64,
    pub(super) sleeps: u64,
    /// Of all results, errors and times.
    pub(super) hash: u64,
}

/// A call that was made.
struct Made {
    /// `None`: it was over when it had been made, or refused.
    call: Option<Arc<CallState>>,
    refused: Option<Error>,
    tensors: Tensors,
    is_ended: bool,
    /// Its rank makes another call than the others.
    is_odd: bool,
    /// How often the callback of its end has run.
    callbacks: Arc<AtomicUsize>,
}

impl Made {
    fn outcome(&self) -> Option<Result<(), Error>> {
        match (&self.refused, &self.call) {
            (Some(error), _) => Some(Err(error.clone())),
            (None, None) => Some(Ok(())),
            (None, Some(call)) => call.outcome().map(|outcome| match outcome {
                Waited::Failed(error) => Err(error),
                _ => Ok(()),
            }),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Running,
    /// It waits for a call, and looks itself so many times more.
    Spinning {
        item: usize,
        left: u32,
        watches: bool,
    },
    Asleep {
        item: usize,
    },
    Over,
}

struct Thread {
    steps: Vec<Step>,
    at: usize,
    state: State,
    /// It has been late for this call.
    was_late: Option<usize>,
}

struct Member {
    caller: Caller,
    planning: Planning,
    has_left: bool,
}

struct Process {
    /// `None`: it is dead, or has ended.
    core: Option<Core>,
    threads: Vec<Thread>,
    members: BTreeMap<usize, Member>,
    /// Something came up since the last sleep in the poller.
    rung: bool,
    /// The sleep in the poller: its number, and whether who sleeps waits for a call.
    sleep: Option<(u64, bool)>,
    sleeps: u64,
    is_about_to_drive: bool,
    peers: Vec<Option<crate::peers::PeerId>>,
}

struct World<'a> {
    scenario: &'a Scenario,
    agenda: Arc<Mutex<Agenda>>,
    wires: Vec<Arc<Mutex<Wire>>>,
    /// Wires of which links were made, or are being made.
    dialled: BTreeSet<usize>,
    /// Ends of wires that their processes have yet to be given, by wire and end.
    pending: BTreeMap<(usize, usize), SimulatedLink>,
    /// Notes that were written, with the process of each.
    notes: Vec<(usize, Note)>,
    processes: Vec<Process>,
    made: BTreeMap<(usize, usize), Made>,
    faults: Vec<Fault>,
    /// Faults that have come to pass.
    struck: BTreeSet<usize>,
    seen: Seen,
    /// Bits of encoded results.
    bits: Bits,
}

/// Runs the history of a scenario.
///
/// # Errors
/// What must hold in all histories and does not in this one.
pub(super) fn run(scenario: &Scenario) -> Result<Seen, Violation> {
    let is_well = scenario.faults().next().is_none();
    let has_codecs = scenario.items.iter().any(|item| item.codec.is_some());
    // What encoded calls end with depends on nothing but what they are given.
    let bits =
        if is_well || !has_codecs { BTreeMap::new() } else { play(&scenario.without_faults(), BTreeMap::new())?.1 };
    play(scenario, bits).map(|(seen, _)| seen)
}

/// How calls ended, by item and process.
pub(super) type Outcomes = BTreeMap<(usize, usize), Result<(), ErrorKind>>;

/// How each call of a scenario ended.
pub(super) fn outcomes(scenario: &Scenario) -> Result<Outcomes, Violation> {
    clock::reset();
    let mut world = World::new(scenario);
    world.go()?;
    let ends = world.made.iter().filter_map(|(&call, made)| Some((call, made.outcome()?.map_err(|error| error.kind))));
    Ok(ends.collect())
}

type Bits = BTreeMap<usize, Vec<Vec<u64>>>;

/// As [`run`]; encoded results must have these bits, and those of others are returned.
fn play(scenario: &Scenario, bits: Bits) -> Result<(Seen, Bits), Violation> {
    clock::reset();
    let mut world = World::new(scenario);
    world.bits = bits;
    world.go()?;
    world.check_rest()?;
    world.end()?;
    world.check_calls()?;
    Ok((world.seen, world.bits))
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario) -> Self {
        let agenda: Arc<Mutex<Agenda>> = Arc::default();
        let faults: Vec<Fault> = scenario.faults().cloned().collect();
        let flips = |wire: usize| {
            faults.iter().find_map(|fault| match fault {
                Fault::Flip { wire: at, flip } if *at == wire => Some(*flip),
                _ => None,
            })
        };
        let wires = scenario.wires.iter().enumerate().map(|(index, (ends, spec))| {
            let mut spec = spec.clone();
            spec.flip = flips(index);
            Wire::new(index, *ends, spec, &agenda)
        });
        let wires: Vec<_> = wires.collect();
        let mut processes: Vec<Process> =
            scenario.steps.iter().map(|threads| Process::new(scenario, threads)).collect();
        for (process, host) in processes.iter_mut().enumerate() {
            let payload = scenario.segment as usize + accl_transport::frame::OVERHEAD_BYTES;
            let Some(core) = &mut host.core else { continue };
            for (wire, (ends, _)) in wires.iter().zip(&scenario.wires) {
                if let Some(end) = ends.iter().position(|&at| at == process) {
                    let peer = core.net.introduce(&card(ends[1 - end]), wire.lock().is_ring());
                    if scenario.linking == Linking::AtFirst {
                        core.net.attach(peer, Box::new(SimulatedLink::new(wire, end)));
                    }
                    host.peers[ends[1 - end]] = Some(peer);
                }
            }
            let own = self_link(payload);
            host.peers[process] = Some(core.net.add(&card(process), Box::new(own)));
            // Nobody has made a group before all have met for it.
            for (index, spec) in (1..).zip(&scenario.groups).filter(|(_, spec)| spec.rank_of(process).is_some()) {
                core.expect_group(index, spec.members.iter().filter_map(|&member| host.peers[member]).collect());
            }
        }
        let (made, struck) = (BTreeMap::new(), BTreeSet::new());
        let (dialled, pending) = (BTreeSet::new(), BTreeMap::new());
        let (seen, bits) = (Seen::default(), BTreeMap::new());
        Self {
            scenario,
            agenda,
            wires,
            dialled,
            pending,
            notes: Vec::new(),
            processes,
            made,
            faults,
            struck,
            seen,
            bits,
        }
    }

    fn enter(&self, wait: u64, event: Event) {
        self.agenda.lock().enter(wait, event);
    }

    // ---- the history

    fn go(&mut self) -> Result<(), Violation> {
        for (process, host) in self.processes.iter().enumerate() {
            (0..host.threads.len()).for_each(|thread| self.enter(0, Event::Run { process, thread }));
        }
        for (index, fault) in self.faults.iter().enumerate() {
            if let Fault::Kill { at, .. } | Fault::Cut { at, .. } | Fault::Vanish { at, .. } | Fault::Stall { at, .. } =
                fault
            {
                self.enter(*at, Event::Fault { index });
            }
        }
        self.go_on(|world| world.is_at_rest())
    }

    /// Until that is so.
    fn go_on(&mut self, is_over: impl Fn(&Self) -> bool) -> Result<(), Violation> {
        while !is_over(self) {
            let next = self.agenda.lock().next();
            let Some(event) = next else {
                return Err(format!("nothing will ever happen again, and calls are in flight: {}", self.unfinished()));
            };
            self.seen.events += 1;
            if self.seen.events > MOST_EVENTS {
                return Err(format!("the world does not come to rest: {}", self.unfinished()));
            }
            if self.scenario.traces {
                println!("{} {event:?}", clock::nanos());
            }
            self.happen(event)?;
        }
        Ok(())
    }

    fn happen(&mut self, event: Event) -> Result<(), Violation> {
        match event {
            Event::Run { process, thread } => self.run_thread(process, thread)?,
            Event::Drive { process } => self.drive(process),
            Event::Ring { process } => self.ring(process),
            Event::TimeIsUp { process, sleep } => {
                if self.processes[process].sleep.is_some_and(|(number, _)| number == sleep) {
                    self.check_progress(process)?;
                    self.wake(process);
                }
            }
            Event::Arrive { wire, end, is_quiet } => self.wires[wire].lock().on_arrival(end, is_quiet),
            Event::Ended { wire, end, process } => {
                self.wires[wire].lock().on_end(end);
                self.ring(process);
            }
            Event::Fault { index } => self.strike(index),
            Event::Dial { wire, process } => self.dial(wire, process),
            Event::Attach { wire, end } => {
                self.attach(wire, end);
                let process = self.scenario.wires[wire].0[end];
                self.settle(process);
                self.note_ends(process)?;
            }
            Event::Refused { process, peer } => self.refuse(process, peer),
            Event::Note { index } => self.deliver(index)?,
        }
        if let Event::Run { process, .. }
        | Event::Refused { process, .. }
        | Event::Drive { process }
        | Event::Ring { process }
        | Event::Ended { process, .. }
        | Event::TimeIsUp { process, .. } = event
        {
            self.settle(process);
            self.note_ends(process)?;
        }
        Ok(())
    }

    /// Every call has ended, every thread has nothing left to do, and nothing is under way.
    fn is_at_rest(&self) -> bool {
        self.agenda.lock().is_quiet()
            && self.living().all(|(_, host)| host.threads.iter().all(|thread| thread.state == State::Over))
            && self.living().all(|(process, _)| self.calls_of(process).all(|(_, made)| made.outcome().is_some()))
    }

    fn living(&self) -> impl Iterator<Item = (usize, &Process)> {
        self.processes.iter().enumerate().filter(|(_, host)| host.core.is_some())
    }

    fn calls_of(&self, process: usize) -> impl Iterator<Item = (usize, &Made)> {
        let calls = self.made.iter().filter(move |((_, by), _)| *by == process);
        calls.map(|((item, _), made)| (*item, made))
    }

    fn unfinished(&self) -> String {
        let calls = self.living().flat_map(|(process, _)| {
            let open = self.calls_of(process).filter(|(_, made)| made.outcome().is_none());
            open.map(move |(item, _)| format!("process {process} item {item}"))
        });
        let threads = self.living().map(|(process, host)| {
            let states: Vec<State> = host.threads.iter().map(|thread| thread.state).collect();
            format!("process {process} {states:?} sleep {:?}", host.sleep)
        });
        let now = clock::nanos();
        format!("{}; {} at {now}", calls.collect::<Vec<_>>().join(", "), threads.collect::<Vec<_>>().join(", "))
    }

    // ---- faults

    fn strike(&mut self, index: usize) {
        self.struck.insert(index);
        match self.faults[index].clone() {
            Fault::Kill { process, .. } => self.kill(process),
            Fault::Cut { wire, .. } => self.wires[wire].lock().cut(),
            Fault::Stall { wire, end, wait, .. } => self.wires[wire].lock().stall(end, wait),
            Fault::Vanish { process, .. } => {
                for (wire, (ends, _)) in self.wires.iter().zip(&self.scenario.wires) {
                    if ends.contains(&process) {
                        wire.lock().fall_silent();
                    }
                }
                self.kill(process);
            }
            Fault::Flip { .. }
            | Fault::Disagree { .. }
            | Fault::Late { .. }
            | Fault::Abort { .. }
            | Fault::Leave { .. } => {}
        }
    }

    fn kill(&mut self, process: usize) {
        let host = &mut self.processes[process];
        host.core = None;
        host.sleep = None;
        host.threads.iter_mut().for_each(|thread| thread.state = State::Over);
        let wires = &self.scenario.wires;
        self.pending.retain(|&(wire, end), _| wires[wire].0[end] != process);
    }

    /// What goes wrong with a rank's call, if anything does.
    fn fault_of(&mut self, item: usize, rank: usize) -> Option<Fault> {
        let at = |fault: &Fault| match fault {
            Fault::Disagree { item, rank, .. }
            | Fault::Late { item, rank, .. }
            | Fault::Abort { item, rank }
            | Fault::Leave { item, rank } => Some((*item, *rank)),
            _ => None,
        };
        let index = self.faults.iter().position(|fault| at(fault) == Some((item, rank)))?;
        self.struck.insert(index);
        Some(self.faults[index].clone())
    }

    // ---- links

    fn wire_between(&self, one: usize, other: usize) -> Option<usize> {
        self.scenario.wires.iter().position(|(ends, _)| ends.contains(&one) && ends.contains(&other) && one != other)
    }

    /// As `session::connector` makes a link that a process wants.
    fn dial(&mut self, wire: usize, process: usize) {
        if self.dialled.contains(&wire) || self.processes[process].core.is_none() {
            return;
        }
        let ends = self.scenario.wires[wire].0;
        let peer = if ends[0] == process { ends[1] } else { ends[0] };
        let latency = self.wires[wire].lock().latency();
        if self.wires[wire].lock().is_silent() {
            // No answer comes before anybody's deadline.
        } else if self.processes[peer].core.is_none() || self.wires[wire].lock().is_cut() {
            self.enter(latency, Event::Refused { process, peer });
        } else {
            self.connect(wire);
            for end in 0..2 {
                let wait = self.wires[wire].lock().latency();
                self.enter(wait, Event::Attach { wire, end });
            }
        }
    }

    /// As `session::connector` sends a note, and the one of its receiver takes it.
    fn deliver(&mut self, index: usize) -> Result<(), Violation> {
        let (from, note) = &self.notes[index];
        let (from, to) = (*from, usize::from(note.to.uuid[0]));
        let is_reached = self.wire_between(from, to).is_some_and(|wire| {
            let wire = self.wires[wire].lock();
            !wire.is_cut() && !wire.is_silent()
        });
        let sender = self.processes[from].core.as_ref();
        if !is_reached || !sender.is_some_and(|core| core.is_note_needed(&note.to.uuid, note.group)) {
            return Ok(());
        }
        if let Some(core) = &mut self.processes[to].core {
            core.on_note(&card(from).uuid, &note.bytes, clock::now());
            self.kick(to);
            self.settle(to);
            self.note_ends(to)?;
        }
        Ok(())
    }

    /// Makes both ends of a wire.
    fn connect(&mut self, wire: usize) {
        self.dialled.insert(wire);
        for end in 0..2 {
            self.pending.insert((wire, end), SimulatedLink::new(&self.wires[wire], end));
        }
    }

    /// Gives an end of a wire to its process.
    fn attach(&mut self, wire: usize, end: usize) {
        let ends = self.scenario.wires[wire].0;
        let Some(link) = self.pending.remove(&(wire, end)) else { return };
        let host = &mut self.processes[ends[end]];
        if let (Some(core), Some(peer)) = (&mut host.core, host.peers[ends[1 - end]]) {
            core.attach(peer, Box::new(link), clock::now());
            self.kick(ends[end]);
        }
    }

    fn refuse(&mut self, process: usize, peer: usize) {
        let host = &mut self.processes[process];
        if let (Some(core), Some(peer)) = (&mut host.core, host.peers[peer]) {
            core.lose(peer, Error::peer_lost("its process has ended"), clock::now());
            self.kick(process);
        }
    }

    /// Makes the links that a rank has from the beginning.
    fn link_neighbours(&mut self, process: usize, group: usize) {
        let spec = &self.scenario.groups[group];
        let Some(rank) = spec.rank_of(process) else { return };
        for neighbour in neighbours(Rank(rank as u32), spec.members.len() as u32) {
            let Some(wire) = self.wire_between(process, spec.members[neighbour.index()]) else { continue };
            match self.scenario.linking {
                Linking::AtFirst => {}
                Linking::Late => self.enter(0, Event::Dial { wire, process }),
                Linking::WithGroups if self.dialled.contains(&wire) => (0..2).for_each(|end| self.attach(wire, end)),
                Linking::WithGroups => {
                    let peer = spec.members[neighbour.index()];
                    if self.processes[peer].core.is_none() || self.wires[wire].lock().is_cut() {
                        self.refuse(process, peer);
                    } else if !self.wires[wire].lock().is_silent() {
                        self.connect(wire);
                        (0..2).for_each(|end| self.attach(wire, end));
                    }
                }
            }
        }
    }

    // ---- threads

    fn run_thread(&mut self, process: usize, thread: usize) -> Result<(), Violation> {
        if self.processes[process].core.is_none() {
            return Ok(());
        }
        match self.processes[process].threads[thread].state {
            State::Running => self.step(process, thread),
            State::Spinning { item, left, watches } => {
                self.spin(process, thread, item, left, watches);
                Ok(())
            }
            State::Asleep { item } => {
                if self.is_over(item, process) {
                    self.resume(process, thread);
                }
                Ok(())
            }
            State::Over => Ok(()),
        }
    }

    fn is_over(&self, item: usize, process: usize) -> bool {
        self.made.get(&(item, process)).is_none_or(|made| made.outcome().is_some())
    }

    fn resume(&mut self, process: usize, thread: usize) {
        self.processes[process].threads[thread].state = State::Running;
        self.enter(100, Event::Run { process, thread });
    }

    fn step(&mut self, process: usize, thread: usize) -> Result<(), Violation> {
        let this = &mut self.processes[process].threads[thread];
        let Some(&step) = this.steps.get(this.at) else {
            this.state = State::Over;
            return Ok(());
        };
        this.at += 1;
        match step {
            Step::Compute(nanos) => self.enter(nanos, Event::Run { process, thread }),
            Step::Make(group) => {
                self.make_group(process, group);
                self.enter(1000, Event::Run { process, thread });
            }
            Step::Call(item) => self.make_call(process, thread, item)?,
            Step::Wait(item) => {
                let left = self.scenario.spins;
                self.processes[process].threads[thread].state = State::Spinning { item, left, watches: false };
                self.enter(0, Event::Run { process, thread });
            }
            Step::Leave(group) => {
                self.leave(process, group);
                self.enter(1000, Event::Run { process, thread });
            }
        }
        Ok(())
    }

    /// As a wait that looks itself for a while.
    fn spin(&mut self, process: usize, thread: usize, item: usize, left: u32, mut watches: bool) {
        let is_over = self.is_over(item, process);
        let Some(core) = &mut self.processes[process].core else { return };
        if is_over || left == 0 {
            let relief = if watches { core.unwatch(clock::now()) } else { Relief::SleepsOn };
            let must = !is_over && core.must_wake_driver(core.next_deadline());
            self.relieve(process, relief);
            if must {
                self.kick(process);
            }
            if is_over {
                self.resume(process, thread);
            } else {
                self.processes[process].threads[thread].state = State::Asleep { item };
            }
            return;
        }
        watches = watches || core.watch();
        let call = self.made.get(&(item, process)).and_then(|made| made.call.as_ref());
        let streams = call.map(|call| core.streams_of(call)).unwrap_or_default();
        streams.iter().for_each(|&peer| core.net.look_again(peer));
        if streams.is_empty() {
            self.look(process);
        }
        let Some(core) = &mut self.processes[process].core else { return };
        core.pass(clock::now());
        if !watches && core.must_wake_driver(None) {
            self.kick(process);
        }
        self.processes[process].threads[thread].state = State::Spinning { item, left: left - 1, watches };
        self.enter(PASS, Event::Run { process, thread });
    }

    fn make_group(&mut self, process: usize, index: usize) {
        self.link_neighbours(process, index);
        let spec = &self.scenario.groups[index];
        let Some(rank) = spec.rank_of(process) else { return };
        let host = &mut self.processes[process];
        let peers = spec.members.iter().map(|&member| host.peers[member].expect("all are introduced")).collect();
        let Some(core) = &mut host.core else { return };
        let (id, name) = (index as u64 + 1, Arc::from(format!("g{index}")));
        let rank = Rank(rank as u32);
        let mut state = GroupState::new(id, Arc::clone(&name), rank, TIMEOUT, Members::new(peers, spec.eager_bytes));
        state.timing = self.scenario.seed.is_multiple_of(3);
        core.add_group(state, clock::now());
        let placement = Placement { near: Near::Shm, cores: 8, segment_bytes: self.scenario.segment };
        let basis = Basis { machine: Machine::default(), placement, deterministic: false };
        let chooser = Chooser::new(Topology::new(spec.hosts.clone()), spec.rules.clone(), &basis);
        let world = spec.members.len() as u32;
        let caller = Caller { group: id, name, rank, world, global_rank: process as u64 };
        let member = Member { caller, planning: Planning::new(Planner::new(chooser, rank)), has_left: false };
        host.members.insert(index, member);
    }

    fn leave(&mut self, process: usize, group: usize) {
        let host = &mut self.processes[process];
        let (Some(core), Some(member)) = (&mut host.core, host.members.get_mut(&group)) else { return };
        if std::mem::replace(&mut member.has_left, true) {
            return;
        }
        core.look_again_at(member.caller.group);
        core.pass_whole(clock::now());
        let _ = core.leave_group(member.caller.group, clock::now());
        core.net.flush_all();
        self.kick(process);
    }

    fn make_call(&mut self, process: usize, thread: usize, index: usize) -> Result<(), Violation> {
        let item = &self.scenario.items[index];
        let Some(rank) = self.scenario.groups[item.group].rank_of(process) else { return Ok(()) };
        let fault = self.fault_of(index, rank);
        let this = &mut self.processes[process].threads[thread];
        if let Some(Fault::Late { wait, .. }) = fault
            && this.was_late != Some(index)
        {
            this.was_late = Some(index);
            this.at -= 1;
            self.enter(wait, Event::Run { process, thread });
            return Ok(());
        }
        match fault {
            Some(Fault::Abort { .. }) => self.abort(process, item.group),
            Some(Fault::Leave { .. }) => self.leave(process, item.group),
            _ => {}
        }
        let odd = match fault {
            Some(Fault::Disagree { on, .. }) => Some(on),
            _ => None,
        };
        let world = self.scenario.groups[item.group].members.len();
        let (tensors, inputs, outputs) = Tensors::new(index, item, rank, world, odd == Some(Matter::Count));
        let mut desc = CallDesc::new(item.collective, item.dtype);
        (desc.inputs, desc.outputs, desc.op) = (inputs, outputs, item.op);
        desc.root = Rank(item.root as u32);
        desc.equal_blocks =
            item.is_equal && !matches!(item.collective, Collective::ReduceScatter | Collective::AllGather);
        desc.mode = if item.is_async[rank] { Mode::Async } else { Mode::Blocking };
        if item.is_message() {
            let sends = rank == item.ends.0;
            desc.collective = if sends { Collective::Send } else { Collective::Recv };
            let peer = if sends { item.ends.1 } else { item.ends.0 };
            desc.peer = (sends || !item.is_from_any).then_some(Rank(peer as u32));
            desc.tag = item.tag;
        } else if !item.collective.is_rooted() {
            desc.root = Rank(0);
        }
        match odd {
            Some(Matter::Operator) => desc.op = if desc.op == ReduceOp::Sum { ReduceOp::Max } else { ReduceOp::Sum },
            Some(Matter::Root) if item.collective.is_rooted() => {
                desc.root = Rank((item.root as u32 + 1) % world as u32)
            }
            Some(Matter::Collective) if !item.is_message() => {
                desc = CallDesc::new(Collective::Barrier, Dtype::U8);
                desc.mode = if item.is_async[rank] { Mode::Async } else { Mode::Blocking };
            }
            Some(_) | None => {}
        }
        if let Some(codec) = item.codec.filter(|_| desc.collective == item.collective) {
            desc.encoding = encoding(codec, index as u64).into();
        }
        let made = self.submit(process, item.group, &desc);
        let (call, refused) = match made {
            Ok(call) => (call, None),
            Err(error) => {
                // A refused call has no number: what follows would be taken for it. Its program ends there.
                if odd.is_some() && error.kind != ErrorKind::Aborted {
                    self.abort(process, item.group);
                }
                (None, Some(error))
            }
        };
        let callbacks: Arc<AtomicUsize> = Arc::default();
        if let Some(call) = &call {
            let counter = callbacks.clone();
            let callback = Box::new(move || {
                counter.fetch_add(1, Ordering::Relaxed);
            });
            if let Some(callback) = call.keep_callback(callback) {
                callback();
            }
        }
        self.made.insert(
            (index, process),
            Made { call, refused, tensors, is_ended: false, is_odd: odd.is_some(), callbacks },
        );
        self.enter(500, Event::Run { process, thread });
        Ok(())
    }

    /// As `Group::run` and `Group::submit` do it.
    fn submit(&mut self, process: usize, group: usize, desc: &CallDesc) -> Result<Option<Arc<CallState>>, Error> {
        let host = &mut self.processes[process];
        let (Some(core), Some(member)) = (&mut host.core, host.members.get(&group)) else {
            return Err(Error::internal("a call without its group"));
        };
        if member.has_left {
            return Err(member.caller.destroyed(Some(desc.collective)));
        }
        if desc.may_take_fast_path() {
            let draws = self.seen.events;
            let spin_limit =
                SpinLimit { spins: 1 + (draws % 3) as u32, yields: (draws % 5) as u32, yield_now: clock::yield_now };
            let watches = core.watch();
            let ran = core.guarded(|core| core.run_fast_path(member.caller.group, desc, spin_limit))?;
            let ran = ran.map(|end| match end {
                FastPathEnd::Done { .. } => Ok(None),
                FastPathEnd::Stopped(stopped) => member.caller.resume(core, desc, *stopped, clock::now()).map(Some),
            });
            let relief = if watches { core.unwatch(clock::now()) } else { Relief::SleepsOn };
            self.relieve(process, relief);
            match ran {
                Some(Ok(None)) => {
                    self.seen.fast += 1;
                    return Ok(None);
                }
                Some(Ok(Some(launched))) => return Ok(Some(self.launched(process, launched))),
                Some(Err(error)) => return Err(error),
                None => {}
            }
        }
        let host = &mut self.processes[process];
        let (Some(core), Some(member)) = (&mut host.core, host.members.get(&group)) else {
            return Err(Error::internal("a call without its group"));
        };
        desc.check(member.caller.rank, member.caller.world)?;
        let shape = (!desc.collective.is_point_to_point()).then(|| member.planning.get(desc)).transpose()?;
        let prepared = member.caller.prepare(desc, shape)?;
        let launched = member.caller.start(core, desc, prepared, None, clock::now())?;
        Ok(Some(self.launched(process, launched)))
    }

    fn launched(&mut self, process: usize, launched: Launched) -> Arc<CallState> {
        let Launched { call, wakes_driver } = launched;
        if wakes_driver {
            self.kick(process);
        }
        if call.is_async && !call.is_done() {
            self.look(process);
            if let Some(core) = &mut self.processes[process].core {
                core.pass(clock::now());
                if core.must_wake_driver(None) {
                    self.kick(process);
                }
            }
        }
        let owes_look = |core: &mut Core| core.take_owed_look();
        if call.is_done() && self.processes[process].core.as_mut().is_some_and(owes_look) {
            self.look(process);
            if let Some(core) = &mut self.processes[process].core {
                core.pass_whole(clock::now());
            }
        }
        call
    }

    fn abort(&mut self, process: usize, group: usize) {
        let host = &mut self.processes[process];
        let (Some(core), Some(member)) = (&mut host.core, host.members.get(&group)) else { return };
        let error = member.caller.placed(Error::aborted("abort was called: by the world"));
        core.with_group(member.caller.group, clock::now(), |group, context| group.fail(error, context, Tell::Peers));
        core.net.flush_all();
        self.kick(process);
    }

    // ---- driving

    /// As `Driver::ask`: what the system says is taken from whoever would sleep next.
    fn look(&mut self, process: usize) {
        let host = &mut self.processes[process];
        if host.core.as_ref().is_some_and(|core| !core.is_parked()) {
            host.rung = false;
            self.wires.iter().for_each(|wire| wire.lock().ask(process));
        }
    }

    fn kick(&mut self, process: usize) {
        self.enter(200, Event::Ring { process });
    }

    fn relieve(&mut self, process: usize, relief: Relief) {
        let waits_for_call = self.processes[process].sleep.is_some_and(|(_, waits)| waits);
        match relief {
            Relief::SleepsOn => {}
            Relief::MayBeOver if !waits_for_call => {}
            Relief::MayBeOver | Relief::Wake => self.kick(process),
        }
    }

    /// Whoever sleeps in the poller wakes, or the next one to do so does at once.
    fn ring(&mut self, process: usize) {
        self.processes[process].rung = true;
        if self.processes[process].sleep.is_some() {
            self.wake(process);
        }
    }

    fn wake(&mut self, process: usize) {
        let host = &mut self.processes[process];
        (host.rung, host.sleep) = (false, None);
        self.wires.iter().for_each(|wire| wire.lock().ask(process));
        if let Some(core) = &mut host.core {
            core.unpark(clock::now());
        }
    }

    /// A thread that waits, or the background thread, parks in the poller.
    fn drive(&mut self, process: usize) {
        let host = &mut self.processes[process];
        host.is_about_to_drive = false;
        if host.sleep.is_some() {
            return;
        }
        let asleep = host.threads.iter().find_map(|thread| match thread.state {
            State::Asleep { item } => self.made.get(&(item, process)).and_then(|made| made.call.clone()),
            _ => None,
        });
        let Some(core) = &mut host.core else { return };
        let parked = core.park(asleep.as_deref(), None, true, clock::now());
        if self.scenario.traces {
            println!("drive {process} {parked:?} work {} residue {:?}", core.has_work(), core.residue());
        }
        let Ok(parked) = parked else { return };
        let Some(until) = parked else {
            self.look(process);
            return;
        };
        host.sleeps += 1;
        self.seen.sleeps += 1;
        host.sleep = Some((host.sleeps, asleep.is_some()));
        if host.rung {
            self.wake(process);
        } else if until != Moment::FAR {
            let event = Event::TimeIsUp { process, sleep: host.sleeps };
            self.agenda.lock().enter_at(until.nanos(), event);
        }
    }

    /// Whoever sleeps on a call that is over goes on, and somebody drives while there is need.
    fn settle(&mut self, process: usize) {
        let host = &mut self.processes[process];
        let Some(core) = &mut host.core else { return };
        core.take_completed().callbacks.into_iter().for_each(|callback| callback());
        let (wanted, notes) = core.net.take_wanted();
        for note in notes {
            self.notes.push((process, note));
            self.enter(NOTE_DELAY, Event::Note { index: self.notes.len() - 1 });
        }
        for card in wanted {
            if let Some(wire) = self.wire_between(process, usize::from(card.uuid[0])) {
                self.enter(0, Event::Dial { wire, process });
            }
        }
        let Some(core) = &mut self.processes[process].core else { return };
        let has_work = core.has_work();
        let mut waits = false;
        for thread in 0..self.processes[process].threads.len() {
            let State::Asleep { item } = self.processes[process].threads[thread].state else { continue };
            if self.is_over(item, process) {
                self.resume(process, thread);
            } else {
                waits = true;
            }
        }
        let host = &mut self.processes[process];
        if (has_work || waits) && host.sleep.is_none() && !host.is_about_to_drive {
            host.is_about_to_drive = true;
            self.enter(PASS, Event::Drive { process });
        }
    }

    // ---- what must hold

    /// Whether anything but time has gone wrong, or could have.
    fn is_well(&self) -> bool {
        self.faults.is_empty()
    }

    fn has_flips(&self) -> bool {
        self.faults.iter().any(|fault| matches!(fault, Fault::Flip { .. }))
    }

    /// In a world that is well, calls do not wait for time to pass: somebody was not told of something.
    fn check_progress(&self, process: usize) -> Result<(), Violation> {
        if !self.is_well() || !self.agenda.lock().is_quiet() {
            return Ok(());
        }
        // Calls that are held back begin after a while in any case.
        let begins =
            |core: &Core| core.groups.values().any(|group| group.begin_by().is_some_and(|at| at <= clock::now()));
        let is_over = self.living().all(|(by, _)| self.calls_of(by).all(|(_, made)| made.outcome().is_some()));
        match &self.processes[process].core {
            Some(core) if !begins(core) && !is_over => {
                Err(format!("only a timer makes the world go on: {}", self.unfinished()))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Looks at the calls of a process that have just ended.
    fn note_ends(&mut self, process: usize) -> Result<(), Violation> {
        let (is_well, has_flips) = (self.is_well(), self.has_flips());
        let mut barriers = Vec::new();
        let group_of = |item: usize| self.scenario.items[item].group;
        for (&(item, by), made) in &mut self.made {
            if by != process || made.is_ended {
                continue;
            }
            let Some(outcome) = made.outcome() else { continue };
            made.is_ended = true;
            made.tensors.end();
            let place = || format!("item {item} on process {process} (group {})", group_of(item));
            let is_sealed = self.scenario.is_sealed(item);
            match &outcome {
                Ok(()) if made.is_odd => self.seen.done += 1,
                Ok(()) if !has_flips || is_sealed => {
                    self.seen.done += 1;
                    if let Some(wrong) = made.tensors.wrong_result() {
                        return Err(format!("{} is done, but {wrong}", place()));
                    }
                    if self.scenario.items[item].codec.is_some() {
                        let bits = made.tensors.bits();
                        if *self.bits.entry(item).or_insert_with(|| bits.clone()) != bits {
                            return Err(format!("{} ended with other bits than on another rank", place()));
                        }
                    }
                }
                Ok(()) => self.seen.done += 1,
                Err(error) => {
                    self.seen.failed += 1;
                    if is_well {
                        return Err(format!("{} failed in a world that is well: {error}", place()));
                    }
                    if error.kind == ErrorKind::Internal {
                        return Err(format!("{} failed of a defect: {error}", place()));
                    }
                }
            }
            if let Some(call) = &made.call {
                let took = clock::now().since(call.started);
                if took > TIMEOUT + SLACK {
                    return Err(format!("{} ended after {took:?}: {outcome:?}", place()));
                }
            }
            if outcome.is_ok() && self.scenario.items[item].collective == Collective::Barrier {
                barriers.push(item);
            }
            let words = [item as u64, process as u64, clock::nanos(), u64::from(outcome.is_ok()), self.seen.hash];
            self.seen.hash = crate::hash::hash_words(words);
        }
        barriers.into_iter().try_for_each(|item| self.check_barrier(item))
    }

    /// What any rank has begun before a barrier is over when the barrier is, on every rank.
    fn check_barrier(&self, barrier: usize) -> Result<(), Violation> {
        let group = self.scenario.items[barrier].group;
        let is_before = |item: usize| {
            let earlier = &self.scenario.items[item];
            item < barrier && earlier.group == group && !earlier.is_message()
        };
        let open = self.made.iter().find(|((item, process), made)| {
            is_before(*item) && made.outcome().is_none() && self.processes[*process].core.is_some()
        });
        open.map_or(Ok(()), |((item, process), _)| {
            Err(format!("barrier {barrier} is over, and item {item} before it is in flight on process {process}"))
        })
    }

    /// Who has no call in flight looks at its links when it makes the next one: until then what has come for it lies there.
    fn read_the_rest(&mut self) -> Result<(), Violation> {
        for _ in 0..1000 {
            let mut moved = false;
            for process in 0..self.processes.len() {
                self.look(process);
                if let Some(core) = &mut self.processes[process].core {
                    moved |= core.pass_whole(clock::now());
                    self.settle(process);
                    self.note_ends(process)?;
                }
            }
            self.go_on(|world| world.agenda.lock().is_quiet())?;
            if !moved {
                return Ok(());
            }
        }
        Err("the processes never stop talking to each other".to_owned())
    }

    /// When all have ended: nothing is left over, and a failure has reached everybody.
    fn check_rest(&mut self) -> Result<(), Violation> {
        self.read_the_rest()?;
        for (process, host) in self.living() {
            let Some(core) = &host.core else { continue };
            if self.is_well() {
                let left = core.residue();
                if !left.is_empty() {
                    return Err(format!("process {process} has left over: {}", left.join(", ")));
                }
            }
        }
        if self.is_well() {
            self.check_credits()?;
        }
        self.check_causes()
    }

    fn state(&self, process: usize, group: usize) -> Option<&GroupState> {
        let host = &self.processes[process];
        host.core.as_ref()?.groups.get(&host.members.get(&group)?.caller.group)
    }

    /// What one may send ahead and what the other has yet to give back make up the window.
    fn check_credits(&self) -> Result<(), Violation> {
        for (index, group) in self.scenario.groups.iter().enumerate() {
            for (a, &mine) in group.members.iter().enumerate() {
                for (b, &theirs) in group.members.iter().enumerate() {
                    let (Some(mine), Some(theirs)) = (self.state(mine, index), self.state(theirs, index)) else {
                        continue;
                    };
                    let (left, _, window) = mine.members.credit(Rank(b as u32));
                    let (_, owed, _) = theirs.members.credit(Rank(a as u32));
                    if a != b && left + owed != window {
                        return Err(format!(
                            "in group {index} rank {a} may send {left} bytes ahead to {b}, which owes {owed} of {window}"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// A group that has failed has failed on all ranks that are still in it, for a reason that has come to pass.
    fn check_causes(&self) -> Result<(), Violation> {
        if self.has_flips() {
            return Ok(());
        }
        for (index, group) in self.scenario.groups.iter().enumerate() {
            let states: Vec<(usize, &GroupState)> =
                group.members.iter().filter_map(|&member| Some((member, self.state(member, index)?))).collect();
            let failed: Vec<(usize, &Error)> =
                states.iter().filter_map(|(member, state)| Some((*member, state.poison()?))).collect();
            let Some((_, first)) = failed.first() else { continue };
            let (may, is_alone) = self.may_fail_of(index);
            if let Some((member, error)) = failed.iter().find(|(_, error)| !may.contains(&error.kind)) {
                return Err(format!("group {index} failed on process {member} of what did not happen: {error}"));
            }
            // A rank that is cut off hears of nothing.
            let is_cut = self.faults.iter().any(|fault| matches!(fault, Fault::Cut { .. } | Fault::Stall { .. }));
            if let Some((member, _)) = states.iter().find(|(_, state)| state.poison().is_none() && !is_cut) {
                return Err(format!("group {index} has failed, and process {member} does not know: {first}"));
            }
            if let Some((member, other)) = failed.iter().find(|(_, error)| is_alone && error.kind != first.kind) {
                return Err(format!(
                    "process {member} says that group {index} failed of another cause: {first}; {other}"
                ));
            }
        }
        Ok(())
    }

    /// The kinds of errors that a group may have failed of, and whether one fault alone concerns it.
    fn may_fail_of(&self, group: usize) -> (Vec<ErrorKind>, bool) {
        let spec = &self.scenario.groups[group];
        let mut kinds: Vec<ErrorKind> = Vec::new();
        let mut count = 0;
        for (index, fault) in self.faults.iter().enumerate() {
            let may: &[ErrorKind] = match fault {
                Fault::Kill { process, .. } if spec.members.contains(process) => &[ErrorKind::PeerLost],
                Fault::Vanish { process, .. } if spec.members.contains(process) => {
                    &[ErrorKind::PeerLost, ErrorKind::Timeout]
                }
                Fault::Cut { wire, .. }
                    if self.scenario.wires[*wire].0.iter().all(|end| spec.members.contains(end)) =>
                {
                    &[ErrorKind::PeerLost]
                }
                // A rank that needs nothing from the one that disagrees may have left the group meanwhile.
                Fault::Disagree { item, .. } if self.scenario.items[*item].group == group => &[
                    ErrorKind::Mismatch,
                    ErrorKind::Protocol,
                    ErrorKind::Timeout,
                    ErrorKind::PeerLost,
                    ErrorKind::Aborted,
                ],
                Fault::Abort { item, .. } if self.scenario.items[*item].group == group => &[ErrorKind::Aborted],
                // A message from any rank may still come from another one.
                Fault::Leave { item, .. } if self.scenario.items[*item].group == group => {
                    &[ErrorKind::Aborted, ErrorKind::PeerLost, ErrorKind::Timeout]
                }
                // Whoever waits in another group until its deadline is late in this one.
                Fault::Stall { .. }
                | Fault::Late { .. }
                | Fault::Vanish { .. }
                | Fault::Disagree { .. }
                | Fault::Leave { .. } => &[ErrorKind::Timeout],
                Fault::Kill { .. } | Fault::Cut { .. } | Fault::Abort { .. } | Fault::Flip { .. } => &[],
            };
            if self.struck.contains(&index) || matches!(fault, Fault::Late { .. } | Fault::Stall { .. }) {
                count += usize::from(!may.is_empty());
                kinds.extend(may);
            }
        }
        let is_alone = count == 1 && kinds.len() == 1;
        (kinds, is_alone)
    }

    /// All processes end, one after the other.
    fn end(&mut self) -> Result<(), Violation> {
        for process in 0..self.processes.len() {
            for group in 0..self.scenario.groups.len() {
                self.leave(process, group);
            }
            let Some(core) = &mut self.processes[process].core else { continue };
            let _ = core.guarded(|core| {
                core.say_goodbye();
                core.net.close_all();
            });
            self.kill(process);
        }
        self.go_on(|world| world.agenda.lock().is_quiet())
    }

    /// Nobody has written where nobody may.
    fn check_calls(&mut self) -> Result<(), Violation> {
        for (&(item, process), made) in &mut self.made {
            // Those of calls that were in flight when their process died are dropped with it.
            let callbacks = made.callbacks.load(Ordering::Relaxed);
            let wanted = usize::from(made.call.is_some() && made.is_ended);
            if callbacks != wanted {
                return Err(format!(
                    "item {item} on process {process} has told of its end {callbacks} times, not {wanted}"
                ));
            }
            if let Some(trespass) = made.tensors.trespass() {
                return Err(format!("item {item} on process {process}: {trespass}"));
            }
        }
        Ok(())
    }
}

impl Process {
    fn new(scenario: &Scenario, threads: &[Vec<Step>]) -> Self {
        let thread = |steps: &Vec<Step>| Thread { steps: steps.clone(), at: 0, state: State::Running, was_late: None };
        Self {
            core: Some(Core::new(scenario.segment, clock::now)),
            threads: threads.iter().map(thread).collect(),
            members: BTreeMap::new(),
            rung: false,
            sleep: None,
            sleeps: 0,
            is_about_to_drive: false,
            peers: vec![None; scenario.processes],
        }
    }
}

fn card(process: usize) -> Card {
    Card {
        version: accl_transport::PROTOCOL_VERSION,
        uuid: [process as u8; 16],
        pid: process as u32,
        uid: 0,
        hostname: format!("process-{process}"),
        host_id: "simulated".to_owned(),
        addresses: Vec::new(),
        unix_name: String::new(),
        transports: Vec::new(),
    }
}

fn encoding(text: &str, id: u64) -> Encoding {
    let codec = accl_kernels::codec::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let raw = accl_kernels::codec::parse("raw").unwrap_or_else(|error| panic!("raw: {error}"));
    let codecs = Codecs::new(vec![TensorCodecs { intra_node: raw, reduce: codec.clone(), result: codec, id }]);
    let codecs = codecs.unwrap_or_else(|error| panic!("{text}: {error}"));
    Encoding { codecs, seed: 5, step: id, residuals: None, probe: None }
}

//! The state of a simulated world: its processes, each with a protocol core, the calls that were issued, and counters.
//!
//! Owns that state and simple queries. Other files extend [`World`]: `ranks` (programs), `driving` (progress), `wiring`
//! (links and faults), `lanes`, and `invariants` (checks). `history` runs one event after the other. Read [`World`]
//! first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use accl_types::Error;
use accl_wire::EndpointInfo;

use super::clock::{self, Agenda, Event};
use super::devices::Devices;
use super::external::ExternalTasks;
use super::link::{SimulatedBitmap, SimulatedLink, Wire, self_link};
use super::oracle::Tensors;
use super::scenario::{Fault, Linking, Scenario, Step};
use accl_engine::internals::CoreJob;
use accl_engine::internals::InFlight;
use accl_engine::internals::Planning;
use accl_engine::internals::{PeerProbe, Question};
use accl_engine::sync::Mutex;
use accl_executor::call::Waited;
use accl_executor::group::{Caller, Core, FailedGroup, GroupState, PeerFate};
use accl_executor::peers::{Note, PeerId};

/// Description of a violated invariant.
pub(super) type Violation = String;

/// Counters of a history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) events: u64,
    pub(super) done: u64,
    pub(super) failed: u64,
    /// Calls that completed on the fast path.
    pub(super) fast: u64,
    pub(super) sleeps: u64,
    /// Calls with tensors in memory that only external operations reach.
    pub(super) staged: u64,
    /// Staged calls whose tiles the device computes.
    pub(super) coded: u64,
    /// Staged calls whose ranks read each other's memory.
    pub(super) by_reference: u64,
    /// Calls that were given to devices.
    pub(super) offloaded: u64,
    /// Calls that were cut into parts for several lanes.
    pub(super) cut: u64,
    /// Hash of the outcome (success or failure) and the end time of all calls.
    pub(super) hash: u64,
}

/// A call that was issued.
pub(super) struct Made {
    /// `None` if the call completed when it was issued, or was refused.
    pub(super) call: Option<InFlight>,
    pub(super) refused: Option<Error>,
    pub(super) tensors: Tensors,
    pub(super) is_ended: bool,
    /// The rank issues a different call than the others.
    pub(super) is_odd: bool,
    /// Number of runs of the completion callback.
    pub(super) callbacks: Arc<AtomicUsize>,
}

impl Made {
    pub(super) fn outcome(&self) -> Option<Result<(), Error>> {
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
pub(super) enum State {
    Running,
    /// The thread waits for a call, and polls `left` more times before it sleeps.
    Spinning {
        item: usize,
        left: u32,
        watches: bool,
    },
    Asleep {
        item: usize,
    },
    /// The thread waits until other threads of the process have reserved a sequence number, or issued a call.
    Awaiting,
    Over,
}

pub(super) struct Thread {
    pub(super) steps: Vec<Step>,
    pub(super) at: usize,
    pub(super) state: State,
    /// Item for which the thread has already been late.
    pub(super) was_late: Option<usize>,
}

pub(super) struct GroupMember {
    pub(super) caller: Arc<Caller>,
    pub(super) planning: Planning,
    pub(super) has_left: bool,
    /// Time at which the process left, in nanoseconds.
    pub(super) left_at: Option<u64>,
    pub(super) made_at: u64,
}

pub(super) struct Process {
    /// `None` if the process is dead or has ended.
    pub(super) core: Option<Core>,
    pub(super) threads: Vec<Thread>,
    pub(super) members: BTreeMap<usize, GroupMember>,
    /// Whether the process was woken since the last sleep in the poller.
    pub(super) rung: bool,
    /// Current sleep in the poller: its number, and whether the sleeping thread waits for a call.
    pub(super) sleep: Option<(u64, bool)>,
    /// Thread that sleeps in the poller, `None` for the background thread. The thread goes on only after that sleep.
    pub(super) driver: Option<usize>,
    pub(super) sleeps: u64,
    pub(super) is_about_to_drive: bool,
    pub(super) peers: Vec<Option<PeerId>>,
    pub(super) died_at: Option<u64>,
    pub(super) peer_probe: PeerProbe,
}

/// A question that one process asks another.
pub(super) struct Asked {
    pub(super) from: usize,
    pub(super) to: usize,
    pub(super) question: Question,
    pub(super) answer: Option<PeerFate>,
    /// Whether the process that answered considers the process in question lost.
    pub(super) knows_loss: bool,
}

pub(super) struct World<'a> {
    pub(super) scenario: &'a Scenario,
    pub(super) agenda: Arc<Mutex<Agenda>>,
    pub(super) wires: Vec<Arc<Mutex<Wire>>>,
    /// Wires for which links exist or are being created.
    pub(super) dialled: BTreeSet<usize>,
    /// Links that their processes have yet to receive, by wire and end.
    pub(super) pending: BTreeMap<(usize, usize), SimulatedLink>,
    /// Time at which the first and the last end of a wire became links of their processes, in nanoseconds, by wire.
    pub(super) linked_at: BTreeMap<usize, (u64, u64)>,
    /// Notes that were written, each with the process that wrote it.
    pub(super) notes: Vec<(usize, Note)>,
    pub(super) questions: Vec<Asked>,
    pub(super) processes: Vec<Process>,
    pub(super) made: BTreeMap<(usize, usize), Made>,
    pub(super) faults: Vec<Fault>,
    /// Faults that have occurred.
    pub(super) struck: BTreeSet<usize>,
    /// Time at which a group failed on a process, in nanoseconds, by process and group.
    pub(super) failed_at: BTreeMap<(usize, usize), u64>,
    pub(super) seen: Seen,
    pub(super) external_tasks: Arc<Mutex<ExternalTasks>>,
    pub(super) devices: Arc<Mutex<Devices>>,
    /// First reserved sequence number and number of calls, by process and composition. `None` if the reservation was
    /// refused.
    pub(super) reserved: BTreeMap<(usize, usize), Option<(u64, u64)>>,
    /// Bits of encoded results.
    pub(super) bits: Bits,
    /// Jobs that lanes were given.
    pub(super) jobs: Arc<Mutex<LaneJobs>>,
    /// Groups that have failed on one lane, each with another lane that has yet to learn of it.
    pub(super) failures: Vec<(usize, FailedGroup)>,
}

/// Jobs with their lanes; a job is `None` once it was taken to run.
pub(super) type LaneJobs = Vec<(usize, Option<CoreJob>)>;

/// Bits of encoded results, by item.
pub(super) type Bits = BTreeMap<usize, Vec<Vec<u64>>>;

impl<'a> World<'a> {
    pub(super) fn new(scenario: &'a Scenario) -> Self {
        let agenda: Arc<Mutex<Agenda>> = Arc::default();
        let faults: Vec<Fault> = scenario.faults().cloned().collect();
        let flips = |wire: usize| {
            faults.iter().find_map(|fault| match fault {
                Fault::Flip { wire: at, flip } if *at == wire => Some(*flip),
                _ => None,
            })
        };
        let nodes = scenario.processes * scenario.lanes;
        let bitmaps: Vec<Arc<SimulatedBitmap>> = (0..nodes).map(|_| Arc::default()).collect();
        let wires = scenario.wires.iter().enumerate().map(|(index, (ends, spec))| {
            let mut spec = spec.clone();
            spec.flip = flips(index);
            Wire::new(index, ends.map(|process| (process, &bitmaps[process])), spec, &agenda)
        });
        let wires: Vec<_> = wires.collect();
        let threads = |node| scenario.steps.get(node).map_or(&[][..], Vec::as_slice);
        let mut processes: Vec<Process> = (0..nodes).map(|node| Process::new(scenario, threads(node))).collect();
        for (process, host) in processes.iter_mut().enumerate() {
            let payload = scenario.segment as usize + accl_wire::frame::OVERHEAD_BYTES;
            let Some(core) = &mut host.core else { continue };
            let wakes = agenda.clone();
            core.set_wake(Arc::new(move || wakes.lock().enter(200, Event::Ring { process })));
            core.net.set_bitmap(bitmaps[process].clone());
            core.net.set_polls_before_arming(scenario.polls_before_arming);
            for (wire, (ends, _)) in wires.iter().zip(&scenario.wires) {
                if let Some(end) = ends.iter().position(|&at| at == process) {
                    let peer = core.net.introduce(&info(ends[1 - end]), wire.lock().is_ring());
                    if scenario.linking == Linking::AtFirst {
                        let slot = wire.lock().slot(end);
                        core.net.attach(peer, Box::new(SimulatedLink::new(wire, end)), Some(slot));
                    }
                    host.peers[ends[1 - end]] = Some(peer);
                }
            }
            let own = self_link(payload);
            host.peers[process] = Some(core.net.add(&info(process), Box::new(own), None));
            // The processes know of the groups before any process has created one.
            let (process, lane) = (process % scenario.processes, process / scenario.processes);
            for (index, spec) in (1..).zip(&scenario.groups).filter(|(_, spec)| spec.rank_of(process).is_some()) {
                let peer = |&member: &usize| host.peers[scenario.node(member, lane)];
                core.expect_group(index, spec.members.iter().filter_map(peer).collect());
            }
        }
        let devices: Arc<Mutex<Devices>> = Arc::default();
        for (index, group) in scenario.groups.iter().enumerate() {
            devices.lock().add_group(index, group.members.len());
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
            linked_at: BTreeMap::new(),
            notes: Vec::new(),
            questions: Vec::new(),
            processes,
            made,
            faults,
            struck,
            failed_at: BTreeMap::new(),
            seen,
            external_tasks: Arc::default(),
            devices,
            reserved: BTreeMap::new(),
            bits,
            jobs: Arc::default(),
            failures: Vec::new(),
        }
    }

    pub(super) fn enter(&self, wait: u64, event: Event) {
        self.agenda.lock().enter(wait, event);
    }

    pub(super) fn living(&self) -> impl Iterator<Item = (usize, &Process)> {
        self.processes.iter().enumerate().filter(|(_, host)| host.core.is_some())
    }

    pub(super) fn calls_of(&self, process: usize) -> impl Iterator<Item = (usize, &Made)> {
        let calls = self.made.iter().filter(move |((_, by), _)| *by == process);
        calls.map(|((item, _), made)| (*item, made))
    }

    pub(super) fn unfinished(&self) -> String {
        let calls = self.living().flat_map(|(process, _)| {
            let open = self.calls_of(process).filter(|(_, made)| made.outcome().is_none());
            open.map(move |(item, _)| format!("process {process} item {item}"))
        });
        let threads = self.living().map(|(process, host)| {
            let states: Vec<State> = host.threads.iter().map(|thread| thread.state).collect();
            format!("process {process} {states:?} sleep {:?}", host.sleep)
        });
        let now = clock::nanos();
        let devices = self.devices.lock().to_string();
        format!(
            "{}; {} {devices}at {now}",
            calls.collect::<Vec<_>>().join(", "),
            threads.collect::<Vec<_>>().join(", ")
        )
    }

    pub(super) fn is_over(&self, item: usize, process: usize) -> bool {
        self.made.get(&(item, process)).is_none_or(|made| made.outcome().is_some())
    }

    pub(super) fn state(&self, process: usize, group: usize) -> Option<&GroupState> {
        let host = &self.processes[process];
        host.core.as_ref()?.group(host.members.get(&group)?.caller.group)
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
            driver: None,
            sleeps: 0,
            is_about_to_drive: false,
            peers: vec![None; scenario.processes * scenario.lanes],
            died_at: None,
            peer_probe: PeerProbe::default(),
        }
    }
}

/// Returns the endpoint information of a process.
pub(super) fn info(process: usize) -> EndpointInfo {
    EndpointInfo {
        version: accl_wire::PROTOCOL_VERSION,
        uuid: [process as u8; 16],
        pid: process as u32,
        uid: 0,
        hostname: format!("process-{process}"),
        host_id: "simulated".to_owned(),
        addresses: Vec::new(),
        unix_name: String::new(),
        transports: Vec::new(),
        lanes: 1,
    }
}

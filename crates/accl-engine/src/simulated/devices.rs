//! The devices of a simulated world: those of a group do whole collectives among each other, at moments of their own, or do not.
//!
//! Owns what each device has been given. A device does one task at a time, in the order in which they were begun, and a collective goes on
//! only when it is the current task on the devices of all ranks: were the order another one on some rank, they would wait for each other.
//! A task writes when the collective goes on and when it ends, so that memory which was given back too early is seen to be written.
//! Read [`Devices::begin`] and [`Fleet::go_on`] first.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use accl_testkit::Rng;
use accl_types::{Collective, Dtype, ErrorKind, Rank, ReduceOp};

use super::clock::{Agenda, Event};
use super::oracle::{both, bytes_of, number_of};
use super::scenario::Breaks;
use crate::sync::Mutex;
use accl_executor::call::{CallDesc, External, ExternalTask};
use accl_executor::memory::CollectiveMemory;

/// A rank's part in a collective takes up to so many nanoseconds once it goes on, and seldom longer.
const MOST: u64 = 300_000;
const MOST_SELDOM: u64 = 20_000_000;
/// Until a device that is asked to stop does so, at most.
const MOST_STOPPING: u64 = 400_000;

/// What ranks must agree on before a device hears of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    collective: Collective,
    dtype: Dtype,
    op: Option<ReduceOp>,
    root: Option<Rank>,
    /// Bytes of a rank's blocks, of whichever side has more.
    bytes: u64,
}

impl Terms {
    pub(super) fn of(desc: &CallDesc, world: u64) -> Self {
        let &CallDesc { collective, dtype, op, root, .. } = desc;
        // Off the root there is one block alone.
        let blocks = if matches!(collective, Collective::Gather | Collective::Scatter) { world } else { 1 };
        let own = if collective == Collective::Gather { &desc.inputs } else { &desc.outputs };
        let bytes = match blocks {
            1 => desc.bytes(),
            blocks => own.pieces().iter().map(|piece| piece.len_bytes()).sum::<u64>() * blocks,
        };
        let (op, root) = (collective.reduces().then_some(op), collective.is_rooted().then_some(root));
        Self { collective, dtype, op, root, bytes }
    }
}

/// The devices of all groups.
#[derive(Default)]
pub(super) struct Devices {
    fleets: BTreeMap<usize, Fleet>,
    begun: u64,
    /// What must not have happened.
    violation: Option<String>,
}

/// The devices of one group.
#[derive(Default)]
struct Fleet {
    /// By rank.
    units: Vec<Unit>,
    /// The calls that ranks have made: by number and rank.
    made: BTreeMap<(u64, usize), Terms>,
    /// What ranks have given to calls that are over on their devices, and not on others.
    given: BTreeMap<(u64, usize), Vec<u8>>,
}

/// The device of one rank.
#[derive(Default)]
struct Unit {
    jobs: VecDeque<Job>,
    latest: Option<u64>,
    /// It takes no more tasks.
    is_dead: bool,
}

struct Job {
    task: ExternalTask,
    number: u64,
    seq: u64,
    breaks: Option<Breaks>,
    /// How long it takes once it goes on.
    takes: u64,
    /// It does not wait for others if it only gives.
    is_eager: bool,
    /// What it writes at its end: it goes on.
    result: Option<Vec<u8>>,
    /// It is asked to stop, and has a turn for that.
    stops: bool,
    /// Its deadline has passed.
    is_late: bool,
}

/// Tasks that are given back when the lock is.
type Given = Vec<(ExternalTask, End)>;

enum End {
    Done,
    Fails(ErrorKind, &'static str),
    Drops,
}

fn give_back(given: Given) {
    for (task, end) in given {
        match end {
            End::Done => task.done(),
            End::Fails(kind, why) => task.fail_as(kind, why),
            End::Drops => drop(task),
        }
    }
}

/// One rank's call, for its device.
pub(super) struct DeviceCall {
    pub(super) devices: Arc<Mutex<Devices>>,
    pub(super) agenda: Arc<Mutex<Agenda>>,
    pub(super) group: usize,
    pub(super) rank: usize,
    pub(super) terms: Terms,
    pub(super) breaks: Option<Breaks>,
    pub(super) seed: u64,
}

impl fmt::Debug for DeviceCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device of rank {} of group {}", self.rank, self.group)
    }
}

impl External for DeviceCall {
    fn name(&self) -> &str {
        "simulated"
    }

    fn begin(&self, task: ExternalTask) {
        let given = self.devices.lock().begin(self, task);
        give_back(given);
    }

    fn cancel(&self) {
        let mut devices = self.devices.lock();
        let Some(unit) = devices.fleets.get_mut(&self.group).and_then(|fleet| fleet.units.get_mut(self.rank)) else {
            return;
        };
        let mut rng = Rng::new(self.seed ^ 0xca);
        let asked = |job: &&mut Job| job.task.is_cancelled() && !job.stops && job.breaks != Some(Breaks::NeverStops);
        for job in unit.jobs.iter_mut().filter(asked) {
            job.stops = true;
            let event = Event::Device { group: self.group, rank: self.rank, job: job.number };
            self.agenda.lock().enter(rng.below(MOST_STOPPING), event);
        }
    }
}

impl Devices {
    pub(super) fn add_group(&mut self, group: usize, world: usize) {
        let units = (0..world).map(|_| Unit::default()).collect();
        self.fleets.insert(group, Fleet { units, ..Fleet::default() });
    }

    /// A rank has made a call for its device.
    pub(super) fn note_made(&mut self, group: usize, rank: usize, seq: u64, terms: Terms) {
        if let Some(fleet) = self.fleets.get_mut(&group) {
            fleet.made.insert((seq, rank), terms);
        }
    }

    pub(super) fn take_violation(&mut self) -> Option<String> {
        self.violation.take()
    }

    fn begin(&mut self, by: &DeviceCall, task: ExternalTask) -> Given {
        let (group, rank) = (by.group, by.rank);
        let number = self.begun;
        self.begun += 1;
        let (Some(fleet), Some(collective)) = (self.fleets.get_mut(&group), task.collective()) else {
            self.violation = Some(format!("a device of group {group} is given what is no collective"));
            return Given::new();
        };
        let (seq, deadline) = (collective.seq, collective.deadline);
        fleet.made.insert((seq, rank), by.terms.clone());
        for other in 0..fleet.units.len() {
            let theirs = fleet.made.get(&(seq, other));
            if theirs != Some(&by.terms) {
                self.violation.get_or_insert_with(|| {
                    format!(
                        "the device of rank {rank} of group {group} begins call {seq}, {:?}, and rank {other} has made {theirs:?}",
                        by.terms
                    )
                });
            }
        }
        let unit = &mut fleet.units[rank];
        if let Some(latest) = unit.latest.filter(|latest| *latest >= seq) {
            let text = format!("the device of rank {rank} of group {group} begins call {seq} after call {latest}");
            self.violation.get_or_insert(text);
        }
        unit.latest = Some(seq);
        if unit.is_dead {
            return vec![(task, End::Fails(ErrorKind::Device, "it takes no more calls"))];
        }
        let mut rng = Rng::new(by.seed);
        let draws = [rng.next_u64() % 8, rng.below(MOST), rng.below(MOST_SELDOM)];
        let is_eager = rng.next_u64().is_multiple_of(2);
        let takes = [draws[1], 0, draws[2]][if draws[0] < 2 { 1 } else { usize::from(draws[0] == 7) * 2 }];
        let breaks = by.breaks;
        let job = Job { task, number, seq, breaks, takes, is_eager, result: None, stops: false, is_late: false };
        unit.jobs.push_back(job);
        let mut agenda = by.agenda.lock();
        match breaks {
            Some(Breaks::Fails | Breaks::Drops) => {
                agenda.enter(draws[1], Event::Device { group, rank, job: number });
            }
            // Nobody looks at the time.
            Some(Breaks::Hangs | Breaks::AllHang | Breaks::NeverStops) => {}
            None => {
                if let Some(deadline) = deadline {
                    agenda.enter_at(deadline.nanos(), Event::DeviceIsLate { group, rank, job: number });
                }
            }
        }
        drop(agenda);
        let mut given = Given::new();
        fleet.go_on(group, &by.agenda, &mut given);
        given
    }

    /// A task's turn has come: it ends, one way or another. That of a process that is dead writes nothing.
    pub(super) fn turn(
        this: &Mutex<Self>,
        agenda: &Mutex<Agenda>,
        (group, rank, number): (usize, usize, u64),
        is_alive: bool,
    ) {
        let mut given = Given::new();
        if let Some(fleet) = this.lock().fleets.get_mut(&group) {
            fleet.turn((group, rank, number), is_alive, &mut given);
            fleet.go_on(group, agenda, &mut given);
        }
        give_back(given);
    }

    /// The deadline of a task has come.
    pub(super) fn is_late(this: &Mutex<Self>, (group, rank, number): (usize, usize, u64)) {
        let mut given = Given::new();
        if let Some(unit) = this.lock().fleets.get_mut(&group).and_then(|fleet| fleet.units.get_mut(rank)) {
            unit.jobs.iter_mut().filter(|job| job.number == number).for_each(|job| job.is_late = true);
            unit.heed_deadline(&mut given);
        }
        give_back(given);
    }
}

impl Fleet {
    /// Has the collective go on that is the current task of all devices, and whatever follows it.
    fn go_on(&mut self, group: usize, agenda: &Mutex<Agenda>, given: &mut Given) {
        loop {
            self.units.iter_mut().for_each(|unit| unit.heed_deadline(given));
            if self.give(given) {
                continue;
            }
            let Some(seq) = self.units.iter().filter_map(Unit::head).map(|job| job.seq).min() else { return };
            let current = |unit: &Unit| unit.head().filter(|job| job.seq == seq).map(|job| input_of(&job.task));
            let input = |(rank, unit)| self.given.get(&(seq, rank)).cloned().or_else(|| current(unit));
            let inputs: Option<Vec<Vec<u8>>> = self.units.iter().enumerate().map(input).collect();
            let Some(inputs) = inputs else { return };
            self.given.retain(|&(of, _), _| of != seq);
            for (rank, unit) in self.units.iter_mut().enumerate() {
                let Some(job) = unit.jobs.front_mut().filter(|job| job.seq == seq) else { continue };
                let result = result_of(&job.task, rank, &inputs);
                let half = result.len() / 2;
                write(&job.task, 0, &result[..half]);
                job.result = Some(result);
                let event = Event::Device { group, rank, job: job.number };
                match job.takes {
                    0 => unit.finish(given),
                    takes => agenda.lock().enter(takes, event),
                }
            }
        }
    }

    /// Whoever only gives something to a call may be done when it is on its way. Returns whether somebody was.
    fn give(&mut self, given: &mut Given) -> bool {
        let mut has_given = false;
        for (rank, unit) in self.units.iter_mut().enumerate() {
            if let Some(job) = unit.head().filter(|job| job.is_eager && only_gives(&job.task, rank)) {
                self.given.insert((job.seq, rank), input_of(&job.task));
                unit.finish(given);
                has_given = true;
            }
        }
        has_given
    }

    fn turn(&mut self, (_, rank, number): (usize, usize, u64), is_alive: bool, given: &mut Given) {
        let Some(unit) = self.units.get_mut(rank) else { return };
        let Some(at) = unit.jobs.iter().position(|job| job.number == number) else { return };
        // What is asked to stop may be done before it has heard of it.
        if at == 0 && is_alive && unit.jobs[at].result.is_some() {
            return unit.finish(given);
        }
        let Some(job) = unit.jobs.remove(at) else { return };
        let end = match job.breaks {
            Some(Breaks::Fails) if is_alive && !job.stops => End::Fails(ErrorKind::Device, "the world wants it"),
            _ => End::Drops,
        };
        given.push((job.task, end));
        unit.die(given);
    }
}

impl Unit {
    /// The task that waits for those of the other devices, if it is done at all.
    fn head(&self) -> Option<&Job> {
        self.jobs.front().filter(|job| job.breaks.is_none() && job.result.is_none() && !job.task.is_cancelled())
    }

    fn finish(&mut self, given: &mut Given) {
        let Some(job) = self.jobs.pop_front() else { return };
        let result = job.result.unwrap_or_default();
        let half = result.len() / 2;
        write(&job.task, half as u64, &result[half..]);
        given.push((job.task, End::Done));
    }

    /// A device looks at the deadline of its current task, and is of no use after one.
    fn heed_deadline(&mut self, given: &mut Given) {
        let is_late = |job: &&Job| job.is_late && !job.stops;
        if self.jobs.front().filter(is_late).is_some()
            && let Some(job) = self.jobs.pop_front()
        {
            given.push((job.task, End::Fails(ErrorKind::Timeout, "the device has waited in vain")));
            self.die(given);
        }
    }

    /// It takes no more tasks. Those that are to stop have their turns for that.
    fn die(&mut self, given: &mut Given) {
        self.is_dead = true;
        let (kept, failed) = self.jobs.drain(..).partition(|job| job.stops || job.task.is_cancelled());
        let failed: VecDeque<Job> = failed;
        self.jobs = kept;
        given.extend(failed.into_iter().map(|job| (job.task, End::Fails(ErrorKind::Device, "it takes no more calls"))));
    }
}

fn bytes(blocks: &accl_executor::call::Blocks) -> usize {
    blocks.pieces().iter().map(|piece| piece.len_bytes() as usize).sum()
}

fn input_of(task: &ExternalTask) -> Vec<u8> {
    let Some(memory) = CollectiveMemory::of(task) else { return Vec::new() };
    let mut input = vec![0; bytes(&memory.collective().inputs)];
    match memory.read_input(0, &mut input) {
        true => input,
        false => Vec::new(),
    }
}

fn write(task: &ExternalTask, at: u64, from: &[u8]) {
    if let Some(mut memory) = CollectiveMemory::of(task) {
        // Of a task that is cancelled nothing is written.
        let _ = memory.write_output(at, from);
    }
}

/// Whether the outputs of a rank do not depend on the others.
fn only_gives(task: &ExternalTask, rank: usize) -> bool {
    task.collective().is_some_and(|collective| match collective.collective {
        Collective::Broadcast => rank == collective.root.index(),
        Collective::Reduce | Collective::Gather => rank != collective.root.index(),
        // A root has its own block, too.
        _ => false,
    })
}

/// What a rank has in its outputs when a collective is done; nothing off the root of a reduce.
fn result_of(task: &ExternalTask, rank: usize, inputs: &[Vec<u8>]) -> Vec<u8> {
    let Some(collective) = task.collective() else { return Vec::new() };
    let (root, world) = (collective.root.index(), inputs.len());
    let block = |from: &[u8], index: usize| from[index * from.len() / world..(index + 1) * from.len() / world].to_vec();
    match collective.collective {
        Collective::AllReduce => combined(inputs, collective.dtype, collective.op),
        Collective::Reduce if rank == root => combined(inputs, collective.dtype, collective.op),
        Collective::ReduceScatter => block(&combined(inputs, collective.dtype, collective.op), rank),
        Collective::Broadcast => inputs[root].clone(),
        Collective::AllGather => inputs.concat(),
        Collective::Gather if rank == root => inputs.concat(),
        Collective::Scatter => block(&inputs[root], rank),
        Collective::AllToAll => inputs.iter().flat_map(|input| block(input, rank)).collect(),
        Collective::Reduce | Collective::Gather | Collective::Barrier | Collective::Send | Collective::Recv => {
            Vec::new()
        }
    }
}

fn combined(inputs: &[Vec<u8>], dtype: Dtype, op: ReduceOp) -> Vec<u8> {
    let size = dtype.size_bytes();
    let number = |bytes: &[u8]| {
        let mut word = [0; 8];
        word[..size].copy_from_slice(bytes);
        number_of(dtype, word) as i64
    };
    let of = |at: usize| {
        let all = inputs.iter().map(|input| number(&input[at * size..(at + 1) * size]));
        bytes_of(dtype, all.reduce(|a, b| both(op, a, b)).unwrap_or(0))
    };
    let count = inputs.iter().map(Vec::len).min().unwrap_or(0) / size;
    (0..count).flat_map(|at| of(at)[..size].to_vec()).collect()
}

/// What has been given to devices and has not come back, in words.
impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (group, fleet) in &self.fleets {
            for (rank, unit) in fleet.units.iter().enumerate().filter(|(_, unit)| !unit.jobs.is_empty()) {
                let calls: Vec<u64> = unit.jobs.iter().map(|job| job.seq).collect();
                write!(f, "the device of rank {rank} of group {group} has calls {calls:?}; ")?;
            }
        }
        Ok(())
    }
}

//! The devices of a simulated world. The devices of one group run whole collectives among each other, after random
//! delays, or break.
//!
//! Owns the tasks of each device. A device runs one task at a time, in the order in which tasks were begun. A
//! collective runs only when it is the current task on the devices of all ranks, so different orders on two ranks would
//! deadlock.
//!
//! A task writes once when the collective starts and once when it ends. A write to memory that was released too early
//! is therefore detected. Read [`Devices::begin`] and [`Fleet::go_on`] first.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use accl_testkit::Rng;
use accl_types::{Collective, Dtype, ErrorKind, Rank, ReduceOp};

use super::clock::{Agenda, Event};
use super::oracle::{both, bytes_of, number_of};
use super::scenario::Breaks;
use accl_engine::sync::Mutex;
use accl_executor::call::{CallDesc, External, ExternalTask};
use accl_executor::memory::CollectiveMemory;

/// Maximum nanoseconds that a rank's part of a collective takes once it runs; `MOST_SELDOM` applies to one task in
/// eight.
const MOST: u64 = 300_000;
const MOST_SELDOM: u64 = 20_000_000;
/// Maximum nanoseconds until a device that was asked to stop does so.
const MOST_STOPPING: u64 = 400_000;

/// Properties of a call that all ranks must agree on before a device is given the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Terms {
    collective: Collective,
    dtype: Dtype,
    op: Option<ReduceOp>,
    root: Option<Rank>,
    /// Bytes of all blocks on the side (inputs or outputs) that has more; for gather and scatter, of all ranks' blocks.
    bytes: u64,
}

impl Terms {
    pub(super) fn of(desc: &CallDesc, world: u64) -> Self {
        let &CallDesc { collective, dtype, op, root, .. } = desc;
        // Ranks other than the root have one block only, so gather and scatter count the own block once for each rank.
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

/// Devices of all groups.
#[derive(Default)]
pub(super) struct Devices {
    fleets: BTreeMap<usize, Fleet>,
    begun: u64,
    /// First violation that was found.
    violation: Option<String>,
}

/// Devices of one group.
#[derive(Default)]
struct Fleet {
    /// Devices by rank.
    units: Vec<Unit>,
    /// Terms of the calls that ranks have issued, by sequence number and rank.
    made: BTreeMap<(u64, usize), Terms>,
    /// Inputs of ranks whose devices have completed a call that other devices have not, by sequence number and rank.
    given: BTreeMap<(u64, usize), Vec<u8>>,
}

/// Device of one rank.
#[derive(Default)]
struct Unit {
    jobs: VecDeque<Job>,
    latest: Option<u64>,
    /// The device accepts no more tasks.
    is_dead: bool,
}

struct Job {
    task: ExternalTask,
    number: u64,
    seq: u64,
    breaks: Option<Breaks>,
    /// Nanoseconds from the start of the collective to the end of this task.
    takes: u64,
    /// The task does not wait for the other devices if its rank only contributes data.
    is_eager: bool,
    /// Output bytes to write; `Some` once the collective runs.
    result: Option<Vec<u8>>,
    /// The task was asked to stop, and an event at which it stops is on the agenda.
    stops: bool,
    /// The deadline has passed.
    is_late: bool,
}

/// Tasks to complete once the lock on [`Devices`] is released.
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

/// One rank's call as its device receives it.
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

    /// Records a call that a rank has issued for its device.
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
            // These tasks ignore the deadline.
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

    /// Handles an [`Event::Device`]: the task ends, one way or another. The task of a dead process writes nothing.
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

    /// Handles an [`Event::DeviceIsLate`].
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
    /// Starts the collective that is the current task of all devices, and every collective that can start after it.
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

    /// Completes tasks of ranks that only contribute data, before the other devices have begun. Returns whether it
    /// completed any.
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
        // A task that was asked to stop may complete before it notices.
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
    /// Returns the current task if it waits for the other devices. A task that breaks, runs or is cancelled does not
    /// wait.
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

    /// Fails the current task if its deadline has passed. The device is dead afterwards.
    fn heed_deadline(&mut self, given: &mut Given) {
        let is_late = |job: &&Job| job.is_late && !job.stops;
        if self.jobs.front().filter(is_late).is_some()
            && let Some(job) = self.jobs.pop_front()
        {
            given.push((job.task, End::Fails(ErrorKind::Timeout, "the device has waited in vain")));
            self.die(given);
        }
    }

    /// Stops accepting tasks and fails the queued ones. Tasks that are to stop stay: an event ends each of them.
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
        // `write_output` refuses to write for a cancelled task.
        let _ = memory.write_output(at, from);
    }
}

/// Whether a rank's outputs do not depend on the other ranks.
fn only_gives(task: &ExternalTask, rank: usize) -> bool {
    task.collective().is_some_and(|collective| match collective.collective {
        Collective::Broadcast => rank == collective.root.index(),
        Collective::Reduce | Collective::Gather => rank != collective.root.index(),
        // The root of a scatter also has its own block, so it does not only give.
        _ => false,
    })
}

/// Returns a rank's outputs after a collective; empty if the rank has none, as at a rank other than the root of a
/// reduce.
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

/// Lists the calls that devices were given and have not completed.
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

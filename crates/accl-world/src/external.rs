//! A stand-in for the device of staged calls in a simulated world: it copies piece by piece after random delays, or
//! breaks. For half of the encoded calls it computes the tiles instead, so that nothing is copied.
//!
//! Owns the tasks in flight. A task writes once when it begins and once when it ends, and copies and tiles are reported late
//! and out of step with the writing. So use of bytes that have not arrived, a copy of bytes that are not final, and a write
//! to memory that was released too early are detected. Read [`ExternalTasks::turn`] first.

use std::any::Any;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use accl_testkit::publisher::Published;
use accl_testkit::{Rng, tile_coder};
use accl_types::{Dtype, Result};

use super::clock::{Agenda, Event};
use super::scenario::Breaks;
use accl_engine::sync::Mutex;
use accl_executor::call::{
    Codecs, CoderNeeds, External, ExternalCopy, ExternalTask, LentMemory, Publisher, PublishingNeeds, Staging,
};

/// Maximum nanoseconds until a task goes on.
const MOST: u64 = 300_000;
/// Maximum nanoseconds until a task that was asked to stop does so.
const MOST_STOPPING: u64 = 400_000;

/// Tasks of all processes.
#[derive(Default)]
pub(super) struct ExternalTasks {
    tasks: BTreeMap<u64, Running>,
    begun: u64,
}

struct Running {
    task: ExternalTask,
    published: Option<Arc<Published>>,
    breaks: Option<Breaks>,
    lingering: Option<Arc<Mutex<Lingering>>>,
    /// An event for the task is on the agenda.
    is_due: bool,
    /// The task was asked to stop, and an event at which it stops is on the agenda.
    stops: bool,
    /// Copies or tiles that were written, but not reported yet. They may be reported late and out of step with the writing.
    written: usize,
    rng: Rng,
}

/// Copy-ins of one call that have copied everything, and end only when the first copy-out begins. So a call that goes on
/// at the end of its copy-in, and not as soon as bytes arrive, hangs.
#[derive(Default)]
pub(super) struct Lingering {
    tasks: Vec<u64>,
    copies_out: bool,
}

/// Runs the external operations of one call.
pub(super) struct Device {
    external_tasks: Arc<Mutex<ExternalTasks>>,
    agenda: Arc<Mutex<Agenda>>,
    process: usize,
    breaks: Option<Breaks>,
    /// Set if the copy-ins of the call linger.
    lingering: Option<Arc<Mutex<Lingering>>>,
    /// Size of the ring of a message.
    ring_bytes: u64,
    /// Whether the device computes the tiles of encoded calls.
    is_coder: bool,
    /// Published chunks of the rank, if the call is by reference.
    published: Option<Arc<Published>>,
    rng: Mutex<Rng>,
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device of process {}", self.process)
    }
}

impl Device {
    pub(super) fn new(
        external_tasks: &Arc<Mutex<ExternalTasks>>,
        agenda: &Arc<Mutex<Agenda>>,
        process: usize,
        breaks: Option<Breaks>,
        lingers: bool,
        segment: u64,
        seed: u64,
    ) -> Self {
        let rng = Mutex::new(Rng::new(seed));
        let (external_tasks, agenda) = (external_tasks.clone(), agenda.clone());
        let (lingering, ring_bytes) = (lingers.then(Arc::default), (segment * 8).div_ceil(7) << (seed % 3));
        let is_coder = (seed / 4).is_multiple_of(2);
        Self { external_tasks, agenda, process, breaks, lingering, ring_bytes, is_coder, published: None, rng }
    }

    /// Returns a worker for other copies of the same call.
    fn another(&self) -> Self {
        let rng = Mutex::new(Rng::new(self.rng.lock().next_u64()));
        let (external_tasks, agenda) = (self.external_tasks.clone(), self.agenda.clone());
        let lingering = self.lingering.clone();
        let (process, breaks, ring_bytes, is_coder) = (self.process, self.breaks, self.ring_bytes, self.is_coder);
        let published = self.published.clone();
        Self { external_tasks, agenda, process, breaks, lingering, ring_bytes, is_coder, published, rng }
    }

    fn below(&self, bound: u64) -> u64 {
        self.rng.lock().below(bound)
    }
}

impl Staging for Device {
    /// Lends memory that holds no zeros, so that bytes which nothing has written are seen.
    fn lend(&self, len_bytes: usize) -> Result<Option<LentMemory>> {
        Ok(self.is_coder.then(|| LentMemory::pageable(vec![0xcc; len_bytes].into())))
    }

    fn copy_in(&self, _: &[ExternalCopy], _: usize, _: &Arc<dyn Any + Send + Sync>) -> Result<Arc<dyn External>> {
        Ok(Arc::new(self.another()))
    }

    fn ring_bytes(&self) -> u64 {
        self.ring_bytes
    }

    fn copy_out(&self) -> Arc<dyn External> {
        Arc::new(self.another())
    }

    fn publisher(&self, needs: PublishingNeeds) -> Result<Publisher> {
        let published = Arc::new(Published::new(needs));
        let scratch = published.scratch();
        Ok(Publisher { worker: Arc::new(Self { published: Some(published), ..self.another() }), scratch })
    }

    fn coder(&self, _: &Codecs, _: Dtype, _: CoderNeeds) -> Option<Arc<dyn External>> {
        self.is_coder.then(|| Arc::new(self.another()) as Arc<dyn External>)
    }
}

impl External for Device {
    fn name(&self) -> &str {
        "simulated"
    }

    fn begin(&self, task: ExternalTask) {
        let ready = task.ready_copies();
        if let Some(lingering) = self.lingering.as_ref().filter(|_| task.is_copy_out()) {
            let mut lingering = lingering.lock();
            lingering.copies_out = true;
            for number in lingering.tasks.drain(..) {
                self.agenda.lock().enter(self.below(MOST), Event::External { process: self.process, task: number });
            }
        }
        if self.breaks.is_none() && self.lingering.is_none() && self.below(4) == 0 && ready == task.units() {
            write_all(&task, self.published.as_deref(), 0..ready, Half::Both);
            return task.done();
        }
        let published = self.published.clone();
        // A reduction in place must not be done twice.
        if task.reduction().is_none() {
            write_all(&task, published.as_deref(), 0..ready.min(1), Half::First);
        }
        let mut external_tasks = self.external_tasks.lock();
        let number = external_tasks.begun;
        external_tasks.begun += 1;
        let is_copy_in = !task.is_copy_out() && task.combination().is_none() && task.reduction().is_none();
        let (breaks, lingering) = (self.breaks, self.lingering.clone().filter(|_| is_copy_in));
        let rng = Rng::new(self.rng.lock().next_u64());
        let running = Running { task, published, breaks, lingering, is_due: false, stops: false, written: 0, rng };
        external_tasks.tasks.insert(number, running);
        drop(external_tasks);
        self.copies_are_ready();
    }

    fn copies_are_ready(&self) {
        for (&number, running) in &mut self.external_tasks.lock().tasks {
            running.plan(number, self.process, &self.agenda);
        }
    }

    fn cancel(&self) {
        for (&number, running) in &mut self.external_tasks.lock().tasks {
            if !running.task.is_cancelled() || running.breaks == Some(Breaks::NeverStops) || running.stops {
                continue;
            }
            running.stops = true;
            let wait = self.below(MOST_STOPPING);
            self.agenda.lock().enter(wait, Event::External { process: self.process, task: number });
        }
    }
}

impl Running {
    /// Puts the next event of the task on the agenda, if it has something to do.
    fn plan(&mut self, number: u64, process: usize, agenda: &Mutex<Agenda>) {
        match self.breaks {
            None | Some(Breaks::Fails | Breaks::Drops) => {}
            // The task waits until it is asked to stop.
            Some(Breaks::Hangs | Breaks::AllHang | Breaks::NeverStops) => return,
        }
        let has_work = self.task.made_copies() < self.task.ready_copies();
        if has_work && !self.is_due && !self.stops {
            self.is_due = true;
            agenda.lock().enter(self.rng.below(MOST), Event::External { process, task: number });
        }
    }

    fn is_over(&self) -> bool {
        self.task.made_copies() == self.task.units()
    }

    /// Returns whether the task ends only when a copy-out of its call begins.
    fn lingers(&self, number: u64) -> bool {
        let Some(lingering) = &self.lingering else { return false };
        let mut lingering = lingering.lock();
        if !lingering.copies_out {
            lingering.tasks.push(number);
        }
        !lingering.copies_out
    }

    /// Writes some of the copies that are ready, and reports some of those that are written.
    fn copy(&mut self) {
        let ready = self.task.ready_copies();
        if self.is_over() {
            return;
        }
        let end = self.written + self.rng.below((ready - self.written) as u64 + 1) as usize;
        let end = if self.task.made_copies() == self.written { end.max(self.written + 1).min(ready) } else { end };
        write_all(&self.task, self.published.as_deref(), self.written..end, Half::Both);
        self.written = end;
        let made = self.task.made_copies();
        self.task.note_made(made + 1 + self.rng.below((end - made) as u64) as usize);
    }
}

impl Running {
    /// Ends a task that was asked to stop. It may complete before it notices, and writes in any case.
    fn stop(mut self) {
        let ready = self.task.ready_copies();
        if ready == self.task.units() && self.breaks.is_none() && self.rng.below(2) == 0 {
            write_all(&self.task, self.published.as_deref(), self.written..ready, Half::Both);
            return self.task.done();
        }
        let end = ready.min(self.written.max(1));
        let begin = if self.task.reduction().is_some() { self.written } else { 0 };
        write_all(&self.task, self.published.as_deref(), begin..end, Half::Second);
        match self.breaks {
            Some(Breaks::Fails) => self.task.fail("the world wants it"),
            None | Some(Breaks::Drops | Breaks::Hangs | Breaks::AllHang | Breaks::NeverStops) => drop(self.task),
        }
    }
}

impl ExternalTasks {
    /// Handles an [`Event::External`]: the task goes on, or ends. The task of a dead process writes nothing.
    pub(super) fn turn(this: &Mutex<Self>, number: u64, process: usize, agenda: &Mutex<Agenda>, is_alive: bool) {
        let Some(mut running) = this.lock().tasks.remove(&number) else { return };
        if !is_alive {
            return;
        }
        running.is_due = false;
        if running.stops {
            running.stop();
            return;
        }
        let was_over = running.is_over();
        running.copy();
        let is_over = running.is_over();
        match running.breaks {
            None if is_over && !was_over && running.lingers(number) => {
                this.lock().tasks.insert(number, running);
            }
            None if is_over => running.task.done(),
            Some(Breaks::Fails) if is_over || running.rng.below(2) == 0 => running.task.fail("the world wants it"),
            Some(Breaks::Drops) if is_over || running.rng.below(2) == 0 => drop(running.task),
            None | Some(_) => {
                running.plan(number, process, agenda);
                this.lock().tasks.insert(number, running);
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Half {
    First,
    Second,
    Both,
}

/// Makes some of the copies of a task that are ready, or computes some of its tiles. Half of a tile is a whole one.
fn write_all(task: &ExternalTask, published: Option<&Published>, range: Range<usize>, half: Half) {
    if let Some((reduction, published)) = task.reduction().zip(published) {
        // SAFETY: as for a combination below; published memory outlives the calls that read it.
        return unsafe { published.reduce(reduction, range) };
    }
    match task.combination() {
        // SAFETY: the addresses are memory of this process; the tiles are ready, and only this task may access them.
        Some(combination) => unsafe { tile_coder::combine(combination, range.start as u32..range.end as u32) },
        // In the order in which a bus with several streams might write them.
        None => task.copies()[range].iter().rev().for_each(|copy| write(task, copy, half)),
    }
}

fn write(task: &ExternalTask, copy: &ExternalCopy, half: Half) {
    let len = copy.host.len_bytes() as usize;
    let range = match half {
        Half::First => 0..len / 2,
        Half::Second => len / 2..len,
        Half::Both => 0..len,
    };
    // SAFETY: the tensor is dense and has these bytes, and only this task may access them and their host memory until
    // it reports the copy or ends.
    unsafe {
        let device = copy.tensor.address().add(copy.at as usize + range.start);
        let host = copy.host.address().add(range.start);
        let (source, target) = if task.is_copy_out() { (host, device) } else { (device, host) };
        std::ptr::copy(source, target, range.len());
    }
}

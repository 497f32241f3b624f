//! The thread of a device: it opens the device, does the collectives that it is given one after the other, and checks
//! their deadlines.
//!
//! Owns the driver. A collective cannot go on if it is late or its call has failed. The device is then unusable,
//! because an engine cannot be interrupted. Read [`Worker::perform`] first.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use accl_cclo::bus::Bus;
use accl_cclo::call::{Descriptor, Operation};
use accl_cclo::device::DeviceUrl;
use accl_cclo::driver::{Driver, Pauses, Settings};
use accl_cclo::memory_map::{DataType, ReduceFunction};
use accl_cclo::offload::{CollectiveRequest, DeviceRoute, Piece, Pieces};
use accl_engine::{CollectiveMemory, ExternalCollective, ExternalTask, TensorDesc, block_signals, now};
use accl_types::{Collective, Error, ErrorKind, Moment, Result};

use super::handle::DeviceTask;
use super::port::Port;
use super::shared::{DeviceState, LAST_WORDS, OpenBus};
use super::staging::{STAGING_BYTES, Segment, Staging, Until};

/// Number of polls of a call that follow each other without a pause.
const EAGER_POLLS: u32 = 8;

/// Extra time after the deadline of a call in which the device may answer.
const LATE_ANSWER: Duration = Duration::from_millis(500);

/// Maximum time for reading the state of a device that does not return.
const DIAGNOSIS: Duration = Duration::from_secs(1);

/// The values that the thread starts with.
pub(super) struct Start {
    pub(super) url: DeviceUrl,
    pub(super) settings: Settings,
    pub(super) shared: Arc<DeviceState>,
    pub(super) port: Arc<Port>,
    pub(super) deadline: Moment,
}

/// Progress of the thread in opening the device.
pub(super) enum OpenStep {
    /// The device was reached. The text goes to all ranks, and the thread waits for the texts of all ranks; `None` if
    /// there is no exchange.
    Reached(Option<String>),
    /// The device is set up, and waits until the devices of all ranks are.
    SetUp,
    /// The device accepts collectives.
    Open,
}

/// Notification to the thread while it opens the device.
pub(super) enum OpenEvent {
    /// The texts of the devices of all ranks, in rank order.
    AllTexts(Vec<String>),
    /// The devices of all ranks are set up.
    AllAreSetUp,
}

/// State of the thread once the device is open.
struct Worker {
    url: DeviceUrl,
    driver: Driver<Box<dyn Bus>>,
    staging: Staging,
    shared: Arc<DeviceState>,
}

/// Why a collective was not done.
enum Stop {
    /// Its call has failed for another reason.
    Cancelled,
    Failed(Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Stop::Failed(error)
    }
}

/// Values that all pieces of a collective share.
struct Calls {
    operation: Operation,
    elements: DataType,
    function: ReduceFunction,
    on_wire: DataType,
    root: u32,
}

impl Start {
    /// Runs the thread. It reports each step, and returns once no receiver of its steps or sender of tasks is left.
    pub(super) fn run(
        self,
        opener: &dyn OpenBus,
        steps: &Sender<Result<OpenStep>>,
        events: &Receiver<OpenEvent>,
        tasks: &Receiver<DeviceTask>,
    ) {
        block_signals();
        self.port.belongs_to_this_thread();
        let mut worker = match self.open(opener, steps, events) {
            Ok(Some(worker)) => worker,
            Ok(None) => return,
            Err(error) => return drop(steps.send(Err(error))),
        };
        if steps.send(Ok(OpenStep::Open)).is_err() {
            return;
        }
        // Ends when the last sender is dropped.
        while let Ok(task) = tasks.recv() {
            worker.serve(task);
        }
    }

    /// Opens the device. Returns `None` if the device is no longer wanted.
    fn open(
        self,
        opener: &dyn OpenBus,
        steps: &Sender<Result<OpenStep>>,
        events: &Receiver<OpenEvent>,
    ) -> Result<Option<Worker>> {
        let Self { url, mut settings, shared, port, deadline } = self;
        let is_closed = shared.clone();
        let mut go_on = || now() < deadline && !is_closed.is_closed.load(Ordering::Relaxed);
        let memory = settings.memory;
        let mut bus = opener.open(&url, &settings, port, &mut go_on)?;
        let own_text = bus.local_info(&settings)?;
        let expects_texts = own_text.is_some();
        if steps.send(Ok(OpenStep::Reached(own_text))).is_err() {
            return Ok(None);
        }
        let until = deadline + LAST_WORDS;
        if expects_texts {
            match next_event(events, until, &*bus)? {
                Some(OpenEvent::AllTexts(texts)) => bus.receive_info(&texts, &mut settings)?,
                Some(OpenEvent::AllAreSetUp) => {
                    return Err(Error::internal("a device expects texts from all ranks, but none were sent"));
                }
                None => return Ok(None),
            }
        }
        let mut driver = Driver::set_up(bus, settings, &mut go_on)?;
        let staging = Staging::new(driver.bus(), memory)?;
        if steps.send(Ok(OpenStep::SetUp)).is_err() || next_event(events, until, driver.bus())?.is_none() {
            return Ok(None);
        }
        driver.enable_packets(go_on)?;
        Ok(Some(Worker { url, driver, staging, shared }))
    }
}

impl Worker {
    fn serve(&mut self, DeviceTask { route, task }: DeviceTask) {
        let Some(mut tensors) = CollectiveMemory::of(&task) else {
            return task.fail(format!("{} runs only whole collectives", self.driver.bus().describe()));
        };
        let ExternalCollective { collective, dtype, op, .. } = *tensors.collective();
        match self.perform(&task, route, &mut tensors) {
            Ok(()) => {
                self.shared.counts.add(collective, dtype, op);
                task.done();
            }
            Err(Stop::Failed(error)) => {
                task.fail_as(error.kind, error.message);
                if self.driver.running().is_some() && self.driver.dead().is_none() {
                    let _ = self.give_up("was abandoned, because its results cannot be read");
                }
            }
            Err(Stop::Cancelled) => {
                // Nothing writes into the caller's memory any more: the device has buffers of its own.
                drop(task);
                if self.driver.running().is_some() {
                    let error = self.give_up("was abandoned, because its call failed");
                    tracing::warn!("{}", error.message);
                }
            }
        }
        if let Some(dead) = self.driver.dead() {
            let _ = self.shared.dead.set(dead.clone());
        }
    }

    /// Does a collective piece by piece: while the device works on one piece, the previous one is copied out and the
    /// next one in.
    fn perform(
        &mut self,
        task: &ExternalTask,
        route: DeviceRoute,
        tensors: &mut CollectiveMemory<'_>,
    ) -> std::result::Result<(), Stop> {
        let collective = tensors.collective();
        let request = request(collective)?;
        let settings = self.driver.settings();
        let DeviceRoute { operation, elements, function } = route;
        let root = if operation.row().has_root { request.root.0 } else { 0 };
        let calls = Calls { operation, elements, function, on_wire: self.url.wire().carries(elements), root };
        let mut pieces = Pieces::new(&request, operation, elements, settings, STAGING_BYTES).enumerate();
        let mut next = self.give(task, tensors, pieces.next())?;
        let mut last: Option<(Piece, Segment)> = None;
        while let Some((piece, segment)) = next.take() {
            let call = self.call(&calls, &piece, segment)?;
            // A call that no peer will join would occupy the engine for ever.
            if !self.goes_on(task) {
                return Err(self.stop(task, collective));
            }
            self.driver.start(&call)?;
            self.take(task, tensors, last.take())?;
            next = self.give(task, tensors, pieces.next())?;
            self.finish(task, collective, &call)?;
            last = Some((piece, segment));
        }
        self.take(task, tensors, last)
    }

    fn give(
        &mut self,
        task: &ExternalTask,
        tensors: &CollectiveMemory<'_>,
        piece: Option<(usize, Piece)>,
    ) -> std::result::Result<Option<(Piece, Segment)>, Stop> {
        let Some((number, piece)) = piece else { return Ok(None) };
        let segment = self.staging.segment(number);
        match self.staging.give(self.driver.bus(), tensors, &piece, segment, &|| until(task))? {
            true => Ok(Some((piece, segment))),
            false => Err(self.stop(task, tensors.collective())),
        }
    }

    fn take(
        &mut self,
        task: &ExternalTask,
        tensors: &mut CollectiveMemory<'_>,
        piece: Option<(Piece, Segment)>,
    ) -> std::result::Result<(), Stop> {
        let Some((piece, segment)) = piece else { return Ok(()) };
        match self.staging.take(self.driver.bus(), tensors, &piece, segment, &|| until(task))? {
            true => Ok(()),
            false => Err(self.stop(task, tensors.collective())),
        }
    }

    /// Returns why a task stops.
    fn stop(&mut self, task: &ExternalTask, collective: &ExternalCollective) -> Stop {
        match collective.deadline.filter(|_| !task.is_cancelled()) {
            Some(deadline) => Stop::Failed(self.late(collective, deadline)),
            None => Stop::Cancelled,
        }
    }

    fn call(&self, calls: &Calls, piece: &Piece, segment: Segment) -> Result<Descriptor> {
        let &Calls { operation, elements, function, on_wire, root } = calls;
        let call = self.driver.call(operation, elements, on_wire, piece.count)?;
        let Segment { first, result } = segment;
        Ok(Descriptor { root, function: function.number(), first, second: result, result, ..call })
    }

    /// Waits until the device has finished a call.
    fn finish(
        &mut self,
        task: &ExternalTask,
        collective: &ExternalCollective,
        call: &Descriptor,
    ) -> std::result::Result<(), Stop> {
        let mut pauses = Pauses::default();
        for poll in 0_u32.. {
            if let Some(finished) = self.driver.poll()? {
                let device = self.url.scheme();
                let (seq, nanos) = (collective.seq, finished.nanos);
                tracing::debug!(device, seq, %call, code = 0, nanos, "the device completed a call");
                break;
            }
            if !self.goes_on(task) {
                return Err(self.stop(task, collective));
            }
            if poll >= EAGER_POLLS {
                self.driver.bus().pause(pauses.next_pause());
            }
        }
        Ok(())
    }

    /// Returns whether a task is still wanted and in time, and limits the device's requests to the task's deadline.
    fn goes_on(&mut self, task: &ExternalTask) -> bool {
        let until = until(task);
        until.is_some_and(|Until(until)| {
            self.driver.bus().set_deadline(until);
            true
        })
    }

    /// Gives the device up: nothing can stop its current call, so it accepts no more calls. The error contains the
    /// state that can be read from the device within `DIAGNOSIS`.
    fn give_up(&mut self, why: &str) -> Error {
        let until = now() + DIAGNOSIS;
        self.driver.give_up(why, || now() < until)
    }

    /// Returns the error of a collective that missed its deadline, with the state that can be read from the device.
    fn late(&mut self, collective: &ExternalCollective, deadline: Moment) -> Error {
        let waited = deadline.since(collective.started).as_millis();
        let why = self.give_up("has not completed");
        let text = format!("Timed out waiting {waited}ms for {}: {}", collective.collective, why.message);
        Error::new(ErrorKind::Timeout, text)
    }
}

/// Waits for the next notification, until `until`. Returns `None` if the device is no longer wanted.
fn next_event(events: &Receiver<OpenEvent>, until: Moment, bus: &dyn Bus) -> Result<Option<OpenEvent>> {
    match events.recv_timeout(until.since(now())) {
        Ok(event) => Ok(Some(event)),
        Err(RecvTimeoutError::Disconnected) => Ok(None),
        Err(RecvTimeoutError::Timeout) => Err(Error::timeout(format!(
            "{} did not receive the texts of all other ranks before the deadline",
            bus.describe()
        ))),
    }
}

/// Returns the deadline of requests for a task, including `LATE_ANSWER`. Returns `None` if the task is no longer wanted
/// or too late.
fn until(task: &ExternalTask) -> Option<Until> {
    if task.is_cancelled() {
        return None;
    }
    let Some(deadline) = task.collective().and_then(|collective| collective.deadline) else { return Some(Until(None)) };
    let left = deadline.since(now());
    (!left.is_zero()).then(|| Until(Instant::now().checked_add(left.saturating_add(LATE_ANSWER))))
}

/// Returns a collective in the form that the planner of devices accepts.
///
/// # Errors
/// `InvalidArgument` for blocks of different sizes, because other ranks do not know the sizes.
fn request(collective: &ExternalCollective) -> Result<CollectiveRequest> {
    let bytes = |block: &[TensorDesc]| block.iter().map(TensorDesc::len_bytes).sum::<u64>();
    let sizes = |is_input: bool| {
        let blocks = if is_input { &collective.inputs } else { &collective.outputs };
        blocks.iter().map(bytes).collect::<Vec<u64>>()
    };
    let (inputs, outputs) = (sizes(true), sizes(false));
    let own = match collective.collective {
        Collective::ReduceScatter | Collective::Scatter => outputs.first(),
        _ => inputs.first().or(outputs.first()),
    };
    let block_bytes = own.copied().unwrap_or(0);
    if let Some(other) = inputs.iter().chain(&outputs).find(|bytes| **bytes != block_bytes) {
        return Err(Error::invalid_argument(format!(
            "a device requires blocks of equal size, but this {} has blocks of {block_bytes} and {other} bytes; make \
             all blocks the same size, or choose the host with sidestep=\"{}=host\"",
            collective.collective, collective.collective
        )));
    }
    Ok(CollectiveRequest {
        collective: collective.collective,
        dtype: collective.dtype,
        op: collective.op,
        root: collective.root,
        block_bytes,
        equal_blocks: true,
    })
}

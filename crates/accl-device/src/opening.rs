//! Opening of a device, in steps: reach it, exchange texts with the other ranks, and set it up. Once the devices of all
//! ranks are set up, it admits packets.
//!
//! Owns the steps of the thread that creates the group. That thread never blocks for longer than the interval of its
//! checks; the device's thread does the rest (`worker`). How ranks exchange texts is not known here. Read
//! [`DeviceOpening::begin`] first.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};

use accl_cclo::device::DeviceUrl;
use accl_engine::now;
use accl_engine::offload::OffloadGroup;
use accl_types::{Error, Moment, Result};

use super::handle::{Device, DeviceOffload};
use super::open_devices::OpenDevices;
use super::port::Port;
use super::shared::{DeviceState, LAST_WORDS, OpenBus, POLL_INTERVAL};
use super::worker::{self, OpenEvent, OpenStep};

/// A device that was reached but accepts no collectives yet.
pub(super) struct DeviceOpening {
    device: Arc<Device>,
    steps: Receiver<Result<OpenStep>>,
    events: Sender<OpenEvent>,
    own_text: Option<String>,
    deadline: Moment,
}

impl DeviceOpening {
    /// Reaches the device of a rank, on a thread of its own. If the device was left by an earlier group and its thread
    /// still runs, waits for that thread. `poll` is called now and then, and ends the wait by returning an error.
    ///
    /// # Errors
    /// Invalid settings; a device that is missing or does not answer before `deadline`; errors of `poll`.
    pub(super) fn begin(
        url: DeviceUrl,
        group: &OffloadGroup<'_>,
        opener: Arc<dyn OpenBus>,
        open_devices: &OpenDevices,
        poll: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let (spec, deadline) = (group.spec, group.deadline);
        let (rank, world) = (spec.rank.0, spec.world);
        let excluded = spec.config.redirects.iter().map(|redirect| redirect.collective).collect();
        let frame_bytes = spec.config.segment_bytes as usize;
        let settings = url.settings(rank, world)?;
        url.check_sessions(&settings)?;
        open_devices.await_left(&url, deadline, poll)?;
        let shared: Arc<DeviceState> = Arc::default();
        let (tasks, queue) = mpsc::channel();
        let (step, steps) = mpsc::channel();
        let (events, received) = mpsc::channel();
        let port = Port::new(rank, world, frame_bytes, u64::from(settings.max_eager_bytes));
        let worker = worker::Start {
            url: url.clone(),
            settings: settings.clone(),
            shared: shared.clone(),
            port: port.clone(),
            deadline,
        };
        let device = Arc::new(Device::new(url.clone(), settings, excluded, shared, port, tasks));
        let ending = open_devices.add(&device);
        std::thread::Builder::new()
            .name("accl-device".to_owned())
            .spawn(move || {
                worker.run(&*opener, &step, &received, &queue);
                // The last thing that the thread does.
                drop(ending);
            })
            .map_err(|error| Error::exhausted(format!("cannot start the thread of device `{url}`: {error}")))?;
        let mut opening = Self { device, steps, events, own_text: None, deadline };
        if let OpenStep::Reached(own_text) = opening.step(poll)? {
            opening.own_text = own_text;
        }
        Ok(opening)
    }

    /// Returns the text that this rank's device sends to the devices of all ranks; `None` if devices of its kind
    /// exchange no texts.
    pub(super) fn own_text(&self) -> Option<&str> {
        self.own_text.as_deref()
    }

    /// Sets the device up. `texts` lists the texts of all ranks in rank order, if there are any.
    ///
    /// # Errors
    /// Invalid texts; a device that is set up for another user or does not answer; errors of `poll`.
    pub(super) fn set_up(&self, texts: Option<Vec<String>>, poll: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        if let Some(texts) = texts {
            self.notify(OpenEvent::AllTexts(texts));
        }
        match self.step(poll)? {
            OpenStep::SetUp => Ok(()),
            OpenStep::Reached(_) | OpenStep::Open => Err(self.out_of_turn()),
        }
    }

    /// Admits packets. The devices of all ranks are set up by now, so none sends packets of an earlier setup.
    ///
    /// # Errors
    /// The device does not answer, or does not reach the devices of all ranks; errors of `poll`.
    pub(super) fn finish(self, poll: &mut dyn FnMut() -> Result<()>) -> Result<DeviceOffload> {
        self.notify(OpenEvent::AllAreSetUp);
        match self.step(poll)? {
            OpenStep::Open => Ok(DeviceOffload(self.device)),
            OpenStep::Reached(_) | OpenStep::SetUp => Err(self.out_of_turn()),
        }
    }

    fn notify(&self, event: OpenEvent) {
        // If the thread has ended, the next step reports that.
        let _ = self.events.send(event);
    }

    fn out_of_turn(&self) -> Error {
        Error::internal(format!("{:?} reached a step of its setup out of order", self.device))
    }

    /// Waits for the next step that the device's thread has reached.
    fn step(&self, poll: &mut dyn FnMut() -> Result<()>) -> Result<OpenStep> {
        let device = &self.device;
        loop {
            match self.steps.recv_timeout(POLL_INTERVAL) {
                Ok(step) => return step,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::internal(format!("the thread of {device:?} ended while opening it")));
                }
                Err(RecvTimeoutError::Timeout) => poll()?,
            }
            if now() > self.deadline + LAST_WORDS {
                return Err(Error::timeout(format!("{device:?} did not open before the deadline of the group")));
            }
        }
    }
}

//! The opening of a device: it is reached, tells the other ranks what they need, hears what they tell, and is set up.
//!
//! Owns what whoever makes the group does of this, which never blocks for longer than it takes to look whether to go on; the device's thread
//! does the rest (`worker`). How ranks tell one another is not known here. Read [`Opening::begin`] first.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};

use accl_cclo::device::DeviceUrl;
use accl_types::{Collective, Error, Moment, Result};

use super::attended::Attended;
use super::handle::Device;
use super::port::Port;
use super::shared::{LAST_WORDS, LOOK, OpenBus, Shared};
use super::worker::{self, Step};
use crate::time;

/// A device that is reached, and not set up yet.
pub(crate) struct Opening {
    device: Arc<Device>,
    steps: Receiver<Result<Step>>,
    told: Sender<Vec<String>>,
    tells: Option<String>,
    deadline: Moment,
}

/// A device that is set up.
pub(crate) struct Opened {
    /// The device.
    pub(crate) device: Arc<Device>,
    /// It is set up for those ranks that told it something: when others come in their place it has to be opened anew.
    pub(crate) has_heard: bool,
}

impl Opening {
    /// Reaches the device of a rank, on a thread of its own; one that was left and is not over yet is waited for. `look` is called now and
    /// then, and ends the wait with an error.
    ///
    /// # Errors
    /// Settings that make no sense, a device that is not there, or that does not answer before `deadline`; what `look` says.
    pub(crate) fn begin(
        url: DeviceUrl,
        (rank, world): (u32, u32),
        sidestep: Vec<Collective>,
        (opener, attended): (Arc<dyn OpenBus>, &Attended),
        frame_bytes: usize,
        deadline: Moment,
        look: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let settings = url.settings(rank, world)?;
        url.check_sessions(&settings)?;
        attended.await_left(&url, deadline, look)?;
        let shared: Arc<Shared> = Arc::default();
        let (tasks, queue) = mpsc::channel();
        let (step, steps) = mpsc::channel();
        let (told, hears) = mpsc::channel();
        let port = Port::new(rank, world, frame_bytes, u64::from(settings.max_eager_bytes));
        let worker = worker::Start {
            url: url.clone(),
            settings: settings.clone(),
            shared: shared.clone(),
            port: port.clone(),
            deadline,
        };
        let device = Arc::new(Device::new(url.clone(), settings, sidestep, shared, port, tasks));
        let ending = attended.add(&device);
        std::thread::Builder::new()
            .name("accl-device".to_owned())
            .spawn(move || {
                worker.run(&*opener, &step, &hears, &queue);
                // Last of all.
                drop(ending);
            })
            .map_err(|error| Error::exhausted(format!("no thread for the device `{url}`: {error}")))?;
        let mut opening = Self { device, steps, told, tells: None, deadline };
        if let Step::Reached(tells) = opening.step(look)? {
            opening.tells = tells;
        }
        Ok(opening)
    }

    /// What the device tells those of all ranks; `None`: it neither tells nor hears anything.
    pub(crate) fn tells(&self) -> Option<&str> {
        self.tells.as_deref()
    }

    /// Sets the device up, with what all have told in rank order, if they have told anything.
    ///
    /// # Errors
    /// What was told makes no sense, a device that is set up for somebody else or does not answer; what `look` says.
    pub(crate) fn finish(self, told: Option<Vec<String>>, look: &mut dyn FnMut() -> Result<()>) -> Result<Opened> {
        let has_heard = told.is_some();
        if let Some(told) = told {
            // If the thread has ended, that is told next.
            let _ = self.told.send(told);
        }
        match self.step(look)? {
            Step::SetUp => Ok(Opened { device: self.device, has_heard }),
            Step::Reached(_) => Err(Error::internal(format!("{:?} was reached twice", self.device))),
        }
    }

    /// What the thread has come to.
    fn step(&self, look: &mut dyn FnMut() -> Result<()>) -> Result<Step> {
        let device = &self.device;
        loop {
            match self.steps.recv_timeout(LOOK) {
                Ok(step) => return step,
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::internal(format!("the thread of {device:?} ended while it opened it")));
                }
                Err(RecvTimeoutError::Timeout) => look()?,
            }
            if time::now() > self.deadline + LAST_WORDS {
                return Err(Error::timeout(format!("{device:?} is not open before the deadline of the group")));
            }
        }
    }
}

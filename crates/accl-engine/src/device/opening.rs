//! The opening of a device: it is reached, tells the other ranks what they need, hears what they tell, and is set up.
//!
//! Owns what whoever makes the group does of this, which never blocks for longer than it takes to look whether to go on; the device's thread
//! does the rest (`worker`). How ranks tell one another is not known here. Read [`Opening::begin`] first.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

use accl_cclo::device::DeviceUrl;
use accl_types::{Collective, Error, Moment, Result};

use super::handle::Device;
use super::port::Port;
use super::shared::{LAST_WORDS, OpenBus, Shared};
use super::worker::{self, Step};
use crate::time;

/// How often whoever waits for a device looks whether it should go on.
const LOOK: Duration = Duration::from_millis(50);

/// A device that is reached, and not set up yet.
pub(crate) struct Opening {
    device: Arc<Device>,
    steps: Receiver<Result<Step>>,
    told: Sender<Vec<String>>,
    tells: Option<String>,
    ended: Ended,
    deadline: Moment,
}

/// A device that is set up.
pub(crate) struct Opened {
    /// The device.
    pub(crate) device: Arc<Device>,
    /// It is set up for those ranks that told it something: when others come in their place it has to be opened anew.
    pub(crate) has_heard: bool,
    ended: Ended,
}

/// Whether the device's thread is over, and all that it had with it.
struct Ended(Receiver<Infallible>);

impl Opening {
    /// Reaches the device of a rank, on a thread of its own. `look` is called now and then, and ends the wait with an error.
    ///
    /// # Errors
    /// Settings that make no sense, a device that is not there, or that does not answer before `deadline`; what `look` says.
    pub(crate) fn begin(
        url: DeviceUrl,
        (rank, world): (u32, u32),
        sidestep: Vec<Collective>,
        opener: Arc<dyn OpenBus>,
        frame_bytes: usize,
        deadline: Moment,
        look: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Self> {
        let settings = url.settings(rank, world)?;
        url.check_sessions(&settings)?;
        let shared: Arc<Shared> = Arc::default();
        let (tasks, queue) = mpsc::channel();
        let (step, steps) = mpsc::channel();
        let (told, hears) = mpsc::channel();
        let (ending, ended) = mpsc::channel();
        let port = Port::new(rank, world, frame_bytes, u64::from(settings.max_eager_bytes));
        let worker = worker::Start {
            url: url.clone(),
            settings: settings.clone(),
            shared: shared.clone(),
            port: port.clone(),
            deadline,
        };
        std::thread::Builder::new()
            .name("accl-device".to_owned())
            .spawn(move || {
                worker.run(&*opener, &step, &hears, &queue);
                // Last of all.
                drop::<Sender<Infallible>>(ending);
            })
            .map_err(|error| Error::exhausted(format!("no thread for the device `{url}`: {error}")))?;
        let device = Arc::new(Device::new(url, settings, sidestep, shared, port, tasks));
        let mut opening = Self { device, steps, told, tells: None, ended: Ended(ended), deadline };
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
            Step::SetUp => Ok(Opened { device: self.device, has_heard, ended: self.ended }),
            Step::Reached(_) => Err(Error::internal(format!("{:?} was reached twice", self.device))),
        }
    }

    /// Goes away from a device that is not set up, and waits until it has been left.
    ///
    /// # Errors
    /// That takes too long; what `look` says.
    pub(crate) fn leave(self, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        let Self { device, ended, deadline, told, .. } = self;
        // The thread may wait for it.
        drop(told);
        leave(device, &ended, deadline, look)
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

impl Opened {
    /// As [`Opening::leave`].
    ///
    /// # Errors
    /// As there.
    pub(crate) fn leave(self, deadline: Moment, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        leave(self.device, &self.ended, deadline, look)
    }
}

/// A card is opened by one at a time, so whoever opens it anew waits until the one before has left it.
fn leave(device: Arc<Device>, ended: &Ended, deadline: Moment, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
    let name = format!("{device:?}");
    drop(device);
    while let Err(RecvTimeoutError::Timeout) = ended.0.recv_timeout(LOOK) {
        look()?;
        if time::now() > deadline {
            return Err(Error::timeout(format!(
                "{name} is not left before the deadline of the group, to be opened anew"
            )));
        }
    }
    Ok(())
}

//! The opening of a device: it is reached, tells the other ranks what they need, hears what they tell, is set up, and lets packets in once
//! those of all ranks are.
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
use super::worker::{self, News, Step};
use crate::time;

/// A device that is reached, and takes no collectives yet.
pub(crate) struct Opening {
    device: Arc<Device>,
    steps: Receiver<Result<Step>>,
    news: Sender<News>,
    tells: Option<String>,
    deadline: Moment,
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
        let (news, hears) = mpsc::channel();
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
        let mut opening = Self { device, steps, news, tells: None, deadline };
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
    pub(crate) fn set_up(&self, told: Option<Vec<String>>, look: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        if let Some(told) = told {
            self.tell(News::Told(told));
        }
        match self.step(look)? {
            Step::SetUp => Ok(()),
            Step::Reached(_) | Step::Open => Err(self.out_of_turn()),
        }
    }

    /// Lets packets in: the devices of all ranks are set up, so none sends anything of a time before.
    ///
    /// # Errors
    /// The device does not answer, or does not reach those of all ranks; what `look` says.
    pub(crate) fn finish(self, look: &mut dyn FnMut() -> Result<()>) -> Result<Arc<Device>> {
        self.tell(News::AllAreSetUp);
        match self.step(look)? {
            Step::Open => Ok(self.device),
            Step::Reached(_) | Step::SetUp => Err(self.out_of_turn()),
        }
    }

    fn tell(&self, news: News) {
        // If the thread has ended, that is told next.
        let _ = self.news.send(news);
    }

    fn out_of_turn(&self) -> Error {
        Error::internal(format!("{:?} has come to a step of its opening out of turn", self.device))
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

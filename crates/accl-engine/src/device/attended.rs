//! The devices of an engine whose threads are not over.
//!
//! Owns the rule that a device which was left is over before it is opened anew, since most are opened by one at a time, and the end of all of
//! them with the process. What a device does is not known here. Read [`Attended::add`] first.

use std::convert::Infallible;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Weak};
use std::time::Duration;

use accl_cclo::device::DeviceUrl;
use accl_types::{Error, Moment, Result};

use super::handle::Device;
use super::shared::LOOK;
use crate::sync::Mutex;
use crate::time;

/// Between looks at a thread when the process ends.
const PAUSE_AT_END: Duration = Duration::from_millis(5);

/// The devices of an engine.
#[derive(Default)]
pub(crate) struct Attended(Mutex<Vec<Thread>>);

/// The thread of a device, with what belongs to it.
struct Thread {
    url: DeviceUrl,
    device: Weak<Device>,
    over: Over,
}

/// What tells that a thread is over: its other end is dropped last.
type Over = Receiver<Infallible>;

/// The other end.
pub(super) type Ending = Sender<Infallible>;

impl Thread {
    fn is_over(&self) -> bool {
        matches!(self.over.try_recv(), Err(mpsc::TryRecvError::Disconnected))
    }

    /// Nobody gives it anything to do any more.
    fn is_left(&self) -> bool {
        self.device.upgrade().is_none_or(|device| device.is_closed())
    }
}

impl Attended {
    /// Another device, and what its thread holds as long as it lives.
    pub(super) fn add(&self, device: &Arc<Device>) -> Ending {
        let (ending, over) = mpsc::channel();
        let thread = Thread { url: device.url().clone(), device: Arc::downgrade(device), over };
        let mut threads = self.0.lock();
        // Nothing grows with the groups of a process.
        threads.retain(|thread| !thread.is_over());
        threads.push(thread);
        ending
    }

    /// Waits until the threads of this device that were left are over. `look` is called now and then, and ends the wait with an
    /// error.
    ///
    /// # Errors
    /// `Timeout` at the deadline; what `look` says.
    pub(super) fn await_left(
        &self,
        url: &DeviceUrl,
        deadline: Moment,
        look: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let left: Vec<Thread> =
            self.0.lock().extract_if(.., |thread| thread.url.is_same_device(url) && thread.is_left()).collect();
        let waited = left.iter().try_for_each(|thread| {
            while let Err(RecvTimeoutError::Timeout) = thread.over.recv_timeout(LOOK) {
                look()?;
                if time::now() > deadline {
                    return Err(Error::timeout(format!(
                        "device `{url}` is still busy for a group that was left, and cannot be opened anew before the deadline of this \
                         one; reset it with `accl device reset`, or end this process"
                    )));
                }
            }
            Ok(())
        });
        if waited.is_err() {
            self.0.lock().extend(left);
        }
        waited
    }

    /// Leaves all of them, and waits until then for their threads. What those are called that are not over then.
    pub(crate) fn leave_all(&self, until: Moment) -> Vec<DeviceUrl> {
        let mut threads = std::mem::take(&mut *self.0.lock());
        for device in threads.iter().filter_map(|thread| thread.device.upgrade()) {
            device.close();
        }
        loop {
            threads.retain(|thread| !thread.is_over());
            if threads.is_empty() || time::now() > until {
                return threads.into_iter().map(|thread| thread.url).collect();
            }
            std::thread::sleep(PAUSE_AT_END);
        }
    }
}

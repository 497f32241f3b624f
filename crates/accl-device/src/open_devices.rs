//! The devices of an engine whose threads still run.
//!
//! Owns the rule that a device is reopened only after the thread of its earlier opening has ended. Most devices accept
//! one user at a time. Also ends all devices with the process. Does not know what a device does. Read
//! [`OpenDevices::add`] first.

use std::convert::Infallible;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Weak};
use std::time::Duration;

use accl_cclo::device::DeviceUrl;
use accl_engine::now;
use accl_engine::sync::Mutex;
use accl_types::{Error, Moment, Result};

use super::handle::Device;
use super::shared::POLL_INTERVAL;

/// Pause between two checks of a thread that is to end.
const PAUSE: Duration = Duration::from_millis(5);

/// The devices of an engine.
#[derive(Default)]
pub(super) struct OpenDevices(Mutex<Vec<Thread>>);

/// The thread of a device, with the device's URL and handle.
struct Thread {
    url: DeviceUrl,
    device: Weak<Device>,
    over: Over,
}

/// Disconnects when a thread is over: the thread drops its [`Ending`] last.
type Over = Receiver<Infallible>;

/// The end of that channel that a device's thread holds.
pub(super) type Ending = Sender<Infallible>;

impl Thread {
    fn is_over(&self) -> bool {
        matches!(self.over.try_recv(), Err(mpsc::TryRecvError::Disconnected))
    }

    /// Returns whether no more tasks can be given to the thread.
    fn is_left(&self) -> bool {
        self.device.upgrade().is_none_or(|device| device.is_closed())
    }
}

impl OpenDevices {
    /// Adds a device. Returns the value that its thread must hold for as long as it runs.
    pub(super) fn add(&self, device: &Arc<Device>) -> Ending {
        let (ending, over) = mpsc::channel();
        let thread = Thread { url: device.url().clone(), device: Arc::downgrade(device), over };
        let mut threads = self.0.lock();
        // Removes ended threads, so that the list does not grow with each group of a process.
        threads.retain(|thread| !thread.is_over());
        threads.push(thread);
        ending
    }

    /// Waits until the threads of this device that were left have ended. `poll` is called now and then, and ends the
    /// wait by returning an error.
    ///
    /// # Errors
    /// `Timeout` at the deadline; errors of `poll`.
    pub(super) fn await_left(
        &self,
        url: &DeviceUrl,
        deadline: Moment,
        poll: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let mut last_poll = now();
        // The threads stay in the list meanwhile, so that `leave_all` finds them.
        while self.is_left(url) {
            std::thread::sleep(PAUSE);
            let time = now();
            if time.since(last_poll) >= POLL_INTERVAL {
                poll()?;
                last_poll = time;
            }
            if time > deadline {
                return Err(Error::timeout(format!(
                    "device `{url}` is still busy with an earlier group, and cannot be reopened before the deadline of \
                     this group; reset it with `accl device reset`, or end this process"
                )));
            }
        }
        Ok(())
    }

    /// Returns whether a thread of this device was left and still runs.
    fn is_left(&self, url: &DeviceUrl) -> bool {
        let threads = self.0.lock();
        threads.iter().any(|thread| thread.url.is_same_device(url) && thread.is_left() && !thread.is_over())
    }

    /// Closes all devices and waits for their threads, at most until `until`. Returns the URLs of the devices whose
    /// threads still run then.
    pub(super) fn leave_all(&self, until: Moment) -> Vec<DeviceUrl> {
        let mut threads = std::mem::take(&mut *self.0.lock());
        for device in threads.iter().filter_map(|thread| thread.device.upgrade()) {
            device.close();
        }
        loop {
            threads.retain(|thread| !thread.is_over());
            if threads.is_empty() || now() > until {
                return threads.into_iter().map(|thread| thread.url).collect();
            }
            std::thread::sleep(PAUSE);
        }
    }
}

#[cfg(all(test, not(accl_loom)))]
mod tests {
    use super::super::port::Port;
    use super::*;

    #[test]
    fn a_thread_that_the_making_of_a_group_waits_for_is_left_with_the_process_and_named() {
        let url = DeviceUrl::parse("sim").unwrap().unwrap();
        let settings = url.settings(0, 1).unwrap();
        let (tasks, _queue) = mpsc::channel();
        let port = Port::new(0, 1, 4096, 4096);
        let device = Arc::new(Device::new(url.clone(), settings, Vec::new(), Arc::default(), port, tasks));
        let open_devices = OpenDevices::default();
        let ending = open_devices.add(&device);
        device.close();
        std::thread::scope(|scope| {
            let making = scope.spawn(|| {
                let mut polls = 0;
                let mut poll = || {
                    polls += 1;
                    if polls == 1 {
                        // The process ends just now.
                        let left = open_devices.leave_all(now());
                        assert_eq!(left.len(), 1, "{left:?}");
                        return Err(Error::aborted("the process ends"));
                    }
                    Ok(())
                };
                open_devices.await_left(&url, now() + Duration::from_secs(20), &mut poll)
            });
            assert_eq!(making.join().unwrap().unwrap_err().message, "the process ends");
        });
        drop(ending);
    }
}

//! A device that does collectives of a group.
//!
//! Owns the connection from a group to the device's thread. Also owns the rule which calls the device takes, and the
//! counts of what it has done. Only the thread (`worker`) talks to the bus, polls and checks deadlines.
//! Nothing here waits under the engine's lock. The executor decides when a call may begin, and `opening` opens the
//! device. Read [`Device::takes`] first.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};

use accl_cclo::device::DeviceUrl;
use accl_cclo::driver::Settings;
use accl_cclo::offload::{CollectiveRequest, Route, route};
use accl_executor::call::{CallDesc, External, ExternalTask};
use accl_executor::group::PacketSink;
use accl_types::Collective;

use super::port::Port;
use super::shared::DeviceState;
use crate::driver::Driver;
use crate::sync::Mutex;

/// A device that has been set up, for the group that it serves.
pub(crate) struct Device {
    url: DeviceUrl,
    /// The settings, without the sessions, which only the thread knows.
    settings: Settings,
    excluded: Vec<Collective>,
    shared: Arc<DeviceState>,
    port: Arc<Port>,
    /// `None` once the group was left: no more tasks are accepted.
    tasks: Mutex<Option<Sender<ExternalTask>>>,
}

impl Device {
    /// Creates the handle of a device. Its thread takes tasks from the other end of `tasks` once it has set the device
    /// up.
    pub(super) fn new(
        url: DeviceUrl,
        settings: Settings,
        excluded: Vec<Collective>,
        shared: Arc<DeviceState>,
        port: Arc<Port>,
        tasks: Sender<ExternalTask>,
    ) -> Self {
        Self { url, settings, excluded, shared, port, tasks: Mutex::new(Some(tasks)) }
    }

    /// Connects an engine in software to the engines of other ranks, after the group was created.
    pub(crate) fn connect(&self, driver: &Arc<Driver>, group: u64) {
        self.port.connect(driver, group);
    }

    /// Returns the receiver of packets from other ranks' devices.
    pub(crate) fn sink(&self) -> Arc<dyn PacketSink> {
        self.port.clone()
    }

    /// Returns whether the device or the host does a call; all ranks decide alike.
    pub(crate) fn route(&self, desc: &CallDesc, world: u32) -> Route {
        if self.excluded.contains(&desc.collective) {
            return Route::Host("`sidestep` assigns it to the host");
        }
        if desc.encoding(world).is_some() {
            return Route::Host("it is encoded");
        }
        if !desc.uses_host_memory() {
            return Route::Host("its tensors are not in host memory");
        }
        let request = CollectiveRequest {
            collective: desc.collective,
            dtype: desc.dtype,
            op: desc.op,
            root: desc.root,
            block_bytes: 0,
            equal_blocks: desc.has_equal_blocks(),
        };
        route(&request, &self.settings)
    }

    /// Returns the same call, done by the device; `None` if the host does it.
    pub(crate) fn takes(self: &Arc<Self>, desc: &CallDesc, world: u32) -> Option<CallDesc> {
        let is_for_device = matches!(self.route(desc, world), Route::Device { .. });
        is_for_device.then(|| CallDesc { offload: Some(self.clone()), ..desc.clone() })
    }

    pub(super) fn url(&self) -> &DeviceUrl {
        &self.url
    }

    /// Closes the device: the group was left, or its creation failed. The thread ends when its tasks are done, even if
    /// a reference to the device remains. This function does not wait for a thread that is stuck.
    pub(crate) fn close(&self) {
        self.shared.is_closed.store(true, Ordering::Relaxed);
        drop(self.tasks.lock().take());
    }

    pub(super) fn is_closed(&self) -> bool {
        self.shared.is_closed.load(Ordering::Relaxed)
    }

    /// Returns a readable description: what the device is and what it has done.
    pub(crate) fn describe(&self) -> String {
        let state = self.shared.dead.get().map_or(String::new(), |why| format!(", dead: {}", why.message));
        format!("device {}: {}{state}\n", self.url, self.shared.counts)
    }
}

impl External for Device {
    fn name(&self) -> &str {
        self.url.scheme()
    }

    fn begin(&self, task: ExternalTask) {
        let unsent = match &*self.tasks.lock() {
            Some(tasks) => tasks.send(task).err().map(|mpsc::SendError(task)| task),
            None => Some(task),
        };
        if let Some(task) = unsent {
            // The device was closed, or its thread has panicked.
            task.fail(format!("the thread of {self:?} has ended; create a new group"));
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device `{}` of rank {}", self.url, self.settings.rank)
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.close();
    }
}

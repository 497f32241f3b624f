//! A device that does collectives of a group.
//!
//! Owns the way from a group to the device's thread, and what is known of the device outside of it: which calls it takes, and what it has
//! done. The thread alone (`worker`) talks to the bus, polls and keeps deadlines; nothing here waits under the engine's lock, and nothing
//! here decides when a call may begin, which is the executor's matter. How it is opened is in `opening`. Read [`Device::takes`] first.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};

use accl_cclo::device::DeviceUrl;
use accl_cclo::driver::Settings;
use accl_cclo::offload::{Request, Route, route};
use accl_executor::call::{CallDesc, External, ExternalTask};
use accl_executor::group::PacketSink;
use accl_types::Collective;

use super::port::Port;
use super::shared::Shared;
use crate::driver::Driver;
use crate::sync::Mutex;

/// A device that has been set up, for the group that it serves.
pub(crate) struct Device {
    url: DeviceUrl,
    /// But for the sessions, which the thread alone knows.
    settings: Settings,
    sidestep: Vec<Collective>,
    shared: Arc<Shared>,
    port: Arc<Port>,
    /// None is taken once the group is left.
    tasks: Mutex<Option<Sender<ExternalTask>>>,
}

impl Device {
    /// The handle of a device whose thread takes these tasks once it has set it up.
    pub(super) fn new(
        url: DeviceUrl,
        settings: Settings,
        sidestep: Vec<Collective>,
        shared: Arc<Shared>,
        port: Arc<Port>,
        tasks: Sender<ExternalTask>,
    ) -> Self {
        Self { url, settings, sidestep, shared, port, tasks: Mutex::new(Some(tasks)) }
    }

    /// The group is made: an engine in software reaches those of other ranks.
    pub(crate) fn connect(&self, driver: &Arc<Driver>, group: u64) {
        self.port.connect(driver, group);
    }

    /// Where packets of other ranks' devices go.
    pub(crate) fn sink(&self) -> Arc<dyn PacketSink> {
        self.port.clone()
    }

    /// Who does a call, as all ranks find it.
    pub(crate) fn route(&self, desc: &CallDesc, world: u32) -> Route {
        if self.sidestep.contains(&desc.collective) {
            return Route::Host("`sidestep` says so");
        }
        if desc.encoding(world).is_some() {
            return Route::Host("it is encoded");
        }
        if !desc.uses_host_memory() {
            return Route::Host("its tensors do not lie in host memory");
        }
        let request = Request {
            collective: desc.collective,
            dtype: desc.dtype,
            op: desc.op,
            root: desc.root,
            block_bytes: 0,
            equal_blocks: desc.has_equal_blocks(),
        };
        route(&request, &self.settings)
    }

    /// The same call, done by the device, if it is to be.
    pub(crate) fn takes(self: &Arc<Self>, desc: &CallDesc, world: u32) -> Option<CallDesc> {
        let is_for_device = matches!(self.route(desc, world), Route::Device { .. });
        is_for_device.then(|| CallDesc { offload: Some(self.clone()), ..desc.clone() })
    }

    pub(super) fn url(&self) -> &DeviceUrl {
        &self.url
    }

    /// The group is left, or is not made: the thread ends when it has nothing more to do, whoever still holds the device. Nobody waits here for
    /// one that is stuck.
    pub(crate) fn close(&self) {
        self.shared.is_closed.store(true, Ordering::Relaxed);
        drop(self.tasks.lock().take());
    }

    pub(super) fn is_closed(&self) -> bool {
        self.shared.is_closed.load(Ordering::Relaxed)
    }

    /// For a person: what it is and what it has done.
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
            // It was left, or its thread has panicked.
            task.fail(format!("the thread of {self:?} has ended; make a new group"));
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

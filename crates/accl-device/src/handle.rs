//! A device that executes collectives of a group.
//!
//! Owns the connection from a group to the device's thread. Also owns the rule which calls the device executes, and the
//! counts of its calls. Only the thread (`worker`) talks to the bus, polls and checks deadlines.
//! Nothing here waits under the engine's lock. The executor decides when a call may begin, and `opening` opens the
//! device. Read [`DeviceOffload`] first.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{self, Sender};

use accl_cclo::device::DeviceUrl;
use accl_cclo::driver::Settings;
use accl_cclo::offload::{CollectiveRequest, DeviceRoute, route};
use accl_engine::offload::{Offload, PacketLinks, Route};
use accl_engine::sync::Mutex;
use accl_engine::{CallDesc, External, ExternalTask, PacketSink};
use accl_types::Collective;

use super::port::Port;
use super::shared::DeviceState;

/// The device of a group.
#[derive(Debug)]
pub(super) struct DeviceOffload(pub(super) Arc<Device>);

/// A device that has been set up, for the group that it serves.
pub(super) struct Device {
    url: DeviceUrl,
    /// The settings, without the sessions, which only the thread knows.
    settings: Settings,
    excluded: Vec<Collective>,
    shared: Arc<DeviceState>,
    port: Arc<Port>,
    /// `None` once the group was left: no more tasks are accepted.
    tasks: Mutex<Option<Sender<DeviceTask>>>,
}

/// A collective that the thread is to do.
pub(super) struct DeviceTask {
    pub(super) route: DeviceRoute,
    pub(super) task: ExternalTask,
}

/// Passes one call to the device.
struct DeviceCall {
    device: Arc<Device>,
    route: DeviceRoute,
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
        tasks: Sender<DeviceTask>,
    ) -> Self {
        Self { url, settings, excluded, shared, port, tasks: Mutex::new(Some(tasks)) }
    }

    /// Returns the device's calls for a collective, or why the host executes it; all ranks decide alike.
    fn route(&self, desc: &CallDesc) -> Result<DeviceRoute, &'static str> {
        if self.excluded.contains(&desc.collective) {
            return Err("`sidestep` assigns it to the host");
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

    pub(super) fn url(&self) -> &DeviceUrl {
        &self.url
    }

    /// Closes the device: the group was left, or its creation failed. The thread ends when its tasks are done, even if
    /// a reference to the device remains. This function does not wait for a thread that is stuck.
    pub(super) fn close(&self) {
        self.shared.is_closed.store(true, Ordering::Relaxed);
        drop(self.tasks.lock().take());
    }

    pub(super) fn is_closed(&self) -> bool {
        self.shared.is_closed.load(Ordering::Relaxed)
    }
}

impl Offload for DeviceOffload {
    fn name(&self) -> &'static str {
        "device"
    }

    fn route(&self, desc: &CallDesc) -> Route {
        match self.0.route(desc) {
            Ok(route) => Route::Offload(Arc::new(DeviceCall { device: self.0.clone(), route })),
            Err(why) => Route::Host(why),
        }
    }

    /// Connects an engine in software to the engines of other ranks.
    fn connect(&self, links: Arc<dyn PacketLinks>) -> Option<Arc<dyn PacketSink>> {
        self.0.port.connect(links);
        Some(self.0.port.clone())
    }

    fn takes_large_calls(&self) -> bool {
        true
    }

    fn describe(&self) -> String {
        let Device { url, shared, .. } = &*self.0;
        let state = shared.dead.get().map_or(String::new(), |why| format!(", dead: {}", why.message));
        format!("device {url}: {}{state}\n", shared.counts)
    }

    fn close(&self, _has_failed: bool) {
        self.0.close();
    }
}

impl External for DeviceCall {
    fn name(&self) -> &str {
        self.device.url.scheme()
    }

    fn begin(&self, task: ExternalTask) {
        let task = DeviceTask { route: self.route, task };
        let unsent = match &*self.device.tasks.lock() {
            Some(tasks) => tasks.send(task).err().map(|mpsc::SendError(task)| task),
            None => Some(task),
        };
        if let Some(DeviceTask { task, .. }) = unsent {
            // The device was closed, or its thread has panicked.
            task.fail(format!("the thread of {:?} has ended; create a new group", self.device));
        }
    }
}

impl fmt::Debug for DeviceCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.device.fmt(f)
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

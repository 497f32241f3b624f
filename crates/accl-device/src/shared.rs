//! State shared by the device's thread and its group, and the interface that opens devices.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use accl_cclo::bus::Bus;
use accl_cclo::device::DeviceUrl;
use accl_cclo::driver::Settings;
use accl_cclo::packets::Packets;
use accl_types::{Error, Result};

use super::counts::Counts;

/// Interval at which a thread that waits for a device checks whether to continue.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Extra time after its deadline in which an opening device may report why it does not open.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(2);

/// Opens the device that a URL names.
pub trait OpenBus: Send + Sync {
    /// Opens a connection to the device of a rank, which no other process has opened. If the devices exchange texts
    /// ([`Bus::local_info`]), the texts go over the group's store, after this call and before the setup. An engine in
    /// software of this process reaches the engines of other ranks by `packets`, once the group is created. `go_on`
    /// returns whether there is time left.
    ///
    /// # Errors
    /// There is no such device, or it does not answer.
    fn open(
        &self,
        url: &DeviceUrl,
        settings: &Settings,
        packets: Arc<dyn Packets>,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Box<dyn Bus>>;
}

#[derive(Default)]
pub(super) struct DeviceState {
    pub(super) counts: Counts,
    /// Set when the group was left and no thread waits for the device any more.
    pub(super) is_closed: AtomicBool,
    /// Why the device accepts no more calls, if it does not.
    pub(super) dead: OnceLock<Error>,
}

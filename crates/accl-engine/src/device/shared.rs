//! What the device's thread and its group both look at, and how a device is reached.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use accl_cclo::bus::Bus;
use accl_cclo::device::DeviceUrl;
use accl_cclo::driver::Settings;
use accl_cclo::packets::Packets;
use accl_types::{Error, Result};

use super::counts::Counts;

/// How often whoever waits for a device looks whether it should go on.
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// How much longer than its deadline a device that opens may take to say why it does not.
pub(super) const LAST_WORDS: Duration = Duration::from_secs(2);

/// Opens what is behind the text of a device.
pub trait OpenBus: Send + Sync {
    /// A connection to the device of a rank, which no other has opened. What it tells and hears ([`Bus::tell`]) goes over the store of the group,
    /// between this and its setting up. An engine in software of this process reaches those of other ranks by
    /// `packets`, once the group is made. `go_on` says whether there is time left.
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
pub(super) struct Shared {
    pub(super) counts: Counts,
    /// Nobody waits for the device any more.
    pub(super) is_closed: AtomicBool,
    /// Why it takes no more calls.
    pub(super) dead: OnceLock<Error>,
}

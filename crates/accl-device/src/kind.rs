//! Devices as a kind of offload: which groups use one, what ranks must agree on, and the steps of opening it.
//!
//! Owns the use of the settings `device` and `sidestep`. `opening` reaches and sets up the device of this rank. Read
//! [`DeviceKind`] first.

use std::sync::Arc;

use accl_cclo::device::DeviceUrl;
use accl_engine::offload::{OffloadGroup, OffloadKind, Opening, Poll};
use accl_engine::{GroupRole, GroupSpec};
use accl_types::config::{Config, RedirectTo};
use accl_types::{Error, Moment, Result};

use super::open_devices::OpenDevices;
use super::opening::DeviceOpening;
use super::shared::OpenBus;

/// Text that a rank sends to the other ranks once its device is set up.
const IS_SET_UP: &str = "set up";

/// The devices of one engine.
pub struct DeviceKind {
    opener: Arc<dyn OpenBus>,
    open_devices: OpenDevices,
}

impl DeviceKind {
    /// Returns the kind whose devices `opener` opens.
    pub fn new(opener: Arc<dyn OpenBus>) -> Arc<Self> {
        Arc::new(Self { opener, open_devices: OpenDevices::default() })
    }
}

/// Refuses a device that is malformed or cannot work.
///
/// # Errors
/// `Configuration`, with the accepted values.
pub fn check(config: &Config) -> Result<()> {
    DeviceUrl::parse(&config.device).map(drop)
}

/// Returns the device that a group uses. Only the default process group uses one; other groups have none.
fn device_of(group: &GroupSpec) -> Result<Option<DeviceUrl>> {
    let url = DeviceUrl::parse(&group.config.device)?;
    if url.is_none()
        && let Some(bare) = group.config.redirects.iter().find(|redirect| redirect.to == RedirectTo::Unnamed)
    {
        return Err(Error::configuration(format!(
            "sidestep: `{0}` alone requires a group with a device; write {0}=host or {0}=mpi, or set a device",
            bare.collective
        )));
    }
    Ok(url.filter(|_| group.role == GroupRole::Default))
}

impl OffloadKind for DeviceKind {
    fn name(&self) -> &'static str {
        "device"
    }

    /// Returns the kind and the settings of the device, but not which device of its kind it is.
    fn agreed(&self, group: &GroupSpec) -> Result<Option<String>> {
        let url = device_of(group)?;
        Ok(Some(url.map_or_else(|| "none".to_owned(), |url| url.agreed())))
    }

    fn open(&self, group: &OffloadGroup<'_>, poll: Poll<'_>) -> Result<Opening> {
        let Some(url) = device_of(group.spec)? else { return Ok(Opening::Unused) };
        let opening = DeviceOpening::begin(url, group, self.opener.clone(), &self.open_devices, poll)?;
        match opening.own_text() {
            None => set_up(opening, None, poll),
            Some(text) => {
                let text = text.to_owned();
                Ok(Opening::Exchange(text, Box::new(move |texts, poll| set_up(opening, Some(texts), poll))))
            }
        }
    }

    fn shutdown(&self, until: Moment) -> Vec<String> {
        self.open_devices.leave_all(until).into_iter().map(|url| format!("device `{url}`")).collect()
    }
}

/// Sets a device up. Packets are admitted once the devices of all ranks are set up.
fn set_up(opening: DeviceOpening, texts: Option<Vec<String>>, poll: Poll<'_>) -> Result<Opening> {
    opening.set_up(texts, poll)?;
    let finish = |_: Vec<String>, poll: Poll<'_>| Ok(Opening::Open(Arc::new(opening.finish(poll)?)));
    Ok(Opening::Exchange(IS_SET_UP.to_owned(), Box::new(finish)))
}

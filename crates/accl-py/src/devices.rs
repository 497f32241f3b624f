//! How groups of this process reach their devices.
//!
//! Owns the choice between an engine in software in this process and what is reached by a bus; the text of a device is read elsewhere. Read
//! [`Opener`] first.

use std::sync::Arc;

use accl_cclo::bus::Bus;
use accl_cclo::buses;
use accl_cclo::device::{DeviceUrl, Place};
use accl_cclo::driver::Settings;
use accl_cclo::packets::Packets;
use accl_emulator::Faithful;
use accl_emulator::sim::SimBus;
use accl_engine::OpenBus;
use accl_types::Result;

/// Opens any device.
pub(crate) struct Opener;

impl OpenBus for Opener {
    fn open(
        &self,
        url: &DeviceUrl,
        settings: &Settings,
        packets: Arc<dyn Packets>,
        _go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Box<dyn Bus>> {
        match url.place {
            Place::Sim => Ok(Box::new(SimBus::new(settings.network, Faithful::default(), settings.rank, packets))),
            Place::Emulator(_) | Place::Xrt { .. } | Place::Coyote { .. } => buses::open(url, settings.rank),
        }
    }
}

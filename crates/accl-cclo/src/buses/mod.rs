//! The buses that devices are reached by, one file each.
//!
//! Owns how registers, memory and calls of a device are reached. Whoever has the engine in software in the same process (`sim`) hands its
//! own bus to the driver. Read [`open`] first.

mod coyote;
mod emulator;
mod hostctrl;
mod xrt;

pub use coyote::CoyoteBus;
pub use emulator::EmulatorBus;
pub use xrt::{XrtBus, XrtPlace};

use accl_types::{Error, Result};

use crate::bus::Bus;
use crate::device::{DeviceUrl, Place};

/// Reaches the device of a rank. What it tells the other ranks, and they tell it, is carried by whoever sets it up.
///
/// # Errors
/// It is not there, does not answer, or is no such device.
pub fn open(url: &DeviceUrl, rank: u32) -> Result<Box<dyn Bus>> {
    match &url.place {
        Place::Emulator(_) => Ok(Box::new(EmulatorBus::open(&url.emulator_of(rank)?)?)),
        Place::Sim => {
            Err(Error::internal("the device `sim` has no bus of this crate: whoever has the engine hands it in"))
        }
        Place::Xrt { index, xclbin } => {
            let (engine, hostctrl) = (url.engine_kernel(), url.hostctrl_kernel());
            Ok(Box::new(XrtBus::open(XrtPlace { index: *index, xclbin, engine, hostctrl })?))
        }
        Place::Coyote { index } => Ok(Box::new(CoyoteBus::open(*index)?)),
    }
}

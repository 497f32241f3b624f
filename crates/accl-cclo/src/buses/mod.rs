//! Buses that reach devices, one file for each.
//!
//! Owns access to the registers, memory and calls of a device. A caller that has a software engine in its own process (`sim`) passes its own bus to
//! the driver instead. Read [`open`] first.

mod coyote;
mod emulator;
mod xrt;

pub use coyote::CoyoteBus;
pub use emulator::EmulatorBus;
pub use xrt::{XrtBus, XrtPlace};

use accl_types::{Error, Result};

use crate::bus::Bus;
use crate::device::{DeviceUrl, Location};

/// Opens the device of a rank. The caller carries the texts of [`Bus::local_info`] between ranks.
///
/// # Errors
/// The device is not there, does not answer, or is of another kind.
pub fn open(url: &DeviceUrl, rank: u32) -> Result<Box<dyn Bus>> {
    match &url.location {
        Location::Emulator(_) => Ok(Box::new(EmulatorBus::open(&url.emulator_of(rank)?)?)),
        Location::Sim => Err(Error::internal(
            "this crate has no bus for the device `sim`: the caller that has the engine must pass a bus",
        )),
        Location::Xrt { index, xclbin } => {
            let (engine, hostctrl) = (url.engine_kernel(), url.hostctrl_kernel());
            Ok(Box::new(XrtBus::open(XrtPlace { index: *index, xclbin, engine, hostctrl })?))
        }
        Location::Coyote { index } => Ok(Box::new(CoyoteBus::open(*index)?)),
    }
}

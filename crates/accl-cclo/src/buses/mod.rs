//! Kinds of buses that reach devices, one file or folder for each, and the table of them.
//!
//! Owns the table, and access to the registers, memory and calls of a device. No other code of this crate knows one kind of bus by name. The layer
//! above opens the devices that exist only in its own process, and passes their bus to the driver. Read [`BUSES`] first; [`BusKind`] defines a row.

mod coyote;
mod emulator;
mod sim;
mod xrt;

use accl_types::{Error, Result};

use crate::bus::Bus;
use crate::device::{BusKind, DeviceUrl, Open};

/// All kinds of buses, in the order in which messages list them.
pub const BUSES: &[BusKind] = &[sim::ROW, emulator::ROW, xrt::ROW, coyote::ROW];

/// Opens the device of a rank. The caller carries the texts of [`Bus::local_info`] between ranks.
///
/// # Errors
/// The device is not there, does not answer, or is of another kind. `Internal` if the layer above opens devices of this kind.
pub fn open(url: &DeviceUrl, rank: u32) -> Result<Box<dyn Bus>> {
    match url.bus().open {
        Open::Here(open) => open(url, rank),
        Open::Above(_) => Err(Error::internal(format!(
            "this crate has no bus for the device `{}`: the caller that has the engine must pass a bus",
            url.scheme()
        ))),
    }
}

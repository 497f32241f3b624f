//! A look at a device that somebody else drives, and its reset: for a person.
//!
//! Owns what is read, and changes nothing but by [`reset`]. Read [`Picture::read`] first.

use accl_types::{Error, ErrorKind, Result};

use super::diagnosis::Diagnosis;
use super::settings::Settings;
use super::tables::Tables;
use crate::bus::Bus;
use crate::call::{ConfigFunction, Descriptor};
use crate::memory_map::{self as map, HardwareId, REGISTERS, Register};
use crate::return_code::ReturnCode;

/// What can be read of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Each word with a fixed place.
    pub registers: Vec<(Register, u32)>,
    /// What lies in the tables, if the device was set up as these settings say; `None`: it is not set up.
    pub tables: Option<Diagnosis>,
}

impl Picture {
    /// Reads it. `go_on` says whether there is time left for all rx buffers.
    ///
    /// # Errors
    /// As [`Bus::read_register`].
    pub fn read(bus: &mut dyn Bus, settings: &Settings, go_on: impl FnMut() -> bool) -> Result<Self> {
        let read = |register: &Register| Ok((*register, bus.read_register(register.offset)?));
        let registers = REGISTERS.iter().map(read).collect::<Result<Vec<_>>>()?;
        let Tables { rx_buffers, communicator, .. } = Tables::lay_out(settings)?;
        let mut picture = Self { registers, tables: None };
        if picture.word(map::IS_CONFIGURED) != 0 {
            picture.tables = Some(Diagnosis::read(bus, rx_buffers, communicator, go_on)?);
        }
        Ok(picture)
    }

    /// The word of a register.
    pub fn word(&self, register: Register) -> u32 {
        self.registers.iter().find(|(known, _)| *known == register).map_or(0, |(_, word)| *word)
    }

    /// What the device was built with.
    pub fn hardware_id(&self) -> HardwareId {
        HardwareId(self.word(map::HARDWARE_ID))
    }
}

/// Resets a device. That is a call as any other: one that is under way has to end first. Between looks `go_on` is asked whether there is time
/// left.
///
/// # Errors
/// The device cannot be reached, or does not come back to it.
pub fn reset(bus: &mut dyn Bus, mut go_on: impl FnMut() -> bool) -> Result<()> {
    bus.drain()?;
    bus.start(&Descriptor::config(ConfigFunction::Reset, 0))?;
    while !bus.poll()? {
        if !go_on() {
            let text = format!(
                "{} does not come back to a reset: a call that is under way holds it, and nothing ends that; reload the board, or start \
                 the emulator again",
                bus.describe()
            );
            return Err(Error::new(ErrorKind::Device, text));
        }
    }
    bus.drain()?;
    let code = ReturnCode(bus.read_register(map::RETURN_CODE.offset)?);
    match code.is_ok() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Device, format!("{}: a reset failed: {code}", bus.describe()))),
    }
}

//! A look at a device that somebody else drives, and its reset: for a person.
//!
//! Owns what is read, and changes nothing but by [`reset`]. Read [`Picture::read`] first.

use std::time::Duration;

use accl_types::{Error, ErrorKind, Result};

use super::diagnosis::Diagnosis;
use super::settings::Settings;
use super::tables::Tables;
use crate::bus::Bus;
use crate::call::{ConfigFunction, Descriptor};
use crate::memory_map::{self as map, HardwareId, REGISTERS, Register};
use crate::return_code::ReturnCode;

/// Between looks whether a reset has come to its turn.
const RESET_PAUSE: Duration = Duration::from_millis(1);

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
        let tables = Tables::lay_out(settings)?;
        let mut picture = Self { registers, tables: None };
        if picture.word(map::IS_CONFIGURED) != 0 {
            picture.tables = Some(Diagnosis::read(bus, tables.rx_buffers, tables.ranks(), None, go_on)?);
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

/// What follows a reset whose end, or that of a call which it waited for, has been seen: it shows, and no end is left that a later call could be
/// given. Between looks `go_on` is asked whether there is time left.
pub(super) fn await_reset(bus: &mut dyn Bus, go_on: &mut dyn FnMut() -> bool) -> Result<()> {
    while bus.read_register(map::IS_CONFIGURED.offset)? != 0 {
        if !go_on() {
            return Err(Error::new(
                ErrorKind::Device,
                format!("{} is in use: it is still set up after a reset", bus.describe()),
            ));
        }
        bus.pause(RESET_PAUSE);
    }
    // The reset's own end may come a moment after what it has done shows.
    bus.drain()?;
    bus.pause(RESET_PAUSE);
    bus.drain()
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
    await_reset(bus, &mut go_on)?;
    let code = ReturnCode(bus.read_register(map::RETURN_CODE.offset)?);
    match code.is_ok() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Device, format!("{}: a reset failed: {code}", bus.describe()))),
    }
}

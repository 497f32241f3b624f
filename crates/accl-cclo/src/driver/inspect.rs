//! Inspection and reset of a device that another process drives, for a person.
//!
//! Owns what is read, and where. The positions follow from what the device was set up with, not from the caller's settings. Only [`reset`] changes
//! anything. Read [`Picture::read`] first.

use std::fmt;
use std::time::{Duration, Instant};

use accl_types::{Error, ErrorKind, Result};

use super::diagnosis::Diagnosis;
use super::pauses::Pauses;
use crate::bus::Bus;
use crate::call::{ConfigFunction, Descriptor};
use crate::memory_map::{
    self as map, Communicator, HardwareId, REGISTERS, Register, RxBuffer, TableAllocator, TableRegion,
};
use crate::return_code::ReturnCode;
use crate::settings::Ranks;
use crate::settings::{MAX_RX_BUFFERS, Settings};

/// How long a device may take to complete a reset. If no call holds the device, a reset takes less than a millisecond.
pub(super) const RESET_PATIENCE: Duration = Duration::from_secs(5);
/// Pause between checks whether a reset has taken effect.
const RESET_PAUSE: Duration = Duration::from_millis(1);

/// Readable state of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Each register and its value.
    pub registers: Vec<(Register, u32)>,
    /// Contents of the tables; `None` if the device is not set up.
    pub tables: Option<Seen>,
}

/// Contents of the tables of a device that is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Each parameter in which the device differs from the settings, as a sentence with the parameter's key.
    pub differs: Vec<String>,
    /// State of the rx buffers and the communicator.
    pub diagnosis: Diagnosis,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.differs.iter().try_for_each(|differs| write!(f, "{differs}; "))?;
        self.diagnosis.fmt(f)
    }
}

impl Picture {
    /// Reads the state of a device. The numbers of rx buffers and ranks, which determine the positions of the tables, are the device's own. Values
    /// that differ from `settings` are reported in `Seen::differs`. `go_on` returns whether there is time left to read the tables.
    ///
    /// # Errors
    /// Same as [`Bus::read_register`]; or there is no valid communicator at its position, so another program has laid out the tables differently.
    pub fn read(bus: &mut dyn Bus, settings: &Settings, go_on: impl FnMut() -> bool) -> Result<Self> {
        let read = |register: &Register| Ok((*register, bus.read_register(register.offset)?));
        let registers = REGISTERS.iter().map(read).collect::<Result<Vec<_>>>()?;
        let mut picture = Self { registers, tables: None };
        if picture.word(map::IS_CONFIGURED) != 0 {
            let (rx_buffers, ranks) = picture.find(bus)?;
            let differs = picture.differs(settings, ranks);
            let diagnosis = Diagnosis::read(bus, rx_buffers, ranks, None, go_on)?;
            picture.tables = Some(Seen { differs, diagnosis });
        }
        Ok(picture)
    }

    /// Returns the positions of the table of rx buffers and of the communicator of all ranks, computed from the device's own values.
    fn find(&self, bus: &mut dyn Bus) -> Result<(TableRegion, Ranks)> {
        let count = self.word(map::RX_BUFFER_COUNT);
        let name = bus.describe();
        let elsewhere = |what: String| {
            let text = format!(
                "{name}: {what}, so a program with another layout of tables has set it up, and only its registers can be read"
            );
            Error::new(ErrorKind::Device, text)
        };
        let mut allocator = TableAllocator::default();
        let rx_buffers =
            (1..=MAX_RX_BUFFERS).contains(&count).then(|| allocator.take(count as usize * RxBuffer::COUNT));
        let rx_buffers = rx_buffers.and_then(std::result::Result::ok);
        let rx_buffers = rx_buffers.ok_or_else(|| elsewhere(format!("its register 0x0 holds {count} rx buffers")))?;
        let head = allocator
            .take(Communicator::word_count(0))
            .map_err(|_| elsewhere("no communicator fits behind its rx buffers".to_owned()))?;
        let [ranks, local] = [bus.read_register(head.word(0))?, bus.read_register(head.word(1))?];
        let region = allocator.take(Communicator::word_count(ranks as usize) - head.words).ok();
        let region =
            region.filter(|_| local < ranks).map(|rest| TableRegion { words: head.words + rest.words, ..head });
        let region = region.ok_or_else(|| {
            elsewhere(format!("the position of its communicator, {:#x}, holds rank {local} of {ranks}", head.offset))
        })?;
        Ok((rx_buffers, Ranks { region, count: ranks, local }))
    }

    /// Returns each parameter of the device that differs from the settings, as a sentence with its key.
    fn differs(&self, settings: &Settings, ranks: Ranks) -> Vec<String> {
        let is = [
            ("`rx_buffers`", self.word(map::RX_BUFFER_COUNT), settings.rx_buffers),
            ("`rx_bytes`", self.word(map::RX_BUFFER_BYTES), settings.rx_bytes),
            ("`--ranks`", ranks.count, settings.world()),
            ("`--rank`", ranks.local, settings.rank),
        ];
        let is_other = is.into_iter().filter(|(_, own, asked)| own != asked);
        is_other.map(|(key, own, asked)| format!("it was set up with {key} {own}, and not with {asked}")).collect()
    }

    /// Returns the value of a register.
    pub fn word(&self, register: Register) -> u32 {
        self.registers.iter().find(|(known, _)| *known == register).map_or(0, |(_, word)| *word)
    }

    /// Returns the build options of the device.
    pub fn hardware_id(&self) -> HardwareId {
        HardwareId(self.word(map::HARDWARE_ID))
    }
}

/// Completes a reset, after the end of the reset or of the call before it has been polled. Waits until the reset has taken effect, and discards
/// remaining ends, so that none is taken for the end of a later call. Between checks `go_on` returns whether there is time left.
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
    // The end of the reset itself may arrive shortly after its effect is visible.
    bus.drain()?;
    bus.pause(RESET_PAUSE);
    bus.drain()
}

/// Returns the error for a device that is held by a call.
pub(super) fn held(bus: &dyn Bus) -> Error {
    let text = format!(
        "{} does not complete a reset: a call in flight holds it, and nothing can end this call; reload the board, or restart the emulator",
        bus.describe()
    );
    Error::new(ErrorKind::Device, text)
}

/// Resets a device. A reset is a call like any other, so a running call has to end first; only this project's emulator ends that call itself. Between
/// polls `go_on` returns whether there is time left.
///
/// # Errors
/// The device cannot be reached, or it does not complete the reset.
pub fn reset(bus: &mut dyn Bus, mut go_on: impl FnMut() -> bool) -> Result<()> {
    bus.drain()?;
    bus.start(&Descriptor::config(ConfigFunction::Reset, 0))?;
    let (begin, mut pauses) = (Instant::now(), Pauses::default());
    while !bus.poll()? {
        if !go_on() || begin.elapsed() > RESET_PATIENCE {
            return Err(held(bus));
        }
        bus.pause(pauses.next_pause());
    }
    await_reset(bus, &mut go_on)?;
    let code = ReturnCode(bus.read_register(map::RETURN_CODE.offset)?);
    match code.is_ok() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Device, format!("{}: a reset failed: {code}", bus.describe()))),
    }
}

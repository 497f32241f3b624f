//! A look at a device that somebody else drives, and its reset: for a person.
//!
//! Owns what is read and where, which is what the device was set up with and not what whoever looks believes, and changes nothing but by
//! [`reset`]. Read [`Picture::read`] first.

use std::fmt;
use std::time::{Duration, Instant};

use accl_types::{Error, ErrorKind, Result};

use super::diagnosis::Diagnosis;
use super::pauses::Pauses;
use super::settings::{MAX_RX_BUFFERS, Settings};
use super::tables::Ranks;
use crate::bus::Bus;
use crate::call::{ConfigFunction, Descriptor};
use crate::memory_map::{self as map, Communicator, HardwareId, Layout, Place, REGISTERS, Register, RxBuffer};
use crate::return_code::ReturnCode;

/// How long a device may take to come back to a reset. One that nothing holds takes less than a millisecond.
pub(super) const RESET_PATIENCE: Duration = Duration::from_secs(5);
/// Between looks whether a reset has come to its turn.
const RESET_PAUSE: Duration = Duration::from_millis(1);

/// What can be read of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    /// Each word with a fixed place.
    pub registers: Vec<(Register, u32)>,
    /// What lies in the tables; `None`: it is not set up.
    pub tables: Option<Seen>,
}

/// What lies in the tables of a device that somebody has set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// What it was set up with that is something else than was asked for, each by its key.
    pub differs: Vec<String>,
    /// What lies there.
    pub diagnosis: Diagnosis,
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.differs.iter().try_for_each(|differs| write!(f, "{differs}; "))?;
        self.diagnosis.fmt(f)
    }
}

impl Picture {
    /// Reads it. Where tables lie follows from the number of rx buffers and of ranks, so those are the device's own; what differs in them from
    /// the settings is said. `go_on` says whether there is time left for all that the tables hold.
    ///
    /// # Errors
    /// As [`Bus::read_register`]; or what lies where a communicator would is none, so somebody else has laid out the tables in another way.
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

    /// Where the table of rx buffers and the communicator of all ranks lie, by what the device says of itself.
    fn find(&self, bus: &mut dyn Bus) -> Result<(Place, Ranks)> {
        let count = self.word(map::RX_BUFFER_COUNT);
        let name = bus.describe();
        let elsewhere = |what: String| {
            let text = format!(
                "{name}: {what}, so a program that lays out its tables in another way has set it up, and only its registers can be read"
            );
            Error::new(ErrorKind::Device, text)
        };
        let mut layout = Layout::default();
        let rx_buffers = (1..=MAX_RX_BUFFERS).contains(&count).then(|| layout.take(count as usize * RxBuffer::COUNT));
        let rx_buffers = rx_buffers.and_then(std::result::Result::ok);
        let rx_buffers = rx_buffers.ok_or_else(|| elsewhere(format!("its register 0x0 says {count} rx buffers")))?;
        let head =
            layout.take(Communicator::word_count(0)).map_err(|_| elsewhere("no communicator fits".to_owned()))?;
        let [ranks, local] = [bus.read_register(head.word(0))?, bus.read_register(head.word(1))?];
        let place = layout.take(Communicator::word_count(ranks as usize) - head.words).ok();
        let place = place.filter(|_| local < ranks).map(|rest| Place { words: head.words + rest.words, ..head });
        let place = place.ok_or_else(|| {
            elsewhere(format!(
                "where its communicator would lie, at {:#x}, it says rank {local} of {ranks}",
                head.offset
            ))
        })?;
        Ok((rx_buffers, Ranks { place, count: ranks, local }))
    }

    /// What the device was set up with that is something else than the settings, each in a sentence with its key.
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

/// A device is held by a call.
pub(super) fn held(bus: &dyn Bus) -> Error {
    let text = format!(
        "{} does not come back to a reset: a call that is under way holds it, and nothing ends that; reload the board, or start the emulator \
         again",
        bus.describe()
    );
    Error::new(ErrorKind::Device, text)
}

/// Resets a device. That is a call as any other, and one that is under way has to end first, unless an emulator of ours
/// ends it. Between looks `go_on` is asked whether there is time left.
///
/// # Errors
/// The device cannot be reached, or does not come back to it.
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

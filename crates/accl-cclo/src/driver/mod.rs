//! Driver of a device, which runs one call at a time.
//!
//! Owns the order of calls, and the error report for a call that does not end. Setting a device up and releasing it is in `set_up`. Other modules
//! decide which calls a collective becomes, and keep the time: a driver uses no clock. Read [`Driver::start`] first.

mod claim;
mod diagnosis;
mod elements;
mod inspect;
mod pauses;
mod refusals;
mod set_up;
#[cfg(test)]
mod tests;

pub use crate::settings::{MAX_RX_BUFFERS, Peer, Settings};
pub(crate) use claim::claim;
pub use diagnosis::Diagnosis;
pub use elements::Elements;
pub use inspect::{Picture, reset};
pub use pauses::Pauses;

use accl_types::{Error, ErrorKind, Result};

use crate::bus::Bus;
use crate::call::{Counts, Descriptor, Hosts, Operation};
use crate::memory_map::{self as map, ArithmeticConfig, DataType, HardwareId};
use crate::return_code::ReturnCode;
use crate::settings::{Ranks, Tables};

/// Result of a call that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finished {
    /// Duration in nanoseconds, as counted by the device.
    pub nanos: u64,
}

/// A device that is set up.
pub struct Driver<B: Bus> {
    bus: B,
    settings: Settings,
    hardware_id: HardwareId,
    tables: Tables,
    running: Option<Descriptor>,
    /// Whether the device lets packets of other engines in, or has been asked to.
    takes_packets: bool,
    /// Error after which the device takes no more calls.
    dead: Option<Error>,
}

impl<B: Bus> Driver<B> {
    fn write_words(&mut self, offset: u32, words: &[u32]) -> Result<()> {
        for (word, at) in words.iter().zip((offset..).step_by(4)) {
            self.bus.write_register(at, *word)?;
        }
        Ok(())
    }

    /// Returns the settings that the device was set up with.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns the build options of the device.
    pub fn hardware_id(&self) -> HardwareId {
        self.hardware_id
    }

    /// Returns the bus, through which callers allocate and access their buffers.
    pub fn bus(&mut self) -> &mut B {
        &mut self.bus
    }

    /// Returns a descriptor for a call on elements of type `dtype`, which are sent as `on_wire`. The caller fills in addresses and other fields.
    ///
    /// # Errors
    /// The device has no arithmetic for these types.
    pub fn call(&self, operation: Operation, dtype: DataType, on_wire: DataType, count: u32) -> Result<Descriptor> {
        self.call_on(operation, Elements::of(dtype).on_wire(on_wire), count)
    }

    /// Same as [`Driver::call`], with element types that differ between buffers.
    ///
    /// # Errors
    /// Same as [`Driver::call`].
    pub fn call_on(&self, operation: Operation, elements: Elements, count: u32) -> Result<Descriptor> {
        let (key, compression) = elements.choose()?;
        let arithmetic = key.map_or(Ok(0), |(dtype, on_wire)| {
            let is_it = |config: &ArithmeticConfig| (config.uncompressed, config.compressed) == (dtype, on_wire);
            let found = self.tables.configs.iter().find(|(config, _)| is_it(config));
            found.map(|(_, region)| region.offset).ok_or_else(|| {
                let text = format!("no device has arithmetic for {dtype:?} that is sent as {on_wire:?}");
                Error::new(ErrorKind::Unsupported, text)
            })
        })?;
        Ok(Descriptor {
            count,
            communicator: self.tables.ranks.region.offset,
            arithmetic,
            compression,
            hosts: Hosts::all(self.settings.memory.is_host()),
            ..Descriptor::new(operation)
        })
    }

    /// Starts a call. Only one call runs at a time.
    ///
    /// # Errors
    /// Firmware would hang on the call or do something else; another call runs; packets are not let in; or the device is dead or cannot
    /// be reached. If it cannot be reached, the device is dead from then on.
    pub fn start(&mut self, call: &Descriptor) -> Result<()> {
        if let Some(dead) = &self.dead {
            return Err(dead.clone());
        }
        if let Some(running) = self.running {
            return Err(Error::internal(format!("`{call}` was started while `{running}` runs")));
        }
        self.check(call)?;
        self.start_unrefused(call)
    }

    fn start_unrefused(&mut self, call: &Descriptor) -> Result<()> {
        if let Err(error) = self.bus.start(call) {
            return Err(self.kill(error));
        }
        self.running = Some(*call);
        Ok(())
    }

    /// Checks that firmware will do what the call asks for.
    fn check(&self, call: &Descriptor) -> Result<()> {
        if !self.takes_packets {
            return Err(Error::internal(format!("`{call}` was issued before packets were enabled")));
        }
        let unknown = |what: &str, offset: u32| {
            Error::new(ErrorKind::InvalidArgument, format!("`{call}` is refused: there is no {what} at {offset:#x}"))
        };
        let (ranks, local) = match call.operation {
            Operation::Config | Operation::Copy | Operation::Combine | Operation::Nop => (1, 0),
            _ => self
                .tables
                .ranks_at(call.communicator)
                .map(|Ranks { count, local, .. }| (count, local))
                .ok_or_else(|| unknown("communicator", call.communicator))?,
        };
        let has_elements = matches!(call.operation.row().counts, Counts::Elements | Counts::ElementsPerRank);
        let config = self.tables.configs.iter().find(|(_, region)| region.offset == call.arithmetic);
        if has_elements && config.is_none() {
            return Err(unknown("arithmetic config", call.arithmetic));
        }
        refusals::check(
            call,
            &self.settings,
            refusals::CallContext { ranks, local, config: config.map(|(config, _)| *config) },
        )
    }

    /// Returns why the device takes no more calls, or `None` if it still does.
    pub fn dead(&self) -> Option<&Error> {
        self.dead.as_ref()
    }

    /// Returns the call that was started and has not ended, as far as the driver has polled.
    pub fn running(&self) -> Option<&Descriptor> {
        self.running.as_ref()
    }

    /// Polls the started call. Returns `None` while it runs, or if no call was started.
    ///
    /// # Errors
    /// The call has failed; the message names every bit of its return code. Or the device cannot be reached. In both cases the device is dead.
    pub fn poll(&mut self) -> Result<Option<Finished>> {
        if let Some(dead) = &self.dead {
            return Err(dead.clone());
        }
        let Some(call) = self.running else { return Ok(None) };
        match self.look(&call) {
            Ok(None) => Ok(None),
            Ok(Some((code, finished))) => {
                self.running = None;
                if code.is_ok() {
                    return Ok(Some(finished));
                }
                // This project's emulator reports more detail than the bits do.
                let about = self.bus.about().ok().flatten().map(|about| about.trouble);
                let trouble =
                    about.filter(|trouble| !trouble.is_empty()).map(|trouble| format!("; it reports: {trouble}"));
                let text = format!("{}: `{call}` failed: {code}{}", self.bus.describe(), trouble.unwrap_or_default());
                Err(self.kill(Error::new(ErrorKind::Device, text)))
            }
            Err(error) => Err(self.kill(error)),
        }
    }

    fn look(&mut self, call: &Descriptor) -> Result<Option<(ReturnCode, Finished)>> {
        if !self.bus.poll()? {
            return Ok(None);
        }
        let code = ReturnCode(self.bus.read_register(map::RETURN_CODE.offset)?);
        // The duration of a config call is of no interest.
        let cycles = match call.operation {
            Operation::Config => 0,
            _ => self.bus.read_register(map::CYCLES.offset)?,
        };
        Ok(Some((code, Finished { nanos: u64::from(cycles) * map::NANOSECONDS_PER_CYCLE })))
    }

    /// Declares the running call overdue. No request can end the call, so the device takes no more calls.
    ///
    /// The returned error says why the call hangs, as far as the device's memory shows it. The memory is read over a new connection, since the first
    /// may be in the middle of a request. Before each read `go_on` returns whether there is time left.
    pub fn give_up(&mut self, why: &str, go_on: impl FnMut() -> bool) -> Error {
        let call = self.running.map_or_else(|| "a call".to_owned(), |call| format!("`{call}`"));
        let rx_buffers = self.tables.rx_buffers;
        let ranks = self.tables.ranks;
        let root = self.running.filter(|call| call.operation.row().has_root).map(|call| call.root);
        let seen =
            self.bus.reconnect().and_then(|mut over| Diagnosis::read(&mut *over, rx_buffers, ranks, root, go_on));
        let seen = match seen {
            Ok(diagnosis) => diagnosis.to_string(),
            Err(error) => format!("its registers cannot be read: {}", error.message),
        };
        let text =
            format!("{}: {call} {why}; {seen}; the device takes no more calls until it is reset", self.bus.describe());
        self.kill(Error::new(ErrorKind::Device, text))
    }

    fn kill(&mut self, error: Error) -> Error {
        self.dead.get_or_insert(error).clone()
    }
}

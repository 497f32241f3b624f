//! Setup and release of a device.
//!
//! Owns the order in which a device is written before its first call. Also ensures that a device no longer writes to its buffers when they are freed.
//! Positions in exchange memory are in `tables`, and the driver's parameters in `settings`. Read [`Driver::set_up`] first.

use std::time::{Duration, Instant};

use accl_types::{Error, ErrorKind, Result};

use super::Driver;
use super::claim::claim;
use super::inspect::{self, RESET_PATIENCE, await_reset, held};
use super::pauses::Pauses;
use crate::bus::{Bus, Memory};
use crate::call::{ConfigFunction, Descriptor};
use crate::control::About;
use crate::design::Design;
use crate::memory_map::{self as map, HardwareId, RxBuffer};
use crate::settings::Settings;
use crate::settings::Tables;

/// Timeout value written to firmware, which never uses it.
const FIRMWARE_TIMEOUT: u32 = 1_000_000;
/// Maximum number of ranks whose addresses a flat gather has outstanding, and the block size above which that limit applies. ACCL's own driver uses
/// the same values.
const GATHER_FAN_IN: u32 = 2;
const GATHER_FAN_IN_BYTES: u32 = 32 << 10;
/// Rendezvous broadcasts use a tree among more ranks than this.
const BROADCAST_FLAT_RANKS: u32 = 3;
/// How long a released device may take to complete a reset. After that it is assumed that the device may still write to its buffers.
const LEAVE_PATIENCE: Duration = Duration::from_millis(500);

impl<B: Bus> Driver<B> {
    /// Sets a device up and lets packets in: [`Driver::set_up`] followed by [`Driver::enable_packets`].
    ///
    /// The caller must know that no other engine will send packets of an earlier job. All ranks must have done this before any rank starts a call.
    ///
    /// # Errors
    /// Same as the two functions.
    pub fn open(bus: B, settings: Settings, mut go_on: impl FnMut() -> bool) -> Result<Self> {
        let mut driver = Self::set_up(bus, settings, &mut go_on)?;
        driver.enable_packets(go_on)?;
        Ok(driver)
    }

    /// Sets a device up without letting packets in, since engines of other ranks may still work for a job that was killed. `settings` must already
    /// contain the sessions of the peers. Between polls of a config call `go_on` returns whether there is time left.
    ///
    /// # Errors
    /// Firmware would refuse the settings, another driver uses the device, the device is of another design, or it cannot be reached.
    pub fn set_up(mut bus: B, settings: Settings, mut go_on: impl FnMut() -> bool) -> Result<Self> {
        settings.check()?;
        settings.check_sessions()?;
        let hardware_id = HardwareId(bus.read_register(map::HARDWARE_ID.offset)?);
        if let Some(network) = hardware_id.network().filter(|network| *network != settings.network) {
            let [built, asked] = [network, settings.network].map(|network| Design::of(network).name());
            return Err(Error::new(
                ErrorKind::Configuration,
                format!("{} was built for {built}, but `design` requests {asked}", bus.describe()),
            ));
        }
        if let Some(about) = bus.about()? {
            let why = differs(&about, &settings).map(|why| format!("{} {why}", bus.describe()));
            why.map_or(Ok(()), |why| Err(Error::new(ErrorKind::Configuration, why)))?;
        }
        let tables = Tables::lay_out(&settings)?;
        claim(&mut bus, &mut go_on)?;
        let mut driver = Self { bus, settings, hardware_id, tables, running: None, takes_packets: false, dead: None };
        driver.write_all(&mut go_on)?;
        Ok(driver)
    }

    fn write_all(&mut self, go_on: &mut impl FnMut() -> bool) -> Result<()> {
        self.bus.drain()?;
        self.configure(ConfigFunction::Reset, 0, go_on)?;
        await_reset(&mut self.bus, go_on)?;
        let Settings { rx_buffers, rx_bytes, max_eager_bytes, max_rendezvous_bytes, .. } = self.settings;
        let rx = self.bus.allocate_rx(u64::from(rx_buffers) * u64::from(rx_bytes))?;
        for index in 0..rx_buffers {
            let entry = RxBuffer::idle(rx + u64::from(index) * u64::from(rx_bytes));
            self.write_words(self.tables.rx_buffers.word(RxBuffer::COUNT * index as usize), &entry.to_words())?;
        }
        self.bus.write_register(map::RX_BUFFER_BYTES.offset, rx_bytes)?;
        self.bus.write_register(map::RX_BUFFER_COUNT.offset, rx_buffers)?;
        for [low, high] in map::SPARE_BUFFERS {
            let spare = self.bus.allocate(Memory::Device, u64::from(max_rendezvous_bytes))?;
            self.bus.write_register(low.offset, spare as u32)?;
            self.bus.write_register(high.offset, (spare >> 32) as u32)?;
        }
        let communicator = self.settings.communicator();
        self.write_words(self.tables.ranks.region.offset, &communicator.to_words())?;
        for (config, region) in self.tables.configs.clone() {
            self.write_words(region.offset, &config.to_words())?;
        }
        for (register, value) in self.tuning() {
            self.bus.write_register(register.offset, value)?;
        }
        self.bus.write_register(map::IS_CONFIGURED.offset, 1)?;
        self.configure(ConfigFunction::Timeout, FIRMWARE_TIMEOUT, go_on)?;
        self.configure(ConfigFunction::MaxEagerBytes, max_eager_bytes, go_on)?;
        self.configure(ConfigFunction::MaxRendezvousBytes, max_rendezvous_bytes, go_on)
    }

    /// Lets packets of other engines in, after which calls may be started. The devices of all ranks must have been reset before, because packets do
    /// not say which job they belong to. Between polls `go_on` returns whether there is time left.
    ///
    /// # Errors
    /// The device cannot be reached, or it has not reached the engines of all ranks in time.
    pub fn enable_packets(&mut self, mut go_on: impl FnMut() -> bool) -> Result<()> {
        self.takes_packets = true;
        self.configure(ConfigFunction::EnablePackets, 0, &mut go_on)
    }

    /// Returns the values of the tuning registers. Reductions never use a tree, where firmware loses the last sum.
    fn tuning(&self) -> [(map::Register, u32); 5] {
        [
            (map::GATHER_FAN_IN, GATHER_FAN_IN),
            (map::GATHER_FAN_IN_BYTES, GATHER_FAN_IN_BYTES),
            (map::BROADCAST_FLAT_RANKS, BROADCAST_FLAT_RANKS),
            (map::REDUCE_FLAT_RANKS, self.settings.world().max(1)),
            (map::REDUCE_FLAT_BYTES, 0),
        ]
    }

    fn configure(&mut self, function: ConfigFunction, value: u32, go_on: &mut impl FnMut() -> bool) -> Result<()> {
        let call = Descriptor { communicator: self.tables.ranks.region.offset, ..Descriptor::config(function, value) };
        self.start_unrefused(&call)?;
        let (begin, mut pauses) = (Instant::now(), Pauses::default());
        while self.poll()?.is_none() {
            if function == ConfigFunction::Reset && begin.elapsed() > RESET_PATIENCE {
                let held = held(&self.bus);
                return Err(self.kill(held));
            }
            if !go_on() {
                let text = format!("{} did not answer `{call}` in time{}", self.bus.describe(), self.why_not(function));
                return Err(self.kill(Error::new(ErrorKind::Device, text)));
            }
            self.bus.pause(pauses.next_pause());
        }
        Ok(())
    }

    /// Returns why a config call does not end, as far as the device reports it. Letting packets in waits for the engines of all ranks.
    fn why_not(&mut self, function: ConfigFunction) -> String {
        // If the device cannot be asked, that is no better explanation.
        let about = self.bus.about().ok().flatten();
        match about {
            Some(About { missing, .. }) if !missing.is_empty() => {
                let ranks: Vec<String> = missing.iter().map(u32::to_string).collect();
                format!("; it waits for the emulators of ranks {}: start them, or correct their addresses", ranks.join(", "))
            }
            Some(About { trouble, .. }) if !trouble.is_empty() => format!("; it reports: {trouble}"),
            None if function == ConfigFunction::EnablePackets => {
                "; it does not report the missing ranks; packets are enabled once the devices of all ranks reach one another".to_owned()
            }
            Some(_) | None => String::new(),
        }
    }

    /// Stops the device from writing to its buffers by a reset, and fails if it may still write. A running call prevents the reset. A device
    /// that never let packets in, or that another driver has claimed since, is left alone.
    fn leave(&mut self) -> Result<()> {
        let begin = Instant::now();
        // The limit on the bus is the deadline of the last call, which may be long past.
        self.bus.set_deadline(None);
        // A poll here might consume the end of another driver's call.
        if self.running.is_some() {
            return Err(held(&self.bus));
        }
        match self.takes_packets && self.bus.claim()?.is_none() {
            true => inspect::reset(&mut self.bus, || begin.elapsed() < LEAVE_PATIENCE),
            false => Ok(()),
        }
    }
}

/// Keeps the buffers for the life of the process if the device may still write to them.
impl<B: Bus> Drop for Driver<B> {
    fn drop(&mut self) {
        if self.leave().is_err() {
            self.bus.keep_buffers();
        }
    }
}

/// Returns in what an emulator's self-description contradicts the settings, or `None` if they agree.
fn differs(about: &About, settings: &Settings) -> Option<String> {
    let (network, world) = (settings.network, settings.world());
    if about.network != network && !settings.suits_any_network {
        let [is, asked] = [about.network, network].map(|network| Design::of(network).name());
        return Some(format!(
            "was started for {is}, but `design` requests {asked}; add `design={is}`, or start it with another `--comms`"
        ));
    }
    if about.ranks != world {
        return Some(format!(
            "was started for {} ranks, but there are {world}; start it with another `--ranks`",
            about.ranks
        ));
    }
    (about.rank != settings.rank).then(|| {
        format!(
            "serves rank {}, but this is rank {}; correct the address of this rank's emulator",
            about.rank, settings.rank
        )
    })
}

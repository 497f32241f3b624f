//! How a device is set up for a driver, and left.
//!
//! Owns the order of what is written to a device before its first call, and that it writes nowhere any more when its buffers go back. What lies
//! where is in `tables`, what a driver is told in `settings`. Read [`Driver::set_up`] first.

use std::time::{Duration, Instant};

use accl_types::{Error, ErrorKind, Result};

use super::Driver;
use super::claim::claim;
use super::inspect::{self, RESET_PATIENCE, await_reset, held};
use super::pauses::Pauses;
use super::queue::Queue;
use super::settings::Settings;
use super::tables::Tables;
use crate::bus::{Bus, Memory};
use crate::call::{ConfigFunction, Descriptor};
use crate::control::About;
use crate::device::Design;
use crate::memory_map::{self as map, HardwareId, RxBuffer};

/// What firmware is told for a time that it never looks at.
const FIRMWARE_TIMEOUT: u32 = 1_000_000;
/// Most ranks that a flat gather has addresses out to, and above how many bytes: as ACCL's own driver sets them.
const GATHER_FAN_IN: u32 = 2;
const GATHER_FAN_IN_BYTES: u32 = 32 << 10;
/// More ranks than this share a tree when a root has something for all of them.
const BROADCAST_FLAT_RANKS: u32 = 3;
/// How long a device that is left may take to come back to a reset, before it is taken for one that may write to its buffers.
const LEAVE_PATIENCE: Duration = Duration::from_millis(500);

impl<B: Bus> Driver<B> {
    /// Sets a device up and lets packets in, for whoever knows that no engine of the others has anything to send of a time before: as
    /// [`Driver::set_up`] and [`Driver::enable_packets`]. All ranks must have done so before the first of them makes a call.
    ///
    /// # Errors
    /// As there.
    pub fn open(bus: B, settings: Settings, mut go_on: impl FnMut() -> bool) -> Result<Self> {
        let mut driver = Self::set_up(bus, settings, &mut go_on)?;
        driver.enable_packets(go_on)?;
        Ok(driver)
    }

    /// Sets a device up, once it has heard what it needs of others, and lets no packets in: the engines of other ranks may still work for a job
    /// that was killed. Between looks at a call that sets something `go_on` is asked whether there is time left.
    ///
    /// # Errors
    /// Settings that firmware refuses, a device that somebody else uses or that is of another design, or that cannot be reached.
    pub fn set_up(mut bus: B, settings: Settings, mut go_on: impl FnMut() -> bool) -> Result<Self> {
        settings.check()?;
        settings.check_sessions()?;
        let hardware_id = HardwareId(bus.read_register(map::HARDWARE_ID.offset)?);
        if let Some(network) = hardware_id.network().filter(|network| *network != settings.network) {
            let [built, asked] = [network, settings.network].map(|network| Design::of(network).name());
            return Err(Error::new(
                ErrorKind::Configuration,
                format!("{} was built for {built}, and `design` asks for {asked}", bus.describe()),
            ));
        }
        if let Some(about) = bus.about()? {
            let why = differs(&about, &settings).map(|why| format!("{} {why}", bus.describe()));
            why.map_or(Ok(()), |why| Err(Error::new(ErrorKind::Configuration, why)))?;
        }
        let tables = Tables::lay_out(&settings)?;
        claim(&mut bus, &mut go_on)?;
        let queue = Queue::default();
        let mut driver =
            Self { bus, settings, hardware_id, tables, running: None, queue, takes_packets: false, dead: None };
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
        self.write_words(self.tables.ranks().place.offset, &communicator.to_words())?;
        for (config, place) in self.tables.configs.clone() {
            self.write_words(place.offset, &config.to_words())?;
        }
        for (register, value) in self.tuning() {
            self.bus.write_register(register.offset, value)?;
        }
        self.bus.write_register(map::IS_CONFIGURED.offset, 1)?;
        self.configure(ConfigFunction::Timeout, FIRMWARE_TIMEOUT, go_on)?;
        self.configure(ConfigFunction::MaxEagerBytes, max_eager_bytes, go_on)?;
        self.configure(ConfigFunction::MaxRendezvousBytes, max_rendezvous_bytes, go_on)
    }

    /// Lets packets of other engines in, after which calls may be started: once the devices of all ranks have been reset, since nothing tells
    /// packets of this job from those of one before. Between looks `go_on` is asked whether there is time left.
    ///
    /// # Errors
    /// The device cannot be reached, or has not heard of the engines of all ranks in time.
    pub fn enable_packets(&mut self, mut go_on: impl FnMut() -> bool) -> Result<()> {
        self.takes_packets = true;
        self.configure(ConfigFunction::EnablePackets, 0, &mut go_on)
    }

    /// Tuning registers. Sums never go up a tree, where firmware loses the last one.
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
        let call = Descriptor { communicator: self.tables.ranks().place.offset, ..Descriptor::config(function, value) };
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

    /// Why a call that sets something does not end, as far as the device says: letting packets in waits for the engines of all ranks.
    fn why_not(&mut self, function: ConfigFunction) -> String {
        // That it cannot be asked is no better reason.
        let about = self.bus.about().ok().flatten();
        match about {
            Some(About { missing, .. }) if !missing.is_empty() => {
                let ranks: Vec<String> = missing.iter().map(u32::to_string).collect();
                format!("; it waits for the emulators of ranks {}: start them, or correct where they are", ranks.join(", "))
            }
            Some(About { trouble, .. }) if !trouble.is_empty() => format!("; it says: {trouble}"),
            None if function == ConfigFunction::EnablePackets => {
                "; it does not say for whom it waits, and packets are let in once the devices of all ranks reach one another".to_owned()
            }
            Some(_) | None => String::new(),
        }
    }

    /// Whether the device writes to none of its buffers any more, which a reset sees to unless a call is under way. A device that another driver
    /// has taken is left to that one.
    fn leave(&mut self) -> Result<()> {
        let begin = Instant::now();
        // The deadline was that of the last call, which may be long past.
        self.bus.limit(None);
        // To ask whether it has ended by now might take the end of another driver's call.
        if self.running.is_some() {
            return Err(held(&self.bus));
        }
        match self.takes_packets && self.bus.claim()?.is_none() {
            true => inspect::reset(&mut self.bus, || begin.elapsed() < LEAVE_PATIENCE),
            false => Ok(()),
        }
    }
}

/// A device that may still write to its buffers keeps them for as long as the process lives.
impl<B: Bus> Drop for Driver<B> {
    fn drop(&mut self) {
        if self.leave().is_err() {
            self.bus.keep_buffers();
        }
    }
}

/// Why an emulator that says what it is cannot be what the settings ask for.
fn differs(about: &About, settings: &Settings) -> Option<String> {
    let (network, world) = (settings.network, settings.world());
    if about.network != network && !settings.suits_any_network {
        let [is, asked] = [about.network, network].map(|network| Design::of(network).name());
        return Some(format!(
            "was started for {is}, and `design` asks for {asked}; add `design={is}`, or start it with other `--comms`"
        ));
    }
    if about.ranks != world {
        return Some(format!(
            "was started for {} ranks, and there are {world}; start it with other `--ranks`",
            about.ranks
        ));
    }
    (about.rank != settings.rank).then(|| {
        format!("is that of rank {}, and this is rank {}; its address is another rank's", about.rank, settings.rank)
    })
}

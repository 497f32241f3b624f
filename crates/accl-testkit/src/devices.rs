//! Devices of a world in one process, and what can be wrong with them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use accl_cclo::bus::{Bus, Memory};
use accl_cclo::call::{Descriptor, Operation};
use accl_cclo::device::DeviceUrl;
use accl_cclo::driver::Settings;
use accl_cclo::packets::Packets;
use accl_emulator::local::{LocalBus, LocalEngines};
use accl_emulator::sim::SimBus;
use accl_engine::OpenBus;
use accl_types::{Error, Result};
use parking_lot::Mutex;

pub use accl_cclo::memory_map::Network;
pub use accl_emulator::Faithful;

/// Opens the engines of this process as devices.
pub struct LocalDevices {
    engines: Arc<LocalEngines>,
    faults: Arc<Faults>,
}

/// What is wrong with the devices, or special; a rank of `u32::MAX` is nobody's.
#[derive(Debug)]
pub struct Faults {
    /// Devices tell one another of the ends of queue pairs, and reach each other by these alone.
    pub have_queue_pairs: AtomicBool,
    /// The device of this rank is not reached before this is taken back.
    pub is_slow: AtomicU32,
    /// The device of this rank tells what makes no sense.
    pub babbles: AtomicU32,
    /// The device of this rank fails when it hears of the others.
    pub does_not_hear: AtomicU32,
    /// What each rank's device has told last.
    pub told: Mutex<BTreeMap<u32, String>>,
    /// What each rank's device has heard last.
    pub heard: Mutex<BTreeMap<u32, Vec<String>>>,
    /// What the driver of a rank has set up for each rank as its session.
    pub sessions: Mutex<BTreeMap<(u32, u32), u32>>,
    /// Devices that are open.
    pub open: AtomicU32,
    /// What was set up on the devices: the rank and the number of a function, in the order in which it was started.
    pub configured: Mutex<Vec<(u32, u32)>>,
    /// Devices that were ever opened, which their queue pairs are numbered by.
    openings: AtomicU32,
    /// The device of this rank does not open.
    pub does_not_open: AtomicU32,
    /// The device of this rank never begins a collective: the others wait for it.
    pub hangs: AtomicU32,
    /// The device of this rank is gone: no request is answered.
    pub is_gone: AtomicU32,
    /// Calls of collectives that were started, on all devices.
    pub started: AtomicU32,
    /// No call of a collective ends before this is taken back.
    pub holds: AtomicBool,
    /// Whoever looks at a call of this rank's device gets no answer before this is taken back, and neither does whoever asks anything else.
    pub is_stuck: AtomicU32,
    /// Somebody has asked it.
    pub waits: AtomicBool,
}

const NOBODY: u32 = u32::MAX;

impl LocalDevices {
    /// Engines for so many ranks.
    pub fn new(network: Network, faithful: Faithful, ranks: u32) -> Arc<Self> {
        let faults = Faults {
            have_queue_pairs: false.into(),
            is_slow: NOBODY.into(),
            babbles: NOBODY.into(),
            does_not_hear: NOBODY.into(),
            told: Mutex::default(),
            heard: Mutex::default(),
            sessions: Mutex::default(),
            open: 0.into(),
            configured: Mutex::default(),
            openings: 0.into(),
            does_not_open: NOBODY.into(),
            hangs: NOBODY.into(),
            is_gone: NOBODY.into(),
            started: 0.into(),
            holds: false.into(),
            is_stuck: NOBODY.into(),
            waits: false.into(),
        };
        Arc::new(Self { engines: LocalEngines::new(network, faithful, ranks), faults: Arc::new(faults) })
    }

    /// What is wrong with them.
    pub fn faults(&self) -> &Faults {
        &self.faults
    }
}

impl OpenBus for LocalDevices {
    fn open(
        &self,
        _url: &DeviceUrl,
        settings: &Settings,
        _packets: Arc<dyn Packets>,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Box<dyn Bus>> {
        while self.faults.is_slow.load(Ordering::Relaxed) == settings.rank {
            if !go_on() {
                return Err(Error::timeout(format!("the card of rank {} does not come", settings.rank)));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.faults.does_not_open.load(Ordering::Relaxed) == settings.rank {
            return Err(Error::device(format!("the card of rank {} has no power", settings.rank)));
        }
        let bus = LocalBus::new(&self.engines, settings.rank);
        self.faults.open.fetch_add(1, Ordering::Relaxed);
        let opening = self.faults.openings.fetch_add(1, Ordering::Relaxed);
        let faults = self.faults.clone();
        Ok(Box::new(FaultyBus { bus, rank: settings.rank, faults, opening, runs_collective: false }))
    }
}

/// Opens an engine in software for each rank, which reaches the others over the links of the ranks.
pub struct SimDevices(pub Faithful);

impl OpenBus for SimDevices {
    fn open(
        &self,
        _url: &DeviceUrl,
        settings: &Settings,
        packets: Arc<dyn Packets>,
        _go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Box<dyn Bus>> {
        Ok(Box::new(SimBus::new(settings.network, self.0, settings.rank, packets)))
    }
}

/// A connection with what is wrong with it.
struct FaultyBus {
    bus: LocalBus,
    rank: u32,
    faults: Arc<Faults>,
    opening: u32,
    runs_collective: bool,
}

/// What numbers of queue pairs begin with, so that nothing else is one.
const QUEUE_PAIR: u32 = 0x5E << 24;

/// The queue pair of an opening for a rank.
fn queue_pair(opening: u32, peer: u32) -> u32 {
    QUEUE_PAIR | opening << 8 | peer
}

impl Drop for FaultyBus {
    fn drop(&mut self) {
        self.faults.open.fetch_sub(1, Ordering::Relaxed);
    }
}

impl FaultyBus {
    fn reach(&self) -> Result<()> {
        while self.faults.is_stuck.load(Ordering::Relaxed) == self.rank {
            self.faults.waits.store(true, Ordering::Relaxed);
            std::thread::sleep(Duration::from_millis(1));
        }
        match self.faults.is_gone.load(Ordering::Relaxed) == self.rank {
            true => Err(Error::device(format!("{} has closed the connection", self.bus.describe()))),
            false => Ok(()),
        }
    }
}

impl Bus for FaultyBus {
    fn tell(&mut self, settings: &Settings) -> Result<Option<String>> {
        if !self.faults.have_queue_pairs.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let of = |peer| format!("qp of rank {} for peer {peer}: {}\n", self.rank, queue_pair(self.opening, peer));
        let text = match self.faults.babbles.load(Ordering::Relaxed) == self.rank {
            true => "qp".to_owned(),
            false => (0..settings.world()).map(of).collect(),
        };
        self.faults.told.lock().insert(self.rank, text.clone());
        Ok(Some(text))
    }

    fn hear(&mut self, told: &[String], settings: &mut Settings) -> Result<()> {
        self.faults.heard.lock().insert(self.rank, told.to_vec());
        if self.faults.does_not_hear.load(Ordering::Relaxed) == self.rank {
            return Err(Error::device(format!("the card of rank {} connects no queue pair", self.rank)));
        }
        for (rank, text) in (0u32..).zip(told) {
            let for_us = format!("qp of rank {rank} for peer {}: ", self.rank);
            if !text.lines().any(|line| line.starts_with(&for_us)) {
                return Err(Error::device(format!("what rank {rank} has told makes no sense: `{text}`")));
            }
            settings.peers[rank as usize].session = queue_pair(self.opening, rank);
        }
        Ok(())
    }

    fn read_register(&mut self, offset: u32) -> Result<u32> {
        self.reach()?;
        self.bus.read_register(offset)
    }

    fn write_register(&mut self, offset: u32, value: u32) -> Result<()> {
        self.reach()?;
        let peer = value & 0xFF;
        if self.faults.have_queue_pairs.load(Ordering::Relaxed) && value == queue_pair(self.opening, peer) {
            self.faults.sessions.lock().insert((self.rank, peer), value);
            // The engine behind it reaches the others by their ranks.
            return self.bus.write_register(offset, peer);
        }
        self.bus.write_register(offset, value)
    }

    fn allocate(&mut self, memory: Memory, bytes: u64) -> Result<u64> {
        self.reach()?;
        self.bus.allocate(memory, bytes)
    }

    fn read_memory(&mut self, memory: Memory, address: u64, into: &mut [u8]) -> Result<()> {
        self.reach()?;
        self.bus.read_memory(memory, address, into)
    }

    fn write_memory(&mut self, memory: Memory, address: u64, from: &[u8]) -> Result<()> {
        self.reach()?;
        self.bus.write_memory(memory, address, from)
    }

    fn start(&mut self, call: &Descriptor) -> Result<()> {
        self.reach()?;
        self.runs_collective = call.operation != Operation::Config;
        if !self.runs_collective {
            self.faults.configured.lock().push((self.rank, call.function));
        }
        if self.runs_collective {
            self.faults.started.fetch_add(1, Ordering::Relaxed);
            if self.faults.hangs.load(Ordering::Relaxed) == self.rank {
                return Ok(());
            }
        }
        self.bus.start(call)
    }

    fn poll(&mut self) -> Result<bool> {
        self.reach()?;
        let does_not_end =
            self.faults.hangs.load(Ordering::Relaxed) == self.rank || self.faults.holds.load(Ordering::Relaxed);
        if self.runs_collective && does_not_end { Ok(false) } else { self.bus.poll() }
    }

    fn drain(&mut self) -> Result<()> {
        self.reach()?;
        self.bus.drain()
    }

    fn reconnect(&self) -> Result<Box<dyn Bus>> {
        self.reach()?;
        self.bus.reconnect()
    }

    fn describe(&self) -> String {
        self.bus.describe()
    }
}

//! Devices of a world in one process, and what can be wrong with them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use accl_cclo::bus::{Bus, Memory};
use accl_cclo::call::{Descriptor, Operation};
use accl_cclo::device::DeviceUrl;
use accl_cclo::driver::Settings;
use accl_cclo::packets::Packets;
use accl_emulator::local::{LocalBus, LocalEngines};
use accl_emulator::sim::SimBus;
use accl_engine::OpenBus;
use accl_types::{Error, Result};

pub use accl_cclo::memory_map::Network;
pub use accl_emulator::Faithful;

/// Opens the engines of this process as devices.
pub struct LocalDevices {
    engines: Arc<LocalEngines>,
    faults: Arc<Faults>,
}

/// What is wrong with the devices; a rank of `u32::MAX` is nobody's.
#[derive(Debug)]
pub struct Faults {
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
}

const NOBODY: u32 = u32::MAX;

impl LocalDevices {
    /// Engines for so many ranks.
    pub fn new(network: Network, faithful: Faithful, ranks: u32) -> Arc<Self> {
        let faults = Faults {
            does_not_open: NOBODY.into(),
            hangs: NOBODY.into(),
            is_gone: NOBODY.into(),
            started: 0.into(),
            holds: false.into(),
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
        _go_on: &mut dyn FnMut() -> bool,
    ) -> Result<Box<dyn Bus>> {
        if self.faults.does_not_open.load(Ordering::Relaxed) == settings.rank {
            return Err(Error::device(format!("the card of rank {} has no power", settings.rank)));
        }
        let bus = LocalBus::new(&self.engines, settings.rank);
        Ok(Box::new(FaultyBus { bus, rank: settings.rank, faults: self.faults.clone(), runs_collective: false }))
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
    runs_collective: bool,
}

impl FaultyBus {
    fn reach(&self) -> Result<()> {
        match self.faults.is_gone.load(Ordering::Relaxed) == self.rank {
            true => Err(Error::device(format!("{} has closed the connection", self.bus.describe()))),
            false => Ok(()),
        }
    }
}

impl Bus for FaultyBus {
    fn read_register(&mut self, offset: u32) -> Result<u32> {
        self.reach()?;
        self.bus.read_register(offset)
    }

    fn write_register(&mut self, offset: u32, value: u32) -> Result<()> {
        self.reach()?;
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
        let is_stuck =
            self.faults.hangs.load(Ordering::Relaxed) == self.rank || self.faults.holds.load(Ordering::Relaxed);
        if self.runs_collective && is_stuck { Ok(false) } else { self.bus.poll() }
    }

    fn reconnect(&self) -> Result<Box<dyn Bus>> {
        self.reach()?;
        self.bus.reconnect()
    }

    fn describe(&self) -> String {
        self.bus.describe()
    }
}

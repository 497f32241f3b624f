//! Devices of a world in one process, and faults to inject into them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use accl_cclo::bus::{Bus, Memory};
use accl_cclo::call::{Descriptor, Operation};
use accl_cclo::device::DeviceUrl;
use accl_cclo::driver::Settings;
use accl_cclo::packets::Packets;
use accl_device::OpenBus;
use accl_emulator::local::{LocalBus, LocalEngines};
use accl_emulator::sim::SimBus;
use accl_types::{Error, Result};
use parking_lot::Mutex;

pub use accl_cclo::memory_map::Network;
pub use accl_emulator::Faithful;

/// Opens the emulated engines of this process as devices.
pub struct LocalDevices {
    engines: Arc<LocalEngines>,
    faults: Arc<Faults>,
}

/// Faults and special behaviour of the devices. A field that names a rank is off while it is `u32::MAX`.
#[derive(Debug)]
pub struct Faults {
    /// Whether devices exchange queue pairs (`Bus::local_info`, `Bus::receive_info`) and reach each other only through
    /// them.
    pub have_queue_pairs: AtomicBool,
    /// Rank whose device cannot be opened until this is reset.
    pub is_slow: AtomicU32,
    /// Rank whose device returns a text without queue pairs from `Bus::local_info`.
    pub babbles: AtomicU32,
    /// Rank whose device fails in `Bus::receive_info`.
    pub does_not_receive: AtomicU32,
    /// Text that each rank's device returned last from `Bus::local_info`.
    pub local_infos: Mutex<BTreeMap<u32, String>>,
    /// Texts of all ranks that each rank's device last received in `Bus::receive_info`.
    pub received_infos: Mutex<BTreeMap<u32, Vec<String>>>,
    /// Session that a rank's driver has set up for a peer, by rank and peer.
    pub sessions: Mutex<BTreeMap<(u32, u32), u32>>,
    /// Number of open devices.
    pub open: AtomicU32,
    /// Configuration calls in the order in which they were started: rank and function number.
    pub configured: Mutex<Vec<(u32, u32)>>,
    /// Number of devices that were ever opened; it numbers their queue pairs.
    openings: AtomicU32,
    /// Rank whose device does not open.
    pub does_not_open: AtomicU32,
    /// Rank whose device never begins a collective, so that the others wait for it.
    pub hangs: AtomicU32,
    /// Rank whose device is gone: every request fails.
    pub is_gone: AtomicU32,
    /// Number of collective calls that were started on all devices.
    pub started: AtomicU32,
    /// No collective call ends while this is set.
    pub holds: AtomicBool,
    /// Rank whose device blocks every request until this is reset.
    pub is_stuck: AtomicU32,
    /// Whether a request has blocked because of `is_stuck`.
    pub waits: AtomicBool,
}

const NO_RANK: u32 = u32::MAX;

impl LocalDevices {
    /// Creates engines for `ranks` ranks.
    pub fn new(network: Network, faithful: Faithful, ranks: u32) -> Arc<Self> {
        let faults = Faults {
            have_queue_pairs: false.into(),
            is_slow: NO_RANK.into(),
            babbles: NO_RANK.into(),
            does_not_receive: NO_RANK.into(),
            local_infos: Mutex::default(),
            received_infos: Mutex::default(),
            sessions: Mutex::default(),
            open: 0.into(),
            configured: Mutex::default(),
            openings: 0.into(),
            does_not_open: NO_RANK.into(),
            hangs: NO_RANK.into(),
            is_gone: NO_RANK.into(),
            started: 0.into(),
            holds: false.into(),
            is_stuck: NO_RANK.into(),
            waits: false.into(),
        };
        Arc::new(Self { engines: LocalEngines::new(network, faithful, ranks), faults: Arc::new(faults) })
    }

    /// Returns the faults to inject.
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

/// Opens a software engine for each rank. The engine reaches the other engines over the links of the ranks.
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

/// A bus with faults injected.
struct FaultyBus {
    bus: LocalBus,
    rank: u32,
    faults: Arc<Faults>,
    opening: u32,
    runs_collective: bool,
}

/// High bits of all queue pair numbers; other register values do not have them.
const QUEUE_PAIR: u32 = 0x5E << 24;

/// Returns the queue pair number of an opened device for a peer.
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
    fn local_info(&mut self, settings: &Settings) -> Result<Option<String>> {
        if !self.faults.have_queue_pairs.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let of = |peer| format!("qp of rank {} for peer {peer}: {}\n", self.rank, queue_pair(self.opening, peer));
        let text = match self.faults.babbles.load(Ordering::Relaxed) == self.rank {
            true => "qp".to_owned(),
            false => (0..settings.world()).map(of).collect(),
        };
        self.faults.local_infos.lock().insert(self.rank, text.clone());
        Ok(Some(text))
    }

    fn receive_info(&mut self, infos: &[String], settings: &mut Settings) -> Result<()> {
        self.faults.received_infos.lock().insert(self.rank, infos.to_vec());
        if self.faults.does_not_receive.load(Ordering::Relaxed) == self.rank {
            return Err(Error::device(format!("the card of rank {} connects no queue pair", self.rank)));
        }
        for (rank, text) in (0u32..).zip(infos) {
            let for_us = format!("qp of rank {rank} for peer {}: ", self.rank);
            if !text.lines().any(|line| line.starts_with(&for_us)) {
                return Err(Error::device(format!("rank {rank} sent no queue pair for this rank: `{text}`")));
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
            // The emulated engine reaches the others by their ranks.
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

//! Engines of one process as devices of drivers.

#[path = "settle.rs"]
mod settle;

use std::sync::{Arc, Mutex, MutexGuard};

use accl_cclo::bus::{Bus, Memory};
use accl_cclo::call::Descriptor;
use accl_cclo::control::{Reply, Request, Status};
use accl_cclo::driver::{Driver, Peer, Settings};
use accl_cclo::memory_map::Network;
use accl_emulator::{Engine, Faithful};
use accl_types::{Error, ErrorKind, Result};
use settle::settle;

/// Engines that reach one another, and how far the memories of each are handed out.
pub struct World {
    pub engines: Vec<Engine>,
    handed_out: Vec<[u64; 2]>,
    pub is_gone: bool,
}

impl World {
    pub fn new(network: Network, faithful: Faithful, ranks: u32) -> Arc<Mutex<Self>> {
        let engines = (0..ranks).map(|_| Engine::new(network, faithful)).collect();
        Arc::new(Mutex::new(Self { engines, handed_out: vec![[0; 2]; ranks as usize], is_gone: false }))
    }

    pub fn settle(&mut self) {
        settle(&mut self.engines, |_, _, _| ());
    }
}

#[derive(Clone)]
pub struct LocalBus {
    world: Arc<Mutex<World>>,
    rank: usize,
}

impl LocalBus {
    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    fn ask(&self, request: &Request) -> Result<Reply> {
        let mut world = self.world();
        if world.is_gone {
            return Err(Error::new(ErrorKind::Device, "the emulator is gone"));
        }
        world.settle();
        match world.engines[self.rank].answer(request) {
            Reply::Status(Status::NoControl) => Err(Error::new(ErrorKind::Device, "there is no such control stream")),
            reply => Ok(reply),
        }
    }
}

impl Bus for LocalBus {
    fn read_register(&mut self, offset: u32) -> Result<u32> {
        match self.ask(&Request::ReadRegister { offset })? {
            Reply::Register(value) => Ok(value),
            _ => Err(Error::new(ErrorKind::Device, format!("there is no register at {offset:#x}"))),
        }
    }

    fn write_register(&mut self, offset: u32, value: u32) -> Result<()> {
        self.ask(&Request::WriteRegister { offset, value }).map(drop)
    }

    fn allocate(&mut self, memory: Memory, bytes: u64) -> Result<u64> {
        let mut world = self.world();
        let next = &mut world.handed_out[self.rank][usize::from(memory.is_host())];
        let address = *next;
        *next += bytes.next_multiple_of(4096);
        assert!(world.engines[self.rank].memory(memory.is_host()).grow(address, bytes));
        Ok(address)
    }

    fn read_memory(&mut self, memory: Memory, address: u64, into: &mut [u8]) -> Result<()> {
        let mut world = self.world();
        into.copy_from_slice(world.engines[self.rank].memory(memory.is_host()).read(address, into.len()).unwrap());
        Ok(())
    }

    fn write_memory(&mut self, memory: Memory, address: u64, from: &[u8]) -> Result<()> {
        let mut world = self.world();
        world.engines[self.rank].memory(memory.is_host()).read_mut(address, from.len()).unwrap().copy_from_slice(from);
        Ok(())
    }

    fn start(&mut self, call: &Descriptor) -> Result<()> {
        self.ask(&Request::Call { control: 0, call: *call }).map(drop)
    }

    fn poll(&mut self) -> Result<bool> {
        Ok(self.ask(&Request::Poll { control: 0 })? == Reply::Status(Status::Good))
    }

    fn reconnect(&self) -> Result<Box<dyn Bus>> {
        Ok(Box::new(self.clone()))
    }

    fn describe(&self) -> String {
        format!("emulator of rank {}", self.rank)
    }
}

pub fn settings(network: Network, rank: u32, ranks: u32) -> Settings {
    let peer = |session| Peer { ip: [127, 0, 0, 1].into(), port: 5500, session };
    Settings::new(network, rank, (0..ranks).map(peer).collect())
}

pub fn open(world: &Arc<Mutex<World>>, settings: Settings) -> Result<Driver<LocalBus>> {
    let mut looks = 0;
    let bus = LocalBus { world: world.clone(), rank: settings.rank as usize };
    Driver::open(bus, settings, || {
        looks += 1;
        looks < 100
    })
}

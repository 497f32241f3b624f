//! Engines of one process as devices of its threads: a bus without a socket.
//!
//! Owns the lock over the engines and the addresses that were handed out. What engines do is in the rest of this crate. Read [`LocalBus`]
//! first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use accl_cclo::bus::{Bus, Memory};
use accl_cclo::call::Descriptor;
use accl_cclo::control::{Reply, Request, Status};
use accl_cclo::memory_map::Network;
use accl_types::{Error, ErrorKind, Result};

use crate::program::Faithful;
use crate::serve::cluster::Cluster;

/// What addresses of buffers are multiples of.
const ALIGNMENT: u64 = 4096;

/// The engines of all ranks, in one process.
pub struct LocalEngines(Mutex<Inner>);

struct Inner {
    cluster: Cluster,
    /// How far the memories of each rank are handed out: the card's and the host's.
    handed_out: Vec<[u64; 2]>,
}

impl LocalEngines {
    /// One engine for each rank.
    pub fn new(network: Network, faithful: Faithful, ranks: u32) -> Arc<Self> {
        let cluster = Cluster::new(0..ranks, network, faithful);
        Arc::new(Self(Mutex::new(Inner { cluster, handed_out: vec![[0; 2]; ranks as usize] })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // A panic of an engine is that of its call, and all others fail by their deadlines.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection to the engine of a rank.
#[derive(Clone)]
pub struct LocalBus {
    engines: Arc<LocalEngines>,
    rank: u32,
}

impl LocalBus {
    /// Connects to the engine of a rank.
    pub fn new(engines: &Arc<LocalEngines>, rank: u32) -> Self {
        Self { engines: engines.clone(), rank }
    }

    fn failed(&self, why: &str) -> Error {
        Error::new(ErrorKind::Device, format!("{}: {why}", self.describe()))
    }

    fn ask(&self, request: &Request) -> Result<Reply> {
        match self.engines.lock().cluster.answer(self.rank, request) {
            None => Err(self.failed("there is no such engine")),
            Some(Reply::Status(Status::NoControl)) => Err(self.failed("there is no such control stream")),
            Some(reply) => Ok(reply),
        }
    }

    fn succeed(&self, request: &Request, what: &str) -> Result<()> {
        match self.ask(request)? {
            Reply::Status(Status::Good) => Ok(()),
            _ => Err(self.failed(what)),
        }
    }
}

impl Bus for LocalBus {
    fn read_register(&mut self, offset: u32) -> Result<u32> {
        match self.ask(&Request::ReadRegister { offset })? {
            Reply::Register(value) => Ok(value),
            _ => Err(self.failed(&format!("there is no register at {offset:#x}"))),
        }
    }

    fn write_register(&mut self, offset: u32, value: u32) -> Result<()> {
        self.succeed(&Request::WriteRegister { offset, value }, &format!("there is no register at {offset:#x}"))
    }

    fn allocate(&mut self, memory: Memory, bytes: u64) -> Result<u64> {
        let is_host = memory.is_host();
        let address = {
            let mut inner = self.engines.lock();
            let place = inner.handed_out.get_mut(self.rank as usize);
            let next = place.ok_or_else(|| self.failed("there is no such engine"))?;
            let next = &mut next[usize::from(is_host)];
            std::mem::replace(next, *next + bytes.next_multiple_of(ALIGNMENT))
        };
        let bytes = u32::try_from(bytes).map_err(|_| self.failed("a buffer has less than 4 GiB"))?;
        self.succeed(&Request::Allocate { address, bytes, is_host }, "it has no room for a buffer").map(|()| address)
    }

    fn read_memory(&mut self, memory: Memory, address: u64, into: &mut [u8]) -> Result<()> {
        let bytes = u32::try_from(into.len()).map_err(|_| self.failed("it reads less than 4 GiB at once"))?;
        match self.ask(&Request::ReadMemory { address, bytes, is_host: memory.is_host() })? {
            Reply::Memory(data) if data.len() == into.len() => {
                into.copy_from_slice(&data);
                Ok(())
            }
            _ => Err(self.failed("there is no such memory")),
        }
    }

    fn write_memory(&mut self, memory: Memory, address: u64, from: &[u8]) -> Result<()> {
        let request = Request::WriteMemory { address, data: from.to_vec(), is_host: memory.is_host() };
        self.succeed(&request, "there is no such memory")
    }

    fn start(&mut self, call: &Descriptor) -> Result<()> {
        self.succeed(&Request::Call { control: 0, call: *call }, "it takes no call")
    }

    fn poll(&mut self) -> Result<bool> {
        Ok(self.ask(&Request::Poll { control: 0 })? == Reply::Status(Status::Good))
    }

    fn reconnect(&self) -> Result<Box<dyn Bus>> {
        Ok(Box::new(self.clone()))
    }

    fn describe(&self) -> String {
        format!("the engine of rank {} in this process", self.rank)
    }
}

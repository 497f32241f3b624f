//! An engine of this process as its host reaches it, without a socket.
//!
//! Owns what becomes of requests that the engine refuses, and the addresses of buffers. Read [`Direct`] first.

use accl_cclo::bus::Memory;
use accl_cclo::call::Descriptor;
use accl_cclo::control::{Reply, Request, Status};
use accl_types::{Error, ErrorKind, Result};

use crate::engine::Engine;

/// What addresses of buffers are multiples of.
const ALIGNMENT: u64 = 4096;
/// The control stream that calls are started on.
const CONTROL: u32 = 0;

/// How far the memories of an engine are handed out: the card's and the host's.
pub(crate) type HandedOut = [u64; 2];

/// An engine, and what messages call it.
pub(crate) struct Direct<'a> {
    pub(crate) engine: &'a mut Engine,
    pub(crate) name: &'a str,
}

impl Direct<'_> {
    fn failed(&self, why: &str) -> Error {
        Error::new(ErrorKind::Device, format!("{}: {why}", self.name))
    }

    fn is_good(&mut self, request: &Request) -> bool {
        self.engine.answer(request) == Reply::Status(Status::Good)
    }

    fn succeed(&mut self, request: &Request, why_not: &str) -> Result<()> {
        if self.is_good(request) { Ok(()) } else { Err(self.failed(why_not)) }
    }

    pub(crate) fn read_register(&mut self, offset: u32) -> Result<u32> {
        match self.engine.answer(&Request::ReadRegister { offset }) {
            Reply::Register(value) => Ok(value),
            _ => Err(self.failed(&format!("there is no register at {offset:#x}"))),
        }
    }

    pub(crate) fn write_register(&mut self, offset: u32, value: u32) -> Result<()> {
        self.succeed(&Request::WriteRegister { offset, value }, &format!("there is no register at {offset:#x}"))
    }

    pub(crate) fn allocate(&mut self, handed_out: &mut HandedOut, memory: Memory, bytes: u64) -> Result<u64> {
        let next = &mut handed_out[usize::from(memory.is_host())];
        let address = *next;
        if !self.engine.memory(memory.is_host()).grow(address, bytes) {
            return Err(self.failed(&format!("it has no room for a buffer of {bytes} bytes")));
        }
        *next += bytes.next_multiple_of(ALIGNMENT);
        Ok(address)
    }

    pub(crate) fn read_memory(&mut self, memory: Memory, address: u64, into: &mut [u8]) -> Result<()> {
        match self.engine.memory(memory.is_host()).read(address, into.len()) {
            Some(bytes) => into.copy_from_slice(bytes),
            None => return Err(self.failed(&format!("there are no {} bytes at {address:#x}", into.len()))),
        }
        Ok(())
    }

    pub(crate) fn write_memory(&mut self, memory: Memory, address: u64, from: &[u8]) -> Result<()> {
        match self.engine.memory(memory.is_host()).read_mut(address, from.len()) {
            Some(bytes) => bytes.copy_from_slice(from),
            None => return Err(self.failed(&format!("there are no {} bytes at {address:#x}", from.len()))),
        }
        Ok(())
    }

    pub(crate) fn start(&mut self, call: &Descriptor) -> Result<()> {
        self.succeed(&Request::Call { control: CONTROL, call: *call }, "it takes no call")
    }

    pub(crate) fn poll(&mut self) -> bool {
        self.is_good(&Request::Poll { control: CONTROL })
    }
}

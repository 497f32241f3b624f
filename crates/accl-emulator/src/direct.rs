//! Access of a host to an engine in the same process, without a socket.
//!
//! Owns the errors for requests that the engine refuses, the addresses of buffers, and the bus to such engines. Read [`DirectBus`] first.

use std::time::Duration;

use accl_cclo::bus::{Bus, Memory};
use accl_cclo::call::Descriptor;
use accl_cclo::control::{Reply, Request, Status};
use accl_types::{Error, ErrorKind, Result};

use crate::engine::Engine;

/// Alignment of buffer addresses in bytes.
const ALIGNMENT: u64 = 4096;
/// Control stream on which calls are started.
const CONTROL: u32 = 0;

/// End of the allocated part of an engine's device memory and of its host memory.
pub type HandedOut = [u64; 2];

/// Access to an engine, which also lets the engine advance.
pub trait Reach: Clone + Send + 'static {
    /// Runs a function on the engine under exclusive access.
    #[doc(hidden)]
    fn with<R>(&self, f: impl FnOnce(Direct<'_>, &mut HandedOut) -> Result<R>) -> Result<R>;

    /// Lets the engine advance as far as possible.
    fn go_on(&self);

    /// Waits until the engine may be able to advance, for at most `at_most`.
    fn pause(&self, at_most: Duration) {
        std::thread::sleep(at_most);
    }

    /// Name of the engine in messages.
    fn name(&self) -> &str;
}

/// Connection to an engine of this process.
#[derive(Clone)]
pub struct DirectBus<R>(pub(crate) R);

impl<R: Reach> Bus for DirectBus<R> {
    fn read_register(&mut self, offset: u32) -> Result<u32> {
        self.0.with(|mut engine, _| engine.read_register(offset))
    }

    fn write_register(&mut self, offset: u32, value: u32) -> Result<()> {
        self.0.with(|mut engine, _| engine.write_register(offset, value))
    }

    fn allocate(&mut self, memory: Memory, bytes: u64) -> Result<u64> {
        self.0.with(|mut engine, handed_out| engine.allocate(handed_out, memory, bytes))
    }

    fn read_memory(&mut self, memory: Memory, address: u64, into: &mut [u8]) -> Result<()> {
        self.0.with(|mut engine, _| engine.read_memory(memory, address, into))
    }

    fn write_memory(&mut self, memory: Memory, address: u64, from: &[u8]) -> Result<()> {
        self.0.with(|mut engine, _| engine.write_memory(memory, address, from))
    }

    fn start(&mut self, call: &Descriptor) -> Result<()> {
        self.0.with(|mut engine, _| engine.start(call))?;
        self.0.go_on();
        Ok(())
    }

    fn poll(&mut self) -> Result<bool> {
        self.0.go_on();
        self.0.with(|mut engine, _| Ok(engine.poll()))
    }

    fn drain(&mut self) -> Result<()> {
        while self.poll()? {}
        Ok(())
    }

    fn pause(&mut self, at_most: Duration) {
        self.0.pause(at_most);
    }

    fn reconnect(&self) -> Result<Box<dyn Bus>> {
        Ok(Box::new(Self(self.0.clone())))
    }

    fn describe(&self) -> String {
        self.0.name().to_owned()
    }
}

/// An engine with its name in messages.
pub struct Direct<'a> {
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
            return Err(self.failed(&format!("no memory is left for a buffer of {bytes} bytes")));
        }
        *next += bytes.next_multiple_of(ALIGNMENT);
        Ok(address)
    }

    pub(crate) fn read_memory(&mut self, memory: Memory, address: u64, into: &mut [u8]) -> Result<()> {
        match self.engine.memory(memory.is_host()).read(address, into.len()) {
            Some(bytes) => into.copy_from_slice(bytes),
            None => return Err(self.failed(&format!("no buffer contains {} bytes at {address:#x}", into.len()))),
        }
        Ok(())
    }

    pub(crate) fn write_memory(&mut self, memory: Memory, address: u64, from: &[u8]) -> Result<()> {
        match self.engine.memory(memory.is_host()).read_mut(address, from.len()) {
            Some(bytes) => bytes.copy_from_slice(from),
            None => return Err(self.failed(&format!("no buffer contains {} bytes at {address:#x}", from.len()))),
        }
        Ok(())
    }

    pub(crate) fn start(&mut self, call: &Descriptor) -> Result<()> {
        self.succeed(&Request::Call { control: CONTROL, call: *call }, "it does not accept the call")
    }

    pub(crate) fn poll(&mut self) -> bool {
        self.is_good(&Request::Poll { control: CONTROL })
    }
}

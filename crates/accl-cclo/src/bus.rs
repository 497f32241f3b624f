//! What a driver does to a device: registers, memory and calls.
//!
//! Owns the interface alone. A bus may block for as long as one of its requests takes, and says so as an error when that is too long; it
//! never waits for a call to end.

use std::time::Duration;

use accl_types::Result;

use crate::call::Descriptor;
use crate::control::About;

/// A memory that a device reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Memory {
    /// That of the card.
    Device,
    /// That of the host.
    Host,
}

/// A device, as a driver reaches it.
pub trait Bus: Send {
    /// Reads a word of exchange memory.
    ///
    /// # Errors
    /// The device cannot be reached, or has no such word.
    fn read_register(&mut self, offset: u32) -> Result<u32>;

    /// Sets a word of exchange memory.
    ///
    /// # Errors
    /// As [`Bus::read_register`].
    fn write_register(&mut self, offset: u32, value: u32) -> Result<()>;

    /// A buffer of so many bytes that lives as long as the device is open: its address as the device knows it, a multiple of 4096. What
    /// lies in it is what lay there before.
    ///
    /// # Errors
    /// The device cannot be reached, or has no room.
    fn allocate(&mut self, memory: Memory, bytes: u64) -> Result<u64>;

    /// A buffer for rx buffers, which some cards have in a bank of their own: as one of [`Memory::Device`].
    ///
    /// # Errors
    /// As [`Bus::allocate`].
    fn allocate_rx(&mut self, bytes: u64) -> Result<u64> {
        self.allocate(Memory::Device, bytes)
    }

    /// Reads bytes of a buffer.
    ///
    /// # Errors
    /// The device cannot be reached, or has no such bytes.
    fn read_memory(&mut self, memory: Memory, address: u64, into: &mut [u8]) -> Result<()>;

    /// Writes bytes of a buffer.
    ///
    /// # Errors
    /// As [`Bus::read_memory`].
    fn write_memory(&mut self, memory: Memory, address: u64, from: &[u8]) -> Result<()>;

    /// Starts a call; the end of the one before has been asked for.
    ///
    /// # Errors
    /// The device cannot be reached.
    fn start(&mut self, call: &Descriptor) -> Result<()>;

    /// Whether the call has ended since it was started; if so, that is said once.
    ///
    /// # Errors
    /// As [`Bus::start`].
    fn poll(&mut self) -> Result<bool>;

    /// Waits until a call that was not over may be, at most so long.
    fn pause(&mut self, at_most: Duration) {
        std::thread::sleep(at_most);
    }

    /// A fresh connection to the same device, which shares its buffers: for a look at why a call does not end, when this connection may be
    /// in the middle of something. It starts nothing.
    ///
    /// # Errors
    /// The device cannot be reached.
    fn reconnect(&self) -> Result<Box<dyn Bus>>;

    /// What the device says of itself; `None`: it says nothing, as cards and the original emulator.
    ///
    /// # Errors
    /// The device cannot be reached.
    fn about(&mut self) -> Result<Option<About>> {
        Ok(None)
    }

    /// How messages name the device.
    fn describe(&self) -> String;
}

impl<B: Bus + ?Sized> Bus for Box<B> {
    fn read_register(&mut self, offset: u32) -> Result<u32> {
        (**self).read_register(offset)
    }

    fn write_register(&mut self, offset: u32, value: u32) -> Result<()> {
        (**self).write_register(offset, value)
    }

    fn allocate(&mut self, memory: Memory, bytes: u64) -> Result<u64> {
        (**self).allocate(memory, bytes)
    }

    fn allocate_rx(&mut self, bytes: u64) -> Result<u64> {
        (**self).allocate_rx(bytes)
    }

    fn read_memory(&mut self, memory: Memory, address: u64, into: &mut [u8]) -> Result<()> {
        (**self).read_memory(memory, address, into)
    }

    fn write_memory(&mut self, memory: Memory, address: u64, from: &[u8]) -> Result<()> {
        (**self).write_memory(memory, address, from)
    }

    fn start(&mut self, call: &Descriptor) -> Result<()> {
        (**self).start(call)
    }

    fn poll(&mut self) -> Result<bool> {
        (**self).poll()
    }

    fn pause(&mut self, at_most: Duration) {
        (**self).pause(at_most);
    }

    fn reconnect(&self) -> Result<Box<dyn Bus>> {
        (**self).reconnect()
    }

    fn about(&mut self) -> Result<Option<About>> {
        (**self).about()
    }

    fn describe(&self) -> String {
        (**self).describe()
    }
}

impl Memory {
    /// Whether it is the host's.
    pub fn is_host(self) -> bool {
        self == Self::Host
    }
}

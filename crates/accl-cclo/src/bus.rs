//! Interface between the driver and a device: registers, memory and calls.
//!
//! Owns the interface only. A bus may block while one of its requests runs, and returns an error if that takes too long. A bus never waits for a call
//! to end.

use std::time::{Duration, Instant};

use accl_types::Result;

use crate::call::Descriptor;
use crate::control::About;
use crate::settings::Settings;

pub use crate::memory::Memory;

/// A device, as the driver accesses it.
///
/// Devices of several ranks may have to exchange data before any other use. The caller asks each device once for its text
/// ([`Bus::local_info`]). If the device returns one, the caller passes it the texts of all ranks ([`Bus::receive_info`]). The caller sets the driver
/// up after that.
pub trait Bus: Send {
    /// Returns the text that this rank sends to all other ranks, or `None` if it sends none. For one kind of device, either all ranks return a text
    /// or none does. The text is valid for this opening of the device only, and later openings never receive it.
    ///
    /// # Errors
    /// The device cannot be reached, or it has too little room for the number of ranks.
    fn local_info(&mut self, _: &Settings) -> Result<Option<String>> {
        Ok(None)
    }

    /// Takes the texts of all ranks in rank order, this rank's included. Fills in the field that the settings lack: the session of each peer.
    ///
    /// # Errors
    /// A text cannot be parsed, the devices are incompatible with one another, or the device cannot be reached.
    fn receive_info(&mut self, _infos: &[String], _: &mut Settings) -> Result<()> {
        Ok(())
    }

    /// Claims the device exclusively for this connection. The claim lasts until the connection is closed or its process is killed.
    ///
    /// Returns `None` if the claim succeeded, or if the device does not report owners, as in the original emulator. Otherwise returns a description
    /// of the current owner and changes nothing; the caller may try again.
    ///
    /// # Errors
    /// The device cannot be reached.
    fn claim(&mut self) -> Result<Option<String>> {
        Ok(None)
    }

    /// Sets the deadline for all following requests; it overrides the bus's own, longer timeout, because the caller has a deadline. `None` removes
    /// the deadline.
    fn set_deadline(&mut self, _deadline: Option<Instant>) {}

    /// Reads a word of exchange memory; `offset` is in bytes.
    ///
    /// # Errors
    /// The device cannot be reached, or has no such word.
    fn read_register(&mut self, offset: u32) -> Result<u32>;

    /// Writes a word of exchange memory; `offset` is in bytes.
    ///
    /// # Errors
    /// Same as [`Bus::read_register`].
    fn write_register(&mut self, offset: u32, value: u32) -> Result<()>;

    /// Allocates a buffer of `bytes` bytes, which lives as long as the device is open. Returns its device address, a multiple of 4096. The memory is
    /// not cleared.
    ///
    /// # Errors
    /// The device cannot be reached, or has no room.
    fn allocate(&mut self, memory: Memory, bytes: u64) -> Result<u64>;

    /// Allocates the memory of rx buffers, which some cards keep in a separate memory bank. The default is [`Memory::Device`].
    ///
    /// # Errors
    /// Same as [`Bus::allocate`].
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
    /// Same as [`Bus::read_memory`].
    fn write_memory(&mut self, memory: Memory, address: u64, from: &[u8]) -> Result<()>;

    /// Starts a call. The caller must have seen the end of the previous call.
    ///
    /// # Errors
    /// The device cannot be reached.
    fn start(&mut self, call: &Descriptor) -> Result<()>;

    /// Returns whether the started call has ended. The bus reports each end once.
    ///
    /// # Errors
    /// Same as [`Bus::start`].
    fn poll(&mut self) -> Result<bool>;

    /// Discards ends of calls that no caller has polled. A host that has disconnected may have left some. Without this, such an end would be taken
    /// for the end of the next call.
    ///
    /// # Errors
    /// Same as [`Bus::poll`].
    fn drain(&mut self) -> Result<()> {
        Ok(())
    }

    /// Sleeps between polls of a running call, for at most `at_most`.
    fn pause(&mut self, at_most: Duration) {
        std::thread::sleep(at_most);
    }

    /// Opens a new connection to the same device that shares its buffers. It is for diagnosing a call that does not end, since this connection may be
    /// in the middle of a request. The new connection starts no call.
    ///
    /// # Errors
    /// The device cannot be reached.
    fn reconnect(&self) -> Result<Box<dyn Bus>>;

    /// Returns the device's description of itself, or `None` if it has none, as cards and the original emulator.
    ///
    /// # Errors
    /// The device cannot be reached.
    fn about(&mut self) -> Result<Option<About>> {
        Ok(None)
    }

    /// Keeps all buffers allocated for the life of the process, even after the bus is closed, because the device may still write to them. An emulator
    /// needs no such care, since it has memory of its own.
    fn keep_buffers(&mut self) {}

    /// Name of the device in messages.
    fn describe(&self) -> String;
}

impl<B: Bus + ?Sized> Bus for Box<B> {
    fn local_info(&mut self, settings: &Settings) -> Result<Option<String>> {
        (**self).local_info(settings)
    }

    fn receive_info(&mut self, infos: &[String], settings: &mut Settings) -> Result<()> {
        (**self).receive_info(infos, settings)
    }

    fn claim(&mut self) -> Result<Option<String>> {
        (**self).claim()
    }

    fn set_deadline(&mut self, deadline: Option<Instant>) {
        (**self).set_deadline(deadline);
    }

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

    fn drain(&mut self) -> Result<()> {
        (**self).drain()
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

    fn keep_buffers(&mut self) {
        (**self).keep_buffers();
    }

    fn describe(&self) -> String {
        (**self).describe()
    }
}

//! What a driver does to a device: registers, memory and calls.
//!
//! Owns the interface alone. A bus may block for as long as one of its requests takes, and says so as an error when that is too long; it
//! never waits for a call to end.

use std::time::{Duration, Instant};

use accl_types::Result;

use crate::call::Descriptor;
use crate::control::About;
use crate::driver::Settings;

pub use crate::memory::Memory;

/// A device, as a driver reaches it.
///
/// Before anything else of it is used, devices of several ranks may have to know one another: each is asked once what it tells
/// ([`Bus::tell`]), and if that is anything, takes what all have told ([`Bus::hear`]). Whoever carries it between the ranks sets the driver up
/// after that.
pub trait Bus: Send {
    /// What this rank tells all others, as text; `None`: nothing. All ranks whose devices are of one kind tell something, or none does. What was
    /// told is of this opening of the device, and is told to nobody who comes later.
    ///
    /// # Errors
    /// The device cannot be reached, or has no room for so many ranks.
    fn tell(&mut self, _: &Settings) -> Result<Option<String>> {
        Ok(None)
    }

    /// Takes what all ranks have told, in rank order with this one's own, and fills in what the settings lack: the session of each peer.
    ///
    /// # Errors
    /// What was told makes no sense, comes from devices that do not understand one another, or the device cannot be reached.
    fn hear(&mut self, _told: &[String], _: &mut Settings) -> Result<()> {
        Ok(())
    }

    /// Takes the device for this connection alone, until that is closed or whoever has it is killed. `None`: it has it, or the device does not
    /// tell who has it, as the original emulator. Else who has it, in words: nothing has changed then. It may be asked for again.
    ///
    /// # Errors
    /// The device cannot be reached.
    fn claim(&mut self) -> Result<Option<String>> {
        Ok(None)
    }

    /// No request may outlast this moment from now on, however long the bus would wait by itself: whoever waits for the device has a deadline.
    /// `None`: there is none.
    fn limit(&mut self, _until: Option<Instant>) {}

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

    /// Forgets the ends of calls that nobody has asked for: a host that has gone may have left some, and the next end would be taken for that
    /// of the call before.
    ///
    /// # Errors
    /// As [`Bus::poll`].
    fn drain(&mut self) -> Result<()> {
        Ok(())
    }

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

    /// The device may still write to its buffers, so none of them goes back when the bus is closed, for as long as the process lives. An emulator
    /// has memory of its own.
    fn keep_buffers(&mut self) {}

    /// How messages name the device.
    fn describe(&self) -> String;
}

impl<B: Bus + ?Sized> Bus for Box<B> {
    fn tell(&mut self, settings: &Settings) -> Result<Option<String>> {
        (**self).tell(settings)
    }

    fn hear(&mut self, told: &[String], settings: &mut Settings) -> Result<()> {
        (**self).hear(told, settings)
    }

    fn claim(&mut self) -> Result<Option<String>> {
        (**self).claim()
    }

    fn limit(&mut self, until: Option<Instant>) {
        (**self).limit(until);
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

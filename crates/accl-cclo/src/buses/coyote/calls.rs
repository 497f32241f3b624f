//! Requests to the kernel driver of Coyote v1: their numbers, and the words that each takes.

use std::io;

/// Request to the kernel driver. Its ioctl opcode combines direction, magic, number and the size of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DriverRequest {
    /// Maps host memory for the card. Words: address, bytes, context.
    MapMemory,
    /// Unmaps host memory. Words: address, context.
    UnmapMemory,
    /// Registers a process. Word: process id. The driver returns the number of the context in the second word.
    RegisterProcess,
    /// Unregisters a process. Word: number of the context.
    UnregisterProcess,
    /// Looks up the hardware address of a peer. Words: port, IPv4 address.
    LookUpAddress,
    /// Sets up a queue pair. Words: port, and three words of the queue pair.
    WriteContext,
    /// Connects a queue pair. Words: port, and three words of the connection.
    WriteConnection,
    /// Reads the configuration of the shell. The driver returns its bits in the first word.
    ReadConfig,
}

/// Maximum number of words in a request.
pub(super) const MAX_WORDS: usize = 8;
/// Magic letter of the driver's requests.
pub(super) const MAGIC: u8 = b'D';

impl DriverRequest {
    pub(super) fn number(self) -> u8 {
        match self {
            Self::MapMemory => 5,
            Self::UnmapMemory => 6,
            Self::RegisterProcess => 7,
            Self::UnregisterProcess => 8,
            Self::LookUpAddress => 10,
            Self::WriteContext => 13,
            Self::WriteConnection => 14,
            Self::ReadConfig => 32,
        }
    }

    /// Returns whether the driver only writes to the words and reads none of them.
    pub(super) fn only_reads(self) -> bool {
        self == Self::ReadConfig
    }
}

/// System calls on a region of a card. Tests replace the implementation.
pub(super) trait Calls: Send {
    /// Sends a request to a context. Contexts are numbered in the order in which they were opened.
    fn request(&mut self, context: usize, what: DriverRequest, words: &mut [u64; MAX_WORDS]) -> io::Result<()>;

    /// Opens another context of the same region.
    fn open_context(&mut self) -> io::Result<usize>;

    /// Reads a word of the user's control registers, by its index.
    fn read_word(&self, index: usize) -> u64;

    /// Writes a word of the user's control registers, by its index.
    fn write_word(&mut self, index: usize, value: u64);

    /// Maps `bytes` bytes of anonymous memory in pages of [`PAGE_BYTES`]. Returns the address.
    fn map_pages(&mut self, bytes: usize) -> io::Result<u64>;

    /// Unmaps the memory at `address`.
    fn unmap_pages(&mut self, address: u64);

    /// Copies from mapped memory.
    fn read_pages(&self, address: u64, into: &mut [u8]) -> io::Result<()>;

    /// Copies to mapped memory.
    fn write_pages(&mut self, address: u64, from: &[u8]) -> io::Result<()>;

    /// Locks the region exclusively for this process and this opening of the region, until it is closed. Returns `false` if another has the lock.
    fn claim(&mut self) -> io::Result<bool>;

    /// Keeps everything open for the life of the process.
    fn keep_open(&mut self);

    /// Opens the same region again, to access registers only.
    fn again(&self) -> io::Result<Box<dyn Calls>>;
}

/// Size of a page of a buffer in bytes.
pub(super) const PAGE_BYTES: u64 = 2 << 20;
/// Number of control registers: 64 KiB of 64-bit words.
pub(super) const REGISTER_WORDS: usize = (64 << 10) / 8;

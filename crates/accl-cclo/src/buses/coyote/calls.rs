//! What is asked of the kernel's driver of Coyote, v1: the numbers of its requests, and the words that each takes.

use std::io;

/// What is asked of the driver, and how its numbers are put together: magic, direction, and the size of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Maps memory of the host: address, bytes, context.
    MapMemory,
    /// Takes it back: address, context.
    UnmapMemory,
    /// Registers a process: its id; the number of the context comes back in the second word.
    RegisterProcess,
    /// Takes a context back: its number.
    UnregisterProcess,
    /// Looks up the hardware address of a peer: port, IPv4 address.
    LookUpAddress,
    /// Sets up a queue pair: port and three words.
    WriteContext,
    /// Connects a queue pair: port and three words.
    WriteConnection,
    /// What the shell was built with: bits come back in the first word.
    ReadConfig,
}

/// Words that a request has at most.
pub(super) const MAX_WORDS: usize = 8;
/// Group of the driver's requests.
pub(super) const MAGIC: u8 = b'D';

impl Request {
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

    /// The driver writes into the words and reads none of them.
    pub(super) fn only_reads(self) -> bool {
        self == Self::ReadConfig
    }
}

/// A region of a card, as the kernel lets a process reach it. What stands behind it is replaced in tests.
pub(super) trait Calls: Send {
    /// A request, in one of the contexts, which are numbered as they were opened.
    fn request(&mut self, context: usize, what: Request, words: &mut [u64; MAX_WORDS]) -> io::Result<()>;

    /// One more context of the same region.
    fn open_context(&mut self) -> io::Result<usize>;

    /// A word of the user's control registers, by its index.
    fn read_word(&self, index: usize) -> u64;

    /// Sets one.
    fn write_word(&mut self, index: usize, value: u64);

    /// Anonymous memory of so many bytes, in pages of [`PAGE_BYTES`]: its address.
    fn map_pages(&mut self, bytes: usize) -> io::Result<u64>;

    /// Gives it back.
    fn unmap_pages(&mut self, address: u64);

    /// Copies from memory that was mapped.
    fn read_pages(&self, address: u64, into: &mut [u8]) -> io::Result<()>;

    /// Copies into it.
    fn write_pages(&mut self, address: u64, from: &[u8]) -> io::Result<()>;

    /// Takes the region for this process and this opening of it, until it is closed. `false`: somebody else has it.
    fn claim(&mut self) -> io::Result<bool>;

    /// Keeps everything open for as long as the process lives.
    fn keep_open(&mut self);

    /// The same region once more, for its registers alone.
    fn again(&self) -> io::Result<Box<dyn Calls>>;
}

/// A page of a buffer.
pub(super) const PAGE_BYTES: u64 = 2 << 20;
/// Words of the control registers: 64 KiB of 64-bit words.
pub(super) const REGISTER_WORDS: usize = (64 << 10) / 8;

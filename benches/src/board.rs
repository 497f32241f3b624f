//! Memory that the ranks of a world share with their driver. By it, ranks start together and the driver reads when each
//! batch began and ended. All are on one host and use one clock.
//!
//! Owns the layout in Rust; `peers/ranks/board.h` has it in C and `peers/board.py` in Python. A cache line for each
//! rank's arrivals, one for its mark, then a row of (begin, end) for each rank. It does not decide what is timed.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::yield_now;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::time::{ClockId, clock_gettime};

/// Maximum number of ranks of a world.
pub const RANKS: usize = 64;
/// Maximum number of batches of an order.
pub const BATCHES: usize = 4096;
const LINE_WORDS: usize = 8;
const MARKS_AT: usize = RANKS * LINE_WORDS;
const SPANS_AT: usize = 2 * MARKS_AT;
const BOARD_WORDS: usize = SPANS_AT + RANKS * BATCHES * 2;
const BOARD_BYTES: usize = BOARD_WORDS * size_of::<u64>();
const SPINS_BEFORE_YIELD: u32 = 20;

/// Begin and end of a batch of calls on one rank, in nanoseconds of the host's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Time before the first call.
    pub begin: u64,
    /// Time after the last call.
    pub end: u64,
}

/// The shared memory, mapped.
#[derive(Debug)]
pub struct Board {
    words: NonNull<AtomicU64>,
}

impl Board {
    /// Creates the file, all zero, and maps it; for the driver.
    ///
    /// # Errors
    /// The system's error if the file cannot be created.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        file.set_len(BOARD_BYTES as u64)?;
        Self::map(&file)
    }

    /// Maps the file that the driver has created; for a rank.
    ///
    /// # Errors
    /// The system's error if the file does not exist, and `InvalidData` if it is too short.
    pub fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        if file.metadata()?.len() < BOARD_BYTES as u64 {
            return Err(io::ErrorKind::InvalidData.into());
        }
        Self::map(&file)
    }

    fn map(file: &File) -> io::Result<Self> {
        // SAFETY: a new mapping at an address that the kernel chooses; the file has `BOARD_BYTES` bytes, and no process
        // shortens it.
        let base = unsafe {
            mmap(std::ptr::null_mut(), BOARD_BYTES, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0)?
        };
        let words = NonNull::new(base.cast()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Self { words })
    }

    fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < BOARD_WORDS, "the board ends before word {index}");
        // SAFETY: `index` is inside the mapping, which lives as long as `self`; all processes access the words as
        // atomics or take turns.
        unsafe { self.words.add(index).as_ref() }
    }

    /// Returns when all ranks have called it as often as this one.
    pub fn meet(&self, rank: u32, ranks: u32) {
        let arrivals = |rank: u32| self.word(rank as usize * LINE_WORDS);
        let mine = arrivals(rank).load(Ordering::Relaxed) + 1;
        arrivals(rank).store(mine, Ordering::Release);
        for other in 0..ranks {
            let mut looks = 0;
            while arrivals(other).load(Ordering::Acquire) < mine {
                if looks < SPINS_BEFORE_YIELD {
                    std::hint::spin_loop()
                } else {
                    yield_now()
                }
                looks += 1;
            }
        }
    }

    /// Sets a mark that shows the others that this rank has reached a barrier. Returns the number of this rank's marks.
    pub fn mark(&self, rank: u32) -> u64 {
        self.word(MARKS_AT + rank as usize * LINE_WORDS).fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Returns whether every rank has set at least `mark` marks.
    pub fn all_marked(&self, ranks: u32, mark: u64) -> bool {
        (0..ranks).all(|rank| self.word(MARKS_AT + rank as usize * LINE_WORDS).load(Ordering::SeqCst) >= mark)
    }

    /// Writes the times of a batch for the driver.
    pub fn publish(&self, rank: u32, batch: usize, span: Span) {
        let at = span_at(rank, batch);
        self.word(at).store(span.begin, Ordering::Relaxed);
        self.word(at + 1).store(span.end, Ordering::Relaxed);
    }

    /// Returns the times that a rank has written for a batch of the last order.
    pub fn span(&self, rank: u32, batch: usize) -> Span {
        let at = span_at(rank, batch);
        Span { begin: self.word(at).load(Ordering::Relaxed), end: self.word(at + 1).load(Ordering::Relaxed) }
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        // SAFETY: `map` created this mapping of `BOARD_BYTES` bytes, and no reference into it outlives `self`. An error
        // is ignored: a mapping that stays does no harm.
        let _ = unsafe { munmap(self.words.as_ptr().cast(), BOARD_BYTES) };
    }
}

// SAFETY: the pointer leads only to atomics in a mapping that exists until the drop, on whichever thread that happens.
unsafe impl Send for Board {}
// SAFETY: shared access to the mapping is by atomic operations only.
unsafe impl Sync for Board {}

fn span_at(rank: u32, batch: usize) -> usize {
    assert!(batch < BATCHES, "the order has no batch {batch}");
    SPANS_AT + (rank as usize * BATCHES + batch) * 2
}

/// Returns the host's clock, in nanoseconds.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

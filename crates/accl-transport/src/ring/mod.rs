//! A ring for frames between one writer and one reader, over memory that both have mapped.
//!
//! Owns the placement of frames and the counter. Knows neither descriptors nor waking ([`arming`] has the flags).
//! Nothing here calls the system or allocates, except [`Memory::grow`]. Read [`Writer`] and [`Reader`] first.
//!
//! A *slot* is one cache line and announces one frame. It holds a word with the frame's number and length, the head,
//! and the payload if that is tiny.
//! There are few slots and they are used in turn, so they stay in the caches of both sides.
//! A waiting reader polls the very line in which the next frame will appear. For a tiny frame, one line moves from core
//! to core.
//!
//! Longer payloads lie in the *data*, one after another, each contiguous. If the rest of the data is too short for a
//! payload, both sides continue at the start.
//!
//! **A ring grows with its use.** Both sides begin with a *window* at the start of the data. The writer enlarges the
//! window in two cases:
//! * It finds no room.
//! * It reaches the window's end, and the window holds only few payloads of the current size.
//!
//! The window grows only while the bytes in flight lie in one piece before the writer's position. Then all new bytes
//! lie after the bytes in flight.
//! Each frame's word states how often the window has grown. The reader follows with the first frame that was written to
//! the larger window.

pub(crate) mod arming;
#[cfg(all(test, accl_loom))]
mod loom_tests;
#[cfg(all(test, not(accl_loom)))]
mod tests;

use crate::sync::{AtomicU64, Ordering};
use accl_wire::{Frame, FrameSlot, HEAD_BYTES, poll_until};

/// Alignment of payloads in the ring. Two payloads never share a cache line, so that writing one does not disturb
/// reading another.
pub(crate) const LINE: usize = 64;
/// Slots of a direction; a power of two. This is also the maximum number of frames in flight. Few, so that they stay in
/// nearby caches.
pub(crate) const SLOTS: usize = 64;
/// Offset of the head in a slot, after the word.
const HEAD_AT: usize = 8;
/// Offset of a tiny payload in a slot; `TINY_BYTES` is its maximum length.
const TINY_AT: usize = HEAD_AT + HEAD_BYTES;
pub(crate) const TINY_BYTES: usize = LINE - TINY_AT;
/// Bits of a word that hold the payload's length. The next four bits count how often the window has grown.
const LEN_BITS: u32 = 28;
/// Maximum bytes of a payload.
pub(crate) const MAX_PAYLOAD_BYTES: usize = (1 << LEN_BITS) - 1;
/// Growth of a window in one step, as a shift.
const GROWTH: u32 = 2;
/// Number of payloads that should fit before the writer returns to the same position. Lines still in the reader's cache
/// take longer to write than lines that have left it.
const PAYLOADS_OF_A_LAP: usize = 64;
/// After a refused larger window, frames to send before the writer asks for it again.
const FRAMES_TO_ASK_AGAIN: u64 = 1024;

/// The counter of one direction, alone on two cache lines (prefetchers fetch pairs).
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Counters {
    /// Number of frames that the reader has released since the beginning.
    taken: Apart<AtomicU64>,
}

impl Counters {
    /// Creates the counter of an empty ring. (Fresh shared memory is all zero, which is the same.)
    #[cfg(test)]
    pub(crate) fn new() -> Counters {
        Counters { taken: Apart(AtomicU64::new(0)) }
    }
}

/// Keeps its content on cache lines of its own.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Apart<T>(pub(crate) T);

/// The memory of one direction.
///
/// # Safety
/// `slots` points to `slot_count` lines. `slot_count` is a power of two and at most [`SLOTS`]. The first word of each
/// line is 0 at the beginning.
/// `data` points to `data_bytes` bytes, a positive multiple of [`LINE`]. The writer may touch the first `window_bytes`,
/// and the bytes that `grow` has agreed to.
/// Both pointers are aligned to [`LINE`], valid as long as `self` lives, and always the same.
/// Only one [`Writer`] and one [`Reader`] over the same counter access the memory.
pub(crate) unsafe trait Memory {
    /// Returns the counter that the reader advances.
    fn counters(&self) -> &Counters;
    /// Start of the lines that announce frames.
    fn slots(&self) -> *mut u8;
    /// Number of slots.
    #[inline(always)]
    fn slot_count(&self) -> usize {
        SLOTS
    }
    /// Start of the bytes for payloads.
    fn data(&self) -> *mut u8;
    /// Number of bytes for payloads.
    fn data_bytes(&self) -> usize;
    /// Bytes of the window at the beginning: a positive multiple of [`LINE`].
    fn window_bytes(&self) -> usize {
        self.data_bytes()
    }
    /// Ensures that the data from offset `_from` to offset `_to` can be written. Returns `false` if the window must
    /// stay as it is.
    fn grow(&self, _from: usize, _to: usize, _demand: Demand) -> bool {
        true
    }
    /// Returns the word at the start of a slot.
    #[inline(always)]
    fn word(&self, slot: usize) -> &AtomicU64 {
        debug_assert!(slot < self.slot_count());
        // SAFETY: `slot` is below `slot_count`, so the word lies inside the slots, and it is aligned. Both sides use
        // words only as atomics.
        unsafe { &*self.slots().add(slot * LINE).cast::<AtomicU64>() }
    }
    /// Called before the writer touches a frame; for the model checker.
    #[inline(always)]
    fn note_write(&self, _slot: usize, _at: usize, _len: usize) {}
    /// Called before the reader touches a frame and before it gives it back; for the model checker.
    #[inline(always)]
    fn note_read(&self, _slot: usize, _at: usize, _len: usize) {}
}

/// Reason why a ring cannot be used any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// The other side left the counter or a word in a state that the protocol excludes.
    Corrupt,
    /// The system has not enough memory for the longest payload.
    Exhausted,
}

/// Importance of a larger window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    /// Without it the longest payload would not always find room.
    Needed,
    /// With it more bytes could be in flight at a time.
    Wished,
}

/// Returns the bytes of the data that a payload occupies.
#[inline]
const fn data_bytes(payload_bytes: usize) -> usize {
    if payload_bytes <= TINY_BYTES { 0 } else { payload_bytes.next_multiple_of(LINE) }
}

/// Returns the smallest data size in which a payload of `max_payload_bytes` always fits once the reader has caught up.
/// The part at the end that may have to be skipped is shorter than a payload.
pub(crate) const fn min_data_bytes(max_payload_bytes: usize) -> usize {
    let longest = data_bytes(max_payload_bytes);
    if longest == 0 { LINE } else { 2 * longest }
}

/// Position in the data: the count of bytes so far, including skipped bytes, and the matching offset.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    count: u64,
    offset: usize,
}

impl Cursor {
    const START: Cursor = Cursor { count: 0, offset: 0 };

    /// Returns the offset of a payload that occupies `need` bytes, and the position after the payload.
    #[inline]
    fn fit(self, need: usize, data_bytes: usize) -> (usize, Cursor) {
        let to_end = data_bytes - self.offset;
        let (at, left_out) = if need <= to_end { (self.offset, 0) } else { (0, to_end) };
        // At the very end the offset is not wrapped: the window may grow after it.
        (at, Cursor { count: self.count + (left_out + need) as u64, offset: at + need })
    }
}

/// Position of a frame, and the position after it.
#[derive(Clone, Copy, Debug)]
struct Found {
    slot: usize,
    at: usize,
    len: usize,
    next: Cursor,
}

/// The part of the data that is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    bytes: usize,
    /// Number of times that the window has grown.
    level: u32,
}

impl Window {
    fn new(memory: &impl Memory, level: u32) -> Window {
        let shift = (GROWTH * level).min(usize::BITS - 1);
        let grown = memory.window_bytes().checked_shl(shift).filter(|grown| grown >> shift == memory.window_bytes());
        Window { bytes: grown.unwrap_or(usize::MAX).min(memory.data_bytes()), level }
    }
}

/// Returns the word that announces frame number `count` (from 0). Numbers repeat only after 2^32 frames, when the
/// slot's old word is long overwritten. A word that is not the expected one therefore belongs to the previous frame of
/// the slot.
#[inline]
pub(crate) fn word_of(count: u64, payload_bytes: usize, level: u32) -> u64 {
    (count + 1) << 32 | u64::from(level) << LEN_BITS | payload_bytes as u64
}

/// The side that puts frames in.
#[derive(Debug)]
pub(crate) struct Writer<M> {
    memory: M,
    /// Number of frames committed so far.
    count: u64,
    cursor: Cursor,
    window: Window,
    /// Bytes of the smallest window that the ring must be able to have. A ring without it is unusable.
    least_bytes: usize,
    /// Value of `count` when a larger window was last refused; `None` if none was refused.
    refused_at: Option<u64>,
    /// The reader's counter when it was last read. Reading it costs a cache miss, so the writer reads it only when room
    /// is short.
    taken: u64,
    /// Bytes of the data that were released with those frames.
    freed: u64,
    /// For each slot: the data's byte count after the frame.
    ends: [u64; SLOTS],
    reserved: Option<Found>,
}

impl<M: Memory> Writer<M> {
    /// Creates a writer over a fresh ring, for payloads up to `max_payload_bytes`.
    pub(crate) fn new(memory: M, max_payload_bytes: usize) -> Self {
        assert!(memory.slot_count().is_power_of_two() && memory.slot_count() <= SLOTS, "see Memory");
        let window = Window::new(&memory, 0);
        Self {
            memory,
            count: 0,
            cursor: Cursor::START,
            window,
            least_bytes: min_data_bytes(max_payload_bytes),
            refused_at: None,
            taken: 0,
            freed: 0,
            ends: [0; SLOTS],
            reserved: None,
        }
    }

    #[inline]
    fn slot(&self, count: u64) -> usize {
        count as usize & (self.memory.slot_count() - 1)
    }

    /// Reserves a position for a frame with a payload of `len` bytes; returns `None` if there is no room now. The
    /// caller has checked that `len` is at most the ring's longest payload.
    #[inline]
    pub(crate) fn reserve(&mut self, len: usize) -> Result<Option<FrameSlot<'_>>, Broken> {
        if data_bytes(len) > self.window.bytes - self.cursor.offset {
            self.grow_at_the_end(len)?;
        }
        while !self.find_room(len)? {
            if !self.grow(self.demand())? {
                return Ok(None);
            }
        }
        Ok(self.reserved())
    }

    /// Called if the payload does not fit before the window's end. Grows the window if it is small for payloads of this
    /// size.
    #[cold]
    fn grow_at_the_end(&mut self, len: usize) -> Result<(), Broken> {
        if self.window.bytes < PAYLOADS_OF_A_LAP * data_bytes(len) && self.window.bytes < self.memory.data_bytes() {
            self.poll_taken()?;
            self.grow(Demand::Wished)?;
        }
        Ok(())
    }

    /// Reserves a position in the window at its present size.
    #[inline]
    fn find_room(&mut self, len: usize) -> Result<bool, Broken> {
        let need = data_bytes(len);
        let (at, next) = self.cursor.fit(need, self.window.bytes);
        let has_room = self.has_room(need, next)?;
        if has_room {
            self.reserved = Some(Found { slot: self.slot(self.count), at, len, next });
        }
        Ok(has_room)
    }

    /// Returns the bytes of the data that are in use by now, and the bytes of all data.
    pub(crate) fn window_bytes(&self) -> (usize, usize) {
        (self.window.bytes, self.memory.data_bytes())
    }

    /// Returns how important a larger window is when there is no room.
    fn demand(&self) -> Demand {
        if self.window.bytes < self.least_bytes { Demand::Needed } else { Demand::Wished }
    }

    /// Whether a larger window may help and, as far as is known, is available.
    fn may_grow(&self, demand: Demand) -> bool {
        // The bytes in flight end at the writer's position and do not wrap round the window's end.
        let in_one_piece = self.cursor.count - self.freed <= self.cursor.offset as u64;
        let has_slot = self.count - self.taken < self.memory.slot_count() as u64;
        let may_ask = demand == Demand::Needed
            || self.refused_at.is_none_or(|refused_at| self.count - refused_at >= FRAMES_TO_ASK_AGAIN);
        in_one_piece && has_slot && may_ask && self.window.bytes < self.memory.data_bytes()
    }

    #[cold]
    fn grow(&mut self, demand: Demand) -> Result<bool, Broken> {
        if !self.may_grow(demand) {
            return Ok(false);
        }
        let larger = Window::new(&self.memory, self.window.level + 1);
        if self.memory.grow(self.window.bytes, larger.bytes, demand) {
            self.window = larger;
            return Ok(true);
        }
        match demand {
            Demand::Needed => Err(Broken::Exhausted),
            Demand::Wished => {
                self.refused_at = Some(self.count);
                Ok(false)
            }
        }
    }

    /// Returns the reserved position.
    #[inline]
    fn reserved(&mut self) -> Option<FrameSlot<'_>> {
        let Found { slot, at, len, .. } = self.reserved?;
        self.memory.note_write(slot, at, len);
        // SAFETY: `reserve` saw (Acquire) that the reader has released slot and bytes, so no other thread touches them
        // before `commit`. Both lie inside the memory. Head and payload do not overlap.
        unsafe {
            let line = self.memory.slots().add(slot * LINE);
            let payload = if len <= TINY_BYTES { line.add(TINY_AT) } else { self.memory.data().add(at) };
            Some(FrameSlot {
                head: &mut *line.add(HEAD_AT).cast(),
                payload: std::slice::from_raw_parts_mut(payload, len),
            })
        }
    }

    /// Publishes the reserved frame. Returns `false` if none is reserved.
    #[inline]
    pub(crate) fn commit(&mut self) -> bool {
        let Some(Found { slot, len, next, .. }) = self.reserved.take() else { return false };
        // Release: a reader that sees the word also sees the frame.
        self.memory.word(slot).store(word_of(self.count, len, self.window.level), Ordering::Release);
        self.ends[slot] = next.count;
        self.cursor = next;
        self.count += 1;
        true
    }

    /// Whether a frame with a payload of `len` bytes would find room now.
    pub(crate) fn would_fit(&mut self, len: usize) -> Result<bool, Broken> {
        let need = data_bytes(len);
        let (_, next) = self.cursor.fit(need, self.window.bytes);
        Ok(self.has_room(need, next)? || self.may_grow(self.demand()))
    }

    /// Whether a slot and all data before `next` are free.
    #[inline]
    fn has_room(&mut self, need: usize, next: Cursor) -> Result<bool, Broken> {
        if self.fits(need, next) {
            return Ok(true);
        }
        self.poll_taken()?;
        Ok(self.fits(need, next))
    }

    fn poll_taken(&mut self) -> Result<(), Broken> {
        // Acquire: the reader has finished with all these frames before the writer writes there.
        let taken = self.memory.counters().taken.0.load(Ordering::Acquire);
        if taken < self.taken || taken > self.count {
            return Err(Broken::Corrupt);
        }
        if taken > self.taken {
            self.taken = taken;
            self.freed = self.ends[self.slot(taken - 1)];
        }
        Ok(())
    }

    #[inline]
    fn fits(&self, need: usize, next: Cursor) -> bool {
        self.count - self.taken < self.memory.slot_count() as u64
            && next.count - self.freed <= self.window.bytes as u64
            && need <= self.window.bytes
    }
}

/// The side that takes frames out.
#[derive(Debug)]
pub(crate) struct Reader<M> {
    memory: M,
    max_payload_bytes: usize,
    /// Number of frames released so far.
    count: u64,
    cursor: Cursor,
    window: Window,
    peeked: Option<Found>,
}

impl<M: Memory> Reader<M> {
    /// Creates a reader over a fresh ring. A payload longer than `max_payload_bytes` counts as corruption.
    pub(crate) fn new(memory: M, max_payload_bytes: usize) -> Self {
        let window = Window::new(&memory, 0);
        Self { memory, max_payload_bytes, count: 0, cursor: Cursor::START, window, peeked: None }
    }

    /// Checks whether a frame has arrived.
    #[inline(always)]
    pub(crate) fn poll(&mut self) -> Result<bool, Broken> {
        if self.peeked.is_none() {
            self.peeked = self.find()?;
        }
        Ok(self.peeked.is_some())
    }

    /// Polls up to `polls` times until the next frame's slot has changed.
    #[inline]
    pub(crate) fn await_word(&self, polls: u32) {
        let word = self.memory.word(self.count as usize & (self.memory.slot_count() - 1));
        let unchanged = self.previous();
        // Relaxed: `find` loads the word again.
        poll_until(polls, || word.load(Ordering::Relaxed) >> 32 != unchanged);
    }

    /// Returns the next frame, if it has arrived; the same one until it is released.
    #[inline(always)]
    pub(crate) fn peek(&mut self) -> Result<Option<Frame<'_>>, Broken> {
        self.poll().map(|_| self.frame())
    }

    /// Returns the frame that was found.
    #[inline]
    fn frame(&self) -> Option<Frame<'_>> {
        let Found { slot, at, len, .. } = self.peeked?;
        self.memory.note_read(slot, at, len);
        // SAFETY: `find` checked that the payload lies inside the memory and that the frame was published (Acquire).
        // The writer touches neither slot nor payload before `release`.
        unsafe {
            let line = self.memory.slots().add(slot * LINE);
            let payload = if len <= TINY_BYTES { line.add(TINY_AT) } else { self.memory.data().add(at) };
            Some(Frame { head: &*line.add(HEAD_AT).cast(), payload: std::slice::from_raw_parts(payload, len) })
        }
    }

    /// Releases the peeked frame's slot and bytes. Returns `false` if no frame was peeked.
    #[inline]
    pub(crate) fn release(&mut self) -> bool {
        let Some(Found { slot, at, len, next }) = self.peeked.take() else { return false };
        self.memory.note_read(slot, at, len);
        self.cursor = next;
        self.count += 1;
        // Release: the reader's loads of the frame come before the writer's stores there, since the writer acquires
        // this count.
        self.memory.counters().taken.0.store(self.count, Ordering::Release);
        true
    }

    /// Finds the next frame and checks every value. The other process may be broken, and a wrong length must not lead
    /// outside the data.
    #[inline(always)]
    fn find(&mut self) -> Result<Option<Found>, Broken> {
        let slot_count = self.memory.slot_count();
        let slot = self.count as usize & (slot_count - 1);
        // Acquire: pairs with the Release in `commit`.
        let word = self.memory.word(slot).load(Ordering::Acquire);
        if word >> 32 != word_of(self.count, 0, 0) >> 32 {
            return self.check_previous(word).map(|()| None);
        }
        let (level, len) = (word as u32 >> LEN_BITS, word as usize & MAX_PAYLOAD_BYTES);
        if level != self.window.level {
            self.window = self.follow(level)?;
        }
        let need = data_bytes(len);
        if len > self.max_payload_bytes || need > self.window.bytes {
            return Err(Broken::Corrupt);
        }
        let (at, next) = self.cursor.fit(need, self.window.bytes);
        Ok(Some(Found { slot, at, len, next }))
    }

    /// Returns the window of a frame that was written after the window had grown.
    #[cold]
    fn follow(&self, level: u32) -> Result<Window, Broken> {
        let window = Window::new(&self.memory, level);
        if level > self.window.level && window.bytes > self.window.bytes { Ok(window) } else { Err(Broken::Corrupt) }
    }

    /// A slot without a new frame holds the word of its previous frame.
    #[inline]
    fn check_previous(&self, word: u64) -> Result<(), Broken> {
        if word >> 32 == self.previous() { Ok(()) } else { Err(Broken::Corrupt) }
    }

    /// Number in the word of the frame that was in the next frame's slot before; 0 if there was none.
    #[inline]
    fn previous(&self) -> u64 {
        let previous = self.count.checked_sub(self.memory.slot_count() as u64);
        previous.map_or(0, |previous| word_of(previous, 0, 0) >> 32)
    }
}

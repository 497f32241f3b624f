//! A ring for frames between one writer and one reader, over memory that both have mapped.
//!
//! Owns the placing of frames and the counter; knows neither descriptors nor waking ([`arming`] has the flags). A *slot*,
//! one cache line, announces each frame: a word with its number and length, the head, and the payload if that is tiny.
//! The slots are few and used in turn, so they stay in the caches of both sides: a reader that waits looks at the very line
//! in which the next frame will be, and for a tiny frame one line moves from core to core. Longer payloads lie in the
//! *data*, one behind the other, each contiguous: where the rest of the data is too short for one, both sides go on at
//! the start. Nothing here calls the system or allocates, but for [`Memory::grow`]. Read [`Writer`] and [`Reader`] first.
//!
//! **A ring grows with its use.** Both sides begin with a *window* at the start of the data. A writer that finds no room makes it
//! larger, and one that comes to its end with payloads of which it holds few, while the bytes that are under way lie in one piece before its
//! place: then all that is new lies behind them. Each frame's
//! word says how often the window has grown, so the reader follows with the very frame from which on it counts.

pub(crate) mod arming;
#[cfg(all(test, accl_loom))]
mod loom_tests;
#[cfg(all(test, not(accl_loom)))]
mod tests;

use crate::sync::{AtomicU64, Ordering};
use accl_wire::{Frame, HEAD_BYTES, Place, look_until};

/// Grain of the ring. Two payloads never share a cache line, so that writing one does not disturb reading another.
pub(crate) const LINE: usize = 64;
/// Slots of a direction; a power of two. Few, so that they stay near; as many frames may be under way.
pub(crate) const SLOTS: usize = 64;
/// Where the head lies in a slot, behind the word.
const HEAD_AT: usize = 8;
/// Where a tiny payload lies in a slot, and how long it may be.
const TINY_AT: usize = HEAD_AT + HEAD_BYTES;
pub(crate) const TINY_BYTES: usize = LINE - TINY_AT;
/// Bits of a word that are a payload's length; four more say how often the window has grown.
const LEN_BITS: u32 = 28;
/// The longest payload.
pub(crate) const MAX_PAYLOAD_BYTES: usize = (1 << LEN_BITS) - 1;
/// How much larger a window grows at once, as a shift.
const GROWTH: u32 = 2;
/// So many payloads are to fit before the writer comes back to the same place: lines that the reader has yet in its own cache take longer
/// to write than those that have left it.
const PAYLOADS_OF_A_LAP: usize = 64;
/// A larger window that was refused is asked for again after so many frames.
const FRAMES_TO_ASK_AGAIN: u64 = 1024;

/// The counter of one direction, alone on two cache lines (prefetchers fetch pairs).
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Counters {
    /// Frames that the reader has given back, since the beginning.
    taken: Apart<AtomicU64>,
}

impl Counters {
    /// The counter of an empty ring. (Fresh shared memory is all zero, which is the same.)
    #[cfg(test)]
    pub(crate) fn new() -> Counters {
        Counters { taken: Apart(AtomicU64::new(0)) }
    }
}

/// Keeps its content off the cache lines of others.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Apart<T>(pub(crate) T);

/// The memory of one direction.
///
/// # Safety
/// `slots` points to `slot_count` lines, a power of two and at most [`SLOTS`], of which the first words are 0 at the
/// beginning; `data` points to `data_bytes` bytes, a positive multiple of [`LINE`], of which the writer may touch the first
/// `window_bytes`, and those that `grow` has agreed to. Both are aligned to [`LINE`], valid
/// as long as `self` lives and always at the same place. Besides one [`Writer`] and one [`Reader`] over the same counter
/// nobody touches them.
pub(crate) unsafe trait Memory {
    /// Where the reader counts.
    fn counters(&self) -> &Counters;
    /// The lines that announce frames.
    fn slots(&self) -> *mut u8;
    /// Their number.
    #[inline(always)]
    fn slot_count(&self) -> usize {
        SLOTS
    }
    /// Start of the payloads' bytes.
    fn data(&self) -> *mut u8;
    /// Their number.
    fn data_bytes(&self) -> usize;
    /// As many of them are the window at the beginning: a positive multiple of [`LINE`].
    fn window_bytes(&self) -> usize {
        self.data_bytes()
    }
    /// Sees to it that the data from one offset to another can be written. `false`: it stays as it is.
    fn grow(&self, _from: usize, _to: usize, _demand: Demand) -> bool {
        true
    }
    /// The word at the start of a slot.
    #[inline(always)]
    fn word(&self, slot: usize) -> &AtomicU64 {
        debug_assert!(slot < self.slot_count());
        // SAFETY: inside the slots and aligned; words are only ever used as atomics, by both sides.
        unsafe { &*self.slots().add(slot * LINE).cast::<AtomicU64>() }
    }
    /// Called before the writer touches a frame; for the model checker.
    #[inline(always)]
    fn note_write(&self, _slot: usize, _at: usize, _len: usize) {}
    /// Called before the reader touches a frame and before it gives it back; for the model checker.
    #[inline(always)]
    fn note_read(&self, _slot: usize, _at: usize, _len: usize) {}
}

/// Why a ring can be used no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    /// The other side left the counter or a word in a state that the protocol excludes.
    Corrupt,
    /// The system has no memory for as much of it as the longest payload needs.
    Exhausted,
}

/// How much depends on a larger window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    /// The longest payload would not always find room without.
    Needed,
    /// More would be under way at a time.
    Wished,
}

/// Bytes of the data that a payload takes up.
#[inline]
const fn data_bytes(payload_bytes: usize) -> usize {
    if payload_bytes <= TINY_BYTES { 0 } else { payload_bytes.next_multiple_of(LINE) }
}

/// The smallest data in which a payload of `max_payload_bytes` always fits once the reader has caught up: the rest at
/// the end that may have to be left out is shorter than a payload.
pub(crate) const fn min_data_bytes(max_payload_bytes: usize) -> usize {
    let longest = data_bytes(max_payload_bytes);
    if longest == 0 { LINE } else { 2 * longest }
}

/// A place in the data: the count of bytes so far, with those left out, and the offset that belongs to it.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    count: u64,
    offset: usize,
}

impl Cursor {
    const START: Cursor = Cursor { count: 0, offset: 0 };

    /// Where a payload that takes up `need` bytes begins, and the place behind it.
    #[inline]
    fn fit(self, need: usize, data_bytes: usize) -> (usize, Cursor) {
        let to_end = data_bytes - self.offset;
        let (at, left_out) = if need <= to_end { (self.offset, 0) } else { (0, to_end) };
        // At the very end it stays there: the window may grow behind it.
        (at, Cursor { count: self.count + (left_out + need) as u64, offset: at + need })
    }
}

/// A frame's place, and the place behind it.
#[derive(Clone, Copy, Debug)]
struct Found {
    slot: usize,
    at: usize,
    len: usize,
    next: Cursor,
}

/// How much of the data is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    bytes: usize,
    /// How often it has grown.
    level: u32,
}

impl Window {
    fn new(memory: &impl Memory, level: u32) -> Window {
        let shift = (GROWTH * level).min(usize::BITS - 1);
        let grown = memory.window_bytes().checked_shl(shift).filter(|grown| grown >> shift == memory.window_bytes());
        Window { bytes: grown.unwrap_or(usize::MAX).min(memory.data_bytes()), level }
    }
}

/// The word that announces frame number `count` (from 0). Numbers return only after 2^32 frames, and then in another
/// frame's slot long overwritten, so a word that is not the expected one is the previous frame's.
#[inline]
pub(crate) fn word_of(count: u64, payload_bytes: usize, level: u32) -> u64 {
    (count + 1) << 32 | u64::from(level) << LEN_BITS | payload_bytes as u64
}

/// The side that puts frames in.
#[derive(Debug)]
pub(crate) struct Writer<M> {
    memory: M,
    /// Frames so far.
    count: u64,
    place: Cursor,
    window: Window,
    /// As large a window is always had, or the ring is of no use.
    least_bytes: usize,
    /// Frames so far when there was no memory to spare for a larger window.
    refused_at: Option<u64>,
    /// The reader's counter when it was last looked at. Looking again costs a cache miss, so only when room is short.
    taken: u64,
    /// Bytes of the data that went with those frames.
    freed: u64,
    /// By slot: the data's count behind the frame.
    ends: [u64; SLOTS],
    reserved: Option<Found>,
}

impl<M: Memory> Writer<M> {
    /// A writer over a fresh ring, of payloads up to `max_payload_bytes`.
    pub(crate) fn new(memory: M, max_payload_bytes: usize) -> Self {
        assert!(memory.slot_count().is_power_of_two() && memory.slot_count() <= SLOTS, "see Memory");
        let window = Window::new(&memory, 0);
        Self {
            memory,
            count: 0,
            place: Cursor::START,
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

    /// Finds a place for a frame with a payload of `len` bytes; the caller has checked that `len` is at most the ring's
    /// longest.
    #[inline]
    pub(crate) fn reserve(&mut self, len: usize) -> Result<bool, Broken> {
        if data_bytes(len) > self.window.bytes - self.place.offset {
            self.grow_at_the_end(len)?;
        }
        while !self.find_room(len)? {
            if !self.grow(self.demand())? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The payload does not fit before the window's end, which moves when the window is small for payloads like it.
    #[cold]
    fn grow_at_the_end(&mut self, len: usize) -> Result<(), Broken> {
        if self.window.bytes < PAYLOADS_OF_A_LAP * data_bytes(len) && self.window.bytes < self.memory.data_bytes() {
            self.look_what_was_taken()?;
            self.grow(Demand::Wished)?;
        }
        Ok(())
    }

    /// Reserves a place in the window as it is.
    #[inline]
    fn find_room(&mut self, len: usize) -> Result<bool, Broken> {
        let need = data_bytes(len);
        let (at, next) = self.place.fit(need, self.window.bytes);
        let has_room = self.has_room(need, next)?;
        if has_room {
            self.reserved = Some(Found { slot: self.slot(self.count), at, len, next });
        }
        Ok(has_room)
    }

    /// Bytes of the data that are used by now, of all that there are.
    pub(crate) fn window_bytes(&self) -> (usize, usize) {
        (self.window.bytes, self.memory.data_bytes())
    }

    /// How much depends on a larger window when there is no room.
    fn demand(&self) -> Demand {
        if self.window.bytes < self.least_bytes { Demand::Needed } else { Demand::Wished }
    }

    /// Whether a larger window may help, and can be had as far as is known.
    fn may_grow(&self, demand: Demand) -> bool {
        // What is under way ends at this side's place, and does not go round the window's end.
        let in_one_piece = self.place.count - self.freed <= self.place.offset as u64;
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

    /// The reserved place.
    #[inline]
    pub(crate) fn reserved(&mut self) -> Option<Place<'_>> {
        let Found { slot, at, len, .. } = self.reserved?;
        self.memory.note_write(slot, at, len);
        // SAFETY: `reserve` saw (Acquire) that the reader has given slot and bytes back, so nobody else touches them
        // before `commit`; both lie inside the memory. Head and payload do not overlap.
        unsafe {
            let line = self.memory.slots().add(slot * LINE);
            let payload = if len <= TINY_BYTES { line.add(TINY_AT) } else { self.memory.data().add(at) };
            Some(Place { head: &mut *line.add(HEAD_AT).cast(), payload: std::slice::from_raw_parts_mut(payload, len) })
        }
    }

    /// Publishes the reserved frame; `false` without one.
    #[inline]
    pub(crate) fn commit(&mut self) -> bool {
        let Some(Found { slot, len, next, .. }) = self.reserved.take() else { return false };
        // Release: whoever sees the word sees the frame.
        self.memory.word(slot).store(word_of(self.count, len, self.window.level), Ordering::Release);
        self.ends[slot] = next.count;
        self.place = next;
        self.count += 1;
        true
    }

    /// Whether a frame with a payload of `len` bytes would find room now.
    pub(crate) fn would_fit(&mut self, len: usize) -> Result<bool, Broken> {
        let need = data_bytes(len);
        let (_, next) = self.place.fit(need, self.window.bytes);
        Ok(self.has_room(need, next)? || self.may_grow(self.demand()))
    }

    /// Whether a slot is free and all data before `next`.
    #[inline]
    fn has_room(&mut self, need: usize, next: Cursor) -> Result<bool, Broken> {
        if self.fits(need, next) {
            return Ok(true);
        }
        self.look_what_was_taken()?;
        Ok(self.fits(need, next))
    }

    fn look_what_was_taken(&mut self) -> Result<(), Broken> {
        // Acquire: the reader has finished with all these frames before we write there.
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
    /// Frames given back so far.
    count: u64,
    place: Cursor,
    window: Window,
    peeked: Option<Found>,
}

impl<M: Memory> Reader<M> {
    /// A reader over a fresh ring. Longer payloads than `max_payload_bytes` count as corruption.
    pub(crate) fn new(memory: M, max_payload_bytes: usize) -> Self {
        let window = Window::new(&memory, 0);
        Self { memory, max_payload_bytes, count: 0, place: Cursor::START, window, peeked: None }
    }

    /// Looks for a frame.
    #[inline(always)]
    pub(crate) fn poll(&mut self) -> Result<bool, Broken> {
        if self.peeked.is_none() {
            self.peeked = self.find()?;
        }
        Ok(self.peeked.is_some())
    }

    /// Looks up to `looks` times whether the next frame's slot has changed.
    #[inline]
    pub(crate) fn await_word(&self, looks: u32) {
        let word = self.memory.word(self.count as usize & (self.memory.slot_count() - 1));
        let unchanged = self.previous();
        // Relaxed: `find` looks again.
        look_until(looks, || word.load(Ordering::Relaxed) >> 32 != unchanged);
    }

    /// The frame that was found; the same one until it is released.
    #[inline]
    pub(crate) fn frame(&self) -> Option<Frame<'_>> {
        let Found { slot, at, len, .. } = self.peeked?;
        self.memory.note_read(slot, at, len);
        // SAFETY: `find` checked that the payload lies inside the memory and that the frame was published (Acquire); the
        // writer touches neither slot nor payload before `release`.
        unsafe {
            let line = self.memory.slots().add(slot * LINE);
            let payload = if len <= TINY_BYTES { line.add(TINY_AT) } else { self.memory.data().add(at) };
            Some(Frame { head: &*line.add(HEAD_AT).cast(), payload: std::slice::from_raw_parts(payload, len) })
        }
    }

    /// Gives the peeked frame's place back; `false` without one.
    #[inline]
    pub(crate) fn release(&mut self) -> bool {
        let Some(Found { slot, at, len, next }) = self.peeked.take() else { return false };
        self.memory.note_read(slot, at, len);
        self.place = next;
        self.count += 1;
        // Release: our reads of the frame are done before the writer, which acquires this count, writes there.
        self.memory.counters().taken.0.store(self.count, Ordering::Release);
        true
    }

    /// Everything is checked here, because the other process may be broken: a wrong length must not lead us out of
    /// the data.
    #[inline(always)]
    fn find(&mut self) -> Result<Option<Found>, Broken> {
        let slot_count = self.memory.slot_count();
        let slot = self.count as usize & (slot_count - 1);
        // Acquire: pairs with `commit`.
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
        let (at, next) = self.place.fit(need, self.window.bytes);
        Ok(Some(Found { slot, at, len, next }))
    }

    /// The window of a frame that was written after it had grown.
    #[cold]
    fn follow(&self, level: u32) -> Result<Window, Broken> {
        let window = Window::new(&self.memory, level);
        if level > self.window.level && window.bytes > self.window.bytes { Ok(window) } else { Err(Broken::Corrupt) }
    }

    /// A slot without news holds the word of the frame that was in it before.
    #[inline]
    fn check_previous(&self, word: u64) -> Result<(), Broken> {
        if word >> 32 == self.previous() { Ok(()) } else { Err(Broken::Corrupt) }
    }

    /// The number in the word of the frame that was in the next frame's slot before; 0 without one.
    #[inline]
    fn previous(&self) -> u64 {
        let previous = self.count.checked_sub(self.memory.slot_count() as u64);
        previous.map_or(0, |previous| word_of(previous, 0, 0) >> 32)
    }
}

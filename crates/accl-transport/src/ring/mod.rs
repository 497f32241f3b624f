//! A byte ring for frames between one writer and one reader, over memory that both have mapped.
//!
//! Owns the placing of frames and the counter; knows neither descriptors nor waking ([`park`] has the flags). A record
//! is a word and a frame behind it. The word publishes the record: 0 says that there is none yet, so a reader that waits
//! looks at the very line in which a short frame will be, and one line moves from core to core. Before a record is
//! published, the word behind it is set to 0. A frame is contiguous: where the rest of the ring is too short for it, a
//! mark sends the reader back to the start. Nothing here calls the system or allocates. Read [`Writer`] and [`Reader`]
//! first.

#[cfg(all(test, loom))]
mod loom_tests;
pub(crate) mod park;
#[cfg(all(test, not(loom)))]
mod tests;

use crate::sync::{AtomicU64, Ordering};

/// Grain of the ring. Two frames never share a cache line, so that writing one does not disturb reading another.
pub(crate) const LINE: usize = 64;
/// A word that publishes nothing: the writer has not got here. Fresh shared memory is all zero.
const NOTHING: u64 = 0;
/// Stands in the place of a length (which is stored plus one): the next frame is at the start of the ring.
const WRAP: u64 = u64::MAX;
/// Where a frame begins after the start of its record. A short frame shares the line with its length; in a long one
/// the payload behind a 40-byte header begins on a line of its own.
const SHORT_AT: usize = 8;
const LONG_AT: usize = 24;

/// The counter of one direction, alone on two cache lines (prefetchers fetch pairs). Bytes since the beginning.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Counters {
    /// Read: everything below has been given back by the reader.
    head: Apart<AtomicU64>,
}

impl Counters {
    /// The counter of an empty ring. (Fresh shared memory is all zero, which is the same.)
    #[cfg(test)]
    pub(crate) fn new() -> Counters {
        Counters { head: Apart(AtomicU64::new(0)) }
    }
}

/// Keeps its content off the cache lines of others.
#[repr(C, align(128))]
#[derive(Debug)]
pub(crate) struct Apart<T>(pub(crate) T);

/// The memory of one direction.
///
/// # Safety
/// `data` points to `data_bytes` bytes, a positive multiple of [`LINE`], aligned to [`LINE`], valid as long as `self`
/// lives and always at the same place; the first word is 0 at the beginning. Besides one [`Writer`] and one [`Reader`]
/// over the same counter nobody touches them.
pub(crate) unsafe trait Memory {
    /// Where both sides count.
    fn counters(&self) -> &Counters;
    /// Start of the bytes.
    fn data(&self) -> *mut u8;
    /// Their number.
    fn data_bytes(&self) -> usize;
    /// The word at the start of a line.
    #[inline(always)]
    fn word(&self, offset: usize) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(LINE) && offset < self.data_bytes());
        // SAFETY: inside the data and aligned; words are only ever used as atomics, by both sides: payloads lie behind
        // them or in lines that hold no word at the time.
        unsafe { &*self.data().add(offset).cast::<AtomicU64>() }
    }
    /// Called before the writer touches these bytes; for the model checker.
    #[inline(always)]
    fn note_write(&self, _at: usize, _len: usize) {}
    /// Called before the reader touches these bytes and before it gives them back; for the model checker.
    #[inline(always)]
    fn note_read(&self, _at: usize, _len: usize) {}
}

/// The other side left the counters or a length in a state that the protocol excludes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

/// Bytes that a frame takes up.
pub(crate) const fn record_bytes(frame_bytes: usize) -> usize {
    (frame_at(frame_bytes) + frame_bytes).next_multiple_of(LINE)
}

/// The smallest ring in which a frame of `max_frame_bytes` always fits once the reader has caught up: the rest at the
/// end that may have to be skipped is at least a line shorter than a record, which leaves room for the word behind it.
pub(crate) const fn min_ring_bytes(max_frame_bytes: usize) -> usize {
    2 * record_bytes(max_frame_bytes)
}

const fn frame_at(frame_bytes: usize) -> usize {
    if frame_bytes <= LINE - SHORT_AT { SHORT_AT } else { LONG_AT }
}

/// A place in a ring: the count of bytes so far and the offset that belongs to it.
#[derive(Clone, Copy, Debug)]
struct Place {
    count: u64,
    offset: usize,
}

impl Place {
    const START: Place = Place { count: 0, offset: 0 };

    /// `offset + bytes` must not exceed `ring_bytes`.
    fn advance(self, bytes: usize, ring_bytes: usize) -> Place {
        let offset = self.offset + bytes;
        Place { count: self.count + bytes as u64, offset: if offset == ring_bytes { 0 } else { offset } }
    }
}

/// A frame's bytes, and the place behind its record.
#[derive(Clone, Copy, Debug)]
struct Found {
    at: usize,
    len: usize,
    next: Place,
}

/// The side that puts frames in.
#[derive(Debug)]
pub(crate) struct Writer<M> {
    memory: M,
    /// Where the next record begins; the word there is 0.
    place: Place,
    /// The reader's counter when it was last looked at. Looking again costs a cache miss, so only when room is short.
    head: u64,
    reserved: Option<Found>,
}

impl<M: Memory> Writer<M> {
    /// A writer over a fresh ring.
    pub(crate) fn new(memory: M) -> Self {
        Self { memory, place: Place::START, head: 0, reserved: None }
    }

    /// Finds a place for a frame of `len` bytes; the caller has checked that `len` is at most the ring's longest frame.
    #[inline]
    pub(crate) fn reserve(&mut self, len: usize) -> Result<bool, Corrupt> {
        let ring_bytes = self.memory.data_bytes();
        let need = record_bytes(len);
        let skip = self.skip(need);
        if !self.has_room(skip + need)? {
            return Ok(false);
        }
        let mut start = self.place;
        if skip > 0 {
            start = start.advance(skip, ring_bytes);
        }
        let next = start.advance(need, ring_bytes);
        // Relaxed: `commit` orders it. Here and not there, so that the line is on its way while the frame is written.
        self.memory.word(next.offset).store(NOTHING, Ordering::Relaxed);
        self.reserved = Some(Found { at: start.offset + frame_at(len), len, next });
        Ok(true)
    }

    /// The reserved place.
    #[inline]
    pub(crate) fn reserved(&mut self) -> Option<&mut [u8]> {
        self.reserved.map(|Found { at, len, .. }| {
            self.memory.note_write(at, len);
            // SAFETY: `reserve` saw (Acquire) that the reader has given these bytes back, so nobody else touches them
            // before `commit`; they lie inside the data, since the whole record does.
            unsafe { std::slice::from_raw_parts_mut(self.memory.data().add(at), len) }
        })
    }

    /// Publishes the reserved frame; `false` without one.
    #[inline]
    pub(crate) fn commit(&mut self) -> bool {
        let Some(Found { at, len, next }) = self.reserved.take() else { return false };
        let start = at - frame_at(len);
        let word = len as u64 + 1;
        // Release: whoever sees the word sees the frame, and the 0 behind it.
        if start == self.place.offset {
            self.memory.word(start).store(word, Ordering::Release);
        } else {
            self.memory.word(start).store(word, Ordering::Relaxed);
            self.memory.word(self.place.offset).store(WRAP, Ordering::Release);
        }
        self.place = next;
        true
    }

    /// Bytes at the end of the ring that a record of `need` bytes leaves out.
    #[inline]
    fn skip(&self, need: usize) -> usize {
        let to_end = self.memory.data_bytes() - self.place.offset;
        if need <= to_end { 0 } else { to_end }
    }

    /// Whether a frame of `len` bytes would find room now.
    pub(crate) fn would_fit(&mut self, len: usize) -> Result<bool, Corrupt> {
        let need = record_bytes(len);
        self.has_room(self.skip(need) + need)
    }

    /// Whether `need` bytes and the word behind them are free.
    #[inline]
    fn has_room(&mut self, need: usize) -> Result<bool, Corrupt> {
        let ring_bytes = self.memory.data_bytes() as u64;
        let fits = |head: u64| ring_bytes - (self.place.count - head) >= (need + LINE) as u64;
        if fits(self.head) {
            return Ok(true);
        }
        // Acquire: the reader has finished with everything below before we write there.
        let head = self.memory.counters().head.0.load(Ordering::Acquire);
        if head < self.head || head > self.place.count {
            return Err(Corrupt);
        }
        self.head = head;
        Ok(fits(head))
    }
}

/// The side that takes frames out.
#[derive(Debug)]
pub(crate) struct Reader<M> {
    memory: M,
    max_frame_bytes: usize,
    place: Place,
    peeked: Option<Found>,
}

impl<M: Memory> Reader<M> {
    /// A reader over a fresh ring. Longer frames than `max_frame_bytes` count as corruption.
    pub(crate) fn new(memory: M, max_frame_bytes: usize) -> Self {
        Self { memory, max_frame_bytes, place: Place::START, peeked: None }
    }

    /// Looks for a frame.
    #[inline]
    pub(crate) fn poll(&mut self) -> Result<bool, Corrupt> {
        if self.peeked.is_none() {
            self.peeked = self.find()?;
        }
        Ok(self.peeked.is_some())
    }

    /// The frame that was found; the same one until it is released.
    #[inline]
    pub(crate) fn frame(&self) -> Option<&[u8]> {
        self.peeked.map(|Found { at, len, .. }| {
            self.memory.note_read(at, len);
            // SAFETY: `find` checked that the frame lies inside the data and was published (Acquire); the writer
            // does not touch it before `release`.
            unsafe { std::slice::from_raw_parts(self.memory.data().add(at), len) }
        })
    }

    /// Gives the peeked frame's place back; `false` without one.
    #[inline]
    pub(crate) fn release(&mut self) -> bool {
        let Some(Found { at, len, next }) = self.peeked.take() else { return false };
        self.memory.note_read(at, len);
        self.place = next;
        // Release: our reads of the frame are done before the writer, which acquires this count, writes there.
        self.memory.counters().head.0.store(next.count, Ordering::Release);
        true
    }

    /// Everything is checked here, because the other process may be broken: a wrong length must not lead us out of
    /// the ring.
    #[inline]
    fn find(&mut self) -> Result<Option<Found>, Corrupt> {
        let ring_bytes = self.memory.data_bytes();
        let mut start = self.place;
        // Acquire: pairs with `commit`.
        let mut word = self.memory.word(start.offset).load(Ordering::Acquire);
        if word == NOTHING {
            return Ok(None);
        }
        if word == WRAP {
            start = start.advance(ring_bytes - start.offset, ring_bytes);
            // Relaxed: written before the mark.
            word = self.memory.word(start.offset).load(Ordering::Relaxed);
            if word == NOTHING || word == WRAP {
                return Err(Corrupt);
            }
        }
        let len = usize::try_from(word - 1).ok().filter(|&len| len <= self.max_frame_bytes).ok_or(Corrupt)?;
        let need = record_bytes(len);
        if need > ring_bytes - start.offset {
            return Err(Corrupt);
        }
        Ok(Some(Found { at: start.offset + frame_at(len), len, next: start.advance(need, ring_bytes) }))
    }
}

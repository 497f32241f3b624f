//! Checks every interleaving of a ring, of the flags of a side that stops polling, and of the bitmap that collects
//! events, at small sizes.
//! `RUSTFLAGS="--cfg accl_loom" cargo test -p accl-transport --release --lib loom_`

use loom::cell::UnsafeCell;
use loom::sync::{Arc, Notify as Event};

use super::arming::{DATA, ROOM, SideState};
use super::*;
use crate::bitmap::EventBits;
use accl_wire::Slot;

#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Line64([u8; LINE]);

/// Memory whose every line is also a loom cell, so that loom finds a read that is not ordered after its write. The
/// slots come first.
struct Checked {
    counters: Counters,
    base: *mut u8,
    lines: Vec<UnsafeCell<()>>,
    window_lines: usize,
    words: Vec<AtomicU64>,
    sides: [SideState; 2],
    events: [Event; 2],
    bitmaps: [EventBits<1>; 2],
}

// SAFETY: loom checks that all accesses to the lines are ordered.
unsafe impl Send for Checked {}
// SAFETY: loom checks that accesses through shared references are ordered as well.
unsafe impl Sync for Checked {}

impl Drop for Checked {
    fn drop(&mut self) {
        let lines = std::ptr::slice_from_raw_parts_mut(self.base.cast::<Line64>(), self.lines.len());
        // SAFETY: the pointer was made by `Box::into_raw` in `checked`, has its length, and is freed once.
        drop(unsafe { Box::from_raw(lines) });
    }
}

#[derive(Clone)]
struct Shared(Arc<Checked>);

impl Shared {
    /// Returns the lines of a frame: its slot and the lines of its payload.
    fn lines(&self, slot: usize, at: usize, len: usize) -> impl Iterator<Item = &UnsafeCell<()>> {
        let first = self.slot_count() + at / LINE;
        std::iter::once(slot).chain(first..first + data_bytes(len) / LINE).map(|line| &self.0.lines[line])
    }
}

// SAFETY: a box of lines, at one address until the last `Arc` is dropped.
unsafe impl Memory for Shared {
    fn counters(&self) -> &Counters {
        &self.0.counters
    }
    fn slots(&self) -> *mut u8 {
        self.0.base
    }
    fn slot_count(&self) -> usize {
        self.0.words.len()
    }
    fn data(&self) -> *mut u8 {
        // SAFETY: the data begins after the slots, inside the same allocation.
        unsafe { self.0.base.add(self.slot_count() * LINE) }
    }
    fn data_bytes(&self) -> usize {
        (self.0.lines.len() - self.slot_count()) * LINE
    }
    fn window_bytes(&self) -> usize {
        self.0.window_lines * LINE
    }
    fn word(&self, slot: usize) -> &AtomicU64 {
        &self.0.words[slot]
    }
    fn note_write(&self, slot: usize, at: usize, len: usize) {
        self.lines(slot, at, len).for_each(|line| line.with_mut(|_| ()));
    }
    fn note_read(&self, slot: usize, at: usize, len: usize) {
        self.lines(slot, at, len).for_each(|line| line.with(|_| ()));
    }
}

fn checked(slot_count: usize, data_lines: usize, window_lines: usize) -> Shared {
    let lines = vec![Line64([0xee; LINE]); slot_count + data_lines].into_boxed_slice();
    Shared(Arc::new(Checked {
        counters: Counters::new(),
        lines: (0..lines.len()).map(|_| UnsafeCell::new(())).collect(),
        base: Box::into_raw(lines).cast(),
        window_lines,
        // The words are stored apart from the bytes: loom's atomics cannot lie among the bytes.
        words: (0..slot_count).map(|_| AtomicU64::new(0)).collect(),
        sides: [SideState::new(), SideState::new()],
        events: [Event::new(), Event::new()],
        bitmaps: [EventBits::new(), EventBits::new()],
    }))
}

const WRITER: usize = 0;
const READER: usize = 1;

/// Notifies the other side like a link does.
fn notify(shared: &Shared, side: usize, what: u32) {
    if let Some(call) = shared.0.sides[side].take_call(what)
        && call.slot.is_none_or(|slot| shared.0.bitmaps[side].post(slot))
    {
        shared.0.events[side].notify();
    }
}

fn send(shared: &Shared, writer: &mut Writer<Shared>, value: u8, len: usize) {
    loop {
        if let Some(slot) = writer.reserve(len).unwrap() {
            slot.head.fill(value);
            slot.payload.fill(value);
            break;
        }
        // Like a link whose process has no board: announce, poll again, sleep, retract.
        shared.0.sides[WRITER].announce(DATA | ROOM, None);
        if !writer.would_fit(len).unwrap() {
            shared.0.events[WRITER].wait();
        }
        shared.0.sides[WRITER].retract();
    }
    writer.commit();
    notify(shared, READER, DATA);
}

fn receive(shared: &Shared, reader: &mut Reader<Shared>, value: u8, len: usize) {
    loop {
        if let Some(frame) = reader.peek().unwrap() {
            assert!(frame.payload.len() == len && frame.head.iter().chain(frame.payload).all(|&b| b == value));
            break;
        }
        shared.0.sides[READER].announce(DATA, None);
        if !reader.poll().unwrap() {
            shared.0.events[READER].wait();
        }
        shared.0.sides[READER].retract();
    }
    reader.release();
    notify(shared, WRITER, ROOM);
}

/// The lower of two bounds: a test's own, and loom's from LOOM_MAX_PREEMPTIONS.
fn least(own: Option<usize>, asked: Option<usize>) -> Option<usize> {
    own.into_iter().chain(asked).min()
}

fn exchange(slot_count: usize, data_lines: usize, lens: &'static [usize], preemptions: Option<usize>) {
    exchange_growing(slot_count, data_lines, data_lines, lens, preemptions);
}

/// `exchange` over a ring whose window begins with a part of its data.
fn exchange_growing(
    slot_count: usize,
    data_lines: usize,
    window_lines: usize,
    lens: &'static [usize],
    preemptions: Option<usize>,
) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = least(preemptions, model.preemption_bound);
    model.check(move || {
        let shared = checked(slot_count, data_lines, window_lines);
        let for_reader = shared.clone();
        let thread = loom::thread::spawn(move || {
            let mut reader = Reader::new(for_reader.clone(), 100);
            for (i, &len) in lens.iter().enumerate() {
                receive(&for_reader, &mut reader, i as u8, len);
            }
        });
        let mut writer = Writer::new(shared.clone(), 100);
        for (i, &len) in lens.iter().enumerate() {
            send(&shared, &mut writer, i as u8, len);
        }
        thread.join().unwrap();
    });
}

/// Receives like `receive`, in a process that arms the link at once, takes events from its bitmap, and sleeps when
/// there are none.
fn receive_armed(shared: &Shared, reader: &mut Reader<Shared>, is_polled: &mut bool, value: u8) {
    let (side, bitmap) = (&shared.0.sides[READER], &shared.0.bitmaps[READER]);
    loop {
        if *is_polled {
            if let Some(frame) = reader.peek().unwrap() {
                assert!(frame.head.iter().chain(frame.payload).all(|&byte| byte == value));
                break;
            }
            side.announce(DATA, Some(Slot(3)));
            *is_polled = reader.poll().unwrap();
            if *is_polled {
                side.retract();
                continue;
            }
        }
        bitmap.take(&mut |slot| *is_polled = slot == Slot(3));
        if !*is_polled {
            if !bitmap.listen() {
                shared.0.events[READER].wait();
            }
            bitmap.mute();
        }
    }
    reader.release();
    notify(shared, WRITER, ROOM);
}

// A lost wake-up is a deadlock, which loom reports; a read that overtakes its write is a causality error.

#[test]
fn loom_one_frame_is_never_missed() {
    exchange(1, 2, &[100], None);
}

#[test]
fn loom_a_writer_without_a_slot_is_woken() {
    exchange(1, 1, &[8, 8, 8], Some(3));
}

#[test]
fn loom_a_writer_without_room_is_woken() {
    exchange(4, 2, &[100, 100, 100], Some(3));
}

#[test]
fn loom_frames_that_wrap_are_whole_and_never_missed() {
    // 2 lines, none, 1 line, then 2 lines: the last does not fit before the end of 4 and wraps.
    exchange(2, 4, &[100, 8, 60, 100], Some(2));
}

#[test]
fn loom_a_ring_grows_while_frames_are_under_way() {
    // From one line to four: the second frame lies after the first, the third may have to wait, and the fourth wraps.
    exchange_growing(4, 4, 1, &[60, 100, 60, 100], Some(2));
}

#[test]
fn loom_frames_on_an_armed_link_are_posted_and_never_missed() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = least(Some(3), model.preemption_bound);
    model.check(|| {
        let shared = checked(2, 2, 2);
        let for_reader = shared.clone();
        let thread = loom::thread::spawn(move || {
            let mut reader = Reader::new(for_reader.clone(), 100);
            let mut is_polled = true;
            (0..2).for_each(|value| receive_armed(&for_reader, &mut reader, &mut is_polled, value));
        });
        let mut writer = Writer::new(shared.clone(), 100);
        (0..2).for_each(|value| send(&shared, &mut writer, value, 8));
        thread.join().unwrap();
    });
}

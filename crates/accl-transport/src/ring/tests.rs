use std::sync::Arc;

use proptest::prelude::*;

use super::*;

#[repr(C, align(64))]
struct Line64(#[allow(dead_code)] [u8; LINE]);

struct Heap {
    counters: Counters,
    lines: std::cell::UnsafeCell<Vec<Line64>>,
    data: *mut u8,
    data_bytes: usize,
}

// SAFETY: the ring protocol keeps the writer's and the reader's bytes apart.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}

#[derive(Clone)]
struct Shared(Arc<Heap>);

// SAFETY: the lines are allocated once, aligned by their type, and live as long as the `Arc`.
unsafe impl Memory for Shared {
    fn counters(&self) -> &Counters {
        &self.0.counters
    }
    fn data(&self) -> *mut u8 {
        self.0.data
    }
    fn data_bytes(&self) -> usize {
        self.0.data_bytes
    }
}

fn memory(bytes: usize) -> Shared {
    let mut lines: Vec<Line64> = (0..bytes / LINE).map(|_| Line64([0xee; LINE])).collect();
    lines[0] = Line64([0; LINE]);
    let data = lines.as_mut_ptr().cast();
    Shared(Arc::new(Heap { counters: Counters::new(), lines: lines.into(), data, data_bytes: bytes }))
}

fn ring(bytes: usize, max_frame: usize) -> (Writer<Shared>, Reader<Shared>, Shared) {
    let memory = memory(bytes);
    (Writer::new(memory.clone()), Reader::new(memory.clone(), max_frame), memory)
}

trait TryReserve {
    fn try_reserve(&mut self, len: usize) -> Result<Option<&mut [u8]>, Corrupt>;
}

impl TryReserve for Writer<Shared> {
    fn try_reserve(&mut self, len: usize) -> Result<Option<&mut [u8]>, Corrupt> {
        Ok(if self.reserve(len)? { self.reserved() } else { None })
    }
}

trait Peek {
    fn peek(&mut self) -> Result<Option<&[u8]>, Corrupt>;
}

impl Peek for Reader<Shared> {
    fn peek(&mut self) -> Result<Option<&[u8]>, Corrupt> {
        self.poll()?;
        Ok(self.frame())
    }
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (seed * 131 + i * 7) as u8).collect()
}

#[test]
fn two_longest_frames_are_enough_for_every_sequence_of_lengths() {
    // With any free rest at the end, a frame fits as soon as the reader has caught up.
    for max_frame in [1, 40, 56, 57, 64, 1000, 4096 + 256] {
        let (mut writer, mut reader, _) = ring(min_ring_bytes(max_frame), max_frame);
        for (i, len) in (0..500).map(|i| (i * 37) % (max_frame + 1)).enumerate() {
            let frame = writer.try_reserve(len).unwrap().expect("the ring is empty");
            assert_eq!(frame.len(), len);
            frame.copy_from_slice(&pattern(i, len));
            assert!(writer.commit());
            assert_eq!(reader.peek().unwrap().unwrap(), pattern(i, len));
            assert!(reader.release());
        }
    }
}

#[test]
fn payloads_of_long_frames_begin_on_a_cache_line() {
    let (mut writer, mut reader, _) = ring(1 << 16, 4096);
    for len in [0, 1, 56, 57, 104, 1000] {
        let frame = writer.try_reserve(len).unwrap().unwrap();
        let at = frame.as_ptr() as usize;
        assert_eq!(at % 8, 0);
        if len > 56 {
            assert_eq!((at + crate::frame::HEADER_BYTES) % LINE, 0);
        }
        writer.commit();
        assert_eq!(reader.peek().unwrap().unwrap().as_ptr() as usize, at);
        reader.release();
    }
}

#[test]
fn a_short_frame_takes_one_cache_line() {
    assert_eq!(record_bytes(crate::frame::HEADER_BYTES + 16), LINE);
    assert_eq!(record_bytes(57), 2 * LINE);
}

#[test]
fn reserving_again_gives_up_the_first_place() {
    let (mut writer, mut reader, _) = ring(1024, 100);
    writer.try_reserve(100).unwrap().unwrap().fill(1);
    writer.try_reserve(3).unwrap().unwrap().fill(2);
    assert!(writer.commit());
    assert!(!writer.commit());
    assert_eq!(reader.peek().unwrap().unwrap(), [2, 2, 2]);
    assert!(reader.release());
    assert!(!reader.release());
    assert_eq!(reader.peek().unwrap(), None);
}

#[test]
fn wrong_counters_and_lengths_are_corruption_and_not_a_crash() {
    let found = |at_end: bool, word: u64, behind: u64| {
        let (mut writer, mut reader, memory) = ring(1024, 100);
        if at_end {
            // One line is left before the end.
            for len in [100, 100, 100, 100, 100, 100, 100, 8] {
                writer.try_reserve(len).unwrap().unwrap();
                writer.commit();
                reader.poll().unwrap();
                reader.release();
            }
        }
        memory.word(0).store(behind, Ordering::Relaxed);
        memory.word(if at_end { 1024 - LINE } else { 0 }).store(word, Ordering::Release);
        reader.peek().map(|frame| frame.map(<[u8]>::len))
    };
    assert_eq!(found(false, 6, 0), Ok(Some(5)));
    assert_eq!(found(true, 6, 0), Ok(Some(5)));
    assert_eq!(found(true, 58, 0), Err(Corrupt), "longer than the rest of the ring");
    assert_eq!(found(false, 102, 0), Err(Corrupt), "longer than any frame");
    assert_eq!(found(false, u64::MAX - 1, 0), Err(Corrupt));
    assert_eq!(found(true, WRAP, 6), Ok(Some(5)));
    assert_eq!(found(true, WRAP, NOTHING), Err(Corrupt), "a mark with nothing behind it");
    assert_eq!(found(true, WRAP, WRAP), Err(Corrupt), "a mark behind a mark");

    let (mut writer, _, memory) = ring(1024, 100);
    memory.counters().head.0.store(4096, Ordering::Release);
    for _ in 0..9 {
        if writer.try_reserve(100) == Err(Corrupt) {
            return;
        }
        writer.commit();
    }
    panic!("a head before the tail was believed");
}

proptest! {
    #[test]
    fn frames_arrive_whole_and_in_order(
        lens in proptest::collection::vec(0usize..700, 1..60),
        rings in 2usize..5,
        writes in proptest::collection::vec(any::<bool>(), 200),
    ) {
        let (mut writer, mut reader, _) = ring(min_ring_bytes(700).next_multiple_of(64) / 2 * rings, 700);
        let (mut sent, mut received) = (0, 0);
        let mut turns = writes.into_iter();
        while received < lens.len() {
            let write = turns.next().unwrap_or(received == sent);
            if write && sent < lens.len() {
                let fits = writer.would_fit(lens[sent]).unwrap();
                let frame = writer.try_reserve(lens[sent]).unwrap();
                prop_assert_eq!(fits, frame.is_some());
                if let Some(frame) = frame {
                    frame.copy_from_slice(&pattern(sent, lens[sent]));
                    writer.commit();
                    sent += 1;
                    continue;
                }
            }
            match reader.peek().unwrap() {
                Some(frame) => {
                    let expected = pattern(received, lens[received]);
                    prop_assert_eq!(frame, &expected[..]);
                    received += 1;
                    reader.release();
                }
                None => prop_assert_eq!(sent, received),
            }
        }
    }
}

#[test]
fn two_threads_exchange_frames_through_a_small_ring() {
    const FRAMES: usize = 20_000;
    let (mut writer, mut reader, memory) = ring(min_ring_bytes(500), 500);
    let len = |i: usize| (i * 97) % 501;
    let sender = std::thread::spawn(move || {
        for i in 0..FRAMES {
            loop {
                if let Some(frame) = writer.try_reserve(len(i)).unwrap() {
                    frame.fill(i as u8);
                    break;
                }
                std::thread::yield_now();
            }
            writer.commit();
        }
    });
    for i in 0..FRAMES {
        while reader.peek().unwrap().is_none() {
            std::thread::yield_now();
        }
        let frame = reader.peek().unwrap().unwrap();
        assert!(frame.len() == len(i) && frame.iter().all(|&b| b == i as u8), "frame {i}");
        reader.release();
    }
    sender.join().unwrap();
    // The lines are owned here to the end.
    assert_eq!(line_count(&memory), min_ring_bytes(500) / LINE);
}

fn line_count(memory: &Shared) -> usize {
    // SAFETY: both users are done.
    unsafe { (*memory.0.lines.get()).len() }
}

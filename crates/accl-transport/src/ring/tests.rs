use std::sync::Arc;

use proptest::prelude::*;

use super::*;

#[repr(C, align(64))]
struct Line64(#[allow(dead_code)] [u8; LINE]);

struct Heap {
    counters: Counters,
    lines: std::cell::UnsafeCell<Vec<Line64>>,
    base: *mut u8,
    slot_count: usize,
    data_bytes: usize,
    window_bytes: usize,
    /// The memory grows no further than this offset.
    most_bytes: usize,
    /// Whether it also gives what the longest payload needs.
    gives_what_is_needed: bool,
}

// SAFETY: the ring protocol keeps the writer's and the reader's bytes apart.
unsafe impl Send for Heap {}
// SAFETY: shared references reach the bytes only through the ring protocol, which keeps the writer's and the reader's
// bytes apart.
unsafe impl Sync for Heap {}

#[derive(Clone)]
struct Shared(Arc<Heap>);

// SAFETY: the lines, slots first, are allocated once, aligned by their type, and live as long as the `Arc`.
unsafe impl Memory for Shared {
    fn counters(&self) -> &Counters {
        &self.0.counters
    }
    fn slots(&self) -> *mut u8 {
        self.0.base
    }
    fn slot_count(&self) -> usize {
        self.0.slot_count
    }
    fn data(&self) -> *mut u8 {
        // SAFETY: the data begins after the `slot_count` slots, inside the same allocation.
        unsafe { self.0.base.add(self.0.slot_count * LINE) }
    }
    fn data_bytes(&self) -> usize {
        self.0.data_bytes
    }
    fn window_bytes(&self) -> usize {
        self.0.window_bytes
    }
    fn grow(&self, _from: usize, to: usize, demand: Demand) -> bool {
        to <= self.0.most_bytes || (demand == Demand::Needed && self.0.gives_what_is_needed)
    }
}

/// Memory with a window at the beginning, which grows to `most_bytes`, and further only if needed.
fn memory(slot_count: usize, data_bytes: usize, window_bytes: usize, most_bytes: usize) -> Shared {
    heap(slot_count, data_bytes, window_bytes, most_bytes, true)
}

fn heap(
    slot_count: usize,
    data_bytes: usize,
    window_bytes: usize,
    most_bytes: usize,
    gives_what_is_needed: bool,
) -> Shared {
    let mut lines: Vec<Line64> = (0..slot_count + data_bytes / LINE).map(|_| Line64([0xee; LINE])).collect();
    for slot in &mut lines[..slot_count] {
        *slot = Line64([0; LINE]);
    }
    let base = lines.as_mut_ptr().cast();
    let (counters, lines) = (Counters::new(), lines.into());
    Shared(Arc::new(Heap {
        counters,
        lines,
        base,
        slot_count,
        data_bytes,
        window_bytes,
        most_bytes,
        gives_what_is_needed,
    }))
}

fn ring(slots: usize, bytes: usize, longest: usize) -> (Writer<Shared>, Reader<Shared>, Shared) {
    growing(slots, bytes, bytes, longest)
}

/// A ring whose window begins with a part of its data.
fn growing(slots: usize, bytes: usize, window: usize, longest: usize) -> (Writer<Shared>, Reader<Shared>, Shared) {
    let memory = memory(slots, bytes, window, bytes);
    (Writer::new(memory.clone(), longest), Reader::new(memory.clone(), longest), memory)
}

fn head(seed: usize) -> [u8; HEAD_BYTES] {
    std::array::from_fn(|i| (seed * 17 + i) as u8)
}

/// Puts a frame in if there is room; returns where its payload lies.
fn put(writer: &mut Writer<Shared>, seed: usize, payload: &[u8]) -> Option<usize> {
    let slot = writer.reserve(payload.len()).unwrap()?;
    *slot.head = head(seed);
    slot.payload.copy_from_slice(payload);
    let at = slot.payload.as_ptr() as usize;
    assert!(writer.commit());
    Some(at)
}

/// Takes a frame out if there is one, and checks that its head matches.
fn take(reader: &mut Reader<Shared>, seed: usize) -> Option<Vec<u8>> {
    let frame = reader.peek().unwrap()?;
    assert_eq!(*frame.head, head(seed));
    let payload = frame.payload.to_vec();
    assert!(reader.release());
    Some(payload)
}

fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (seed * 131 + i * 7) as u8).collect()
}

#[test]
fn twice_the_longest_payload_is_enough_for_every_sequence_of_lengths() {
    // Whatever the free rest at the end, a frame fits as soon as the reader has caught up.
    for longest in [1, 16, 17, 64, 65, 1000, 4096 + 256] {
        let (mut writer, mut reader, _) = ring(2, min_data_bytes(longest), longest);
        for (i, len) in (0..500).map(|i| (i * 37) % (longest + 1)).enumerate() {
            put(&mut writer, i, &pattern(i, len)).expect("the ring is empty");
            assert_eq!(take(&mut reader, i), Some(pattern(i, len)));
        }
    }
}

#[test]
fn a_tiny_payload_lies_in_the_slot_and_others_begin_on_a_line_of_their_own() {
    let (mut writer, mut reader, memory) = ring(4, 1 << 16, 4096);
    for (i, len) in [0, 1, TINY_BYTES, TINY_BYTES + 1, 64, 65, 1000].into_iter().enumerate() {
        let at = put(&mut writer, i, &pattern(i, len)).unwrap();
        let in_slots = at < memory.data() as usize;
        assert_eq!(in_slots, len <= TINY_BYTES);
        assert_eq!(at % if in_slots { 8 } else { LINE }, 0);
        take(&mut reader, i).unwrap();
    }
}

#[test]
fn as_many_frames_as_slots_are_under_way() {
    let (mut writer, mut reader, _) = ring(4, 1024, 100);
    for round in 0..3 {
        for i in 0..4 {
            assert!(put(&mut writer, round + i, &[1]).is_some());
        }
        assert!(put(&mut writer, 0, &[]).is_none());
        for i in 0..4 {
            assert!(take(&mut reader, round + i).is_some());
        }
        assert!(take(&mut reader, 0).is_none());
    }
}

#[test]
fn reserving_again_gives_up_the_first_place() {
    let (mut writer, mut reader, _) = ring(4, 1024, 100);
    writer.reserve(100).unwrap().unwrap().payload.fill(1);
    put(&mut writer, 5, &[2, 2, 2]).unwrap();
    assert!(!writer.commit());
    assert_eq!(take(&mut reader, 5).unwrap(), [2, 2, 2]);
    assert!(!reader.release());
    assert!(take(&mut reader, 6).is_none());
}

#[test]
fn wrong_counters_and_words_are_corruption_and_not_a_crash() {
    // In the first round over the slots, and in a later one.
    for frames in [0, 5u64] {
        let found = |word: u64| {
            let (mut writer, mut reader, memory) = ring(4, 1024, 100);
            for i in 0..frames as usize {
                put(&mut writer, i, &[3]).unwrap();
                take(&mut reader, i).unwrap();
            }
            memory.word(frames as usize % 4).store(word, Ordering::Release);
            reader.poll()
        };
        assert_eq!(found(word_of(frames, 100, 0)), Ok(true));
        assert_eq!(found(word_of(frames, 101, 0)), Err(Broken::Corrupt), "longer than any payload");
        assert_eq!(found(word_of(frames, MAX_PAYLOAD_BYTES, 0)), Err(Broken::Corrupt));
        assert_eq!(found(word_of(frames, 100, 1)), Err(Broken::Corrupt), "a window larger than the data");
        assert_eq!(found(word_of(frames + 1, 5, 0)), Err(Broken::Corrupt), "a frame out of turn");
        assert_eq!(found(u64::MAX), Err(Broken::Corrupt));
        assert_eq!(found(if frames == 0 { 0 } else { word_of(frames - 4, 1, 0) }), Ok(false), "the previous one");
    }

    for taken in [2, u64::MAX] {
        let (mut writer, _, memory) = ring(1, 1024, 100);
        put(&mut writer, 0, &[]).unwrap();
        memory.counters().taken.0.store(taken, Ordering::Release);
        assert_eq!(writer.reserve(1), Err(Broken::Corrupt), "more taken than put in was believed");
    }
}

#[test]
fn numbers_return_without_harm() {
    let (mut writer, mut reader, memory) = ring(4, 1024, 100);
    let start = u64::from(u32::MAX) - 8;
    (writer.count, writer.taken, reader.count) = (start, start, start);
    memory.counters().taken.0.store(start, Ordering::Release);
    for slot in 0..4 {
        let previous = start - 4 + (slot + 4 - start % 4) % 4;
        memory.word((previous % 4) as usize).store(word_of(previous, 1, 0), Ordering::Release);
    }
    for i in 0..20 {
        put(&mut writer, i, &pattern(i, 50)).unwrap();
        assert_eq!(take(&mut reader, i), Some(pattern(i, 50)));
        assert_eq!(take(&mut reader, i), None);
    }
}

proptest! {
    #[test]
    fn frames_arrive_whole_and_in_order(
        lens in proptest::collection::vec(prop_oneof![0usize..20, 0usize..700], 1..60),
        slots in 0u32..5,
        lines in 0usize..30,
        // Lines of the window at the beginning, and lines that the window can grow to.
        window in 1usize..60,
        most in 0usize..60,
        writes in proptest::collection::vec(any::<bool>(), 200),
    ) {
        let bytes = min_data_bytes(700) + lines * LINE;
        let window = (window * LINE).min(bytes);
        // The memory that the longest payload needs is granted; the rest may be refused.
        let memory = memory(1 << slots, bytes, window, most * LINE);
        let (mut writer, mut reader) = (Writer::new(memory.clone(), 700), Reader::new(memory, 700));
        let (mut sent, mut received) = (0, 0);
        let mut turns = writes.into_iter();
        while received < lens.len() {
            let write = turns.next().unwrap_or(received == sent);
            if write && sent < lens.len() {
                let fits = writer.would_fit(lens[sent]).unwrap();
                let put = put(&mut writer, sent, &pattern(sent, lens[sent]));
                // A sender that is refused sleeps until the reader has moved.
                prop_assert!(fits || put.is_none());
                if put.is_some() {
                    sent += 1;
                    continue;
                }
            }
            match take(&mut reader, received) {
                Some(payload) => {
                    prop_assert_eq!(payload, pattern(received, lens[received]));
                    received += 1;
                }
                None => prop_assert_eq!(sent, received),
            }
        }
    }
}

#[test]
fn a_ring_grows_when_there_is_no_room_and_the_reader_follows() {
    let (mut writer, mut reader, _) = growing(16, 16 * 1024, 256, 4096);
    assert_eq!(writer.window_bytes(), (256, 16 * 1024));
    put(&mut writer, 0, &pattern(0, 200)).unwrap();
    assert_eq!(writer.window_bytes().0, 256);
    // Behind the bytes in flight, in the new part.
    put(&mut writer, 1, &pattern(1, 700)).unwrap();
    assert_eq!(writer.window_bytes().0, 1024);
    put(&mut writer, 2, &pattern(2, 4096)).unwrap();
    assert_eq!(writer.window_bytes().0, 16 * 1024);
    for (seed, len) in [(0, 200), (1, 700), (2, 4096)] {
        assert_eq!(take(&mut reader, seed), Some(pattern(seed, len)));
    }
    // The next payloads wrap round the larger window.
    for i in 3..40 {
        put(&mut writer, i, &pattern(i, 3000)).unwrap();
        assert_eq!(take(&mut reader, i), Some(pattern(i, 3000)));
    }
}

#[test]
fn a_ring_does_not_grow_while_what_is_under_way_goes_round_its_end() {
    // Payloads of one line. The window holds `PAYLOADS_OF_A_LAP` of them.
    let (mut writer, mut reader, _) = growing(SLOTS, 64 * 1024, PAYLOADS_OF_A_LAP * LINE, 4096);
    (0..64).for_each(|i| assert!(put(&mut writer, i, &pattern(i, 50)).is_some()));
    (0..32).for_each(|i| assert_eq!(take(&mut reader, i), Some(pattern(i, 50))));
    put(&mut writer, 64, &pattern(64, 50)).unwrap();
    assert!(!writer.would_fit(2000).unwrap() && put(&mut writer, 65, &pattern(65, 2000)).is_none());
    assert_eq!(writer.window_bytes().0, PAYLOADS_OF_A_LAP * LINE);
    (32..65).for_each(|i| assert_eq!(take(&mut reader, i), Some(pattern(i, 50))));
    for (seed, len) in [(65, 2000), (66, 2000)] {
        assert!(writer.would_fit(len).unwrap());
        put(&mut writer, seed, &pattern(seed, len)).unwrap();
    }
    assert!(writer.would_fit(2000).unwrap());
    put(&mut writer, 67, &pattern(67, 2000)).unwrap();
    assert_eq!(writer.window_bytes().0, 4 * PAYLOADS_OF_A_LAP * LINE);
    (65..68).for_each(|i| assert_eq!(take(&mut reader, i), Some(pattern(i, 2000))));
}

#[test]
fn a_ring_that_holds_few_of_its_payloads_grows_although_there_is_room() {
    let most = 64 * 1024;
    let (mut writer, mut reader, _) = growing(16, most, 256, 4096);
    let mut pass = |count: usize, len: usize| {
        for i in 0..count {
            put(&mut writer, i, &pattern(i, len)).unwrap();
            assert_eq!(take(&mut reader, i), Some(pattern(i, len)));
        }
        writer.window_bytes().0
    };
    // At most one payload is in flight at any time.
    assert_eq!(pass(1000, 64), PAYLOADS_OF_A_LAP * 64);
    assert_eq!(pass(1000, TINY_BYTES), PAYLOADS_OF_A_LAP * 64, "tiny ones take none of it");
    assert_eq!(pass(1000, 256), PAYLOADS_OF_A_LAP * 256);
    assert_eq!(pass(1000, 4096), most);
}

#[test]
fn a_ring_that_gets_no_more_memory_goes_on_as_it_is_and_asks_again_much_later() {
    let memory = memory(4, 4096, 256, 256);
    let (mut writer, mut reader) = (Writer::new(memory.clone(), 100), Reader::new(memory.clone(), 100));
    for i in 0..20 {
        put(&mut writer, i, &pattern(i, 100)).unwrap();
        put(&mut writer, i, &pattern(i, 100)).unwrap();
        assert!(put(&mut writer, i, &pattern(i, 100)).is_none());
        // Otherwise a sender that waits for room would not sleep.
        assert!(!writer.would_fit(100).unwrap());
        take(&mut reader, i).unwrap();
        take(&mut reader, i).unwrap();
    }
    assert_eq!(writer.window_bytes(), (256, 4096));
    assert_eq!(writer.refused_at, Some(2), "it was asked once");
    for i in 0..FRAMES_TO_ASK_AGAIN as usize {
        put(&mut writer, i, &pattern(i, 100)).unwrap();
        take(&mut reader, i).unwrap();
    }
    assert!(writer.refused_at > Some(FRAMES_TO_ASK_AGAIN), "and again");
    assert_eq!(writer.window_bytes(), (256, 4096));
}

#[test]
fn payloads_that_have_room_need_no_memory_that_is_scarce() {
    // First no further memory is available, then exactly as much as is needed.
    for gives in [false, true] {
        let memory = heap(64, 256 << 10, 16 << 10, 0, gives);
        let (mut writer, mut reader) = (Writer::new(memory.clone(), 64 << 10), Reader::new(memory, 64 << 10));
        for i in 0..1000 {
            assert!(put(&mut writer, i, &pattern(i, 1200)).is_some(), "frame {i}");
            assert_eq!(take(&mut reader, i), Some(pattern(i, 1200)));
        }
        assert_eq!(writer.window_bytes().0, 16 << 10, "it is a wish, and was refused");
        if gives {
            // A size that was refused as a wish is given when the longest payload needs it.
            put(&mut writer, 0, &pattern(0, 64 << 10)).unwrap();
            assert_eq!(take(&mut reader, 0), Some(pattern(0, 64 << 10)));
        }
    }
}

#[test]
fn the_longest_payload_goes_through_a_ring_that_gets_no_more_memory_than_it_needs() {
    // Twice the longest, because otherwise a position in the second half would leave no room for it.
    let (bytes, longest) = (16 * 4096, 4096);
    let memory = memory(4, bytes, 1024, 0);
    let (mut writer, mut reader) = (Writer::new(memory.clone(), longest), Reader::new(memory, longest));
    for (i, len) in [10, 600, 3000, 4096, 4096, 200, 4096].into_iter().enumerate() {
        put(&mut writer, i, &pattern(i, len)).unwrap();
        assert_eq!(take(&mut reader, i), Some(pattern(i, len)));
    }
    assert!(writer.window_bytes().0 < bytes);
}

#[test]
fn a_ring_that_does_not_get_what_it_needs_is_an_error() {
    let memory = heap(4, 16 * 4096, 1024, 0, false);
    let mut writer = Writer::new(memory, 4096);
    put(&mut writer, 0, &pattern(0, 900)).unwrap();
    assert_eq!(writer.reserve(4096), Err(Broken::Exhausted));
}

#[test]
fn two_threads_exchange_frames_through_a_small_ring() {
    const FRAMES: usize = 20_000;
    let (mut writer, mut reader, memory) = growing(8, 4 * min_data_bytes(500), min_data_bytes(500) / 4, 500);
    let payload = |i: usize| vec![i as u8; (i * 97) % 501];
    let sender = std::thread::spawn(move || {
        for i in 0..FRAMES {
            while put(&mut writer, i, &payload(i)).is_none() {
                std::thread::yield_now();
            }
        }
    });
    for i in 0..FRAMES {
        let received = loop {
            match take(&mut reader, i) {
                Some(received) => break received,
                None => std::thread::yield_now(),
            }
        };
        assert_eq!(received, payload(i), "frame {i}");
    }
    sender.join().unwrap();
    // The memory's owner is alive here, so its lines are still allocated.
    assert_eq!(line_count(&memory), 8 + 4 * min_data_bytes(500) / LINE);
}

fn line_count(memory: &Shared) -> usize {
    // SAFETY: the sender has been joined and the reader is done, so no other reference to the lines is in use.
    unsafe { (*memory.0.lines.get()).len() }
}

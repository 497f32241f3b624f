//! A collectives library for ranks in this process, offered like the transport `mpi`. The last rank to arrive does the
//! work of all.
//!
//! Owns the meeting of ranks and the arithmetic. Links over its transport are pipes. Read [`Library`] first.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use accl_transport::CollectiveV1;
use accl_transport::collectives::{CollectiveCall, CollectiveGroup, Collectives, Opened};
use accl_transport::{Transport, register};
use accl_wire::table::{collectives, element_types, ops};
use parking_lot::Mutex;

use super::pipe;

/// The library of this process, and switches and counters for tests.
#[derive(Default)]
pub struct Library {
    groups: Mutex<HashMap<u64, Arc<Meeting>>>,
    /// Whether collectives fail when they are polled.
    pub fails: AtomicBool,
    /// Whether the library refuses to begin collectives.
    pub refuses: AtomicBool,
    /// Whether collectives never end.
    pub is_stuck: AtomicBool,
    /// Whether groups are left to the host.
    pub leaves_to_host: AtomicBool,
    /// Number of collectives that ranks have begun, over all groups.
    pub begun: AtomicU64,
    /// Number of collectives that ranks have abandoned.
    pub abandoned: AtomicU64,
    /// Number of ranks that have opened a group.
    pub opened: AtomicU64,
    /// Number of ranks that have closed a group.
    pub closed: AtomicU64,
    /// Number of ranks that have closed a group that had failed.
    pub closed_after_failure: AtomicU64,
}

/// Ranks of a group.
struct Meeting {
    world: usize,
    /// Contributions by sequence number of the collective. Entries stay after the collective is done.
    calls: Mutex<HashMap<u64, Coming>>,
}

#[derive(Default)]
struct Coming {
    parts: Vec<(usize, Part)>,
    is_done: bool,
}

#[derive(Clone, Copy)]
struct Part(CollectiveV1);

// SAFETY: the memory stays valid until the collective has ended; if the collective was abandoned, its ranks keep the
// memory. Only the last rank to arrive, or `Library::go_on`, accesses it, under the lock on `calls`.
unsafe impl Send for Part {}

/// Returns the library. The first call registers it as the transport `mpi`. All tests of a process share it.
///
/// # Panics
/// Panics if a transport with this name exists already.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<&'static Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let library: &'static Library = Box::leak(Box::default());
        let row = Transport { name: "mpi", collectives: Some(library), ..pipe::ROW };
        register(row).unwrap_or_else(|why| panic!("{why}"));
        library
    })
}

impl Library {
    /// Does every collective for which all ranks have arrived and which is not done, like a library that completes work
    /// after it was abandoned.
    pub fn go_on(&self) {
        for meeting in self.groups.lock().values() {
            for coming in meeting.calls.lock().values_mut() {
                if !coming.is_done && coming.parts.len() == meeting.world {
                    coming.do_it();
                }
            }
        }
    }
}

impl Coming {
    fn do_it(&mut self) {
        self.parts.sort_unstable_by_key(|(rank, _)| *rank);
        let parts: Vec<CollectiveV1> = self.parts.iter().map(|(_, part)| part.0).collect();
        perform(&parts);
        self.is_done = true;
    }
}

impl Collectives for Library {
    fn address(&self) -> Result<Vec<u8>, String> {
        Ok(b"here".to_vec())
    }

    fn open(&self, rank: u32, addresses: &[Vec<u8>], key: u64) -> Result<Opened, String> {
        if let Some(other) = addresses.iter().position(|address| address != b"here") {
            return Err(format!("rank {other} is in another process"));
        }
        if self.leaves_to_host.load(Ordering::Relaxed) {
            return Ok(Opened::LeftToHost("it was set to".to_owned()));
        }
        let world = addresses.len();
        let make = || Arc::new(Meeting { world, calls: Mutex::default() });
        let meeting = self.groups.lock().entry(key).or_insert_with(make).clone();
        let library = library();
        library.opened.fetch_add(1, Ordering::Relaxed);
        Ok(Opened::Group(Box::new(LibraryGroup { library, meeting, rank: rank as usize, next: 0 })))
    }
}

struct LibraryGroup {
    library: &'static Library,
    meeting: Arc<Meeting>,
    rank: usize,
    next: u64,
}

impl CollectiveGroup for LibraryGroup {
    unsafe fn start(&mut self, collective: &CollectiveV1) -> Result<Box<dyn CollectiveCall>, String> {
        if self.library.refuses.load(Ordering::Relaxed) {
            return Err("it was set to refuse".to_owned());
        }
        let number = self.next;
        self.next += 1;
        self.library.begun.fetch_add(1, Ordering::Relaxed);
        let mut calls = self.meeting.calls.lock();
        let coming = calls.entry(number).or_default();
        coming.parts.push((self.rank, Part(*collective)));
        if coming.parts.len() == self.meeting.world && !self.library.is_stuck.load(Ordering::Relaxed) {
            coming.do_it();
        }
        Ok(Box::new(LibraryCall { library: self.library, meeting: self.meeting.clone(), number }))
    }

    fn close(self: Box<Self>, has_failed: bool) {
        self.library.closed_after_failure.fetch_add(u64::from(has_failed), Ordering::Relaxed);
        self.library.closed.fetch_add(1, Ordering::Relaxed);
    }
}

struct LibraryCall {
    library: &'static Library,
    meeting: Arc<Meeting>,
    number: u64,
}

impl CollectiveCall for LibraryCall {
    fn test(&mut self) -> Result<bool, String> {
        if self.library.fails.load(Ordering::Relaxed) {
            return Err("it was set to fail".to_owned());
        }
        Ok(self.meeting.calls.lock().get(&self.number).is_some_and(|coming| coming.is_done))
    }

    fn abandon(self: Box<Self>) {
        self.library.abandoned.fetch_add(1, Ordering::Relaxed);
    }
}

fn element_bytes(element_type: u32) -> usize {
    match element_type {
        element_types::BYTES | element_types::INT8 | element_types::UINT8 => 1,
        element_types::INT32 | element_types::UINT32 | element_types::FLOAT => 4,
        element_types::INT64 | element_types::UINT64 | element_types::DOUBLE | element_types::FLOAT_COMPLEX => 8,
        element_types::DOUBLE_COMPLEX => 16,
        other => panic!("there is no element type {other}"),
    }
}

/// Does a collective with the contributions of all ranks, in rank order.
fn perform(parts: &[CollectiveV1]) {
    let what = parts[0];
    // MPI requires that all_reduce and all_gather are in place on all ranks or on none.
    let in_place = |part: &CollectiveV1| {
        matches!(part.collective, collectives::ALL_REDUCE | collectives::ALL_GATHER) && part.input.is_null()
    };
    let alike =
        |part: &CollectiveV1| (part.collective, part.element_type, part.op, part.root, part.count, in_place(part));
    assert!(parts.iter().all(|part| alike(part) == alike(&what)), "ranks issued different collectives: {parts:?}");
    let (root, world) = (what.root as usize, parts.len());
    let block = what.count as usize * element_bytes(what.element_type);
    // Contributions are copied first, because results may overwrite them.
    let contribution = |rank: usize, blocks: usize, own: usize| {
        let part = parts[rank];
        let from = match part.input.is_null() {
            true => part.output.cast_const().cast::<u8>().wrapping_add(own * block),
            false => part.input.cast(),
        };
        // SAFETY: a rank's `input`, or `output` if it is in place, holds the blocks that the collective reads, and
        // stays valid until its end.
        unsafe { std::slice::from_raw_parts(from, blocks * block) }.to_vec()
    };
    let give = |rank: usize, bytes: &[u8]| {
        // SAFETY: a rank's `output` has room for its results, only this thread accesses it, and it stays valid until
        // the end.
        unsafe { bytes.as_ptr().copy_to_nonoverlapping(parts[rank].output.cast(), bytes.len()) };
    };
    let reduced = |blocks: usize| {
        let mut sum = contribution(0, blocks, 0);
        (1..world).for_each(|rank| combine(&mut sum, &contribution(rank, blocks, 0), what.element_type, what.op));
        sum
    };
    match what.collective {
        collectives::BROADCAST => {
            let bytes = contribution(root, 1, 0);
            (0..world).filter(|&rank| rank != root).for_each(|rank| give(rank, &bytes));
        }
        collectives::ALL_REDUCE => {
            let bytes = reduced(1);
            (0..world).for_each(|rank| give(rank, &bytes));
        }
        collectives::REDUCE => give(root, &reduced(1)),
        collectives::REDUCE_SCATTER => {
            let bytes = reduced(world);
            (0..world).for_each(|rank| give(rank, &bytes[rank * block..][..block]));
        }
        collectives::ALL_GATHER => {
            let bytes: Vec<u8> = (0..world).flat_map(|rank| contribution(rank, 1, rank)).collect();
            (0..world).for_each(|rank| give(rank, &bytes));
        }
        collectives::GATHER => {
            let bytes: Vec<u8> = (0..world).flat_map(|rank| contribution(rank, 1, rank)).collect();
            give(root, &bytes);
        }
        collectives::SCATTER => {
            let bytes = contribution(root, world, 0);
            (0..world).for_each(|rank| give(rank, &bytes[rank * block..][..block]));
        }
        collectives::ALL_TO_ALL => {
            let all: Vec<Vec<u8>> = (0..world).map(|rank| contribution(rank, world, 0)).collect();
            for to in 0..world {
                let bytes: Vec<u8> = all.iter().flat_map(|from| from[to * block..][..block].to_vec()).collect();
                give(to, &bytes);
            }
        }
        other => panic!("there is no collective {other}"),
    }
}

/// Reduces another rank's contribution into `into`, by sum or maximum.
fn combine(into: &mut [u8], other: &[u8], element_type: u32, op: u32) {
    macro_rules! each {
        ($ty:ty) => {
            for (into, other) in into.chunks_exact_mut(size_of::<$ty>()).zip(other.chunks_exact(size_of::<$ty>())) {
                let [a, b] = [&*into, other].map(|bytes| <$ty>::from_ne_bytes(bytes.try_into().unwrap_or_default()));
                let combined = match op {
                    ops::SUM => a + b,
                    ops::MAX => {
                        if a > b {
                            a
                        } else {
                            b
                        }
                    }
                    other => panic!("operator {other} is not supported in tests"),
                };
                into.copy_from_slice(&combined.to_ne_bytes());
            }
        };
    }
    match element_type {
        element_types::INT32 => each!(i32),
        element_types::INT64 => each!(i64),
        element_types::FLOAT => each!(f32),
        element_types::DOUBLE => each!(f64),
        other => panic!("element type {other} is not supported in tests"),
    }
}

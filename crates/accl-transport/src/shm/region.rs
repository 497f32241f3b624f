//! The memory of one link: a page of counters and flags, then slots and data of a ring for each direction.
//!
//! Owns the layout, and how much of the memory is allocated. If memory is short, creating the region is an error, or a
//! ring does not grow.
//! At the beginning there is as much as small messages need: see [`Direction::grow`](crate::ring::Memory::grow).

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::budget::{Budget, Reserved};
use crate::fork::Fd;
use crate::mapping::{Mapping, PAGE};
use crate::ring::arming::SideState;
use crate::ring::{Apart, Counters, Demand, LINE, Memory, SLOTS, min_data_bytes};

/// The first page of a region. All zero is its initial state.
#[repr(C)]
#[derive(Debug)]
struct Control {
    directions: [Counters; 2],
    sides: [Apart<SideState>; 2],
}

const _: () = assert!(size_of::<Control>() <= PAGE);

/// Bytes of a direction's slots.
const SLOT_BYTES: usize = SLOTS * LINE;
const _: () = assert!(SLOT_BYTES.is_multiple_of(PAGE));

/// Bytes of a direction's data that are allocated from the beginning; more are added with use.
const WINDOW_BYTES: usize = 16 << 10;

/// Returns the bytes of a direction's data, rounded so that it fills pages and the longest payload always fits.
pub(crate) fn ring_bytes_for(wanted: u64, max_payload_bytes: usize) -> usize {
    usize::try_from(wanted).unwrap_or(usize::MAX / 4).max(min_data_bytes(max_payload_bytes)).next_multiple_of(PAGE)
}

/// Returns the bytes of the whole region.
pub(crate) fn region_bytes(ring_bytes: usize) -> usize {
    PAGE + 2 * (SLOT_BYTES + ring_bytes)
}

/// Returns the offsets of counters, flags, slots and data of the two directions, for a snapshot.
#[cfg(all(test, not(accl_loom)))]
pub(super) fn places(ring_bytes: usize) -> [[usize; 4]; 2] {
    let (counters, sides) = (std::mem::offset_of!(Control, directions), std::mem::offset_of!(Control, sides));
    [0, 1].map(|direction| {
        let slots = PAGE + direction * SLOT_BYTES;
        let data = PAGE + 2 * SLOT_BYTES + direction * ring_bytes;
        [counters + direction * size_of::<Counters>(), sides + direction * size_of::<Apart<SideState>>(), slots, data]
    })
}

/// A mapped region.
#[derive(Debug)]
pub(crate) struct Region {
    memory: Mapping,
    ring_bytes: usize,
    /// Answers how much memory the machine has left.
    budget: Budget,
    /// Counts towards the limit of the process that created the region; `None` in the other process.
    _reserved: Option<Reserved>,
}

impl Region {
    /// Creates the memory and returns it with its descriptor.
    ///
    /// # Errors
    /// A clause that names what the system refused.
    pub(crate) fn create(ring_bytes: usize, budget: &Budget) -> Result<(Region, Fd), String> {
        let reserved = budget.reserve(region_bytes(ring_bytes) as u64)?;
        let (memory, fd) = Mapping::create("accl-ring", region_bytes(ring_bytes))?;
        let region = Region { memory, ring_bytes, budget: budget.clone(), _reserved: Some(reserved) };
        region.fill_windows(fd.as_fd())?;
        Ok((region, fd))
    }

    /// Maps memory that a peer created.
    ///
    /// # Errors
    /// A clause that names what does not fit or what the system refused.
    pub(crate) fn open(fd: BorrowedFd<'_>, ring_bytes: usize, budget: &Budget) -> Result<Region, String> {
        let memory = Mapping::open(fd, region_bytes(ring_bytes))?;
        let region = Region { memory, ring_bytes, budget: budget.clone(), _reserved: None };
        region.fill_windows(fd)?;
        Ok(region)
    }

    /// Allocates the memory that is used from the beginning.
    fn fill_windows(&self, fd: BorrowedFd<'_>) -> Result<(), String> {
        let first = self.data_at(0) + self.window_bytes();
        let filled = self
            .memory
            .fill(0, first)
            .and_then(|()| self.memory.fill(self.data_at(1), self.data_at(1) + self.window_bytes()));
        match filled {
            Ok(()) => Ok(()),
            // Kernels before 5.14 cannot do this, so the whole region is allocated now.
            Err(Errno::INVAL) => self.memory.fill_all(fd),
            Err(why) => Err(format!("cannot allocate {} bytes of shared memory: {why}", region_bytes(self.ring_bytes))),
        }
    }

    /// Offset in the region at which a direction's data begins.
    fn data_at(&self, direction: usize) -> usize {
        PAGE + 2 * SLOT_BYTES + direction * self.ring_bytes
    }

    /// Bytes of a direction's data that are allocated from the beginning.
    fn window_bytes(&self) -> usize {
        WINDOW_BYTES.min(self.ring_bytes)
    }

    /// Bytes of one direction's data.
    pub(crate) fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }

    /// Returns the flags of side 0 (the creator of the region) or side 1.
    pub(crate) fn side(&self, side: usize) -> &SideState {
        &self.control().sides[side].0
    }

    fn control(&self) -> &Control {
        // SAFETY: the first page is mapped, aligned, valid in every bit pattern, and holds only atomics.
        unsafe { self.memory.base().cast::<Control>().as_ref() }
    }
}

/// One direction of a region; side `direction` writes it.
#[derive(Clone, Debug)]
pub(crate) struct Direction {
    region: Arc<Region>,
    direction: usize,
}

impl Direction {
    pub(crate) fn new(region: &Arc<Region>, direction: usize) -> Direction {
        assert!(direction < 2, "a region has two directions");
        Direction { region: Arc::clone(region), direction }
    }
}

// SAFETY: slots and data lie inside the mapping after the first page, page-aligned, and their sizes are multiples of a
// page. The mapping lives as long as the `Arc`. The handshake gives each side one writer and one reader, of different
// directions.
unsafe impl Memory for Direction {
    #[inline]
    fn counters(&self) -> &Counters {
        &self.region.control().directions[self.direction]
    }
    #[inline]
    fn slots(&self) -> *mut u8 {
        // SAFETY: the slots of both directions lie inside the mapping: see `region_bytes`.
        unsafe { self.region.memory.base().as_ptr().add(PAGE + self.direction * SLOT_BYTES) }
    }
    #[inline]
    fn data(&self) -> *mut u8 {
        // SAFETY: the data of both directions lies inside the mapping: see `region_bytes`.
        unsafe { self.region.memory.base().as_ptr().add(self.region.data_at(self.direction)) }
    }
    #[inline]
    fn data_bytes(&self) -> usize {
        self.region.ring_bytes
    }
    fn window_bytes(&self) -> usize {
        self.region.window_bytes()
    }
    fn grow(&self, from: usize, to: usize, demand: Demand) -> bool {
        let at = self.region.data_at(self.direction);
        // Growth that is only wished for leaves some memory to others.
        let may = demand == Demand::Needed || self.region.budget.has_room((to - from) as u64);
        may && match self.region.memory.fill(at + from, at + to) {
            Ok(()) => true,
            // A kernel that cannot allocate later: all memory was allocated when it was mapped.
            Err(why) => why == Errno::INVAL,
        }
    }
}

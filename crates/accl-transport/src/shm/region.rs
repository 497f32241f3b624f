//! The memory of one link: a page of counters and flags, then slots and data of a ring for each direction.
//!
//! Owns creating, checking, mapping and unmapping. The memory is there before it is used, so that shortage is an error here, or a
//! ring that does not grow, and never a SIGBUS; and it is sealed, so that no side can shrink it under the other. At the beginning
//! there is as much as small messages need: see [`Direction::grow`](crate::ring::Memory::grow).

use std::os::fd::{AsFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::Resource;

use super::budget::{Budget, Reserved};
use crate::fork::Fd;
use crate::ring::park::SideState;
use crate::ring::{Apart, Counters, Demand, LINE, Memory, SLOTS, min_data_bytes};

pub(super) const PAGE: usize = 4096;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// The first page. All zero is the state at the start.
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

/// Bytes of a direction's data that are there from the beginning; more come with use.
const WINDOW_BYTES: usize = 16 << 10;

/// Bytes of a direction's data, rounded so that it fills pages and the longest payload always fits.
pub(crate) fn ring_bytes_for(wanted: u64, max_payload_bytes: usize) -> usize {
    usize::try_from(wanted).unwrap_or(usize::MAX / 4).max(min_data_bytes(max_payload_bytes)).next_multiple_of(PAGE)
}

/// Bytes of the whole region.
pub(crate) fn region_bytes(ring_bytes: usize) -> usize {
    PAGE + 2 * (SLOT_BYTES + ring_bytes)
}

/// A mapped region.
#[derive(Debug)]
pub(crate) struct Region {
    base: NonNull<u8>,
    ring_bytes: usize,
    /// What the machine has left.
    budget: Budget,
    /// Counts towards the limit of the process that created the region.
    _reserved: Option<Reserved>,
}

// SAFETY: the pointer is to memory that is shared on purpose; the ring protocol governs all access to it.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Creates the memory and returns it with its descriptor.
    ///
    /// # Errors
    /// A clause that says what the system refused.
    pub(crate) fn create(ring_bytes: usize, budget: &Budget) -> Result<(Region, Fd), String> {
        let reserved = budget.reserve(region_bytes(ring_bytes) as u64)?;
        let len = region_bytes(ring_bytes);
        check_file_size_limit(len)?;
        let fd = Fd::adopt(memfd).map_err(|why| format!("memfd_create: {why}"))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(|why| format!("ftruncate to {len} bytes: {why}"))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(|why| format!("sealing: {why}"))?;
        Ok((Region::map(fd.as_fd(), ring_bytes, budget, Some(reserved))?, fd))
    }

    /// Maps what a peer created.
    ///
    /// # Errors
    /// A clause that says what does not fit or what the system refused.
    pub(crate) fn open(fd: BorrowedFd<'_>, ring_bytes: usize, budget: &Budget) -> Result<Region, String> {
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(|why| format!("no memory that can be sealed: {why}"))?;
        if !seals.contains(SEALS) {
            return Err("the memory is not sealed".to_owned());
        }
        let stat = rustix::fs::fstat(fd).map_err(|why| format!("fstat: {why}"))?;
        if u64::try_from(stat.st_size) != Ok(region_bytes(ring_bytes) as u64) {
            return Err(format!("the memory has {} bytes, not {}", stat.st_size, region_bytes(ring_bytes)));
        }
        Region::map(fd, ring_bytes, budget, None)
    }

    fn map(
        fd: BorrowedFd<'_>,
        ring_bytes: usize,
        budget: &Budget,
        reserved: Option<Reserved>,
    ) -> Result<Region, String> {
        let len = region_bytes(ring_bytes);
        // SAFETY: a new mapping at a place of the kernel's choice. Its length is sealed; what is touched of it was populated.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
        }
        .map_err(|why| format!("mmap of {len} bytes: {why}"))?;
        let base = NonNull::new(base.cast()).ok_or("mmap gave no address")?;
        let region = Region { base, ring_bytes, budget: budget.clone(), _reserved: reserved };
        let first = region.data_at(0) + region.window_bytes();
        let populated = region
            .populate(0, first)
            .and_then(|()| region.populate(region.data_at(1), region.data_at(1) + region.window_bytes()));
        match populated {
            Ok(()) => {}
            // A kernel before 5.14: all that there will ever be.
            Err(Errno::INVAL) => {
                rustix::io::retry_on_intr(|| rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, len as u64))
                    .map_err(|why| format!("fallocate of {len} bytes: {why}"))?
            }
            Err(why) => return Err(format!("{len} bytes of shared memory: {why}")),
        }
        Ok(region)
    }

    /// Where a direction's data begin.
    fn data_at(&self, direction: usize) -> usize {
        PAGE + 2 * SLOT_BYTES + direction * self.ring_bytes
    }

    /// Bytes of a direction's data that are there from the beginning.
    fn window_bytes(&self) -> usize {
        WINDOW_BYTES.min(self.ring_bytes)
    }

    /// Has the kernel provide memory for a part of the mapping, in whole pages.
    fn populate(&self, from: usize, to: usize) -> Result<(), Errno> {
        let from = from / PAGE * PAGE;
        let to = to.next_multiple_of(PAGE).min(region_bytes(self.ring_bytes));
        // SAFETY: the part lies inside the mapping, and populating changes no byte of it.
        rustix::io::retry_on_intr(|| unsafe {
            rustix::mm::madvise(self.base.as_ptr().add(from).cast(), to - from, Advice::LinuxPopulateWrite)
        })
    }

    /// Bytes of one direction's data.
    pub(crate) fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }

    /// The flags of side 0 (who created the region) or 1.
    pub(crate) fn side(&self, side: usize) -> &SideState {
        &self.control().sides[side].0
    }

    fn control(&self) -> &Control {
        // SAFETY: the first page is mapped, aligned, valid in every bit pattern, and holds only atomics.
        unsafe { self.base.cast::<Control>().as_ref() }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `map` with this length; nobody refers to it any more, since every user holds
        // an `Arc` of the region. A forked child has its own copy of the mapping and unmaps that.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), region_bytes(self.ring_bytes)) };
    }
}

/// One direction of a region: the one that side `direction` writes.
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

// SAFETY: slots and data lie inside the mapping behind the first page, page-aligned, their sizes multiples of a page;
// the mapping lives as long as the `Arc`. The handshake gives each side one writer and one reader, of different
// directions.
unsafe impl Memory for Direction {
    #[inline]
    fn counters(&self) -> &Counters {
        &self.region.control().directions[self.direction]
    }
    #[inline]
    fn slots(&self) -> *mut u8 {
        // SAFETY: inside the mapping: see `region_bytes`.
        unsafe { self.region.base.as_ptr().add(PAGE + self.direction * SLOT_BYTES) }
    }
    #[inline]
    fn data(&self) -> *mut u8 {
        // SAFETY: as above.
        unsafe { self.region.base.as_ptr().add(self.region.data_at(self.direction)) }
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
        // What can be done without leaves some memory to others.
        let may = demand == Demand::Needed || self.region.budget.has_room((to - from) as u64);
        may && match self.region.populate(at + from, at + to) {
            Ok(()) => true,
            // A kernel that cannot: all was there when the memory was mapped.
            Err(why) => why == Errno::INVAL,
        }
    }
}

fn memfd() -> Result<std::os::fd::OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Without NOEXEC_SEAL newer kernels complain in their log; older ones (before 6.3) do not know it.
    match rustix::fs::memfd_create("accl-ring", flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => rustix::fs::memfd_create("accl-ring", flags),
        other => other,
    }
}

/// Growing a file beyond `ulimit -f` would not fail but kill the process by SIGXFSZ.
fn check_file_size_limit(len: usize) -> Result<(), String> {
    match rustix::process::getrlimit(Resource::Fsize).current {
        Some(limit) if limit < len as u64 => Err(format!("`ulimit -f` allows {limit} of {len} bytes")),
        Some(_) | None => Ok(()),
    }
}

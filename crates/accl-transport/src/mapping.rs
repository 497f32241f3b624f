//! Memory that processes share: a sealed memfd, mapped.
//!
//! Owns creating, checking, mapping, filling and unmapping.
//! Memory is allocated before it is used, so that shortage is an error and never a SIGBUS. Its size is sealed, so that
//! no side can shrink it under the other.
//! Other modules decide what lies in the memory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::Resource;

use crate::fork::Fd;

pub(crate) const PAGE: usize = 4096;
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Shared memory, mapped at an address of its own in this process.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the pointer refers to memory that is shared on purpose. The types that lie there govern all access to it.
unsafe impl Send for Mapping {}
// SAFETY: shared references give out only the address. The types that lie there govern all access to the memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Creates `len` bytes, a multiple of [`PAGE`], all zero, and returns them with their descriptor. No byte may be
    /// touched before it was filled.
    ///
    /// # Errors
    /// A clause that names what the system refused.
    pub(crate) fn create(name: &str, len: usize) -> Result<(Mapping, Fd), String> {
        check_file_size_limit(len)?;
        let fd = Fd::adopt(|| memfd(name)).map_err(|why| format!("memfd_create: {why}"))?;
        rustix::fs::ftruncate(&fd, len as u64).map_err(|why| format!("ftruncate to {len} bytes: {why}"))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(|why| format!("sealing: {why}"))?;
        Ok((Mapping::map(fd.as_fd(), len)?, fd))
    }

    /// Maps memory that a peer created.
    ///
    /// # Errors
    /// A clause that names what does not fit or what the system refused.
    pub(crate) fn open(fd: BorrowedFd<'_>, len: usize) -> Result<Mapping, String> {
        let seals =
            rustix::fs::fcntl_get_seals(fd).map_err(|why| format!("cannot read the seals of the memory: {why}"))?;
        if !seals.contains(SEALS) {
            return Err("the memory is not sealed".to_owned());
        }
        let stat = rustix::fs::fstat(fd).map_err(|why| format!("fstat: {why}"))?;
        if u64::try_from(stat.st_size) != Ok(len as u64) {
            return Err(format!("the memory has {} bytes, not {len}", stat.st_size));
        }
        Mapping::map(fd, len)
    }

    fn map(fd: BorrowedFd<'_>, len: usize) -> Result<Mapping, String> {
        // SAFETY: a new mapping at an address of the kernel's choice. Its length is sealed, and every byte is filled
        // before it is touched.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
        }
        .map_err(|why| format!("mmap of {len} bytes: {why}"))?;
        let base = NonNull::new(base.cast()).ok_or("mmap returned no address")?;
        Ok(Mapping { base, len })
    }

    /// Returns the address of the mapping, page-aligned, valid as long as `self` lives.
    #[inline]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Lets the kernel allocate the bytes from offset `from` to offset `to`, in whole pages.
    ///
    /// # Errors
    /// `INVAL` on kernels before 5.14, which can only fill the whole memory ([`Mapping::fill_all`]). Any other error
    /// means that there is no memory.
    pub(crate) fn fill(&self, from: usize, to: usize) -> Result<(), Errno> {
        let from = from / PAGE * PAGE;
        let to = to.next_multiple_of(PAGE).min(self.len);
        // SAFETY: the part lies inside the mapping, and populating changes no byte of it.
        rustix::io::retry_on_intr(|| unsafe {
            rustix::mm::madvise(self.base.as_ptr().add(from).cast(), to - from, Advice::LinuxPopulateWrite)
        })
    }

    /// Lets the kernel allocate all of the memory.
    ///
    /// # Errors
    /// A clause that names what the system refused.
    pub(crate) fn fill_all(&self, fd: BorrowedFd<'_>) -> Result<(), String> {
        let len = self.len;
        rustix::io::retry_on_intr(|| rustix::fs::fallocate(fd, FallocateFlags::empty(), 0, len as u64))
            .map_err(|why| format!("fallocate of {len} bytes: {why}"))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `map` with this length. Nothing refers to it any more, since every user holds
        // `self`. A forked child has its own copy of the mapping and unmaps that.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn memfd(name: &str) -> Result<OwnedFd, Errno> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Without NOEXEC_SEAL newer kernels complain in their log; older ones (before 6.3) do not know the flag.
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        other => other,
    }
}

/// Checks `ulimit -f`: growing a file beyond it would not fail but kill the process by SIGXFSZ.
fn check_file_size_limit(len: usize) -> Result<(), String> {
    match rustix::process::getrlimit(Resource::Fsize).current {
        Some(limit) if limit < len as u64 => Err(format!("`ulimit -f` allows {limit} of {len} bytes")),
        Some(_) | None => Ok(()),
    }
}

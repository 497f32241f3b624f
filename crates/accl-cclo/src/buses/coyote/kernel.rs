//! System calls to the kernel driver of Coyote v1.
//!
//! Owns every mapping, so that no access lies outside of one. Also owns the lock on the device's file: the kernel driver admits any number of
//! processes, and the lock keeps this project's drivers apart. The unsafe code of the bus is here: mapped registers, huge pages, and requests whose
//! words the kernel driver writes to.

use std::ffi::c_void;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null_mut};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::ioctl::{Direction, Ioctl, IoctlOutput, Opcode, opcode};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use super::calls::{Calls, DriverRequest, MAGIC, MAX_WORDS, REGISTER_WORDS};

/// Offset of the user's control registers in the device file.
const REGISTERS_AT: u64 = 0;

/// An open region of a card.
pub(super) struct Kernel {
    path: PathBuf,
    contexts: Vec<File>,
    /// Mapped control registers, valid for the lifetime of this value.
    registers: NonNull<u64>,
    /// Address and length of each buffer.
    pages: Vec<(u64, usize)>,
}

// SAFETY: this value alone owns the mapping that `registers` points to, and none of its fields is bound to a thread.
unsafe impl Send for Kernel {}

impl Kernel {
    pub(super) fn open(devices: &Path, region: u32) -> io::Result<Self> {
        Self::at(devices.join(format!("fpga{region}")))
    }

    fn at(path: PathBuf) -> io::Result<Self> {
        let file = device(&path)?;
        let (all, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the kernel chooses the address of a new mapping, so the mapping overlaps no other.
        let mapped = unsafe { mmap(null_mut(), REGISTER_WORDS * size_of::<u64>(), all, flags, &file, REGISTERS_AT) }?;
        let registers =
            NonNull::new(mapped.cast()).ok_or_else(|| io::Error::other("the registers are mapped at address zero"))?;
        Ok(Self { path, contexts: vec![file], registers, pages: Vec::new() })
    }

    /// Returns a pointer to `length` bytes at `address`, if they lie within one buffer.
    fn bytes_at(&self, address: u64, length: usize) -> io::Result<*mut u8> {
        let is_in = |(begin, bytes): &&(u64, usize)| {
            address.checked_sub(*begin).is_some_and(|offset| {
                usize::try_from(offset).is_ok_and(|offset| offset.checked_add(length).is_some_and(|end| end <= *bytes))
            })
        };
        let found = self.pages.iter().find(is_in);
        let (begin, _) =
            found.ok_or_else(|| io::Error::other(format!("no buffer has {length} bytes at {address:#x}")))?;
        let base: *mut u8 = std::ptr::with_exposed_provenance_mut(*begin as usize);
        Ok(base.wrapping_add((address - begin) as usize))
    }
}

fn device(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    // Avoids the numbers of the standard streams, so that output which the process prints cannot reach the device.
    Ok(rustix::io::fcntl_dupfd_cloexec(&file, 3)?.into())
}

/// A request with its words.
struct Asked<'a> {
    what: DriverRequest,
    words: &'a mut [u64; MAX_WORDS],
}

// SAFETY: the opcode is one of the driver's requests, whose argument is an array of at most `MAX_WORDS` words. `as_ptr` points to that many words,
// which the driver may write to.
unsafe impl Ioctl for Asked<'_> {
    type Output = ();

    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        let direction = if self.what.only_reads() { Direction::Read } else { Direction::Write };
        opcode::from_components(direction, MAGIC, self.what.number(), size_of::<u64>())
    }

    fn as_ptr(&mut self) -> *mut c_void {
        self.words.as_mut_ptr().cast()
    }

    // SAFETY: the function does not read through the pointer.
    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

impl Calls for Kernel {
    fn request(&mut self, context: usize, what: DriverRequest, words: &mut [u64; MAX_WORDS]) -> io::Result<()> {
        let file = self.contexts.get(context).ok_or_else(|| io::Error::other("there is no such context"))?;
        // SAFETY: the file is a device of this driver, and `Asked` describes how the driver accesses the words. Memory that a request maps for the
        // card stays mapped in the process until another request unmaps it.
        unsafe { rustix::ioctl::ioctl(file, Asked { what, words }) }?;
        Ok(())
    }

    fn open_context(&mut self) -> io::Result<usize> {
        self.contexts.push(device(&self.path)?);
        Ok(self.contexts.len() - 1)
    }

    fn read_word(&self, index: usize) -> u64 {
        assert!(index < REGISTER_WORDS, "a card has only {REGISTER_WORDS} register words");
        // SAFETY: the mapping has `REGISTER_WORDS` words, is page-aligned and lives as long as `self`. Volatile, since a register may change at any
        // time.
        unsafe { self.registers.add(index).read_volatile() }
    }

    fn write_word(&mut self, index: usize, value: u64) {
        assert!(index < REGISTER_WORDS, "a card has only {REGISTER_WORDS} register words");
        // SAFETY: `index` was checked above, and the mapping has `REGISTER_WORDS` words, is page-aligned and lives as long as `self`.
        unsafe { self.registers.add(index).write_volatile(value) }
    }

    fn map_pages(&mut self, bytes: usize) -> io::Result<u64> {
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        // SAFETY: the kernel chooses the address of a new mapping, so the mapping overlaps no other.
        let mapped = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, flags) }?;
        let address = mapped.expose_provenance() as u64;
        self.pages.push((address, bytes));
        if let Err(error) = keep_from_children(mapped, bytes) {
            self.unmap_pages(address);
            return Err(error);
        }
        Ok(address)
    }

    fn unmap_pages(&mut self, address: u64) {
        let Some(index) = self.pages.iter().position(|(begin, _)| *begin == address) else { return };
        let (begin, bytes) = self.pages.swap_remove(index);
        // SAFETY: this is a whole mapping of `map_pages`. It was just removed from the list that all accesses go through, and the card no longer uses
        // it.
        let _ = unsafe { munmap(std::ptr::with_exposed_provenance_mut(begin as usize), bytes) };
    }

    fn read_pages(&self, address: u64, into: &mut [u8]) -> io::Result<()> {
        let from = self.bytes_at(address, into.len())?;
        // SAFETY: `bytes_at` has checked that the bytes lie in a mapping, which lives while it is in the list. `into` is a Rust slice, and no Rust
        // memory lies in these mappings. Bytes that the card writes meanwhile belong to a call that has not ended.
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    fn write_pages(&mut self, address: u64, from: &[u8]) -> io::Result<()> {
        let to = self.bytes_at(address, from.len())?;
        // SAFETY: `bytes_at` has checked that the bytes lie in a live mapping. `from` is a Rust slice, and no Rust memory lies in these mappings.
        unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) };
        Ok(())
    }

    fn claim(&mut self) -> io::Result<bool> {
        let device = self.contexts.first().ok_or_else(|| io::Error::other("the region is closed"))?;
        match flock(device, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(true),
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn keep_open(&mut self) {
        for file in self.contexts.drain(..) {
            // Leaks the file descriptor, so that the file stays open.
            let _ = file.into_raw_fd();
        }
    }

    fn again(&self) -> io::Result<Box<dyn Calls>> {
        Ok(Box::new(Self::at(self.path.clone())?))
    }
}

/// Excludes these pages from forked processes. Otherwise the next write here after a fork would go to a copy. The card uses physical pages and would
/// go on reading the old page.
fn keep_from_children(mapped: *mut c_void, bytes: usize) -> io::Result<()> {
    // SAFETY: this is a whole mapping of this module, and the advice does not change its content.
    unsafe { madvise(mapped, bytes, Advice::LinuxDontFork) }.map_err(io::Error::from)
}

/// Leaves buffers mapped that were not unmapped, since the card may write to them.
impl Drop for Kernel {
    fn drop(&mut self) {
        // Unlocks explicitly, since a process forked meanwhile may have inherited the file and, with it, the lock.
        if let Some(device) = self.contexts.first() {
            let _ = flock(device, FlockOperation::Unlock);
        }
        // SAFETY: this is the whole mapping of `at`, and its only pointer is dropped with `self`.
        let _ = unsafe { munmap(self.registers.as_ptr().cast(), REGISTER_WORDS * size_of::<u64>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_a_card_are_not_copied_when_the_process_forks() {
        let bytes = 1 << 16;
        // SAFETY: the kernel chooses the address of a new mapping, so the mapping overlaps no other.
        let mapped =
            unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }
                .unwrap();
        keep_from_children(mapped, bytes).unwrap();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begin = format!("{:x}-", mapped as usize);
        let flags = smaps.lines().skip_while(|line| !line.starts_with(&begin)).find(|line| line.starts_with("VmFlags"));
        // SAFETY: this is the mapping created above, and nothing refers to it.
        unsafe { munmap(mapped, bytes) }.unwrap();
        assert!(flags.is_some_and(|flags| flags.split(' ').any(|flag| flag == "dc")), "{flags:?}");
    }

    #[test]
    fn requests_are_numbered_as_the_kernel_does() {
        let opcode = |what| Asked { what, words: &mut [0; MAX_WORDS] }.opcode();
        // The opcode combines direction, eight bytes, the letter D, and the number in the reference.
        for (what, number) in [
            (DriverRequest::MapMemory, 0x4008_4405),
            (DriverRequest::UnmapMemory, 0x4008_4406),
            (DriverRequest::RegisterProcess, 0x4008_4407),
            (DriverRequest::UnregisterProcess, 0x4008_4408),
            (DriverRequest::LookUpAddress, 0x4008_440A),
            (DriverRequest::WriteContext, 0x4008_440D),
            (DriverRequest::WriteConnection, 0x4008_440E),
            (DriverRequest::ReadConfig, 0x8008_4420),
        ] {
            assert_eq!(opcode(what), number, "{what:?}");
        }
    }
}

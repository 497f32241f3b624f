//! The kernel's driver of Coyote, v1, by way of system calls.
//!
//! Owns every mapping, so that nothing is read or written outside of one, and the lock on the device's file by which drivers of ours know of one
//! another: the kernel's driver lets in as many as come. Unsafe code is here: mapped registers, huge pages, and requests
//! whose words the driver writes to.

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

use super::calls::{Calls, MAGIC, MAX_WORDS, REGISTER_WORDS, Request};

/// Where the user's control registers begin in the device.
const REGISTERS_AT: u64 = 0;

/// A region of a card.
pub(super) struct Kernel {
    path: PathBuf,
    contexts: Vec<File>,
    /// The control registers, for as long as this lives.
    registers: NonNull<u64>,
    /// Address and length of each buffer.
    pages: Vec<(u64, usize)>,
}

// SAFETY: the pointer is to registers that this alone owns the mapping of; no thread holds anything of it that another could miss.
unsafe impl Send for Kernel {}

impl Kernel {
    pub(super) fn open(devices: &Path, region: u32) -> io::Result<Self> {
        Self::at(devices.join(format!("fpga{region}")))
    }

    fn at(path: PathBuf) -> io::Result<Self> {
        let file = device(&path)?;
        let (all, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the kernel chooses the place of a new mapping, which overlaps none that there is.
        let mapped = unsafe { mmap(null_mut(), REGISTER_WORDS * size_of::<u64>(), all, flags, &file, REGISTERS_AT) }?;
        let registers = NonNull::new(mapped.cast()).ok_or_else(|| io::Error::other("registers at address zero"))?;
        Ok(Self { path, contexts: vec![file], registers, pages: Vec::new() })
    }

    /// The place of a buffer's bytes, if they lie in one.
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
    // A number that is none of a standard stream: what the process prints must not go there.
    Ok(rustix::io::fcntl_dupfd_cloexec(&file, 3)?.into())
}

/// A request with its words.
struct Asked<'a> {
    what: Request,
    words: &'a mut [u64; MAX_WORDS],
}

// SAFETY: the opcode is one of the driver's, whose argument is an array of at most `MAX_WORDS` words, and `as_ptr` is to as many, which
// the driver may write to.
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

    // SAFETY: nothing is read through the pointer.
    unsafe fn output_from_ptr(_: IoctlOutput, _: *mut c_void) -> rustix::io::Result<()> {
        Ok(())
    }
}

impl Calls for Kernel {
    fn request(&mut self, context: usize, what: Request, words: &mut [u64; MAX_WORDS]) -> io::Result<()> {
        let file = self.contexts.get(context).ok_or_else(|| io::Error::other("there is no such context"))?;
        // SAFETY: the file is a device of this driver, and `Asked` says what the driver does with the words. Memory that a request hands to
        // the card stays mapped until another has taken it back.
        unsafe { rustix::ioctl::ioctl(file, Asked { what, words }) }?;
        Ok(())
    }

    fn open_context(&mut self) -> io::Result<usize> {
        self.contexts.push(device(&self.path)?);
        Ok(self.contexts.len() - 1)
    }

    fn read_word(&self, index: usize) -> u64 {
        assert!(index < REGISTER_WORDS, "register words end at {REGISTER_WORDS}");
        // SAFETY: the mapping has `REGISTER_WORDS` words, is aligned to a page and lives as long as this. A register may change at any time.
        unsafe { self.registers.add(index).read_volatile() }
    }

    fn write_word(&mut self, index: usize, value: u64) {
        assert!(index < REGISTER_WORDS, "register words end at {REGISTER_WORDS}");
        // SAFETY: as in `read_word`.
        unsafe { self.registers.add(index).write_volatile(value) }
    }

    fn map_pages(&mut self, bytes: usize) -> io::Result<u64> {
        let flags = MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        // SAFETY: the kernel chooses the place of a new mapping, which overlaps none that there is.
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
        // SAFETY: this is a whole mapping of `map_pages`, which nothing refers to any more: it was just taken from the list that all accesses
        // go through, and the card has given it back.
        let _ = unsafe { munmap(std::ptr::with_exposed_provenance_mut(begin as usize), bytes) };
    }

    fn read_pages(&self, address: u64, into: &mut [u8]) -> io::Result<()> {
        let from = self.bytes_at(address, into.len())?;
        // SAFETY: `bytes_at` has checked that all bytes lie in a mapping that lives as long as it is in the list. `into` is the caller's, and
        // no other memory of Rust lies in a mapping of ours. What the card writes meanwhile is what a call has yet to end for.
        unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    fn write_pages(&mut self, address: u64, from: &[u8]) -> io::Result<()> {
        let to = self.bytes_at(address, from.len())?;
        // SAFETY: as in `read_pages`.
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
            // A number that nobody closes.
            let _ = file.into_raw_fd();
        }
    }

    fn again(&self) -> io::Result<Box<dyn Calls>> {
        Ok(Box::new(Self::at(self.path.clone())?))
    }
}

/// A process that is forked does not get these pages. If it did, the next write here would go to a copy, and the card, which knows physical
/// pages, would go on reading the old one.
fn keep_from_children(mapped: *mut c_void, bytes: usize) -> io::Result<()> {
    // SAFETY: this is a whole mapping of ours, whose content stays as it is.
    unsafe { madvise(mapped, bytes, Advice::LinuxDontFork) }.map_err(io::Error::from)
}

/// Buffers that are still mapped stay so, for the card may write to them.
impl Drop for Kernel {
    fn drop(&mut self) {
        // A process that was forked meanwhile may have the file as well, and with it the lock.
        if let Some(device) = self.contexts.first() {
            let _ = flock(device, FlockOperation::Unlock);
        }
        // SAFETY: this is the whole mapping of `at`, and its only pointer is dropped with it.
        let _ = unsafe { munmap(self.registers.as_ptr().cast(), REGISTER_WORDS * size_of::<u64>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_a_card_are_not_copied_when_the_process_forks() {
        let bytes = 1 << 16;
        // SAFETY: the kernel chooses the place of a new mapping, which overlaps none that there is.
        let mapped =
            unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) }
                .unwrap();
        keep_from_children(mapped, bytes).unwrap();
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let begin = format!("{:x}-", mapped as usize);
        let flags = smaps.lines().skip_while(|line| !line.starts_with(&begin)).find(|line| line.starts_with("VmFlags"));
        // SAFETY: this is the mapping, and nothing refers to it.
        unsafe { munmap(mapped, bytes) }.unwrap();
        assert!(flags.is_some_and(|flags| flags.split(' ').any(|flag| flag == "dc")), "{flags:?}");
    }

    #[test]
    fn requests_are_numbered_as_the_kernel_does() {
        let opcode = |what| Asked { what, words: &mut [0; MAX_WORDS] }.opcode();
        // Direction, eight bytes, the letter D, and the number of the reference.
        for (what, number) in [
            (Request::MapMemory, 0x4008_4405),
            (Request::UnmapMemory, 0x4008_4406),
            (Request::RegisterProcess, 0x4008_4407),
            (Request::UnregisterProcess, 0x4008_4408),
            (Request::LookUpAddress, 0x4008_440A),
            (Request::WriteContext, 0x4008_440D),
            (Request::WriteConnection, 0x4008_440E),
            (Request::ReadConfig, 0x8008_4420),
        ] {
            assert_eq!(opcode(what), number, "{what:?}");
        }
    }
}

//! XRT's library, loaded at run time, and one open card.
//!
//! Owns all handles of the C interface, so that none is used after it was closed. The unsafe code of the bus is here: calls of foreign functions.
//! Read `functions!` first: it is the table of the functions that are called, which a test compares with XRT's own headers.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;
use rustix::io::Errno;

/// Types of the C interface, under the names that the table uses.
type Handle = *mut c_void;
type Uint = c_uint;
type Int = c_int;
type Size = usize;
type U32 = u32;
type U64 = u64;
type Text = *const c_char;
type OutU32 = *mut u32;
type OutUuid = *mut u8;
type Uuid = *const u8;
type Bytes = *const c_void;
type OutBytes = *mut c_void;

/// Setting that turns XRT's log off. If XRT's setup is incomplete, logging to the terminal ends the process, because the function that reports an
/// exception throws another. Without a log, every failure is a return value, which this module reports.
const LOG_NOTHING: [&str; 2] = ["Runtime.runtime_log", "null"];
/// File name of the library up to its version.
const STEM: &str = "libxrt_coreutil.so.";
/// File that lists the mappings of this process.
const MAPPED: &str = "/proc/self/maps";
/// Size in bytes of a bitstream's UUID.
const UUID_BYTES: usize = 16;

/// Declares the functions with their names and Rust types, and the same types as text for a test.
macro_rules! functions {
    ($($field:ident $name:literal ($($argument:ident),*$(; $rest:tt)?) -> $result:ident;)+) => {
        /// Functions of a library that is never closed.
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),* $(, $rest)?) -> $result,)+
        }

        /// Name, argument types and result type of each function.
        #[cfg(test)]
        pub(super) const SYMBOLS: &[(&str, &[&str], &str)] =
            &[$(($name, &[$(stringify!($argument),)* $(stringify!($rest))?], stringify!($result))),+];

        impl Functions {
            /// Loads all functions. The error is the name of the first function that is missing.
            fn of(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($field: {
                        let name = concat!($name, "\0").as_bytes();
                        // SAFETY: the table declares the type that XRT's headers give the function of this name, as a test checks. A library whose
                        // functions are kept is never closed.
                        let symbol = unsafe { library.get(name) };
                        *symbol.map_err(|_| $name)?
                    },)+
                })
            }
        }
    };
}

functions! {
    set_ini "xrtIniStringSet" (Text, Text) -> Int;
    device_open "xrtDeviceOpen" (Uint) -> Handle;
    device_close "xrtDeviceClose" (Handle) -> Int;
    device_load "xrtDeviceLoadXclbinFile" (Handle, Text) -> Int;
    device_uuid "xrtDeviceGetXclbinUUID" (Handle, OutUuid) -> Int;
    kernel_open "xrtPLKernelOpen" (Handle, Uuid, Text) -> Handle;
    kernel_open_exclusive "xrtPLKernelOpenExclusive" (Handle, Uuid, Text) -> Handle;
    kernel_close "xrtKernelClose" (Handle) -> Int;
    kernel_read "xrtKernelReadRegister" (Handle, U32, OutU32) -> Int;
    kernel_write "xrtKernelWriteRegister" (Handle, U32, U32) -> Int;
    run_open "xrtRunOpen" (Handle) -> Handle;
    run_set "xrtRunSetArg" (Handle, Int; ...) -> Int;
    run_start "xrtRunStart" (Handle) -> Int;
    run_state "xrtRunState" (Handle) -> Uint;
    run_close "xrtRunClose" (Handle) -> Int;
    buffer_open "xrtBOAlloc" (Handle, Size, U64, U32) -> Handle;
    buffer_close "xrtBOFree" (Handle) -> Int;
    buffer_address "xrtBOAddress" (Handle) -> U64;
    buffer_write "xrtBOWrite" (Handle, Bytes, Size, Size) -> Int;
    buffer_read "xrtBORead" (Handle, OutBytes, Size, Size) -> Int;
    buffer_sync "xrtBOSync" (Handle, Uint, Size, Size) -> Int;
}

/// Direction in which a buffer is copied between host and card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sync {
    ToCard = 0,
    FromCard = 1,
}

/// Failure of a call to the library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The library cannot be opened.
    NoLibrary(String),
    /// The library lacks a function. Contains the function's name and the library's version.
    NoFunction(&'static str, String),
    /// There is no such card.
    NoCard,
    /// The card rejected the bitstream. Contains the returned error.
    NotLoaded(c_int),
    /// The bitstream has no kernel of this name, or another process has it.
    NoKernel(String),
    /// Another process has opened the kernel, or has loaded another bitstream on the card.
    InUse,
    /// The bank has no room for the buffer.
    NoBuffer,
    /// The bytes do not lie in one buffer.
    NoBytes,
    /// A function has failed. Contains its name and its return value.
    Failed(&'static str, c_int),
}

/// Parts of a card to open.
pub(super) struct Names<'a> {
    pub(super) index: u32,
    pub(super) xclbin: &'a Path,
    pub(super) engine: &'a str,
    pub(super) hostctrl: &'a str,
}

struct Buffer {
    handle: Handle,
    address: u64,
    bytes: usize,
}

/// A card with a bitstream, and everything that was opened on it.
pub(super) struct Card {
    functions: Functions,
    device: Handle,
    /// Kernel whose registers are the engine's exchange memory.
    engine: Handle,
    /// Kernel that starts calls, and its only run.
    hostctrl: Handle,
    run: Handle,
    buffers: Vec<Buffer>,
    /// Whether a run is in progress.
    pub(super) is_busy: bool,
    /// Whether packets may still arrive in buffers although no run is in progress.
    pub(super) may_write: bool,
}

// SAFETY: this value alone owns its handles, XRT binds none to a thread, and `&mut self` or a lock admits one thread at a time.
unsafe impl Send for Card {}

impl Card {
    /// Opens the library, the card and its kernels.
    pub(super) fn open(library: &Path, names: &Names) -> Result<Self, Failure> {
        // SAFETY: opening the library runs only XRT's own initializers, which have no preconditions.
        let opened = unsafe { Library::new(library) }.map_err(|error| Failure::NoLibrary(error.to_string()))?;
        // The library's file name is in the process's mappings while the library is open.
        let functions = Functions::of(&opened).map_err(|name| Failure::NoFunction(name, version_of(library)))?;
        // The library is never closed, since a busy card may still run its code.
        std::mem::forget(opened);
        let [key, value] = LOG_NOTHING.map(text);
        // SAFETY: both are strings that end in zero. A library that is already in use keeps its settings.
        let _ = unsafe { (functions.set_ini)(key.as_ptr(), value.as_ptr()) };
        // SAFETY: the function accepts any index.
        let device = unsafe { (functions.device_open)(names.index) };
        let none = std::ptr::null_mut();
        let mut card = Self {
            functions,
            device,
            engine: none,
            hostctrl: none,
            run: none,
            buffers: Vec::new(),
            is_busy: false,
            may_write: false,
        };
        if card.device.is_null() {
            return Err(Failure::NoCard);
        }
        card.load(names)?;
        Ok(card)
    }

    fn load(&mut self, names: &Names) -> Result<(), Failure> {
        let xclbin = text(&names.xclbin.to_string_lossy());
        // SAFETY: the device is open, and the path is a string that ends in zero.
        let loaded = unsafe { (self.functions.device_load)(self.device, xclbin.as_ptr()) };
        if loaded != 0 {
            let is_busy = loaded.unsigned_abs() == Errno::BUSY.raw_os_error().unsigned_abs() || is_busy();
            return Err(if is_busy { Failure::InUse } else { Failure::NotLoaded(loaded) });
        }
        let mut uuid = [0; UUID_BYTES];
        // SAFETY: the device is open, and `uuid` has the `UUID_BYTES` bytes that the function writes.
        let known = unsafe { (self.functions.device_uuid)(self.device, uuid.as_mut_ptr()) };
        done("xrtDeviceGetXclbinUUID", known)?;
        let kernel = |open: unsafe extern "C" fn(Handle, Uuid, Text) -> Handle, name: &str| {
            let wanted = text(name);
            // SAFETY: the device is open, `uuid` belongs to its bitstream, and the name is a string that ends in zero.
            let kernel = unsafe { open(self.device, uuid.as_ptr(), wanted.as_ptr()) };
            match kernel.is_null() {
                false => Ok(kernel),
                true if is_busy() => Err(Failure::InUse),
                true => Err(Failure::NoKernel(name.to_owned())),
            }
        };
        self.engine = kernel(self.functions.kernel_open_exclusive, names.engine)?;
        self.hostctrl = kernel(self.functions.kernel_open, names.hostctrl)?;
        // SAFETY: `hostctrl` was opened above.
        self.run = unsafe { (self.functions.run_open)(self.hostctrl) };
        if self.run.is_null() { Err(Failure::Failed("xrtRunOpen", 0)) } else { Ok(()) }
    }

    pub(super) fn read_register(&self, offset: u32) -> Result<u32, Failure> {
        let mut value = 0;
        // SAFETY: `load` opened the engine's kernel, and `value` is a word that may be written to. The library checks the offset.
        let read = unsafe { (self.functions.kernel_read)(self.engine, offset, &mut value) };
        done("xrtKernelReadRegister", read).map(|()| value)
    }

    pub(super) fn write_register(&mut self, offset: u32, value: u32) -> Result<(), Failure> {
        // SAFETY: `load` opened the engine's kernel, and the library checks the offset.
        done("xrtKernelWriteRegister", unsafe { (self.functions.kernel_write)(self.engine, offset, value) })
    }

    /// Starts a call, with the words and then the addresses as arguments of the run.
    pub(super) fn start(&mut self, words: &[u32], addresses: &[u64]) -> Result<(), Failure> {
        let set = self.functions.run_set;
        for (index, word) in (0..).zip(words) {
            // SAFETY: `load` opened the run, and this argument has 32 bits.
            done("xrtRunSetArg", unsafe { set(self.run, index, *word) })?;
        }
        for (index, address) in (words.len() as Int..).zip(addresses) {
            // SAFETY: `load` opened the run, and this argument has 64 bits.
            done("xrtRunSetArg", unsafe { set(self.run, index, *address) })?;
        }
        // SAFETY: `load` opened the run, and all its arguments are set. `drop` frees no buffer while `is_busy` is set.
        done("xrtRunStart", unsafe { (self.functions.run_start)(self.run) })?;
        self.is_busy = true;
        Ok(())
    }

    /// Returns the state of the run, in XRT's numbering.
    pub(super) fn state(&self) -> u32 {
        // SAFETY: `load` opened the run.
        unsafe { (self.functions.run_state)(self.run) }
    }

    /// Allocates a buffer in a bank, and returns its address.
    pub(super) fn allocate(&mut self, bytes: usize, flags: u64, bank: u32) -> Result<u64, Failure> {
        // SAFETY: the device is open, and the library checks the other arguments.
        let handle = unsafe { (self.functions.buffer_open)(self.device, bytes, flags, bank) };
        if handle.is_null() {
            return Err(Failure::NoBuffer);
        }
        // SAFETY: the buffer was just opened.
        let address = unsafe { (self.functions.buffer_address)(handle) };
        self.buffers.push(Buffer { handle, address, bytes });
        Ok(address)
    }

    /// Copies into a buffer, and then to the card.
    pub(super) fn write(&mut self, address: u64, from: &[u8]) -> Result<(), Failure> {
        let (handle, offset) = self.buffer_at(address, from.len())?;
        // SAFETY: the buffer is open, and `buffer_at` has checked that it has `from.len()` bytes from `offset`.
        let written = unsafe { (self.functions.buffer_write)(handle, from.as_ptr().cast(), from.len(), offset) };
        done("xrtBOWrite", written)?;
        self.sync(handle, Sync::ToCard, from.len(), offset)
    }

    /// Copies from the card, and then out of a buffer.
    pub(super) fn read(&mut self, address: u64, into: &mut [u8]) -> Result<(), Failure> {
        let (handle, offset) = self.buffer_at(address, into.len())?;
        self.sync(handle, Sync::FromCard, into.len(), offset)?;
        // SAFETY: the buffer is open, and `buffer_at` has checked that it has `into.len()` bytes from `offset`.
        let read = unsafe { (self.functions.buffer_read)(handle, into.as_mut_ptr().cast(), into.len(), offset) };
        done("xrtBORead", read)
    }

    fn sync(&mut self, handle: Handle, way: Sync, bytes: usize, offset: usize) -> Result<(), Failure> {
        // SAFETY: the buffer is open, and `buffer_at` has checked that it has `bytes` bytes from `offset`.
        done("xrtBOSync", unsafe { (self.functions.buffer_sync)(handle, way as Uint, bytes, offset) })
    }

    /// Returns the buffer that contains these bytes, and their offset in it.
    fn buffer_at(&self, address: u64, bytes: usize) -> Result<(Handle, usize), Failure> {
        let offset_in = |buffer: &Buffer| {
            let offset = usize::try_from(address.checked_sub(buffer.address)?).ok()?;
            offset.checked_add(bytes).filter(|end| *end <= buffer.bytes)?;
            Some((buffer.handle, offset))
        };
        self.buffers.iter().find_map(offset_in).ok_or(Failure::NoBytes)
    }
}

/// Closes everything in reverse order of opening, unless the card may still write to buffers.
impl Drop for Card {
    fn drop(&mut self) {
        let Functions { buffer_close, run_close, kernel_close, device_close, .. } = self.functions;
        if self.is_busy || self.may_write || self.device.is_null() {
            return;
        }
        let close = |close: unsafe extern "C" fn(Handle) -> Int, handle: Handle| {
            if !handle.is_null() {
                // SAFETY: the handle is open, this value alone owns it, and nothing uses it afterwards. Handles opened from it were closed before.
                let _ = unsafe { close(handle) };
            }
        };
        for buffer in self.buffers.drain(..) {
            close(buffer_close, buffer.handle);
        }
        close(run_close, self.run);
        close(kernel_close, self.hostctrl);
        close(kernel_close, self.engine);
        close(device_close, self.device);
    }
}

/// Returns the version in the file name of an open library.
fn version_of(library: &Path) -> String {
    let file = library.canonicalize().ok().or_else(|| {
        let maps = std::fs::read_to_string(MAPPED).ok()?;
        let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
        paths.into_iter().find(|path| path.contains(STEM)).map(PathBuf::from)
    });
    let name = file.as_deref().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
    name.split_once(STEM).map_or_else(|| "unknown".to_owned(), |(_, version)| version.to_owned())
}

/// Returns whether the last failed function set `errno` to `EBUSY`. XRT's headers promise that, but not all versions do it.
fn is_busy() -> bool {
    std::io::Error::last_os_error().raw_os_error() == Some(Errno::BUSY.raw_os_error())
}

fn done(name: &'static str, returned: c_int) -> Result<(), Failure> {
    if returned == 0 { Ok(()) } else { Err(Failure::Failed(name, returned)) }
}

/// Returns a C string; a zero in the text ends it.
fn text(text: &str) -> CString {
    let bytes: Vec<u8> = text.bytes().take_while(|byte| *byte != 0).chain([0]).collect();
    CStr::from_bytes_until_nul(&bytes).map(CStr::to_owned).unwrap_or_default()
}

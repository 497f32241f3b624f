//! A stand-in for a GPU's driver and compiler, for tests without a GPU.
//!
//! `standin.cpp` is the library: it exports the vendors' functions over the processor's memory. `standin.h` is its control
//! interface, and this file is the same interface for tests in Rust. `model.hpp` runs the threads of a kernel. Owns no
//! check: tests compare. Read [`Standin`] first.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;
use tempfile::TempDir;

/// The library, as the build script has compiled it.
const COMPILED: &str = concat!(env!("OUT_DIR"), "/standin.so");

/// When streams do their work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// At once.
    Early = 0,
    /// When a result is required. Each query does one task.
    Late = 1,
    /// Some at each call, drawn by a seed.
    Random = 2,
}

/// Objects that are alive, and calls so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Counts {
    /// Contexts that are retained.
    pub contexts: i64,
    /// Modules that are loaded.
    pub modules: i64,
    /// Events.
    pub events: i64,
    /// Programs of the compiler.
    pub programs: i64,
    /// Tasks that wait in streams.
    pub tasks: i64,
    /// Modules that were loaded so far.
    pub loads: i64,
    /// Programs that were compiled so far.
    pub compiles: i64,
    /// Calls of the vendors' functions so far.
    pub calls: i64,
    /// Launches of kernels so far.
    pub launches: i64,
    /// Allocations of device memory by the driver.
    pub allocations: i64,
    /// Imports of other processes' memory that are not closed.
    pub imports: i64,
    /// Copies from device memory to device memory so far.
    pub copies: i64,
}

impl Counts {
    /// Returns whether nothing is left that its owner should have released.
    pub fn is_empty(&self) -> bool {
        [self.contexts, self.modules, self.events, self.programs, self.allocations, self.imports] == [0; 6]
    }
}

/// Streams and device memory of another stand-in. The header describes the fields.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[expect(missing_docs, reason = "the header describes the fields")]
pub struct Host {
    pub own: *mut c_void,
    pub enqueue: extern "C" fn(*mut c_void, c_int, *mut c_void, Work, *mut c_void),
    pub advance: extern "C" fn(*mut c_void, c_int, *mut c_void),
    pub access: extern "C" fn(*mut c_void, c_int, c_int),
    pub memory: extern "C" fn(*mut c_void, c_int, c_int, *mut u64, *mut u64) -> c_int,
}

/// Work of a task.
pub type Work = extern "C" fn(*mut c_void);

/// A copy of the library with state of its own.
#[derive(Debug)]
pub struct Standin {
    path: PathBuf,
    library: &'static Library,
    _folder: TempDir,
}

impl Standin {
    /// Opens a new copy of the library.
    ///
    /// # Panics
    /// Panics if the file cannot be copied or opened.
    pub fn new() -> Self {
        Self::with(std::fs::read(COMPILED).expect("the build script has compiled the library"))
    }

    /// Opens a copy that lacks a function.
    ///
    /// # Panics
    /// The panics of [`Standin::new`], and if the library has no such function.
    pub fn without(function: &str) -> Self {
        let mut bytes = std::fs::read(COMPILED).expect("the build script has compiled the library");
        // The first place is in the table of the dynamic linker's names. The name there becomes another one.
        let name = [b"\0", function.as_bytes(), b"\0"].concat();
        let at = bytes.windows(name.len()).position(|window| window == name);
        bytes[at.expect("the library has the function") + 1] = b'_';
        Self::with(bytes)
    }

    fn with(bytes: Vec<u8>) -> Self {
        let folder = tempfile::tempdir().expect("a folder can be created");
        let path = folder.path().join("standin.so");
        std::fs::write(&path, bytes).expect("the folder can be written to");
        // SAFETY: the library's initializers have no preconditions.
        let library = unsafe { Library::new(&path) }.expect("the library can be opened");
        Self { path, library: Box::leak(Box::new(library)), _folder: folder }
    }

    /// Returns the path of the library, which is the driver and the compiler.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Lends the library streams and memory, which it uses in place of its own.
    pub fn lend(&self, host: &Host) {
        // SAFETY: the header declares this type.
        let call = unsafe { self.function::<unsafe extern "C" fn(*const Host)>("accl_standin_lend") };
        // SAFETY: the function copies the structure, whose functions live as long as the process.
        unsafe { call(host) };
    }

    /// Sets when streams do their work.
    pub fn order(&self, order: Order, seed: u64) {
        // SAFETY: the header declares this type.
        let call = unsafe { self.function::<unsafe extern "C" fn(c_int, u64)>("accl_standin_order") };
        // SAFETY: the function accepts all numbers of the enumeration.
        unsafe { call(order as c_int, seed) };
    }

    /// Lets one call of a function fail with a code: the call after `skipped` others. An empty name ends that.
    pub fn fail(&self, function: &str, skipped: u32, code: i32) {
        let name = CString::new(function).unwrap_or_default();
        // SAFETY: the header declares this type.
        let call = unsafe { self.function::<unsafe extern "C" fn(*const c_char, c_uint, c_int)>("accl_standin_fail") };
        // SAFETY: the name ends in zero, and the function copies it.
        unsafe { call(name.as_ptr(), skipped, code) };
    }

    /// Lets each call fail with a probability in millionths, drawn by a seed.
    pub fn draw(&self, seed: u64, per_million: u32, code: i32) {
        // SAFETY: the header declares this type.
        let call = unsafe { self.function::<unsafe extern "C" fn(u64, c_uint, c_int)>("accl_standin_draw") };
        // SAFETY: the function accepts all numbers.
        unsafe { call(seed, per_million, code) };
    }

    /// Returns the name of the function that was made to fail last, and empty for none.
    pub fn failed(&self) -> String {
        // SAFETY: the header declares this type.
        let call = unsafe { self.function::<unsafe extern "C" fn() -> *const c_char>("accl_standin_failed") };
        // SAFETY: the function returns a text that ends in zero and lives until this thread's next call.
        unsafe { CStr::from_ptr(call()) }.to_string_lossy().into_owned()
    }

    /// Sets the driver's version, such as 13020 for 13.2, and the compute capability of its devices.
    pub fn version(&self, driver: i32, major: i32, minor: i32) {
        // SAFETY: the header declares this type.
        let call = unsafe { self.function::<unsafe extern "C" fn(c_int, c_int, c_int)>("accl_standin_version") };
        // SAFETY: the function accepts all numbers.
        unsafe { call(driver, major, minor) };
    }

    /// Sets the most bytes that the driver's allocations may have together. 0: no limit.
    pub fn memory_limit(&self, bytes: usize) {
        // SAFETY: the header declares this type.
        let call = unsafe { self.function::<unsafe extern "C" fn(usize)>("accl_standin_memory_limit") };
        // SAFETY: the function accepts all numbers.
        unsafe { call(bytes) };
    }

    /// Returns what is alive.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        // SAFETY: the header declares this type.
        let call = unsafe { self.function::<unsafe extern "C" fn(*mut Counts)>("accl_standin_count") };
        // SAFETY: `counts` may be written to, and has the header's layout.
        unsafe { call(&mut counts) };
        counts
    }

    /// Creates a stream of a device. Returns its native handle.
    pub fn stream(&self, device: u32) -> u64 {
        // SAFETY: the header declares this type.
        let call = unsafe { self.function::<unsafe extern "C" fn(c_int) -> *mut c_void>("accl_standin_stream") };
        // SAFETY: there are two devices.
        unsafe { call(device.min(1) as c_int) as u64 }
    }

    /// Allocates device memory, which is never freed. Returns its address.
    pub fn allocate(&self, device: u32, bytes: usize) -> u64 {
        // SAFETY: the header declares this type.
        let call = unsafe { self.function::<unsafe extern "C" fn(c_int, usize) -> u64>("accl_standin_allocate") };
        // SAFETY: there are two devices.
        unsafe { call(device.min(1) as c_int, bytes) }
    }

    /// Writes to device memory at once.
    pub fn poke(&self, address: u64, bytes: &[u8]) {
        // SAFETY: the header declares this type.
        let call = unsafe { self.function::<unsafe extern "C" fn(u64, *const u8, usize)>("accl_standin_poke") };
        // SAFETY: the library ends the process if the address is not one of a device.
        unsafe { call(address, bytes.as_ptr(), bytes.len()) };
    }

    /// Reads device memory at once.
    pub fn peek(&self, address: u64, bytes: &mut [u8]) {
        // SAFETY: the header declares this type.
        let call = unsafe { self.function::<unsafe extern "C" fn(*mut u8, u64, usize)>("accl_standin_peek") };
        // SAFETY: the library ends the process if the address is not one of a device.
        unsafe { call(bytes.as_mut_ptr(), address, bytes.len()) };
    }

    /// Returns the context that is current in this thread, as a number; 0 for none.
    pub fn current(&self) -> usize {
        let mut context = std::ptr::null_mut();
        // SAFETY: the type is the vendor's.
        let call = unsafe { self.function::<unsafe extern "C" fn(*mut *mut c_void) -> c_int>("cuCtxGetCurrent") };
        // SAFETY: `context` may be written to.
        unsafe { call(&mut context) };
        context as usize
    }

    /// Makes a device's context current in this thread as another library does, and `None`: no context.
    pub fn set_current(&self, device: Option<i32>) {
        let mut context = std::ptr::null_mut();
        if let Some(device) = device {
            // SAFETY: the type is the vendor's.
            let retain = unsafe {
                self.function::<unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int>("cuDevicePrimaryCtxRetain")
            };
            // SAFETY: `context` may be written to, and there are two devices.
            unsafe { retain(&mut context, device.clamp(0, 1)) };
        }
        // SAFETY: the type is the vendor's.
        let set = unsafe { self.function::<unsafe extern "C" fn(*mut c_void) -> c_int>("cuCtxSetCurrent") };
        // SAFETY: the context was retained, and stays so.
        unsafe { set(context) };
    }

    /// # Safety
    /// `F` is the type of a pointer to the function of this name.
    unsafe fn function<F: Copy>(&self, name: &str) -> F {
        // SAFETY: the caller knows the type, and the library is never closed.
        *unsafe { self.library.get::<F>(name.as_bytes()) }.expect("the library has the function")
    }
}

impl Default for Standin {
    fn default() -> Self {
        Self::new()
    }
}

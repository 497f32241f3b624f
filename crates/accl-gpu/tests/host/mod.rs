//! Kernels compiled for the host, and memory for them.
//!
//! Owns the C++ compiler's run, the opened library and the launch on fibers of `model.hpp`. Does not know what kernels
//! compute.

use std::ffi::{CStr, c_char, c_void};
use std::fs;
use std::process::Command;

use libloading::Library;
use tempfile::TempDir;

const MODEL: &str = include_str!("model.hpp");

/// Optimised a little: compiling takes longer than running.
const FLAGS: &[&str] = &[
    "-O1",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
];

/// A function of kernels, and the launcher of the model.
type Function = unsafe extern "C" fn(*const c_void);
type Launcher = unsafe extern "C" fn(Function, *const c_void, u32, u32, u32, *const Range, u32) -> *const c_char;

/// Memory that a kernel may access.
#[derive(Clone, Copy)]
#[repr(C)]
struct Range {
    begin: u64,
    end: u64,
    is_writable: u32,
    reserved: u32,
}

/// Order in which the model runs threads and blocks. The results must not depend on it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Order {
    Forward,
    Reversed,
}

/// Kernels in a library of the host.
pub struct HostLibrary {
    library: Library,
    _folder: TempDir,
}

impl HostLibrary {
    /// Compiles a source with `CXX`, or with `c++`.
    pub fn compile(source: &str, options: &[String]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (file, library) = (folder.path().join("kernels.cpp"), folder.path().join("kernels.so"));
        fs::write(&file, format!("{MODEL}\n{source}")).unwrap();
        #[expect(clippy::disallowed_methods, reason = "CXX names the compiler, as for every build")]
        let compiler = std::env::var("CXX").unwrap_or_else(|_| "c++".to_owned());
        let mut command = Command::new(&compiler);
        command.args(FLAGS).args(options).arg(&file).arg("-o").arg(&library);
        let output = command.output().unwrap_or_else(|error| panic!("{compiler}: {error}; set CXX to a C++ compiler"));
        assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        // SAFETY: the library was just made from the sources of this crate, and has no initialisers.
        let library = unsafe { Library::new(&library) }.unwrap();
        Self { library, _folder: folder }
    }

    /// Runs a kernel on `blocks` blocks of `threads` threads. It may access `memory` and nothing else. Returns the error of a
    /// kernel that accesses anything else, or whose threads wait for ever.
    ///
    /// # Safety
    /// `A` has the layout of the kernel's arguments.
    pub unsafe fn run<A>(
        &self,
        entry: &str,
        (blocks, threads): (u32, u32),
        args: &A,
        memory: &[&Memory],
        order: Order,
    ) -> Result<(), String> {
        let ranges: Vec<Range> = memory.iter().map(|memory| memory.range()).collect();
        // SAFETY: the library defines both functions with these types, and `A` has the layout of the kernels' arguments.
        // The model checks each access against `ranges`, which are live memory that no reference covers during the
        // launch.
        let error = unsafe {
            let launcher = self.library.get::<Launcher>(b"accl_model_launch\0").unwrap();
            let function = self.library.get::<Function>(format!("{entry}\0").as_bytes()).unwrap();
            let error = launcher(
                *function,
                (&raw const *args).cast(),
                blocks,
                threads,
                u32::from(order == Order::Reversed),
                ranges.as_ptr(),
                ranges.len() as u32,
            );
            (!error.is_null()).then(|| CStr::from_ptr(error).to_string_lossy().into_owned())
        };
        error.map_or(Ok(()), Err)
    }
}

/// Bytes at a chosen distance from a boundary of 64 bytes, with guard bytes on both sides. All accesses go through one
/// pointer.
pub struct Memory {
    bytes: *mut [u8],
    start: usize,
    len: usize,
    is_writable: bool,
}

const GUARD: usize = 64;
const FILL: u8 = 0xa5;

impl Memory {
    /// Creates memory that kernels may only read.
    pub fn constant(content: &[u8], misalignment: usize) -> Self {
        let mut bytes = vec![FILL; content.len() + 3 * GUARD + misalignment].into_boxed_slice();
        let start = GUARD + bytes.as_ptr().align_offset(64) % 64 + misalignment;
        bytes[start..start + content.len()].copy_from_slice(content);
        Self { bytes: Box::into_raw(bytes), start, len: content.len(), is_writable: false }
    }

    /// Creates memory that kernels may read and write.
    pub fn new(content: &[u8], misalignment: usize) -> Self {
        let mut memory = Self::constant(content, misalignment);
        memory.is_writable = true;
        memory
    }

    pub fn address(&self) -> u64 {
        self.bytes.cast::<u8>().wrapping_add(self.start) as u64
    }

    /// Returns the content.
    ///
    /// # Panics
    /// Panics if a byte outside of it was written.
    pub fn content(&self) -> &[u8] {
        // SAFETY: the pointer is from `Box::into_raw`, and no kernel runs while the slice is in use.
        let all = unsafe { &*self.bytes };
        let (before, rest) = all.split_at(self.start);
        let (content, after) = rest.split_at(self.len);
        assert!(before.iter().chain(after).all(|&byte| byte == FILL), "a byte outside of the memory was written");
        content
    }

    fn range(&self) -> Range {
        let begin = self.address();
        Range { begin, end: begin + self.len as u64, is_writable: u32::from(self.is_writable), reserved: 0 }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the pointer is from `Box::into_raw`, and is not used any more.
        drop(unsafe { Box::from_raw(self.bytes) });
    }
}

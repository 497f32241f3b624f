//! Sizes and arguments of a launch of a kernel.
//!
//! Owns the sizes of a launch and the form of its arguments. Does not know kernels.

use std::ffi::c_void;
use std::marker::PhantomData;

/// Numbers of blocks and threads of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Numbers of blocks in x, y and z.
    pub blocks: [u32; 3],
    /// Numbers of threads of a block in x, y and z.
    pub threads: [u32; 3],
    /// Bytes of shared memory of a block, in addition to what the kernel declares.
    pub shared_bytes: u32,
}

impl Grid {
    /// Returns a grid of `blocks` blocks of `threads` threads in one dimension.
    pub fn line(blocks: u32, threads: u32) -> Self {
        Self { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared_bytes: 0 }
    }

    /// Returns the number of threads of a block.
    pub(crate) fn threads(&self) -> u64 {
        self.threads.iter().map(|count| u64::from(*count)).product()
    }
}

/// Argument of a kernel, by reference. The launch copies it.
#[derive(Clone, Copy, Debug)]
pub struct Argument<'a> {
    pointer: *const c_void,
    lives: PhantomData<&'a ()>,
}

impl<'a> Argument<'a> {
    /// Returns a value as an argument. `T` has the size and layout of the kernel's parameter: an integer, a `float`, or a
    /// structure with C's layout. A pointer is the address of device memory, as a `u64`.
    pub fn of<T: Copy>(value: &'a T) -> Self {
        Self { pointer: std::ptr::from_ref(value).cast(), lives: PhantomData }
    }

    /// Returns the address of the value. The driver only reads it.
    pub(super) fn pointer(self) -> *mut c_void {
        self.pointer.cast_mut()
    }
}

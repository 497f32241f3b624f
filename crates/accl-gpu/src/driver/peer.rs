//! Device memory of our own, memory of other processes on the same host, and copies between both.
//!
//! Owns each allocation and each import: it is released once, when its value is dropped. Does not know how a handle
//! comes to another process, or when that process has finished. Read [`Allocation`] first.

use std::sync::Arc;

use accl_types::{Error, ErrorKind, Result};

use super::context::Context;
use super::functions::Handle;
use super::peer_functions::{IpcHandle, LAZY_ACCESS, NO_MEMORY, NON_BLOCKING};
use super::{DeviceMemory, Stream};

/// Device memory that this value owns. Dropping it frees the memory.
#[derive(Debug)]
pub struct Allocation {
    context: Arc<Context>,
    address: u64,
    len_bytes: u64,
}

impl Allocation {
    /// Allocates memory on the device of a context. Its content has no meaning.
    pub(crate) fn new(context: &Arc<Context>, len_bytes: u64) -> Result<Self> {
        let allocate = context.driver().peer_functions()?.memory_allocate;
        let size = usize::try_from(len_bytes).unwrap_or(usize::MAX);
        let (mut address, mut is_exhausted) = (0, false);
        let allocated = context.call(allocate, |call| {
            // SAFETY: `address` may be written to, and the context is current.
            let code = unsafe { call(&mut address, size) };
            is_exhausted = code == NO_MEMORY;
            code
        });
        allocated.map_err(|error| match is_exhausted {
            true => Error::new(ErrorKind::Exhausted, format!("{} for {len_bytes} bytes", error.message)),
            false => error,
        })?;
        Ok(Self { context: context.clone(), address, len_bytes })
    }

    /// Returns the number of bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Returns the address on the device, which is a multiple of 256.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the memory.
    ///
    /// # Safety
    /// The contract of [`DeviceMemory::new`]. This value lives until the device has done all work to which the memory was
    /// given. Work of other processes that have imported the memory counts as work on other streams.
    pub unsafe fn memory(&self) -> DeviceMemory {
        // SAFETY: by this function's contract; the bytes are one allocation while this value lives.
        unsafe { DeviceMemory::new(self.address, self.len_bytes) }
    }

    /// Returns a handle with which other processes of the host can import the memory. They must drop their imports before
    /// this value is dropped.
    ///
    /// CUDA's driver may place small allocations in one block, and shares the whole block. Allocations of a multiple of 2 MiB
    /// have blocks of their own.
    ///
    /// # Errors
    /// `Device` with the driver's words, for example because the system does not let processes share memory.
    pub fn export(&self) -> Result<IpcHandle> {
        let export = self.context.driver().peer_functions()?.ipc_export;
        let mut handle = IpcHandle::from_bytes([0; _]);
        // SAFETY: `handle` may be written to, and the address is the beginning of an allocation of this value.
        self.context.call(export, |call| unsafe { call(&mut handle, self.address) })?;
        Ok(handle)
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // The table is open, because the memory was allocated with it.
        if let Ok(functions) = self.context.driver().peer_functions() {
            // SAFETY: this value alone owns the memory, and users of the memory keep this value: see `memory`.
            self.context.release(functions.memory_free, |call| unsafe { call(self.address) });
        }
    }
}

/// Memory of another process, mapped in this one. Dropping it ends the mapping.
#[derive(Debug)]
pub struct Imported {
    context: Arc<Context>,
    address: u64,
    len_bytes: u64,
}

impl Imported {
    /// Maps memory of another process on the device of a context.
    ///
    /// # Safety
    /// The contract of [`crate::Gpu::import`].
    pub(crate) unsafe fn new(context: &Arc<Context>, handle: IpcHandle, len_bytes: u64) -> Result<Self> {
        let import = context.driver().peer_functions()?.ipc_import;
        let mut address = 0;
        // SAFETY: `address` may be written to, the context is current, and the handle is one of a driver by this function's
        // contract.
        context.call(import, |call| unsafe { call(&mut address, handle, LAZY_ACCESS) })?;
        Ok(Self { context: context.clone(), address, len_bytes })
    }

    /// Returns the number of bytes.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Returns the address on this process's device. It differs from the address in the other process.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the memory.
    ///
    /// # Safety
    /// The contract of [`Allocation::memory`]: this value lives until the device has done all work to which the memory was
    /// given, and work of other processes counts as work on other streams.
    pub unsafe fn memory(&self) -> DeviceMemory {
        // SAFETY: by this function's contract, and by the contract of `new` for the number of bytes.
        unsafe { DeviceMemory::new(self.address, self.len_bytes) }
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        // The table is open, because the memory was imported with it.
        if let Ok(functions) = self.context.driver().peer_functions() {
            // SAFETY: this value has imported the memory once, and users of the memory keep this value: see `memory`.
            self.context.release(functions.ipc_close, |call| unsafe { call(self.address) });
        }
    }
}

/// Creates a stream that waits for no other stream. It lives as long as the process.
pub(crate) fn stream(context: &Context) -> Result<Stream> {
    let create = context.driver().peer_functions()?.stream_create;
    let mut handle = Handle(std::ptr::null_mut());
    // SAFETY: `handle` may be written to, and the context is current.
    context.call(create, |call| unsafe { call(&mut handle, NON_BLOCKING) })?;
    Ok(Stream(handle))
}

/// Enqueues a copy from device memory to device memory.
pub(crate) fn copy(context: &Context, to: DeviceMemory, from: DeviceMemory, stream: Stream) -> Result<()> {
    let copy = context.driver().peer_functions()?.copy_between;
    if to.len_bytes() != from.len_bytes() {
        let (to, from) = (to.len_bytes(), from.len_bytes());
        return Err(Error::invalid_argument(format!("a copy has {from} bytes at its source, and {to} at its target")));
    }
    let distance_bytes = to.address().abs_diff(from.address());
    if distance_bytes < to.len_bytes() {
        let bytes = to.len_bytes();
        return Err(Error::invalid_argument(format!(
            "a copy of {bytes} bytes overlaps: its source and its target are {distance_bytes} bytes apart"
        )));
    }
    let bytes = usize::try_from(to.len_bytes());
    let bytes = bytes.map_err(|_| Error::invalid_argument("a copy exceeds the address space"))?;
    // SAFETY: the creators of the memory and the stream have promised that they live until the work is done, and both
    // sides have `bytes` bytes.
    context.call(copy, |call| unsafe { call(to.address(), from.address(), bytes, stream.0) })
}

//! The table of the driver's functions for memory that processes share, one line each.
//!
//! Owns the names, with the versions of the headers, and the types. Encoded calls do not need these functions, so a driver
//! may lack them. The first use of shared memory opens the table.

use accl_types::Result;

use super::functions::{Address, Code, Size, Stream, Uint};
use crate::library::{Function, OpenLibrary, Vendor, find, functions};

/// Bytes of a handle.
pub(crate) const HANDLE_BYTES: usize = 64;
/// Flag of an import: another device gets access when it needs it.
pub(crate) const LAZY_ACCESS: Uint = 1;
/// Flag of a stream: it does not wait for the default stream, nor the default stream for it.
pub(crate) const NON_BLOCKING: Uint = 1;
/// Code of an allocation for which the device has no memory.
pub(crate) const NO_MEMORY: Code = 2;

/// Name of an allocation of one process in the drivers of all processes of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct IpcHandle([u8; HANDLE_BYTES]);

impl IpcHandle {
    /// Returns the bytes to send to another process.
    pub fn to_bytes(self) -> [u8; HANDLE_BYTES] {
        self.0
    }

    /// Returns the handle that another process has sent.
    pub fn from_bytes(bytes: [u8; HANDLE_BYTES]) -> Self {
        Self(bytes)
    }
}

pub(crate) type OutAddress = *mut Address;
pub(crate) type OutIpcHandle = *mut IpcHandle;
pub(crate) type OutStream = *mut Stream;

functions! {
    both {
        memory_allocate "cuMemAlloc_v2"         "hipMalloc"            (OutAddress, Size) -> Code;
        memory_free     "cuMemFree_v2"          "hipFree"              (Address) -> Code;
        ipc_export      "cuIpcGetMemHandle"     "hipIpcGetMemHandle"   (OutIpcHandle, Address) -> Code;
        ipc_import      "cuIpcOpenMemHandle_v2" "hipIpcOpenMemHandle"  (OutAddress, IpcHandle, Uint) -> Code;
        ipc_close       "cuIpcCloseMemHandle"   "hipIpcCloseMemHandle" (Address) -> Code;
        copy_between    "cuMemcpyDtoDAsync_v2"  "hipMemcpyDtoDAsync"   (Address, Address, Size, Stream) -> Code;
        stream_create   "cuStreamCreate"        "hipStreamCreateWithFlags" (OutStream, Uint) -> Code;
    }
    cuda {}
    hip {}
}

//! Things of torch that a call uses: memory of a device, pinned memory of the host, and streams.
//!
//! Owns the promises that make them usable: a caller makes them once, where it takes an address from torch. Copies need no
//! further promise. Launches do, because their arguments are plain addresses.

use std::ffi::c_void;

use accl_types::{Error, Result};

use super::functions::Handle;

/// A stream of torch, by its native handle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub(super) Handle);

impl Stream {
    /// Returns the stream with a native handle: a `CUstream` or a `hipStream_t`. 0 is the default stream.
    ///
    /// # Safety
    /// The handle is 0, or a stream of the device with which it is used. The stream lives as long as the value is used.
    pub unsafe fn new(native_handle: u64) -> Self {
        Self(Handle(native_handle as usize as *mut c_void))
    }
}

/// Bytes in the memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    address: u64,
    len_bytes: u64,
}

impl DeviceMemory {
    /// Returns the memory at an address.
    ///
    /// # Safety
    /// The bytes belong to one allocation on the device with which the value is used. They stay allocated until the
    /// device has done all work to which the value was given. Work on other streams does not write them meanwhile, nor read
    /// them if that work writes them.
    pub unsafe fn new(address: u64, len_bytes: u64) -> Self {
        Self { address, len_bytes }
    }

    /// Returns the address on the device.
    pub fn address(self) -> u64 {
        self.address
    }

    /// Returns the number of bytes.
    pub fn len_bytes(self) -> u64 {
        self.len_bytes
    }

    /// Returns a part of the memory.
    ///
    /// # Errors
    /// `InvalidArgument` if the part is not inside the memory.
    pub fn part(self, offset_bytes: u64, len_bytes: u64) -> Result<Self> {
        inside(offset_bytes, len_bytes, self.len_bytes)?;
        Ok(Self { address: self.address + offset_bytes, len_bytes })
    }
}

/// Bytes in pinned memory of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    address: usize,
    len_bytes: u64,
}

impl HostMemory {
    /// Returns the memory at an address.
    ///
    /// # Safety
    /// The bytes are pinned, or the caller accepts that the driver copies them before it returns. They stay allocated until the device has
    /// done all work to which the value was given. Until then the host does not read bytes that the work writes, and does
    /// not write bytes that it reads.
    pub unsafe fn new(address: *mut u8, len_bytes: u64) -> Self {
        Self { address: address as usize, len_bytes }
    }

    /// Returns the address.
    pub fn address(self) -> *mut u8 {
        self.address as *mut u8
    }

    /// Returns the number of bytes.
    pub fn len_bytes(self) -> u64 {
        self.len_bytes
    }

    /// Returns a part of the memory.
    ///
    /// # Errors
    /// `InvalidArgument` if the part is not inside the memory.
    pub fn part(self, offset_bytes: u64, len_bytes: u64) -> Result<Self> {
        inside(offset_bytes, len_bytes, self.len_bytes)?;
        Ok(Self { address: self.address + offset_bytes as usize, len_bytes })
    }
}

fn inside(offset_bytes: u64, len_bytes: u64, of_bytes: u64) -> Result<()> {
    if offset_bytes.checked_add(len_bytes).is_some_and(|end| end <= of_bytes) {
        return Ok(());
    }
    Err(Error::invalid_argument(format!("expected bytes inside of {of_bytes}, got {len_bytes} from {offset_bytes}")))
}

//! Contract of the code that copies on the streams of an accelerator. In the product, the shim keeps it with torch's
//! streams, events and pinned memory.
//!
//! This module owns nothing else. Read [`CallStreams`] first.

use std::any::Any;
use std::fmt;

use accl_engine::LentMemory;
use accl_gpu::{Libraries, Vendor};
use accl_types::{Error, Result};

/// Direction of a copy, as the host sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From a tensor to host memory.
    In,
    /// From host memory to a tensor.
    Out,
}

/// One copy between a tensor and host memory.
#[derive(Clone, Copy, Debug)]
pub struct StreamCopy {
    /// Direction of the copy.
    pub direction: Direction,
    /// Index of the tensor: see [`accl_engine::ExternalCopy::piece`].
    pub piece: u32,
    /// First byte of the tensor's elements in row-major order.
    pub at: u64,
    /// Address of the host memory.
    pub host: *mut u8,
    /// Number of bytes.
    pub len_bytes: u64,
    /// Whether the host memory is pinned. If not, the copy blocks until it is made.
    pub is_pinned: bool,
}

/// The tensors of one call, and the side streams on which they are copied.
///
/// Copies in wait for the work that the caller's stream had when the call was issued. The value may be dropped on any
/// thread.
pub trait CallStreams: Send + fmt::Debug {
    /// Returns the name of the device, for messages, such as `cuda:0`.
    fn device(&self) -> String;

    /// Returns whether copies in this direction may be enqueued now; once `true`, it stays `true`. Never blocks.
    ///
    /// Copies to tensors must wait until the caller's stream has come to the call. Otherwise they would keep copies of
    /// other calls from a side stream, and what the caller's stream waits for may depend on these.
    ///
    /// # Errors
    /// `Device` as for [`CallStreams::copy`].
    fn may_copy(&mut self, direction: Direction) -> Result<bool>;

    /// Enqueues a copy and returns. The memory must stay until an event that is recorded later has come.
    ///
    /// # Errors
    /// `Device` if the device does not take the copy, for example because its context is broken.
    fn copy(&mut self, copy: StreamCopy) -> Result<()>;

    /// Records an event behind the copies in this direction.
    ///
    /// # Errors
    /// `Device` as for [`CallStreams::copy`].
    fn record(&mut self, direction: Direction) -> Result<Box<dyn StreamEvent>>;

    /// Returns the GPU on which kernels may run for the call; `None` if its type of device has no kernels.
    fn gpu(&self) -> Option<GpuDevice> {
        None
    }

    /// Returns the native handle of the stream of copies to the tensors, on which kernels run. It lives as long as the process.
    ///
    /// # Errors
    /// `Device` if torch does not give it.
    fn native_stream(&mut self) -> Result<u64> {
        Err(Error::internal(format!("{} has no native stream for kernels", self.device())))
    }

    /// Allocates memory of the device for kernels on that stream. May wait for the device, so it is called in the thread that
    /// issues the call.
    ///
    /// # Errors
    /// `Device` if there is no memory.
    fn allocate(&mut self, len_bytes: u64) -> Result<DeviceRoom> {
        Err(Error::internal(format!("{} has no {len_bytes} bytes for kernels", self.device())))
    }

    /// Follows the last copy to the tensors, before an event is recorded behind it. Not called for a call that has failed
    /// or writes no tensor.
    ///
    /// # Errors
    /// `Device` as for [`CallStreams::copy`].
    fn finish(&mut self) -> Result<()>;
}

/// A GPU as torch numbers it.
#[derive(Clone, Debug)]
pub struct GpuDevice {
    /// Whose driver and compiler serve it.
    pub vendor: Vendor,
    /// torch's index of the device.
    pub ordinal: u32,
    /// Candidates for the libraries, in place of those that torch uses. For tests.
    pub libraries: Option<Libraries>,
}

/// Memory of a device. It is freed when the value is dropped.
pub struct DeviceRoom {
    /// Address on the device.
    pub address: u64,
    /// Owner of the memory.
    pub owner: Box<dyn Any + Send + Sync>,
}

impl fmt::Debug for DeviceRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceRoom").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Point in a stream.
pub trait StreamEvent: Send + fmt::Debug {
    /// Returns whether the device has come to the event. Never blocks.
    ///
    /// # Errors
    /// `Device` if the device has failed, so that the event will never come.
    fn has_come(&self) -> Result<bool>;
}

/// A type of device: its host memory, from which and to which it copies without the processor, and its threads.
pub trait Pinning: Send + Sync + fmt::Debug {
    /// Returns pinned memory; `None` if this system cannot pin so much.
    fn allocate(&self, len_bytes: usize) -> Option<LentMemory>;

    /// Prepares the thread that asks the device for events, before it asks for the first one.
    fn enter_thread(&self) {}
}

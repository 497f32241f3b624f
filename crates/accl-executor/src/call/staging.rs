//! Contract of the code that copies the tensors of a call between other memory and host memory.
//!
//! This module owns nothing else. `plan::staging` decides which bytes are copied and in which order, and
//! [`external`](super::external) reports the progress of the copies. Read [`Staging`] first.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use accl_types::{Dtype, Elems, Result};

use super::external::External;
use super::external_copy::ExternalCopy;
use super::tensor::TensorDesc;

/// Stages the tensors of one call: copies them to host memory and back.
pub trait Staging: Send + Sync + fmt::Debug {
    /// Lends the call at least `len_bytes` bytes of host memory for its copies. With `None`, the executor uses memory of
    /// its own.
    ///
    /// # Errors
    /// `Exhausted` if there is no memory.
    fn lend(&self, len_bytes: usize) -> Result<Option<LentMemory>> {
        let _ = len_bytes;
        Ok(None)
    }

    /// Begins to copy a tensor to host memory, or prepares that. Runs in the thread that issues the call, without a
    /// lock. Returns the worker of the copy-in, whose task has these copies. Only the first `ready` of them may be made
    /// before the task says more. If the call is refused, the worker is dropped without a task. `keeps` owns the host
    /// memory, and has to live as long as copies are in flight.
    ///
    /// # Errors
    /// The reason why the call is refused.
    fn copy_in(
        &self,
        copies: &[ExternalCopy],
        ready: usize,
        keeps: &Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<dyn External>>;

    /// Returns the bytes of host memory through which a message between two ranks passes, if it has more bytes. They have
    /// to hold one and one seventh of a segment, the maximum payload of a frame, which is at most 4 MiB.
    fn ring_bytes(&self) -> u64 {
        8 << 20
    }

    /// Returns the worker that copies results from host memory to the tensors.
    fn copy_out(&self) -> Arc<dyn External>;
}

/// Host memory that belongs to another library, such as pinned memory.
pub struct LentMemory {
    pub(crate) bytes: TensorDesc,
    _owner: Box<dyn Any + Send + Sync>,
}

impl LentMemory {
    /// Lends `len_bytes` bytes at `ptr`. `owner` is dropped once nothing uses the memory any more. It may be dropped
    /// under the engine's lock, so it must neither block nor call the engine.
    ///
    /// # Safety
    /// Until `owner` is dropped, the bytes must be readable and writable, and no other code may access them.
    pub unsafe fn new(ptr: *mut u8, len_bytes: usize, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self { bytes: TensorDesc::dense(ptr, Dtype::U8, Elems(len_bytes as u64)), _owner: owner }
    }
}

impl fmt::Debug for LentMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentMemory").field("bytes", &self.bytes.len_bytes()).finish_non_exhaustive()
    }
}

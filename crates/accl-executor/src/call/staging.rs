//! Contract of the code that copies the tensors of a call between other memory and host memory.
//!
//! This module owns nothing else. `plan::staging` decides which bytes are copied and in which order, and
//! [`external`](super::external) reports the progress of the copies. Read [`Staging`] first.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use accl_types::{Dtype, Elems, Error, Result};

use super::encoding::Codecs;
use super::external::{External, Wake};
use super::external_copy::ExternalCopy;
use super::published::PublishingNeeds;
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
    /// before the task says more. `keeps` owns the host memory, and has to live as long as copies are in flight.
    ///
    /// If the call or one of its parts is refused, the worker is dropped without a task. The call may then be over while
    /// copies still read its tensors, so the worker has to keep these alive, too.
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

    /// Returns the worker that copies results from host memory to the tensors. Each part of a call has one, and all are
    /// asked for before the first of them begins.
    fn copy_out(&self) -> Arc<dyn External>;

    /// Returns the worker that computes the combinations of an encoded call where its tensors of this dtype lie, so that
    /// encoded bytes alone leave the device. Each combination is a task of its own, and tasks whose tiles depend on each other
    /// follow each other. With `None`, the host's codecs work on copies in host memory.
    ///
    /// The memory of the encoded bytes, and of the sample of a measured call, is lent by [`Staging::lend`].
    fn coder(&self, codecs: &Codecs, dtype: Dtype, needs: CoderNeeds) -> Option<Arc<dyn External>> {
        let _ = (codecs, dtype, needs);
        None
    }

    /// Returns the worker of a call by reference: see [`CallDesc::is_by_reference`](super::CallDesc::is_by_reference). Runs in
    /// the thread that issues the call, without a lock.
    ///
    /// # Errors
    /// `Exhausted` if there is no memory to publish in. The reason why the call is refused.
    fn publisher(&self, needs: PublishingNeeds) -> Result<Publisher> {
        let _ = needs;
        Err(Error::internal("no memory that other ranks can read"))
    }

    /// Returns the flag that is set when the last copy of all parts is enqueued. `None` if no thread continues before
    /// the call completes; also for a call that writes no tensor.
    fn enqueued(&self) -> Option<Arc<dyn Enqueued>> {
        None
    }
}

/// Worker of a call by reference.
#[derive(Clone)]
pub struct Publisher {
    /// Does the tasks, each of which is an [`ExternalReduction`](super::published::ExternalReduction).
    pub worker: Arc<dyn External>,
    /// Address of the temporary memory, which lives as long as the worker. Only the worker uses it.
    pub scratch: *mut u8,
}

impl fmt::Debug for Publisher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Publisher").field("worker", &self.worker.name()).finish_non_exhaustive()
    }
}

/// Needs of an encoded call in addition to its codecs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoderNeeds {
    /// Error feedback.
    pub residuals: bool,
    /// Figures: see [`ExternalCombination::is_measured`](super::combination::ExternalCombination::is_measured).
    pub figures: bool,
}

/// Flag of a staged call that has nothing left to do but copies that are enqueued on the device. Work that the device does
/// behind these copies sees the results, so a waiting thread may continue before the call completes.
pub trait Enqueued: Send + Sync + fmt::Debug {
    /// Returns whether all copies are enqueued. A thread that sees this also sees what the worker wrote before.
    fn is_set(&self) -> bool;

    /// Calls `notify` with `false` before the flag is set, and with `true` after; at once if it is set. `notify` neither
    /// blocks nor calls the engine.
    fn notify_with(&self, notify: Box<dyn Fn(bool) + Send>);
}

/// Where the parts of a staged call meet. Each copies in its own bytes, and what needs the bytes of all parts waits here.
pub trait Meeting: Send + Sync + fmt::Debug {
    /// Records that one part has copied in its bytes; each part does this once. `wake` wakes the part's thread when
    /// [`Meeting::has_news`] changes. It runs under a lock, as the end of an external operation does.
    fn note_copied_in(&self, wake: &Wake);

    /// Returns whether all parts have copied in their bytes.
    fn are_copied_in(&self) -> bool;

    /// Lets all parts go on. The first part does this when all parts have their bytes.
    fn open(&self);

    /// Returns whether all parts may go on.
    fn is_open(&self) -> bool;

    /// Returns whether a part that waits should look again.
    fn has_news(&self) -> bool {
        self.is_open() || self.are_copied_in()
    }
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

    /// Lends memory that is not pinned.
    pub fn pageable(mut memory: Box<[u8]>) -> Self {
        let (ptr, len_bytes) = (memory.as_mut_ptr(), memory.len());
        // SAFETY: the owner has the memory, and no other code has access to it.
        unsafe { Self::new(ptr, len_bytes, Box::new(memory)) }
    }

    /// Returns the address of the first byte. The owner of this value has exclusive access to the bytes.
    pub fn address(&self) -> *mut u8 {
        self.bytes.address()
    }

    /// Number of bytes.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len_bytes() as usize
    }

    /// Returns the same memory, which is passed to `back` once nothing uses it any more. `back` may run under the engine's
    /// lock, so it must neither block nor call the engine.
    #[must_use]
    pub fn returned_to(self, back: impl FnOnce(Self) + Send + Sync + 'static) -> Self {
        let bytes = self.bytes.clone();
        Self { bytes, _owner: Box::new(Returned(Some((self, Box::new(back))))) }
    }
}

/// Owner that passes its memory on when it is dropped.
struct Returned(Option<(LentMemory, Back)>);

type Back = Box<dyn FnOnce(LentMemory) + Send + Sync>;

impl Drop for Returned {
    fn drop(&mut self) {
        if let Some((memory, back)) = self.0.take() {
            back(memory);
        }
    }
}

// SAFETY: a shared reference gives access to nothing but the number of bytes.
unsafe impl Sync for LentMemory {}

impl fmt::Debug for LentMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LentMemory").field("bytes", &self.bytes.len_bytes()).finish_non_exhaustive()
    }
}

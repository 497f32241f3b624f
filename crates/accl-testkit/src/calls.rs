//! Short blocking forms of the calls over plain slices.

use std::sync::Arc;
use std::time::Duration;

use accl_engine::{Blocks, Call, CallDesc, Group, Mode, Submitted, TensorDesc, Waited};
use accl_types::{Collective, Dtype, Elems, Error, Rank, ReduceOp, Result};

/// A rank of a world's group.
#[derive(Clone)]
pub struct Member {
    /// The group.
    pub group: Arc<Group>,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub world: usize,
}

/// Element types of the short forms.
pub trait Element: Copy + Send + Sync {
    /// Dtype of the element type.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($ty:ty = $dtype:ident),*) => { $(impl Element for $ty { const DTYPE: Dtype = Dtype::$dtype; })* };
}
elements!(u8 = U8, i8 = I8, u16 = U16, i16 = I16, u32 = U32, i32 = I32, u64 = U64, i64 = I64, f32 = F32, f64 = F64);

/// Returns a dense tensor over a slice that the call only reads.
pub fn read<T: Element>(data: &[T]) -> TensorDesc {
    TensorDesc::dense(data.as_ptr().cast_mut().cast(), T::DTYPE, Elems(data.len() as u64))
}

/// Returns a dense tensor over a slice that the call writes.
pub fn write<T: Element>(data: &mut [T]) -> TensorDesc {
    TensorDesc::dense(data.as_mut_ptr().cast(), T::DTYPE, Elems(data.len() as u64))
}

/// Cuts a slice into consecutive blocks; `counts` are their lengths in elements.
fn blocks<T: Element>(base: *mut T, counts: &[usize]) -> Blocks {
    let mut at = 0;
    counts
        .iter()
        .map(|&count| {
            let tensor = TensorDesc::dense(base.wrapping_add(at).cast(), T::DTYPE, Elems(count as u64));
            at += count;
            [tensor]
        })
        .collect()
}

impl Member {
    /// Creates the handle of this process's rank in `group`.
    pub fn new(group: Arc<Group>) -> Self {
        let (rank, world) = (group.rank().index(), group.world() as usize);
        Self { group, rank, world }
    }

    /// Submits a call and waits for it.
    ///
    /// # Errors
    /// The error of the submission or of the call.
    pub fn call(&self, mut desc: CallDesc) -> Result<()> {
        finish_submitted(&self.group.submit_blocking(&mut desc)?)
    }

    /// Reduces all ranks' data with `op`, in place.
    ///
    /// # Errors
    /// See [`Member::call`].
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        self.call(self.all_reduce_desc(data, op, Mode::Blocking))
    }

    /// Describes an all_reduce in place.
    pub fn all_reduce_desc<T: Element>(&self, data: &mut [T], op: ReduceOp, mode: Mode) -> CallDesc {
        let mut desc = CallDesc::new(Collective::AllReduce, T::DTYPE);
        desc.op = op;
        desc.mode = mode;
        desc.outputs = Blocks::of(write(data));
        desc
    }

    /// Copies the root's data to all ranks.
    ///
    /// # Errors
    /// See [`Member::call`].
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: u32) -> Result<()> {
        let mut desc = CallDesc::new(Collective::Broadcast, T::DTYPE);
        desc.root = Rank(root);
        desc.outputs = Blocks::of(write(data));
        self.call(desc)
    }

    /// Reduces all ranks' data with `op`; only the root gets the result.
    ///
    /// # Errors
    /// See [`Member::call`].
    pub fn reduce<T: Element>(&self, data: &mut [T], op: ReduceOp, root: u32) -> Result<()> {
        let mut desc = CallDesc::new(Collective::Reduce, T::DTYPE);
        desc.op = op;
        desc.root = Rank(root);
        desc.outputs = Blocks::of(write(data));
        self.call(desc)
    }

    /// Reduces all ranks' inputs; rank r gets block r. `counts` are the blocks' lengths in elements.
    ///
    /// # Errors
    /// See [`Member::call`].
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        counts: &[usize],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        let mut desc = CallDesc::new(Collective::ReduceScatter, T::DTYPE);
        desc.op = op;
        desc.inputs = blocks(input.as_ptr().cast_mut(), counts);
        desc.outputs = Blocks::of(write(output));
        self.call(desc)
    }

    /// Gathers all ranks' inputs on all ranks. `counts` are their lengths in elements.
    ///
    /// # Errors
    /// See [`Member::call`].
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T], counts: &[usize]) -> Result<()> {
        let mut desc = CallDesc::new(Collective::AllGather, T::DTYPE);
        desc.inputs = Blocks::of(read(input));
        desc.outputs = blocks(output.as_mut_ptr(), counts);
        self.call(desc)
    }

    /// Gathers all ranks' inputs on the root. `output` is empty on the other ranks.
    ///
    /// # Errors
    /// See [`Member::call`].
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: u32) -> Result<()> {
        let mut desc = CallDesc::new(Collective::Gather, T::DTYPE);
        desc.root = Rank(root);
        desc.inputs = Blocks::of(read(input));
        if self.rank == root as usize {
            desc.outputs = blocks(output.as_mut_ptr(), &vec![input.len(); self.world]);
        }
        self.call(desc)
    }

    /// Sends one of the root's blocks to each rank. `input` is empty on the other ranks.
    ///
    /// # Errors
    /// See [`Member::call`].
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: u32) -> Result<()> {
        let mut desc = CallDesc::new(Collective::Scatter, T::DTYPE);
        desc.root = Rank(root);
        if self.rank == root as usize {
            desc.inputs = blocks(input.as_ptr().cast_mut(), &vec![output.len(); self.world]);
        }
        desc.outputs = Blocks::of(write(output));
        self.call(desc)
    }

    /// Sends block d to rank d, for all d. `equal` states that all blocks on all ranks have the same length.
    ///
    /// # Errors
    /// See [`Member::call`].
    pub fn all_to_all<T: Element>(
        &self,
        input: &[T],
        input_counts: &[usize],
        output: &mut [T],
        output_counts: &[usize],
        equal: bool,
    ) -> Result<()> {
        let mut desc = CallDesc::new(Collective::AllToAll, T::DTYPE);
        desc.equal_blocks = equal;
        desc.inputs = blocks(input.as_ptr().cast_mut(), input_counts);
        desc.outputs = blocks(output.as_mut_ptr(), output_counts);
        self.call(desc)
    }

    /// Waits until all ranks have entered the barrier.
    ///
    /// # Errors
    /// See [`Member::call`].
    pub fn barrier(&self) -> Result<()> {
        self.call(CallDesc::new(Collective::Barrier, Dtype::U8))
    }

    /// Starts a send.
    ///
    /// # Errors
    /// The error of the submission.
    pub fn post_send<T: Element>(&self, data: &[T], to: u32, tag: u32) -> Result<Call> {
        let mut desc = CallDesc::new(Collective::Send, T::DTYPE);
        desc.peer = Some(Rank(to));
        desc.tag = tag;
        desc.mode = Mode::Async;
        desc.inputs = Blocks::of(read(data));
        self.group.submit(desc)
    }

    /// Starts a receive. Without `from`, it accepts a message from any rank.
    ///
    /// # Errors
    /// The error of the submission.
    pub fn post_recv<T: Element>(&self, data: &mut [T], from: Option<u32>, tag: u32) -> Result<Call> {
        let mut desc = CallDesc::new(Collective::Recv, T::DTYPE);
        desc.peer = from.map(Rank);
        desc.tag = tag;
        desc.mode = Mode::Async;
        desc.outputs = Blocks::of(write(data));
        self.group.submit(desc)
    }
}

/// Waits for a submitted call, unless it is done already.
///
/// # Errors
/// See [`finish`].
pub fn finish_submitted(ran: &Submitted) -> Result<()> {
    match ran {
        Submitted::Done(_) => Ok(()),
        Submitted::Pending(call) => finish(call),
    }
}

/// Waits for a call without interrupts.
///
/// # Errors
/// The error of the call, or `Timeout` if it has not completed after two minutes.
pub fn finish(call: &Call) -> Result<()> {
    match call.wait(Some(Duration::from_secs(120)), &mut || false) {
        Waited::Done => Ok(()),
        Waited::Failed(error) | Waited::TimedOut(error) => Err(error),
        Waited::Interrupted => Err(Error::internal("interrupted without an interrupt")),
    }
}

//! Short forms of the calls over plain slices, blocking.

use std::sync::Arc;
use std::time::Duration;

use accl_engine::{Blocks, Call, CallDesc, Group, Mode, Ran, TensorDesc, Waited};
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
    /// The dtype.
    const DTYPE: Dtype;
}

macro_rules! elements {
    ($($ty:ty = $dtype:ident),*) => { $(impl Element for $ty { const DTYPE: Dtype = Dtype::$dtype; })* };
}
elements!(u8 = U8, i8 = I8, u16 = U16, i16 = I16, u32 = U32, i32 = I32, u64 = U64, i64 = I64, f32 = F32, f64 = F64);

/// A dense tensor over a slice that the call may only read.
pub fn read<T: Element>(data: &[T]) -> TensorDesc {
    TensorDesc::dense(data.as_ptr().cast_mut().cast(), T::DTYPE, Elems(data.len() as u64))
}

/// A dense tensor over a slice that the call writes.
pub fn write<T: Element>(data: &mut [T]) -> TensorDesc {
    TensorDesc::dense(data.as_mut_ptr().cast(), T::DTYPE, Elems(data.len() as u64))
}

/// Cuts a slice into blocks of the given lengths.
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
    /// A rank of this group.
    pub fn new(group: Arc<Group>) -> Self {
        let (rank, world) = (group.rank().index(), group.world() as usize);
        Self { group, rank, world }
    }

    /// Submits and waits.
    ///
    /// # Errors
    /// What submission or the call says.
    pub fn call(&self, desc: CallDesc) -> Result<()> {
        finish_ran(&self.group.run(&desc)?)
    }

    /// Sum (or another reduction) of all ranks' data, in place.
    ///
    /// # Errors
    /// As [`Member::call`].
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        self.call(self.all_reduce_desc(data, op, Mode::Blocking))
    }

    /// The description of an all_reduce in place.
    pub fn all_reduce_desc<T: Element>(&self, data: &mut [T], op: ReduceOp, mode: Mode) -> CallDesc {
        let mut desc = CallDesc::new(Collective::AllReduce, T::DTYPE);
        desc.op = op;
        desc.mode = mode;
        desc.outputs = Blocks::of(write(data));
        desc
    }

    /// The root's data on all ranks.
    ///
    /// # Errors
    /// As [`Member::call`].
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: u32) -> Result<()> {
        let mut desc = CallDesc::new(Collective::Broadcast, T::DTYPE);
        desc.root = Rank(root);
        desc.outputs = Blocks::of(write(data));
        self.call(desc)
    }

    /// The reduction on the root only.
    ///
    /// # Errors
    /// As [`Member::call`].
    pub fn reduce<T: Element>(&self, data: &mut [T], op: ReduceOp, root: u32) -> Result<()> {
        let mut desc = CallDesc::new(Collective::Reduce, T::DTYPE);
        desc.op = op;
        desc.root = Rank(root);
        desc.outputs = Blocks::of(write(data));
        self.call(desc)
    }

    /// Block r of the reduction to rank r; `counts` are the blocks' lengths.
    ///
    /// # Errors
    /// As [`Member::call`].
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

    /// All ranks' inputs; `counts` are their lengths.
    ///
    /// # Errors
    /// As [`Member::call`].
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T], counts: &[usize]) -> Result<()> {
        let mut desc = CallDesc::new(Collective::AllGather, T::DTYPE);
        desc.inputs = Blocks::of(read(input));
        desc.outputs = blocks(output.as_mut_ptr(), counts);
        self.call(desc)
    }

    /// All ranks' inputs on the root; `output` is empty elsewhere.
    ///
    /// # Errors
    /// As [`Member::call`].
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: u32) -> Result<()> {
        let mut desc = CallDesc::new(Collective::Gather, T::DTYPE);
        desc.root = Rank(root);
        desc.inputs = Blocks::of(read(input));
        if self.rank == root as usize {
            desc.outputs = blocks(output.as_mut_ptr(), &vec![input.len(); self.world]);
        }
        self.call(desc)
    }

    /// The root's blocks, one to each rank; `input` is empty elsewhere.
    ///
    /// # Errors
    /// As [`Member::call`].
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: u32) -> Result<()> {
        let mut desc = CallDesc::new(Collective::Scatter, T::DTYPE);
        desc.root = Rank(root);
        if self.rank == root as usize {
            desc.inputs = blocks(input.as_ptr().cast_mut(), &vec![output.len(); self.world]);
        }
        desc.outputs = Blocks::of(write(output));
        self.call(desc)
    }

    /// Block d to rank d, for all d; with `equal`, the lengths are known to be the same everywhere.
    ///
    /// # Errors
    /// As [`Member::call`].
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

    /// Nobody leaves before all have entered.
    ///
    /// # Errors
    /// As [`Member::call`].
    pub fn barrier(&self) -> Result<()> {
        self.call(CallDesc::new(Collective::Barrier, Dtype::U8))
    }

    /// Starts a send.
    ///
    /// # Errors
    /// What submission says.
    pub fn post_send<T: Element>(&self, data: &[T], to: u32, tag: u32) -> Result<Call> {
        let mut desc = CallDesc::new(Collective::Send, T::DTYPE);
        desc.peer = Some(Rank(to));
        desc.tag = tag;
        desc.mode = Mode::Async;
        desc.inputs = Blocks::of(read(data));
        self.group.submit(desc)
    }

    /// Starts a receive, from any rank without `from`.
    ///
    /// # Errors
    /// What submission says.
    pub fn post_recv<T: Element>(&self, data: &mut [T], from: Option<u32>, tag: u32) -> Result<Call> {
        let mut desc = CallDesc::new(Collective::Recv, T::DTYPE);
        desc.peer = from.map(Rank);
        desc.tag = tag;
        desc.mode = Mode::Async;
        desc.outputs = Blocks::of(write(data));
        self.group.submit(desc)
    }
}

/// Waits for a call that has begun, if it is not done yet.
///
/// # Errors
/// As [`finish`].
pub fn finish_ran(ran: &Ran) -> Result<()> {
    match ran {
        Ran::Done(_) => Ok(()),
        Ran::Pending(call) => finish(call),
    }
}

/// Waits for a call without interrupts.
///
/// # Errors
/// The call's own, or `Timeout` when it hangs for two minutes.
pub fn finish(call: &Call) -> Result<()> {
    match call.wait(Some(Duration::from_secs(120)), &mut || false) {
        Waited::Done => Ok(()),
        Waited::Failed(error) | Waited::TimedOut(error) => Err(error),
        Waited::Interrupted => Err(Error::internal("interrupted without an interrupt")),
    }
}

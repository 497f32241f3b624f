//! Descriptions of calls and tensors, and their check: the only validator of arguments below the shim.

use std::time::Duration;

use accl_kernels::StridedView;
use accl_types::{Collective, Dtype, Error, Rank, ReduceOp, Result};
use smallvec::SmallVec;

use crate::encoding::{self, Encoded, Encoding};

/// A tensor's memory: `ptr` points to its first element.
///
/// The caller keeps the memory alive and untouched until the call is done or failed.
#[derive(Clone, Debug)]
pub struct TensorDesc {
    /// First element; may be null when the tensor is empty.
    pub(crate) ptr: *mut u8,
    pub(crate) dtype: Dtype,
    /// The memory holds the conjugate of the value.
    pub(crate) conj: bool,
    /// The memory holds the negative of the value.
    pub(crate) neg: bool,
    count: u64,
    /// How the elements lie, unless densely in row-major order.
    strided: Option<Box<Strided>>,
}

/// The shape of a tensor that is not dense, in elements.
#[derive(Clone, Debug)]
struct Strided {
    sizes: SmallVec<[i64; 4]>,
    strides: SmallVec<[i64; 4]>,
}

// SAFETY: a descriptor is an address with a shape; who may use the memory and when is the contract of `Group::submit`.
unsafe impl Send for TensorDesc {}

impl TensorDesc {
    /// A dense tensor.
    pub fn dense(ptr: *mut u8, dtype: Dtype, count_elems: usize) -> Self {
        Self { ptr, dtype, conj: false, neg: false, count: count_elems as u64, strided: None }
    }

    /// A tensor of any layout; sizes and strides are in elements, none of both for a zero-dimensional one.
    ///
    /// # Errors
    /// `Internal` for sizes that cannot be a tensor's.
    pub fn strided(ptr: *mut u8, dtype: Dtype, sizes: &[i64], strides: &[i64]) -> Result<Self> {
        let count = sizes.iter().try_fold(1_u64, |count, &size| count.checked_mul(u64::try_from(size).ok()?));
        let Some(count) = count.filter(|_| sizes.len() == strides.len()) else {
            return Err(Error::internal("a tensor was described with unfit sizes"));
        };
        let mut expected = 1;
        let mut dense = true;
        for (&size, &stride) in sizes.iter().zip(strides).rev() {
            dense &= size == 1 || stride == expected;
            expected *= size;
        }
        let strided = (!dense && count > 0)
            .then(|| Box::new(Strided { sizes: SmallVec::from_slice(sizes), strides: SmallVec::from_slice(strides) }));
        Ok(Self { ptr, dtype, conj: false, neg: false, count, strided })
    }

    /// Memory that holds the conjugate, the negative or both of the value.
    #[must_use]
    pub fn viewed(mut self, conj: bool, neg: bool) -> Self {
        (self.conj, self.neg) = (conj, neg);
        self
    }

    /// Number of elements.
    #[inline]
    pub fn count_elems(&self) -> u64 {
        self.count
    }

    /// Size in bytes.
    #[inline]
    pub(crate) fn len_bytes(&self) -> u64 {
        self.count * self.dtype.size_bytes() as u64
    }

    /// Whether the memory is the value itself in row-major order, so that it can be sent from and received into.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.strided.is_none() && !self.conj && !self.neg
    }

    /// Whether several elements lie at one address.
    pub(crate) fn is_expanded(&self) -> bool {
        let repeats = |s: &Strided| s.sizes.iter().zip(&s.strides).any(|(&size, &stride)| size > 1 && stride == 0);
        self.strided.as_deref().is_some_and(repeats)
    }

    /// Lowest and one past the highest address that the tensor touches.
    pub(crate) fn bounds(&self) -> (usize, usize) {
        if self.count == 0 {
            return (0, 0);
        }
        let elems = self.strided.as_deref().map_or(self.count, |s| {
            let last: i64 = s.sizes.iter().zip(&s.strides).map(|(&size, &stride)| (size - 1) * stride).sum();
            last as u64 + 1
        });
        let start = self.ptr as usize;
        (start, start + elems as usize * self.dtype.size_bytes())
    }

    /// For the kernels that pack and unpack; `dense` is storage for the shape of a dense tensor.
    pub(crate) fn view<'a>(&'a self, dense: &'a mut [i64; 2]) -> StridedView<'a> {
        *dense = [self.count as i64, 1];
        let (sizes, strides) = match &self.strided {
            Some(strided) => (&strided.sizes[..], &strided.strides[..]),
            None => dense.split_at(1),
        };
        StridedView { ptr: self.ptr, dtype: self.dtype, sizes, strides, conj: self.conj, neg: self.neg }
    }
}

/// A list of blocks, each a list of pieces: block r is what goes to or comes from rank r; several pieces are the
/// tensors of a coalesced call.
#[derive(Clone, Debug, Default)]
pub struct Blocks {
    pieces: SmallVec<[TensorDesc; 1]>,
    /// Where each block ends in `pieces`.
    ends: SmallVec<[u32; 4]>,
}

impl Blocks {
    /// One block of one tensor.
    pub fn of(tensor: TensorDesc) -> Self {
        let mut blocks = Self::default();
        blocks.push([tensor]);
        blocks
    }

    /// Adds a block.
    pub fn push(&mut self, block: impl IntoIterator<Item = TensorDesc>) {
        self.pieces.extend(block);
        self.ends.push(self.pieces.len() as u32);
    }

    /// Number of blocks.
    #[inline]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there is no block.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The pieces of a block.
    pub fn get(&self, index: usize) -> Option<&[TensorDesc]> {
        let end = *self.ends.get(index)? as usize;
        let start = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        self.pieces.get(start..end)
    }

    /// The blocks in order.
    pub fn iter(&self) -> impl Iterator<Item = &[TensorDesc]> {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// The tensor of a list that is one block of one tensor.
    #[inline]
    fn alone(&self) -> Option<&TensorDesc> {
        match &self.pieces[..] {
            [tensor] if self.ends.len() == 1 => Some(tensor),
            _ => None,
        }
    }

    /// Where each block ends among the pieces.
    #[inline]
    pub(crate) fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// All pieces in order.
    #[inline]
    pub fn pieces(&self) -> &[TensorDesc] {
        &self.pieces
    }
}

impl<B: IntoIterator<Item = TensorDesc>> FromIterator<B> for Blocks {
    fn from_iter<I: IntoIterator<Item = B>>(blocks: I) -> Self {
        let mut all = Self::default();
        blocks.into_iter().for_each(|block| all.push(block));
        all
    }
}

/// Whether the caller waits at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The caller waits next: no other thread is woken for the call.
    Blocking,
    /// The caller goes on: somebody else must make progress.
    Async,
}

/// One call, as plain data.
#[derive(Clone, Debug)]
pub struct CallDesc {
    /// What to do.
    pub collective: Collective,
    /// Element type of all tensors. Calls that only move data may mix types: then this is the first one's.
    pub dtype: Dtype,
    /// How to combine contributions.
    pub op: ReduceOp,
    /// The factor of `PREMUL_SUM`; 1.0 otherwise.
    pub factor: f64,
    /// The root of a rooted collective; 0 otherwise.
    pub root: Rank,
    /// The other side of a send or receive; `None` receives from any rank.
    pub peer: Option<Rank>,
    /// The tag of a send or receive.
    pub tag: u32,
    /// A word that goes with a send of the engine itself; 0 otherwise.
    pub note: u64,
    /// Own deadline; `None` takes the group's.
    pub timeout: Option<Duration>,
    /// What this rank contributes. Empty for calls in place and off a scatter's root.
    pub inputs: Blocks,
    /// What this rank receives. Empty off a gather's root.
    pub outputs: Blocks,
    /// All ranks' blocks have equal sizes by construction (no splits were given).
    pub equal_blocks: bool,
    /// Whether the caller waits at once.
    pub mode: Mode,
    /// A number reserved with `Group::reserve_seqs`; `None` takes the next.
    pub seq: Option<u64>,
    /// Whether messages are encoded, and how.
    pub encoding: Encoded,
}

impl CallDesc {
    /// A call of `collective` without tensors; fill in the rest.
    pub fn new(collective: Collective, dtype: Dtype) -> Self {
        Self {
            collective,
            dtype,
            op: ReduceOp::Sum,
            factor: 1.0,
            root: Rank(0),
            peer: None,
            tag: 0,
            note: 0,
            timeout: None,
            inputs: Blocks::default(),
            outputs: Blocks::default(),
            equal_blocks: true,
            mode: Mode::Blocking,
            seq: None,
            encoding: Encoded::Usual,
        }
    }

    /// Whether the call may take the short way: its caller waits, and it is nothing unusual.
    #[inline]
    pub(crate) fn may_go_straight(&self) -> bool {
        self.mode == Mode::Blocking
            && self.seq.is_none()
            && !matches!(self.encoding, Encoded::As(_))
            && !self.collective.is_point_to_point()
            && self.uses_tensors_as_they_are()
    }

    /// How this call is encoded, if it is.
    pub(crate) fn encoding(&self, world: u32) -> Option<&Encoding> {
        match &self.encoding {
            Encoded::As(encoding) if encoding::applies(self.collective, self.dtype, self.op, world) => Some(encoding),
            Encoded::As(_) | Encoded::Usual | Encoded::Never => None,
        }
    }

    /// The tensor of a call in place that has no other.
    #[inline]
    pub(crate) fn alone(&self) -> Option<&TensorDesc> {
        if self.inputs.is_empty() { self.outputs.alone() } else { None }
    }

    /// Whether all tensors can be sent from and received into.
    #[inline]
    pub(crate) fn uses_tensors_as_they_are(&self) -> bool {
        self.op != ReduceOp::PremulSum
            && self.inputs.pieces().iter().chain(self.outputs.pieces()).all(TensorDesc::is_plain)
    }

    /// Checks the description against the group's size.
    ///
    /// # Errors
    /// `InvalidArgument` for ranks, block counts and sizes that do not fit, and for mixed dtypes where they must
    /// agree; `Unsupported` for an operator that the dtype does not have.
    pub fn check(&self, world: u32) -> Result<()> {
        self.check_ranks(world)?;
        self.check_blocks(world)?;
        if self.collective.reduces() {
            self.check_reduction()?;
        }
        if let Some(encoding) = self.encoding(world) {
            self.check_encoding(encoding)?;
        }
        Ok(())
    }

    /// Tensors of one type, and codecs for each of them.
    fn check_encoding(&self, encoding: &Encoding) -> Result<()> {
        let refused = |why: String| Err(Error::invalid_argument(why).of(self.collective));
        let mut pieces = self.inputs.pieces().iter().chain(self.outputs.pieces());
        if let Some(other) = pieces.find(|piece| piece.dtype != self.dtype) {
            return refused(format!(
                "tensors that are encoded must have one dtype, but one is {} and one {}",
                self.dtype, other.dtype
            ));
        }
        let tensors = encoding.codecs.tensors();
        if let Some(block) = self.inputs.iter().chain(self.outputs.iter()).find(|block| block.len() != tensors) {
            return refused(format!("codecs were given for {tensors} tensors, and there are {}", block.len()));
        }
        Ok(())
    }

    fn check_ranks(&self, world: u32) -> Result<()> {
        let within = |rank: Rank, what: &str| {
            if rank.0 < world {
                return Ok(());
            }
            Err(Error::invalid_argument(format!("{what} {rank} is not a rank of this group, which has {world}"))
                .of(self.collective))
        };
        if self.collective.is_rooted() {
            within(self.root, "root")?;
        }
        if let Some(peer) = self.peer {
            within(peer, "peer")?;
        } else if self.collective == Collective::Send {
            return Err(Error::invalid_argument("a send needs a destination").of(self.collective));
        }
        Ok(())
    }

    fn check_blocks(&self, world: u32) -> Result<()> {
        let world = world as usize;
        // Expected numbers of (input, output) blocks; `usize::MAX` marks "root only".
        const ROOT: usize = usize::MAX;
        let (inputs, outputs) = match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => (0, 1),
            Collective::ReduceScatter => (world, 1),
            Collective::AllGather => (1, world),
            Collective::Gather => (1, ROOT),
            Collective::Scatter => (ROOT, 1),
            Collective::AllToAll => (world, world),
            Collective::Barrier => (0, 0),
            Collective::Send => (1, 0),
            Collective::Recv => (0, 1),
        };
        for (what, blocks, expected) in [("input", &self.inputs, inputs), ("output", &self.outputs, outputs)] {
            let fits =
                if expected == ROOT { blocks.is_empty() || blocks.len() == world } else { blocks.len() == expected };
            if !fits {
                let expected = if expected == ROOT { world } else { expected };
                return Err(Error::invalid_argument(format!(
                    "{} {what} tensors were given where {expected} are needed",
                    blocks.len()
                ))
                .of(self.collective));
            }
        }
        match self.collective {
            Collective::ReduceScatter | Collective::AllGather => self.check_own_block()?,
            Collective::AllReduce
            | Collective::Broadcast
            | Collective::Reduce
            | Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll
            | Collective::Barrier
            | Collective::Send
            | Collective::Recv => {}
        }
        Ok(())
    }

    /// In every block the pieces must be as many as in the one that stands alone.
    fn check_own_block(&self) -> Result<()> {
        let (many, one) = if self.collective == Collective::AllGather {
            (&self.outputs, &self.inputs)
        } else {
            (&self.inputs, &self.outputs)
        };
        if many.iter().any(|block| block.len() != one.pieces().len()) {
            return Err(Error::invalid_argument("the lists of tensors have different lengths").of(self.collective));
        }
        Ok(())
    }

    fn check_reduction(&self) -> Result<()> {
        if let Some(other) =
            self.inputs.pieces().iter().chain(self.outputs.pieces()).find(|piece| piece.dtype != self.dtype)
        {
            return Err(Error::invalid_argument(format!(
                "all tensors must have the same dtype, but one is {} and one {}",
                self.dtype, other.dtype
            ))
            .of(self.collective));
        }
        if !accl_kernels::supports(self.op, self.dtype) {
            return Err(Error::unsupported(format!("{} is not defined for {} tensors", self.op, self.dtype))
                .of(self.collective));
        }
        Ok(())
    }
}

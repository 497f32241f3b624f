//! Descriptions of calls and tensors, and their check: the only validator of arguments below the shim.

use std::time::Duration;

use accl_types::{Collective, Dtype, Error, Rank, ReduceOp, Result};
use smallvec::SmallVec;

/// A tensor's memory: `ptr` points to its first element, sizes and strides are in elements.
///
/// The caller keeps the memory alive and untouched until the call is done or failed.
#[derive(Clone, Debug)]
pub struct TensorDesc {
    /// First element; may be null when the tensor is empty.
    pub ptr: *mut u8,
    /// Element type.
    pub dtype: Dtype,
    /// Size of each dimension; empty for a zero-dimensional tensor of one element.
    pub sizes: SmallVec<[i64; 4]>,
    /// Stride of each dimension.
    pub strides: SmallVec<[i64; 4]>,
    /// The memory holds the conjugate of the value.
    pub conj: bool,
    /// The memory holds the negative of the value.
    pub neg: bool,
}

// SAFETY: a descriptor is an address with a shape; who may use the memory and when is the contract of `Group::submit`.
unsafe impl Send for TensorDesc {}

impl TensorDesc {
    /// A dense one-dimensional tensor.
    pub fn dense(ptr: *mut u8, dtype: Dtype, count_elems: usize) -> Self {
        Self {
            ptr,
            dtype,
            sizes: SmallVec::from_slice(&[count_elems as i64]),
            strides: SmallVec::from_slice(&[1]),
            conj: false,
            neg: false,
        }
    }

    /// Number of elements.
    pub fn count_elems(&self) -> u64 {
        self.sizes.iter().map(|&size| size as u64).product()
    }

    /// Whether the memory is the value itself in row-major order, so that it can be sent from and received into.
    pub fn is_plain(&self) -> bool {
        if self.conj || self.neg {
            return false;
        }
        if self.count_elems() == 0 {
            return true;
        }
        let mut expected = 1;
        for (&size, &stride) in self.sizes.iter().zip(&self.strides).rev() {
            if size != 1 && stride != expected {
                return false;
            }
            expected *= size;
        }
        true
    }

    /// Lowest and one past the highest address that the tensor touches.
    pub(crate) fn bounds(&self) -> (usize, usize) {
        if self.count_elems() == 0 {
            return (0, 0);
        }
        let last: i64 = self.sizes.iter().zip(&self.strides).map(|(&size, &stride)| (size - 1) * stride).sum();
        let start = self.ptr as usize;
        (start, start + (last as usize + 1) * self.dtype.size_bytes())
    }
}

/// A list of blocks, each a list of pieces: block r is what goes to or comes from rank r; several pieces are the
/// tensors of a coalesced call.
pub type Blocks = Vec<Vec<TensorDesc>>;

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
            timeout: None,
            inputs: Vec::new(),
            outputs: Vec::new(),
            equal_blocks: true,
            mode: Mode::Blocking,
            seq: None,
        }
    }

    /// Checks the description against the group's size.
    ///
    /// # Errors
    /// `InvalidArgument` for ranks, block counts and sizes that do not fit; `InvalidType` for mixed dtypes where they
    /// must agree; `Unsupported` for an operator that the dtype does not have.
    pub fn check(&self, world: u32) -> Result<()> {
        self.check_ranks(world)?;
        self.check_blocks(world)?;
        if self.collective.reduces() {
            self.check_reduction()?;
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
            for piece in blocks.iter().flatten() {
                if piece.sizes.len() != piece.strides.len() || piece.sizes.iter().any(|&size| size < 0) {
                    return Err(Error::internal("a tensor was described with unfit sizes").of(self.collective));
                }
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
        if many.iter().any(|block| block.len() != one[0].len()) {
            return Err(Error::invalid_argument("the lists of tensors have different lengths").of(self.collective));
        }
        Ok(())
    }

    fn check_reduction(&self) -> Result<()> {
        if let Some(other) = self.inputs.iter().chain(&self.outputs).flatten().find(|piece| piece.dtype != self.dtype) {
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

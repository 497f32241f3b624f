//! Descriptions of calls, and their check: the only validator of arguments below the shim.
//!
//! Owns what a caller may ask for. Read [`CallDesc`] first.

use std::sync::Arc;
use std::time::Duration;

use accl_schedule::Part;
use accl_types::{Collective, Dtype, Error, Rank, ReduceOp, Result};

use super::encoding::{Encoded, Encoding, is_encoded};
use super::external::External;
use super::phases::Phases;
use super::tensor::{Blocks, MemoryKind, TensorDesc};

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
    /// What brings tensors that lie in other memory into memory of the host and back, if there are any.
    pub staging: Option<Arc<dyn External>>,
    /// What does the whole collective, once all ranks have shown that they make the same; whether it does must be the same on all ranks.
    pub offload: Option<Arc<dyn External>>,
    /// Which part of the call this is, where other lanes do the others.
    pub part: Part,
    /// Of the first part: what is over when the others are.
    pub joins: Option<Arc<dyn External>>,
    /// Where it is noted where the time of a collective goes; nowhere as a rule, since that takes time, and never on the fast path.
    pub phases: Option<Arc<Phases>>,
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
            encoding: Encoded::GroupDefault,
            staging: None,
            offload: None,
            part: Part::WHOLE,
            joins: None,
            phases: None,
        }
    }

    /// Bytes of the larger side: of all that goes in, or all that comes out.
    pub fn bytes(&self) -> u64 {
        let total = |blocks: &Blocks| blocks.pieces().iter().map(TensorDesc::len_bytes).sum::<u64>();
        total(&self.inputs).max(total(&self.outputs))
    }

    /// Bytes of the whole buffer of one rank, the same on all ranks of such a world; 0 where no rank knows it, since the blocks are uneven.
    pub fn size_bytes(&self, world: u32) -> u64 {
        let total = |blocks: &Blocks| blocks.pieces().iter().map(TensorDesc::len_bytes).sum::<u64>();
        match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::AllGather => {
                total(&self.outputs)
            }
            Collective::ReduceScatter => total(&self.inputs),
            Collective::Gather => total(&self.inputs) * u64::from(world),
            Collective::Scatter => total(&self.outputs) * u64::from(world),
            // Some ranks may give splits that happen to be equal, and others none.
            Collective::AllToAll | Collective::Barrier | Collective::Send | Collective::Recv => 0,
        }
    }

    /// Whether all ranks know that the blocks of the call have one size.
    pub fn has_equal_blocks(&self) -> bool {
        let bytes = |block: &[TensorDesc]| block.iter().map(TensorDesc::len_bytes).sum::<u64>();
        let are_alike = |blocks: &Blocks| {
            let mut sizes = blocks.iter().map(bytes);
            let first = sizes.next();
            sizes.all(|size| Some(size) == first)
        };
        self.equal_blocks
            && match self.collective {
                Collective::AllGather => are_alike(&self.outputs),
                Collective::ReduceScatter => are_alike(&self.inputs),
                _ => true,
            }
    }

    /// Whether the call may take the fast path: its caller waits, and it is nothing unusual.
    #[inline]
    pub fn may_take_fast_path(&self) -> bool {
        self.mode == Mode::Blocking
            && self.seq.is_none()
            && !matches!(self.encoding, Encoded::As(_))
            && self.offload.is_none()
            && self.part == Part::WHOLE
            && self.phases.is_none()
            && !self.collective.is_point_to_point()
            && self.uses_tensors_as_they_are()
    }

    /// How this call is encoded, if it is.
    pub fn encoding(&self, world: u32) -> Option<&Encoding> {
        match &self.encoding {
            Encoded::As(encoding) if is_encoded(self.collective, self.dtype, self.op, world) => Some(encoding),
            Encoded::As(_) | Encoded::GroupDefault | Encoded::Never => None,
        }
    }

    /// The tensor of a call in place that has no other.
    #[inline]
    pub(crate) fn alone(&self) -> Option<&TensorDesc> {
        if self.inputs.is_empty() { self.outputs.alone() } else { None }
    }

    /// Whether all tensors can be sent from and received into.
    #[inline]
    pub fn uses_tensors_as_they_are(&self) -> bool {
        self.op != ReduceOp::PremulSum
            && self.inputs.pieces().iter().chain(self.outputs.pieces()).all(TensorDesc::is_plain)
    }

    /// Checks the description of a call that `rank` makes in a group of `world` ranks.
    ///
    /// # Errors
    /// `InvalidArgument` for ranks, block counts and sizes that do not fit, and for mixed dtypes where they must
    /// agree; `Unsupported` for an operator that the dtype does not have.
    pub fn check(&self, rank: Rank, world: u32) -> Result<()> {
        self.check_ranks(world)?;
        self.check_blocks(rank, world)?;
        self.check_memory(rank, world)?;
        self.check_offload(rank, world)?;
        if self.collective.reduces() {
            self.check_reduction()?;
        }
        if let Some(encoding) = self.encoding(world) {
            self.check_encoding(encoding)?;
        }
        Ok(())
    }

    /// Whether some tensor lies where the executor cannot touch it.
    pub(crate) fn is_staged(&self) -> bool {
        let mut pieces = self.inputs.pieces().iter().chain(self.outputs.pieces());
        // The first part brings them here for all.
        self.part.index == 0 && pieces.any(|tensor| tensor.memory() != MemoryKind::Host)
    }

    /// Whether all tensors lie where the host touches them.
    pub fn uses_host_memory(&self) -> bool {
        !self.is_staged()
    }

    /// What the executor cannot touch is staged by external operations of the plan, or refused.
    fn check_memory(&self, rank: Rank, world: u32) -> Result<()> {
        let sides = [("input", &self.inputs), ("output", &self.outputs)];
        let all = sides.iter().flat_map(|(side, blocks)| (0..).zip(blocks.pieces()).map(move |(i, t)| (*side, i, t)));
        for (side, index, tensor) in all.filter(|(_, _, tensor)| tensor.memory() != MemoryKind::Host) {
            let why = match &self.staging {
                None => "and nothing was given that stages it; copy it to host memory first, or set `staging`",
                // A message has no plan.
                Some(_) if self.collective.is_point_to_point() => {
                    "which messages do not stage; copy it to host memory first"
                }
                Some(_) if self.op == ReduceOp::PremulSum => {
                    "and PREMUL_SUM scales tensors before they are staged; scale it first, and take SUM"
                }
                Some(_) if self.encoding(world).is_some() => {
                    "and calls that are encoded read host memory; copy it there first, or make the call without a codec"
                }
                Some(_) if !tensor.is_dense_value() => {
                    "and is not dense there; give a contiguous tensor, for instance tensor.contiguous()"
                }
                Some(_) => continue,
            };
            let text = format!("{side} tensor {index} lies in {}, {why}", tensor.memory());
            return Err(Error::unsupported(text).of(self.collective).on_rank(rank));
        }
        Ok(())
    }

    /// What is done elsewhere is a collective on host memory as it is.
    fn check_offload(&self, rank: Rank, world: u32) -> Result<()> {
        let Some(by) = &self.offload else { return Ok(()) };
        let why = match self.collective {
            Collective::Barrier | Collective::Send | Collective::Recv => "which moves no blocks between all ranks",
            _ if self.op == ReduceOp::PremulSum => {
                "and PREMUL_SUM scales tensors before that; scale them first, and take SUM"
            }
            _ if self.encoding(world).is_some() => "and is encoded; make it without a codec",
            _ if self.is_staged() => "and has tensors that do not lie in host memory; copy them there first",
            _ if !self.equal_blocks => "and has blocks of unequal sizes",
            _ => return Ok(()),
        };
        let text = format!("the call was given to `{}`, {why}", by.name());
        Err(Error::unsupported(text).of(self.collective).on_rank(rank))
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

    fn check_blocks(&self, rank: Rank, world: u32) -> Result<()> {
        let world = world as usize;
        let at_root = if rank == self.root { world } else { 0 };
        // Expected numbers of (input, output) blocks.
        let (inputs, outputs) = match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => (0, 1),
            Collective::ReduceScatter => (world, 1),
            Collective::AllGather => (1, world),
            Collective::Gather => (1, at_root),
            Collective::Scatter => (at_root, 1),
            Collective::AllToAll => (world, world),
            Collective::Barrier => (0, 0),
            Collective::Send => (1, 0),
            Collective::Recv => (0, 1),
        };
        for (what, blocks, expected) in [("input", &self.inputs, inputs), ("output", &self.outputs, outputs)] {
            if blocks.len() != expected {
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

#[cfg(test)]
mod tests {
    use super::*;
    use accl_types::Elems;

    #[test]
    fn a_root_without_room_for_what_it_gathers_is_refused() {
        let mut value = [0_u8; 4];
        let mut tensor = || TensorDesc::dense(value.as_mut_ptr(), Dtype::U8, Elems(4));
        let mut desc = CallDesc::new(Collective::Gather, Dtype::U8);
        desc.inputs = Blocks::of(tensor());
        assert!(desc.check(Rank(1), 2).is_ok());
        assert_eq!(desc.check(Rank(0), 2).unwrap_err().kind, accl_types::ErrorKind::InvalidArgument);
        desc.outputs = [[tensor()], [tensor()]].into_iter().collect();
        assert!(desc.check(Rank(0), 2).is_ok());
        assert_eq!(desc.check(Rank(1), 2).unwrap_err().kind, accl_types::ErrorKind::InvalidArgument);
    }
}

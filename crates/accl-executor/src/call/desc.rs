//! Descriptions of calls, and their check: the only validator of arguments below the shim.
//!
//! This module owns what a caller may request. Read [`CallDesc`] first.

use std::sync::Arc;
use std::time::Duration;

use accl_schedule::Part;
use accl_types::{Collective, Dtype, Error, Rank, ReduceOp, Result};

use super::encoding::{Encoded, Encoding, is_encoded};
use super::error_stats::Keeps;
use super::external::External;
use super::phases::Phases;
use super::staging::{Meeting, Staging};
use super::tensor::{Blocks, MemoryKind, TensorDesc};

/// Whether the caller waits immediately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The caller waits next: no other thread is woken for the call.
    Blocking,
    /// The caller continues: another thread must make progress.
    Async,
}

/// [`CallDesc::note`] of the collectives of a trial: whether the ranks of a group can make calls by reference.
pub const TRIAL: u64 = u64::MAX - 1;

/// Description of one call, as plain data.
#[derive(Clone, Debug)]
pub struct CallDesc {
    /// Collective or point-to-point operation.
    pub collective: Collective,
    /// Element type of all tensors. A call that only moves data may mix types; this is then the type of its first
    /// tensor.
    pub dtype: Dtype,
    /// Reduce operator.
    pub op: ReduceOp,
    /// Factor of `PREMUL_SUM`; 1.0 otherwise.
    pub factor: f64,
    /// Root of a rooted collective; 0 otherwise.
    pub root: Rank,
    /// Peer of a send or receive; `None` receives from any rank.
    pub peer: Option<Rank>,
    /// Tag of a send or receive.
    pub tag: u32,
    /// Word that accompanies an internal send of the engine, or [`TRIAL`]; 0 otherwise.
    pub note: u64,
    /// Timeout of this call; `None` uses the group's timeout.
    pub timeout: Option<Duration>,
    /// Contributions of this rank. Empty for calls in place, and on the non-root ranks of a scatter.
    pub inputs: Blocks,
    /// Buffers for what this rank receives. Empty on the non-root ranks of a gather.
    pub outputs: Blocks,
    /// Whether the blocks of all ranks have equal sizes by construction (no splits were given).
    pub equal_blocks: bool,
    /// Whether the caller waits immediately.
    pub mode: Mode,
    /// Sequence number reserved with `Group::reserve_seqs`; `None` takes the next number.
    pub seq: Option<u64>,
    /// Whether messages are encoded, and with which settings.
    pub encoding: Encoded,
    /// Copies tensors in other memory to host memory and back, if there are such tensors.
    pub staging: Option<Arc<dyn Staging>>,
    /// Computes the combinations of an encoded call where its tensors lie, instead of staging these: see
    /// [`Caller::tensor_coder`](crate::group::Caller::tensor_coder).
    pub tensor_coder: Option<Arc<dyn External>>,
    /// Whether ranks publish chunks in memory that all others read, and send references. All tensors lie on devices, and the
    /// staging has a [publisher](Staging::publisher). All ranks must set this, or none.
    pub is_by_reference: bool,
    /// Worker that does the whole collective, once the signatures of all ranks agree. All ranks must set this, or none.
    pub offload: Option<Arc<dyn External>>,
    /// Part of the call that this description covers, if other lanes do the other parts.
    pub part: Part,
    /// In the first part: operation that ends when the other parts have completed.
    pub joins: Option<Arc<dyn External>>,
    /// Where the parts of a staged call meet, if it has several.
    pub meeting: Option<Arc<dyn Meeting>>,
    /// Where the phase times of a collective are recorded. Usually `None`, because timing costs time; always `None` on
    /// the fast path.
    pub phases: Option<Arc<Phases>>,
}

impl CallDesc {
    /// Creates a call of `collective` without tensors. The caller sets the remaining fields.
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
            tensor_coder: None,
            is_by_reference: false,
            offload: None,
            part: Part::WHOLE,
            joins: None,
            meeting: None,
            phases: None,
        }
    }

    /// Returns the bytes of the larger side: total of all inputs, or total of all outputs.
    pub fn bytes(&self) -> u64 {
        let total = |blocks: &Blocks| blocks.pieces().iter().map(TensorDesc::len_bytes).sum::<u64>();
        total(&self.inputs).max(total(&self.outputs))
    }

    /// Returns the bytes of one rank's whole buffer, which is the same on all ranks of a group of `world` ranks.
    /// Returns 0 if the blocks may be uneven, because then no rank knows it.
    pub fn size_bytes(&self, world: u32) -> u64 {
        let total = |blocks: &Blocks| blocks.pieces().iter().map(TensorDesc::len_bytes).sum::<u64>();
        match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce | Collective::AllGather => {
                total(&self.outputs)
            }
            Collective::ReduceScatter => total(&self.inputs),
            Collective::Gather => total(&self.inputs) * u64::from(world),
            Collective::Scatter => total(&self.outputs) * u64::from(world),
            // Some ranks may pass splits that happen to be equal, while others pass none.
            Collective::AllToAll | Collective::Barrier | Collective::Send | Collective::Recv => 0,
        }
    }

    /// Returns whether all ranks know that the blocks of the call have one size.
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

    /// Returns whether the call may take the fast path: its caller waits, and it uses no special option.
    #[inline]
    pub fn may_take_fast_path(&self) -> bool {
        self.mode == Mode::Blocking
            && self.seq.is_none()
            && !matches!(self.encoding, Encoded::As(_))
            && self.offload.is_none()
            && !self.is_by_reference
            && self.part == Part::WHOLE
            && self.phases.is_none()
            && !self.collective.is_point_to_point()
            && self.uses_tensors_as_they_are()
    }

    /// Returns the encoding of this call, if it is encoded.
    pub fn encoding(&self, world: u32) -> Option<&Encoding> {
        match &self.encoding {
            Encoded::As(encoding) if is_encoded(self.collective, self.dtype, self.op, world) => Some(encoding),
            Encoded::As(_) | Encoded::GroupDefault | Encoded::Never => None,
        }
    }

    /// Returns the only tensor of a call in place.
    #[inline]
    pub(crate) fn alone(&self) -> Option<&TensorDesc> {
        if self.inputs.is_empty() { self.outputs.alone() } else { None }
    }

    /// Returns whether all tensors can be sent from and received into directly.
    #[inline]
    pub fn uses_tensors_as_they_are(&self) -> bool {
        self.op != ReduceOp::PremulSum
            && self.inputs.pieces().iter().chain(self.outputs.pieces()).all(TensorDesc::is_plain)
    }

    /// Checks the description of a call that `rank` issues in a group of `world` ranks.
    ///
    /// # Errors
    /// `InvalidArgument` for ranks, block counts and sizes that do not fit, and for mixed dtypes where they must agree.
    /// `Unsupported` for an operator that the dtype does not have, for memory that cannot be staged, and for a call
    /// that cannot be offloaded.
    pub fn check(&self, rank: Rank, world: u32) -> Result<()> {
        self.check_ranks(world)?;
        self.check_blocks(rank, world)?;
        self.check_memory(rank)?;
        self.check_offload(rank, world)?;
        self.check_reference(world)?;
        if self.collective.reduces() {
            self.check_reduction()?;
        }
        if let Some(encoding) = self.encoding(world) {
            self.check_encoding(encoding)?;
        }
        Ok(())
    }

    /// Returns whether a tensor lies in memory that the executor cannot access.
    pub(crate) fn is_staged(&self) -> bool {
        let mut pieces = self.inputs.pieces().iter().chain(self.outputs.pieces());
        pieces.any(|tensor| tensor.memory() != MemoryKind::Host)
    }

    /// Returns whether each block ends with the sample of a measured call.
    pub(crate) fn has_sample(&self) -> bool {
        self.sample_memory().is_some()
    }

    /// Returns the owner of the sample's memory.
    pub(crate) fn sample_memory(&self) -> Option<Arc<dyn Keeps>> {
        match &self.encoding {
            Encoded::As(Encoding { probe: Some(probe), .. }) => probe.rooms.clone(),
            Encoded::As(_) | Encoded::Never | Encoded::GroupDefault => None,
        }
    }

    /// Checks the tensors that the executor cannot access: they must lie on one device, and something must stage them.
    fn check_memory(&self, rank: Rank) -> Result<()> {
        let sides = [("input", &self.inputs), ("output", &self.outputs)];
        let all = sides.iter().flat_map(|(side, blocks)| (0..).zip(blocks.pieces()).map(move |(i, t)| (*side, i, t)));
        let mut first: Option<(&str, u32, MemoryKind)> = None;
        for (side, index, tensor) in all.filter(|(_, _, tensor)| tensor.memory() != MemoryKind::Host) {
            let memory = tensor.memory();
            let (first_side, first_index, first_memory) = *first.get_or_insert((side, index, memory));
            let why = match &self.staging {
                None => "and no staging is configured; copy it to host memory first, or set `staging`".to_owned(),
                Some(_) if memory != first_memory => format!(
                    "but {first_side} tensor {first_index} is in {first_memory}; put all tensors of a call on one device"
                ),
                Some(_) => continue,
            };
            let text = format!("{side} tensor {index} is in {memory}, {why}");
            return Err(Error::unsupported(text).of(self.collective).on_rank(rank));
        }
        Ok(())
    }

    /// Returns why the host always executes this call; `None` if a component may execute it as a whole. All ranks get the
    /// same answer.
    pub fn why_on_host(&self, world: u32) -> Option<&'static str> {
        Some(match self.collective {
            Collective::Barrier | Collective::Send | Collective::Recv => "it does not move blocks between all ranks",
            _ if self.op == ReduceOp::PremulSum => "PREMUL_SUM scales tensors beforehand; scale them first and use SUM",
            _ if self.encoding(world).is_some() => "it is compressed; call without a codec",
            _ if !self.equal_blocks => "it has blocks of unequal sizes",
            _ => return None,
        })
    }

    /// Checks an offloaded call: it must be a collective that is not encoded.
    fn check_offload(&self, rank: Rank, world: u32) -> Result<()> {
        let Some((by, why)) = self.offload.as_ref().zip(self.why_on_host(world)) else { return Ok(()) };
        let text = format!("`{}` cannot run the call: {why}", by.name());
        Err(Error::unsupported(text).of(self.collective).on_rank(rank))
    }

    /// Returns whether a call of this kind can be by reference: it moves bytes or reduces, unscaled and not encoded. All ranks
    /// get the same answer.
    pub fn can_be_by_reference(&self, world: u32) -> bool {
        let moves = match self.collective {
            Collective::Barrier => false,
            Collective::Send | Collective::Recv => self.bytes() > 0,
            _ => true,
        };
        moves && world > 1 && self.op != ReduceOp::PremulSum && self.encoding(world).is_none() && self.seq.is_none()
    }

    fn check_reference(&self, world: u32) -> Result<()> {
        if !self.is_by_reference || self.can_be_by_reference(world) && self.offload.is_none() && self.staging.is_some()
        {
            return Ok(());
        }
        Err(Error::internal("a call of this kind cannot be by reference").of(self.collective))
    }

    /// Checks an encoded call: its tensors have one dtype, and there are codecs for each.
    fn check_encoding(&self, encoding: &Encoding) -> Result<()> {
        let refused = |why: String| Err(Error::invalid_argument(why).of(self.collective));
        let mut pieces = self.inputs.pieces().iter().chain(self.outputs.pieces());
        if let Some(other) = pieces.find(|piece| piece.dtype != self.dtype) {
            return refused(format!(
                "all tensors of a compressed call must have the same dtype, but one is {} and one {}",
                self.dtype, other.dtype
            ));
        }
        let tensors = encoding.codecs.tensors();
        if let Some(block) = self.inputs.iter().chain(self.outputs.iter()).find(|block| block.len() != tensors) {
            return refused(format!("got codecs for {tensors} tensors, expected codecs for {}", block.len()));
        }
        Ok(())
    }

    fn check_ranks(&self, world: u32) -> Result<()> {
        let within = |rank: Rank, what: &str| {
            if rank.0 < world {
                return Ok(());
            }
            Err(Error::invalid_argument(format!("{what} {rank} is not a rank of this group of {world} ranks"))
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
                    "got {} {what} tensors, expected {expected}",
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

    /// Checks that every block has as many pieces as the single block of the other side.
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

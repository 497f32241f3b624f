//! Keys of plans: everything on which a plan depends.
//!
//! This module owns which facts of a call these are. Read [`PlanKey`] first.

use accl_schedule::{Coding, Part, Role};
use accl_types::{Collective, Elems, Rank};
use smallvec::SmallVec;

use crate::call::{Blocks, CallDesc, MemoryKind, TensorDesc, TypedCodecs};

/// Everything on which a plan depends. Equal keys give equal plans.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct PlanKey {
    /// Collective of the call.
    pub collective: Collective,
    pub(crate) root: Rank,
    pub(crate) elem_bytes: u64,
    pub(crate) equal_blocks: bool,
    pub(crate) inputs: Vec<Vec<Elems>>,
    pub(crate) outputs: Vec<Vec<Elems>>,
    /// Codecs of an encoded call; `None` if the call is not encoded.
    pub codecs: Option<TypedCodecs>,
    /// Whether each reduction rounds, because its dtype is narrower than the arithmetic.
    pub(crate) rounds: bool,
    /// Memory of the tensors, if external operations stage some of them.
    pub(crate) staged: StagedPieces,
    /// Whether messages are references to published chunks.
    pub(crate) is_by_reference: bool,
    /// Whether the whole collective is an external operation.
    pub(crate) is_offloaded: bool,
    /// Part of the call that the plan covers.
    pub(crate) part: Part,
}

impl PlanKey {
    /// Returns the bytes by which the algorithm is chosen, equal on all ranks: the whole buffer of one rank.
    pub fn size_bytes(&self, world: u32) -> u64 {
        let bytes = |(position, elems): (u32, &Elems)| match &self.codecs {
            Some(codecs) => codecs.piece_bytes(Role::Result, position, elems.0),
            None => elems.0 * self.elem_bytes,
        };
        let total = |blocks: &Vec<Vec<Elems>>| blocks.iter().flat_map(|block| (0..).zip(block)).map(bytes).sum::<u64>();
        match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => total(&self.outputs),
            Collective::ReduceScatter => total(&self.inputs),
            Collective::AllGather => total(&self.outputs),
            Collective::Gather => total(&self.inputs) * u64::from(world),
            Collective::Scatter => total(&self.outputs) * u64::from(world),
            // With splits, the sizes differ from rank to rank, and no rank knows them all.
            Collective::AllToAll | Collective::Barrier | Collective::Send | Collective::Recv => 0,
        }
    }
}

/// Memory of one piece of a call, as far as a plan depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PieceMemory {
    /// Memory that the executor accesses directly.
    Host,
    /// Memory that only external operations access.
    Device,
    /// The same, of a call whose combinations a worker computes there: encoded, or by reference. It is not staged.
    Coded,
    /// Host memory of a measured call's sample, which is filled when everything has been copied in.
    Sample,
}

/// Memory of all pieces of a call; empty if they all lie in host memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct StagedPieces {
    pub(super) inputs: SmallVec<[PieceMemory; 4]>,
    pub(super) outputs: SmallVec<[PieceMemory; 4]>,
}

impl StagedPieces {
    pub(crate) fn of(desc: &CallDesc) -> Self {
        if !desc.is_staged() {
            return Self::default();
        }
        let is_coded = desc.tensor_coder.is_some() || desc.is_by_reference;
        let device = if is_coded { PieceMemory::Coded } else { PieceMemory::Device };
        let has_sample = desc.has_sample();
        let kinds = |blocks: &Blocks| -> SmallVec<[PieceMemory; 4]> {
            let kind = |(index, tensor): (usize, &TensorDesc)| match tensor.memory() {
                MemoryKind::Device { .. } => device,
                MemoryKind::Host if has_sample && blocks.ends().contains(&(index as u32 + 1)) => PieceMemory::Sample,
                MemoryKind::Host => PieceMemory::Host,
            };
            blocks.pieces().iter().enumerate().map(kind).collect()
        };
        Self { inputs: kinds(&desc.inputs), outputs: kinds(&desc.outputs) }
    }

    /// Returns whether a worker computes the combinations of the call where the tensors lie.
    pub(crate) fn are_coded(&self) -> bool {
        self.inputs.iter().chain(&self.outputs).any(|&memory| memory == PieceMemory::Coded)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.inputs.is_empty() && self.outputs.is_empty()
    }
}

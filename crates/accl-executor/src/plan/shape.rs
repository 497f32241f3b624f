//! Shapes of calls that a group has seen. Everything that depends on a shape alone is computed once.
//!
//! This module owns the list of recent shapes. `cache` creates the plans; several shapes may share one plan, for
//! example a sum and a maximum of equal size. Read [`Shapes::find`] first, then [`Draft`].

use std::sync::Arc;

use accl_kernels::Reducer;
use accl_schedule::Part;
use accl_types::{Collective, Dtype, DtypeClass, Elems, Error, Rank, ReduceOp, Result};
use accl_wire::frame::{Header, Signature};
use smallvec::SmallVec;

use super::build::Plan;
use super::key::{PlanKey, StagedPieces};
use super::signature::signature;
use crate::call::{Blocks, CallDesc, Codecs, TensorDesc, TypedCodecs};

/// Maximum shapes kept in one list. A training step repeats few shapes.
const MAX_SHAPES: usize = 16;

/// Data that all calls of one shape share.
pub struct Shape {
    key: Key,
    /// Plan of the calls.
    pub plan: Arc<Plan>,
    pub(crate) signature: Signature,
    /// Header of a message that fits one frame, without group, sequence number and edge; `None` if the signature does
    /// not fit.
    pub(crate) whole: Option<Header>,
    /// Reducer and element size in bytes; `None` for calls that only move data, are encoded, or are by reference.
    pub(crate) reducer: Option<(Reducer, usize)>,
}

/// The parts of a description on which a plan or a signature may depend.
#[derive(PartialEq, Eq)]
struct Key {
    collective: Collective,
    dtype: Dtype,
    op: ReduceOp,
    root: Rank,
    equal_blocks: bool,
    codecs: Option<Arc<Codecs>>,
    part: Part,
    /// Bytes and dtype of the only tensor of a call in place.
    alone: Option<(u64, Dtype)>,
    inputs: Sizes,
    outputs: Sizes,
    staged: StagedPieces,
    is_by_reference: bool,
    note: u64,
}

#[derive(PartialEq, Eq)]
struct Sizes {
    /// Bytes and dtype of each piece.
    pieces: SmallVec<[(u64, Dtype); 2]>,
    /// End index of each block among the pieces.
    blocks: SmallVec<[u32; 2]>,
}

impl Sizes {
    fn of(blocks: &Blocks) -> Self {
        Self {
            pieces: blocks.pieces().iter().map(|piece| (piece.len_bytes(), piece.dtype)).collect(),
            blocks: blocks.ends().iter().copied().collect(),
        }
    }

    #[inline]
    fn fit(&self, blocks: &Blocks) -> bool {
        let pieces = blocks.pieces();
        // Compared element by element, because the lists are short and a comparison of memory would be a function call.
        self.blocks.len() == blocks.ends().len()
            && self.blocks.iter().eq(blocks.ends())
            && self.pieces.len() == pieces.len()
            && self.pieces.iter().zip(pieces).all(|(known, piece)| *known == (piece.len_bytes(), piece.dtype))
    }
}

impl Key {
    fn of(desc: &CallDesc, world: u32) -> Self {
        Self {
            codecs: desc.encoding(world).map(|encoding| encoding.codecs.clone()),
            collective: desc.collective,
            dtype: desc.dtype,
            op: desc.op,
            root: desc.root,
            equal_blocks: desc.equal_blocks,
            part: desc.part,
            alone: desc.alone().map(|tensor| (tensor.len_bytes(), tensor.dtype)),
            inputs: Sizes::of(&desc.inputs),
            outputs: Sizes::of(&desc.outputs),
            staged: StagedPieces::of(desc),
            is_by_reference: desc.is_by_reference,
            note: desc.note,
        }
    }

    #[inline]
    fn fits(&self, desc: &CallDesc, world: u32) -> bool {
        self.collective == desc.collective
            && match (&self.codecs, desc.encoding(world)) {
                (None, None) => true,
                (Some(known), Some(encoding)) => **known == *encoding.codecs,
                (None, Some(_)) | (Some(_), None) => false,
            }
            && self.dtype == desc.dtype
            && self.op == desc.op
            && self.root == desc.root
            && self.equal_blocks == desc.equal_blocks
            && self.part == desc.part
            && (self.is_by_reference, self.note) == (desc.is_by_reference, desc.note)
            && match (self.alone, desc.alone()) {
                (Some(known), Some(tensor)) => known == (tensor.len_bytes(), tensor.dtype),
                _ => self.inputs.fit(&desc.inputs) && self.outputs.fit(&desc.outputs),
            }
            // Staged calls have a list of shapes of their own.
            && (self.staged.is_empty() || self.staged == StagedPieces::of(desc))
    }
}

/// The recent shapes of one list.
#[derive(Default)]
pub(crate) struct Shapes {
    /// The shapes, roughly sorted by use: a hit moves a shape one position to the front.
    shapes: Vec<Arc<Shape>>,
}

impl Shapes {
    /// Returns the shape of this call, if it is among the recent ones. A call with a known shape needs no check of its
    /// arguments.
    #[inline]
    pub(crate) fn find(&mut self, desc: &CallDesc, world: u32) -> Option<&Arc<Shape>> {
        let index = self.shapes.iter().position(|shape| shape.key.fits(desc, world))?;
        if index > 0 {
            self.shapes.swap(index - 1, index);
        }
        self.shapes.get(index.saturating_sub(1))
    }

    /// Returns whether a shape is in the list, or another shape of the same calls.
    pub(crate) fn contains(&self, shape: &Arc<Shape>) -> bool {
        self.shapes.iter().any(|known| Arc::ptr_eq(known, shape) || known.key == shape.key)
    }

    /// Adds a shape that is not in the list. If the list is full, its last shape is dropped.
    pub(crate) fn keep(&mut self, shape: Arc<Shape>) {
        if self.shapes.len() >= MAX_SHAPES {
            self.shapes.pop();
        }
        self.shapes.push(shape);
    }
}

/// The recent shapes of one group. Calls of host memory and staged calls have lists of their own, because their shapes
/// can have equal sizes and still differ.
#[derive(Default)]
pub struct AllShapes {
    host: ShapeLists,
    staged: ShapeLists,
}

/// Recent shapes by kind. Each part index has its own list, so that calls of many parts displace no other shapes.
#[derive(Default)]
struct ShapeLists {
    whole: Shapes,
    offloaded: Shapes,
    parts: Vec<Shapes>,
}

impl AllShapes {
    /// Returns the shape of this call, like [`Shapes::find`].
    pub fn find(&mut self, desc: &CallDesc, world: u32) -> Option<&Arc<Shape>> {
        self.of(desc).find(desc, world)
    }

    /// Adds a shape, like [`Shapes::keep`].
    pub fn keep(&mut self, desc: &CallDesc, shape: Arc<Shape>) {
        self.of(desc).keep(shape);
    }

    fn of(&mut self, desc: &CallDesc) -> &mut Shapes {
        let lists = if desc.is_staged() { &mut self.staged } else { &mut self.host };
        match desc.offload {
            Some(_) => &mut lists.offloaded,
            None if desc.part == Part::WHOLE => &mut lists.whole,
            None => {
                let index = desc.part.index as usize;
                if lists.parts.len() <= index {
                    lists.parts.resize_with(index + 1, Shapes::default);
                }
                &mut lists.parts[index]
            }
        }
    }
}

/// A checked call before it has a plan.
pub struct Draft {
    /// Key of the plan.
    pub plan_key: PlanKey,
    reducer: Option<(Reducer, usize)>,
}

impl Draft {
    /// Creates the draft of a checked call.
    ///
    /// # Errors
    /// `InvalidArgument` if the block that a rank keeps differs in size between input and output. Errors of the reducer
    /// are returned.
    pub fn new(desc: &CallDesc, rank: Rank, world: u32) -> Result<Self> {
        let reduces = desc.collective.reduces();
        let codecs = desc.encoding(world).map(|encoding| encoding.codecs.clone());
        let elem = if reduces || codecs.is_some() { desc.dtype.size_bytes() } else { 1 };
        let is_encoded = codecs.is_some();
        let plan_key = plan_key(desc, elem, codecs);
        check_kept_block(desc.collective, &plan_key, rank)?;
        // Encoded tensors are added in float32, whatever their dtype, and need no reducer. A worker reduces by reference.
        let reducer = if reduces && !is_encoded && !desc.is_by_reference {
            Some((Reducer::new(kernel_op(desc.op), desc.dtype, world)?, elem))
        } else {
            None
        };
        Ok(Self { plan_key, reducer })
    }

    /// Returns the shape. `plan` must be the plan of this draft's key.
    pub fn with_plan(&self, desc: &CallDesc, world: u32, plan: Arc<Plan>) -> Shape {
        let signature = signature(desc, &self.plan_key, plan.id);
        let whole = Header::whole(&signature);
        Shape { key: Key::of(desc, world), plan, signature, whole, reducer: self.reducer }
    }
}

/// Returns the key of a call's plan; `elem` is the size in bytes of the unit in which the layout counts.
fn plan_key(desc: &CallDesc, elem: usize, codecs: Option<Arc<Codecs>>) -> PlanKey {
    let outputs = block_elems(&desc.outputs, elem as u64);
    let in_place = desc.inputs.is_empty();
    let inputs = match desc.collective {
        Collective::AllReduce | Collective::Reduce if in_place => outputs.clone(),
        _ => block_elems(&desc.inputs, elem as u64),
    };
    PlanKey {
        collective: desc.collective,
        root: desc.root,
        elem_bytes: elem as u64,
        equal_blocks: equal_blocks(desc, &inputs, &outputs),
        inputs,
        outputs,
        codecs: codecs.map(|codecs| TypedCodecs { codecs, dtype: desc.dtype }),
        rounds: desc.collective.reduces() && desc.dtype.class() == DtypeClass::Float16 && rounds(desc.op),
        staged: StagedPieces::of(desc),
        is_by_reference: desc.is_by_reference,
        is_offloaded: desc.offload.is_some(),
        part: desc.part,
    }
}

/// Returns the operator of the kernels. Factors are applied while the buffers are prepared; after that, the operation
/// is a sum.
fn kernel_op(op: ReduceOp) -> ReduceOp {
    if op == ReduceOp::PremulSum { ReduceOp::Sum } else { op }
}

/// Returns whether the exact result of two operands is generally not representable in the dtype.
fn rounds(op: ReduceOp) -> bool {
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product | ReduceOp::PremulSum => true,
        ReduceOp::Min | ReduceOp::Max | ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => false,
    }
}

/// Returns whether every rank knows from its own arguments that all blocks are equal.
fn equal_blocks(desc: &CallDesc, inputs: &[Vec<Elems>], outputs: &[Vec<Elems>]) -> bool {
    let all_same = |blocks: &[Vec<Elems>]| blocks.windows(2).all(|pair| pair[0] == pair[1]);
    match desc.collective {
        Collective::AllToAll => desc.equal_blocks,
        Collective::AllGather => all_same(outputs),
        Collective::ReduceScatter => all_same(inputs),
        Collective::AllReduce
        | Collective::Broadcast
        | Collective::Reduce
        | Collective::Gather
        | Collective::Scatter
        | Collective::Barrier
        | Collective::Send
        | Collective::Recv => true,
    }
}

/// Checks that the block that a rank keeps has equal sizes on both sides. Blocks that are sent are compared on arrival.
fn check_kept_block(collective: Collective, key: &PlanKey, rank: Rank) -> Result<()> {
    let own = |blocks: &[Vec<Elems>]| {
        if blocks.len() == 1 { blocks.first().cloned() } else { blocks.get(rank.index()).cloned() }
    };
    let (input, output) = match collective {
        Collective::AllGather
        | Collective::ReduceScatter
        | Collective::AllToAll
        | Collective::Gather
        | Collective::Scatter => (own(&key.inputs), own(&key.outputs)),
        Collective::AllReduce
        | Collective::Broadcast
        | Collective::Reduce
        | Collective::Barrier
        | Collective::Send
        | Collective::Recv => return Ok(()),
    };
    let (Some(input), Some(output)) = (input, output) else { return Ok(()) };
    if input == output {
        return Ok(());
    }
    let bytes = |block: &[Elems]| block.iter().map(|elems| elems.0).sum::<u64>() * key.elem_bytes;
    Err(Error::invalid_argument(format!(
        "the block that rank {rank} keeps has {} bytes in the input but {} bytes in the output",
        bytes(&input),
        bytes(&output)
    )))
}

/// Returns the element counts of blocks of pieces, for a layout over elements of `elem_bytes` bytes (1: bytes).
fn block_elems(blocks: &Blocks, elem_bytes: u64) -> Vec<Vec<Elems>> {
    let count = |tensor: &TensorDesc| Elems(tensor.len_bytes() / elem_bytes);
    blocks.iter().map(|block| block.iter().map(count).collect()).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use accl_schedule::cost::{IntraNode, Machine, Placement};
    use accl_schedule::{Basis, Chooser, Topology};

    use super::*;
    use crate::plan::Planner;

    /// Describes the sum of `count` elements over the ranks, in place.
    pub(crate) fn sum(count: u64) -> CallDesc {
        let tensor = TensorDesc::dense(std::ptr::dangling_mut(), Dtype::F32, Elems(count));
        CallDesc { outputs: Blocks::of(tensor), ..CallDesc::new(Collective::AllReduce, Dtype::F32) }
    }

    /// Computes the shape of a call of two ranks on one host.
    pub(crate) fn shape_of(desc: &CallDesc) -> Arc<Shape> {
        let placement = Placement { intra_node: IntraNode::Shm, cores: 2, segment_bytes: 1 << 16 };
        let basis = Basis { machine: Machine::default(), placement, deterministic: false };
        let planner = Planner::new(Chooser::new(Topology::flat(2), Vec::new(), &basis), Rank(0));
        let draft = Draft::new(desc, Rank(0), 2).unwrap();
        let plan = planner.plan(&draft.plan_key).unwrap();
        Arc::new(draft.with_plan(desc, 2, plan))
    }
}

//! Shapes of calls that a group has met: what follows from a shape alone is worked out once.
//!
//! Owns the list of the latest shapes and the signature of a call. Plans are made in `cache`; several shapes may share
//! one (a sum and a maximum of equal size do). Read [`Shapes::find`] first, then [`Draft`].

use std::sync::Arc;

use accl_kernels::Reducer;
use accl_schedule::Part;
use accl_types::{Collective, Dtype, DtypeClass, Elems, Error, Rank, ReduceOp, Result};
use accl_wire::frame::{Header, Signature};
use smallvec::SmallVec;

use super::build::Plan;
use super::cache::PlanKey;
use super::signature::signature;
use crate::call::{Blocks, CallDesc, Codecs, TensorDesc, TypedCodecs};

/// Shapes kept; a step of training repeats few.
const MAX_SHAPES: usize = 16;

/// What calls of one shape have in common.
pub struct Shape {
    key: Key,
    /// What is to be done.
    pub plan: Arc<Plan>,
    pub(crate) signature: Signature,
    /// The header of a message that is whole in one frame, but for group, call and edge.
    pub(crate) whole: Option<Header>,
    /// With the size of an element; none for calls that only move data.
    pub(crate) reducer: Option<(Reducer, usize)>,
}

/// All of a description that a plan or a signature may depend on.
#[derive(PartialEq, Eq)]
struct Key {
    collective: Collective,
    dtype: Dtype,
    op: ReduceOp,
    root: Rank,
    equal_blocks: bool,
    codecs: Option<Arc<Codecs>>,
    part: Part,
    /// Bytes and type of the only tensor of a call in place.
    alone: Option<(u64, Dtype)>,
    inputs: Sizes,
    outputs: Sizes,
}

#[derive(PartialEq, Eq)]
struct Sizes {
    /// Bytes and type of each piece.
    pieces: SmallVec<[(u64, Dtype); 2]>,
    /// How many pieces each block has.
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
        // Element by element: the lists are short, and a comparison of memory is a call.
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
            && match (self.alone, desc.alone()) {
                (Some(known), Some(tensor)) => known == (tensor.len_bytes(), tensor.dtype),
                _ => self.inputs.fit(&desc.inputs) && self.outputs.fit(&desc.outputs),
            }
    }
}

/// The latest shapes of one group.
#[derive(Default)]
pub(crate) struct Shapes {
    /// Sorted by use, roughly: a hit moves one place to the front.
    shapes: Vec<Arc<Shape>>,
}

impl Shapes {
    /// The shape of this call, if it is among the latest. A call of a known shape needs no check of its arguments.
    #[inline]
    pub(crate) fn find(&mut self, desc: &CallDesc, world: u32) -> Option<&Arc<Shape>> {
        let index = self.shapes.iter().position(|shape| shape.key.fits(desc, world))?;
        if index > 0 {
            self.shapes.swap(index - 1, index);
        }
        self.shapes.get(index.saturating_sub(1))
    }

    /// Keeps a shape that has not been found.
    pub(crate) fn keep(&mut self, shape: Arc<Shape>) {
        if self.shapes.len() >= MAX_SHAPES {
            self.shapes.pop();
        }
        self.shapes.push(shape);
    }
}

/// The latest shapes of one group, those whose tensors are staged apart, and those that are done elsewhere: equal sizes do not make them
/// equal. Those of parts of calls are by part, so that calls of many parts displace no others.
#[derive(Default)]
pub struct AllShapes {
    plain: Shapes,
    staged: Shapes,
    offloaded: Shapes,
    parts: Vec<Shapes>,
}

impl AllShapes {
    /// As [`Shapes::find`].
    pub fn find(&mut self, desc: &CallDesc, world: u32) -> Option<&Arc<Shape>> {
        self.of(desc).find(desc, world)
    }

    /// As [`Shapes::keep`].
    pub fn keep(&mut self, desc: &CallDesc, shape: Arc<Shape>) {
        self.of(desc).keep(shape);
    }

    fn of(&mut self, desc: &CallDesc) -> &mut Shapes {
        match desc.offload {
            Some(_) => &mut self.offloaded,
            None if desc.is_staged() => &mut self.staged,
            None if desc.part == Part::WHOLE => &mut self.plain,
            None => {
                let index = desc.part.index as usize;
                if self.parts.len() <= index {
                    self.parts.resize_with(index + 1, Shapes::default);
                }
                &mut self.parts[index]
            }
        }
    }
}

/// What is known of a call before it has a plan.
pub struct Draft {
    /// What the plan depends on.
    pub plan_key: PlanKey,
    reducer: Option<(Reducer, usize)>,
}

impl Draft {
    /// Of a checked call.
    ///
    /// # Errors
    /// `InvalidArgument` when the block that a rank keeps differs in size; those of the reducer.
    pub fn new(desc: &CallDesc, rank: Rank, world: u32) -> Result<Self> {
        let reduces = desc.collective.reduces();
        let codecs = desc.encoding(world).map(|encoding| encoding.codecs.clone());
        let elem = if reduces || codecs.is_some() { desc.dtype.size_bytes() } else { 1 };
        let is_encoded = codecs.is_some();
        let plan_key = plan_key(desc, elem, codecs);
        check_kept_block(desc.collective, &plan_key, rank)?;
        // What is encoded is added up in float32, whatever its type.
        let reducer = if reduces && !is_encoded {
            Some((Reducer::new(kernel_op(desc.op), desc.dtype, world)?, elem))
        } else {
            None
        };
        Ok(Self { plan_key, reducer })
    }

    /// The shape, with the plan of its key.
    pub fn with_plan(&self, desc: &CallDesc, world: u32, plan: Arc<Plan>) -> Shape {
        let signature = signature(desc, &self.plan_key, plan.id);
        let whole = Header::whole(&signature);
        Shape { key: Key::of(desc, world), plan, signature, whole, reducer: self.reducer }
    }
}

/// What the plan of a call depends on; `elem` is the size of what is counted in.
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
        is_staged: desc.is_staged(),
        is_offloaded: desc.offload.is_some(),
        part: desc.part,
    }
}

/// Factors are applied while the buffers are prepared; what remains is a sum.
fn kernel_op(op: ReduceOp) -> ReduceOp {
    if op == ReduceOp::PremulSum { ReduceOp::Sum } else { op }
}

/// Whether the result of two operands is in general none of the numbers that a type has.
fn rounds(op: ReduceOp) -> bool {
    match op {
        ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product | ReduceOp::PremulSum => true,
        ReduceOp::Min | ReduceOp::Max | ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => false,
    }
}

/// Whether every rank knows from its own arguments that all blocks are equal.
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

/// The block that a rank keeps must be as large on both sides. (What goes between ranks is compared there.)
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
        "the block that rank {rank} keeps has {} bytes as input and {} as output",
        bytes(&input),
        bytes(&output)
    )))
}

/// Element counts of blocks of pieces, for a layout over elements of `elem_bytes` (1: bytes).
fn block_elems(blocks: &Blocks, elem_bytes: u64) -> Vec<Vec<Elems>> {
    let count = |tensor: &TensorDesc| Elems(tensor.len_bytes() / elem_bytes);
    blocks.iter().map(|block| block.iter().map(count).collect()).collect()
}

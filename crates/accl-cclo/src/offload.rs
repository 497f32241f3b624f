//! Which collectives a device does, and which of its calls one becomes.
//!
//! Owns the route of a collective, which follows from what all ranks agree on, and its cut into pieces that fit into staging buffers and stay
//! clear of every hazard. Copies nothing and starts nothing. Read [`route`] and [`Pieces`] first.

use accl_types::{Collective, Dtype, Rank, ReduceOp};

use crate::call::Operation;
use crate::driver::Settings;
use crate::memory_map::{DataType, Network, ReduceFunction};

/// A collective, as torch asks for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What it does.
    pub collective: Collective,
    /// What its elements are.
    pub dtype: Dtype,
    /// How it adds; looked at if it does.
    pub op: ReduceOp,
    /// Root, if it has one.
    pub root: Rank,
    /// Bytes of a block: of the whole buffer, or of each rank's part where ranks have parts.
    pub block_bytes: u64,
    /// All blocks have the same size.
    pub equal_blocks: bool,
}

/// Who does a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// The device, by this operation on elements of this type.
    Device {
        /// What the device does.
        operation: Operation,
        /// What it takes the elements for.
        elements: DataType,
        /// How it adds.
        function: ReduceFunction,
    },
    /// The host, and why.
    Host(&'static str),
}

/// Which buffer of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// Operand 0.
    First,
    /// The result.
    Result,
}

/// Bytes that are copied between a rank's tensor and a staging buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where in the bytes of the tensors.
    pub tensor: u64,
    /// Where in the staging buffer.
    pub staging: u64,
    /// How many.
    pub bytes: u64,
}

/// A call of the device, and what is copied before and after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Elements, as the operation counts them.
    pub count: u32,
    /// Copied into operand 0 before; what lies between them is zero.
    pub gives: Vec<Span>,
    /// Bytes of operand 0 that the call looks at.
    pub given_bytes: u64,
    /// Copied to the result tensors afterwards.
    pub takes: Vec<Span>,
    /// From which buffer.
    pub takes_from: Buffer,
}

/// Cuts a collective into pieces, one after the other.
#[derive(Clone, Debug)]
pub struct Pieces {
    operation: Operation,
    element_bytes: u64,
    /// Elements of a block, of which so many are done.
    elements: u64,
    done: u64,
    /// Most elements of a block in a piece.
    most: u64,
    /// A count is a multiple of this.
    unit: u64,
    blocks_in: u64,
    blocks_out: u64,
    gives: bool,
    takes: bool,
}

/// Who does a collective: the same on all ranks.
pub fn route(request: &Request, settings: &Settings) -> Route {
    let operation = match request.collective {
        Collective::AllReduce => Operation::AllReduce,
        Collective::ReduceScatter => Operation::ReduceScatter,
        Collective::AllGather => Operation::AllGather,
        Collective::Broadcast => Operation::Broadcast,
        Collective::Reduce => Operation::Reduce,
        Collective::Gather => Operation::Gather,
        Collective::Scatter => Operation::Scatter,
        Collective::AllToAll => Operation::AllToAll,
        Collective::Barrier => return Route::Host("a barrier is a message between hosts"),
        Collective::Send | Collective::Recv => return Route::Host("a device cannot have sends wait for receives"),
    };
    if !request.equal_blocks {
        return Route::Host("blocks of a device have one size");
    }
    if operation == Operation::AllToAll && settings.network != Network::Rdma {
        return Route::Host("an all_to_all of a device needs RDMA");
    }
    if !operation.row().reduces {
        return Route::Device { operation, elements: DataType::Bytes, function: ReduceFunction::Sum };
    }
    let elements = match request.dtype {
        Dtype::F16 => DataType::F16,
        Dtype::F32 => DataType::F32,
        Dtype::F64 => DataType::F64,
        Dtype::I32 => DataType::I32,
        Dtype::I64 => DataType::I64,
        _ => return Route::Host("a device has no arithmetic for this type"),
    };
    let is_whole = matches!(elements, DataType::I32 | DataType::I64);
    match request.op {
        ReduceOp::Sum => Route::Device { operation, elements, function: ReduceFunction::Sum },
        ReduceOp::Max if is_whole => Route::Device { operation, elements, function: ReduceFunction::Max },
        ReduceOp::Max => Route::Host("a device does not order numbers that are none"),
        _ => Route::Host("a device has SUM and MAX alone"),
    }
}

impl Pieces {
    /// The pieces of a collective that goes to the device. Each staging buffer has so many bytes, at least those of an rx buffer.
    pub fn new(
        request: &Request,
        operation: Operation,
        elements: DataType,
        settings: &Settings,
        staging_bytes: u64,
    ) -> Self {
        let world = u64::from(settings.world());
        let element_bytes = u64::from(elements.size_bytes());
        let is_root = request.root.0 == settings.rank;
        let (gives, takes) = match operation {
            Operation::Broadcast => (is_root, !is_root),
            Operation::Scatter => (is_root, true),
            Operation::Gather | Operation::Reduce => (true, is_root),
            _ => (true, true),
        };
        let blocks = |has_all: bool| if has_all { world } else { 1 };
        let blocks_in =
            blocks(matches!(operation, Operation::Scatter | Operation::ReduceScatter | Operation::AllToAll));
        let blocks_out = blocks(matches!(operation, Operation::Gather | Operation::AllGather | Operation::AllToAll));
        let unit = if operation == Operation::AllReduce { world } else { 1 };
        // Whatever goes over UDP or TCP is eager. Sums are, since the order of their additions is fixed there and no spare buffer is too small;
        // and a gather is, unless its root is at an end.
        let root_is_between = request.root.0 > 0 && u64::from(request.root.0) + 1 < world;
        let is_eager = settings.network != Network::Rdma
            || operation.row().reduces
            || (operation == Operation::Gather && root_is_between);
        let eager = u64::from(settings.max_eager_bytes) / element_bytes;
        let staged = staging_bytes / (element_bytes * blocks_in.max(blocks_out));
        let most = staged.min(if is_eager { eager } else { u64::from(u32::MAX) / (element_bytes * world) });
        Self {
            operation,
            element_bytes,
            elements: request.block_bytes / element_bytes,
            done: 0,
            most: (most / unit * unit).max(unit),
            unit,
            blocks_in,
            blocks_out,
            gives,
            takes,
        }
    }

    fn spans(&self, blocks: u64, count: u64, staged: u64) -> Vec<Span> {
        let Self { element_bytes, elements, done, .. } = *self;
        let span = |block: u64| Span {
            tensor: (block * elements + done) * element_bytes,
            staging: block * staged * element_bytes,
            bytes: count * element_bytes,
        };
        (0..blocks).map(span).collect()
    }
}

impl Iterator for Pieces {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        let count = self.most.min(self.elements - self.done);
        if count == 0 {
            return None;
        }
        let padded = count.next_multiple_of(self.unit);
        let piece = Piece {
            count: padded as u32,
            gives: if self.gives { self.spans(self.blocks_in, count, padded) } else { Vec::new() },
            given_bytes: self.blocks_in * padded * self.element_bytes,
            takes: if self.takes { self.spans(self.blocks_out, count, padded) } else { Vec::new() },
            takes_from: if self.operation == Operation::Broadcast { Buffer::First } else { Buffer::Result },
        };
        self.done += count;
        Some(piece)
    }
}

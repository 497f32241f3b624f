//! Routing of collectives: which collectives a device runs, and which device calls each of them becomes.
//!
//! Owns the route of a collective, which depends only on values that all ranks agree on. Also owns the split of a collective into pieces that fit
//! into staging buffers and avoid every hazard. Copies nothing and starts nothing. Read [`route`] and [`Pieces`] first.

use accl_types::{Collective, Dtype, Rank, ReduceOp};

use crate::call::Operation;
use crate::memory_map::{DataType, Network, ReduceFunction};
use crate::settings::Settings;

/// A collective, as torch requests it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectiveRequest {
    /// The collective.
    pub collective: Collective,
    /// Element type.
    pub dtype: Dtype,
    /// Reduction operator; ignored if the collective does not reduce.
    pub op: ReduceOp,
    /// Root rank; ignored if the collective has no root.
    pub root: Rank,
    /// Size of a block in bytes: the whole buffer, or each rank's part if the buffer is divided among ranks.
    pub block_bytes: u64,
    /// Whether all blocks have the same size.
    pub equal_blocks: bool,
}

/// The calls of a device that a collective becomes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceRoute {
    /// Operation of the device.
    pub operation: Operation,
    /// Element type that the device uses.
    pub elements: DataType,
    /// Reduction function of the device.
    pub function: ReduceFunction,
}

/// Buffer of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PieceBuffer {
    /// Operand 0.
    First,
    /// The result buffer.
    Result,
}

/// Bytes that are copied between a rank's tensor and a staging buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Offset in the bytes of the tensors.
    pub tensor: u64,
    /// Offset in the staging buffer, in bytes.
    pub staging: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// A call of the device, with the copies before and after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Number of elements, in the unit of the operation's count.
    pub count: u32,
    /// Spans copied into operand 0 before the call. Bytes between the spans are zero.
    pub gives: Vec<Span>,
    /// Bytes of operand 0 that the call reads.
    pub given_bytes: u64,
    /// Spans copied to the result tensors after the call.
    pub takes: Vec<Span>,
    /// Buffer that `takes` is copied from.
    pub takes_from: PieceBuffer,
}

/// Splits a collective into consecutive pieces.
#[derive(Clone, Debug)]
pub struct Pieces {
    operation: Operation,
    element_bytes: u64,
    /// Elements of a block in total, and how many of them earlier pieces have covered.
    elements: u64,
    done: u64,
    /// Maximum elements of a block in one piece.
    most: u64,
    /// Every count is a multiple of this.
    unit: u64,
    blocks_in: u64,
    blocks_out: u64,
    gives: bool,
    takes: bool,
}

/// Returns the device's calls for a collective. The result is the same on all ranks.
///
/// # Errors
/// The reason, in a clause, why the host runs the collective.
pub fn route(request: &CollectiveRequest, settings: &Settings) -> Result<DeviceRoute, &'static str> {
    let operation = match request.collective {
        Collective::AllReduce => Operation::AllReduce,
        Collective::ReduceScatter => Operation::ReduceScatter,
        Collective::AllGather => Operation::AllGather,
        Collective::Broadcast => Operation::Broadcast,
        Collective::Reduce => Operation::Reduce,
        Collective::Gather => Operation::Gather,
        Collective::Scatter => Operation::Scatter,
        Collective::AllToAll => Operation::AllToAll,
        Collective::Barrier => return Err("barriers run between hosts"),
        Collective::Send | Collective::Recv => return Err("a device cannot make sends wait for receives"),
    };
    if !request.equal_blocks {
        return Err("a device needs blocks of equal size");
    }
    if operation == Operation::AllToAll && settings.network != Network::Rdma {
        return Err("all_to_all on a device needs RDMA");
    }
    if !operation.row().reduces {
        return Ok(DeviceRoute { operation, elements: DataType::Bytes, function: ReduceFunction::Sum });
    }
    let elements = match request.dtype {
        Dtype::F16 => DataType::F16,
        Dtype::F32 => DataType::F32,
        Dtype::F64 => DataType::F64,
        Dtype::I32 => DataType::I32,
        Dtype::I64 => DataType::I64,
        _ => return Err("a device has no arithmetic for this type"),
    };
    let is_whole = matches!(elements, DataType::I32 | DataType::I64);
    match request.op {
        ReduceOp::Sum => Ok(DeviceRoute { operation, elements, function: ReduceFunction::Sum }),
        ReduceOp::Max if is_whole => Ok(DeviceRoute { operation, elements, function: ReduceFunction::Max }),
        ReduceOp::Max => Err("a device does not support NaN in MAX"),
        _ => Err("a device supports only SUM and MAX"),
    }
}

impl Pieces {
    /// Returns the pieces of a collective that the device runs. Each staging buffer holds `staging_bytes` bytes, which must be at least the size of
    /// an rx buffer.
    pub fn new(
        request: &CollectiveRequest,
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
        // Messages over UDP or TCP are always eager. Over RDMA, sums are eager: that fixes the order of their additions, and no spare buffer can be
        // too small. A gather is also eager unless its root is the first or the last rank.
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
            takes_from: if self.operation == Operation::Broadcast { PieceBuffer::First } else { PieceBuffer::Result },
        };
        self.done += count;
        Some(piece)
    }
}

//! A collective in the form that a library of C functions accepts, and its memory.
//!
//! Owns the translation of types and operators, and the copies of memory that is not contiguous. Read
//! [`OffloadRequest::new`] first.

use accl_engine::{CollectiveMemory, ExternalCollective, ExternalTask};
use accl_transport::CollectiveV1;
use accl_types::{Collective, Dtype, Error, ReduceOp, Result};
use accl_wire::table::{collectives, element_types, ops};

/// Alignment in bytes that suits elements of every type.
const ALIGNMENT: usize = 64;

/// A buffer of this module that can hold elements of any type.
#[derive(Default)]
struct Room {
    bytes: Vec<u8>,
    begin: usize,
}

/// The arguments for the library, and the memory that they point to.
pub(super) struct OffloadRequest {
    pub(super) collective: CollectiveV1,
    pub(super) memory: RequestMemory,
}

/// The memory that a library works on.
#[derive(Default)]
pub(super) struct RequestMemory {
    /// Whether it is the caller's own memory, which the task holds from [`OffloadRequest::hold`] on.
    is_direct: bool,
    /// If not, copies of the caller's memory.
    input: Room,
    output: Room,
}

/// Contiguous memory: its address and its length in bytes.
type Piece = (*mut u8, u64);

impl OffloadRequest {
    /// Creates the request of a task's collective on this rank. Copies this rank's contribution if its memory is not
    /// contiguous, or if its position relative to the output is not allowed. Returns `None` if the task is cancelled.
    ///
    /// # Errors
    /// `Internal` for calls that are never given to a library; `Exhausted` when there is no memory for copies.
    pub(super) fn new(task: &ExternalTask, rank: u32, world: u32) -> Result<Option<Self>> {
        let memory =
            CollectiveMemory::of(task).ok_or_else(|| Error::internal("a library does whole collectives alone"))?;
        let what = memory.collective();
        let (element_type, element_bytes) = element_type(what)?;
        let is_root = what.root.0 == rank;
        let (reads, writes) = match what.collective {
            Collective::Reduce | Collective::Gather => (true, is_root),
            Collective::Scatter => (is_root, true),
            Collective::Broadcast => (is_root, true),
            _ => (true, true),
        };
        let input_bytes = if reads { memory.input_bytes() } else { 0 };
        let output_bytes = if writes { memory.output_bytes() } else { 0 };
        let block_bytes = match what.collective {
            Collective::AllToAll => output_bytes / u64::from(world),
            Collective::ReduceScatter | Collective::Scatter | Collective::Broadcast => output_bytes,
            _ => input_bytes,
        };
        let mut request = Self {
            collective: CollectiveV1 {
                size: size_of::<CollectiveV1>() as u32,
                collective: collective_number(what.collective)?,
                element_type,
                op: if what.collective.reduces() { op_number(what.op)? } else { 0 },
                root: if what.collective.is_rooted() { what.root.0 } else { 0 },
                flags: 0,
                count: block_bytes / element_bytes,
                input: std::ptr::null(),
                output: std::ptr::null_mut(),
            },
            memory: RequestMemory::default(),
        };
        let nowhere: Piece = (std::ptr::NonNull::<u128>::dangling().as_ptr().cast(), 0);
        let own_block = |output: *mut u8| match what.collective {
            Collective::AllGather | Collective::Gather => output.wrapping_add((block_bytes * u64::from(rank)) as usize),
            _ => output,
        };
        let may_be_in_place =
            !matches!(what.collective, Collective::AllToAll | Collective::ReduceScatter | Collective::Scatter);
        // Libraries require the same choice on all ranks, but the layout of tensors may differ between ranks.
        let must_be_in_place = matches!(what.collective, Collective::AllReduce | Collective::Broadcast) && reads;
        let may_not_be_in_place = what.collective == Collective::AllGather;
        let input = if input_bytes > 0 { memory.whole_input() } else { Some(nowhere) };
        let output = if output_bytes > 0 { memory.whole_output() } else { Some(nowhere) };
        if let (Some(input), Some(output)) = (input, output) {
            let is_in_place =
                reads && writes && may_be_in_place && (input_bytes == 0 || input.0 == own_block(output.0));
            if is_in_place || !(must_be_in_place || overlap(input, output)) {
                request.memory.is_direct = true;
                request.collective.output = if writes { output.0.cast() } else { std::ptr::null_mut() };
                if is_in_place && may_not_be_in_place {
                    request.memory.input = Room::of(input_bytes)?;
                    if !memory.read_input(0, request.memory.input.bytes()) {
                        return Ok(None);
                    }
                    request.collective.input = request.memory.input.bytes().as_ptr().cast();
                } else if reads && !is_in_place {
                    request.collective.input = input.0.cast_const().cast();
                }
                return Ok(Some(request));
            }
        }
        request.memory.output = Room::of(output_bytes)?;
        if must_be_in_place {
            if !memory.read_input(0, request.memory.output.bytes()) {
                return Ok(None);
            }
        } else {
            request.memory.input = Room::of(input_bytes)?;
            if !memory.read_input(0, request.memory.input.bytes()) {
                return Ok(None);
            }
            if reads {
                request.collective.input = request.memory.input.bytes().as_ptr().cast();
            }
        }
        if writes {
            request.collective.output = request.memory.output.bytes().as_mut_ptr().cast();
        }
        Ok(Some(request))
    }

    /// Holds the caller's memory for as long as the library works on it. Returns `false` if the task is cancelled.
    pub(super) fn hold(&self, task: &ExternalTask) -> bool {
        !self.memory.is_direct || task.hold()
    }
}

impl RequestMemory {
    /// Returns whether the library works on the caller's memory.
    pub(super) fn is_direct(&self) -> bool {
        self.is_direct
    }

    /// Finishes after the library has: copies the data that this rank receives to its destination. Returns `false` if
    /// the task is cancelled.
    pub(super) fn finish(&mut self, task: &ExternalTask) -> bool {
        let Some(mut memory) = CollectiveMemory::of(task) else { return false };
        self.is_direct || memory.write_output(0, self.output.bytes())
    }
}

fn overlap(a: Piece, b: Piece) -> bool {
    let (a_begin, b_begin) = (a.0.addr() as u64, b.0.addr() as u64);
    a.1 > 0 && b.1 > 0 && a_begin < b_begin + b.1 && b_begin < a_begin + a.1
}

impl Room {
    /// Allocates room for `bytes` bytes.
    ///
    /// # Errors
    /// `Exhausted` when there is not enough memory.
    fn of(bytes: u64) -> Result<Self> {
        let mut all: Vec<u8> = Vec::new();
        let length = bytes as usize + ALIGNMENT;
        all.try_reserve_exact(length)
            .map_err(|_| Error::exhausted(format!("cannot allocate {bytes} bytes for tensors in separate memory")))?;
        let begin = all.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        // The capacity suffices, so the buffer does not move.
        all.resize(begin + bytes as usize, 0);
        Ok(Self { bytes: all, begin })
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.bytes[self.begin..]
    }
}

fn collective_number(collective: Collective) -> Result<u32> {
    Ok(match collective {
        Collective::Broadcast => collectives::BROADCAST,
        Collective::AllReduce => collectives::ALL_REDUCE,
        Collective::Reduce => collectives::REDUCE,
        Collective::AllGather => collectives::ALL_GATHER,
        Collective::Gather => collectives::GATHER,
        Collective::Scatter => collectives::SCATTER,
        Collective::ReduceScatter => collectives::REDUCE_SCATTER,
        Collective::AllToAll => collectives::ALL_TO_ALL,
        Collective::Barrier | Collective::Send | Collective::Recv => {
            return Err(Error::internal(format!("{collective} was given to a library")));
        }
    })
}

/// Returns the library's number for the element type, and the size of an element in bytes.
fn element_type(what: &ExternalCollective) -> Result<(u32, u64)> {
    if !what.collective.reduces() {
        return Ok((element_types::BYTES, 1));
    }
    let element_type = match what.dtype {
        Dtype::I8 => element_types::INT8,
        Dtype::U8 => element_types::UINT8,
        Dtype::I32 => element_types::INT32,
        Dtype::U32 => element_types::UINT32,
        Dtype::I64 => element_types::INT64,
        Dtype::U64 => element_types::UINT64,
        Dtype::F32 => element_types::FLOAT,
        Dtype::F64 => element_types::DOUBLE,
        Dtype::C64 => element_types::FLOAT_COMPLEX,
        Dtype::C128 => element_types::DOUBLE_COMPLEX,
        other => return Err(Error::internal(format!("{other} was given to a library to be reduced"))),
    };
    Ok((element_type, what.dtype.size_bytes() as u64))
}

fn op_number(op: ReduceOp) -> Result<u32> {
    Ok(match op {
        ReduceOp::Sum => ops::SUM,
        ReduceOp::Product => ops::PRODUCT,
        ReduceOp::Min => ops::MIN,
        ReduceOp::Max => ops::MAX,
        ReduceOp::Band => ops::BAND,
        ReduceOp::Bor => ops::BOR,
        ReduceOp::Bxor => ops::BXOR,
        ReduceOp::Avg | ReduceOp::PremulSum => {
            return Err(Error::internal(format!("{op} was given to a library")));
        }
    })
}

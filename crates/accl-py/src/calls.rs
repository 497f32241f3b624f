//! Descriptions of calls: what the shim passes, in the engine's types.
//!
//! Owns the translation of tensors. The engine checks the result. Read [`call_desc`] first.

use std::slice;
use std::time::Duration;

use accl_engine::{Blocks, CallDesc, MemoryKind, Mode, Phases, TensorDesc};
use accl_types::{Collective, Dtype, Elems, Error, Rank, ReduceOp, Result};

use crate::bridge::ffi::{CallArgs, TensorView};
use crate::compression;

/// Converts milliseconds; returns `None` for a negative number.
pub(crate) fn millis(timeout_ms: i64) -> Option<Duration> {
    u64::try_from(timeout_ms).ok().map(Duration::from_millis)
}

/// Describes a call of the shim.
///
/// # Errors
/// `Internal` for arguments that the shim does not pass; `Unsupported` for an operator.
pub(crate) fn call_desc(args: &CallArgs, mode: Mode) -> Result<CallDesc> {
    let collective =
        Collective::from_code(args.collective.repr).ok_or_else(|| Error::internal("unknown collective code"))?;
    let op = ReduceOp::from_code(args.op).ok_or_else(|| Error::unsupported("unknown reduce operator"))?;
    // A barrier has no tensors.
    let dtype = args.inputs.first().or(args.outputs.first()).map_or(Ok(Dtype::U8), |view| dtype(view.dtype))?;
    Ok(CallDesc {
        op,
        factor: args.factor,
        root: Rank(args.root),
        peer: u32::try_from(args.peer).ok().map(Rank),
        tag: args.tag,
        timeout: millis(args.timeout_ms),
        inputs: blocks(args.inputs, args.input_blocks)?,
        outputs: blocks(args.outputs, args.output_blocks)?,
        equal_blocks: args.equal_blocks,
        mode,
        seq: u64::try_from(args.seq).ok(),
        encoding: compression::current(),
        phases: (args.is_profiled && !collective.is_point_to_point()).then(Phases::new),
        ..CallDesc::new(collective, dtype)
    })
}

fn blocks(views: &[TensorView], counts: &[u32]) -> Result<Blocks> {
    let mut views = views;
    let mut blocks = Blocks::default();
    for &count in counts {
        let (block, rest) = views
            .split_at_checked(count as usize)
            .ok_or_else(|| Error::internal("a call names more tensors than it describes"))?;
        views = rest;
        match block {
            [one] => blocks.push([tensor_desc(one)?]),
            several => blocks.push(several.iter().map(tensor_desc).collect::<Result<Vec<_>>>()?),
        }
    }
    Ok(blocks)
}

/// Returns the same tensors at the addresses of their dense copies on the device.
pub(crate) fn dense_blocks(blocks: &Blocks, views: &[TensorView]) -> Blocks {
    let mut views = views.iter();
    let mut dense = |tensor: &TensorDesc| {
        let address = views.next().map_or(0, |view| view.dense) as *mut u8;
        let elems = Elems(tensor.len_bytes() / tensor.dtype().size_bytes() as u64);
        TensorDesc::dense(address, tensor.dtype(), elems).in_memory(tensor.memory())
    };
    blocks.iter().map(|block| block.iter().map(&mut dense).collect::<Vec<_>>()).collect()
}

fn tensor_desc(view: &TensorView) -> Result<TensorDesc> {
    let dtype = dtype(view.dtype)?;
    let ptr = view.data as *mut u8;
    let tensor = if view.sizes == 0 {
        TensorDesc::dense(ptr, dtype, Elems(view.count as u64))
    } else {
        let shape = |address: usize| {
            // SAFETY: the shim passes the address of `dim` numbers of a tensor, and it holds that tensor during this
            // call.
            unsafe { slice::from_raw_parts(address as *const i64, view.dim) }
        };
        TensorDesc::strided(ptr, dtype, shape(view.sizes), shape(view.strides))?
    };
    let memory = if view.dense == 0 { MemoryKind::Host } else { compression::DEVICE_MEMORY };
    Ok(tensor.viewed(view.conj, view.neg).in_memory(memory))
}

fn dtype(code: u8) -> Result<Dtype> {
    Dtype::from_code(code).ok_or_else(|| Error::internal("unknown dtype code"))
}

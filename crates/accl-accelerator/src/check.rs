//! A check of new kernels against the CPU's codecs, before a call uses them.
//!
//! A compiler or a device may compute other bits than the CPU, and ranks would then get other results without an error. So each
//! codec that is loaded computes a few tiles first, and the results are compared byte by byte. This module owns the values and
//! the comparison. Read [`check`] first.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accl_engine::codec::{Codec, Floats, RngKey, Slice};
use accl_engine::{ExternalCombination, TILE_ELEMS, TILE_HEADER_BYTES, TileCode, TileOperand, TileRun};
use accl_types::{Dtype, Error, Rank, Result};

use crate::gpu_codecs::CallKernels;
use crate::pinned::PinnedMemory;
use crate::streams::{CallStreams, Direction};
use crate::tiles::{self, LaunchTarget};

/// Time for which the check waits for the device.
const PATIENCE: Duration = Duration::from_secs(10);
/// Alignment of each array.
const ALIGN: usize = 64;
/// Index of the first element, so that a tile does not begin where its tensor does.
const FIRST: u64 = 1 << 15;
const DIVISOR: f32 = 3.0;

/// Computes tiles with a codec's kernels and with the codec. Returns whether all bytes are equal.
///
/// # Errors
/// `Device` if the device fails, or does not end in time. `Exhausted` if no memory can be pinned.
pub(crate) fn check(
    streams: &mut dyn CallStreams,
    pinned: &Arc<PinnedMemory>,
    target: LaunchTarget,
    kernels: &CallKernels,
    codec: &Arc<dyn Codec>,
    dtype: Dtype,
) -> Result<bool> {
    // Whole buckets, and one that is not whole: almost a whole tile.
    let count = TILE_ELEMS as usize - 13;
    let (values_bytes, code_bytes) = (count * dtype.size_bytes(), codec.encoded_bytes(dtype, count));
    let tile_bytes = TILE_HEADER_BYTES + code_bytes;
    let sizes = [values_bytes, tile_bytes, values_bytes, tile_bytes, tile_bytes, values_bytes, values_bytes];
    let room = |len: usize| (len + dtype.size_bytes()).next_multiple_of(ALIGN);
    let none = || Error::exhausted("no memory can be pinned to check kernels");
    let memory = pinned.lend(sizes.iter().map(|&len| room(len)).sum(), || {}).ok_or_else(none)?;
    let mut next = memory.address();
    let [values, code, decoded, pair_code, sums_code, sums, copy] = sizes.map(|len| {
        let here = next;
        next = next.wrapping_add(room(len));
        here
    });
    // Tensors may begin at any element.
    let [values, decoded] = [values, decoded].map(|at| at.wrapping_add(dtype.size_bytes()));
    let rng_key = RngKey::keyed(&[11, 7]).among(&[11], Rank(1), 3);
    let expected = Expected::of(codec, dtype, count, rng_key);
    // SAFETY: the memory is lent to this function alone, and the arrays have these lengths.
    unsafe {
        std::ptr::copy_nonoverlapping(expected.values.as_ptr(), values, values_bytes);
        for (at, len) in [(code, tile_bytes), (decoded, values_bytes), (pair_code, tile_bytes), (sums_code, tile_bytes)]
        {
            std::ptr::write_bytes(at, 0xa5, len);
        }
    }
    let tile = |address: *mut u8| TileCode { address, stride: tile_bytes as u64, codec: codec.clone() };
    let run = |operands: &[TileOperand], code: Option<*mut u8>, values: Option<*mut u8>| TileRun {
        tiles: 0..1,
        piece: 0,
        elems: count as u64,
        tile_elems: count as u64,
        first: FIRST,
        operands: operands.iter().cloned().collect(),
        code: code.map(tile),
        values,
        residual: None,
        divisor: (operands.len() > 1).then_some(DIVISOR),
        rng_key,
    };
    // One operand, two that are added in one pass where there is a kernel for it, more, and results that are not encoded.
    let (own, other) = (TileOperand::Values(values), TileOperand::Code(tile(code)));
    let encoded = run(std::slice::from_ref(&own), Some(code), Some(decoded));
    let pair = run(&[own.clone(), other.clone()], Some(pair_code), None);
    let summed = run(&[other.clone(), other.clone(), own.clone()], Some(sums_code), None);
    let written = run(&[own.clone(), other], None, Some(sums));
    let copied = run(&[own], None, Some(copy));
    // Until an event behind them has come, kernels may write to the memory.
    let memory = ManuallyDrop::new(memory);
    for run in [encoded, pair, summed, written, copied] {
        let combination = ExternalCombination::new(dtype, vec![run], false);
        tiles::batches(&combination, 0..1)
            .iter()
            .try_for_each(|batch| tiles::launch(kernels, target, dtype, batch, 0))?;
    }
    let event = streams.record(Direction::Out)?;
    let begin = Instant::now();
    while !event.has_come()? {
        if begin.elapsed() > PATIENCE {
            return Err(Error::device(format!("{}: kernels were not done after {PATIENCE:?}", streams.device())));
        }
        std::thread::yield_now();
    }
    let _memory = ManuallyDrop::into_inner(memory);
    let same = |at: *mut u8, skipped: usize, expected: &[u8]| {
        // SAFETY: the array has these bytes, and the kernels that wrote them are done.
        unsafe { std::slice::from_raw_parts(at.wrapping_add(skipped), expected.len()) == expected }
    };
    let checks = [
        ("encode", same(code, TILE_HEADER_BYTES, &expected.code)),
        ("decode", same(decoded, 0, &expected.decoded)),
        ("add and encode", same(pair_code, TILE_HEADER_BYTES, &expected.pair_code)),
        ("encode sums", same(sums_code, TILE_HEADER_BYTES, &expected.sums_code)),
        ("write sums", same(sums, 0, &expected.sums)),
        ("copy", same(copy, 0, &expected.values)),
    ];
    if let Some((what, _)) = checks.iter().find(|(_, is_same)| !is_same) {
        let device = streams.device();
        tracing::warn!(
            device,
            ?codec,
            "kernels that {what} give other bytes than the CPU's codec, which is used instead"
        );
        return Ok(false);
    }
    Ok(true)
}

/// Bytes that the CPU's codec gives.
struct Expected {
    values: Vec<u8>,
    code: Vec<u8>,
    decoded: Vec<u8>,
    pair_code: Vec<u8>,
    sums_code: Vec<u8>,
    sums: Vec<u8>,
}

impl Expected {
    fn of(codec: &Arc<dyn Codec>, dtype: Dtype, count: usize, rng_key: RngKey) -> Self {
        let (floats, values_of) = (Floats::default(), (0..count).map(value).collect::<Vec<f32>>());
        let mut values = vec![0; count * dtype.size_bytes()];
        let room = || vec![0; codec.encoded_bytes(dtype, count)];
        let (mut code, mut decoded, mut sums) = (room(), values.clone(), values.clone());
        let (mut pair_code, mut sums_code) = (room(), room());
        let mut added = vec![0.0; count];
        let slice = |src, dtype_of_src| Slice { src, dtype: dtype_of_src, tensor: dtype, count, first: FIRST };
        // SAFETY: each array has `count` elements of its type, and belongs to this function.
        unsafe {
            floats.write(values.as_mut_ptr(), dtype, &values_of);
            codec.encode(&mut code, slice(values.as_ptr(), dtype), rng_key);
            codec.decode(decoded.as_mut_ptr(), dtype, &code, dtype, count);
            floats.read(&mut added, values.as_ptr(), dtype);
            codec.decode_add(&mut added, &code, dtype);
            floats.finish(&mut added, Some(DIVISOR), dtype);
            codec.encode(&mut pair_code, slice(added.as_ptr().cast(), Dtype::F32), rng_key);
            floats.write(sums.as_mut_ptr(), dtype, &added);
            codec.decode(added.as_mut_ptr().cast(), Dtype::F32, &code, dtype, count);
            codec.decode_add(&mut added, &code, dtype);
            floats.add(&mut added, values.as_ptr(), dtype);
            floats.finish(&mut added, Some(DIVISOR), dtype);
            codec.encode(&mut sums_code, slice(added.as_ptr().cast(), Dtype::F32), rng_key);
        }
        Self { values, code, decoded, pair_code, sums_code, sums }
    }
}

/// Returns one of the values: of many magnitudes and both signs, with zeros. Some blocks of 64 have values that are not finite, that
/// metadata of 16 bits cannot hold, or that are smaller than normal numbers.
fn value(index: usize) -> f32 {
    let mixed = (index as u32).wrapping_mul(0x9e37_79b9) >> 8;
    let unit = mixed as f32 / (1 << 23) as f32 - 1.0;
    let scale = match index / 64 % 32 {
        28 => f32::from_bits(1 << 18),
        29 => 3e38,
        30 => 7e4,
        exponent => f32::powi(2.0, exponent as i32 - 14),
    };
    match (index / 64 % 64, index % 64) {
        (31, 5) => f32::NAN,
        (63, 9) => f32::NEG_INFINITY,
        (_, at) if at % 11 == 3 => 0.0,
        _ => unit * scale,
    }
}

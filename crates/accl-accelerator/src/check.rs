//! A check of new kernels against the CPU's codecs, before a call uses them.
//!
//! A compiler or a device may compute other bits than the CPU, and ranks would then get other results without an error. So each
//! codec that is loaded computes a few tiles first, and the results are compared byte by byte. This module owns the values and
//! the comparison. Read [`Checker::check`] first.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accl_engine::codec::{Codec, Floats, RngKey, Slice};
use accl_engine::{
    ExternalCombination, LentMemory, TILE_ELEMS, TILE_HEADER_BYTES, TileCode, TileOperand, TileResidual, TileRun,
};
use accl_types::{Dtype, Error, Rank, Result};

use crate::figures::SQUARES_BYTES;
use crate::gpu_codecs::{CallKernels, Purpose};
use crate::pinned::PinnedMemory;
use crate::streams::{CallStreams, Direction};
use crate::tiles::{self, FigureOutputs, LaunchTarget};

/// Time for which the check waits for the device.
const PATIENCE: Duration = Duration::from_secs(10);
/// Alignment of each array.
const ALIGN: usize = 64;
/// Index of the first element, so that a tile does not begin where its tensor does.
const FIRST: u64 = 1 << 15;
const DIVISOR: f32 = 3.0;

/// A check of the kernels of one codec, for tensors of one type.
pub(crate) struct Checker<'a> {
    pub(crate) streams: &'a mut dyn CallStreams,
    pub(crate) pinned: &'a Arc<PinnedMemory>,
    pub(crate) target: LaunchTarget,
    pub(crate) kernels: &'a CallKernels,
    pub(crate) codec: &'a Arc<dyn Codec>,
    pub(crate) dtype: Dtype,
}

/// Number of values: whole buckets, and one that is not whole. They are almost a whole tile.
const COUNT: usize = TILE_ELEMS as usize - 13;

/// Memory of a check: the inputs, and what kernels make of them.
struct Arrays {
    values: *mut u8,
    code: *mut u8,
    decoded: *mut u8,
    pair_code: *mut u8,
    sums_code: *mut u8,
    sums: *mut u8,
    copy: *mut u8,
    residuals: [*mut u8; 2],
    squares: *mut u8,
    /// Sums of float32 between kernels. The memory for sums of the stream belongs to the calls in flight.
    between: *mut u8,
}

/// A comparison: what kernels have done, the address of their results, and the expected bytes.
type Comparison<'a> = (&'static str, *const u8, &'a [u8]);

impl Checker<'_> {
    /// Computes tiles with the kernels of a purpose and with the codec. Returns whether all bytes are equal.
    ///
    /// # Errors
    /// `Device` if the device fails, or does not end in time. `Exhausted` if no memory can be pinned.
    pub(crate) fn check(&mut self, purpose: Purpose) -> Result<bool> {
        let (codec, dtype) = (self.codec, self.dtype);
        let rng_key = RngKey::keyed(&[11, 7]).among(&[11], Rank(1), 3);
        let expected = Expected::of(codec, dtype, rng_key);
        let tile_bytes = TILE_HEADER_BYTES + codec.encoded_bytes(dtype, COUNT);
        let (memory, arrays) = self.lend(&expected, tile_bytes)?;
        let tile = |address: *mut u8| TileCode { address, stride: tile_bytes as u64, codec: codec.clone() };
        let run = |operands: &[TileOperand], code: Option<*mut u8>, values: Option<*mut u8>| TileRun {
            tiles: 0..1,
            piece: 0,
            elems: COUNT as u64,
            tile_elems: COUNT as u64,
            first: FIRST,
            operands: operands.iter().cloned().collect(),
            code: code.map(tile),
            values,
            residual: None,
            divisor: (operands.len() > 1).then_some(DIVISOR),
            rng_key,
        };
        let with_residual = |run: TileRun, address: *mut u8, skips_zeros: bool| {
            let is_measured = !skips_zeros;
            TileRun { residual: Some(TileResidual { address, skips_zeros, used: None, is_measured }), ..run }
        };
        let (own, other) = (TileOperand::Values(arrays.values), TileOperand::Code(tile(arrays.code)));
        let summed = run(&[other.clone(), other.clone(), own.clone()], Some(arrays.sums_code), None);
        let runs = match purpose {
            // One operand, two that are added in one pass where there is a kernel for it, more, and results that are not encoded.
            Purpose::Calls => vec![
                run(std::slice::from_ref(&own), Some(arrays.code), Some(arrays.decoded)),
                run(&[own.clone(), other.clone()], Some(arrays.pair_code), None),
                summed,
                run(&[own.clone(), other], None, Some(arrays.sums)),
                run(&[own], None, Some(arrays.copy)),
            ],
            // The first one's code is an operand of the second one.
            Purpose::Feedback => vec![
                with_residual(run(&[own], Some(arrays.code), None), arrays.residuals[0], false),
                with_residual(summed, arrays.residuals[1], true),
            ],
        };
        // Until an event behind them has come, kernels may write to the memory.
        let memory = ManuallyDrop::new(memory);
        let target = LaunchTarget { sums: arrays.between.addr() as u64, ..self.target };
        let figures = FigureOutputs { counters: 0, squares: arrays.squares.addr() as u64 };
        for run in runs {
            let combination = ExternalCombination::new(dtype, vec![run], false);
            tiles::batches(&combination, 0..1)
                .iter()
                .try_for_each(|batch| tiles::launch(self.kernels, target, dtype, batch, figures))?;
        }
        self.wait()?;
        let _memory = ManuallyDrop::into_inner(memory);
        let body = |at: *mut u8| at.wrapping_add(TILE_HEADER_BYTES).cast_const();
        let Arrays { code, decoded, pair_code, sums_code, sums, copy, residuals, squares, .. } = arrays;
        let comparisons: Vec<Comparison<'_>> = match purpose {
            Purpose::Calls => vec![
                ("encode", body(code), &expected.code),
                ("decode", decoded, &expected.decoded),
                ("add and encode", body(pair_code), &expected.pair_code),
                ("encode sums", body(sums_code), &expected.sums_code),
                ("write sums", sums, &expected.sums),
                ("copy", copy, &expected.values),
            ],
            Purpose::Feedback => vec![
                ("encode with a residual", body(code), &expected.feedback_code),
                ("keep a residual", residuals[0], &expected.residuals[0]),
                // The squares of the values are NaN, and have any payload.
                ("add squares up", squares.wrapping_add(size_of::<f64>()), &expected.squares_of_lost),
                ("encode sums with a residual", body(sums_code), &expected.feedback_sums_code),
                ("keep a residual of sums", residuals[1], &expected.residuals[1]),
            ],
        };
        let is_same = |&(_, at, expected): &Comparison<'_>| {
            // SAFETY: the array has these bytes, and the kernels that wrote them are done.
            unsafe { std::slice::from_raw_parts(at, expected.len()) == expected }
        };
        if let Some((what, ..)) = comparisons.iter().find(|comparison| !is_same(comparison)) {
            let device = self.streams.device();
            tracing::warn!(
                device,
                ?codec,
                "kernels that {what} give other bytes than the CPU's codec, which is used instead"
            );
            return Ok(false);
        }
        Ok(true)
    }

    /// Lends memory, with the inputs. Results are not zeros, so that missing ones are seen.
    fn lend(&self, expected: &Expected, tile_bytes: usize) -> Result<(LentMemory, Arrays)> {
        let (size, residual_bytes) = (self.dtype.size_bytes(), COUNT * size_of::<f32>());
        let values_bytes = COUNT * size;
        let sizes = [
            values_bytes,
            tile_bytes,
            values_bytes,
            tile_bytes,
            tile_bytes,
            values_bytes,
            values_bytes,
            residual_bytes,
            residual_bytes,
            SQUARES_BYTES,
            residual_bytes,
        ];
        let room = |len: usize| (len + size).next_multiple_of(ALIGN);
        let none = || Error::exhausted("no memory can be pinned to check kernels");
        let memory = self.pinned.lend(sizes.iter().map(|&len| room(len)).sum(), || {}).ok_or_else(none)?;
        let mut next = memory.address();
        // SAFETY: the memory is lent to this function alone, and has these bytes.
        unsafe { std::ptr::write_bytes(next, 0xa5, sizes.iter().map(|&len| room(len)).sum()) };
        let [values, code, decoded, pair_code, sums_code, sums, copy, first, second, squares, between] =
            sizes.map(|len| {
                let here = next;
                next = next.wrapping_add(room(len));
                here
            });
        // Tensors may begin at any element.
        let [values, decoded] = [values, decoded].map(|at| at.wrapping_add(size));
        let residuals = [first, second];
        // SAFETY: the memory is lent to this function alone, and the arrays have these lengths.
        unsafe {
            std::ptr::copy_nonoverlapping(expected.values.as_ptr(), values, values_bytes);
            for residual in residuals {
                std::ptr::copy_nonoverlapping(expected.residual.as_ptr().cast(), residual, residual_bytes);
            }
        }
        Ok((memory, Arrays { values, code, decoded, pair_code, sums_code, sums, copy, residuals, squares, between }))
    }

    /// Waits for all kernels that were enqueued.
    fn wait(&mut self) -> Result<()> {
        let event = self.streams.record(Direction::Out)?;
        let begin = Instant::now();
        while !event.has_come()? {
            if begin.elapsed() > PATIENCE {
                let device = self.streams.device();
                return Err(Error::device(format!("{device}: kernels were not done after {PATIENCE:?}")));
            }
            std::thread::yield_now();
        }
        Ok(())
    }
}

/// Bytes that the CPU's codec gives.
struct Expected {
    values: Vec<u8>,
    code: Vec<u8>,
    decoded: Vec<u8>,
    pair_code: Vec<u8>,
    sums_code: Vec<u8>,
    sums: Vec<u8>,
    /// The residual before an encoding.
    residual: Vec<f32>,
    feedback_code: Vec<u8>,
    feedback_sums_code: Vec<u8>,
    /// New residuals: of the values, and of the sums.
    residuals: [Vec<u8>; 2],
    squares_of_lost: Vec<u8>,
}

impl Expected {
    fn of(codec: &Arc<dyn Codec>, dtype: Dtype, rng_key: RngKey) -> Self {
        let (floats, values_of) = (Floats::default(), (0..COUNT).map(value).collect::<Vec<f32>>());
        let mut values = vec![0; COUNT * dtype.size_bytes()];
        let (mut decoded, mut sums) = (values.clone(), values.clone());
        let mut added = vec![0.0; COUNT];
        let encoded = |src: *const u8, dtype_of_src: Dtype| {
            let mut code = vec![0; codec.encoded_bytes(dtype, COUNT)];
            let slice = Slice { src, dtype: dtype_of_src, tensor: dtype, count: COUNT, first: FIRST };
            // SAFETY: the caller's array has `COUNT` elements of this type.
            unsafe { codec.encode(&mut code, slice, rng_key) };
            code
        };
        let encoded_sums = |sums: &[f32]| encoded(sums.as_ptr().cast(), Dtype::F32);
        // Sums of two decoded operands and the values, divided.
        let summed = |code: &[u8], values: &[u8]| {
            let mut sums = vec![0.0; COUNT];
            // SAFETY: each array has `COUNT` elements of its type.
            unsafe {
                codec.decode(sums.as_mut_ptr().cast(), Dtype::F32, code, dtype, COUNT);
                codec.decode_add(&mut sums, code, dtype);
                floats.add(&mut sums, values.as_ptr(), dtype);
            }
            floats.finish(&mut sums, Some(DIVISOR), dtype);
            sums
        };
        let residual: Vec<f32> = (0..COUNT).map(|index| 0.01 * value(index * 7 + 64 * 3)).map(finite).collect();
        let with_residual = |mut sums: Vec<f32>| {
            let (mut lost, mut decoded) = (residual.clone(), vec![0.0; COUNT]);
            // SAFETY: each array has `COUNT` float32.
            let (code, squares_of_lost) = unsafe {
                floats.add(&mut sums, residual.as_ptr().cast(), Dtype::F32);
                let code = encoded_sums(&sums);
                codec.decode(decoded.as_mut_ptr().cast(), Dtype::F32, &code, dtype, COUNT);
                (code, floats.write_loss(lost.as_mut_ptr().cast(), &sums, &mut decoded))
            };
            (code, lost.iter().flat_map(|lost| lost.to_le_bytes()).collect::<Vec<u8>>(), squares_of_lost)
        };
        // SAFETY: each array has `COUNT` elements of its type, and belongs to this function.
        unsafe {
            floats.write(values.as_mut_ptr(), dtype, &values_of);
            floats.read(&mut added, values.as_ptr(), dtype);
        }
        let (feedback_code, lost, squares_of_lost) = with_residual(added.clone());
        let (feedback_sums_code, lost_of_sums, _) = with_residual(summed(&feedback_code, &values));
        let code = encoded(values.as_ptr(), dtype);
        let sums_code = encoded_sums(&summed(&code, &values));
        // SAFETY: each array has `COUNT` elements of its type, and belongs to this function.
        unsafe {
            codec.decode(decoded.as_mut_ptr(), dtype, &code, dtype, COUNT);
            codec.decode_add(&mut added, &code, dtype);
            floats.finish(&mut added, Some(DIVISOR), dtype);
            floats.write(sums.as_mut_ptr(), dtype, &added);
        }
        let pair_code = encoded_sums(&added);
        let (residuals, squares_of_lost) = ([lost, lost_of_sums], squares_of_lost.to_le_bytes().to_vec());
        Self {
            values,
            code,
            decoded,
            pair_code,
            sums_code,
            sums,
            residual,
            feedback_code,
            feedback_sums_code,
            residuals,
            squares_of_lost,
        }
    }
}

/// Returns 0 for a value that is not finite.
fn finite(value: f32) -> f32 {
    if value.is_finite() { value } else { 0.0 }
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

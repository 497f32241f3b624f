//! Combinations of encoded calls, computed by the host's codecs: what a stand-in for a device does with the tasks of a
//! [tensor coder](accl_engine::CallDesc::tensor_coder).
//!
//! This module owns the order of the steps of one tile. The codecs are the product's, so the results of a call are the bits
//! that the call gives on host memory. Read [`combine`] first.

use std::ops::Range;

use accl_engine::codec::{Floats, NonFinite, Slice};
use accl_engine::{
    ExternalCombination, SampleCopy, Squares, TILE_HEADER_BYTES, TileCode, TileOperand, TileResidual, TileRun,
};
use accl_types::Dtype;

/// Computes some tiles of a combination.
///
/// # Safety
/// The addresses of the combination can be accessed by this process. The tiles are ready in a task that the caller owns and
/// have not been reported.
pub unsafe fn combine(combination: &ExternalCombination, tiles: Range<u32>) {
    let size = combination.dtype.size_bytes();
    let copy = |copy: &SampleCopy| {
        // SAFETY: both addresses have these elements, and nothing else accesses them, by this function's contract.
        unsafe { copy.from.copy_to_nonoverlapping(copy.to, copy.elems as usize * size) };
    };
    if let Some(sample) = &combination.sample {
        let made = sample.make_once(|copies| {
            copies.iter().for_each(copy);
            Ok(())
        });
        made.expect("copies on the host do not fail");
    }
    for (number, run) in combination.runs.iter().enumerate() {
        let range = tiles.start.max(run.tiles.start)..tiles.end.min(run.tiles.end);
        for index in range {
            let tile = Tile::of(combination.dtype, run, index - run.tiles.start);
            // SAFETY: the tile is one of those that the caller may access.
            let (non_finite, squares) = unsafe { tile.make() };
            combination.count(number, non_finite);
            if run.residual.is_some_and(|residual| residual.is_measured) {
                combination.add_squares(number, squares);
            }
        }
    }
    let of_tiles = combination.sampled.iter().filter(|sampled| tiles.contains(&sampled.tile));
    of_tiles.for_each(|sampled| copy(&sampled.copy));
}

/// One tile of a run.
struct Tile<'a> {
    run: &'a TileRun,
    dtype: Dtype,
    index: u64,
    /// First element in the run, and number of elements.
    start: u64,
    count: usize,
}

impl<'a> Tile<'a> {
    fn of(dtype: Dtype, run: &'a TileRun, index: u32) -> Self {
        let start = u64::from(index) * run.tile_elems;
        let count = (run.elems - start).min(run.tile_elems) as usize;
        Self { run, dtype, index: index.into(), start, count }
    }

    /// # Safety
    /// The contract of [`combine`].
    unsafe fn make(&self) -> (NonFinite, Option<Squares>) {
        let run = self.run;
        let mut figures = (NonFinite::default(), None);
        // SAFETY: the addresses have the tile's elements, and nothing else accesses them, by this function's contract.
        unsafe {
            match (&run.operands[..], &run.code, run.values) {
                ([TileOperand::Values(src)], Some(code), _) if run.residual.is_none() => {
                    figures.0 = self.encode(code, self.values(*src), self.dtype);
                }
                ([TileOperand::Values(src)], None, Some(dst)) => {
                    let len = self.count * self.dtype.size_bytes();
                    std::ptr::copy(self.values(*src), self.values(dst).cast_mut(), len);
                }
                ([TileOperand::Code(code)], None, Some(dst)) => self.decode(code, self.values(dst), self.dtype),
                (_, code, values) => {
                    let mut sums = self.sum();
                    match (code, values) {
                        (Some(code), _) => figures = self.encode_sums(code, &mut sums),
                        (None, Some(dst)) => {
                            Floats::default().write(self.values(dst).cast_mut(), self.dtype, &sums);
                        }
                        (None, None) => {}
                    }
                }
            }
            if let (Some(code), Some(dst)) = (&run.code, run.values) {
                self.decode(code, self.values(dst), self.dtype);
            }
        }
        figures
    }

    /// Returns the address of the tile's first value.
    fn values(&self, base: *const u8) -> *const u8 {
        base.wrapping_add(self.start as usize * self.dtype.size_bytes())
    }

    /// Returns the codec's bytes of the tile.
    ///
    /// # Safety
    /// The contract of [`combine`]; nothing else accesses the bytes while the result is used.
    unsafe fn body<'b>(&self, code: &TileCode) -> &'b mut [u8] {
        let at = self.index as usize * code.stride as usize + TILE_HEADER_BYTES;
        let len = code.codec.encoded_bytes(self.dtype, self.count);
        // SAFETY: the tile has these bytes behind its header, and no other code accesses them by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(code.address.wrapping_add(at), len) }
    }

    /// # Safety
    /// The contract of [`combine`].
    unsafe fn sum(&self) -> Vec<f32> {
        let mut sums = vec![0.0; self.count];
        for (position, operand) in self.run.operands.iter().enumerate() {
            // SAFETY: the operands have the tile's elements by this function's contract, and `sums` is new memory.
            unsafe {
                match operand {
                    TileOperand::Values(src) if position == 0 => {
                        Floats::default().read(&mut sums, self.values(*src), self.dtype);
                    }
                    TileOperand::Values(src) => Floats::default().add(&mut sums, self.values(*src), self.dtype),
                    TileOperand::Code(code) if position == 0 => {
                        self.decode(code, sums.as_mut_ptr().cast(), Dtype::F32);
                    }
                    TileOperand::Code(code) => code.codec.decode_add(&mut sums, self.body(code), self.dtype),
                }
            }
        }
        Floats::default().finish(&mut sums, self.run.divisor, self.dtype);
        sums
    }

    /// Encodes the sums, with the residual if there is one.
    ///
    /// # Safety
    /// The contract of [`combine`].
    unsafe fn encode_sums(&self, code: &TileCode, sums: &mut [f32]) -> (NonFinite, Option<Squares>) {
        let gradient = Floats::default().squares(sums);
        // SAFETY: the byte can be read by this function's contract.
        let is_used = |of: &TileResidual| of.used.is_none_or(|used| unsafe { *used != 0 });
        let residual = self.run.residual.filter(is_used);
        let residual = residual.filter(|of| !of.skips_zeros || sums.iter().any(|sum| *sum != 0.0));
        let residual = residual.map(|of| of.address.wrapping_add(self.start as usize * size_of::<f32>()));
        // SAFETY: the residual has a float32 for each element by this function's contract; the other slices are memory of this
        // function.
        unsafe {
            if let Some(residual) = residual {
                Floats::default().add(sums, residual, Dtype::F32);
            }
            let non_finite = self.encode(code, sums.as_ptr().cast(), Dtype::F32);
            let squares = residual.map(|residual| {
                let mut decoded = vec![0.0_f32; self.count];
                self.decode(code, decoded.as_mut_ptr().cast(), Dtype::F32);
                Squares { gradient, lost: Floats::default().write_loss(residual, sums, &mut decoded) }
            });
            (non_finite, squares)
        }
    }

    /// # Safety
    /// The contract of [`combine`]; `src` has the tile's elements.
    unsafe fn encode(&self, code: &TileCode, src: *const u8, dtype: Dtype) -> NonFinite {
        let first = self.run.first + self.start;
        let slice = Slice { src, dtype, tensor: self.dtype, count: self.count, first };
        // SAFETY: by this function's contract, `src` has the elements, and the tile belongs to the caller.
        unsafe { code.codec.encode(self.body(code), slice, self.run.rng_key) }
    }

    /// # Safety
    /// The contract of [`combine`]; `dst` has room for the tile's elements.
    unsafe fn decode(&self, code: &TileCode, dst: *const u8, into: Dtype) {
        // SAFETY: by this function's contract, `dst` has room for the elements, and the tile belongs to the caller.
        unsafe { code.codec.decode(dst.cast_mut(), into, self.body(code), self.dtype, self.count) };
    }
}

//! The arithmetic of an encoded call: decodes, adds and encodes, one tile after the other.
//!
//! Owns the float32 sums of the tile at hand. Which tiles are due is decided by the executor; what a tile is, in `tile`. Read
//! [`Coder::combine`] first.

use std::sync::Arc;

use accl_kernels::codec::{Floats, RngKey, Slice};
use accl_schedule::{Finish, Role, Tile};
use accl_types::{Dtype, Moment, Rank, ReduceOp};

use super::buffers::Buffers;
use super::error_probe::{ErrorProbe, Sample};
use super::tile::TileHead;
use crate::call::{CallDesc, Codecs, Encoding, Probe, Residuals, TILE_HEADER_BYTES};
use crate::plan::{Coded, Combination, Operand, Region};

/// What one call encodes and decodes with.
pub(crate) struct Coder {
    codecs: Arc<Codecs>,
    dtype: Dtype,
    seed: u64,
    step: u64,
    /// In the job.
    rank: u64,
    /// This rank in the group, and its size, where contributions are added up.
    among: Option<(Rank, u32)>,
    /// What finished sums are divided by.
    divisor: Option<f32>,
    has_checksums: bool,
    floats: Floats,
    residuals: Option<Arc<Residuals>>,
    sums: Vec<f32>,
    /// What a tile decodes to, where that is compared with the sums.
    decoded: Vec<f32>,
    probe: Option<ErrorProbe>,
    /// Times what is probed.
    clock: fn() -> Moment,
}

impl Coder {
    pub(crate) fn new(
        encoding: &Encoding,
        desc: &CallDesc,
        (rank, rank_in_group): (u64, Rank),
        world: u32,
        has_checksums: bool,
        clock: fn() -> Moment,
    ) -> Self {
        Self {
            codecs: encoding.codecs.clone(),
            dtype: desc.dtype,
            seed: encoding.seed,
            step: encoding.step,
            rank,
            among: desc.collective.reduces().then_some((rank_in_group, world)),
            divisor: (desc.collective.reduces() && desc.op == ReduceOp::Avg).then_some(world as f32),
            has_checksums,
            floats: Floats::default(),
            residuals: encoding.residuals.clone(),
            sums: Vec::new(),
            decoded: Vec::new(),
            probe: None,
            clock,
        }
    }

    /// The same for a call that is measured, and has one more tensor if there is a sample.
    pub(crate) fn probed(self, probe: &Probe, sample: Option<Sample>, is_first: bool, buffers: &Buffers) -> Self {
        let probe = ErrorProbe::begin(probe, sample, is_first, self.codecs.given(), buffers);
        Self { probe: Some(probe), ..self }
    }

    /// Enters what was measured, when the call is done.
    pub(crate) fn end(&mut self, buffers: &Buffers) {
        if let Some(probe) = &mut self.probe {
            probe.end(buffers);
        }
    }

    fn head(&self, role: Role, tile: &Tile) -> TileHead {
        let settings = self.codecs.settings(role, tile.piece);
        TileHead { elems: tile.elems as u32, settings, has_checksum: self.has_checksums }
    }

    /// Looks at tiles that have come.
    ///
    /// # Errors
    /// What is wrong with the first bad one.
    pub(crate) fn check(&self, buffers: &Buffers, coded: &Coded, tiles: std::ops::Range<u64>) -> Result<(), String> {
        for index in tiles {
            let tile = &coded.tiles[index as usize];
            let bytes = bytes(buffers, coded, index as usize);
            self.head(coded.role, tile).check(bytes).map_err(|why| {
                format!("tile {index} (elements {} to {}): {why}", tile.first, tile.first + tile.elems - 1)
            })?;
        }
        Ok(())
    }

    /// Makes one tile of what a combination makes.
    pub(crate) fn combine(&mut self, buffers: &Buffers, op: &Combination, index: usize) {
        let begin = self.probe.is_some().then(self.clock);
        self.make(buffers, op, index);
        let row = self.probe.as_mut().and_then(|probe| probe.row(op.tiles[index].piece));
        if let (Some(begin), Some(row)) = (begin, row) {
            row.nanos += (self.clock)().since(begin).as_nanos() as u64;
        }
    }

    fn make(&mut self, buffers: &Buffers, op: &Combination, index: usize) {
        let tile = &op.tiles[index];
        let at = op.starts[index] * self.dtype.size_bytes() as u64;
        let address = |region: &Region| buffers.address(&region.at(at));
        match (&op.srcs[..], &op.code, &op.out) {
            // From memory to bytes, and the reverse, without a detour.
            ([Operand::Values(src)], Some(code), out) => {
                match self.residual(op, code, index) {
                    Some(residual) => {
                        self.sum(buffers, op, index, at);
                        self.encode_with(buffers, op, (code, index), residual);
                    }
                    None => self.encode(buffers, code, index, address(src), self.dtype, op.pass),
                }
                if let Some(out) = out {
                    self.decode(buffers, code, index, address(out), self.dtype);
                }
            }
            ([Operand::Code(code)], None, Some(out)) => self.decode(buffers, code, index, address(out), self.dtype),
            ([Operand::Values(src)], None, Some(out)) => {
                let (from, to, len) = (address(src), address(out), tile.elems as usize * self.dtype.size_bytes());
                // SAFETY: both hold the tile's elements and stay valid until the call ends; they may be the same memory.
                unsafe { std::ptr::copy(from, to, len) };
            }
            _ => {
                self.sum(buffers, op, index, at);
                let sums = self.sums.as_ptr().cast_mut().cast();
                if let Some(code) = &op.code {
                    match self.residual(op, code, index) {
                        Some(residual) => self.encode_with(buffers, op, (code, index), residual),
                        None => self.encode(buffers, code, index, sums, Dtype::F32, op.pass),
                    }
                    if let Some(out) = &op.out {
                        self.decode(buffers, code, index, address(out), self.dtype);
                    }
                } else if let Some(out) = &op.out {
                    let sums = &self.sums[..tile.elems as usize];
                    // SAFETY: the caller's memory has the tile's elements, writable until the call ends.
                    unsafe { self.floats.write(address(out), self.dtype, sums) };
                }
            }
        }
    }

    /// Adds up a tile's operands.
    fn sum(&mut self, buffers: &Buffers, op: &Combination, index: usize, at: u64) {
        let count = op.tiles[index].elems as usize;
        if self.sums.len() < count {
            self.sums.resize(count, 0.0);
        }
        for (position, operand) in op.srcs.iter().enumerate() {
            match operand {
                Operand::Values(src) => {
                    let (src, sums) = (buffers.address(&src.at(at)), &mut self.sums[..count]);
                    // SAFETY: the caller's memory has the tile's elements, unchanged until the call ends.
                    unsafe {
                        if position == 0 {
                            self.floats.read(sums, src, self.dtype);
                        } else {
                            self.floats.add(sums, src, self.dtype);
                        }
                    }
                }
                Operand::Code(code) if position == 0 => {
                    let sums = self.sums.as_mut_ptr().cast();
                    self.decode(buffers, code, index, sums, Dtype::F32);
                }
                Operand::Code(code) => {
                    let tile = &code.tiles[index];
                    let codec = self.codecs.codec(code.role, tile.piece);
                    let body = &bytes(buffers, code, index)[TILE_HEADER_BYTES..];
                    codec.decode_add(&mut self.sums[..count], body, self.dtype);
                }
            }
        }
        let divisor = self.divisor.filter(|_| op.finish == Finish::Yes);
        self.floats.finish(&mut self.sums[..count], divisor, self.dtype);
    }

    /// Where the residual of a tile is kept: of a contribution, or of a finished sum.
    fn residual(&self, op: &Combination, code: &Coded, index: usize) -> Option<*mut u8> {
        let residuals = self.residuals.as_ref()?;
        let tile = &code.tiles[index];
        // The sample has none.
        if tile.piece as usize >= self.codecs.given() {
            return None;
        }
        let base = match (op.pass, op.finish) {
            (0, _) => residuals.contributions.get(tile.block as usize * self.codecs.given() + tile.piece as usize),
            (_, Finish::Yes) => residuals.sums.get(tile.piece as usize),
            (_, Finish::No) => None,
        };
        let offset = tile.first as usize * size_of::<f32>();
        base.filter(|&&base| base != 0).map(|&base| (base as *mut u8).wrapping_add(offset))
    }

    /// Encodes the sums with what was lost before, and keeps what is lost now.
    fn encode_with(&mut self, buffers: &Buffers, op: &Combination, (code, index): (&Coded, usize), residual: *mut u8) {
        let count = code.tiles[index].elems as usize;
        // A sum of zeros may be of a tensor that no rank has used: who asked for it throws it away. The residual waits.
        if op.pass > 0 && self.sums[..count].iter().all(|sum| *sum == 0.0) {
            let sums = self.sums.as_ptr().cast_mut().cast();
            self.encode(buffers, code, index, sums, Dtype::F32, op.pass);
            return;
        }
        let is_probed = op.pass == 0 && self.probe.is_some();
        let gradient = if is_probed { self.floats.squares(&self.sums[..count]) } else { 0.0 };
        // SAFETY: there is a float32 for each element of the tensor, by the contract of `Residuals`.
        unsafe { self.floats.add(&mut self.sums[..count], residual, Dtype::F32) };
        let sums = self.sums.as_ptr().cast_mut().cast();
        self.encode(buffers, code, index, sums, Dtype::F32, op.pass);
        if self.decoded.len() < count {
            self.decoded.resize(count, 0.0);
        }
        let decoded = self.decoded.as_mut_ptr().cast();
        self.decode(buffers, code, index, decoded, Dtype::F32);
        // SAFETY: as above.
        let lost = unsafe { self.floats.write_loss(residual, &self.sums[..count], &mut self.decoded[..count]) };
        if let Some(probe) = self.probe.as_mut().filter(|_| is_probed) {
            probe.residual(code.tiles[index].piece, lost, gradient);
        }
    }

    /// Encodes a tile of elements that lie at `src`, as the tensor's type or as float32.
    fn encode(&mut self, buffers: &Buffers, code: &Coded, index: usize, src: *mut u8, dtype: Dtype, pass: u32) {
        let tile = &code.tiles[index];
        let (start, len) = code.range(index);
        let codec = self.codecs.codec(code.role, tile.piece);
        let id = self.codecs.tensor(tile.piece).id;
        let words = [self.seed, self.step, id, u64::from(tile.block), u64::from(pass), self.rank];
        let mut rng_key = RngKey::keyed(&words);
        // Contributions meet those of all other ranks in one sum. How often sums were encoded before differs between ranks.
        if let (0, Some((rank, world))) = (pass, self.among) {
            rng_key = rng_key.among(&words[..4], rank, world);
        }
        let slice = Slice { src, dtype, tensor: self.dtype, count: tile.elems as usize, first: tile.first };
        let dst = buffers.address(&code.region.at(start));
        // SAFETY: the bytes of a version are written once, by the operation that makes it, and read by those that wait for it;
        // the elements stay readable until the call ends.
        let dst = unsafe { std::slice::from_raw_parts_mut(dst, len) };
        // SAFETY: as above.
        let non_finite = unsafe { codec.encode(&mut dst[TILE_HEADER_BYTES..], slice, rng_key) };
        self.head(code.role, tile).seal(dst);
        if let Some(row) = self.probe.as_mut().and_then(|probe| probe.row(tile.piece)) {
            row.non_finite += non_finite;
        }
    }

    /// Decodes a tile to `dst`, as the tensor's type or as float32.
    fn decode(&self, buffers: &Buffers, code: &Coded, index: usize, dst: *mut u8, into: Dtype) {
        let tile = &code.tiles[index];
        let body = &bytes(buffers, code, index)[TILE_HEADER_BYTES..];
        let codec = self.codecs.codec(code.role, tile.piece);
        // SAFETY: there is room for the tile's elements in the caller's memory, writable until the call ends, or in the sums.
        unsafe { codec.decode(dst, into, body, self.dtype, tile.elems as usize) };
    }
}

/// A tile that is there.
fn bytes<'a>(buffers: &'a Buffers, code: &Coded, index: usize) -> &'a [u8] {
    let (start, len) = code.range(index);
    // SAFETY: the code buffer lives as long as the call's other memory; a version's bytes are complete before anybody reads
    // them, and never written again.
    unsafe { std::slice::from_raw_parts(buffers.address(&code.region.at(start)), len) }
}

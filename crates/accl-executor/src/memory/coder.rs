//! The arithmetic of an encoded call: decodes, adds and encodes, tile by tile.
//!
//! This module owns the float32 sums of the current tile. The executor decides which tiles are due, and `tile` defines
//! their format. Read [`Coder::combine`] first.

use std::ops::Range;
use std::sync::Arc;

use accl_kernels::codec::{Floats, RngKey, Slice, Sums};
use accl_schedule::{Finish, Role, Tile};
use accl_types::{Dtype, Moment, Rank, ReduceOp};

use super::buffers::Buffers;
use super::error_probe::{ErrorProbe, Sample};
use super::tile::TileHead;
use crate::call::{
    CallDesc, Codecs, CodedSample, Encoding, ExternalCombination, Probe, Residuals, Squares, TILE_HEADER_BYTES,
};
use crate::plan::{Coded, Combination, Operand, Region};

/// Settings and work memory with which one call encodes and decodes.
pub(crate) struct Coder {
    codecs: Arc<Codecs>,
    dtype: Dtype,
    seed: u64,
    step: u64,
    /// This process's rank in the job.
    rank: u64,
    /// This rank in the group and the size of the group, if the collective adds contributions.
    among: Option<(Rank, u32)>,
    /// Divisor of finished sums (the world size, for `AVG`).
    divisor: Option<f32>,
    has_checksums: bool,
    floats: Floats,
    residuals: Option<Arc<Residuals>>,
    sums: Vec<f32>,
    /// Decoded values of a tile, for comparison with the sums.
    decoded: Vec<f32>,
    probe: Option<ErrorProbe>,
    /// Clock that times encoding and decoding if the call is probed.
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

    /// Returns this coder for a call that is measured. The call has one more tensor if there is a sample.
    pub(crate) fn probed(self, probe: &Probe, sample: Option<Sample>, is_first: bool, buffers: &Buffers) -> Self {
        let probe = ErrorProbe::begin(probe, sample, is_first, self.codecs.given(), buffers);
        Self { probe: Some(probe), ..self }
    }

    /// Returns whether the call has a sample.
    pub(crate) fn has_sample(&self) -> bool {
        self.probe.as_ref().is_some_and(ErrorProbe::has_sample)
    }

    /// Fills the sample of a measured call: see [`ErrorProbe::fill_sample`].
    pub(crate) fn fill_sample(&self, buffers: &Buffers) {
        if let Some(probe) = &self.probe {
            probe.fill_sample(buffers);
        }
    }

    /// Reports the measurements when the results are final: see [`ErrorProbe::end`].
    pub(crate) fn end(&mut self, buffers: &Buffers) {
        if let Some(probe) = &mut self.probe {
            probe.end(buffers);
        }
    }

    /// Returns whether the call is measured.
    pub(super) fn is_probed(&self) -> bool {
        self.probe.is_some()
    }

    /// Adds what a worker has measured in a combination.
    pub(super) fn add_measurements(&mut self, combination: &ExternalCombination) {
        if let Some(probe) = &mut self.probe {
            probe.add_measurements(combination);
        }
    }

    /// Returns what a worker copies for the sample.
    pub(super) fn sample_copies(&self) -> Option<&Arc<CodedSample>> {
        self.probe.as_ref()?.copies()
    }

    pub(super) fn codecs(&self) -> &Arc<Codecs> {
        &self.codecs
    }

    pub(super) fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn head(&self, role: Role, tile: &Tile) -> TileHead {
        let settings = self.codecs.settings(role, tile.piece);
        TileHead { elems: tile.elems as u32, settings, has_checksum: self.has_checksums }
    }

    /// Checks tiles that have arrived.
    ///
    /// # Errors
    /// Description of the first bad tile.
    pub(crate) fn check(&self, memory: &TileMemory<'_>, coded: &Coded, tiles: Range<u64>) -> Result<(), String> {
        for index in tiles {
            let tile = &coded.tiles[index as usize];
            let bytes = memory.bytes(coded, index as usize);
            self.head(coded.role, tile).check(bytes).map_err(|why| {
                format!("tile {index} (elements {} to {}): {why}", tile.first, tile.first + tile.elems - 1)
            })?;
        }
        Ok(())
    }

    /// Computes one tile of the results of a combination.
    pub(crate) fn combine(&mut self, memory: &mut TileMemory<'_>, op: &Combination, index: usize) {
        let begin = self.probe.is_some().then(self.clock);
        self.make(memory, op, index);
        let row = self.probe.as_mut().and_then(|probe| probe.row(op.tiles[index].piece));
        if let (Some(begin), Some(row)) = (begin, row) {
            row.nanos += (self.clock)().since(begin).as_nanos() as u64;
        }
    }

    fn make(&mut self, memory: &mut TileMemory<'_>, op: &Combination, index: usize) {
        let tile = &op.tiles[index];
        let at = op.starts[index] * self.dtype.size_bytes() as u64;
        let buffers = memory.buffers;
        let address = |region: &Region| buffers.address(&region.at(at));
        match (&op.srcs[..], &op.code, &op.out) {
            // Encoding and decoding work directly on the tensor, without the float32 sums, where possible.
            ([Operand::Values(src)], Some(code), out) => {
                match self.residual(op, code, index) {
                    Some(residual) => {
                        self.sum(memory, op, index, at);
                        self.encode_with(memory, op, (code, index), residual);
                    }
                    None => self.encode(memory, code, index, address(src), self.dtype, op.pass),
                }
                if let Some(out) = out {
                    self.decode(memory, code, index, address(out), self.dtype);
                }
            }
            ([Operand::Code(code)], None, Some(out)) => self.decode(memory, code, index, address(out), self.dtype),
            ([Operand::Values(src)], None, Some(out)) => {
                let (from, to, len) = (address(src), address(out), tile.elems as usize * self.dtype.size_bytes());
                // SAFETY: source and destination hold the tile's elements and stay valid until the call completes.
                // `copy` allows overlap.
                unsafe { std::ptr::copy(from, to, len) };
            }
            (_, Some(code), out) if self.encode_sums(memory, op, (code, index), at, out.as_ref()) => {}
            _ => {
                self.sum(memory, op, index, at);
                let sums = self.sums.as_ptr().cast_mut().cast();
                if let Some(code) = &op.code {
                    match self.residual(op, code, index) {
                        Some(residual) => self.encode_with(memory, op, (code, index), residual),
                        None => self.encode(memory, code, index, sums, Dtype::F32, op.pass),
                    }
                    if let Some(out) = &op.out {
                        self.decode(memory, code, index, address(out), self.dtype);
                    }
                } else if let Some(out) = &op.out {
                    let sums = &self.sums[..tile.elems as usize];
                    // SAFETY: `out` has room for the tile's elements in the caller's memory, which is writable until
                    // the call completes.
                    unsafe { self.floats.write(address(out), self.dtype, sums) };
                }
            }
        }
    }

    /// Adds a tile's operands, and finishes the sums.
    fn sum(&mut self, memory: &TileMemory<'_>, op: &Combination, index: usize, at: u64) {
        self.add_up(memory, op, index, at, op.srcs.len());
        let count = op.tiles[index].elems as usize;
        let divisor = self.finishing(op);
        self.floats.finish(&mut self.sums[..count], divisor, self.dtype);
    }

    /// Adds the first `operands` operands of a tile.
    fn add_up(&mut self, memory: &TileMemory<'_>, op: &Combination, index: usize, at: u64, operands: usize) {
        let count = op.tiles[index].elems as usize;
        if self.sums.len() < count {
            self.sums.resize(count, 0.0);
        }
        for (position, operand) in op.srcs.iter().take(operands).enumerate() {
            match operand {
                Operand::Values(src) => {
                    let (src, sums) = (memory.buffers.address(&src.at(at)), &mut self.sums[..count]);
                    // SAFETY: `src` holds the tile's elements in the caller's memory, which does not change until the
                    // call completes.
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
                    self.decode(memory, code, index, sums, Dtype::F32);
                }
                Operand::Code(code) => {
                    let tile = &code.tiles[index];
                    let codec = self.codecs.codec(code.role, tile.piece);
                    let body = &memory.bytes(code, index)[TILE_HEADER_BYTES..];
                    codec.decode_add(&mut self.sums[..count], body, self.dtype);
                }
            }
        }
    }

    /// Adds a tile's float32 operands while it encodes them, if the codec supports that. Returns `false` if not; then
    /// nothing has changed.
    fn encode_sums(
        &mut self,
        memory: &mut TileMemory<'_>,
        op: &Combination,
        (code, index): (&Coded, usize),
        at: u64,
        out: Option<&Region>,
    ) -> bool {
        let tile = &code.tiles[index];
        let codecs = self.codecs.clone();
        let codec = codecs.codec(code.role, tile.piece);
        let Some(encoder) = codec.encode_sums() else { return false };
        if self.dtype != Dtype::F32 || self.residual(op, code, index).is_some() {
            return false;
        }
        let (addends, last) = match &op.srcs[..] {
            // The order of the two operands does not matter: encoding discards which NaN a sum is.
            [Operand::Values(first), Operand::Code(last)] | [Operand::Code(last), Operand::Values(first)] => {
                (Some(memory.buffers.address(&first.at(at)).cast_const().cast()), last)
            }
            [_, _, .., Operand::Code(last)] => (None, last),
            _ => return false,
        };
        if codecs.codec(last.role, tile.piece).summary() != codec.summary() {
            return false;
        }
        let addends = addends.unwrap_or_else(|| {
            self.add_up(memory, op, index, at, op.srcs.len() - 1);
            self.sums.as_ptr()
        });
        let results = out.map(|out| memory.buffers.address(&out.at(at)).cast());
        let sums = Sums { addends, divisor: self.finishing(op), results, count: tile.elems as usize };
        let (src, dst) = memory.both(last, code, index);
        // SAFETY: the caller's memory holds the tile's elements, which do not change until the call completes, and has
        // room for its results. If these are the same memory, the encoder overwrites operands with their sums.
        unsafe { encoder.encode_sums(&mut dst[TILE_HEADER_BYTES..], &src[TILE_HEADER_BYTES..], sums) };
        self.head(code.role, tile).seal(dst);
        true
    }

    /// Returns the divisor of a combination's sums, if it finishes them.
    pub(super) fn finishing(&self, op: &Combination) -> Option<f32> {
        self.divisor.filter(|_| op.finish == Finish::Yes)
    }

    /// Returns the address of the byte that says whether the residual of a tile is used; `None` if it is.
    pub(super) fn residual_flag(&self, op: &Combination, code: &Coded, index: usize) -> Option<*const u8> {
        let tile = &code.tiles[index];
        let contribution = tile.block as usize * self.codecs.given() + tile.piece as usize;
        let used = &self.residuals.as_ref().filter(|_| op.pass == 0)?.used;
        used.get(contribution).map(|&address| std::ptr::with_exposed_provenance(address))
    }

    /// Returns the address of a tile's residual: of a contribution, or of a finished sum.
    pub(super) fn residual(&self, op: &Combination, code: &Coded, index: usize) -> Option<*mut u8> {
        let residuals = self.residuals.as_ref()?;
        let tile = &code.tiles[index];
        // The sample tensor has no residual.
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

    /// Encodes the sums with the residual added, and stores what this encoding loses as the new residual.
    fn encode_with(
        &mut self,
        memory: &mut TileMemory<'_>,
        op: &Combination,
        (code, index): (&Coded, usize),
        residual: *mut u8,
    ) {
        let count = code.tiles[index].elems as usize;
        // A sum of zeros may belong to a tensor that no rank has used; the caller then discards it. The residual is
        // kept for later.
        if op.pass > 0 && self.sums[..count].iter().all(|sum| *sum == 0.0) {
            let sums = self.sums.as_ptr().cast_mut().cast();
            self.encode(memory, code, index, sums, Dtype::F32, op.pass);
            return;
        }
        let is_probed = op.pass == 0 && self.probe.is_some();
        let gradient = if is_probed { self.floats.squares(&self.sums[..count]) } else { 0.0 };
        // SAFETY: `residual` has a float32 for each element of the tensor, by the contract of `Residuals`.
        unsafe { self.floats.add(&mut self.sums[..count], residual, Dtype::F32) };
        let sums = self.sums.as_ptr().cast_mut().cast();
        self.encode(memory, code, index, sums, Dtype::F32, op.pass);
        if self.decoded.len() < count {
            self.decoded.resize(count, 0.0);
        }
        let decoded = self.decoded.as_mut_ptr().cast();
        self.decode(memory, code, index, decoded, Dtype::F32);
        // SAFETY: `residual` has a float32 for each element of the tensor, by the contract of `Residuals`.
        let lost = unsafe { self.floats.write_loss(residual, &self.sums[..count], &mut self.decoded[..count]) };
        if let Some(probe) = self.probe.as_mut().filter(|_| is_probed) {
            probe.add_squares(code.tiles[index].piece, Squares { gradient, lost });
        }
    }

    /// Returns the key of the random numbers with which a tile is encoded.
    pub(super) fn rng_key(&self, tile: &Tile, pass: u32) -> RngKey {
        let id = self.codecs.tensor(tile.piece).id;
        let words = [self.seed, self.step, id, u64::from(tile.block), u64::from(pass), self.rank];
        let rng_key = RngKey::keyed(&words);
        // All ranks' contributions are added in one sum, so correlated rounding can relate their random numbers. It cannot
        // do so for sums, because the number of earlier encodings of a sum differs between ranks.
        match (pass, self.among) {
            (0, Some((rank, world))) => rng_key.among(&words[..4], rank, world),
            _ => rng_key,
        }
    }

    /// Writes the headers of tiles that a worker has encoded in the call's memory.
    pub(super) fn seal(&self, memory: &mut TileMemory<'_>, code: &Coded, tiles: Range<u64>) {
        for index in tiles {
            let head = self.head(code.role, &code.tiles[index as usize]);
            head.seal(memory.bytes_mut(code, index as usize));
        }
    }

    /// Encodes a tile of elements at `src`. `dtype` is the tensor's dtype or float32.
    fn encode(
        &mut self,
        memory: &mut TileMemory<'_>,
        code: &Coded,
        index: usize,
        src: *mut u8,
        dtype: Dtype,
        pass: u32,
    ) {
        let tile = &code.tiles[index];
        let codec = self.codecs.codec(code.role, tile.piece);
        let rng_key = self.rng_key(tile, pass);
        let slice = Slice { src, dtype, tensor: self.dtype, count: tile.elems as usize, first: tile.first };
        let dst = memory.bytes_mut(code, index);
        // SAFETY: `src` holds the tile's elements, which stay readable until the call completes.
        let non_finite = unsafe { codec.encode(&mut dst[TILE_HEADER_BYTES..], slice, rng_key) };
        self.head(code.role, tile).seal(dst);
        if let Some(row) = self.probe.as_mut().and_then(|probe| probe.row(tile.piece)) {
            row.non_finite += non_finite;
        }
    }

    /// Decodes a tile to `dst`. `into` is the tensor's dtype or float32.
    fn decode(&self, memory: &TileMemory<'_>, code: &Coded, index: usize, dst: *mut u8, into: Dtype) {
        let tile = &code.tiles[index];
        let body = &memory.bytes(code, index)[TILE_HEADER_BYTES..];
        let codec = self.codecs.codec(code.role, tile.piece);
        // SAFETY: `dst` has room for the tile's elements: in the caller's memory, writable until the call completes, or
        // in `sums` or `decoded`.
        unsafe { codec.decode(dst, into, body, self.dtype, tile.elems as usize) };
    }
}

/// The memory in which the tiles of a call lie.
pub(crate) struct TileMemory<'a> {
    pub(crate) buffers: &'a Buffers,
    pub(crate) frames: InFrames<'a>,
}

/// Tiles that lie in frames. Each entry has the address that its first tile would have in the call's memory.
pub(crate) struct InFrames<'a> {
    /// Tiles that have just arrived.
    pub(crate) come: Option<(*mut u8, &'a [u8])>,
    /// Room for tiles that are sent as soon as they are computed.
    pub(crate) go: Option<(*mut u8, &'a mut [u8])>,
}

impl TileMemory<'_> {
    /// Returns the bytes of a tile that is complete.
    pub(super) fn bytes(&self, code: &Coded, index: usize) -> &[u8] {
        let (start, len) = code.range(index);
        let home = self.buffers.address(&code.region.at(start));
        let go = self.frames.go.as_ref().and_then(|(first, bytes)| bytes.get(within(*first, home, len)));
        let come = self.frames.come.as_ref().and_then(|(first, bytes)| bytes.get(within(*first, home, len)));
        go.or(come).unwrap_or_else(|| {
            // SAFETY: the code buffer lives as long as the call's other memory. The bytes of a version are complete
            // before an operation reads them, and are never written again.
            unsafe { std::slice::from_raw_parts(home, len) }
        })
    }

    /// Returns the bytes of a complete tile of one chunk, and room for a tile of another chunk.
    fn both(&mut self, from: &Coded, to: &Coded, index: usize) -> (&[u8], &mut [u8]) {
        let src = std::ptr::from_ref(self.bytes(from, index));
        let dst = self.bytes_mut(to, index);
        // SAFETY: `src` was borrowed from `self`, which stays valid. No two versions have a byte in common, so `dst`
        // does not overlap it.
        (unsafe { &*src }, dst)
    }

    /// Returns room for a tile.
    pub(super) fn bytes_mut(&mut self, code: &Coded, index: usize) -> &mut [u8] {
        let (start, len) = code.range(index);
        let home = self.buffers.address(&code.region.at(start));
        let go = self.frames.go.as_mut().and_then(|(first, bytes)| bytes.get_mut(within(*first, home, len)));
        go.unwrap_or_else(|| {
            // SAFETY: the operation that creates a version writes its bytes once. The operations that read them depend
            // on it.
            unsafe { std::slice::from_raw_parts_mut(home, len) }
        })
    }
}

/// Returns the range of a tile in a frame. The range is out of bounds if the tile has an earlier address.
fn within(first: *mut u8, home: *mut u8, len: usize) -> Range<usize> {
    match home.addr().checked_sub(first.addr()) {
        Some(start) => start..start + len,
        None => usize::MAX..usize::MAX,
    }
}

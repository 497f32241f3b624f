//! Measures the error that the encodings of one call cause.
//!
//! This module chooses the elements of a sum that are also sent raw, and compares both results. The caller that
//! requested the measurement decides what to do with the figures. Read [`ErrorProbe`] first.
//!
//! # How the error is found
//! A sampled call has one more tensor, the sample, which is sent raw. It holds short runs of elements of the other
//! tensors, the same elements on all ranks. Its result is the exact sum of these elements. The results of the encoded
//! tensors at the same positions are compared with it, and contain the error of all encodings of the algorithm. The
//! sample adds no message, and only a small share of bytes.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use accl_kernels::codec::{Floats, RngKey};
use accl_schedule::{Buf, Extent};
use accl_types::{Collective, Dtype, Elems, Error, Result};

use super::buffers::Buffers;
use super::storage::Storage;
use crate::call::{
    Blocks, CallDesc, Codecs, CodedSample, Encoded, Encoding, ExternalCombination, Figures, Gather, Keeps, Measured,
    Measurement, Probe, SampleCopies, SampleCopy, Squares, Statistics, TensorDesc,
};

/// Maximum elements of a run.
pub(super) const RUN: u64 = 256;

/// Alignment of a block's memory: a cache line.
const ALIGN: usize = 64;

/// Length and start of a run are multiples of this number of elements.
const GRAIN: u64 = 8;

/// Elements that are also sent raw: `len` elements from `first` on, of the tensor at `position` in a block.
#[derive(Clone, Copy, Debug)]
struct Pick {
    position: usize,
    first: u64,
    len: u64,
}

/// The additional tensor of a call that is measured.
pub struct Sample {
    picks: Vec<Pick>,
    /// Elements between the starts of two runs in the additional tensor.
    run: u64,
    dtype: Dtype,
    /// Indices of the pieces of each block that this rank contributes, and of each block that it receives. The last
    /// piece of a block is the additional one.
    contributions: Vec<Range<usize>>,
    results: Vec<Range<usize>>,
    /// If a worker computes the combinations: where it copies the sampled results of each block.
    found: Vec<*mut u8>,
}

// SAFETY: the addresses belong to memory of the call, and are used only when nothing else accesses it.
unsafe impl Send for Sample {}

// SAFETY: as for `Send`.
unsafe impl Sync for Sample {}

/// Memory of the additional tensor, for all blocks. With a worker, its staging lends the memory.
struct Rooms {
    _memory: Storage,
    next: *mut u8,
    /// Bytes of a block.
    len_bytes: usize,
    /// Number of blocks that have no memory yet.
    left: usize,
}

// SAFETY: the address belongs to the memory, and only the owner of `Rooms` passes it on.
unsafe impl Send for Rooms {}

// SAFETY: a shared reference gives access to nothing.
unsafe impl Sync for Rooms {}

impl Rooms {
    /// Returns memory of zeros for `blocks` blocks. Not all bytes of a block are written before it is sent.
    fn new(desc: &CallDesc, len_bytes: usize, blocks: usize) -> Result<Self> {
        let len_bytes = len_bytes.next_multiple_of(ALIGN);
        let total = len_bytes * blocks;
        let mut memory = match desc.staging.as_ref().filter(|_| desc.tensor_coder.is_some()) {
            None => Storage::new(total)?,
            Some(staging) => {
                let none = || Error::exhausted(format!("no memory is lent for a sample of {total} bytes"));
                let lent = staging.lend(total)?.ok_or_else(none)?;
                // SAFETY: the memory has these bytes, and nothing else uses them yet.
                unsafe { lent.address().write_bytes(0, total) };
                Storage::lent(lent)
            }
        };
        let next = memory.ptr();
        Ok(Self { _memory: memory, next, len_bytes, left: blocks })
    }

    /// Returns the address of the memory of one more block.
    fn next(&mut self) -> Result<*mut u8> {
        self.left =
            self.left.checked_sub(1).ok_or_else(|| Error::internal("a sample has more blocks than were counted"))?;
        let next = self.next.wrapping_add(self.len_bytes);
        Ok(std::mem::replace(&mut self.next, next))
    }
}

impl fmt::Debug for Rooms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rooms").finish_non_exhaustive()
    }
}

impl Keeps for Rooms {}

impl Sample {
    /// Returns the codecs that a call has together with its sample.
    ///
    /// # Errors
    /// The errors of [`Codecs::new`].
    pub(super) fn codecs_of(desc: &CallDesc, encoding: &Encoding) -> Result<Arc<Codecs>> {
        if sampled(desc, encoding).is_some() { encoding.codecs.with_raw_tensor() } else { Ok(encoding.codecs.clone()) }
    }

    /// Adds the additional tensor to a call. If a worker computes the combinations, the call also says which elements it copies.
    /// Returns `None` if the call gets none; all ranks decide this equally.
    ///
    /// # Errors
    /// `Exhausted` if there is no memory.
    pub fn with_call(desc: &CallDesc, encoding: &Encoding) -> Result<Option<(CallDesc, Self)>> {
        let Some((run, picks)) = picks(desc, encoding) else { return Ok(None) };
        let (elems, dtype) = (picks.len() * run as usize, desc.dtype);
        // With a worker, sampled results have memory, too.
        let found = if desc.tensor_coder.is_some() { desc.outputs.len() } else { 0 };
        let blocks = desc.inputs.len() + desc.outputs.len() + found;
        let mut rooms = Rooms::new(desc, elems * dtype.size_bytes(), blocks)?;
        let mut room = || Ok(TensorDesc::dense(rooms.next()?, dtype, Elems(elems as u64)));
        let outputs: Vec<TensorDesc> = desc.outputs.iter().map(|_| room()).collect::<Result<_>>()?;
        // This rank's block may be reduced in place; the additional tensor then is reduced in place as well.
        let is_in_place = |block: &[TensorDesc]| {
            let mut pairs = block.iter().zip(desc.outputs.pieces());
            pairs.any(|(input, output)| input.count_elems() > 0 && input.ptr == output.ptr)
        };
        let input = |block: &[TensorDesc]| match outputs.first() {
            Some(output) if is_in_place(block) => Ok(output.clone()),
            Some(_) | None => room(),
        };
        let inputs: Vec<TensorDesc> = desc.inputs.iter().map(input).collect::<Result<_>>()?;
        let with = |blocks: &Blocks, more: Vec<TensorDesc>| -> Blocks {
            blocks
                .iter()
                .zip(more)
                .map(|(block, more)| block.iter().cloned().chain([more]).collect::<Vec<_>>())
                .collect()
        };
        let (inputs, outputs) = (with(&desc.inputs, inputs), with(&desc.outputs, outputs));
        let results = pieces_of(&outputs);
        let contributions = if inputs.is_empty() { results.clone() } else { pieces_of(&inputs) };
        let mut encoding = Encoding { codecs: encoding.codecs.with_raw_tensor()?, ..encoding.clone() };
        let mut sample = Self { picks, run, dtype, contributions, results, found: Vec::new() };
        if let Some(probe) = &mut encoding.probe {
            if desc.tensor_coder.is_some() {
                sample.found = outputs.iter().map(|_| rooms.next()).collect::<Result<_>>()?;
                probe.copies = Some(Arc::new(sample.coded(&inputs, &outputs)));
            }
            probe.rooms = Some(Arc::new(rooms));
        }
        let desc = CallDesc { inputs, outputs, encoding: Encoded::As(encoding), ..desc.clone() };
        Ok(Some((desc, sample)))
    }

    /// Returns the copies that a worker makes in place of [`Sample::take`], and of the results that are compared.
    fn coded(&self, inputs: &Blocks, outputs: &Blocks) -> CodedSample {
        let size = self.dtype.size_bytes() as u64;
        let at = |base: *mut u8, elems: u64| base.wrapping_add((elems * size) as usize);
        let copies = |blocks: &[Range<usize>], tensors: &[TensorDesc], room: &dyn Fn(usize, usize) -> *mut u8| {
            let copy = |(number, block): (usize, &Range<usize>)| -> Vec<SampleCopy> {
                let copy = |(index, pick): (u64, &Pick)| {
                    let from = at(tensors[block.start + pick.position].ptr, pick.first);
                    SampleCopy { from, to: at(room(number, block.end - 1), index * self.run), elems: pick.len }
                };
                (0..).zip(&self.picks).map(copy).collect()
            };
            blocks.iter().enumerate().flat_map(copy).collect::<Vec<_>>()
        };
        let given = if inputs.is_empty() { outputs.pieces() } else { inputs.pieces() };
        let contributions = copies(&self.contributions, given, &|_, piece| given[piece].ptr);
        let mut results = copies(&self.results, outputs.pieces(), &|number, _| self.found[number]);
        results.sort_unstable_by_key(|copy| copy.from);
        CodedSample { contributions: Arc::new(SampleCopies::new(contributions)), results }
    }

    /// Copies the sampled elements of this rank's contribution.
    fn take(&self, buffers: &Buffers) {
        let size = self.dtype.size_bytes() as u64;
        for block in &self.contributions {
            for (index, pick) in (0..).zip(&self.picks) {
                let from = address(buffers, Buf::In, block.start + pick.position, pick.first * size);
                let to = address(buffers, Buf::In, block.end - 1, index * self.run * size);
                // SAFETY: the run lies in a tensor of the caller, readable until the call completes. The additional
                // tensor has room for it.
                unsafe { std::ptr::copy_nonoverlapping(from, to, (pick.len * size) as usize) };
            }
        }
    }

    /// Compares the results of the encoded tensors with the result of the raw tensor.
    fn compare(&self, buffers: &Buffers, rows: &mut [Measured]) {
        let floats = Floats::default();
        let size = self.dtype.size_bytes() as u64;
        let read = |src: *mut u8, len: u64| {
            let mut values = [0.0; RUN as usize];
            // SAFETY: the run lies in an output, or in memory of the sample. Both stay valid until the call completes.
            unsafe { floats.read(&mut values[..len as usize], src, self.dtype) };
            values.into_iter().take(len as usize)
        };
        for (number, block) in self.results.iter().enumerate() {
            for (index, pick) in (0..).zip(&self.picks) {
                let row = &mut rows[pick.position];
                let found = match self.found.get(number) {
                    Some(copies) => copies.wrapping_add((index * self.run * size) as usize),
                    None => address(buffers, Buf::Out, block.start + pick.position, pick.first * size),
                };
                let exact = address(buffers, Buf::Out, block.end - 1, index * self.run * size);
                let [found, exact] = [found, exact].map(|src| read(src, pick.len));
                // Buckets that are not finite are counted in `Measured::non_finite`.
                for (found, exact) in found.zip(exact).filter(|(found, exact)| found.is_finite() && exact.is_finite()) {
                    let (found, exact) = (f64::from(found), f64::from(exact));
                    row.compared += 1;
                    row.error += (found - exact).powi(2);
                    row.square += exact.powi(2);
                }
            }
        }
    }
}

/// Measurement of one call.
pub(crate) struct ErrorProbe {
    stats: Arc<dyn Statistics>,
    /// In a part of a call: the place where all parts leave their figures for the last one.
    gathered: Option<Arc<dyn Gather>>,
    sample: Option<Arc<Sample>>,
    /// Memory of the additional tensor, kept alive as long as this part may access it.
    rooms: Option<Arc<dyn Keeps>>,
    copies: Option<Arc<CodedSample>>,
    figures: Figures,
    /// Whether the figures were reported, or left for another part.
    has_ended: bool,
}

impl ErrorProbe {
    /// Begins the measurement. `tensors` tensors of a block are the caller's. The first part of a call has the sample.
    pub(crate) fn begin(
        probe: &Probe,
        sample: Option<Sample>,
        is_first: bool,
        tensors: usize,
        buffers: &Buffers,
    ) -> Self {
        if let Some(sample) = sample.as_ref().filter(|_| !buffers.are_staged() && probe.copies.is_none()) {
            sample.take(buffers);
        }
        let sample = sample.map(Arc::new);
        let (stats, gathered, rooms) = (probe.stats.clone(), probe.gathered.clone(), probe.rooms.clone());
        if let (Some(gathered), Some(sample)) = (&gathered, &sample) {
            gathered.keep_sample(sample.clone());
        }
        let rows = vec![Measured { calls: u64::from(is_first), ..Measured::default() }; tensors];
        let figures = Figures { rows, squares: vec![Squares::default(); tensors] };
        Self { stats, gathered, sample, rooms, copies: probe.copies.clone(), figures, has_ended: false }
    }

    /// Returns whether the call has a sample, which this part or another one fills.
    pub(crate) fn has_sample(&self) -> bool {
        self.rooms.is_some()
    }

    /// Fills the sample of a call whose tensors have been copied in, if this part has it.
    pub(crate) fn fill_sample(&self, buffers: &Buffers) {
        if let Some(sample) = &self.sample {
            sample.take(buffers);
        }
    }

    /// Returns the figures of a tensor; `None` for the additional tensor.
    pub(crate) fn row(&mut self, position: u32) -> Option<&mut Measured> {
        self.figures.rows.get_mut(position as usize)
    }

    /// Adds the squares of a tile of a contribution that was encoded with a residual.
    pub(crate) fn add_squares(&mut self, position: u32, squares: Squares) {
        if let Some(sum) = self.figures.squares.get_mut(position as usize) {
            sum.add(squares);
        }
    }

    /// Adds what a worker has measured.
    pub(crate) fn add_measurements(&mut self, combination: &ExternalCombination) {
        for Measurement { piece, non_finite, squares } in combination.measurements() {
            if let Some(row) = self.row(piece) {
                row.non_finite += non_finite;
                self.add_squares(piece, squares);
            }
        }
    }

    /// Returns what a worker copies for the sample; `None` if the call has no sample, or the host computes it.
    pub(crate) fn copies(&self) -> Option<&Arc<CodedSample>> {
        self.copies.as_ref()
    }

    /// Reports the measurements when the results of the call, or of this part of it, are final. Of several parts the
    /// last reports: the results of all parts then lie in `buffers`. Later calls do nothing.
    pub(crate) fn end(&mut self, buffers: &Buffers) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        let mut sample = self.sample.clone();
        if let Some(gathered) = &self.gathered {
            let Some(all) = gathered.add(std::mem::take(&mut self.figures)) else { return };
            self.figures = all.figures;
            sample = all.sample.and_then(|sample| sample.downcast::<Sample>().ok());
        }
        let Figures { rows, squares } = &mut self.figures;
        if let Some(sample) = &sample {
            sample.compare(buffers, rows);
        }
        for (row, squares) in rows.iter_mut().zip(squares).filter(|(_, squares)| squares.gradient > 0.0) {
            row.residual_calls = 1;
            row.residual = (squares.lost / squares.gradient).sqrt();
        }
        self.stats.enter(rows);
    }
}

/// Returns the runs of a call, and their length in elements. The number of runs depends only on the call's shape, so
/// that the ranks' blocks are cut identically in every step. Their positions depend on the step.
fn picks(desc: &CallDesc, encoding: &Encoding) -> Option<(u64, Vec<Pick>)> {
    let (one_in, expected) = sampled(desc, encoding)?;
    let total: u64 = expected.iter().sum();
    let wanted = total.div_ceil(one_in);
    let runs = wanted.div_ceil(RUN);
    let run = wanted.div_ceil(runs).next_multiple_of(GRAIN);
    let first_id = encoding.codecs.tensor(0).id;
    let draw = |index| RngKey::keyed(&[encoding.seed, encoding.step, first_id, index]).word();
    let pick = |index| {
        let mut first = ((u128::from(draw(index)) * u128::from(total)) >> 64) as u64;
        for (position, &count) in expected.iter().enumerate() {
            if first < count {
                first -= first % GRAIN;
                return Some(Pick { position, first, len: run.min(count - first) });
            }
            first -= count;
        }
        None
    };
    (0..runs).map(pick).collect::<Option<_>>().map(|picks| (run, picks))
}

/// Returns of how many elements one is compared, and the elements of each tensor of a block. `None` if the call has no sample.
fn sampled(desc: &CallDesc, encoding: &Encoding) -> Option<(u64, Vec<u64>)> {
    let one_in = encoding.probe.as_ref().map(|probe| probe.one_in).filter(|&one_in| one_in > 0)?;
    if !matches!(desc.collective, Collective::AllReduce | Collective::ReduceScatter) {
        return None;
    }
    let counts = |block: &[TensorDesc]| -> Vec<u64> { block.iter().map(TensorDesc::count_elems).collect() };
    let expected = counts(desc.outputs.get(0)?);
    // With uneven blocks, no run exists in every block.
    let mut blocks = desc.inputs.iter().chain(desc.outputs.iter());
    if !blocks.all(|block| counts(block) == expected && block.iter().all(|tensor| tensor.dtype == desc.dtype)) {
        return None;
    }
    (expected.iter().sum::<u64>() > 0).then_some((one_in, expected))
}

/// Returns the piece indices of each block.
fn pieces_of(blocks: &Blocks) -> Vec<Range<usize>> {
    let ends = blocks.ends().iter().map(|&end| end as usize);
    ends.scan(0, |start, end| Some(std::mem::replace(start, end)..end)).collect()
}

fn address(buffers: &Buffers, buf: Buf, piece: usize, offset: u64) -> *mut u8 {
    buffers.address(&Extent { buf, piece: piece as u32, offset, len: 0 })
}

#[cfg(test)]
mod tests {
    use accl_kernels::codec;

    use super::*;
    use crate::call::{Codecs, TensorCodecs};

    #[derive(Debug)]
    struct Nowhere;

    impl Statistics for Nowhere {
        fn enter(&self, _: &[Measured]) {}
    }

    #[test]
    fn the_additional_tensor_stays_until_the_last_part_of_its_call_has_ended() {
        let mut tensor = vec![1.0_f32; 1000];
        let mut desc = CallDesc::new(Collective::AllReduce, Dtype::F32);
        desc.outputs = Blocks::of(TensorDesc::dense(tensor.as_mut_ptr().cast(), Dtype::F32, Elems(1000)));
        let codec = codec::parse("maxmin:4").unwrap();
        let codecs = TensorCodecs { intra_node: codec.clone(), reduce: codec.clone(), result: codec, id: 1 };
        let codecs = Codecs::new(vec![codecs]).unwrap();
        let probe = Some(Probe::new(Arc::new(Nowhere), 8));
        let encoding = Encoding { codecs, seed: 1, step: 1, residuals: None, probe };
        let (desc, sample) = Sample::with_call(&desc, &encoding).unwrap().unwrap();
        let Encoded::As(Encoding { probe: Some(probe), .. }) = &desc.encoding else { panic!("it is measured") };
        let rooms = Arc::downgrade(probe.rooms.as_ref().unwrap());
        // Another part needs no sample. It reads and writes its part of the additional tensor.
        let other = ErrorProbe::begin(probe, None, false, 1, &Buffers::default());
        drop((desc, sample));
        assert!(rooms.upgrade().is_some());
        drop(other);
        assert!(rooms.upgrade().is_none());
    }
}

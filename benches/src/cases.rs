//! The measured call of a collective at a size: its tensors, its result, its bandwidths.
//!
//! Owns the meaning of *size*: the largest buffer of the call in bytes, the same on all ranks. Read [`CollectiveCase`]
//! first.

use accl_engine::{Blocks, CallDesc, TensorDesc};
use accl_schedule::{ALGORITHMS, Algorithm, Topology};
use accl_types::{Collective, Dtype, Elems, Rank};
use half::{bf16, f16};

/// The collectives that are measured.
pub const COLLECTIVES: &[Collective] = &[
    Collective::AllReduce,
    Collective::ReduceScatter,
    Collective::AllGather,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::Gather,
    Collective::Scatter,
    Collective::AllToAll,
    Collective::Barrier,
];

/// Name of the engine's own choice, in place of an algorithm's name.
pub const AUTO: &str = "auto";

/// A collective, by an algorithm, at a size.
#[derive(Clone, Copy, Debug)]
pub struct CollectiveCase {
    /// The collective.
    pub collective: Collective,
    /// The algorithm that is forced; `None` for the engine's choice.
    pub algorithm: Option<&'static Algorithm>,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Bytes of the largest buffer of the call.
    pub bytes: u64,
}

/// Returns the type for a collective: float32 for reductions; bytes for the others, so that four bytes can be
/// divided among several ranks.
pub fn usual_dtype(collective: Collective) -> Dtype {
    if collective.reduces() { Dtype::F32 } else { Dtype::U8 }
}

/// Returns the algorithms of a collective that can run with equal blocks on one host. The first entry, `None`, is the
/// engine's choice.
pub fn algorithms(collective: Collective, ranks: u32) -> Vec<Option<&'static Algorithm>> {
    let topology = Topology::flat(ranks);
    let rows = ALGORITHMS.iter().filter(|row| row.collective == collective && (row.applies)(ranks, &topology));
    std::iter::once(None).chain(rows.map(Some)).collect()
}

/// Returns the name of an algorithm in ids and settings.
pub fn algorithm_name(algorithm: Option<&'static Algorithm>) -> &'static str {
    algorithm.map_or(AUTO, |row| row.name)
}

impl CollectiveCase {
    /// Returns whether the case exists: a barrier has no bytes, and some algorithms need blocks of equal size.
    pub fn exists(&self, ranks: u32) -> bool {
        let equal = self.has_equal_blocks(ranks);
        let barrier = self.collective == Collective::Barrier;
        (equal || !self.algorithm.is_some_and(|row| row.needs_equal_blocks)) && barrier == (self.bytes == 0)
    }

    /// Returns the number of elements of the largest buffer.
    pub fn count_elems(&self) -> u64 {
        self.bytes / self.dtype.size_bytes() as u64
    }

    /// Returns whether the buffer can be divided among `ranks` without remainder.
    pub fn has_equal_blocks(&self, ranks: u32) -> bool {
        self.count_elems().is_multiple_of(u64::from(ranks))
    }

    /// Returns the number of elements of block `rank` if the buffer is divided among `ranks`: equal, or the first ones
    /// larger by one.
    pub fn block_elems(&self, rank: u32, ranks: u32) -> u64 {
        let count = self.count_elems();
        count / u64::from(ranks) + u64::from(u64::from(rank) < count % u64::from(ranks))
    }

    /// Returns the factor from algorithm bandwidth to bus bandwidth, as nccl-tests define it: the bytes that the
    /// busiest link must carry per byte of the buffer, with any algorithm.
    pub fn bus_factor(&self, ranks: u32) -> f64 {
        let n = f64::from(ranks);
        match self.collective {
            Collective::AllReduce => 2.0 * (n - 1.0) / n,
            Collective::ReduceScatter
            | Collective::AllGather
            | Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll => (n - 1.0) / n,
            Collective::Broadcast | Collective::Reduce => 1.0,
            Collective::Barrier | Collective::Send | Collective::Recv => 0.0,
        }
    }
}

/// The memory of one rank's calls; it grows to the largest case.
#[derive(Debug, Default)]
pub struct Tensors {
    input: AlignedWords,
    output: AlignedWords,
}

/// Words whose start is aligned to a cache line, as torch's tensors are.
#[derive(Debug, Default)]
struct AlignedWords {
    words: Vec<u64>,
}

impl AlignedWords {
    /// Makes room for `room_words` words; existing data may move.
    fn grow(&mut self, room_words: usize) {
        let wanted = room_words + LINE_BYTES / size_of::<u64>();
        if self.words.len() < wanted {
            // Written, so that the pages exist before anything is timed.
            self.words = (0..wanted as u64).collect();
        }
    }

    fn words(&self) -> &[u64] {
        &self.words[self.words.as_ptr().align_offset(LINE_BYTES)..]
    }

    fn words_mut(&mut self) -> &mut [u64] {
        let start = self.words.as_ptr().align_offset(LINE_BYTES);
        &mut self.words[start..]
    }
}

const LINE_BYTES: usize = 64;

impl Tensors {
    /// Returns the call of `case` on these tensors, after growing them if needed. It is valid until the next call of
    /// this function.
    pub fn call(&mut self, case: &CollectiveCase, rank: u32, ranks: u32, root: u32) -> CallDesc {
        let room = room_words(case, ranks);
        for buffer in [&mut self.input, &mut self.output] {
            buffer.grow(room);
        }
        let dtype = case.dtype;
        let elem = dtype.size_bytes();
        let (input, output): (*mut u8, *mut u8) =
            (self.input.words_mut().as_mut_ptr().cast(), self.output.words_mut().as_mut_ptr().cast());
        let whole = |base| Blocks::of(TensorDesc::dense(base, dtype, Elems(case.count_elems())));
        let own = |base| Blocks::of(TensorDesc::dense(base, dtype, Elems(case.block_elems(rank, ranks))));
        let blocks = |base: *mut u8, count: &dyn Fn(u32) -> u64| {
            let mut at = 0;
            let mut block = |of: u32| {
                let tensor = TensorDesc::dense(base.wrapping_add(at), dtype, Elems(count(of)));
                at += count(of) as usize * elem;
                [tensor]
            };
            (0..ranks).map(&mut block).collect::<Blocks>()
        };
        let each = |of: u32| case.block_elems(of, ranks);
        let mine = |_: u32| case.block_elems(rank, ranks);

        let mut desc = CallDesc::new(case.collective, dtype);
        desc.root = Rank(root);
        desc.equal_blocks = case.has_equal_blocks(ranks);
        match case.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => desc.outputs = whole(output),
            Collective::ReduceScatter => {
                desc.inputs = blocks(input, &each);
                desc.outputs = own(output);
            }
            Collective::AllGather => {
                desc.inputs = own(input);
                desc.outputs = blocks(output, &each);
            }
            Collective::Gather => {
                desc.inputs = own(input);
                if rank == root {
                    desc.outputs = blocks(output, &each);
                }
            }
            Collective::Scatter => {
                if rank == root {
                    desc.inputs = blocks(input, &each);
                }
                desc.outputs = own(output);
            }
            Collective::AllToAll => {
                desc.inputs = blocks(input, &each);
                desc.outputs = blocks(output, &mine);
            }
            Collective::Barrier => {}
            Collective::Send | Collective::Recv => unreachable!("cases never contain messages"),
        }
        desc
    }

    /// Writes the contribution of `rank` to the result that [`Tensors::check`] expects. Call it after
    /// [`Tensors::call`].
    pub fn fill(&mut self, case: &CollectiveCase, rank: u32, ranks: u32) {
        self.write(case, ranks, Some(rank + 1));
    }

    /// Writes zeros, so that repeated sums in place stay finite. Call it after [`Tensors::call`].
    pub fn clear(&mut self, case: &CollectiveCase, ranks: u32) {
        self.write(case, ranks, None);
    }

    /// Writes elements whose period starts with `value`, or zeros for `None`.
    fn write(&mut self, case: &CollectiveCase, ranks: u32, value: Option<u32>) {
        let room = room_words(case, ranks);
        let words = value.map_or([0; PERIOD], |value| period(case.dtype, value, 1));
        for buffer in [&mut self.input, &mut self.output] {
            buffer.words_mut()[..room].chunks_mut(PERIOD).for_each(|some| some.copy_from_slice(&words[..some.len()]));
        }
    }

    /// Checks that the outputs hold the result of one call after [`Tensors::fill`] on all ranks. If calls are
    /// `encoded`, float32 only needs to be near the result.
    ///
    /// # Errors
    /// A clause for a person that describes the wrong element.
    pub fn check(&self, case: &CollectiveCase, rank: u32, ranks: u32, root: u32, encoded: bool) -> Result<(), String> {
        let sum = ranks * (ranks + 1) / 2;
        let (whole, block) = (case.count_elems(), case.block_elems(rank, ranks));
        // First element of this rank's block in a buffer with a block for each rank.
        let own: u64 = (0..rank).map(|before| case.block_elems(before, ranks)).sum();
        let run = |value, times, first, count| Run { value, times, first, count };
        let of_all = || (0..ranks).map(|from| run(from + 1, 1, 0, case.block_elems(from, ranks))).collect();
        let expected: Vec<Run> = match case.collective {
            Collective::AllReduce => vec![run(sum, ranks, 0, whole)],
            Collective::Reduce if rank == root => vec![run(sum, ranks, 0, whole)],
            Collective::ReduceScatter => vec![run(sum, ranks, own, block)],
            Collective::AllGather => of_all(),
            Collective::Gather if rank == root => of_all(),
            Collective::Broadcast => vec![run(root + 1, 1, 0, whole)],
            Collective::Scatter => vec![run(root + 1, 1, own, block)],
            Collective::AllToAll => (0..ranks).map(|from| run(from + 1, 1, own, block)).collect(),
            Collective::Reduce | Collective::Gather | Collective::Barrier => Vec::new(),
            Collective::Send | Collective::Recv => unreachable!("cases never contain messages"),
        };
        if encoded && case.dtype == Dtype::F32 {
            resemble(self.output.words(), &expected)
        } else {
            compare(self.output.words(), case.dtype, &expected)
        }
    }
}

/// Returns the words that either buffer of a case needs. If blocks differ in size, `ranks` times the largest may exceed
/// the whole.
fn room_words(case: &CollectiveCase, ranks: u32) -> usize {
    (case.bytes + 64 * u64::from(ranks)).div_ceil(8) as usize
}

/// Returns eight bytes of elements that all have this value, for the types that are measured.
fn pattern(dtype: Dtype, value: u32) -> u64 {
    let twice = |half: u32| u64::from(half) << 32 | u64::from(half);
    let four = |quarter: u16| twice(u32::from(quarter) << 16 | u32::from(quarter));
    if dtype == Dtype::F32 {
        twice((value as f32).to_bits())
    } else if dtype == Dtype::F16 {
        four(f16::from_f32(value as f32).to_bits())
    } else if dtype == Dtype::BF16 {
        four(bf16::from_f32(value as f32).to_bits())
    } else {
        u64::from(value & 0xff) * 0x0101_0101_0101_0101
    }
}

/// Words, and elements, after which values repeat: the size of a measured block is never a multiple.
const PERIOD: usize = 7;

/// Consecutive elements of a result. They start at element `first` of buffers from `times` ranks. The first values of
/// these buffers have the sum `value`.
struct Run {
    value: u32,
    times: u32,
    first: u64,
    count: u64,
}

impl Run {
    /// Returns the value of an element of the run.
    fn value_of(&self, elem: u64) -> u32 {
        self.value + self.times * ((self.first + elem) % PERIOD as u64) as u32
    }
}

/// Returns words whose elements cycle through `value` to `value + 6 * times`, so that a block in the wrong place is
/// detected.
fn period(dtype: Dtype, value: u32, times: u32) -> [u64; PERIOD] {
    let size = dtype.size_bytes();
    let mut words = [0; PERIOD];
    let elems = (0..PERIOD * 8 / size).map(|at| pattern(dtype, value + times * (at % PERIOD) as u32).to_ne_bytes());
    let bytes: Vec<u8> = elems.flat_map(|word| word.into_iter().take(size)).collect();
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        bytes.iter().rev().for_each(|&byte| *word = *word << 8 | u64::from(byte));
        *word = u64::from_le(*word);
    }
    words
}

/// Number of elements up to which a run is checked completely; in longer runs, one in [`STRIDE`] is checked.
const ALL_CHECKED: u64 = 1 << 16;
const STRIDE: usize = 61;

/// Checks the runs, one behind the other.
fn compare(words: &[u64], dtype: Dtype, expected: &[Run]) -> Result<(), String> {
    let size = dtype.size_bytes();
    let mut start = 0;
    for run in expected {
        for elem in (0..run.count).step_by(if run.count > ALL_CHECKED { STRIDE } else { 1 }) {
            let value = run.value_of(elem);
            let wanted = &pattern(dtype, value).to_ne_bytes()[..size];
            let at = (start + elem) as usize * size;
            let found = &words[at / 8].to_ne_bytes()[at % 8..at % 8 + size];
            if found != wanted {
                return Err(format!("element {} is {found:?}, expected {value}", start + elem));
            }
        }
        start += run.count;
    }
    Ok(())
}

/// Maximum mean error of encoded values, as a share of the range of a run's values. Values in the wrong place, or
/// zeros, have a mean error of more than a quarter.
const MEAN_OFF: f64 = 0.15;

/// Checks float32 results of encoded calls, as [`compare`] checks exact ones.
fn resemble(words: &[u64], expected: &[Run]) -> Result<(), String> {
    let mut start = 0;
    for run in expected {
        let off = |elem: u64| {
            let at = (start + elem) as usize * size_of::<f32>();
            let bytes = words[at / 8].to_ne_bytes();
            let found: [u8; 4] = bytes[at % 8..][..4].try_into().unwrap_or_default();
            (f64::from(f32::from_ne_bytes(found)) - f64::from(run.value_of(elem))).abs()
        };
        let mean = (0..run.count).map(off).sum::<f64>() / run.count.max(1) as f64;
        let most = MEAN_OFF * f64::from(run.times) * (PERIOD - 1) as f64;
        if mean.is_nan() || mean > most {
            return Err(format!("elements from {start} on are off by {mean} on average, expected at most {most}"));
        }
        start += run.count;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a result that `result` gives by element, as if all ranks had contributed.
    fn is_right(case: &CollectiveCase, rank: u32, ranks: u32, result: impl Fn(u64) -> u32) -> bool {
        let mut tensors = Tensors::default();
        tensors.call(case, rank, ranks, 0);
        tensors.clear(case, ranks);
        let size = case.dtype.size_bytes();
        let words = tensors.output.words_mut();
        for elem in 0..case.count_elems() {
            let at = elem as usize * size;
            let mut bytes = words[at / 8].to_ne_bytes();
            bytes[at % 8..at % 8 + size].copy_from_slice(&pattern(case.dtype, result(elem)).to_ne_bytes()[..size]);
            words[at / 8] = u64::from_ne_bytes(bytes);
        }
        tensors.check(case, rank, ranks, 0, false).is_ok()
    }

    #[test]
    fn the_block_of_another_rank_is_a_wrong_result() {
        let case = |collective, dtype| CollectiveCase { collective, algorithm: None, dtype, bytes: 1024 };
        for (collective, dtype) in [(Collective::Scatter, Dtype::U8), (Collective::Scatter, Dtype::F32)] {
            let case = case(collective, dtype);
            let block = case.count_elems() / 4;
            let from = |first: u64| move |elem: u64| 1 + ((first + elem) % 7) as u32;
            assert!(is_right(&case, 2, 4, from(2 * block)), "{collective} {dtype}");
            assert!(!is_right(&case, 2, 4, from(block)), "{collective} {dtype}");
        }
        let case = case(Collective::AllReduce, Dtype::F32);
        assert!(is_right(&case, 1, 4, |elem| 10 + 4 * (elem % 7) as u32));
        assert!(!is_right(&case, 1, 4, |elem| 10 + 4 * ((elem + 64) % 7) as u32));
        assert!(!is_right(&case, 1, 4, |_| 10));
    }

    #[test]
    fn what_a_rank_contributes_is_what_the_check_expects_of_it() {
        for dtype in [Dtype::U8, Dtype::BF16, Dtype::F16, Dtype::F32] {
            let case = CollectiveCase { collective: Collective::Broadcast, algorithm: None, dtype, bytes: 1000 };
            let mut tensors = Tensors::default();
            tensors.call(&case, 0, 3, 0);
            tensors.fill(&case, 0, 3);
            assert_eq!(tensors.check(&case, 0, 3, 0, false), Ok(()), "{dtype}");
        }
    }

    #[test]
    fn sums_that_were_encoded_are_about_right_or_wrong() {
        let case =
            CollectiveCase { collective: Collective::AllReduce, algorithm: None, dtype: Dtype::F32, bytes: 4096 };
        let mut tensors = Tensors::default();
        tensors.call(&case, 0, 2, 0);
        let mut is_right = |value: &dyn Fn(u64) -> f32| {
            let words = tensors.output.words_mut();
            for word in 0..512 {
                let [low, high] = [2 * word, 2 * word + 1].map(|elem| u64::from(value(elem).to_bits()));
                words[word as usize] = if cfg!(target_endian = "little") { high << 32 | low } else { low << 32 | high };
            }
            tensors.check(&case, 0, 2, 0, true).is_ok()
        };
        // Ranks contribute 1 and 2, and up to six more. With four bits, two sums are off by 0.8 at most.
        let sum = |elem: u64| 3.0 + 2.0 * (elem % 7) as f32;
        assert!(is_right(&sum));
        assert!(is_right(&|elem| sum(elem) + if elem % 2 == 0 { 0.8 } else { -0.8 }));
        for shift in 1..7 {
            assert!(!is_right(&|elem| sum(elem + shift)), "a block {shift} elements on");
        }
        assert!(!is_right(&|_| 0.0) && !is_right(&|elem| sum(elem) / 2.0) && !is_right(&|_| f32::NAN));
    }
}

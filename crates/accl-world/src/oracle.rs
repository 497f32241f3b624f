//! The tensors of simulated calls: their contents before a call, the expected contents after it, and guards around
//! them.
//!
//! Owns their memory. Values are small whole numbers, so every sum is exact in every dtype. Read [`Tensors::new`]
//! first.

use accl_testkit::Rng;
use accl_types::{Collective, Dtype, Elems, ReduceOp};
use half::bf16;

use super::scenario::Item;
use accl_executor::call::{Blocks, TensorDesc};

/// Content of memory that was never written.
const UNWRITTEN: u64 = 0xa5a5_a5a5_a5a5_a5a5;
/// Number of guard words before and after each tensor.
const GUARD: usize = 4;

/// Memory of one tensor.
#[derive(Debug)]
struct Tensor {
    words: Vec<u64>,
    dtype: Dtype,
    count: usize,
    step: usize,
    /// Expected elements after the call. `None` if they are not checked.
    expected: Option<Vec<i64>>,
    is_input: bool,
}

impl Tensor {
    fn new(dtype: Dtype, step: usize, count: usize, values: Option<&[i64]>, is_input: bool) -> Self {
        let words = (count * step * dtype.size_bytes()).div_ceil(8) + 2 * GUARD;
        let mut tensor = Self { words: vec![UNWRITTEN; words], dtype, count, step, expected: None, is_input };
        if let Some(values) = values {
            values.iter().enumerate().for_each(|(index, &value)| tensor.put(index, value));
        }
        tensor
    }

    fn element(&mut self, index: usize) -> &mut [u8] {
        let size = self.dtype.size_bytes();
        let at = GUARD * 8 + index * self.step * size;
        // SAFETY: `words` is exclusively borrowed and initialised, the slice covers its bytes only, and any bytes are
        // valid as `u8` and as `u64`.
        let bytes =
            unsafe { std::slice::from_raw_parts_mut(self.words.as_mut_ptr().cast::<u8>(), self.words.len() * 8) };
        &mut bytes[at..at + size]
    }

    fn put(&mut self, index: usize, value: i64) {
        let bytes = bytes_of(self.dtype, value);
        let element = self.element(index);
        element.copy_from_slice(&bytes[..element.len()]);
    }

    fn get(&mut self, index: usize) -> f64 {
        let dtype = self.dtype;
        let mut word = [0; 8];
        let element = self.element(index);
        word[..element.len()].copy_from_slice(element);
        number_of(dtype, word)
    }

    fn desc(&mut self) -> TensorDesc {
        let ptr = self.words.as_mut_ptr().wrapping_add(GUARD).cast();
        if self.step == 1 {
            return TensorDesc::dense(ptr, self.dtype, Elems(self.count as u64));
        }
        TensorDesc::strided(ptr, self.dtype, &[self.count as i64], &[self.step as i64])
            .unwrap_or_else(|e| panic!("{e}"))
    }

    /// Whether the memory around the elements is unchanged.
    fn is_bounded(&mut self) -> bool {
        let (size, count, step) = (self.dtype.size_bytes(), self.count, self.step);
        let first = GUARD * 8;
        let is_element =
            |at: usize| at >= first && (at - first) / (size * step) < count && (at - first) % (size * step) < size;
        let bytes = self.words.iter().flat_map(|word| word.to_ne_bytes());
        bytes.enumerate().all(|(at, byte)| is_element(at) || byte == UNWRITTEN as u8)
    }
}

/// Converts a number to an element of `dtype`, in the first bytes of the result.
pub(super) fn bytes_of(dtype: Dtype, value: i64) -> [u8; 8] {
    let mut out = [0; 8];
    let mut put = |bytes: &[u8]| out[..bytes.len()].copy_from_slice(bytes);
    match dtype {
        Dtype::F32 => put(&(value as f32).to_ne_bytes()),
        Dtype::F64 => put(&(value as f64).to_ne_bytes()),
        Dtype::BF16 => put(&bf16::from_f64(value as f64).to_ne_bytes()),
        _ => put(&value.to_ne_bytes()),
    }
    out
}

/// Converts an element of `dtype`, in the first bytes of `word`, to a number.
pub(super) fn number_of(dtype: Dtype, word: [u8; 8]) -> f64 {
    let [a, b, c, d, ..] = word;
    match dtype {
        Dtype::F32 => f64::from(f32::from_ne_bytes([a, b, c, d])),
        Dtype::F64 => f64::from_ne_bytes(word),
        Dtype::BF16 => f64::from(bf16::from_ne_bytes([a, b])),
        _ => i64::from_ne_bytes(word) as f64,
    }
}

/// Returns a rank's input to a call: element `index` of piece `piece` of block `block`.
fn value(item: usize, rank: usize, block: usize, piece: usize, index: usize) -> i64 {
    let mut rng = Rng::new(((item * 31 + rank) * 31 + block) as u64 * 31 + piece as u64);
    for _ in 0..3 {
        rng.next_u64();
    }
    let start = rng.next_u64();
    (start.wrapping_add(index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 60) as i64
}

fn values(item: usize, rank: usize, block: usize, piece: usize, count: usize) -> Vec<i64> {
    (0..count).map(|index| value(item, rank, block, piece, index)).collect()
}

/// Reduces two elements.
pub(super) fn both(op: ReduceOp, a: i64, b: i64) -> i64 {
    match op {
        ReduceOp::Max => a.max(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Bxor => a ^ b,
        ReduceOp::Band => a & b,
        _ => a + b,
    }
}

fn combined(item: usize, op: ReduceOp, world: usize, block: usize, piece: usize, count: usize) -> Vec<i64> {
    let of = |index| {
        let all = (0..world).map(|rank| value(item, rank, block, piece, index));
        all.reduce(|a, b| both(op, a, b)).unwrap_or(0)
    };
    (0..count).map(of).collect()
}

/// Tensors of one rank in one call.
#[derive(Debug)]
pub(super) struct Tensors {
    tensors: Vec<Tensor>,
    /// Contents of all tensors when the call ended.
    ended: Option<Vec<Vec<u64>>>,
    /// Maximum absolute error of a result.
    tolerance: f64,
}

impl Tensors {
    /// Returns the tensors of a rank, and the inputs and outputs of its call description. With `odd`, the rank's first
    /// count is one more than the other ranks expect.
    pub(super) fn new(index: usize, item: &Item, rank: usize, world: usize, odd: bool) -> (Self, Blocks, Blocks) {
        let mut made = Self { tensors: Vec::new(), ended: None, tolerance: 0.0 };
        if let Some(codec) = item.codec {
            let levels = if codec.starts_with("maxmin:8") || codec == "bf16" { 100.0 } else { 1.0 };
            made.tolerance = 15.0 * 4.0 * (world * world) as f64 / levels;
        }
        let (mut inputs, mut outputs) = (Blocks::default(), Blocks::default());
        let count = |at: usize| item.counts[at] + usize::from(odd && at == 0);
        let n = item.counts.len();
        let mut input = |block: usize, piece: usize, count: usize| {
            made.add(item, count, Some(&values(index, rank, block, piece, count)), None, true)
        };
        match item.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => {
                let pieces: Vec<TensorDesc> = (0..n)
                    .map(|piece| {
                        let count = count(piece);
                        let mine = values(index, rank, 0, piece, count);
                        let result = match item.collective {
                            Collective::Broadcast => values(index, item.root, 0, piece, count),
                            Collective::Reduce if rank != item.root => mine.clone(),
                            _ => combined(index, item.op, world, 0, piece, count),
                        };
                        made.add(item, count, Some(&mine), Some(result), false)
                    })
                    .collect();
                outputs.push(pieces);
            }
            Collective::ReduceScatter => {
                (0..world).for_each(|block| inputs.push([input(block, 0, count(block))]));
                let result = combined(index, item.op, world, rank, 0, count(rank));
                outputs.push([made.add(item, count(rank), None, Some(result), false)]);
            }
            Collective::AllGather => {
                inputs.push([input(0, 0, count(rank))]);
                for from in 0..world {
                    let result = values(index, from, 0, 0, count(from));
                    outputs.push([made.add(item, count(from), None, Some(result), false)]);
                }
            }
            Collective::Gather => {
                inputs.push([input(0, 0, count(0))]);
                for from in (0..world).filter(|_| rank == item.root) {
                    let result = values(index, from, 0, 0, count(0));
                    outputs.push([made.add(item, count(0), None, Some(result), false)]);
                }
            }
            Collective::Scatter => {
                (0..world).filter(|_| rank == item.root).for_each(|to| inputs.push([input(to, 0, count(0))]));
                let result = values(index, item.root, rank, 0, count(0));
                outputs.push([made.add(item, count(0), None, Some(result), false)]);
            }
            Collective::AllToAll => {
                let split = |from: usize, to: usize| if item.is_equal { count(0) } else { count(from * world + to) };
                (0..world).for_each(|to| inputs.push([input(to, 0, split(rank, to))]));
                for from in 0..world {
                    let result = values(index, from, rank, 0, split(from, rank));
                    outputs.push([made.add(item, split(from, rank), None, Some(result), false)]);
                }
            }
            Collective::Send if rank == item.ends.0 => inputs.push([input(0, 0, count(0))]),
            Collective::Send | Collective::Recv => {
                let result = values(index, item.ends.0, 0, 0, count(0));
                outputs.push([made.add(item, count(0), None, Some(result), false)]);
            }
            Collective::Barrier => {}
        }
        (made, inputs, outputs)
    }

    fn add(
        &mut self,
        item: &Item,
        count: usize,
        values: Option<&[i64]>,
        expected: Option<Vec<i64>>,
        is_input: bool,
    ) -> TensorDesc {
        let mut tensor = Tensor::new(item.dtype, item.step, count, values, is_input);
        tensor.expected = expected.or_else(|| values.map(<[i64]>::to_vec));
        // The description points at the buffer of `tensor.words`, which does not move when the list grows.
        let desc = tensor.desc();
        self.tensors.push(tensor);
        desc
    }

    /// Saves the contents at the end of the call: from now on the memory must not change.
    pub(super) fn end(&mut self) {
        self.ended.get_or_insert_with(|| self.tensors.iter().map(|tensor| tensor.words.clone()).collect());
    }

    /// Describes the first wrong result of a completed call. `None` if all results are right.
    pub(super) fn wrong_result(&mut self) -> Option<String> {
        let tolerance = self.tolerance;
        self.tensors.iter_mut().enumerate().find_map(|(number, tensor)| {
            let expected = tensor.expected.clone()?;
            let tolerance = if tensor.is_input { 0.0 } else { tolerance };
            (0..tensor.count).find_map(|index| {
                let (found, wanted) = (tensor.get(index), expected[index] as f64);
                let is_right = (found - wanted).abs() <= tolerance;
                (!is_right).then(|| format!("element {index} of tensor {number} is {found} and must be {wanted}"))
            })
        })
    }

    /// Describes a write around a tensor, or after the call's end. `None` if there was none.
    pub(super) fn trespass(&mut self) -> Option<String> {
        if let Some(number) = self.tensors.iter_mut().position(|tensor| !tensor.is_bounded()) {
            return Some(format!("memory around tensor {number} was written"));
        }
        let ended = self.ended.as_ref()?;
        let changed = self.tensors.iter().zip(ended).position(|(tensor, before)| tensor.words != *before);
        changed.map(|number| format!("tensor {number} was written after its call had ended"))
    }

    /// Returns the memory of the outputs, bit by bit.
    pub(super) fn bits(&self) -> Vec<Vec<u64>> {
        self.tensors.iter().filter(|tensor| !tensor.is_input).map(|tensor| tensor.words.clone()).collect()
    }
}

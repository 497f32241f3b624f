//! The kernel that reduces elements of several operands, for each operator and dtype.
//!
//! Owns the constants with which the source is compiled, and the arguments and size of a launch. `reduce.cu` declares the
//! same layout. Does not compile, load or launch anything. Read [`ReductionSet`] first.

use std::fmt;

use accl_types::{Dtype, ReduceOp};

use super::families::{self, File};

/// Most operands of a part: as many as fit a launch with one part.
pub const MOST_OPERANDS: usize = WORDS - HEAD;

/// Maximum bytes of a kernel's parameters, on every GPU.
const MOST_BYTES: usize = 4096;
/// Bytes of the arguments before the words.
const FIXED_BYTES: usize = 16;
/// Words of the arguments.
const WORDS: usize = (MOST_BYTES - FIXED_BYTES) / size_of::<u64>();
/// Words of a part before its operands.
const HEAD: usize = 3;
/// Threads of a block.
const THREADS: u32 = 256;
/// Bytes of each operand that a block reads.
const PART_BYTES: u64 = 2 * 16 * THREADS as u64;
/// Bytes of the widest access.
const WIDEST_BYTES: u64 = 16;
/// Bit that distinguishes the words of these sets from the words of sets of codecs.
const IS_REDUCTION: u64 = 1 << 63;

/// The kernel that reduces elements of one dtype by one operator.
///
/// Results equal the results of `accl_kernels::Reducer::many` in every bit. PREMUL_SUM adds elements that were multiplied
/// before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReductionSet {
    /// Never `PremulSum`.
    op: ReduceOp,
    dtype: Dtype,
}

/// Elements that one kernel launch reduces: `to[i] = operands[0][i] op operands[1][i] op ...`, in this order.
///
/// Addresses are in device memory. They have the alignment of a real number of the dtype; accesses are wider if all addresses
/// are multiples of 16. `to` may equal the addresses of operands, and overlaps the other operands nowhere.
#[derive(Clone, Copy, Debug)]
pub struct ReductionPart<'a> {
    /// Address of the first result.
    pub to: u64,
    /// Address of the first element of each operand.
    pub operands: &'a [u64],
    /// Number of elements of each operand.
    pub elements: u64,
}

/// The parameter of the kernel, passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ReductionArgs {
    parts: u32,
    operands: u32,
    /// Divisor; 0 for none.
    world: u32,
    reserved: u32,
    /// Words of each part: the address of the results, the number of real numbers or bytes, the number of the first block plus
    /// 2^32 times the bytes of an access, and the addresses of the operands.
    words: [u64; WORDS],
}

const _: () = assert!(size_of::<ReductionArgs>() <= MOST_BYTES, "the arguments exceed the parameters of a kernel");

/// A launch: its arguments, and its number of blocks and of threads in a block.
#[derive(Debug)]
pub struct ReductionLaunch {
    /// The kernel's parameter.
    pub args: ReductionArgs,
    /// Number of blocks; 0 if there is nothing to do.
    pub blocks: u32,
    /// Number of threads of a block.
    pub threads: u32,
}

/// Arithmetic of a set, in the numbers of the source.
#[derive(Clone, Copy, Debug)]
struct Arithmetic {
    /// Type of the numbers.
    element: u32,
    /// Bytes of a number.
    bytes: u64,
    operator: u32,
    divides: bool,
    /// Whether products are products of complex numbers.
    is_complex: bool,
}

impl ReductionSet {
    /// Returns the kernel of an operator and a dtype; `None` if `accl_kernels::Reducer` does not support the pair.
    pub fn new(op: ReduceOp, dtype: Dtype) -> Option<Self> {
        let is_supported = accl_kernels::supports(op, dtype) && type_of(dtype).is_some();
        let op = if op == ReduceOp::PremulSum { ReduceOp::Sum } else { op };
        is_supported.then_some(Self { op, dtype })
    }

    /// Returns a number that is equal for equal sets, and only for them. No [`super::KernelSet`] has the same number.
    pub fn word(&self) -> u64 {
        IS_REDUCTION | (self.op as u64) << 8 | self.dtype as u64
    }

    /// Returns the source.
    pub fn source(&self) -> String {
        families::REDUCTIONS.iter().map(File::with_name).collect()
    }

    /// Returns the options of the compiler that define the operator and the dtype, as `-DNAME=VALUE`. Different sets may
    /// have the same options, and then the same code.
    pub fn options(&self) -> Vec<String> {
        let Arithmetic { element, operator, divides, is_complex, .. } = self.arithmetic();
        let defines = [
            ("ELEMENT", element),
            ("OPERATOR", operator),
            ("DIVIDES", u32::from(divides)),
            ("COMPLEX", u32::from(is_complex)),
            ("THREADS", THREADS),
            ("PART_BYTES", PART_BYTES as u32),
            ("WORDS", WORDS as u32),
        ];
        defines.into_iter().map(|(name, value)| format!("-DACCL_{name}={value}")).collect()
    }

    /// Returns the name of the kernel's function.
    pub fn entry(&self) -> &'static str {
        "accl_reduce"
    }

    /// Returns how many parts one launch takes, if each has this number of operands: at least 1 up to [`MOST_OPERANDS`],
    /// and 0 for more.
    pub fn capacity(operands: usize) -> usize {
        WORDS / (HEAD + operands)
    }

    /// Returns the arguments and the size of a launch. With a world size the results are final, so that AVG divides by it.
    ///
    /// # Panics
    /// Panics if there are more parts than [`ReductionSet::capacity`], if a part has no operands or another number of
    /// operands than the first one, if an address is not aligned, if the world size is 0, or if the elements exceed a
    /// grid.
    pub fn launch(&self, parts: &[ReductionPart<'_>], world_to_finish: Option<u32>) -> ReductionLaunch {
        assert!(world_to_finish != Some(0), "a world has ranks");
        let Arithmetic { bytes, .. } = self.arithmetic();
        let operands = parts.first().map_or(1, |part| part.operands.len());
        let capacity = Self::capacity(operands);
        assert!(operands > 0 && parts.len() <= capacity, "{} parts of {operands}, at most {capacity}", parts.len());
        let world = world_to_finish.unwrap_or(0);
        let mut args = ReductionArgs { parts: 0, operands: operands as u32, world, reserved: 0, words: [0; WORDS] };
        let mut blocks = 0_u64;
        let places = args.words.chunks_exact_mut(HEAD + operands);
        for (part, words) in parts.iter().filter(|part| part.elements > 0).zip(places) {
            assert!(part.operands.len() == operands, "{} operands, expected {operands}", part.operands.len());
            let all = part.operands.iter().fold(part.to | WIDEST_BYTES, |all, address| all | address);
            let access_bytes = 1 << all.trailing_zeros();
            assert!(access_bytes >= bytes, "addresses are aligned to {access_bytes} bytes, expected {bytes}");
            let numbers = part.elements * (self.dtype.size_bytes() as u64 / bytes);
            words[..HEAD].copy_from_slice(&[part.to, numbers, blocks | access_bytes << 32]);
            words[HEAD..].copy_from_slice(part.operands);
            args.parts += 1;
            blocks += (numbers * bytes).div_ceil(PART_BYTES);
            assert!(blocks <= i32::MAX as u64, "{blocks} blocks exceed a grid");
        }
        ReductionLaunch { args, blocks: blocks as u32, threads: THREADS }
    }

    fn arithmetic(&self) -> Arithmetic {
        let (mut element, mut bytes) = type_of(self.dtype).unwrap_or((UNSIGNED8, 1));
        let is_bool = self.dtype == Dtype::Bool;
        let operator = match self.op {
            ReduceOp::Sum | ReduceOp::Max if is_bool => OR,
            ReduceOp::Product | ReduceOp::Min if is_bool => AND,
            ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => SUM,
            ReduceOp::Product => PRODUCT,
            ReduceOp::Min => LEAST,
            ReduceOp::Max => GREATEST,
            ReduceOp::Band => AND,
            ReduceOp::Bor => OR,
            ReduceOp::Bxor => XOR,
        };
        let is_integer = element >= UNSIGNED8;
        if is_integer && operator >= AND {
            // Every width has the kernel of bytes.
            (element, bytes) = (UNSIGNED8, 1);
        } else if is_integer && matches!(self.op, ReduceOp::Sum | ReduceOp::Product) {
            // Numbers wrap, so the sign means nothing.
            element &= !SIGNED;
        }
        let is_complex = operator == PRODUCT && matches!(self.dtype, Dtype::C64 | Dtype::C128);
        Arithmetic { element, bytes, operator, divides: self.op == ReduceOp::Avg, is_complex }
    }
}

/// Prints the operator and the dtype, for messages.
impl fmt::Display for ReductionSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.op, self.dtype)
    }
}

/// Number of the unsigned integers of one byte in the source. Integers have this number or a greater one.
const UNSIGNED8: u32 = 6;
/// Bit of the numbers of signed integers.
const SIGNED: u32 = 1;

/// Numbers of operators in the source.
const SUM: u32 = 0;
const PRODUCT: u32 = 1;
const LEAST: u32 = 2;
const GREATEST: u32 = 3;
const AND: u32 = 4;
const OR: u32 = 5;
const XOR: u32 = 6;

/// Returns the type of a dtype's real numbers in the source, and their size in bytes; `None` if the source does not know it.
fn type_of(dtype: Dtype) -> Option<(u32, u64)> {
    match dtype {
        Dtype::F32 | Dtype::C64 => Some((0, 4)),
        Dtype::F16 => Some((1, 2)),
        Dtype::BF16 => Some((2, 2)),
        Dtype::F64 | Dtype::C128 => Some((3, 8)),
        Dtype::Bool => Some((4, 1)),
        Dtype::U8 => Some((UNSIGNED8, 1)),
        Dtype::I8 => Some((UNSIGNED8 | SIGNED, 1)),
        Dtype::U16 => Some((8, 2)),
        Dtype::I16 => Some((8 | SIGNED, 2)),
        Dtype::U32 => Some((10, 4)),
        Dtype::I32 => Some((10 | SIGNED, 4)),
        Dtype::U64 => Some((12, 8)),
        Dtype::I64 => Some((12 | SIGNED, 8)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use accl_kernels::codec::parse;

    use super::*;
    use crate::kernels::KernelSet;

    fn all() -> impl Iterator<Item = (ReduceOp, Dtype)> {
        ReduceOp::ALL.iter().flat_map(|op| Dtype::ALL.iter().map(|dtype| (*op, *dtype)))
    }

    fn sum(dtype: Dtype) -> ReductionSet {
        ReductionSet::new(ReduceOp::Sum, dtype).unwrap()
    }

    #[test]
    fn every_pair_that_the_cpu_supports_has_a_kernel() {
        for (op, dtype) in all() {
            assert_eq!(ReductionSet::new(op, dtype).is_some(), accl_kernels::supports(op, dtype), "{op} of {dtype}");
        }
    }

    #[test]
    fn equal_sets_alone_have_equal_words() {
        let (mut words, mut sets) = (HashSet::new(), Vec::new());
        for set in all().filter_map(|(op, dtype)| ReductionSet::new(op, dtype)) {
            assert_eq!(words.insert(set.word()), !sets.contains(&set), "{set}");
            sets.push(set);
        }
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            assert!(words.insert(KernelSet::of_sums(dtype).unwrap().word()));
            assert!(words.insert(KernelSet::of_codec(parse("maxmin:4").unwrap().summary(), dtype).unwrap().word()));
        }
        assert_eq!(ReductionSet::new(ReduceOp::PremulSum, Dtype::F32), Some(sum(Dtype::F32)));
    }

    #[test]
    fn sets_with_the_same_arithmetic_have_the_same_options() {
        let of = |op, dtype| ReductionSet::new(op, dtype).unwrap().options();
        assert_eq!(sum(Dtype::C64).options(), sum(Dtype::F32).options());
        assert_eq!(sum(Dtype::I16).options(), sum(Dtype::U16).options());
        assert_ne!(of(ReduceOp::Avg, Dtype::I16), of(ReduceOp::Avg, Dtype::U16));
        assert_eq!(of(ReduceOp::Bor, Dtype::I64), of(ReduceOp::Bor, Dtype::U8));
        assert_ne!(of(ReduceOp::Bor, Dtype::Bool), of(ReduceOp::Bor, Dtype::U8));
        let distinct: HashSet<_> =
            all().filter_map(|(op, dtype)| Some(ReductionSet::new(op, dtype)?.options())).collect();
        assert_eq!(distinct.len(), 60);
    }

    #[test]
    fn a_launch_has_as_many_parts_as_fit_and_blocks_for_every_element() {
        assert_eq!((ReductionSet::capacity(1), ReductionSet::capacity(2), ReductionSet::capacity(8)), (127, 102, 46));
        assert_eq!((ReductionSet::capacity(MOST_OPERANDS), ReductionSet::capacity(MOST_OPERANDS + 1)), (1, 0));
        let operands = [64, 128];
        let part = |elements| ReductionPart { to: 32, operands: &operands, elements };
        let ReductionLaunch { args, blocks, threads } =
            sum(Dtype::F32).launch(&[part(2049), part(0), part(2048), part(1)], Some(3));
        assert_eq!((args.parts, args.operands, args.world, blocks, threads), (3, 2, 3, 4, 256));
        assert_eq!(args.words[..5], [32, 2049, 16 << 32, 64, 128]);
        assert_eq!(args.words[5..8], [32, 2048, 16 << 32 | 2]);
        let complex = sum(Dtype::C128).launch(&[part(10)], None).args;
        assert_eq!((complex.words[1], complex.world), (20, 0));
        assert_eq!(sum(Dtype::F16).launch(&[], None).blocks, 0);
        let most = vec![8; MOST_OPERANDS];
        let launch = sum(Dtype::F32).launch(&[ReductionPart { to: 8, operands: &most, elements: 1 << 40 }], None);
        assert_eq!((launch.blocks, launch.args.words[2], launch.args.words[WORDS - 1]), (1 << 29, 8 << 32, 8));
    }

    #[test]
    #[should_panic(expected = "addresses are aligned to 2 bytes, expected 4")]
    fn addresses_that_are_not_aligned_are_refused() {
        sum(Dtype::C64).launch(&[ReductionPart { to: 16, operands: &[16, 18], elements: 1 }], None);
    }

    #[test]
    #[should_panic(expected = "103 parts of 2, at most 102")]
    fn more_parts_than_fit_are_refused() {
        sum(Dtype::F32).launch(&[ReductionPart { to: 16, operands: &[16, 32], elements: 1 }; 103], None);
    }
}

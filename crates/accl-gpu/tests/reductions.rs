//! The kernel of reductions, compiled for the host, against `accl_kernels::Reducer`: equal in every byte.
//!
//! The kernel is compiled by the C++ compiler in `CXX` (default `c++`) and runs on fibers, see `host/model.hpp`.

mod host;

use std::collections::HashMap;

use accl_gpu::kernels::{MOST_OPERANDS, ReductionLaunch, ReductionPart, ReductionSet};
use accl_kernels::{Finish, Reducer};
use accl_types::{Dtype, DtypeClass, ReduceOp};
use host::{HostLibrary, Memory, Order};

/// Numbers of elements: less than a vector, and more than a block, for every type.
const COUNTS: [usize; 8] = [0, 1, 7, 8, 1000, 2048, 4099, 9001];
/// Bytes that a kernel must not leave in results.
const PATTERN: u8 = 0xe7;

/// A generator of splitmix64: the same seed gives the same data.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

/// Bytes of a real number of a dtype.
fn number_bytes(dtype: Dtype) -> usize {
    if dtype.class() == DtypeClass::Complex { dtype.size_bytes() / 2 } else { dtype.size_bytes() }
}

/// Returns the bits of a float with exponents of `exponent` bits in `8 * bytes` bits.
fn float(bytes: usize, exponent: u32, random: &mut Random) -> u64 {
    let bits = 8 * bytes as u32;
    let mantissa = bits - 1 - exponent;
    let (sign, infinity) = ((random.next() & 1) << (bits - 1), ((1 << exponent) - 1) << mantissa);
    let below = |random: &mut Random, bits: u32| random.next() & ((1 << bits) - 1);
    let magnitude = match random.next() % 16 {
        0 => 0,
        1 => infinity,
        // A NaN with a payload, which may be signalling.
        2 if random.next().is_multiple_of(4) => infinity | below(random, mantissa) | 1,
        // The largest number, and the smallest normal one.
        3 => infinity - 1,
        4 => 1 << mantissa,
        // A denormal number.
        5 | 6 => below(random, mantissa),
        7 => 1,
        // Any number.
        8 => below(random, bits - 1).min(infinity - 1),
        // Numbers around 1, whose sums need rounding.
        _ => (((1 << (exponent - 1)) - 3 + random.next() % 5) << mantissa) | below(random, mantissa),
    };
    sign | magnitude
}

/// Returns the bytes of `count` elements.
fn elements(dtype: Dtype, count: usize, random: &mut Random) -> Vec<u8> {
    let bytes = number_bytes(dtype);
    let number = |random: &mut Random| match (dtype.class(), dtype) {
        (DtypeClass::Bool, _) if random.next().is_multiple_of(2) => 0,
        (DtypeClass::Bool, _) => random.next(),
        (DtypeClass::Integer, _) => match random.next() % 8 {
            0 => 0,
            1 => u64::MAX,
            2 => 1 << (8 * bytes - 1),
            3 => (1 << (8 * bytes - 1)) - 1,
            4 => 1,
            5 => random.next() >> 60,
            _ => random.next(),
        },
        (_, Dtype::F16) => float(bytes, 5, random),
        _ if bytes == 8 => float(bytes, 11, random),
        _ => float(bytes, 8, random),
    };
    let numbers = count * dtype.size_bytes() / bytes;
    (0..numbers).flat_map(|_| number(random).to_le_bytes()[..bytes].to_vec()).collect()
}

/// How a part lies in memory.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// All addresses are multiples of 16.
    Aligned,
    /// Addresses have different distances from such a multiple, in real numbers.
    Loose,
    /// Addresses are multiples of 4 bytes and of a number. The results replace the first operand.
    InFirst,
    /// The results replace the last operand, which is the first one, too.
    InLast,
}

const PLACES: [Place; 4] = [Place::Aligned, Place::Loose, Place::InFirst, Place::InLast];

/// A part, its memory and the results of the CPU.
struct Case {
    what: String,
    elements: usize,
    /// Memory of the operands, and of results that replace none.
    memory: Vec<Memory>,
    /// Index of the memory of the results, and of each operand.
    to: usize,
    operands: Vec<usize>,
    addresses: Vec<u64>,
    expected: Vec<u8>,
}

impl Case {
    fn new(
        reducer: &Reducer,
        finish: Finish,
        operands: usize,
        elements: usize,
        place: Place,
        random: &mut Random,
    ) -> Self {
        let dtype = reducer.dtype();
        let number = number_bytes(dtype);
        let off_bytes = |index: usize| match place {
            Place::Aligned | Place::InLast => 0,
            Place::Loose => (index % 3 + 1) * number,
            Place::InFirst => number.max(4),
        };
        let content: Vec<Vec<u8>> = (0..operands).map(|_| self::elements(dtype, elements, random)).collect();
        let mut memory: Vec<Memory> = Vec::new();
        memory.extend(content.iter().enumerate().map(|(index, content)| Memory::new(content, off_bytes(index))));
        let mut of_operands: Vec<usize> = (0..operands).collect();
        let to = match place {
            Place::Aligned | Place::Loose => operands,
            Place::InFirst => 0,
            Place::InLast => operands - 1,
        };
        if let Place::InLast = place {
            of_operands[0] = operands - 1;
        }
        if to == operands {
            memory.push(Memory::new(&vec![PATTERN; elements * dtype.size_bytes()], off_bytes(operands)));
        }
        let mut expected = vec![0; elements * dtype.size_bytes()];
        let sources: Vec<*const u8> = of_operands.iter().map(|&index| content[index].as_ptr()).collect();
        // SAFETY: all buffers have `elements` elements, and the results are apart from the operands.
        unsafe { reducer.many(expected.as_mut_ptr(), &sources, elements, finish) };
        let what = format!("{} of {dtype}: {elements} elements of {operands}, {place:?}, {finish:?}", reducer.op());
        let addresses = of_operands.iter().map(|&index| memory[index].address()).collect();
        Self { what, elements, memory, to, operands: of_operands, addresses, expected }
    }

    fn part(&self) -> ReductionPart<'_> {
        ReductionPart { to: self.memory[self.to].address(), operands: &self.addresses, elements: self.elements as u64 }
    }

    /// Checks that the results are the results of the CPU, and that no other memory was written.
    fn check(&self) {
        let found = self.memory[self.to].content();
        if let Some(at) = (0..found.len()).find(|&at| found[at] != self.expected[at]) {
            let range = at / 16 * 16..(at / 16 * 16 + 16).min(found.len());
            let operands: Vec<&[u8]> =
                self.operands.iter().map(|&index| &self.memory[index].content()[range.clone()]).collect();
            let (ours, expected) = (&found[range.clone()], &self.expected[range.clone()]);
            panic!("{}: byte {at}: {ours:02x?}, expected {expected:02x?} of {operands:02x?}", self.what);
        }
    }
}

/// Libraries by their options: sets with the same options share code.
#[derive(Default)]
struct Libraries(HashMap<Vec<String>, HostLibrary>);

impl Libraries {
    fn of(&mut self, set: ReductionSet) -> &HostLibrary {
        self.0.entry(set.options()).or_insert_with(|| HostLibrary::compile(&set.source(), &set.options()))
    }
}

/// Launches a set on all cases at once, and checks the results.
fn run(library: &HostLibrary, set: ReductionSet, cases: &[Case], world: Option<u32>, order: Order) {
    let parts: Vec<ReductionPart<'_>> = cases.iter().map(Case::part).collect();
    let ReductionLaunch { args, blocks, threads } = set.launch(&parts, world);
    let memory: Vec<&Memory> = cases.iter().flat_map(|case| &case.memory).collect();
    // SAFETY: `args` has the layout of the kernel's arguments.
    let result = unsafe { library.run(set.entry(), (blocks, threads), &args, &memory, order) };
    assert_eq!(result, Ok(()), "{set}");
    cases.iter().for_each(Case::check);
}

/// Checks every operator on some dtypes.
fn check(dtypes: &[Dtype]) {
    let (mut libraries, mut random) = (Libraries::default(), Random(42));
    for (op, dtype) in dtypes.iter().flat_map(|dtype| ReduceOp::ALL.iter().map(move |op| (*op, *dtype))) {
        let Some(set) = ReductionSet::new(op, dtype) else { continue };
        let library = libraries.of(set);
        for (operands, world, order) in [
            (1, 3, Order::Forward),
            (2, 7, Order::Reversed),
            (3, 4_000_000_007, Order::Forward),
            (5, 5, Order::Reversed),
        ] {
            let reducer = Reducer::new(op, dtype, world).unwrap();
            for finish in [Finish::No, Finish::Yes] {
                let places = PLACES.iter().flat_map(|place| COUNTS.iter().map(move |count| (*place, *count)));
                let case = |(place, count)| Case::new(&reducer, finish, operands, count, place, &mut random);
                let cases: Vec<Case> = places.map(case).collect();
                assert!(cases.len() <= ReductionSet::capacity(operands));
                run(library, set, &cases, (finish == Finish::Yes).then_some(world), order);
            }
        }
    }
}

#[test]
fn sixteen_bit_floats() {
    check(&[Dtype::F16, Dtype::BF16]);
}

#[test]
fn floats() {
    check(&[Dtype::F32, Dtype::F64]);
}

#[test]
fn complex_numbers() {
    check(&[Dtype::C64, Dtype::C128]);
}

#[test]
fn unsigned_integers() {
    check(&[Dtype::U8, Dtype::U16, Dtype::U32, Dtype::U64]);
}

#[test]
fn signed_integers() {
    check(&[Dtype::I8, Dtype::I16, Dtype::I32, Dtype::I64]);
}

#[test]
fn booleans() {
    check(&[Dtype::Bool]);
}

#[test]
fn as_many_operands_as_fit() {
    let mut random = Random(7);
    for (op, dtype) in [(ReduceOp::Sum, Dtype::BF16), (ReduceOp::Avg, Dtype::F16)] {
        let (set, reducer) = (ReductionSet::new(op, dtype).unwrap(), Reducer::new(op, dtype, 507).unwrap());
        let library = HostLibrary::compile(&set.source(), &set.options());
        for place in [Place::Aligned, Place::Loose] {
            let case = Case::new(&reducer, Finish::Yes, MOST_OPERANDS, 500, place, &mut random);
            run(&library, set, &[case], Some(507), Order::Forward);
        }
    }
}

//! Every kernel, compiled for the host, against the codecs of `accl-kernels`: equal in every byte.
//!
//! The kernels are compiled by the C++ compiler in `CXX` (default `c++`) and run on fibers, see `host/model.hpp`. The
//! default is a selection of settings. The whole matrix has 1,350 settings and takes about half an hour. `ACCL_GPU_MATRIX=n`
//! checks every n-th of them:
//! ```text
//! ACCL_GPU_MATRIX=1 cargo test -p accl-gpu --test kernels -- matrix --nocapture
//! ```
//!
//! This file is long because all checks of a codec share its data, its spans and one compilation.

mod host;

use std::sync::Arc;

use accl_gpu::kernels::{Kernel, KernelSet, Launch, Options, Span, missing};
use accl_kernels::codec::{CODECS, Codec, Floats, NonFinite, RngKey, Setting, Slice, parse};
use accl_types::{Dtype, Rank};
use host::{HostLibrary, Memory, Order};

const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];
const HEADER_BYTES: usize = 16;
const MOST_TILE: usize = 16_384;

/// A set of kernels in a library of the host.
struct HostKernels {
    set: KernelSet,
    library: HostLibrary,
}

impl HostKernels {
    fn compile(set: KernelSet) -> Self {
        Self { set, library: HostLibrary::compile(&set.source(), &set.options(set.kernels())) }
    }

    /// Runs a kernel, which may access `memory` and nothing else.
    fn run(&self, kernel: Kernel, spans: &[Span], options: &Options, memory: &[&Memory], order: Order) {
        let Launch { args, blocks, threads } = self.set.launch(kernel, spans, options);
        let entry = self.set.entry(kernel);
        // SAFETY: `Args` has the layout of the kernels' arguments.
        let result = unsafe { self.library.run(entry, (blocks, threads), &args, memory, order) };
        assert_eq!(result, Ok(()), "{entry} of {}", self.set);
    }
}

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

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }

    /// Returns a number from -1 to 1.
    fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

/// Creates values of runs of `run` elements, each run of another kind.
fn values(count: usize, run: usize, random: &mut Random) -> Vec<f32> {
    let mut values = Vec::with_capacity(count);
    let mut kind = random.below(KINDS);
    while values.len() < count {
        let constant = random.number();
        let count = run.min(count - values.len());
        let mut run: Vec<f32> = (0..count).map(|index| of_kind(kind, index, constant, random)).collect();
        // Some values of another kind among the others: one NaN, an infinity, a great value.
        let at = random.below(run.len());
        match random.below(12) {
            0 => run[at] = f32::NAN,
            1 => run[at] = f32::INFINITY,
            2 => run[at] = f32::NEG_INFINITY,
            3 => run[at] = 3.0e38 * random.number(),
            4 => run[at] = f32::from_bits(0xff80_0000 | random.next() as u32 | 1),
            _ => {}
        }
        values.extend(run);
        kind = (kind + 1) % KINDS;
    }
    values
}

const KINDS: usize = 16;

fn of_kind(kind: usize, index: usize, constant: f32, random: &mut Random) -> f32 {
    let number = random.number();
    match kind {
        0 => number,
        // These have the size of gradients, and a few are greater.
        1 => number * number * number * 1e-3,
        2 => constant,
        3 => [0.0, -0.0][random.below(2)],
        4 => f32::from_bits(random.next() as u32 & 0x807f_ffff),
        5 => number * 3.4e38,
        6 => number * 70_000.0,
        7 => 1000.0 + number * 1e-3,
        8 => -1.0 - number.abs(),
        9 => number * 1e-7,
        10 => random.below(5) as f32 - 2.0,
        11 => 1e30 * number.abs() + 1e30,
        12 => f32::from_bits(random.next() as u32 & 0xbfff_ffff),
        // The mean lies between two float32, and which of them is nearer depends on the order of a sum in float64.
        13 => match index % 16 {
            0 => 1.0,
            1 => 2f32.powi(-24),
            8 | 10 => 2f32.powi(-53),
            _ => 0.0,
        },
        // Around the largest float16 and the least number that rounds to an infinity.
        14 => [-0.5, 0.5][random.below(2)] * (131_000.0 + random.below(80) as f32),
        _ => number.abs() * 6.0e4,
    }
}

fn to_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn to_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

/// Converts values to elements of a type; NaN keeps a payload.
fn elements(dtype: Dtype, values: &[f32], random: &mut Random) -> Vec<u8> {
    if dtype == Dtype::F32 {
        return to_bytes(values);
    }
    let mut bytes = written(dtype, values);
    let infinity: u16 = if dtype == Dtype::F16 { 0x7c00 } else { 0x7f80 };
    for bytes in bytes.chunks_exact_mut(2) {
        let bits = u16::from_le_bytes([bytes[0], bytes[1]]);
        if bits & 0x7fff > infinity {
            let payload = random.next() as u16 & !infinity & 0x7fff | 1;
            bytes.copy_from_slice(&(bits & 0x8000 | infinity | payload).to_le_bytes());
        }
    }
    bytes
}

fn written(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.size_bytes()];
    // SAFETY: there is room for each value.
    unsafe { Floats::default().write(bytes.as_mut_ptr(), dtype, values) };
    bytes
}

fn read(dtype: Dtype, elements: &[u8]) -> Vec<f32> {
    let mut sums = vec![0.0; elements.len() / dtype.size_bytes()];
    // SAFETY: there are as many elements as sums.
    unsafe { Floats::default().read(&mut sums, elements.as_ptr(), dtype) };
    sums
}

/// Makes every NaN canonical, as sums of decoded values have it.
fn canonical(values: &mut [f32]) {
    values.iter_mut().filter(|value| value.is_nan()).for_each(|value| *value = f32::NAN);
}

/// The place of a span in its tensor and in memory.
#[derive(Clone, Copy)]
struct Place {
    count: usize,
    tile: usize,
    first: u64,
    /// Elements by which values are misaligned.
    values_off: usize,
    /// Bytes by which codes are misaligned to 16: 0 or 8.
    code_off: usize,
}

/// The data of one span, and the results of the CPU.
struct Case<'a> {
    codec: &'a dyn Codec,
    tensor: Dtype,
    place: Place,
    key: RngKey,
    stride: usize,
    code_bytes: usize,
}

impl<'a> Case<'a> {
    fn new(codec: &'a dyn Codec, tensor: Dtype, place: Place, key: RngKey) -> Self {
        let stride = HEADER_BYTES + codec.encoded_bytes(tensor, place.tile);
        let mut case = Self { codec, tensor, place, key, stride, code_bytes: 0 };
        case.code_bytes = case.tiles().map(|(_, count)| HEADER_BYTES + codec.encoded_bytes(tensor, count)).sum();
        case
    }

    /// Iterates over the first element and the number of elements of every tile.
    fn tiles(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let Place { count, tile, .. } = self.place;
        (0..count).step_by(tile).map(move |start| (start, tile.min(count - start)))
    }

    /// Returns the byte range of the code of the tile that begins with `start`.
    fn code_of(&self, (start, count): (usize, usize)) -> std::ops::Range<usize> {
        let at = start / self.place.tile * self.stride + HEADER_BYTES;
        at..at + self.codec.encoded_bytes(self.tensor, count)
    }

    fn encoded(&self, code: &mut [u8], src: &[u8], dtype: Dtype, tile: (usize, usize)) -> NonFinite {
        let (start, count) = tile;
        let src = &src[start * dtype.size_bytes()..(start + count) * dtype.size_bytes()];
        let first = self.place.first + start as u64;
        let slice = Slice { src: src.as_ptr(), dtype, tensor: self.tensor, count, first };
        // SAFETY: `src` has `count` elements of `dtype`.
        unsafe { self.codec.encode(&mut code[self.code_of(tile)], slice, self.key) }
    }

    fn decoded(&self, code: &[u8], into: Dtype, tile: (usize, usize)) -> Vec<u8> {
        let mut bytes = vec![0; tile.1 * into.size_bytes()];
        // SAFETY: `bytes` has room for as many elements.
        unsafe { self.codec.decode(bytes.as_mut_ptr(), into, &code[self.code_of(tile)], self.tensor, tile.1) };
        bytes
    }

    fn encode(&self, src: &[u8], dtype: Dtype) -> (Vec<u8>, NonFinite) {
        let mut code = self.empty_code();
        let mut non_finite = NonFinite::default();
        self.tiles().for_each(|tile| non_finite += self.encoded(&mut code, src, dtype, tile));
        (code, non_finite)
    }

    fn decode(&self, code: &[u8], into: Dtype) -> Vec<u8> {
        self.tiles().flat_map(|tile| self.decoded(code, into, tile)).collect()
    }

    fn decode_add(&self, code: &[u8], sums: &[f32]) -> Vec<u8> {
        let mut sums = sums.to_vec();
        for tile @ (start, count) in self.tiles() {
            self.codec.decode_add(&mut sums[start..start + count], &code[self.code_of(tile)], self.tensor);
        }
        to_bytes(&sums)
    }

    /// Encodes with error feedback, as a call does. Returns the code and the residual.
    fn feedback(&self, src: &[u8], dtype: Dtype, residual: &[f32], keeps_zeros: bool) -> (Vec<u8>, Vec<u8>, NonFinite) {
        let floats = Floats::default();
        let (mut code, mut residual) = (self.empty_code(), residual.to_vec());
        let mut non_finite = NonFinite::default();
        for tile @ (start, count) in self.tiles() {
            let mut sums = read(dtype, &src[start * dtype.size_bytes()..(start + count) * dtype.size_bytes()]);
            let residual = &mut residual[start..start + count];
            let is_kept = keeps_zeros && sums.iter().all(|sum| *sum == 0.0);
            if !is_kept {
                // SAFETY: there are as many residuals as sums.
                unsafe { floats.add(&mut sums, residual.as_ptr().cast(), Dtype::F32) };
            }
            let mut padded = vec![0.0; start];
            padded.extend(&sums);
            non_finite += self.encoded(&mut code, &to_bytes(&padded), Dtype::F32, tile);
            if !is_kept {
                let mut decoded = to_floats(&self.decoded(&code, Dtype::F32, tile));
                // SAFETY: there is room for as many residuals as sums.
                unsafe { floats.write_loss(residual.as_mut_ptr().cast(), &sums, &mut decoded) };
            }
        }
        (code, to_bytes(&residual), non_finite)
    }

    /// Returns memory for the code, with a pattern that shows what was written. Zero is a frequent code.
    fn empty_code(&self) -> Vec<u8> {
        vec![0xe7; self.code_bytes]
    }

    /// Adds encoded elements, finishes the sums and encodes them, as a call does. Returns the code and the results.
    fn combine(&self, src: &[u8], dtype: Dtype, other: &[u8], divisor: Option<f32>) -> (Vec<u8>, Vec<u8>, NonFinite) {
        let mut sums = to_floats(&self.decode_add(other, &read(dtype, src)));
        Floats::default().finish(&mut sums, divisor, self.tensor);
        let (code, non_finite) = self.encode(&to_bytes(&sums), Dtype::F32);
        let results = self.decode(&code, self.tensor);
        (code, results, non_finite)
    }

    fn span(&self, values: &Memory, code: &Memory, sums: Option<&Memory>) -> Span {
        let Place { count, tile, first, .. } = self.place;
        Span {
            values: values.address(),
            code: code.address() + HEADER_BYTES as u64,
            sums: sums.map_or(0, Memory::address),
            other: 0,
            elements: count as u64,
            first,
            key: self.key.into(),
            tile: tile as u32,
            stride: self.stride as u32,
        }
    }
}

/// Memory of one span during a launch.
struct Used {
    values: Memory,
    code: Memory,
    sums: Option<Memory>,
}

/// Memory of one span that combines: the code of an operand, and whether the results replace the values.
struct Combined {
    used: Used,
    other: Memory,
    is_in_place: bool,
}

/// Launches a kernel on all cases at once and returns the memory of each, and the counters.
fn launch(
    kernels: &HostKernels,
    kernel: Kernel,
    cases: &[Case],
    keeps_zeros: bool,
    order: Order,
    mut make: impl FnMut(usize, &Case) -> Used,
) -> (Vec<Used>, NonFinite) {
    let used: Vec<Used> = cases.iter().enumerate().map(|(index, case)| make(index, case)).collect();
    let counters = Memory::new(&[0; 16], 0);
    let spans: Vec<Span> =
        cases.iter().zip(&used).map(|(case, used)| case.span(&used.values, &used.code, used.sums.as_ref())).collect();
    let mut memory: Vec<&Memory> = vec![&counters];
    for Used { values, code, sums } in &used {
        memory.extend([values, code].into_iter().chain(sums));
    }
    let options = Options { counters: counters.address(), divisor: None, keeps_zeros };
    kernels.run(kernel, &spans, &options, &memory, order);
    let count = |at: usize| u64::from_le_bytes(counters.content()[at..at + 8].try_into().unwrap()) as usize;
    let non_finite = NonFinite { not_finite: count(0), too_large: count(8) };
    (used, non_finite)
}

/// Launches a kernel that combines, on all cases at once.
fn launch_combined(
    kernels: &HostKernels,
    kernel: Kernel,
    cases: &[Case],
    divisor: Option<f32>,
    order: Order,
    combined: &[Combined],
) -> NonFinite {
    let counters = Memory::new(&[0; 16], 0);
    let span = |(case, Combined { used, other, is_in_place }): (&Case, &Combined)| {
        let span = case.span(&used.values, &used.code, used.sums.as_ref());
        let results = if *is_in_place { used.values.address() } else { span.sums };
        Span { other: other.address() + HEADER_BYTES as u64, sums: results, ..span }
    };
    let spans: Vec<Span> = cases.iter().zip(combined).map(span).collect();
    let mut memory: Vec<&Memory> = vec![&counters];
    for Combined { used: Used { values, code, sums }, other, .. } in combined {
        memory.extend([values, code, other].into_iter().chain(sums));
    }
    let options = Options { counters: counters.address(), divisor, keeps_zeros: false };
    kernels.run(kernel, &spans, &options, &memory, order);
    let count = |at: usize| u64::from_le_bytes(counters.content()[at..at + 8].try_into().unwrap()) as usize;
    NonFinite { not_finite: count(0), too_large: count(8) }
}

/// Panics at the first byte that differs.
fn assert_same(what: &str, ours: &[u8], expected: &[u8]) {
    if let Some(at) = (0..expected.len()).find(|&at| ours[at] != expected[at]) {
        let end = expected.len().min(at + 16);
        panic!("{what}: byte {at} of {}: {:02x?}, expected {:02x?}", ours.len(), &ours[at..end], &expected[at..end]);
    }
    assert_eq!(ours.len(), expected.len(), "{what}");
}

/// Like [`assert_same`] for float32, but every NaN equals every other.
fn assert_same_numbers(what: &str, ours: &[u8], expected: &[u8]) {
    let (ours, expected) = (to_floats(ours), to_floats(expected));
    for (at, (a, b)) in ours.iter().zip(&expected).enumerate() {
        assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{what}: element {at}: {a:e}, expected {b:e}");
    }
}

/// Returns the places of spans for a codec: whole and incomplete tiles, incomplete buckets, starts away from 0, beyond
/// the end of the random numbers' counter, and misaligned memory.
fn places(codec: &dyn Codec, bucket: usize, tensor: Dtype) -> Vec<Place> {
    let grain = codec.grain().max(8);
    let tile = (MOST_TILE / grain).clamp(1, 1 + 3000 / grain) * grain;
    // The counter of random numbers ends within the second tile.
    let near_end = (1u64 << 34) / tile as u64 * tile as u64 - tile as u64;
    let most = MOST_TILE / grain * grain;
    let off = usize::from(tensor != Dtype::F32);
    vec![
        Place { count: 2 * tile + tile / 2 + 5, tile, first: 0, values_off: 0, code_off: 0 },
        Place { count: 3 * tile, tile, first: near_end, values_off: 0, code_off: 8 },
        Place { count: bucket.min(3 * tile) + 1, tile, first: 7 * tile as u64, values_off: 1, code_off: 0 },
        Place { count: most + 8, tile: most, first: (3 * grain) as u64, values_off: 0, code_off: 0 },
        Place { count: 3, tile, first: 0, values_off: 2 + off, code_off: 8 },
        Place { count: 9, tile: most, first: most as u64, values_off: 4, code_off: 8 },
    ]
}

fn key(index: usize) -> RngKey {
    let key = RngKey::keyed(&[5, index as u64]);
    let world = [3, 1, 300, 8, 2, 128][index % 6];
    if index == 1 { key } else { key.among(&[9, 2], Rank(world - 1), world) }
}

/// Checks all kernels of a codec for a type of tensor.
fn check(text: &str, tensor: Dtype) {
    let codec: Arc<dyn Codec> = parse(text).unwrap();
    let name = format!("{text} of {tensor}");
    let set = KernelSet::of_codec(codec.summary(), tensor).unwrap_or_else(|| panic!("{name} has kernels"));
    let kernels = HostKernels::compile(set);
    let bucket = (codec.summary().row().shared)(codec.summary().settings());
    let mut random = Random(codec.summary().word().into());
    let places = places(&*codec, bucket, tensor);
    let cases: Vec<Case> =
        places.iter().enumerate().map(|(index, &place)| Case::new(&*codec, tensor, place, key(index))).collect();
    let run = bucket.clamp(8, 1024);
    let floats: Vec<Vec<f32>> = cases.iter().map(|case| values(case.place.count, run, &mut random)).collect();

    check_encode(&name, &kernels, &cases, &floats, &mut random);
    check_feedback(&name, &kernels, &cases, &floats, &mut random);
    check_decode(&name, &kernels, &cases, &floats, &mut random);
    if set.kernels().contains(&Kernel::Combine) {
        check_combine(&name, &kernels, &cases, &floats, &mut random);
    }
}

/// Types of the values of a codec's kernels: the tensor's, and float32.
fn sources(tensor: Dtype) -> Vec<(Kernel, Kernel, Dtype)> {
    vec![(Kernel::Encode, Kernel::Feedback, tensor), (Kernel::EncodeSums, Kernel::FeedbackSums, Dtype::F32)]
}

fn check_encode(name: &str, kernels: &HostKernels, cases: &[Case], floats: &[Vec<f32>], random: &mut Random) {
    for (kernel, _, dtype) in sources(cases[0].tensor) {
        let src: Vec<Vec<u8>> = floats.iter().map(|values| elements(dtype, values, random)).collect();
        for order in [Order::Forward, Order::Reversed] {
            let (used, non_finite) = launch(kernels, kernel, cases, false, order, |index, case| Used {
                values: Memory::constant(&src[index], case.place.values_off * dtype.size_bytes()),
                code: Memory::new(&case.empty_code(), case.place.code_off),
                sums: None,
            });
            let mut expected_non_finite = NonFinite::default();
            for (index, case) in cases.iter().enumerate() {
                let (expected, counted) = case.encode(&src[index], dtype);
                expected_non_finite += counted;
                assert_same(&format!("{name}: {kernel:?}, span {index}"), used[index].code.content(), &expected);
            }
            assert_eq!(non_finite, expected_non_finite, "{name}: {kernel:?}");
        }
    }
}

fn check_feedback(name: &str, kernels: &HostKernels, cases: &[Case], floats: &[Vec<f32>], random: &mut Random) {
    for (_, kernel, dtype) in sources(cases[0].tensor) {
        let mut src = Vec::new();
        let mut residuals = Vec::new();
        for (case, values) in cases.iter().zip(floats) {
            let mut values = values.clone();
            canonical(&mut values);
            // The second tile is zeros of both signs.
            let tile = case.place.tile;
            if let Some(second) = values.get_mut(tile..) {
                second.iter_mut().take(tile).for_each(|value| *value = [0.0, -0.0][random.below(2)]);
            }
            // Shares of the values, so that tiny ones stay tiny; numbers for zeros and what is not finite.
            let residual = |value: &f32| match value.abs() {
                0.0 => random.number() * 0.01,
                _ if value.is_finite() => value * 0.1 * random.number(),
                _ => random.number(),
            };
            residuals.push(values.iter().map(residual).collect::<Vec<f32>>());
            src.push(written(dtype, &values));
        }
        for (keeps_zeros, order) in [(false, Order::Forward), (true, Order::Reversed)] {
            let (used, non_finite) = launch(kernels, kernel, cases, keeps_zeros, order, |index, case| Used {
                values: Memory::constant(&src[index], case.place.values_off * dtype.size_bytes()),
                code: Memory::new(&case.empty_code(), case.place.code_off),
                sums: Some(Memory::new(&to_bytes(&residuals[index]), 4 * (case.place.code_off / 8))),
            });
            let mut expected_non_finite = NonFinite::default();
            for (index, case) in cases.iter().enumerate() {
                let what = format!("{name}: {kernel:?} ({keeps_zeros}), span {index}");
                let (code, residual, counted) = case.feedback(&src[index], dtype, &residuals[index], keeps_zeros);
                expected_non_finite += counted;
                assert_same(&what, used[index].code.content(), &code);
                let ours = used[index].sums.as_ref().map_or(&[][..], Memory::content);
                assert_same(&format!("{what}, residual"), ours, &residual);
            }
            assert_eq!(non_finite, expected_non_finite, "{name}: {kernel:?}");
        }
        check_flags(name, kernels, kernel, dtype, cases, random);
    }
}

/// Checks that residuals of zeros are used if a flag says so, and stay if not.
fn check_flags(name: &str, kernels: &HostKernels, kernel: Kernel, dtype: Dtype, cases: &[Case], random: &mut Random) {
    let flags = Memory::constant(&[0, 1], 3);
    let mut residual = |case: &Case| (0..case.place.count).map(|_| 0.01 * random.number()).collect::<Vec<f32>>();
    for case in cases {
        let (src, residual) = (vec![0; case.place.count * dtype.size_bytes()], residual(case));
        for is_used in [false, true] {
            let (values, code) = (Memory::constant(&src, 0), Memory::new(&case.empty_code(), case.place.code_off));
            let sums = Memory::new(&to_bytes(&residual), 0);
            let other = flags.address() + u64::from(is_used);
            let span = Span { other, ..case.span(&values, &code, Some(&sums)) };
            kernels.run(kernel, &[span], &Options::default(), &[&values, &code, &sums, &flags], Order::Forward);
            // A residual of zeros that stays is what tiles of zeros keep.
            let (expected, lost, _) = case.feedback(&src, dtype, &residual, !is_used);
            assert_same(&format!("{name}: {kernel:?}, used: {is_used}"), code.content(), &expected);
            assert_same(&format!("{name}: {kernel:?}, residual, used: {is_used}"), sums.content(), &lost);
        }
    }
}

fn check_decode(name: &str, kernels: &HostKernels, cases: &[Case], floats: &[Vec<f32>], random: &mut Random) {
    let tensor = cases[0].tensor;
    let sound = |index: usize, case: &Case, random: &mut Random| {
        case.encode(&elements(tensor, &floats[index], random), tensor).0
    };
    for is_sound in [true, false] {
        let codes: Vec<Vec<u8>> = cases
            .iter()
            .enumerate()
            .map(|(index, case)| if is_sound { sound(index, case, random) } else { random.bytes(case.code_bytes) })
            .collect();
        let order = if is_sound { Order::Forward } else { Order::Reversed };
        for (kernel, into) in [(Kernel::Decode, tensor), (Kernel::DecodeSums, Dtype::F32)] {
            let (used, _) = launch(kernels, kernel, cases, false, order, |index, case| Used {
                values: Memory::new(
                    &vec![0xe7; case.place.count * into.size_bytes()],
                    case.place.values_off * into.size_bytes(),
                ),
                code: Memory::constant(&codes[index], case.place.code_off),
                sums: None,
            });
            for (index, case) in cases.iter().enumerate() {
                let what = format!("{name}: {kernel:?} ({is_sound}), span {index}");
                let expected = case.decode(&codes[index], into);
                // Wrong bytes decode to any NaN, which 16-bit types make canonical.
                let compare = if is_sound || into != Dtype::F32 { assert_same } else { assert_same_numbers };
                compare(&what, used[index].values.content(), &expected);
            }
        }
        let (used, _) = launch(kernels, Kernel::DecodeAdd, cases, false, order, |index, case| Used {
            values: Memory::constant(&[], 0),
            code: Memory::constant(&codes[index], case.place.code_off),
            sums: Some(Memory::new(&to_bytes(&floats[index]), 4 * case.place.values_off)),
        });
        for (index, case) in cases.iter().enumerate() {
            let what = format!("{name}: DecodeAdd ({is_sound}), span {index}");
            let expected = case.decode_add(&codes[index], &floats[index]);
            let ours = used[index].sums.as_ref().map_or(&[][..], Memory::content);
            assert_same_numbers(&what, ours, &expected);
        }
    }
}

fn check_combine(name: &str, kernels: &HostKernels, cases: &[Case], floats: &[Vec<f32>], random: &mut Random) {
    let tensor = cases[0].tensor;
    let variants = [
        (Kernel::Combine, tensor, None, Order::Forward, true),
        (Kernel::CombineSums, Dtype::F32, Some(3.0), Order::Reversed, false),
    ];
    for (kernel, dtype, divisor, order, is_in_place) in variants {
        let mut src = Vec::new();
        let mut others = Vec::new();
        for (case, values) in cases.iter().zip(floats) {
            let mut values = values.clone();
            canonical(&mut values);
            src.push(written(dtype, &values));
            // Finite, since the sum of two infinities is another NaN on each processor.
            let finite = |value: f32| if value.is_finite() { value } else { random.number() };
            let other: Vec<f32> = values.iter().rev().map(|value| value * 0.75).map(finite).collect();
            others.push(case.encode(&written(tensor, &other), tensor).0);
        }
        let size = tensor.size_bytes();
        let combined: Vec<Combined> = (cases.iter().zip(&src).zip(&others))
            .map(|((case, src), other)| Combined {
                used: Used {
                    values: Memory::new(src, case.place.values_off * dtype.size_bytes()),
                    code: Memory::new(&case.empty_code(), case.place.code_off),
                    sums: (!is_in_place)
                        .then(|| Memory::new(&vec![0xe7; case.place.count * size], case.place.values_off * size)),
                },
                other: Memory::constant(other, 8 - case.place.code_off),
                is_in_place,
            })
            .collect();
        let non_finite = launch_combined(kernels, kernel, cases, divisor, order, &combined);
        let mut expected_non_finite = NonFinite::default();
        for (index, case) in cases.iter().enumerate() {
            let what = format!("{name}: {kernel:?}, span {index}");
            let (code, results, counted) = case.combine(&src[index], dtype, &others[index], divisor);
            expected_non_finite += counted;
            let Used { values, code: ours, sums } = &combined[index].used;
            assert_same(&what, ours.content(), &code);
            assert_same(&format!("{what}, results"), sums.as_ref().unwrap_or(values).content(), &results);
        }
        assert_eq!(non_finite, expected_non_finite, "{name}: {kernel:?}");
    }
}

#[test]
fn sums_of_unencoded_elements() {
    for tensor in FLOATS {
        let kernels = HostKernels::compile(KernelSet::of_sums(tensor).unwrap());
        let mut random = Random(77);
        let counts = [1, 3, 8, 4097, 9000];
        let floats: Vec<Vec<f32>> = counts.iter().map(|&count| values(count, 64, &mut random)).collect();
        let others: Vec<Vec<f32>> = counts.iter().map(|&count| values(count, 50, &mut random)).collect();
        let src: Vec<Vec<u8>> = floats.iter().map(|values| elements(tensor, values, &mut random)).collect();
        let size = tensor.size_bytes();
        let floats = Floats::default();
        for (kernel, divisor) in [
            (Kernel::Read, None),
            (Kernel::Add, None),
            (Kernel::Finish, None),
            (Kernel::Finish, Some(3.0)),
            (Kernel::Write, None),
            (Kernel::Copy, None),
        ] {
            let used: Vec<(Memory, Memory)> = (0..counts.len())
                .map(|at| (Memory::new(&src[at], at % 3 * size), Memory::new(&to_bytes(&others[at]), at % 2 * 4)))
                .collect();
            let span = |(values, sums): &(Memory, Memory), count: usize| Span {
                values: values.address(),
                sums: sums.address(),
                elements: count as u64,
                ..Span::default()
            };
            let spans: Vec<Span> = used.iter().zip(counts).map(|(used, count)| span(used, count)).collect();
            let memory: Vec<&Memory> = used.iter().flat_map(|(values, sums)| [values, sums]).collect();
            let options = Options { divisor, ..Options::default() };
            kernels.run(kernel, &spans, &options, &memory, Order::Forward);
            for at in 0..counts.len() {
                let (mut values, mut sums) = (src[at].clone(), others[at].clone());
                if kernel == Kernel::Copy {
                    // Elements of the tensor's type are written from the first byte on, with their bits.
                    let mut bytes = to_bytes(&sums);
                    bytes[..values.len()].copy_from_slice(&values);
                    assert_same(&format!("Copy of {tensor}, span {at}"), used[at].1.content(), &bytes);
                    continue;
                }
                // SAFETY: there are as many elements as sums.
                unsafe {
                    match kernel {
                        Kernel::Read => floats.read(&mut sums, values.as_ptr(), tensor),
                        Kernel::Add => floats.add(&mut sums, values.as_ptr(), tensor),
                        Kernel::Write => floats.write(values.as_mut_ptr(), tensor, &sums),
                        _ => floats.finish(&mut sums, divisor, tensor),
                    }
                }
                let what = format!("{kernel:?} of {tensor}, span {at}");
                assert_same(&what, used[at].0.content(), &values);
                // A copied NaN keeps its payload.
                let compare = if kernel == Kernel::Read { assert_same } else { assert_same_numbers };
                compare(&what, used[at].1.content(), &to_bytes(&sums));
            }
        }
    }
}

#[test]
fn squares_of_tiles_are_the_cpus_figures() {
    let mut random = Random(23);
    for tensor in FLOATS {
        let kernels = HostKernels::compile(KernelSet::of_sums(tensor).unwrap());
        // Tiles of whole and of incomplete groups of sixteen, and a last tile that is shorter.
        for (tile, count) in [(16_384, 40_000), (1000, 4001), (40, 40), (7, 20)] {
            let floats = [values(count, 96, &mut random), values(count, 96, &mut random)];
            let gradient = elements(tensor, &floats[0], &mut random);
            let (values, sums) = (Memory::constant(&gradient, 4), Memory::constant(&to_bytes(&floats[1]), 4));
            let pairs = Memory::new(&vec![0xee; count.div_ceil(tile) * 16], 8);
            let span = Span {
                sums: sums.address(),
                code: pairs.address(),
                elements: count as u64,
                tile: tile as u32,
                stride: 16,
                ..Span::default()
            };
            let runs = [(Kernel::Squares, &values, Order::Forward), (Kernel::Squares, &values, Order::Reversed)];
            for (kernel, values, order) in runs.into_iter().chain([(Kernel::SquaresOfSums, &sums, Order::Forward)]) {
                let span = Span { values: values.address(), ..span };
                kernels.run(kernel, &[span], &Options::default(), &[values, &sums, &pairs], order);
                let gradient = if kernel == Kernel::Squares { read(tensor, &gradient) } else { floats[1].clone() };
                let tiles = gradient.chunks(tile).zip(floats[1].chunks(tile));
                let of_tile = |(a, b): (&[f32], &[f32])| [a, b].map(|of| Floats::default().squares(of));
                for (index, (expected, ours)) in tiles.map(of_tile).zip(pairs.content().chunks(16)).enumerate() {
                    let ours = [0, 8].map(|at| f64::from_le_bytes(ours[at..at + 8].try_into().unwrap()));
                    let is_same = |(a, b): (f64, f64)| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                    assert!(
                        expected.into_iter().zip(ours).all(is_same),
                        "{tensor} {tile} {index}: {ours:?} {expected:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn codecs_without_kernels_are_named() {
    for name in missing() {
        println!("no kernels: {name}");
    }
    assert!(missing().len() < CODECS.len());
}

/// Checks a list of codecs, each with its type of tensor.
fn check_all(cases: &[(&str, Dtype)]) {
    cases.iter().for_each(|(text, tensor)| check(text, *tensor));
}

const F32: Dtype = Dtype::F32;
const F16: Dtype = Dtype::F16;
const BF16: Dtype = Dtype::BF16;

#[test]
fn maxmin() {
    check_all(&[
        ("maxmin:1,bucket=64,rounding=stochastic", F32),
        ("maxmin:1,bucket=40,meta=float16,rounding=correlated,skip_incomplete", BF16),
        ("maxmin:2,bucket=8,meta=bfloat16,rounding=nearest", F16),
        ("maxmin:2,bucket=1024,rounding=correlated", F32),
        ("maxmin:3,bucket=24,rounding=nearest,skip_incomplete", F32),
        ("maxmin:3,bucket=2048,meta=float16,rounding=stochastic", F16),
        ("maxmin:4,bucket=512", F32),
        ("maxmin:4,bucket=128,meta=float16,rounding=stochastic,skip_incomplete", F32),
        ("maxmin:4,bucket=4096,meta=bfloat16,rounding=correlated", BF16),
        ("maxmin:5,bucket=16,meta=float16,rounding=nearest", BF16),
        ("maxmin:5,bucket=8192,rounding=stochastic,skip_incomplete", F32),
        ("maxmin:6,bucket=256,meta=bfloat16,rounding=nearest,skip_incomplete", F16),
        ("maxmin:6,bucket=1096,rounding=correlated", F32),
        ("maxmin:7,bucket=1000,meta=float16,rounding=correlated", F32),
        ("maxmin:7,bucket=32,rounding=stochastic,skip_incomplete", BF16),
        ("maxmin:8,bucket=512,rounding=nearest", F16),
        ("maxmin:8,bucket=8184,meta=bfloat16,rounding=nearest,skip_incomplete", F32),
        ("maxmin:8,bucket=72,meta=float16,rounding=correlated", BF16),
    ]);
}

#[test]
fn absmax() {
    check_all(&[
        ("absmax:2,bucket=8,meta=float16,rounding=correlated", F32),
        ("absmax:2,bucket=512,rounding=stochastic,skip_incomplete", F16),
        ("absmax:3,bucket=264,meta=bfloat16,rounding=nearest", BF16),
        ("absmax:4,bucket=512,meta=float16", F32),
        ("absmax:4,bucket=64,rounding=correlated,skip_incomplete", BF16),
        ("absmax:5,bucket=2048,meta=bfloat16,rounding=stochastic", F32),
        ("absmax:6,bucket=120,meta=float16,rounding=nearest,skip_incomplete", F16),
        ("absmax:7,bucket=8192,rounding=nearest", F32),
        ("absmax:8,bucket=1024,meta=bfloat16,rounding=correlated,skip_incomplete", F32),
        ("absmax:8,bucket=128,rounding=stochastic", F16),
    ]);
}

#[test]
fn casts() {
    let names = ["raw", "bf16", "fp16"];
    names.iter().for_each(|name| FLOATS.iter().for_each(|tensor| check(name, *tensor)));
}

#[test]
fn scaled() {
    let names = ["e4m3", "e5m2", "mxfp8", "mxfp8_e5m2", "mxfp4", "nvfp4"];
    names.iter().for_each(|name| FLOATS.iter().for_each(|tensor| check(name, *tensor)));
}

#[test]
fn sign() {
    check_all(&[
        ("sign,bucket=8,meta=float16", F32),
        ("sign,bucket=24", BF16),
        ("sign,bucket=128,meta=bfloat16", F16),
        ("sign,bucket=512", F32),
        ("sign,bucket=1000,meta=float16", BF16),
        ("sign,bucket=2048,meta=bfloat16", F32),
        ("sign,bucket=8192,meta=float16", F16),
        ("sign,bucket=8184", F32),
    ]);
}

#[test]
fn hadamard() {
    check_all(&[
        ("hadamard:1,bucket=64,meta=float16,rounding=correlated", F32),
        ("hadamard:2,bucket=128,rounding=stochastic,skip_incomplete", F16),
        ("hadamard:3,bucket=256,meta=bfloat16,rounding=nearest", BF16),
        ("hadamard:4,bucket=512", F32),
        ("hadamard:4,bucket=1024,meta=float16,rounding=stochastic,skip_incomplete", BF16),
        ("hadamard:5,bucket=2048,rounding=correlated", F16),
        ("hadamard:6,bucket=4096,meta=bfloat16,rounding=stochastic", F32),
        ("hadamard:8,bucket=8192,rounding=nearest,skip_incomplete", F32),
        ("hadamard:7,bucket=64,meta=float16,rounding=nearest,skip_incomplete", BF16),
    ]);
}

#[test]
fn topk() {
    check_all(&[
        ("topk:1,bucket=8,meta=float16", F32),
        ("topk:1,bucket=8192", BF16),
        ("topk:2,bucket=24,meta=bfloat16", F16),
        ("topk:3,bucket=128", F32),
        ("topk:4,bucket=512,meta=float16", BF16),
        ("topk:5,bucket=1000,meta=bfloat16", F32),
        ("topk:6,bucket=1024", F16),
        ("topk:7,bucket=2048,meta=float16", F32),
        ("topk:8,bucket=4104,meta=bfloat16", F32),
    ]);
}

/// Returns every choice of settings of a codec but buckets, which take turns.
fn matrix_of(row: &accl_kernels::codec::Row) -> Vec<String> {
    let buckets: &[u32] = match row.buckets {
        accl_kernels::codec::Buckets::PowersOfTwo => &[64, 128, 256, 512, 1024, 2048, 4096, 8192],
        accl_kernels::codec::Buckets::MultiplesOf8 => {
            &[8, 16, 24, 32, 64, 104, 128, 256, 264, 512, 1000, 1024, 1032, 2048, 2056, 4096, 4104, 8184, 8192]
        }
    };
    let mut texts = vec![if row.has(Setting::Bits) { String::new() } else { row.name.to_owned() }];
    let mut with = |setting: Setting, choices: Vec<String>| {
        if row.has(setting) {
            texts = texts.iter().flat_map(|text| choices.iter().map(move |choice| format!("{text}{choice}"))).collect();
        }
    };
    with(Setting::Bits, row.bits.clone().map(|bits| format!("{}:{bits}", row.name)).collect());
    let settings = |choices: &[&str]| choices.iter().map(|choice| (*choice).to_owned()).collect();
    with(Setting::Meta, settings(&[",meta=float32", ",meta=float16", ",meta=bfloat16"]));
    with(Setting::Rounding, settings(&[",rounding=nearest", ",rounding=stochastic", ",rounding=correlated"]));
    with(Setting::SkipIncomplete, settings(&["", ",skip_incomplete"]));
    let with_bucket = |(index, text): (usize, String)| match row.has(Setting::Bucket) {
        true => format!("{text},bucket={}", buckets[index % buckets.len()]),
        false => text,
    };
    texts.into_iter().enumerate().map(with_bucket).collect()
}

#[test]
fn matrix() {
    #[expect(clippy::disallowed_methods, reason = "a variable of this test alone")]
    let Ok(every) = std::env::var("ACCL_GPU_MATRIX") else {
        println!("the whole matrix is not checked: ACCL_GPU_MATRIX is not set");
        return;
    };
    let every: usize = every.parse().expect("ACCL_GPU_MATRIX is a number");
    let rows = CODECS.iter().filter(|row| !missing().contains(&row.name));
    let all = rows.flat_map(matrix_of).flat_map(|text| FLOATS.map(|tensor| (text.clone(), tensor)));
    for (text, tensor) in all.step_by(every) {
        println!("{text} of {tensor}");
        check(&text, tensor);
    }
}

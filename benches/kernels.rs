//! Reductions, packing and unpacking, by dtype, operator and instruction set, against a copy and a plain `y += x`.
//!
//! Ids are `reduce_pair/isa/op/dtype/level`, likewise `reduce_many` (of four) and `scale`, `pack/shape/dtype/level`,
//! and `reference/what/level`. Bytes count the result. `L2` means that all buffers of the call together fit into that
//! cache.

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Duration;

use accl_benches::memory_level::MemoryLevel;
use accl_benches::pin::{self, Pinned};
use accl_benches::sweep::{self, Sweep};
use accl_kernels::{Finish, Isa, Reducer, StridedView, available_isas, pack, scale_with_isa, supports, unpack};
use accl_types::{Dtype, ReduceOp};
use criterion::{BenchmarkId, Criterion, Throughput};

/// Number of sources of the reductions of many.
const MANY: usize = 4;

/// The buffers of all benches, aligned as words.
struct Buffers {
    sources: [Vec<u64>; MANY],
    result: Vec<u64>,
}

impl Buffers {
    fn new() -> Self {
        // Words that are small integers and small floats at once: no dtype meets NaN or denormals.
        let words = || (0..MemoryLevel::Dram.bytes() / 8).map(|i| 0x3f80_3f80_3f80_3f80 | (i as u64 & 1)).collect();
        Self { sources: std::array::from_fn(|_| words()), result: words() }
    }

    fn source(&self, index: usize) -> *const u8 {
        self.sources[index].as_ptr().cast()
    }

    fn result(&mut self) -> *mut u8 {
        self.result.as_mut_ptr().cast()
    }
}

fn main() -> ExitCode {
    let sweep = Sweep::chosen();
    let _pinned = Pinned::new(0, 1, &pin::cores());
    let mut criterion = sweep::criterion(Duration::from_millis(300));
    let mut buffers = Buffers::new();
    references(&mut criterion, &mut buffers);
    reductions(&mut criterion, &mut buffers, sweep);
    scales(&mut criterion, &mut buffers, sweep);
    packs(&mut criterion, &mut buffers, sweep);
    criterion.final_summary();
    ExitCode::SUCCESS
}

/// Measures the rate of memory for code that computes nothing or a plain sum.
fn references(criterion: &mut Criterion, buffers: &mut Buffers) {
    let mut group = criterion.benchmark_group("reference");
    for level in MemoryLevel::ALL {
        let bytes = level.bytes();
        group.throughput(Throughput::Bytes(bytes as u64));
        group.bench_function(BenchmarkId::new("memcpy", level.name()), |bencher| {
            bencher.iter(|| {
                let Buffers { sources, result } = &mut *buffers;
                result[..bytes / 8].copy_from_slice(black_box(&sources[0][..bytes / 8]));
            });
        });
        let (mut y, x) = (vec![0.0_f32; bytes / 4], vec![0.5_f32; bytes / 4]);
        group.bench_function(BenchmarkId::new("y+=x", level.name()), |bencher| {
            bencher.iter(|| black_box(&mut y).iter_mut().zip(black_box(&x)).for_each(|(y, x)| *y += x));
        });
    }
    group.finish();
}

/// Returns whether a combination belongs to the moderate set: sums of all types, other operators for the usual types,
/// and the slower instruction sets for the types that are summed most.
fn is_usual(isa: Isa, best: Isa, op: ReduceOp, dtype: Dtype) -> bool {
    let common = matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::I32);
    if isa == best { op == ReduceOp::Sum || common } else { op == ReduceOp::Sum && (common || dtype == Dtype::F16) }
}

fn reductions(criterion: &mut Criterion, buffers: &mut Buffers, sweep: Sweep) {
    let isas = available_isas();
    let best = isas[isas.len() - 1];
    for &isa in &isas {
        for &op in ReduceOp::ALL {
            for &dtype in Dtype::ALL {
                if supports(op, dtype) && (sweep == Sweep::Full || is_usual(isa, best, op, dtype)) {
                    for level in MemoryLevel::ALL {
                        reduction(criterion, buffers, (isa, op, dtype, level));
                    }
                }
            }
        }
    }
}

fn reduction(
    criterion: &mut Criterion,
    buffers: &mut Buffers,
    (isa, op, dtype, level): (Isa, ReduceOp, Dtype, MemoryLevel),
) {
    let reducer = Reducer::with_isa(op, dtype, 2, isa).unwrap_or_else(|error| panic!("{error}"));
    let count = level.bytes() / dtype.size_bytes();
    let id = |kind: &str| format!("{kind}/{isa}/{}/{dtype}", op.name().to_lowercase());

    let mut group = criterion.benchmark_group(id("reduce_pair"));
    group.throughput(Throughput::Bytes(level.bytes() as u64));
    group.bench_function(level.name(), |bencher| {
        let (dst, a, b) = (buffers.result(), buffers.source(0), buffers.source(1));
        // SAFETY: the three buffers hold the bytes of every level, do not overlap, and no other code uses them during
        // the call.
        bencher.iter(|| unsafe { reducer.pair(dst, black_box(a), black_box(b), count, Finish::Yes) });
    });
    group.finish();

    let mut group = criterion.benchmark_group(id("reduce_in_place"));
    group.throughput(Throughput::Bytes(level.bytes() as u64));
    group.bench_function(level.name(), |bencher| {
        let (dst, a) = (buffers.result(), buffers.source(0));
        // SAFETY: both buffers hold the bytes of every level, and no other code uses them; `pair` allows `dst` as an
        // operand.
        bencher.iter(|| unsafe { reducer.pair(dst, black_box(dst), black_box(a), count, Finish::No) });
    });
    group.finish();

    let mut group = criterion.benchmark_group(id("reduce_many"));
    group.throughput(Throughput::Bytes(level.bytes() as u64));
    group.bench_function(level.name(), |bencher| {
        let dst = buffers.result();
        let sources: [*const u8; MANY] = std::array::from_fn(|index| buffers.source(index));
        // SAFETY: the result and all sources hold the bytes of every level, do not overlap, and no other code uses
        // them.
        bencher.iter(|| unsafe { reducer.many(dst, black_box(&sources), count, Finish::Yes) });
    });
    group.finish();
}

fn scales(criterion: &mut Criterion, buffers: &mut Buffers, sweep: Sweep) {
    let isas = available_isas();
    for &isa in sweep.pick(&isas[isas.len() - 1..], &isas[..]) {
        for dtype in [Dtype::F16, Dtype::BF16, Dtype::F32, Dtype::F64] {
            for level in MemoryLevel::ALL {
                let mut group = criterion.benchmark_group(format!("scale/{isa}/{dtype}"));
                group.throughput(Throughput::Bytes(level.bytes() as u64));
                group.bench_function(level.name(), |bencher| {
                    let (dst, src) = (buffers.result(), buffers.source(0));
                    let count = level.bytes() / dtype.size_bytes();
                    // SAFETY: both buffers hold the bytes of every level, do not overlap, and no other code uses them.
                    bencher.iter(|| unsafe { scale_with_isa(isa, dtype, dst, black_box(src), count, 0.5) });
                });
                group.finish();
            }
        }
    }
}

/// Returns layouts to pack, of roughly `count` elements: name, sizes and strides. They span at most twice the memory.
fn shapes(count: i64) -> [(&'static str, [i64; 2], [i64; 2]); 4] {
    let side = 1 << (count.ilog2() / 2);
    let rows = count / side;
    [
        ("dense", [rows, side], [side, 1]),
        ("transposed", [rows, side], [1, rows]),
        ("rows", [rows / 2, side], [2 * side, 1]),
        ("every_second", [rows, side / 2], [side, 2]),
    ]
}

fn packs(criterion: &mut Criterion, buffers: &mut Buffers, sweep: Sweep) {
    let dtypes = [Dtype::F32, Dtype::BF16, Dtype::U8, Dtype::F64, Dtype::C128];
    for &dtype in &dtypes[..sweep.pick(2, dtypes.len())] {
        for level in MemoryLevel::ALL {
            for (name, sizes, strides) in shapes((level.bytes() / dtype.size_bytes()) as i64) {
                let dense = buffers.result();
                let view = |buffers: &mut Buffers| StridedView {
                    ptr: buffers.sources[0].as_mut_ptr().cast(),
                    dtype,
                    sizes: &sizes,
                    strides: &strides,
                    conj: false,
                    neg: false,
                };
                let view = view(buffers);
                let bytes = view.count() * dtype.size_bytes();

                let mut group = criterion.benchmark_group(format!("pack/{name}/{dtype}"));
                group.throughput(Throughput::Bytes(bytes as u64));
                // SAFETY: the view lies within a source, the result is as large, and no other code uses them.
                group.bench_function(level.name(), |bencher| bencher.iter(|| unsafe { pack(dense, black_box(&view)) }));
                group.finish();

                let mut group = criterion.benchmark_group(format!("unpack/{name}/{dtype}"));
                group.throughput(Throughput::Bytes(bytes as u64));
                group.bench_function(level.name(), |bencher| {
                    // SAFETY: the view lies within a source, `dense` holds as many bytes as the view, and no other code
                    // uses them.
                    bencher.iter(|| unsafe { unpack(black_box(&view), dense) });
                });
                group.finish();
            }
        }
    }
}

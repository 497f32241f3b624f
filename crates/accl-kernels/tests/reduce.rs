//! Every operator, dtype and instruction set against the naive oracle, bit for bit.

mod common;
#[path = "common/oracle.rs"]
mod oracle;

use accl_kernels::{Finish, Isa, Reducer, available_isas, supports};
use accl_types::{Dtype, DtypeClass, ErrorKind, ReduceOp};
use common::{Buffer, Random, elements};

const COUNTS: &[usize] = if cfg!(miri) { &[0, 3] } else { &[0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 64, 65, 1000] };
const MISALIGNMENTS: &[usize] = if cfg!(miri) { &[1] } else { &[0, 1, 8, 61] };
const WORLDS: &[u32] = &[1, 2, 3, 7, 17];

fn offered() -> impl Iterator<Item = (ReduceOp, Dtype)> {
    let pairs = ReduceOp::ALL.iter().flat_map(|&op| Dtype::ALL.iter().map(move |&dtype| (op, dtype)));
    pairs.filter(|&(op, dtype)| supports(op, dtype))
}

fn expected(op: ReduceOp, dtype: Dtype, srcs: &[&[u8]], divisor: Option<u32>) -> Vec<u8> {
    let size = dtype.size_bytes();
    (0..srcs[0].len() / size)
        .flat_map(|i| {
            let operands: Vec<&[u8]> = srcs.iter().map(|src| &src[i * size..][..size]).collect();
            oracle::reduce(op, dtype, &operands, divisor)
        })
        .collect()
}

#[track_caller]
fn assert_same(got: &[u8], want: &[u8], dtype: Dtype, case: &str) {
    let size = dtype.size_bytes();
    for (i, (got, want)) in got.chunks(size).zip(want.chunks(size)).enumerate() {
        assert_eq!(got, want, "{case}: element {i} (bytes in memory order)");
    }
}

#[derive(Clone, Copy, Debug)]
enum Alias {
    None,
    First,
    Second,
    Both,
}

#[test]
fn pair_equals_the_oracle_on_every_isa() {
    let mut random = Random(1);
    for (op, dtype) in offered() {
        for &count in COUNTS {
            let a = elements(dtype, count, &mut random);
            let b = elements(dtype, count, &mut random);
            for (finish, divisor) in [(Finish::No, None), (Finish::Yes, Some(WORLDS[count % WORLDS.len()]))] {
                let want = expected(op, dtype, &[&a, &b], divisor);
                let want_both = expected(op, dtype, &[&a, &a], divisor);
                for isa in available_isas() {
                    let reducer = Reducer::with_isa(op, dtype, divisor.unwrap_or(5), isa).unwrap();
                    for &misalignment in MISALIGNMENTS {
                        for alias in [Alias::None, Alias::First, Alias::Second, Alias::Both] {
                            let case = format!("{op} {dtype} {isa} x{count} {finish:?} +{misalignment} {alias:?}");
                            let dst = Buffer::new(&vec![0x5a; a.len()], misalignment);
                            let x = Buffer::new(&a, misalignment / 2);
                            let y = Buffer::new(&b, (misalignment + 3) % 64);
                            let (to, from, other) = match alias {
                                Alias::None => (dst.ptr(), x.ptr(), y.ptr()),
                                Alias::First => (x.ptr(), x.ptr(), y.ptr()),
                                Alias::Second => (y.ptr(), x.ptr(), y.ptr()),
                                Alias::Both => (x.ptr(), x.ptr(), x.ptr()),
                            };
                            // SAFETY: the buffers have `count` elements and overlap only as `pair` allows.
                            unsafe { reducer.pair(to, from, other, count, finish) };
                            let (got, want) = match alias {
                                Alias::None => (dst.bytes(), &want),
                                Alias::First => (x.bytes(), &want),
                                Alias::Second => (y.bytes(), &want),
                                Alias::Both => (x.bytes(), &want_both),
                            };
                            assert_same(got, want, dtype, &case);
                            for buffer in [&dst, &x, &y] {
                                buffer.check_guards();
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn many_equals_the_oracle_on_every_isa() {
    let mut random = Random(2);
    for (op, dtype) in offered() {
        for sources in if cfg!(miri) { 1..=3 } else { 1..=9 } {
            for &count in [0, 1, 5, 8, 65, 511, 512, 513, 1111].iter().filter(|&&count| !cfg!(miri) || count < 9) {
                let data: Vec<Vec<u8>> = (0..sources).map(|_| elements(dtype, count, &mut random)).collect();
                let views: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
                let divisor = sources as u32;
                let finish = if random.below(2) == 0 { Finish::Yes } else { Finish::No };
                let want = expected(op, dtype, &views, (finish == Finish::Yes).then_some(divisor));
                // The destination is a buffer of its own, or one of the sources.
                let dst_at = random.below(sources as u64 + 1) as usize;
                for isa in available_isas() {
                    let case = format!("{op} {dtype} {isa} x{count} of {sources} into {dst_at} {finish:?}");
                    let mut buffers: Vec<Buffer> =
                        data.iter().enumerate().map(|(i, bytes)| Buffer::new(bytes, 7 * i % 64)).collect();
                    buffers.push(Buffer::new(&vec![0x5a; views[0].len()], 3));
                    let srcs: Vec<*const u8> = buffers.iter().map(|buffer| buffer.ptr().cast_const()).collect();
                    let reducer = Reducer::with_isa(op, dtype, divisor, isa).unwrap();
                    // SAFETY: the buffers have `count` elements; the destination does not overlap a source or is equal
                    // to it.
                    unsafe { reducer.many(srcs[dst_at].cast_mut(), &srcs[..sources], count, finish) };
                    assert_same(buffers[dst_at].bytes(), &want, dtype, &case);
                    for (i, buffer) in buffers.iter().enumerate() {
                        buffer.check_guards();
                        assert!(
                            i == dst_at || i == sources || buffer.bytes() == views[i],
                            "{case}: source {i} changed"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn many_without_sources_writes_nothing() {
    let dst = Buffer::new(&[1, 2, 3, 4], 0);
    let reducer = Reducer::new(ReduceOp::Sum, Dtype::F32, 2).unwrap();
    // SAFETY: `dst` has room for one element, and there are no sources.
    unsafe { reducer.many(dst.ptr(), &[], 1, Finish::Yes) };
    assert_eq!(dst.bytes(), [1, 2, 3, 4]);
}

fn reduce_f32(op: ReduceOp, a: f32, b: f32, isa: Isa) -> [f32; 20] {
    let (a, b, mut dst) = ([a; 20], [b; 20], [0f32; 20]);
    let reducer = Reducer::with_isa(op, Dtype::F32, 1, isa).unwrap();
    // SAFETY: all three hold 20 elements and do not overlap.
    unsafe { reducer.pair(dst.as_mut_ptr().cast(), a.as_ptr().cast(), b.as_ptr().cast(), 20, Finish::No) };
    dst
}

#[test]
fn nan_comes_out_canonical_whatever_went_in() {
    let nans = [f32::NAN, -f32::NAN, f32::from_bits(0x7f80_0001), f32::from_bits(0xffd2_3456)];
    let mut cases: Vec<(f32, f32)> = nans.iter().flat_map(|&a| nans.iter().map(move |&b| (a, b))).collect();
    cases.extend(nans.iter().flat_map(|&nan| [(nan, 1.0), (1.0, nan), (nan, f32::NEG_INFINITY)]));
    for (a, b) in cases {
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
            for isa in available_isas() {
                for got in reduce_f32(op, a, b, isa) {
                    assert_eq!(got.to_bits(), 0x7fc0_0000, "{op} of {a:?} and {b:?} on {isa}");
                }
            }
        }
    }
    for isa in available_isas() {
        let got = reduce_f32(ReduceOp::Sum, f32::INFINITY, f32::NEG_INFINITY, isa);
        assert!(got.iter().all(|x| x.to_bits() == 0x7fc0_0000), "inf - inf on {isa}");
    }
}

#[test]
fn minus_zero_is_below_zero() {
    for isa in available_isas() {
        for (a, b) in [(0.0, -0.0), (-0.0, 0.0)] {
            assert!(reduce_f32(ReduceOp::Min, a, b, isa).iter().all(|x| x.to_bits() == (-0f32).to_bits()), "{isa}");
            assert!(reduce_f32(ReduceOp::Max, a, b, isa).iter().all(|x| x.to_bits() == 0), "{isa}");
        }
    }
}

#[test]
fn denormals_survive() {
    let tiny = f32::from_bits(3);
    for isa in available_isas() {
        assert!(reduce_f32(ReduceOp::Sum, tiny, tiny, isa).iter().all(|x| x.to_bits() == 6), "{isa}");
        assert!(reduce_f32(ReduceOp::Max, tiny, 0.0, isa).iter().all(|x| x.to_bits() == 3), "{isa}");
    }
}

#[test]
fn denormals_survive_in_a_thread_that_flushes_them() {
    let sum = |isa| reduce_f32(ReduceOp::Sum, f32::from_bits(3), f32::from_bits(4), isa);
    let got: Vec<_> = common::with_flushed_denormals(|| available_isas().into_iter().map(sum).collect());
    assert!(got.iter().flatten().all(|x| x.to_bits() == 7));
}

#[test]
fn sixteen_bit_floats_round_once_in_many() {
    // 2048 + 1 is a tie that rounds to even in float16; rounding after each step would lose all eight ones.
    let srcs: Vec<[u16; 9]> =
        (0..9).map(|i| [half::f16::from_f32(if i == 0 { 2048.0 } else { 1.0 }).to_bits(); 9]).collect();
    let pointers: Vec<*const u8> = srcs.iter().map(|src| src.as_ptr().cast()).collect();
    for isa in available_isas() {
        let mut dst = [0u16; 9];
        let reducer = Reducer::with_isa(ReduceOp::Sum, Dtype::F16, 9, isa).unwrap();
        // SAFETY: all hold nine elements and do not overlap.
        unsafe { reducer.many(dst.as_mut_ptr().cast(), &pointers, 9, Finish::Yes) };
        assert_eq!(dst.map(|bits| half::f16::from_bits(bits).to_f32()), [2056.0; 9], "{isa}");
    }
}

#[test]
fn every_sixteen_bit_pattern_gives_the_same_bits_on_every_isa() {
    let step = if cfg!(miri) { 4099 } else { 1 };
    let all: Vec<u16> = (0..=u16::MAX).step_by(step).collect();
    let partners =
        [0x0000, 0x8000, 0x0001, 0x03ff, 0x3c00, 0x7bff, 0x7c00, 0xfc00, 0x7c01, 0xffff, 0x3f80, 0x7f7f, 0x0080];
    for dtype in [Dtype::F16, Dtype::BF16] {
        for op in [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max] {
            for partner in partners {
                let others = vec![partner; all.len()];
                let results: Vec<Vec<u16>> = available_isas()
                    .into_iter()
                    .map(|isa| {
                        let mut dst = vec![0; all.len()];
                        let reducer = Reducer::with_isa(op, dtype, 3, isa).unwrap();
                        let (to, a, b) = (dst.as_mut_ptr().cast(), all.as_ptr().cast(), others.as_ptr().cast());
                        // SAFETY: all have the same length, and do not overlap.
                        unsafe { reducer.pair(to, a, b, all.len(), Finish::Yes) };
                        dst
                    })
                    .collect();
                for (isa, result) in available_isas().into_iter().zip(&results) {
                    let differs = result.iter().zip(&results[0]).position(|(got, want)| got != want);
                    assert_eq!(differs.map(|i| all[i]), None, "{op} {dtype} with {partner:#06x} on {isa}");
                }
            }
        }
    }
}

#[test]
fn the_average_of_integers_is_the_sum_divided_towards_zero() {
    macro_rules! check {
        ($type:ty, $dtype:expr) => {
            // Every remainder, the ends of the range, and sums that wrap before the division, as SUM does.
            let ends = [<$type>::MIN, <$type>::MIN + 1, <$type>::MAX - 1, <$type>::MAX];
            let small = (0..100).map(|i| <$type>::MIN.wrapping_add(i).wrapping_mul(3)).chain(0..100);
            let a: Vec<$type> = small.chain(ends).chain(ends).collect();
            let b: Vec<$type> = a.iter().rev().copied().collect();
            for (isa, world) in available_isas().into_iter().flat_map(|isa| [1, 2, 3, 7, 200, 70_000].map(|n| (isa, n)))
            {
                let mut dst: Vec<$type> = vec![0; a.len()];
                let reducer = Reducer::with_isa(ReduceOp::Avg, $dtype, world, isa).unwrap();
                let (to, x, y) = (dst.as_mut_ptr().cast(), a.as_ptr().cast(), b.as_ptr().cast());
                // SAFETY: all have the same length, and do not overlap.
                unsafe { reducer.pair(to, x, y, a.len(), Finish::Yes) };
                for ((&a, &b), &got) in a.iter().zip(&b).zip(&dst) {
                    let want = i128::from(a.wrapping_add(b)) / i128::from(world);
                    assert_eq!(i128::from(got), want, "({a} + {b}) / {world} of {} on {isa}", $dtype);
                }
            }
        };
    }
    check!(u8, Dtype::U8);
    check!(i8, Dtype::I8);
    check!(u16, Dtype::U16);
    check!(i16, Dtype::I16);
    check!(u32, Dtype::U32);
    check!(i32, Dtype::I32);
    check!(u64, Dtype::U64);
    check!(i64, Dtype::I64);
}

#[test]
fn average_divides_before_it_rounds() {
    // In float16 the sum overflows, but its half does not.
    let big = [half::f16::MAX.to_bits(); 11];
    for isa in available_isas() {
        let mut dst = [0u16; 11];
        let reducer = Reducer::with_isa(ReduceOp::Avg, Dtype::F16, 2, isa).unwrap();
        // SAFETY: both hold eleven elements and do not overlap.
        unsafe { reducer.pair(dst.as_mut_ptr().cast(), big.as_ptr().cast(), big.as_ptr().cast(), 11, Finish::Yes) };
        assert_eq!(dst, big, "{isa}");
        // SAFETY: `dst` and `big` hold eleven elements and do not overlap.
        unsafe { reducer.pair(dst.as_mut_ptr().cast(), big.as_ptr().cast(), big.as_ptr().cast(), 11, Finish::No) };
        assert_eq!(dst, [half::f16::INFINITY.to_bits(); 11], "{isa}");
    }
}

#[test]
fn what_is_offered_follows_the_class_of_the_dtype() {
    for &op in ReduceOp::ALL {
        for &dtype in Dtype::ALL {
            let want = match dtype.class() {
                DtypeClass::Bool => !matches!(op, ReduceOp::Avg | ReduceOp::PremulSum),
                DtypeClass::Integer => op != ReduceOp::PremulSum,
                DtypeClass::Float16 | DtypeClass::Float => {
                    !matches!(op, ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor)
                }
                DtypeClass::Complex => {
                    matches!(op, ReduceOp::Sum | ReduceOp::Avg | ReduceOp::Product | ReduceOp::PremulSum)
                }
                DtypeClass::Opaque => false,
            };
            assert_eq!(supports(op, dtype), want, "{op} {dtype}");
            for isa in available_isas() {
                assert_eq!(Reducer::with_isa(op, dtype, 2, isa).is_ok(), want, "{op} {dtype} {isa}");
            }
        }
    }
}

#[test]
fn a_refusal_names_the_operator_the_dtype_and_what_is_accepted() {
    let error = Reducer::new(ReduceOp::Avg, Dtype::Bool, 2).unwrap_err();
    assert_eq!(error.kind, ErrorKind::Unsupported);
    assert_eq!(
        error.message,
        "reduce operator AVG is not supported for bool; it takes uint8, int8, uint16, int16, uint32, int32, uint64, int64, \
         float16, bfloat16, float32, float64, complex64, complex128"
    );
}

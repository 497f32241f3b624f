//! Codecs against an oracle written from the format's description, on every instruction set; their error on known data.

mod common;

use accl_kernels::codec::{Codec, Floats, NonFinite, RngKey, Rounding, Settings, Slice, Sums, codec};
use accl_kernels::{Isa, available_isas};
use accl_types::{Dtype, ErrorKind, Rank};
use common::Random;
use common::codecs::{
    FLOATS, alike, bytes_of, data, data_values, decode, encode, from_f32, through, to_f32, values_of,
};
use proptest::prelude::*;
use std::collections::HashSet;
use std::sync::{Arc, OnceLock};

fn max_min(settings: Settings, isa: Isa) -> Arc<dyn Codec> {
    codec("maxmin").unwrap().build_with_isa(&settings, isa).unwrap()
}

/// Returns every finite value of a 16-bit type, in order.
fn all_of(dtype: Dtype) -> &'static [f32] {
    static ALL: [OnceLock<Vec<f32>>; 2] = [OnceLock::new(), OnceLock::new()];
    ALL[usize::from(dtype == Dtype::F16)].get_or_init(|| {
        let mut all: Vec<f32> = (0..=u16::MAX).map(|bits| to_f32(dtype, &bits.to_le_bytes())).collect();
        all.retain(|value| value.is_finite());
        all.sort_by(f32::total_cmp);
        all
    })
}

/// Returns unit and min of a bucket of finite values whose range does not overflow.
fn grid(settings: &Settings, values: &[f32]) -> (f32, f32) {
    let top = ((1u32 << settings.bits) - 1) as f32;
    let least = values.iter().copied().fold(f32::INFINITY, f32::min);
    let most = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    match settings.meta {
        Dtype::F32 => {
            let unit = (most - least) / top;
            (if most == least { 0.0 } else { unit.max(f32::MIN_POSITIVE) }, least + 0.0)
        }
        meta => {
            let all = all_of(meta);
            let min = all[all.partition_point(|&value| value <= least) - 1] + 0.0;
            let wanted = (most - min) / top;
            let smallest = if meta == Dtype::F16 { 2.0f32.powi(-14) } else { f32::MIN_POSITIVE };
            let unit = all[all.partition_point(|&value| value < wanted)].max(smallest);
            (if most == min { 0.0 } else { unit }, min)
        }
    }
}

/// Encodes finite values as `max_min.rs` describes it.
fn oracle(settings: &Settings, dtype: Dtype, src: &[u8]) -> Vec<u8> {
    let values = values_of(dtype, src);
    let bucket = settings.bucket as usize;
    let coded = if settings.skip_incomplete { values.len() / bucket * bucket } else { values.len() };
    let (mut out, mut bits) = (Vec::new(), Vec::new());
    for bucket in values[..coded].chunks(bucket) {
        let (unit, min) = grid(settings, bucket);
        out.extend(from_f32(settings.meta, unit));
        out.extend(from_f32(settings.meta, min));
        for value in bucket {
            let s = if unit == 0.0 { 0.0 } else { (value - min) * (1.0 / unit) };
            let level = s.round_ties_even().clamp(0.0, ((1u32 << settings.bits) - 1) as f32) as u8;
            bits.extend((0..settings.bits).map(|bit| level >> bit & 1));
        }
    }
    let mut codes: Vec<u8> =
        bits.chunks(8).map(|bits| bits.iter().rev().fold(0, |byte, bit| byte << 1 | bit)).collect();
    codes.resize(codes.len().next_multiple_of(8), 0);
    out.extend(codes);
    out.extend(&src[coded * dtype.size_bytes()..]);
    out.resize(out.len().next_multiple_of(8), 0);
    out
}

#[test]
fn the_golden_vector() {
    let settings = Settings { bits: 4, bucket: 8, ..Settings::default() };
    let values: Vec<f32> = (0..10).map(|value| value as f32).collect();
    let mut want = bytes_of(Dtype::F32, &[7.0 / 15.0, 0.0, 1.0 / 15.0, 8.0]);
    want.extend([0x20, 0x64, 0xb9, 0xfd, 0xf0, 0, 0, 0]);
    for isa in available_isas() {
        let (encoded, _) =
            encode(&*max_min(settings, isa), Dtype::F32, &bytes_of(Dtype::F32, &values), 0, RngKey::keyed(&[]));
        assert_eq!(encoded, want, "{isa}");
        assert_eq!(encoded.len(), 24);
    }
}

fn settings() -> impl Strategy<Value = Settings> {
    (
        1u8..=8,
        prop::sample::select(vec![8u32, 16, 32, 40, 64, 96, 104, 512, 520, 1024, 8192]),
        prop::sample::select(FLOATS.to_vec()),
        any::<bool>(),
    )
        .prop_map(|(bits, bucket, meta, skip_incomplete)| Settings {
            bits,
            bucket,
            meta,
            skip_incomplete,
            rounding: Rounding::Nearest,
        })
}

/// Returns counts around every size that matters, and beyond the number of elements of small buckets that are handled
/// together.
fn count(bucket: usize, kind: usize) -> usize {
    let small = [0, 1, 7, 8, 9, 15, 16, 17, bucket - 1, bucket, bucket + 1, 3 * bucket + 5];
    small.into_iter().chain([517, 1031, 4104]).nth(kind).unwrap_or_else(|| panic!("{kind} of {KINDS}"))
}

/// Number of counts.
const KINDS: usize = 15;

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 192 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn encoding_equals_the_oracle_on_every_isa(settings in settings(), dtype in 0usize..3, kind in 0..KINDS, seed: u64) {
        let dtype = FLOATS[dtype];
        let mut random = Random(seed);
        let count = count(settings.bucket as usize, kind);
        let src = data(dtype, count, seed, &mut random);
        let want = oracle(&settings, dtype, &src);
        for isa in available_isas() {
            let codec = max_min(settings, isa);
            prop_assert_eq!(codec.encoded_bytes(dtype, count), want.len());
            let (got, non_finite) = encode(&*codec, dtype, &src, 0, RngKey::keyed(&[]));
            prop_assert_eq!(&got, &want, "{} {} x{}", isa, dtype, count);
            prop_assert_eq!(non_finite, NonFinite::default());
        }
    }

    #[test]
    fn decoding_is_within_the_bound_and_the_same_on_every_isa(
        mut settings in settings(), rounding in 0usize..3, dtype in 0usize..3, kind in 0..KINDS, seed: u64,
    ) {
        let dtype = FLOATS[dtype];
        settings.rounding = [Rounding::Nearest, Rounding::Stochastic, Rounding::Correlated][rounding];
        let mut random = Random(seed);
        let count = count(settings.bucket as usize, kind);
        let src = data(dtype, count, seed, &mut random);
        let world = [1, 2, 3, 8, 127, 128, 129, 300][random.below(8) as usize];
        let rng_key = RngKey::keyed(&[seed]).among(&[seed], Rank(random.below(world.into()) as u32), world);
        // Also around the ends of blocks of permutations, and of the parts of the counter.
        let first = u64::from(settings.bucket) * (random.below(1000) + [0, (1 << 34) / u64::from(settings.bucket) - 1][random.below(2) as usize]);
        let mut of_first_isa = None;
        for isa in available_isas() {
            let codec = max_min(settings, isa);
            let (encoded, _) = encode(&*codec, dtype, &src, first, rng_key);
            let decoded = decode(&*codec, dtype, &encoded, count);
            let mut sums = vec![1.0; count];
            codec.decode_add(&mut sums, &encoded, dtype);
            let sums: Vec<u32> = sums.into_iter().map(f32::to_bits).collect();
            let (want, want_sums) = of_first_isa.get_or_insert((decoded.clone(), sums.clone()));
            prop_assert_eq!(&decoded, want, "{}", isa);
            prop_assert_eq!(&sums, want_sums, "{}", isa);
        }
        let (Some((decoded, _)), bucket) = (of_first_isa, settings.bucket as usize) else { return Ok(()) };
        let (before, after) = (values_of(dtype, &src), values_of(dtype, &decoded));
        for (before, after) in before.chunks(bucket).zip(after.chunks(bucket)) {
            if settings.skip_incomplete && before.len() < bucket {
                prop_assert_eq!(before, after);
                continue;
            }
            let (unit, _) = grid(&settings, before);
            let most = before.iter().fold(0f32, |most, value| most.max(value.abs()));
            // The grid reaches up to a level beyond the values.
            let half_ulp = match dtype {
                Dtype::F16 => (most + unit) * 2f32.powi(-11) + 2f32.powi(-25),
                Dtype::BF16 => (most + unit) * 2f32.powi(-8),
                _ => 0.0,
            };
            let levels = if settings.rounding == Rounding::Nearest { 0.5 } else { 1.0 };
            let bound = unit * levels + most * 2f32.powi(-20) + half_ulp;
            for (before, after) in before.iter().zip(after) {
                prop_assert!((before - after).abs() <= bound, "{} became {}, bound {}", before, after, bound);
            }
        }
    }

    #[test]
    fn any_bytes_can_be_decoded(settings in settings(), dtype in 0usize..3, kind in 0..KINDS, seed: u64) {
        let dtype = FLOATS[dtype];
        let mut random = Random(seed);
        let count = count(settings.bucket as usize, kind);
        let mut of_first_isa = None;
        let size = max_min(settings, Isa::Scalar).encoded_bytes(dtype, count);
        let encoded: Vec<u8> = (0..size).map(|_| random.next() as u8).collect();
        for isa in available_isas() {
            let decoded = decode(&*max_min(settings, isa), dtype, &encoded, count);
            prop_assert_eq!(of_first_isa.get_or_insert(decoded.clone()), &decoded);
        }
    }
}

/// Buckets of 16: one with each kind of trouble, between normal ones.
#[test]
fn a_bucket_that_is_not_finite_becomes_nan_and_leaves_the_others_alone() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0xff80_0001)] {
        for dtype in FLOATS {
            for place in [16, 20, 31] {
                let mut values: Vec<f32> = (0..48).map(|i| i as f32).collect();
                values[place] = bad;
                for isa in available_isas() {
                    let codec = max_min(Settings { bits: 8, bucket: 16, ..Settings::default() }, isa);
                    let (encoded, non_finite) =
                        encode(&*codec, dtype, &bytes_of(dtype, &values), 0, RngKey::keyed(&[]));
                    assert_eq!(non_finite, NonFinite { not_finite: 1, too_large: 0 });
                    assert_eq!(encoded[8..16], [0, 0, 0xc0, 0x7f, 0, 0, 0xc0, 0x7f], "canonical in the metadata");
                    assert_eq!(encoded[24 + 16..24 + 32], [0; 16], "no codes");
                    let decoded = decode(&*codec, dtype, &encoded, 48);
                    let decoded = values_of(dtype, &decoded);
                    assert_eq!(decoded[..16], values[..16]);
                    assert!(decoded[16..32].iter().all(|value| value.is_nan()), "{decoded:?}");
                    assert_eq!(decoded[32..], values[32..]);
                }
            }
        }
    }
}

/// Vectors compare bits, as signed and as unsigned numbers.
#[test]
fn ranges_are_those_of_all_values_whatever_their_signs() {
    let signs: [fn(f32) -> f32; 4] =
        [|value| value, |value| -value, |value| if value % 2.0 == 0.0 { value } else { -value }, |value| value * -0.0];
    let infinity = f32::INFINITY;
    let decisive = [1e4, -1e4, 0.25, -0.25, 0.0, -0.0, f32::NAN, -f32::NAN, infinity, -infinity];
    for (bucket, sign) in [32u32, 64, 104].into_iter().flat_map(|bucket| signs.map(|sign| (bucket, sign))) {
        let usual: Vec<f32> = (0..bucket).map(|i| sign((1 + i * 37 % bucket) as f32)).collect();
        let settings = Settings { bits: 8, bucket, ..Settings::default() };
        let codecs = available_isas().into_iter().map(|isa| (isa, max_min(settings, isa))).collect::<Vec<_>>();
        for place in (0..usual.len()).step_by(if cfg!(miri) { 31 } else { 1 }) {
            for value in decisive {
                let mut values = usual.clone();
                values[place] = value;
                let src = bytes_of(Dtype::F32, &values);
                let want = value.is_finite().then(|| oracle(&settings, Dtype::F32, &src));
                for (isa, codec) in &codecs {
                    let (got, non_finite) = encode(&**codec, Dtype::F32, &src, 0, RngKey::keyed(&[]));
                    assert_eq!(
                        non_finite.not_finite,
                        usize::from(want.is_none()),
                        "{isa}, {value} at {place} of {bucket}"
                    );
                    assert!(want.as_ref().is_none_or(|want| *want == got), "{isa}, {value} at {place} of {bucket}");
                }
            }
        }
    }
}

/// The range of a bucket is found while the previous bucket is encoded. Several buckets in a row, at sizes between the
/// sizes of vectors.
#[test]
fn several_buckets_have_a_range_each() {
    let decisive = [1e4, -1e4, 0.25, -0.25, f32::NAN, f32::NEG_INFINITY];
    for (bucket, bits) in [32u32, 96, 104].into_iter().flat_map(|bucket| [1u8, 3, 4, 8].map(|bits| (bucket, bits))) {
        let buckets = 5;
        let settings = Settings { bits, bucket, ..Settings::default() };
        let codecs = available_isas().into_iter().map(|isa| (isa, max_min(settings, isa))).collect::<Vec<_>>();
        // Each bucket has values of its own size, so that using a neighbour's range is detected.
        let usual: Vec<f32> = (0..buckets * bucket)
            .map(|i| (1 + i * 37 % bucket) as f32 * [1.0, -30.0, 0.1, 7.0, -0.5][(i / bucket) as usize])
            .collect();
        for place in (0..usual.len()).step_by(if cfg!(miri) { 101 } else { 7 }) {
            for value in decisive {
                let mut values = usual.clone();
                values[place] = value;
                let src = bytes_of(Dtype::F32, &values);
                let want = value.is_finite().then(|| oracle(&settings, Dtype::F32, &src));
                for (isa, codec) in &codecs {
                    let tested = format!("{isa}, {bits} bits, {value} at {place}, buckets of {bucket}");
                    let (got, non_finite) = encode(&**codec, Dtype::F32, &src, 0, RngKey::keyed(&[]));
                    assert_eq!(non_finite.not_finite, usize::from(want.is_none()), "{tested}");
                    assert!(want.as_ref().is_none_or(|want| *want == got), "{tested}");
                    let decoded = values_of(Dtype::F32, &decode(&**codec, Dtype::F32, &got, values.len()));
                    let non_finite = place / bucket as usize;
                    for (at, decoded) in decoded.iter().enumerate() {
                        let is_nan = want.is_none() && at / bucket as usize == non_finite;
                        assert_eq!(decoded.is_nan(), is_nan, "{tested}, element {at}");
                    }
                }
            }
        }
    }
}

#[test]
fn buckets_that_become_nan_among_many_small_ones_leave_the_others_alone() {
    const COUNT: usize = 3000;
    let bad = [3, 700, 2047, 2048, 2999];
    for (bucket, rounding, isa) in [8u32, 24, 32, 40, 64, 96, 104].into_iter().flat_map(|bucket| {
        let roundings = [Rounding::Nearest, Rounding::Stochastic, Rounding::Correlated].into_iter();
        roundings.flat_map(move |rounding| available_isas().into_iter().map(move |isa| (bucket, rounding, isa)))
    }) {
        let codec = max_min(Settings { bits: 5, bucket, rounding, ..Settings::default() }, isa);
        let sound: Vec<f32> = (0..COUNT).map(|i| ((i * 7919) % 1009) as f32).collect();
        let mut values = sound.clone();
        bad.iter().for_each(|&place| values[place] = f32::NAN);
        let rng_key = RngKey::keyed(&[1]).among(&[1], Rank(2), 5);
        let [with, without] = [&values, &sound].map(|values| {
            let (encoded, non_finite) = encode(&*codec, Dtype::F32, &bytes_of(Dtype::F32, values), 16_000, rng_key);
            (values_of(Dtype::F32, &decode(&*codec, Dtype::F32, &encoded, COUNT)), non_finite.not_finite)
        });
        let buckets: HashSet<usize> = bad.iter().map(|place| place / bucket as usize).collect();
        assert_eq!((with.1, without.1), (buckets.len(), 0));
        for (place, (with, without)) in with.0.iter().zip(&without.0).enumerate() {
            if buckets.contains(&(place / bucket as usize)) {
                assert!(with.is_nan());
            } else {
                assert_eq!(with, without, "{isa}, {bucket}, {rounding:?}, element {place}");
            }
        }
    }
}

#[test]
fn a_finite_bucket_that_the_metadata_cannot_hold_is_counted_apart() {
    let lost_of = |meta, bits, values: &[f32]| {
        let codec = max_min(Settings { bits, bucket: 8, meta, ..Settings::default() }, Isa::best());
        let (encoded, non_finite) = encode(&*codec, Dtype::F32, &bytes_of(Dtype::F32, values), 0, RngKey::keyed(&[]));
        let decoded = values_of(Dtype::F32, &decode(&*codec, Dtype::F32, &encoded, values.len()));
        assert_eq!(decoded.iter().all(|value| value.is_nan()), non_finite != NonFinite::default(), "{decoded:?}");
        assert_eq!(decoded.iter().any(|value| value.is_nan()), non_finite != NonFinite::default(), "{decoded:?}");
        non_finite
    };
    let too_large = NonFinite { not_finite: 0, too_large: 1 };
    assert_eq!(lost_of(Dtype::F16, 4, &[-1e5, 0.0]), too_large);
    assert_eq!(lost_of(Dtype::F16, 1, &[0.0, 1e5]), too_large);
    assert_eq!(lost_of(Dtype::F16, 4, &[0.0, 1e5]), NonFinite::default());
    // The ends are one level further apart than the largest number: no unit is large enough.
    assert_eq!(lost_of(Dtype::F32, 1, &[f32::MAX, f32::MIN]), too_large);
}

#[test]
fn a_range_that_overflows_is_encoded_from_halves() {
    let values = [-3e38, -1e38, 0.0, 1e38, 3e38, 2.5e38, -2.5e38, 1.0];
    for bits in 2..=8 {
        for isa in available_isas() {
            let codec = max_min(Settings { bits, bucket: 8, ..Settings::default() }, isa);
            let (encoded, non_finite) =
                encode(&*codec, Dtype::F32, &bytes_of(Dtype::F32, &values), 0, RngKey::keyed(&[]));
            assert_eq!(non_finite, NonFinite::default());
            let unit = f64::from(to_f32(Dtype::F32, &encoded[..4]));
            for (before, after) in values.iter().zip(values_of(Dtype::F32, &decode(&*codec, Dtype::F32, &encoded, 8))) {
                let off = (f64::from(*before) - f64::from(after)).abs();
                assert!(off <= unit / 2.0 + 3e38 / f64::from(1 << 20), "{bits} bits: {before} became {after}");
            }
        }
    }
}

#[test]
fn tiny_ranges_and_constants_keep_their_values() {
    let cases: &[&[f32]] = &[
        &[0.0; 8],
        &[-0.0; 8],
        &[1e30; 8],
        &[1e-45, 0.0, 1e-45, 0.0, 1e-45, 0.0, 1e-45, 0.0],
        &[5.0],
        &[f32::MIN_POSITIVE, -f32::MIN_POSITIVE],
    ];
    for values in cases {
        for isa in available_isas() {
            let codec = max_min(Settings { bits: 8, bucket: 8, ..Settings::default() }, isa);
            let (encoded, _) = encode(&*codec, Dtype::F32, &bytes_of(Dtype::F32, values), 0, RngKey::keyed(&[]));
            let decoded = values_of(Dtype::F32, &decode(&*codec, Dtype::F32, &encoded, values.len()));
            for (before, after) in values.iter().zip(&decoded) {
                assert!((before - after).abs() <= f32::MIN_POSITIVE / 2.0, "{values:?} became {decoded:?} ({isa})");
            }
        }
    }
}

#[test]
fn a_value_that_leaves_the_range_of_float16_becomes_its_largest() {
    let values = [-65504.0, 65504.0, 65472.0, 100.0, -65504.0, 3.0, 0.0, 1.0];
    for bits in 1..=8 {
        for meta in FLOATS {
            for isa in available_isas() {
                let codec = max_min(Settings { bits, bucket: 8, meta, ..Settings::default() }, isa);
                let src = bytes_of(Dtype::F16, &values);
                let (encoded, non_finite) = encode(&*codec, Dtype::F16, &src, 0, RngKey::keyed(&[]));
                let decoded = values_of(Dtype::F16, &decode(&*codec, Dtype::F16, &encoded, 8));
                let whole = non_finite == NonFinite::default();
                assert!(decoded.iter().all(|value| value.is_finite() == whole), "{bits} bits, {meta}: {decoded:?}");
            }
        }
    }
}

/// Values on the grid stay unchanged, the others have the right mean and variance, and ranks differ.
#[test]
fn stochastic_rounding_is_unbiased_and_independent() {
    const COUNT: usize = 1 << 12;
    const DRAWS: u64 = if cfg!(miri) { 4 } else { 1 << 10 };
    let settings = Settings { bits: 4, rounding: Rounding::Stochastic, ..Settings::default() };
    let codec = max_min(settings, Isa::best());
    let mut random = Random(9);
    let mut values: Vec<f32> = (0..COUNT).map(|_| (random.next() >> 40) as f32 / (1 << 24) as f32 * 15.0).collect();
    // Every bucket has the grid of the whole numbers from 0 to 15.
    values.chunks_mut(512).for_each(|bucket| (bucket[0], bucket[1], bucket[2]) = (0.0, 15.0, 7.0));
    let src = bytes_of(Dtype::F32, &values);
    let draw = |rank, step| {
        let (encoded, _) = encode(&*codec, Dtype::F32, &src, 0, RngKey::keyed(&[rank, step]));
        values_of(Dtype::F32, &decode(&*codec, Dtype::F32, &encoded, COUNT))
    };
    let (mut sums, mut squares, mut crossed) = (vec![0.0; COUNT], 0.0, 0.0);
    for step in 0..DRAWS {
        let (mine, other) = (draw(0, step), draw(1, step));
        for at in 0..COUNT {
            let value = f64::from(values[at]);
            let (error, others) = (f64::from(mine[at]) - value, f64::from(other[at]) - value);
            assert!(error.abs() < 1.0, "{value} became {}", mine[at]);
            assert!(value.fract() != 0.0 || error == 0.0);
            sums[at] += error;
            squares += error * error;
            crossed += error * others;
        }
    }
    if cfg!(miri) {
        return;
    }
    let (draws, all) = (DRAWS as f64, DRAWS as f64 * COUNT as f64);
    let variance: f64 =
        values.iter().map(|value| f64::from(value.fract())).map(|f| f * (1.0 - f)).sum::<f64>() / COUNT as f64;
    let measured = squares / all;
    assert!((measured / variance - 1.0).abs() < 0.05, "{measured} for {variance}");
    // The draws have a resolution of 1/256: a bias of 1/512 in addition to the spread of the mean.
    let worst = sums.iter().map(|sum| (sum / draws).abs()).fold(0.0, f64::max);
    assert!(worst <= 5.0 / (2.0 * draws.sqrt()) + 1.0 / 512.0, "{worst}");
    let mean = sums.iter().sum::<f64>() / all;
    assert!(mean.abs() < 4.0 * (variance / all).sqrt() + 1e-4, "{mean}");
    let correlation = crossed / squares;
    assert!(correlation.abs() < 4.0 / all.sqrt(), "{correlation}");
}

/// Encodes each rank's values and returns what they decode to.
fn of_ranks(codec: &dyn Codec, ranks: &[Vec<f32>], step: u64) -> Vec<Vec<f32>> {
    let world = ranks.len() as u32;
    let of_rank = |(rank, values): (u32, &Vec<f32>)| {
        let rng_key = RngKey::keyed(&[step, rank.into()]).among(&[step], Rank(rank), world);
        let (encoded, _) = encode(codec, Dtype::F32, &bytes_of(Dtype::F32, values), 0, rng_key);
        values_of(Dtype::F32, &decode(codec, Dtype::F32, &encoded, values.len()))
    };
    (0..).zip(ranks).map(of_rank).collect()
}

/// Each rank alone is rounded as with stochastic rounding; between ranks, errors balance each other.
#[test]
#[cfg(not(miri))]
fn correlated_rounding_is_unbiased_on_each_rank_and_errors_of_two_ranks_are_opposed() {
    const COUNT: usize = 1 << 11;
    const STEPS: u64 = 1 << 9;
    let settings = Settings { bits: 4, rounding: Rounding::Correlated, ..Settings::default() };
    let mut random = Random(17);
    let mut values: Vec<f32> = (0..COUNT).map(|_| (random.next() >> 40) as f32 / (1 << 24) as f32 * 15.0).collect();
    // Every bucket has the grid of the whole numbers from 0 to 15.
    values.chunks_mut(512).for_each(|bucket| (bucket[0], bucket[1], bucket[2]) = (0.0, 15.0, 7.0));
    let fractions = || values.iter().map(|value| f64::from(value.fract()));
    let variance = fractions().map(|f| f * (1.0 - f)).sum::<f64>() / COUNT as f64;
    for isa in available_isas() {
        let codec = max_min(settings, isa);
        for world in [2, 5] {
            let ranks = vec![values.clone(); world];
            let (mut sums, mut squares, mut crossed) = (vec![vec![0.0; COUNT]; world], vec![0.0; world], 0.0);
            for step in 0..STEPS {
                let decoded = of_ranks(&*codec, &ranks, step);
                let error = |rank: usize, at: usize| f64::from(decoded[rank][at]) - f64::from(values[at]);
                for rank in 0..world {
                    for at in 0..COUNT {
                        let error = error(rank, at);
                        assert!(error.abs() < 1.0 && (values[at].fract() != 0.0 || error == 0.0));
                        sums[rank][at] += error;
                        squares[rank] += error * error;
                    }
                }
                crossed += (0..COUNT).map(|at| error(0, at) * error(world - 1, at)).sum::<f64>();
            }
            let (steps, all) = (STEPS as f64, STEPS as f64 * COUNT as f64);
            for (rank, sums) in sums.iter().enumerate() {
                let measured = squares[rank] / all;
                assert!(
                    (measured / variance - 1.0).abs() < 0.02,
                    "{isa}, rank {rank} of {world}: {measured} for {variance}"
                );
                // The same limits as in `stochastic_rounding_is_unbiased_and_independent`.
                let worst = sums.iter().map(|sum| (sum / steps).abs()).fold(0.0, f64::max);
                assert!(worst <= 5.0 / (2.0 * steps.sqrt()) + 1.0 / 512.0, "{isa}, rank {rank} of {world}: {worst}");
                let mean = sums.iter().sum::<f64>() / all;
                assert!(mean.abs() < 4.0 * (variance / all).sqrt() + 1e-4, "{isa}, rank {rank} of {world}: {mean}");
            }
            // Let f be the fraction of a value and r the fraction of f n. Of the n ranks, either the whole part of f n
            // rounds up, or one rank more. The variance of their sum is therefore r (1 - r). The covariance of two
            // ranks is (r (1 - r) - n f (1 - f)) / (n (n - 1)). If f n is below one, two ranks never both round up.
            let n = world as f64;
            let of_all = fractions().map(|f| (n * f).fract()).map(|r| r * (1.0 - r)).sum::<f64>() / COUNT as f64;
            let covariance = (of_all - n * variance) / (n * (n - 1.0));
            let found = crossed / all;
            assert!((found / covariance - 1.0).abs() < 0.05, "{isa}, {world} ranks: {found} for {covariance}");
        }
    }
}

/// Relative squared error of a sum that each of 8 ranks encoded once, at 4 bits. The values are Gaussian with this
/// correlation between ranks, and have the same range in every bucket. The values for correlated rounding were measured
/// elsewhere.
#[test]
#[cfg(not(miri))]
fn sums_of_correlated_rounding_have_the_error_that_they_should_have() {
    const COUNT: usize = 1 << 17;
    const WORLD: usize = 8;
    let mut random = Random(4321);
    let mut uniform = || ((random.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let mut gaussian = || (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    for (correlation, want, at_least) in [(1.0f64, 4.32e-4, 5.0), (0.95, 2.42e-3, 1.5), (0.0, 2.21e-2, 1.5)] {
        let common: Vec<f64> = (0..COUNT).map(|_| gaussian()).collect();
        let mut of_rank = || -> Vec<f32> {
            let own = (1.0 - correlation).sqrt();
            common.iter().map(|common| (correlation.sqrt() * common + own * gaussian()) as f32).collect()
        };
        let mut ranks: Vec<Vec<f32>> = (0..WORLD).map(|_| of_rank()).collect();
        for bucket in (0..COUNT).step_by(512) {
            let all = || ranks.iter().flat_map(|values| &values[bucket..bucket + 512]).copied();
            let (least, most) = (all().fold(f32::INFINITY, f32::min), all().fold(f32::NEG_INFINITY, f32::max));
            ranks.iter_mut().for_each(|values| (values[bucket], values[bucket + 1]) = (least, most));
        }
        let error = |rounding| {
            let codec = max_min(Settings { bits: 4, rounding, ..Settings::default() }, Isa::best());
            let decoded = of_ranks(&*codec, &ranks, 1);
            let sum = |ranks: &[Vec<f32>], at: usize| ranks.iter().map(|values| f64::from(values[at])).sum::<f64>();
            let (mut off, mut all) = (0.0, 0.0);
            for at in (0..COUNT).filter(|at| at % 512 > 1) {
                let exact = sum(&ranks, at);
                off += (sum(&decoded, at) - exact).powi(2);
                all += exact.powi(2);
            }
            off / all
        };
        let (correlated, stochastic) = (error(Rounding::Correlated), error(Rounding::Stochastic));
        assert!((correlated / want - 1.0).abs() < 0.15, "at {correlation}: {correlated:.3e}, expected {want:.3e}");
        assert!(stochastic > at_least * correlated, "at {correlation}: {stochastic:.3e} and {correlated:.3e}");
    }
}

/// Without other ranks there is nothing to balance.
#[test]
fn correlated_rounding_of_a_rank_alone_is_stochastic() {
    let src = bytes_of(Dtype::F32, &data_values(5000, 0, &mut Random(3)));
    let encoded = |rounding, rng_key| {
        encode(&*max_min(Settings { rounding, ..Settings::default() }, Isa::best()), Dtype::F32, &src, 512, rng_key).0
    };
    let rng_key = RngKey::keyed(&[1, 2]);
    let stochastic = encoded(Rounding::Stochastic, rng_key);
    assert_eq!(encoded(Rounding::Correlated, rng_key), stochastic);
    assert_eq!(encoded(Rounding::Correlated, rng_key.among(&[1], Rank(0), 1)), stochastic);
    assert_eq!(encoded(Rounding::Stochastic, rng_key.among(&[1], Rank(0), 2)), stochastic);
    assert_ne!(encoded(Rounding::Correlated, rng_key.among(&[1], Rank(0), 2)), stochastic);
}

#[test]
fn a_thread_that_flushes_denormals_encodes_the_same() {
    let values: Vec<f32> = (0..512).map(|i| f32::from_bits(i * 40_000)).collect();
    let src = bytes_of(Dtype::F32, &values);
    let codec = max_min(Settings { bits: 8, ..Settings::default() }, Isa::best());
    let both = || {
        let (encoded, _) = encode(&*codec, Dtype::F32, &src, 0, RngKey::keyed(&[]));
        let decoded = decode(&*codec, Dtype::F32, &encoded, 512);
        (encoded, decoded)
    };
    let want = both();
    let got = common::with_flushed_denormals(both);
    assert_eq!(got, want);
}

/// Relative squared error of 2^20 Gaussian and Laplace samples, as measured elsewhere (nearest rounding, float32
/// metadata). Stochastic rounding doubles it.
#[test]
#[cfg(not(miri))]
fn the_error_on_known_data_is_as_it_should_be() {
    const COUNT: usize = 1 << 20;
    let mut random = Random(12345);
    let mut uniform = || ((random.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let gaussian: Vec<f32> = (0..COUNT)
        .map(|_| ((-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos()) as f32)
        .collect();
    let laplace: Vec<f32> = (0..COUNT)
        .map(|_| {
            let sign = if uniform() < 0.5 { -1.0 } else { 1.0 };
            (-sign * uniform().ln()) as f32
        })
        .collect();
    let known: &[(&[f32], u32, [f64; 7])] = &[
        (&gaussian, 64, [2.74, 0.203, 3.70e-2, 8.05e-3, 1.88e-3, 4.57e-4, 2.78e-5]),
        (&gaussian, 128, [3.56, 0.250, 4.57e-2, 9.94e-3, 2.33e-3, 5.64e-4, 3.44e-5]),
        (&gaussian, 512, [5.38, 0.348, 6.32e-2, 1.375e-2, 3.23e-3, 7.82e-4, 4.76e-5]),
        (&gaussian, 1024, [6.31, 0.398, 7.20e-2, 1.57e-2, 3.67e-3, 8.86e-4, 5.42e-5]),
        (&gaussian, 2048, [7.28, 0.451, 8.08e-2, 1.76e-2, 4.11e-3, 9.96e-4, 6.08e-5]),
        (&gaussian, 8192, [9.32, 0.564, 9.84e-2, 2.15e-2, 5.02e-3, 1.22e-3, 7.39e-5]),
        (&laplace, 128, [6.86, 0.443, 7.79e-2, 1.70e-2, 3.97e-3, 9.61e-4, 5.87e-5]),
        (&laplace, 512, [12.8, 0.811, 0.131, 2.84e-2, 6.66e-3, 1.61e-3, 9.84e-5]),
        (&laplace, 1024, [16.4, 1.05, 0.161, 3.51e-2, 8.23e-3, 1.99e-3, 1.21e-4]),
    ];
    let relative = |name: &str, values: &[f32], settings: Settings| {
        let codec = codec(name).unwrap().build(&settings).unwrap();
        let (encoded, _) = encode(&*codec, Dtype::F32, &bytes_of(Dtype::F32, values), 0, RngKey::keyed(&[1]));
        let decoded = values_of(Dtype::F32, &decode(&*codec, Dtype::F32, &encoded, COUNT));
        let square = |x: f32| f64::from(x) * f64::from(x);
        let error: f64 = values.iter().zip(&decoded).map(|(x, y)| square(x - y)).sum();
        error / values.iter().copied().map(square).sum::<f64>()
    };
    type Known<'a> = (&'a [f32], u8, [(u32, f64); 3]);
    let symmetric: [Known; 4] = [
        (&gaussian, 4, [(32, 9.4e-3), (128, 1.37e-2), (512, 1.81e-2)]),
        (&laplace, 4, [(32, 1.47e-2), (128, 2.57e-2), (512, 3.96e-2)]),
        (&gaussian, 8, [(128, 4.2e-5); 3]),
        (&laplace, 8, [(128, 8.0e-5); 3]),
    ];
    for (values, bits, errors) in symmetric {
        for (bucket, want) in errors {
            let found = relative("absmax", values, Settings { bits, bucket, ..Settings::default() });
            assert!(
                (found / want - 1.0).abs() < 0.05,
                "absmax, {bits} bits of {bucket}: {found:.3e}, expected {want:.3e}"
            );
        }
    }
    for &(values, bucket, errors) in known {
        for (bits, want) in [1, 2, 3, 4, 5, 6, 8].into_iter().zip(errors) {
            let nmse =
                |rounding| relative("maxmin", values, Settings { bits, bucket, rounding, ..Settings::default() });
            let nearest = nmse(Rounding::Nearest);
            assert!((nearest / want - 1.0).abs() < 0.05, "{bits} bits of {bucket}: {nearest:.3e}, expected {want:.3e}");
            let ratio = nmse(Rounding::Stochastic) / nearest;
            let expected = match bits {
                1 => 1.3..2.0,
                2 => 1.8..2.02,
                _ => 1.96..2.04,
            };
            assert!(expected.contains(&ratio), "{bits} bits of {bucket}: stochastic has {ratio:.3} times the error");
        }
    }
}

#[test]
fn what_has_no_meaning_is_refused_by_name() {
    let refused = |settings: Settings, part: &str| {
        let error = codec("maxmin").unwrap().build(&settings).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Configuration);
        assert!(error.message.contains(part), "{}", error.message);
    };
    let usual = Settings::default();
    refused(Settings { bits: 0, ..usual }, "bits is 0; expected 1 to 8");
    refused(Settings { bits: 9, ..usual }, "bits is 9; expected 1 to 8");
    refused(Settings { bucket: 0, ..usual }, "bucket is 0; expected a multiple of 8 from 8 to 8192");
    refused(Settings { bucket: 7, ..usual }, "bucket is 7");
    refused(Settings { bucket: 8200, ..usual }, "bucket is 8200");
    refused(Settings { meta: Dtype::F64, ..usual }, "meta is float64; expected float32, float16 or bfloat16");
    let error = codec("int9").unwrap_err();
    assert!(
        error.message.contains("unknown codec `int9`; expected one of raw, bf16, fp16, maxmin, absmax"),
        "{}",
        error.message
    );
}

#[test]
fn absmax_has_the_format_that_it_describes() {
    // Units 0.5 and 2, of three bits: levels from -3 to 3, codes from 0 to 6.
    let values = [-1.5, -1.0, -0.4, 0.0, 0.2, 0.5, 1.0, 1.5, 6.0, -6.0, 0.9, -1.1];
    let settings = Settings { bits: 3, bucket: 8, ..Settings::default() };
    let (encoded, decoded, _) =
        through("absmax", &settings, Dtype::F32, &bytes_of(Dtype::F32, &values), RngKey::keyed(&[]));
    let codes: [u64; 12] = [0, 1, 2, 3, 3, 4, 5, 6, 6, 0, 3, 2];
    let packed = codes.iter().rev().fold(0, |packed, code| packed << 3 | code);
    let expected: Vec<u8> = [0.5f32.to_le_bytes(), 2f32.to_le_bytes()].concat();
    assert_eq!(encoded, [expected, packed.to_le_bytes().to_vec()].concat());
    assert_eq!(decoded, [-1.5, -1.0, -0.5, 0.0, 0.0, 0.5, 1.0, 1.5, 6.0, -6.0, 0.0, -2.0]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 192 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn absmax_is_near_every_value_and_keeps_zero(
        bits in 2u8..=8, bucket in 1u32..40, meta in 0usize..3, dtype in 0usize..3, stochastic: bool,
        kind in 0u64..5, count in 0usize..700, seed: u64,
    ) {
        let (meta, dtype, bucket) = (FLOATS[meta], FLOATS[dtype], 8 * bucket);
        let rounding = if stochastic { Rounding::Stochastic } else { Rounding::Nearest };
        let settings = Settings { bits, bucket, meta, rounding, skip_incomplete: false };
        let mut random = Random(seed);
        let mut values = data_values(count, kind, &mut random);
        values.iter_mut().step_by(7).for_each(|value| *value = 0.0);
        let src = bytes_of(dtype, &values);
        let values = values_of(dtype, &src);
        let (_, decoded, non_finite) = through("absmax", &settings, dtype, &src, RngKey::keyed(&[seed]));
        let reach = ((1u32 << (bits - 1)) - 1) as f32;
        for (before, after) in values.chunks(bucket as usize).zip(decoded.chunks(bucket as usize)) {
            let most = before.iter().fold(0f32, |most, value| most.max(value.abs()));
            // Metadata of 16 bits may round up by one part in 128, or be the least possible value.
            let least = match meta { Dtype::F16 => 6.2e-5, _ => f32::MIN_POSITIVE };
            let unit = (most / reach * (1.0 + 1.0 / 128.0)).max(least);
            let is_lost = after.iter().any(|value| value.is_nan());
            prop_assert!(!is_lost || non_finite.too_large > 0);
            for (&before, &after) in before.iter().zip(after).filter(|_| !is_lost) {
                // Half a unit in the last place of a 16-bit result. Its least value belongs to the denormals of
                // float16.
                let rounded = match dtype {
                    Dtype::BF16 => most / 256.0,
                    Dtype::F16 => (most / 2048.0).max(2f32.powi(-25)),
                    _ => most * 1e-6,
                };
                let bound = unit * if stochastic { 1.0 + 1.0 / 256.0 } else { 0.5 } + rounded;
                prop_assert!((after - before).abs() <= bound, "{before} became {after}, greatest {most}");
                prop_assert!(before != 0.0 || after.to_bits() == 0, "zero became {after}");
            }
        }
    }

    #[test]
    fn casts_round_to_nearest_even_and_raw_keeps_every_bit(
        kind in 0usize..12, seed: u64, count in 0usize..1300, tensor in 0usize..3, as_sums: bool,
    ) {
        let tensor = FLOATS[tensor];
        let dtype = if as_sums { Dtype::F32 } else { tensor };
        let src = bytes_of(dtype, &data_values(count, kind as u64, &mut Random(seed)));
        for (name, wire) in [("raw", tensor), ("bf16", Dtype::BF16), ("fp16", Dtype::F16)] {
            let sent: Vec<f32> = values_of(dtype, &src).into_iter().map(|x| to_f32(wire, &from_f32(wire, x))).collect();
            for isa in available_isas() {
                let codec = codec(name).unwrap().build_with_isa(&Settings::default(), isa).unwrap();
                let mut encoded = vec![0xa5; codec.encoded_bytes(tensor, count)];
                let slice = Slice { src: src.as_ptr(), dtype, tensor, count, first: 0 };
                // SAFETY: the slice refers to `src`.
                unsafe { codec.encode(&mut encoded, slice, RngKey::keyed(&[])) };
                prop_assert!(encoded.len().is_multiple_of(8));
                if wire == dtype {
                    prop_assert_eq!(&encoded[..src.len()], &src[..]);
                }
                for into in [Dtype::F32, tensor] {
                    let mut decoded = vec![0; count * into.size_bytes()];
                    // SAFETY: `decoded` has room for the elements.
                    unsafe { codec.decode(decoded.as_mut_ptr(), into, &encoded, tensor, count) };
                    for (value, sent) in values_of(into, &decoded).into_iter().zip(&sent) {
                        let expected = to_f32(into, &from_f32(into, *sent));
                        prop_assert!(alike(value, expected), "{value} for {sent} by {name}");
                    }
                }
                let mut sums = vec![1.5; count];
                codec.decode_add(&mut sums, &encoded, tensor);
                prop_assert!(sums.iter().zip(&sent).all(|(&sum, &sent)| alike(sum, 1.5 + sent)));
            }
        }
    }

    #[test]
    fn sums_are_encoded_while_they_are_made_as_they_are_one_step_after_the_other(
        kinds in (0usize..12, 0usize..12), seed: u64, count in 0usize..1300, shift in 0usize..4, in_place: bool, wanted: bool, ranks in 0u32..4,
    ) {
        let random = &mut Random(seed);
        let addends = data_values(count, kinds.0 as u64, random);
        let incoming = bytes_of(Dtype::F32, &data_values(count, kinds.1 as u64, random));
        for isa in available_isas() {
            let codec = codec("bf16").unwrap().build_with_isa(&Settings::default(), isa).unwrap();
            let bytes = codec.encoded_bytes(Dtype::F32, count);
            let encode = |values: *const f32| {
                let mut encoded = vec![0xa5; bytes];
                let slice = Slice { src: values.cast(), dtype: Dtype::F32, tensor: Dtype::F32, count, first: 0 };
                // SAFETY: there are `count` values at `values`.
                unsafe { codec.encode(&mut encoded, slice, RngKey::keyed(&[])) };
                encoded
            };
            let incoming = encode(incoming.as_ptr().cast());
            let mut expected_sums = addends.clone();
            codec.decode_add(&mut expected_sums, &incoming, Dtype::F32);
            let divisor = (ranks > 0).then_some(ranks as f32);
            Floats::default().finish(&mut expected_sums, divisor, Dtype::F32);
            let expected = encode(expected_sums.as_ptr());
            let mut expected_results = vec![0f32; count];
            // SAFETY: `expected_results` has room for the elements.
            unsafe { codec.decode(expected_results.as_mut_ptr().cast(), Dtype::F32, &expected, Dtype::F32, count) };

            let encoder = codec.encode_sums().unwrap();
            // Memory that may be unaligned.
            let mut memory = vec![0u8; 4 * count + shift];
            memory[shift..].copy_from_slice(&bytes_of(Dtype::F32, &addends));
            let mut elsewhere = vec![0u8; 4 * count + shift];
            let results = if in_place { memory[shift..].as_mut_ptr() } else { elsewhere[shift..].as_mut_ptr() };
            let results = wanted.then_some(results.cast::<f32>());
            let mut encoded = vec![0xa5; bytes];
            let addends = memory[shift..].as_mut_ptr().cast_const().cast();
            // SAFETY: there are `count` addends, and there is room for as many results.
            unsafe { encoder.encode_sums(&mut encoded, &incoming, Sums { addends, divisor, results, count }) };
            prop_assert_eq!(&encoded, &expected);
            if wanted {
                let written = if in_place { &memory[shift..] } else { &elsewhere[shift..] };
                prop_assert_eq!(written, &bytes_of(Dtype::F32, &expected_results)[..]);
            }
        }
    }
}

//! Codecs of small floats, signs and rotated buckets against test vectors and oracles written from their descriptions.
//! Also properties that hold for every row of the table.

mod common;

use accl_kernels::available_isas;
use accl_kernels::codec::{
    Bound, CODECS, Codec, Loss, MOST_BUCKET, NonFinite, RngKey, Rounding, Row, Setting, Settings, Slice, Summary,
    codec, parse,
};
use accl_types::{Dtype, ErrorKind};
use common::codecs::{FLOATS, bytes_of, data_values, decode, encode, from_f32, through, to_f32, values_of};
use common::{Random, with_flushed_denormals};
use proptest::prelude::*;
use std::sync::Arc;

const CASES: u32 = if cfg!(miri) { 2 } else { 128 };

/// Codecs of small floats: name, elements of a block and of a group.
const SMALL_FLOATS: [(&str, usize, usize); 6] = [
    ("e4m3", 256, 256),
    ("e5m2", 256, 256),
    ("mxfp8", 32, 32),
    ("mxfp8_e5m2", 32, 32),
    ("mxfp4", 32, 32),
    ("nvfp4", 16, 2048),
];

/// Encodes and decodes float32 on every instruction set, without randomness.
fn through_f32(name: &str, values: &[f32]) -> (Vec<u8>, Vec<f32>, NonFinite) {
    through(name, &Settings::default(), Dtype::F32, &bytes_of(Dtype::F32, values), RngKey::keyed(&[]))
}

/// Returns counts around every size that matters.
fn count_of(bucket: usize, kind: usize) -> usize {
    [0, 1, 7, 8, 9, 15, 16, 17, bucket - 1, bucket, bucket + 1, 3 * bucket + 5][kind % 12]
}

/// Returns exponent bits, mantissa bits, and the code of the greatest number.
fn format_of(name: &str) -> (u32, u32, u32) {
    match name {
        "e4m3" | "mxfp8" => (4, 3, 0x7e),
        "e5m2" | "mxfp8_e5m2" => (5, 2, 0x7b),
        _ => (2, 1, 7),
    }
}

/// Returns the value of a code without its sign, as the specifications define it.
fn number(exponent_bits: u32, mantissa_bits: u32, code: u32) -> f64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let (exponent, mantissa) = ((code >> mantissa_bits) as i32, f64::from(code & ((1 << mantissa_bits) - 1)));
    let fraction = mantissa / f64::from(1 << mantissa_bits);
    if exponent == 0 { fraction * 2f64.powi(1 - bias) } else { (1.0 + fraction) * 2f64.powi(exponent - bias) }
}

/// Returns the code of the number nearest to a value: the even code of two equally near ones, the greatest for larger
/// values.
fn nearest((exponent_bits, mantissa_bits, greatest): (u32, u32, u32), value: f32) -> u8 {
    let magnitude = f64::from(value.abs());
    let of = |code| number(exponent_bits, mantissa_bits, code);
    // The numbers are in the order of their codes.
    let (mut low, mut high) = (0, greatest);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if of(middle) <= magnitude { low = middle } else { high = middle - 1 }
    }
    let next = (low + 1).min(greatest);
    let (below, above) = (magnitude - of(low), of(next) - magnitude);
    let code = if above < below || above == below && next % 2 == 0 { next } else { low };
    code as u8 | u8::from(value.is_sign_negative()) << (exponent_bits + mantissa_bits)
}

/// Clears the `bits` lowest bits of a float32.
fn without_lowest(value: f32, bits: u32) -> f32 {
    f32::from_bits(value.to_bits() >> bits << bits)
}

fn greatest(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |most, value| most.max(value.abs()))
}

/// Encodes finite values as the heads of `scaled.rs`, `fp8.rs`, `mx.rs` and `nvfp4.rs` describe it. Returns the bytes
/// and the decoded values.
fn oracle(name: &str, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let (_, block, group) = SMALL_FLOATS.into_iter().find(|row| row.0 == name).unwrap();
    let format = format_of(name);
    let (mut groups, mut scales, mut codes, mut decoded) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for group in values.chunks(group) {
        let of_group = without_lowest(greatest(group) / 2688.0, 6).max(2f32.powi(-117));
        if name == "nvfp4" {
            groups.extend(of_group.to_le_bytes());
        }
        for block in group.chunks(block) {
            let most = greatest(block);
            let (scale, bytes) = match name {
                "e4m3" | "e5m2" => {
                    let largest = if name == "e4m3" { 448.0 } else { 57344.0 };
                    let scale = without_lowest(most / largest, 4).max(f32::MIN_POSITIVE);
                    (scale, scale.to_le_bytes().to_vec())
                }
                "nvfp4" => {
                    let code = nearest((4, 3, 0x7e), most * (1.0 / (6.0 * of_group))).max(1);
                    (number(4, 3, u32::from(code)) as f32 * of_group, vec![code])
                }
                _ => {
                    let exponent = match name {
                        "mxfp8" => 8,
                        "mxfp8_e5m2" => 15,
                        _ => 2,
                    };
                    // The exponent of the greatest magnitude. Numbers below the normal ones have no exponent that
                    // matters.
                    let of_most = (most.to_bits() >> 23) as i32;
                    let byte = (of_most - exponent).max(0);
                    (2f64.powi(byte - 127) as f32, vec![byte as u8])
                }
            };
            scales.extend(bytes);
            let factor = 1.0 / scale;
            for value in block {
                let code = nearest(format, value * factor);
                codes.push(code);
                let sign_at = format.0 + format.1;
                let exact = number(format.0, format.1, u32::from(code) & ((1 << sign_at) - 1)) * f64::from(scale);
                let exact = if u32::from(code) >> sign_at == 1 { -exact } else { exact };
                decoded.push(exact as f32);
            }
        }
    }
    let packed: Vec<u8> = match format {
        (2, ..) => codes.chunks(2).map(|pair| pair[0] | pair.get(1).unwrap_or(&0) << 4).collect(),
        _ => codes,
    };
    let mut all = [groups, scales, packed].concat();
    all.resize(all.len().next_multiple_of(8), 0);
    (all, decoded)
}

#[test]
fn e4m3_has_the_numbers_of_its_specification() {
    // The greatest is 448, so the scale is 1. Ties go to even codes, also in the subnormal numbers.
    let values = [
        448.0,
        240.0,
        1.0,
        -1.5,
        2f32.powi(-6),
        7.0 / 512.0,
        1.0 / 512.0,
        17.0,
        19.0,
        3.0 / 1024.0,
        1.0 / 1024.0,
        -0.0,
    ];
    let (encoded, decoded, _) = through_f32("e4m3", &values);
    let codes = [0x7e, 0x77, 0x38, 0xbc, 0x08, 0x07, 0x01, 0x58, 0x5a, 0x02, 0x00, 0x80];
    assert_eq!(encoded, [&1f32.to_le_bytes()[..], &codes].concat());
    assert_eq!(
        decoded,
        [448.0, 240.0, 1.0, -1.5, 0.015625, 0.013671875, 0.001953125, 16.0, 20.0, 0.00390625, 0.0, 0.0]
    );
}

#[test]
fn e5m2_has_the_numbers_of_its_specification() {
    let values = [57344.0, 1.0, -0.75, 2f32.powi(-14), 3.0 * 2f32.powi(-16), 2f32.powi(-16), 9.0, 2f32.powi(-17)];
    let (encoded, decoded, _) = through_f32("e5m2", &values);
    let codes = [0x7b, 0x3c, 0xba, 0x04, 0x03, 0x01, 0x48, 0x00, 0, 0, 0, 0];
    assert_eq!(encoded, [&1f32.to_le_bytes()[..], &codes].concat());
    assert_eq!(decoded, [57344.0, 1.0, -0.75, 2f32.powi(-14), 3.0 * 2f32.powi(-16), 2f32.powi(-16), 8.0, 0.0]);
}

#[test]
fn mxfp4_has_the_numbers_of_its_specification_and_the_floor_rule() {
    // The magnitudes 6 and 7.9 have the exponent 2, like the largest number. The scale is 2^0, byte 127.
    for most in [4.0, 6.0, 7.9] {
        let values = [most, 0.5, -1.0, 1.5, 2.0, 3.0, -4.0, 0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.5];
        let (encoded, decoded, _) = through_f32("mxfp4", &values);
        let top = if most == 4.0 { 0x6 } else { 0x7 };
        let codes = [0x10 | top, 0x3a, 0x54, 0x0e, 0x20, 0x42, 0x64, 0xf6];
        assert_eq!(encoded, [&[127][..], &codes, &[0; 7]].concat(), "{most}");
        let expected = [most.min(6.0), 0.5, -1.0, 1.5, 2.0, 3.0, -4.0, 0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -6.0];
        assert_eq!(decoded, expected);
    }
    // Two blocks; the second consists of powers of two and has the scale 2^(100 - 127).
    let values: Vec<f32> = (0..40).map(|at| if at < 32 { 1.0 } else { 2f32.powi(-25) }).collect();
    let (encoded, decoded, _) = through_f32("mxfp4", &values);
    assert_eq!(encoded[..4], [125, 100, 0x66, 0x66]);
    assert_eq!(decoded, values);
}

#[test]
fn mxfp8_has_the_floor_rule_for_both_kinds_of_numbers() {
    for (name, byte) in [("mxfp8", 127 - 8), ("mxfp8_e5m2", 127 - 15)] {
        let (encoded, decoded, _) = through_f32(name, &[1.0, -1.9375, 0.0]);
        assert_eq!(encoded[0], byte, "{name}");
        // 1.9375 is above the largest number, 1.75 times a power of two, and becomes that.
        assert_eq!(decoded, [1.0, -1.75, 0.0], "{name}");
    }
    let (encoded, decoded, _) = through_f32("mxfp8", &[500.0, 1.0, -0.001953125]);
    assert_eq!(encoded, [127, 0x7e, 0x38, 0x81, 0, 0, 0, 0]);
    assert_eq!(decoded, [448.0, 1.0, -0.001953125]);
}

#[test]
fn nvfp4_has_a_scale_of_its_group_and_one_of_each_block() {
    let mut values = vec![0.0; 34];
    // The greatest is 6 * 448, so the scale of the group is 1. The blocks have the scales 448, 1, and 2^-9, which is
    // the least.
    (values[0], values[1], values[16], values[17], values[32]) = (2688.0, -1344.0, 6.0, -0.5, 0.001);
    let (encoded, decoded, _) = through_f32("nvfp4", &values);
    assert_eq!(encoded[..4], 1f32.to_le_bytes());
    assert_eq!(encoded[4..7], [0x7e, 0x38, 0x01]);
    assert_eq!(encoded[7..9], [0xd7, 0x00]);
    assert_eq!(encoded[15..17], [0x97, 0x00]);
    assert_eq!(encoded[23..], [0x01, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00][..encoded.len() - 23]);
    values[32] = 0.5 / 512.0;
    assert_eq!(decoded, values);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn small_floats_equal_the_oracle(
        which in 0usize..6, dtype in 0usize..3, kind in 0usize..12, exponent in -140i32..100, seed: u64,
    ) {
        let (name, block, group) = SMALL_FLOATS[which];
        let (dtype, mut random) = (FLOATS[dtype], Random(seed));
        let count = count_of(if seed % 3 == 0 { group } else { block }, kind);
        let scale = if seed % 2 == 0 { 1.0 } else { 2f64.powi(exponent) as f32 };
        let mut values = data_values(count, seed >> 2, &mut random);
        values.iter_mut().for_each(|value| *value *= scale);
        let mut src = bytes_of(dtype, &values);
        let mut values = values_of(dtype, &src);
        values.iter_mut().for_each(|value| *value = if value.is_finite() { *value } else { 1.0 });
        src = bytes_of(dtype, &values);
        let (bytes, expected) = oracle(name, &values);
        let (encoded, decoded, non_finite) = through(name, &Settings::default(), dtype, &src, RngKey::keyed(&[]));
        prop_assert_eq!(encoded, bytes);
        prop_assert_eq!(non_finite, NonFinite::default());
        for ((&found, &expected), &value) in decoded.iter().zip(&expected).zip(&values) {
            let most = match dtype { Dtype::F16 => 65504.0, Dtype::BF16 => f32::from_bits(0x7f7f_0000), _ => f32::MAX };
            let expected = to_f32(dtype, &from_f32(dtype, expected.clamp(-most, most)));
            prop_assert_eq!(found.to_bits(), expected.to_bits(), "{} became {}, expected {}", value, found, expected);
        }
    }
}

#[test]
fn sign_has_the_format_that_it_describes() {
    // Means 2 and 3; zeros of both signs count as positive.
    let values = [1.0, -3.0, 0.0, -0.0, 4.0, -4.0, 2.0, -2.0, 3.0, -3.0];
    let settings = Settings { bucket: 8, ..Settings::default() };
    let (encoded, decoded, _) =
        through("sign", &settings, Dtype::F32, &bytes_of(Dtype::F32, &values), RngKey::keyed(&[]));
    let means = [2f32.to_le_bytes(), 3f32.to_le_bytes()].concat();
    assert_eq!(encoded, [means, vec![0b1010_0010, 0b10, 0, 0, 0, 0, 0, 0]].concat());
    assert_eq!(decoded, [2.0, -2.0, 2.0, 2.0, 2.0, -2.0, 2.0, -2.0, 3.0, -3.0]);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn signs_and_means_equal_the_oracle(
        bucket in 1u32..200, meta in 0usize..3, dtype in 0usize..3, kind in 0usize..12, exponent in -140i32..120,
        seed: u64,
    ) {
        let (meta, dtype, bucket) = (FLOATS[meta], FLOATS[dtype], 8 * bucket as usize);
        let settings = Settings { bucket: bucket as u32, meta, ..Settings::default() };
        let scale = if seed % 2 == 0 || meta == Dtype::F16 { 1.0 } else { 2f64.powi(exponent) as f32 };
        let mut values = data_values(count_of(bucket, kind), seed, &mut Random(seed));
        values.iter_mut().for_each(|value| *value = (*value * scale).clamp(-1e30, 1e30));
        let src = bytes_of(dtype, &values);
        let values = values_of(dtype, &src);
        prop_assume!(values.iter().all(|value| value.is_finite()));
        let (encoded, decoded, non_finite) = through("sign", &settings, dtype, &src, RngKey::keyed(&[]));
        prop_assert_eq!(non_finite, NonFinite::default());
        let (mut means, mut codes, mut expected) = (Vec::new(), Vec::new(), Vec::new());
        for bucket in values.chunks(bucket) {
            let mut sums = [0f64; 16];
            bucket.iter().enumerate().for_each(|(at, value)| sums[at % 16] += f64::from(value.abs()));
            for half in [8, 4, 2, 1] {
                (0..half).for_each(|at| sums[at] += sums[at + half]);
            }
            let mean = to_f32(meta, &from_f32(meta, (sums[0] / bucket.len() as f64) as f32));
            means.extend(from_f32(meta, mean));
            for eight in bucket.chunks(8) {
                codes.push(eight.iter().enumerate().fold(0u8, |byte, (at, value)| byte | u8::from(*value < 0.0) << at));
            }
            expected.extend(bucket.iter().map(|value| if *value < 0.0 { -mean } else { mean }));
        }
        let mut all = [means, codes].concat();
        all.resize(all.len().next_multiple_of(8), 0);
        prop_assert_eq!(encoded, all);
        prop_assert_eq!(bytes_of(dtype, &decoded), bytes_of(dtype, &expected));
    }
}

#[test]
fn a_mean_is_found_where_a_sum_would_overflow() {
    let values = vec![-3e38; 8192];
    let settings = Settings { bucket: 8192, ..Settings::default() };
    let (_, decoded, non_finite) =
        through("sign", &settings, Dtype::F32, &bytes_of(Dtype::F32, &values), RngKey::keyed(&[]));
    assert_eq!((decoded, non_finite), (values, NonFinite::default()));
}

/// Returns whether the sign of an element of a bucket is flipped, as the head of `hadamard.rs` describes it.
fn is_flipped(index: u32) -> bool {
    let x = index.wrapping_add(0x9e37_79b9);
    let x = (x ^ (x >> 16)).wrapping_mul(0x7feb_352d);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846c_a68b);
    (x ^ (x >> 16)) >> 31 == 1
}

/// Multiplies a bucket by signs and matrix, in the described order.
fn rotated(bucket: &[f32]) -> Vec<f32> {
    let factor = (1.0 / (bucket.len() as f64).sqrt()) as f32;
    let mut values: Vec<f32> =
        bucket.iter().enumerate().map(|(at, x)| x * if is_flipped(at as u32) { -factor } else { factor }).collect();
    let mut apart = 1;
    while apart < values.len() {
        for at in (0..values.len()).filter(|at| at & apart == 0) {
            (values[at], values[at + apart]) = (values[at] + values[at + apart], values[at] - values[at + apart]);
        }
        apart *= 2;
    }
    values
}

#[test]
fn a_rotation_is_by_signs_and_the_hadamard_matrix() {
    for size in [64usize, 128, 2048] {
        let values = data_values(size, 0, &mut Random(size as u64));
        let found = rotated(&values);
        let norm = values.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
        for (row, found) in found.iter().enumerate() {
            let sum: f64 = values
                .iter()
                .enumerate()
                .map(|(at, x)| {
                    let minus = ((row & at).count_ones() % 2 == 1) != is_flipped(at as u32);
                    if minus { -f64::from(*x) } else { f64::from(*x) }
                })
                .sum();
            let expected = sum / (size as f64).sqrt();
            // One rounding for each bit of the index, and one for the factor.
            assert!((f64::from(*found) - expected).abs() <= norm * 16.0 * 2f64.powi(-24), "row {row} of {size}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES / 2, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn rotated_buckets_equal_the_oracle_and_are_near(
        bits in 1u8..=8, bucket in 6u32..=13, meta in 0usize..3, dtype in 0usize..3, stochastic: bool,
        skip_incomplete: bool, kind in 0usize..14, seed: u64,
    ) {
        let (meta, dtype, bucket) = (FLOATS[meta], FLOATS[dtype], 1usize << bucket);
        let rounding = if stochastic { Rounding::Stochastic } else { Rounding::Nearest };
        let settings = Settings { bits, bucket: bucket as u32, meta, rounding, skip_incomplete };
        let count = match kind { 12 => 4096 + 3, 13 => 2 * 4096 + bucket + 9, _ => count_of(bucket, kind) };
        let src = bytes_of(dtype, &data_values(count, seed, &mut Random(seed)));
        let values = values_of(dtype, &src);
        let rng_key = RngKey::keyed(&[seed]);
        let (encoded, decoded, non_finite) = through("hadamard", &settings, dtype, &src, rng_key);
        prop_assert_eq!(non_finite, NonFinite::default());

        // Max-min of the rotated buckets, part by part.
        let inner = codec("maxmin").unwrap().build(&settings).unwrap();
        let turned: Vec<f32> = values
            .chunks(bucket)
            .flat_map(|part| if part.len() == bucket { rotated(part) } else { part.to_vec() })
            .collect();
        let (mut expected, mut levels) = (Vec::new(), Vec::new());
        let part = bucket.max(4096);
        for (at, values) in turned.chunks(part).enumerate() {
            let src = bytes_of(Dtype::F32, values);
            let mut bytes = vec![0; inner.encoded_bytes(dtype, values.len())];
            let first = (at * part) as u64;
            let slice = Slice { src: src.as_ptr(), dtype: Dtype::F32, tensor: dtype, count: values.len(), first };
            // SAFETY: the slice refers to `src`.
            unsafe { inner.encode(&mut bytes, slice, rng_key) };
            let mut back = vec![0f32; values.len()];
            // SAFETY: `back` has room for the elements.
            unsafe { inner.decode(back.as_mut_ptr().cast(), Dtype::F32, &bytes, dtype, values.len()) };
            expected.extend(bytes);
            levels.extend(back);
        }
        prop_assert_eq!(encoded, expected);

        // Rotating keeps distances: a bucket loses what max-min loses of the rotated bucket.
        let distance =
            |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
        for (at, (before, after)) in values.chunks(bucket).zip(decoded.chunks(bucket)).enumerate() {
            let place = at * bucket..at * bucket + before.len();
            let norm = distance(before, &vec![0.0; before.len()]);
            let rounded = 2f64.powi(match dtype { Dtype::F16 => -10, Dtype::BF16 => -7, _ => -18 });
            let lost = distance(before, after);
            let by_max_min = distance(&turned[place.clone()], &levels[place]);
            let slack = rounded * (norm + by_max_min) + 1e-6;
            prop_assert!((lost - by_max_min).abs() <= slack, "{} lost, {} by max-min, of {}", lost, by_max_min, norm);
        }
    }
}

#[test]
fn rotated_values_that_could_overflow_on_their_way_back_are_counted_as_too_large() {
    let settings = Settings { bits: 8, bucket: 64, ..Settings::default() };
    let run = |values: &[f32]| {
        let src = bytes_of(Dtype::F32, values);
        let (_, decoded, non_finite) = through("hadamard", &settings, Dtype::F32, &src, RngKey::keyed(&[]));
        (decoded, non_finite)
    };
    let mut values = vec![1.0; 200];
    values[70] = 3e38;
    let (decoded, non_finite) = run(&values);
    assert_eq!(non_finite, NonFinite { not_finite: 0, too_large: 1 });
    for (at, value) in decoded.iter().enumerate() {
        assert_eq!(value.is_nan(), (64..128).contains(&at), "{at}");
    }
    values[140] = f32::INFINITY;
    let (_, non_finite) = run(&values);
    assert_eq!(non_finite, NonFinite { not_finite: 1, too_large: 1 });
    values[70] = 1e30;
    values[140] = 1.0;
    let (decoded, non_finite) = run(&values);
    assert_eq!(non_finite, NonFinite::default());
    assert!((decoded[70] / 1e30 - 1.0).abs() < 1e-5, "{}", decoded[70]);
}

#[test]
fn buckets_that_cannot_be_rotated_are_refused() {
    for (text, part) in [
        ("hadamard:4,bucket=96", "codec hadamard: bucket is 96; expected a power of two from 64 to 8192"),
        ("hadamard:4,bucket=32", "bucket is 32; expected a power of two from 64 to 8192"),
        ("hadamard:4,bucket=16384", "bucket is 16384; expected a power of two from 64 to 8192"),
        ("hadamard:9", "bits is 9; expected 1 to 8"),
    ] {
        let error = parse(text).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Configuration);
        assert!(error.message.contains(part), "{text}: {}", error.message);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_greatest_of_each_bucket_are_kept(
        bits in 1u8..=8, bucket in 1u32..130, meta in 0usize..3, dtype in 0usize..3, kind in 0usize..12, seed: u64,
    ) {
        let (meta, dtype, bucket) = (FLOATS[meta], FLOATS[dtype], 8 * bucket as usize);
        let settings = Settings { bits, bucket: bucket as u32, meta, ..Settings::default() };
        let mut random = Random(seed);
        let mut values = data_values(count_of(bucket, kind), seed, &mut random);
        // Makes some elements equal except for the sign.
        values.iter_mut().for_each(|value| *value = if random.below(3) == 0 { -0.25 } else { *value });
        let src = bytes_of(dtype, &values);
        let values = values_of(dtype, &src);
        let (encoded, decoded, non_finite) = through("topk", &settings, dtype, &src, RngKey::keyed(&[]));
        prop_assert_eq!(non_finite, NonFinite::default());
        let (mut kept_values, mut indices, mut expected) = (Vec::new(), Vec::new(), vec![0.0; values.len()]);
        for (start, bucket) in (0..).step_by(bucket).zip(values.chunks(bucket)) {
            let mut order: Vec<usize> = (0..bucket.len()).collect();
            // The sort is stable: of equal elements the first comes first.
            order.sort_by(|&a, &b| bucket[b].abs().total_cmp(&bucket[a].abs()));
            order.truncate(bucket.len().div_ceil(1 << bits));
            order.sort();
            for index in order {
                kept_values.extend(from_f32(meta, bucket[index]));
                indices.extend((index as u16).to_le_bytes());
                expected[start + index] = to_f32(dtype, &from_f32(dtype, to_f32(meta, &from_f32(meta, bucket[index]))));
            }
        }
        let mut all = [kept_values, indices].concat();
        all.resize(all.len().next_multiple_of(8), 0);
        prop_assert_eq!(encoded, all);
        prop_assert_eq!(decoded, expected);
    }
}

#[test]
fn a_value_that_the_metadata_cannot_hold_spoils_its_bucket() {
    let settings = Settings { bits: 2, bucket: 8, meta: Dtype::F16, ..Settings::default() };
    let mut values = [1.0; 16];
    values[3] = 1e5;
    let (_, decoded, non_finite) =
        through("topk", &settings, Dtype::F32, &bytes_of(Dtype::F32, &values), RngKey::keyed(&[]));
    assert_eq!(non_finite, NonFinite { not_finite: 0, too_large: 1 });
    assert!(decoded[..8].iter().all(|value| value.is_nan()));
    assert_eq!(decoded[8..], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
}

/// Returns settings that the row accepts, and the codec with them.
fn any_codec(row: &'static Row, random: &mut Random) -> (Settings, Arc<dyn Codec>) {
    let mut settings = Settings {
        bits: row.bits.start() + random.below(u64::from(row.bits.end() - row.bits.start()) + 1) as u8,
        meta: FLOATS[random.below(3) as usize],
        rounding: [Rounding::Nearest, Rounding::Stochastic][random.below(2) as usize],
        skip_incomplete: random.below(3) == 0,
        ..Settings::default()
    };
    // Small buckets are more frequent than large ones, whose counts take long.
    let buckets: Vec<u32> =
        (8..=1040).chain([4096, MOST_BUCKET]).filter(|bucket| row.buckets.accept(*bucket)).collect();
    settings.bucket = buckets[random.below(buckets.len() as u64) as usize];
    (settings, row.build(&settings).unwrap())
}

/// Decodes in both ways on every instruction set, into the tensor's type and into float32. All results must have the
/// same bits.
fn decoded_alike(row: &Row, settings: &Settings, dtype: Dtype, bytes: &[u8], count: usize) -> Vec<u8> {
    let mut first = None;
    for isa in available_isas() {
        let codec = row.build_with_isa(settings, isa).unwrap();
        let decoded = decode(&*codec, dtype, bytes, count);
        let mut wide = vec![0f32; count];
        // SAFETY: `wide` has room for the elements.
        unsafe { codec.decode(wide.as_mut_ptr().cast(), Dtype::F32, bytes, dtype, count) };
        let mut sums = vec![0.5; count];
        codec.decode_add(&mut sums, bytes, dtype);
        let canonical = |values: Vec<f32>| -> Vec<u32> {
            values.iter().map(|value| if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }).collect()
        };
        let added: Vec<f32> = wide.iter().map(|value| 0.5 + value).collect();
        assert_eq!(canonical(sums), canonical(added), "{} {isa}: what is added is what is decoded", row.name);
        let found = (decoded, canonical(wide));
        assert_eq!(first.get_or_insert_with(|| found.clone()), &found, "{} {isa}", row.name);
    }
    first.unwrap().0
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES / 2, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever bytes a sender puts into a tile, decoding yields numbers and does no harm.
    #[test]
    fn any_bytes_can_be_decoded_by_every_codec(
        dtype in 0usize..3, kind in 0usize..12, changed in 0usize..3, seed: u64,
    ) {
        let dtype = FLOATS[dtype];
        for row in CODECS {
            let mut random = Random(seed);
            let (settings, codec) = any_codec(row, &mut random);
            let count = count_of(codec.grain(), kind);
            let mut bytes = if changed == 0 {
                (0..codec.encoded_bytes(dtype, count)).map(|_| random.next() as u8).collect()
            } else {
                let src = bytes_of(dtype, &data_values(count, seed, &mut random));
                encode(&*codec, dtype, &src, 0, RngKey::keyed(&[])).0
            };
            if !bytes.is_empty() {
                for _ in 0..changed * 4 {
                    // Bytes of all ones and zeros are special more often than others.
                    let at = random.below(bytes.len() as u64) as usize;
                    bytes[at] = [0xff, 0x7f, 0x80, 0x00, random.next() as u8][random.below(5) as usize];
                }
            }
            decoded_alike(row, &settings, dtype, &bytes, count);
        }
    }

    #[test]
    fn a_tensor_in_slices_is_the_whole_for_every_codec(
        dtype in 0usize..3, grains in 1usize..4, more in 0usize..5000, seed: u64,
    ) {
        let dtype = FLOATS[dtype];
        for row in CODECS {
            let mut random = Random(seed);
            let (settings, codec) = any_codec(row, &mut random);
            let cut = grains * codec.grain();
            let count = cut + more;
            let src = bytes_of(dtype, &data_values(count, seed, &mut random));
            let rng_key = RngKey::keyed(&[seed]);
            let whole = encode(&*codec, dtype, &src, 0, rng_key).0;
            let whole = decoded_alike(row, &settings, dtype, &whole, count);
            let (head, tail) = src.split_at(cut * dtype.size_bytes());
            let head = decode(&*codec, dtype, &encode(&*codec, dtype, head, 0, rng_key).0, cut);
            let tail = decode(&*codec, dtype, &encode(&*codec, dtype, tail, cut as u64, rng_key).0, more);
            prop_assert_eq!(whole, [head, tail].concat(), "{:?} cut at {}", codec, cut);
        }
    }

    #[test]
    fn sizes_depend_on_counts_alone_and_the_rest_is_zeros(dtype in 0usize..3, count in 0usize..9000, seed: u64) {
        let dtype = FLOATS[dtype];
        for row in CODECS {
            let mut random = Random(seed);
            let (_, codec) = any_codec(row, &mut random);
            let bytes = codec.encoded_bytes(dtype, count);
            prop_assert!(bytes % 8 == 0 && (count > 0 || bytes == 0));
            // If every element is NaN, no byte depends on the random numbers, and no byte of the earlier content is
            // left.
            let src = bytes_of(dtype, &vec![f32::NAN; count]);
            let (first, _) = encode(&*codec, dtype, &src, 0, RngKey::keyed(&[1]));
            let (second, _) = encode(&*codec, dtype, &src, 0, RngKey::keyed(&[2]));
            prop_assert_eq!(first, second);
            let parsed = parse(&format!("{codec:?}")).unwrap();
            prop_assert_eq!(parsed.summary(), codec.summary());
            prop_assert_eq!(parsed.encoded_bytes(dtype, count), bytes);
        }
    }
}

#[test]
fn what_is_not_finite_spoils_its_bucket_and_leaves_the_others_alone_with_every_codec() {
    let mut random = Random(5);
    for row in CODECS {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::from_bits(0xff80_0001)] {
            for dtype in FLOATS {
                let settings = Settings { bits: 8, bucket: 64, ..Settings::default() };
                let size = (row.shared)(&settings);
                let is_grouped = row.build(&settings).unwrap().grain() > size && size > 1;
                let count = 2 * 256 + 5;
                let mut values: Vec<f32> = (0..count).map(|_| random.below(1000) as f32 - 500.0).collect();
                let run =
                    |values: &[f32]| through(row.name, &settings, dtype, &bytes_of(dtype, values), RngKey::keyed(&[]));
                let (_, before, _) = run(&values);
                let at = 256 + random.below(256) as usize;
                values[at] = bad;
                let (_, after, non_finite) = run(&values);
                let bucket = at / size * size..(at / size + 1) * size;
                let counts = if size == 1 { 0 } else { 1 };
                assert_eq!(non_finite, NonFinite { not_finite: counts, too_large: 0 }, "{}", row.name);
                // Without the block's values, the scale of a group may differ.
                for index in (0..count).filter(|index| !is_grouped || bucket.contains(index)) {
                    let is_non_finite = size > 1 && bucket.contains(&index);
                    assert_eq!(
                        after[index].is_nan(),
                        is_non_finite || size == 1 && index == at && bad.is_nan(),
                        "{} {index}",
                        row.name
                    );
                    assert!(is_non_finite || index == at || after[index] == before[index], "{} {index}", row.name);
                }
                if is_grouped {
                    assert!(after.iter().enumerate().all(|(index, value)| value.is_nan() == bucket.contains(&index)));
                }
            }
        }
    }
}

/// Returns the bounds of the values of a slice, in their order. The caller handles values that the metadata cannot
/// hold.
fn bounds(row: &Row, settings: &Settings, values: &[f32]) -> Vec<Bound> {
    let (shared, grain) = ((row.shared)(settings), row.build(settings).unwrap().grain());
    let mut bounds = Vec::new();
    for group in values.chunks(grain) {
        for bucket in group.chunks(shared) {
            bounds.extend(bucket.iter().map(|_| (row.bound)(settings, bucket, group)));
        }
    }
    bounds
}

/// Returns the squared error of one encoding.
fn error_of(summary: Summary, values: &[f32]) -> f64 {
    let codec = summary.row().build(summary.settings()).unwrap();
    let (encoded, _) = encode(&*codec, Dtype::F32, &bytes_of(Dtype::F32, values), 0, RngKey::keyed(&[1]));
    let decoded = values_of(Dtype::F32, &decode(&*codec, Dtype::F32, &encoded, values.len()));
    values.iter().zip(decoded).map(|(&before, after)| (f64::from(before) - f64::from(after)).powi(2)).sum()
}

/// Fails unless decoded values are within the row's bounds. Buckets that were lost to their metadata must be NaN.
fn check_bounds(row: &Row, settings: &Settings, dtype: Dtype, values: &[f32], decoded: &[f32], lost: NonFinite) {
    let bounds = bounds(row, settings, values);
    assert_eq!(lost.not_finite, 0, "{}", row.name);
    for (bucket, (values, decoded)) in
        values.chunks((row.shared)(settings)).zip(decoded.chunks((row.shared)(settings))).enumerate()
    {
        if lost.too_large > 0 && decoded.iter().all(|value| value.is_nan()) {
            continue;
        }
        for (at, (&before, &after)) in values.iter().zip(decoded).enumerate() {
            let bound = bounds[bucket * (row.shared)(settings) + at].of(before);
            // A value decoded into 16 bits is rounded once more, and none exceeds the largest value.
            let most = f64::from(before).abs() + bound;
            let bound = match dtype {
                Dtype::F16 => bound + (most * 2f64.powi(-11)).max(2f64.powi(-25)),
                Dtype::BF16 => bound + (most * 2f64.powi(-8)).max(2f64.powi(-134)),
                _ => bound,
            };
            let off = (f64::from(before) - f64::from(after)).abs();
            assert!(
                off <= bound || bound.is_infinite(),
                "{} {settings:?}: {before} became {after}, bound {bound}",
                row.name
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES / 2, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_codec_is_within_the_bound_of_its_row(
        dtype in 0usize..3, kind in 0u64..5, count in 1usize..5000, seed: u64,
    ) {
        let dtype = FLOATS[dtype];
        for row in CODECS {
            let mut random = Random(seed);
            let (settings, codec) = any_codec(row, &mut random);
            let src = bytes_of(dtype, &data_values(count, kind, &mut random));
            let values = values_of(dtype, &src);
            let (encoded, lost) = encode(&*codec, dtype, &src, 0, RngKey::keyed(&[seed]));
            let decoded = values_of(dtype, &decode(&*codec, dtype, &encoded, count));
            check_bounds(row, &settings, dtype, &values, &decoded, lost);
            if codec.summary().loss() == Loss::None {
                prop_assert_eq!(values, decoded, "{} says that it loses nothing", row.name);
            }
        }
    }

    /// A codec that replaces another because of its loss loses less, until nothing is lost.
    #[test]
    fn from_every_codec_finer_ones_lead_to_one_that_loses_nothing(seed: u64) {
        let mut random = Random(seed);
        // Sums of uniform samples are nearly Gaussian.
        let unit = |random: &mut Random| (random.next() >> 40) as f32 / (1 << 24) as f32 - 0.5;
        let values: Vec<f32> = (0..1 << 14).map(|_| (0..12).map(|_| unit(&mut random)).sum()).collect();
        for row in CODECS {
            let mut summary = any_codec(row, &mut random).1.summary();
            let mut passed = vec![summary.to_string()];
            while let Some(finer) = summary.next_finer() {
                // The finer codec can be parsed from its text.
                prop_assert_eq!(parse(&finer.to_string()).unwrap().summary(), finer);
                prop_assert!(finer.loss() <= summary.loss(), "{} is no finer than {}", finer, summary);
                let (less, more) = (error_of(finer, &values), error_of(summary, &values));
                prop_assert!(less < more, "{} loses {} and {} loses {}", finer, less, summary, more);
                passed.push(finer.to_string());
                prop_assert!(passed.len() < 20, "no end: {:?}", passed);
                summary = finer;
            }
            prop_assert_eq!(summary.loss(), Loss::None, "{:?}", passed);
        }
    }
}

#[test]
fn rows_that_need_error_feedback_lose_much_and_no_other_is_refused_without_it() {
    for row in CODECS {
        let settings = Settings { bits: *row.bits.end(), ..Settings::default() };
        let loss = (row.loss)(&settings);
        assert!(!row.needs_feedback || loss == Loss::Coarse, "{}: {loss:?}", row.name);
        assert!(row.needs_feedback || loss < Loss::Coarse, "{} with most bits: {loss:?}", row.name);
        assert!(row.is_cast == ((row.shared)(&settings) == 1), "{}", row.name);
    }
}

#[test]
fn what_auto_tries_of_a_codec_is_that_codec_and_the_finest_comes_first() {
    for row in CODECS {
        let bytes = row.auto.iter().map(|text| {
            let codec = parse(text).unwrap();
            assert_eq!(codec.summary().row().id, row.id, "{text}");
            assert!(!row.needs_feedback, "{text}: nothing is carried over while it is tried");
            codec.encoded_bytes(Dtype::F32, 1 << 16)
        });
        assert!(bytes.is_sorted_by(|finer, coarser| finer > coarser), "{}", row.name);
    }
}

#[test]
fn settings_beyond_what_a_row_accepts_are_refused_with_what_it_does() {
    for row in CODECS {
        let refused = |settings: Settings, part: String| {
            let error = row.build(&settings).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Configuration);
            assert!(error.message.contains(&part) && error.message.contains(row.name), "{}", error.message);
        };
        let default = Settings { bits: *row.bits.end(), ..Settings::default() };
        row.build(&default).unwrap();
        if row.has(Setting::Bits) {
            let (least, most) = (*row.bits.start(), *row.bits.end());
            for bits in [least - 1, most + 1] {
                refused(Settings { bits, ..default }, format!("bits is {bits}; expected {least} to {most}"));
            }
            row.build(&Settings { bits: least, ..default }).unwrap();
        }
        if row.has(Setting::Bucket) {
            for bucket in [0, 7, 8200, 16384] {
                refused(Settings { bucket, ..default }, format!("bucket is {bucket}; expected {}", row.buckets));
            }
        }
        if row.has(Setting::Meta) {
            let settings = Settings { meta: Dtype::F64, ..default };
            refused(settings, "meta is float64; expected float32, float16 or bfloat16".to_owned());
        }
    }
}

#[test]
fn constants_zeros_and_outliers_keep_what_they_can() {
    for row in CODECS {
        let settings = Settings { bits: 8, bucket: 64, ..Settings::default() };
        let (loss, grain) = ((row.loss)(&settings), row.build(&settings).unwrap().grain());
        let run = |values: &[f32]| {
            let src = bytes_of(Dtype::F32, values);
            let (_, decoded, lost) = through(row.name, &settings, Dtype::F32, &src, RngKey::keyed(&[]));
            check_bounds(row, &settings, Dtype::F32, values, &decoded, lost);
            decoded
        };
        // Not every codec can represent numbers of any size.
        let is_held = |value: f32| (row.bound)(&settings, &[value], &[value]).of(value).is_finite();
        let large = if is_held(1e30) { 1e30 } else { 1e4 };
        for count in [1, 64, 300] {
            assert!(run(&vec![0.0; count]).iter().all(|value| *value == 0.0), "{}", row.name);
            assert!(run(&vec![-0.0; count]).iter().all(|value| *value == 0.0), "{}", row.name);
            for value in run(&vec![large; count]) {
                assert!((value / large - 1.0).abs() <= 0.25 || loss >= Loss::Coarse, "{}: {value}", row.name);
            }
        }
        // Elements that are encoded together share a scale, so an outlier leaves the others only a part of it.
        let outlier = if grain > 256 { 1e4 } else { large };
        let mut values = vec![1.0; 300];
        values[100] = outlier;
        let decoded = run(&values);
        assert!((decoded[100] / outlier - 1.0).abs() <= 0.25 || row.hides_magnitudes, "{}: {}", row.name, decoded[100]);
        assert!((decoded[299] - 1.0).abs() < 0.13 || loss >= Loss::Coarse, "{}: {}", row.name, decoded[299]);
        // Numbers below the normal ones become numbers that are no larger than the smallest normal number.
        let tiny: Vec<f32> = (0..300).map(|at| f32::from_bits(at * 20_011)).collect();
        for (before, after) in tiny.iter().zip(run(&tiny)) {
            let bound = f32::MIN_POSITIVE * if row.name == "hadamard" { 4.0 } else { 1.0 };
            assert!((before - after).abs() <= bound, "{}: {before} became {after}", row.name);
        }
    }
}

#[test]
fn a_thread_that_flushes_denormals_gets_the_same_from_every_codec() {
    let values: Vec<f32> =
        (0..3000).map(|at| f32::from_bits(at * 10_007) * if at % 3 == 0 { -1.0 } else { 1.0 }).collect();
    for row in CODECS {
        let settings = Settings { bits: 8, ..Settings::default() };
        let both = || {
            let (encoded, decoded, _) =
                through(row.name, &settings, Dtype::F32, &bytes_of(Dtype::F32, &values), RngKey::keyed(&[]));
            (encoded, decoded.into_iter().map(f32::to_bits).collect::<Vec<_>>())
        };
        let want = both();
        assert_eq!(with_flushed_denormals(both), want, "{}", row.name);
    }
}

/// A tensor without elements has no memory either, and torch then gives the address 0.
#[test]
fn no_elements_at_no_address_are_nothing_to_every_codec() {
    for row in CODECS {
        let settings = Settings { bits: 8, ..Settings::default() };
        for (dtype, isa) in
            FLOATS.into_iter().flat_map(|dtype| available_isas().into_iter().map(move |isa| (dtype, isa)))
        {
            let codec = row.build_with_isa(&settings, isa).unwrap();
            let mut encoded = vec![0; codec.encoded_bytes(dtype, 0)];
            for given in [dtype, Dtype::F32] {
                let slice = Slice { src: std::ptr::null(), dtype: given, tensor: dtype, count: 0, first: 0 };
                // SAFETY: the slice has no elements.
                let non_finite = unsafe { codec.encode(&mut encoded, slice, RngKey::keyed(&[])) };
                assert_eq!(non_finite, NonFinite::default(), "{}", row.name);
                // SAFETY: no element is decoded, so nothing is written to the address 0.
                unsafe { codec.decode(std::ptr::null_mut(), given, &encoded, dtype, 0) };
            }
            codec.decode_add(&mut [], &encoded, dtype);
        }
    }
}

#[test]
fn small_floats_beyond_the_range_of_a_16_bit_type_become_its_largest() {
    // A scale that is rounded up may decode to more than the encoded value. Here the bytes are constructed by hand.
    for (name, bytes) in [
        ("e4m3", [&1e9f32.to_le_bytes()[..], &[0x38, 0xb8, 0, 0]].concat()),
        ("mxfp8", vec![180, 0x38, 0xb8, 0, 0, 0, 0, 0]),
        ("mxfp4", vec![180, 0xa2, 0, 0, 0, 0, 0, 0]),
    ] {
        for isa in available_isas() {
            let codec = codec(name).unwrap().build_with_isa(&Settings::default(), isa).unwrap();
            let decoded = values_of(Dtype::F16, &decode(&*codec, Dtype::F16, &bytes, 2));
            assert_eq!(decoded, [65504.0, -65504.0], "{name}");
        }
    }
}

/// Returns the relative squared error of one encoding.
#[cfg(not(miri))]
fn relative_error(text: &str, values: &[f32]) -> f64 {
    let codec = parse(text).unwrap();
    let (encoded, _) = encode(&*codec, Dtype::F32, &bytes_of(Dtype::F32, values), 0, RngKey::keyed(&[1]));
    let decoded = values_of(Dtype::F32, &decode(&*codec, Dtype::F32, &encoded, values.len()));
    let square = |x: f64| x * x;
    let error: f64 = values.iter().zip(&decoded).map(|(x, y)| square(f64::from(*x) - f64::from(*y))).sum();
    error / values.iter().map(|x| square(f64::from(*x))).sum::<f64>()
}

/// Gaussian samples, Laplace samples, and Gaussian samples of which each 256 have a magnitude of their own.
#[cfg(not(miri))]
fn samples() -> [Vec<f32>; 3] {
    const COUNT: usize = 1 << 20;
    let mut random = Random(12345);
    let mut uniform = || ((random.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let mut gauss = |_| (-2.0 * uniform().ln()).sqrt() * (std::f64::consts::TAU * uniform()).cos();
    let gaussian: Vec<f32> = (0..COUNT).map(|at| gauss(at) as f32).collect();
    let sizes: Vec<f32> = (0..COUNT / 256).map(|at| (1.5 * gauss(at)).exp() as f32).collect();
    let of_sizes = (0..COUNT).map(|at| gauss(at) as f32 * sizes[at / 256]).collect();
    let laplace = (0..COUNT).map(|_| (if uniform() < 0.5 { 1.0 } else { -1.0 } * uniform().ln()) as f32).collect();
    [gaussian, laplace, of_sizes]
}

/// The errors were measured elsewhere on such samples, or follow from their distribution.
#[test]
#[cfg(not(miri))]
fn the_error_of_each_format_on_known_data_is_as_it_should_be() {
    let samples = samples();
    let known: [(&str, [Option<f64>; 3]); 10] = [
        ("maxmin:4,bucket=64,meta=float16", [Some(8.05e-3), Some(1.23e-2), Some(8.2e-3)]),
        ("bf16", [Some(2.8e-6), Some(2.7e-6), Some(2.7e-6)]),
        ("mxfp4", [Some(1.32e-2), Some(1.61e-2), Some(1.33e-2)]),
        ("nvfp4", [Some(9.0e-3), Some(8.6e-3), Some(8.8e-3)]),
        ("mxfp8", [Some(8.6e-4), Some(1.0e-3), Some(8.6e-4)]),
        ("e4m3", [Some(6.8e-4), Some(6.5e-4), Some(7.0e-4)]),
        // Among values of many magnitudes the few largest decide, which depend on the samples.
        ("hadamard:4,bucket=1024", [Some(1.57e-2), Some(1.57e-2), None]),
        ("hadamard:2,bucket=1024,rounding=nearest", [Some(0.400), Some(0.399), None]),
        // 1 - (mean magnitude)^2 / mean square. The mean of a bucket adapts to its values, which makes the error a
        // little smaller.
        ("sign", [Some(1.0 - 2.0 / std::f64::consts::PI), Some(0.5), None]),
        // One mantissa bit less: four times the error of e4m3.
        ("e5m2", [Some(4.0 * 6.8e-4), Some(4.0 * 6.5e-4), None]),
    ];
    for (text, wanted) in known {
        for (values, wanted) in samples.iter().zip(wanted) {
            let found = relative_error(text, values);
            let Some(wanted) = wanted else { continue };
            assert!((found / wanted - 1.0).abs() < 0.05, "{text}: {found:.3e}, expected {wanted:.3e}");
        }
    }
}

/// Errors do not depend on the unit of the values, as long as scales have the range for it.
#[test]
#[cfg(not(miri))]
fn the_error_does_not_depend_on_powers_of_two() {
    let [gaussian, ..] = samples();
    for (text, exponents) in [
        ("sign", -120..=100),
        ("e4m3", -110..=100),
        ("e5m2", -100..=100),
        ("mxfp8", -110..=100),
        ("mxfp8_e5m2", -105..=100),
        ("mxfp4", -120..=100),
        ("nvfp4", -95..=100),
        ("hadamard:4", -110..=100),
        ("hadamard:2,bucket=1024", -110..=100),
    ] {
        let wanted = relative_error(text, &gaussian[..1 << 14]);
        for exponent in exponents.step_by(7) {
            let scaled: Vec<f32> = gaussian[..1 << 14].iter().map(|x| x * 2f32.powi(exponent)).collect();
            let found = relative_error(text, &scaled);
            assert!((found / wanted - 1.0).abs() < 1e-3, "{text} at 2^{exponent}: {found:.4e}, otherwise {wanted:.4e}");
        }
    }
}

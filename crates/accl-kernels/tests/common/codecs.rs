//! Helpers that encode and decode with a codec, on unaligned buffers and on every instruction set.

use accl_kernels::available_isas;
use accl_kernels::codec::{Codec, NonFinite, RngKey, Settings, Slice, codec};
use accl_types::Dtype;

use super::{Buffer, Random};

pub const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

pub fn to_f32(dtype: Dtype, bytes: &[u8]) -> f32 {
    match dtype {
        Dtype::F16 => half::f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        Dtype::BF16 => half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        _ => f32::from_le_bytes(bytes.try_into().unwrap()),
    }
}

pub fn from_f32(dtype: Dtype, value: f32) -> Vec<u8> {
    match dtype {
        Dtype::F16 => half::f16::from_f32(value).to_le_bytes().to_vec(),
        Dtype::BF16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
        _ => value.to_le_bytes().to_vec(),
    }
}

pub fn bytes_of(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&value| from_f32(dtype, value)).collect()
}

pub fn values_of(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(dtype.size_bytes()).map(|bytes| to_f32(dtype, bytes)).collect()
}

pub fn encode(codec: &dyn Codec, dtype: Dtype, src: &[u8], first: u64, rng_key: RngKey) -> (Vec<u8>, NonFinite) {
    let count = src.len() / dtype.size_bytes();
    // Both buffers are unaligned, and `dst` has a known content, so that bytes that are not written are detected.
    let src = Buffer::new(src, 3);
    let room = codec.encoded_bytes(dtype, count);
    let mut dst = vec![0xa5; room + 5];
    // SAFETY: `src` holds `count` elements.
    let non_finite =
        unsafe { codec.encode(&mut dst[5..], Slice { src: src.ptr(), dtype, tensor: dtype, count, first }, rng_key) };
    (dst.split_off(5), non_finite)
}

pub fn decode(codec: &dyn Codec, dtype: Dtype, encoded: &[u8], count: usize) -> Vec<u8> {
    let src = Buffer::new(encoded, 1);
    let dst = Buffer::new(&vec![0xa5; count * dtype.size_bytes()], 2);
    // SAFETY: `dst` has room for `count` elements.
    unsafe { codec.decode(dst.ptr(), dtype, src.bytes(), dtype, count) };
    dst.check_guards();
    dst.bytes().to_vec()
}

/// Creates values of one magnitude, of many, of one sign, or all equal, depending on `kind`.
pub fn data(dtype: Dtype, count: usize, kind: u64, random: &mut Random) -> Vec<u8> {
    bytes_of(dtype, &data_values(count, kind, random))
}

pub fn data_values(count: usize, kind: u64, random: &mut Random) -> Vec<f32> {
    let scale = 10f32.powi(random.below(7) as i32 - 4);
    (0..count)
        .map(|_| {
            let unit = (random.next() >> 40) as f32 / (1 << 24) as f32;
            match kind % 5 {
                0 => (unit - 0.5) * scale,
                1 => unit * scale,
                2 => -unit * scale - 3.0,
                3 => scale,
                _ => (unit - 0.5) * 10f32.powi(random.below(9) as i32 - 5),
            }
        })
        .collect()
}

/// Encodes and decodes with a codec on every instruction set. The results must be the same and are returned.
pub fn through(
    name: &str,
    settings: &Settings,
    dtype: Dtype,
    src: &[u8],
    rng_key: RngKey,
) -> (Vec<u8>, Vec<f32>, NonFinite) {
    let count = src.len() / dtype.size_bytes();
    let mut first = None;
    for isa in available_isas() {
        let codec = codec(name).unwrap().build_with_isa(settings, isa).unwrap();
        let (encoded, non_finite) = encode(&*codec, dtype, src, 0, rng_key);
        let decoded = values_of(dtype, &decode(&*codec, dtype, &encoded, count));
        let mut sums = vec![0.0; count];
        codec.decode_add(&mut sums, &encoded, dtype);
        let found = (encoded, decoded, sums, non_finite);
        let same = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(&a, &b)| alike(a, b));
        let (encoded, decoded, sums, non_finite) = first.get_or_insert_with(|| found.clone());
        assert!(
            *encoded == found.0 && same(decoded, &found.1) && same(sums, &found.2) && *non_finite == found.3,
            "{isa}"
        );
    }
    let (encoded, decoded, _, non_finite) = first.unwrap();
    (encoded, decoded, non_finite)
}

/// Whether both have the same bits, or both are NaN.
pub fn alike(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

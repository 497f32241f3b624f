//! Arithmetic plugins of the data path: sums, maxima, and conversion between single and half precision.

use half::f16;

/// Reduces elements by the function of a stream destination. The numbers are the reference's, with sums before maxima. Returns `false` for an unknown
/// destination.
pub(crate) fn reduce(destination: u32, into: &mut [u8], other: &[u8]) -> bool {
    match destination {
        0 => each(into, other, |a, b| (f32::from_le_bytes(a) + f32::from_le_bytes(b)).to_le_bytes()),
        1 => each(into, other, |a, b| (f64::from_le_bytes(a) + f64::from_le_bytes(b)).to_le_bytes()),
        2 => each(into, other, |a, b| i32::from_le_bytes(a).wrapping_add(i32::from_le_bytes(b)).to_le_bytes()),
        3 => each(into, other, |a, b| i64::from_le_bytes(a).wrapping_add(i64::from_le_bytes(b)).to_le_bytes()),
        4 => each(into, other, |a, b| (f16::from_le_bytes(a) + f16::from_le_bytes(b)).to_le_bytes()),
        5 => each(into, other, |a, b| larger(f32::from_le_bytes(a), f32::from_le_bytes(b)).to_le_bytes()),
        6 => each(into, other, |a, b| larger(f64::from_le_bytes(a), f64::from_le_bytes(b)).to_le_bytes()),
        7 => each(into, other, |a, b| larger(i32::from_le_bytes(a), i32::from_le_bytes(b)).to_le_bytes()),
        8 => each(into, other, |a, b| larger(i64::from_le_bytes(a), i64::from_le_bytes(b)).to_le_bytes()),
        9 => each(into, other, |a, b| larger(f16::from_le_bytes(a), f16::from_le_bytes(b)).to_le_bytes()),
        _ => return false,
    }
    true
}

fn larger<T: PartialOrd>(a: T, b: T) -> T {
    if a > b { a } else { b }
}

fn each<const BYTES: usize>(into: &mut [u8], other: &[u8], f: impl Fn([u8; BYTES], [u8; BYTES]) -> [u8; BYTES]) {
    let (into, _) = into.as_chunks_mut::<BYTES>();
    let (other, _) = other.as_chunks::<BYTES>();
    into.iter_mut().zip(other).for_each(|(a, b)| *a = f(*a, *b));
}

/// Converts single to half precision, rounded to nearest.
pub(crate) fn compress(from: &[u8]) -> Vec<u8> {
    let (from, _) = from.as_chunks::<4>();
    from.iter().flat_map(|&element| f16::from_f32(f32::from_le_bytes(element)).to_le_bytes()).collect()
}

/// Converts half to single precision.
pub(crate) fn decompress(from: &[u8]) -> Vec<u8> {
    let (from, _) = from.as_chunks::<2>();
    from.iter().flat_map(|&element| f16::from_le_bytes(element).to_f32().to_le_bytes()).collect()
}

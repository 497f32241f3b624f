//! Multiplication by a factor against plain Rust, on every instruction set.

mod common;

use accl_kernels::{available_isas, describe_isa, scale, scale_with_isa};
use accl_types::{Dtype, DtypeClass, ErrorKind};
use common::{Buffer, Random, elements};

/// Factors that are exact, that round, that change the sign, that overflow and that make NaN of infinities.
const FACTORS: &[f64] = &[1.0, 0.5, 1.0 / 3.0, -2.0, 1e30, 1e-30, 0.0, f64::NAN];

const COUNTS: &[usize] = if cfg!(miri) { &[0, 5] } else { &[0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 64, 65, 1000] };

fn expected(dtype: Dtype, src: &[u8], factor: f64) -> Vec<u8> {
    macro_rules! multiply {
        ($float:ident) => {
            |bytes: &[u8]| {
                let product = $float::from_le_bytes(bytes.try_into().unwrap()) * factor as $float;
                (if product.is_nan() { $float::NAN } else { product }).to_le_bytes().to_vec()
            }
        };
    }
    macro_rules! multiply16 {
        ($float:ident) => {
            |bytes: &[u8]| {
                let product = half::$float::from_le_bytes(bytes.try_into().unwrap()).to_f32() * factor as f32;
                let rounded = if product.is_nan() { half::$float::NAN } else { half::$float::from_f32(product) };
                rounded.to_le_bytes().to_vec()
            }
        };
    }
    match dtype {
        Dtype::F16 => src.chunks(2).flat_map(multiply16!(f16)).collect(),
        Dtype::BF16 => src.chunks(2).flat_map(multiply16!(bf16)).collect(),
        Dtype::F32 | Dtype::C64 => src.chunks(4).flat_map(multiply!(f32)).collect(),
        Dtype::F64 | Dtype::C128 => src.chunks(8).flat_map(multiply!(f64)).collect(),
        other => unreachable!("{other} is not scaled"),
    }
}

fn is_scaled(dtype: Dtype) -> bool {
    matches!(dtype.class(), DtypeClass::Float16 | DtypeClass::Float | DtypeClass::Complex)
}

#[test]
fn scale_equals_the_oracle_on_every_isa() {
    let mut random = Random(4);
    for &dtype in Dtype::ALL.iter().filter(|&&dtype| is_scaled(dtype)) {
        for &count in COUNTS {
            let content = elements(dtype, count, &mut random);
            for &factor in FACTORS {
                let want = expected(dtype, &content, factor);
                for isa in available_isas() {
                    for misalignment in [0, 1, 8] {
                        let src = Buffer::new(&content, misalignment);
                        let dst = Buffer::new(&vec![0x5a; content.len()], 64 - misalignment);
                        let (to, from) = (dst.ptr(), src.ptr());
                        // SAFETY: both have `count` elements; they do not overlap in the first call and are equal in
                        // the second.
                        unsafe {
                            scale_with_isa(isa, dtype, to, from, count, factor).unwrap();
                            assert_eq!(src.bytes(), content);
                            scale_with_isa(isa, dtype, from, from, count, factor).unwrap();
                        }
                        for buffer in [&src, &dst] {
                            assert_eq!(buffer.bytes(), want, "{dtype} {isa} x{count} by {factor} +{misalignment}");
                            buffer.check_guards();
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn dtypes_without_fractions_are_refused() {
    for &dtype in Dtype::ALL.iter().filter(|&&dtype| !is_scaled(dtype)) {
        let mut byte = 7;
        // SAFETY: no elements are read or written.
        let error = unsafe { scale(dtype, &mut byte, &7, 0, 2.0) }.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Unsupported);
        assert!(error.message.contains(dtype.name()), "{}", error.message);
    }
}

#[test]
fn the_description_names_the_best_isa() {
    let best = *available_isas().last().unwrap();
    assert!(describe_isa().starts_with(best.name()));
}

//! The reductions written naively, one element at a time in plain Rust, from the rules in the crate's documentation.

use accl_types::{Dtype, ReduceOp};

/// Reduces one element of each source, in order. `divisor` is the world size if this is the last step of AVG, else
/// `None`.
pub fn reduce(op: ReduceOp, dtype: Dtype, operands: &[&[u8]], divisor: Option<u32>) -> Vec<u8> {
    macro_rules! read {
        ($type:ty) => {
            operands.iter().map(|bytes| <$type>::from_le_bytes((*bytes).try_into().unwrap()))
        };
    }
    macro_rules! integer {
        ($type:ty) => {{
            let value = read!($type).reduce(|a, b| integer(op, a.into(), b.into()) as $type).unwrap();
            match divisor {
                // Rounds towards zero. The sum has wrapped as SUM does.
                Some(world) if op == ReduceOp::Avg => (i128::from(value) / i128::from(world)) as $type,
                _ => value,
            }
            .to_le_bytes()
            .to_vec()
        }};
    }
    macro_rules! float16 {
        ($type:ty) => {{
            let value =
                finish32(read!($type).map(|x| x.to_f32()).reduce(|a, b| float32(op, a, b)).unwrap(), op, divisor);
            let rounded = if value.is_nan() { <$type>::NAN } else { <$type>::from_f32(value) };
            rounded.to_le_bytes().to_vec()
        }};
    }
    match dtype {
        Dtype::Bool => {
            let value = operands.iter().map(|bytes| bytes[0] != 0).reduce(|a, b| boolean(op, a, b)).unwrap();
            vec![u8::from(value)]
        }
        Dtype::U8 => integer!(u8),
        Dtype::I8 => integer!(i8),
        Dtype::U16 => integer!(u16),
        Dtype::I16 => integer!(i16),
        Dtype::U32 => integer!(u32),
        Dtype::I32 => integer!(i32),
        Dtype::U64 => integer!(u64),
        Dtype::I64 => integer!(i64),
        Dtype::F16 => float16!(half::f16),
        Dtype::BF16 => float16!(half::bf16),
        Dtype::F32 => canonical32(finish32(read!(f32).reduce(|a, b| float32(op, a, b)).unwrap(), op, divisor))
            .to_le_bytes()
            .to_vec(),
        Dtype::F64 => canonical64(finish64(read!(f64).reduce(|a, b| float64(op, a, b)).unwrap(), op, divisor))
            .to_le_bytes()
            .to_vec(),
        Dtype::C64 => complex(op, dtype, Dtype::F32, operands, divisor),
        Dtype::C128 => complex(op, dtype, Dtype::F64, operands, divisor),
        _ => unreachable!("{dtype} is not reduced"),
    }
}

fn boolean(op: ReduceOp, a: bool, b: bool) -> bool {
    match op {
        ReduceOp::Sum | ReduceOp::Max | ReduceOp::Bor => a || b,
        ReduceOp::Product | ReduceOp::Min | ReduceOp::Band => a && b,
        ReduceOp::Bxor => a != b,
        ReduceOp::Avg | ReduceOp::PremulSum => unreachable!(),
    }
}

/// Computes in 128 bits; the caller's cast wraps. Only a product of two 64-bit numbers could overflow.
fn integer(op: ReduceOp, a: i128, b: i128) -> i128 {
    match op {
        ReduceOp::Sum | ReduceOp::Avg => a + b,
        ReduceOp::Product => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        ReduceOp::Band => a & b,
        ReduceOp::Bor => a | b,
        ReduceOp::Bxor => a ^ b,
        ReduceOp::PremulSum => unreachable!(),
    }
}

macro_rules! floats {
    ($float:ident, $operate:ident, $finish:ident, $canonical:ident) => {
        fn $operate(op: ReduceOp, a: $float, b: $float) -> $float {
            match op {
                ReduceOp::Sum | ReduceOp::Avg | ReduceOp::PremulSum => a + b,
                ReduceOp::Product => a * b,
                ReduceOp::Min | ReduceOp::Max if a.is_nan() || b.is_nan() => $float::NAN,
                ReduceOp::Min => {
                    if a.total_cmp(&b).is_le() {
                        a
                    } else {
                        b
                    }
                }
                ReduceOp::Max => {
                    if a.total_cmp(&b).is_ge() {
                        a
                    } else {
                        b
                    }
                }
                ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => unreachable!(),
            }
        }

        fn $finish(value: $float, op: ReduceOp, divisor: Option<u32>) -> $float {
            match divisor {
                Some(world) if op == ReduceOp::Avg => value / world as $float,
                _ => value,
            }
        }

        pub fn $canonical(value: $float) -> $float {
            if value.is_nan() { $float::from_bits($float::NAN.to_bits()) } else { value }
        }
    };
}

floats!(f32, float32, finish32, canonical32);
floats!(f64, float64, finish64, canonical64);

fn complex(op: ReduceOp, dtype: Dtype, part: Dtype, operands: &[&[u8]], divisor: Option<u32>) -> Vec<u8> {
    let middle = dtype.size_bytes() / 2;
    if op != ReduceOp::Product {
        let parts = |side: std::ops::Range<usize>| -> Vec<u8> {
            let operands: Vec<&[u8]> = operands.iter().map(|bytes| &bytes[side.clone()]).collect();
            reduce(op, part, &operands, divisor)
        };
        return [parts(0..middle), parts(middle..2 * middle)].concat();
    }
    macro_rules! product {
        ($float:ident, $canonical:ident) => {{
            let read = |bytes: &[u8]| {
                let part = |bytes: &[u8]| $float::from_le_bytes(bytes.try_into().unwrap());
                (part(&bytes[..middle]), part(&bytes[middle..]))
            };
            let (re, im) = operands
                .iter()
                .map(|bytes| read(bytes))
                .reduce(|(a, b), (c, d)| (a * c - b * d, a * d + b * c))
                .unwrap();
            [$canonical(re).to_le_bytes(), $canonical(im).to_le_bytes()].concat()
        }};
    }
    if part == Dtype::F32 { product!(f32, canonical32) } else { product!(f64, canonical64) }
}

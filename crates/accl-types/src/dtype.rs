//! Element types that torch can send, and their widths. `accl-kernels` defines which of them can be reduced, and how.

use std::fmt;

/// How an element type behaves in arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DtypeClass {
    /// `bool`: one byte, 0 or 1.
    Bool,
    /// Signed and unsigned integers.
    Integer,
    /// float16 and bfloat16: sent as they are, added in float32.
    Float16,
    /// float32 and float64.
    Float,
    /// complex64 and complex128.
    Complex,
    /// Types that are sent but never reduced: 8-bit floats, sub-byte packs, half complex.
    Opaque,
}

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $name:literal, $bytes:literal, $class:ident;)*) => {
        /// Element type of a buffer. The discriminant is the code on the wire and across the C++ bridge.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Dtype {
            $($(#[$doc])* $variant = $code,)*
        }

        impl Dtype {
            /// Every dtype, in code order.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$variant),*];

            /// The name that torch prints after `torch.`.
            pub const fn name(self) -> &'static str {
                match self { $(Dtype::$variant => $name,)* }
            }

            /// Size of one element in bytes.
            pub const fn size_bytes(self) -> usize {
                match self { $(Dtype::$variant => $bytes,)* }
            }

            /// How the type behaves in arithmetic.
            pub const fn class(self) -> DtypeClass {
                match self { $(Dtype::$variant => DtypeClass::$class,)* }
            }

            /// The dtype with this code, or `None`.
            pub const fn from_code(code: u8) -> Option<Dtype> {
                match code { $($code => Some(Dtype::$variant),)* _ => None }
            }
        }
    };
}

impl Dtype {
    /// The dtype of torch's `ScalarType` with this code, or `None` if its elements cannot be sent. The scale of quantized
    /// types would not be sent with them. torch's releases add codes and change none.
    pub const fn from_torch(scalar_type: i8) -> Option<Dtype> {
        Some(match scalar_type {
            0 => Dtype::U8,
            1 => Dtype::I8,
            2 => Dtype::I16,
            3 => Dtype::I32,
            4 => Dtype::I64,
            5 => Dtype::F16,
            6 => Dtype::F32,
            7 => Dtype::F64,
            8 => Dtype::C32,
            9 => Dtype::C64,
            10 => Dtype::C128,
            11 => Dtype::Bool,
            15 => Dtype::BF16,
            // Bits1x8, Bits2x4, Bits4x2, Bits8, UInt1 to UInt7, Int1 to Int7: one byte per element.
            18..=21 | 30..=43 => Dtype::Bits8,
            22 => Dtype::Bits16,
            23 => Dtype::F8E5M2,
            24 => Dtype::F8E4M3Fn,
            25 => Dtype::F8E5M2FnUz,
            26 => Dtype::F8E4M3FnUz,
            27 => Dtype::U16,
            28 => Dtype::U32,
            29 => Dtype::U64,
            44 => Dtype::F8E8M0Fnu,
            45 => Dtype::F4E2M1FnX2,
            46 => Dtype::BC32,
            _ => return None,
        })
    }
}

dtypes! {
    /// `torch.bool`
    Bool = 0, "bool", 1, Bool;
    /// `torch.uint8`
    U8 = 1, "uint8", 1, Integer;
    /// `torch.int8`
    I8 = 2, "int8", 1, Integer;
    /// `torch.uint16`
    U16 = 3, "uint16", 2, Integer;
    /// `torch.int16`
    I16 = 4, "int16", 2, Integer;
    /// `torch.uint32`
    U32 = 5, "uint32", 4, Integer;
    /// `torch.int32`
    I32 = 6, "int32", 4, Integer;
    /// `torch.uint64`
    U64 = 7, "uint64", 8, Integer;
    /// `torch.int64`
    I64 = 8, "int64", 8, Integer;
    /// `torch.float16`
    F16 = 9, "float16", 2, Float16;
    /// `torch.bfloat16`
    BF16 = 10, "bfloat16", 2, Float16;
    /// `torch.float32`
    F32 = 11, "float32", 4, Float;
    /// `torch.float64`
    F64 = 12, "float64", 8, Float;
    /// `torch.complex32`
    C32 = 13, "complex32", 4, Opaque;
    /// `torch.complex64`
    C64 = 14, "complex64", 8, Complex;
    /// `torch.complex128`
    C128 = 15, "complex128", 16, Complex;
    /// `torch.float8_e4m3fn`
    F8E4M3Fn = 16, "float8_e4m3fn", 1, Opaque;
    /// `torch.float8_e5m2`
    F8E5M2 = 17, "float8_e5m2", 1, Opaque;
    /// `torch.float8_e4m3fnuz`
    F8E4M3FnUz = 18, "float8_e4m3fnuz", 1, Opaque;
    /// `torch.float8_e5m2fnuz`
    F8E5M2FnUz = 19, "float8_e5m2fnuz", 1, Opaque;
    /// `torch.float8_e8m0fnu`
    F8E8M0Fnu = 20, "float8_e8m0fnu", 1, Opaque;
    /// `torch.float4_e2m1fn_x2`: two values per byte
    F4E2M1FnX2 = 21, "float4_e2m1fn_x2", 1, Opaque;
    /// `torch.bcomplex32`
    BC32 = 22, "bcomplex32", 4, Opaque;
    /// `torch.bits8` and the sub-byte integers, which occupy one byte each
    Bits8 = 23, "bits8", 1, Opaque;
    /// `torch.bits16`
    Bits16 = 24, "bits16", 2, Opaque;
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_leads_back_to_its_dtype() {
        for (code, &dtype) in Dtype::ALL.iter().enumerate() {
            assert_eq!(Dtype::from_code(code as u8), Some(dtype));
        }
        assert_eq!(Dtype::from_code(Dtype::ALL.len() as u8), None);
    }

    #[test]
    fn every_dtype_is_one_of_torchs_and_quantized_types_are_none() {
        for &dtype in Dtype::ALL {
            let codes = (i8::MIN..=i8::MAX).filter(|&code| Dtype::from_torch(code) == Some(dtype)).count();
            assert_eq!(codes, if dtype == Dtype::Bits8 { 18 } else { 1 }, "{dtype}");
        }
        for quantized in [12, 13, 14, 16, 17] {
            assert_eq!(Dtype::from_torch(quantized), None);
        }
    }
}

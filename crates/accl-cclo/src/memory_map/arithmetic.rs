//! Arithmetic configs: how an engine reduces elements, and how it represents them on the wire.

use crate::words::words;

/// Maximum number of functions in a config.
pub const MAX_FUNCTIONS: usize = 10;

words! {
    /// The words of a config that precede its functions.
    pub struct ArithmeticHead: 7 words {
        0 uncompressed_bytes: "Size of an element in memory in bytes.",
        1 compressed_bytes: "Size of an element on a compressed wire in bytes.",
        2 log2_ratio: "Logarithm of the number of elements in one compressed element.",
        3 compressor: "Stream destination of the compressor.",
        4 decompressor: "Stream destination of the decompressor.",
        5 functions: "Number of functions that follow.",
        6 adds_compressed: "One if arithmetic works on the compressed form.",
    }
}

/// Type of the elements of a call, in the engine's numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataType {
    /// Bytes, which are moved but never reduced.
    Bytes,
    /// IEEE half precision.
    F16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
    /// 32-bit integers.
    I32,
    /// 64-bit integers.
    I64,
}

/// Reduction of two elements that an engine supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceFunction {
    /// Sum.
    Sum,
    /// Maximum.
    Max,
}

/// How an engine treats the elements of a call. Firmware caches configs by address, so each config is placed at a new address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArithmeticConfig {
    /// Element type in memory.
    pub uncompressed: DataType,
    /// Element type on a compressed wire.
    pub compressed: DataType,
    /// Stream destination of the compressor.
    pub compressor: u32,
    /// Stream destination of the decompressor.
    pub decompressor: u32,
    /// Whether arithmetic works on the compressed form.
    pub adds_compressed: bool,
    /// Stream destinations of SUM and MAX; empty for elements that are only moved.
    pub functions: &'static [u32],
}

impl DataType {
    /// Returns the type's number in flags and keys.
    pub fn number(self) -> u32 {
        match self {
            Self::Bytes => 1,
            Self::F16 => 2,
            Self::F32 => 3,
            Self::F64 => 4,
            Self::I32 => 5,
            Self::I64 => 6,
        }
    }

    /// Returns the size of an element in bytes.
    pub fn size_bytes(self) -> u32 {
        match self {
            Self::Bytes => 1,
            Self::F16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::F64 | Self::I64 => 8,
        }
    }
}

impl ReduceFunction {
    /// Returns the function's number in a descriptor, which is also its index in [`ArithmeticConfig::functions`].
    pub fn number(self) -> u32 {
        match self {
            Self::Sum => 0,
            Self::Max => 1,
        }
    }

    /// Returns the function with this number in a descriptor, or `None` if there is none.
    pub fn from_number(number: u32) -> Option<Self> {
        [Self::Sum, Self::Max].into_iter().find(|function| function.number() == number)
    }
}

const fn plain(of: DataType, functions: &'static [u32]) -> ArithmeticConfig {
    ArithmeticConfig {
        uncompressed: of,
        compressed: of,
        compressor: 0,
        decompressor: 0,
        adds_compressed: false,
        functions,
    }
}

/// Configs that every design has arithmetic for, in the order in which they are laid out. The config with half precision on the wire and single
/// precision in memory reduces in half precision.
pub const ARITHMETIC_CONFIGS: [ArithmeticConfig; 6] = [
    plain(DataType::F16, &[4, 9]),
    ArithmeticConfig {
        uncompressed: DataType::F32,
        compressed: DataType::F16,
        compressor: 0,
        decompressor: 1,
        adds_compressed: true,
        functions: &[4, 9],
    },
    plain(DataType::F32, &[0, 5]),
    plain(DataType::F64, &[1, 6]),
    plain(DataType::I32, &[2, 7]),
    plain(DataType::I64, &[3, 8]),
];

impl ArithmeticConfig {
    /// Returns the config for elements of any type that are moved as bytes and never reduced.
    pub const fn bytes() -> Self {
        plain(DataType::Bytes, &[])
    }

    /// Returns the length of the config in words.
    pub fn word_count(&self) -> usize {
        ArithmeticHead::COUNT + self.functions.len()
    }

    /// Returns the config as it lies in exchange memory.
    pub fn to_words(&self) -> Vec<u32> {
        let head = ArithmeticHead {
            uncompressed_bytes: self.uncompressed.size_bytes(),
            compressed_bytes: self.compressed.size_bytes(),
            log2_ratio: 0,
            compressor: self.compressor,
            decompressor: self.decompressor,
            functions: self.functions.len() as u32,
            adds_compressed: u32::from(self.adds_compressed),
        };
        head.to_words().into_iter().chain(self.functions.iter().copied()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configs_are_those_of_the_reference() {
        let words: Vec<Vec<u32>> = ARITHMETIC_CONFIGS.iter().map(ArithmeticConfig::to_words).collect();
        assert_eq!(words[0], [2, 2, 0, 0, 0, 2, 0, 4, 9]);
        assert_eq!(words[1], [4, 2, 0, 0, 1, 2, 1, 4, 9]);
        assert_eq!(words[5], [8, 8, 0, 0, 0, 2, 0, 3, 8]);
        assert_eq!(ArithmeticConfig::bytes().to_words(), [1, 1, 0, 0, 0, 0, 0]);
        assert!(ARITHMETIC_CONFIGS.iter().all(|config| config.functions.len() <= MAX_FUNCTIONS));
    }
}

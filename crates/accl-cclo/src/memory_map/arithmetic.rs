//! Arithmetic configs: how an engine adds, and what a number is on the wire.

use crate::words::words;

/// Most functions of a config.
pub const MAX_FUNCTIONS: usize = 10;

words! {
    /// The words of a config before its functions.
    pub struct ArithmeticHead: 7 words {
        0 uncompressed_bytes: "Size of an element in memory in bytes.",
        1 compressed_bytes: "Size of an element on a compressed wire in bytes.",
        2 log2_ratio: "Logarithm of how many elements one compressed one stands for.",
        3 compressor: "Stream destination of the compressor.",
        4 decompressor: "Stream destination of the decompressor.",
        5 functions: "How many functions follow.",
        6 adds_compressed: "One if arithmetic works on the compressed form.",
    }
}

/// What elements of a call are, as the engine numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataType {
    /// Bytes, which are moved and never added.
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

/// What an engine can do with two elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceFunction {
    /// Their sum.
    Sum,
    /// The larger one.
    Max,
}

/// How an engine treats the elements of a call. Engines keep it by address: another one is laid at another address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArithmeticConfig {
    /// What elements are in memory.
    pub uncompressed: DataType,
    /// What they are on a compressed wire.
    pub compressed: DataType,
    /// Stream destination of the compressor.
    pub compressor: u32,
    /// Stream destination of the decompressor.
    pub decompressor: u32,
    /// Arithmetic works on the compressed form.
    pub adds_compressed: bool,
    /// Stream destinations of SUM and MAX; none for elements that are only moved.
    pub functions: &'static [u32],
}

impl DataType {
    /// Its number in flags and keys.
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

    /// Size of an element in bytes.
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
    /// As a descriptor names it: also the index in [`ArithmeticConfig::functions`].
    pub fn number(self) -> u32 {
        match self {
            Self::Sum => 0,
            Self::Max => 1,
        }
    }

    /// From a descriptor.
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

/// The configs that every design has arithmetic for, in the order in which they are laid out. Half precision on the wire between single
/// precision in memory is added as halves.
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
    /// Elements of any type that are moved and not added, byte by byte.
    pub const fn bytes() -> Self {
        plain(DataType::Bytes, &[])
    }

    /// How many words it takes.
    pub fn word_count(&self) -> usize {
        ArithmeticHead::COUNT + self.functions.len()
    }

    /// As it lies in exchange memory.
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

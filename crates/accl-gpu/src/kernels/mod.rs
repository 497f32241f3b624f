//! The source of the kernels, and for each codec the kernels that serve it.
//!
//! Owns the source in CUDA C, the constants with which it is compiled for a codec's settings, and the sizes of
//! launches. Does not compile, load or launch anything. Start with [`KernelSet`]: the kernels that are compiled
//! together.
//!
//! # Use
//! Compile [`KernelSet::source`] with [`KernelSet::options`] for the kernels that are needed: a compiler takes most of
//! a second for each. Ask for the entry point of a kernel with [`KernelSet::entry`], and for the arguments and size of a
//! launch with [`KernelSet::launch`]. The parameter of every kernel is an [`Args`].
//!
//! Results equal the results of the CPU's codecs in every byte, if the compiler keeps each operation as written: without
//! fused multiplications and additions, with denormals, and with exact division. Only the payload of a NaN among
//! float32 sums may differ: here every such NaN is canonical.
//!
//! [`ReductionSet`] has another kernel, which reduces elements of several operands by an operator.

mod families;
mod reductions;
mod spans;

use std::fmt;

use accl_kernels::codec::{Setting, Summary};
use accl_types::Dtype;

use families::{File, Shape};
pub use reductions::{MOST_OPERANDS, ReductionArgs, ReductionLaunch, ReductionPart, ReductionSet};
pub use spans::{Args, CAPACITY, Key, Options, Span};

/// A kernel, with the fields of [`Span`] and [`Options`] that it uses in addition to `elements`. All kernels of a codec
/// use `code`, `tile` and `stride`, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernel {
    /// Encodes elements of the tensor's type from `values`. Uses `first`, `key`, `counters`.
    Encode,
    /// Encodes float32 sums from `values`, like [`Kernel::Encode`].
    EncodeSums,
    /// Encodes elements of the tensor's type from `values` plus the residual in `sums`, which becomes what the encoding
    /// loses. Uses the fields of [`Kernel::Encode`], `keeps_zeros`, and `other` as a flag.
    Feedback,
    /// Encodes float32 sums from `values`, like [`Kernel::Feedback`].
    FeedbackSums,
    /// Decodes to elements of the tensor's type in `values`.
    Decode,
    /// Decodes to float32 in `values`.
    DecodeSums,
    /// Adds decoded elements to `sums`.
    DecodeAdd,
    /// Sets `sums` to the elements of the tensor's type in `values`.
    Read,
    /// Adds the elements of the tensor's type in `values` to `sums`.
    Add,
    /// Finishes `sums`: divides them by `divisor`, if given. Sums that the tensor's type cannot hold become infinite.
    Finish,
    /// Writes `sums` to `values` as elements of the tensor's type.
    Write,
    /// Adds the elements at `other`, encoded by the same codec, to the elements of the tensor's type in `values`,
    /// finishes the sums like [`Kernel::Finish`], and encodes them like [`Kernel::EncodeSums`]. Writes the elements that
    /// they decode to, of the tensor's type, to `sums`, unless that is 0; they may replace the values.
    Combine,
    /// Does the same with float32 sums in `values`.
    CombineSums,
    /// Copies the elements in `values` to the address in `sums`, as elements of the tensor's type.
    Copy,
    /// Writes two float64 for each tile to `code`: the sum of the squares of the elements of the tensor's type in `values`, and
    /// of the float32 in `sums`. Uses `tile`; `stride` is 16.
    Squares,
    /// Does the same with float32 sums in `values`.
    SquaresOfSums,
}

impl Kernel {
    /// Kernels of a codec. Some codecs lack the last two.
    pub const OF_CODEC: [Kernel; 9] = [
        Kernel::Encode,
        Kernel::EncodeSums,
        Kernel::Feedback,
        Kernel::FeedbackSums,
        Kernel::Decode,
        Kernel::DecodeSums,
        Kernel::DecodeAdd,
        Kernel::Combine,
        Kernel::CombineSums,
    ];

    /// Kernels for float32 sums of unencoded elements.
    pub const OF_SUMS: [Kernel; 7] = [
        Kernel::Read,
        Kernel::Add,
        Kernel::Finish,
        Kernel::Write,
        Kernel::Copy,
        Kernel::Squares,
        Kernel::SquaresOfSums,
    ];

    /// Whether the kernel encodes with error feedback.
    pub fn has_feedback(self) -> bool {
        matches!(self, Kernel::Feedback | Kernel::FeedbackSums)
    }

    fn is_squares(self) -> bool {
        matches!(self, Kernel::Squares | Kernel::SquaresOfSums)
    }
}

/// Kernels that are compiled together, for one type of tensor: the kernels of a codec with its settings, or the kernels
/// of unencoded sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelSet {
    /// `None`: unencoded sums.
    codec: Option<Summary>,
    tensor: Dtype,
}

/// A launch: its arguments, and its number of blocks and of threads in a block.
#[derive(Debug)]
pub struct Launch {
    /// The kernel's parameter.
    pub args: Args,
    /// Number of blocks; 0 if there is nothing to do.
    pub blocks: u32,
    /// Number of threads of a block.
    pub threads: u32,
}

impl KernelSet {
    /// Returns the kernels of a codec for a type of tensor; `None` if there are none.
    pub fn of_codec(codec: Summary, tensor: Dtype) -> Option<Self> {
        (number_of(tensor).is_some() && families::of(codec).is_some()).then_some(Self { codec: Some(codec), tensor })
    }

    /// Returns the kernels for float32 sums of unencoded elements of a type; `None` if there are none.
    pub fn of_sums(tensor: Dtype) -> Option<Self> {
        number_of(tensor).map(|_| Self { codec: None, tensor })
    }

    /// Returns a number that is equal for equal sets, and only for them.
    pub fn word(&self) -> u64 {
        let codec = self.codec.map_or(0, |codec| u64::from(codec.word()) + 1);
        codec << 2 | u64::from(number_of(self.tensor).unwrap_or(0))
    }

    /// Returns the kernels of the set.
    pub fn kernels(&self) -> &'static [Kernel] {
        match self.codec.and_then(families::of) {
            None => &Kernel::OF_SUMS,
            Some(family) if family.combines => &Kernel::OF_CODEC,
            Some(_) => &Kernel::OF_CODEC[..Kernel::OF_CODEC.len() - 2],
        }
    }

    /// Returns the name of a kernel's function.
    pub fn entry(&self, kernel: Kernel) -> &'static str {
        match self.function(kernel) {
            Kernel::Encode => "accl_encode",
            Kernel::EncodeSums => "accl_encode_sums",
            Kernel::Feedback => "accl_feedback",
            Kernel::FeedbackSums => "accl_feedback_sums",
            Kernel::Decode => "accl_decode",
            Kernel::DecodeSums => "accl_decode_sums",
            Kernel::DecodeAdd => "accl_decode_add",
            Kernel::Read => "accl_read",
            Kernel::Add => "accl_add",
            Kernel::Finish => "accl_finish",
            Kernel::Write => "accl_write",
            Kernel::Combine => "accl_combine",
            Kernel::CombineSums => "accl_combine_sums",
            Kernel::Copy => "accl_copy",
            Kernel::Squares => "accl_squares",
            Kernel::SquaresOfSums => "accl_squares_of_sums",
        }
    }

    /// Returns the kernel whose function serves a kernel, too. Float32 sums are elements of a float32 tensor.
    fn function(&self, kernel: Kernel) -> Kernel {
        match kernel {
            _ if self.tensor != Dtype::F32 => kernel,
            Kernel::EncodeSums => Kernel::Encode,
            Kernel::FeedbackSums => Kernel::Feedback,
            Kernel::DecodeSums => Kernel::Decode,
            Kernel::CombineSums => Kernel::Combine,
            Kernel::SquaresOfSums => Kernel::Squares,
            _ => kernel,
        }
    }

    /// Returns the source.
    pub fn source(&self) -> String {
        self.files().map(File::with_name).collect()
    }

    /// Returns the options of the compiler that define the settings, as `-DNAME=VALUE`. The result has the given kernels
    /// and no others.
    pub fn options(&self, kernels: &[Kernel]) -> Vec<String> {
        let chosen = kernels.iter().fold(0, |chosen, kernel| chosen | 1 << self.function(*kernel) as u32);
        let mut defines = vec![
            ("KERNELS", chosen),
            ("CAPACITY", CAPACITY as u32),
            ("SPAN_BYTES", Args::SPAN_BYTES),
            ("TENSOR", number_of(self.tensor).unwrap_or(0)),
        ];
        let [encode, decode] = self.shapes();
        defines.extend([("THREADS", encode.threads), ("PART", encode.part)]);
        if let Some(codec) = self.codec {
            defines.extend([("DECODE_THREADS", decode.threads), ("DECODE_PART", decode.part)]);
            let settings = codec.settings();
            for setting in Setting::ALL.into_iter().filter(|setting| codec.row().has(*setting)) {
                defines.push(match setting {
                    Setting::Bits => ("BITS", u32::from(settings.bits)),
                    Setting::Bucket => ("BUCKET", settings.bucket),
                    Setting::Meta => ("META", number_of(settings.meta).unwrap_or(0)),
                    Setting::Rounding => ("ROUNDING", settings.rounding as u32),
                    Setting::SkipIncomplete => ("SKIP_INCOMPLETE", u32::from(settings.skip_incomplete)),
                });
            }
            if let Some(family) = families::of(codec) {
                defines.extend((family.defines)(settings));
            }
        }
        defines.into_iter().map(|(name, value)| format!("-DACCL_{name}={value}")).collect()
    }

    /// Returns the arguments and the size of a launch.
    ///
    /// # Panics
    /// Panics if there are more than [`CAPACITY`] spans, or more elements than a launch can have.
    pub fn launch(&self, kernel: Kernel, spans: &[Span], options: &Options) -> Launch {
        let [encode, decode] = self.shapes();
        let shape = match kernel {
            Kernel::Decode | Kernel::DecodeSums | Kernel::DecodeAdd => decode,
            _ if kernel.is_squares() => Shape::TILES,
            _ => encode,
        };
        let has_tiles = self.codec.is_some() || kernel.is_squares();
        let (args, blocks) = Args::new(spans, options, shape.part, has_tiles);
        Launch { args, blocks, threads: shape.threads }
    }

    fn files(&self) -> impl Iterator<Item = &'static File> {
        let of_codec = self.codec.and_then(families::of).map(|family| family.files);
        families::COMMON.iter().chain(of_codec.unwrap_or(families::SUMS))
    }

    /// Returns the shapes of encoding and decoding kernels.
    fn shapes(&self) -> [Shape; 2] {
        match self.codec.and_then(|codec| families::of(codec).map(|family| (family.shapes)(codec.settings()))) {
            Some(shapes) => shapes,
            None => [Shape::SUMS; 2],
        }
    }
}

/// Prints the codec and the type of tensor, for messages.
impl fmt::Display for KernelSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.codec {
            Some(codec) => write!(f, "{codec} of {}", self.tensor),
            None => write!(f, "sums of {}", self.tensor),
        }
    }
}

/// Returns the number of a type in the source; `None` if kernels do not know it.
fn number_of(dtype: Dtype) -> Option<u32> {
    match dtype {
        Dtype::F32 => Some(0),
        Dtype::F16 => Some(1),
        Dtype::BF16 => Some(2),
        _ => None,
    }
}

/// Codecs without kernels, by name.
pub fn missing() -> Vec<&'static str> {
    families::TABLE.iter().filter(|row| row.family.is_none()).map(|row| row.codec).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use accl_kernels::codec::parse;

    use super::*;

    #[test]
    fn equal_sets_alone_have_equal_words() {
        let mut words = HashSet::new();
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            words.insert(KernelSet::of_sums(dtype).unwrap().word());
            for text in ["raw", "bf16", "maxmin:4", "maxmin:5", "maxmin:4,bucket=128", "absmax:4"] {
                let set = KernelSet::of_codec(parse(text).unwrap().summary(), dtype).unwrap();
                assert!(words.insert(set.word()), "{set}");
            }
        }
        assert_eq!(words.len(), 21);
        assert_eq!(KernelSet::of_sums(Dtype::F64), None);
    }

    #[test]
    fn float32_sums_share_functions_with_float32_tensors() {
        let of = |dtype| KernelSet::of_codec(parse("maxmin:4").unwrap().summary(), dtype).unwrap();
        assert_eq!(of(Dtype::F32).entry(Kernel::EncodeSums), "accl_encode");
        assert_eq!(of(Dtype::F16).entry(Kernel::EncodeSums), "accl_encode_sums");
        let options = of(Dtype::F32).options(&[Kernel::DecodeSums, Kernel::Encode]);
        assert!(options.contains(&format!("-DACCL_KERNELS={}", 1 << 4 | 1)), "{options:?}");
    }
}

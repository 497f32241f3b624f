//! Codecs: floats to fewer bits and back. One file and one row of [`CODECS`] each; start with [`Codec`].
//!
//! Owns the bytes that a slice of a tensor becomes, the arithmetic of both directions and its random numbers. Does not
//! know which tensors are compressed, what a tile's header or checksum is, who sends to whom, or residuals.
//!
//! # Numbers
//! * Encoding and decoding give the same bits on every instruction set, in every thread and floating-point mode.
//! * The length of what is encoded depends on counts and settings only, never on values.
//! * Random numbers are a function of a [`Noise`] key and an element's index in its tensor: not of threads, slices or tiles.
//! * A bucket with a NaN or an infinity decodes to NaN in all of its elements, and leaves its neighbours alone. So does
//!   one whose values are finite but that the metadata cannot hold; the two are counted apart, see [`Spoilt`].
//! * Any bytes can be decoded: wrong ones give wrong numbers and nothing worse.

mod abs_max;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(all(target_arch = "x86_64", accl_avx512))]
#[expect(clippy::incompatible_msrv, reason = "build.rs leaves it out where the compiler is older")]
pub(crate) mod avx512;
mod cast;
mod floats;
mod fp8;
#[cfg(target_arch = "x86_64")]
mod groups;
mod hadamard;
pub(crate) mod loops;
mod max_min;
mod mx;
pub(crate) mod noise;
mod nvfp4;
mod pieces;
mod scaled;
mod sign;
mod small_float;
mod summary;
mod text;
mod top_k;
mod uniform;

use std::fmt;
use std::ops::AddAssign;
use std::sync::Arc;

use accl_types::{Dtype, Error, Result};

use crate::arch::Isa;
pub use floats::Floats;
pub use noise::Noise;
pub use summary::Summary;
pub use text::parse;

/// How a value between two levels becomes one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// The nearer one; the even one of two that are as near.
    Nearest,
    /// One of the two at random, so that the mean of many is the value (to 1/512 of a level).
    Stochastic,
    /// As stochastic, but of ranks whose values are added up, one rounds up where another rounds down: see
    /// [`Noise::among`]. Stochastic where nothing is said of other ranks.
    Correlated,
}

/// What is chosen about a codec. What a codec has no use for is left out of account.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Settings {
    /// Bits of a code, 1 to 8; of `topk`, that one in 2^bits is kept.
    pub bits: u8,
    /// Elements that share their metadata: 8 to 8,192, a multiple of 8.
    pub bucket: u32,
    /// Type of the metadata: float32, float16 or bfloat16.
    pub meta: Dtype,
    /// How values are rounded.
    pub rounding: Rounding,
    /// Whether elements behind the last full bucket travel as they are.
    pub skip_incomplete: bool,
}

/// One of the [`Settings`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Setting {
    /// [`Settings::bits`].
    Bits,
    /// [`Settings::bucket`].
    Bucket,
    /// [`Settings::meta`].
    Meta,
    /// [`Settings::rounding`].
    Rounding,
    /// [`Settings::skip_incomplete`].
    SkipIncomplete,
}

impl Setting {
    /// All of them.
    pub const ALL: [Setting; 5] =
        [Setting::Bits, Setting::Bucket, Setting::Meta, Setting::Rounding, Setting::SkipIncomplete];

    /// As in texts.
    pub fn name(self) -> &'static str {
        match self {
            Setting::Bits => "bits",
            Setting::Bucket => "bucket",
            Setting::Meta => "meta",
            Setting::Rounding => "rounding",
            Setting::SkipIncomplete => "skip_incomplete",
        }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self { bits: 4, bucket: 512, meta: Dtype::F32, rounding: Rounding::Nearest, skip_incomplete: false }
    }
}

/// Buckets that decode to NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spoilt {
    /// For a NaN or an infinity in them.
    pub not_finite: usize,
    /// Because the metadata cannot hold their range.
    pub too_large: usize,
}

impl AddAssign for Spoilt {
    fn add_assign(&mut self, other: Self) {
        self.not_finite += other.not_finite;
        self.too_large += other.too_large;
    }
}

/// One way to encode, with its settings.
///
/// Elements are float32, float16 or bfloat16 ([`encodes`]).
pub trait Codec: Send + Sync {
    /// Which codec it is, with its settings: equal ones encode alike.
    fn summary(&self) -> Summary;

    /// Elements that are encoded together: a slice that does not end with its tensor has a multiple of it.
    fn grain(&self) -> usize;

    /// Bytes that `count` elements of a tensor of this type become: a multiple of 8.
    fn encoded_bytes(&self, tensor: Dtype, count: usize) -> usize;

    /// Encodes a slice.
    ///
    /// # Safety
    /// The slice's elements may be read, and are written by nobody meanwhile. No alignment is asked for.
    ///
    /// # Panics
    /// Panics if `dst` has another length than [`Codec::encoded_bytes`].
    unsafe fn encode(&self, dst: &mut [u8], slice: Slice, noise: Noise) -> Spoilt;

    /// Decodes `count` elements of a tensor of type `tensor` into elements of that type or of float32. A value beyond the
    /// range of a 16-bit type becomes the largest one.
    ///
    /// # Safety
    /// `dst` has room for the elements, and nobody else uses it meanwhile. No alignment is asked for.
    ///
    /// # Panics
    /// Panics if `src` has another length than [`Codec::encoded_bytes`].
    unsafe fn decode(&self, dst: *mut u8, into: Dtype, src: &[u8], tensor: Dtype, count: usize);

    /// Adds as many decoded elements of a tensor of type `tensor` as there are sums.
    ///
    /// # Panics
    /// Panics if `src` has another length than [`Codec::encoded_bytes`].
    fn decode_add(&self, sums: &mut [f32], src: &[u8], tensor: Dtype);
}

/// By its settings.
impl fmt::Debug for dyn Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.summary(), f)
    }
}

/// Elements that are encoded together.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    /// Where they are.
    pub src: *const u8,
    /// Their type: that of the tensor, or float32 for sums of it.
    pub dtype: Dtype,
    /// The tensor's type: what travels as it is has it.
    pub tensor: Dtype,
    /// How many there are.
    pub count: usize,
    /// The index of the first one in its tensor, a multiple of the bucket.
    pub first: u64,
}

impl Slice {
    /// `count` of its elements, from the one at `start` on.
    #[inline]
    pub(crate) fn part(self, start: usize, count: usize) -> Self {
        let src = self.src.wrapping_add(start * self.dtype.size_bytes());
        Self { src, count, first: self.first + start as u64, ..self }
    }
}

/// One codec of the table.
#[derive(Debug)]
pub struct Row {
    /// The name in settings.
    pub name: &'static str,
    /// What it does, in a line.
    pub description: &'static str,
    /// What there is a choice of; other settings mean nothing to it.
    pub settings: &'static [Setting],
    /// Whether it is of use only where what it loses is added to what is encoded next.
    pub needs_feedback: bool,
    build: Build,
}

type Build = fn(&Settings, Isa) -> Result<Arc<dyn Codec>>;

impl Row {
    /// One that has no settings.
    const fn plain(name: &'static str, description: &'static str, build: Build) -> Self {
        Self { name, description, settings: &[], needs_feedback: false, build }
    }

    /// Whether there is a choice of this.
    pub fn has(&self, setting: Setting) -> bool {
        self.settings.contains(&setting)
    }

    /// The codec with these settings.
    ///
    /// # Errors
    /// `Configuration` if a setting has no meaning for it.
    pub fn build(&self, settings: &Settings) -> Result<Arc<dyn Codec>> {
        self.build_with_isa(settings, Isa::best())
    }

    /// As [`Row::build`], with a chosen instruction set: for tests and measurements.
    ///
    /// # Errors
    /// As above, and `Unsupported` if this machine has not got the instruction set.
    pub fn build_with_isa(&self, settings: &Settings, isa: Isa) -> Result<Arc<dyn Codec>> {
        (self.build)(settings, isa)
    }
}

/// All codecs.
pub const CODECS: &[Row] = &[
    cast::RAW,
    cast::BF16,
    cast::FP16,
    max_min::ROW,
    abs_max::ROW,
    sign::ROW,
    fp8::E4M3,
    fp8::E5M2,
    mx::MXFP8,
    mx::MXFP8_E5M2,
    mx::MXFP4,
    nvfp4::ROW,
    hadamard::ROW,
    top_k::ROW,
];

/// The codec of this name.
///
/// # Errors
/// `Configuration` if there is none; the message lists those that there are.
pub fn codec(name: &str) -> Result<&'static Row> {
    CODECS.iter().find(|row| row.name == name).ok_or_else(|| {
        let names: Vec<&str> = CODECS.iter().map(|row| row.name).collect();
        Error::configuration(format!("unknown codec `{name}`; expected one of {}", names.join(", ")))
    })
}

/// Whether elements of this type can be encoded.
pub fn encodes(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

//! The settings of a codec.

use accl_types::Dtype;

/// Rounding of a value between two levels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// To the nearer level; if both are as near, to the even one.
    Nearest,
    /// To one of the two levels at random, so that the mean of many results is the value (to 1/512 of a level).
    Stochastic,
    /// Like stochastic, but among ranks whose values are added up, one rank rounds up where another rounds down: see
    /// [`super::RngKey::among`]. Stochastic if the key names no other ranks.
    Correlated,
}

/// From this number of bits on, rounding to nearest is the default. With fewer bits it is too biased to be used unless
/// requested.
const NEAREST_FROM_BITS: u8 = 4;

impl Rounding {
    /// Returns the rounding that is used if none is given.
    pub(super) fn default_of(bits: u8) -> Self {
        if bits < NEAREST_FROM_BITS { Rounding::Stochastic } else { Rounding::Nearest }
    }
}

/// The settings of a codec. A codec ignores the settings that it does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Settings {
    /// Bits of a code, 1 to 8. For `topk`, one in 2^bits elements is kept.
    pub bits: u8,
    /// Elements that share their metadata: 8 to 8,192, a multiple of 8.
    pub bucket: u32,
    /// Type of the metadata: float32, float16 or bfloat16.
    pub meta: Dtype,
    /// Rounding of values.
    pub rounding: Rounding,
    /// Whether elements after the last full bucket are sent unencoded.
    pub skip_incomplete: bool,
}

/// Name of a field of [`Settings`].
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
    /// All settings.
    pub const ALL: [Setting; 5] =
        [Setting::Bits, Setting::Bucket, Setting::Meta, Setting::Rounding, Setting::SkipIncomplete];

    /// Returns the name used in texts.
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

/// Maximum bits of a code.
pub(super) const MOST_BITS: u8 = 8;

/// Types of metadata; the index is the number in a word.
pub(super) const META: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// Kinds of rounding with their names; the index is the number in a word.
pub(super) const ROUNDING: [(&str, Rounding); 3] =
    [("nearest", Rounding::Nearest), ("stochastic", Rounding::Stochastic), ("correlated", Rounding::Correlated)];

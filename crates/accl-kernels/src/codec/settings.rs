//! What is chosen about a codec.

use accl_types::Dtype;

/// How a value between two levels becomes one of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Rounding {
    /// The nearer one; the even one of two that are as near.
    Nearest,
    /// One of the two at random, so that the mean of many is the value (to 1/512 of a level).
    Stochastic,
    /// As stochastic, but of ranks whose values are added up, one rounds up where another rounds down: see
    /// [`super::RngKey::among`]. Stochastic where nothing is said of other ranks.
    Correlated,
}

/// Below so many bits, what is rounded to the nearest is biased too much to be left so unless it is asked for.
const NEAREST_FROM_BITS: u8 = 4;

impl Rounding {
    /// What is meant where nothing is said.
    pub(super) fn default_of(bits: u8) -> Self {
        if bits < NEAREST_FROM_BITS { Rounding::Stochastic } else { Rounding::Nearest }
    }
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

/// Most bits of a code.
pub(super) const MOST_BITS: u8 = 8;

/// Types of metadata, by their numbers.
pub(super) const META: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];

/// Ways of rounding with their names, by their numbers.
pub(super) const ROUNDING: [(&str, Rounding); 3] =
    [("nearest", Rounding::Nearest), ("stochastic", Rounding::Stochastic), ("correlated", Rounding::Correlated)];

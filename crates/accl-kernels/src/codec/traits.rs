//! The interface of a codec, and its row in the table. Read [`Codec`] first.

use std::fmt;
use std::ops::{AddAssign, RangeInclusive};
use std::sync::Arc;

use accl_types::{Dtype, Error, Result};

use super::rng::RngKey;
use super::settings::{META, MOST_BITS, ROUNDING, Setting, Settings};
use crate::isa::Isa;

/// Numbers of buckets that decode to NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NonFinite {
    /// Buckets that contain a NaN or an infinity.
    pub not_finite: usize,
    /// Buckets whose range the metadata cannot hold.
    pub too_large: usize,
}

impl AddAssign for NonFinite {
    fn add_assign(&mut self, other: Self) {
        self.not_finite += other.not_finite;
        self.too_large += other.too_large;
    }
}

/// One way to encode, with its settings.
///
/// Elements are float32, float16 or bfloat16 ([`encodes`]).
pub trait Codec: Send + Sync {
    /// Returns the codec's row and its settings. Codecs with equal summaries encode alike.
    fn summary(&self) -> Summary;

    /// Number of elements that are encoded together. The length of a slice is a multiple of it, unless the slice ends
    /// with its tensor.
    fn grain(&self) -> usize;

    /// Returns the bytes that `count` elements of a tensor of this type are encoded to: a multiple of 8.
    fn encoded_bytes(&self, tensor: Dtype, count: usize) -> usize;

    /// Encodes a slice. Returns the numbers of buckets that become NaN.
    ///
    /// # Safety
    /// The slice's elements may be read, and nothing writes them meanwhile. No alignment is required.
    ///
    /// # Panics
    /// Panics if the length of `dst` is not [`Codec::encoded_bytes`].
    unsafe fn encode(&self, dst: &mut [u8], slice: Slice, rng_key: RngKey) -> NonFinite;

    /// Decodes `count` elements of a tensor of type `tensor` into elements of that type or of float32. A value beyond
    /// the range of a 16-bit type becomes the type's largest value.
    ///
    /// # Safety
    /// `dst` has room for the elements, and nothing else accesses it meanwhile. No alignment is required.
    ///
    /// # Panics
    /// Panics if the length of `src` is not [`Codec::encoded_bytes`].
    unsafe fn decode(&self, dst: *mut u8, into: Dtype, src: &[u8], tensor: Dtype, count: usize);

    /// Adds as many decoded elements of a tensor of type `tensor` as there are sums.
    ///
    /// # Panics
    /// Panics if the length of `src` is not [`Codec::encoded_bytes`].
    fn decode_add(&self, sums: &mut [f32], src: &[u8], tensor: Dtype);

    /// Returns the interface to encode sums while they are added up, if the codec supports that.
    fn encode_sums(&self) -> Option<&dyn EncodeSums> {
        None
    }
}

/// A codec that encodes sums while they are added up.
pub trait EncodeSums {
    /// Encodes the sums of float32 addends and of the encoded elements in `src`, and writes the values that the sums
    /// decode to. The result has the same bits as [`Codec::decode_add`], [`Codec::encode`] and [`Codec::decode`] one
    /// after the other, but takes one pass.
    ///
    /// # Safety
    /// The addends of `sums` may be read. If results are wanted, there is room for as many float32. The results may
    /// replace the addends. Nothing else accesses either meanwhile. No alignment is required.
    ///
    /// # Panics
    /// Panics if the length of one of the slices is not [`Codec::encoded_bytes`].
    unsafe fn encode_sums(&self, dst: &mut [u8], src: &[u8], sums: Sums);
}

/// Sums that are encoded while they are added up.
#[derive(Clone, Copy, Debug)]
pub struct Sums {
    /// Float32 numbers that the decoded elements are added to.
    pub addends: *const f32,
    /// Divisor of the sums before they are encoded; `None` does not divide.
    pub divisor: Option<f32>,
    /// Destination of the values that the sums decode to, as float32; `None` writes none.
    pub results: Option<*mut f32>,
    /// Number of sums.
    pub count: usize,
}

/// Prints the settings.
impl fmt::Debug for dyn Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.summary(), f)
    }
}

/// Elements that are encoded together.
#[derive(Clone, Copy, Debug)]
pub struct Slice {
    /// Address of the elements.
    pub src: *const u8,
    /// Type of the elements: the tensor's type, or float32 for sums of it.
    pub dtype: Dtype,
    /// The tensor's type. Elements that are sent unencoded have this type.
    pub tensor: Dtype,
    /// Number of elements.
    pub count: usize,
    /// Index of the first element in its tensor, a multiple of the bucket.
    pub first: u64,
}

impl Slice {
    /// Returns `count` elements of the slice, from the element at `start` on.
    #[inline]
    pub(crate) fn part(self, start: usize, count: usize) -> Self {
        let src = self.src.wrapping_add(start * self.dtype.size_bytes());
        Self { src, count, first: self.first + start as u64, ..self }
    }
}

/// Loss of a codec as far as training needs to know it, in increasing order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Loss {
    /// No loss.
    None,
    /// Little loss: error feedback, if used, needs only a rank's own contributions.
    Fine,
    /// Great loss: sums lose on their way back, too, and error feedback keeps a residual of both.
    Coarse,
    /// A loss greater than the signal: with error feedback the residual grows without end.
    Divergent,
}

/// Bucket sizes that a codec accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buckets {
    /// Multiples of 8 from 8 to [`MOST_BUCKET`].
    MultiplesOf8,
    /// Powers of two from 64 to [`MOST_BUCKET`].
    PowersOfTwo,
}

/// The largest bucket, in elements.
pub const MOST_BUCKET: u32 = 8192;
const LEAST_MULTIPLE: u32 = 8;
const LEAST_POWER: u32 = 64;

impl Buckets {
    /// Whether a bucket may have `bucket` elements.
    pub fn accept(self, bucket: u32) -> bool {
        match self {
            Buckets::MultiplesOf8 => bucket.is_multiple_of(8) && (LEAST_MULTIPLE..=MOST_BUCKET).contains(&bucket),
            Buckets::PowersOfTwo => bucket.is_power_of_two() && (LEAST_POWER..=MOST_BUCKET).contains(&bucket),
        }
    }
}

impl fmt::Display for Buckets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Buckets::MultiplesOf8 => write!(f, "a multiple of 8 from {LEAST_MULTIPLE} to {MOST_BUCKET}"),
            Buckets::PowersOfTwo => write!(f, "a power of two from {LEAST_POWER} to {MOST_BUCKET}"),
        }
    }
}

/// Maximum magnitude by which one encoding of float32 changes a value of a bucket: a share of the value, or the floor
/// if that is more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Share of the value's magnitude.
    pub share: f64,
    /// Part that does not depend on the value; an infinity if the codec cannot represent a value of the bucket.
    pub floor: f64,
}

impl Bound {
    /// Returns the bound of a value.
    pub fn of(self, value: f32) -> f64 {
        (self.share * f64::from(value).abs()).max(self.floor)
    }
}

/// One codec of the table, with everything that other modules ask about it, so that none of them decides by its name.
#[derive(Debug)]
pub struct Row {
    /// Number in the words that ranks compare; it never changes and is never reused.
    pub id: u8,
    /// Name in settings.
    pub name: &'static str,
    /// Description of the codec, in one line.
    pub description: &'static str,
    /// Settings that the codec has; it ignores all others.
    pub settings: &'static [Setting],
    /// Accepted bits, if the codec has [`Setting::Bits`].
    pub bits: RangeInclusive<u8>,
    /// Accepted buckets, if the codec has [`Setting::Bucket`].
    pub buckets: Buckets,
    /// Number of elements that share their metadata, counted from the first element: a NaN or an infinity among them
    /// makes all of them NaN. 1 if each element is encoded on its own.
    pub shared: fn(&Settings) -> usize,
    /// Whether the codec converts elements one by one, without looking at others, and is as fast as memory.
    pub is_cast: bool,
    /// How much the codec loses.
    pub loss: fn(&Settings) -> Loss,
    /// Whether the codec is useful only if its loss is added to the next encoding.
    pub needs_feedback: bool,
    /// Whether all elements of a bucket decode to one magnitude, so that second moments (Adam's) are meaningless for
    /// them.
    pub hides_magnitudes: bool,
    /// Returns the next codec to use if this one loses too much; `None` if nothing is lost.
    pub next_finer: fn(&Settings) -> Option<Summary>,
    /// Settings of this codec that the choice by measurement (`"auto"`) tries, the finest first.
    pub auto: &'static [&'static str],
    /// Returns the maximum change of a value by an encoding. The second argument is the finite values that share their
    /// metadata. The third is the slice that is encoded together, as many values as the [grain](Codec::grain).
    pub bound: fn(&Settings, &[f32], &[f32]) -> Bound,
    /// Creates the codec. The caller has checked settings and instruction set.
    pub(super) build: Build,
}

pub(super) type Build = fn(&Settings, Isa) -> Arc<dyn Codec>;

impl Row {
    /// Whether the codec has this setting.
    pub fn has(&self, setting: Setting) -> bool {
        self.settings.contains(&setting)
    }

    /// Returns the name, with a word for the bits if there is a choice of them.
    pub fn spelled(&self) -> String {
        if self.has(Setting::Bits) { format!("{}:BITS", self.name) } else { self.name.to_owned() }
    }

    /// Creates the codec with these settings.
    ///
    /// # Errors
    /// `Configuration` if the codec does not accept a setting.
    pub fn build(&self, settings: &Settings) -> Result<Arc<dyn Codec>> {
        self.build_with_isa(settings, Isa::best())
    }

    /// Creates the codec like [`Row::build`], with a given instruction set: for tests and measurements.
    ///
    /// # Errors
    /// The errors of [`Row::build`], and `Unsupported` if this machine lacks the instruction set.
    pub fn build_with_isa(&self, settings: &Settings, isa: Isa) -> Result<Arc<dyn Codec>> {
        isa.check_available()?;
        self.check(settings)?;
        Ok((self.build)(settings, isa))
    }

    /// # Errors
    /// `Configuration` if the codec does not accept a setting.
    fn check(&self, settings: &Settings) -> Result<()> {
        let Settings { bits, bucket, meta, .. } = *settings;
        let refused = |why: String| Err(Error::configuration(format!("codec {}: {why}", self.name)));
        if self.has(Setting::Bits) && !self.bits.contains(&bits) {
            return refused(format!("bits is {bits}; expected {} to {}", self.bits.start(), self.bits.end()));
        }
        if self.has(Setting::Bucket) && !self.buckets.accept(bucket) {
            return refused(format!("bucket is {bucket}; expected {}", self.buckets));
        }
        if self.has(Setting::Meta) && !META.contains(&meta) {
            return refused(format!("meta is {meta}; expected float32, float16 or bfloat16"));
        }
        Ok(())
    }

    /// Returns the same codec with another number of bits, if it accepts that number: for [`Row::next_finer`].
    pub(super) fn with_bits(&'static self, settings: &Settings, bits: u8) -> Option<Summary> {
        self.bits.contains(&bits).then(|| Summary::new(self, Settings { bits, ..*settings }))
    }
}

/// A codec and its settings.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    row: &'static Row,
    settings: Settings,
}

/// Settings that the codec does not have are ignored.
impl PartialEq for Summary {
    fn eq(&self, other: &Self) -> bool {
        self.word() == other.word()
    }
}

impl Eq for Summary {}

impl Summary {
    /// Bits of a word.
    pub const BITS: u32 = 26;

    /// Creates the summary of a codec with these settings.
    pub(super) fn new(row: &'static Row, settings: Settings) -> Self {
        Self { row, settings }
    }

    /// Returns the codec's row.
    pub fn row(self) -> &'static Row {
        self.row
    }

    /// Returns the settings. Settings that the codec does not have are meaningless.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Returns how much the codec loses.
    pub fn loss(&self) -> Loss {
        (self.row.loss)(&self.settings)
    }

    /// Returns a codec that loses less; `None` if nothing is lost.
    pub fn next_finer(&self) -> Option<Summary> {
        (self.row.next_finer)(&self.settings)
    }

    /// Returns a word that is equal for codecs that encode alike, and only for them.
    pub fn word(self) -> u32 {
        let Settings { bits, bucket, meta, rounding, skip_incomplete } = self.settings;
        let meta = META.iter().position(|dtype| *dtype == meta).unwrap_or(0) as u32;
        let rounding = ROUNDING.iter().position(|(_, other)| *other == rounding).unwrap_or(0) as u32;
        let fields = [
            (Setting::Bits, u32::from(bits) - 1),
            (Setting::Bucket, bucket / 8 - 1),
            (Setting::Meta, meta),
            (Setting::Rounding, rounding),
            (Setting::SkipIncomplete, u32::from(skip_incomplete)),
        ];
        let add = |word, (setting, value)| word << width(setting) | if self.row.has(setting) { value } else { 0 };
        fields.into_iter().rev().fold(0, add) << ROW_BITS | u32::from(self.row.id)
    }

    /// Decodes a word, with the row whose number is in it; `None` for settings that this version does not know.
    pub(super) fn from_word(word: u32, row: &'static Row) -> Option<Self> {
        let mut settings = Settings::default();
        let mut word = (word & ((1 << Self::BITS) - 1)) >> ROW_BITS;
        for setting in Setting::ALL {
            let value = word & ((1 << width(setting)) - 1);
            word >>= width(setting);
            if !row.has(setting) {
                continue;
            }
            match setting {
                Setting::Bits => settings.bits = value as u8 + 1,
                Setting::Bucket => settings.bucket = 8 * (value + 1),
                Setting::Meta => settings.meta = *META.get(value as usize)?,
                Setting::Rounding => settings.rounding = ROUNDING.get(value as usize)?.1,
                Setting::SkipIncomplete => settings.skip_incomplete = value == 1,
            }
        }
        Some(Self { row, settings })
    }

    /// Returns the number of the row in a word.
    pub(super) fn row_id(word: u32) -> u8 {
        (word & ((1 << ROW_BITS) - 1)) as u8
    }
}

/// Bits of a row's number, enough for every value of its type.
pub(super) const ROW_BITS: u32 = u8::BITS;

/// Returns the bits of a setting's field. Bits, and eighths of a bucket, are never 0, so their field holds one less.
pub(super) const fn width(setting: Setting) -> u32 {
    match setting {
        Setting::Bits => 3,
        Setting::Bucket => 10,
        Setting::Meta | Setting::Rounding => 2,
        Setting::SkipIncomplete => 1,
    }
}

// The fields fill the word, and each is wide enough for its values.
const _: () = {
    let (mut bits, mut index) = (ROW_BITS, 0);
    while index < Setting::ALL.len() {
        bits += width(Setting::ALL[index]);
        index += 1;
    }
    assert!(bits == Summary::BITS, "the fields do not fill the word");
    assert!(MOST_BITS as u32 <= 1 << width(Setting::Bits), "bits do not fit their field");
    assert!(MOST_BUCKET / 8 <= 1 << width(Setting::Bucket), "buckets do not fit their field");
    assert!(META.len() <= 1 << width(Setting::Meta), "types of metadata do not fit their field");
    assert!(ROUNDING.len() <= 1 << width(Setting::Rounding), "ways of rounding do not fit their field");
};

/// Prints the form that [`super::parse`] reads.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row.name)?;
        for setting in Setting::ALL.into_iter().filter(|setting| self.row.has(*setting)) {
            match setting {
                Setting::Bits => write!(f, ":{}", self.settings.bits)?,
                Setting::Bucket => write!(f, ",bucket={}", self.settings.bucket)?,
                Setting::Meta => write!(f, ",meta={}", self.settings.meta)?,
                Setting::Rounding => {
                    let named = ROUNDING.iter().find(|(_, rounding)| *rounding == self.settings.rounding);
                    write!(f, ",rounding={}", named.map_or("unknown", |(name, _)| *name))?;
                }
                Setting::SkipIncomplete if !self.settings.skip_incomplete => {}
                Setting::SkipIncomplete => f.write_str(",skip_incomplete")?,
            }
        }
        Ok(())
    }
}

/// Whether elements of this type can be encoded.
pub fn encodes(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16)
}

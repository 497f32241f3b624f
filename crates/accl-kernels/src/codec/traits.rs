//! What a codec is, and its row in the table. Read [`Codec`] first.

use std::fmt;
use std::ops::{AddAssign, RangeInclusive};
use std::sync::Arc;

use accl_types::{Dtype, Error, Result};

use super::rng::RngKey;
use super::settings::{META, MOST_BITS, ROUNDING, Setting, Settings};
use crate::isa::Isa;

/// Buckets that decode to NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NonFinite {
    /// For a NaN or an infinity in them.
    pub not_finite: usize,
    /// Because the metadata cannot hold their range.
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
    unsafe fn encode(&self, dst: &mut [u8], slice: Slice, rng_key: RngKey) -> NonFinite;

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

    /// How it encodes sums while they are made, if it can.
    fn encode_sums(&self) -> Option<&dyn EncodeSums> {
        None
    }
}

/// A codec that encodes sums while they are made.
pub trait EncodeSums {
    /// Encodes sums of a tensor of float32, of as many addends and of what the same codec has encoded, and writes what they decode
    /// to: as [`Codec::decode_add`], [`Codec::encode`] and [`Codec::decode`] do one after the other, to the bit, in one pass.
    ///
    /// # Safety
    /// The addends of `sums` may be read; where the results go, if they are wanted, there is room for as many float32. Both may be
    /// the same place; nobody else uses it meanwhile. No alignment is asked for.
    ///
    /// # Panics
    /// Panics if one of the slices has another length than [`Codec::encoded_bytes`].
    unsafe fn encode_sums(&self, dst: &mut [u8], src: &[u8], sums: Sums);
}

/// Sums that are made while they are encoded.
#[derive(Clone, Copy, Debug)]
pub struct Sums {
    /// Float32 that what was encoded is added to.
    pub addends: *const f32,
    /// What the sums are divided by before they are encoded.
    pub divisor: Option<f32>,
    /// Where what the sums decode to goes, as float32.
    pub results: Option<*mut f32>,
    /// How many there are.
    pub count: usize,
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

/// How much of what it encodes a codec loses, as training has to know it. In order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Loss {
    /// Nothing.
    None,
    /// So little that error feedback, if there is any, need not go beyond a rank's own contributions.
    Fine,
    /// So much that sums lose it on their way back, too: error feedback has a residual of both.
    Coarse,
    /// More than there is: with error feedback the residual grows without end.
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

/// The largest bucket.
pub const MOST_BUCKET: u32 = 8192;
const LEAST_MULTIPLE: u32 = 8;
const LEAST_POWER: u32 = 64;

impl Buckets {
    /// Whether a bucket may have so many elements.
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

/// Most that one encoding of float32 changes a value of a bucket, in magnitude: a share of the value, or the floor where
/// that is more.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bound {
    /// Of the value's magnitude.
    pub share: f64,
    /// Whatever the value is; an infinity where the codec has no number for what is in the bucket.
    pub floor: f64,
}

impl Bound {
    /// The bound of a value.
    pub fn of(self, value: f32) -> f64 {
        (self.share * f64::from(value).abs()).max(self.floor)
    }
}

/// One codec of the table: all that others ask about it, so that nobody decides by its name.
#[derive(Debug)]
pub struct Row {
    /// Its number in words that ranks compare: its own for ever.
    pub id: u8,
    /// The name in settings.
    pub name: &'static str,
    /// What it does, in a line.
    pub description: &'static str,
    /// What there is a choice of; other settings mean nothing to it.
    pub settings: &'static [Setting],
    /// The bits that it accepts, if it has [`Setting::Bits`].
    pub bits: RangeInclusive<u8>,
    /// The buckets that it accepts, if it has [`Setting::Bucket`].
    pub buckets: Buckets,
    /// How many elements share their metadata, from the first on: a NaN or an infinity among them makes all of them NaN.
    /// 1 where each element stands for itself.
    pub shared: fn(&Settings) -> usize,
    /// Whether it converts elements one by one, without looking at others: as fast as memory is.
    pub is_cast: bool,
    /// How much it loses.
    pub loss: fn(&Settings) -> Loss,
    /// Whether it is of use only where what it loses is added to what is encoded next.
    pub needs_feedback: bool,
    /// Whether all elements of a bucket decode to one magnitude, so that second moments (Adam's) say nothing of them.
    pub hides_magnitudes: bool,
    /// The codec that loses less, to go on with where this one loses too much; `None` where nothing is lost.
    pub next_finer: fn(&Settings) -> Option<Summary>,
    /// What the choice of a codec by measurement (`"auto"`) tries of it, the finest first.
    pub auto: &'static [&'static str],
    /// Most that an encoding changes a value, of finite values that share their metadata (the second argument), in a slice
    /// that is encoded together (the third: as many as the [grain](Codec::grain)).
    pub bound: fn(&Settings, &[f32], &[f32]) -> Bound,
    /// Makes the codec; settings and instruction set are checked.
    pub(super) build: Build,
}

pub(super) type Build = fn(&Settings, Isa) -> Arc<dyn Codec>;

impl Row {
    /// Whether there is a choice of this.
    pub fn has(&self, setting: Setting) -> bool {
        self.settings.contains(&setting)
    }

    /// The name, with a word for the bits where there is a choice of them.
    pub fn spelled(&self) -> String {
        if self.has(Setting::Bits) { format!("{}:BITS", self.name) } else { self.name.to_owned() }
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
        isa.check_available()?;
        self.check(settings)?;
        Ok((self.build)(settings, isa))
    }

    /// # Errors
    /// `Configuration` if a setting has no meaning for it.
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

    /// The same codec with another number of bits, if it accepts that: for [`Row::next_finer`].
    pub(super) fn with_bits(&'static self, settings: &Settings, bits: u8) -> Option<Summary> {
        self.bits.contains(&bits).then(|| Summary::new(self, Settings { bits, ..*settings }))
    }
}

/// Which codec with which settings.
#[derive(Clone, Copy, Debug)]
pub struct Summary {
    row: &'static Row,
    settings: Settings,
}

/// Settings that a codec has no use for are alike.
impl PartialEq for Summary {
    fn eq(&self, other: &Self) -> bool {
        self.word() == other.word()
    }
}

impl Eq for Summary {}

impl Summary {
    /// Bits of its word.
    pub const BITS: u32 = 26;

    /// Of a codec with these settings.
    pub(super) fn new(row: &'static Row, settings: Settings) -> Self {
        Self { row, settings }
    }

    /// The codec's row.
    pub fn row(self) -> &'static Row {
        self.row
    }

    /// The settings; those that the codec has not got are of no meaning.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// How much it loses.
    pub fn loss(&self) -> Loss {
        (self.row.loss)(&self.settings)
    }

    /// The codec that loses less; `None` where nothing is lost.
    pub fn next_finer(&self) -> Option<Summary> {
        (self.row.next_finer)(&self.settings)
    }

    /// Equal for codecs that encode alike, and for no others.
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

    /// Of a word, with the row of the number in it; `None` for settings that this version does not know.
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

    /// The number of the row in a word.
    pub(super) fn row_id(word: u32) -> u8 {
        (word & ((1 << ROW_BITS) - 1)) as u8
    }
}

/// Bits of the number of a row: all that it can be.
pub(super) const ROW_BITS: u32 = u8::BITS;

/// Bits of a setting: what it can be, less one for bits and for eighths of a bucket, which are never 0.
pub(super) const fn width(setting: Setting) -> u32 {
    match setting {
        Setting::Bits => 3,
        Setting::Bucket => 10,
        Setting::Meta | Setting::Rounding => 2,
        Setting::SkipIncomplete => 1,
    }
}

// The fields fill the word, and hold what they are for.
const _: () = {
    let (mut bits, mut index) = (ROW_BITS, 0);
    while index < Setting::ALL.len() {
        bits += width(Setting::ALL[index]);
        index += 1;
    }
    assert!(bits == Summary::BITS, "a word has other fields than it has room for");
    assert!(MOST_BITS as u32 <= 1 << width(Setting::Bits), "bits do not fit their field");
    assert!(MOST_BUCKET / 8 <= 1 << width(Setting::Bucket), "buckets do not fit their field");
    assert!(META.len() <= 1 << width(Setting::Meta), "types of metadata do not fit their field");
    assert!(ROUNDING.len() <= 1 << width(Setting::Rounding), "ways of rounding do not fit their field");
};

/// As [`super::parse`] reads it.
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

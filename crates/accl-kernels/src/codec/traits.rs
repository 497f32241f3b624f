//! What a codec is, and its row in the table. Read [`Codec`] first.

use std::fmt;
use std::ops::AddAssign;
use std::sync::Arc;

use accl_types::{Dtype, Result};

use super::noise::Noise;
use super::settings::{META, ROUNDING, Setting, Settings};
use crate::isa::Isa;

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
    /// Its number in words that ranks compare: its own for ever.
    pub id: u8,
    /// The name in settings.
    pub name: &'static str,
    /// What it does, in a line.
    pub description: &'static str,
    /// What there is a choice of; other settings mean nothing to it.
    pub settings: &'static [Setting],
    /// Whether it is of use only where what it loses is added to what is encoded next.
    pub needs_feedback: bool,
    pub(super) build: Build,
}

pub(super) type Build = fn(&Settings, Isa) -> Result<Arc<dyn Codec>>;

impl Row {
    /// One that has no settings.
    pub(super) const fn plain(id: u8, name: &'static str, description: &'static str, build: Build) -> Self {
        Self { id, name, description, settings: &[], needs_feedback: false, build }
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

    /// Equal for codecs that encode alike, and for no others.
    pub fn word(self) -> u32 {
        let Settings { bits, bucket, meta, rounding, skip_incomplete } = self.settings;
        let meta = META.iter().position(|dtype| *dtype == meta).unwrap_or(0) as u32;
        let rounding = ROUNDING.iter().position(|(_, other)| *other == rounding).unwrap_or(0) as u32;
        let fields = [
            (Setting::Bits, u32::from(bits)),
            (Setting::Bucket, bucket / 8),
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
                Setting::Bits => settings.bits = value as u8,
                Setting::Bucket => settings.bucket = 8 * value,
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

/// Bits of the number of a row.
pub(super) const ROW_BITS: u32 = 6;

/// Bits of a setting.
pub(super) fn width(setting: Setting) -> u32 {
    match setting {
        Setting::Bits => 4,
        Setting::Bucket => 11,
        Setting::Meta | Setting::Rounding => 2,
        Setting::SkipIncomplete => 1,
    }
}

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

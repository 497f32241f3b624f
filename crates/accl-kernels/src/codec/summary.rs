//! Settings of a codec in a word: for ranks that compare them, and to name them in errors, as [`super::parse`] reads them.

use std::fmt;

use accl_types::Dtype;

use super::{CODECS, Rounding, Row, Setting, Settings};

/// Which codec with which settings, in 24 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Summary(u32);

impl Summary {
    /// Bits that are used.
    pub const BITS: u32 = 24;

    /// Of the codec of this name; what it has no choice of is left out.
    pub(super) fn new(name: &str, settings: Option<&Settings>) -> Self {
        let index = CODECS.iter().position(|row| row.name == name).unwrap_or(CODECS.len());
        let (Some(row), Some(settings)) = (CODECS.get(index), settings) else { return Self(index as u32) };
        let Settings { bits, bucket, meta, rounding, skip_incomplete } = *settings;
        let meta = META.iter().position(|dtype| *dtype == meta).unwrap_or(0) as u32;
        let rounding = ROUNDING.iter().position(|other| *other == rounding).unwrap_or(0) as u32;
        let fields = [
            (Setting::Bits, u32::from(bits)),
            (Setting::Bucket, bucket / 8),
            (Setting::Meta, meta),
            (Setting::Rounding, rounding),
            (Setting::SkipIncomplete, u32::from(skip_incomplete)),
        ];
        let packed = fields
            .into_iter()
            .rev()
            .fold(0, |word, (setting, value)| word << width(setting) | if row.has(setting) { value } else { 0 });
        Self(packed << ROW_BITS | index as u32)
    }

    /// The word.
    pub fn word(self) -> u32 {
        self.0
    }

    /// The codec's row, if this version knows it.
    pub fn row(self) -> Option<&'static Row> {
        CODECS.get((self.0 & ((1 << ROW_BITS) - 1)) as usize)
    }

    /// From a word; what is in its higher bits is left out of account.
    pub fn from_word(word: u32) -> Self {
        Self(word & ((1 << Self::BITS) - 1))
    }
}

/// Bits of the number of a row.
const ROW_BITS: u32 = 4;

/// Bits of a setting.
fn width(setting: Setting) -> u32 {
    match setting {
        Setting::Bits => 4,
        Setting::Bucket => 11,
        Setting::Meta | Setting::Rounding => 2,
        Setting::SkipIncomplete => 1,
    }
}

/// Types of metadata, by their numbers.
pub(super) const META: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];
const ROUNDING: [Rounding; 3] = [Rounding::Nearest, Rounding::Stochastic, Rounding::Correlated];

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(row) = self.row() else { return f.write_str("a codec that this version does not know") };
        f.write_str(row.name)?;
        let mut word = self.0 >> ROW_BITS;
        for setting in Setting::ALL {
            let value = (word & ((1 << width(setting)) - 1)) as usize;
            word >>= width(setting);
            match setting {
                _ if !row.has(setting) => {}
                Setting::Bits => write!(f, ":{value}")?,
                Setting::Bucket => write!(f, ",bucket={}", 8 * value)?,
                Setting::Meta => write!(f, ",meta={}", META.get(value).map_or("unknown", |dtype| dtype.name()))?,
                Setting::Rounding => {
                    let name = match ROUNDING.get(value) {
                        Some(Rounding::Nearest) => "nearest",
                        Some(Rounding::Stochastic) => "stochastic",
                        Some(Rounding::Correlated) => "correlated",
                        None => "unknown",
                    };
                    write!(f, ",rounding={name}")?;
                }
                Setting::SkipIncomplete if value == 0 => {}
                Setting::SkipIncomplete => f.write_str(",skip_incomplete")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_named_after_their_way_through_a_word() {
        let settings = Settings { bits: 8, bucket: 8192, meta: Dtype::BF16, ..Settings::default() };
        let text = |settings: &Settings| {
            let summary = Summary::new("maxmin", Some(settings));
            assert_eq!(Summary::from_word(summary.word()), summary);
            summary.to_string()
        };
        assert_eq!(text(&Settings::default()), "maxmin:4,bucket=512,meta=float32,rounding=nearest");
        assert_eq!(text(&settings), "maxmin:8,bucket=8192,meta=bfloat16,rounding=nearest");
        let settings = Settings { rounding: Rounding::Stochastic, skip_incomplete: true, ..settings };
        assert_eq!(text(&settings), "maxmin:8,bucket=8192,meta=bfloat16,rounding=stochastic,skip_incomplete");
        let settings = Settings { rounding: Rounding::Correlated, skip_incomplete: false, ..settings };
        assert_eq!(text(&settings), "maxmin:8,bucket=8192,meta=bfloat16,rounding=correlated");
        assert_eq!(Summary::new("raw", None).to_string(), "raw");
    }

    #[test]
    fn the_table_fits_its_field() {
        assert!(CODECS.len() < 1 << ROW_BITS);
        assert_eq!(ROW_BITS + Setting::ALL.into_iter().map(width).sum::<u32>(), Summary::BITS);
    }
}

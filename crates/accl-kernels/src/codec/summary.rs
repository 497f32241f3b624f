//! Settings of a codec in a word: for ranks that compare them, and to name them in errors, as [`super::parse`] reads them.

use std::fmt;

use accl_types::Dtype;

use super::{CODECS, Rounding, Settings};

/// Which codec with which settings, in 24 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Summary(u32);

impl Summary {
    /// Bits that are used.
    pub const BITS: u32 = 24;

    /// Of the codec of this name; without settings, it has none.
    pub(super) fn new(name: &str, settings: Option<&Settings>) -> Self {
        let row = CODECS.iter().position(|row| row.name == name).unwrap_or(CODECS.len()) as u32;
        let Some(&Settings { bits, bucket, meta, rounding, skip_incomplete }) = settings else { return Self(row) };
        let meta = META.iter().position(|dtype| *dtype == meta).unwrap_or(0) as u32;
        let rounding = ROUNDING.iter().position(|other| *other == rounding).unwrap_or(0) as u32;
        let fields = [(row, 4), (u32::from(bits), 4), (bucket / 8, 11), (meta, 2), (rounding, 2)];
        let packed = fields.iter().rev().fold(u32::from(skip_incomplete), |word, (value, width)| word << width | value);
        Self(packed)
    }

    /// The word.
    pub fn word(self) -> u32 {
        self.0
    }

    /// From a word; what is in its higher bits is left out of account.
    pub fn from_word(word: u32) -> Self {
        Self(word & ((1 << Self::BITS) - 1))
    }
}

/// Types of metadata, by their numbers.
pub(super) const META: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::BF16];
const ROUNDING: [Rounding; 3] = [Rounding::Nearest, Rounding::Stochastic, Rounding::Correlated];

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut word = self.0;
        let mut field = |width: u32| {
            let value = word & ((1 << width) - 1);
            word >>= width;
            value as usize
        };
        let Some(row) = CODECS.get(field(4)) else { return f.write_str("a codec that this version does not know") };
        let (bits, bucket, meta, rounding, skip) = (field(4), 8 * field(11), field(2), field(2), field(1));
        f.write_str(row.name)?;
        if bits == 0 {
            return Ok(());
        }
        let rounding = match ROUNDING.get(rounding) {
            Some(Rounding::Nearest) => "nearest",
            Some(Rounding::Stochastic) => "stochastic",
            Some(Rounding::Correlated) => "correlated",
            None => "unknown",
        };
        let meta = META.get(meta).map_or("unknown", |dtype| dtype.name());
        write!(f, ":{bits},bucket={bucket},meta={meta},rounding={rounding}")?;
        if skip == 1 { f.write_str(",skip_incomplete") } else { Ok(()) }
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
        assert!(CODECS.len() < 16);
    }
}

//! Codecs: floats to fewer bits and back. Each has one file and one row of [`CODECS`]; start with [`Codec`].
//!
//! Owns the encoded bytes of a slice of a tensor, the arithmetic of both directions and its random numbers. Does not
//! know which tensors are compressed, a tile's header or checksum, which rank sends to which, or residuals.
//!
//! # Numbers
//! * Encoding and decoding give the same bits on every instruction set, in every thread and floating-point mode.
//! * The length of an encoded slice depends only on counts and settings, never on values.
//! * Random numbers are a function of a [`RngKey`] key and an element's index in its tensor: not of threads, slices or
//!   tiles.
//! * A bucket with a NaN or an infinity decodes to NaN in all of its elements, and does not affect its neighbours. So
//!   does a bucket of finite values that the metadata cannot hold. The two are counted separately, see [`NonFinite`].
//! * Any bytes can be decoded: wrong bytes give wrong numbers and no other harm.

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
mod nvfp4;
mod page;
mod pieces;
pub(crate) mod rng;
mod rotation;
mod scaled;
mod settings;
mod sign;
mod sign_loops;
mod small_float;
mod text;
mod top_k;
mod traits;
mod uniform;

use std::sync::Arc;

use accl_types::{Error, Result, nearest};

pub use floats::Floats;
pub use page::page_with_table;
pub use rng::RngKey;
pub use settings::{Rounding, Setting, Settings};
use traits::ROW_BITS;
pub use traits::{Bound, Buckets, Codec, EncodeSums, Loss, MOST_BUCKET, NonFinite, Row, Slice, Summary, Sums, encodes};

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

// Each codec has a number of its own, which fits its field in the words that ranks compare.
const _: () = {
    assert!(CODECS.len() <= 1 << ROW_BITS, "the table has more codecs than a word can number");
    let mut index = 0;
    while index < CODECS.len() {
        assert!((CODECS[index].id as u32) < 1 << ROW_BITS, "the number of a codec does not fit its field");
        let mut other = 0;
        while other < index {
            assert!(CODECS[other].id != CODECS[index].id, "two codecs have the same number");
            other += 1;
        }
        index += 1;
    }
};

/// Returns the row of the codec with this name.
///
/// # Errors
/// `Configuration` if there is none; the message lists the known names, with the nearest one.
pub fn codec(name: &str) -> Result<&'static Row> {
    CODECS.iter().find(|row| row.name == name).ok_or_else(|| {
        let names = CODECS.iter().map(|row| row.name);
        let hint = nearest(name, names.clone()).map_or(String::new(), |known| format!("; did you mean `{known}`?"));
        let names: Vec<&str> = names.collect();
        Error::configuration(format!("unknown codec `{name}`; expected one of {}{hint}", names.join(", ")))
    })
}

/// Describes what [`parse`] accepts, for the texts of settings.
pub fn accepted() -> String {
    let spelled: Vec<String> = CODECS.iter().map(Row::spelled).collect();
    let listed = match spelled.split_last() {
        Some((last, [])) => last.clone(),
        Some((last, others)) => format!("{} or {last}", others.join(", ")),
        None => String::new(),
    };
    format!("a codec: {listed}, with settings such as maxmin:4,bucket=128,rounding=stochastic")
}

/// Parses a codec: its name, `:` and the bits if it has a choice of them, then settings with `,` between. Examples:
/// `bf16`, `maxmin:4`, `maxmin:4,bucket=128,rounding=stochastic`.
///
/// Omitted settings have the values of [`Settings::default`], except that rounding is stochastic below four bits.
///
/// # Errors
/// `Configuration` for an unknown codec or setting, with the nearest known one, and for a value that is not accepted.
pub fn parse(text: &str) -> Result<Arc<dyn Codec>> {
    let row = codec(text::name(text))?;
    row.build(&text::settings(text, row)?)
}

/// Decodes a word that [`Summary::word`] made; `None` if this version does not know the codec.
pub fn from_word(word: u32) -> Option<Summary> {
    let row = CODECS.iter().find(|row| row.id == Summary::row_id(word))?;
    Summary::from_word(word, row)
}

//! Codecs: elements per second, compared with a copy of the same float32 (encoding) and with `y += x` (decoding).
//!
//! Arguments: words, of which one must be part of `isa/codec/bits/bucket/dtype/what/level`, and `--json`. Bits and
//! bucket are `-` if a codec does not have that setting.

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;

use accl_benches::arguments::Arguments;
use accl_benches::memory_level::MemoryLevel;
use accl_benches::pin::{self, Pinned};
use accl_benches::plain_loops::PlainLoops;
use accl_benches::sweep::{self, Sweep};
use accl_benches::turns::compare;
use accl_kernels::codec::{CODECS, Codec, RngKey, Rounding, Row, Setting, Settings, Slice};
use accl_kernels::{Isa, available_isas};
use accl_types::{Dtype, Rank};

/// Operation on a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Encode,
    /// Encoding with stochastic rounding.
    EncodeDrawn,
    /// Encoding with correlated rounding among eight ranks.
    EncodeAmong,
    Decode,
    /// Decoding into sums in float32.
    DecodeAdd,
}

impl What {
    const ALL: [What; 5] = [What::Encode, What::EncodeDrawn, What::EncodeAmong, What::Decode, What::DecodeAdd];

    fn name(self) -> &'static str {
        match self {
            What::Encode => "encode",
            What::EncodeDrawn => "encode_stochastic",
            What::EncodeAmong => "encode_correlated",
            What::Decode => "decode",
            What::DecodeAdd => "decode_add",
        }
    }

    fn rounding(self) -> Rounding {
        match self {
            What::EncodeDrawn => Rounding::Stochastic,
            What::EncodeAmong => Rounding::Correlated,
            What::Encode | What::Decode | What::DecodeAdd => Rounding::Nearest,
        }
    }
}

struct CodecBuffers {
    floats: Vec<f32>,
    others: Vec<f32>,
    encoded: Vec<u8>,
}

impl CodecBuffers {
    fn new() -> Self {
        let count = MemoryLevel::Dram.bytes() / 4;
        // Small numbers of both signs in each of the types: the lower half of a word is a valid 16-bit float, too.
        let mut state = 1u32;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            f32::from_bits(0x3c00_3c00 | state >> 9 & 0x03ff_03ff | state & 0x8000_8000)
        };
        let mut floats = || (0..count).map(|_| next()).collect();
        Self { floats: floats(), others: floats(), encoded: vec![0; 2 * MemoryLevel::Dram.bytes()] }
    }
}

/// A combination to measure.
struct CodecCase {
    isa: Isa,
    codec: &'static Row,
    /// `None` if the codec has no such setting; the same holds for `bucket`.
    bits: Option<u8>,
    bucket: Option<u32>,
    dtype: Dtype,
    what: What,
    level: MemoryLevel,
}

impl CodecCase {
    fn id(&self) -> String {
        let CodecCase { isa, codec, bits, bucket, dtype, what, level } = self;
        let bits = bits.map_or("-".to_owned(), |bits| bits.to_string());
        let bucket = bucket.map_or("-".to_owned(), |bucket| bucket.to_string());
        format!("{isa}/{}/{bits}/{bucket}/{dtype}/{}/{}", codec.name, what.name(), level.name())
    }

    fn settings(&self) -> Settings {
        let usual = Settings::default();
        Settings {
            bits: self.bits.unwrap_or(usual.bits),
            bucket: self.bucket.unwrap_or(usual.bucket),
            rounding: self.what.rounding(),
            ..usual
        }
    }

    fn to_json(&self, rate: f64, reference: f64, share: f64) -> serde_json::Value {
        serde_json::json!({
            "isa": self.isa.name(),
            "codec": self.codec.name,
            "bits": self.bits,
            "bucket": self.bucket,
            "dtype": self.dtype.name(),
            "what": self.what.name(),
            "place": self.level.name(),
            "g_elements_s": rate,
            "reference_g_elements_s": reference,
            "share": share,
        })
    }
}

/// Returns every combination of the codecs' settings. The moderate set has the best instruction set, the default bucket
/// and half of the widths.
fn cases(sweep: Sweep) -> Vec<CodecCase> {
    let isas = available_isas();
    let mut cases = Vec::new();
    for &isa in sweep.pick(&isas[isas.len() - 1..], &isas[..]) {
        for codec in CODECS {
            let bits = sweep.pick(&[8, 4, 2, 1][..], &[8, 7, 6, 5, 4, 3, 2, 1][..]);
            for bits in choices(codec, Setting::Bits, bits) {
                let buckets = sweep.pick(&[512][..], &[64, 128, 512, 1024, 8192][..]);
                for bucket in choices(codec, Setting::Bucket, buckets) {
                    for dtype in [Dtype::F32, Dtype::BF16, Dtype::F16] {
                        let of = |what, level| CodecCase { isa, codec, bits, bucket, dtype, what, level };
                        let whats = What::ALL
                            .into_iter()
                            .filter(|what| *what != What::EncodeDrawn || codec.has(Setting::Rounding));
                        cases.extend(whats.flat_map(|what| MemoryLevel::ALL.map(|level| of(what, level))));
                    }
                }
            }
        }
    }
    cases.retain(|case| case.codec.build_with_isa(&case.settings(), case.isa).is_ok());
    cases
}

/// Returns the values of a setting, or one `None` if the codec does not have the setting.
fn choices<T: Copy>(codec: &Row, setting: Setting, values: &[T]) -> Vec<Option<T>> {
    if codec.has(setting) { values.iter().copied().map(Some).collect() } else { vec![None] }
}

fn main() -> ExitCode {
    let arguments = Arguments::of_process();
    let _pinned = Pinned::new(0, 1, &pin::cores());
    let mut buffers = CodecBuffers::new();
    let mut all = Vec::new();
    arguments.say(&format!("{:>60} {:>10} {:>12} {:>12}", "", "G elem/s", "reference", "ratio"));
    for case in cases(Sweep::chosen()).iter().filter(|case| arguments.want(&case.id())) {
        let (rate, reference, share) = measure(&mut buffers, case);
        arguments.say(&format!("{:>60} {rate:>10.2} {reference:>12.2} {share:>12.2}", case.id()));
        all.push(case.to_json(rate, reference, share));
        if sweep::is_test() {
            break;
        }
    }
    arguments.end(all);
    ExitCode::SUCCESS
}

/// Returns elements per nanosecond of a case and of its reference, and the ratio of the two.
fn measure(buffers: &mut CodecBuffers, case: &CodecCase) -> (f64, f64, f64) {
    let CodecCase { isa, dtype, what, level, .. } = *case;
    let codec = case.codec.build_with_isa(&case.settings(), isa).unwrap_or_else(|error| panic!("{error}"));
    let plain = PlainLoops::of(isa);
    let count = level.bytes() / 4;
    let found = compare(
        buffers,
        level,
        |buffers| reference(buffers, &plain, what, count),
        |buffers| subject(buffers, &codec, what, dtype, count),
    );
    (count as f64 / found.ns, count as f64 / found.reference_ns, found.share)
}

fn reference(buffers: &mut CodecBuffers, plain: &PlainLoops, what: What, count: usize) {
    let (y, x) = (&mut buffers.others[..count], black_box(&buffers.floats[..count]));
    match what {
        What::Encode | What::EncodeDrawn | What::EncodeAmong => y.copy_from_slice(x),
        What::Decode | What::DecodeAdd => plain.add(y, x),
    }
}

fn subject(buffers: &mut CodecBuffers, codec: &Arc<dyn Codec>, what: What, dtype: Dtype, count: usize) {
    let slice = Slice { src: black_box(buffers.floats.as_ptr()).cast(), dtype, tensor: dtype, count, first: 0 };
    let encoded = &mut buffers.encoded[..codec.encoded_bytes(dtype, count)];
    let others = &mut buffers.others[..count];
    match what {
        What::Encode | What::EncodeDrawn | What::EncodeAmong => {
            // SAFETY: `buffers.floats` holds `count` elements of up to four bytes, and no other code writes them during
            // the call.
            let _ = black_box(unsafe { codec.encode(encoded, slice, RngKey::keyed(&[1]).among(&[1], Rank(3), 8)) });
        }
        // SAFETY: `others` has room for `count` elements of up to four bytes, and no other code uses it during the
        // call.
        What::Decode => unsafe { codec.decode(others.as_mut_ptr().cast(), dtype, black_box(encoded), dtype, count) },
        What::DecodeAdd => codec.decode_add(others, black_box(encoded), dtype),
    }
}

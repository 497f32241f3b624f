//! Codecs and their settings as texts and as words of a frame.

use accl_kernels::codec::{Rounding, Settings, Summary, codec, from_word, parse};
use accl_types::Dtype;

fn summary(codec_name: &str, settings: &Settings) -> Summary {
    codec(codec_name).unwrap().build(settings).unwrap().summary()
}

#[test]
fn settings_come_back_as_they_were_written() {
    for (text, whole) in [
        ("raw", "raw"),
        ("bf16", "bf16"),
        ("absmax:8", "absmax:8,bucket=512,meta=float32,rounding=nearest"),
        ("sign", "sign,bucket=512,meta=float32"),
        ("sign,meta=bfloat16,bucket=64", "sign,bucket=64,meta=bfloat16"),
        ("hadamard:2,bucket=1024", "hadamard:2,bucket=1024,meta=float32,rounding=stochastic"),
        ("e5m2", "e5m2"),
        ("mxfp8_e5m2", "mxfp8_e5m2"),
        ("nvfp4", "nvfp4"),
        ("maxmin:4", "maxmin:4,bucket=512,meta=float32,rounding=nearest"),
        ("maxmin:3", "maxmin:3,bucket=512,meta=float32,rounding=stochastic"),
        ("maxmin:2, bucket=64 ,rounding=nearest", "maxmin:2,bucket=64,meta=float32,rounding=nearest"),
        ("absmax:2,rounding=correlated", "absmax:2,bucket=512,meta=float32,rounding=correlated"),
        (
            "maxmin:8,meta=bfloat16,rounding=stochastic,bucket=8192,skip_incomplete",
            "maxmin:8,bucket=8192,meta=bfloat16,rounding=stochastic,skip_incomplete",
        ),
    ] {
        assert_eq!(parse(text).unwrap().summary().to_string(), whole);
        assert_eq!(parse(whole).unwrap().summary().to_string(), whole);
    }
}

#[test]
fn what_is_wrong_is_named() {
    for (text, part) in [
        ("maxmin", "expected the number of bits, as in `maxmin:4`"),
        ("maxmin:four", "bits is `four`; expected a number"),
        ("maxmin:9", "bits is 9; expected 1 to 8"),
        ("maxmin:0", "bits is 0; expected 1 to 8"),
        ("absmax:1", "codec absmax: bits is 1; expected 2 to 8"),
        ("maxmin:4,bucket=0", "bucket is 0; expected a multiple of 8 from 8 to 8192"),
        ("maxmin:4,bucket=7", "bucket is 7; expected a multiple of 8 from 8 to 8192"),
        ("maxmin:4,bucket=big", "bucket is `big`; expected a number of elements"),
        ("maxmin:4,meta=int8", "meta is `int8`; expected float32, float16 or bfloat16"),
        ("maxmin:4,rounding=up", "rounding is `up`; expected nearest, stochastic or correlated"),
        ("maxmin:4,bukket=8", "unknown setting `bukket=8`; maxmin has bucket, meta, rounding, skip_incomplete"),
        ("maxmin:4,bukket=8", "did you mean `bucket`?"),
        ("maxmin:4,bucket", "bucket has no value; expected `bucket=VALUE`"),
        ("maxmin:4,skip_incomplete=1", "skip_incomplete takes no value"),
        ("sign:1", "sign has no choice of bits"),
        ("sign,rounding=nearest", "unknown setting `rounding=nearest`; sign has bucket, meta"),
        ("sign,bucket=12", "codec sign: bucket is 12; expected a multiple of 8 from 8 to 8192"),
        ("hadamard", "expected the number of bits, as in `hadamard:4`"),
        ("mxfp8,bucket=32", "mxfp8 has no settings"),
        ("bf16:4", "bf16 has no choice of bits"),
        ("raw,bucket=8", "raw has no settings"),
        ("maxmum:4", "unknown codec `maxmum`; expected one of raw, bf16, fp16, maxmin, absmax"),
    ] {
        let error = parse(text).unwrap_err();
        assert!(error.message.contains(part), "{text}: {}", error.message);
    }
}

#[test]
fn settings_are_named_after_their_way_through_a_word() {
    let settings = Settings { bits: 8, bucket: 8192, meta: Dtype::BF16, ..Settings::default() };
    let text = |settings: &Settings| {
        let summary = summary("maxmin", settings);
        assert_eq!(from_word(summary.word()), Some(summary));
        summary.to_string()
    };
    assert_eq!(text(&Settings::default()), "maxmin:4,bucket=512,meta=float32,rounding=nearest");
    assert_eq!(text(&settings), "maxmin:8,bucket=8192,meta=bfloat16,rounding=nearest");
    let settings = Settings { rounding: Rounding::Stochastic, skip_incomplete: true, ..settings };
    assert_eq!(text(&settings), "maxmin:8,bucket=8192,meta=bfloat16,rounding=stochastic,skip_incomplete");
    let settings = Settings { rounding: Rounding::Correlated, skip_incomplete: false, ..settings };
    assert_eq!(text(&settings), "maxmin:8,bucket=8192,meta=bfloat16,rounding=correlated");
    assert_eq!(summary("raw", &Settings::default()).to_string(), "raw");
}

//! Codecs as users write them: `bf16`, `maxmin:4`, `maxmin:4,bucket=128,rounding=stochastic`.

use accl_types::{Error, Result, nearest};

use super::settings::{META, ROUNDING, Rounding, Setting, Settings};
use super::traits::Row;

/// The name in a text.
pub(super) fn name(text: &str) -> &str {
    let head = text.split(',').next().unwrap_or_default().trim();
    head.split_once(':').map_or(head, |(name, _)| name)
}

/// The settings in a text, for a codec of this row.
///
/// # Errors
/// `Configuration` for an unknown setting, with the nearest known one, and for a value that is not accepted.
pub(super) fn settings(text: &str, row: &Row) -> Result<Settings> {
    let mut parts = text.split(',').map(str::trim);
    let bits = parts.next().and_then(|head| head.split_once(':')).map(|(_, bits)| bits);
    let name = row.name;
    let wrong = |why: String| Error::configuration(format!("codec `{text}`: {why}"));
    let mut settings = Settings::default();
    if row.has(Setting::Bits) {
        let bits = bits.ok_or_else(|| wrong(format!("expected the number of bits, as in `{name}:4`")))?;
        settings.bits = bits.parse().map_err(|_| wrong(format!("bits is `{bits}`; expected a number")))?;
    } else if bits.is_some() {
        return Err(wrong(format!("{name} has no choice of bits")));
    }
    let keys = || row.settings.iter().filter(|setting| **setting != Setting::Bits).map(|setting| setting.name());
    let mut rounding = None;
    for part in parts {
        let (key, value) = part.split_once('=').map_or((part, None), |(key, value)| (key, Some(value)));
        if row.settings.is_empty() {
            return Err(wrong(format!("{name} has no settings")));
        }
        if !keys().any(|known| known == key) {
            let hint = nearest(key, keys()).map_or(String::new(), |known| format!("; did you mean `{known}`?"));
            return Err(wrong(format!(
                "unknown setting `{part}`; {name} has {}{hint}",
                keys().collect::<Vec<_>>().join(", ")
            )));
        }
        match (key, value) {
            ("bucket", Some(value)) => {
                let bucket = value.parse();
                let number = || wrong(format!("bucket is `{value}`; expected a number of elements"));
                settings.bucket = bucket.map_err(|_| number())?;
            }
            ("meta", Some(value)) => {
                let meta = META.iter().find(|dtype| dtype.name() == value);
                let one_of = || wrong(format!("meta is `{value}`; expected float32, float16 or bfloat16"));
                settings.meta = *meta.ok_or_else(one_of)?;
            }
            ("rounding", Some(value)) => {
                let known = ROUNDING.iter().find(|(name, _)| *name == value);
                let one_of = || wrong(format!("rounding is `{value}`; expected nearest, stochastic or correlated"));
                rounding = Some(known.ok_or_else(one_of)?.1);
            }
            ("skip_incomplete", None) => settings.skip_incomplete = true,
            ("skip_incomplete", Some(_)) => return Err(wrong("skip_incomplete has no value".to_owned())),
            _ => return Err(wrong(format!("{key} has no value; expected `{key}=` and one"))),
        }
    }
    settings.rounding = rounding.unwrap_or(Rounding::default_of(settings.bits));
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::super::parse;

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
            ("maxmin:4,bucket", "bucket has no value; expected `bucket=` and one"),
            ("maxmin:4,skip_incomplete=1", "skip_incomplete has no value"),
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
}

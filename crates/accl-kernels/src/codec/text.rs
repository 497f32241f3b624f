//! Codecs as users write them: `bf16`, `maxmin:4`, `maxmin:4,bucket=128,rounding=stochastic`.

use accl_types::{Error, Result, nearest};

use super::settings::{META, ROUNDING, Rounding, Setting, Settings};
use super::traits::Row;

/// Returns the name in a text.
pub(super) fn name(text: &str) -> &str {
    let head = text.split(',').next().unwrap_or_default().trim();
    head.split_once(':').map_or(head, |(name, _)| name)
}

/// Parses the settings in a text, for a codec of this row.
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
            ("skip_incomplete", Some(_)) => return Err(wrong("skip_incomplete takes no value".to_owned())),
            _ => return Err(wrong(format!("{key} has no value; expected `{key}=VALUE`"))),
        }
    }
    settings.rounding = rounding.unwrap_or(Rounding::default_of(settings.bits));
    Ok(settings)
}

//! JSON field that is a number or an array of bytes.

use std::fmt;

use serde::de::{Deserialize, Deserializer, SeqAccess, Visitor};

/// A number or an array of bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Data {
    Number(u32),
    Bytes(Vec<u8>),
}

/// Hosts write bytes from 0 to 255 and the emulator writes them from -128 to 127; both are accepted.
impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Read;

        impl<'de> Visitor<'de> for Read {
            type Value = Data;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number of 32 bits, or an array of bytes")
            }

            fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<Data, E> {
                let number = u32::try_from(number);
                number.map(Data::Number).map_err(|_| E::custom("a number is larger than 32 bits"))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut array: A) -> Result<Data, A::Error> {
                let mut bytes = Vec::new();
                while let Some(number) = array.next_element::<i16>()? {
                    if !(-128..256).contains(&number) {
                        return Err(serde::de::Error::custom("an array holds a number that is not a byte"));
                    }
                    bytes.push(number as u8);
                }
                Ok(Data::Bytes(bytes))
            }
        }

        deserializer.deserialize_any(Read)
    }
}

#[derive(serde::Deserialize)]
struct Fields {
    data: Data,
}

/// Returns the JSON text in which the emulator's packets and kernel streams carry bytes.
pub fn data_to_json(bytes: &[u8]) -> String {
    format!(r#"{{"data":{}}}"#, unsigned(bytes))
}

/// Parses the JSON text of [`data_to_json`]. Returns `None` if the text is malformed.
pub fn data_from_json(text: &[u8]) -> Option<Vec<u8>> {
    match serde_json::from_slice::<Fields>(text).ok()?.data {
        Data::Bytes(bytes) => Some(bytes),
        Data::Number(_) => None,
    }
}

/// Returns an array of bytes with numbers from 0 to 255.
pub(super) fn unsigned(bytes: &[u8]) -> String {
    // Writing numbers to a string cannot fail.
    serde_json::to_string(bytes).unwrap_or_default()
}

/// Returns an array of bytes with numbers from -128 to 127.
pub(super) fn signed(bytes: &[u8]) -> String {
    let numbers: Vec<i8> = bytes.iter().map(|byte| byte.cast_signed()).collect();
    serde_json::to_string(&numbers).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_written_as_a_number_of_its_kind_and_read_again() {
        let all: Vec<u8> = (0..=255).collect();
        for (text, last) in [(unsigned(&all), ",254,255]"), (signed(&all), ",-2,-1]")] {
            assert!(text.starts_with("[0,1,2,") && text.ends_with(last), "{text}");
            assert_eq!(data_from_json(format!("{{\"data\":{text}}}").as_bytes()), Some(all.clone()));
        }
        assert_eq!(data_to_json(&[]), r#"{"data":[]}"#);
        assert_eq!(data_from_json(br#"{"data":[]}"#), Some(vec![]));
    }

    #[test]
    fn what_is_no_array_of_bytes_is_none() {
        for array in [
            "[1,]", "[,1]", "[1,,2]", "[01]", "[-]", "[256]", "[-129]", "[1.5]", "[1", "[1]]", "[[1]]", "[\"1\"]", "7",
            "[- 1]", "[-0]", "[1 2]", "[1000]", "[null]", "[true]", "[0x1]",
        ] {
            let text = format!("{{\"data\":{array}}}");
            assert_eq!(data_from_json(text.as_bytes()), None, "{text}");
        }
        assert_eq!(data_from_json(br#"{"other":"[1,2]","data":[3]}"#), Some(vec![3]));
        assert_eq!(data_from_json(br#"{"other":[1,2],"data":7}"#), None);
        assert_eq!(data_from_json(br#"{"other":[1,2]}"#), None);
    }
}

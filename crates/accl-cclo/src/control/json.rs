//! A field of JSON that is a number or an array of bytes, without a value in between for each byte.

use std::fmt::{self, Write};

use serde::de::{Deserialize, Deserializer, SeqAccess, Visitor};

/// A number, or bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Data {
    Number(u32),
    Bytes(Vec<u8>),
}

/// Bytes are written from 0 to 255 by hosts, and from -128 to 127 by the emulator: both are read.
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
                        return Err(serde::de::Error::custom("an array holds a number that is no byte"));
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

/// Bytes as packets and kernel streams of the emulator have them.
pub fn data_to_json(bytes: &[u8]) -> String {
    let mut text = r#"{"data":"#.to_owned();
    push_array(&mut text, bytes.iter());
    text.push('}');
    text
}

/// From such a text; `None`: it is none.
pub fn data_from_json(text: &[u8]) -> Option<Vec<u8>> {
    match serde_json::from_slice(text).ok()? {
        Fields { data: Data::Bytes(bytes) } => Some(bytes),
        Fields { data: Data::Number(_) } => None,
    }
}

/// Appends an array of numbers.
pub(super) fn push_array<T: fmt::Display>(text: &mut String, numbers: impl ExactSizeIterator<Item = T>) {
    text.reserve(4 * numbers.len() + 2);
    text.push('[');
    for (index, number) in numbers.enumerate() {
        if index > 0 {
            text.push(',');
        }
        let _ = write!(text, "{number}");
    }
    text.push(']');
}

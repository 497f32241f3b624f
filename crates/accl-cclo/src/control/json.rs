//! JSON field that is a number or an array of bytes, parsed without an intermediate value per byte.

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
                    let byte = byte_of(number);
                    bytes.push(
                        byte.ok_or_else(|| serde::de::Error::custom("an array holds a number that is not a byte"))?,
                    );
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
    let mut text = r#"{"data":"#.to_owned();
    push_array(&mut text, bytes, Bytes::Unsigned);
    text.push('}');
    text
}

/// Parses the JSON text of [`data_to_json`]. Returns `None` if the text is malformed.
pub fn data_from_json(text: &[u8]) -> Option<Vec<u8>> {
    let (fields, array) = read::<Fields>(text).ok()?;
    match fields.data {
        Data::Bytes(bytes) => Some(array.unwrap_or(bytes)),
        Data::Number(_) => None,
    }
}

/// Parses a text that may contain an array of bytes. If [`split`] accepts the text, the array is returned separately and an empty array is parsed in
/// its place. That is faster for large arrays.
pub(super) fn read<T: serde::de::DeserializeOwned>(text: &[u8]) -> Result<(T, Option<Vec<u8>>), serde_json::Error> {
    match split(text) {
        Some((rest, bytes)) => Ok((serde_json::from_slice(&rest)?, Some(bytes))),
        None => Ok((serde_json::from_slice(text)?, None)),
    }
}

/// Returns the text with an empty array, and the bytes of its only array. Returns `None` if the text is not of this simple form.
fn split(text: &[u8]) -> Option<(Vec<u8>, Vec<u8>)> {
    let begin = text.iter().position(|&byte| byte == b'[')?;
    let (head, array) = text.split_at(begin + 1);
    // A number and its separator take at least two characters.
    let mut bytes = Vec::with_capacity(array.len() / 2);
    let mut at = 0;
    loop {
        at = skip_blank(array, at);
        let is_negative = array.get(at) == Some(&b'-');
        let digits = at + usize::from(is_negative);
        let (number, end) = match (*array.get(digits)?, array.get(digits + 1), array.get(digits + 2)) {
            (b']', ..) if bytes.is_empty() && !is_negative => break,
            (b'0', ..) if !is_negative => (0, digits + 1),
            (first @ b'1'..=b'9', Some(second @ b'0'..=b'9'), Some(third @ b'0'..=b'9')) => {
                (100 * value(first) + 10 * value(*second) + value(*third), digits + 3)
            }
            (first @ b'1'..=b'9', Some(second @ b'0'..=b'9'), _) => (10 * value(first) + value(*second), digits + 2),
            (first @ b'1'..=b'9', ..) => (value(first), digits + 1),
            _ => return None,
        };
        let number = if is_negative { -number } else { number };
        bytes.push(byte_of(number)?);
        at = skip_blank(array, end);
        match *array.get(at)? {
            b',' => at += 1,
            b']' => break,
            _ => return None,
        }
    }
    let tail = &array[at..];
    let is_only = !tail.contains(&b'[');
    is_only.then(|| ([head, tail].concat(), bytes))
}

fn value(digit: u8) -> i16 {
    i16::from(digit - b'0')
}

fn skip_blank(text: &[u8], from: usize) -> usize {
    let mut at = from;
    while matches!(text.get(at), Some(b' ' | b'\n' | b'\r' | b'\t')) {
        at += 1;
    }
    at
}

/// Returns the byte for a number from -128 to 255, or `None` outside of that range.
fn byte_of(number: i16) -> Option<u8> {
    (-128..256).contains(&number).then_some(number as u8)
}

/// Range in which bytes are written.
#[derive(Clone, Copy)]
pub(super) enum Bytes {
    /// From 0 to 255.
    Unsigned,
    /// From -128 to 127.
    Signed,
}

/// Digits of a number, and how many characters they take.
type Digits = ([u8; 4], usize);

const fn digits(number: i16) -> Digits {
    let mut text = [0; 4];
    let mut len = 0;
    if number < 0 {
        text[0] = b'-';
        len = 1;
    }
    let size = number.unsigned_abs();
    let mut unit = if size >= 100 {
        100
    } else if size >= 10 {
        10
    } else {
        1
    };
    while unit > 0 {
        text[len] = b'0' + (size / unit % 10) as u8;
        len += 1;
        unit /= 10;
    }
    (text, len)
}

const fn table(kind: Bytes) -> [Digits; 256] {
    let mut table = [([0; 4], 0); 256];
    let mut byte = 0;
    while byte < table.len() {
        table[byte] = digits(match kind {
            Bytes::Unsigned => byte as i16,
            Bytes::Signed => byte as u8 as i8 as i16,
        });
        byte += 1;
    }
    table
}

static UNSIGNED: [Digits; 256] = table(Bytes::Unsigned);
static SIGNED: [Digits; 256] = table(Bytes::Signed);

/// Appends an array of bytes.
pub(super) fn push_array(text: &mut String, bytes: &[u8], kind: Bytes) {
    let table = match kind {
        Bytes::Unsigned => &UNSIGNED,
        Bytes::Signed => &SIGNED,
    };
    let mut written = std::mem::take(text).into_bytes();
    written.reserve(5 * bytes.len() + 2);
    written.push(b'[');
    for &byte in bytes {
        let (digits, len) = &table[usize::from(byte)];
        written.extend_from_slice(&digits[..*len]);
        written.push(b',');
    }
    if !bytes.is_empty() {
        written.pop();
    }
    written.push(b']');
    // The text was a string, and only digits, signs, commas and brackets were appended.
    *text = String::from_utf8(written).unwrap_or_default();
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Parses with serde, one number at a time.
    fn plain(text: &str) -> Option<Vec<u8>> {
        match serde_json::from_str::<Fields>(text).ok()?.data {
            Data::Bytes(bytes) => Some(bytes),
            Data::Number(_) => None,
        }
    }

    #[test]
    fn every_byte_is_written_as_a_number_of_its_kind_and_read_again() {
        let all: Vec<u8> = (0..=255).collect();
        for (kind, first, last) in [(Bytes::Unsigned, "[0,1,2,", ",254,255]"), (Bytes::Signed, "[0,1,2,", ",-2,-1]")] {
            let mut text = String::new();
            push_array(&mut text, &all, kind);
            assert!(text.starts_with(first) && text.ends_with(last), "{text}");
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

    proptest! {
        #[test]
        fn arrays_are_read_as_serde_reads_them(
            numbers in prop::collection::vec(-140i16..270, 0..40),
            blanks in prop::collection::vec(prop::sample::select(vec!["", " ", "\n\t", "\r"]), 4),
            head in prop::sample::select(vec!["", r#""a":1,"#, r#""a":"]","#, r#""a":"[","#, r#""a":[1],"#]),
        ) {
            let list: Vec<String> = numbers.iter().map(|number| format!("{}{number}{}", blanks[0], blanks[1])).collect();
            let text = format!("{{{head}{}\"data\":[{}]{}}}", blanks[2], list.join(","), blanks[3]);
            prop_assert_eq!(data_from_json(text.as_bytes()), plain(&text));
        }

        #[test]
        fn text_of_such_characters_is_read_as_serde_reads_it(array in "[-0-9,\\[\\] ]{0,12}") {
            let text = format!("{{\"data\":{array}}}");
            prop_assert_eq!(data_from_json(text.as_bytes()), plain(&text));
        }
    }
}

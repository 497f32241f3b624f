//! What the elements of a call are, and what follows from it: the arithmetic config and the compression flags.

use accl_types::{Error, ErrorKind, Result};

use crate::call::Compression;
use crate::memory_map::DataType;

/// What elements are in the buffers of a call and on the wire. What a call has no buffer for may be left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elements {
    /// In operand 0.
    pub first: Option<DataType>,
    /// In operand 1.
    pub second: Option<DataType>,
    /// In the result.
    pub result: Option<DataType>,
    /// On the wire, if they are to be something else there.
    pub wire: Option<DataType>,
}

/// The uncompressed and the compressed type of a config.
pub(super) type Key = (DataType, DataType);

impl Elements {
    /// The same in all buffers and on the wire.
    pub fn of(dtype: DataType) -> Self {
        Self { first: Some(dtype), second: Some(dtype), result: Some(dtype), wire: None }
    }

    /// The same, but on the wire.
    pub fn on_wire(self, wire: DataType) -> Self {
        Self { wire: Some(wire), ..self }
    }

    /// The config that such a call needs, `None` if none, and its flags.
    pub(super) fn choose(self) -> Result<(Option<Key>, Compression)> {
        let mut types: Vec<DataType> = Vec::new();
        for dtype in [self.first, self.second, self.result].into_iter().flatten() {
            if !types.contains(&dtype) {
                types.push(dtype);
            }
        }
        let is = |small: DataType| Compression {
            first: self.first == Some(small),
            second: self.second == Some(small),
            result: self.result == Some(small),
            wire: false,
        };
        types.sort_by_key(|dtype| dtype.size_bytes());
        match (types.as_slice(), self.wire) {
            ([], _) => Ok((None, Compression::default())),
            (&[one], wire) if wire.is_none_or(|wire| wire == one) => Ok((Some((one, one)), Compression::default())),
            (&[one], Some(wire)) => Ok((Some((one, wire)), Compression { wire: true, ..Compression::default() })),
            (&[small, large], None) => Ok((Some((large, small)), is(small))),
            (&[small, large], Some(wire)) if wire == small => {
                Ok((Some((large, small)), Compression { wire: true, ..is(small) }))
            }
            _ => Err(Error::new(
                ErrorKind::Unsupported,
                format!(
                    "the buffers of a call hold elements of one type, or of two of which the smaller is that on the wire, not {}{}",
                    types.iter().map(|dtype| format!("{dtype:?}")).collect::<Vec<_>>().join(", "),
                    self.wire.map_or_else(String::new, |wire| format!(" and {wire:?} on the wire"))
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use DataType::{F16, F32, F64};

    #[test]
    fn configs_and_flags_are_those_of_the_reference() {
        let none = Compression::default();
        let wire = Compression { wire: true, ..none };
        let chosen = |elements: Elements| elements.choose().unwrap();
        assert_eq!(chosen(Elements::default()), (None, none));
        assert_eq!(chosen(Elements::of(F32)), (Some((F32, F32)), none));
        assert_eq!(chosen(Elements::of(F32).on_wire(F32)), (Some((F32, F32)), none));
        assert_eq!(chosen(Elements::of(F32).on_wire(F16)), (Some((F32, F16)), wire));
        let mixed = Elements { first: Some(F32), second: None, result: Some(F16), wire: None };
        assert_eq!(chosen(mixed), (Some((F32, F16)), Compression { result: true, ..none }));
        assert_eq!(chosen(mixed.on_wire(F16)), (Some((F32, F16)), Compression { result: true, ..wire }));
        let text = mixed.on_wire(F64).choose().unwrap_err().message;
        assert!(text.ends_with("not F16, F32 and F64 on the wire"), "{text}");
        assert!(Elements { second: Some(F64), ..mixed }.choose().is_err());
    }
}

//! Element types of a call, and the arithmetic config and compression flags that follow from them.

use accl_types::{Error, ErrorKind, Result};

use crate::call::Compression;
use crate::memory_map::DataType;

/// Element types in the buffers of a call and on the wire. A buffer that the call does not use may be left `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elements {
    /// Type in operand 0.
    pub first: Option<DataType>,
    /// Type in operand 1.
    pub second: Option<DataType>,
    /// Type in the result.
    pub result: Option<DataType>,
    /// Type on the wire; `None` for the type in memory.
    pub wire: Option<DataType>,
}

/// Uncompressed and compressed type of a config.
pub(super) type Key = (DataType, DataType);

impl Elements {
    /// Returns elements of one type in all buffers and on the wire.
    pub fn of(dtype: DataType) -> Self {
        Self { first: Some(dtype), second: Some(dtype), result: Some(dtype), wire: None }
    }

    /// Returns the same elements with another type on the wire.
    pub fn on_wire(self, wire: DataType) -> Self {
        Self { wire: Some(wire), ..self }
    }

    /// Returns the config that such a call needs, or `None` if it needs none, and its compression flags.
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
                    "elements of a call: expected one type, or two types of which the smaller is also on the wire, got {}{}",
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
        assert!(text.ends_with("got F16, F32 and F64 on the wire"), "{text}");
        assert!(Elements { second: Some(F64), ..mixed }.choose().is_err());
    }
}

//! Newtypes for the integers of public signatures, and rounding up to a multiple.

use std::fmt;

macro_rules! unit {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[repr(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }

        impl From<$inner> for $name {
            fn from(value: $inner) -> Self {
                Self(value)
            }
        }
    };
}

unit!(
    /// Position of a process in a group, from 0 to world - 1.
    Rank(u32)
);
unit!(
    /// Sequence number of a call in its group; all ranks number collectives alike.
    Seq(u64)
);
unit!(
    /// A length in bytes.
    Bytes(u64)
);
unit!(
    /// A length in elements of the call's dtype.
    Elems(u64)
);

impl Rank {
    /// The rank as an index into per-rank slices.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl Bytes {
    /// The length as an index; lengths of memory in this process always fit.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }
}

/// The smallest multiple of `step` that is at least `value`, or `None` on overflow.
///
/// # Panics
/// Panics when `step` is 0.
pub const fn round_up(value: u64, step: u64) -> Option<u64> {
    value.checked_next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_up_gives_the_next_multiple() {
        for value in 0..1000u64 {
            for step in [1, 2, 3, 64, 255, 256] {
                let rounded = round_up(value, step).unwrap();
                assert!(rounded >= value && rounded < value + step && rounded.is_multiple_of(step));
            }
        }
        assert_eq!(round_up(u64::MAX, 2), None);
    }
}

//! Structures of 32-bit words, declared with the place of each in one table.

/// A word of a structure: where it stands, how it is called and what it holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word {
    /// Index within the structure.
    pub index: usize,
    /// As the field is called.
    pub name: &'static str,
    /// What it holds, in a sentence.
    pub about: &'static str,
}

/// Declares a structure whose fields are words, the table of them, and both directions.
macro_rules! words {
    (
        #[doc = $about:literal]
        pub struct $name:ident: $count:literal words {
            $($index:literal $field:ident: $text:literal,)+
        }
    ) => {
        #[doc = $about]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $(#[doc = $text] pub $field: u32,)+
        }

        impl $name {
            /// How many words it has.
            pub const COUNT: usize = $count;
            /// Its words in order.
            pub const WORDS: [$crate::words::Word; $count] =
                [$($crate::words::Word { index: $index, name: stringify!($field), about: $text }),+];

            /// As it lies in memory.
            pub fn to_words(&self) -> [u32; $count] {
                let mut words = [0; $count];
                $(words[$index] = self.$field;)+
                words
            }

            /// From memory.
            pub fn from_words(words: &[u32; $count]) -> Self {
                Self { $($field: words[$index]),+ }
            }
        }
    };
}

pub(crate) use words;

/// The two words of an address, the low one first.
pub(crate) fn halves(address: u64) -> [u32; 2] {
    [address as u32, (address >> 32) as u32]
}

/// The address of two words, the low one first.
pub(crate) fn address(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

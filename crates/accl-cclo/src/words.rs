//! Structures of 32-bit words, each declared with the position of every word in one table.

/// A word of a structure: its position, name and meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Word {
    /// Index within the structure.
    pub index: usize,
    /// Name of the field.
    pub name: &'static str,
    /// Meaning of the word, in a sentence.
    pub about: &'static str,
}

/// Declares a structure whose fields are words, the table of its words, and the conversions to and from memory.
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
            /// Number of words.
            pub const COUNT: usize = $count;
            /// Words of the structure, in order.
            pub const WORDS: [$crate::words::Word; $count] =
                [$($crate::words::Word { index: $index, name: stringify!($field), about: $text }),+];

            /// Returns the words as they lie in memory.
            pub fn to_words(&self) -> [u32; $count] {
                let mut words = [0; $count];
                $(words[$index] = self.$field;)+
                words
            }

            /// Builds the structure from its words in memory.
            pub fn from_words(words: &[u32; $count]) -> Self {
                Self { $($field: words[$index]),+ }
            }
        }
    };
}

pub(crate) use words;

/// Splits an address into two words, low word first.
pub(crate) fn halves(address: u64) -> [u32; 2] {
    [address as u32, (address >> 32) as u32]
}

/// Joins two words, low word first, into an address.
pub(crate) fn address(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

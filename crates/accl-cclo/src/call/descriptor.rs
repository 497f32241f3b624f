//! The fifteen words of a call descriptor.

use std::fmt;

use super::flags::{Compression, Hosts, Streams};
use super::operation::{ConfigFunction, Counts, Operation};
use crate::memory_map::ReduceFunction;
use crate::words::{address, halves, words};

/// Tag that firmware gives the messages of collectives. A receiver that names this tag matches no other tag.
pub const ANY_TAG: u32 = u32::MAX;
/// Host flags lie above the stream flags in one word.
const HOSTS_SHIFT: u32 = 8;
const STREAMS_MASK: u32 = 0xFF;

words! {
    /// The words of a call, in the order in which a host writes them.
    pub struct Words: 15 words {
        0 operation: "Operation: see [`super::OPERATIONS`].",
        1 count: "Count: see [`super::Counts`].",
        2 communicator: "Offset of the communicator in exchange memory.",
        3 root: "Root, destination or source: a rank in the communicator.",
        4 function: "Parameter of a config call, or the reduction function.",
        5 tag: "Tag of a message, or the number of a kernel stream.",
        6 arithmetic: "Offset of the arithmetic config in exchange memory; zero if no elements are involved.",
        7 compression: "Compressed parts: see [`super::Compression`].",
        8 places: "Flags of kernel streams in the low byte, flags of host memory in the next byte.",
        9 first_low: "Address of operand 0, low word.",
        10 first_high: "Address of operand 0, high word.",
        11 second_low: "Address of operand 1, low word.",
        12 second_high: "Address of operand 1, high word.",
        13 result_low: "Address of the result, low word.",
        14 result_high: "Address of the result, high word.",
    }
}

/// A call of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Operation to run.
    pub operation: Operation,
    /// Count in the operation's unit: elements, elements of each rank, or the value of a config call.
    pub count: u32,
    /// Offset of the communicator in exchange memory.
    pub communicator: u32,
    /// Root, destination or source rank in the communicator.
    pub root: u32,
    /// Number of a [`ConfigFunction`] (what to set) or of a [`ReduceFunction`] (how to reduce).
    pub function: u32,
    /// Tag of a message, or the number of a kernel stream.
    pub tag: u32,
    /// Offset of the arithmetic config in exchange memory; zero if no elements are involved.
    pub arithmetic: u32,
    /// Which data is compressed.
    pub compression: Compression,
    /// Which ends are kernel streams.
    pub streams: Streams,
    /// Which buffers lie in host memory.
    pub hosts: Hosts,
    /// Address of operand 0.
    pub first: u64,
    /// Address of operand 1.
    pub second: u64,
    /// Address of the result.
    pub result: u64,
}

/// Error for a descriptor word without a meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadWord {
    /// Name of the word.
    pub name: &'static str,
    /// Value of the word.
    pub value: u32,
}

impl Descriptor {
    /// Returns a descriptor of this operation with default values in all other fields.
    pub fn new(operation: Operation) -> Self {
        Self {
            operation,
            count: 0,
            communicator: 0,
            root: 0,
            function: 0,
            tag: ANY_TAG,
            arithmetic: 0,
            compression: Compression::default(),
            streams: Streams::default(),
            hosts: Hosts::default(),
            first: 0,
            second: 0,
            result: 0,
        }
    }

    /// Returns a config call that sets `function` to `value`.
    pub fn config(function: ConfigFunction, value: u32) -> Self {
        Self { function: function.number(), count: value, ..Self::new(Operation::Config) }
    }

    /// Returns whether this is the config call that sets `function`.
    pub fn sets(&self, function: ConfigFunction) -> bool {
        self.operation == Operation::Config && self.function == function.number()
    }

    /// Returns the words that a host writes. A host writes all words of every call, even those that the operation ignores.
    pub fn to_words(&self) -> [u32; Words::COUNT] {
        let [[first_low, first_high], [second_low, second_high], [result_low, result_high]] =
            [self.first, self.second, self.result].map(halves);
        Words {
            operation: self.operation.number(),
            count: self.count,
            communicator: self.communicator,
            root: self.root,
            function: self.function,
            tag: self.tag,
            arithmetic: self.arithmetic,
            compression: self.compression.bits(),
            places: self.places(),
            first_low,
            first_high,
            second_low,
            second_high,
            result_low,
            result_high,
        }
        .to_words()
    }

    /// Parses the words that an engine receives.
    ///
    /// # Errors
    /// [`BadWord`] if the operation or a flag has no meaning. The function is not checked here; the operation interprets it.
    pub fn from_words(words: &[u32; Words::COUNT]) -> Result<Self, BadWord> {
        let words = Words::from_words(words);
        let bad = |name, value| BadWord { name, value };
        let (streams, hosts) = (words.places & STREAMS_MASK, words.places >> HOSTS_SHIFT);
        Ok(Self {
            operation: Operation::from_number(words.operation).ok_or(bad("operation", words.operation))?,
            count: words.count,
            communicator: words.communicator,
            root: words.root,
            function: words.function,
            tag: words.tag,
            arithmetic: words.arithmetic,
            compression: Compression::from_bits(words.compression).ok_or(bad("compression", words.compression))?,
            streams: Streams::from_bits(streams).ok_or(bad("streams", streams))?,
            hosts: Hosts::from_bits(hosts).ok_or(bad("hosts", hosts))?,
            first: address(words.first_low, words.first_high),
            second: address(words.second_low, words.second_high),
            result: address(words.result_low, words.result_high),
        })
    }

    /// Returns stream and host flags in one word.
    pub fn places(&self) -> u32 {
        self.hosts.bits() << HOSTS_SHIFT | self.streams.bits()
    }

    /// Returns the reduction function. Returns `None` if the operation does not reduce or the function is unknown.
    pub fn reduce_function(&self) -> Option<ReduceFunction> {
        ReduceFunction::from_number(self.function).filter(|_| self.operation.row().reduces)
    }
}

impl fmt::Display for Descriptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let row = self.operation.row();
        write!(f, "{}", row.name)?;
        match row.counts {
            Counts::Nothing => {}
            Counts::Value => match ConfigFunction::from_number(self.function) {
                Some(function) => write!(f, " {function:?} = {}", self.count)?,
                None => write!(f, " function {} = {}", self.function, self.count)?,
            },
            Counts::Elements => write!(f, " of {} elements", self.count)?,
            Counts::ElementsPerRank => write!(f, " of {} elements a rank", self.count)?,
        }
        if row.has_root {
            write!(f, ", rank {}", self.root)?;
        }
        if row.counts != Counts::Value {
            write!(f, ", communicator at {:#x}", self.communicator)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_stand_in_the_order_of_the_reference() {
        let call = Descriptor {
            count: 16,
            communicator: 0x1C8,
            root: 1,
            function: ReduceFunction::Max.number(),
            arithmetic: 0x248,
            compression: Compression { wire: true, ..Compression::default() },
            hosts: Hosts { first: true, result: true, ..Hosts::default() },
            first: 0x1_0000_2000,
            second: 0x3000,
            result: 0x4000,
            ..Descriptor::new(Operation::Reduce)
        };
        let words = [8, 16, 0x1C8, 1, 1, u32::MAX, 0x248, 8, 0x0500, 0x2000, 1, 0x3000, 0, 0x4000, 0];
        assert_eq!(call.to_words(), words);
        assert_eq!(call.reduce_function(), Some(ReduceFunction::Max));
        assert_eq!(call.to_string(), "reduce of 16 elements, rank 1, communicator at 0x1c8");
        let reset = Descriptor::config(ConfigFunction::Reset, 0);
        assert_eq!(reset.to_string(), "config Reset = 0");
        assert_eq!(reset.reduce_function(), None);
    }

    #[test]
    fn what_means_nothing_is_named() {
        let words = Descriptor::new(Operation::Nop).to_words();
        for (index, name, value) in [(0, "operation", 14), (7, "compression", 16), (8, "streams", 4)] {
            let mut words = words;
            words[index] = value;
            assert_eq!(Descriptor::from_words(&words), Err(BadWord { name, value }));
        }
        let mut words = words;
        words[8] = 8 << 8;
        assert_eq!(Descriptor::from_words(&words), Err(BadWord { name: "hosts", value: 8 }));
    }

    proptest! {
        #[test]
        fn what_is_understood_is_written_as_it_was(mut words in prop::array::uniform15(any::<u32>())) {
            words[0] %= 16;
            words[7] %= 20;
            words[8] &= 0x0F03;
            if let Ok(call) = Descriptor::from_words(&words) {
                prop_assert_eq!(call.to_words(), words);
            }
        }
    }
}

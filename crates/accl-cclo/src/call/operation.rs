//! The operations of an engine, and what each makes of the words of a descriptor.

/// What an engine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Sets something: see [`ConfigFunction`].
    Config,
    /// Copies within the memory of one engine.
    Copy,
    /// Adds two buffers of one engine.
    Combine,
    /// Sends to a rank.
    Send,
    /// Receives from a rank.
    Recv,
    /// One rank's buffer for all.
    Broadcast,
    /// A block of the root's for each rank.
    Scatter,
    /// A block of each rank's for the root.
    Gather,
    /// The sum for the root.
    Reduce,
    /// A block of each rank's for all.
    AllGather,
    /// The sum for all.
    AllReduce,
    /// A block of the sum for each rank.
    ReduceScatter,
    /// Waits for all ranks.
    Barrier,
    /// A block of each rank's for each rank.
    AllToAll,
    /// Nothing.
    Nop,
}

/// What a config call sets; its value stands where other calls have their count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConfigFunction {
    /// Forgets communicators and whatever waits.
    Reset,
    /// Lets packets in and out.
    EnablePackets,
    /// A time that firmware stores and never looks at.
    Timeout,
    /// The largest eager message in bytes.
    MaxEagerBytes,
    /// The largest rendezvous message in bytes, which firmware compares with the eager one and nothing else.
    MaxRendezvousBytes,
}

/// What the count of a descriptor counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// Nothing.
    Nothing,
    /// It is the value of a config call.
    Value,
    /// Elements of the buffer.
    Elements,
    /// Elements of each rank's block.
    ElementsPerRank,
}

/// Which buffers of a descriptor an operation looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uses {
    /// Operand 0.
    pub first: bool,
    /// Operand 1.
    pub second: bool,
    /// The result.
    pub result: bool,
}

/// A row of the table of operations.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// The first word of its descriptors.
    pub number: u32,
    /// The operation.
    pub operation: Operation,
    /// As messages name it.
    pub name: &'static str,
    /// What its count counts.
    pub counts: Counts,
    /// Which buffers it looks at.
    pub uses: Uses,
    /// It has a root, or another rank that it speaks to.
    pub has_root: bool,
    /// It adds.
    pub reduces: bool,
}

const NONE: Uses = Uses { first: false, second: false, result: false };
const SOURCE: Uses = Uses { first: true, second: false, result: false };
const RESULT: Uses = Uses { first: false, second: false, result: true };
const BOTH: Uses = Uses { first: true, second: false, result: true };
const ALL: Uses = Uses { first: true, second: true, result: true };

const fn row(number: u32, operation: Operation, name: &'static str, counts: Counts, uses: Uses) -> Row {
    let has_root = matches!(
        operation,
        Operation::Send
            | Operation::Recv
            | Operation::Broadcast
            | Operation::Scatter
            | Operation::Gather
            | Operation::Reduce
    );
    let reduces =
        matches!(operation, Operation::Combine | Operation::Reduce | Operation::AllReduce | Operation::ReduceScatter);
    Row { number, operation, name, counts, uses, has_root, reduces }
}

/// All operations, by number.
pub const OPERATIONS: [Row; 15] = [
    row(0, Operation::Config, "config", Counts::Value, NONE),
    row(1, Operation::Copy, "copy", Counts::Elements, BOTH),
    row(2, Operation::Combine, "combine", Counts::Elements, ALL),
    row(3, Operation::Send, "send", Counts::Elements, SOURCE),
    row(4, Operation::Recv, "recv", Counts::Elements, RESULT),
    row(5, Operation::Broadcast, "broadcast", Counts::Elements, BOTH),
    row(6, Operation::Scatter, "scatter", Counts::ElementsPerRank, BOTH),
    row(7, Operation::Gather, "gather", Counts::ElementsPerRank, BOTH),
    row(8, Operation::Reduce, "reduce", Counts::Elements, BOTH),
    row(9, Operation::AllGather, "all_gather", Counts::ElementsPerRank, BOTH),
    row(10, Operation::AllReduce, "all_reduce", Counts::Elements, BOTH),
    row(11, Operation::ReduceScatter, "reduce_scatter", Counts::ElementsPerRank, BOTH),
    row(12, Operation::Barrier, "barrier", Counts::Nothing, NONE),
    row(13, Operation::AllToAll, "all_to_all", Counts::ElementsPerRank, BOTH),
    row(255, Operation::Nop, "nop", Counts::Nothing, NONE),
];

impl Operation {
    /// Its row.
    pub fn row(self) -> &'static Row {
        // Every operation has one: the test below goes through all.
        OPERATIONS.iter().find(|row| row.operation == self).unwrap_or(&OPERATIONS[OPERATIONS.len() - 1])
    }

    /// The first word of its descriptors.
    pub fn number(self) -> u32 {
        self.row().number
    }

    /// From a descriptor.
    pub fn from_number(number: u32) -> Option<Self> {
        OPERATIONS.iter().find(|row| row.number == number).map(|row| row.operation)
    }

    /// As messages name it.
    pub fn name(self) -> &'static str {
        self.row().name
    }
}

impl ConfigFunction {
    const ALL: [Self; 5] =
        [Self::Reset, Self::EnablePackets, Self::Timeout, Self::MaxEagerBytes, Self::MaxRendezvousBytes];

    /// As a descriptor names it.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// From a descriptor.
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|function| function.number() == number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_has_one_row_and_one_number() {
        for row in &OPERATIONS {
            assert_eq!(row.operation.row().number, row.number, "{row:?}");
            assert_eq!(Operation::from_number(row.number), Some(row.operation));
        }
        assert!(OPERATIONS.is_sorted_by(|one, other| one.number < other.number));
        assert_eq!(Operation::from_number(14), None);
        let functions: Vec<u32> = ConfigFunction::ALL.iter().map(|function| function.number()).collect();
        assert_eq!(functions, [0, 1, 2, 3, 4]);
        assert_eq!(ConfigFunction::from_number(5), None);
    }
}

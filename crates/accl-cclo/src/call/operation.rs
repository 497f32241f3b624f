//! Operations of an engine, and how each interprets the words of a descriptor.

/// Operation of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Sets a parameter: see [`ConfigFunction`].
    Config,
    /// Copies within the memory of one engine.
    Copy,
    /// Reduces two buffers of one engine.
    Combine,
    /// Sends to a rank.
    Send,
    /// Receives from a rank.
    Recv,
    /// Copies the root's buffer to all ranks.
    Broadcast,
    /// Sends a block of the root's buffer to each rank.
    Scatter,
    /// Collects a block from each rank at the root.
    Gather,
    /// Leaves the reduced buffer at the root.
    Reduce,
    /// Collects a block from each rank at all ranks.
    AllGather,
    /// Leaves the reduced buffer at all ranks.
    AllReduce,
    /// Leaves a block of the reduced buffer at each rank.
    ReduceScatter,
    /// Waits for all ranks.
    Barrier,
    /// Sends a block from each rank to each rank.
    AllToAll,
    /// Does nothing.
    Nop,
}

/// Parameter that a config call sets. The value is in the word that holds the count of other calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ConfigFunction {
    /// Resets the engine, which forgets communicators and waiting data.
    Reset,
    /// Lets packets in and out.
    EnablePackets,
    /// Sets a timeout that firmware stores and never uses.
    Timeout,
    /// The largest eager message in bytes.
    MaxEagerBytes,
    /// Sets the largest rendezvous message in bytes, which firmware only compares with the largest eager message.
    MaxRendezvousBytes,
}

/// Unit of a descriptor's count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counts {
    /// The count is unused.
    Nothing,
    /// The count is the value of a config call.
    Value,
    /// Elements of the buffer.
    Elements,
    /// Elements of each rank's block.
    ElementsPerRank,
}

/// Which buffers of a descriptor an operation uses.
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
pub struct OperationRow {
    /// First word of the operation's descriptors.
    pub number: u32,
    /// The operation.
    pub operation: Operation,
    /// Name of the operation in messages.
    pub name: &'static str,
    /// Unit of the count.
    pub counts: Counts,
    /// Buffers that the operation uses.
    pub uses: Uses,
    /// Whether the operation has a root or a peer rank.
    pub has_root: bool,
    /// Whether the operation reduces.
    pub reduces: bool,
}

const NONE: Uses = Uses { first: false, second: false, result: false };
const SOURCE: Uses = Uses { first: true, second: false, result: false };
const RESULT: Uses = Uses { first: false, second: false, result: true };
const BOTH: Uses = Uses { first: true, second: false, result: true };
const ALL: Uses = Uses { first: true, second: true, result: true };

const fn row(number: u32, operation: Operation, name: &'static str, counts: Counts, uses: Uses) -> OperationRow {
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
    OperationRow { number, operation, name, counts, uses, has_root, reduces }
}

/// All operations, by number.
pub const OPERATIONS: [OperationRow; 15] = [
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
    /// Returns the operation's row in [`OPERATIONS`].
    pub fn row(self) -> &'static OperationRow {
        // Every operation has a row; the test below checks all of them.
        OPERATIONS.iter().find(|row| row.operation == self).unwrap_or(&OPERATIONS[OPERATIONS.len() - 1])
    }

    /// Returns the first word of the operation's descriptors.
    pub fn number(self) -> u32 {
        self.row().number
    }

    /// Returns the operation with this number in a descriptor, or `None` if there is none.
    pub fn from_number(number: u32) -> Option<Self> {
        OPERATIONS.iter().find(|row| row.number == number).map(|row| row.operation)
    }

    /// Returns the operation's name in messages.
    pub fn name(self) -> &'static str {
        self.row().name
    }
}

impl ConfigFunction {
    const ALL: [Self; 5] =
        [Self::Reset, Self::EnablePackets, Self::Timeout, Self::MaxEagerBytes, Self::MaxRendezvousBytes];

    /// Returns the function's number in a descriptor.
    pub fn number(self) -> u32 {
        self as u32
    }

    /// Returns the function with this number in a descriptor, or `None` if there is none.
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

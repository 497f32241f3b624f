//! Call descriptors, which a host sends to start an engine.
//!
//! Owns the fifteen words of a descriptor, the table of operations and the flags. The driver decides which call a collective becomes, and whether an
//! engine can run it. Read [`Descriptor`] and [`OPERATIONS`] first.

mod descriptor;
mod flags;
mod operation;

pub use descriptor::{ANY_TAG, BadWord, Descriptor, Words};
pub use flags::{Compression, Hosts, Streams};
pub use operation::{ConfigFunction, Counts, OPERATIONS, Operation, OperationRow, Uses};

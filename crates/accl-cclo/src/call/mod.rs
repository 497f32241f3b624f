//! Calls of an engine: what a host starts.
//!
//! Owns the fifteen words of a descriptor, the table of operations and the flags. Which call a collective becomes, and whether an engine
//! can make it, is the driver's. Read [`Descriptor`] and [`OPERATIONS`] first.

mod descriptor;
mod flags;
mod operation;

pub use descriptor::{ANY_TAG, BadWord, Descriptor, Words};
pub use flags::{Compression, Hosts, Streams};
pub use operation::{ConfigFunction, Counts, OPERATIONS, Operation, Row, Uses};

//! The memory of calls and the arithmetic on it. No other module accesses the contents of tensors.

mod buffers;
mod coder;
mod collective_memory;
mod compute;
mod error_probe;
mod message;
mod message_references;
mod overlap;
mod references;
mod staged;
mod storage;
mod tile;
mod tile_runs;

pub(crate) use buffers::Buffers;
pub(crate) use coder::Coder;
pub use collective_memory::CollectiveMemory;
pub(crate) use compute::Compute;
pub use error_probe::Sample;
pub(crate) use message::{BY_REFERENCE, MessageMemory};
pub use overlap::refuse_undefined_outputs;
pub(crate) use references::{References, publishing_needs};
pub(crate) use tile::BadTile;
pub use tile::TileHead;
pub(crate) use tile_runs::tensor_coder;

pub(crate) use storage::{BufferPool, Storage};

//! The memory of calls and the arithmetic on it. Besides the links, the only place that touches tensors.

pub(crate) mod buffers;
pub(crate) mod coder;
pub(crate) mod compute;
pub(crate) mod error_probe;
pub(crate) mod overlap;
pub(crate) mod storage;
pub(crate) mod tile;

pub(crate) use buffers::Buffers;
pub(crate) use coder::Coder;
pub(crate) use compute::Compute;
pub(crate) use error_probe::Sample;
pub(crate) use storage::{BufferPool, Storage};

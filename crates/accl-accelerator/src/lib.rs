//! Tensors of accelerators, such as GPUs, in the calls of the engine.
//!
//! torch copies such tensors to pinned host memory and back on side streams, and the engine's calls stream behind these
//! copies. `streams` is the contract that torch's side has to keep. `staging` and `copies` enqueue the copies of one call,
//! and `worker` is the thread that follows all of them. `eager` does small blocking calls in their caller's thread. `pinned`
//! keeps pinned memory for later calls. `gpu_codecs` and `tiles` compute encoded calls where their tensors lie, once `check` has
//! compared the kernels with the CPU's codecs, and `figures` has what they measure. With `peers`, ranks of a host read each other's
//! device memory. `single` runs one kernel for a
//! benchmark. No stream and no kernel ever waits for another rank: the host does, by events. Read [`Accelerators`] first.

mod check;
mod copies;
mod eager;
mod enqueued;
mod figures;
mod gpu_codecs;
mod peers;
mod pinned;
mod single;
mod staging;
mod streams;
mod tiles;
mod worker;

pub use accl_gpu::{Libraries, Vendor};
pub use eager::EagerCall;
pub use peers::{GroupRoute, Issuing, PeerRoute};
pub use pinned::PinnedCounts;
pub use single::{KernelMemory, SingleKernels, Work};
pub use staging::Accelerators;
pub use streams::{CallStreams, DeviceRoom, Direction, GpuDevice, Pinning, StreamCopy, StreamEvent};

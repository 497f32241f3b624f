//! Codecs and reductions on a GPU.
//!
//! Owns the source of the kernels, the compiler that builds them for the GPU of this process, and the table of driver
//! functions that loads and launches them. It also owns device memory that processes of a host share. Does not know calls,
//! tiles' headers or streams' order: the caller passes the native handle of a stream and addresses of device memory.
//!
//! Results equal the results of `accl-kernels` in every byte, so ranks with GPU tensors and ranks with CPU tensors can
//! join one call.
//!
//! `library` opens libraries, `compiler` and `driver` have the tables of their functions, and `gpu` is the face of all.
//! Read [`Gpu`] first.

mod compiler;
mod driver;
mod gpu;
pub mod kernels;
mod library;
#[cfg(test)]
mod support;

pub use driver::{Allocation, Argument, DeviceMemory, Event, Grid, HostMemory, Imported, IpcHandle, Stream};
pub use gpu::{Gpu, Module};
pub use library::{Libraries, Vendor};

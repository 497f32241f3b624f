//! The vocabulary that every crate of torch-accl shares: units, dtypes, reduce operators, collective kinds, errors,
//! and the one configuration table.
//!
//! Owns no behaviour beyond naming and checking; knows no threads, clocks, sockets or environment. Read [`Error`] and
//! [`config::Config`] first.
#![forbid(unsafe_code)]

mod collective;
pub mod config;
mod cpus;
mod dtype;
mod error;
pub mod hash;
mod moment;
mod nearest;
mod reduce_op;
mod size;
mod units;

pub use collective::Collective;
pub use cpus::{parse_cpus, show_cpus};
pub use dtype::{Dtype, DtypeClass};
pub use error::{Context, Error, ErrorKind, HOLDS_MEMORY, Result};
pub use moment::Moment;
pub use nearest::{nearest, nearest_within};
pub use reduce_op::ReduceOp;
pub use size::{parse_size, show_size};
pub use units::{Bytes, Elems, Rank, Seq, round_up};

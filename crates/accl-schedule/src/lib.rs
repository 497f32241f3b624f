//! Collective algorithms as data: pure functions from a rank to a schedule, and their symbolic checker.
//!
//! Owns the instruction set ([`ir`]), the lowering to operations with dependencies ([`program`]), the mapping of chunks
//! to bytes ([`layout`]) and the checker ([`check`]). Also owns the algorithms and their table ([`algorithms`]), their
//! costs ([`cost`]) and the choice between them ([`Chooser`]). Knows no threads, clocks, sockets or environment. Read
//! [`ir::Action`] first.
#![forbid(unsafe_code)]

pub mod algorithms;
pub mod check;
mod choose;
pub mod cost;
mod encode;
pub mod ir;
pub mod layout;
mod page;
pub mod patterns;
pub mod program;
mod reference;
mod topology;

pub use algorithms::{ALGORITHMS, Algorithm, Encodes, Fraction, Sums};
pub use choose::{Basis, Chooser, check_rules};
pub use encode::encodes;
pub use ir::{Action, Buf, ChunkRange, Code, Division, Finish, Order, Request, Role, Schedule, Span};
pub use layout::{CallShape, Coding, Extent, Extents, Layout, Part, SCRATCH_ALIGN, Tile};
pub use page::algorithms_page;
pub use program::{Dep, Op, OpKind, Program};
pub use topology::Topology;

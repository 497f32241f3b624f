//! Shared code of the microbenchmarks: processes as ranks, the calls they measure, placement, and the table of
//! bandwidths.
//!
//! Owns none of the code that is measured. Read [`rank::serve`] and [`world::BenchWorld`] first.

pub mod arguments;
pub mod board;
pub mod cases;
pub mod memory_level;
pub mod order;
pub mod pin;
pub mod plain_loops;
pub mod process;
pub mod rank;
pub mod sweep;
pub mod table;
pub mod turns;
pub mod world;

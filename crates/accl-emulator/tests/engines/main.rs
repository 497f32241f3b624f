//! Engines, alone and as drivers and hosts meet them, in this process and in others.
//!
//! One program, since linking takes longer than most of its tests; each runs in a process of its own under nextest.

mod bus;
mod bus_queue;
mod driver;
mod garbage;
mod hazards;
mod matrix;
mod offload;
mod peers;
mod recordings;
mod serve;
mod support;
mod time;

//! Tests of engines alone, with drivers and with hosts, both in this process and in others.
//!
//! They form one program, since linking takes longer than most of the tests. Under nextest each test runs in its own process.

mod bus;
mod bus_calls;
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

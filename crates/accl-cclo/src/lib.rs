//! The CCLO, a collective engine on an FPGA, as its host and its peers see it.
//!
//! Owns the words of its memory map, the descriptors of its calls, its return codes, the packets that engines send each other, the
//! requests of the emulator's protocol, the table of what its firmware does wrong, and the driver, which works round it. Nothing opens a
//! device yet: a [`bus::Bus`] is handed in, and nothing waits. Read [`call::Descriptor`] and [`driver::Driver`] first.
//!
//! The words follow the ACCL project, where the engine comes from; each is written down once, in the table of its module, and nowhere
//! else as a bare number.

#![forbid(unsafe_code)]

pub mod bus;
pub mod call;
pub mod control;
pub mod driver;
pub mod hazards;
pub mod memory_map;
pub mod offload;
pub mod return_code;
pub mod wire;
mod words;

pub use words::Word;

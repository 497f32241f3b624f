//! Host side of the CCLO, a collective engine on an FPGA: what its host and its peers see of it.
//!
//! Owns the memory map, the call descriptors, the return codes, the packets between engines and the emulator's protocol. Also owns the table of
//! firmware hazards, the driver, which works round them, and the buses, which reach devices. Every bus request has a deadline, and no bus waits for a
//! call to end. Read [`call::Descriptor`], [`device::DeviceUrl`] and [`driver::Driver`] first.
//!
//! Names and numbers follow the ACCL project, where the engine comes from. Each number is written once, in the table of its module, and never
//! elsewhere as a literal. In comments, "the original" is the ACCL project's emulator. "The reference" is a description of ACCL's sources and of its
//! emulator's behaviour.

// Mapped registers and dynamically loaded libraries need unsafe code; only their files allow it.
#![deny(unsafe_code)]

pub mod bus;
pub mod buses;
pub mod call;
mod cards;
pub mod control;
pub mod design;
pub mod device;
pub mod driver;
pub mod hazards;
mod memory;
pub mod memory_map;
pub mod offload;
pub mod packets;
mod page;
pub mod parse;
pub mod return_code;
pub mod settings;
pub mod wire;
mod words;
pub mod zmtp;

pub use page::tables_page;
pub use words::Word;

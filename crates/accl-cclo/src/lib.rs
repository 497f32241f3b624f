//! The CCLO, a collective engine on an FPGA, as its host and its peers see it.
//!
//! Owns the words of its memory map, the descriptors of its calls, its return codes, the packets that engines send each other, the
//! requests of the emulator's protocol, the table of what its firmware does wrong, the driver, which works round it, and the buses that
//! reach devices. A request of a bus has a deadline, and nothing waits for a call to end. Read [`call::Descriptor`],
//! [`device::DeviceUrl`] and [`driver::Driver`] first.
//!
//! The words follow the ACCL project, where the engine comes from; each is written down once, in the table of its module, and nowhere
//! else as a bare number.

// Registers that are mapped and libraries that are opened cannot do without; their files allow it.
#![deny(unsafe_code)]

pub mod bus;
pub mod buses;
pub mod call;
pub mod control;
pub mod device;
pub mod driver;
pub mod hazards;
mod memory;
pub mod memory_map;
pub mod offload;
pub mod packets;
mod page;
pub mod return_code;
pub mod wire;
mod words;
pub mod zmtp;

pub use page::tables_page;
pub use words::Word;

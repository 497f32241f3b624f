//! Map of an engine's exchange memory, through which host and firmware communicate.
//!
//! Owns the words with fixed offsets and the structures that the host lays out between them. The driver decides which of them to write, and when.
//! Read [`REGISTERS`] and [`TableAllocator`] first.

mod arithmetic;
mod communicator;
mod hardware_id;
mod layout;
mod registers;
mod rx_buffer;

pub use arithmetic::{ARITHMETIC_CONFIGS, ArithmeticConfig, ArithmeticHead, DataType, MAX_FUNCTIONS, ReduceFunction};
pub use communicator::{Communicator, NO_SESSION, RankEntry};
pub use hardware_id::{HardwareId, Network};
pub use layout::{NoRoom, TableAllocator, TableRegion};
pub use registers::{
    BROADCAST_FLAT_RANKS, CYCLES, EXCHANGE_MEMORY_BYTES, GATHER_FAN_IN, GATHER_FAN_IN_BYTES, HARDWARE_ID,
    IS_CONFIGURED, NANOSECONDS_PER_CYCLE, REDUCE_FLAT_BYTES, REDUCE_FLAT_RANKS, RETURN_CODE, RX_BUFFER_BYTES,
    RX_BUFFER_COUNT, TABLES_BEGIN, TABLES_END,
};
pub use registers::{REGISTERS, Register, SPARE_BUFFERS};
pub use rx_buffer::{RxBuffer, RxStatus};

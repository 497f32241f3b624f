//! Registers: the words of exchange memory that have fixed offsets.

/// Size of exchange memory in bytes.
pub const EXCHANGE_MEMORY_BYTES: u32 = 0x2000;
/// Byte offset at which the host's tables begin; the table of rx buffers comes first.
pub const TABLES_BEGIN: u32 = 0x0008;
/// Byte offset at which the host's tables must have ended.
pub const TABLES_END: u32 = 0x1FC4;
/// Duration of one cycle of [`CYCLES`], which counts at 250 MHz on every board so far.
pub const NANOSECONDS_PER_CYCLE: u64 = 4;

/// A word of exchange memory with a fixed offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Register {
    /// Offset from the start of exchange memory, in bytes.
    pub offset: u32,
    /// Name of the register in messages.
    pub name: &'static str,
    /// Meaning of the register, in a sentence.
    pub about: &'static str,
}

macro_rules! registers {
    ($($constant:ident $offset:literal $name:literal $about:literal;)+) => {
        $(
            #[doc = $about]
            pub const $constant: Register = Register { offset: $offset, name: $name, about: $about };
        )+
        /// All registers, by offset.
        pub const REGISTERS: &[Register] = &[$($constant),+];
    };
}

registers! {
    RX_BUFFER_COUNT 0x0000 "rx_buffer_count" "Number of eager rx buffers. Written last, because any value except zero starts the rx engine.";
    RX_BUFFER_BYTES 0x0004 "rx_buffer_bytes" "Size of each eager rx buffer in bytes.";
    GATHER_FAN_IN 0x1FC4 "gather_fan_in" "Maximum number of ranks to which the root of a flat gather sends addresses at a time, above `gather_fan_in_bytes`.";
    GATHER_FAN_IN_BYTES 0x1FC8 "gather_fan_in_bytes" "Blocks of more bytes than this are gathered from `gather_fan_in` ranks at a time.";
    BROADCAST_FLAT_RANKS 0x1FCC "broadcast_flat_ranks" "Maximum number of ranks of a flat rendezvous broadcast; more ranks use a binomial tree.";
    REDUCE_FLAT_RANKS 0x1FD0 "reduce_flat_ranks" "Maximum number of ranks of a flat rendezvous reduction.";
    REDUCE_FLAT_BYTES 0x1FD4 "reduce_flat_bytes" "Maximum bytes of a rendezvous reduction that is flat for any number of ranks.";
    SPARE_1_LOW 0x1FD8 "spare_1_low" "Address of spare buffer 1, low word: scratch for rendezvous reductions.";
    SPARE_1_HIGH 0x1FDC "spare_1_high" "Address of spare buffer 1, high word.";
    SPARE_2_LOW 0x1FE0 "spare_2_low" "Address of spare buffer 2, low word.";
    SPARE_2_HIGH 0x1FE4 "spare_2_high" "Address of spare buffer 2, high word.";
    SPARE_3_LOW 0x1FE8 "spare_3_low" "Address of spare buffer 3, low word.";
    SPARE_3_HIGH 0x1FEC "spare_3_high" "Address of spare buffer 3, high word.";
    CYCLES 0x1FF0 "cycles" "Duration of the last call in cycles of four nanoseconds.";
    IS_CONFIGURED 0x1FF4 "is_configured" "Zero after a reset; the driver writes one. Another driver that reads one does not have the engine to itself.";
    HARDWARE_ID 0x1FF8 "hardware_id" "Build options of the engine; zero in the emulator.";
    RETURN_CODE 0x1FFC "return_code" "Error bits of the call that ended last; zero if it succeeded.";
}

/// Registers for the low and the high word of each spare buffer's address.
pub const SPARE_BUFFERS: [[Register; 2]; 3] =
    [[SPARE_1_LOW, SPARE_1_HIGH], [SPARE_2_LOW, SPARE_2_HIGH], [SPARE_3_LOW, SPARE_3_HIGH]];

impl Register {
    /// Returns the register at a byte offset, or `None` if there is none.
    pub fn at(offset: u32) -> Option<Self> {
        REGISTERS.iter().copied().find(|register| register.offset == offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_register_has_a_place_of_its_own_outside_the_tables() {
        assert!(REGISTERS.is_sorted_by(|one, other| one.offset + 4 <= other.offset));
        for register in REGISTERS {
            assert!(register.offset % 4 == 0 && register.offset + 4 <= EXCHANGE_MEMORY_BYTES, "{register:?}");
            assert!(register.offset < TABLES_BEGIN || register.offset >= TABLES_END, "{register:?}");
            assert!(register.about.ends_with('.') && !register.name.is_empty(), "{register:?}");
            assert_eq!(Register::at(register.offset), Some(*register));
        }
        assert_eq!(Register::at(TABLES_BEGIN), None);
    }
}

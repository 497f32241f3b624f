//! Return codes: the word that an engine writes when a call ends; each bit is one kind of failure.

use std::fmt;

/// Value of the register `return_code`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ReturnCode(pub u32);

/// A bit of a return code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Index of the bit.
    pub bit: u32,
    /// Meaning of the bit.
    pub about: &'static str,
    /// Whether current firmware raises the bit.
    pub is_raised: bool,
}

const fn raised(bit: u32, about: &'static str) -> Fault {
    Fault { bit, about, is_raised: true }
}

const fn fault(bit: u32, about: &'static str) -> Fault {
    Fault { bit, about, is_raised: false }
}

/// All bits that have a meaning.
pub const FAULTS: [Fault; 28] = [
    fault(0, "DMA mismatch"),
    raised(1, "internal DMA error"),
    raised(2, "DMA to an address outside all memories"),
    raised(3, "DMA error reported by the memory"),
    raised(4, "DMA that did not succeed"),
    fault(5, "DMA without an end of packet"),
    fault(6, "DMA of an unexpected length"),
    fault(7, "DMA timeout"),
    fault(8, "a switch that could not be configured"),
    fault(9, "timeout while waiting for an rx buffer with the message"),
    fault(10, "an rx buffer in an invalid state"),
    fault(11, "receive timeout"),
    fault(12, "an rx buffer with an unexpected tag"),
    fault(13, "an rx buffer that does not exist"),
    raised(14, "an operation that the firmware does not support"),
    fault(15, "a receive into an rx buffer that does not exist"),
    raised(16, "the largest eager message is smaller than an rx buffer"),
    raised(17, "the largest rendezvous message is no larger than the largest eager message"),
    fault(18, "DMA of an invalid size"),
    fault(19, "arithmetic"),
    fault(20, "timeout while sending a packet"),
    raised(21, "a packet with an unexpected sequence number"),
    fault(22, "compression"),
    fault(23, "kernel timeout"),
    fault(24, "an unexpected answer of a kernel"),
    raised(25, "a segment of an unexpected length"),
    fault(26, "DMA with an unexpected tag"),
    fault(31, "a reset dropped the call before it completed"),
];

impl ReturnCode {
    /// The descriptor names an operation that firmware does not have.
    pub const NOT_IMPLEMENTED: Self = Self(1 << 14);
    /// The largest eager message is smaller than an rx buffer.
    pub const EAGER_TOO_SMALL: Self = Self(1 << 16);
    /// The largest rendezvous message is no larger than the largest eager one.
    pub const RENDEZVOUS_TOO_SMALL: Self = Self(1 << 17);
    /// A packet arrived out of sequence.
    pub const WRONG_SEQUENCE: Self = Self(1 << 21);

    /// Returns whether the call succeeded.
    pub fn is_ok(self) -> bool {
        self.0 == 0
    }

    /// Returns the faults whose bits are set.
    pub fn faults(self) -> impl Iterator<Item = &'static Fault> {
        FAULTS.iter().filter(move |fault| self.0 >> fault.bit & 1 == 1)
    }

    /// Returns the set bits that have no known meaning.
    pub fn unknown(self) -> u32 {
        FAULTS.iter().fold(self.0, |left, fault| left & !(1 << fault.bit))
    }
}

impl fmt::Display for ReturnCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_ok() {
            return write!(f, "no error");
        }
        let known = self.faults().map(|fault| format!("{} (bit {})", fault.about, fault.bit));
        let unknown = (0..u32::BITS).filter(|bit| self.unknown() >> bit & 1 == 1);
        let all: Vec<String> = known.chain(unknown.map(|bit| format!("unknown bit {bit}"))).collect();
        write!(f, "return code {:#x}: {}", self.0, all.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bit_is_said() {
        assert!(FAULTS.is_sorted_by(|one, other| one.bit < other.bit));
        assert_eq!(ReturnCode(0).to_string(), "no error");
        assert_eq!(
            ReturnCode::NOT_IMPLEMENTED.to_string(),
            "return code 0x4000: an operation that the firmware does not support (bit 14)"
        );
        for bit in 0..u32::BITS {
            let text = ReturnCode(1 << bit).to_string();
            assert!(text.contains(&format!("bit {bit}")), "{text}");
        }
        assert_eq!(ReturnCode(u32::MAX).unknown(), 0b1111 << 27);
    }

    #[test]
    fn the_bits_that_firmware_raises_are_those_of_the_reference() {
        let raised: Vec<u32> = FAULTS.iter().filter(|fault| fault.is_raised).map(|fault| fault.bit).collect();
        assert_eq!(raised, [1, 2, 3, 4, 14, 16, 17, 21, 25]);
    }
}

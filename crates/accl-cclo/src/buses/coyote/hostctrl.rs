//! Registers of the kernel `hostctrl`, through which a host starts calls of an engine on a card.

use crate::call::Words;

/// Offset of the control register; the constants below are its bits.
pub(super) const CONTROL: u32 = 0x00;
/// Starts the call whose words were written.
pub(super) const START: u32 = 1 << 0;
/// The call has ended; reading the register clears the bit.
pub(super) const DONE: u32 = 1 << 1;

/// Offset at which each word of a call is written, in the order of [`crate::call::Words`].
pub(super) const WORD_OFFSETS: [u32; Words::COUNT] =
    [0x10, 0x18, 0x20, 0x28, 0x30, 0x38, 0x40, 0x48, 0x50, 0x58, 0x5C, 0x64, 0x68, 0x70, 0x74];

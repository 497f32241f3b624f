//! The flags by which a side of a link says that nobody looks at its end, and the fences that make it reliable that it is told.
//!
//! Writer: publish the change, full fence, read the other side's flags. The other side: set the flags, full fence, look once
//! more, look no longer. In every order of events at least one of the two sees the other. Owns no telling itself: whoever gets
//! something from [`SideState::take_call`] must post it on the other side's board.

use accl_wire::Slot;

use crate::sync::{AtomicU32, Ordering, fence};

/// To be told of frames (as ever).
pub(crate) const DATA: u32 = 1;
/// To be told of room, too.
pub(crate) const ROOM: u32 = 2;
/// Bits of the flags; above them is the slot's number, counted from 1.
const FLAG_BITS: u32 = 2;

/// What one side of a link shows the other, beyond its counters.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct SideState {
    /// What it is to be told of, and where; 0 while it looks itself.
    armed: AtomicU32,
}

/// What has become of the flags that a side had set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    /// Where to post; without one the side's process must be woken.
    pub(crate) slot: Option<Slot>,
}

impl SideState {
    /// A side that looks, as in fresh shared memory.
    #[cfg(test)]
    pub(crate) fn new() -> SideState {
        SideState { armed: AtomicU32::new(0) }
    }

    /// As the other side sees it.
    #[cfg(all(test, not(accl_loom)))]
    pub(crate) fn bits(&self) -> u32 {
        self.armed.load(Ordering::Relaxed)
    }

    /// Says that nobody will look. What it is to be told of must be looked at once more after this call.
    pub(crate) fn announce(&self, flags: u32, slot: Option<Slot>) {
        let place = slot.map_or(0, |slot| (slot.0 + 1) << FLAG_BITS);
        // A swap puts an order between this and the swap of `take_call` by itself; a store has one only by way of the
        // values read, which loom does not follow.
        self.armed.swap(place | flags, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Takes the announcement back.
    pub(crate) fn retract(&self) {
        // Relaxed: who still sees the flag only tells once too often.
        self.armed.store(0, Ordering::Relaxed);
    }

    /// Called by the other side after it published a change of kind `what`: what is to be done about it.
    #[inline]
    pub(crate) fn take_call(&self, what: u32) -> Option<Call> {
        fence(Ordering::SeqCst);
        // Relaxed: the fence orders the load, and the post itself orders what follows it.
        if self.armed.load(Ordering::Relaxed) & what == 0 { None } else { self.take() }
    }

    /// The swap makes one post out of many commits. Whatever was announced meanwhile was taken with it, so it must be answered too.
    #[cold]
    fn take(&self) -> Option<Call> {
        let taken = self.armed.swap(0, Ordering::Relaxed);
        (taken != 0).then(|| Call { slot: (taken >> FLAG_BITS).checked_sub(1).map(Slot) })
    }
}

//! The flags by which a side of a link says that it sleeps, and the fences that make waking reliable.
//!
//! Writer: publish the change, full fence, read the sleeper's flags. Sleeper: set the flags, full fence, look once
//! more, sleep. In every order of events at least one of the two sees the other. Owns no waking itself: whoever gets
//! `true` from [`SideState::take_call`] must write the sleeper's event descriptor.

use crate::sync::{AtomicU32, Ordering, fence};

/// The sleeper waits for frames (it always does).
pub(crate) const DATA: u32 = 1;
/// The sleeper also waits for room.
pub(crate) const ROOM: u32 = 2;

/// What one side of a link shows the other, beyond its counters.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct SideState {
    parked: AtomicU32,
}

impl SideState {
    /// A side that is awake, as in fresh shared memory.
    #[cfg(all(test, loom))]
    pub(crate) fn new() -> SideState {
        SideState { parked: AtomicU32::new(0) }
    }

    /// Says that this side is about to sleep. What it waits for must be looked at after this call.
    pub(crate) fn announce(&self, flags: u32) {
        // A swap puts an order between this and the swap of `take_call` by itself; a store has one only by way of the
        // values read, which loom does not follow.
        self.parked.swap(flags, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Takes the announcement back.
    pub(crate) fn retract(&self) {
        // Relaxed: a waker that still sees the flag only wakes once too often.
        self.parked.store(0, Ordering::Relaxed);
    }

    /// Called by the other side after it published a change of kind `what`. `true`: wake this side now.
    #[inline]
    pub(crate) fn take_call(&self, what: u32) -> bool {
        fence(Ordering::SeqCst);
        // The swap makes one waker out of many commits. Whatever was announced meanwhile was taken with it, so it must
        // be answered too. Relaxed: the fence orders the load, and the wake-up itself orders what follows it.
        self.parked.load(Ordering::Relaxed) & what != 0 && self.parked.swap(0, Ordering::Relaxed) != 0
    }
}

//! Flags with which one side of a link asks to be notified because it has stopped polling, and the fences that make
//! this reliable.
//!
//! The writer publishes its change, executes a full fence, and reads the other side's flags. The other side sets its
//! flags, executes a full fence, polls once more, and then stops polling. In every order of events at least one of the
//! two sees the other.
//! This module sends no notification itself: a caller that gets something from [`SideState::take_call`] must post it on
//! the other side's bitmap.

use accl_wire::Slot;

use crate::sync::{AtomicU32, Ordering, fence};

/// Flag: notify about frames. It is always set by an armed side.
pub(crate) const DATA: u32 = 1;
/// Flag: notify about room, too.
pub(crate) const ROOM: u32 = 2;
/// Number of flag bits. Above them is the slot's number, counted from 1.
const FLAG_BITS: u32 = 2;

/// State that one side of a link shows the other, in addition to its counters.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct SideState {
    /// Flags of the events that the side wants to be notified of, and the slot to post on; 0 while the side polls.
    armed: AtomicU32,
}

/// Request that a side has made with its flags, as the other side has taken it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Call {
    /// Slot to post on. If `None`, the side's process must be woken.
    pub(crate) slot: Option<Slot>,
}

impl SideState {
    /// Creates the state of a side that polls, as in fresh shared memory.
    #[cfg(test)]
    pub(crate) fn new() -> SideState {
        SideState { armed: AtomicU32::new(0) }
    }

    /// Returns the state as the other side sees it.
    #[cfg(all(test, not(accl_loom)))]
    pub(crate) fn bits(&self) -> u32 {
        self.armed.load(Ordering::Relaxed)
    }

    /// Announces that this side will stop polling. After this call the side must poll once more for everything that it
    /// wants to be notified of.
    pub(crate) fn announce(&self, flags: u32, slot: Option<Slot>) {
        let shifted = slot.map_or(0, |slot| (slot.0 + 1) << FLAG_BITS);
        // A swap is by itself ordered with the swap of `take_call`. A store is ordered only through the values read,
        // which loom does not follow.
        self.armed.swap(shifted | flags, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Takes the announcement back.
    pub(crate) fn retract(&self) {
        // Relaxed: a peer that still sees the flag only notifies once too often.
        self.armed.store(0, Ordering::Relaxed);
    }

    /// Called by the other side after it has published a change of kind `what`. Returns the request to serve, if there
    /// is one.
    #[inline]
    pub(crate) fn take_call(&self, what: u32) -> Option<Call> {
        fence(Ordering::SeqCst);
        // Relaxed: the fence orders the load, and the post itself orders what follows it.
        if self.armed.load(Ordering::Relaxed) & what == 0 { None } else { self.take() }
    }

    /// The swap turns many commits into one post. It also takes every flag that was announced meanwhile, so that flag
    /// must be answered too.
    #[cold]
    fn take(&self) -> Option<Call> {
        let taken = self.armed.swap(0, Ordering::Relaxed);
        (taken != 0).then(|| Call { slot: (taken >> FLAG_BITS).checked_sub(1).map(Slot) })
    }
}

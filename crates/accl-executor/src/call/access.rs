//! Permission to access the memory of a collective that an external operation does.
//!
//! This module owns one atomic word. The worker accesses the memory only between [`Access::begin`] and [`Access::end`],
//! and no longer once the memory is wanted back. A failed call therefore has its memory back as soon as no worker is
//! between the two. It does not matter what else blocks the worker. Read [`Access::begin`] first.

use std::sync::atomic::{AtomicU8, Ordering};

const TOUCHED: u8 = 1;
const WANTED_BACK: u8 = 2;

/// A revocable permission to access memory.
#[derive(Debug, Default)]
pub(super) struct Access(AtomicU8);

impl Access {
    /// Begins an access. Returns `false` if the memory is wanted back. Only one thread calls this at a time, because
    /// one thread has the task.
    pub(super) fn begin(&self) -> bool {
        self.0.compare_exchange(0, TOUCHED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Ends an access. Returns whether the memory is wanted back, so that a waiting thread must be woken.
    pub(super) fn end(&self) -> bool {
        // Release: the next owner of the memory then sees what the worker wrote.
        self.0.fetch_and(!TOUCHED, Ordering::Release) & WANTED_BACK != 0
    }

    /// Forbids further accesses. Returns whether this is the first such call.
    pub(super) fn want_back(&self) -> bool {
        self.0.fetch_or(WANTED_BACK, Ordering::Relaxed) & WANTED_BACK == 0
    }

    pub(super) fn is_wanted_back(&self) -> bool {
        self.0.load(Ordering::Relaxed) & WANTED_BACK != 0
    }

    /// Returns whether no worker accesses the memory, now or later: it is wanted back, and the last access has ended.
    pub(super) fn is_back(&self) -> bool {
        self.0.load(Ordering::Acquire) == WANTED_BACK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wanted_back_is_not_touched_again_and_is_back_once_it_is_let_go() {
        let access = Access::default();
        assert!(access.begin() && !access.end() && !access.is_back() && !access.is_wanted_back());
        assert!(access.begin());
        assert!(access.want_back() && !access.want_back() && access.is_wanted_back());
        assert!(!access.is_back(), "it is touched");
        assert!(access.end(), "a thread waits");
        assert!(access.is_back() && !access.begin() && access.is_back());
    }

    #[test]
    fn memory_is_not_touched_after_its_owner_has_it_back() {
        for round in 0..2000 {
            let (access, touched) = (Access::default(), std::sync::Mutex::new(0_u64));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while access.begin() {
                        *touched.try_lock().expect("no other thread touches it") += 1;
                        access.end();
                    }
                });
                if round % 2 == 0 {
                    std::thread::yield_now();
                }
                access.want_back();
                while !access.is_back() {
                    std::thread::yield_now();
                }
                let held = touched.try_lock().expect("no thread touches it");
                std::thread::yield_now();
                drop(held);
            });
        }
    }
}

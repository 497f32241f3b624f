//! Who may touch the memory of a collective that is done elsewhere.
//!
//! Owns one word, whose changes have one order: whoever does the work touches the memory between [`Access::begin`] and [`Access::end`], and not
//! any more once it is wanted back. So a call that has failed has its memory as soon as nobody is in between, whatever else those that do the
//! work are stuck in. Read [`Access::begin`] first.

use std::sync::atomic::{AtomicU8, Ordering};

const TOUCHED: u8 = 1;
const WANTED_BACK: u8 = 2;

/// The right to touch a memory, which can be taken back.
#[derive(Debug, Default)]
pub(super) struct Access(AtomicU8);

impl Access {
    /// Touches the memory, unless it is wanted back: `false`. One thread does so at a time, since one has the task.
    pub(super) fn begin(&self) -> bool {
        self.0.compare_exchange(0, TOUCHED, Ordering::Acquire, Ordering::Relaxed).is_ok()
    }

    /// Touches it no more. Returns whether somebody waits for that.
    pub(super) fn end(&self) -> bool {
        // Release: whoever has it then sees what was written.
        self.0.fetch_and(!TOUCHED, Ordering::Release) & WANTED_BACK != 0
    }

    /// Nobody begins to touch it any more. Returns whether it is said for the first time.
    pub(super) fn want_back(&self) -> bool {
        self.0.fetch_or(WANTED_BACK, Ordering::Relaxed) & WANTED_BACK == 0
    }

    pub(super) fn is_wanted_back(&self) -> bool {
        self.0.load(Ordering::Relaxed) & WANTED_BACK != 0
    }

    /// Whether nobody touches it, now and later: it is wanted back, and whoever touched it has ended.
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
        assert!(access.end(), "somebody waits");
        assert!(access.is_back() && !access.begin() && access.is_back());
    }

    #[test]
    fn nobody_touches_what_somebody_else_has_back() {
        for round in 0..2000 {
            let (access, touched) = (Access::default(), std::sync::Mutex::new(0_u64));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while access.begin() {
                        *touched.try_lock().expect("nobody else touches it") += 1;
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
                let held = touched.try_lock().expect("nobody touches it");
                std::thread::yield_now();
                drop(held);
            });
        }
    }
}

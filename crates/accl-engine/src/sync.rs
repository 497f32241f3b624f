//! Locks, and the `park` of threads, in one module so that loom can replace them. Also for crates that the engine's
//! models cover.

#[cfg(not(accl_loom))]
pub use parking_lot::{Condvar, Mutex, MutexGuard};
#[cfg(not(accl_loom))]
pub use std::thread::{Thread, current as current_thread, park_timeout};

#[cfg(accl_loom)]
pub use modelled::{Condvar, Mutex, MutexGuard, Thread, current_thread, park_timeout};

/// Loom's locks with the interface of `parking_lot`. Time does not pass in a model, so a wait ends only when it is
/// notified.
#[cfg(accl_loom)]
mod modelled {
    use std::ops::{Deref, DerefMut};
    use std::time::{Duration, Instant};

    use loom::sync;
    pub use loom::thread::{Thread, current as current_thread};

    const HELD: &str = "a guard is empty only inside a wait";

    pub fn park_timeout(_at_most: Duration) {
        loom::thread::park();
    }

    #[derive(Debug, Default)]
    pub struct Mutex<T>(sync::Mutex<T>);

    pub struct MutexGuard<'a, T>(Option<sync::MutexGuard<'a, T>>, &'a sync::Mutex<T>);

    /// Result of a wait that was notified.
    pub struct Notified;

    impl Notified {
        pub fn timed_out(&self) -> bool {
            false
        }
    }

    impl<T> Mutex<T> {
        pub fn new(value: T) -> Self {
            Self(sync::Mutex::new(value))
        }

        pub fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap_or_else(|error| error.into_inner())), &self.0)
        }

        pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok().map(|guard| MutexGuard(Some(guard), &self.0))
        }

        pub fn try_lock_for(&self, _at_most: Duration) -> Option<MutexGuard<'_, T>> {
            Some(self.lock())
        }
    }

    impl<T> MutexGuard<'_, T> {
        pub fn unlocked<R>(this: &mut Self, f: impl FnOnce() -> R) -> R {
            this.0 = None;
            let result = f();
            this.0 = Some(this.1.lock().unwrap_or_else(|error| error.into_inner()));
            result
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.0.as_ref().expect(HELD)
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().expect(HELD)
        }
    }

    #[derive(Debug, Default)]
    pub struct Condvar(sync::Condvar);

    impl Condvar {
        pub fn new() -> Self {
            Self(sync::Condvar::new())
        }

        pub fn notify_one(&self) {
            self.0.notify_one();
        }

        pub fn notify_all(&self) {
            self.0.notify_all();
        }

        pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
            let held = guard.0.take().expect(HELD);
            guard.0 = Some(self.0.wait(held).unwrap_or_else(|error| error.into_inner()));
        }

        pub fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _at_most: Duration) {
            self.wait(guard);
        }

        pub fn wait_until<T>(&self, guard: &mut MutexGuard<'_, T>, _until: Instant) -> Notified {
            self.wait(guard);
            Notified
        }

        pub fn wait_while_for<T>(
            &self,
            guard: &mut MutexGuard<'_, T>,
            mut goes_on: impl FnMut(&mut T) -> bool,
            _at_most: Duration,
        ) {
            while goes_on(&mut **guard) {
                self.wait(guard);
            }
        }
    }
}

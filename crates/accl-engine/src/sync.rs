//! The locks of the engine, in one place so that a model checker can replace them.

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};

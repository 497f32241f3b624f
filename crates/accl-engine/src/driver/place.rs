//! Where the background thread of a driver runs.
//!
//! Owns the meeting of that thread, which may begin at any time, with whoever knows its CPU. Which CPU that is, the session says.

use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};

use rustix::thread::{Pid, gettid};

use crate::cpus;

/// There is none.
const NO_CPU: i64 = -1;

/// A thread and its CPU, of which either may come first.
pub(crate) struct Place {
    /// The thread's number; 0 before it has begun.
    thread: AtomicI32,
    cpu: AtomicI64,
}

impl Default for Place {
    fn default() -> Self {
        Self { thread: AtomicI32::new(0), cpu: AtomicI64::new(NO_CPU) }
    }
}

impl Place {
    /// The calling thread is the one.
    pub(crate) fn begin(&self) {
        // Each side writes before it reads, so that one of them sees the other.
        self.thread.store(gettid().as_raw_nonzero().get(), Ordering::SeqCst);
        if let Ok(cpu) = u32::try_from(self.cpu.load(Ordering::SeqCst)) {
            bind(None, cpu);
        }
    }

    /// The thread runs on this CPU from now on, or as soon as it begins. Where it cannot, a line says so.
    pub(crate) fn move_to(&self, cpu: u32) {
        self.cpu.store(i64::from(cpu), Ordering::SeqCst);
        if let Some(thread) = Pid::from_raw(self.thread.load(Ordering::SeqCst)) {
            bind(Some(thread), cpu);
        }
    }
}

fn bind(thread: Option<Pid>, cpu: u32) {
    if let Err(why) = cpus::bind(thread, cpu) {
        tracing::warn!("ACCL_WORKER_AFFINITY: CPU {cpu} cannot be had, since {why}; the thread stays where it was");
    }
}

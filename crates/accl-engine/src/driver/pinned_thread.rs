//! CPU binding of a driver's background thread.
//!
//! The thread may start at any time, before or after its CPU is known. Owns the handover between that thread and the
//! caller that knows the CPU. `session` chooses the CPU.

use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};

use rustix::thread::{Pid, gettid};

use crate::cpus;

/// Value of `cpu` while no CPU is set.
const NO_CPU: i64 = -1;

/// A thread and its CPU; either may be known first.
pub(crate) struct PinnedThread {
    /// The thread's id in the system; 0 before the thread has started.
    thread: AtomicI32,
    cpu: AtomicI64,
}

impl Default for PinnedThread {
    fn default() -> Self {
        Self { thread: AtomicI32::new(0), cpu: AtomicI64::new(NO_CPU) }
    }
}

impl PinnedThread {
    /// Registers the calling thread, and binds it if its CPU is known.
    pub(crate) fn begin(&self) {
        // Each side writes before it reads, so at least one of them sees the other's value.
        self.thread.store(gettid().as_raw_nonzero().get(), Ordering::SeqCst);
        if let Ok(cpu) = u32::try_from(self.cpu.load(Ordering::SeqCst)) {
            bind(None, cpu);
        }
    }

    /// Binds the thread to this CPU, now or as soon as it starts. Logs a warning if the CPU is not available.
    pub(crate) fn move_to(&self, cpu: u32) {
        self.cpu.store(i64::from(cpu), Ordering::SeqCst);
        if let Some(thread) = Pid::from_raw(self.thread.load(Ordering::SeqCst)) {
            bind(Some(thread), cpu);
        }
    }
}

fn bind(thread: Option<Pid>, cpu: u32) {
    if let Err(why) = cpus::bind(thread, cpu) {
        tracing::warn!("ACCL_WORKER_AFFINITY: CPU {cpu} is not available: {why}; the thread keeps its binding");
    }
}

//! Placement of ranks: one core each if there are enough.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Returns the cores that this process may use.
pub fn cores() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
}

/// Returns the core of `rank` among `cores`, if each of `ranks` ranks has its own.
pub fn core_of(rank: usize, ranks: usize, cores: &[usize]) -> Option<usize> {
    cores.get(rank).filter(|_| ranks <= cores.len()).copied()
}

/// Pins the calling thread, and threads that it starts later, to one core.
///
/// # Errors
/// The system's error if it refuses.
pub fn stay_on(core: usize) -> io::Result<()> {
    let mut one = CpuSet::new();
    one.set(core);
    Ok(sched_setaffinity(None, &one)?)
}

/// Keeps the calling thread, and threads that it starts, on one core until dropped.
#[derive(Debug)]
pub struct Pinned {
    before: Option<CpuSet>,
}

impl Pinned {
    /// Pins to the core of `rank` among `cores` if each of `ranks` ranks has its own; otherwise does nothing.
    pub fn new(rank: usize, ranks: usize, cores: &[usize]) -> Self {
        let Some(core) = core_of(rank, ranks, cores) else { return Self { before: None } };
        let before = sched_getaffinity(None).ok();
        // If the kernel refuses, the rank stays unpinned: slower at times, but correct.
        let _ = stay_on(core);
        Self { before }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = sched_setaffinity(None, before);
        }
    }
}

//! Where ranks run: one core each if there are enough.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores that this process was given.
pub fn cores() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
}

/// The core of `rank` among `cores`, if every one of `ranks` has its own.
pub fn core_of(rank: usize, ranks: usize, cores: &[usize]) -> Option<usize> {
    cores.get(rank).filter(|_| ranks <= cores.len()).copied()
}

/// Keeps the calling thread, and threads that it will start, on one core.
///
/// # Errors
/// The system's, when it refuses.
pub fn stay_on(core: usize) -> io::Result<()> {
    let mut one = CpuSet::new();
    one.set(core);
    Ok(sched_setaffinity(None, &one)?)
}

/// The calling thread, and threads it starts, stay on one core until this is dropped.
#[derive(Debug)]
pub struct Pinned {
    before: Option<CpuSet>,
}

impl Pinned {
    /// Pins to the core of `rank` among `cores` if every one of `ranks` has its own; otherwise does nothing.
    pub fn new(rank: usize, ranks: usize, cores: &[usize]) -> Self {
        let Some(core) = core_of(rank, ranks, cores) else { return Self { before: None } };
        let before = sched_getaffinity(None).ok();
        // A kernel that refuses leaves the rank where it is: slower at times, not wrong.
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

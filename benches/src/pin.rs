//! Where ranks run: one core each if there are enough.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The cores that this process was given.
pub fn cores() -> Vec<usize> {
    let Ok(set) = sched_getaffinity(None) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
}

/// The calling thread, and threads it starts, stay on one core until this is dropped.
#[derive(Debug)]
pub struct Pinned {
    before: Option<CpuSet>,
}

impl Pinned {
    /// Pins to the core of `rank` among `cores` if every one of `ranks` has its own; otherwise does nothing.
    pub fn new(rank: usize, ranks: usize, cores: &[usize]) -> Self {
        let Some(&core) = cores.get(rank).filter(|_| ranks <= cores.len()) else { return Self { before: None } };
        let before = sched_getaffinity(None).ok();
        let mut one = CpuSet::new();
        one.set(core);
        // A kernel that refuses leaves the rank where it is: slower at times, not wrong.
        let _ = sched_setaffinity(None, &one);
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

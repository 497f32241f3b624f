//! The CPUs of this machine, and binding threads to them.
//!
//! Owns the queries to the system. Other modules decide which thread runs where.

use std::path::Path;

use accl_types::parse_cpus;
use rustix::thread::{CpuSet, Pid, sched_setaffinity};

/// Returns whether this machine has a CPU with this number.
pub(crate) fn is_there(cpu: u32) -> bool {
    Path::new(&format!("/sys/devices/system/cpu/cpu{cpu}")).exists()
}

/// Returns the number of online CPUs of this machine; 0 if the system does not report it.
pub(crate) fn online() -> usize {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/online").ok();
    list.and_then(|list| parse_cpus(list.trim())).map_or(0, |cpus| cpus.len())
}

/// Binds `thread` to the CPU; `None` means the calling thread.
///
/// # Errors
/// The reason why the thread was not moved, as a clause.
pub(crate) fn bind(thread: Option<Pid>, cpu: u32) -> Result<(), &'static str> {
    let mut one = CpuSet::new();
    let is_numbered = (cpu as usize) < CpuSet::MAX_CPU;
    if is_numbered {
        one.set(cpu as usize);
    }
    match is_numbered && sched_setaffinity(thread, &one).is_ok() {
        true => Ok(()),
        false if is_there(cpu) => Err("this process may not use it"),
        false => Err("this machine has no CPU with this number"),
    }
}

//! The CPUs of this machine, and a thread's.
//!
//! Owns what the system says of them. Which thread runs where, others decide.

use std::path::Path;

use accl_types::parse_cpus;
use rustix::thread::{CpuSet, Pid, sched_setaffinity};

/// Whether this machine has a CPU of that number.
pub(crate) fn is_there(cpu: u32) -> bool {
    Path::new(&format!("/sys/devices/system/cpu/cpu{cpu}")).exists()
}

/// How many CPUs this machine runs on; 0 where the system does not say.
pub(crate) fn online() -> usize {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/online").ok();
    list.and_then(|list| parse_cpus(list.trim())).map_or(0, |cpus| cpus.len())
}

/// Binds a thread, or the calling one, to that CPU.
///
/// # Errors
/// Why it stays where it was, as a clause.
pub(crate) fn bind(thread: Option<Pid>, cpu: u32) -> Result<(), &'static str> {
    let mut one = CpuSet::new();
    let is_numbered = (cpu as usize) < CpuSet::MAX_CPU;
    if is_numbered {
        one.set(cpu as usize);
    }
    match is_numbered && sched_setaffinity(thread, &one).is_ok() {
        true => Ok(()),
        false if is_there(cpu) => Err("this process may not use it"),
        false => Err("this machine has none of that number"),
    }
}

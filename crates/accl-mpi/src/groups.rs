//! The groups whose collectives MPI runs, and their communicators.
//!
//! Owns the information that processes exchange for this, and the rule by which all of them reach the same result. Read
//! [`open`] first.

use std::ffi::c_int;
use std::sync::Arc;

use crate::address::Address;
use crate::calls::{self, Checked, Level};
use crate::collectives::Group;
use crate::world::{self, Job, NOT_IN_JOB};

/// Flag in the tag field of such an address: the process may call MPI from any thread.
const IS_MULTIPLE: c_int = 1;
/// Flag in the tag field: the communicator from MPI's start is free for the group of this address.
const HAS_FIRST: c_int = 2;

/// The result of [`open`].
pub(crate) enum Opened {
    Group(Arc<Group>),
    /// MPI runs nothing for such a group, for this reason. All of the group's processes get this result.
    LeftToHost(String),
}

/// Returns the information that the other processes of a new group need.
///
/// # Errors
/// If MPI has ended.
pub(crate) fn address() -> Checked<Address> {
    world::with(|world| {
        let has_first = world.has_first_communicator()?;
        let Job { id, rank, library, level, .. } = world.job.clone();
        let multiple = if level == Level::Multiple { IS_MULTIPLE } else { 0 };
        Ok(Address { job: id, rank, tag: multiple | if has_first { HAS_FIRST } else { 0 }, library })
    })?
}

/// Opens the group of these processes, each given by its address. `key` is the same in all of them.
///
/// # Errors
/// If a process is not in this job or uses another library, or if two groups of all processes are created at once.
pub(crate) fn open(rank: u32, addresses: &[Address], key: u64) -> Checked<Opened> {
    world::with(|world| {
        let job = &world.job;
        for (other, address) in addresses.iter().enumerate() {
            if address.library != job.library {
                return Err(format!(
                    "rank {rank} uses {}, rank {other} uses {} or another build of it; start all ranks with the same MPI library",
                    calls::short_name(&job.library),
                    calls::short_name(&address.library)
                ));
            }
            if address.job != job.id || address.rank < 0 || address.rank >= job.size {
                return Err(format!("rank {other}, seen from rank {rank}, is {NOT_IN_JOB}"));
            }
        }
        let ranks: Vec<c_int> = addresses.iter().map(|address| address.rank).collect();
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != ranks.len() {
            return Err("two ranks of the group are the same process of the MPI job".to_owned());
        }
        let all_have = |flag: c_int| addresses.iter().all(|address| address.tag & flag != 0);
        let is_job = ranks.len() == job.size as usize && ranks == sorted;
        let first = world.first_communicator();
        let made = is_job && all_have(HAS_FIRST);
        if !made && !all_have(IS_MULTIPLE) {
            return Ok(Opened::LeftToHost(format!(
                "MPI has thread level {} and can run collectives only for the first group of all its processes; start it with \
                 MPI_THREAD_MULTIPLE (ACCL_MPI_THREAD_LEVEL=multiple)",
                job.level.name()
            )));
        }
        // Another group that is created at the same time was offered the communicator too.
        if made && !world.take_first_communicator() {
            return Err("two groups of all processes are created at once; create one after the other".to_owned());
        }
        Ok(Opened::Group(Group::new(ranks, first, world.tag_of(key), made.then_some(first))))
    })?
}

//! Which processes are a group whose collectives MPI does, and by which communicator.
//!
//! Owns what processes tell one another for that, and the rule by which all of them find the same. Read [`open`] first.

use std::ffi::c_int;
use std::sync::Arc;

use crate::address::Address;
use crate::calls::{self, Checked, Level};
use crate::collectives::Group;
use crate::world::{self, ELSEWHERE, Job};

/// What an address says in place of a tag: the process may call MPI from any thread,
const IS_MULTIPLE: c_int = 1;
/// and the communicator that was made with MPI's start is free for the group that this address is for.
const HAS_FIRST: c_int = 2;

/// What [`open`] has come to.
pub(crate) enum Opened {
    Group(Arc<Group>),
    /// MPI does nothing for such a group, for this reason, in all of its processes alike.
    LeftToHost(String),
}

/// What the others of a group that is about to be made need to know.
///
/// # Errors
/// MPI has ended.
pub(crate) fn address() -> Checked<Address> {
    world::with(|world| {
        let has_first = world.has_first_communicator()?;
        let Job { id, rank, library, level, .. } = world.job.clone();
        let multiple = if level == Level::Multiple { IS_MULTIPLE } else { 0 };
        Ok(Address { job: id, rank, tag: multiple | if has_first { HAS_FIRST } else { 0 }, library })
    })?
}

/// The group of these processes, by what each has said of itself. `key` is the same in all of them.
///
/// # Errors
/// Not all are of this job.
pub(crate) fn open(rank: u32, addresses: &[Address], key: u64) -> Checked<Opened> {
    world::with(|world| {
        let job = &world.job;
        for (other, address) in addresses.iter().enumerate() {
            if address.library != job.library {
                return Err(format!(
                    "rank {rank} uses {}, and rank {other} {}, or another build of it; start all with one library",
                    calls::short_name(&job.library),
                    calls::short_name(&address.library)
                ));
            }
            if address.job != job.id || address.rank < 0 || address.rank >= job.size {
                return Err(format!("rank {other}, seen from rank {rank}, is {ELSEWHERE}"));
            }
        }
        let ranks: Vec<c_int> = addresses.iter().map(|address| address.rank).collect();
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != ranks.len() {
            return Err("two ranks of the group are one process of the MPI job".to_owned());
        }
        let all_have = |flag: c_int| addresses.iter().all(|address| address.tag & flag != 0);
        let is_job = ranks.len() == job.size as usize && ranks == sorted;
        let first = world.first_communicator();
        let made = is_job && all_have(HAS_FIRST);
        if !made && !all_have(IS_MULTIPLE) {
            return Ok(Opened::LeftToHost(format!(
                "the thread level of MPI is {}, with which it does collectives of the first group of all its processes alone; start it with \
                 MPI_THREAD_MULTIPLE (ACCL_MPI_THREAD_LEVEL=multiple)",
                job.level.name()
            )));
        }
        // Another group that is made at the same time was offered it, too.
        if made && !world.take_first_communicator() {
            return Err("two groups of all processes are made at once; make one after the other".to_owned());
        }
        Ok(Opened::Group(Group::new(ranks, first, world.tag_of(key), made.then_some(first))))
    })?
}

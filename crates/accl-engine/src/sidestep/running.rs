//! The collectives that a library has under way: it is given those that are due, moved on, and its deadlines are kept.
//!
//! Owns the groups of the library and what is known of each. Nothing stops what a library has begun: a collective that is late, or whose
//! call has failed, is abandoned with its group, and its memory stays. Which thread does this is the matter of `worker`. Read
//! [`Library::obey`] first.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use accl_executor::call::{ExternalCollective, ExternalTask};
use accl_transport::collectives::{CollectiveCall, CollectiveGroup};
use accl_types::{Error, ErrorKind};

use super::request::{Memory, Request};
use crate::time;

/// What is to be done.
pub(super) enum Order {
    /// There is a group.
    Open(Membership),
    /// A collective of a group is due.
    Do { group: u64, task: ExternalTask },
    /// A group is left, after it has failed or in good order.
    Close { group: u64, has_failed: bool },
}

/// A group of the library.
pub(super) struct Membership {
    pub(super) key: u64,
    pub(super) rank: u32,
    pub(super) world: u32,
    /// The transport that does it.
    pub(super) name: &'static str,
    pub(super) group: Box<dyn CollectiveGroup>,
    /// How many collectives it has done.
    pub(super) done: Arc<AtomicU64>,
}

/// What the library is at, for all groups of the process.
#[derive(Default)]
pub(super) struct Library {
    groups: HashMap<u64, Known>,
    running: Vec<Running>,
}

struct Known {
    membership: Membership,
    /// Why nothing more is started in it.
    broken: Option<String>,
    /// It is left, and ends with the last that is under way.
    is_left: bool,
}

struct Running {
    group: u64,
    task: ExternalTask,
    memory: Memory,
    call: Box<dyn CollectiveCall>,
}

/// What has become of a collective that was under way.
enum End {
    Done,
    Failed(String),
    Late,
    Cancelled,
}

impl Library {
    /// How many collectives are under way.
    pub(super) fn under_way(&self) -> usize {
        self.running.len()
    }

    pub(super) fn obey(&mut self, order: Order) {
        match order {
            Order::Open(membership) => {
                let key = membership.key;
                self.groups.insert(key, Known { membership, broken: None, is_left: false });
            }
            Order::Do { group, task } => self.begin(group, task),
            Order::Close { group, has_failed } => {
                if let Some(known) = self.groups.get_mut(&group) {
                    known.is_left = true;
                    if has_failed {
                        known.broken.get_or_insert_with(|| "the group has failed".to_owned());
                    }
                }
                self.forget_if_left(group);
            }
        }
    }

    fn begin(&mut self, group: u64, task: ExternalTask) {
        let Some(Known { membership, broken, .. }) = self.groups.get_mut(&group) else {
            return task.fail("its group was left");
        };
        let name = membership.name;
        if let Some(why) = broken {
            return task.fail_as(ErrorKind::Network, format!("{name} does no more collectives of this group: {why}"));
        }
        let request = match Request::new(&task, membership.rank, membership.world) {
            Ok(Some(request)) if request.hold(&task) => request,
            // Its call has failed, and the other ranks' calls with it, which may have begun.
            Ok(_) => {
                broken.get_or_insert_with(|| "a collective of it was not begun".to_owned());
                return;
            }
            Err(error) => {
                broken.get_or_insert_with(|| error.message.clone());
                return task.fail_with(error);
            }
        };
        // SAFETY: the memory is the request's own, or the caller's, which the task holds; both stay until the collective is done, or for
        // ever if it is abandoned.
        match unsafe { membership.group.start(&request.collective) } {
            Ok(call) => self.running.push(Running { group, task, memory: request.memory, call }),
            Err(why) => {
                broken.get_or_insert_with(|| why.clone());
                task.fail_as(ErrorKind::Network, format!("{name} has not begun it: {why}"));
            }
        }
    }

    /// One look at everything that is under way. Whether something has ended.
    pub(super) fn move_on(&mut self) -> bool {
        let mut has_ended = false;
        let mut index = 0;
        while let Some(running) = self.running.get_mut(index) {
            match running.look() {
                None => index += 1,
                Some(end) => {
                    let running = self.running.remove(index);
                    self.end(running, end);
                    has_ended = true;
                }
            }
        }
        has_ended
    }

    fn end(&mut self, running: Running, end: End) {
        let Running { group, task, mut memory, call } = running;
        let Some(known) = self.groups.get_mut(&group) else {
            return abandon(task, memory, call, Error::internal("its group was forgotten"));
        };
        let name = known.membership.name;
        match end {
            End::Done => {
                known.membership.done.fetch_add(1, Ordering::Relaxed);
                // Of one that is not wanted any more nobody asks how it has ended.
                if memory.finish(&task) {
                    task.done();
                }
            }
            End::Failed(why) => {
                known.broken.get_or_insert_with(|| why.clone());
                let text = format!("{name} has failed to do it: {why}");
                abandon(task, memory, call, Error::new(ErrorKind::Network, text));
            }
            End::Late => {
                known.broken.get_or_insert_with(|| "a collective of it was late".to_owned());
                let error = late_error(name, &task);
                abandon(task, memory, call, error);
            }
            End::Cancelled => {
                known.broken.get_or_insert_with(|| "a collective of it was given up".to_owned());
                let text = format!("{name} cannot be stopped");
                abandon(task, memory, call, Error::new(ErrorKind::Network, text));
            }
        }
        self.forget_if_left(group);
    }

    fn forget_if_left(&mut self, group: u64) {
        let is_over = |known: &Known| known.is_left && self.running.iter().all(|running| running.group != group);
        if self.groups.get(&group).is_some_and(is_over)
            && let Some(Known { membership, broken, .. }) = self.groups.remove(&group)
        {
            membership.group.close(broken.is_some());
        }
    }

    /// The process is about to end.
    pub(super) fn abandon_all(&mut self) {
        for Running { task, memory, call, .. } in std::mem::take(&mut self.running) {
            abandon(task, memory, call, Error::aborted("the process is about to end"));
        }
    }
}

impl Running {
    /// How it has ended, if it has.
    fn look(&mut self) -> Option<End> {
        match self.call.test() {
            Ok(true) => return Some(End::Done),
            Ok(false) => {}
            Err(why) => return Some(End::Failed(why)),
        }
        if self.task.is_cancelled() {
            return Some(End::Cancelled);
        }
        let deadline = self.task.collective().and_then(|collective| collective.deadline);
        deadline.is_some_and(|deadline| time::now() >= deadline).then_some(End::Late)
    }
}

/// Ends a task, and leaves to the library what it works on.
fn abandon(task: ExternalTask, memory: Memory, call: Box<dyn CollectiveCall>, error: Error) {
    call.abandon();
    let is_direct = memory.is_direct();
    // The copies stay; the library may read one also where it writes to the caller's memory.
    std::mem::forget(memory);
    if is_direct {
        task.abandon(error);
    } else {
        task.fail_with(error);
    }
}

fn late_error(name: &str, task: &ExternalTask) -> Error {
    let Some(ExternalCollective { collective, started, .. }) = task.collective() else {
        return Error::timeout(format!("{name} has not ended it"));
    };
    let waited = time::now().since(*started).as_millis();
    Error::timeout(format!(
        "Timed out waiting {waited}ms for {collective}: {name} has not ended it, and all ranks have made it; look whether a rank was stopped or \
         the network of {name} stands still, or take the host with sidestep=\"{collective}=host\""
    ))
}

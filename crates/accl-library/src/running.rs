//! The collectives that a library has in flight: starts those that are due, polls them, and checks their deadlines.
//!
//! Owns the library's groups and their state. A library cannot stop a collective that it has begun. If a collective is
//! late, or its call has failed, it is abandoned together with its group, and its memory is never freed. `worker`
//! decides which thread does this. Read [`Library::obey`] first.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use accl_engine::{ExternalCollective, ExternalTask, now};
use accl_transport::collectives::{CollectiveCall, CollectiveGroup};
use accl_types::{Error, ErrorKind};

use super::request::{OffloadRequest, RequestMemory};

/// A command for the library.
pub(super) enum Order {
    /// Adds a group.
    Open(Membership),
    /// Starts a collective of a group.
    Do { group: u64, task: ExternalTask },
    /// Leaves a group, after a failure or cleanly.
    Close { group: u64, has_failed: bool },
}

/// A group of the library.
pub(super) struct Membership {
    pub(super) key: u64,
    pub(super) rank: u32,
    pub(super) world: u32,
    /// Name of the transport whose library does the collectives.
    pub(super) name: &'static str,
    pub(super) group: Box<dyn CollectiveGroup>,
    /// Number of collectives that the library has done for the group.
    pub(super) done: Arc<AtomicU64>,
}

/// State of the library for all groups of the process.
#[derive(Default)]
pub(super) struct Library {
    groups: HashMap<u64, Known>,
    running: Vec<Running>,
}

struct Known {
    membership: Membership,
    /// Why no further collective is started in the group; `None` if it works.
    broken: Option<String>,
    /// Whether the group was left. It is closed once its last collective in flight has ended.
    is_left: bool,
}

struct Running {
    group: u64,
    task: ExternalTask,
    memory: RequestMemory,
    call: Box<dyn CollectiveCall>,
}

/// How a collective that was in flight has ended.
enum TaskEnd {
    Done,
    Failed(String),
    Late,
    Cancelled,
}

impl Library {
    /// Returns the number of collectives in flight.
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
            return task.fail_as(ErrorKind::Network, format!("{name} runs no more collectives of this group: {why}"));
        }
        let request = match OffloadRequest::new(&task, membership.rank, membership.world) {
            Ok(Some(request)) if request.hold(&task) => request,
            // The call has failed here. The other ranks may have begun theirs, so the library's group is unusable.
            Ok(_) => {
                broken.get_or_insert_with(|| "one of its collectives was not started".to_owned());
                return;
            }
            Err(error) => {
                broken.get_or_insert_with(|| error.message.clone());
                return task.fail_with(error);
            }
        };
        // SAFETY: the memory is the request's own or the caller's, which the task holds since `request.hold`. Both stay
        // valid until the collective is done, or for ever if `abandon` gives them up.
        match unsafe { membership.group.start(&request.collective) } {
            Ok(call) => self.running.push(Running { group, task, memory: request.memory, call }),
            Err(why) => {
                broken.get_or_insert_with(|| why.clone());
                task.fail_as(ErrorKind::Network, format!("{name} could not start the collective: {why}"));
            }
        }
    }

    /// Polls every collective in flight once. Returns whether one has ended.
    pub(super) fn move_on(&mut self) -> bool {
        let mut has_ended = false;
        let mut index = 0;
        while let Some(running) = self.running.get_mut(index) {
            match running.poll() {
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

    fn end(&mut self, running: Running, end: TaskEnd) {
        let Running { group, task, mut memory, call } = running;
        let Some(known) = self.groups.get_mut(&group) else {
            return abandon(task, memory, call, Error::internal("its group no longer exists"));
        };
        let name = known.membership.name;
        match end {
            TaskEnd::Done => {
                known.membership.done.fetch_add(1, Ordering::Relaxed);
                // If the task was cancelled, no thread waits for its result.
                if memory.finish(&task) {
                    task.done();
                }
            }
            TaskEnd::Failed(why) => {
                known.broken.get_or_insert_with(|| why.clone());
                let text = format!("the collective failed in {name}: {why}");
                abandon(task, memory, call, Error::new(ErrorKind::Network, text));
            }
            TaskEnd::Late => {
                known.broken.get_or_insert_with(|| "one of its collectives missed its deadline".to_owned());
                let error = late_error(name, &task);
                abandon(task, memory, call, error);
            }
            TaskEnd::Cancelled => {
                known.broken.get_or_insert_with(|| "one of its collectives was abandoned".to_owned());
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

    /// Abandons everything in flight, because the process is about to end.
    pub(super) fn abandon_all(&mut self) {
        for Running { task, memory, call, .. } in std::mem::take(&mut self.running) {
            abandon(task, memory, call, Error::aborted("the process is exiting"));
        }
    }
}

impl Running {
    /// Returns how the collective has ended; `None` while it is in flight.
    fn poll(&mut self) -> Option<TaskEnd> {
        match self.call.test() {
            Ok(true) => return Some(TaskEnd::Done),
            Ok(false) => {}
            Err(why) => return Some(TaskEnd::Failed(why)),
        }
        if self.task.is_cancelled() {
            return Some(TaskEnd::Cancelled);
        }
        let deadline = self.task.collective().and_then(|collective| collective.deadline);
        deadline.is_some_and(|deadline| now() >= deadline).then_some(TaskEnd::Late)
    }
}

/// Ends a task with an error, and leaves its memory to the library.
fn abandon(task: ExternalTask, memory: RequestMemory, call: Box<dyn CollectiveCall>, error: Error) {
    call.abandon();
    let is_direct = memory.is_direct();
    // The copies are leaked too: the library may read one even where it writes to the caller's memory.
    std::mem::forget(memory);
    if is_direct {
        task.abandon(error);
    } else {
        task.fail_with(error);
    }
}

fn late_error(name: &str, task: &ExternalTask) -> Error {
    let Some(ExternalCollective { collective, started, .. }) = task.collective() else {
        return Error::timeout(format!("{name} has not completed it"));
    };
    let waited = now().since(*started).as_millis();
    Error::timeout(format!(
        "Timed out waiting {waited}ms for {collective}: {name} has not completed it, although all ranks issued it; \
         check whether a rank is stopped or the network of {name} hangs, or choose the host with \
         sidestep=\"{collective}=host\""
    ))
}

//! The thread that has libraries do collectives: it starts what it is given, moves on what is under way, and sees to deadlines.
//!
//! One serves all groups of a process, from the first on that has use for it, and sleeps while there is nothing to do. It alone calls the
//! library for them. Nothing stops what a library has begun: a collective that is late, or whose call has failed, is abandoned with its
//! group, and its memory stays. Read [`Worker::run`] first.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, TryRecvError};
use std::time::{Duration, Instant};

use accl_executor::call::ExternalTask;
use accl_transport::collectives::{CollectiveCall, CollectiveGroup};
use accl_types::{Error, ErrorKind, Result};

use super::request::Request;
use crate::sync::Mutex;
use crate::{signals, time};

/// For so long after something has begun or ended the thread goes on without a sleep, but gives its core to others.
const ATTENTION: Duration = Duration::from_millis(2);
/// Then it sleeps between looks: so long at first, and twice as long each time up to the longest.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// What the thread is told.
pub(super) enum Order {
    /// There is a group.
    Open(Membership),
    /// A collective of a group is due.
    Do { group: u64, task: ExternalTask },
    /// A group is left.
    Close { group: u64 },
}

/// A group as the thread knows it.
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

/// The thread of a process, once there is one.
#[derive(Default)]
pub(crate) struct Workers {
    orders: Mutex<Option<Sender<Order>>>,
    groups: AtomicU64,
}

impl Workers {
    /// The way to the thread, which is started if there is none.
    ///
    /// # Errors
    /// `Exhausted` when it cannot start.
    pub(super) fn orders(&self) -> Result<Sender<Order>> {
        let mut orders = self.orders.lock();
        if let Some(orders) = &*orders {
            return Ok(orders.clone());
        }
        let (tell, told) = mpsc::channel();
        std::thread::Builder::new()
            .name("accl-sidestep".to_owned())
            .spawn(move || {
                signals::block_all();
                Worker { orders: told, groups: HashMap::new(), running: Vec::new() }.run();
            })
            .map_err(|why| Error::exhausted(format!("no thread for the collectives of a library: {why}")))?;
        Ok(orders.insert(tell).clone())
    }

    /// What no other group of this process has been called.
    pub(super) fn next_key(&self) -> u64 {
        self.groups.fetch_add(1, Ordering::Relaxed)
    }
}

struct Worker {
    orders: Receiver<Order>,
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
    request: Request,
    call: Box<dyn CollectiveCall>,
}

/// What has become of a collective that was under way.
enum End {
    Done,
    Failed(String),
    Late,
    Cancelled,
}

impl Worker {
    fn run(mut self) {
        let mut news = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            let order = if self.running.is_empty() {
                self.orders.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                self.orders.try_recv()
            };
            match order {
                Ok(order) => {
                    self.obey(order);
                    (news, pause) = (Instant::now(), FIRST_PAUSE);
                    continue;
                }
                Err(TryRecvError::Empty) => {}
                // Nobody waits for what is under way.
                Err(TryRecvError::Disconnected) => return self.abandon_all(),
            }
            if self.move_on() {
                (news, pause) = (Instant::now(), FIRST_PAUSE);
            } else if news.elapsed() < ATTENTION {
                std::thread::yield_now();
            } else {
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Open(membership) => {
                let key = membership.key;
                self.groups.insert(key, Known { membership, broken: None, is_left: false });
            }
            Order::Do { group, task } => self.begin(group, task),
            Order::Close { group } => {
                if let Some(known) = self.groups.get_mut(&group) {
                    known.is_left = true;
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
            Err(error) => return task.fail_with(error),
        };
        // SAFETY: the memory is the request's own, or the caller's, which the task holds; both stay until the collective is done, or for
        // ever if it is abandoned.
        match unsafe { membership.group.start(&request.collective) } {
            Ok(call) => self.running.push(Running { group, task, request, call }),
            Err(why) => {
                broken.get_or_insert_with(|| why.clone());
                task.fail_as(ErrorKind::Network, format!("{name} has not begun it: {why}"));
            }
        }
    }

    /// One look at everything that is under way. Whether something has ended.
    fn move_on(&mut self) -> bool {
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
        let Running { group, task, mut request, call } = running;
        let Some(known) = self.groups.get_mut(&group) else { return };
        let name = known.membership.name;
        match end {
            End::Done => {
                known.membership.done.fetch_add(1, Ordering::Relaxed);
                // Of one that is not wanted any more nobody asks how it has ended.
                if request.finish(&task) {
                    task.done();
                }
            }
            End::Failed(why) => {
                known.broken.get_or_insert_with(|| why.clone());
                let text = format!("{name} has failed to do it: {why}");
                abandon(task, request, call, Error::new(ErrorKind::Network, text));
            }
            End::Late => {
                known.broken.get_or_insert_with(|| "a collective of it was late".to_owned());
                let error = late_error(name, &task);
                abandon(task, request, call, error);
            }
            End::Cancelled => {
                known.broken.get_or_insert_with(|| "a collective of it was given up".to_owned());
                let text = format!("{name} cannot be stopped");
                abandon(task, request, call, Error::new(ErrorKind::Network, text));
            }
        }
        self.forget_if_left(group);
    }

    fn forget_if_left(&mut self, group: u64) {
        let is_over = |known: &Known| known.is_left && self.running.iter().all(|running| running.group != group);
        if self.groups.get(&group).is_some_and(is_over) {
            self.groups.remove(&group);
        }
    }

    fn abandon_all(&mut self) {
        for Running { task, request, call, .. } in std::mem::take(&mut self.running) {
            abandon(task, request, call, Error::aborted("the process is about to end"));
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
fn abandon(task: ExternalTask, request: Request, call: Box<dyn CollectiveCall>, error: Error) {
    call.abandon();
    if request.is_direct() {
        let Error { kind, message, context } = error;
        let text = format!(
            "{message}; it may still write into the tensors of this call, whose memory is never freed: do not use them, and end this \
             process when you can"
        );
        task.abandon(Error { context, ..Error::new(kind, text) });
    } else {
        // The copies stay.
        std::mem::forget(request);
        task.fail_with(error);
    }
}

fn late_error(name: &str, task: &ExternalTask) -> Error {
    let begin = task.collective().map_or_else(String::new, |collective| {
        let waited = time::now().since(collective.started).as_millis();
        format!("Timed out waiting {waited}ms for {}: ", collective.collective)
    });
    let text = format!(
        "{begin}{name} has not ended it, and all ranks have made it; look whether a rank was stopped or the network of {name} stands \
         still, or take the host with sidestep=\"COLLECTIVE=host\""
    );
    Error::timeout(text)
}

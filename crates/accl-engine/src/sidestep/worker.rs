//! Who has libraries do collectives: the thread that waits for one, and otherwise a thread for all groups of the process, which sleeps while
//! there is nothing to do.
//!
//! A change of threads takes longer than a small collective, so who waits helps: it looks at the library between its looks at the links, and
//! the thread is woken only where nobody does. Owns the queue of what is due; what is done with it is in `running`. Read [`Worker::put`] first.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use accl_types::{Error, Result};

use super::running::{Library, Order};
use crate::signals;
use crate::sync::{Condvar, Mutex};

/// For so long after something has begun or ended the thread goes on without a sleep, but gives its core to others: all ranks are in what is under
/// way, and a library may get no further than it is looked at.
const ATTENTION: Duration = Duration::from_secs(10);
/// Then it sleeps between looks: so long at first, and twice as long each time up to the longest.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// The worker of an engine, once there is one.
#[derive(Default)]
pub(crate) struct Workers {
    worker: OnceLock<Arc<Worker>>,
    starting: Mutex<()>,
    groups: AtomicU64,
}

/// What is due, and whoever does it.
pub(crate) struct Worker {
    due: Mutex<VecDeque<Order>>,
    /// There is something due, or nobody helps any more.
    wanted: Condvar,
    /// Whoever has it calls the library. It is taken before `due`.
    library: Mutex<Library>,
    /// How many collectives are under way.
    under_way: AtomicU64,
    /// Threads that wait for a collective and look at the library meanwhile.
    helpers: AtomicU32,
    is_over: AtomicBool,
}

/// What one look has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// There is nothing to do.
    Nothing,
    /// Something is under way, or another thread looks.
    UnderWay,
    /// Something has begun or ended.
    News,
}

impl Workers {
    /// The worker, whose thread is started if there is none.
    ///
    /// # Errors
    /// `Exhausted` when it cannot start.
    pub(super) fn worker(&self) -> Result<Arc<Worker>> {
        let _alone = self.starting.lock();
        if let Some(worker) = self.worker.get() {
            return Ok(worker.clone());
        }
        let worker = Arc::new(Worker {
            due: Mutex::default(),
            wanted: Condvar::new(),
            library: Mutex::default(),
            under_way: AtomicU64::new(0),
            helpers: AtomicU32::new(0),
            is_over: AtomicBool::new(false),
        });
        let served = worker.clone();
        std::thread::Builder::new()
            .name("accl-sidestep".to_owned())
            .spawn(move || {
                signals::block_all();
                served.serve();
            })
            .map_err(|why| Error::exhausted(format!("no thread for the collectives of a library: {why}")))?;
        Ok(self.worker.get_or_init(|| worker).clone())
    }

    /// What no other group of this process has been called.
    pub(super) fn next_key(&self) -> u64 {
        self.groups.fetch_add(1, Ordering::Relaxed)
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        if let Some(worker) = self.worker.get() {
            worker.is_over.store(true, Ordering::Relaxed);
            worker.wake();
        }
    }
}

impl Worker {
    /// Something is due. Whoever helps sees it, and else the thread is woken. Neither blocks nor calls the library.
    pub(super) fn put(&self, order: Order) {
        let mut due = self.due.lock();
        due.push_back(order);
        // Under the lock: who stops helping counts itself out first, and takes the lock then.
        if self.helpers.load(Ordering::Relaxed) == 0 {
            self.wanted.notify_one();
        }
    }

    fn wake(&self) {
        let _due = self.due.lock();
        self.wanted.notify_one();
    }

    /// This thread waits for a collective, and looks at the library until what this returns is dropped.
    pub(crate) fn help(&self) -> Helping<'_> {
        self.helpers.fetch_add(1, Ordering::Relaxed);
        Helping(self)
    }

    /// What is due is begun, and what is under way is looked at once.
    fn look(&self, library: &mut Library) -> Found {
        let mut has_news = false;
        loop {
            // One at a time: what is put meanwhile need not wait for the library.
            let Some(order) = self.due.lock().pop_front() else { break };
            library.obey(order);
            has_news = true;
        }
        has_news |= library.move_on();
        let under_way = library.under_way() as u64;
        self.under_way.store(under_way, Ordering::Relaxed);
        match under_way {
            _ if has_news => Found::News,
            0 => Found::Nothing,
            _ => Found::UnderWay,
        }
    }

    /// The life of the thread.
    fn serve(&self) {
        let mut news = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            {
                let mut due = self.due.lock();
                let is_wanted = |due: &VecDeque<Order>| {
                    let has_work = !due.is_empty() || self.under_way.load(Ordering::Relaxed) > 0;
                    has_work && self.helpers.load(Ordering::Relaxed) == 0
                };
                while !is_wanted(&due) && !self.is_over.load(Ordering::Relaxed) {
                    self.wanted.wait(&mut due);
                    (news, pause) = (Instant::now(), FIRST_PAUSE);
                }
            }
            let mut library = self.library.lock();
            if self.is_over.load(Ordering::Relaxed) {
                // Nobody waits for what is under way.
                return library.abandon_all();
            }
            let found = self.look(&mut library);
            drop(library);
            if found == Found::News {
                (news, pause) = (Instant::now(), FIRST_PAUSE);
            } else if news.elapsed() < ATTENTION {
                std::thread::yield_now();
            } else {
                std::thread::sleep(pause);
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
        }
    }
}

/// See [`Worker::help`].
pub(crate) struct Helping<'a>(&'a Worker);

impl Helping<'_> {
    /// One look at the library, unless another thread has it.
    pub(crate) fn look(&self) -> Found {
        match self.0.library.try_lock() {
            Some(mut library) => self.0.look(&mut library),
            None => Found::UnderWay,
        }
    }
}

impl Drop for Helping<'_> {
    fn drop(&mut self) {
        self.0.helpers.fetch_sub(1, Ordering::Relaxed);
        let due = self.0.due.lock();
        if !due.is_empty() || self.0.under_way.load(Ordering::Relaxed) > 0 {
            self.0.wanted.notify_one();
        }
    }
}

//! Calls the library: on the thread that waits for a collective, or on a thread that all groups of the process share.
//! The shared thread sleeps while there is nothing to do.
//!
//! Switching threads takes longer than a small collective. So a waiting thread helps: it polls the library between its
//! polls of the links. The worker thread is woken only if no thread helps. Owns the queue of commands; `running`
//! carries them out. Read [`Worker::put`] first.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use accl_engine::block_signals;
use accl_engine::offload::Progress;
use accl_types::{Error, Result};
use parking_lot::{Condvar, Mutex};

use super::running::{Library, Order};

/// After an event, the thread polls without sleeping for this long, but yields its core. All ranks take part in a
/// collective in flight, and a library may make progress only while it is polled.
const ATTENTION: Duration = Duration::from_secs(10);
/// After that time the thread sleeps between polls: `FIRST_PAUSE` at first, twice as long each time, at most
/// `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// The worker of an engine, once there is one.
#[derive(Default)]
pub(crate) struct Workers {
    worker: OnceLock<Arc<Worker>>,
    starting: Mutex<()>,
    groups: AtomicU64,
}

/// The queue of commands, and the library that carries them out.
pub(crate) struct Worker {
    due: Mutex<VecDeque<Order>>,
    /// Notified when a command is queued, or when a helping thread leaves work behind.
    wanted: Condvar,
    /// The thread that holds this lock calls the library. It is taken before `due`.
    library: Mutex<Library>,
    /// Number of collectives in flight.
    under_way: AtomicU64,
    /// Number of threads that wait for a collective and poll the library meanwhile.
    helpers: AtomicU32,
    is_over: AtomicBool,
}

impl Workers {
    /// Returns the worker, starting its thread if there is none.
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
                block_signals();
                served.serve();
            })
            .map_err(|why| Error::exhausted(format!("cannot start the thread for collectives of a library: {why}")))?;
        Ok(self.worker.get_or_init(|| worker).clone())
    }

    /// Returns a key that no other group of this process has.
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
    /// Queues a command. A helping thread will see it; if no thread helps, the worker thread is woken. Does not call
    /// the library, and does not wait for it.
    pub(super) fn put(&self, order: Order) {
        let mut due = self.due.lock();
        due.push_back(order);
        // Under the lock: a thread that stops helping first decrements the count, then takes the lock.
        if self.helpers.load(Ordering::Relaxed) == 0 {
            self.wanted.notify_one();
        }
    }

    fn wake(&self) {
        let _due = self.due.lock();
        self.wanted.notify_one();
    }

    /// Registers the calling thread as a helper: it waits for a collective, and polls the library until it calls
    /// [`Worker::end_help`].
    pub(crate) fn begin_help(&self) {
        self.helpers.fetch_add(1, Ordering::Relaxed);
    }

    /// Polls the library once, unless another thread holds it.
    pub(crate) fn help(&self) -> Progress {
        match self.library.try_lock() {
            Some(mut library) => self.poll(&mut library),
            None => Progress::UnderWay,
        }
    }

    /// Ends the help of the calling thread.
    pub(crate) fn end_help(&self) {
        self.helpers.fetch_sub(1, Ordering::Relaxed);
        let due = self.due.lock();
        if !due.is_empty() || self.under_way.load(Ordering::Relaxed) > 0 {
            self.wanted.notify_one();
        }
    }

    /// Carries out the queued commands and polls each collective in flight once.
    fn poll(&self, library: &mut Library) -> Progress {
        let mut has_events = false;
        loop {
            // One at a time, so that a thread that queues a command does not wait for the library.
            let Some(order) = self.due.lock().pop_front() else { break };
            library.obey(order);
            has_events = true;
        }
        has_events |= library.move_on();
        let under_way = library.under_way() as u64;
        self.under_way.store(under_way, Ordering::Relaxed);
        match under_way {
            _ if has_events => Progress::Events,
            0 => Progress::Idle,
            _ => Progress::UnderWay,
        }
    }

    /// Runs the worker thread.
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
                // Groups that were left are still closed: the library may have few.
                while let Some(order) = self.due.lock().pop_front() {
                    library.obey(order);
                }
                // No thread waits for the collectives in flight.
                return library.abandon_all();
            }
            let progress = self.poll(&mut library);
            drop(library);
            if progress == Progress::Events {
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

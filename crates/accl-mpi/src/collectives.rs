//! Collectives that MPI runs as a whole, for groups of the job's processes.
//!
//! Owns a group's communicator, which is created at the group's first collective, and the order in which a group's
//! collectives start. One communicator is created when MPI starts, for the first group that contains all processes in
//! their order. For any other group, a thread waits for the group's processes. This needs `MPI_THREAD_MULTIPLE`, and no
//! lock is held meanwhile. [`crate::groups`] decides which group has which communicator, and [`crate::world`] which
//! thread calls MPI. Read [`Call::step`] first.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::calls::{Checked, Collective, Communicator, Request};
use crate::signals;

/// A group of processes whose collectives MPI runs.
pub(crate) struct Group {
    /// The processes. Their communicator is created from `parent`, with `tag`.
    ranks: Vec<c_int>,
    parent: Communicator,
    tag: c_int,
    state: Mutex<State>,
    /// Number of requested collectives, and number of those that MPI has started.
    asked: AtomicU64,
    begun: AtomicU64,
}

enum State {
    /// Not requested yet.
    Unmade,
    UnderWay,
    Made {
        communicator: Communicator,
        is_ours: bool,
    },
    /// There is no communicator, or no further collective may start in it, for this reason.
    Over(String),
}

/// Number of threads that create or free communicators. MPI does not end before they finish.
static AT_WORK: AtomicUsize = AtomicUsize::new(0);

/// Whether a thread is creating or freeing a communicator.
pub(crate) fn are_at_work() -> bool {
    AT_WORK.load(Ordering::Relaxed) > 0
}

/// Runs work on communicators that may wait for other processes, on its own thread, unless MPI has ended.
fn begin_work(work: impl FnOnce() + Send + 'static) -> Checked<()> {
    // Counted first: the thread that ends MPI marks it as ended before it reads this count.
    AT_WORK.fetch_add(1, Ordering::SeqCst);
    let begin = move || {
        signals::block();
        if unless_over(|| Ok(())).is_ok() {
            work();
        }
        AT_WORK.fetch_sub(1, Ordering::SeqCst);
    };
    let spawned = std::thread::Builder::new().name("accl-mpi-group".to_owned()).spawn(begin);
    spawned.map(|_| ()).map_err(|why| {
        AT_WORK.fetch_sub(1, Ordering::SeqCst);
        format!("cannot start a thread for a communicator: {why}")
    })
}

/// Locks a mutex. A panic of an earlier holder does not matter, because no code panics halfway through a change of the
/// data.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether MPI must not be called any more. A thread that calls MPI without the world's lock holds this one.
static IS_OVER: RwLock<bool> = RwLock::new(false);

/// Marks MPI as ended.
pub(crate) fn end_all() {
    *IS_OVER.write().unwrap_or_else(PoisonError::into_inner) = true;
}

/// Calls MPI through `work`, unless MPI has ended.
pub(crate) fn unless_over<T>(work: impl FnOnce() -> Checked<T>) -> Checked<T> {
    let is_over = IS_OVER.read().unwrap_or_else(PoisonError::into_inner);
    if *is_over { Err("MPI has ended".to_owned()) } else { work() }
}

impl Group {
    /// Creates a group of these processes, with its communicator if that exists already.
    pub(crate) fn new(ranks: Vec<c_int>, parent: Communicator, tag: c_int, made: Option<Communicator>) -> Arc<Self> {
        let made = made.map(|communicator| State::Made { communicator, is_ours: false });
        let state = Mutex::new(made.unwrap_or(State::Unmade));
        Arc::new(Self { ranks, parent, tag, state, asked: AtomicU64::new(0), begun: AtomicU64::new(0) })
    }

    /// Returns the communicator, or `None` while it is being created.
    fn communicator(self: &Arc<Self>) -> Checked<Option<Communicator>> {
        let mut state = lock(&self.state);
        match &*state {
            State::Made { communicator, .. } => return Ok(Some(*communicator)),
            State::Over(why) => return Err(why.clone()),
            State::UnderWay => return Ok(None),
            State::Unmade => {}
        }
        *state = State::UnderWay;
        drop(state);
        let group = self.clone();
        // No lock is held, because the thread waits for the group's other processes.
        let begun = begin_work(move || group.keep(group.parent.of_some(&group.ranks, group.tag)));
        begun.inspect_err(|why| *lock(&self.state) = State::Over(why.clone())).map(|()| None)
    }

    /// Stores the created communicator, or the error. The group may have been closed meanwhile.
    fn keep(&self, made: Checked<Communicator>) {
        let mut state = lock(&self.state);
        let is_wanted = matches!(*state, State::UnderWay);
        match made {
            Ok(communicator) if is_wanted => *state = State::Made { communicator, is_ours: true },
            Ok(communicator) => {
                drop(state);
                let _ = communicator.free();
            }
            Err(why) if is_wanted => *state = State::Over(why),
            Err(_) => {}
        }
    }

    /// Creates a collective of the group, which starts in its turn.
    pub(crate) fn call(self: &Arc<Self>, what: Collective) -> Call {
        let turn = self.asked.fetch_add(1, Ordering::Relaxed);
        Call { group: self.clone(), what, turn, request: None, ended: None }
    }

    /// Frees the communicator if it was created for this group and no collective was abandoned in it. Returns whether
    /// the group had the communicator from MPI's start and never used it.
    pub(crate) fn close(&self) -> bool {
        let state = std::mem::replace(&mut *lock(&self.state), State::Over("the group was destroyed".to_owned()));
        let asked = self.asked.load(Ordering::Relaxed);
        match state {
            State::Made { communicator, is_ours: true } if asked == self.begun.load(Ordering::Relaxed) => {
                // Freeing may also wait for the other processes.
                let _ = begin_work(move || drop(communicator.free()));
                false
            }
            State::Made { is_ours: false, .. } => asked == 0,
            _ => false,
        }
    }
}

/// Number of collectives that MPI has started and not completed. Abandoned and failed collectives stay counted, because
/// it is unknown when MPI finishes with them.
static UNDER_WAY: AtomicU64 = AtomicU64::new(0);

/// Whether MPI is running a collective.
pub(crate) fn are_under_way() -> bool {
    UNDER_WAY.load(Ordering::SeqCst) > 0
}

/// A requested collective.
pub(crate) struct Call {
    group: Arc<Group>,
    what: Collective,
    /// Its position among the group's collectives, from 0.
    turn: u64,
    request: Option<Request>,
    ended: Option<Checked<()>>,
}

impl Call {
    /// Advances the collective by a call to MPI. Returns its result once it has ended.
    pub(crate) fn step(&mut self) -> Option<Checked<()>> {
        if self.ended.is_none() {
            self.ended = self.go_on().transpose();
            if matches!(self.ended, Some(Ok(()))) {
                UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
            }
        }
        self.ended.clone()
    }

    fn go_on(&mut self) -> Checked<Option<()>> {
        if self.request.is_none() {
            let Some(communicator) = self.group.communicator()? else { return Ok(None) };
            if self.group.begun.load(Ordering::Relaxed) != self.turn {
                return Ok(None);
            }
            // SAFETY: the code that starts the collective keeps its memory valid until the collective has ended, or
            // forever.
            self.request = Some(unsafe { communicator.collective(&self.what) }?);
            UNDER_WAY.fetch_add(1, Ordering::SeqCst);
            self.group.begun.store(self.turn + 1, Ordering::Relaxed);
        }
        let Some(request) = &mut self.request else { return Ok(None) };
        Ok(request.is_complete()?.then_some(()))
    }

    /// Returns the result if the collective has ended, without a call to MPI.
    pub(crate) fn ended(&self) -> Option<Checked<()>> {
        self.ended.clone()
    }

    /// Ends the collective with an error, unless it has ended. It is not advanced any more.
    pub(crate) fn end(&mut self, why: &str) {
        self.ended.get_or_insert_with(|| Err(why.to_owned()));
    }

    /// Gives the collective up: no further collective may start in its group, and the group's communicator is never
    /// freed.
    pub(crate) fn abandon(&self) {
        *lock(&self.group.state) = State::Over("a collective of the group was abandoned".to_owned());
    }
}

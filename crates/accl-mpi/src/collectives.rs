//! Collectives that MPI does as a whole for groups of the job's processes.
//!
//! Owns a group's communicator, which is made when the group makes its first collective, and the order in which its collectives are begun.
//! The group of all processes, in their order, that is the first to ask has one that was made with MPI's start; for others a thread waits
//! for their processes, which needs `MPI_THREAD_MULTIPLE`, and for as long no lock is held. Which group has which is in [`crate::groups`], which
//! thread calls MPI the matter of [`crate::world`]. Read [`Call::step`] first.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use crate::calls::{Checked, Collective, Communicator, Request};
use crate::signals;

/// A group of processes whose collectives MPI does.
pub(crate) struct Group {
    /// The processes, and what to make their communicator from, by a tag.
    ranks: Vec<c_int>,
    parent: Communicator,
    tag: c_int,
    state: Mutex<State>,
    /// How many collectives were asked for, and how many of them MPI was given.
    asked: AtomicU64,
    begun: AtomicU64,
}

enum State {
    /// Nobody has asked for it.
    Unmade,
    UnderWay,
    Made {
        communicator: Communicator,
        is_ours: bool,
    },
    /// There is none, or nothing more begins in it.
    Over(String),
}

/// Threads that make communicators or give them back: MPI does not end before them.
static AT_WORK: AtomicUsize = AtomicUsize::new(0);

/// Whether a thread makes a communicator or gives one back.
pub(crate) fn are_at_work() -> bool {
    AT_WORK.load(Ordering::Relaxed) > 0
}

/// Does something with communicators that may wait for other processes, on a thread of its own, unless MPI is over.
fn begin_work(work: impl FnOnce() + Send + 'static) -> Checked<()> {
    // Counted first: who looks whether MPI may end looks at this, and says that it is over before.
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
        format!("no thread that makes a communicator: {why}")
    })
}

/// Nothing panics half-way through a change of what these guard.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// MPI is not called any more. Whoever calls it without the world's lock has this one.
static IS_OVER: RwLock<bool> = RwLock::new(false);

/// MPI is about to end.
pub(crate) fn end_all() {
    *IS_OVER.write().unwrap_or_else(PoisonError::into_inner) = true;
}

/// Calls MPI, unless it is over.
pub(crate) fn unless_over<T>(work: impl FnOnce() -> Checked<T>) -> Checked<T> {
    let is_over = IS_OVER.read().unwrap_or_else(PoisonError::into_inner);
    if *is_over { Err("MPI has ended".to_owned()) } else { work() }
}

impl Group {
    /// A group of these processes, and its communicator where that is there.
    pub(crate) fn new(ranks: Vec<c_int>, parent: Communicator, tag: c_int, made: Option<Communicator>) -> Arc<Self> {
        let made = made.map(|communicator| State::Made { communicator, is_ours: false });
        let state = Mutex::new(made.unwrap_or(State::Unmade));
        Arc::new(Self { ranks, parent, tag, state, asked: AtomicU64::new(0), begun: AtomicU64::new(0) })
    }

    /// The communicator, as soon as there is one.
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
        // No lock is held: it waits for the others of the group.
        let begun = begin_work(move || group.keep(group.parent.of_some(&group.ranks, group.tag)));
        begun.inspect_err(|why| *lock(&self.state) = State::Over(why.clone())).map(|()| None)
    }

    /// There is a communicator, or not. Meanwhile the group may have been left.
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

    /// A collective of the group, which is begun in its turn.
    pub(crate) fn call(self: &Arc<Self>, what: Collective) -> Call {
        let turn = self.asked.fetch_add(1, Ordering::Relaxed);
        Call { group: self.clone(), what, turn, request: None, ended: None }
    }

    /// Gives the communicator back that was made for it alone, unless collectives were abandoned in it. Returns whether the group had that
    /// of the job, and never used it.
    pub(crate) fn close(&self) -> bool {
        let state = std::mem::replace(&mut *lock(&self.state), State::Over("the group was left".to_owned()));
        let asked = self.asked.load(Ordering::Relaxed);
        match state {
            State::Made { communicator, is_ours: true } if asked == self.begun.load(Ordering::Relaxed) => {
                // It may wait for the others as well.
                let _ = begin_work(move || drop(communicator.free()));
                false
            }
            State::Made { is_ours: false, .. } => asked == 0,
            _ => false,
        }
    }
}

/// How many collectives MPI has begun and not ended. What is given up, or has failed, stays among them: nobody knows when MPI is through with it.
static UNDER_WAY: AtomicU64 = AtomicU64::new(0);

/// Whether MPI works on a collective.
pub(crate) fn are_under_way() -> bool {
    UNDER_WAY.load(Ordering::SeqCst) > 0
}

/// A collective that was asked for.
pub(crate) struct Call {
    group: Arc<Group>,
    what: Collective,
    /// Which of its group's it is.
    turn: u64,
    request: Option<Request>,
    ended: Option<Checked<()>>,
}

impl Call {
    /// Moves it on, by a call to MPI. Returns how it has ended, once it has.
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
            // SAFETY: whoever starts it keeps the memory until it has ended, or for ever.
            self.request = Some(unsafe { communicator.collective(&self.what) }?);
            UNDER_WAY.fetch_add(1, Ordering::SeqCst);
            self.group.begun.store(self.turn + 1, Ordering::Relaxed);
        }
        let Some(request) = &mut self.request else { return Ok(None) };
        Ok(request.is_complete()?.then_some(()))
    }

    /// How it has ended, if it has, without a call to MPI.
    pub(crate) fn ended(&self) -> Option<Checked<()>> {
        self.ended.clone()
    }

    /// It is moved on no more.
    pub(crate) fn end(&mut self, why: &str) {
        self.ended.get_or_insert_with(|| Err(why.to_owned()));
    }

    /// It is not waited for: nothing more may begin in its group, and its communicator is not given back.
    pub(crate) fn abandon(&self) {
        *lock(&self.group.state) = State::Over("a collective of the group was given up".to_owned());
    }
}

//! The end of a call whose parts several lanes do.
//!
//! The first part is what the caller has: it is over when this is, which is an external operation of its plan. The others begin with the call; where its
//! tensors have to be brought to where they can be touched, with that operation, which comes after. Owns their beginning, the count of those that have
//! not ended, and the first of their errors. That a group which fails on one lane fails on all is the drivers' matter, so no part goes on for long
//! when another one has failed. Read [`Join`] first.

use std::fmt;
use std::sync::{Arc, Weak};

use accl_types::{Error, Moment, Result};

use accl_executor::call::{CallDesc, CallObserver, Callback, External, ExternalTask};
use accl_executor::group::{Caller, Launched, Prepared};

use crate::driver::Driver;
use crate::sync::Mutex;

/// What the first part of a call waits for.
pub(crate) struct Join {
    state: Mutex<State>,
    me: Weak<Join>,
}

struct State {
    /// Parts that have not ended.
    left: u32,
    /// Why the first of those failed that have.
    error: Option<Error>,
    /// From when the first part has come so far until all others have ended.
    task: Option<ExternalTask>,
    /// The others, until they begin.
    parts: Option<Parts>,
}

/// The parts of a call besides the first, ready to begin.
pub(crate) struct Parts {
    pub(crate) caller: Arc<Caller>,
    /// A lane for each, and perhaps more.
    pub(crate) lanes: Vec<Arc<Driver>>,
    pub(crate) parts: Vec<(CallDesc, Prepared)>,
    /// The number of the call, and when it was made.
    pub(crate) seq: u64,
    pub(crate) now: Moment,
    /// Where the memory of the call is not ready when it is made: a completion thread of the first lane that begins them once it is.
    pub(crate) starter: Option<Announced>,
}

/// A job that a completion thread has been promised, until it is posted or will not be.
pub(crate) struct Announced(Option<Arc<Driver>>);

impl Announced {
    /// Of this lane.
    ///
    /// # Errors
    /// `Exhausted` when the system has no thread for it; `Aborted` when the engine has ended.
    pub(crate) fn on(driver: &Arc<Driver>) -> Result<Self> {
        driver.completions().expect()?;
        Ok(Self(Some(driver.clone())))
    }

    fn post(mut self, job: Box<dyn FnOnce() + Send>) {
        if let Some(driver) = self.0.take() {
            driver.completions().post(job);
        }
    }
}

impl Drop for Announced {
    fn drop(&mut self) {
        if let Some(driver) = &self.0 {
            driver.completions().withdraw();
        }
    }
}

/// One of the other parts, as its lane tells of its end.
struct OtherPart(Arc<Join>);

impl Join {
    /// Of so many parts besides the first.
    pub(crate) fn new(others: u32) -> Arc<Self> {
        let state = State { left: others, error: None, task: None, parts: None };
        Arc::new_cyclic(|me| Self { state: Mutex::new(state), me: me.clone() })
    }

    /// The call has been made. The parts begin now, or as soon as its memory is ready for them.
    pub(crate) fn begin_parts(self: &Arc<Self>, parts: Parts) {
        let mut state = self.state.lock();
        if parts.starter.is_some() && state.task.is_none() {
            state.parts = Some(parts);
            return;
        }
        drop(state);
        self.start(parts);
    }

    /// Has the lanes do their parts. No lock is held.
    fn start(self: &Arc<Self>, parts: Parts) {
        let Parts { caller, lanes, parts, seq, now, starter: _starter } = parts;
        for (lane, (desc, prepared)) in lanes.iter().zip(parts) {
            let (desc, observer) = (CallDesc { seq: Some(seq), ..desc }, Arc::new(OtherPart(self.clone())));
            let started = lane.with_core(|core| caller.start(core, &desc, prepared, None, observer, now));
            match started {
                Ok(Launched { call, wakes_driver }) => {
                    if wakes_driver {
                        lane.kick();
                    }
                    lane.submitted(&call);
                }
                // The group has failed there, and fails here as well.
                Err(error) => self.end(Some(&error)),
            }
        }
    }

    /// One of them has ended, or has not begun and will not.
    fn end(&self, error: Option<&Error>) {
        let mut state = self.state.lock();
        state.left -= 1;
        if let Some(error) = error {
            state.error.get_or_insert_with(|| error.clone());
        }
        state.finish();
    }
}

impl State {
    /// Ends the task once all parts have.
    fn finish(&mut self) {
        let Some(task) = self.task.take_if(|_| self.left == 0) else { return };
        match self.error.take() {
            None => task.done(),
            Some(error) => task.fail_with(error),
        }
    }
}

impl External for Join {
    fn name(&self) -> &str {
        "lanes"
    }

    fn begin(&self, task: ExternalTask) {
        let mut state = self.state.lock();
        state.task = Some(task);
        // The others may have been faster.
        state.finish();
        // Not here, where a lock is held.
        if let Some((mut parts, me)) = state.parts.take().zip(self.me.upgrade())
            && let Some(starter) = parts.starter.take()
        {
            starter.post(Box::new(move || me.start(parts)));
        }
    }
}

impl CallObserver for OtherPart {
    fn ended(&self, error: Option<&Error>) -> Option<Callback> {
        self.0.end(error);
        None
    }
}

impl fmt::Debug for Join {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Join").finish_non_exhaustive()
    }
}

//! Runs the election in every interleaving, over a model: links are a list of frames, a pass completes the calls whose
//! frames have arrived, and the poller is a flag. Time does not pass, so a lost wake-up is a deadlock, which loom
//! reports.
//! `RUSTFLAGS="--cfg accl_loom" cargo test -p accl-engine --release --lib loom_`

use std::sync::{Arc, Weak};

use accl_types::{Collective, Moment, Rank};
use loom::thread::{self, JoinHandle};

use super::{Election, Host, Stint, Waiter};
use crate::in_flight::{InFlight, Notifier};
use crate::sync::{Condvar, Mutex};
use accl_executor::call::{CallInfo, CallState, Waited};

/// Maximum number of times that loom switches threads although none must wait.
const PREEMPTIONS: usize = 3;

type Call = Arc<InFlight>;

#[derive(Default)]
struct Core {
    in_flight: Vec<Call>,
    /// Calls whose frames are on their links.
    arrived: Vec<Call>,
    is_parked: bool,
}

impl Core {
    /// Completes the calls whose frames have arrived. Returns whether there were any.
    fn pass(&mut self) -> bool {
        let arrived = std::mem::take(&mut self.arrived);
        let has_moved = !arrived.is_empty();
        for call in arrived {
            self.in_flight.retain(|other| !Arc::ptr_eq(other, &call));
            drop(call.finish(Moment::from_nanos(1), None));
        }
        has_moved
    }
}

struct Model {
    core: Mutex<Core>,
    is_rung: Mutex<bool>,
    rings: Condvar,
    election: Election,
    background: Mutex<Option<JoinHandle<()>>>,
    me: Weak<Model>,
}

impl Host for Model {
    fn park(&self, call: Option<&InFlight>, _until: Option<Moment>) {
        {
            let mut core = self.core.lock();
            if core.pass() || call.is_some_and(|call| call.is_done()) || (call.is_none() && core.in_flight.is_empty()) {
                return;
            }
            core.is_parked = true;
        }
        {
            let mut is_rung = self.is_rung.lock();
            while !*is_rung {
                self.rings.wait(&mut is_rung);
            }
            *is_rung = false;
        }
        let mut core = self.core.lock();
        core.is_parked = false;
        core.pass();
    }

    fn has_work(&self) -> bool {
        !self.core.lock().in_flight.is_empty()
    }

    fn wake(&self) {
        *self.is_rung.lock() = true;
        self.rings.notify_all();
    }

    fn start_background(&self) -> bool {
        let model = self.me.upgrade().unwrap();
        *self.background.lock() =
            Some(thread::spawn(move || while model.election.background_turn(&*model) == Stint::Over {}));
        true
    }

    fn now(&self) -> Moment {
        Moment::from_nanos(0)
    }
}

impl Model {
    /// Creates a model with `calls` calls in flight. The first `blocking` of them have a waiting thread; the callers of
    /// the others have moved on.
    fn new(calls: usize, blocking: usize) -> (Arc<Self>, Vec<Call>) {
        let info = |seq: usize| CallInfo {
            group_id: 1,
            group: "g".into(),
            rank: Rank(0),
            collective: Collective::Barrier,
            seq: seq as u64,
            is_async: seq >= blocking,
            is_cut: false,
            is_timed: false,
            phases: None,
            waits: Arc::default(),
        };
        let call = |seq: usize| {
            let notifier: Arc<Notifier> = Arc::default();
            let state = CallState::new(info(seq), notifier.clone(), Moment::from_nanos(0));
            Arc::new(InFlight::new(state, notifier))
        };
        let calls: Vec<Call> = (0..calls).map(call).collect();
        let in_flight = calls.clone();
        let model = Arc::new_cyclic(|me| Self {
            core: Mutex::new(Core { in_flight, ..Core::default() }),
            is_rung: Mutex::default(),
            rings: Condvar::new(),
            election: Election::default(),
            background: Mutex::default(),
            me: me.clone(),
        });
        (model, calls)
    }

    /// Waits without spinning first.
    fn wait(&self, me: u64, call: &Call, turn: impl FnMut() -> Result<Option<Moment>, Waited>) -> Waited {
        let waited = self.election.wait(Waiter(me), call, self, turn);
        self.election.leave(Waiter(me), self);
        waited
    }

    /// Acts as a peer that sends the frame that a call waits for. The peer wakes this process if the process has
    /// announced that it sleeps, as in the protocol of the shared-memory rings.
    fn deliver(&self, call: &Call) {
        let is_parked = {
            let mut core = self.core.lock();
            core.arrived.push(call.clone());
            core.is_parked
        };
        if is_parked {
            self.wake();
        }
    }

    /// Acts as a thread that issues its own call and finds the frame of another call on a link.
    fn find(&self, call: &Call) {
        {
            let mut core = self.core.lock();
            core.arrived.push(call.clone());
            core.pass();
        }
        self.election.wake_driver_if(false, self);
    }

    fn end(&self) {
        self.election.stop_background(self);
        let background = self.background.lock().take();
        if let Some(thread) = background {
            thread.join().unwrap();
        }
    }
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(builder.preemption_bound.map_or(PREEMPTIONS, |asked| asked.min(PREEMPTIONS)));
    builder.check(model);
}

/// Runs two waiters, and a third thread that runs `does` with their calls.
fn two_wait(does: fn(&Model, &[Call])) {
    check(move || {
        let (model, calls) = Model::new(2, 2);
        let waiter = {
            let (model, call) = (model.clone(), calls[1].clone());
            thread::spawn(move || assert_eq!(model.wait(2, &call, || Ok(None)), Waited::Done))
        };
        let other = {
            let (model, calls) = (model.clone(), calls.clone());
            thread::spawn(move || does(&model, &calls))
        };
        assert_eq!(model.wait(1, &calls[0], || Ok(None)), Waited::Done);
        waiter.join().unwrap();
        other.join().unwrap();
        model.end();
    });
}

#[test]
fn loom_who_drives_hands_over_when_its_call_is_done() {
    two_wait(|model, calls| calls.iter().for_each(|call| model.deliver(call)));
}

#[test]
fn loom_a_driver_learns_that_another_thread_has_ended_its_call() {
    two_wait(|model, calls| calls.iter().for_each(|call| model.find(call)));
}

#[test]
fn loom_a_call_that_ends_while_its_waiter_becomes_the_driver_ends_the_wait() {
    check(|| {
        let (model, calls) = Model::new(1, 1);
        let other = {
            let (model, call) = (model.clone(), calls[0].clone());
            thread::spawn(move || model.find(&call))
        };
        assert_eq!(model.wait(1, &calls[0], || Ok(None)), Waited::Done);
        other.join().unwrap();
        model.end();
    });
}

#[test]
fn loom_a_driver_that_is_interrupted_hands_over() {
    check(|| {
        let (model, calls) = Model::new(2, 2);
        let waiter = {
            let (model, call) = (model.clone(), calls[1].clone());
            thread::spawn(move || assert_eq!(model.wait(2, &call, || Ok(None)), Waited::Done))
        };
        let peer = {
            let (model, calls) = (model.clone(), calls.clone());
            thread::spawn(move || calls.iter().rev().for_each(|call| model.deliver(call)))
        };
        let mut turns = 0;
        let ended = model.wait(1, &calls[0], || {
            turns += 1;
            if turns > 1 { Err(Waited::Interrupted) } else { Ok(None) }
        });
        assert!(matches!(ended, Waited::Interrupted | Waited::Done));
        waiter.join().unwrap();
        peer.join().unwrap();
        model.end();
    });
}

#[test]
fn loom_who_stands_aside_for_its_interrupt_hook_is_not_relied_upon() {
    check(|| {
        let (model, calls) = Model::new(2, 2);
        let over = Arc::new(loom::sync::Notify::new());
        let waiter = {
            let (model, call, over) = (model.clone(), calls[1].clone(), over.clone());
            thread::spawn(move || {
                assert_eq!(model.wait(2, &call, || Ok(None)), Waited::Done);
                over.notify();
            })
        };
        let peer = {
            let (model, calls) = (model.clone(), calls.clone());
            thread::spawn(move || {
                // A sleep may end without a reason.
                model.wake();
                calls.iter().rev().for_each(|call| model.deliver(call));
            })
        };
        let mut turns = 0;
        let turn = || {
            turns += 1;
            model.election.stand_aside(Waiter(1), &*model);
            // After its first sleep the hook takes as long as the other waiter's call.
            if turns == 2 {
                over.wait();
            }
            Ok(None)
        };
        assert_eq!(model.wait(1, &calls[0], turn), Waited::Done);
        waiter.join().unwrap();
        peer.join().unwrap();
        model.end();
    });
}

#[test]
fn loom_the_background_thread_takes_over_calls_without_a_waiter() {
    check(|| {
        let (model, calls) = Model::new(2, 1);
        let peer = {
            let (model, calls) = (model.clone(), calls.clone());
            thread::spawn(move || calls.iter().for_each(|call| model.deliver(call)))
        };
        // Does what follows a submission.
        model.election.ensure_driver(&*model);
        assert_eq!(model.wait(1, &calls[0], || Ok(None)), Waited::Done);
        // The caller of this call does something else, and is notified when the call completes.
        while !calls[1].is_done() {
            calls[1].sleep(None);
        }
        peer.join().unwrap();
        model.end();
    });
}

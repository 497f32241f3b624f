//! The thread that makes links: those that calls and groups of this process want, and those that peers want.
//!
//! Owns the endpoint, the way of a link from there to the peers under the driver's lock, and what is said to peers besides links: notes
//! that a group has failed, for ranks that look at no link, and questions what has become of a peer that cannot be reached, which `inquests` keeps. It
//! sleeps until somebody connects or a link is wanted, and answers peers also while nobody here makes a call. Read [`Connector`]
//! first, then [`Work::turn`].

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use accl_transport::{Endpoint, Host, Unreachable, Waker, Wanted};
use accl_types::{Error, Result};
use accl_wire::{EndpointInfo, Stance};

use super::inquests::{Found, Inquests, Question};
use crate::driver::Driver;
use crate::signals;
use crate::sync::{Condvar, Mutex};
use crate::time;
use accl_executor::group::Fate;
use accl_executor::peers::Note;

/// A note goes out after so long: a rank that is awake hears of a failure on its links, and says so on them.
pub(crate) const NOTE_DELAY: Duration = Duration::from_millis(100);

/// The identity of a peer process.
type Uuid = [u8; 16];

/// The hand of this process on the thread.
pub(crate) struct Connector {
    /// Until the thread has it.
    endpoint: Mutex<Option<Endpoint>>,
    driver: Weak<Driver>,
    shared: Arc<Shared>,
}

/// What the thread and the others know.
struct Shared {
    waker: Arc<Waker>,
    /// Set before a wake.
    is_stopping: AtomicBool,
    state: Mutex<State>,
    /// Something has changed about links.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    requests: Vec<Request>,
    is_running: bool,
    /// Why there is no thread any more, after a panic.
    failure: Option<Error>,
}

enum Request {
    /// A group is made that needs links to these.
    Want(Vec<EndpointInfo>),
    /// It needs them no more, whether it has them or not.
    Forget(Vec<Uuid>),
    /// Peers have been introduced that may have links already.
    HandOver,
}

impl Connector {
    /// Without its thread.
    ///
    /// # Errors
    /// `Exhausted` when there is no descriptor left.
    pub(crate) fn new(endpoint: Endpoint, driver: &Arc<Driver>) -> Result<Self> {
        let waker = Arc::new(Waker::new()?);
        driver.wanted().set_waker(waker.clone());
        let shared = Arc::new(Shared {
            waker,
            is_stopping: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        Ok(Self { endpoint: Mutex::new(Some(endpoint)), driver: Arc::downgrade(driver), shared })
    }

    /// Starts the thread, once.
    ///
    /// # Errors
    /// `Exhausted` when the system has no thread for it, `Internal` when it has ended by a panic.
    pub(crate) fn start(&self) -> Result<()> {
        let mut place = self.endpoint.lock();
        if place.is_none() {
            return self.shared.state.lock().failure.clone().map_or(Ok(()), Err);
        }
        // What moves into a thread that the system refuses is lost: it is taken there.
        let handed_over = Arc::new(Mutex::new(place.take()));
        let (endpoint, driver, shared) = (handed_over.clone(), self.driver.clone(), self.shared.clone());
        shared.state.lock().is_running = true;
        let spawned = std::thread::Builder::new().name("accl-connect".into()).spawn(move || {
            signals::block_all();
            let endpoint = endpoint.lock().take();
            if let Some(endpoint) = endpoint {
                Work::new(endpoint, driver, shared.clone()).run();
            }
            shared.state.lock().is_running = false;
            shared.changed.notify_all();
        });
        spawned.map(drop).map_err(|why| {
            *place = handed_over.lock().take();
            self.shared.state.lock().is_running = false;
            Error::exhausted(format!("no thread that makes links: {why}; raise the limit with `ulimit -u`"))
        })
    }

    fn ask(&self, request: Request) {
        self.shared.state.lock().requests.push(request);
        self.shared.waker.wake();
    }

    /// Begins to make links that this and the other side want.
    pub(crate) fn want(&self, peers: Vec<EndpointInfo>) {
        self.ask(Request::Want(peers));
    }

    /// Whoever has called [`Connector::want`] waits for these no more.
    pub(crate) fn forget(&self, peers: Vec<Uuid>) {
        self.ask(Request::Forget(peers));
    }

    /// Peers have been introduced, who may have connected before.
    pub(crate) fn hand_over(&self) {
        self.ask(Request::HandOver);
    }

    /// Waits until something has changed about links, at most so long.
    pub(crate) fn await_change(&self, at_most: Duration, is_enough: impl Fn() -> bool) {
        let mut state = self.shared.state.lock();
        // What changed before this has the lock is seen here; what changes later notifies.
        if !is_enough() {
            let _ = self.shared.changed.wait_for(&mut state, at_most);
        }
    }

    /// Ends the thread, and the listening with it; waits at most so long.
    pub(crate) fn stop(&self, at_most: Duration) {
        let until = Instant::now() + at_most;
        self.endpoint.lock().take();
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.waker.wake();
        let mut state = self.shared.state.lock();
        while state.is_running && Instant::now() < until {
            let _ = self.shared.changed.wait_for(&mut state, until.saturating_duration_since(Instant::now()));
        }
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        // In a forked child there is no thread, the descriptor may be another file's, and another thread may have had the lock.
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.waker.wake();
    }
}

/// What the thread has.
struct Work {
    endpoint: Endpoint,
    driver: Weak<Driver>,
    shared: Arc<Shared>,
    /// Peers that groups wait for, and how many do.
    awaited: HashMap<Uuid, (EndpointInfo, usize)>,
    /// Notes that are sent unless their receivers speak first, in the order of when.
    notes: VecDeque<(Instant, Note)>,
    /// Peers that cannot be reached, of which others are asked.
    inquests: Inquests,
    /// Of notes and questions.
    numbers: u64,
    /// What has been said of peers that are hard to reach.
    troubles: HashMap<Uuid, String>,
}

impl Work {
    fn new(endpoint: Endpoint, driver: Weak<Driver>, shared: Arc<Shared>) -> Self {
        Self {
            endpoint,
            driver,
            shared,
            awaited: HashMap::new(),
            notes: VecDeque::new(),
            inquests: Inquests::default(),
            numbers: 0,
            troubles: HashMap::new(),
        }
    }

    fn run(mut self) {
        while let Some(driver) = self.driver.upgrade() {
            self.shared.waker.clear();
            let requests = std::mem::take(&mut self.shared.state.lock().requests);
            if self.shared.is_stopping.load(Ordering::Acquire) {
                return;
            }
            let turned = catch_unwind(AssertUnwindSafe(|| self.turn(&driver, requests)));
            if let Err(panic) = turned {
                // Nobody else could make links, and calls would wait for them until their deadline.
                let error = driver.with_core(|core| core.fail_all(&*panic));
                self.shared.state.lock().failure = Some(error);
                return;
            }
            drop(driver);
            self.endpoint.sleep(&self.shared.waker, self.next_turn());
        }
    }

    /// How long there is nothing to do but what comes.
    fn next_turn(&self) -> Option<Duration> {
        let note = self.notes.front().map(|(due, _)| due.saturating_duration_since(Instant::now()));
        let question = self.inquests.next().map(|at| at.since(time::now()));
        note.into_iter().chain(question).min()
    }

    /// Begins what is wanted, looks at what is under way, and gives links that were made to their peers.
    fn turn(&mut self, driver: &Arc<Driver>, requests: Vec<Request>) {
        let now = Instant::now();
        let (wanted, notes) = driver.wanted().take();
        // Links come to their peers on this thread alone: those without stay so for now.
        for info in driver.still_unlinked(wanted) {
            self.endpoint.want(&info, Wanted::Here, now);
        }
        self.notes.extend(notes.into_iter().map(|note| (now + NOTE_DELAY, note)));
        let mut has_changed = !requests.is_empty();
        for request in requests {
            match request {
                Request::Want(infos) => {
                    for info in &infos {
                        self.awaited.entry(info.uuid).or_insert_with(|| (info.clone(), 0)).1 += 1;
                    }
                    for info in driver.still_unlinked(infos) {
                        self.endpoint.want(&info, Wanted::OnBothSides, now);
                    }
                }
                Request::Forget(peers) => peers.iter().for_each(|peer| self.forget(peer)),
                Request::HandOver => {}
            }
        }
        self.send_notes(driver, now);
        self.endpoint.turn(now, &mut Answers(driver));
        let reached: Vec<Uuid> = self.endpoint.reached().collect();
        for uuid in reached {
            let endpoint = &mut self.endpoint;
            if driver.attach(&uuid, || endpoint.take_link(&uuid)) {
                has_changed = true;
            } else if driver.has_gone(&uuid) {
                // It was given up while the link was made, and is to learn of that.
                self.endpoint.drop_link(&uuid);
            }
        }
        for Unreachable { peer, error, has_ended } in self.endpoint.take_unreachable() {
            if has_ended {
                self.inquests.begin(peer.uuid, error, time::now());
            } else {
                driver.lose(&peer.uuid, error);
                has_changed = true;
            }
        }
        has_changed |= self.inquire(driver, now);
        // Those that a group being made waits for are spoken of at its deadline, which may come before there has been time for a link.
        let awaited = self.awaited.iter().map(|(uuid, (info, _))| (*uuid, self.endpoint.why_not(info)));
        let troubles: HashMap<Uuid, String> = self.endpoint.troubles(now).chain(awaited).collect();
        if troubles != self.troubles {
            driver.with_core(|core| {
                for (uuid, why) in troubles.iter().filter(|(uuid, why)| self.troubles.get(*uuid) != Some(*why)) {
                    core.net.set_trouble(uuid, why);
                }
            });
            self.troubles = troubles;
        }
        for warning in self.endpoint.take_warnings() {
            tracing::warn!("{warning}");
        }
        if has_changed || !self.awaited.is_empty() {
            // Under the lock: whoever has just found that links are missing waits by then.
            let _state = self.shared.state.lock();
            self.shared.changed.notify_all();
        }
    }

    /// Sends the notes that are due, to those who have not spoken.
    fn send_notes(&mut self, driver: &Driver, now: Instant) {
        while self.notes.front().is_some_and(|(due, _)| *due <= now) {
            let Some((_, note)) = self.notes.pop_front() else { return };
            if driver.with_core(|core| core.is_note_needed(&note.to.uuid, note.group)) {
                self.numbers += 1;
                self.endpoint.send_note(&note.to, &note.bytes, self.numbers, now);
            }
        }
    }

    /// Asks others what has become of peers that cannot be reached, and heeds their answers. Returns whether it is known of any.
    fn inquire(&mut self, driver: &Arc<Driver>, now: Instant) -> bool {
        let moment = time::now();
        for (number, reply) in self.endpoint.take_replies() {
            self.inquests.answer(number, reply.ok().map(|answer| Fate::of(&answer)), moment);
        }
        let numbers = &mut self.numbers;
        let number = || {
            *numbers += 1;
            *numbers
        };
        let questions = self.inquests.ask(moment, |uuid| driver.with_core(|core| core.witnesses(uuid)), number);
        for Question { number, to, bytes } in questions {
            self.endpoint.send_note(&to, &bytes, number, now);
        }
        let found = self.inquests.take_found();
        let has_changed = !found.is_empty();
        for (uuid, found) in found {
            match found {
                Found::Left { is_assumed } => driver.depart(&uuid, is_assumed),
                Found::Lost(error) => driver.lose(&uuid, error),
            }
        }
        has_changed
    }

    fn forget(&mut self, peer: &Uuid) {
        if let Some((_, count)) = self.awaited.get_mut(peer) {
            *count -= 1;
            if *count == 0 {
                self.awaited.remove(peer);
                self.endpoint.lose_patience(peer);
            }
        }
    }
}

/// What this process says to those that connect.
struct Answers<'a>(&'a Arc<Driver>);

impl Host for Answers<'_> {
    fn stance_to(&mut self, peer: &Uuid) -> Stance {
        self.0.stance_to(peer)
    }

    fn on_note(&mut self, from: &Uuid, note: &[u8]) -> String {
        self.0.on_note(from, note).name().to_owned()
    }
}

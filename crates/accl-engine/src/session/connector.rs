//! The thread that makes links: those that calls and groups of this process want, and those that peers want.
//!
//! Owns the endpoint, and the way of a link from there to the peers under the driver's lock. It sleeps until somebody connects or
//! a link is wanted, and answers peers also while nobody here makes a call. Read [`Connector`] first, then [`Work::turn`].

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use accl_transport::{Card, Endpoint, Waker, Wanted};
use accl_types::{Error, Result};

use crate::driver::Driver;
use crate::signals;
use crate::sync::{Condvar, Mutex};

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
    state: Mutex<State>,
    /// Something has changed about links.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    requests: Vec<Request>,
    /// Why peers that groups wait for have no link yet.
    why_not: HashMap<Uuid, String>,
    is_running: bool,
    is_stopping: bool,
}

enum Request {
    /// A group is made that needs links to these.
    Want(Vec<Card>),
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
        let shared = Arc::new(Shared { waker, state: Mutex::default(), changed: Condvar::new() });
        Ok(Self { endpoint: Mutex::new(Some(endpoint)), driver: Arc::downgrade(driver), shared })
    }

    /// Starts the thread, once.
    ///
    /// # Errors
    /// `Exhausted` when the system has no thread for it.
    pub(crate) fn start(&self) -> Result<()> {
        let mut place = self.endpoint.lock();
        if place.is_none() {
            return Ok(());
        }
        // What moves into a thread that the system refuses is lost: it is taken there.
        let handed_over = Arc::new(Mutex::new(place.take()));
        let (endpoint, driver, shared) = (handed_over.clone(), self.driver.clone(), self.shared.clone());
        shared.state.lock().is_running = true;
        let spawned = std::thread::Builder::new().name("accl-connect".into()).spawn(move || {
            signals::block_all();
            let endpoint = endpoint.lock().take();
            if let Some(endpoint) = endpoint {
                Work { endpoint, driver, shared: shared.clone(), awaited: HashMap::new() }.run();
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
    pub(crate) fn want(&self, peers: Vec<Card>) {
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

    /// Why a peer that a group waits for has no link yet, as a clause.
    pub(crate) fn why_not(&self, peer: &Uuid) -> String {
        let why = self.shared.state.lock().why_not.get(peer).cloned();
        why.unwrap_or_else(|| "no connection from it yet".to_owned())
    }

    /// Ends the thread, and the listening with it; waits at most so long.
    pub(crate) fn stop(&self, at_most: Duration) {
        let until = Instant::now() + at_most;
        self.endpoint.lock().take();
        let mut state = self.shared.state.lock();
        state.is_stopping = true;
        self.shared.waker.wake();
        while state.is_running && Instant::now() < until {
            let _ = self.shared.changed.wait_for(&mut state, until.saturating_duration_since(Instant::now()));
        }
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        // In a forked child there is no thread, and the descriptor may be another file's.
        self.shared.state.lock().is_stopping = true;
        self.shared.waker.wake();
    }
}

/// What the thread has.
struct Work {
    endpoint: Endpoint,
    driver: Weak<Driver>,
    shared: Arc<Shared>,
    /// Peers that groups wait for, and how many do.
    awaited: HashMap<Uuid, (Card, usize)>,
}

impl Work {
    fn run(mut self) {
        while let Some(driver) = self.driver.upgrade() {
            self.shared.waker.clear();
            let (requests, is_stopping) = {
                let mut state = self.shared.state.lock();
                (std::mem::take(&mut state.requests), state.is_stopping)
            };
            if is_stopping {
                return;
            }
            let turned = catch_unwind(AssertUnwindSafe(|| self.turn(&driver, requests)));
            if let Err(panic) = turned {
                // Nobody else could make links, and calls would wait for them until their deadline.
                driver.with_core(|core| core.fail_all(&*panic));
                return;
            }
            drop(driver);
            self.endpoint.sleep(&self.shared.waker, None);
        }
    }

    /// Begins what is wanted, looks at what is under way, and gives links that were made to their peers.
    fn turn(&mut self, driver: &Arc<Driver>, requests: Vec<Request>) {
        let now = Instant::now();
        for card in driver.wanted().take() {
            self.endpoint.want(&card, Wanted::Here, now);
        }
        let mut has_changed = !requests.is_empty();
        for request in requests {
            match request {
                Request::Want(cards) => {
                    for card in cards {
                        self.endpoint.want(&card, Wanted::OnBothSides, now);
                        self.awaited.entry(card.uuid).or_insert_with(|| (card, 0)).1 += 1;
                    }
                }
                Request::Forget(peers) => peers.iter().for_each(|peer| self.forget(peer)),
                Request::HandOver => {}
            }
        }
        self.endpoint.turn(now, &mut |uuid| driver.has_live_link(uuid));
        let reached: Vec<Uuid> = self.endpoint.reached().collect();
        for uuid in reached {
            let endpoint = &mut self.endpoint;
            has_changed |= driver.attach(&uuid, || endpoint.take_link(&uuid));
        }
        for (card, error) in self.endpoint.take_unreachable() {
            driver.lose(&card.uuid, error);
            has_changed = true;
        }
        for warning in self.endpoint.take_warnings() {
            tracing::warn!("{warning}");
        }
        if has_changed || !self.awaited.is_empty() {
            let why_not = self.awaited.iter().map(|(uuid, (card, _))| (*uuid, self.endpoint.why_not(card))).collect();
            self.shared.state.lock().why_not = why_not;
            self.shared.changed.notify_all();
        }
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

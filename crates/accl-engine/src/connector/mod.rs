//! The thread that makes links: for calls and groups of this process, and for peers that connect.
//!
//! Owns the endpoint, and hands each link over to its peer under the lane's driver lock. Also sends messages to peers
//! outside the links. These are notes that a group has failed, for ranks that do not poll their links, and questions
//! about unreachable peers (see `peer_probe`). The thread sleeps until a peer connects or a link is wanted. It answers
//! peers even while no thread here issues a call. Read [`Connector`] first, then [`Work::turn`].

pub(crate) mod peer_probe;

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use accl_transport::{Endpoint, Host, Unreachable, Waker, Wanted};
use accl_types::{Error, Result};
use accl_wire::{EndpointInfo, Stance};

use self::peer_probe::{Found, PeerProbe, Question};
use crate::driver::Driver;
use crate::signals;
use crate::sync::{Condvar, Mutex};
use crate::time;
use accl_executor::group::PeerFate;
use accl_executor::peers::Note;

/// Delay before a note is sent. A rank that is awake learns of a failure on its links, and confirms it there.
pub const NOTE_DELAY: Duration = Duration::from_millis(100);

/// Identity of a peer process.
type Uuid = [u8; 16];

/// Handle of the connector thread.
pub(crate) struct Connector {
    /// The endpoint, until the thread takes it.
    endpoint: Mutex<Option<Endpoint>>,
    /// The driver of each lane.
    drivers: Vec<Weak<Driver>>,
    shared: Arc<ConnectorShared>,
}

/// State shared by the thread and its handle.
struct ConnectorShared {
    waker: Arc<Waker>,
    /// Set before the wake-up.
    is_stopping: AtomicBool,
    state: Mutex<ConnectorState>,
    /// Notified when the state of a link may have changed.
    changed: Condvar,
}

#[derive(Default)]
struct ConnectorState {
    requests: Vec<LinkRequest>,
    is_running: bool,
    /// Why the thread has ended, after a panic.
    failure: Option<Error>,
}

enum LinkRequest {
    /// A group is being created that needs links to these peers on a lane.
    Want(u32, Vec<EndpointInfo>),
    /// The group no longer waits for these peers, whether it has links to them or not.
    Forget(u32, Vec<Uuid>),
    /// Peers have been introduced that may have links already.
    HandOver,
}

impl Connector {
    /// Creates the connector without its thread. The endpoint has as many lanes as there are drivers.
    ///
    /// # Errors
    /// `Exhausted` when there is no descriptor left.
    pub(crate) fn new<'a>(endpoint: Endpoint, drivers: impl Iterator<Item = &'a Arc<Driver>>) -> Result<Self> {
        let waker = Arc::new(Waker::new()?);
        let drivers = drivers.inspect(|driver| driver.wanted().set_waker(waker.clone()));
        let drivers = drivers.map(Arc::downgrade).collect();
        let shared = Arc::new(ConnectorShared {
            waker,
            is_stopping: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        Ok(Self { endpoint: Mutex::new(Some(endpoint)), drivers, shared })
    }

    /// Starts the thread. Further calls have no effect.
    ///
    /// # Errors
    /// `Exhausted` when the system has no thread for it; `Internal` when it has ended by a panic.
    pub(crate) fn start(&self) -> Result<()> {
        let mut place = self.endpoint.lock();
        if place.is_none() {
            return self.shared.state.lock().failure.clone().map_or(Ok(()), Err);
        }
        // The system may refuse the thread, and values moved into it would be lost. So the thread takes the endpoint
        // from here.
        let handed_over = Arc::new(Mutex::new(place.take()));
        let (endpoint, drivers, shared) = (handed_over.clone(), self.drivers.clone(), self.shared.clone());
        shared.state.lock().is_running = true;
        let spawned = std::thread::Builder::new().name("accl-connect".into()).spawn(move || {
            signals::block_all();
            let endpoint = endpoint.lock().take();
            if let Some(endpoint) = endpoint {
                Work::new(endpoint, drivers, shared.clone()).run();
            }
            shared.state.lock().is_running = false;
            shared.changed.notify_all();
        });
        spawned.map(drop).map_err(|why| {
            *place = handed_over.lock().take();
            self.shared.state.lock().is_running = false;
            Error::exhausted(format!(
                "cannot start the thread that creates links: {why}; raise the process limit with `ulimit -u`"
            ))
        })
    }

    fn ask(&self, request: LinkRequest) {
        self.shared.state.lock().requests.push(request);
        self.shared.waker.wake();
    }

    /// Begins to make links that both this side and the peers want.
    pub(crate) fn want(&self, lane: u32, peers: Vec<EndpointInfo>) {
        self.ask(LinkRequest::Want(lane, peers));
    }

    /// Withdraws a [`Connector::want`]: its caller no longer waits for these peers.
    pub(crate) fn forget(&self, lane: u32, peers: Vec<Uuid>) {
        self.ask(LinkRequest::Forget(lane, peers));
    }

    /// Hands over links of peers that connected before they were introduced.
    pub(crate) fn hand_over(&self) {
        self.ask(LinkRequest::HandOver);
    }

    /// Waits until the state of a link may have changed, for `at_most` at the longest.
    pub(crate) fn await_change(&self, at_most: Duration, is_enough: impl Fn() -> bool) {
        let mut state = self.shared.state.lock();
        // Changes before this lock are seen here; later changes notify.
        if !is_enough() {
            let _ = self.shared.changed.wait_for(&mut state, at_most);
        }
    }

    /// Ends the thread and with it the listening; waits for `at_most` at the longest.
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
        // No lock here: in a forked child there is no thread, another thread may have held the lock, and the descriptor
        // may be another file's.
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.waker.wake();
    }
}

/// State of the thread.
struct Work {
    endpoint: Endpoint,
    lanes: Vec<Lane>,
    shared: Arc<ConnectorShared>,
    /// Last number given to a note or question.
    numbers: u64,
}

/// State of the peers of one lane, as the thread knows it.
struct Lane {
    number: u32,
    driver: Weak<Driver>,
    /// Peers that groups wait for, each with the number of those groups.
    awaited: HashMap<Uuid, (EndpointInfo, usize)>,
    /// Notes in the order of their due times. A note is not sent if its receiver reports the failure first.
    notes: VecDeque<(Instant, Note)>,
    /// Unreachable peers that other processes are asked about.
    peer_probe: PeerProbe,
    /// The last reports to the driver about peers that are hard to reach.
    troubles: HashMap<Uuid, String>,
}

impl Work {
    fn new(endpoint: Endpoint, drivers: Vec<Weak<Driver>>, shared: Arc<ConnectorShared>) -> Self {
        let lane = |(number, driver)| Lane {
            number,
            driver,
            awaited: HashMap::new(),
            notes: VecDeque::new(),
            peer_probe: PeerProbe::default(),
            troubles: HashMap::new(),
        };
        Self { endpoint, lanes: (0..).zip(drivers).map(lane).collect(), shared, numbers: 0 }
    }

    fn run(mut self) {
        let upgraded = |lanes: &[Lane]| lanes.iter().map(|lane| lane.driver.upgrade()).collect::<Option<Vec<_>>>();
        while let Some(drivers) = upgraded(&self.lanes) {
            self.shared.waker.clear();
            let requests = std::mem::take(&mut self.shared.state.lock().requests);
            if self.shared.is_stopping.load(Ordering::Acquire) {
                return;
            }
            let turned = catch_unwind(AssertUnwindSafe(|| self.turn(&drivers, requests)));
            if let Err(panic) = turned {
                // No other thread can make links, and calls would wait for links until their deadlines.
                let errors = drivers.iter().map(|driver| driver.with_core(|core| core.fail_all(&*panic)));
                self.shared.state.lock().failure = errors.last();
                return;
            }
            drop(drivers);
            self.endpoint.sleep(&self.shared.waker, self.next_turn());
        }
    }

    /// Returns how long the thread may sleep if no event comes; `None` means without limit.
    fn next_turn(&self) -> Option<Duration> {
        self.lanes.iter().filter_map(Lane::next_turn).min()
    }

    /// Begins to make wanted links, polls those in progress, and hands completed links over to their peers.
    fn turn(&mut self, drivers: &[Arc<Driver>], requests: Vec<LinkRequest>) {
        let now = Instant::now();
        let Self { endpoint, lanes, numbers, .. } = self;
        for (lane, driver) in lanes.iter_mut().zip(drivers) {
            lane.take_wanted(driver, endpoint, now);
        }
        let mut has_changed = !requests.is_empty();
        for request in requests {
            match request {
                LinkRequest::Want(lane, infos) => {
                    if let Some((lane, driver)) = lanes.get_mut(lane as usize).zip(drivers.get(lane as usize)) {
                        lane.want(infos, driver, endpoint, now);
                    }
                }
                LinkRequest::Forget(lane, peers) => {
                    if let Some(lane) = lanes.get_mut(lane as usize) {
                        peers.iter().for_each(|peer| lane.forget(peer, endpoint));
                    }
                }
                LinkRequest::HandOver => {}
            }
        }
        for (lane, driver) in lanes.iter_mut().zip(drivers) {
            lane.send_notes(driver, endpoint, numbers, now);
        }
        endpoint.turn(now, &mut Answers(drivers));
        let reached: Vec<(u32, Uuid)> = endpoint.reached().collect();
        for (lane, uuid) in reached {
            let Some(driver) = drivers.get(lane as usize) else { continue };
            if driver.attach(&uuid, || endpoint.take_link(&uuid)) {
                has_changed = true;
            } else if driver.has_gone(&uuid) {
                // The peer was given up while the link was made; dropping the link lets it know.
                endpoint.drop_link(&uuid);
            }
        }
        for Unreachable { lane, peer, error, has_ended } in endpoint.take_unreachable() {
            let Some((lane, driver)) = lanes.get_mut(lane as usize).zip(drivers.get(lane as usize)) else { continue };
            if has_ended {
                lane.peer_probe.begin(peer.uuid, error, time::now());
            } else {
                driver.lose(&peer.uuid, error);
                has_changed = true;
            }
        }
        // Numbers are unique across the questions and notes of all lanes, so each lane ignores numbers that it has not
        // sent.
        for (number, reply) in endpoint.take_replies() {
            let fate = reply.ok().map(|answer| PeerFate::of(&answer));
            lanes.iter_mut().for_each(|lane| lane.peer_probe.answer(number, fate, time::now()));
        }
        for (lane, driver) in lanes.iter_mut().zip(drivers) {
            has_changed |= lane.inquire(driver, endpoint, numbers, now);
            lane.report_troubles(driver, endpoint, now);
        }
        for warning in endpoint.take_warnings() {
            tracing::warn!("{warning}");
        }
        if has_changed || lanes.iter().any(|lane| !lane.awaited.is_empty()) {
            // Under the lock: a thread that has just found links missing is waiting by then.
            let _state = self.shared.state.lock();
            self.shared.changed.notify_all();
        }
    }
}

impl Lane {
    fn next_turn(&self) -> Option<Duration> {
        let note = self.notes.front().map(|(due, _)| due.saturating_duration_since(Instant::now()));
        let question = self.peer_probe.next().map(|at| at.since(time::now()));
        note.into_iter().chain(question).min()
    }

    /// Begins to make the links that calls want.
    fn take_wanted(&mut self, driver: &Driver, endpoint: &mut Endpoint, now: Instant) {
        let (wanted, notes) = driver.wanted().take();
        // Only this thread attaches links to peers, so peers without a link stay without one for now.
        for info in driver.still_unlinked(wanted) {
            endpoint.want(self.number, &info, Wanted::Here, now);
        }
        self.notes.extend(notes.into_iter().map(|note| (now + NOTE_DELAY, note)));
    }

    /// Begins to make the links that a group under creation wants.
    fn want(&mut self, infos: Vec<EndpointInfo>, driver: &Driver, endpoint: &mut Endpoint, now: Instant) {
        for info in &infos {
            self.awaited.entry(info.uuid).or_insert_with(|| (info.clone(), 0)).1 += 1;
        }
        for info in driver.still_unlinked(infos) {
            endpoint.want(self.number, &info, Wanted::OnBothSides, now);
        }
    }

    fn forget(&mut self, peer: &Uuid, endpoint: &mut Endpoint) {
        if let Some((_, count)) = self.awaited.get_mut(peer) {
            *count -= 1;
            if *count == 0 {
                self.awaited.remove(peer);
                endpoint.lose_patience(peer);
            }
        }
    }

    /// Sends the notes that are due to receivers that may not know of the failure yet.
    fn send_notes(&mut self, driver: &Driver, endpoint: &mut Endpoint, numbers: &mut u64, now: Instant) {
        while self.notes.front().is_some_and(|(due, _)| *due <= now) {
            let Some((_, note)) = self.notes.pop_front() else { return };
            if driver.with_core(|core| core.is_note_needed(&note.to.uuid, note.group)) {
                *numbers += 1;
                endpoint.send_note(self.number, &note.to, &note.bytes, *numbers, now);
            }
        }
    }

    /// Asks other processes what happened to unreachable peers. Returns whether there is a result for any of them.
    fn inquire(&mut self, driver: &Arc<Driver>, endpoint: &mut Endpoint, numbers: &mut u64, now: Instant) -> bool {
        let moment = time::now();
        let number = || {
            *numbers += 1;
            *numbers
        };
        let questions = self.peer_probe.ask(moment, |uuid| driver.with_core(|core| core.neighbours_of(uuid)), number);
        for Question { number, to, bytes } in questions {
            endpoint.send_note(self.number, &to, &bytes, number, now);
        }
        let found = self.peer_probe.take_found();
        let has_changed = !found.is_empty();
        for (uuid, found) in found {
            match found {
                Found::Left { is_assumed } => driver.depart(&uuid, is_assumed),
                Found::Lost(error) => driver.lose(&uuid, error),
            }
        }
        has_changed
    }

    /// Reports to the driver which peers are hard to reach, and why.
    fn report_troubles(&mut self, driver: &Driver, endpoint: &Endpoint, now: Instant) {
        // Peers that a group under creation waits for are reported even before there was time for a link: the group's
        // deadline may come first.
        let awaited = self.awaited.iter().map(|(uuid, (info, _))| (*uuid, endpoint.why_not(info)));
        let troubles: HashMap<Uuid, String> = endpoint.troubles(self.number, now).chain(awaited).collect();
        if troubles != self.troubles {
            driver.with_core(|core| {
                for (uuid, why) in troubles.iter().filter(|(uuid, why)| self.troubles.get(*uuid) != Some(*why)) {
                    core.net.set_trouble(uuid, why);
                }
            });
            self.troubles = troubles;
        }
    }
}

/// Answers of this process to peers that connect.
struct Answers<'a>(&'a [Arc<Driver>]);

impl Host for Answers<'_> {
    fn stance_to(&mut self, lane: u32, peer: &Uuid) -> Stance {
        self.0.get(lane as usize).map_or(Stance::GivenUp, |driver| driver.stance_to(peer))
    }

    fn on_note(&mut self, lane: u32, from: &Uuid, note: &[u8]) -> String {
        let fate = self.0.get(lane as usize).map_or(PeerFate::Unknown, |driver| driver.on_note(from, note));
        fate.name().to_owned()
    }
}

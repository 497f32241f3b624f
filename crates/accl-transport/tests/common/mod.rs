//! Endpoints, sleeping and time limits for the tests of links.
#![allow(dead_code)]

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use accl_testkit::every_transport;
use accl_transport::loopback::{self, Capacity};
use accl_transport::{ConnectError, Endpoint, Poller, Settings, Watched};
use accl_types::Error;
use accl_wire::{EndpointInfo, EventBitmap, HEAD_BYTES, Link, Slot};

/// Maximum time of a test; a lost wake-up exceeds it.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Runs `body` on a thread and fails if it does not end in time.
pub fn within_limit<R: Send + 'static>(body: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, wait) = channel();
    let thread = std::thread::spawn(move || {
        let result = body();
        let _ = done.send(());
        result
    });
    if let Err(RecvTimeoutError::Timeout) = wait.recv_timeout(LIMIT) {
        panic!("not done after {LIMIT:?}");
    }
    thread.join().unwrap_or_else(|why| std::panic::resume_unwind(why))
}

pub fn deadline() -> Instant {
    Instant::now() + LIMIT / 2
}

pub fn settings(transports: &[&str]) -> Settings {
    Settings { transports: transports.iter().map(|&t| t.to_owned()).collect(), ..Settings::default() }
}

/// Minimal process: a poller to sleep on and an endpoint to connect to.
pub struct Host {
    pub poller: Poller,
    pub endpoint: Endpoint,
}

impl Host {
    pub fn new(settings: Settings) -> Host {
        let poller = Poller::new().unwrap();
        let endpoint = Endpoint::new(settings, poller.waker()).unwrap();
        Host { poller, endpoint }
    }

    pub fn info(&self) -> EndpointInfo {
        self.endpoint.info().clone()
    }

    pub fn connect(&mut self, peers: &[EndpointInfo]) -> Result<Vec<Box<dyn Watched>>, ConnectError> {
        self.endpoint.connect(peers, deadline(), &mut || false)
    }
}

/// One end of a link and the poller on which it sleeps.
pub struct Node {
    pub poller: Arc<Poller>,
    pub link: Box<dyn Watched>,
    pub bitmap: Arc<dyn EventBitmap>,
    /// Slot on which the link's events are posted, if they are.
    pub slot: Option<Slot>,
    pub warnings: Vec<String>,
}

/// Connects two endpoints of this process.
pub fn connected(a: Settings, b: Settings) -> (Node, Node) {
    let (mut a, mut b) = (Host::new(a), Host::new(b));
    let (info_a, info_b) = (a.info(), b.info());
    let thread = std::thread::spawn(move || {
        let links = b.connect(&[info_a]).unwrap();
        (b, links)
    });
    let links_a = a.connect(&[info_b]).unwrap();
    let (b, links_b) = thread.join().unwrap();
    let node = |host: Host, links: Vec<Box<dyn Watched>>| {
        let Host { poller, mut endpoint } = host;
        Node::new(poller.into(), links.into_iter().next().unwrap(), endpoint.take_warnings())
    };
    (node(a, links_a), node(b, links_b))
}

/// The kinds of links, all with the same longest frame: one per transport, and some more.
pub fn kinds() -> Vec<&'static str> {
    every_transport().into_iter().chain(["shm in small rings", "loopback"]).collect()
}

pub fn pair(kind: &str) -> (Node, Node) {
    match kind {
        "shm in small rings" => {
            let small = Settings { ring_bytes: 1, ..settings(&["shm"]) };
            connected(small.clone(), small)
        }
        "loopback" => {
            let pollers = [Arc::new(Poller::new().unwrap()), Arc::new(Poller::new().unwrap())];
            let longest = Settings::default().max_payload_bytes();
            let (a, b) = loopback::pair(longest, Capacity::Frames(3), pollers[0].waker(), pollers[1].waker());
            let [p, q] = pollers;
            let node = |poller, link: loopback::LoopbackLink| Node::new(poller, Box::new(link), Vec::new());
            (node(p, a), node(q, b))
        }
        transport => connected(settings(&[transport]), settings(&[transport])),
    }
}

impl Node {
    /// Creates a node whose link a poller watches from now on.
    pub fn new(poller: Arc<Poller>, mut link: Box<dyn Watched>, warnings: Vec<String>) -> Self {
        let slot = poller.watch(&mut link).unwrap();
        Self { bitmap: poller.bitmap(), poller, link, slot, warnings }
    }

    /// Sleeps until the link has an event. There is no timer: only a wake-up ends the sleep.
    pub fn park(&mut self, wants_room: bool) {
        if !self.link.arm(wants_room) {
            let before = Instant::now();
            self.sleep(self.link.poll_interval().unwrap_or(LIMIT / 2));
            assert!(before.elapsed() < LIMIT / 2, "no peer woke {}", self.link.describe());
        }
        self.link.disarm();
    }

    /// Sleeps until an event is posted or seen, at most for `at_most`. The link is armed.
    pub fn sleep(&self, at_most: Duration) {
        if !self.bitmap.listen() {
            self.poller.wait(Some(at_most)).unwrap();
        }
        self.bitmap.mute();
        self.bitmap.take(&mut |_| {});
    }

    pub fn try_send(&mut self, frame: &[u8]) -> Result<bool, Error> {
        let Some(slot) = self.link.try_reserve(frame.len())? else { return Ok(false) };
        assert_eq!(slot.payload.as_ptr() as usize % 8, 0);
        *slot.head = head_of(frame);
        slot.payload.copy_from_slice(frame);
        self.link.commit();
        Ok(true)
    }

    pub fn send(&mut self, frame: &[u8]) {
        while !self.try_send(frame).unwrap() {
            self.park(true);
        }
        self.link.flush().unwrap();
    }

    /// Flushes until the link holds no bytes: the kernel may have taken only a part of them.
    pub fn send_the_rest(&mut self) {
        while !self.link.flush().unwrap() {
            self.poller.wait(Some(Duration::from_millis(10))).unwrap();
        }
    }

    pub fn try_receive(&mut self) -> Result<Option<Vec<u8>>, Error> {
        let frame = self.link.peek()?.map(|frame| {
            assert_eq!(frame.payload.as_ptr() as usize % 8, 0);
            assert_eq!(*frame.head, head_of(frame.payload));
            frame.payload.to_vec()
        });
        self.link.release();
        Ok(frame)
    }

    pub fn receive(&mut self) -> Result<Vec<u8>, Error> {
        loop {
            if let Some(frame) = self.try_receive()? {
                return Ok(frame);
            }
            self.park(false);
        }
    }

    /// Sends `frames` while receiving `expected` ones.
    pub fn exchange(&mut self, frames: &[Vec<u8>], expected: usize) -> Vec<Vec<u8>> {
        let (mut sent, mut received) = (0, Vec::new());
        while sent < frames.len() || received.len() < expected {
            let mut moved = false;
            if sent < frames.len() && self.try_send(&frames[sent]).unwrap() {
                sent += 1;
                moved = true;
            }
            if received.len() < expected
                && let Some(frame) = self.try_receive().unwrap()
            {
                received.push(frame);
                moved = true;
            }
            if !moved {
                self.link.flush().unwrap();
                self.park(sent < frames.len());
            }
        }
        // Bytes that are not taken now are sent when possible. A peer that has everything may be gone by then.
        while !self.link.flush().unwrap_or(true) {
            std::thread::yield_now();
        }
        received
    }
}

/// Returns a head that matches the payload.
fn head_of(payload: &[u8]) -> [u8; HEAD_BYTES] {
    let mut head = [payload.last().copied().unwrap_or(0xa5); HEAD_BYTES];
    head[..8].copy_from_slice(&payload.len().to_le_bytes());
    head
}

/// Creates repeatable frames of random lengths: many short ones, some of the longest.
pub fn frames(seed: u64, count: usize, longest: usize) -> Vec<Vec<u8>> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as usize
    };
    (0..count)
        .map(|i| {
            let len = match next() % 8 {
                0..4 => next() % 128,
                4..7 => next() % 8192,
                _ => longest - next() % 64,
            };
            (0..len).map(|at| (i * 31 + at * 7) as u8).collect()
        })
        .collect()
}

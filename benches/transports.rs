//! Links without an engine: round trips and streams of frames over loopback (between threads), shm and tcp (between
//! processes).
//!
//! Ids are `round_trip/transport/bytes` and `stream/transport/bytes`; bytes is the size of one frame. Each frame is
//! written from one buffer and read into another, as a message is.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accl_benches::pin::{self, Pinned};
use accl_benches::process::{RankProcess, Ranks, started_as_rank};
use accl_benches::sweep::{self, Sweep};
use accl_engine::Store;
use accl_transport::loopback::{self, Capacity};
use accl_transport::{Endpoint, Poller, Settings, Watched};
use accl_types::config::Config;
use accl_types::{Error, Result};
use accl_wire::{EndpointInfo, Link};
use criterion::{BenchmarkId, Criterion, Throughput};

/// Deadline of connecting, and of the next frame.
const DEADLINE: Duration = Duration::from_secs(60);
/// Maximum wait of the other side for the next bench.
const IDLE: Duration = Duration::from_secs(600);
/// Largest frame in bytes.
const MAX_FRAME: usize = 1 << 20;
/// Frames that a loopback link holds: as many bytes as a ring holds by default.
const LOOPBACK_FRAMES: usize = 16;
/// Polls of the link before parking.
const LOOKS: u32 = 20_000;

/// First word of a frame's head: the order for the other side.
const ECHO: u64 = 1;
const KEEP: u64 = 2;
const KEEP_AND_REPLY: u64 = 3;
const END: u64 = 4;

const FEW_SIZES: &[usize] = &[64, 4 << 10, 64 << 10, 1 << 20];
const ALL_SIZES: &[usize] = &[64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];

fn main() -> ExitCode {
    if let Some(code) = started_as_rank(serve_process) {
        return code;
    }
    let sizes = Sweep::chosen().pick(FEW_SIZES, ALL_SIZES);
    let mut criterion = sweep::criterion(Duration::from_millis(600));
    for transport in ["loopback", "shm", "tcp"] {
        let mut other = None;
        for &bytes in sizes {
            bench(&mut criterion, &mut other, transport, bytes);
        }
    }
    criterion.final_summary();
    ExitCode::SUCCESS
}

fn bench(criterion: &mut Criterion, other: &mut Option<Other>, transport: &str, bytes: usize) {
    let mut run = |kind: &str, body: fn(&mut Wire, usize, u64) -> Result<()>, factor: u64| {
        let mut group = criterion.benchmark_group(format!("{kind}/{transport}"));
        group.throughput(Throughput::Bytes(bytes as u64 * factor));
        group.bench_function(BenchmarkId::from_parameter(bytes), |bencher| {
            let other = other.get_or_insert_with(|| {
                Other::start(transport).unwrap_or_else(|error| panic!("the other process over {transport}: {error}"))
            });
            bencher.iter_custom(|iterations| {
                let start = Instant::now();
                body(&mut other.wire, bytes, iterations)
                    .unwrap_or_else(|error| panic!("{kind}/{transport}/{bytes}: {error}"));
                start.elapsed()
            });
        });
        group.finish();
    };
    run("round_trip", Wire::round_trips, 2);
    run("stream", Wire::stream, 1);
}

/// The other end of the link; dropping it ends the other side.
struct Other {
    wire: Wire,
    // Dropped after the wire, because these wait for the end of the other side.
    _thread: Option<Joined>,
    _ranks: Option<Ranks>,
    _pinned: Pinned,
}

struct Joined(Option<std::thread::JoinHandle<()>>);

impl Drop for Joined {
    fn drop(&mut self) {
        if let Some(thread) = self.0.take() {
            let _ = thread.join();
        }
    }
}

impl Other {
    fn start(transport: &str) -> Result<Self> {
        let cores = pin::cores();
        if transport != "loopback" {
            let ranks = Ranks::start(transport, 2)?;
            let pinned = Pinned::new(0, 2, &cores);
            let wire = Wire::meet(ranks.own())?;
            return Ok(Self { wire, _thread: None, _ranks: Some(ranks), _pinned: pinned });
        }
        let (ours, theirs) = (Poller::new()?, Poller::new()?);
        let capacity = Capacity::Frames(LOOPBACK_FRAMES);
        let (left, right) = loopback::pair(MAX_FRAME, capacity, ours.waker(), theirs.waker());
        let pinned = Pinned::new(0, 2, &cores);
        let thread = std::thread::spawn(move || {
            let _pinned = Pinned::new(1, 2, &cores);
            // An error closes the link, and the bench reports that it did not get its frame.
            let _ = Wire::new(theirs, Box::new(right)).serve();
        });
        let wire = Wire::new(ours, Box::new(left));
        Ok(Self { wire, _thread: Some(Joined(Some(thread))), _ranks: None, _pinned: pinned })
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // The other side may have ended; closing the link ends it as well.
        let _ = self.wire.send(END, 64);
        let _ = self.wire.flush();
        self.wire.link.close();
    }
}

fn serve_process(process: &RankProcess) -> Result<()> {
    let _pinned = Pinned::new(process.rank as usize, process.ranks as usize, &pin::cores());
    Wire::meet(process)?.serve()
}

/// A link, and the poller to wait for it.
struct Wire {
    poller: Poller,
    link: Box<dyn Watched>,
    // Keeps the listeners as long as the link.
    _endpoint: Option<Endpoint>,
    outgoing: Vec<u8>,
    incoming: Vec<u8>,
}

impl Wire {
    fn new(poller: Poller, link: Box<dyn Watched>) -> Self {
        Self { poller, link, _endpoint: None, outgoing: vec![1; MAX_FRAME], incoming: vec![2; MAX_FRAME] }
    }

    /// Connects to the other process.
    fn meet(process: &RankProcess) -> Result<Self> {
        let mut config = Config::default();
        config.set_option("transports", &process.transport)?;
        let mut settings = Settings::from_config(&config);
        settings.segment_bytes = MAX_FRAME as u64;
        settings.ring_bytes = settings.ring_bytes.max(2 * MAX_FRAME as u64);
        let poller = Poller::new()?;
        let mut endpoint = Endpoint::new(settings, Arc::clone(&poller.waker()))?;
        let store = process.store()?;
        let keys = [process.rank, 1 - process.rank].map(|rank| format!("info/{rank}"));
        store.set(&keys[0], endpoint.info().to_text().as_bytes())?;
        let peer =
            store.wait(&keys[1], DEADLINE)?.ok_or_else(|| Error::timeout("the other process did not connect"))?;
        let peer = EndpointInfo::from_text(&String::from_utf8_lossy(&peer))?;
        let links = endpoint.connect(&[peer], Instant::now() + DEADLINE, &mut || false);
        let mut link =
            links.map_err(|failed| failed.error)?.pop().ok_or_else(|| Error::internal("no link was created"))?;
        poller.watch(&mut link)?;
        Ok(Self { _endpoint: Some(endpoint), ..Self::new(poller, link) })
    }

    /// Sends frames there and back, one at a time.
    fn round_trips(&mut self, bytes: usize, count: u64) -> Result<()> {
        for _ in 0..count {
            self.send(ECHO, bytes)?;
            self.receive(DEADLINE)?;
        }
        Ok(())
    }

    /// Sends frames, one behind the other, and waits until the last one is acknowledged.
    fn stream(&mut self, bytes: usize, count: u64) -> Result<()> {
        for _ in 1..count {
            self.send(KEEP, bytes)?;
        }
        self.send(KEEP_AND_REPLY, bytes)?;
        self.receive(DEADLINE).map(drop)
    }

    /// Carries out the orders of frames until one orders the end.
    fn serve(mut self) -> Result<()> {
        loop {
            match self.receive(IDLE)? {
                (ECHO, bytes) => self.send(KEEP, bytes)?,
                (KEEP, _) => {}
                (KEEP_AND_REPLY, _) => self.send(KEEP, 64)?,
                (END, _) => return Ok(()),
                (other, _) => return Err(Error::protocol(format!("unknown order {other}"))),
            }
        }
    }

    fn send(&mut self, order: u64, bytes: usize) -> Result<()> {
        let mut waiting = Waiting::new(DEADLINE);
        loop {
            if let Some(place) = self.link.try_reserve(bytes)? {
                place.payload.copy_from_slice(&self.outgoing[..bytes]);
                place.head[..8].copy_from_slice(&order.to_le_bytes());
                self.link.commit();
                self.link.flush()?;
                return Ok(());
            }
            self.link.flush()?;
            waiting.once_more(&self.poller, &mut *self.link, true)?;
        }
    }

    /// Returns the order of the next frame, and its payload's length in bytes.
    fn receive(&mut self, patience: Duration) -> Result<(u64, usize)> {
        let mut waiting = Waiting::new(patience);
        loop {
            if let Some(frame) = self.link.peek()? {
                let bytes = frame.payload.len();
                self.incoming[..bytes].copy_from_slice(frame.payload);
                let order = frame.head.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
                self.link.release();
                return Ok((order, bytes));
            }
            let unsent = !self.link.flush()?;
            waiting.once_more(&self.poller, &mut *self.link, unsent)?;
        }
    }

    /// Waits until everything has left this process, for at most two seconds.
    fn flush(&mut self) -> Result<()> {
        let mut waiting = Waiting::new(Duration::from_secs(2));
        while !self.link.flush()? {
            waiting.once_more(&self.poller, &mut *self.link, true)?;
        }
        Ok(())
    }
}

/// Wait state: polls for a while, then parks, and fails after the deadline.
struct Waiting {
    looks: u32,
    patience: Duration,
    deadline: Option<Instant>,
}

impl Waiting {
    fn new(patience: Duration) -> Self {
        Self { looks: 0, patience, deadline: None }
    }

    fn once_more(&mut self, poller: &Poller, link: &mut dyn Link, wants_room: bool) -> Result<()> {
        self.looks += 1;
        if self.looks < LOOKS {
            std::hint::spin_loop();
            return Ok(());
        }
        let now = Instant::now();
        let deadline = *self.deadline.get_or_insert(now + self.patience);
        if now >= deadline {
            return Err(Error::timeout("the other process did not answer"));
        }
        link.check_peer()?;
        let bitmap = poller.bitmap();
        if !link.arm(wants_room) && !bitmap.listen() {
            poller.wait(Some(deadline - now))?;
        }
        bitmap.mute();
        bitmap.take(&mut |_| {});
        link.disarm();
        Ok(())
    }
}

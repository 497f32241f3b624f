//! Worlds: one engine, one group and one thread for each rank.

use std::sync::Arc;
use std::time::Duration;

use accl_engine::{Engine, Group, GroupRole, GroupSpec};
use accl_transport::loopback::{self, Capacity, LoopbackLink};
use accl_types::config::{Calibration, Config, WorkerCount};
use accl_types::{Rank, Result};
use accl_wire::frame::OVERHEAD_BYTES;
use parking_lot::Mutex;

use crate::{Member, MemoryStore, Rig, Rigged, THRIFTY, every_transport};

/// Transport between the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fabric {
    /// Queues in this process that hold this many frames.
    Loopback(usize),
    /// Rings in shared memory.
    Shm,
    /// TCP sockets.
    Tcp,
    /// One of [`every_transport`], or [`THRIFTY`].
    Over(&'static str),
}

/// Number of worker lanes, from `ACCL_TEST_WORKERS`. With `ACCL_TEST_WORKERS=2`, all worlds have two lanes in addition
/// to the first. These lanes run parts of every call that can be cut; the tests' expectations stay the same.
#[expect(clippy::disallowed_methods, reason = "no setting, but an argument of tests")]
fn lanes() -> Option<u32> {
    std::env::var("ACCL_TEST_WORKERS").ok().map(|text| text.parse().expect("ACCL_TEST_WORKERS is a number"))
}

/// Minimum bytes of a part of a call if `ACCL_TEST_WORKERS` is not set.
const LEAST_PART_BYTES: u64 = 256 << 10;

/// How a world is created.
#[derive(Clone, Debug)]
pub struct WorldOptions {
    /// Number of ranks.
    pub world: u32,
    /// Transport between them.
    pub fabric: Fabric,
    /// Settings of every rank.
    pub config: Config,
    /// Time limit of each call.
    pub timeout: Duration,
    /// Host identity of each rank; empty if all ranks are on one host.
    pub hosts: Vec<String>,
    /// Whether loopback links are created and adopted. If false, the test brings its own.
    pub adopt: bool,
}

impl WorldOptions {
    /// Returns options for `world` ranks over roomy loopback links, with default settings.
    pub fn new(world: u32) -> Self {
        Self {
            world,
            fabric: Fabric::Loopback(64),
            // Tests do not use the user's calibration cache, nor spend the time to fill it.
            config: Config {
                calibration: Calibration::Off,
                worker_count: WorkerCount::Exactly(lanes().unwrap_or(0)),
                ..Config::default()
            },
            timeout: Duration::from_secs(60),
            hosts: Vec::new(),
            adopt: true,
        }
    }

    /// Sets a setting by its option name.
    ///
    /// # Panics
    /// Panics if the value is not accepted.
    #[must_use]
    pub fn with(mut self, option: &str, value: &str) -> Self {
        self.config.set_option(option, value).unwrap_or_else(give_up);
        self
    }

    /// Sets the transport between the ranks.
    #[must_use]
    pub fn over(mut self, fabric: Fabric) -> Self {
        self.fabric = fabric;
        self
    }

    /// Sets the time limit of each call.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

/// Connected engines of all ranks, and the store in which their groups meet.
pub struct World {
    options: WorldOptions,
    /// One engine per rank.
    pub engines: Vec<Arc<Engine>>,
    /// Store for the rendezvous of groups.
    pub store: MemoryStore,
}

impl World {
    /// Creates and connects the engines.
    ///
    /// # Panics
    /// Panics if an endpoint cannot be opened: a test cannot go on.
    pub fn new(options: WorldOptions) -> Self {
        let mut config = options.config.clone();
        let transports = match options.fabric {
            Fabric::Loopback(_) => None,
            Fabric::Shm => Some("shm"),
            Fabric::Tcp => Some("tcp"),
            Fabric::Over(name) => every_transport().into_iter().chain([THRIFTY]).find(|&known| known == name),
        };
        if let Some(transports) = transports {
            config.set_option("transports", transports).unwrap_or_else(give_up);
        }
        let engines: Vec<_> = (0..options.world as usize)
            .map(|rank| {
                let mut config = config.clone();
                if let Some(host) = options.hosts.get(rank) {
                    config.set_option("host_id", host).unwrap_or_else(give_up);
                }
                let engine = accl_calibrate::engine(config);
                // How calls are cut must not depend on predicted times.
                engine.set_least_part_bytes(if lanes().is_some() { 1 } else { LEAST_PART_BYTES });
                engine
            })
            .collect();
        let world = Self { options, engines, store: MemoryStore::default() };
        if let Fabric::Loopback(frames) = world.options.fabric
            && world.options.adopt
        {
            world.connect_loopback(frames);
        }
        world
    }

    fn connect_loopback(&self, frames: usize) {
        for (index, a) in self.engines.iter().enumerate() {
            for b in &self.engines[index + 1..] {
                let (left, right) = self.loopback_pair(a, b, frames);
                a.adopt_link(b.info().unwrap_or_else(give_up), Box::new(left)).unwrap_or_else(give_up);
                b.adopt_link(a.info().unwrap_or_else(give_up), Box::new(right)).unwrap_or_else(give_up);
            }
        }
    }

    /// Creates two ranks, with a [`Rig`] on the first rank's end of their link.
    ///
    /// # Panics
    /// See [`World::new`].
    pub fn rigged(options: WorldOptions) -> (Self, Arc<Rig>) {
        let world = Self::new(WorldOptions { adopt: false, ..options });
        let rig = Arc::new(Rig::default());
        let (a, b) = (&world.engines[0], &world.engines[1]);
        let (left, right) = world.loopback_pair(a, b, 16);
        let left = Rigged::new(left, rig.clone());
        a.adopt_link(b.info().unwrap_or_else(give_up), Box::new(left)).unwrap_or_else(give_up);
        b.adopt_link(a.info().unwrap_or_else(give_up), Box::new(right)).unwrap_or_else(give_up);
        (world, rig)
    }

    fn loopback_pair(&self, a: &Engine, b: &Engine, frames: usize) -> (LoopbackLink, LoopbackLink) {
        let frame_bytes = self.options.config.segment_bytes as usize + OVERHEAD_BYTES;
        let wakers = (a.waker().unwrap_or_else(give_up), b.waker().unwrap_or_else(give_up));
        loopback::pair(frame_bytes, Capacity::Frames(frames), wakers.0, wakers.1)
    }

    /// Creates a group of all ranks and runs `body` on one thread per rank. Returns the results in rank order.
    ///
    /// # Panics
    /// Panics if a rank panics, after all ranks have ended.
    pub fn run<R: Send>(&self, name: &str, body: impl Fn(Member) -> R + Sync) -> Vec<R> {
        self.run_ranks(name, &(0..self.options.world).collect::<Vec<_>>(), body)
    }

    /// Does the same as [`World::run`] with the listed ranks of the world only.
    ///
    /// # Panics
    /// See [`World::run`].
    pub fn run_ranks<R: Send>(&self, name: &str, ranks: &[u32], body: impl Fn(Member) -> R + Sync) -> Vec<R> {
        self.run_on_threads(name, ranks, &body)
    }

    /// Runs `body` on one thread per rank. Compiled once for each `R`, because hundreds of tests call [`World::run`]
    /// with a `body` of their own type.
    fn run_on_threads<R: Send>(&self, name: &str, ranks: &[u32], body: &(dyn Fn(Member) -> R + Sync)) -> Vec<R> {
        let results: Vec<Mutex<Option<R>>> = ranks.iter().map(|_| Mutex::new(None)).collect();
        self.on_a_thread_each(name, ranks, &|rank, member| *results[rank].lock() = Some(body(member)));
        results.into_iter().map(|result| result.into_inner().expect("every thread has ended well")).collect()
    }

    fn on_a_thread_each(&self, name: &str, ranks: &[u32], body: &(dyn Fn(usize, Member) + Sync)) {
        std::thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .iter()
                .enumerate()
                .map(|(rank, &global)| {
                    let spawn = std::thread::Builder::new().name(format!("rank {rank}"));
                    let work = move || {
                        body(rank, Member::new(self.group(name, global, rank as u32, ranks.len() as u32)));
                    };
                    spawn.spawn_scoped(scope, work).unwrap_or_else(|error| panic!("cannot start a thread: {error}"))
                })
                .collect();
            let results: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
            for result in results {
                result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            }
        });
    }

    /// Creates a group of all ranks, each on a thread of its own. Returns the group or the error of each rank, in rank
    /// order.
    ///
    /// # Panics
    /// Panics if a rank panics.
    pub fn try_run(&self, name: &str) -> Vec<Result<Arc<Group>>> {
        self.try_run_with(name, |_, _| ())
    }

    /// Does the same as [`World::try_run`] with changed settings.
    ///
    /// # Panics
    /// See [`World::try_run`].
    pub fn try_run_with(&self, name: &str, change: impl Fn(u32, &mut Config) + Sync) -> Vec<Result<Arc<Group>>> {
        std::thread::scope(|scope| {
            let make = |rank| {
                let change = &change;
                scope
                    .spawn(move || self.try_group(name, rank, rank, self.options.world, &|config| change(rank, config)))
            };
            let threads: Vec<_> = (0..self.options.world).map(make).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, Result<Arc<Group>>>| thread.join();
            threads.into_iter().map(|t| join(t).unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        })
    }

    fn group(&self, name: &str, global: u32, rank: u32, world: u32) -> Arc<Group> {
        self.try_group(name, global, rank, world, &|_| ()).unwrap_or_else(give_up)
    }

    fn try_group(
        &self,
        name: &str,
        global: u32,
        rank: u32,
        world: u32,
        change: &dyn Fn(&mut Config),
    ) -> Result<Arc<Group>> {
        let engine = &self.engines[global as usize];
        let mut config = engine.config().clone();
        change(&mut config);
        let spec = GroupSpec {
            name: name.to_owned(),
            rank: Rank(rank),
            world,
            timeout: self.options.timeout,
            config,
            master: None,
            global_ranks: Vec::new(),
            role: GroupRole::Default,
        };
        let store = self.store.prefixed(name);
        engine.create_group(spec, &store, &mut || false)
    }
}

/// Panics: a test cannot go on without its world.
fn give_up<T>(error: accl_types::Error) -> T {
    panic!("{error}")
}

impl Drop for World {
    fn drop(&mut self) {
        // All engines shut down at the same time, as processes end. Each one receives what the others have yet to send.
        std::thread::scope(|scope| {
            for engine in &self.engines {
                scope.spawn(|| engine.shutdown());
            }
        });
    }
}

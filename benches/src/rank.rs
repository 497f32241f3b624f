//! What every rank does, rank 0 included: meets the others, makes a group per algorithm, runs a batch of calls and tells
//! when each began and ended.
//!
//! All ranks of a world share a host, hence a clock: times of different processes are compared. Owns the definition of
//! what a call took. Read [`Member::run`] first.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use accl_engine::{CallDesc, Engine, Group, GroupSpec, Mode, config_from_environment};
use accl_schedule::Algorithm;
use accl_testkit::{DirStore, Member as Calls, finish_ran};
use accl_types::{Collective, Dtype, Error, Rank, Result};
use rustix::time::{ClockId, clock_gettime};

use crate::cases::{AUTO, Case, Tensors, algorithm_name};
use crate::pin::{self, Pinned};
use crate::process::Place;

/// Deadline of the making of a group and of each call.
const DEADLINE: Duration = Duration::from_secs(60);
/// How long the other ranks wait for rank 0 to think.
const IDLE: Duration = Duration::from_secs(600);
/// Calls whose times are kept before they are collected.
const BATCH: u64 = 1 << 15;

/// What rank 0 tells the others to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// Only run the calls.
    No,
    /// Run one more before, and look at its result.
    Yes,
}

/// One order of rank 0, as it is broadcast.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    /// What to call.
    pub case: Case,
    /// How often.
    pub iterations: u64,
    /// Whether to look at a result.
    pub verify: Verify,
}

/// Words of an order; all zeros: end.
const ORDER_WORDS: usize = 6;

impl Order {
    fn to_words(self) -> [u64; ORDER_WORDS] {
        let algorithm = self.case.algorithm.map_or(u64::MAX, |row| u64::from(row.id));
        let verify = u64::from(self.verify == Verify::Yes);
        [self.iterations, self.case.collective as u64, algorithm, self.case.dtype as u64, self.case.bytes, verify]
    }

    /// `None` for the end.
    fn from_words(words: [u64; ORDER_WORDS]) -> Result<Option<Self>> {
        let [iterations, collective, algorithm, dtype, bytes, verify] = words;
        if iterations == 0 {
            return Ok(None);
        }
        let unknown = || Error::internal(format!("unknown order {words:?}"));
        let collective = u8::try_from(collective).ok().and_then(Collective::from_code).ok_or_else(unknown)?;
        let algorithm: Option<&'static Algorithm> = match u8::try_from(algorithm) {
            Ok(id) => Some(accl_schedule::algorithms::by_id(id).ok_or_else(unknown)?),
            Err(_) => None,
        };
        let dtype = u8::try_from(dtype).ok().and_then(Dtype::from_code).ok_or_else(unknown)?;
        let verify = if verify == 1 { Verify::Yes } else { Verify::No };
        Ok(Some(Self { case: Case { collective, algorithm, dtype, bytes }, iterations, verify }))
    }
}

/// When a call, or a row of calls, began and ended on one rank, in nanoseconds of the host's clock.
#[derive(Clone, Copy, Debug)]
struct Span {
    begin: u64,
    end: u64,
}

/// One rank of a world of processes.
pub struct Member {
    rank: u32,
    ranks: u32,
    engine: Arc<Engine>,
    store: DirStore,
    control: Calls,
    groups: HashMap<(Collective, &'static str), Arc<Group>>,
    tensors: Tensors,
    _pinned: Pinned,
}

impl Member {
    /// Meets the other ranks. With `ACCL_*` variables in the environment the engine takes them, except the transport.
    ///
    /// # Errors
    /// As [`Engine::create_group`].
    pub fn join(place: &Place) -> Result<Self> {
        let cores = pin::cores();
        let mut config = config_from_environment()?;
        config.set_option("transports", &place.transport)?;
        // Before pinning: the engine counts the cores that it may use, and one core would mean that ranks share it.
        let engine = accl_calibrate::engine(config);
        let pinned = Pinned::new(place.rank as usize, place.ranks as usize, &cores);
        let store = place.store()?;
        let (rank, ranks) = (place.rank, place.ranks);
        let control = make_group(&engine, &store, "control", rank, ranks, None)?;
        let control = Calls { group: control, rank: rank as usize, world: ranks as usize };
        Ok(Self {
            rank,
            ranks,
            engine,
            store,
            control,
            groups: HashMap::new(),
            tensors: Tensors::default(),
            _pinned: pinned,
        })
    }

    /// What a rank other than 0 does until rank 0 says that it is over.
    ///
    /// # Errors
    /// The first that any call had; `PeerLost` when rank 0 left without a word.
    pub fn serve(mut self) -> Result<()> {
        loop {
            self.control.group.set_timeout(IDLE);
            let mut words = [0; ORDER_WORDS];
            self.control.broadcast(&mut words, 0)?;
            self.control.group.set_timeout(DEADLINE);
            match Order::from_words(words)? {
                Some(order) => drop(self.run(&order)?),
                None => return Ok(()),
            }
        }
    }

    /// On rank 0: has all ranks carry out an order, and returns what its calls took together.
    ///
    /// # Errors
    /// The first that any call had, or a wrong result.
    pub fn lead(&mut self, order: &Order) -> Result<Duration> {
        self.control.broadcast(&mut order.to_words(), 0)?;
        self.run(order)
    }

    /// On rank 0: tells the others to end.
    ///
    /// # Errors
    /// When they are gone already.
    pub fn dismiss(&self) -> Result<()> {
        self.control.broadcast(&mut [0_u64; ORDER_WORDS], 0)
    }

    /// Runs an order's calls. What they took is known to rank 0 only.
    fn run(&mut self, order: &Order) -> Result<Duration> {
        let case = &order.case;
        let group = self.group(case)?;
        if order.verify == Verify::Yes {
            self.verify(case, &group)?;
        }
        let desc = self.tensors.call(case, self.rank, self.ranks, 0);
        self.tensors.clear(case, self.ranks);
        let mut took = Duration::ZERO;
        let mut left = order.iterations;
        while left > 0 {
            let batch = left.min(BATCH);
            left -= batch;
            self.control.barrier()?;
            let spans =
                if case.collective.is_rooted() { each(&group, &desc, batch)? } else { all(&group, &desc, batch)? };
            took += self.collect(case.collective, &spans)?;
        }
        Ok(took)
    }

    /// The sum over calls of the time from when the call could begin to when its last rank was done, on rank 0.
    ///
    /// Data comes from the root of a broadcast or scatter: its time begins there. What needs every rank's contribution
    /// begins with the last rank to come.
    fn collect(&self, collective: Collective, spans: &[Span]) -> Result<Duration> {
        let mine: Vec<u64> = spans.iter().flat_map(|span| [span.begin, span.end]).collect();
        let mut theirs = vec![0; if self.rank == 0 { mine.len() * self.ranks as usize } else { 0 }];
        self.control.gather(&mine, &mut theirs, 0)?;
        if self.rank != 0 {
            return Ok(Duration::ZERO);
        }
        let from_root = matches!(collective, Collective::Broadcast | Collective::Scatter);
        let nanos = (0..spans.len()).map(|call| {
            let of = |what: usize| theirs.iter().skip(2 * call + what).step_by(mine.len()).copied();
            let begin = if from_root { spans[call].begin } else { of(0).max().unwrap_or(0) };
            of(1).max().unwrap_or(0).saturating_sub(begin)
        });
        // At least something, for Criterion divides by it.
        Ok(Duration::from_nanos(nanos.sum::<u64>().max(1)))
    }

    fn verify(&mut self, case: &Case, group: &Group) -> Result<()> {
        let root = self.ranks - 1;
        let desc = self.tensors.call(case, self.rank, self.ranks, root);
        self.tensors.fill(case, self.rank, self.ranks);
        self.control.barrier()?;
        finish_ran(&group.run(&desc)?)?;
        self.tensors.check(case, self.rank, self.ranks, root).map_err(|what| {
            let name = algorithm_name(case.algorithm);
            Error::internal(format!("{} by {name} of {} bytes: {what}", case.collective, case.bytes))
        })
    }

    /// The group of the case's own on which its algorithm is forced.
    fn group(&mut self, case: &Case) -> Result<Arc<Group>> {
        let name = algorithm_name(case.algorithm);
        if let Some(group) = self.groups.get(&(case.collective, name)) {
            return Ok(group.clone());
        }
        let rule = (name != AUTO).then(|| format!("{}={name}", case.collective));
        let title = format!("{}/{name}", case.collective);
        let group = make_group(&self.engine, &self.store, &title, self.rank, self.ranks, rule.as_deref())?;
        self.groups.insert((case.collective, name), group.clone());
        Ok(group)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

fn make_group(
    engine: &Arc<Engine>,
    store: &DirStore,
    name: &str,
    rank: u32,
    ranks: u32,
    rule: Option<&str>,
) -> Result<Arc<Group>> {
    let mut config = engine.config().clone();
    if let Some(rule) = rule {
        config.set_option("algorithm", rule)?;
    }
    let spec = GroupSpec {
        name: name.to_owned(),
        rank: Rank(rank),
        world: ranks,
        timeout: DEADLINE,
        config,
        master: None,
        global_ranks: Vec::new(),
    };
    engine.create_group(spec, &store.prefixed(name), &mut || false)
}

/// Calls one behind the other. For collectives in which every rank needs something of every other, so that no rank is
/// ahead by more than one call.
fn all(group: &Group, desc: &CallDesc, count: u64) -> Result<Vec<Span>> {
    let begin = now();
    for _ in 0..count {
        call(group, desc)?;
    }
    Ok(vec![Span { begin, end: now() }])
}

/// Each call by itself, after a barrier. For rooted collectives: a root that only sends would be many calls ahead.
fn each(group: &Group, desc: &CallDesc, count: u64) -> Result<Vec<Span>> {
    let barrier = CallDesc::new(Collective::Barrier, desc.dtype);
    let mut spans = Vec::with_capacity(count as usize);
    for _ in 0..count {
        call(group, &barrier)?;
        let begin = now();
        call(group, desc)?;
        spans.push(Span { begin, end: now() });
    }
    Ok(spans)
}

fn call(group: &Group, desc: &CallDesc) -> Result<()> {
    debug_assert_eq!(desc.mode, Mode::Blocking);
    finish_ran(&group.run(desc)?)
}

fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

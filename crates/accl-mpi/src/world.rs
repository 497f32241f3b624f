//! The process as a member of its MPI job: one communicator, all links over it, and the choice of the thread that calls
//! MPI.
//!
//! Owns the start and the end of MPI, the communicator, the tags, and all MPI calls for links. One lock guards all of
//! these. If the level of thread support allows it, the thread that holds the lock calls MPI. Otherwise only the
//! *MPI thread* does, a thread of this module. In both cases the MPI thread starts and ends MPI, unless other code has
//! started MPI. With `MPI_THREAD_MULTIPLE`, waiting threads advance collectives ([`crate::collectives`]) without the
//! lock.
//! Only [`start`], [`broadcast`] and [`finish`] block, and all have deadlines. Separate threads create and free
//! communicators of groups, and no thread waits for them.
//!
//! This file is long because one lock guards all of MPI's state, and every MPI call for links is made under it.

use std::collections::HashMap;
use std::ffi::c_int;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use accl_wire::HEAD_BYTES;

use crate::address::{self, Address};
use crate::calls::{self, Checked, Communicator, Level, Message, Request};
use crate::collectives::{Call, are_at_work, are_under_way, end_all, lock as lock_of, unless_over};
use crate::frames::{Buffer, Spare};
use crate::link::{Incoming, Link, Outgoing, Peer, Polled};

/// Maximum number of messages that one poll receives.
const MESSAGES: usize = 8;
/// Maximum bytes of a broadcast from rank 0, including two bytes for the length.
const BROADCAST_BYTES: usize = 4096;
/// Extra wait for a thread that enforces its own deadline.
const GRACE: Duration = Duration::from_secs(1);
/// Wait for the end of MPI after which a message is printed.
const PATIENCE: Duration = Duration::from_secs(30);
/// Maximum wait for the end of MPI if some processes may not reach it.
const DOUBTFUL: Duration = Duration::from_secs(10);
/// Maximum wait for processes that still send something, when other code ends MPI.
const OTHERS_END: Duration = Duration::from_secs(2);
/// Time after the last poll during which the thread that calls MPI continues without sleeping.
const ATTENTION: Duration = Duration::from_millis(1);
/// Maximum sleep of that thread afterwards, while something is in flight.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// The parameters of MPI's start.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    /// Number of processes that the launcher has started, if known.
    pub(crate) size: Option<c_int>,
    /// The requested level of thread support.
    pub(crate) level: Level,
    /// Whether no other code calls MPI from the first group on.
    pub(crate) is_exclusive: bool,
    /// The Fortran handle of a communicator, if other code has started MPI.
    pub(crate) communicator: Option<c_int>,
    pub(crate) timeout: Duration,
}

/// The job as this process sees it.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// Identifier of the job: equal in all of its processes, and different in every other job.
    pub(crate) id: u128,
    pub(crate) library: String,
    pub(crate) rank: c_int,
    pub(crate) size: c_int,
    pub(crate) level: Level,
    /// Whether other code has started MPI, and ends it.
    pub(crate) is_shared: bool,
}

/// The state under the lock.
pub(crate) struct World {
    pub(crate) job: Job,
    communicator: Communicator,
    /// A communicator of the same processes, for the collectives of the first group of all processes. Other
    /// communicators are created from it.
    first: Communicator,
    is_first_taken: bool,
    /// Collectives in flight, if one thread makes all MPI calls.
    calls: Vec<Arc<Mutex<Call>>>,
    /// Whether only the thread that started MPI calls it.
    is_served: bool,
    links: Vec<Option<Link>>,
    by_tag: HashMap<c_int, usize>,
    next_tag: c_int,
    largest_tag: c_int,
    pub(crate) spare: Spare,
    /// Messages of destroyed links that MPI still uses.
    leaving: Vec<(Peer, Outgoing)>,
    unwanted: Vec<Incoming>,
    /// The reason why MPI is not called any more.
    over: Option<String>,
    /// Whether the process is about to end. Then the thread that started MPI is asked to end it.
    is_leaving: bool,
    broadcast: Option<Broadcast>,
    /// The reason why a barrier of all processes could last forever: a peer has died, or a collective was abandoned
    /// here.
    barrier_blocker: Option<&'static str>,
    /// Whether some processes may not reach the barrier.
    is_doubtful: bool,
    last_poll: Instant,
    is_parked: bool,
}

/// A broadcast from rank 0. There is at most one at a time.
struct Broadcast {
    /// A buffer of the same size in all processes. After a broadcast was given up it is never freed, because the
    /// library may still write to it.
    bytes: Box<[u8; BROADCAST_BYTES]>,
    request: Option<Request>,
    /// The result, once the broadcast has ended.
    ended: Option<Checked<()>>,
}

/// Error text for a peer with another job identifier: it is in another job, or uses another communicator.
pub(crate) const NOT_IN_JOB: &str = "in another MPI job, or outside the communicator over which this transport was opened; if you call init_from_mpi several times, pass the largest communicator first";

static WORLD: Mutex<Option<World>> = Mutex::new(None);
/// The process that began to start MPI. In a forked child all of this state belongs to the parent, including the lock's
/// state.
static STARTED_IN: AtomicU32 = AtomicU32::new(0);
/// The error of a failed start. It cannot be retried, and the failed start may still be running.
static FAILED: Mutex<Option<String>> = Mutex::new(None);
/// The threads that may call MPI for a collective; set when MPI was started.
static CALLER: OnceLock<Caller> = OnceLock::new();
/// Wakes the thread that calls MPI, because another thread waits for it.
static WANTED: Condvar = Condvar::new();
/// The channel to the thread that started MPI, for its next order.
static MPI_THREAD: Mutex<Option<mpsc::Sender<Order>>> = Mutex::new(None);

/// The threads that may call MPI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Caller {
    /// Any thread at any time.
    Anybody,
    /// The thread that holds the world's lock.
    OneAtATime,
    /// The thread that started MPI.
    MpiThread,
}

/// An order to end MPI by `until`, and the channel for the result.
struct Order {
    until: Instant,
    answer: mpsc::Sender<Checked<()>>,
}

fn lock() -> MutexGuard<'static, Option<World>> {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `work` with the world.
///
/// # Errors
/// If this library has not started or joined MPI.
pub(crate) fn with<T>(work: impl FnOnce(&mut World) -> T) -> Result<T, String> {
    debug_assert!(guard_fork().is_ok(), "the engine calls nothing in a forked child");
    let mut world = lock();
    let world = world.as_mut().ok_or("MPI was not started")?;
    Ok(work(world))
}

/// Refuses a forked child, without accessing anything that its parent may have held during the fork.
pub(crate) fn guard_fork() -> Checked<()> {
    match STARTED_IN.load(Ordering::Relaxed) {
        0 => Ok(()),
        pid if pid == std::process::id() => Ok(()),
        _ => Err("MPI was started in the process from which this one was forked, and cannot be used here; use another transport \
                  in this process (ACCL_TRANSPORTS=tcp)"
            .to_owned()),
    }
}

/// Starts MPI, or joins an MPI that other code has started. If that was done before, returns the same job.
///
/// # Errors
/// One sentence with the problem and the remedy.
pub(crate) fn start(wanted: &Wanted) -> Checked<Job> {
    guard_fork()?;
    if let Some(why) = FAILED.lock().unwrap_or_else(PoisonError::into_inner).as_ref() {
        return Err(format!("an earlier start of MPI failed and cannot be repeated in the same process: {why}"));
    }
    let started = start_or_join(wanted);
    // An invalid setting may be corrected and retried, and so may joining an MPI that other code has started.
    let has_begun = MPI_THREAD.lock().unwrap_or_else(PoisonError::into_inner).is_some();
    if let (Err(why), true) = (&started, has_begun) {
        FAILED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| why.clone());
    }
    started
}

fn start_or_join(wanted: &Wanted) -> Checked<Job> {
    let until = Instant::now() + wanted.timeout;
    if let Some(world) = lock().as_ref() {
        return match &world.over {
            None => Ok(world.job.clone()),
            Some(why) => Err(why.clone()),
        };
    }
    if calls::is_finalized()? {
        return Err("MPI was finalised in this process, and cannot be started twice".to_owned());
    }
    STARTED_IN.store(std::process::id(), Ordering::Relaxed);
    if calls::is_initialized()? {
        let level = calls::level()?;
        permit_sharing(level, wanted.is_exclusive)?;
        let communicator = wanted.communicator.map_or_else(Communicator::world, Communicator::from_fortran);
        let world = join(communicator, wanted, level, true, until)?;
        calls::before_finalize(|| {
            let is_whole = with(|world| world.over.is_none() && world.barrier_blocker.is_none()).unwrap_or(false);
            if is_whole {
                let _ = leave(Instant::now() + OTHERS_END, "MPI was finalised by the code that started it");
            }
            let _ = with(|world| world.end("MPI was finalised by the code that started it"));
        })?;
        return Ok(install(world));
    }
    if wanted.communicator.is_some() {
        return Err("a communicator was passed, but MPI is not started".to_owned());
    }
    start_mpi_thread(wanted.clone(), until)
}

/// Checks whether MPI may be called in addition to the code that started it.
fn permit_sharing(level: Level, is_exclusive: bool) -> Checked<()> {
    match level {
        Level::Multiple => Ok(()),
        Level::Serialized if is_exclusive => Ok(()),
        Level::Serialized => Err(format!(
            "MPI was started with thread level {}, at which two threads may not call it at once; start it with MPI_THREAD_MULTIPLE \
             (mpi4py.rc.thread_level = \"multiple\"), or set ACCL_MPI_EXCLUSIVE=1 if no other code calls MPI from the first group on",
            level.name()
        )),
        Level::Single | Level::Funneled => Err(format!(
            "MPI was started with thread level {}, at which the threads of torch-accl may not call it; start it with \
             MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level = \"multiple\" before `from mpi4py import MPI`)",
            level.name()
        )),
    }
}

fn install(world: World) -> Job {
    let job = world.job.clone();
    let caller = match job.level {
        Level::Multiple => Caller::Anybody,
        _ if world.is_served => Caller::MpiThread,
        _ => Caller::OneAtATime,
    };
    let _ = CALLER.set(caller);
    *lock() = Some(world);
    job
}

/// Starts the MPI thread. It starts MPI, makes all MPI calls if no other thread may, and ends MPI.
fn start_mpi_thread(wanted: Wanted, until: Instant) -> Checked<Job> {
    let timeout = wanted.timeout;
    let (report, started) = mpsc::channel();
    let (orders, to_do) = mpsc::channel::<Order>();
    let serve = move || {
        crate::signals::block();
        let started = calls::init(wanted.level).and_then(|level| {
            let world = join(Communicator::world(), &wanted, level, false, until)?;
            let is_served = world.is_served;
            Ok((install(world), is_served))
        });
        let is_served = started.as_ref().is_ok_and(|(_, is_served)| *is_served);
        let _ = report.send(started.map(|(job, _)| job));
        if is_served {
            serve_until_over();
        }
        // The order to end MPI may come at any time while the process lives.
        if let Ok(Order { until, answer }) = to_do.recv() {
            // Without a world, nothing was ever sent.
            let is_idle = lock().is_none();
            let left = if is_idle { Ok(()) } else { leave(until, "the process is exiting") };
            let left = left.and_then(|()| calls::finalize());
            let _ = answer.send(left);
        }
    };
    std::thread::Builder::new()
        .name("accl-mpi".to_owned())
        .spawn(serve)
        .map_err(|why| format!("cannot create the thread that starts MPI: {why}"))?;
    *MPI_THREAD.lock().unwrap_or_else(PoisonError::into_inner) = Some(orders);
    // MPI_Init_thread itself has no deadline; if it is late, it is left running.
    match started.recv_timeout(until.saturating_duration_since(Instant::now()) + GRACE) {
        Ok(job) => job,
        Err(_) => Err(format!(
            "MPI_Init_thread has not returned for {} s; open the transport in every process of the MPI job, or start MPI in the script and \
             call torch_accl.init_from_mpi(comm) in the processes that use it",
            timeout.as_secs()
        )),
    }
}

/// Creates the communicator of the links. All processes of `from` must call this.
fn join(from: Communicator, wanted: &Wanted, level: Level, is_shared: bool, until: Instant) -> Checked<World> {
    let library = address::shortened(&calls::library()?).to_owned();
    let (rank, size) = (from.rank()?, from.size()?);
    if let Some(launched) = wanted.size.filter(|&launched| launched != size && wanted.communicator.is_none()) {
        return Err(format!(
            "{} sees a job of {size} where the launcher has started {launched}; start the job with this library's mpirun or mpiexec, or \
             build torch-accl-mpi with the mpicc that belongs to the launcher (MPICC=/path/to/mpicc make mpi)",
            calls::short_name(&library)
        ));
    }
    let communicator = from.duplicate(until).map_err(|why| {
        format!(
            "cannot create the communicator of {size} processes: {why}; open the transport in every process of the MPI job, or \
             pass torch_accl.init_from_mpi(comm) a communicator of the processes that use it"
        )
    })?;
    let first = communicator
        .duplicate(until)
        .map_err(|why| format!("cannot create the communicator for collectives: {why}"))?;
    // Leaked: if this gives up, the library may still write to it.
    let id = Box::leak(Box::new(some_number().to_le_bytes()));
    // SAFETY: the bytes are leaked, so they stay valid, and they are read only after the request has completed.
    unsafe { communicator.broadcast(id.as_mut_ptr(), id.len()) }
        .and_then(|mut request| request.complete(until))
        .map_err(|why| format!("the processes did not agree on the job's identity: {why}"))?;
    let id = u128::from_le_bytes(*id);
    let largest_tag = communicator.largest_tag()?;
    Ok(World {
        job: Job { id, library, rank, size, level, is_shared },
        communicator,
        first,
        is_first_taken: false,
        calls: Vec::new(),
        is_served: !is_shared && level < Level::Serialized,
        links: Vec::new(),
        by_tag: HashMap::new(),
        next_tag: 0,
        largest_tag,
        spare: Spare::default(),
        leaving: Vec::new(),
        unwanted: Vec::new(),
        over: None,
        is_leaving: false,
        broadcast: None,
        barrier_blocker: None,
        is_doubtful: false,
        last_poll: Instant::now(),
        is_parked: false,
    })
}

/// A random number, different in every job.
fn some_number() -> u128 {
    let half = || u128::from(RandomState::new().hash_one(std::process::id()));
    (half() << 64) | half()
}

/// Returns the bytes that rank 0 of the job passes. All processes of the job must call this.
///
/// # Errors
/// If not all processes have called in time, if there are too many bytes, or if MPI has failed or ended.
pub(crate) fn broadcast(given: &[u8], timeout: Duration) -> Checked<Vec<u8>> {
    let until = Instant::now() + timeout;
    let length = u16::try_from(given.len()).ok().filter(|&length| usize::from(length) + 2 <= BROADCAST_BYTES);
    let length = length.ok_or_else(|| format!("{} bytes are too many for one broadcast", given.len()))?;
    let mut bytes = Box::new([0; BROADCAST_BYTES]);
    bytes[..2].copy_from_slice(&length.to_le_bytes());
    bytes[2..2 + given.len()].copy_from_slice(given);
    with(|world| {
        if let Some(why) = &world.over {
            return Err(why.clone());
        }
        if world.broadcast.is_some() {
            return Err("another thread is in a broadcast of the job".to_owned());
        }
        world.broadcast = Some(Broadcast { bytes, request: None, ended: None });
        Ok(())
    })??;
    loop {
        let is_late = Instant::now() >= until;
        let outcome = with(|world| {
            world.wake();
            if !world.is_served {
                world.move_broadcast();
            }
            match world.broadcast.take() {
                Some(Broadcast { ended: Some(ended), bytes, .. }) => Some(ended.map(|()| bytes)),
                given_up if is_late || world.over.is_some() => {
                    std::mem::forget(given_up);
                    Some(Err("not all processes of the MPI job took part".to_owned()))
                }
                under_way => {
                    world.broadcast = under_way;
                    None
                }
            }
        })?;
        if let Some(outcome) = outcome {
            let bytes = outcome?;
            let length = usize::from(u16::from_le_bytes([bytes[0], bytes[1]])).min(BROADCAST_BYTES - 2);
            return Ok(bytes[2..2 + length].to_vec());
        }
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Ends MPI, which is a barrier: all processes of the job must call this.
///
/// # Errors
/// If not all processes have called in time, or if MPI reports an error. Then the process cannot exit normally.
pub(crate) fn finish(timeout: Duration) -> Checked<()> {
    if guard_fork().is_err() {
        return Ok(());
    }
    let is_doubtful = with(|world| world.is_doubtful).unwrap_or(false);
    let timeout = if is_doubtful { timeout.min(DOUBTFUL) } else { timeout };
    let until = Instant::now() + timeout;
    let Some(mpi_thread) = MPI_THREAD.lock().unwrap_or_else(PoisonError::into_inner).take() else {
        // Other code has started MPI, or it was never started.
        let _ = with(|world| world.end("the process is exiting"));
        return Ok(());
    };
    let barrier_blocker = with(|world| {
        world.is_leaving = true;
        WANTED.notify_all();
        world.barrier_blocker
    });
    if let Ok(Some(why)) = barrier_blocker {
        // The launcher ends a job that has lost a process, or in which a process exits without ending MPI.
        let _ = with(|world| world.end(why));
        return Ok(());
    }
    let (answer, answered) = mpsc::channel();
    mpi_thread.send(Order { until, answer }).map_err(|_| "the thread that started MPI has exited".to_owned())?;
    let left = || until.saturating_duration_since(Instant::now()) + GRACE;
    let answer = answered.recv_timeout(left().min(PATIENCE)).or_else(|_| {
        eprintln!(
            "torch_accl_mpi: process {} is exiting and waits for the other processes of its MPI job, as MPI_Finalize requires",
            std::process::id()
        );
        answered.recv_timeout(left())
    });
    match answer.unwrap_or_else(|_| Err(format!("MPI_Finalize has not returned for {} s", timeout.as_secs()))) {
        // Handled like a known reason in `barrier_blocker`: MPI is not ended.
        Err(_) if is_doubtful => Ok(()),
        answer => answer,
    }
}

/// Sends and receives until all processes of the job have reached this point. Then no link calls MPI any more. A
/// process that ended earlier would leave other processes with messages that are never received.
fn leave(until: Instant, why: &str) -> Checked<()> {
    let mut barrier = None;
    loop {
        let is_over = with(|world| {
            world.serve();
            if barrier.is_none() && world.is_at_rest() {
                barrier = Some(world.communicator.barrier()?);
            }
            let Some(barrier) = &mut barrier else { return Ok(false) };
            if !barrier.is_complete()? {
                return Ok(false);
            }
            while world.take_in()? {}
            world.end(why);
            Ok(true)
        });
        match is_over.and_then(|is_over| is_over) {
            Ok(true) => return Ok(()),
            Ok(false) if Instant::now() < until => std::thread::sleep(Duration::from_micros(50)),
            Ok(false) => {
                let _ = with(|world| world.end(why));
                return Err("not all processes of the MPI job reached their exit in time".to_owned());
            }
            Err(why) => return Err(why),
        }
    }
}

/// The loop of the MPI thread, if only this thread may call MPI.
fn serve_until_over() {
    let mut guard = lock();
    loop {
        let Some(world) = guard.as_mut() else { return };
        if world.over.is_some() || world.is_leaving {
            return;
        }
        world.serve();
        let unwatched = world.last_poll.elapsed();
        if unwatched >= ATTENTION {
            world.is_parked = true;
            // The pause grows like an armed link's. If nothing is in flight, another thread wakes this one when needed.
            let pause = (unwatched / 8).min(LONGEST_PAUSE);
            guard = if world.is_at_rest() {
                WANTED.wait(guard).unwrap_or_else(PoisonError::into_inner)
            } else {
                WANTED.wait_timeout(guard, pause).unwrap_or_else(PoisonError::into_inner).0
            };
            if let Some(world) = guard.as_mut() {
                world.is_parked = false;
            }
        } else {
            drop(guard);
            std::thread::yield_now();
            guard = lock();
        }
    }
}

/// Queues a collective. It starts soon, and advances whenever it is tested.
pub(crate) fn start_collective(call: &Arc<Mutex<Call>>) -> Checked<()> {
    with(|world| {
        if let Some(why) = &world.over {
            return Err(why.clone());
        }
        if world.is_served {
            world.calls.push(call.clone());
            world.wake();
        }
        Ok(())
    })?
}

/// Advances a collective, if this thread may call MPI. Returns its result once it has ended.
pub(crate) fn test_collective(call: &Mutex<Call>) -> Option<Checked<()>> {
    let lock_call = || lock_of(call);
    match CALLER.get() {
        Some(Caller::Anybody) => unless_over(|| Ok(lock_call().step())).unwrap_or_else(|why| Some(Err(why))),
        Some(Caller::OneAtATime) => with(|world| match &world.over {
            Some(why) => Some(Err(why.clone())),
            None => lock_call().step(),
        })
        .unwrap_or_else(|why| Some(Err(why))),
        Some(Caller::MpiThread) => {
            let _ = with(World::wake);
            lock_call().ended()
        }
        None => Some(Err("MPI was not started".to_owned())),
    }
}

/// Gives a collective up. A collective that a process leaves unfinished keeps MPI from ending properly.
pub(crate) fn abandon_collective(call: &Arc<Mutex<Call>>) {
    let _ = with(|world| {
        world.note_abandonment();
        world.calls.retain(|known| !Arc::ptr_eq(known, call));
    });
    lock_of(call).abandon();
}

impl World {
    /// Whether the communicator from MPI's start is free.
    ///
    /// # Errors
    /// If MPI has ended.
    pub(crate) fn has_first_communicator(&self) -> Checked<bool> {
        self.over.clone().map_or(Ok(!self.is_first_taken), Err)
    }

    /// Gives that communicator to a group. Returns false if another group has it.
    pub(crate) fn take_first_communicator(&mut self) -> bool {
        !std::mem::replace(&mut self.is_first_taken, true)
    }

    /// Makes that communicator free again, because its group never used it.
    pub(crate) fn give_back_first_communicator(&mut self) {
        self.is_first_taken = false;
    }

    pub(crate) fn first_communicator(&self) -> Communicator {
        self.first
    }

    /// A tag for creating a communicator, from a number that all of its processes have.
    pub(crate) fn tag_of(&self, key: u64) -> c_int {
        let tags = u64::from(self.largest_tag.unsigned_abs()) + 1;
        c_int::try_from(key % tags).unwrap_or(0)
    }

    /// Creates one end of a link. Returns its index and its address.
    ///
    /// # Errors
    /// If MPI has ended.
    pub(crate) fn open(&mut self, max_payload_bytes: usize) -> Checked<(usize, Address)> {
        if let Some(why) = &self.over {
            return Err(why.clone());
        }
        while self.by_tag.contains_key(&self.next_tag) {
            self.next_tag = self.tag_after(self.next_tag);
        }
        let tag = self.next_tag;
        self.next_tag = self.tag_after(tag);
        let link = Link::new(tag, max_payload_bytes);
        let index = match self.links.iter().position(Option::is_none) {
            Some(index) => {
                self.links[index] = Some(link);
                index
            }
            None => {
                self.links.push(Some(link));
                self.links.len() - 1
            }
        };
        self.by_tag.insert(tag, index);
        Ok((index, Address { job: self.job.id, rank: self.job.rank, tag, library: self.job.library.clone() }))
    }

    fn tag_after(&self, tag: c_int) -> c_int {
        if tag >= self.largest_tag { 0 } else { tag + 1 }
    }

    /// Sets the peer of a link.
    ///
    /// # Errors
    /// If the peer is not in this job or uses another library.
    pub(crate) fn connect(&mut self, index: usize, peer: &Address, max_payload_bytes: usize) -> Checked<()> {
        if peer.library != self.job.library {
            return Err(format!(
                "this process uses {}, the peer uses {} or another build of it; start all ranks with the same MPI library",
                calls::short_name(&self.job.library),
                calls::short_name(&peer.library)
            ));
        }
        if peer.job != self.job.id || peer.rank < 0 || peer.rank >= self.job.size {
            return Err(format!("the peer is {NOT_IN_JOB}"));
        }
        let link = self.link(index)?;
        link.max_payload_bytes = max_payload_bytes.min(link.max_payload_bytes);
        link.peer = Some(Peer { rank: peer.rank, tag: peer.tag });
        Ok(())
    }

    pub(crate) fn link(&mut self, index: usize) -> Checked<&mut Link> {
        self.links.get_mut(index).and_then(Option::as_mut).ok_or_else(|| "the link no longer exists".to_owned())
    }

    /// A link, and the unused buffers for its frames.
    pub(crate) fn link_and_spare(&mut self, index: usize) -> Option<(&mut Link, &mut Spare)> {
        Some((self.links.get_mut(index)?.as_mut()?, &mut self.spare))
    }

    pub(crate) fn destroy(&mut self, index: usize) {
        let Some(link) = self.links.get_mut(index).and_then(Option::take) else { return };
        self.by_tag.remove(&link.tag);
        let peer = link.peer;
        let (outgoing, incoming) = link.into_remains(&mut self.spare);
        if let Some(peer) = peer {
            self.leaving.extend(outgoing.into_iter().map(|message| (peer, message)));
        }
        self.unwanted.extend(incoming);
        self.wake();
    }

    /// Handles a committed frame. Sends it now if this thread may call MPI.
    pub(crate) fn send(&mut self, index: usize) {
        self.wake();
        if !self.is_served && self.over.is_none() {
            self.send_all(index);
        }
        if let Some((link, _)) = self.link_and_spare(index) {
            link.ring();
        }
    }

    fn send_all(&mut self, index: usize) {
        let World { links, communicator, .. } = self;
        let Some(link) = links.get_mut(index).and_then(Option::as_mut) else { return };
        let Some(peer) = link.peer else { return };
        let first = link.outgoing.iter().position(|message| message.request.is_none()).unwrap_or(link.outgoing.len());
        for message in link.outgoing.range_mut(first..) {
            // SAFETY: the buffer stays in `outgoing` or `leaving` until its request has completed, and is not written
            // to there.
            let sent = unsafe { communicator.send(message.buffer.as_ptr(), message.bytes, peer.rank, peer.tag) };
            match sent {
                Ok(request) => message.request = Some(request),
                Err(why) => {
                    link.fail(why);
                    return;
                }
            }
        }
    }

    /// Handles received messages and completed sends, if this thread may call MPI.
    pub(crate) fn turn(&mut self, index: usize) {
        self.wake();
        if self.is_served || self.over.is_some() {
            return;
        }
        self.settle(index);
        self.settle_remains();
        // Messages for this link are handled before more are received.
        self.take_in_several(|world| {
            let link = world.links.get(index).and_then(Option::as_ref);
            link.is_some_and(|link| !matches!(link.poll(), Polled::Nothing))
        });
    }

    /// Records a poll, and wakes the thread that calls MPI.
    fn wake(&mut self) {
        if self.is_served {
            self.last_poll = Instant::now();
            if self.is_parked {
                WANTED.notify_one();
            }
        }
    }

    /// Handles the completed sends and receives of a link.
    fn settle(&mut self, index: usize) {
        if let Some((link, spare)) = self.link_and_spare(index)
            && let Err(why) = link.settle(spare)
        {
            link.fail(why);
        }
    }

    /// Handles the completed sends and receives of destroyed links.
    fn settle_remains(&mut self) {
        let World { leaving, unwanted, spare, communicator, .. } = self;
        for (peer, mut message) in std::mem::take(leaving) {
            if message.request.is_none() {
                // SAFETY: the buffer stays in `leaving` until its request has completed, and is not written to there.
                let sent = unsafe { communicator.send(message.buffer.as_ptr(), message.bytes, peer.rank, peer.tag) };
                message.request = sent.ok();
            }
            let Outgoing { buffer, bytes, request } = message;
            if let Some((buffer, request)) = still_under_way(buffer, request, spare) {
                leaving.push((peer, Outgoing { buffer, bytes, request: Some(request) }));
            }
        }
        for Incoming { buffer, bytes, request } in std::mem::take(unwanted) {
            if let Some((buffer, request)) = still_under_way(buffer, request, spare) {
                unwanted.push(Incoming { buffer, bytes, request: Some(request) });
            }
        }
    }

    /// Receives the next message of any link. Returns false if there is no message.
    fn take_in(&mut self) -> Checked<bool> {
        let Some(message) = self.communicator.probe()? else { return Ok(false) };
        let Message { source, tag, bytes, .. } = message;
        let mut buffer = self.spare.take(bytes.max(1));
        // SAFETY: the buffer has room for the message, and stays in `incoming` or `unwanted` until the request has
        // completed.
        let mut request = unsafe { message.receive(buffer.as_mut_ptr()) }?;
        let request = match request.is_complete() {
            Ok(true) => None,
            Ok(false) => Some(request),
            Err(why) => {
                // Leaked, because the library may still write to it.
                std::mem::forget(buffer);
                return Err(why);
            }
        };
        let incoming = Incoming { buffer, bytes, request };
        let link = self.by_tag.get(&tag).and_then(|&index| self.links[index].as_mut());
        match link.filter(|link| link.peer.is_none_or(|peer| peer.rank == source)) {
            Some(link) => {
                if bytes < HEAD_BYTES || bytes - HEAD_BYTES > link.max_payload_bytes {
                    link.fail(format!("a message of {bytes} bytes from MPI rank {source} is not a valid frame"));
                }
                link.arrives(incoming);
            }
            // The message's link was destroyed.
            None => self.unwanted.push(incoming),
        }
        Ok(true)
    }

    fn fail_all(&mut self, why: &str) {
        for link in self.links.iter_mut().flatten() {
            link.fail(why);
        }
    }

    /// Records that a peer has ended without disconnecting.
    pub(crate) fn note_death(&mut self) {
        self.barrier_blocker.get_or_insert("a process of the job has died");
    }

    /// Records that a collective was abandoned in this process.
    pub(crate) fn note_abandonment(&mut self) {
        self.barrier_blocker.get_or_insert("a collective of MPI was abandoned");
    }

    /// Records that a group has failed whose collectives MPI runs. Its other processes may have abandoned a collective.
    pub(crate) fn note_doubt(&mut self) {
        self.is_doubtful = true;
    }

    /// Starts the broadcast from rank 0, or checks whether it has completed.
    fn move_broadcast(&mut self) {
        let World { broadcast: Some(broadcast), communicator, .. } = self else { return };
        if broadcast.ended.is_some() {
            return;
        }
        let begun = match broadcast.request.take() {
            Some(request) => Ok(request),
            // SAFETY: the bytes stay valid until the request has completed, or forever, and are not accessed before.
            None => unsafe { communicator.broadcast(broadcast.bytes.as_mut_ptr(), BROADCAST_BYTES) },
        };
        match begun.and_then(|mut request| request.is_complete().map(|is_complete| (request, is_complete))) {
            Ok((_, true)) => broadcast.ended = Some(Ok(())),
            Ok((request, false)) => broadcast.request = Some(request),
            Err(why) => broadcast.ended = Some(Err(why)),
        }
    }

    /// One progress pass over all links and collectives.
    fn serve(&mut self) {
        self.move_broadcast();
        self.calls.retain(|call| lock_of(call).step().is_none());
        for index in 0..self.links.len() {
            self.send_all(index);
            self.settle(index);
        }
        self.settle_remains();
        self.take_in_several(|_| false);
    }

    /// Receives messages until `is_enough` or until there are none. The number is limited, so that other work gets its
    /// turn.
    fn take_in_several(&mut self, is_enough: impl Fn(&World) -> bool) {
        for _ in 0..MESSAGES {
            match self.take_in() {
                Ok(true) if !is_enough(self) => {}
                Ok(_) => break,
                Err(why) => {
                    self.fail_all(&why);
                    break;
                }
            }
        }
    }

    fn is_at_rest(&self) -> bool {
        self.leaving.is_empty()
            && self.unwanted.is_empty()
            && self.calls.is_empty()
            && !are_at_work()
            && !are_under_way()
            && self.broadcast.as_ref().is_none_or(|broadcast| broadcast.ended.is_some())
            && self.links.iter().flatten().all(Link::is_at_rest)
    }

    /// Stops all MPI calls from now on.
    fn end(&mut self, why: &str) {
        self.over.get_or_insert_with(|| why.to_owned());
        end_all();
        self.fail_all(why);
        for call in self.calls.drain(..) {
            lock_of(&call).end(why);
            std::mem::forget(call);
        }
        // Memory that MPI may still use is never freed.
        std::mem::forget((std::mem::take(&mut self.leaving), std::mem::take(&mut self.unwanted)));
        for link in self.links.iter_mut().flatten() {
            std::mem::forget((std::mem::take(&mut link.outgoing), std::mem::take(&mut link.incoming)));
        }
        WANTED.notify_all();
    }
}

/// Returns the buffer and its request if MPI still uses the buffer. Otherwise gives the buffer back.
fn still_under_way(buffer: Buffer, request: Option<Request>, spare: &mut Spare) -> Option<(Buffer, Request)> {
    let mut request = match request {
        Some(request) => request,
        None => {
            spare.give_back(buffer);
            return None;
        }
    };
    match request.is_complete() {
        Ok(false) => return Some((buffer, request)),
        Ok(true) => spare.give_back(buffer),
        // Leaked, because the library may still use it.
        Err(_) => std::mem::forget(buffer),
    }
    None
}

//! Bridged functions on groups.

use std::net::{IpAddr, ToSocketAddrs};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use accl_engine::{
    Blocks, Call, CallDesc, Engine, GroupRole, GroupSpec, Mode, Phases, Ran, TensorDesc, Waited as EngineWaited,
};
use accl_types::config::{Config, LogLevel, ProfileNames};
use accl_types::{Collective, Dtype, Elems, Error, ErrorKind, Rank, ReduceOp, Result};
use cxx::UniquePtr;

use crate::bridge::ffi::{
    self, CallArgs, Described, GroupArgs, Numbered, Outcome, PhaseNanos, Profiled, Status, TensorView, Waited,
};
use crate::compression;
use crate::devices::Opener;
use crate::guard::{FromError, bridged};
use crate::log;
use crate::snapshot;
use crate::status::INTERRUPTED;
use crate::store::TorchStore;
use crate::ticket::Ticket;

/// Name in place of an option's: why Python cannot make the group on this rank, so that the others learn it.
const REFUSAL: &str = "refusal";
/// The option of the log's level.
const LOG: &str = "log";
/// How long a call that was aborted may take to end.
const STOPPING: Duration = Duration::from_secs(1);

/// The process's engine, made by its first group: that group's settings of process scope hold.
#[derive(Default)]
pub struct Runtime(Mutex<Slot>);

#[derive(Default)]
struct Slot {
    engine: Option<Arc<Engine>>,
    has_made_groups: bool,
    /// It is settled whether this process reports the variables that have no effect.
    has_warned: bool,
    /// The process that the engine belongs to: a forked child makes its own.
    pid: u32,
}

impl Slot {
    fn engine_of_this_process(&mut self, config: &Config, rank: u32) -> Arc<Engine> {
        let pid = std::process::id();
        if self.pid != pid {
            // The parent's engine stays as it is: its threads and connections are not here.
            std::mem::forget(self.engine.take());
            *self = Self { pid, ..Self::default() };
        }
        let engine = self.engine.get_or_insert_with(|| open(config.clone())).clone();
        // Launchers give all ranks the same variables, and one of them reports it. A process's first group decides: of sub-groups, many
        // processes are the first rank.
        if !std::mem::replace(&mut self.has_warned, true) && rank == 0 {
            log::warn_of_unused_variables();
        }
        engine
    }
}

impl Runtime {
    /// The engine, if a group was made or is being made.
    pub(crate) fn engine(&self) -> Option<Arc<Engine>> {
        self.slot().engine.clone()
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        // Nothing can panic while the slot is locked but its own assignments.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a group in the process's engine. An engine that has made none binds nobody to its settings.
    fn create(&self, config: Config, args: &GroupArgs, store: &ffi::StoreRef) -> Result<Inner> {
        let names = config.profile_names;
        let spec = spec_of(config, args)?;
        let engine = self.slot().engine_of_this_process(&spec.config, args.rank);
        let made = engine.create_group(spec, &TorchStore::new(store), &mut ffi::python_interrupted);
        let made = made.map(|group| Inner { engine, group, names });
        let mut slot = self.slot();
        if let Ok(made) = &made {
            slot.has_made_groups = true;
            // Another thread whose group failed meanwhile may have given the engine up.
            slot.engine = Some(made.engine.clone());
        } else if !slot.has_made_groups {
            slot.engine = None;
        }
        made
    }
}

/// A new engine, and its log.
fn open(config: Config) -> Arc<Engine> {
    log::follow(config.log);
    let engine = accl_calibrate::engine(config);
    engine.open_devices_with(Arc::new(Opener));
    engine
}

/// A group, empty until [`group_create`] filled it.
#[derive(Default)]
pub struct Group(Option<Inner>);

struct Inner {
    engine: Arc<Engine>,
    group: Arc<accl_engine::Group>,
    names: ProfileNames,
}

impl Group {
    fn inner(&self) -> Result<&Inner> {
        self.0.as_ref().ok_or_else(|| Error::internal("a group was used before it was made"))
    }

    pub(crate) fn group(&self) -> Result<&Arc<accl_engine::Group>> {
        Ok(&self.inner()?.group)
    }
}

/// An empty group.
pub(crate) fn new_group() -> Box<Group> {
    Box::default()
}

impl Drop for Group {
    fn drop(&mut self) {
        // C++ drops groups outside any guard; a panic must not reach it.
        let inner = self.0.take();
        let _ = catch_unwind(AssertUnwindSafe(move || drop(inner)));
    }
}

bridged! {
    /// Makes the group: collective over its ranks. Blocks; Python's signal handlers run meanwhile.
    fn group_create(group: &mut Group, runtime: &Runtime, args: &GroupArgs, store: &ffi::StoreRef) -> Status {
        let config = config(args).inspect_err(|error| refuse(args, store, error))?;
        group.0 = Some(runtime.create(config, args, store)?);
        Ok(Status::ok())
    }

    /// As [`group_create`], out of another group, in whose engine it is.
    fn group_create_beside(group: &mut Group, other: &Group, args: &GroupArgs, store: &ffi::StoreRef) -> Status {
        let engine = other.inner()?.engine.clone();
        let config = config(args).inspect_err(|error| refuse(args, store, error))?;
        let names = config.profile_names;
        let spec = spec_of(config, args)?;
        let made = engine.create_group(spec, &TorchStore::new(store), &mut ffi::python_interrupted)?;
        group.0 = Some(Inner { engine, group: made, names });
        Ok(Status::ok())
    }

    /// Makes a call and waits for it; Python's signal handlers run meanwhile. However it ends, nothing touches the call's
    /// tensors any more, unless its status says that their memory has to stay.
    fn group_call(group: &Group, args: &CallArgs) -> Waited {
        complete(group.group()?, &call_desc(args, Mode::Blocking)?)
    }

    /// As [`group_call`], with where its time went if the arguments ask for it.
    fn group_call_profiled(group: &Group, args: &CallArgs) -> Profiled {
        let desc = call_desc(args, Mode::Blocking)?;
        let waited = complete(group.group()?, &desc).unwrap_or_else(Waited::from_error);
        Ok(Profiled { waited, phases: PhaseNanos::of(desc.phases.as_deref()) })
    }

    /// Starts a call that the caller does not wait for at once.
    fn group_submit(group: &Group, args: &CallArgs, ticket: &mut Ticket) -> Status {
        let group = group.group()?;
        let desc = call_desc(args, Mode::Async)?;
        let phases = desc.phases.clone();
        ticket.set_call(group.clone(), group.submit(desc)?, phases);
        Ok(Status::ok())
    }

    /// Runs a task on a completion thread.
    fn group_spawn(group: &Group, task: UniquePtr<ffi::Task>, ticket: &mut Ticket) -> Status {
        let inner = group.inner()?;
        ticket.spawn(&inner.engine, inner.group.clone(), task)?;
        Ok(Status::ok())
    }

    /// Reserves consecutive call numbers; the first of them.
    fn group_reserve(group: &Group, count: u64) -> Numbered {
        Ok(Numbered::of(group.group()?.reserve_seqs(count)? as i64))
    }

    /// Ends what numbers were reserved for, well or with an error.
    fn group_conclude(group: &Group, first: i64, count: u64, outcome: &Status) -> Status {
        let first = u64::try_from(first).map_err(|_| Error::internal("a number that was not reserved was given up"))?;
        group.group()?.conclude_seqs(first..first + count, outcome.to_error().as_ref());
        Ok(Status::ok())
    }

    /// The number that the next call will have.
    fn group_next_seq(group: &Group) -> Numbered {
        Ok(Numbered::of(group.group()?.next_seq() as i64))
    }

    /// A barrier that names the ranks that did not come. Blocks; Python's signal handlers run meanwhile.
    fn group_monitored_barrier(group: &Group, timeout_ms: i64, wait_all: bool) -> Waited {
        let (group, timeout) = (group.group()?, millis(timeout_ms).unwrap_or_default());
        unless_interrupted(|interrupt| group.monitored_barrier(timeout, wait_all, interrupt))
    }

    /// Makes links to all ranks. Blocks; Python's signal handlers run meanwhile.
    fn group_connect_all(group: &Group) -> Waited {
        let group = group.group()?;
        unless_interrupted(|interrupt| group.connect_all(interrupt))
    }

    /// Fails all calls of the group, now and later.
    fn group_abort(group: &Group, reason: &str) -> Status {
        group.group()?.abort(reason);
        Ok(Status::ok())
    }

    /// Leaves the group, and waits if asked until the other ranks have what calls that are done have sent. Python's signal
    /// handlers run meanwhile. Fails only to tell of a disagreement that no call could tell: who leaves needs no group.
    fn group_shutdown(group: &Group, wait: bool) -> Status {
        let group = group.group()?;
        let left = if wait { group.shutdown_unless(&mut ffi::python_interrupted) } else { group.leave() };
        match left {
            Err(error) if error.kind == ErrorKind::Mismatch => Err(error),
            Ok(()) | Err(_) => Ok(Status::ok()),
        }
    }

    /// Sets the deadline of calls made from now on.
    fn group_set_timeout(group: &Group, timeout_ms: i64) -> Status {
        group.group()?.set_timeout(timeout_of(timeout_ms)?);
        Ok(Status::ok())
    }

    /// Lets calls made from now on record their duration.
    fn group_enable_timing(group: &Group) -> Status {
        group.group()?.enable_timing();
        Ok(Status::ok())
    }

    /// The cause that poisoned the group.
    fn group_first_error(group: &Group) -> Status {
        Ok(group.group()?.error().map_or_else(Status::ok, Status::from_error))
    }

    /// How its calls are called by the profiler, a code of `ProfileNames`.
    fn group_profile_names(group: &Group) -> Numbered {
        Ok(Numbered::of(group.inner()?.names as i64))
    }

    /// Name, rank, world and links of the group, one a line.
    fn group_describe(group: &Group) -> Described {
        Ok(Described { text: group.group()?.describe(), status: Status::ok() })
    }

    /// What the group is doing and has done, as JSON.
    fn group_snapshot(group: &Group) -> Described {
        Ok(Described { text: snapshot::to_json(&group.group()?.snapshot()), status: Status::ok() })
    }
}

/// Blocks in `wait`, which asks now and then whether a signal handler of Python has raised; what that raised counts, and not the
/// error that the wait then ends with.
fn unless_interrupted(wait: impl FnOnce(&mut dyn FnMut() -> bool) -> Result<()>) -> Result<Waited> {
    let mut is_interrupted = false;
    let result = wait(&mut || {
        is_interrupted |= ffi::python_interrupted();
        is_interrupted
    });
    if is_interrupted {
        return Ok(Waited::interrupted());
    }
    result.map(|()| Waited::plain(Outcome::Done))
}

/// Makes a call and waits for it, as [`group_call`].
pub(crate) fn complete(group: &accl_engine::Group, desc: &CallDesc) -> Result<Waited> {
    let call = match group.run(desc)? {
        Ran::Done(_) => return Ok(Waited::plain(Outcome::Done)),
        Ran::Pending(call) => *call,
    };
    let leaving = Leaving { group, call: &call };
    let waited = call.wait(None, &mut ffi::python_interrupted);
    drop(leaving);
    let holds_memory = !call.is_done() || call.error().is_some_and(|error| error.context.holds_memory);
    match waited {
        EngineWaited::Done => Ok(Waited::plain(Outcome::Done)),
        EngineWaited::Failed(error) | EngineWaited::TimedOut(error) => Err(error),
        EngineWaited::Interrupted => Ok(Waited::interrupted_with(holds_memory)),
    }
}

/// Stops a call that is left while it runs, also by a panic: an interrupt, or a wait that broke.
struct Leaving<'a> {
    group: &'a accl_engine::Group,
    call: &'a Call,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if !self.call.is_done() {
            self.group.abort(INTERRUPTED);
            self.call.wait(Some(STOPPING), &mut || false);
        }
    }
}

/// The environment's settings, then the options', which win.
fn config(args: &GroupArgs) -> Result<Config> {
    let mut config = accl_engine::config_from_environment()?;
    for pair in args.settings.chunks_exact(2) {
        if pair[0] == REFUSAL {
            return Err(Error::configuration(pair[1].clone()));
        }
        config.set_option(&pair[0], &pair[1])?;
    }
    accl_engine::check_settings(&config)?;
    Ok(config)
}

/// Lets the other ranks know why this one cannot make the group.
fn refuse(args: &GroupArgs, store: &ffi::StoreRef, error: &Error) {
    if let Ok(spec) = spec_of(Config::default(), args) {
        // There may be no engine yet that prints what is said.
        log::during(log_level(args), || {
            accl_engine::refuse_group(&spec, &TorchStore::new(store), error, &mut ffi::python_interrupted);
        });
    }
}

/// What is to be printed of a group whose settings are refused.
fn log_level(args: &GroupArgs) -> LogLevel {
    let mut config = accl_engine::config_from_environment().unwrap_or_default();
    let options = args.settings.chunks_exact(2).filter(|pair| pair[0] == LOG).map(|pair| pair[1].clone());
    for level in options {
        // A wrong one leaves the default.
        let _ = config.set_option(LOG, &level);
    }
    config.log
}

fn spec_of(config: Config, args: &GroupArgs) -> Result<GroupSpec> {
    Ok(GroupSpec {
        name: args.name.to_owned(),
        rank: Rank(args.rank),
        world: args.world,
        timeout: timeout_of(args.timeout_ms)?,
        config,
        master: address_of(args.master),
        global_ranks: args.global_ranks.to_vec(),
        role: if args.is_default { GroupRole::Default } else { GroupRole::Other },
    })
}

/// The first address of a host name; `None` when there is none, or it cannot be resolved.
fn address_of(host: &str) -> Option<IpAddr> {
    if host.is_empty() {
        return None;
    }
    (host, 0).to_socket_addrs().ok()?.next().map(|address| address.ip())
}

/// The timeout of a group.
///
/// # Errors
/// `InvalidArgument` for a negative one.
fn timeout_of(timeout_ms: i64) -> Result<Duration> {
    let refused = || {
        Error::invalid_argument(format!(
            "timeout of {timeout_ms} ms; give one that is not negative (a `timedelta` of more than 292 years becomes negative in torch)"
        ))
    };
    millis(timeout_ms).ok_or_else(refused)
}

/// `None` for a negative number of milliseconds.
pub(crate) fn millis(timeout_ms: i64) -> Option<Duration> {
    u64::try_from(timeout_ms).ok().map(Duration::from_millis)
}

pub(crate) fn call_desc(args: &CallArgs, mode: Mode) -> Result<CallDesc> {
    let collective =
        Collective::from_code(args.collective.repr).ok_or_else(|| Error::internal("unknown code of a collective"))?;
    let op = ReduceOp::from_code(args.op.repr).ok_or_else(|| Error::internal("unknown code of a reduce operator"))?;
    Ok(CallDesc {
        op,
        factor: args.factor,
        root: Rank(args.root),
        peer: u32::try_from(args.peer).ok().map(Rank),
        tag: args.tag,
        timeout: millis(args.timeout_ms),
        inputs: blocks(args.inputs, args.input_blocks)?,
        outputs: blocks(args.outputs, args.output_blocks)?,
        equal_blocks: args.equal_blocks,
        mode,
        seq: u64::try_from(args.seq).ok(),
        encoding: compression::current(),
        phases: (args.is_profiled && !collective.is_point_to_point()).then(Phases::new),
        ..CallDesc::new(collective, dtype(args.dtype)?)
    })
}

fn blocks(views: &[TensorView], counts: &[u32]) -> Result<Blocks> {
    let mut views = views;
    let mut blocks = Blocks::default();
    for &count in counts {
        let (block, rest) = views
            .split_at_checked(count as usize)
            .ok_or_else(|| Error::internal("a call names more tensors than it describes"))?;
        views = rest;
        match block {
            [one] => blocks.push([tensor_desc(one)?]),
            several => blocks.push(several.iter().map(tensor_desc).collect::<Result<Vec<_>>>()?),
        }
    }
    Ok(blocks)
}

fn tensor_desc(view: &TensorView) -> Result<TensorDesc> {
    let dtype = dtype(view.dtype)?;
    let ptr = view.data as *mut u8;
    let tensor = if view.sizes == 0 {
        TensorDesc::dense(ptr, dtype, Elems(view.count as u64))
    } else {
        let shape = |address: usize| {
            // SAFETY: the shim gives the address of `dim` numbers of a tensor that it holds during this call.
            unsafe { slice::from_raw_parts(address as *const i64, view.dim) }
        };
        TensorDesc::strided(ptr, dtype, shape(view.sizes), shape(view.strides))?
    };
    Ok(tensor.viewed(view.conj, view.neg))
}

fn dtype(code: ffi::Dtype) -> Result<Dtype> {
    Dtype::from_code(code.repr).ok_or_else(|| Error::internal("unknown code of a dtype"))
}

//! Bridged functions on groups.

use std::net::{IpAddr, ToSocketAddrs};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use accl_accelerator::{GroupRoute, PeerRoute};
use accl_engine::offload::OffloadKind;
use accl_engine::{
    Call, CallDesc, Engine, GroupRole, GroupSpec, Mode, Phases, Submitted, Waited as EngineWaited,
    refuse_undefined_outputs,
};
use accl_types::config::{Config, LogLevel, ProfileNames};
use accl_types::{Dtype, Error, ErrorKind, Rank, Result};
use cxx::{SharedPtr, UniquePtr};

use crate::accelerator::{TorchAccelerators, complete_eagerly};
use crate::bridge::ffi::{
    self, AcceleratorCall, CallArgs, Described, ErrorType, GroupArgs, Numbered, Outcome, PhaseNanos, Profiled, Status,
    Waited,
};
use crate::calls::{call_desc, dense_blocks, millis};
use crate::guard::{FromError, bridged};
use crate::in_order::{InOrder, Memory};
use crate::log;
use crate::offloads;
use crate::snapshot;
use crate::status::INTERRUPTED;
use crate::store::TorchStore;
use crate::ticket::Ticket;

/// An option name that carries the reason why Python cannot create the group on this rank, so that the other ranks
/// learn it.
const REFUSAL: &str = "refusal";
/// The option of the log level.
const LOG: &str = "log";
/// Maximum time for an aborted call to end.
const STOPPING: Duration = Duration::from_secs(1);

/// The process's engine, created by its first group. That group's settings of process scope are used.
#[derive(Default)]
pub struct Runtime(Mutex<Slot>);

#[derive(Default)]
struct Slot {
    engine: Option<Arc<Engine>>,
    /// Kinds of offloads. They outlive an engine whose first group could not be created: a thread of its device may
    /// still run, and the next engine waits for it.
    offloads: Option<Vec<Arc<dyn OffloadKind>>>,
    /// Tensors on accelerators. Created with the first group.
    accelerators: Option<Arc<TorchAccelerators>>,
    has_made_groups: bool,
    /// Whether it is decided if this process reports variables that have no effect.
    has_warned: bool,
    /// The process that the engine belongs to: a forked child creates its own.
    pid: u32,
}

impl Slot {
    fn engine_of_this_process(&mut self, config: &Config, rank: u32) -> Result<Arc<Engine>> {
        let pid = std::process::id();
        if self.pid != pid {
            // The parent's engine is leaked, because its threads and connections do not exist in this process.
            std::mem::forget((self.engine.take(), self.offloads.take(), self.accelerators.take()));
            *self = Self { pid, ..Self::default() };
        }
        let engine = match &self.engine {
            Some(engine) => engine.clone(),
            None => open(config.clone(), self.offloads.get_or_insert_with(offloads::kinds))?,
        };
        self.engine = Some(engine.clone());
        // Launchers give all ranks the same variables, and one rank reports them. The process's first group decides
        // which, because in sub-groups many processes are the first rank.
        if !std::mem::replace(&mut self.has_warned, true) && rank == 0 {
            log::warn_of_unused_variables();
        }
        Ok(engine)
    }

    fn accelerators(&mut self, most_idle: u64) -> Arc<TorchAccelerators> {
        self.accelerators.get_or_insert_with(|| Arc::new(TorchAccelerators::new(most_idle))).clone()
    }
}

impl Runtime {
    /// The engine, or `None` if no group was created or is being created.
    pub(crate) fn engine(&self) -> Option<Arc<Engine>> {
        self.slot().engine.clone()
    }

    /// Ends all use of accelerators, after the engine.
    pub(crate) fn close_accelerators(&self) {
        let slot = self.slot();
        // A forked child has no threads of its parent.
        let accelerators = slot.accelerators.clone().filter(|_| slot.pid == std::process::id());
        drop(slot);
        if let Some(accelerators) = accelerators {
            accelerators.close();
        }
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        // While the slot is locked, only its own assignments run, and they cannot panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a group in the process's engine. If the engine has created no group yet, a failure also drops the
    /// engine, so that its settings do not bind later groups.
    fn create(&self, config: Config, args: &GroupArgs, store: &ffi::StoreRef) -> Result<Inner> {
        let (names, pinned, eager_bytes) = (config.profile_names, config.gpu_pinned, config.eager_bytes);
        let route = Box::new(GroupRoute::new(&config));
        let spec = spec_of(config, args)?;
        let engine = self.slot().engine_of_this_process(&spec.config, args.rank)?;
        let made = engine.create_group(spec, &TorchStore::new(store), &mut ffi::python_interrupted);
        let mut slot = self.slot();
        let made = made.map(|group| {
            let accelerators = slot.accelerators(pinned);
            Inner { engine, group, names, accelerators, in_order: Box::default(), route, eager_bytes }
        });
        if let Ok(made) = &made {
            slot.has_made_groups = true;
            // Another thread whose group failed meanwhile may have dropped the engine.
            slot.engine = Some(made.engine.clone());
        } else if !slot.has_made_groups {
            slot.engine = None;
        }
        made
    }
}

/// Creates a new engine with these offloads and installs its log.
fn open(config: Config, offloads: &[Arc<dyn OffloadKind>]) -> Result<Arc<Engine>> {
    log::follow(config.log);
    let engine = accl_calibrate::engine(config);
    offloads.iter().try_for_each(|kind| engine.add_offload(kind.clone()))?;
    Ok(engine)
}

/// A group, empty until [`group_create`] fills it.
#[derive(Default)]
pub struct Group(Option<Inner>);

struct Inner {
    engine: Arc<Engine>,
    group: Arc<accl_engine::Group>,
    names: ProfileNames,
    accelerators: Arc<TorchAccelerators>,
    in_order: Box<InOrder>,
    /// Way of collectives on accelerators.
    route: Box<GroupRoute>,
    /// Maximum bytes of a blocking call on an accelerator that its caller's thread does alone.
    eager_bytes: u64,
}

impl Group {
    fn inner(&self) -> Result<&Inner> {
        self.0.as_ref().ok_or_else(|| Error::internal("a group was used before it was created"))
    }

    pub(crate) fn group(&self) -> Result<&Arc<accl_engine::Group>> {
        Ok(&self.inner()?.group)
    }

    /// Issues a call and waits for it. Sets `phases` if the call records them.
    fn call(
        &self,
        args: &CallArgs,
        tensors: &SharedPtr<AcceleratorCall>,
        phases: &mut Option<Arc<Phases>>,
    ) -> Result<Waited> {
        let inner = self.inner()?;
        let mut desc = call_desc(args, Mode::Blocking)?;
        let refused = |error| self.refused(tensors, error);
        if let Some(tensors) = tensors.as_ref()
            && !desc.collective.is_point_to_point()
            && !inner.in_order.follow(&Memory::of(&desc), tensors).map_err(refused)?
        {
            // Other ranks may have issued the call.
            inner.group.abort(INTERRUPTED);
            return Ok(Waited::interrupted());
        }
        let route = self.route_of(&desc, tensors)?;
        let is_small =
            route.is_none() && desc.bytes() <= inner.eager_bytes && desc.seq.is_none() && !args.waits_for_device;
        if !tensors.is_null()
            && is_small
            && let Some(eager) = inner.accelerators.begin_eager(tensors, args, &desc).map_err(refused)?
            && let Some(waited) = complete_eagerly(&inner.group, eager, phases).map_err(refused)?
        {
            return Ok(waited);
        }
        self.stage(&mut desc, args, tensors, route)?;
        complete_with(&inner.group, &mut desc, phases)
            .map_err(|error| self.refused_as(desc.is_by_reference, tensors, error))
    }

    /// Stages the tensors of a call. `tensors` is null if they are in host memory.
    fn stage(
        &self,
        desc: &mut CallDesc,
        args: &CallArgs,
        tensors: &SharedPtr<AcceleratorCall>,
        route: Option<PeerRoute>,
    ) -> Result<()> {
        if !tensors.is_null() {
            let inner = self.inner()?;
            inner.route.count(desc.bytes(), route.is_some());
            if route.is_some() {
                // Below, the engine sees dense copies of the tensors.
                refuse_undefined_outputs(desc).map_err(|error| error.of(desc.collective))?;
                desc.is_by_reference = true;
                (desc.inputs, desc.outputs) =
                    (dense_blocks(&desc.inputs, args.inputs), dense_blocks(&desc.outputs, args.outputs));
            }
            let staging = inner.accelerators.staging(tensors, args, route);
            desc.staging = Some(staging.map_err(|error| self.refused(tensors, error.of(desc.collective)))?);
        }
        Ok(())
    }

    /// Returns the way of a collective on an accelerator, if it is by reference.
    fn route_of(&self, desc: &CallDesc, tensors: &SharedPtr<AcceleratorCall>) -> Result<Option<PeerRoute>> {
        let Some(call) = tensors.as_ref() else { return Ok(None) };
        let inner = self.inner()?;
        let route = inner.accelerators.route_of(call, &inner.route, &inner.group, desc);
        route.map_err(|error| self.refused(tensors, error))
    }

    /// Follows the refusal of a call like [`Group::refused`]. If a call by reference has no memory for a window, or no kernel, this
    /// rank alone refuses it, and the other ranks wait for it, so the group fails.
    fn refused_as(&self, is_by_reference: bool, tensors: &SharedPtr<AcceleratorCall>, error: Error) -> Error {
        match &self.0 {
            Some(inner)
                if is_by_reference && error.kind != ErrorKind::InvalidArgument && inner.group.error().is_none() =>
            {
                inner.group.fail(error.clone());
                error
            }
            Some(_) | None => self.refused(tensors, error),
        }
    }

    /// Follows the refusal of a call. An accelerator that refuses a copy has failed, and the other ranks wait for the
    /// call, so the group fails.
    fn refused(&self, tensors: &SharedPtr<AcceleratorCall>, error: Error) -> Error {
        if !tensors.is_null()
            && error.kind == ErrorKind::Device
            && let Some(inner) = &self.0
        {
            inner.group.fail(error.clone());
            return inner.group.error().unwrap_or(error);
        }
        error
    }
}

/// Returns an empty group.
pub(crate) fn new_group() -> Box<Group> {
    Box::default()
}

impl Drop for Group {
    fn drop(&mut self) {
        // C++ destroys groups outside any guard, and a panic must not reach C++.
        let inner = self.0.take();
        let _ = catch_unwind(AssertUnwindSafe(move || drop(inner)));
    }
}

bridged! {
    /// Creates the group: collective over its ranks. Blocks; Python's signal handlers run meanwhile.
    fn group_create(group: &mut Group, runtime: &Runtime, args: &GroupArgs, store: &ffi::StoreRef) -> Status {
        let config = config(args).inspect_err(|error| refuse(args, store, error))?;
        group.0 = Some(runtime.create(config, args, store)?);
        Ok(Status::ok())
    }

    /// Like [`group_create`], in the engine of another group.
    fn group_create_sibling(group: &mut Group, other: &Group, args: &GroupArgs, store: &ffi::StoreRef) -> Status {
        let engine = other.inner()?.engine.clone();
        let config = config(args).inspect_err(|error| refuse(args, store, error))?;
        let (names, eager_bytes) = (config.profile_names, config.eager_bytes);
        let route = Box::new(GroupRoute::new(&config));
        let spec = spec_of(config, args)?;
        let made = engine.create_group(spec, &TorchStore::new(store), &mut ffi::python_interrupted)?;
        let accelerators = other.inner()?.accelerators.clone();
        let in_order = Box::default();
        group.0 = Some(Inner { engine, group: made, names, accelerators, in_order, route, eager_bytes });
        Ok(Status::ok())
    }

    /// Issues a call and waits for it; Python's signal handlers run meanwhile. When it returns, nothing accesses the
    /// call's tensors any more, unless the status says that their memory must be kept. Returns the times of the phases if
    /// the arguments request them.
    fn group_call(group: &Group, args: &CallArgs, tensors: &SharedPtr<AcceleratorCall>) -> Profiled {
        let mut phases = None;
        let waited = group.call(args, tensors, &mut phases).unwrap_or_else(Waited::from_error);
        Ok(Profiled { waited, phases: PhaseNanos::of(phases.as_deref()) })
    }

    /// Starts a call without waiting for it.
    fn group_submit(
        group: &Group,
        args: &CallArgs,
        tensors: &SharedPtr<AcceleratorCall>,
        ticket: &mut Ticket,
    ) -> Status {
        let mut desc = call_desc(args, Mode::Async)?;
        let in_order = &group.inner()?.in_order;
        let on_device = tensors.as_ref().filter(|_| !desc.collective.is_point_to_point());
        let memory = on_device.map(|tensors| (Memory::of(&desc), tensors));
        if let Some((memory, tensors_of)) = &memory
            && !in_order.follow(memory, tensors_of).map_err(|error| group.refused(tensors, error))?
        {
            group.group()?.abort(INTERRUPTED);
            return Err(Error::aborted(INTERRUPTED));
        }
        let route = group.route_of(&desc, tensors)?;
        group.stage(&mut desc, args, tensors, route)?;
        let (phases, is_by_reference) = (desc.phases.clone(), desc.is_by_reference);
        let engine_group = group.group()?;
        let refused = |error| group.refused_as(is_by_reference, tensors, error);
        let call = engine_group.submit(desc).map_err(refused)?;
        if let Some((memory, _)) = memory {
            in_order.add(call.clone(), tensors, memory);
        }
        ticket.set_call(engine_group.clone(), call, phases);
        Ok(Status::ok())
    }

    /// Runs a task on a completion thread.
    fn group_spawn(group: &Group, task: UniquePtr<ffi::Task>, ticket: &mut Ticket) -> Status {
        let inner = group.inner()?;
        ticket.spawn(&inner.engine, inner.group.clone(), task)?;
        Ok(Status::ok())
    }

    /// Reserves consecutive sequence numbers; returns the first.
    fn group_reserve(group: &Group, count: u64) -> Numbered {
        Ok(Numbered::of(group.group()?.reserve_seqs(count)? as i64))
    }

    /// Completes the calls for which numbers were reserved, with success or an error.
    fn group_conclude(group: &Group, first: i64, count: u64, outcome: &Status) -> Status {
        let first = u64::try_from(first).map_err(|_| Error::internal("released an unreserved sequence number"))?;
        group.group()?.conclude_seqs(first..first + count, outcome.to_error().as_ref());
        Ok(Status::ok())
    }

    /// The sequence number of the next call.
    fn group_next_seq(group: &Group) -> Numbered {
        Ok(Numbered::of(group.group()?.next_seq() as i64))
    }

    /// A barrier that names the missing ranks. Blocks; Python's signal handlers run meanwhile.
    fn group_monitored_barrier(group: &Group, timeout_ms: i64, wait_all: bool) -> Waited {
        let (group, timeout) = (group.group()?, millis(timeout_ms).unwrap_or_default());
        unless_interrupted(|interrupt| group.monitored_barrier(timeout, wait_all, interrupt))
    }

    /// Creates links to all ranks. Blocks; Python's signal handlers run meanwhile.
    fn group_connect_all(group: &Group) -> Waited {
        let group = group.group()?;
        unless_interrupted(|interrupt| group.connect_all(interrupt))
    }

    /// Fails all current and later calls of the group.
    fn group_abort(group: &Group, reason: &str) -> Status {
        group.group()?.abort(reason);
        Ok(Status::ok())
    }

    /// Leaves the group. If `wait` is set, waits until the other ranks have received what completed calls have sent;
    /// Python's signal handlers run meanwhile. The only error that is returned is a mismatch between ranks that no call
    /// has reported. Other errors do not matter to a rank that leaves.
    fn group_shutdown(group: &Group, wait: bool) -> Status {
        let group = group.group()?;
        let left = if wait { group.shutdown_unless(&mut ffi::python_interrupted) } else { group.leave() };
        match left {
            Err(error) if error.kind == ErrorKind::Mismatch => Err(error),
            Ok(()) | Err(_) => Ok(Status::ok()),
        }
    }

    /// Sets the timeout of calls issued from now on.
    fn group_set_timeout(group: &Group, timeout_ms: i64) -> Status {
        group.group()?.set_timeout(timeout_of(timeout_ms)?);
        Ok(Status::ok())
    }

    /// Makes calls issued from now on record their duration.
    fn group_enable_timing(group: &Group) -> Status {
        group.group()?.enable_timing();
        Ok(Status::ok())
    }

    /// The error that aborted the group.
    fn group_first_error(group: &Group) -> Status {
        Ok(group.group()?.error().map_or_else(Status::ok, Status::from_error))
    }

    /// The error that aborted the group, as c10d classifies it. A remote error names another rank as its cause.
    fn group_error_type(group: &Group) -> ErrorType {
        Ok(match group.group()?.error().map(|error| error.kind) {
            None => ErrorType::Success,
            Some(ErrorKind::Timeout) => ErrorType::Timeout,
            Some(ErrorKind::PeerLost | ErrorKind::Network | ErrorKind::Mismatch) => ErrorType::RemoteError,
            Some(
                ErrorKind::InvalidArgument
                | ErrorKind::InvalidType
                | ErrorKind::Unsupported
                | ErrorKind::Configuration
                | ErrorKind::Rendezvous
                | ErrorKind::Protocol
                | ErrorKind::Device
                | ErrorKind::Exhausted
                | ErrorKind::Aborted
                | ErrorKind::Internal,
            ) => ErrorType::CommError,
        })
    }

    /// The style of names of its calls in the profiler, as a code of `ProfileNames`.
    fn group_profile_names(group: &Group) -> Numbered {
        Ok(Numbered::of(group.inner()?.names as i64))
    }

    /// Name, rank, world and links of the group, one per line.
    fn group_describe(group: &Group) -> Described {
        let text = group.group()?.describe() + &group.inner()?.route.describe();
        Ok(Described { text, status: Status::ok() })
    }

    /// Current and past activity of the group, as JSON.
    fn group_snapshot(group: &Group) -> Described {
        let Inner { group, accelerators, .. } = group.inner()?;
        Ok(Described { text: snapshot::to_json(&group.snapshot(), &accelerators.counts()), status: Status::ok() })
    }
}

/// Blocks in `wait`, which regularly checks whether a Python signal handler has raised. In this case that exception is
/// reported, not the error with which the wait ends.
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

/// Issues a call and waits for it, for [`group_call`].
pub(crate) fn complete(group: &accl_engine::Group, desc: &mut CallDesc) -> Result<Waited> {
    let call = match group.submit_blocking(desc)? {
        Submitted::Done(_) => return Ok(Waited::plain(Outcome::Done)),
        Submitted::Pending(call) => *call,
    };
    let mut leaving = Leaving { group, call: &call, has_ended: false };
    let waited = call.wait(None, &mut ffi::python_interrupted);
    leaving.has_ended = waited == EngineWaited::Done;
    drop(leaving);
    let must_leak_memory = !call.is_done() || call.error().is_some_and(|error| error.context.must_leak_memory);
    match waited {
        EngineWaited::Done => Ok(Waited::plain(Outcome::Done)),
        EngineWaited::Failed(error) | EngineWaited::TimedOut(error) => Err(error),
        EngineWaited::Interrupted => Ok(Waited::interrupted_with(must_leak_memory)),
    }
}

pub(crate) fn complete_with(
    group: &accl_engine::Group,
    desc: &mut CallDesc,
    phases: &mut Option<Arc<Phases>>,
) -> Result<Waited> {
    let waited = complete(group, desc);
    *phases = desc.phases.take();
    waited
}

/// Stops a call that is still running when its wait ends: after an interrupt, a failed wait or a panic.
struct Leaving<'a> {
    group: &'a accl_engine::Group,
    call: &'a Call,
    /// Whether the call has ended for its caller. An accelerator may still copy results.
    has_ended: bool,
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if !self.has_ended && !self.call.is_done() {
            self.group.abort(INTERRUPTED);
            self.call.wait(Some(STOPPING), &mut || false);
        }
    }
}

/// The settings of the environment, overridden by the options.
fn config(args: &GroupArgs) -> Result<Config> {
    let mut config = offloads::config_from_environment()?;
    for pair in args.settings.chunks_exact(2) {
        if pair[0] == REFUSAL {
            return Err(Error::configuration(pair[1].clone()));
        }
        config.set_option(&pair[0], &pair[1])?;
    }
    offloads::check_settings(&config)?;
    Ok(config)
}

/// Reports to the other ranks why this rank cannot create the group.
fn refuse(args: &GroupArgs, store: &ffi::StoreRef, error: &Error) {
    if let Ok(spec) = spec_of(Config::default(), args) {
        // There may be no engine yet, so the log is installed for this block only.
        log::during(log_level(args), || {
            accl_engine::refuse_group(&spec, &TorchStore::new(store), error, &mut ffi::python_interrupted);
        });
    }
}

/// The log level for a group whose settings are refused.
fn log_level(args: &GroupArgs) -> LogLevel {
    let mut config = accl_engine::config_from_environment().unwrap_or_default();
    let options = args.settings.chunks_exact(2).filter(|pair| pair[0] == LOG).map(|pair| pair[1].clone());
    for level in options {
        // An invalid level is ignored and leaves the default.
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

/// The first address of a host name; `None` if the name is empty or cannot be resolved.
fn address_of(host: &str) -> Option<IpAddr> {
    if host.is_empty() {
        return None;
    }
    (host, 0).to_socket_addrs().ok()?.next().map(|address| address.ip())
}

/// The timeout of a group.
///
/// # Errors
/// `InvalidArgument` for a negative number.
fn timeout_of(timeout_ms: i64) -> Result<Duration> {
    let refused = || {
        Error::invalid_argument(format!(
            "timeout: expected a value that is not negative, got {timeout_ms} ms (a `timedelta` of more than 292 years \
             becomes negative in torch)"
        ))
    };
    millis(timeout_ms).ok_or_else(refused)
}

pub(crate) fn dtype_code(scalar_type: i8) -> u8 {
    Dtype::from_torch(scalar_type).map_or(u8::MAX, |dtype| dtype as u8)
}

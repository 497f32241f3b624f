//! A group as its users hold it: submission of calls, and leaving the group.
//!
//! Owns the step from a checked description to a call in flight; the state is in `group::state`, under the driver's
//! lock. Read [`Group::submit`] first.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use accl_types::{Collective, Error, Rank, Result};

use super::call::Call;
use super::default_codec::DefaultCodec;
use super::planning::Planning;
use crate::driver::Driver;
use crate::driver::fast_turn::{FastEnd, FastTurn};
use crate::driver::waiting::{Delivery, lasting};
use crate::engine::{Engine, LAST_BYTES, LAST_BYTES_FAILED, LAST_CALLS};
use crate::events;
use crate::in_flight::{InFlight, Notifier, Release};
use crate::lanes::{Cut, Lane, Least, Parts, parts_of};
use crate::offload::{Offload, OpenOffloads, Route};
use crate::spec::GroupSpec;
use crate::time;
use accl_executor::call::{CallDesc, External};
use accl_executor::group::{Caller, Context, Departure, GroupState, Notify, Prepared, Started, Stopped};
use accl_executor::memory::Sample;
use accl_executor::plan::Planner;

/// A submitted call whose caller waits.
pub enum Submitted {
    /// The call has completed; the value is its sequence number.
    Done(u64),
    /// The call is in flight and must be waited for. It is boxed so that `Submitted` fits into two words, which matters
    /// on the fast path.
    Pending(Box<Call>),
}

/// Starts phase timing, if the caller requested it.
#[inline]
fn make_phases(desc: &CallDesc) {
    if let Some(phases) = &desc.phases {
        phases.make(time::now());
    }
}

/// A description with a worker. It has none again when this is dropped, because its caller may issue it again.
struct RoutedDesc<'a>(&'a mut CallDesc);

impl<'a> RoutedDesc<'a> {
    fn new(desc: &'a mut CallDesc, by: Arc<dyn External>) -> Self {
        desc.offload = Some(by);
        Self(desc)
    }
}

impl Drop for RoutedDesc<'_> {
    fn drop(&mut self) {
        self.0.offload = None;
    }
}

/// A component that executes a call, and its worker for the call.
type Routed<'a> = (&'a Arc<dyn Offload>, Arc<dyn External>);

fn pending(call: Call) -> Submitted {
    Submitted::Pending(Box::new(call))
}

/// Components that a group's handle needs.
pub(crate) struct Rules {
    pub(crate) default_codec: Option<DefaultCodec>,
    pub(crate) offloads: OpenOffloads,
    pub(crate) planner: Planner,
    /// Drivers of the lanes after the first.
    pub(crate) lanes: Vec<Arc<Driver>>,
    /// The size from which on these lanes do parts of calls.
    pub(crate) least: Least,
}

/// A set of ranks that issue calls together. Dropping it leaves the group.
pub struct Group {
    /// Keeps the endpoint and settings alive as long as the group.
    pub(crate) engine: Arc<Engine>,
    pub(crate) driver: Arc<Driver>,
    pub(crate) caller: Arc<Caller>,
    /// See [`DefaultCodec`].
    default_codec: Option<DefaultCodec>,
    /// Components that execute whole calls, in the order in which they are asked.
    offloads: Vec<Arc<dyn Offload>>,
    pub(super) planning: Planning,
    /// Drivers of the lanes after the first, which do parts of large calls.
    pub(crate) lanes: Vec<Arc<Driver>>,
    /// The same drivers, as receivers of parts.
    takers: Arc<[Arc<dyn Lane>]>,
    /// The size from which on these lanes do parts of calls.
    least: Least,
    closed: AtomicBool,
}

impl Group {
    pub(crate) fn new(engine: Arc<Engine>, id: u64, name: Arc<str>, spec: &GroupSpec, rules: Rules) -> Arc<Self> {
        let Rules { default_codec, offloads, planner, lanes, least } = rules;
        let (rank, world) = (spec.rank, spec.world);
        let global_rank = spec.global_ranks.get(rank.index()).copied().unwrap_or(u64::from(rank.0));
        let driver = engine.driver.clone();
        Arc::new(Self {
            engine,
            driver,
            caller: Arc::new(Caller { group: id, name, rank, world, global_rank }),
            default_codec,
            offloads: offloads.take(),
            planning: Planning::new(planner),
            takers: lanes.iter().map(|lane| lane.clone() as Arc<dyn Lane>).collect(),
            lanes,
            least,
            closed: AtomicBool::new(false),
        })
    }

    /// Starts a call. Its tensors must stay valid, and must not be read or written, until the call completes or fails.
    ///
    /// Any thread may submit. Calls of one group are numbered in the order of submission, which must be the same on all
    /// ranks. The caller must wait for a call with [`Mode::Blocking`](accl_executor::call::Mode::Blocking) at once:
    /// until it does, the call may make no progress.
    ///
    /// # Errors
    /// `InvalidArgument`, `InvalidType`, `Unsupported`, `Configuration`, `Exhausted`: the call was refused, no sequence
    /// number was consumed, and the group is usable. `Aborted`, or the cause's kind for the first error: the group failed
    /// earlier or was destroyed. All later errors are reported by the call.
    pub fn submit(&self, mut desc: CallDesc) -> Result<Call> {
        make_phases(&desc);
        let default = self.default_codec_of(&desc);
        match self.route(&desc, default) {
            Some(routed) => self.submit_offloaded(&mut desc, routed),
            None => self.submit_on_host(&desc, default),
        }
    }

    /// Returns the component that executes a call, and its worker for the call; `None` if the host executes it.
    #[inline]
    pub(super) fn route(&self, desc: &CallDesc, default: Option<&DefaultCodec>) -> Option<Routed<'_>> {
        if self.offloads.is_empty() || default.is_some() || desc.offload.is_some() {
            return None;
        }
        if desc.why_on_host(self.caller.world).is_some() {
            return None;
        }
        self.offloads.iter().find_map(|offload| match offload.route(desc) {
            Route::Offload(by) => Some((offload, by)),
            Route::Host(_) => None,
        })
    }

    fn submit_offloaded(&self, desc: &mut CallDesc, (offload, by): Routed<'_>) -> Result<Call> {
        let routed = RoutedDesc::new(desc, by);
        self.start(routed.0, None, Some(offload)).map_err(|error| self.in_context(error))
    }

    /// Submits a call that the caller waits for. A small call with a known shape takes the fast path on this thread if
    /// the peers are there too. Otherwise this is [`Group::submit`].
    ///
    /// # Errors
    /// The errors of [`Group::submit`].
    pub fn submit_blocking(&self, desc: &mut CallDesc) -> Result<Submitted> {
        make_phases(desc);
        let default = self.default_codec_of(desc);
        if let Some(routed) = self.route(desc, default) {
            return self.submit_offloaded(desc, routed).map(pending);
        }
        let desc = &*desc;
        let may_be_fast = desc.may_take_fast_path() && default.is_none() && !self.closed.load(Ordering::Acquire);
        match may_be_fast.then(|| self.driver.start_fast(self.caller.group, desc)).flatten() {
            Some(FastEnd::Done { seq, took }) => {
                if let Some(took) = took {
                    let (name, rank, bytes) = (self.name(), self.caller.rank.0, desc.bytes());
                    events::ended_at_once(name, rank, desc.collective, seq, bytes, took);
                }
                Ok(Submitted::Done(seq))
            }
            Some(FastEnd::Stopped(turn, stopped)) => self.resume(desc, turn, *stopped).map(pending),
            Some(FastEnd::Failed(error)) => Err(self.in_context(error.of(desc.collective))),
            None => self.submit_on_host(desc, default).map(pending),
        }
    }

    /// Resumes a call that stopped on the fast path. It must continue before another thread takes another frame.
    #[inline(never)]
    fn resume(&self, desc: &CallDesc, mut turn: FastTurn<'_>, stopped: Stopped) -> Result<Call> {
        let (algorithm, notifier) = (stopped.algorithm(), Arc::<Notifier>::default());
        let resumed = self.caller.resume(turn.core(), desc, stopped, notifier.clone(), time::now());
        turn.end();
        self.after_start(desc, Some(algorithm), None, notifier, resumed, false).map_err(|error| self.in_context(error))
    }

    /// Submits a call that the host executes, encoded by `default` if there is one.
    fn submit_on_host(&self, desc: &CallDesc, default: Option<&DefaultCodec>) -> Result<Call> {
        let Some(codec) = default else { return self.start_encoded(desc).map_err(|error| self.in_context(error)) };
        let started = codec.encoded(desc, codec.next_step()).and_then(|desc| self.start_encoded(&desc));
        // A refused call takes no step, as it takes no sequence number: the other ranks may have issued theirs.
        if started.is_ok() {
            codec.count();
        }
        started.map_err(|error| self.in_context(error))
    }

    /// Returns the default codec of the group; `None` if this call specifies its encoding or is not encoded by default.
    pub(super) fn default_codec_of(&self, desc: &CallDesc) -> Option<&DefaultCodec> {
        self.default_codec.as_ref().filter(|codec| codec.is_for(desc, self.caller.world))
    }

    /// Starts a call. `offload` is the component that executes it, if there is one.
    pub(super) fn start(
        &self,
        desc: &CallDesc,
        sample: Option<Sample>,
        offload: Option<&Arc<dyn Offload>>,
    ) -> Result<Call> {
        self.check_usable(desc.collective)?;
        desc.check(self.caller.rank, self.caller.world)?;
        let cut = self.cut(desc);
        let desc = cut.as_ref().map_or(desc, |cut| &cut.first);
        let in_context = |error: Error| error.of(desc.collective);
        let prepared = self.prepare(desc).map_err(in_context);
        // If the group has failed, that error says more than an error of a call that the group would refuse anyway.
        let prepared = prepared.or_else(|error| self.refuse_if_aborted(desc.collective).and(Err(error)))?;
        if let Some(phases) = &desc.phases {
            phases.prepare(time::now());
        }
        let algorithm = prepared.algorithm();
        let notifier: Arc<Notifier> = Arc::default();
        let shape_of = |desc: &CallDesc| self.planning.get(desc);
        let others = cut.as_ref().map(|cut| Ok((&cut.join, cut.others(&self.caller, &prepared, shape_of)?)));
        let others = others.transpose().map_err(in_context)?;
        // A part that copies nothing back would not be waited for.
        let releases_early = prepared.copies_out()
            && others.iter().flat_map(|(_, parts)| parts).all(|(_, prepared)| prepared.copies_out());
        let now = time::now();
        let algorithm = algorithm.map(|name| offload.map_or(name, |offload| offload.name()));
        let is_left_to_waiter = cut.as_ref().is_some_and(|cut| self.driver.leaves_parts_to_waiter(cut, now));
        let started =
            self.driver.with_core(|core| self.caller.start(core, desc, prepared, sample, notifier.clone(), now));
        if let Some(((join, parts), started)) = others.zip(started.as_ref().ok()) {
            let (caller, lanes, seq) = (self.caller.clone(), self.takers.clone(), started.call.seq);
            join.begin_parts(Parts { caller, lanes, parts, seq, now, wakes: !is_left_to_waiter });
        }
        if let Some(cut) = cut.as_ref().filter(|_| started.is_err()) {
            cut.join.give_up();
        }
        let mut call = self.after_start(desc, algorithm, offload, notifier, started, releases_early)?;
        call.state.is_left_to_waiter = is_left_to_waiter;
        Ok(call)
    }

    /// Cuts the call into parts; `None` if other lanes do no parts of it.
    fn cut(&self, desc: &CallDesc) -> Option<Cut> {
        if desc.is_by_reference {
            return None;
        }
        let least = self.engine.least_part_bytes().map_or(self.least, Least::Bytes);
        let lanes = self.lanes.len() as u32 + 1;
        let predicted = Cell::new(0);
        let of = parts_of(desc, self.caller.world, lanes, least, || {
            predicted.set(self.planning.predicted_ps(desc));
            predicted.get()
        });
        Cut::new(desc, of, predicted.get())
    }

    /// Returns the shape and the memory of a checked call.
    fn prepare(&self, desc: &CallDesc) -> Result<Prepared> {
        let shape = (!desc.collective.is_point_to_point()).then(|| self.planning.get(desc)).transpose()?;
        self.caller.prepare(desc, shape)
    }

    fn refuse_if_aborted(&self, collective: Collective) -> Result<()> {
        let aborted = self.with_state(|group, _| group.aborted(Some(collective)));
        aborted.map_err(|error| error.of(collective))?.map_or(Ok(()), Err)
    }

    /// Follows the start of a call, without the lock.
    fn after_start(
        &self,
        desc: &CallDesc,
        algorithm: Option<&'static str>,
        offload: Option<&Arc<dyn Offload>>,
        notifier: Arc<Notifier>,
        started: Result<Started>,
        releases_early: bool,
    ) -> Result<Call> {
        let Started { call, wakes_driver } = started.map_err(|error| error.of(desc.collective))?;
        if events::follows_calls() {
            events::begun(&call, desc, algorithm);
        }
        if wakes_driver {
            self.driver.wake();
        }
        self.driver.after_start(&call);
        let mut state = InFlight::new(call, notifier);
        if let Some(enqueued) = desc.staging.as_ref().filter(|_| releases_early).and_then(|staging| staging.enqueued())
        {
            let driver = Arc::downgrade(&self.driver);
            state.release_when(enqueued, move |step| match (driver.upgrade(), step) {
                // Posted before a waiting thread continues and may end the process.
                (Some(driver), Release::Callback(callback)) => driver.completions().post(callback),
                // The driver may be a thread that waits for this call.
                (Some(driver), Release::Wake) => driver.wake(),
                (None, _) => {}
            });
        }
        state.helped = offload.filter(|offload| offload.needs_help()).cloned();
        Ok(Call { state, driver: Arc::downgrade(&self.driver) })
    }

    /// Returns the name of the algorithm that such a collective uses in this group. Issues no call and consumes no
    /// sequence number.
    ///
    /// # Errors
    /// The errors of [`Group::submit`] for a refused description; `Unsupported` for point-to-point calls, which have no
    /// algorithm.
    pub fn algorithm_of(&self, desc: &CallDesc) -> Result<&'static str> {
        let usable = self.check_usable(desc.collective);
        let named = usable.and_then(|()| desc.check(self.caller.rank, self.caller.world)).and_then(|()| {
            let default = self.default_codec_of(desc);
            if let Some((offload, _)) = self.route(desc, default) {
                return Ok(offload.name());
            }
            let encoded = default.map(|codec| codec.encoded(desc, 0)).transpose()?;
            self.planning.get(encoded.as_ref().unwrap_or(desc)).map(|shape| shape.plan.name)
        });
        named.map_err(|error| self.in_context(error.of(desc.collective)))
    }

    /// Reserves `count` consecutive sequence numbers for collectives that are submitted later with [`CallDesc::seq`],
    /// and returns the first. A barrier issued after this does not complete before [`Group::conclude_seqs`].
    ///
    /// # Errors
    /// `Aborted` when the group failed or was destroyed; the kind of the cause if no call has raised it.
    pub fn reserve_seqs(&self, count: u64) -> Result<u64> {
        self.with_state(|group, _| match group.aborted(None) {
            Some(error) => Err(error),
            None => Ok(group.reserve_seqs(count)),
        })?
    }

    /// Concludes reserved sequence numbers. `failed` is the error that kept this rank from issuing all of the calls, if
    /// there is one. The group then fails with it, because the other ranks would wait for the remaining calls.
    pub fn conclude_seqs(&self, seqs: Range<u64>, failed: Option<&Error>) {
        if self.with_state(|group, context| group.conclude_seqs(seqs, failed, context)).is_ok() {
            self.driver.flush();
            self.driver.wake();
        }
    }

    /// Returns the sequence number of the next collective; 0 once the group was left.
    pub fn next_seq(&self) -> u64 {
        self.with_state(|group, _| group.next_seq()).unwrap_or(0)
    }

    /// Returns the number of times that point-to-point messages were examined so far, which shows the cost of
    /// outstanding messages. For tests.
    pub fn message_steps(&self) -> u64 {
        self.with_state(|group, _| group.message_steps()).unwrap_or(0)
    }

    /// Returns the rank of this process.
    pub fn rank(&self) -> Rank {
        self.caller.rank
    }

    /// Returns the number of ranks.
    pub fn world(&self) -> u32 {
        self.caller.world
    }

    /// Returns the name of the group in messages.
    pub fn name(&self) -> &str {
        &self.caller.name
    }

    /// Returns a readable description: name, rank, world and number of threads for parts of calls. Then follow a line
    /// for each other rank with its process and link, and the descriptions of components that execute whole calls.
    pub fn describe(&self) -> String {
        let mut head = format!("group {}\nrank {}\nworld {}\n", self.caller.name, self.caller.rank, self.caller.world);
        if !self.lanes.is_empty() {
            head += &format!("threads for parts of large calls: {}\n", self.lanes.len());
        }
        let links = self.with_state(|group, context| {
            let others = group.members().ranks().filter(|&rank| rank != group.rank());
            let line = |rank: Rank| {
                let link = context.net.describe(group.members().peer(rank));
                format!("{}: {link}\n", group.members().describe(rank, context.net))
            };
            others.map(line).collect::<String>()
        });
        let offloads = self.offloads.iter().map(|offload| offload.describe()).collect::<String>();
        head + &links.unwrap_or_default() + &offloads
    }

    /// Returns the first error that made the group fail; `None` if it has not failed.
    pub fn error(&self) -> Option<Error> {
        self.with_state(|group, _| group.failure().cloned()).ok().flatten()
    }

    /// Sets the timeout of calls issued from now on.
    pub fn set_timeout(&self, timeout: Duration) {
        if self.driver.is_forked() {
            return;
        }
        let now = time::now();
        for lane in self.drivers() {
            lane.with_core(|core| core.with_group(self.caller.group, now, |group, _| group.set_timeout(timeout)));
        }
    }

    /// Makes calls issued from now on record their duration.
    pub fn enable_timing(&self) {
        let _ = self.with_state(|group, _| group.enable_timing());
    }

    /// Aborts the group here and on all ranks: calls in flight fail at once, later calls are refused. Any thread may
    /// call this.
    pub fn abort(&self, reason: &str) {
        self.fail(Error::aborted(format!("the group was aborted: {reason}")));
    }

    /// Aborts the group like [`Group::abort`], with an error of another kind.
    pub fn fail(&self, error: Error) {
        let error = self.in_context(error);
        if self.with_state(|group, context| group.fail(error, context, Notify::Peers)).is_ok() {
            self.driver.flush();
            self.driver.wake();
        }
    }

    /// Leaves the group and notifies the other ranks. Further calls have no effect.
    ///
    /// Waits, at most half a minute, until asynchronous collectives have completed: the other ranks may be about to
    /// issue them. Other calls in flight fail. Then waits, in bounded time, until the other ranks' hosts have received
    /// what completed calls have sent. The process may end right after, and data in its buffers would be lost.
    ///
    /// # Errors
    /// A mismatch between ranks' calls that was detected only after the calls completed, if no later call could report
    /// it.
    pub fn shutdown(&self) -> Result<()> {
        self.shutdown_unless(&mut || false)
    }

    /// Like [`Group::shutdown`], but the waits end when `interrupt` returns true. It is called about every 50 ms.
    ///
    /// # Errors
    /// The errors of [`Group::shutdown`].
    pub fn shutdown_unless(&self, interrupt: &mut dyn FnMut() -> bool) -> Result<()> {
        let interrupt = &mut lasting(interrupt);
        if !self.closed.load(Ordering::Acquire) && !self.driver.is_forked() {
            let until = time::now() + self.with_state(|group, _| group.timeout()).unwrap_or_default().min(LAST_CALLS);
            self.driver.await_calls(&[self.caller.group], until, interrupt);
        }
        let departures = self.leave_at_once();
        let Some((_, first)) = departures.first() else { return Ok(()) };
        let timeout = first.timeout;
        let has_failed = departures.iter().any(|(_, departure)| departure.has_failed);
        let patience = if has_failed { LAST_BYTES_FAILED } else { LAST_BYTES }.min(timeout);
        let (until, mut mismatch) = (time::now() + patience, None);
        for (lane, Departure { unreported_mismatch, sent, .. }) in departures {
            mismatch = mismatch.or(unreported_mismatch);
            match lane.await_delivery(sent, until, interrupt) {
                Delivery::Complete | Delivery::Interrupted => {}
                Delivery::Late => tracing::warn!(
                    group = &*self.caller.name,
                    "group destroyed, but after {} ms another rank has not received data sent by completed calls; the \
                     data is lost if this process exits before that rank receives it",
                    patience.as_millis()
                ),
            }
        }
        mismatch.map_or(Ok(()), Err)
    }

    /// Iterates over the drivers of all lanes of the group, the first lane first.
    fn drivers(&self) -> impl Iterator<Item = &Arc<Driver>> {
        std::iter::once(&self.driver).chain(&self.lanes)
    }

    /// Like [`Group::shutdown`], but does not wait.
    ///
    /// # Errors
    /// The errors of [`Group::shutdown`].
    pub fn leave(&self) -> Result<()> {
        self.leave_at_once().into_iter().find_map(|(_, departure)| departure.unreported_mismatch).map_or(Ok(()), Err)
    }

    /// Leaves the group and returns what remains to be done on each lane; empty if the group was left before.
    fn leave_at_once(&self) -> Vec<(&Arc<Driver>, Departure)> {
        if self.closed.swap(true, Ordering::AcqRel) || self.driver.is_forked() {
            return Vec::new();
        }
        let mut departures = Vec::new();
        // Another thread may not have failed the other lanes yet. Their peers would take the disconnect message for the
        // cause.
        let failed = self.with_state(|group, _| group.failed()).ok().flatten();
        let has_failed = failed.is_some();
        if let Some(failed) = failed.filter(|_| !self.lanes.is_empty()) {
            self.driver.fail_on_other_lanes(&failed);
        }
        for lane in self.drivers() {
            // Polls the links once more: a mismatch that calls could not see may be waiting there.
            lane.with_core(|core| core.force_poll_of(self.caller.group));
            lane.pass_now();
            let departure = lane.with_core(|core| core.leave_group(self.caller.group, time::now()));
            departures.extend(departure.map(|departure| (lane, departure)));
        }
        self.offloads.iter().for_each(|offload| offload.close(has_failed));
        for lane in self.drivers() {
            lane.flush();
            lane.wake();
        }
        departures
    }

    pub(crate) fn with_state<R>(&self, f: impl FnOnce(&mut GroupState, &mut Context<'_>) -> R) -> Result<R> {
        // Another thread may have held the lock when the process forked.
        self.driver.refuse_if_forked().map_err(|forked| self.in_context(forked))?;
        let now = time::now();
        self.driver
            .with_core(|core| core.with_group(self.caller.group, now, f))
            .ok_or_else(|| self.caller.destroyed(None))
    }

    fn check_usable(&self, collective: Collective) -> Result<()> {
        self.driver.refuse_if_forked().map_err(|forked| forked.of(collective))?;
        if self.closed.load(Ordering::Acquire) {
            return Err(self.caller.destroyed(Some(collective)));
        }
        Ok(())
    }

    /// Adds this group's name and rank to an error.
    pub(crate) fn in_context(&self, error: Error) -> Error {
        self.caller.in_context(error)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // An unreported error is lost here, and dropping a group must not wait.
        let _ = self.leave();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use accl_schedule::cost::Machine;
    use accl_types::Dtype;
    use accl_types::config::Config;

    use super::*;
    use crate::session::store::MemoryStore;

    #[test]
    fn a_plan_is_made_while_another_thread_has_the_drivers_lock() {
        let config = Config::default();
        let engine = Engine::new(config.clone(), |_| Machine::default());
        let spec = GroupSpec {
            name: "g".to_owned(),
            rank: Rank(0),
            world: 1,
            timeout: Duration::from_secs(30),
            config,
            master: None,
            global_ranks: Vec::new(),
            role: crate::GroupRole::Default,
        };
        let group = engine.create_group(spec, &MemoryStore::default(), &mut || false).unwrap();
        let (sender, made) = mpsc::channel();
        let held = engine.driver.lock();
        let planner = std::thread::spawn({
            let group = group.clone();
            move || sender.send(group.algorithm_of(&CallDesc::new(Collective::Barrier, Dtype::U8))).unwrap()
        });
        assert!(made.recv_timeout(Duration::from_secs(20)).unwrap().is_ok());
        drop(held);
        planner.join().unwrap();
    }
}

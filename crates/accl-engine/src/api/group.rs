//! A group as its users hold it: submission of calls, and the end.
//!
//! Owns the turning of a checked description into a call in flight; the state lives in `group::state`, under the driver's lock.
//! Read [`Group::submit`] first.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use accl_transport::frame::Signature;
use accl_types::{Collective, Error, Moment, Rank, Result};

use super::call::Call;
use super::default_codec::DefaultCodec;
use super::planning::Planning;
use super::spec::GroupSpec;
use crate::call::{CallDesc, CallPlace, CallState, Mode};
use crate::driver::{Delivery, Driver, lasting};
use crate::engine::{Engine, LAST_BYTES, LAST_BYTES_FAILED, LAST_CALLS};
use crate::exec::{INQUIRE_AFTER, Message, PRIVATE_TAGS, Run};
use crate::group::{Context, Core, FastPathEnd, GroupState, Relief, Stopped, Tell};
use crate::memory::{Buffers, Coder, Compute, Sample};
use crate::peers::Mark;
use crate::plan::{Planner, Shape};
use crate::time;

/// What became of a call whose caller waits.
pub enum Ran {
    /// It is done; this was its number.
    Done(u64),
    /// It has begun; wait for it. In a box: what is returned fits two words, which the fast path writes and its caller reads.
    Pending(Box<Call>),
}

fn pending(call: Call) -> Ran {
    Ran::Pending(Box::new(call))
}

/// What remains of a group that was left.
struct Left {
    unsaid: Option<Error>,
    /// What its calls rely on.
    sent: Vec<Mark>,
    /// How long to wait for its delivery.
    patience: Duration,
}

/// A set of ranks that make calls together. Dropping it leaves the group.
pub struct Group {
    /// Its endpoint and settings stay as long as the group.
    _engine: Arc<Engine>,
    pub(crate) driver: Arc<Driver>,
    pub(crate) id: u64,
    pub(crate) name: Arc<str>,
    pub(crate) rank: Rank,
    pub(crate) world: u32,
    /// Its rank in the job, for random numbers: ranks of different groups have different ones.
    global_rank: u64,
    /// See [`DefaultCodec`].
    default_codec: Option<DefaultCodec>,
    planning: Planning,
    closed: AtomicBool,
}

impl Group {
    pub(crate) fn new(
        engine: Arc<Engine>,
        id: u64,
        name: Arc<str>,
        spec: &GroupSpec,
        default_codec: Option<DefaultCodec>,
        planner: Planner,
    ) -> Arc<Self> {
        let (rank, world) = (spec.rank, spec.world);
        let global_rank = spec.global_ranks.get(rank.index()).copied().unwrap_or(u64::from(rank.0));
        let driver = engine.driver.clone();
        Arc::new(Self {
            _engine: engine,
            driver,
            id,
            name,
            rank,
            world,
            global_rank,
            default_codec,
            planning: Planning::new(planner),
            closed: AtomicBool::new(false),
        })
    }

    /// Starts a call. Its tensors must stay valid and untouched until the call is done or failed.
    ///
    /// Any thread may submit; calls of one group are numbered in the order of submission, which must be the same on all
    /// ranks.
    ///
    /// # Errors
    /// `InvalidArgument`, `InvalidType`, `Unsupported`, `Configuration`, `Exhausted`: refused, no number was consumed,
    /// the group is usable. `Aborted`: the group failed earlier or was destroyed. Everything later comes through the
    /// call.
    pub fn submit(&self, desc: CallDesc) -> Result<Call> {
        self.submit_ref(&desc)
    }

    /// Makes a call that the caller waits for. A small one of a shape met before takes the fast path on this thread,
    /// when the peers are there too; otherwise this is [`Group::submit`].
    ///
    /// # Errors
    /// As [`Group::submit`].
    pub fn run(&self, desc: &CallDesc) -> Result<Ran> {
        let goes = desc.may_take_fast_path()
            && !self.is_encoded_by_default(desc)
            && !self.driver.is_forked()
            && !self.closed.load(Ordering::Acquire);
        if !goes {
            return self.submit_ref(desc).map(pending);
        }
        let spin_limit = self.driver.spin_limit();
        let mut core = self.driver.lock_briefly();
        let is_watch = core.watch();
        let ran = core.guarded(|core| core.run_fast_path(self.id, desc, spin_limit));
        // What stopped halfway goes on before anybody takes another frame.
        let ran = ran.map(|ran| match ran {
            Some(FastPathEnd::Done { seq, .. }) => Some(Ok(seq)),
            Some(FastPathEnd::Stopped(stopped)) => Some(Err(self.go_on(&mut core, desc, *stopped))),
            None => None,
        });
        let relief = if is_watch { core.unwatch(time::now()) } else { Relief::SleepsOn };
        self.driver.unlock(core);
        self.driver.relieve(relief);
        match ran {
            Ok(Some(Ok(seq))) => Ok(Ran::Done(seq)),
            Ok(Some(Err(launched))) => self.launched(desc, launched).map(pending).map_err(|error| self.placed(error)),
            Ok(None) => self.submit_ref(desc).map(pending),
            Err(error) => Err(self.placed(error.of(desc.collective))),
        }
    }

    fn submit_ref(&self, desc: &CallDesc) -> Result<Call> {
        let started = self.with_default_codec(desc, DefaultCodec::next_step, |desc| self.start_measured(desc));
        // One that was refused has no number: the other ranks may have made theirs.
        if let (Ok(_), Some(codec)) =
            (&started, self.default_codec.as_ref().filter(|codec| codec.is_for(desc, self.world)))
        {
            codec.count();
        }
        started.map_err(|error| self.placed(error))
    }

    /// As [`Group::start`], with what is measured of the call.
    fn start_measured(&self, desc: &CallDesc) -> Result<Call> {
        let sampled = desc.encoding(self.world).map(|encoding| Sample::beside(desc, encoding)).transpose();
        match sampled.map_err(|error| error.of(desc.collective))?.flatten() {
            Some((desc, sample)) => self.start(&desc, Some(sample)),
            None => self.start(desc, None),
        }
    }

    fn is_encoded_by_default(&self, desc: &CallDesc) -> bool {
        self.default_codec.as_ref().is_some_and(|codec| codec.is_for(desc, self.world))
    }

    /// Passes the call on, encoded if that is the default in this group.
    fn with_default_codec<R>(
        &self,
        desc: &CallDesc,
        step: fn(&DefaultCodec) -> u64,
        then: impl FnOnce(&CallDesc) -> Result<R>,
    ) -> Result<R> {
        match &self.default_codec {
            Some(codec) if codec.is_for(desc, self.world) => then(&codec.encoded(desc, step(codec))?),
            Some(_) | None => then(desc),
        }
    }

    /// Puts a call that stopped on the fast path into the group.
    fn go_on(&self, core: &mut Core, desc: &CallDesc, stopped: Stopped) -> Result<(Arc<CallState>, bool)> {
        self.launch(core, desc, |group, context| {
            let call = self.call(desc, stopped.seq, group, context.now);
            let deadline = deadline(desc, group, context.now);
            group.start(stopped.into_run(call.clone(), deadline), context);
            Ok(call)
        })
    }

    fn start(&self, desc: &CallDesc, sample: Option<Sample>) -> Result<Call> {
        self.check_usable(desc.collective)?;
        desc.check(self.world)?;
        let placed = |error: Error| error.of(desc.collective);
        // All reasons to refuse the call come first where preparing its memory may change it.
        if !desc.uses_tensors_as_they_are() {
            self.refuse_if_aborted(desc.collective)?;
        }
        let prepared = self.prepare(desc).map_err(placed);
        // That the group has failed says more than what is wrong with a call that it would not take anyway.
        let (shape, mut buffers) = prepared.or_else(|error| self.refuse_if_aborted(desc.collective).and(Err(error)))?;
        let launched = self.driver.with_core(|core| {
            self.launch(core, desc, |group, context| {
                if let Some(error) = group.aborted(Some(desc.collective)) {
                    return Err(error);
                }
                let Some(shape) = shape else { return self.start_message(desc, buffers, group, context) };
                if shape.plan.code_bytes > 0 {
                    buffers.add_codes(group.code_pool.take(shape.plan.code_bytes as usize)?);
                }
                if desc.may_take_fast_path() {
                    group.keep_shape(desc, &shape);
                }
                let seq = group.take_seq(desc.seq)?;
                let call = self.call(desc, seq, group, context.now);
                let deadline = deadline(desc, group, context.now);
                let coder = desc.encoding(self.world).map(|encoding| {
                    let has_checksums = group.has_checksums(context.net);
                    let ranks = (self.global_rank, self.rank);
                    let coder = Coder::new(encoding, desc, ranks, self.world, has_checksums, time::now);
                    match &encoding.audit {
                        Some(audit) => coder.probed(audit, sample, &buffers),
                        None => coder,
                    }
                });
                let mut compute = Compute::new(buffers, shape.reducer);
                if let Some(coder) = coder {
                    compute = compute.encoding(coder);
                }
                group.start(Run::new(call.clone(), &shape, compute, &[], deadline), context);
                Ok(call)
            })
        });
        self.launched(desc, launched)
    }

    /// The shape of a checked call, if it is a collective, and its memory.
    fn prepare(&self, desc: &CallDesc) -> Result<(Option<Arc<Shape>>, Buffers)> {
        let shape = if desc.collective.is_point_to_point() { None } else { Some(self.planning.get(desc)?) };
        let mut buffers = Buffers::prepare(desc, self.rank.index())?;
        if desc.collective == Collective::Reduce && self.rank != desc.root {
            buffers.discard_outputs();
        }
        if let Some(shape) = &shape {
            buffers.add_scratch(shape.plan.scratch_bytes)?;
        }
        Ok((shape, buffers))
    }

    fn refuse_if_aborted(&self, collective: Collective) -> Result<()> {
        let aborted = self.with_state(|group, _| group.aborted(Some(collective)));
        aborted.map_err(|error| error.of(collective))?.map_or(Ok(()), Err)
    }

    /// Puts a call into the group and does all that can be done at once. Says also whether the driver must be woken.
    fn launch(
        &self,
        core: &mut Core,
        desc: &CallDesc,
        start: impl FnOnce(&mut GroupState, &mut Context<'_>) -> Result<Arc<CallState>>,
    ) -> Result<(Arc<CallState>, bool)> {
        let now = time::now();
        let started = core.guarded(|core| {
            let started = core.with_group(self.id, now, |group, context| {
                let call = start(group, context)?;
                group.advance(context);
                group.check_absentees(context);
                let inquire_at = (!desc.collective.is_point_to_point()).then(|| now + INQUIRE_AFTER);
                let look_by = deadline(desc, group, now).into_iter().chain(inquire_at).chain(group.begin_by());
                Ok((call, look_by.min()))
            });
            core.net.flush_all();
            started
        })?;
        let (call, look_by) = started.unwrap_or_else(|| Err(self.destroyed(Some(desc.collective))))?;
        if call.is_done() {
            core.ended_at_once();
        }
        let wake = match desc.mode {
            _ if call.is_done() => core.must_wake_driver(None),
            Mode::Async => core.must_wake_driver(look_by),
            // Its caller looks after it first, and wakes the driver when it goes to sleep.
            Mode::Blocking => false,
        };
        Ok((call, wake))
    }

    /// What follows a launch, without the lock.
    fn launched(&self, desc: &CallDesc, launched: Result<(Arc<CallState>, bool)>) -> Result<Call> {
        let (call, wake) = launched.map_err(|error| error.of(desc.collective))?;
        if wake {
            self.driver.kick();
        }
        self.driver.submitted(&call);
        Ok(Call { state: call, driver: Arc::downgrade(&self.driver) })
    }

    fn start_message(
        &self,
        desc: &CallDesc,
        buffers: Buffers,
        group: &mut GroupState,
        context: &mut Context<'_>,
    ) -> Result<Arc<CallState>> {
        let blocks = if desc.collective == Collective::Send { &desc.inputs } else { &desc.outputs };
        let [tensor] = blocks.pieces() else {
            return Err(Error::invalid_argument("a message has one tensor"));
        };
        let count = tensor.count_elems();
        let signature = Signature {
            collective: desc.collective as u8,
            dtype: tensor.dtype as u8,
            count,
            reserved: desc.note,
            ..Signature::default()
        };
        let call = self.call(desc, group.next_p2p, group, context.now);
        group.next_p2p += 1;
        let message = Message {
            call: call.clone(),
            deadline: deadline(desc, group, context.now),
            peer: desc.peer,
            tag: desc.tag,
            signature,
            buffers,
            total: tensor.len_bytes(),
            is_private: desc.tag >= PRIVATE_TAGS,
        };
        let to = if desc.collective == Collective::Send { desc.peer } else { None };
        group.start_message(message, to, context);
        Ok(call)
    }

    fn call(&self, desc: &CallDesc, seq: u64, group: &GroupState, now: Moment) -> Arc<CallState> {
        let place = CallPlace {
            group_id: self.id,
            group: self.name.clone(),
            rank: self.rank,
            collective: desc.collective,
            seq,
            is_async: desc.mode == Mode::Async,
            timed: group.timing,
        };
        CallState::new(place, now)
    }

    /// The name of the algorithm that such a collective takes in this group. Makes no call and consumes no number.
    ///
    /// # Errors
    /// As [`Group::submit`] for a description that it refuses; `Unsupported` for point-to-point calls, which have none.
    pub fn algorithm_of(&self, desc: &CallDesc) -> Result<&'static str> {
        let usable = self.check_usable(desc.collective);
        let named = usable.and_then(|()| desc.check(self.world)).and_then(|()| {
            self.with_default_codec(desc, |_| 0, |desc| Ok(self.planning.get(desc)?.plan.algorithm.name))
        });
        named.map_err(|error| self.placed(error.of(desc.collective)))
    }

    /// Takes `count` consecutive numbers for collectives that are submitted later with [`CallDesc::seq`]. A barrier that is made
    /// after this is not over before [`Group::conclude_seqs`].
    ///
    /// # Errors
    /// `Aborted` when the group failed or was destroyed.
    pub fn reserve_seqs(&self, count: u64) -> Result<u64> {
        self.with_state(|group, _| match group.aborted(None) {
            Some(error) => Err(error),
            None => Ok(group.reserve_seqs(count)),
        })?
    }

    /// Ends what numbers were reserved for. After an error that kept this rank from making all of the calls the group fails
    /// with it: the other ranks would wait for the rest.
    pub fn conclude_seqs(&self, seqs: Range<u64>, failed: Option<&Error>) {
        if self.with_state(|group, context| group.conclude_seqs(seqs, failed, context)).is_ok() {
            self.driver.flush();
            self.driver.kick();
        }
    }

    /// Number of the next collective.
    pub fn next_seq(&self) -> u64 {
        self.with_state(|group, _| group.next_seq).unwrap_or(0)
    }

    /// How often a point-to-point message was looked at so far: what those that are outstanding cost. For tests.
    pub fn message_steps(&self) -> u64 {
        self.with_state(|group, _| group.p2p.steps()).unwrap_or(0)
    }

    /// This process's rank.
    pub fn rank(&self) -> u32 {
        self.rank.0
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.world
    }

    /// Name for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// For a person: name, rank and world, then a line for each other rank with its process and the link to it.
    pub fn describe(&self) -> String {
        let head = format!("group {}\nrank {}\nworld {}\n", self.name, self.rank, self.world);
        let links = self.with_state(|group, context| {
            let others = group.members.ranks().filter(|&rank| rank != group.rank);
            let line = |rank: Rank| {
                let link = context.net.describe(group.members.peer(rank));
                format!("{}: {link}\n", group.members.describe(rank, context.net))
            };
            others.map(line).collect::<String>()
        });
        head + &links.unwrap_or_default()
    }

    /// The first cause, when the group has failed.
    pub fn error(&self) -> Option<Error> {
        self.with_state(|group, _| group.poison().cloned()).ok().flatten()
    }

    /// The deadline of calls made from now on.
    pub fn set_timeout(&self, timeout: Duration) {
        let _ = self.with_state(|group, _| group.timeout = timeout);
    }

    /// Calls made from now on record their duration.
    pub fn enable_timing(&self) {
        let _ = self.with_state(|group, _| group.timing = true);
    }

    /// Ends the group here and on all ranks: calls in flight fail at once, later ones are refused. Any thread may.
    pub fn abort(&self, reason: &str) {
        let error = Error::aborted(format!("abort was called: {reason}")).in_group(&self.name).on_rank(self.rank);
        if self.with_state(|group, context| group.fail(error, context, Tell::Peers)).is_ok() {
            self.driver.flush();
            self.driver.kick();
        }
    }

    /// Leaves the group; the other ranks are told. Again and again is fine.
    ///
    /// Waits, at most half a minute, until collectives that were made asynchronously are done: the other ranks may be about to
    /// make them. Other calls in flight fail. Then waits until the other ranks' hosts have what calls that are done have sent,
    /// in bounded time: the process may end right after, and what it buffers would go with it.
    ///
    /// # Errors
    /// A disagreement about calls that ended before it could be seen, when no later call could say so.
    pub fn shutdown(&self) -> Result<()> {
        self.shutdown_unless(&mut || false)
    }

    /// As [`Group::shutdown`]; the wait ends when `interrupt` returns true. It is called about every 50 ms.
    ///
    /// # Errors
    /// As [`Group::shutdown`].
    pub fn shutdown_unless(&self, interrupt: &mut dyn FnMut() -> bool) -> Result<()> {
        let interrupt = &mut lasting(interrupt);
        if !self.closed.load(Ordering::Acquire) && !self.driver.is_forked() {
            let until = time::now() + self.with_state(|group, _| group.timeout).unwrap_or_default().min(LAST_CALLS);
            self.driver.await_calls(&[self.id], until, interrupt);
        }
        let Some(Left { unsaid, sent, patience }) = self.leave_at_once() else { return Ok(()) };
        let until = time::now() + patience;
        match self.driver.await_delivery(sent, until, interrupt) {
            Delivery::Complete | Delivery::Interrupted => {}
            Delivery::Late => tracing::warn!(
                group = &*self.name,
                "destroyed, and {} ms later another rank has not yet taken what calls that are done have sent to it; it is \
                 lost if this process ends before that rank receives it",
                patience.as_millis()
            ),
        }
        unsaid.map_or(Ok(()), Err)
    }

    /// As [`Group::shutdown`], without waiting for anybody.
    ///
    /// # Errors
    /// As [`Group::shutdown`].
    pub fn leave(&self) -> Result<()> {
        self.leave_at_once().and_then(|left| left.unsaid).map_or(Ok(()), Err)
    }

    /// `None`: it was left before.
    fn leave_at_once(&self) -> Option<Left> {
        if self.closed.swap(true, Ordering::AcqRel) || self.driver.is_forked() {
            return None;
        }
        // One look at the links: a disagreement that calls could not see may lie there.
        self.driver.pass_now();
        let now = time::now();
        // At once, or a call made in between would be forgotten with the group.
        let left = self.driver.with_core(|core| {
            let left = core.guarded(|core| {
                core.with_group(self.id, now, |group, context| {
                    let patience = if group.poison().is_some() { LAST_BYTES_FAILED } else { LAST_BYTES };
                    // Without the goodbyes: who waits for them would wait for ranks that have no need of them.
                    let sent = group.marks(context.net);
                    let left = Left { unsaid: group.unsaid(), sent, patience: patience.min(group.timeout) };
                    group.leave(context);
                    left
                })
            });
            core.remove_group(self.id);
            left
        });
        self.driver.flush();
        self.driver.kick();
        left.ok().flatten()
    }

    pub(crate) fn with_state<R>(&self, f: impl FnOnce(&mut GroupState, &mut Context<'_>) -> R) -> Result<R> {
        // The lock may have been held by another thread when the process forked.
        if self.driver.is_forked() {
            return Err(self.placed(forked()));
        }
        let now = time::now();
        self.driver.with_core(|core| core.with_group(self.id, now, f)).ok_or_else(|| self.destroyed(None))
    }

    fn check_usable(&self, collective: Collective) -> Result<()> {
        if self.driver.is_forked() {
            return Err(forked().of(collective));
        }
        if self.closed.load(Ordering::Acquire) {
            return Err(self.destroyed(Some(collective)));
        }
        Ok(())
    }

    fn destroyed(&self, collective: Option<Collective>) -> Error {
        let error = Error::aborted("the group was destroyed; make a new one").in_group(&self.name).on_rank(self.rank);
        match collective {
            Some(collective) => error.of(collective),
            None => error,
        }
    }

    /// An error with this group's place.
    pub(crate) fn placed(&self, error: Error) -> Error {
        error.in_group(&self.name).on_rank(self.rank)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A cause that nobody asked for has nowhere to go, and who drops a group does not expect to wait.
        let _ = self.leave();
    }
}

/// Private messages have none: whoever made them waits no longer than it wants, and takes them back.
fn deadline(desc: &CallDesc, group: &GroupState, now: Moment) -> Option<Moment> {
    if desc.tag >= PRIVATE_TAGS {
        return None;
    }
    Some(now + desc.timeout.unwrap_or(group.timeout))
}

fn forked() -> Error {
    Error::aborted(
        "this process was forked from the one that made the group, and a group does not survive a fork; make a group of \
         its own in the child, or start the child with spawn",
    )
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

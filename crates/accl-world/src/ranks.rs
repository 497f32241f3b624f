//! Runs the programs of simulated threads: they create groups, issue calls, wait, and leave.
//!
//! Owns the path of a call from a program to the protocol, in the manner of `api::group`, and of a wait that polls for
//! itself. `driving` decides which thread drives when all sleep. Read [`World::run_thread`] first.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use accl_schedule::cost::{IntraNode, Machine, Placement};
use accl_schedule::{Basis, Chooser, Topology};
use accl_types::{Bytes, Collective, Dtype, Error, ErrorKind, Rank, ReduceOp};

use super::clock::{self, Event};
use super::devices::{DeviceCall, Terms};
use super::driving::PASS;
use super::external::Device;
use super::lanes::LaneOf;
use super::oracle::Tensors;
use super::scenario::{Breaks, Fault, Matter, Step};
use super::world::{GroupMember, Made, State, Violation, World};
use accl_engine::internals::Planning;
use accl_engine::internals::{Cut, Lane, Least, Numbers, Parts, parts_of};
use accl_engine::internals::{InFlight, Kept, Notifier};
use accl_executor::call::{Blocks, CallDesc, Codecs, Encoding, MemoryKind, Mode, TensorCodecs};
use accl_executor::exec::SpinLimit;
use accl_executor::group::{Caller, Core, FastStart, GroupState, Notify, Started, WakeDecision};
use accl_executor::peers::Members;
use accl_executor::plan::Planner;

impl World<'_> {
    pub(super) fn run_thread(&mut self, process: usize, thread: usize) -> Result<(), Violation> {
        if self.processes[process].core.is_none() {
            return Ok(());
        }
        match self.processes[process].threads[thread].state {
            State::Running | State::Awaiting => self.step(process, thread),
            State::Spinning { item, left, watches } => {
                self.spin(process, thread, item, left, watches);
                Ok(())
            }
            State::Asleep { item } => {
                if self.is_over(item, process) && self.processes[process].driver != Some(thread) {
                    self.resume(process, thread);
                }
                Ok(())
            }
            State::Over => Ok(()),
        }
    }

    pub(super) fn resume(&mut self, process: usize, thread: usize) {
        self.processes[process].threads[thread].state = State::Running;
        self.enter(100, Event::Run { process, thread });
    }

    fn step(&mut self, process: usize, thread: usize) -> Result<(), Violation> {
        let this = &mut self.processes[process].threads[thread];
        let Some(&step) = this.steps.get(this.at) else {
            this.state = State::Over;
            return Ok(());
        };
        (this.at, this.state) = (this.at + 1, State::Running);
        if self.has_yet_to_be_made(process, step) {
            let this = &mut self.processes[process].threads[thread];
            (this.at, this.state) = (this.at - 1, State::Awaiting);
            return Ok(());
        }
        match step {
            Step::Compute(nanos) => self.enter(nanos, Event::Run { process, thread }),
            Step::Make(group) => {
                self.make_group(process, group);
                self.enter(1000, Event::Run { process, thread });
            }
            Step::Call(item) => {
                self.make_call(process, thread, item)?;
                self.resume_those_that_await(process);
            }
            Step::Reserve(composition) => {
                self.reserve(process, composition);
                self.resume_those_that_await(process);
                self.enter(500, Event::Run { process, thread });
            }
            Step::Conclude(composition) => {
                self.conclude(process, composition);
                self.enter(500, Event::Run { process, thread });
            }
            Step::Wait(item) => {
                let left = self.scenario.spins;
                self.processes[process].threads[thread].state = State::Spinning { item, left, watches: false };
                self.enter(0, Event::Run { process, thread });
            }
            Step::Leave(group) => {
                self.leave(process, group);
                self.enter(1000, Event::Run { process, thread });
            }
        }
        Ok(())
    }

    /// Whether the step depends on something that another thread has not done yet.
    fn has_yet_to_be_made(&self, process: usize, step: Step) -> bool {
        let of = |item: usize| self.scenario.items[item].composed;
        match step {
            Step::Call(item) => of(item).is_some_and(|composed| !self.reserved.contains_key(&(process, composed))),
            Step::Wait(item) => of(item).is_some() && !self.made.contains_key(&(item, process)),
            Step::Compute(_) | Step::Make(_) | Step::Leave(_) | Step::Reserve(_) | Step::Conclude(_) => false,
        }
    }

    fn resume_those_that_await(&mut self, process: usize) {
        for thread in 0..self.processes[process].threads.len() {
            if self.processes[process].threads[thread].state == State::Awaiting {
                self.resume(process, thread);
            }
        }
    }

    /// Mirrors `Group::reserve_seqs`.
    fn reserve(&mut self, process: usize, composition: usize) {
        let count = self.scenario.composed(composition).count() as u64;
        let group = self.scenario.items[composition].group;
        let host = &mut self.processes[process];
        let first = host.core.as_mut().zip(host.members.get(&group)).and_then(|(core, member)| {
            core.with_group(member.caller.group, clock::now(), |group, _| {
                group.aborted(None).is_none().then(|| group.reserve_seqs(count))
            })
        });
        self.reserved.insert((process, composition), first.flatten().map(|first| (first, count)));
    }

    /// Mirrors `Group::conclude_seqs`.
    fn conclude(&mut self, process: usize, composition: usize) {
        let group = self.scenario.items[composition].group;
        let Some(&Some((first, count))) = self.reserved.get(&(process, composition)) else { return };
        let host = &mut self.processes[process];
        let (Some(core), Some(member)) = (&mut host.core, host.members.get(&group)) else { return };
        core.with_group(member.caller.group, clock::now(), |group, context| {
            group.conclude_seqs(first..first + count, None, context);
        });
        core.net.flush_all();
        self.schedule_wake(process);
    }

    /// Mirrors a wait that polls for itself for a while before it sleeps.
    fn spin(&mut self, process: usize, thread: usize, item: usize, left: u32, mut watches: bool) {
        let is_over = self.is_over(item, process);
        let Some(core) = &mut self.processes[process].core else { return };
        if is_over || left == 0 {
            let decision = if watches { core.unwatch(clock::now()) } else { WakeDecision::KeepAsleep };
            let must = !is_over && core.must_wake_driver(core.next_deadline());
            self.apply_wake(process, decision);
            if must {
                self.schedule_wake(process);
            }
            if is_over {
                self.resume(process, thread);
            } else {
                self.processes[process].threads[thread].state = State::Asleep { item };
            }
            return;
        }
        watches = watches || core.watch();
        let call = self.made.get(&(item, process)).and_then(|made| made.call.as_ref());
        if left == self.scenario.spins {
            let peers = call.map(|call| core.peers_of(call)).unwrap_or_default();
            peers.into_iter().for_each(|peer| core.net.poll_link(peer));
        }
        let streams = call.map(|call| core.streams_of(call)).unwrap_or_default();
        streams.iter().for_each(|&peer| core.net.force_poll(peer));
        if streams.is_empty() {
            self.poll(process);
        }
        let Some(core) = &mut self.processes[process].core else { return };
        let moved = core.pass(clock::now()) | core.take_driver_unnotified();
        let must = !watches && core.must_wake_driver(None);
        if must {
            self.schedule_wake(process);
        } else if moved {
            self.apply_wake(process, WakeDecision::CheckCall);
        }
        self.processes[process].threads[thread].state = State::Spinning { item, left: left - 1, watches };
        self.enter(PASS, Event::Run { process, thread });
    }

    fn make_group(&mut self, process: usize, index: usize) {
        self.link_neighbours(process, index);
        let numbers: Arc<Numbers> = Arc::default();
        // Like `create_group`, creates the group on the first lane first.
        for lane in 0..self.scenario.lanes {
            self.make_group_on(process, lane, index, &numbers);
        }
    }

    fn make_group_on(&mut self, process: usize, lane: usize, index: usize, numbers: &Arc<Numbers>) {
        let spec = &self.scenario.groups[index];
        let Some(rank) = spec.rank_of(process) else { return };
        let host = &mut self.processes[self.scenario.node(process, lane)];
        let peer = |&member: &usize| host.peers[self.scenario.node(member, lane)].expect("all are introduced");
        let peers = spec.members.iter().map(peer).collect();
        let Some(core) = &mut host.core else { return };
        let (id, name) = (index as u64 + 1, Arc::from(format!("g{index}")));
        let rank = Rank(rank as u32);
        let mut state = GroupState::new(
            id,
            Arc::clone(&name),
            rank,
            self.scenario.timeout,
            Members::new(peers, Bytes(spec.eager_bytes)),
        );
        if self.scenario.seed.is_multiple_of(3) {
            state.enable_timing();
        }
        if self.scenario.lanes > 1 {
            state.set_lane(lane as u32, numbers.clone());
        }
        core.add_group(state, clock::now());
        let placement = Placement { intra_node: IntraNode::Shm, cores: 8, segment_bytes: self.scenario.segment };
        let basis = Basis { machine: Machine::default(), placement, deterministic: false };
        let chooser = Chooser::new(Topology::new(spec.hosts.clone()), spec.rules.clone(), &basis);
        let world = spec.members.len() as u32;
        let caller = Arc::new(Caller { group: id, name, rank, world, global_rank: process as u64 });
        let member = GroupMember {
            caller,
            planning: Planning::new(Planner::new(chooser, rank).with_least_copy(self.scenario.least_copy())),
            has_left: false,
            left_at: None,
            made_at: clock::nanos(),
        };
        host.members.insert(index, member);
    }

    /// Mirrors `Group::leave`.
    pub(super) fn leave(&mut self, process: usize, group: usize) {
        let process = process % self.scenario.processes;
        // A failure that another thread found may not have reached the other lanes yet.
        self.fail_lanes_now(process);
        for node in self.scenario.nodes(process) {
            self.leave_node(node, group);
            self.fail_lanes_now(process);
        }
    }

    fn leave_node(&mut self, process: usize, group: usize) {
        let host = &mut self.processes[process];
        let (Some(core), Some(member)) = (&mut host.core, host.members.get_mut(&group)) else { return };
        if std::mem::replace(&mut member.has_left, true) {
            return;
        }
        member.left_at = Some(clock::nanos());
        core.force_poll_of(member.caller.group);
        core.pass_whole(clock::now());
        let _ = core.leave_group(member.caller.group, clock::now());
        core.net.flush_all();
        self.schedule_wake(process);
    }

    fn make_call(&mut self, process: usize, thread: usize, index: usize) -> Result<(), Violation> {
        let item = &self.scenario.items[index];
        let Some(rank) = self.scenario.groups[item.group].rank_of(process) else { return Ok(()) };
        let fault = self.fault_of(index, rank);
        let this = &mut self.processes[process].threads[thread];
        if let Some(Fault::Late { wait, .. }) = fault
            && this.was_late != Some(index)
        {
            this.was_late = Some(index);
            this.at -= 1;
            self.enter(wait, Event::Run { process, thread });
            return Ok(());
        }
        match fault {
            Some(Fault::Abort { .. }) => {
                self.abort(process, item.group);
                // A rank that aborts may leave at once. Ranks that link to it later must still learn the cause.
                if self.scenario.seed.is_multiple_of(2) {
                    self.leave(process, item.group);
                }
            }
            Some(Fault::Leave { .. }) => self.leave(process, item.group),
            _ => {}
        }
        let odd = match fault {
            Some(Fault::Disagree { on, .. }) => Some(on),
            _ => None,
        };
        let world = self.scenario.groups[item.group].members.len();
        let (tensors, inputs, outputs) = Tensors::new(index, item, rank, world, odd == Some(Matter::Count));
        let mut desc = CallDesc::new(item.collective, item.dtype);
        (desc.inputs, desc.outputs, desc.op) = (inputs, outputs, item.op);
        desc.root = Rank(item.root as u32);
        desc.equal_blocks =
            item.is_equal && !matches!(item.collective, Collective::ReduceScatter | Collective::AllGather);
        desc.mode = if item.is_async[rank] { Mode::Async } else { Mode::Blocking };
        if item.is_message() {
            let sends = rank == item.ends.0;
            desc.collective = if sends { Collective::Send } else { Collective::Recv };
            let peer = if sends { item.ends.1 } else { item.ends.0 };
            desc.peer = (sends || !item.is_from_any).then_some(Rank(peer as u32));
            desc.tag = item.tag;
        } else if !item.collective.is_rooted() {
            desc.root = Rank(0);
        }
        match odd {
            Some(Matter::Operator) => desc.op = if desc.op == ReduceOp::Sum { ReduceOp::Max } else { ReduceOp::Sum },
            Some(Matter::Root) if item.collective.is_rooted() => {
                desc.root = Rank((item.root as u32 + 1) % world as u32)
            }
            Some(Matter::Collective) if !item.is_message() => {
                desc = CallDesc::new(Collective::Barrier, Dtype::U8);
                desc.mode = if item.is_async[rank] { Mode::Async } else { Mode::Blocking };
            }
            Some(_) | None => {}
        }
        if let Some(codec) = item.codec.filter(|_| desc.collective == item.collective) {
            desc.encoding = encoding(codec, item.counts.len(), index as u64).into();
        }
        if self.scenario.is_staged(index, rank) {
            self.stage(index, rank, process, &mut desc);
        }
        let number = item.composed.map(|composed| {
            let at = self.scenario.composed(composed).position(|other| other == index).unwrap_or_default() as u64;
            self.reserved.get(&(process, composed)).copied().flatten().map(|(first, _)| first + at)
        });
        desc.seq = number.flatten();
        let terms = self.offload(index, rank, &mut desc);
        let made = match number {
            // Without a reserved sequence number, the rank issues no call.
            Some(None) => Err(Error::aborted("no number was reserved")),
            Some(Some(_)) | None => self.submit(process, item.group, &desc),
        };
        if let (Ok(Some(call)), Some(terms)) = (&made, terms) {
            self.devices.lock().note_made(item.group, rank, call.seq, terms);
        }
        let (call, refused) = match made {
            Ok(call) => (call, None),
            Err(error) => {
                // A refused call has no sequence number, so ranks would mistake the next call for it. The rank's
                // program ends there.
                if odd.is_some() && error.kind != ErrorKind::Aborted {
                    self.abort(process, item.group);
                }
                (None, Some(error))
            }
        };
        let callbacks: Arc<AtomicUsize> = Arc::default();
        if let Some(call) = &call {
            let counter = callbacks.clone();
            let callback = Box::new(move || {
                counter.fetch_add(1, Ordering::Relaxed);
            });
            if let Kept::Ended(callback) = call.keep_callback(callback) {
                callback();
            }
        }
        self.made.insert(
            (index, process),
            Made { call, refused, tensors, is_ended: false, is_odd: odd.is_some(), callbacks },
        );
        self.enter(500, Event::Run { process, thread });
        Ok(())
    }

    /// Gives a call to the devices of its group, if they do it. Returns the terms on which the ranks must agree.
    fn offload(&mut self, item: usize, rank: usize, desc: &mut CallDesc) -> Option<Terms> {
        let group = self.scenario.items[item].group;
        let world = self.scenario.groups[group].members.len();
        let is_moved = desc.collective != Collective::Barrier && self.scenario.is_offloaded(item);
        let are_alike = |blocks: &Blocks| {
            let mut sizes = blocks.iter().map(|block| block.iter().map(|piece| piece.len_bytes()).sum::<u64>());
            let first = sizes.next();
            sizes.all(|size| Some(size) == first)
        };
        if !is_moved || !are_alike(&desc.inputs) || !are_alike(&desc.outputs) {
            return None;
        }
        desc.equal_blocks = true;
        let at_rank = |fault: &Fault| match fault {
            Fault::Break { item: at, rank: of, breaks } if *at == item => {
                (*of == rank || *breaks == Breaks::AllHang).then_some(*breaks)
            }
            _ => None,
        };
        let found = self.faults.iter().enumerate().find_map(|(index, fault)| Some((index, at_rank(fault)?)));
        self.struck.extend(found.map(|(index, _)| index));
        let terms = Terms::of(desc, world as u64);
        desc.offload = Some(Arc::new(DeviceCall {
            devices: self.devices.clone(),
            agenda: self.agenda.clone(),
            group,
            rank,
            terms: terms.clone(),
            breaks: found.map(|(_, breaks)| breaks),
            seed: accl_types::hash::hash_words([self.scenario.seed, item as u64, rank as u64, 0xdec1ce]),
        }));
        self.seen.offloaded += 1;
        Some(terms)
    }

    /// Places the tensors of a call in memory that only a stand-in for a device reaches.
    fn stage(&mut self, item: usize, rank: usize, process: usize, desc: &mut CallDesc) {
        let at_rank = |fault: &Fault| match fault {
            Fault::Break { item: at, rank: of, breaks } if (*at, *of) == (item, rank) => Some(*breaks),
            _ => None,
        };
        let found = self.faults.iter().enumerate().find_map(|(index, fault)| Some((index, at_rank(fault)?)));
        self.struck.extend(found.map(|(index, _)| index));
        let external_tasks = |blocks: &Blocks| -> Blocks {
            let device = MemoryKind::Device { id: process as u32 };
            blocks
                .iter()
                .map(|block| block.iter().map(|tensor| tensor.clone().in_memory(device)).collect::<Vec<_>>())
                .collect()
        };
        (desc.inputs, desc.outputs) = (external_tasks(&desc.inputs), external_tasks(&desc.outputs));
        let seed = accl_types::hash::hash_words([self.scenario.seed, item as u64, process as u64]);
        let breaks = found.map(|(_, breaks)| breaks);
        // The same bytes of this collective are copied in and out.
        let lingers = desc.collective == Collective::AllReduce && seed.is_multiple_of(2);
        let device =
            Device::new(&self.external_tasks, &self.agenda, process, breaks, lingers, self.scenario.segment, seed);
        desc.staging = Some(Arc::new(device));
        self.seen.staged += 1;
        desc.is_by_reference = self.scenario.is_by_reference(item) && desc.collective != Collective::Barrier;
        self.seen.by_reference += u64::from(desc.is_by_reference);
    }

    /// Mirrors `Group::submit_blocking` and `Group::submit`.
    fn submit(&mut self, process: usize, group: usize, desc: &CallDesc) -> Result<Option<InFlight>, Error> {
        let host = &mut self.processes[process];
        let (Some(core), Some(member)) = (&mut host.core, host.members.get(&group)) else {
            return Err(Error::internal("a call without its group"));
        };
        if member.has_left {
            return Err(member.caller.destroyed(Some(desc.collective)));
        }
        if desc.may_take_fast_path() {
            let draws = self.seen.events;
            let spin_limit =
                SpinLimit { spins: 1 + (draws % 3) as u32, yields: (draws % 5) as u32, yield_now: clock::yield_now };
            let watches = core.watch();
            let ran = core.start_fast(member.caller.group, desc, spin_limit);
            let ran = ran.map(|end| match end {
                FastStart::Done { .. } => Ok(None),
                FastStart::Failed(error) => Err(*error),
                FastStart::Stopped(stopped) => {
                    let notifier: Arc<Notifier> = Arc::default();
                    let started = member.caller.resume(core, desc, *stopped, notifier.clone(), clock::now());
                    started.map(|started| Some((started, notifier)))
                }
            });
            let decision = if watches { core.unwatch(clock::now()) } else { WakeDecision::KeepAsleep };
            self.apply_wake(process, decision);
            match ran {
                Some(Ok(None)) => {
                    self.seen.fast += 1;
                    return Ok(None);
                }
                Some(Ok(Some((started, notifier)))) => return Ok(Some(self.after_start(process, started, notifier))),
                Some(Err(error)) => return Err(error),
                None => {}
            }
        }
        let host = &mut self.processes[process];
        let (Some(core), Some(member)) = (&mut host.core, host.members.get(&group)) else {
            return Err(Error::internal("a call without its group"));
        };
        desc.check(member.caller.rank, member.caller.world)?;
        let coded = member.caller.tensor_coder(desc);
        self.seen.coded += u64::from(coded.is_some());
        let coded = coded.map(|coder| CallDesc { tensor_coder: Some(coder), ..desc.clone() });
        let desc = coded.as_ref().unwrap_or(desc);
        let least = Least::Bytes(self.scenario.least_part_bytes);
        let of = parts_of(desc, member.caller.world, self.scenario.lanes as u32, least, || 0);
        let cut = Cut::new(desc, of, 0);
        let desc = cut.as_ref().map_or(desc, |cut| &cut.first);
        let shape = (!desc.collective.is_point_to_point()).then(|| member.planning.get(desc)).transpose()?;
        let prepared = member.caller.prepare(desc, shape)?;
        let shape_of = |desc: &CallDesc| member.planning.get(desc);
        let others = cut.as_ref().map(|cut| Ok::<_, Error>((cut, cut.others(&member.caller, &prepared, shape_of)?)));
        let others = others.transpose()?;
        let notifier: Arc<Notifier> = Arc::default();
        let started = member.caller.start(core, desc, prepared, None, notifier.clone(), clock::now())?;
        if let Some((cut, parts)) = others {
            self.seen.cut += 1;
            let lane = |node| LaneOf { node, jobs: self.jobs.clone(), agenda: self.agenda.clone() };
            let lanes = self.scenario.nodes(process).skip(1).map(|node| Arc::new(lane(node)) as Arc<dyn Lane>);
            let (caller, seq, now) = (member.caller.clone(), started.call.seq, clock::now());
            cut.join.begin_parts(Parts { caller, lanes: lanes.collect(), parts, seq, now, wakes: true });
        }
        Ok(Some(self.after_start(process, started, notifier)))
    }

    fn after_start(&mut self, process: usize, started: Started, notifier: Arc<Notifier>) -> InFlight {
        let Started { call, wakes_driver } = started;
        if wakes_driver {
            self.schedule_wake(process);
        }
        if call.is_async && !call.is_done() {
            self.poll(process);
            if let Some(core) = &mut self.processes[process].core {
                core.pass(clock::now());
                if core.must_wake_driver(None) {
                    self.schedule_wake(process);
                }
            }
        }
        let poll_due = |core: &mut Core| core.take_poll_due();
        if call.is_done() && self.processes[process].core.as_mut().is_some_and(poll_due) {
            self.poll(process);
            if let Some(core) = &mut self.processes[process].core {
                core.pass_whole(clock::now());
            }
        }
        InFlight::new(call, notifier)
    }

    fn abort(&mut self, process: usize, group: usize) {
        let host = &mut self.processes[process];
        let (Some(core), Some(member)) = (&mut host.core, host.members.get(&group)) else { return };
        let error = member.caller.in_context(Error::aborted("the group was aborted: by the world"));
        core.with_group(member.caller.group, clock::now(), |group, context| group.fail(error, context, Notify::Peers));
        core.net.flush_all();
        self.schedule_wake(process);
        self.fail_lanes_now(process);
    }
}

fn encoding(text: &str, tensors: usize, id: u64) -> Encoding {
    let codec = accl_engine::codec::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    let raw = accl_engine::codec::parse("raw").unwrap_or_else(|error| panic!("raw: {error}"));
    let of = |tensor| TensorCodecs {
        intra_node: raw.clone(),
        reduce: codec.clone(),
        result: codec.clone(),
        id: id + tensor,
    };
    let codecs = Codecs::new((0..tensors as u64).map(of).collect());
    let codecs = codecs.unwrap_or_else(|error| panic!("{text}: {error}"));
    Encoding { codecs, seed: 5, step: id, residuals: None, probe: None }
}

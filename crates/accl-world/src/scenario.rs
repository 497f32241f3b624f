//! Scenarios of a simulated world, as data: processes, links, groups, the calls of all ranks, and the faults.
//!
//! Owns the drawing of a scenario from a seed, and the parts that can be left out to make a failure smaller. Read
//! [`Scenario::draw`] first.
//!
//! This file is long because everything that a seed may draw is listed here, with its probability and its smaller
//! forms.

use std::time::Duration;

use accl_executor::peers::neighbours;
use accl_schedule::{ALGORITHMS, Encodes, Topology};
use accl_testkit::Rng;
use accl_types::config::AlgorithmRule;
use accl_types::{Bytes, Collective, Dtype, Rank, ReduceOp};

use super::link::{Flip, Medium, WireSpec};
use accl_types::hash::hash_words;

/// Deadlines of calls: the usual one, and one that is long enough to detect a vanished host first.
pub(super) const TIMEOUT: Duration = Duration::from_secs(1);
const LONG_TIMEOUT: Duration = Duration::from_secs(45);
/// Maximum nanoseconds by which a late rank is late.
const MOST_LATE: u64 = 2_500_000_000;

const REDUCED: [Collective; 3] = [Collective::AllReduce, Collective::Reduce, Collective::ReduceScatter];
const MOVED: [Collective; 5] =
    [Collective::Broadcast, Collective::AllGather, Collective::Gather, Collective::Scatter, Collective::AllToAll];
const DTYPES: [Dtype; 7] = [Dtype::F32, Dtype::I64, Dtype::U8, Dtype::I32, Dtype::F64, Dtype::BF16, Dtype::I16];
const CODECS: [&str; 4] = ["maxmin:4,bucket=64", "maxmin:8,bucket=64", "bf16", "maxmin:2,bucket=64"];

/// A group. `members` lists its processes in rank order.
#[derive(Clone, Debug)]
pub(super) struct GroupSpec {
    pub(super) members: Vec<usize>,
    /// Host of each rank, as algorithms see it.
    pub(super) hosts: Vec<u32>,
    pub(super) rules: Vec<AlgorithmRule>,
    pub(super) eager_bytes: u64,
    /// Thread, in each member process, that issues the group's calls.
    pub(super) thread: usize,
}

impl GroupSpec {
    pub(super) fn rank_of(&self, process: usize) -> Option<usize> {
        self.members.iter().position(|&member| member == process)
    }
}

/// A call that all ranks of a group issue, or a message between two ranks.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub(super) group: usize,
    pub(super) collective: Collective,
    pub(super) dtype: Dtype,
    pub(super) op: ReduceOp,
    pub(super) root: usize,
    /// Elements of each piece of a block, or of each block if block sizes differ.
    pub(super) counts: Vec<usize>,
    /// Whether all blocks have equal size.
    pub(super) is_equal: bool,
    pub(super) codec: Option<&'static str>,
    /// Distance between consecutive elements, in elements.
    pub(super) step: usize,
    /// For a message: ranks of the sender and the receiver.
    pub(super) ends: (usize, usize),
    pub(super) tag: u32,
    pub(super) is_from_any: bool,
    /// For each rank: whether the call is asynchronous.
    pub(super) is_async: Vec<bool>,
    /// For a message: the receiver issues its receive before anything else in the group.
    pub(super) is_early: bool,
    /// Composition to which the call belongs, named by its first item. The calls of a composition have reserved
    /// sequence numbers. `None` for a call that takes the next number.
    pub(super) composed: Option<usize>,
}

impl Item {
    pub(super) fn is_message(&self) -> bool {
        self.collective == Collective::Send
    }
}

/// When processes are linked to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Linking {
    /// All processes are linked before anything happens.
    AtFirst,
    /// Neighbours in a group are linked when the group is created, other processes when a call first needs the link.
    WithGroups,
    /// Links are created as for [`Linking::WithGroups`], but the creation of a group does not wait for them.
    Late,
}

/// A step of a thread's program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Make(usize),
    Call(usize),
    Wait(usize),
    /// Does something else for this many nanoseconds.
    Compute(u64),
    Leave(usize),
    /// Reserves the sequence numbers of a composition.
    Reserve(usize),
    /// Ends a composition after all its calls were issued.
    Conclude(usize),
}

/// Whether a receive accepts a message from any rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IsFromAny {
    Yes,
    No,
}

/// Property of a call on which a rank disagrees.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Matter {
    Count,
    Operator,
    Root,
    Collective,
}

/// How an external operation, or a device's task, breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Breaks {
    Fails,
    /// The task is dropped without a result.
    Drops,
    /// The task ends only when it is asked to stop.
    Hangs,
    /// For devices: the task hangs like [`Breaks::Hangs`] on all ranks, so no device enforces the deadline.
    AllHang,
    /// The task does not end even when it is asked to stop.
    NeverStops,
}

/// A fault of the scenario. Times (`at`, `wait`) are in nanoseconds.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// A process dies at time `at`.
    Kill { process: usize, at: u64 },
    /// A wire is cut.
    Cut { wire: usize, at: u64 },
    /// A host vanishes: nothing arrives from it, and no process is notified.
    Vanish { process: usize, at: u64 },
    /// Everything that one end sends is delayed.
    Stall { wire: usize, end: usize, at: u64, wait: u64 },
    /// A bit of a frame flips.
    Flip { wire: usize, flip: Flip },
    /// A rank issues a different call than the others.
    Disagree { item: usize, rank: usize, on: Matter },
    /// A rank issues a call late.
    Late { item: usize, rank: usize, wait: u64 },
    /// A rank aborts the group before it issues a call.
    Abort { item: usize, rank: usize },
    /// A rank leaves the group before it issues a call.
    Leave { item: usize, rank: usize },
    /// The first external operation of a rank's call breaks, or the task of its device.
    Break { item: usize, rank: usize, breaks: Breaks },
}

/// A world and everything that is drawn for its history.
#[derive(Clone, Debug)]
pub(super) struct Scenario {
    pub(super) seed: u64,
    pub(super) processes: usize,
    /// Number of lanes of each process. Lane 0 of process `p` is node `p`. Lane `l` is node `p + l * processes` and
    /// behaves like a process without threads that lives and dies with `p`.
    pub(super) lanes: usize,
    /// Minimum bytes of a part of a call that is cut for several lanes.
    pub(super) least_part_bytes: u64,
    pub(super) threads: usize,
    pub(super) segment: u64,
    pub(super) wires: Vec<([usize; 2], WireSpec)>,
    pub(super) groups: Vec<GroupSpec>,
    pub(super) items: Vec<Item>,
    /// Program of each thread, by process and thread.
    pub(super) steps: Vec<Vec<Vec<Step>>>,
    pub(super) faults: Vec<Fault>,
    pub(super) linking: Linking,
    /// Number of polls of a waiting thread before it sleeps.
    pub(super) spins: u32,
    /// See [`accl_executor::peers::Net::set_polls_before_arming`].
    pub(super) polls_before_arming: u32,
    /// Time limit of each call.
    pub(super) timeout: Duration,
    /// Whether every rank leaves a group after its last call there. If false, some ranks do.
    pub(super) all_leave: bool,
    /// Parts that were left out, by number: items, then faults.
    pub(super) without: Vec<usize>,
    /// Whether each event is printed.
    pub(super) traces: bool,
}

impl Scenario {
    /// Draws the scenario of a seed.
    pub(super) fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x5eed);
        for _ in 0..8 {
            rng.next_u64();
        }
        let processes = match rng.below(10) {
            0..=3 => 2,
            4..=6 => 3 + rng.below(2) as usize,
            7..=8 => 5 + rng.below(2) as usize,
            _ => 7 + rng.below(3) as usize,
        };
        let threads = [1, 2, 2, 2, 3][rng.below(5) as usize];
        let segment = 64 << rng.below(6);
        // `style` 0 is rings only, 1 and 2 are streams only, and 3 is either by host.
        let style = rng.below(4);
        let hosts: Vec<u32> = match style {
            0 | 1 => vec![0; processes],
            2 => (0..processes as u32).collect(),
            _ => (0..processes).map(|_| rng.below(3) as u32).collect(),
        };
        let mut wires = Vec::new();
        for a in 0..processes {
            for b in a + 1..processes {
                let medium = match hosts[a] == hosts[b] && style != 1 {
                    true => Medium::Ring { frames: [1, 1, 2, 32][rng.below(4) as usize] },
                    false => Medium::Stream {
                        kept: [0, 300, 5000][rng.below(3) as usize],
                        window: [1, 500, 20_000][rng.below(3) as usize],
                    },
                };
                let least = [50, 1000, 20_000][rng.below(3) as usize];
                let most = least + [0, 500, 100_000][rng.below(3) as usize];
                let spec = WireSpec {
                    medium,
                    max_payload_bytes: segment as usize + accl_wire::frame::OVERHEAD_BYTES,
                    least,
                    most,
                    seed: rng.next_u64(),
                    flip: None,
                };
                wires.push(([a, b], spec));
            }
        }
        let mut groups: Vec<GroupSpec> =
            (0..1 + rng.below(3)).map(|index| draw_group(&mut rng, index, processes, threads, &hosts)).collect();
        let mut items: Vec<Item> = Vec::new();
        // Ranks that are not neighbours stay unlinked in short programs only.
        let (least, most) = match rng.below(3) {
            0 if processes > 5 => (0, 0),
            1 if processes > 5 => (1, 3),
            _ => (1, 20),
        };
        for _ in 0..least + rng.below(most + 1 - least) {
            let group = rng.below(groups.len() as u64) as usize;
            let tag = items.len() as u32;
            items.push(draw_item(&mut rng, group, &groups[group], segment, tag));
            // Programs repeat calls. A small call that is waited for and was issued before takes the fast path. Calls
            // that no thread waits for fill the links.
            if rng.below(3) == 0 {
                let mut again = items[items.len() - 1].clone();
                again.counts.iter_mut().for_each(|count| *count %= 20);
                let are_async = rng.below(2) == 0;
                again.is_async.iter_mut().for_each(|is_async| *is_async = are_async);
                let times = 1 + rng.below(6) as usize;
                items.extend((0..times).map(|_| again.clone()));
            }
            if rng.below(8) == 0 {
                draw_burst(&mut rng, &mut items, group, groups[group].members.len(), segment);
            }
        }
        for (index, group) in groups.iter_mut().enumerate() {
            draw_last_word(&mut rng, &mut items, index, group);
        }
        if items.is_empty() {
            items.push(draw_item(&mut rng, 0, &groups[0], segment, 0));
        }
        let (lanes, least_part_bytes) = draw_lanes(seed, processes);
        let mut scenario = Self {
            seed,
            processes,
            lanes,
            least_part_bytes,
            threads,
            segment,
            wires,
            groups,
            items,
            steps: Vec::new(),
            faults: Vec::new(),
            linking: [Linking::AtFirst, Linking::WithGroups, Linking::Late][rng.below(3) as usize],
            spins: [0, 1, 3, 3, 10][rng.below(5) as usize],
            polls_before_arming: [1, 2, 5, 256][rng.below(4) as usize],
            timeout: if rng.below(16) == 0 { LONG_TIMEOUT } else { TIMEOUT },
            all_leave: rng.below(2) == 0,
            without: Vec::new(),
            traces: false,
        };
        scenario.fit_devices();
        scenario.draw_compositions();
        scenario.add_lanes();
        // Half of the worlds have no faults.
        if rng.below(2) == 0 {
            for _ in 0..1 + rng.below(2) * rng.below(2) {
                let fault = scenario.draw_fault(&mut rng);
                scenario.faults.push(fault);
            }
            let breaks = scenario.draw_break();
            let death = breaks.as_ref().and_then(|breaks| scenario.draw_death(breaks));
            scenario.faults.extend(breaks.into_iter().chain(death));
            if scenario.faults.iter().any(|fault| matches!(fault, Fault::Vanish { .. })) && rng.below(4) > 0 {
                scenario.timeout = LONG_TIMEOUT;
            }
        }
        if let Some(cut) = scenario.draw_cut_of_first_lane() {
            scenario.faults = vec![cut];
        }
        scenario.steps = scenario.draw_steps();
        scenario
    }

    /// Returns a test scenario: one group of all processes over streams, messages between ranks in this order, and
    /// these faults. Each rank waits for each of its calls.
    pub(super) fn of_messages(processes: usize, messages: &[(usize, usize, IsFromAny)], faults: &[Fault]) -> Self {
        let pairs = (0..processes).flat_map(|a| (a + 1..processes).map(move |b| [a, b]));
        let spec = WireSpec {
            medium: Medium::Stream { kept: 5000, window: 20_000 },
            max_payload_bytes: 1024 + accl_wire::frame::OVERHEAD_BYTES,
            least: 1000,
            most: 1000,
            seed: 1,
            flip: None,
        };
        let group = GroupSpec {
            members: (0..processes).collect(),
            hosts: (0..processes as u32).collect(),
            rules: Vec::new(),
            eager_bytes: 4096,
            thread: 0,
        };
        let item = |(tag, &(from, to, is_from_any)): (u32, &(usize, usize, IsFromAny))| Item {
            group: 0,
            collective: Collective::Send,
            dtype: Dtype::I32,
            op: ReduceOp::Sum,
            root: 0,
            counts: vec![3],
            is_equal: true,
            codec: None,
            step: 1,
            ends: (from, to),
            tag,
            is_from_any: is_from_any == IsFromAny::Yes,
            is_async: vec![false; processes],
            is_early: false,
            composed: None,
        };
        let items: Vec<Item> = (0..).zip(messages).map(item).collect();
        let mine = |process: usize| {
            (0..).zip(&items).filter(move |(_, item)| item.ends.0 == process || item.ends.1 == process)
        };
        let steps_of = |process: usize| {
            let calls = mine(process).flat_map(|(index, _)| [Step::Call(index), Step::Wait(index)]);
            vec![std::iter::once(Step::Make(0)).chain(calls).collect()]
        };
        Self {
            seed: 1,
            processes,
            lanes: 1,
            least_part_bytes: 1,
            threads: 1,
            segment: 1024,
            wires: pairs.map(|pair| (pair, spec.clone())).collect(),
            groups: vec![group],
            steps: (0..processes).map(steps_of).collect(),
            items,
            faults: faults.to_vec(),
            linking: Linking::AtFirst,
            spins: 0,
            polls_before_arming: 2,
            timeout: TIMEOUT,
            all_leave: false,
            without: Vec::new(),
            traces: false,
        }
    }

    /// Returns a test scenario: one all_reduce of all processes over streams, with staged tensors on every rank, and
    /// these faults.
    pub(super) fn of_staged(processes: usize, faults: &[Fault]) -> Self {
        let mut scenario = Self::of_messages(processes, &[(0, 1, IsFromAny::No)], faults);
        // Searches for the first seed for which the tensors of all ranks are staged.
        scenario.items[0].collective = Collective::AllReduce;
        let is_fit = |scenario: &Self| (0..processes).all(|rank| scenario.is_staged(0, rank));
        while !is_fit(&scenario) {
            scenario.seed += 1;
        }
        scenario.steps = vec![vec![vec![Step::Make(0), Step::Call(0), Step::Wait(0)]]; processes];
        scenario
    }

    /// Like [`Scenario::of_staged`], but the devices of all ranks do the call.
    pub(super) fn of_offloaded(processes: usize, faults: &[Fault]) -> Self {
        let mut scenario = Self::of_staged(processes, faults);
        while !scenario.is_offloaded(0) {
            scenario.seed += 1;
        }
        scenario
    }

    /// Gives `lanes` lanes to each process of a test scenario.
    pub(super) fn with_lanes(mut self, lanes: usize) -> Self {
        self.lanes = lanes;
        self.add_lanes();
        self
    }

    /// Adds wires for each lane other than the first.
    fn add_lanes(&mut self) {
        let first = self.wires.clone();
        for lane in 1..self.lanes {
            for (ends, spec) in &first {
                let spec = WireSpec { seed: hash_words([spec.seed, lane as u64]), ..spec.clone() };
                self.wires.push((ends.map(|process| self.node(process, lane)), spec));
            }
        }
    }

    /// Returns the node number of a process's lane.
    pub(super) fn node(&self, process: usize, lane: usize) -> usize {
        lane * self.processes + process
    }

    /// Returns the node numbers of all lanes of a process.
    pub(super) fn nodes(&self, process: usize) -> impl Iterator<Item = usize> + use<> {
        let processes = self.processes;
        (0..self.lanes).map(move |lane| lane * processes + process)
    }

    /// Number of parts that [`Scenario::without`] can leave out: items, then faults.
    pub(super) fn parts(&self) -> usize {
        self.items.len() + self.faults.len()
    }

    /// Returns this scenario without the given items and faults.
    pub(super) fn without(&self, parts: &[usize]) -> Self {
        let mut smaller = self.clone();
        smaller.without = parts.to_vec();
        smaller.steps = smaller.draw_steps();
        smaller
    }

    /// Returns this scenario without its faults.
    pub(super) fn without_faults(&self) -> Self {
        let first = self.items.len();
        let faults = first..first + self.faults.len();
        self.without(&self.without.iter().copied().chain(faults).collect::<Vec<_>>())
    }

    pub(super) fn has_item(&self, item: usize) -> bool {
        !self.without.contains(&item)
    }

    /// Returns the faults that are not left out.
    pub(super) fn faults(&self) -> impl Iterator<Item = &Fault> {
        let first = self.items.len();
        self.faults
            .iter()
            .enumerate()
            .filter(move |(index, _)| !self.without.contains(&(first + index)))
            .map(|(_, f)| f)
    }

    /// Whether receivers check the data of a call: its tensors are encoded, and no two ranks share memory.
    pub(super) fn is_sealed(&self, item: usize) -> bool {
        let item = &self.items[item];
        let members = &self.groups[item.group].members;
        let is_between = |ends: &[usize; 2]| ends.iter().all(|end| members.contains(end));
        let is_stream = |spec: &WireSpec| matches!(spec.medium, Medium::Stream { .. });
        item.codec.is_some() && self.wires.iter().all(|(ends, spec)| !is_between(ends) || is_stream(spec))
    }

    /// Minimum bytes of a copy of staged tensors.
    pub(super) fn least_copy(&self) -> Bytes {
        Bytes(64 << (self.seed / 6 % 8))
    }

    /// Whether only external operations reach a rank's tensors in a call. True for about half of the suitable calls in
    /// every third world, and in half of the worlds with devices.
    pub(super) fn is_staged(&self, item: usize, rank: usize) -> bool {
        let can_be = self.items[item].step == 1;
        let has_staging = self.seed.is_multiple_of(3) || self.seed % 6 == 1;
        let is_drawn = hash_words([self.seed, item as u64, rank as u64]).is_multiple_of(2);
        can_be && has_staging && is_drawn || self.is_by_reference(item)
    }

    /// Whether the ranks of a call publish chunks and send references. True for some suitable calls in worlds with staging.
    pub(super) fn is_by_reference(&self, item: usize) -> bool {
        let Item { step, codec, collective, composed, counts, .. } = &self.items[item];
        let has_bytes = !self.items[item].is_message() || counts[0] > 0;
        let can_be = has_bytes && *collective != Collective::Barrier && codec.is_none() && composed.is_none();
        let is_drawn = self.seed.is_multiple_of(3) && hash_words([self.seed, item as u64, 0x4ef]).is_multiple_of(3);
        can_be && *step == 1 && !self.is_offloaded(item) && is_drawn
    }

    /// Whether the devices of its group do a call. True for most suitable calls of two groups in three, in every third
    /// world.
    pub(super) fn is_offloaded(&self, item: usize) -> bool {
        let Item { group, collective, codec, .. } = &self.items[item];
        let can_be = !self.items[item].is_message() && *collective != Collective::Barrier && codec.is_none();
        let has_devices = self.has_devices() && !hash_words([self.seed, *group as u64, 0xdec1ce]).is_multiple_of(3);
        can_be && has_devices && !hash_words([self.seed, item as u64, 0xdec1ce]).is_multiple_of(4)
    }

    fn has_devices(&self) -> bool {
        self.seed % 3 == 1
    }

    /// In worlds with devices, makes the blocks of offloaded calls equal in size, as devices require.
    fn fit_devices(&mut self) {
        if !self.has_devices() {
            return;
        }
        for index in (0..self.items.len()).filter(|&index| self.is_offloaded(index)).collect::<Vec<_>>() {
            let item = &mut self.items[index];
            match item.collective {
                Collective::AllToAll => (item.is_equal, item.counts) = (true, vec![item.counts[0]]),
                Collective::AllGather | Collective::ReduceScatter => {
                    let first = item.counts[0];
                    item.counts.iter_mut().for_each(|count| *count = first);
                }
                _ => {}
            }
        }
    }

    /// In worlds with devices or several lanes, gives some calls reserved sequence numbers. Uses a generator of its
    /// own, so other draws stay the same.
    fn draw_compositions(&mut self) {
        if !self.has_devices() && self.lanes == 1 {
            return;
        }
        let mut rng = Rng::new(self.seed ^ 0xc0);
        rng.next_u64();
        for group in 0..self.groups.len() {
            // First item of the open composition, which names it, and the number of calls that it still gets.
            let mut open = (0, 0);
            for (index, item) in self.items.iter_mut().enumerate().filter(|(_, item)| item.group == group) {
                if item.is_message() {
                    continue;
                }
                // A barrier waits for all calls before it, so no composition spans it.
                if item.collective == Collective::Barrier {
                    open.1 = 0;
                    continue;
                }
                if open.1 == 0 && rng.below(4) == 0 {
                    open = (index, 1 + rng.below(3));
                }
                if open.1 > 0 {
                    open.1 -= 1;
                    item.composed = Some(open.0);
                }
            }
        }
    }

    /// Whether some calls of a group have reserved sequence numbers.
    pub(super) fn has_compositions(&self, group: usize) -> bool {
        self.items.iter().any(|item| item.group == group && item.composed.is_some())
    }

    /// Returns the items of a composition.
    pub(super) fn composed(&self, composition: usize) -> impl Iterator<Item = usize> {
        let is_part = move |&item: &usize| self.has_item(item) && self.items[item].composed == Some(composition);
        (0..self.items.len()).filter(is_part)
    }

    /// Returns the thread of a process that issues a call: the thread of its group, or any thread for a call of a
    /// composition.
    fn thread_of(&self, item: usize, process: usize) -> usize {
        let Item { group, composed, .. } = self.items[item];
        let thread = self.groups[group].thread;
        composed.map_or(thread, |composed| {
            let word = hash_words([self.seed, composed as u64, process as u64, 0x7ead]);
            (thread + word as usize % self.threads) % self.threads
        })
    }

    /// Draws a [`Fault::Break`] for some worlds with faults. Uses a generator of its own, so other draws stay the same.
    fn draw_break(&self) -> Option<Fault> {
        let mut rng = Rng::new(self.seed ^ 0xe47e);
        rng.next_u64();
        let item = rng.below(self.items.len() as u64) as usize;
        let rank = rng.below(self.groups[self.items[item].group].members.len() as u64) as usize;
        let ways: &[Breaks] = match self.is_offloaded(item) {
            true => &[Breaks::Fails, Breaks::Drops, Breaks::Hangs, Breaks::AllHang],
            false => &[Breaks::Fails, Breaks::Hangs],
        };
        let breaks = ways[rng.below(ways.len() as u64) as usize];
        let is_external = self.is_offloaded(item) || self.is_staged(item, rank);
        (is_external && rng.below(2) == 0).then_some(Fault::Break { item, rank, breaks })
    }

    /// Draws the death of a process while all devices of its group hang, in half of the worlds with
    /// [`Breaks::AllHang`].
    fn draw_death(&self, breaks: &Fault) -> Option<Fault> {
        let Fault::Break { item, breaks: Breaks::AllHang, .. } = breaks else { return None };
        let mut rng = Rng::new(self.seed ^ 0xdead);
        rng.next_u64();
        let members = &self.groups[self.items[*item].group].members;
        let process = members[rng.below(members.len() as u64) as usize];
        let at = 1 << (20 + rng.below(10));
        (rng.below(2) == 0).then_some(Fault::Kill { process, at: at + rng.below(at) })
    }

    /// Draws a cut of a wire between two first lanes, as the only fault. With several lanes, three in four worlds of
    /// two processes have it, and one in four larger worlds with faults.
    ///
    /// Notifications that the first lane would send to the other process must then arrive over other lanes. Uses a
    /// generator of its own, so other draws stay the same.
    fn draw_cut_of_first_lane(&self) -> Option<Fault> {
        let mut rng = Rng::new(self.seed ^ 0xc09);
        rng.next_u64();
        let first_wires = (self.wires.len() / self.lanes) as u64;
        // Times at which calls are in flight.
        let at = 1 << (15 + rng.below(4));
        let cut = Fault::Cut { at: at + rng.below(at), wire: rng.below(first_wires) as usize };
        let is_cut = match (self.processes, rng.below(4)) {
            (2, draw) => draw > 0,
            (_, draw) => draw == 0 && !self.faults.is_empty(),
        };
        (self.lanes > 1 && is_cut).then_some(cut)
    }

    fn draw_fault(&self, rng: &mut Rng) -> Fault {
        // Most calls complete within a few milliseconds.
        let at = 1 << rng.below(24);
        let at = at + rng.below(at);
        let process = rng.below(self.processes as u64) as usize;
        let wire = rng.below(self.wires.len() as u64) as usize;
        let end = rng.below(2) as usize;
        let item = rng.below(self.items.len() as u64) as usize;
        let rank = match self.items[item].is_message() {
            true => [self.items[item].ends.0, self.items[item].ends.1][end],
            false => rng.below(self.groups[self.items[item].group].members.len() as u64) as usize,
        };
        // A failure that one lane alone has found must reach the other lanes.
        if self.lanes > 1 && rng.below(3) == 0 {
            return Fault::Cut { wire, at };
        }
        // In larger worlds not all ranks are neighbours. A rank's failure must be passed on there, or asked for.
        if self.processes > 5 && rng.below(2) == 0 {
            return match self.items.last() {
                _ if rng.below(2) == 0 => Fault::Abort { item, rank },
                Some(last)
                    if strangers(last.ends.0, self.groups[last.group].members.len())
                        .any(|rank| rank == last.ends.1) =>
                {
                    Fault::Leave { item: self.items.len() - 1, rank: last.ends.0 }
                }
                _ => Fault::Leave { item, rank },
            };
        }
        match rng.below(17) {
            0..=2 => Fault::Kill { process, at },
            3..=4 => Fault::Cut { wire, at },
            5 | 14..=16 => Fault::Vanish { process, at },
            6 => Fault::Stall { wire, end, at, wait: 1 << rng.below(27) },
            7..=9 => Fault::Flip { wire, flip: Flip { end, frame: rng.below(40), bit: rng.next_u64() } },
            10 | 11 => {
                let matters = [Matter::Count, Matter::Operator, Matter::Root, Matter::Collective];
                Fault::Disagree { item, rank, on: matters[rng.below(4) as usize] }
            }
            12 => Fault::Late { item, rank, wait: rng.below(MOST_LATE) },
            13 if rng.below(2) == 0 => Fault::Abort { item, rank },
            _ => Fault::Leave { item, rank },
        }
    }

    /// Draws the program of each thread. Calls have one global order, and every thread issues its groups' calls in that
    /// order, so no wait can deadlock. Each thread of each process uses a generator of its own: leaving parts out does
    /// not change the other draws.
    fn draw_steps(&self) -> Vec<Vec<Vec<Step>>> {
        let of = |process: usize, thread: usize| {
            let mut rng = Rng::new(self.seed ^ ((process * 7 + thread) as u64 + 1) << 20);
            self.steps_of(process, thread, &mut rng)
        };
        (0..self.processes).map(|process| (0..self.threads).map(|thread| of(process, thread)).collect()).collect()
    }

    /// Returns the receives that a rank issues before anything else in a group.
    fn early_receives(&self, group: usize, rank: usize) -> Vec<usize> {
        let is_mine = |item: &Item| item.group == group && item.is_early && item.ends.1 == rank;
        (0..self.items.len()).filter(|&index| self.has_item(index) && is_mine(&self.items[index])).collect()
    }

    fn steps_of(&self, process: usize, thread: usize, rng: &mut Rng) -> Vec<Step> {
        let mut steps = vec![Step::Compute(rng.below(50_000))];
        let mut made = vec![false; self.groups.len()];
        let mut waits: Vec<usize> = Vec::new();
        // Steps of calls with reserved sequence numbers that are issued later.
        let mut owed: Vec<Step> = Vec::new();
        let pace = [0, 1000, 100_000][rng.below(3) as usize];
        for (index, item) in self.items.iter().enumerate() {
            let group = &self.groups[item.group];
            let draws = [rng.below(3), rng.below(2), rng.below(4), rng.next_u64(), rng.next_u64()];
            let Some(rank) = group.rank_of(process).filter(|_| self.has_item(index)) else { continue };
            let maker = self.thread_of(index, process);
            if group.thread != thread {
                if maker == thread {
                    steps.append(&mut owed);
                    steps.extend(self.steps_of_composed(index, rank));
                    waits.extend(item.is_async[rank].then_some(index));
                }
                continue;
            }
            if !std::mem::replace(&mut made[item.group], true) {
                steps.push(Step::Make(item.group));
                let early = self.early_receives(item.group, rank);
                if !early.is_empty() {
                    steps.extend(early.iter().map(|&early| Step::Call(early)));
                    steps.push(Step::Compute(draws[3] % 50_000));
                }
            }
            if item.is_early && item.ends.1 == rank {
                // The sender may first wait for calls that this rank issues meanwhile, so the wait for the receive
                // comes here.
                waits.push(index);
                continue;
            }
            if item.is_message() && item.ends.0 != rank && item.ends.1 != rank {
                continue;
            }
            if draws[0] == 0 && pace > 0 {
                steps.push(Step::Compute(draws[3] % pace));
            }
            if let Some(composition) = item.composed {
                steps.extend((self.composed(composition).next() == Some(index)).then_some(Step::Reserve(composition)));
            }
            match item.composed {
                Some(_) if maker == thread => owed.extend(self.steps_of_composed(index, rank)),
                Some(_) => {}
                None => {
                    // Other ranks may need the owed calls before this call can complete, unless it is asynchronous.
                    let may_wait = item.is_async[rank] && !draws[4].is_multiple_of(4);
                    steps.extend(owed.drain(..if may_wait { 0 } else { owed.len() }));
                    steps.push(Step::Call(index));
                    steps.extend((!item.is_async[rank]).then_some(Step::Wait(index)));
                }
            }
            // Includes calls that another thread issues.
            if item.is_async[rank] {
                waits.push(index);
            }
            if draws[2] == 0 && !waits.is_empty() {
                steps.append(&mut owed);
                steps.push(Step::Wait(waits.swap_remove(draws[4] as usize % waits.len())));
            }
            let is_last = self.items[index + 1..].iter().all(|later| later.group != item.group);
            if is_last && (draws[2] < 2 || self.all_leave) {
                let (mine, others): (Vec<usize>, Vec<usize>) =
                    waits.into_iter().partition(|&waited| self.items[waited].group == item.group);
                steps.append(&mut owed);
                // Calls that another thread issues and waits for.
                let others_make = |at: &usize| {
                    let other = &self.items[*at];
                    other.group == item.group && other.composed.is_some() && self.has_item(*at) && !mine.contains(at)
                };
                steps.extend((0..self.items.len()).filter(others_make).map(Step::Wait));
                steps.extend(mine.into_iter().map(Step::Wait));
                steps.push(Step::Leave(item.group));
                waits = others;
            }
        }
        steps.append(&mut owed);
        // A group is created even if the rank issues no call in it.
        for (index, group) in self.groups.iter().enumerate() {
            if !made[index] && group.thread == thread && group.rank_of(process).is_some() {
                steps.push(Step::Make(index));
            }
        }
        // Some calls are never waited for.
        while waits.len() > if self.all_leave { 0 } else { rng.below(3) as usize } {
            let at = rng.below(waits.len() as u64) as usize;
            steps.push(Step::Wait(waits.swap_remove(at)));
        }
        // A thread that leaves a group must know that other threads have issued their calls in it.
        let is_mine = |at: &usize| {
            let item = &self.items[*at];
            let is_there = item.composed.is_some() && self.has_item(*at);
            is_there && self.groups[item.group].thread == thread && self.groups[item.group].rank_of(process).is_some()
        };
        steps.extend((0..self.items.len()).filter(is_mine).map(Step::Wait));
        if self.all_leave || (waits.is_empty() && self.faults.is_empty() && rng.below(3) == 0) {
            let mine =
                |group: &usize| self.groups[*group].thread == thread && self.groups[*group].rank_of(process).is_some();
            steps.extend((0..self.groups.len()).filter(mine).map(Step::Leave));
        }
        steps
    }
}

impl Scenario {
    /// Returns the steps with which a rank issues a call of a composition.
    fn steps_of_composed(&self, index: usize, rank: usize) -> impl Iterator<Item = Step> {
        let item = &self.items[index];
        let composition = item.composed.unwrap_or(index);
        let is_last = self.composed(composition).last() == Some(index);
        let wait = (!item.is_async[rank]).then_some(Step::Wait(index));
        let conclude = is_last.then_some(Step::Conclude(composition));
        [Some(Step::Call(index)), conclude, wait].into_iter().flatten()
    }
}

/// Returns a message of `count` bytes for which the sender does not wait.
fn message(group: usize, world: usize, ends: (usize, usize), count: u64, number: usize) -> Item {
    Item {
        group,
        collective: Collective::Send,
        dtype: Dtype::U8,
        op: ReduceOp::Sum,
        root: 0,
        counts: vec![count as usize],
        is_equal: true,
        codec: None,
        step: 1,
        ends,
        tag: 100 + number as u32,
        is_from_any: false,
        is_async: (0..world).map(|rank| rank == ends.0).collect(),
        is_early: false,
        composed: None,
    }
}

/// Draws a burst: messages from one rank to another for which the sender does not wait. The sender asks for an answer
/// before it sends them, so its driver sleeps while the links are full.
fn draw_burst(rng: &mut Rng, items: &mut Vec<Item>, group: usize, world: usize, segment: u64) {
    let from = rng.below(world as u64) as usize;
    let to = (from + 1 + rng.below(world as u64 - 1) as usize) % world;
    for _ in 0..2 + rng.below(5) {
        items.push(message(group, world, (from, to), rng.below(segment), items.len()));
    }
    let answer = message(group, world, (to, from), rng.below(8), items.len());
    items.push(Item { is_early: true, is_async: (0..world).map(|rank| rank == from).collect(), ..answer });
}

/// Draws the last transfer of a group, between two ranks that are not neighbours, if there are any. It is a message,
/// received from that rank or from any rank, or a gather. No other rank notices if the sender leaves instead of
/// sending.
fn draw_last_word(rng: &mut Rng, items: &mut Vec<Item>, index: usize, group: &mut GroupSpec) {
    let world = group.members.len();
    let from = rng.below(world as u64) as usize;
    let strangers: Vec<usize> = strangers(from, world).collect();
    if strangers.is_empty() || rng.below(4) == 0 {
        return;
    }
    let to = strangers[rng.below(strangers.len() as u64) as usize];
    let word = message(index, world, (from, to), rng.below(20), items.len());
    items.push(match rng.below(3) {
        0 => word,
        1 => Item { is_from_any: true, ..word },
        _ => {
            group.rules.retain(|rule| rule.collective != Collective::Gather);
            let algorithm = "flat".to_owned();
            let rule = AlgorithmRule { collective: Collective::Gather, algorithm, min_bytes: 0, max_bytes: u64::MAX };
            group.rules.push(rule);
            Item { collective: Collective::Gather, root: to, ..word }
        }
    });
}

/// Draws the number of lanes of each process, and the minimum bytes of a part. Half of the small worlds without devices
/// have several lanes.
fn draw_lanes(seed: u64, processes: usize) -> (usize, u64) {
    let mut rng = Rng::new(seed ^ 0x1a9e);
    rng.next_u64();
    let (lanes, least) = (2 + rng.below(3) as usize, [1, 100, 1000][rng.below(3) as usize]);
    let are_several = seed % 3 != 1 && processes <= 6 && rng.below(2) == 0;
    (if are_several { lanes } else { 1 }, least)
}

fn draw_group(rng: &mut Rng, index: u64, processes: usize, threads: usize, hosts: &[u32]) -> GroupSpec {
    let mut members: Vec<usize> = (0..processes).collect();
    if index > 0 {
        for at in (1..members.len()).rev() {
            members.swap(at, rng.below(at as u64 + 1) as usize);
        }
        members.truncate((1 + rng.below(processes as u64) as usize).max(2));
    }
    let mut seen: Vec<u32> = Vec::new();
    let numbered = members.iter().map(|&member| {
        let host = hosts[member];
        seen.iter().position(|&known| known == host).unwrap_or_else(|| {
            seen.push(host);
            seen.len() - 1
        }) as u32
    });
    let hosts: Vec<u32> = numbered.collect();
    let topology = Topology::new(hosts.clone());
    let world = members.len() as u32;
    let mut rules = Vec::new();
    for &collective in Collective::ALL.iter().filter(|collective| !collective.is_point_to_point()) {
        let fits = |row: &&accl_schedule::Algorithm| {
            row.collective == collective && (row.applies)(world, &topology) && !row.needs_equal_blocks
        };
        let rows: Vec<&str> = ALGORITHMS.iter().filter(fits).map(|row| row.name).collect();
        if rng.below(4) > 0
            && let Some(name) = rows.get(rng.below(rows.len().max(1) as u64) as usize)
        {
            let algorithm = (*name).to_owned();
            rules.push(AlgorithmRule { collective, algorithm, min_bytes: 0, max_bytes: u64::MAX });
        }
    }
    let eager_bytes = [0, 200, 4096, 65_536][rng.below(4) as usize];
    GroupSpec { members, hosts, rules, eager_bytes, thread: rng.below(threads as u64) as usize }
}

/// Returns the ranks that are not neighbours of rank `of`.
fn strangers(of: usize, world: usize) -> impl Iterator<Item = usize> {
    let near: Vec<Rank> = neighbours(Rank(of as u32), world as u32).collect();
    (0..world).filter(move |&rank| rank != of && !near.contains(&Rank(rank as u32)))
}

fn draw_item(rng: &mut Rng, index: usize, group: &GroupSpec, segment: u64, tag: u32) -> Item {
    let world = group.members.len();
    let collective = match rng.below(12) {
        0..=3 => Collective::AllReduce,
        4..=5 => REDUCED[1 + rng.below(2) as usize],
        6..=8 => MOVED[rng.below(MOVED.len() as u64) as usize],
        9 => Collective::Barrier,
        _ => Collective::Send,
    };
    let is_encoded = collective == Collective::AllReduce && rng.below(3) == 0;
    let dtype = if is_encoded { Dtype::F32 } else { DTYPES[rng.below(DTYPES.len() as u64) as usize] };
    let is_integer = matches!(dtype, Dtype::I64 | Dtype::U8 | Dtype::I32 | Dtype::I16);
    let op = match rng.below(6) {
        _ if is_encoded => ReduceOp::Sum,
        0 => ReduceOp::Max,
        1 => ReduceOp::Min,
        2 if is_integer => ReduceOp::Bxor,
        3 if is_integer => ReduceOp::Band,
        _ => ReduceOp::Sum,
    };
    let most = (3 * segment as usize) / dtype.size_bytes();
    let count = |rng: &mut Rng| match rng.below(6) {
        0 => 0,
        1 => 1,
        2 => rng.below(9) as usize,
        3 | 4 => rng.below(most as u64 + 1) as usize,
        _ => rng.below(4 * most as u64 + 1) as usize,
    };
    let is_equal = collective != Collective::AllToAll || rng.below(2) == 0;
    let counts: Vec<usize> = match collective {
        Collective::ReduceScatter | Collective::AllGather => (0..world).map(|_| count(rng)).collect(),
        Collective::AllToAll if !is_equal => (0..world * world).map(|_| count(rng).min(most)).collect(),
        Collective::AllReduce | Collective::Broadcast if !is_encoded && rng.below(4) == 0 => {
            (0..2).map(|_| count(rng)).collect()
        }
        // Each tensor has a tile of its own, and many tiles go into one frame.
        Collective::AllReduce if is_encoded && rng.below(2) == 0 => {
            (0..2 + rng.below(7)).map(|_| count(rng) / 6).collect()
        }
        _ => vec![count(rng)],
    };
    let topology = Topology::new(group.hosts.clone());
    let encodes = |rule: &AlgorithmRule| {
        let row = ALGORITHMS.iter().find(|row| row.collective == collective && row.name == rule.algorithm);
        row.is_some_and(|row| row.encodes != Encodes::No && (row.applies)(world as u32, &topology))
    };
    let has_row = group.rules.iter().filter(|rule| rule.collective == collective).all(encodes);
    let codec = (is_encoded && has_row).then(|| CODECS[rng.below(4) as usize]);
    let from = rng.below(world as u64) as usize;
    let is_from_any = rng.below(4) == 0;
    let mut to = (from + 1 + rng.below(world as u64 - 1) as usize) % world;
    // Few pairs of ranks are not neighbours. Only those pairs have no link until a call needs one.
    let strangers: Vec<usize> = strangers(from, world).collect();
    if rng.below(2) == 0 && !strangers.is_empty() {
        to = strangers[rng.below(strangers.len() as u64) as usize];
    }
    Item {
        group: index,
        collective,
        dtype,
        op,
        root: rng.below(world as u64) as usize,
        counts,
        is_equal,
        codec,
        step: if rng.below(8) == 0 && codec.is_none() { 2 } else { 1 },
        ends: (from, to),
        // Several messages share a tag, except messages that are received from any rank.
        tag: if is_from_any || rng.below(2) == 0 { 100 + tag } else { 7 },
        is_from_any,
        is_async: (0..world).map(|_| rng.below(2) == 0).collect(),
        is_early: false,
        composed: None,
    }
}

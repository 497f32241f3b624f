//! Plans: this rank's program of an algorithm with every span resolved to byte ranges.
//!
//! This module owns what is equal for all calls of one shape. It knows no addresses and no links to peers. Read
//! [`Plan`] first.

use accl_schedule::{Algorithm, Buf, CallShape, Coding, Layout, OpKind, Program, Span};
use accl_types::{Bytes, Rank};
use smallvec::SmallVec;

use super::encoded::{Coded, Combination, Operand};
use super::key::PlanKey;
use super::op::{ExternalStep, PlanOp, PlanOpKind};
use super::region::Region;
use super::staging::StagedCopies;
use crate::call::PUBLISHED_ALIGN;

/// A plan may take the fast path if it has up to `FAST_PATH_OPS` operations, each of at most `FAST_PATH_BYTES` bytes.
const FAST_PATH_OPS: usize = 64;
const FAST_PATH_BYTES: u64 = 64 << 10;

/// Name of an offloaded collective in messages, and its number in signatures. No algorithm of the table has this
/// number.
const OFFLOADED: &str = "device";
pub(super) const OFFLOADED_ID: u8 = u8::MAX;

/// Operations by (peer, edge).
#[derive(Debug, Default)]
struct EdgeIndex {
    first: Vec<u32>,
    ops: Vec<u32>,
}

impl EdgeIndex {
    /// Creates the index. `edges` lists (peer, edge, operation); the edges of a peer are numbered from 0 without gaps.
    fn new(world: u32, mut edges: Vec<(u32, u32, u32)>) -> Self {
        edges.sort_unstable();
        let first = (0..=world).map(|peer| edges.partition_point(|&(p, _, _)| p < peer) as u32).collect();
        Self { first, ops: edges.into_iter().map(|(_, _, op)| op).collect() }
    }

    fn find(&self, peer: Rank, edge: u32) -> Option<u32> {
        let range = *self.first.get(peer.index())? as usize..*self.first.get(peer.index() + 1)? as usize;
        self.ops[range].get(edge as usize).copied()
    }
}

/// This rank's part in all calls of one shape.
pub struct Plan {
    /// Name of the algorithm.
    pub name: &'static str,
    /// Number of the algorithm in signatures.
    pub(crate) id: u8,
    pub(crate) ops: Vec<PlanOp>,
    pub(crate) scratch_bytes: u64,
    /// Bytes of memory for encoded chunks or references; 0 for plain calls.
    pub(crate) code_bytes: u64,
    /// Bytes that this rank publishes in a call by reference: see [`PublishingNeeds`](crate::call::PublishingNeeds).
    pub(crate) published_bytes: u64,
    /// Total of the longest operation, in bytes (or tiles of a combination).
    pub(crate) longest: u64,
    /// Total bytes of all operations.
    pub(crate) work: u64,
    /// An order in which the operations can run one after the other. Operations that need no peer come as early as
    /// possible.
    pub(crate) fast_path: Option<Box<[u32]>>,
    /// Whether this rank receives anything in the call.
    pub(crate) has_receives: bool,
    /// The ranks that this rank sends to or receives from.
    pub(crate) peers: SmallVec<[Rank; 4]>,
    /// In a plan for tensors that only external operations can access: the copies.
    pub(crate) staging: Option<StagedCopies>,
    /// Operations that copy these tensors in and out, where there is something to copy.
    pub(crate) copy_in: Option<u32>,
    pub(crate) copy_out: Option<u32>,
    /// Whether the whole collective is an external operation.
    pub(crate) is_offloaded: bool,
    /// Whether a worker computes the combinations where the tensors lie. No tile then lies in a frame, and nothing is staged.
    pub(crate) combines_elsewhere: bool,
    /// Whether other lanes do parts of the call, for which an external operation waits.
    pub(crate) is_joined: bool,
    receives: EdgeIndex,
    sends: EdgeIndex,
}

impl Plan {
    /// Returns this plan for tensors that only external operations can access. Two more operations copy them in and
    /// out, and the others stream behind them. If a worker computes the combinations there, nothing is copied.
    pub(super) fn staged(mut self, key: &PlanKey, rank: Rank, least_copy: Bytes) -> Self {
        if key.staged.are_coded() || key.is_by_reference {
            self.ops.iter_mut().for_each(|op| op.partner = None);
            self.combines_elsewhere = true;
            return self;
        }
        let staging = StagedCopies::new(&self.ops, key, rank, least_copy);
        self.copy_in = (!staging.copy_in.is_empty()).then(|| self.add_external(ExternalStep::CopyIn));
        self.copy_out = (!staging.copy_out.is_empty()).then(|| self.add_external(ExternalStep::CopyOut));
        self.staging = Some(staging);
        self.fast_path = None;
        self
    }

    /// Adds an external operation without dependencies. Returns its index.
    fn add_external(&mut self, step: ExternalStep) -> u32 {
        self.ops.push(PlanOp {
            kind: PlanOpKind::External(step),
            total: 0,
            coded: None,
            partner: None,
            edge: 0,
            deps: SmallVec::new(),
            dependents: SmallVec::new(),
        });
        self.ops.len() as u32 - 1
    }

    /// Turns the plan of a barrier into the plan of an offloaded collective. One external operation follows the
    /// barrier: by then, all ranks are known to have issued the same call.
    pub(super) fn offloaded(mut self) -> Self {
        let last = self.add_external(ExternalStep::Offload);
        let (before, offload) = self.ops.split_at_mut(last as usize);
        for (index, op) in (0..).zip(before).filter(|(_, op)| op.dependents.is_empty()) {
            op.dependents.push(last);
            offload[0].deps.push((index, false));
        }
        self.is_offloaded = true;
        (self.name, self.id) = (OFFLOADED, OFFLOADED_ID);
        self.fast_path = None;
        self
    }

    /// Returns this plan with an external operation parallel to all others. It ends when the parts of the call on other
    /// lanes complete.
    pub(super) fn joined(mut self) -> Self {
        self.add_external(ExternalStep::Join);
        self.fast_path = None;
        self.is_joined = true;
        self
    }

    /// Returns the operation that receives message `edge` from `peer`.
    pub(crate) fn receive(&self, peer: Rank, edge: u32) -> Option<u32> {
        self.receives.find(peer, edge)
    }

    /// Returns the operation that sends message `edge` to `peer`.
    pub(crate) fn send(&self, peer: Rank, edge: u32) -> Option<u32> {
        self.sends.find(peer, edge)
    }

    pub(super) fn new(algorithm: &'static Algorithm, program: &Program, shape: &CallShape, world: u32) -> Self {
        let layout = Layout::new(program, shape);
        let region = |span: &Span| Region::new(&layout, span);
        let coded = |span: &Span| shape.coding.and_then(|coding| coded(&layout, program, span, coding));
        let (mut receives, mut sends) = (Vec::new(), Vec::new());
        let mut ops: Vec<PlanOp> = Vec::with_capacity(program.ops.len());
        let (mut work, mut published_bytes) = (0, 0);
        for (index, op) in program.ops.iter().enumerate() {
            let mut coded_message = None;
            let (kind, total) = match &op.kind {
                OpKind::Send { src, to } => {
                    sends.push((to.0, op.edge, index as u32));
                    coded_message = coded(src);
                    let src = region(src);
                    let total = src.len;
                    (PlanOpKind::Send { src, to: *to }, total)
                }
                OpKind::Recv { dst, from } => {
                    receives.push((from.0, op.edge, index as u32));
                    coded_message = coded(dst);
                    let dst = region(dst);
                    let total = dst.len;
                    (PlanOpKind::Recv { dst, from: *from }, total)
                }
                OpKind::RecvReduce { dst, local, from, order, finish } => {
                    receives.push((from.0, op.edge, index as u32));
                    let (dst, local) = (region(dst), region(local));
                    let total = dst.len;
                    (PlanOpKind::RecvReduce { dst, local, from: *from, order: *order, finish: *finish }, total)
                }
                OpKind::Copy { dst, src } => {
                    let (dst, src) = (region(dst), region(src));
                    let total = if dst.is_same(&src) { 0 } else { dst.len };
                    (PlanOpKind::Copy { dst, src }, total)
                }
                OpKind::Reduce { dst, srcs, finish } => {
                    let (dst, srcs) = (region(dst), srcs.iter().map(region).collect());
                    let total = dst.len;
                    (PlanOpKind::Reduce { dst, srcs, finish: *finish }, total)
                }
                OpKind::Combine { dsts, srcs, finish, pass } => {
                    let mut combination = Combination::new(*finish, *pass);
                    for dst in dsts {
                        match coded(dst) {
                            Some(code) => combination.code = Some(code),
                            None => combination.out = Some(region(dst)),
                        }
                    }
                    let operand = |src| coded(src).map_or_else(|| Operand::Values(region(src)), Operand::Code);
                    combination.srcs = srcs.iter().map(operand).collect();
                    if let Some(coding) = shape.coding {
                        let like = like_of(program, dsts.iter().chain(srcs));
                        combination.set_tiles(layout.tiles(like, coding).collect());
                    }
                    let bytes = combination.elems() * shape.elem_bytes;
                    work += bytes;
                    if program.is_by_reference && combination.code.is_some() {
                        published_bytes += bytes.next_multiple_of(PUBLISHED_ALIGN);
                    }
                    let total = combination.tiles.len() as u64;
                    (PlanOpKind::Combine(Box::new(combination)), total)
                }
            };
            for dep in &op.deps {
                ops[dep.on as usize].dependents.push(index as u32);
            }
            let deps = op.deps.iter().map(|dep| (dep.on, dep.stream)).collect();
            if !matches!(kind, PlanOpKind::Combine(_)) {
                work += total;
            }
            let coded = coded_message.map(Box::new);
            ops.push(PlanOp { kind, total, coded, partner: None, edge: op.edge, deps, dependents: SmallVec::new() });
        }
        if shape.coding.is_some() && !program.is_by_reference {
            find_partners(program, &mut ops);
        }
        let mut peers: SmallVec<[Rank; 4]> = receives.iter().chain(&sends).map(|&(peer, ..)| Rank(peer)).collect();
        peers.sort_unstable();
        peers.dedup();
        let longest = ops.iter().map(|op| op.total).max().unwrap_or(0);
        let is_short = ops.len() <= FAST_PATH_OPS && longest <= FAST_PATH_BYTES && shape.coding.is_none();
        Self {
            staging: None,
            copy_in: None,
            copy_out: None,
            is_offloaded: false,
            combines_elsewhere: false,
            is_joined: false,
            name: algorithm.name,
            id: algorithm.id,
            longest,
            work,
            peers,
            fast_path: is_short.then(|| fast_path_order(&ops)),
            ops,
            scratch_bytes: layout.scratch_bytes(),
            code_bytes: layout.code_bytes(),
            published_bytes,
            has_receives: !receives.is_empty(),
            receives: EdgeIndex::new(world, receives),
            sends: EdgeIndex::new(world, sends),
        }
    }
}

/// Returns the tiles of a chunk of `Code`; `None` for a chunk of another buffer.
fn coded(layout: &Layout, program: &Program, span: &Span, coding: &dyn Coding) -> Option<Coded> {
    let (Buf::Code, chunk) = span.chunks().next()? else { return None };
    let code = &program.codes[chunk as usize];
    let ends = layout.tile_bytes(code, coding).scan(0, |end, bytes| {
        *end += bytes;
        Some(*end)
    });
    Some(Coded {
        role: code.role,
        region: Region::new(layout, span),
        tiles: layout.tiles(code.like, coding).collect(),
        ends: ends.collect(),
    })
}

/// Finds the encoded chunks with one writing and one reading operation, of which one is a combination and the other a
/// message.
fn find_partners(program: &Program, ops: &mut [PlanOp]) {
    let mut readers: Vec<SmallVec<[u32; 2]>> = vec![SmallVec::new(); program.codes.len()];
    let mut makers: Vec<Option<u32>> = vec![None; program.codes.len()];
    fn codes(span: &Span) -> impl Iterator<Item = usize> {
        span.chunks().filter(|(buf, _)| *buf == Buf::Code).map(|(_, chunk)| chunk as usize)
    }
    for (index, op) in (0..).zip(&program.ops) {
        match &op.kind {
            OpKind::Send { src, .. } => codes(src).for_each(|code| readers[code].push(index)),
            OpKind::Recv { dst, .. } => codes(dst).for_each(|code| makers[code] = Some(index)),
            OpKind::Combine { dsts, srcs, .. } => {
                srcs.iter().flat_map(codes).for_each(|code| readers[code].push(index));
                dsts.iter().flat_map(codes).for_each(|code| makers[code] = Some(index));
            }
            OpKind::RecvReduce { .. } | OpKind::Copy { .. } | OpKind::Reduce { .. } => {}
        }
    }
    for (maker, readers) in makers.into_iter().zip(readers) {
        let (Some(maker), [reader]) = (maker, &readers[..]) else { continue };
        match (&ops[maker as usize].kind, &ops[*reader as usize].kind) {
            // An empty message has no byte that could stream behind its tiles.
            (PlanOpKind::Combine(_), PlanOpKind::Send { .. })
                if ops[*reader as usize].deps[..] == [(maker, true)] && ops[*reader as usize].total > 0 =>
            {
                ops[maker as usize].partner = Some(*reader);
                ops[*reader as usize].partner = Some(maker);
            }
            (PlanOpKind::Recv { .. }, PlanOpKind::Combine(_)) => ops[maker as usize].partner = Some(*reader),
            _ => {}
        }
    }
}

/// Returns the chunk whose elements all these spans have.
fn like_of<'a>(program: &Program, spans: impl Iterator<Item = &'a Span>) -> (Buf, u32) {
    let mut chunks = spans.flat_map(Span::chunks);
    let Some((buf, chunk)) = chunks.next() else { unreachable!("a combination has a result") };
    match buf {
        Buf::Code => program.codes[chunk as usize].like,
        Buf::Scratch => program.scratch[chunk as usize],
        Buf::In | Buf::Out => (buf, chunk),
    }
}

/// Returns the operations in an order that respects their dependencies. A receive comes only if no other operation is
/// ready.
fn fast_path_order(ops: &[PlanOp]) -> Box<[u32]> {
    let is_receive = |op: &PlanOp| matches!(op.kind, PlanOpKind::Recv { .. } | PlanOpKind::RecvReduce { .. });
    let mut done = vec![false; ops.len()];
    let mut order = Vec::with_capacity(ops.len());
    while order.len() < ops.len() {
        let ready = |&index: &usize| !done[index] && ops[index].deps.iter().all(|&(on, _)| done[on as usize]);
        let mut all = (0..ops.len()).filter(ready);
        let first = all.clone().find(|&index| !is_receive(&ops[index])).or_else(|| all.next());
        // Dependencies point backwards only, so the first operation that is not done is ready.
        let Some(index) = first else { unreachable!("dependencies have no cycle") };
        done[index] = true;
        order.push(index as u32);
    }
    order.into()
}

#[cfg(test)]
pub(super) mod tests {
    use accl_kernels::codec;
    use accl_schedule::{ALGORITHMS, Part, Request, Role, Topology};
    use accl_types::{Collective, Dtype, Elems};

    use super::super::key::StagedPieces;
    use super::*;
    use crate::call::{Codecs, TensorCodecs, TypedCodecs};

    /// Returns the plans of all ranks for one algorithm. Block r has `counts[r % counts.len()]` elements.
    fn plans(algorithm: &'static Algorithm, topology: &Topology, counts: &[u64], part: Part) -> Vec<Plan> {
        plans_with(algorithm, topology, counts, part, None)
    }

    fn plans_with(
        algorithm: &'static Algorithm,
        topology: &Topology,
        counts: &[u64],
        part: Part,
        coding: Option<&TypedCodecs>,
    ) -> Vec<Plan> {
        let world = topology.world();
        (0..world)
            .map(|rank| plan_of(algorithm, topology, &key_of(algorithm, world, rank, counts, part, coding), rank))
            .collect()
    }

    /// Returns the plan of a rank for one algorithm.
    pub(in crate::plan) fn plan_of(
        algorithm: &'static Algorithm,
        topology: &Topology,
        key: &PlanKey,
        rank: u32,
    ) -> Plan {
        let world = topology.world();
        let request = Request { collective: algorithm.collective, world, rank: Rank(rank), root: key.root, topology };
        let plain = (algorithm.build)(&request).lower(&request);
        let coding = key.codecs.as_ref().map(|codecs| codecs as &dyn Coding);
        let program = if coding.is_some() { plain.encoded(algorithm, &request) } else { plain };
        let (in_blocks, out_blocks) = (&key.inputs, &key.outputs);
        let shape = CallShape { elem_bytes: key.elem_bytes, in_blocks, out_blocks, coding, part: key.part };
        Plan::new(algorithm, &program, &shape, world)
    }

    /// Returns the key of a rank's calls with the root 0. Block r has `counts[r % counts.len()]` elements of 4 bytes.
    pub(in crate::plan) fn key_of(
        algorithm: &Algorithm,
        world: u32,
        rank: u32,
        counts: &[u64],
        part: Part,
        coding: Option<&TypedCodecs>,
    ) -> PlanKey {
        let root = Rank(0);
        let block = |of: u32| vec![Elems(counts[of as usize % counts.len()])];
        let (own, each, none) = (vec![block(rank)], (0..world).map(block).collect::<Vec<_>>(), Vec::new());
        let all = vec![block(0)];
        let (inputs, outputs) = match algorithm.collective {
            Collective::AllReduce | Collective::Reduce => (all.clone(), all),
            Collective::Broadcast => (none, all),
            Collective::AllGather => (own, each),
            Collective::ReduceScatter => (each, own),
            Collective::Gather => (own, if Rank(rank) == root { each } else { none }),
            Collective::Scatter => (if Rank(rank) == root { each } else { none }, own),
            // A message between two ranks has the same size on both sides.
            Collective::AllToAll => {
                let towards = |from: u32, to: u32| block(from * 3 + to);
                let sent = (0..world).map(|to| towards(rank, to)).collect();
                (sent, (0..world).map(|from| towards(from, rank)).collect())
            }
            Collective::Barrier | Collective::Send | Collective::Recv => (none.clone(), none),
        };
        PlanKey {
            collective: algorithm.collective,
            root,
            elem_bytes: 4,
            equal_blocks: false,
            inputs,
            outputs,
            codecs: coding.cloned(),
            rounds: false,
            staged: StagedPieces::default(),
            is_by_reference: false,
            is_offloaded: false,
            part,
        }
    }

    pub(in crate::plan) const HOSTS: [&[u32]; 5] = [&[0], &[0, 0], &[0, 0, 1], &[0; 5], &[0, 0, 1, 1]];

    #[test]
    fn ranks_agree_on_the_size_of_each_message_of_each_part_of_a_call() {
        for topology in HOSTS.map(|hosts| Topology::new(hosts.to_vec())) {
            let fits = |row: &&Algorithm| (row.applies)(topology.world(), &topology);
            let sizes: [&[u64]; 3] = [&[1000], &[70, 0, 3, 131], &[5]];
            for (algorithm, counts) in ALGORITHMS.iter().filter(fits).flat_map(|row| sizes.map(|sizes| (row, sizes))) {
                if algorithm.needs_equal_blocks && counts.len() > 1 {
                    continue;
                }
                let whole: u64 = plans(algorithm, &topology, counts, Part::WHOLE).iter().map(|plan| plan.work).sum();
                let mut work = 0;
                for part in (0..3).map(|index| Part { index, of: 3 }) {
                    let plans = plans(algorithm, &topology, counts, part);
                    for (from, plan) in (0..).zip(&plans) {
                        work += plan.work;
                        for op in &plan.ops {
                            let name = algorithm.name;
                            let bytes = op.total;
                            match &op.kind {
                                PlanOpKind::Send { to, .. } => {
                                    let receiver = &plans[to.index()];
                                    let receive =
                                        receiver.receive(Rank(from), op.edge).expect("a receive for each send");
                                    assert_eq!(receiver.ops[receive as usize].total, bytes, "{name}: {from} to {to}");
                                }
                                PlanOpKind::RecvReduce { dst, local, .. } => assert_eq!(dst.len, local.len, "{name}"),
                                PlanOpKind::Copy { dst, src } => assert_eq!(dst.len, src.len, "{name}"),
                                PlanOpKind::Reduce { dst, srcs, .. } => {
                                    assert!(srcs.iter().all(|src| src.len == dst.len), "{name}");
                                }
                                PlanOpKind::Recv { .. } | PlanOpKind::Combine(_) | PlanOpKind::External(_) => {}
                            }
                        }
                    }
                }
                assert_eq!(work, whole, "{}: parts have together what the whole call has", algorithm.name);
            }
        }
    }

    #[test]
    fn what_one_rank_encodes_for_one_other_never_lies_in_memory_on_either_side() {
        let bf16 = codec::parse("bf16").expect("a codec");
        let tensor = TensorCodecs { intra_node: bf16.clone(), reduce: bf16.clone(), result: bf16, id: 0 };
        let coding = TypedCodecs { codecs: Codecs::new(vec![tensor]).expect("codecs"), dtype: Dtype::F32 };
        let plans_of = |name: &str, world: usize| {
            let row = ALGORITHMS.iter().find(|row| row.collective == Collective::AllReduce && row.name == name);
            let topology = Topology::new(vec![0; world]);
            plans_with(row.expect("a row"), &topology, &[100_000], Part::WHOLE, Some(&coding))
        };
        let partners = |plans: &[Plan]| {
            let messages = plans.iter().flat_map(|plan| &plan.ops).filter(|op| op.coded.is_some());
            messages.map(|op| (matches!(op.kind, PlanOpKind::Send { .. }), op.partner.is_some())).collect::<Vec<_>>()
        };
        let of_two = partners(&plans_of("direct_two_phase", 2));
        assert_eq!(of_two, [(true, true), (false, true), (true, true), (false, true)].repeat(2));
        for plan in &plans_of("direct_two_phase", 4) {
            for op in plan.ops.iter().filter(|op| op.coded.is_some()) {
                // Contributions go to one rank. Finished sums go to all ranks, so they are encoded once, in memory that
                // all sends read.
                let is_sum = op.coded.as_ref().is_some_and(|coded| coded.role == Role::Result);
                let is_send = matches!(op.kind, PlanOpKind::Send { .. });
                assert_eq!(op.partner.is_some(), !(is_send && is_sum));
            }
        }
    }

    /// Returns the bytes of each frame of a message.
    fn frames_of(op: &PlanOp, segment: u64) -> Vec<u64> {
        let (mut at, mut frames) = (0, Vec::new());
        while at < op.total {
            frames.push(op.frame_bytes(at, segment).min(op.total - at));
            at += frames[frames.len() - 1];
        }
        frames
    }

    #[test]
    fn whole_tiles_take_few_more_frames_than_bytes_do_and_none_of_a_few_bytes() {
        let parse = |text: &str| codec::parse(text).expect("a codec");
        let row = ALGORITHMS.iter().find(|row| row.name == "two_level" && row.collective == Collective::AllReduce);
        let topology = Topology::new(vec![0, 0, 1, 1]);
        for (inner, codec) in
            [("raw", "raw"), ("raw", "bf16"), ("raw", "maxmin:8"), ("bf16", "maxmin:2"), ("raw", "maxmin:4")]
        {
            let tensor = TensorCodecs { intra_node: parse(inner), reduce: parse(codec), result: parse(codec), id: 0 };
            let codecs = Codecs::new(vec![tensor]).expect("codecs");
            let coding = TypedCodecs { codecs, dtype: Dtype::F32 };
            let plans = plans_with(row.expect("a row"), &topology, &[4_000_000], Part::WHOLE, Some(&coding));
            for segment in [4 << 10, 16 << 10, 64 << 10, 1 << 20] {
                for op in plans.iter().flat_map(|plan| &plan.ops).filter(|op| op.coded.is_some()) {
                    let frames = frames_of(op, segment);
                    let fewest = op.total.div_ceil(segment);
                    assert!(frames.len() as u64 <= 2 * fewest, "{codec}: {} of {segment}, {fewest}", frames.len());
                    let short = frames.iter().rev().skip(1).filter(|&&bytes| bytes < segment / 4).count();
                    assert_eq!(short, 0, "{inner} and {codec} in segments of {segment}: {frames:?}");
                }
            }
        }
    }
}

//! Plans: what is the same for all calls of one shape, computed once and cached.
//!
//! A plan is this rank's program of the chosen algorithm with every span resolved to byte ranges. Owns the cache and the
//! choice of algorithm; knows no addresses and no peers' links. Read [`Plan`] first.

use std::collections::HashMap;
use std::sync::Arc;

use accl_schedule::{
    Algorithm, Buf, CallShape, Chooser, Coding, Extent, Extents, Finish, Layout, OpKind, Order, Program, Request, Role,
    Span,
};
use accl_types::{Collective, Elems, Rank, Result};
use smallvec::SmallVec;

use crate::coder::{Coded, Combination, Operand};
use crate::encoding::TypedCodecs;

/// Plans kept per group; beyond, the cache starts anew (a program that never repeats a shape gains nothing from it).
const MAX_PLANS: usize = 256;

/// Calls up to this many operations, each of at most so many bytes, may run straight through on the caller's thread.
const STRAIGHT_OPS: usize = 64;
const STRAIGHT_BYTES: u64 = 64 << 10;

/// A payload as byte ranges, with the position of each in the payload.
#[derive(Clone, Debug, Default)]
pub(crate) struct Region {
    extents: Extents,
    /// Position of each extent in the payload.
    starts: SmallVec<[u64; 1]>,
    /// Length of the payload.
    pub(crate) len: u64,
}

impl Region {
    fn new(layout: &Layout, span: &Span) -> Self {
        let mut region = Region { extents: layout.extents(span), ..Region::default() };
        for extent in &region.extents {
            region.starts.push(region.len);
            region.len += extent.len;
        }
        region
    }

    /// The contiguous range at payload position `at`: its first byte as an extent that ends with the range.
    #[inline]
    pub(crate) fn at(&self, at: u64) -> Extent {
        let index = if self.extents.len() == 1 { 0 } else { self.starts.partition_point(|&start| start <= at) - 1 };
        let extent = self.extents[index];
        let skip = at - self.starts[index];
        Extent { offset: extent.offset + skip, len: extent.len - skip, ..extent }
    }

    /// Whether both payloads are the same bytes of the same buffer.
    fn is_same(&self, other: &Region) -> bool {
        self.extents == other.extents
    }
}

/// An operation with its bytes.
#[derive(Debug)]
pub(crate) enum PlanOpKind {
    Send { src: Region, to: Rank },
    Recv { dst: Region, from: Rank },
    RecvReduce { dst: Region, local: Region, from: Rank, order: Order, finish: Finish },
    Copy { dst: Region, src: Region },
    Reduce { dst: Region, srcs: Vec<Region>, finish: Finish },
    Combine(Box<Combination>),
}

#[derive(Debug)]
pub(crate) struct PlanOp {
    pub(crate) kind: PlanOpKind,
    /// Payload length in bytes; number of tiles of a combination.
    pub(crate) total: u64,
    /// Of a message that is an encoded chunk: its tiles.
    pub(crate) coded: Option<Box<Coded>>,
    pub(crate) edge: u32,
    /// (operation, whether byte k may follow byte k)
    pub(crate) deps: SmallVec<[(u32, bool); 4]>,
    /// Operations that wait for this one.
    pub(crate) dependents: SmallVec<[u32; 4]>,
}

impl PlanOp {
    /// How far `later`, which streams behind this one, may go when this one has done so much: a combination goes by tiles,
    /// a message by bytes.
    pub(crate) fn reach(&self, done: u64, later: &PlanOp) -> u64 {
        match (&self.coded, &later.coded) {
            (Some(message), None) => message.tiles_in(done),
            (None, Some(message)) => message.bytes_of(done),
            (Some(_), Some(_)) | (None, None) => done,
        }
    }
}

/// Operations by (peer, edge).
#[derive(Debug, Default)]
struct EdgeIndex {
    first: Vec<u32>,
    ops: Vec<u32>,
}

impl EdgeIndex {
    /// `edges` lists (peer, edge, operation); the edges of a peer are numbered from 0 without gaps.
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
pub(crate) struct Plan {
    pub(crate) algorithm: &'static Algorithm,
    pub(crate) ops: Vec<PlanOp>,
    pub(crate) scratch_bytes: u64,
    /// Room for encoded chunks; 0 for calls that are not encoded.
    pub(crate) code_bytes: u64,
    /// Bytes of the longest operation.
    pub(crate) longest: u64,
    /// Bytes of all operations together.
    pub(crate) work: u64,
    /// An order in which the operations can be run one after the other: what needs no peer as early as possible.
    pub(crate) straight: Option<Box<[u32]>>,
    /// Whether anything is received.
    pub(crate) hears: bool,
    /// The ranks that something goes to or comes from.
    pub(crate) peers: SmallVec<[Rank; 4]>,
    receives: EdgeIndex,
    sends: EdgeIndex,
}

impl Plan {
    /// The operation that receives message `edge` of `peer`.
    pub(crate) fn receive(&self, peer: Rank, edge: u32) -> Option<u32> {
        self.receives.find(peer, edge)
    }

    /// The operation that sends message `edge` to `peer`.
    pub(crate) fn send(&self, peer: Rank, edge: u32) -> Option<u32> {
        self.sends.find(peer, edge)
    }

    fn new(algorithm: &'static Algorithm, program: &Program, shape: &CallShape, world: u32) -> Self {
        let layout = Layout::new(program, shape);
        let region = |span: &Span| Region::new(&layout, span);
        let coded = |span: &Span| shape.coding.and_then(|coding| coded(&layout, program, span, coding));
        let (mut receives, mut sends) = (Vec::new(), Vec::new());
        let mut ops: Vec<PlanOp> = Vec::with_capacity(program.ops.len());
        let mut work = 0;
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
                    work += combination.elems() * shape.elem_bytes;
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
            ops.push(PlanOp { kind, total, coded, edge: op.edge, deps, dependents: SmallVec::new() });
        }
        let mut peers: SmallVec<[Rank; 4]> = receives.iter().chain(&sends).map(|&(peer, ..)| Rank(peer)).collect();
        peers.sort_unstable();
        peers.dedup();
        let longest = ops.iter().map(|op| op.total).max().unwrap_or(0);
        let is_short = ops.len() <= STRAIGHT_OPS && longest <= STRAIGHT_BYTES && shape.coding.is_none();
        Self {
            algorithm,
            longest,
            work,
            peers,
            straight: is_short.then(|| straight_order(&ops)),
            ops,
            scratch_bytes: layout.scratch_bytes(),
            code_bytes: layout.code_bytes(),
            hears: !receives.is_empty(),
            receives: EdgeIndex::new(world, receives),
            sends: EdgeIndex::new(world, sends),
        }
    }
}

/// The tiles of a chunk of `Code`; `None` for any other.
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

/// The chunk that all of these have the elements of.
fn like_of<'a>(program: &Program, spans: impl Iterator<Item = &'a Span>) -> (Buf, u32) {
    let mut chunks = spans.flat_map(Span::chunks);
    let Some((buf, chunk)) = chunks.next() else { unreachable!("a combination makes something") };
    if buf == Buf::Code { program.codes[chunk as usize].like } else { (buf, chunk) }
}

/// The operations in an order that respects their dependencies: a receive only when nothing else can be done.
fn straight_order(ops: &[PlanOp]) -> Box<[u32]> {
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

/// What plans depend on; equal keys give equal plans.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct PlanKey {
    pub(crate) collective: Collective,
    pub(crate) root: Rank,
    pub(crate) elem_bytes: u64,
    pub(crate) equal_blocks: bool,
    pub(crate) inputs: Vec<Vec<Elems>>,
    pub(crate) outputs: Vec<Vec<Elems>>,
    /// Of an encoded call.
    pub(crate) codecs: Option<TypedCodecs>,
    /// Whether each reduction rounds: its type is narrower than the arithmetic.
    pub(crate) rounds: bool,
}

impl PlanKey {
    /// The size that the choice of algorithm goes by, the same on all ranks: the whole buffer of one rank.
    pub(crate) fn size_bytes(&self, world: u32) -> u64 {
        let bytes = |(position, elems): (u32, &Elems)| match &self.codecs {
            Some(codecs) => codecs.piece_bytes(Role::Down, position, elems.0),
            None => elems.0 * self.elem_bytes,
        };
        let total = |blocks: &Vec<Vec<Elems>>| blocks.iter().flat_map(|block| (0..).zip(block)).map(bytes).sum::<u64>();
        match self.collective {
            Collective::AllReduce | Collective::Broadcast | Collective::Reduce => total(&self.outputs),
            Collective::ReduceScatter => total(&self.inputs),
            Collective::AllGather => total(&self.outputs),
            Collective::Gather => total(&self.inputs) * u64::from(world),
            Collective::Scatter => total(&self.outputs) * u64::from(world),
            // With splits the sizes differ from rank to rank: none is known to all.
            Collective::AllToAll | Collective::Barrier | Collective::Send | Collective::Recv => 0,
        }
    }
}

/// The plans of one group.
pub(crate) struct Plans {
    cache: HashMap<PlanKey, Arc<Plan>>,
    chooser: Chooser,
    rank: Rank,
}

impl Plans {
    pub(crate) fn new(chooser: Chooser, rank: Rank) -> Self {
        Self { cache: HashMap::new(), chooser, rank }
    }

    /// The plan for `key`, cached or made.
    ///
    /// # Errors
    /// `Configuration` when an override names an algorithm that does not fit.
    pub(crate) fn get(&mut self, key: &PlanKey) -> Result<Arc<Plan>> {
        if let Some(plan) = self.cache.get(key) {
            return Ok(plan.clone());
        }
        let topology = self.chooser.topology();
        let world = topology.world();
        let encoded = key.codecs.is_some();
        let bytes = key.size_bytes(world);
        let algorithm = match encoded {
            true => self.chooser.choose_encoded(key.collective, bytes, key.equal_blocks)?,
            false if key.rounds => self.chooser.choose_narrow(key.collective, bytes, key.equal_blocks)?,
            false => self.chooser.choose(key.collective, bytes, key.equal_blocks)?,
        };
        let request = Request { collective: key.collective, world, rank: self.rank, root: key.root, topology };
        let mut program = (algorithm.build)(&request).lower(&request);
        if encoded {
            program = program.encoded(algorithm, &request);
        }
        let shape = CallShape {
            elem_bytes: key.elem_bytes,
            in_blocks: &key.inputs,
            out_blocks: &key.outputs,
            coding: key.codecs.as_ref().map(|codecs| codecs as &dyn Coding),
        };
        let plan = Arc::new(Plan::new(algorithm, &program, &shape, world));
        tracing::info!(
            collective = key.collective.name(),
            algorithm = algorithm.name,
            bytes = key.size_bytes(world),
            world,
            codecs = key.codecs.as_ref().map(|typed| typed.codecs.text()),
            "algorithm chosen"
        );
        if self.cache.len() >= MAX_PLANS {
            self.cache.clear();
        }
        self.cache.insert(key.clone(), plan.clone());
        Ok(plan)
    }
}

//! The making of plans and the choice of an algorithm; the plans of a group, by what they depend on.
//!
//! Read [`Planner`] first.

use std::collections::HashMap;
use std::sync::Arc;

use accl_schedule::{ALGORITHMS, Algorithm, CallShape, Chooser, Coding, Part, Request, Role};
use accl_types::{Bytes, Collective, Elems, Error, Rank, Result};

use super::build::Plan;
use crate::call::TypedCodecs;

/// Plans kept per group and part of calls; beyond, the cache starts anew (a program that never repeats a shape gains nothing from it).
const MAX_PLANS: usize = 256;

/// The barrier by which ranks meet before a collective is done elsewhere: messages lead from each to each.
const MEETING: &str = "dissemination";

/// What plans depend on; equal keys give equal plans.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct PlanKey {
    /// What the call is.
    pub collective: Collective,
    pub(crate) root: Rank,
    pub(crate) elem_bytes: u64,
    pub(crate) equal_blocks: bool,
    pub(crate) inputs: Vec<Vec<Elems>>,
    pub(crate) outputs: Vec<Vec<Elems>>,
    /// Of an encoded call.
    pub codecs: Option<TypedCodecs>,
    /// Whether each reduction rounds: its type is narrower than the arithmetic.
    pub(crate) rounds: bool,
    /// Whether tensors are staged by external operations.
    pub(crate) is_staged: bool,
    /// Whether the whole collective is an external operation.
    pub(crate) is_offloaded: bool,
    /// Which part of the call it is.
    pub(crate) part: Part,
}

impl PlanKey {
    /// The size that the choice of algorithm goes by, the same on all ranks: the whole buffer of one rank.
    pub fn size_bytes(&self, world: u32) -> u64 {
        let bytes = |(position, elems): (u32, &Elems)| match &self.codecs {
            Some(codecs) => codecs.piece_bytes(Role::Result, position, elems.0),
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

/// Makes the plans of one group.
pub struct Planner {
    chooser: Chooser,
    rank: Rank,
}

impl Planner {
    /// For a group whose algorithms are chosen so, on one of its ranks.
    pub fn new(chooser: Chooser, rank: Rank) -> Self {
        Self { chooser, rank }
    }

    /// The rank of this process.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.chooser.topology().world()
    }

    /// The time that a collective of so many bytes is predicted to take, in picoseconds: see [`Chooser::predicted_ps`].
    pub fn predicted_ps(&self, collective: Collective, bytes: Bytes, equal_blocks: bool) -> u64 {
        self.chooser.predicted_ps(collective, bytes, equal_blocks)
    }

    /// The plan for `key`. That takes time: no lock should be held.
    ///
    /// # Errors
    /// `Configuration` when an override names an algorithm that does not fit.
    pub fn plan(&self, key: &PlanKey) -> Result<Arc<Plan>> {
        let topology = self.chooser.topology();
        let world = topology.world();
        if key.is_offloaded {
            return self.offloaded(key).map(Arc::new);
        }
        let encoded = key.codecs.is_some();
        let bytes = key.size_bytes(world);
        let algorithm = match encoded {
            true => self.chooser.choose_encoded(key.collective, Bytes(bytes), key.equal_blocks)?,
            false if key.rounds => self.chooser.choose_narrow(key.collective, Bytes(bytes), key.equal_blocks)?,
            false => self.chooser.choose(key.collective, Bytes(bytes), key.equal_blocks)?,
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
            part: key.part,
        };
        let plan = Plan::new(algorithm, &program, &shape, world);
        // The first part is what the caller sees of the call.
        let plan = if key.part.of > 1 && key.part.index == 0 { plan.joined() } else { plan };
        Ok(Arc::new(if key.is_staged { plan.staged() } else { plan }))
    }
}

impl Planner {
    /// The plan of a collective that is done elsewhere: all ranks meet, and then it begins.
    fn offloaded(&self, key: &PlanKey) -> Result<Plan> {
        let topology = self.chooser.topology();
        let is_it = |row: &&Algorithm| row.collective == Collective::Barrier && row.name == MEETING;
        let algorithm = ALGORITHMS.iter().find(is_it).ok_or_else(|| Error::internal("no barrier to meet by"))?;
        let world = topology.world();
        let request = Request { collective: Collective::Barrier, world, rank: self.rank, root: Rank(0), topology };
        let program = (algorithm.build)(&request).lower(&request);
        let shape =
            CallShape { elem_bytes: key.elem_bytes, in_blocks: &[], out_blocks: &[], coding: None, part: Part::WHOLE };
        Ok(Plan::new(algorithm, &program, &shape, world).offloaded())
    }
}

/// Plans that were made, by what they depend on.
#[derive(Default)]
pub struct Plans(HashMap<PlanKey, Arc<Plan>>);

impl Plans {
    /// The plan for a key, if it is kept.
    pub fn get(&self, key: &PlanKey) -> Option<Arc<Plan>> {
        self.0.get(key).cloned()
    }

    /// Keeps a plan. Those that were kept before go when there are too many.
    pub fn keep(&mut self, key: PlanKey, plan: Arc<Plan>) {
        if self.0.len() >= MAX_PLANS * key.part.of as usize && !self.0.contains_key(&key) {
            self.0.clear();
        }
        self.0.insert(key, plan);
    }
}

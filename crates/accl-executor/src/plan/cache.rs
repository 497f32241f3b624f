//! Construction of plans, the choice of an algorithm, and the cache of a group's plans.
//!
//! Read [`Planner`] first.

use std::collections::HashMap;
use std::sync::Arc;

use accl_schedule::{ALGORITHMS, Algorithm, CallShape, Chooser, Coding, Part, Request};
use accl_types::{Bytes, Collective, Error, Rank, Result};

use super::build::Plan;
use super::key::PlanKey;
use super::staging::LEAST_COPY;
use crate::call::Referencing;

/// Maximum plans kept per group and per part of calls. When it is reached, the cache is emptied: a program that never
/// repeats a shape gains nothing from a cache.
const MAX_PLANS: usize = 256;

/// Barrier algorithm that precedes an offloaded collective: it passes messages, directly or not, from each rank to each
/// other.
const MEETING: &str = "dissemination";

/// Creates the plans of one group.
pub struct Planner {
    chooser: Chooser,
    rank: Rank,
    least_copy: Bytes,
}

impl Planner {
    /// Creates the planner of rank `rank` in a group whose algorithms `chooser` chooses.
    pub fn new(chooser: Chooser, rank: Rank) -> Self {
        Self { chooser, rank, least_copy: LEAST_COPY }
    }

    /// Returns this planner with another minimum size for the copies of staged tensors, which is the size of published
    /// tiles, too. For tests, whose tensors are small.
    #[must_use]
    pub fn with_least_copy(self, least_copy: Bytes) -> Self {
        Self { least_copy, ..self }
    }

    /// Returns the rank of this process.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Returns the number of ranks.
    pub fn world(&self) -> u32 {
        self.chooser.topology().world()
    }

    /// Returns whether all ranks are on one host.
    pub fn is_on_one_host(&self) -> bool {
        self.chooser.topology().host_count() == 1
    }

    /// Returns the predicted time of a collective of `bytes` bytes, in picoseconds: see [`Chooser::predicted_ps`].
    pub fn predicted_ps(&self, collective: Collective, bytes: Bytes, equal_blocks: bool) -> u64 {
        self.chooser.predicted_ps(collective, bytes, equal_blocks)
    }

    /// Creates the plan for `key`. This takes time, so the caller should hold no lock.
    ///
    /// # Errors
    /// `Configuration` if an override names an algorithm that does not fit.
    pub fn plan(&self, key: &PlanKey) -> Result<Arc<Plan>> {
        let topology = self.chooser.topology();
        let world = topology.world();
        if key.is_offloaded {
            return self.offloaded(key).map(|plan| Arc::new(self.staged(plan, key)));
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
        let (elem_bytes, tile_bytes) = (key.elem_bytes, self.least_copy.0);
        let referencing = key.is_by_reference.then_some(Referencing { elem_bytes, tile_bytes });
        if encoded {
            program = program.encoded(algorithm, &request);
        } else if referencing.is_some() {
            program = program.by_reference(&request);
        }
        let of_codecs = key.codecs.as_ref().map(|codecs| codecs as &dyn Coding);
        let shape = CallShape {
            elem_bytes: key.elem_bytes,
            in_blocks: &key.inputs,
            out_blocks: &key.outputs,
            coding: of_codecs.or(referencing.as_ref().map(|referencing| referencing as &dyn Coding)),
            part: key.part,
        };
        let plan = Plan::new(algorithm, &program, &shape, world);
        // The caller waits for the first part, so the first part waits for the others.
        let plan = if key.part.of > 1 && key.part.index == 0 { plan.joined() } else { plan };
        Ok(Arc::new(self.staged(plan, key)))
    }
}

impl Planner {
    fn staged(&self, plan: Plan, key: &PlanKey) -> Plan {
        if key.staged.is_empty() && !key.is_by_reference { plan } else { plan.staged(key, self.rank, self.least_copy) }
    }

    /// Creates the plan of an offloaded collective: a barrier of all ranks, then the external operation.
    fn offloaded(&self, key: &PlanKey) -> Result<Plan> {
        let topology = self.chooser.topology();
        let is_it = |row: &&Algorithm| row.collective == Collective::Barrier && row.name == MEETING;
        let algorithm =
            ALGORITHMS.iter().find(is_it).ok_or_else(|| Error::internal("no barrier algorithm for offloaded calls"))?;
        let world = topology.world();
        let request = Request { collective: Collective::Barrier, world, rank: self.rank, root: Rank(0), topology };
        let program = (algorithm.build)(&request).lower(&request);
        let shape =
            CallShape { elem_bytes: key.elem_bytes, in_blocks: &[], out_blocks: &[], coding: None, part: Part::WHOLE };
        Ok(Plan::new(algorithm, &program, &shape, world).offloaded())
    }
}

/// Cache of plans by key.
#[derive(Default)]
pub struct Plans(HashMap<PlanKey, Arc<Plan>>);

impl Plans {
    /// Returns the plan for a key, if it is cached.
    pub fn get(&self, key: &PlanKey) -> Option<Arc<Plan>> {
        self.0.get(key).cloned()
    }

    /// Caches a plan. If the cache is full, all earlier plans are dropped first.
    pub fn keep(&mut self, key: PlanKey, plan: Arc<Plan>) {
        if self.0.len() >= MAX_PLANS * key.part.of as usize && !self.0.contains_key(&key) {
            self.0.clear();
        }
        self.0.insert(key, plan);
    }
}

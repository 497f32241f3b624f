//! The shapes and plans of one group, for any thread.
//!
//! Owns the lock over both, which nobody holds while a plan is made. Read [`Planning::get`] first.

use std::sync::Arc;

use accl_types::{Bytes, Result};

use crate::sync::Mutex;
use accl_executor::call::CallDesc;
use accl_executor::plan::{AllShapes, Draft, Planner, Plans, Shape};

/// The shapes and plans of one group, and how more of them are made.
pub(crate) struct Planning {
    planner: Planner,
    made: Mutex<Made>,
}

#[derive(Default)]
struct Made {
    shapes: AllShapes,
    plans: Plans,
}

impl Planning {
    pub(crate) fn new(planner: Planner) -> Self {
        Self { planner, made: Mutex::default() }
    }

    /// The time that a call is predicted to take, in picoseconds, the same on all ranks; 0 where it is not known. Of one that is encoded it is that of the
    /// same call without, which makes up for what encoding takes.
    pub(crate) fn predicted_ps(&self, desc: &CallDesc) -> u64 {
        let bytes = Bytes(desc.size_bytes(self.planner.world()));
        self.planner.predicted_ps(desc.collective, bytes, desc.equal_blocks)
    }

    /// The shape of a checked call, kept from now on.
    ///
    /// # Errors
    /// Those of [`Draft::new`] and of [`Planner::plan`].
    pub(crate) fn get(&self, desc: &CallDesc) -> Result<Arc<Shape>> {
        let (rank, world) = (self.planner.rank(), self.planner.world());
        if let Some(shape) = self.made.lock().shapes.find(desc, world) {
            return Ok(shape.clone());
        }
        let draft = Draft::new(desc, rank, world)?;
        let key = &draft.plan_key;
        let known = self.made.lock().plans.get(key);
        let plan = match known {
            Some(plan) => plan,
            None => {
                let plan = self.planner.plan(key)?;
                tracing::info!(
                    collective = key.collective.name(),
                    algorithm = plan.name,
                    bytes = key.size_bytes(world),
                    world,
                    codecs = key.codecs.as_ref().map(|typed| typed.codecs.text()),
                    "algorithm chosen"
                );
                plan
            }
        };
        let shape = Arc::new(draft.with_plan(desc, world, plan.clone()));
        let mut made = self.made.lock();
        // Another thread may have made it meanwhile.
        if let Some(shape) = made.shapes.find(desc, world) {
            return Ok(shape.clone());
        }
        made.plans.keep(draft.plan_key, plan);
        made.shapes.keep(desc, shape.clone());
        Ok(shape)
    }
}

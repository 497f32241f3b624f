//! The shapes and plans of one group, usable from any thread.
//!
//! Owns the lock over both; it is not held while a plan is computed. Read [`Planning::get`] first.

use std::sync::Arc;

use accl_types::{Bytes, Result};

use crate::sync::Mutex;
use accl_executor::call::CallDesc;
use accl_executor::plan::{AllShapes, Draft, Planner, Plans, Shape};

/// The shapes and plans of one group, and the planner that computes more of them.
pub struct Planning {
    planner: Planner,
    made: Mutex<Made>,
}

#[derive(Default)]
struct Made {
    shapes: AllShapes,
    plans: Plans,
}

impl Planning {
    /// Creates the shapes and plans of a group, empty at first.
    pub fn new(planner: Planner) -> Self {
        Self { planner, made: Mutex::default() }
    }

    /// Returns whether all ranks are on one host.
    pub fn is_on_one_host(&self) -> bool {
        self.planner.is_on_one_host()
    }

    /// Returns the predicted time of a call in picoseconds, the same on all ranks; 0 if it is not known. For an encoded
    /// call it is the time of the same call unencoded, which compensates for the time of encoding.
    pub fn predicted_ps(&self, desc: &CallDesc) -> u64 {
        let bytes = Bytes(desc.size_bytes(self.planner.world()));
        self.planner.predicted_ps(desc.collective, bytes, desc.equal_blocks)
    }

    /// Returns the shape of a checked call, and keeps it.
    ///
    /// # Errors
    /// The errors of [`Draft::new`] and of [`Planner::plan`].
    pub fn get(&self, desc: &CallDesc) -> Result<Arc<Shape>> {
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
        // Another thread may have computed it meanwhile.
        if let Some(shape) = made.shapes.find(desc, world) {
            return Ok(shape.clone());
        }
        made.plans.keep(draft.plan_key, plan);
        made.shapes.keep(desc, shape.clone());
        Ok(shape)
    }
}

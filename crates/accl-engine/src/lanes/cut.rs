//! A call that is cut into parts.
//!
//! Owns the definition of the parts: the first as its caller has it, the others over the same memory. [`super::join::Join`]
//! tracks their completion. Read [`Cut::new`] first.

use std::sync::Arc;

use accl_executor::call::{CallDesc, Encoded, Encoding, Figures, Gather, Mode};
use accl_executor::group::{Caller, Prepared};
use accl_executor::plan::Shape;
use accl_schedule::Part;
use accl_types::Result;

use super::join::Join;
use crate::sync::Mutex;

/// Measurements of a call's parts except the first.
#[derive(Debug, Default)]
struct Gathered(Mutex<Figures>);

impl Gather for Gathered {
    fn add(&self, figures: Figures) {
        self.0.lock().add(figures);
    }

    fn take(&self) -> Figures {
        std::mem::take(&mut self.0.lock())
    }
}

/// A call that is cut into parts.
pub struct Cut {
    /// Its first part, which completes when all parts have completed.
    pub first: CallDesc,
    /// Completes the call when all parts have ended.
    pub join: Arc<Join>,
    /// Predicted time of the call in one part, in picoseconds.
    pub predicted_ps: u64,
}

impl Cut {
    /// Cuts a call into `of` parts; `None` if `of` is 1. `predicted_ps` is the predicted time of the call in one part.
    pub fn new(desc: &CallDesc, of: u32, predicted_ps: u64) -> Option<Self> {
        if of == 1 {
            return None;
        }
        let join = Join::new(of - 1);
        let mut first = CallDesc { part: Part { index: 0, of }, joins: Some(join.clone()), ..desc.clone() };
        if let Encoded::As(Encoding { probe: Some(probe), .. }) = &mut first.encoding {
            probe.gathered = Some(Arc::new(Gathered::default()));
        }
        Some(Self { first, join, predicted_ps })
    }

    /// Returns the parts except the first, which `prepared` holds.
    ///
    /// # Errors
    /// The errors of `shape_of`; `Exhausted` when there is no memory.
    pub fn others(
        &self,
        caller: &Caller,
        prepared: &Prepared,
        shape_of: impl Fn(&CallDesc) -> Result<Arc<Shape>>,
    ) -> Result<Vec<(CallDesc, Prepared)>> {
        let part = |index| {
            let part = Part { index, ..self.first.part };
            let desc = CallDesc { part, joins: None, mode: Mode::Async, ..self.first.clone() };
            let shape = shape_of(&desc)?;
            Ok((desc, caller.prepare_part(prepared, shape)?))
        };
        (1..self.first.part.of).map(part).collect()
    }
}

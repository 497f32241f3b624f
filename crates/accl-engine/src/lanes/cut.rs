//! A call that is cut into parts.
//!
//! Owns the definition of the parts: the first as its caller has it, the others over the same memory. [`super::join::Join`]
//! tracks their completion. Read [`Cut::new`] first.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use accl_executor::call::{AllFigures, CallDesc, Encoded, Encoding, Figures, Gather, Meeting, Mode, Wake};
use accl_executor::group::{Caller, Prepared};
use accl_executor::plan::Shape;
use accl_schedule::Part;
use accl_types::Result;

use super::join::Join;
use crate::sync::Mutex;

/// Measurements of a call's parts, and the number of parts that have yet to add theirs.
#[derive(Debug)]
struct Gathered(Mutex<(AllFigures, u32)>);

impl Gathered {
    fn new(parts: u32) -> Self {
        Self(Mutex::new((AllFigures::default(), parts)))
    }
}

impl Gather for Gathered {
    fn keep_sample(&self, sample: Arc<dyn Any + Send + Sync>) {
        self.0.lock().0.sample = Some(sample);
    }

    fn add(&self, figures: Figures) -> Option<AllFigures> {
        let (all, left) = &mut *self.0.lock();
        all.figures.add(figures);
        *left = left.saturating_sub(1);
        (*left == 0).then(|| std::mem::take(all))
    }
}

/// Where the parts of a staged call meet.
struct PartsMeeting {
    /// Functions that wake the parts which have copied in their bytes.
    wakes: Mutex<Vec<Wake>>,
    /// Number of parts that have not copied in their bytes.
    left: AtomicU32,
    is_open: AtomicBool,
}

impl PartsMeeting {
    fn new(parts: u32) -> Self {
        Self { wakes: Mutex::default(), left: AtomicU32::new(parts), is_open: AtomicBool::new(false) }
    }

    fn wake_all(&self) {
        self.wakes.lock().iter().for_each(|wake| wake());
    }
}

impl fmt::Debug for PartsMeeting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PartsMeeting").field("left", &self.left).finish_non_exhaustive()
    }
}

impl Meeting for PartsMeeting {
    fn note_copied_in(&self, wake: &Wake) {
        self.wakes.lock().push(wake.clone());
        // Release and acquire: the part that goes on sees the bytes of all parts.
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.wake_all();
        }
    }

    fn are_copied_in(&self) -> bool {
        self.left.load(Ordering::Acquire) == 0
    }

    fn open(&self) {
        self.is_open.store(true, Ordering::Release);
        self.wake_all();
    }

    fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
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
            probe.gathered = Some(Arc::new(Gathered::new(of)));
        }
        first.meeting = first.staging.is_some().then(|| Arc::new(PartsMeeting::new(of)) as Arc<dyn Meeting>);
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
            let prepared = caller.prepare_part(prepared, &desc, shape)?;
            Ok((desc, prepared))
        };
        (1..self.first.part.of).map(part).collect()
    }
}

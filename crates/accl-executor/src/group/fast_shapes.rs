//! The shapes of a group that may take the fast path, and the memory of such calls.
//!
//! Owns which shapes are kept. `fast_calls` runs the calls. Read [`FastShapes::keep`] first.

use std::sync::Arc;

use crate::call::CallDesc;
use crate::memory::{Compute, Storage};
use crate::plan::{Shape, Shapes};

/// Recent shapes of calls on the fast path, and what these calls use one after the other.
#[derive(Default)]
pub(super) struct FastShapes {
    pub(super) shapes: Shapes,
    /// Bytes of the largest call that had such a shape. A larger call is not looked up.
    pub(super) most_bytes: u64,
    pub(super) compute: Compute,
    pub(super) scratch: Storage,
}

impl FastShapes {
    /// Keeps the shape of a call, so that later calls may take the fast path. Each message of such a call fits one
    /// frame of `segment` bytes.
    pub(super) fn keep(&mut self, desc: &CallDesc, shape: &Arc<Shape>, segment: u64) {
        if shape.plan.fast_path.is_some() && shape.plan.longest <= segment && !self.shapes.contains(shape) {
            self.most_bytes = self.most_bytes.max(desc.bytes());
            self.shapes.keep(shape.clone());
        }
    }
}

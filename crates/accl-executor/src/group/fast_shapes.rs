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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::shape::tests::{shape_of, sum};

    const SEGMENT: u64 = 1 << 16;

    #[test]
    fn equal_shapes_are_kept_once_although_each_was_computed_again() {
        let mut fast = FastShapes::default();
        for _ in 0..20 {
            fast.keep(&sum(4), &shape_of(&sum(4)), SEGMENT);
        }
        // Copies would have displaced each other, and the next shapes too.
        for count in 1..=16 {
            fast.keep(&sum(count), &shape_of(&sum(count)), SEGMENT);
        }
        assert!((1..=16).all(|count| fast.shapes.find(&sum(count), 2).is_some()));
    }

    #[test]
    fn a_call_whose_messages_need_several_frames_is_not_kept() {
        let mut fast = FastShapes::default();
        let large = sum(1 << 20);
        fast.keep(&large, &shape_of(&large), SEGMENT);
        assert!(fast.shapes.find(&large, 2).is_none() && fast.most_bytes == 0);
        fast.keep(&sum(4), &shape_of(&sum(4)), SEGMENT);
        assert_eq!(fast.most_bytes, 16);
    }
}

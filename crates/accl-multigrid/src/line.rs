//! The points of all levels in the order of a pass, and the ranks that hold them.
//!
//! Owns the one difference between the passes: the adjoint pass goes through the same points from the end. Read
//! [`Line`] first.

use accl_types::Rank;

use crate::grid::{Grid, Step};
use crate::kind::Kind;
use crate::placement::Placement;
use crate::plan::Pass;

/// One step of a pass on a level.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LineStep {
    pub(crate) layer: u32,
    pub(crate) span: u32,
    pub(crate) kind: Kind,
    /// The rank that has the layer.
    pub(crate) evaluator: Rank,
}

/// One level of a pass.
#[derive(Clone, Debug)]
pub(crate) struct LineLevel {
    pub(crate) steps: Vec<LineStep>,
    /// The rank that holds the value of each position.
    pub(crate) homes: Vec<Rank>,
    /// The point of each position.
    pub(crate) points: Vec<u32>,
    /// The positions of these points in the next finer level.
    pub(crate) in_finer: Vec<usize>,
    /// How often the level's states have been made coarser.
    pub(crate) mesh: u32,
}

impl LineLevel {
    /// The last position.
    pub(crate) fn end(&self) -> usize {
        self.steps.len()
    }
}

/// A net as one pass sees it. Values are sent in one direction along the ranks only.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) pass: Pass,
    pub(crate) levels: Vec<LineLevel>,
}

impl Line {
    pub(crate) fn new(grid: &Grid, placement: &Placement, pass: Pass) -> Self {
        let levels = grid.levels().iter().map(|level| {
            let step = |step: &Step| LineStep {
                layer: step.layer,
                span: step.span,
                kind: step.kind,
                evaluator: placement.owner(step.layer),
            };
            let mut steps: Vec<_> = level.steps.iter().map(step).collect();
            let mut points = level.points.clone();
            let mut in_finer: Vec<_> = level.in_finer.iter().map(|&position| position as usize).collect();
            if pass == Pass::Adjoint {
                steps.reverse();
                points.reverse();
                in_finer.reverse();
                // Positions are counted from the other end.
                let end = in_finer[0];
                in_finer.iter_mut().for_each(|position| *position = end - *position);
            }
            let homes = points.iter().map(|&point| home(placement, pass, point)).collect();
            LineLevel { steps, homes, points, in_finer, mesh: level.mesh }
        });
        Self { pass, levels: levels.collect() }
    }

    pub(crate) fn finest(&self) -> &LineLevel {
        &self.levels[0]
    }
}

/// The rank that holds the value of a point: the owner of the layer that makes it. A pass's input is on the rank at the
/// end where the pass starts.
fn home(placement: &Placement, pass: Pass, point: u32) -> Rank {
    match pass {
        Pass::Forward if point == 0 => Rank(0),
        Pass::Forward => placement.owner(point - 1),
        Pass::Adjoint if point == placement.layers() => Rank(placement.ranks() - 1),
        Pass::Adjoint => placement.owner(point),
    }
}

/// The rank that gets the output of a pass: the other end of the ranks.
pub(crate) fn exit(placement: &Placement, pass: Pass) -> Rank {
    match pass {
        Pass::Forward => Rank(placement.ranks() - 1),
        Pass::Adjoint => Rank(0),
    }
}

//! Settings of a solve: its start, its relaxations, the order of levels, and when norms are awaited.
//!
//! Owns these settings and their check. Read [`Cycle`] first.

use accl_types::{Error, Result};

/// The order in which a cycle visits levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Shape {
    /// Down to the coarsest level and up again.
    #[default]
    V,
    /// Like `V`, and on the way up a V-cycle from every level.
    F,
}

/// The values of the points before the first cycle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Start {
    /// The coarsest level's solution, interpolated. This counts as the first iteration and has no norm.
    #[default]
    Coarsest,
    /// The solution of every level from the coarsest on, each improved by a V-cycle. This counts as the first iteration
    /// and has no norm.
    FullMultigrid,
    /// A value for each C-point of the finest level, from the caller that executes the lists.
    Guess,
}

/// When a norm is awaited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Norms {
    /// Never: there are no norms.
    None,
    /// Before the norm's own cycle continues.
    Blocking,
    /// One cycle later, or at the end.
    #[default]
    Lagged,
}

/// Which known results are not computed again. The same for all ranks; the results do not change by a bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reuse {
    /// None: every step is computed again.
    Nothing,
    /// All values. The final evaluations are separate, in the last sweep, which all ranks run at the same time.
    Values,
    /// All values, and a known evaluation is made final where it stands, also in the coarsest-level solve, in which
    /// ranks wait for each other. With P ranks this pays if a final evaluation takes less than P / (P - 1) times as
    /// long as a non-final one.
    #[default]
    All,
}

/// The settings of a solve.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cycle {
    /// Number of iterations: the start, if it counts as one, and the cycles.
    pub iterations: u32,
    /// The order of levels.
    pub shape: Shape,
    /// For each level except the coarsest: how often its C-points are relaxed before the last F-relaxation of a visit.
    /// 0 is F-relaxation, 1 is FCF-relaxation. The last number also holds for all later levels; an empty list means 0.
    pub relaxations: Vec<u32>,
    /// The start.
    pub start: Start,
    /// When norms are awaited.
    pub norms: Norms,
    /// Whether the last sweep is done, in which every layer has its final evaluation.
    pub has_final_sweep: bool,
    /// Which results are reused.
    pub reuse: Reuse,
}

impl Cycle {
    /// V-cycles with F-relaxation, `iterations` iterations in total.
    pub fn new(iterations: u32) -> Self {
        Self {
            iterations,
            shape: Shape::V,
            relaxations: Vec::new(),
            start: Start::Coarsest,
            norms: Norms::Lagged,
            has_final_sweep: true,
            reuse: Reuse::All,
        }
    }

    /// How often the C-points of a level are relaxed.
    pub fn relaxations_of(&self, level: usize) -> u32 {
        self.relaxations.get(level).or(self.relaxations.last()).copied().unwrap_or(0)
    }

    /// Number of cycles after the start.
    pub fn cycles(&self) -> u32 {
        match self.start {
            Start::Coarsest | Start::FullMultigrid => self.iterations.saturating_sub(1),
            Start::Guess => self.iterations,
        }
    }

    /// Checks the settings.
    ///
    /// # Errors
    /// `InvalidArgument` for 0 iterations if the start counts as one.
    pub(crate) fn check(&self) -> Result<()> {
        match (self.iterations, self.start) {
            (0, Start::Coarsest | Start::FullMultigrid) => {
                Err(Error::invalid_argument("0 iterations; the first iteration computes the start, so give 1 or more"))
            }
            _ => Ok(()),
        }
    }
}

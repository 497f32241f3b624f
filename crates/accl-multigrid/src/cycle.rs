//! How a solve goes: where it starts, how it relaxes, in what order it visits levels, and who waits for its norms.
//!
//! Owns these settings and their check. Read [`Cycle`] first.

use accl_types::{Error, Result};

/// The order in which a cycle visits levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Shape {
    /// Down to the coarsest level and up again.
    #[default]
    V,
    /// On the way up, a V-cycle from every level.
    F,
}

/// What the points have before the first cycle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Start {
    /// The solution of the coarsest level, interpolated: the first iteration is that, and has no norm.
    #[default]
    Coarsest,
    /// The solution of every level from the coarsest on, each improved by a V-cycle on its own: the first iteration is that, and has no norm.
    FullMultigrid,
    /// What who walks the lists has for each C-point of the finest level.
    Guess,
}

/// When a norm is waited for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Norms {
    /// Never: there are none.
    None,
    /// Before the cycle that it belongs to goes on.
    Blocking,
    /// One cycle later, or at the end.
    #[default]
    Lagged,
}

/// What is not computed again where it is known. It is the same for all ranks and changes no bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reuse {
    /// Nothing: every step is computed anew.
    Nothing,
    /// What was computed before; but each evaluation for good is one of its own, in the last sweep, which all ranks do at once.
    Values,
    /// That as well: what was evaluated before is evaluated for good there, also by the march, in which one rank waits for the other. With P ranks it pays
    /// where that takes less than P / (P - 1) times as long as evaluating for now.
    #[default]
    All,
}

/// How a net is solved.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Cycle {
    /// Start and cycles together.
    pub iterations: u32,
    /// The order of levels.
    pub shape: Shape,
    /// Of each level but the coarsest, how often its C-points are relaxed before the last F-relaxation of a visit: 0 is F-relaxation, 1 FCF. The last
    /// number holds for all levels after it; none is 0.
    pub relaxations: Vec<u32>,
    /// Where it starts.
    pub start: Start,
    /// Who waits for norms.
    pub norms: Norms,
    /// Whether the last sweep is made, in which every layer is evaluated for good.
    pub has_final_sweep: bool,
    /// What is not computed again.
    pub reuse: Reuse,
}

impl Cycle {
    /// So many iterations of V-cycles with F-relaxation.
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

    /// Cycles after the start.
    pub fn cycles(&self) -> u32 {
        match self.start {
            Start::Coarsest | Start::FullMultigrid => self.iterations.saturating_sub(1),
            Start::Guess => self.iterations,
        }
    }

    /// # Errors
    /// `InvalidArgument` for no iterations where the start is one.
    pub(crate) fn check(&self) -> Result<()> {
        match (self.iterations, self.start) {
            (0, Start::Coarsest | Start::FullMultigrid) => {
                Err(Error::invalid_argument("0 iterations; the first one makes the start, so give 1 or more"))
            }
            _ => Ok(()),
        }
    }
}

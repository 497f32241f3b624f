//! The kinds of layers.
//!
//! Owns the answers to every question about a kind: its name, whether it can be part of a coarse step, and the
//! operations of its steps. Other files ask [`Kind`] and name none of its variants. `build` makes the operations.

use crate::plan::Pass;

/// The role of a layer in the solver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// A step `x + dt * f(x)` of a differential equation; the layer computes f.
    Increment,
    /// A step `f(x, dt)` of a differential equation.
    Timed,
    /// A step `f(x)` of a differential equation, such as a block with its own skip connection. A coarse step goes as
    /// many times as far as it spans.
    Residual,
    /// A step of a differential equation with its own coarse step, such as an implicit step. The layer also computes
    /// the coarse step's effect on a cotangent.
    Custom,
    /// `f(x)`, not a step of an equation; it may change the shape of the state.
    Plain,
}

/// The operations that make a step over `span` fine steps, from a state `src`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepRule {
    /// Evaluates the layer on the finest mesh of states. The result is the next state, and the span is 1.
    Whole,
    /// Evaluates the layer with the span. The result is the next state.
    EvalSpan,
    /// Evaluates a fine step. The next state is `src + span * (stepped - src)`.
    Stretch,
    /// Evaluates the increment of a fine step. The next state is `src + span * dt * increment`.
    Advance,
}

impl Kind {
    /// All kinds, in the order in which messages list their names.
    pub const ALL: [Self; 5] = [Self::Increment, Self::Timed, Self::Residual, Self::Custom, Self::Plain];

    /// The name under which callers give the kind.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Increment => "ode",
            Self::Timed => "timed",
            Self::Residual => "residual",
            Self::Custom => "custom",
            Self::Plain => "plain",
        }
    }

    /// The kind with this name, or `None`.
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether every layer of the kind is an interval of its own on every level.
    pub const fn is_apart(self) -> bool {
        match self {
            Self::Increment | Self::Timed | Self::Residual | Self::Custom => false,
            Self::Plain => true,
        }
    }

    /// The operations of a step in a pass.
    pub const fn rule(self, pass: Pass) -> StepRule {
        match (self, pass) {
            (Self::Increment, _) => StepRule::Advance,
            // The final evaluation is recorded with the length of a fine step.
            (Self::Timed, Pass::Adjoint) | (Self::Residual, _) => StepRule::Stretch,
            (Self::Timed, Pass::Forward) | (Self::Custom, _) => StepRule::EvalSpan,
            (Self::Plain, _) => StepRule::Whole,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_name_is_the_name_of_one_kind() {
        assert_eq!(Kind::ALL.map(Kind::name), ["ode", "timed", "residual", "custom", "plain"]);
        for kind in Kind::ALL {
            assert_eq!(Kind::of(kind.name()), Some(kind));
        }
        assert_eq!(Kind::of("Ode"), None);
    }

    #[test]
    fn a_whole_step_never_spans_layers() {
        for kind in Kind::ALL {
            for pass in [Pass::Forward, Pass::Adjoint] {
                assert_eq!(kind.rule(pass) == StepRule::Whole, kind.is_apart(), "{kind:?} {pass:?}");
            }
        }
    }
}

//! The points of a net's levels.
//!
//! Owns which points of a level the next coarser level also has, and what a step between two points consists of. Point
//! i lies before layer i, and the last point lies after all layers. Read [`Grid`] first.

use accl_types::{Error, Result};

use crate::kind::Kind;

/// A layer of the net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// The layer's role.
    pub kind: Kind,
    /// Whether the layer is an interval of its own on every level. Layers of some kinds always are
    /// ([`Kind::is_apart`]).
    pub is_apart: bool,
}

impl Layer {
    /// A layer that may be part of coarse steps, if its kind can.
    pub const fn of(kind: Kind) -> Self {
        Self { kind, is_apart: kind.is_apart() }
    }
}

/// A step of a level, from one of its points to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// The layer that the step evaluates: the first of the layers it spans.
    pub layer: u32,
    /// Number of fine steps that it spans.
    pub span: u32,
    /// The layer's role.
    pub kind: Kind,
}

/// One level: its points, and the steps between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Level {
    /// The points, as points of the finest level. They include the net's first and last points.
    pub points: Vec<u32>,
    /// The step from each point to the next.
    pub steps: Vec<Step>,
    /// The same points as positions in the next finer level; for the finest level, in itself.
    pub in_finer: Vec<u32>,
    /// How often the level's states have been made coarser.
    pub mesh: u32,
}

/// The levels of a net, the finest first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grid {
    levels: Vec<Level>,
}

impl Grid {
    /// Builds the finest level and one coarser level per factor. A step of a level covers `factor` steps of the next
    /// finer level. At the end of a run of layers that are not apart it may cover fewer.
    ///
    /// # Errors
    /// `InvalidArgument` without layers, for a factor below 2, and for too many levels; the message has the maximum.
    pub fn new(layers: &[Layer], factors: &[u32]) -> Result<Self> {
        if layers.is_empty() {
            return Err(Error::invalid_argument("a net without layers; give at least one"));
        }
        let is_apart = |layer: u32| layers[layer as usize].is_apart || layers[layer as usize].kind.is_apart();
        let count = layers.len() as u32;
        let mut levels = vec![Level::of(layers, (0..=count).collect(), (0..=count).collect())];
        for (index, &factor) in factors.iter().enumerate() {
            if factor < 2 {
                let text =
                    format!("a coarsening factor of {factor} between levels {index} and {}; give 2 or more", index + 1);
                return Err(Error::invalid_argument(text));
            }
            let finer = &levels[index];
            let mut in_finer = vec![0];
            let mut taken = 0;
            for (position, step) in finer.steps.iter().enumerate() {
                taken += 1;
                let ends_run = finer.steps.get(position + 1).is_none_or(|next| is_apart(next.layer));
                if taken == factor || is_apart(step.layer) || ends_run {
                    in_finer.push(position as u32 + 1);
                    taken = 0;
                }
            }
            if in_finer.len() == finer.points.len() {
                let text = format!(
                    "{} levels, but {count} layers with these coarsening factors allow at most {}; give fewer levels, \
                     or fewer layers that are apart",
                    factors.len() + 1,
                    index + 1
                );
                return Err(Error::invalid_argument(text));
            }
            let points = in_finer.iter().map(|&position| finer.points[position as usize]).collect();
            levels.push(Level::of(layers, points, in_finer));
        }
        Ok(Self { levels })
    }

    /// Returns the grid with states that become coarser between a level and the next coarser one where `is_coarser`
    /// says so.
    ///
    /// # Errors
    /// `InvalidArgument` unless `is_coarser` has one entry for each level except the finest.
    pub fn with_coarser_states(mut self, is_coarser: &[bool]) -> Result<Self> {
        if is_coarser.len() + 1 != self.levels.len() {
            let text = format!(
                "got states of {} levels, expected {}: one for each level except the finest",
                is_coarser.len(),
                self.levels.len() - 1
            );
            return Err(Error::invalid_argument(text));
        }
        for (index, &is_coarser) in is_coarser.iter().enumerate() {
            self.levels[index + 1].mesh = self.levels[index].mesh + u32::from(is_coarser);
        }
        Ok(self)
    }

    /// The levels, the finest first.
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// Number of layers.
    pub fn layers(&self) -> u32 {
        self.levels[0].steps.len() as u32
    }
}

impl Level {
    fn of(layers: &[Layer], points: Vec<u32>, in_finer: Vec<u32>) -> Self {
        let step = |ends: &[u32]| Step { layer: ends[0], span: ends[1] - ends[0], kind: layers[ends[0] as usize].kind };
        let steps = points.windows(2).map(step).collect();
        Self { points, steps, in_finer, mesh: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ODE: Layer = Layer::of(Kind::Increment);
    const PLAIN: Layer = Layer::of(Kind::Plain);

    fn points(layers: &[Layer], factors: &[u32]) -> Vec<Vec<u32>> {
        Grid::new(layers, factors).unwrap().levels().iter().map(|level| level.points.clone()).collect()
    }

    #[test]
    fn the_first_and_the_last_point_are_on_every_level() {
        assert_eq!(points(&[ODE; 10], &[4, 2])[1..], [vec![0, 4, 8, 10], vec![0, 8, 10]]);
        assert_eq!(points(&[ODE; 8], &[4])[1..], [vec![0, 4, 8]]);
    }

    #[test]
    fn a_plain_layer_is_an_interval_on_every_level() {
        let layers = [PLAIN, ODE, ODE, ODE, PLAIN, ODE, ODE];
        assert_eq!(points(&layers, &[2, 2])[1..], [vec![0, 1, 3, 4, 5, 7], vec![0, 1, 4, 5, 7]]);
        let grid = Grid::new(&layers, &[2, 2]).unwrap();
        let spans: Vec<_> = grid.levels()[2].steps.iter().map(|step| (step.layer, step.span)).collect();
        assert_eq!(spans, [(0, 1), (1, 3), (4, 1), (5, 2)]);
    }

    #[test]
    fn a_layer_that_is_apart_is_one_as_well() {
        let mut layers = [ODE; 8];
        layers[0].is_apart = true;
        layers[7].is_apart = true;
        assert_eq!(points(&layers, &[3])[1..], [vec![0, 1, 4, 7, 8]]);
    }

    #[test]
    fn levels_that_would_be_alike_are_refused_with_the_greatest_number() {
        let refused = |layers: &[Layer], factors: &[u32]| Grid::new(layers, factors).unwrap_err().to_string();
        assert!(
            refused(&[ODE; 8], &[2, 2, 2, 2])
                .contains("5 levels, but 8 layers with these coarsening factors allow at most 4")
        );
        assert!(refused(&[PLAIN; 3], &[2]).contains("at most 1"));
        assert!(refused(&[ODE; 8], &[1]).contains("factor of 1"));
        assert!(refused(&[], &[]).contains("at least one"));
    }
}

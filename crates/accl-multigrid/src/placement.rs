//! The owner of each layer.
//!
//! Owns the rule that ranks have consecutive layers, in rank order and perhaps none, and the usual ways to divide
//! layers. Read [`Placement`] first.

use accl_types::{Error, Rank, Result};

use crate::grid::Grid;

/// The owner of each layer. The rank that evaluates a layer holds the layer and the point after it; only states are
/// sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    owners: Vec<Rank>,
    ranks: u32,
}

impl Placement {
    /// Places `counts[r]` layers on each rank r, in rank order.
    ///
    /// # Errors
    /// `InvalidArgument` without ranks or without layers.
    pub fn of_counts(counts: &[u32]) -> Result<Self> {
        let owners: Vec<_> =
            (0..).map(Rank).zip(counts).flat_map(|(rank, &count)| (0..count).map(move |_| rank)).collect();
        if counts.is_empty() {
            return Err(Error::invalid_argument("0 ranks; give 1 or more"));
        }
        if owners.is_empty() {
            return Err(Error::invalid_argument("no rank has a layer; give at least one rank a layer"));
        }
        Ok(Self { owners, ranks: counts.len() as u32 })
    }

    /// Divides layers as equally as possible; the first ranks have one more.
    ///
    /// # Errors
    /// `InvalidArgument` without ranks or without layers.
    pub fn even(layers: u32, ranks: u32) -> Result<Self> {
        let first = |rank: u32| rank * (layers / ranks.max(1)) + rank.min(layers % ranks.max(1));
        let counts: Vec<_> = (0..ranks).map(|rank| first(rank + 1) - first(rank)).collect();
        Self::of_counts(&counts)
    }

    /// Divides layers nearly equally. Each rank begins at a point of the coarsest level that allows it, so that fewer
    /// states are sent. No rank has more than an eighth above an equal share.
    ///
    /// # Errors
    /// `InvalidArgument` without ranks or without layers.
    pub fn aligned(grid: &Grid, ranks: u32) -> Result<Self> {
        let layers = grid.layers();
        if ranks == 0 {
            return Self::even(layers, ranks);
        }
        let share = layers.div_ceil(ranks);
        let counts_at = |points: &[u32]| {
            let nearest = |rank: u32| {
                let wanted = u64::from(layers) * u64::from(rank);
                points.iter().copied().min_by_key(|&point| (u64::from(point) * u64::from(ranks)).abs_diff(wanted))
            };
            let cuts: Option<Vec<_>> = (0..=ranks).map(nearest).collect();
            cuts.map(|cuts| cuts.windows(2).map(|ends| ends[1] - ends[0]).collect::<Vec<_>>())
        };
        let is_fair = |counts: &Vec<u32>| counts.iter().all(|&count| count > 0 && count <= share + share / 8);
        let fair = grid.levels().iter().rev().filter_map(|level| counts_at(&level.points)).find(is_fair);
        fair.map_or_else(|| Self::even(layers, ranks), |counts| Self::of_counts(&counts))
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Number of layers.
    pub fn layers(&self) -> u32 {
        self.owners.len() as u32
    }

    /// The owner of a layer.
    pub fn owner(&self, layer: u32) -> Rank {
        self.owners[layer as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grid::Layer;
    use crate::kind::Kind;

    fn counts(placement: &Placement) -> Vec<usize> {
        let of = |rank| (0..placement.layers()).filter(|&layer| placement.owner(layer) == Rank(rank)).count();
        (0..placement.ranks()).map(of).collect()
    }

    #[test]
    fn layers_are_divided_evenly() {
        assert_eq!(counts(&Placement::even(8, 2).unwrap()), [4, 4]);
        assert_eq!(counts(&Placement::even(8, 3).unwrap()), [3, 3, 2]);
        assert_eq!(counts(&Placement::even(2, 4).unwrap()), [1, 1, 0, 0]);
    }

    #[test]
    fn ranks_begin_at_coarse_points_where_that_is_fair() {
        let aligned = |layers: &[Layer], factors: &[u32], ranks| {
            counts(&Placement::aligned(&Grid::new(layers, factors).unwrap(), ranks).unwrap())
        };
        let ode = [Layer::of(Kind::Increment); 64];
        assert_eq!(aligned(&ode, &[4, 4], 4), [16; 4]);
        assert_eq!(aligned(&ode, &[4, 4], 3), [20, 24, 20], "at points of the middle level");
        assert_eq!(aligned(&ode[..8], &[4], 3), [3, 2, 3]);
        let mut opened = vec![Layer::of(Kind::Plain)];
        opened.extend(ode);
        assert_eq!(aligned(&opened, &[4, 4], 4), [17, 16, 16, 16]);
        assert_eq!(aligned(&ode[..2], &[2], 4), [1, 1, 0, 0]);
    }

    #[test]
    fn a_placement_without_layers_or_ranks_is_refused() {
        assert!(Placement::even(0, 3).is_err());
        assert!(Placement::of_counts(&[]).is_err());
        assert!(Placement::even(8, 0).unwrap_err().to_string().contains("0 ranks"));
    }
}

//! Who has which layer.
//!
//! Owns that ranks have layers in their order, each a run of its own, perhaps an empty one; and the usual ways to divide them. Read
//! [`Placement`] first.

use accl_types::{Error, Rank, Result};

/// The owner of each layer. A layer is with the rank that evaluates it, and so is the point after it; only states travel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    owners: Vec<Rank>,
    ranks: u32,
}

impl Placement {
    /// So many layers for each rank, in the order of ranks.
    ///
    /// # Errors
    /// `InvalidArgument` without ranks, or without layers.
    pub fn of_counts(counts: &[u32]) -> Result<Self> {
        let owners: Vec<_> =
            (0..).map(Rank).zip(counts).flat_map(|(rank, &count)| (0..count).map(move |_| rank)).collect();
        if owners.is_empty() {
            return Err(Error::invalid_argument("no rank has a layer; give at least one rank some"));
        }
        Ok(Self { owners, ranks: counts.len() as u32 })
    }

    /// As equal as they can be, the first ranks having one more.
    ///
    /// # Errors
    /// As [`Placement::of_counts`].
    pub fn even(layers: u32, ranks: u32) -> Result<Self> {
        Self::aligned(layers, ranks, 1)
    }

    /// As equal as they can be while each rank but the last begins at a multiple of `block` layers. Where there are fewer blocks than
    /// ranks the layers are divided as if there were none.
    ///
    /// # Errors
    /// As [`Placement::of_counts`].
    pub fn aligned(layers: u32, ranks: u32, block: u32) -> Result<Self> {
        let block = if layers / block.max(1) >= ranks { block.max(1) } else { 1 };
        let blocks = layers.div_ceil(block);
        let first = |rank: u32| {
            let (each, more) = (blocks / ranks.max(1), blocks % ranks.max(1));
            ((rank * each + rank.min(more)) * block).min(layers)
        };
        let counts: Vec<_> = (0..ranks).map(|rank| first(rank + 1) - first(rank)).collect();
        Self::of_counts(&counts)
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
    fn ranks_begin_at_coarse_points_where_there_are_enough() {
        assert_eq!(counts(&Placement::aligned(64, 3, 8).unwrap()), [24, 24, 16]);
        assert_eq!(counts(&Placement::aligned(20, 2, 8).unwrap()), [16, 4]);
        assert_eq!(counts(&Placement::aligned(8, 4, 4).unwrap()), [2, 2, 2, 2]);
    }

    #[test]
    fn nobody_has_nothing() {
        assert!(Placement::even(0, 3).is_err());
        assert!(Placement::of_counts(&[]).is_err());
    }
}

//! The kinds of calls that a group can issue, spelled as in torch.

use std::fmt;

/// The kind of a call. The discriminant is the code on the wire and across the C++ bridge.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Collective {
    /// Every rank gets the reduction of all contributions.
    AllReduce = 0,
    /// Rank r gets block r of the reduction.
    ReduceScatter = 1,
    /// Every rank gets the blocks of all ranks.
    AllGather = 2,
    /// Every rank gets the root's buffer.
    Broadcast = 3,
    /// The root gets the reduction of all contributions.
    Reduce = 4,
    /// The root gets the blocks of all ranks.
    Gather = 5,
    /// Rank r gets block r of the root's buffer.
    Scatter = 6,
    /// Rank r gets block r of every rank's buffer.
    AllToAll = 7,
    /// No rank leaves before all ranks have entered.
    Barrier = 8,
    /// Point-to-point: one rank sends.
    Send = 9,
    /// Point-to-point: one rank receives.
    Recv = 10,
}

impl Collective {
    /// Every kind, in code order.
    pub const ALL: &'static [Collective] = &[
        Collective::AllReduce,
        Collective::ReduceScatter,
        Collective::AllGather,
        Collective::Broadcast,
        Collective::Reduce,
        Collective::Gather,
        Collective::Scatter,
        Collective::AllToAll,
        Collective::Barrier,
        Collective::Send,
        Collective::Recv,
    ];

    /// The kind with this code, or `None`.
    pub fn from_code(code: u8) -> Option<Collective> {
        Self::ALL.get(code as usize).copied()
    }

    /// The kind's name in torch's spelling.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all_reduce",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::AllGather => "all_gather",
            Collective::Broadcast => "broadcast",
            Collective::Reduce => "reduce",
            Collective::Gather => "gather",
            Collective::Scatter => "scatter",
            Collective::AllToAll => "all_to_all",
            Collective::Barrier => "barrier",
            Collective::Send => "send",
            Collective::Recv => "recv",
        }
    }

    /// Whether one rank is the root.
    pub const fn is_rooted(self) -> bool {
        match self {
            Collective::Broadcast | Collective::Reduce | Collective::Gather | Collective::Scatter => true,
            Collective::AllReduce
            | Collective::ReduceScatter
            | Collective::AllGather
            | Collective::AllToAll
            | Collective::Barrier
            | Collective::Send
            | Collective::Recv => false,
        }
    }

    /// Whether contributions are combined by a [`crate::ReduceOp`].
    pub const fn reduces(self) -> bool {
        match self {
            Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce => true,
            Collective::AllGather
            | Collective::Broadcast
            | Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll
            | Collective::Barrier
            | Collective::Send
            | Collective::Recv => false,
        }
    }

    /// Whether the call is between two ranks only.
    pub const fn is_point_to_point(self) -> bool {
        matches!(self, Collective::Send | Collective::Recv)
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_leads_back_to_its_kind() {
        for (code, &kind) in Collective::ALL.iter().enumerate() {
            assert_eq!(kind as usize, code);
            assert_eq!(Collective::from_code(code as u8), Some(kind));
        }
    }
}

//! Number of parts that a call is cut into.
//!
//! Owns that rule. It must give the same number on all ranks, so it depends only on values that they agree on. Read
//! [`parts_of`] first.

use accl_types::{Collective, ReduceOp};

use accl_executor::call::CallDesc;

/// Calls with fewer bytes are never cut.
const LEAST_BYTES: u64 = 256 << 10;
/// Minimum predicted time in picoseconds of a call that is cut, if lanes have cores of their own. For shorter calls,
/// waking the threads would take longer than it saves.
const LEAST_CUT_PS: u64 = 75_000_000;
/// Minimum predicted time in picoseconds of a part in that case: each part has a fixed cost to begin and to end.
const LEAST_PART_PS: u64 = 12_500_000;
/// Minimum predicted time in picoseconds of a part if lanes share cores: parts then save no time, and threads take
/// turns.
const LEAST_SHARED_PART_PS: u64 = 1_000_000_000;

/// The size from which on a group's calls are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Least {
    /// Minimum predicted times, in picoseconds.
    Time {
        /// Least time of a call.
        call: u64,
        /// Least time of each of its parts.
        part: u64,
    },
    /// Minimum bytes of a part. For tests, which must not depend on predictions.
    Bytes(u64),
}

impl Least {
    /// Returns the limits of a group. `have_own_cores` says whether each lane of each rank has a core of its own on
    /// every host; it is the same on all ranks.
    pub fn of(have_own_cores: bool) -> Self {
        if have_own_cores {
            Self::Time { call: LEAST_CUT_PS, part: LEAST_PART_PS }
        } else {
            Self::Time { call: 0, part: LEAST_SHARED_PART_PS }
        }
    }
}

/// Returns the number of parts of a call; each part goes to one of the group's `lanes` lanes. `desc` is the call of one
/// rank in a group of `world` ranks.
pub fn parts_of(desc: &CallDesc, world: u32, lanes: u32, least: Least, predicted_ps: impl FnOnce() -> u64) -> u32 {
    if lanes <= 1 || !may_be_cut(desc) {
        return 1;
    }
    let bytes = desc.size_bytes(world);
    let most = match least {
        Least::Bytes(least) => bytes / least,
        Least::Time { .. } if bytes < LEAST_BYTES => 1,
        Least::Time { call, part } => Some(predicted_ps()).filter(|&ps| ps >= call).map_or(1, |ps| ps / part),
    };
    u32::try_from(most).unwrap_or(u32::MAX).clamp(1, lanes)
}

/// Returns whether other lanes can do parts of such a call. The location of its tensors does not matter, and other
/// ranks do not know it: the first part packs the tensors for all.
fn may_be_cut(desc: &CallDesc) -> bool {
    !desc.collective.is_point_to_point()
        && desc.collective != Collective::Barrier
        && desc.offload.is_none()
        // A call that scales in place must not be refused afterwards, and parts may be refused.
        && desc.op != ReduceOp::PremulSum
}

#[cfg(test)]
mod tests {
    use accl_executor::call::{Blocks, TensorDesc};
    use accl_types::{Dtype, Elems};

    use super::*;

    fn of_bytes(collective: Collective, bytes: u64) -> CallDesc {
        let mut desc = CallDesc::new(collective, Dtype::U8);
        desc.outputs = Blocks::of(TensorDesc::dense(std::ptr::null_mut(), Dtype::U8, Elems(bytes)));
        desc
    }

    #[test]
    fn a_call_has_as_many_parts_as_pay_and_no_more_than_lanes() {
        let large = of_bytes(Collective::AllReduce, 64 << 20);
        let parts = |least, ps| parts_of(&large, 2, 4, least, || ps);
        assert_eq!([0, LEAST_CUT_PS - 1].map(|ps| parts(Least::of(true), ps)), [1, 1]);
        assert_eq!([LEAST_CUT_PS, u64::MAX].map(|ps| parts(Least::of(true), ps)), [4, 4]);
        let many = |ps| parts_of(&large, 2, 16, Least::of(true), || ps);
        assert_eq!([6, 7, 400].map(|times| many(times * LEAST_PART_PS)), [6, 7, 16]);
        assert_eq!(parts(Least::of(false), 10 * LEAST_PART_PS), 1, "lanes that share cores gain nothing");
        assert_eq!(parts(Least::of(false), 2 * LEAST_SHARED_PART_PS), 2);
        assert_eq!(parts_of(&large, 2, 1, Least::of(true), || u64::MAX), 1);
        assert_eq!(parts(Least::Bytes(32 << 20), 0), 2);
    }

    #[test]
    fn small_calls_are_not_even_predicted() {
        let unasked = || unreachable!("its time is not asked for");
        for (collective, bytes) in [(Collective::AllReduce, LEAST_BYTES - 1), (Collective::AllToAll, 64 << 20)] {
            assert_eq!(parts_of(&of_bytes(collective, bytes), 2, 4, Least::of(true), unasked), 1);
        }
    }
}

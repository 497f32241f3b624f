//! Constants from what calls took.
//!
//! Owns the formulas, which undo those of `accl_schedule::cost` for the calls that are measured. Pure. Read [`fit`] first.

use accl_schedule::cost::{Link, Machine, Rates, SIZES};

/// No kernel switches faster; less means that the two ranks were not on one core after all.
const LEAST_SWITCH_PS: u64 = 300_000;

/// Picoseconds that calls between two ranks took, each with a core of its own unless said otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    pub(super) shm: LinkTimes,
    pub(super) tcp: LinkTimes,
    /// The smallest all_reduce over shared memory when both share a core.
    pub(super) on_one_core_ps: u64,
    /// Of a host's connection to the others, if known.
    pub(super) network_ps_per_kib: Option<u64>,
}

/// Of one link.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LinkTimes {
    /// An all_reduce of few bytes in one step.
    pub(super) one_step_ps: u64,
    /// The same in two steps.
    pub(super) two_steps_ps: u64,
    /// A reduce_scatter of few bytes in one step: of as many tensors as there are ranks.
    pub(super) in_blocks_ps: u64,
    /// A call of the root of many broadcasts of few bytes.
    pub(super) sending_ps: u64,
    /// An all_gather in place, one that copies, and a reduce_scatter of each of [`SIZES`].
    pub(super) moving_ps: Rates,
    pub(super) copying_ps: Rates,
    pub(super) reducing_ps: Rates,
}

/// Bytes of the frames that were measured.
pub(super) const SEGMENT: u64 = 64 << 10;

/// The constants with which the cost model predicts these times. What the times contradict is cut to what can be.
pub(super) fn fit(times: &Times) -> Machine {
    let defaults = Machine::default();
    let mut machine = defaults;
    let shm = Rated::of(&times.shm, &defaults.shm);
    machine.shm = shm.link;
    machine.block_ps = shm.block_ps;
    machine.reduced_ps_per_kib = shm.reduced;
    machine.copied_ps_per_kib = shm.copied;
    machine.tcp = Rated::of(&times.tcp, &defaults.tcp).link;
    if times.on_one_core_ps > 0 {
        // Both calls and all four ends of frames, one after the other, and a switch for each of the two ranks.
        let busy = 2 * machine.shm.call_ps + 4 * machine.shm.frame_ps + machine.shm.latency_ps;
        machine.switch_ps = (times.on_one_core_ps.saturating_sub(busy) / 2).max(LEAST_SWITCH_PS);
    }
    if let Some(sent) = times.network_ps_per_kib {
        machine.network.sent_ps_per_kib = sent;
    }
    machine.smoothed()
}

/// A link with what depends on bytes.
struct Rated {
    link: Link,
    block_ps: u64,
    reduced: Rates,
    copied: Rates,
}

impl Rated {
    fn of(times: &LinkTimes, defaults: &Link) -> Self {
        let block_ps = times.in_blocks_ps.saturating_sub(times.one_step_ps) / 2;
        let mut rated = Self { link: *defaults, block_ps, reduced: [0; SIZES.len()], copied: [0; SIZES.len()] };
        let link = &mut rated.link;
        // Two steps are one more than one: two ends of a frame and the way between.
        let step = times.two_steps_ps.saturating_sub(times.one_step_ps).max(times.one_step_ps / 8);
        link.call_ps = times.one_step_ps.saturating_sub(step);
        link.frame_ps = times.sending_ps.saturating_sub(link.call_ps).clamp(step / 8, step / 2);
        link.latency_ps = step.saturating_sub(2 * link.frame_ps);

        for (index, &size) in SIZES.iter().enumerate() {
            // A half goes each way, in so many frames, to and from a list of tensors.
            let half = size / 2;
            let fixed =
                link.call_ps + 2 * half.div_ceil(SEGMENT) * link.frame_ps + link.latency_ps + 2 * rated.block_ps;
            let per_kib = |ps: u64| ps.saturating_sub(fixed).saturating_mul(1024) / half;
            // Both ends alike: they take turns on the same memory.
            let moved = per_kib(times.moving_ps[index]) / 2;
            link.sent_ps_per_kib[index] = moved;
            link.received_ps_per_kib[index] = moved;
            // Differences of measurements err most: within what memory and cores can do.
            let reduced = per_kib(times.reducing_ps[index]).saturating_sub(2 * moved);
            rated.reduced[index] = reduced.clamp(moved / 8, moved);
            let copied = per_kib(times.copying_ps[index]).saturating_sub(2 * moved);
            rated.copied[index] = copied.clamp(moved / 2, 2 * moved);
        }
        rated
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use accl_schedule::cost::{CONSTANTS, Near, Placement, Prices};
    use accl_schedule::{ALGORITHMS, Fraction, Topology};
    use accl_types::Collective;

    /// What the model says that the measured calls take.
    fn predicted(machine: &Machine, near: Near) -> LinkTimes {
        let flat = Topology::flat(2);
        let prices = Prices::new(*machine, Placement { near, cores: 2, segment_bytes: SEGMENT }, &flat);
        let cost = |collective, name| {
            let row = ALGORITHMS.iter().find(|row| row.collective == collective && row.name == name).unwrap();
            (row.cost)(2, &flat)
        };
        let time = |collective, name, bytes| prices.time_ps(collective, &cost(collective, name), bytes);
        let moving = cost(Collective::AllGather, "direct").copies(Fraction::default());
        let link = if near == Near::Shm { &machine.shm } else { &machine.tcp };
        LinkTimes {
            one_step_ps: time(Collective::AllReduce, "recursive_doubling", 0),
            two_steps_ps: time(Collective::AllReduce, "direct_two_phase", 0),
            in_blocks_ps: time(Collective::ReduceScatter, "direct", 0),
            sending_ps: link.call_ps + link.frame_ps,
            moving_ps: SIZES.map(|size| prices.time_ps(Collective::AllGather, &moving, size)),
            copying_ps: SIZES.map(|size| time(Collective::AllGather, "direct", size)),
            reducing_ps: SIZES.map(|size| time(Collective::ReduceScatter, "direct", size)),
        }
    }

    #[test]
    fn constants_are_found_from_the_times_that_they_predict() {
        let mut machine = Machine { switch_ps: 4_000_000, block_ps: 90_000, ..Machine::default() };
        for link in [&mut machine.shm, &mut machine.tcp] {
            link.received_ps_per_kib = link.sent_ps_per_kib;
        }
        let busy = 2 * machine.shm.call_ps + 4 * machine.shm.frame_ps + machine.shm.latency_ps;
        let times = Times {
            shm: predicted(&machine, Near::Shm),
            tcp: predicted(&machine, Near::Tcp),
            on_one_core_ps: busy + 2 * machine.switch_ps,
            network_ps_per_kib: Some(7),
        };
        machine.network.sent_ps_per_kib = 7;
        let found = fit(&times);
        for constant in CONSTANTS {
            for (found, wanted) in found.values(constant).into_iter().zip(machine.values(constant)) {
                // Divisions round.
                assert!(found.abs_diff(wanted) <= 2 + wanted / 1000, "{}: {found}, {wanted}", constant.name);
            }
        }
    }

    #[test]
    fn times_that_contradict_each_other_give_constants_all_the_same() {
        let mut times = Times::default();
        assert_eq!(fit(&times).shm.call_ps, 0);
        times.shm.one_step_ps = 1_000_000;
        times.shm.moving_ps = [u64::MAX; SIZES.len()];
        times.shm.reducing_ps = [u64::MAX / 2; SIZES.len()];
        assert!(!fit(&times).to_string().is_empty());
    }
}

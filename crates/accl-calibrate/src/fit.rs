//! Computes constants from measured call times.
//!
//! Owns the formulas, which invert the formulas of `accl_schedule::cost` for the measured calls, and the rule for how
//! often to repeat a measurement. Does no input or output. Read [`fit`] first.

use accl_schedule::cost::{Link, Machine, Rates, SIZES};
use accl_types::Result;

/// Shortest plausible time of a context switch, in picoseconds. No kernel switches faster: a shorter time means that
/// the two ranks did not share a core.
const LEAST_SWITCH_PS: u64 = 300_000;

/// Shortest plausible time of a step, in picoseconds. It is large enough that its smallest fractions are still above 0.
const LEAST_STEP_PS: u64 = 2_000;

/// A call's own cost is at least 1/32 of a call of one step. A frame's latency is at least 1/32 of a step. Both bounds
/// are below the values of every machine whose times determined them.
const LEAST_PART: u64 = 32;

/// Times in picoseconds of calls between two ranks. Each rank has its own core unless stated otherwise.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    pub(super) shm: LinkTimes,
    pub(super) tcp: LinkTimes,
    /// The smallest all_reduce over shared memory while both ranks share a core.
    pub(super) on_one_core_ps: u64,
    /// Time per KiB on the host's connection to other hosts, or `None` if unknown.
    pub(super) network_ps_per_kib: Option<u64>,
}

/// Times of one kind of link.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LinkTimes {
    /// An all_reduce of few bytes in one step.
    pub(super) one_step_ps: u64,
    /// An all_reduce of few bytes in two steps.
    pub(super) two_steps_ps: u64,
    /// A reduce_scatter of few bytes in one step, whose input is a list of one tensor per rank.
    pub(super) in_blocks_ps: u64,
    /// One call on the root of many consecutive broadcasts of few bytes.
    pub(super) sending_ps: u64,
    /// For each size in [`SIZES`]: an all_gather in place, an all_gather that copies, and a reduce_scatter.
    pub(super) moving_ps: Rates,
    pub(super) copying_ps: Rates,
    pub(super) reducing_ps: Rates,
}

impl Times {
    /// The shorter of each pair of times, because disturbances only make a measurement longer.
    fn least(&self, other: &Times) -> Times {
        Times {
            shm: self.shm.least(&other.shm),
            tcp: self.tcp.least(&other.tcp),
            on_one_core_ps: self.on_one_core_ps.min(other.on_one_core_ps),
            network_ps_per_kib: self.network_ps_per_kib.or(other.network_ps_per_kib),
        }
    }
}

impl LinkTimes {
    fn least(&self, other: &LinkTimes) -> LinkTimes {
        let rates = |a: &Rates, b: &Rates| std::array::from_fn(|index| a[index].min(b[index]));
        LinkTimes {
            one_step_ps: self.one_step_ps.min(other.one_step_ps),
            two_steps_ps: self.two_steps_ps.min(other.two_steps_ps),
            in_blocks_ps: self.in_blocks_ps.min(other.in_blocks_ps),
            sending_ps: self.sending_ps.min(other.sending_ps),
            moving_ps: rates(&self.moving_ps, &other.moving_ps),
            copying_ps: rates(&self.copying_ps, &other.copying_ps),
            reducing_ps: rates(&self.reducing_ps, &other.reducing_ps),
        }
    }
}

/// Maximum bytes of a measured frame.
pub(super) const SEGMENT: u64 = 64 << 10;

/// The constants computed from times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Fitted {
    /// The constants; none of them is [impossible](Machine::impossible).
    pub(super) machine: Machine,
    /// The names of constants that the times do not determine: they come out below what any machine has, or above what
    /// the rest of the call allows. Each takes the nearest possible value, so a call of one step still takes its
    /// measured time.
    pub(super) at_bounds: Vec<&'static str>,
}

/// Measures until the times contradict no constant, at most `attempts` times. If all measurements contradict some
/// constant, the shortest of each time over all measurements is used.
///
/// # Errors
/// The error of the first measurement. A later measurement that fails only ends the repetition.
pub(super) fn settle(attempts: u32, mut measure: impl FnMut() -> Result<Times>) -> Result<Fitted> {
    let mut least = measure()?;
    let mut fitted = fit(&least);
    for _ in 1..attempts {
        if fitted.at_bounds.is_empty() {
            break;
        }
        let Ok(again) = measure() else { break };
        least = least.least(&again);
        let alone = fit(&again);
        fitted = if alone.at_bounds.is_empty() { alone } else { fit(&least) };
    }
    Ok(fitted)
}

/// The constants with which the cost model predicts these times. A constant that the times contradict is limited to
/// possible values.
pub(super) fn fit(times: &Times) -> Fitted {
    let defaults = Machine::default();
    let mut machine = defaults;
    let mut at_bounds = Vec::new();
    let shm = Rated::of(&times.shm, &defaults, &SHM, &mut at_bounds);
    machine.shm = shm.link;
    machine.block_ps = shm.block_ps;
    machine.reduced_ps_per_kib = shm.reduced;
    machine.copied_ps_per_kib = shm.copied;
    machine.tcp = Rated::of(&times.tcp, &defaults, &TCP, &mut at_bounds).link;
    if times.on_one_core_ps > 0 {
        // Both calls and all four frame ends run one after the other, and each of the two ranks needs one context
        // switch.
        let busy = 2 * machine.shm.call_ps + 4 * machine.shm.frame_ps + machine.shm.latency_ps;
        let switch_ps = times.on_one_core_ps.saturating_sub(busy) / 2;
        machine.switch_ps = within(switch_ps, (LEAST_SWITCH_PS, u64::MAX), &["switch_ps"], &[], &mut at_bounds);
    }
    if let Some(sent) = times.network_ps_per_kib {
        // Above eight terabits per second, a KiB takes less than a picosecond.
        machine.network.sent_ps_per_kib = sent.max(1);
    }
    Fitted { machine: machine.smoothed(), at_bounds }
}

/// Limits a value to bounds. Adds the names `below` or `above` to `at_bounds` if the value was too small or too large.
fn within(
    value: u64,
    (least, most): (u64, u64),
    below: &[&'static str],
    above: &[&'static str],
    at_bounds: &mut Vec<&'static str>,
) -> u64 {
    let named = if value < least {
        below
    } else if value > most {
        above
    } else {
        &[]
    };
    note(at_bounds, named);
    value.max(least).min(most.max(least))
}

/// Adds each name that is not yet in the list.
fn note(at_bounds: &mut Vec<&'static str>, names: &[&'static str]) {
    let new: Vec<_> = names.iter().filter(|name| !at_bounds.contains(name)).collect();
    at_bounds.extend(new);
}

/// The names of a link's constants, and access to the link in a machine.
struct Named {
    call: &'static str,
    frame: &'static str,
    latency: &'static str,
    sent: &'static str,
    received: &'static str,
    of: fn(&Machine) -> &Link,
}

const SHM: Named = Named {
    call: "shm_call_ps",
    frame: "shm_frame_ps",
    latency: "shm_latency_ps",
    sent: "shm_sent_ps_per_kib",
    received: "shm_received_ps_per_kib",
    of: |machine| &machine.shm,
};

const TCP: Named = Named {
    call: "tcp_call_ps",
    frame: "tcp_frame_ps",
    latency: "tcp_latency_ps",
    sent: "tcp_sent_ps_per_kib",
    received: "tcp_received_ps_per_kib",
    of: |machine| &machine.tcp,
};

/// A link together with the constants that depend on bytes.
struct Rated {
    link: Link,
    block_ps: u64,
    reduced: Rates,
    copied: Rates,
}

impl Rated {
    fn of(times: &LinkTimes, defaults: &Machine, named: &Named, at_bounds: &mut Vec<&'static str>) -> Self {
        let defaults = (named.of)(defaults);
        let block_ps = times.in_blocks_ps.saturating_sub(times.one_step_ps) / 2;
        let mut rated = Self { link: *defaults, block_ps, reduced: [0; SIZES.len()], copied: [0; SIZES.len()] };
        let link = &mut rated.link;
        // Two steps take one step more than one step: two frame ends and the latency between them. The call itself, the
        // step and each part of the step take some time, however little of it was measured.
        let one_step = times.one_step_ps.max(LEAST_STEP_PS);
        let step = times.two_steps_ps.saturating_sub(one_step);
        let of_step = [named.frame, named.latency];
        let step = within(step, (one_step / 8, one_step - one_step / LEAST_PART), &of_step, &[named.call], at_bounds);
        link.call_ps = one_step - step;
        let frame = times.sending_ps.saturating_sub(link.call_ps);
        link.frame_ps =
            within(frame, (step / 8, (step - step / LEAST_PART) / 2), &[named.frame], &[named.latency], at_bounds);
        link.latency_ps = step - 2 * link.frame_ps;

        for (index, &size) in SIZES.iter().enumerate() {
            // Half of the bytes go in each direction, in several frames, to and from a list of tensors.
            let half = size / 2;
            let fixed =
                link.call_ps + 2 * half.div_ceil(SEGMENT) * link.frame_ps + link.latency_ps + 2 * rated.block_ps;
            let per_kib = |ps: u64| ps.saturating_sub(fixed).saturating_mul(1024) / half;
            // The cost is split equally between both ends, because they take turns on the same memory.
            let moved = match per_kib(times.moving_ps[index]) / 2 {
                0 => {
                    note(at_bounds, &[named.sent, named.received]);
                    defaults.sent_ps_per_kib[index]
                }
                moved => moved,
            };
            link.sent_ps_per_kib[index] = moved;
            link.received_ps_per_kib[index] = moved;
            // Differences of measurements have the largest errors, so they are limited to what memory and cores can do.
            let reduced = per_kib(times.reducing_ps[index]).saturating_sub(2 * moved);
            rated.reduced[index] = reduced.clamp(moved / 8, moved);
            let copied = per_kib(times.copying_ps[index]).saturating_sub(2 * moved);
            rated.copied[index] = copied.clamp(moved.div_ceil(2), 2 * moved);
        }
        rated
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use accl_schedule::cost::{CONSTANTS, IntraNode, Placement, Prices};
    use accl_schedule::{ALGORITHMS, Fraction, Topology};
    use accl_types::{Bytes, Collective, Error};

    /// The times that the model predicts for the measured calls.
    fn predicted(machine: &Machine, intra_node: IntraNode) -> LinkTimes {
        let flat = Topology::flat(2);
        let prices = Prices::new(*machine, Placement { intra_node, cores: 2, segment_bytes: SEGMENT }, &flat);
        let cost = |collective, name| {
            let row = ALGORITHMS.iter().find(|row| row.collective == collective && row.name == name).unwrap();
            (row.cost)(2, &flat)
        };
        let time = |collective, name, bytes| prices.time_ps(collective, &cost(collective, name), Bytes(bytes));
        let moving = cost(Collective::AllGather, "direct").copies(Fraction::default());
        let link = if intra_node == IntraNode::Shm { &machine.shm } else { &machine.tcp };
        LinkTimes {
            one_step_ps: time(Collective::AllReduce, "recursive_doubling", 0),
            two_steps_ps: time(Collective::AllReduce, "direct_two_phase", 0),
            in_blocks_ps: time(Collective::ReduceScatter, "direct", 0),
            sending_ps: link.call_ps + link.frame_ps,
            moving_ps: SIZES.map(|size| prices.time_ps(Collective::AllGather, &moving, Bytes(size))),
            copying_ps: SIZES.map(|size| time(Collective::AllGather, "direct", size)),
            reducing_ps: SIZES.map(|size| time(Collective::ReduceScatter, "direct", size)),
        }
    }

    /// A machine whose links are equally fast in both directions, as the fit assumes, and the times measured on it.
    fn measured() -> (Machine, Times) {
        let mut machine = Machine { switch_ps: 4_000_000, block_ps: 90_000, ..Machine::default() };
        for link in [&mut machine.shm, &mut machine.tcp] {
            link.received_ps_per_kib = link.sent_ps_per_kib;
        }
        machine.network.sent_ps_per_kib = 7;
        let busy = 2 * machine.shm.call_ps + 4 * machine.shm.frame_ps + machine.shm.latency_ps;
        let times = Times {
            shm: predicted(&machine, IntraNode::Shm),
            tcp: predicted(&machine, IntraNode::Tcp),
            on_one_core_ps: busy + 2 * machine.switch_ps,
            network_ps_per_kib: Some(7),
        };
        (machine, times)
    }

    /// Times seen on a quiet Zen 4: the second step took longer than a whole call of one step, and sending over sockets
    /// took half a step.
    fn quiet() -> Times {
        let (_, mut times) = measured();
        times.shm.one_step_ps = 746_600;
        times.shm.two_steps_ps = 1_500_000;
        times.shm.sending_ps = 182_025;
        times.tcp.one_step_ps = 9_209_734;
        times.tcp.two_steps_ps = 19_000_000;
        times.tcp.sending_ps = 5_100_000;
        times
    }

    #[test]
    fn constants_are_found_from_the_times_that_they_predict() {
        let (machine, times) = measured();
        let Fitted { machine: found, at_bounds } = fit(&times);
        assert_eq!(at_bounds, Vec::<&str>::new());
        for constant in CONSTANTS {
            for (found, wanted) in found.values(constant).into_iter().zip(machine.values(constant)) {
                // Divisions round, hence the tolerance.
                assert!(found.abs_diff(wanted) <= 2 + wanted / 1000, "{}: {found}, {wanted}", constant.name);
            }
        }
    }

    #[test]
    fn times_that_contradict_each_other_give_constants_all_the_same() {
        let mut times = Times::default();
        assert_eq!(fit(&times).machine.impossible(), Vec::<&str>::new());
        times.shm.one_step_ps = 1_000_000;
        times.shm.moving_ps = [u64::MAX; SIZES.len()];
        times.shm.reducing_ps = [u64::MAX / 2; SIZES.len()];
        assert_eq!(fit(&times).machine.impossible(), Vec::<&str>::new());
        // All orders of the four times, including equal ones.
        for seed in 0..4_u64.pow(4) {
            let ps = |place: u32| 1_000_000 * (seed / 4_u64.pow(place) % 4);
            let (one_step_ps, two_steps_ps, sending_ps, in_blocks_ps) = (ps(0), ps(1), ps(2), ps(3));
            let rates = SIZES.map(|size| size * ps(3) / 1024);
            times.shm =
                LinkTimes { one_step_ps, two_steps_ps, sending_ps, in_blocks_ps, moving_ps: rates, ..times.shm };
            times.tcp = LinkTimes { copying_ps: rates, ..times.shm };
            times.on_one_core_ps = ps(2);
            assert_eq!(fit(&times).machine.impossible(), Vec::<&str>::new(), "{times:?}");
        }
    }

    #[test]
    fn no_constant_is_nothing_where_a_step_takes_longer_than_a_call() {
        let Fitted { machine, at_bounds } = fit(&quiet());
        assert_eq!(at_bounds, ["shm_call_ps", "tcp_call_ps", "tcp_latency_ps"]);
        assert_eq!(machine.impossible(), Vec::<&str>::new());
        // A call of one step takes its measured time, whatever its parts are.
        for (link, times) in [(machine.shm, quiet().shm), (machine.tcp, quiet().tcp)] {
            assert_eq!(link.call_ps + 2 * link.frame_ps + link.latency_ps, times.one_step_ps);
        }
    }

    #[test]
    fn every_bound_that_is_met_is_named() {
        let named = |change: fn(&mut Times)| {
            let (_, mut times) = measured();
            change(&mut times);
            fit(&times).at_bounds
        };
        assert_eq!(named(|times| times.shm.two_steps_ps = 0), ["shm_frame_ps", "shm_latency_ps"]);
        // The call takes nearly nothing of the measured sending time, so the whole sending time goes to the frame.
        assert_eq!(named(|times| times.shm.two_steps_ps *= 3), ["shm_call_ps", "shm_latency_ps"]);
        assert_eq!(named(|times| times.tcp.sending_ps = 0), ["tcp_frame_ps"]);
        assert_eq!(named(|times| times.tcp.sending_ps *= 4), ["tcp_latency_ps"]);
        assert_eq!(named(|times| times.on_one_core_ps = 1), ["switch_ps"]);
        let rates = ["shm_sent_ps_per_kib", "shm_received_ps_per_kib"];
        assert_eq!(named(|times| times.shm.moving_ps = [0; SIZES.len()]), rates);
    }

    /// Runs `settle` on these measurements in turn. Returns the result and the number of unused measurements.
    fn settled(attempts: u32, times: &[Result<Times>]) -> (Result<Fitted>, usize) {
        let mut left = times.iter().cloned();
        let found = settle(attempts, || left.next().expect("measured too often"));
        (found, left.len())
    }

    #[test]
    fn a_degenerate_measurement_is_made_again() {
        let (_, sane) = measured();
        assert_eq!(settled(3, &[Ok(sane), Ok(quiet())]), (Ok(fit(&sane)), 1));
        assert_eq!(settled(3, &[Ok(quiet()), Ok(sane), Ok(quiet())]), (Ok(fit(&sane)), 1));
        assert_eq!(settled(3, &[Ok(quiet()), Ok(quiet()), Ok(sane)]), (Ok(fit(&sane)), 0));
    }

    #[test]
    fn what_stays_degenerate_is_measured_so_often_and_named() {
        let (found, left) = settled(3, &[Ok(quiet()), Ok(quiet()), Ok(quiet()), Ok(measured().1)]);
        assert_eq!((found, left), (Ok(fit(&quiet())), 1));
        assert_eq!(settled(1, &[Ok(quiet())]), (Ok(fit(&quiet())), 0));
        // With several measurements, the shortest of each time counts.
        let mut slower = quiet();
        slower.shm.one_step_ps *= 2;
        slower.tcp.moving_ps = slower.tcp.moving_ps.map(|ps| 3 * ps);
        assert_eq!(settled(2, &[Ok(slower), Ok(quiet())]), (Ok(fit(&quiet())), 0));
    }

    #[test]
    fn a_measurement_that_fails_ends_it_and_only_the_first_is_an_error() {
        let busy = Error::timeout("it is too busy");
        assert_eq!(settled(3, &[Err(busy.clone()), Ok(quiet())]), (Err(busy.clone()), 1));
        assert_eq!(settled(3, &[Ok(quiet()), Err(busy), Ok(quiet())]), (Ok(fit(&quiet())), 1));
    }
}

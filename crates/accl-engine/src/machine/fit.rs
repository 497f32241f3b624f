//! Constants from what calls took.
//!
//! Owns the formulas, which undo those of `accl_schedule::cost` for the calls that are measured. Pure. Read [`fit`] first.

use accl_schedule::cost::{Link, Machine, Rates, SIZES};

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
    /// A call of the root of many broadcasts of few bytes.
    pub(super) sending_ps: u64,
    /// All_reduce in two phases, reduce_scatter, all_gather and broadcast of each of [`SIZES`].
    pub(super) all_reduce_ps: Rates,
    pub(super) reduce_scatter_ps: Rates,
    pub(super) all_gather_ps: Rates,
    pub(super) broadcast_ps: Rates,
}

/// Bytes of the frames that were measured.
pub(super) const SEGMENT: u64 = 64 << 10;

/// The constants with which the cost model predicts these times. What the times contradict is cut to what can be.
pub(super) fn fit(times: &Times) -> Machine {
    let defaults = Machine::default();
    let mut machine = defaults;
    let shm = Rated::of(&times.shm, &defaults.shm);
    machine.shm = shm.link;
    machine.reduced_ps_per_kib = shm.reduced;
    machine.copied_ps_per_kib = shm.copied;
    machine.tcp = Rated::of(&times.tcp, &defaults.tcp).link;
    if times.on_one_core_ps > 0 {
        // Both calls and all four ends of frames, one after the other, and a switch for each of the two ranks.
        let busy = 2 * machine.shm.call_ps + 4 * machine.shm.frame_ps + machine.shm.latency_ps;
        machine.switch_ps = times.on_one_core_ps.saturating_sub(busy) / 2;
    }
    if let Some(sent) = times.network_ps_per_kib {
        machine.network.sent_ps_per_kib = sent;
    }
    machine.smoothed()
}

/// A link with what depends on bytes.
struct Rated {
    link: Link,
    reduced: Rates,
    copied: Rates,
}

impl Rated {
    fn of(times: &LinkTimes, defaults: &Link) -> Self {
        let mut rated = Self { link: *defaults, reduced: [0; SIZES.len()], copied: [0; SIZES.len()] };
        let link = &mut rated.link;
        // Two steps are one more than one: two ends of a frame and the way between.
        let step = times.two_steps_ps.saturating_sub(times.one_step_ps).max(times.one_step_ps / 8);
        link.call_ps = times.one_step_ps.saturating_sub(step);
        link.frame_ps = times.sending_ps.saturating_sub(link.call_ps).clamp(step / 8, step / 2);
        link.latency_ps = step.saturating_sub(2 * link.frame_ps);

        let mut near = None;
        for (index, &size) in SIZES.iter().enumerate() {
            // A half goes each way, in so many frames.
            let half = size / 2;
            let frames = 2 * half.div_ceil(SEGMENT) * link.frame_ps + link.latency_ps;
            let per_kib = |ps: u64| ps.saturating_mul(1024) / half;
            let gathered = per_kib(times.all_reduce_ps[index].saturating_sub(times.reduce_scatter_ps[index] + frames));
            let scattered = per_kib(times.reduce_scatter_ps[index].saturating_sub(link.call_ps + frames));
            let copied = per_kib(times.all_gather_ps[index].saturating_sub(link.call_ps + frames));
            // The second phase sends what it has just reduced, which is as near as bytes of the second size.
            let relayed = near.unwrap_or(gathered / 2);
            let received = gathered.saturating_sub(relayed).max(gathered / 4);
            let sent = if near.is_none() {
                gathered - received
            } else {
                // A broadcast takes as long as the slower end, and the other end of a segment.
                let frames = (size.div_ceil(SEGMENT) + 1) * link.frame_ps + link.call_ps + link.latency_ps;
                let frames = frames + (relayed + received) / 2 * (SEGMENT >> 10);
                let slower = times.broadcast_ps[index].saturating_sub(frames).saturating_mul(1024) / size;
                slower.clamp(relayed, scattered.saturating_sub(received).max(relayed))
            };
            if index == 1 {
                near = Some(sent);
            }
            link.sent_ps_per_kib[index] = sent;
            link.received_ps_per_kib[index] = received;
            rated.reduced[index] = scattered.saturating_sub(sent + received);
            rated.copied[index] = copied.saturating_sub(sent + received).max(received / 4);
        }
        rated
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use accl_schedule::cost::{Near, Placement, Prices};
    use accl_schedule::{ALGORITHMS, Topology};
    use accl_types::Collective;

    /// What the model says that the measured calls take.
    fn predicted(machine: &Machine, near: Near) -> LinkTimes {
        let flat = Topology::flat(2);
        let prices = Prices::new(*machine, Placement { near, cores: 2, segment_bytes: SEGMENT }, &flat);
        let time = |collective, name, bytes| {
            let row = ALGORITHMS.iter().find(|row| row.collective == collective && row.name == name).unwrap();
            prices.time_ps(&(row.cost)(2, &flat), bytes)
        };
        let link = if near == Near::Shm { &machine.shm } else { &machine.tcp };
        LinkTimes {
            one_step_ps: time(Collective::AllReduce, "recursive_doubling", 0),
            two_steps_ps: time(Collective::AllReduce, "direct_two_phase", 0),
            sending_ps: link.call_ps + link.frame_ps,
            all_reduce_ps: SIZES.map(|size| time(Collective::AllReduce, "direct_two_phase", size)),
            reduce_scatter_ps: SIZES.map(|size| time(Collective::ReduceScatter, "direct", size)),
            all_gather_ps: SIZES.map(|size| time(Collective::AllGather, "direct", size)),
            broadcast_ps: SIZES.map(|size| time(Collective::Broadcast, "flat", size)),
        }
    }

    #[test]
    fn constants_are_found_from_the_times_that_they_predict() {
        let machine = Machine { switch_ps: 4_000_000, ..Machine::default() };
        let busy = 2 * machine.shm.call_ps + 4 * machine.shm.frame_ps + machine.shm.latency_ps;
        let times = Times {
            shm: predicted(&machine, Near::Shm),
            tcp: predicted(&machine, Near::Tcp),
            on_one_core_ps: busy + 2 * machine.switch_ps,
            network_ps_per_kib: Some(7),
        };
        let found = fit(&times);
        assert_eq!((found.switch_ps, found.network.sent_ps_per_kib), (4_000_000, 7));
        for (name, found, wanted) in [("shm", found.shm, machine.shm), ("tcp", found.tcp, machine.tcp)] {
            let fixed = |link: Link| (link.call_ps, link.frame_ps, link.latency_ps);
            assert_eq!(fixed(found), fixed(wanted), "{name}");
        }
        // What it predicts then is what was measured; some constants may be told apart no better than that.
        let near = |a: u64, b: u64| a.abs_diff(b) <= b / 20;
        for (times, again) in [(times.shm, predicted(&found, Near::Shm)), (times.tcp, predicted(&found, Near::Tcp))] {
            for (index, size) in SIZES.iter().enumerate() {
                let pairs = [
                    (again.all_reduce_ps[index], times.all_reduce_ps[index]),
                    (again.reduce_scatter_ps[index], times.reduce_scatter_ps[index]),
                    (again.broadcast_ps[index], times.broadcast_ps[index]),
                ];
                assert!(pairs.iter().all(|&(again, was)| near(again, was)), "{size} bytes: {pairs:?}");
            }
        }
    }

    #[test]
    fn times_that_contradict_each_other_give_constants_all_the_same() {
        let mut times = Times::default();
        assert_eq!(fit(&times).shm.call_ps, 0);
        times.shm.one_step_ps = 1_000_000;
        times.shm.all_gather_ps = [u64::MAX; SIZES.len()];
        times.shm.reduce_scatter_ps = [u64::MAX / 2; SIZES.len()];
        let text = fit(&times).to_string();
        assert!(!text.is_empty());
    }
}

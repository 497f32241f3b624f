//! Measures calls of two engines in this process, each on its own thread and core.
//!
//! Uses the engine's own transports, executor and kernels. Owns which calls are measured and how often. A measurement
//! takes about a tenth of a second on a quiet machine and is given up on a busy one. Read [`measure`] first.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use accl_engine::{
    Blocks, CallDesc, Engine, Group, GroupRole, GroupSpec, MemoryStore, Submitted, TensorDesc, Waited, block_signals,
};
use accl_schedule::cost::{Machine, SIZES};
use accl_types::config::{Calibration, Config};
use accl_types::{Collective, Dtype, Elems, Error, Rank, Result};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::fit::{LinkTimes, SEGMENT, Times};

/// Timeout of a call, in case it hangs for a reason other than a busy machine.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of calls that have only fixed costs: for one step and for two steps.
const FEW_BYTES: (u64, u64) = (4, 64);
/// For shared memory and for loopback sockets: the number of measured [`SIZES`], and the bytes of one batch of calls.
/// Over sockets the largest sizes are not measured, because their time per byte is constant.
const SHM: (usize, u64) = (SIZES.len(), 1 << 20);
const TCP: (usize, u64) = (3, 128 << 10);

/// The cores of the two ranks; `None` if the system does not report them.
type Cores = (Option<usize>, Option<usize>);

/// Measures on this machine the calls that [`fit`](super::fit::fit) needs.
///
/// # Errors
/// If a group of two threads cannot be created, or the machine is too busy.
pub(super) fn measure(until: Instant) -> Result<Times> {
    // A separate thread keeps the caller's thread unpinned. Also, a caller that is pinned to one core may still use the
    // other cores here.
    let measuring = || {
        let cores = cores();
        let apart = (cores.first().copied(), cores.get(1).or(cores.first()).copied());
        let mut times = Times { network_ps_per_kib: network_ps_per_kib(), ..Times::default() };
        times.shm = link_times("shm", apart, SHM, until)?;
        times.tcp = link_times("tcp", apart, TCP, until)?;
        let (one_core, _) = apart;
        let together = TimedCalls::small(What::AllReduce, FEW_BYTES.0, 20);
        times.on_one_core_ps = run("shm", (one_core, one_core), &[together], until)?[0];
        Ok(times)
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("accl-calibrate".into()).spawn_scoped(scope, measuring);
        let thread =
            thread.map_err(|error| Error::exhausted(format!("cannot start a thread for the calibration: {error}")))?;
        thread.join().unwrap_or_else(|_| Err(Error::internal("the calibration panicked")))
    })
}

/// The cores that a thread of this process may run on, including those it is currently pinned away from.
fn cores() -> Vec<usize> {
    let mut all = CpuSet::new();
    (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
    // If the kernel refuses the full set, the current set remains.
    let own = sched_getaffinity(None);
    let _ = sched_setaffinity(None, &all);
    let allowed = sched_getaffinity(None);
    let Ok(allowed) = allowed else { return Vec::new() };
    let mut cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect();
    // The process's current cores come first, because other processes may be busy on the rest.
    if let Ok(own) = own {
        cores.sort_by_key(|&cpu| (!own.is_set(cpu), cpu));
    }
    cores
}

/// The time per KiB on the host's fastest network interface that reports its speed.
fn network_ps_per_kib() -> Option<u64> {
    let interfaces = std::fs::read_dir("/sys/class/net").ok()?;
    let speed = |path: std::path::PathBuf| std::fs::read_to_string(path.join("speed")).ok()?.trim().parse::<u64>().ok();
    let fastest =
        interfaces.flatten().filter_map(|entry| speed(entry.path())).filter(|&megabits| megabits > 0).max()?;
    // A KiB has 8192 bits, and 1 megabit per second is 1 bit per 1,000,000 picoseconds.
    Some(8_192_000_000 / fastest)
}

/// The measured kind of call.
#[derive(Clone, Copy, PartialEq, Eq)]
enum What {
    AllReduce,
    ReduceScatter,
    AllGather,
    AllGatherInPlace,
    Broadcast,
}

/// Calls that are issued one after the other and timed together. Of several batches, the time at the lower quartile is
/// used, because most slower batches were disturbed.
#[derive(Clone, Copy)]
struct TimedCalls {
    what: What,
    bytes: u64,
    calls: u32,
    batches: usize,
}

impl TimedCalls {
    fn small(what: What, bytes: u64, calls: u32) -> Self {
        Self { what, bytes, calls, batches: 7 }
    }

    /// Chooses the number of calls so that batches of all sizes take similar time: about `together` bytes per batch.
    fn of(what: What, bytes: u64, together: u64) -> Self {
        let calls = (together / bytes).clamp(1, 32) as u32;
        let batches = (16 * together / bytes).clamp(1, 7) as usize;
        Self { what, bytes, calls, batches }
    }
}

fn link_times(transport: &str, cores: Cores, (sizes, together): (usize, u64), until: Instant) -> Result<LinkTimes> {
    let few = if together == SHM.1 { 40 } else { 15 };
    let mut timed_calls = vec![
        TimedCalls::small(What::AllReduce, FEW_BYTES.0, few),
        TimedCalls::small(What::AllReduce, FEW_BYTES.1, few),
        TimedCalls::small(What::ReduceScatter, 2 * FEW_BYTES.0, few),
        TimedCalls::small(What::Broadcast, FEW_BYTES.0, few),
    ];
    let of_size = |&bytes: &u64| {
        [What::AllGatherInPlace, What::AllGather, What::ReduceScatter].map(|what| TimedCalls::of(what, bytes, together))
    };
    let measured = &SIZES[..sizes];
    timed_calls.extend(measured.iter().flat_map(of_size));
    let took = run(transport, cores, &timed_calls, until)?;
    let (fixed, rates) = took.split_at(4);
    let of = |kind: usize| {
        let time = |index: usize| {
            // Sizes above the largest measured one are extrapolated in proportion to their bytes.
            let last = index.min(sizes - 1);
            rates[3 * last + kind].saturating_mul(SIZES[index] / SIZES[last])
        };
        std::array::from_fn(time)
    };
    Ok(LinkTimes {
        one_step_ps: fixed[0],
        two_steps_ps: fixed[1],
        in_blocks_ps: fixed[2],
        sending_ps: fixed[3],
        moving_ps: of(0),
        copying_ps: of(1),
        reducing_ps: of(2),
    })
}

/// Runs all timed calls between two ranks on these cores. Returns the picoseconds of one call for each entry.
fn run(transport: &str, cores: Cores, timed_calls: &[TimedCalls], until: Instant) -> Result<Vec<u64>> {
    let store = MemoryStore::default();
    let too_long = AtomicBool::new(false);
    let calibration_rank =
        |rank, core| CalibrationRank::join(rank, core, transport, &store)?.run(timed_calls, until, &too_long);
    std::thread::scope(|scope| {
        let other = std::thread::Builder::new().name("accl-calibrate".into());
        let other = other.spawn_scoped(scope, || calibration_rank(1, cores.1));
        let other =
            other.map_err(|error| Error::exhausted(format!("cannot start a thread for the calibration: {error}")))?;
        let first = calibration_rank(0, cores.0);
        let second = other.join().unwrap_or_else(|_| Err(Error::internal("the calibration panicked")));
        first.and_then(|took| second.map(|_| took))
    })
}

/// One of the two ranks.
struct CalibrationRank {
    engine: std::sync::Arc<Engine>,
    group: std::sync::Arc<Group>,
    rank: u32,
    input: Vec<u64>,
    output: Vec<u64>,
}

impl CalibrationRank {
    /// Joins the group. Must run on a thread of this module, which it pins and shields from signals.
    fn join(rank: u32, core: Option<usize>, transport: &str, store: &MemoryStore) -> Result<Self> {
        block_signals();
        if let Some(core) = core {
            let mut one = CpuSet::new();
            one.set(core);
            let _ = sched_setaffinity(None, &one);
        }
        let mut config = Config { calibration: Calibration::Off, segment_bytes: SEGMENT, ..Config::default() };
        config.set_option("transports", transport)?;
        let (few, more) = FEW_BYTES;
        let rules = format!(
            "all_reduce=recursive_doubling:0-{few},all_reduce=direct_two_phase:{more}-,reduce_scatter=direct,\
             all_gather=direct,broadcast=flat"
        );
        config.set_option("algorithm", &rules)?;
        let engine = Engine::new(config.clone(), |_| Machine::default());
        let spec = GroupSpec {
            name: "calibration".to_owned(),
            rank: Rank(rank),
            world: 2,
            timeout: TIMEOUT,
            config,
            master: None,
            global_ranks: Vec::new(),
            role: GroupRole::Default,
        };
        let group = engine.create_group(spec, store, &mut || false)?;
        Ok(Self { engine, group, rank, input: Vec::new(), output: Vec::new() })
    }

    fn run(mut self, timed_calls: &[TimedCalls], until: Instant, too_long: &AtomicBool) -> Result<Vec<u64>> {
        let mut took = Vec::with_capacity(timed_calls.len());
        for timed in timed_calls {
            let mut desc = self.desc(timed);
            let mut batches = Vec::with_capacity(timed.batches);
            for _ in 0..timed.batches {
                if self.rank == 0 && Instant::now() > until {
                    too_long.store(true, Ordering::Relaxed);
                }
                self.barrier()?;
                // The deciding rank writes the flag before the barrier; both ranks read it after the barrier.
                if too_long.load(Ordering::Relaxed) {
                    return Err(Error::timeout("it is too busy"));
                }
                let start = Instant::now();
                for _ in 0..timed.calls {
                    self.call(&mut desc)?;
                }
                batches.push(start.elapsed().as_nanos() as u64 * 1000 / u64::from(timed.calls));
            }
            batches.sort_unstable();
            took.push(batches[batches.len() / 4]);
        }
        Ok(took)
    }

    fn desc(&mut self, timed: &TimedCalls) -> CallDesc {
        let words = timed.bytes.div_ceil(8) as usize + 1;
        for buffer in [&mut self.input, &mut self.output] {
            if buffer.len() < words {
                // Writing the buffer maps its pages before anything is timed.
                *buffer = (0..words as u64).collect();
            }
        }
        let dtype = Dtype::F32;
        let count = timed.bytes as usize / dtype.size_bytes();
        let half = count / 2;
        let tensor = |buffer: &mut Vec<u64>, first: usize, count: usize| {
            TensorDesc::dense(
                buffer.as_mut_ptr().cast::<u8>().wrapping_add(first * dtype.size_bytes()),
                dtype,
                Elems(count as u64),
            )
        };
        let halves =
            |buffer: &mut Vec<u64>| (0..2).map(|block| [tensor(buffer, block * half, half)]).collect::<Blocks>();
        let collective = match timed.what {
            What::AllReduce => Collective::AllReduce,
            What::ReduceScatter => Collective::ReduceScatter,
            What::AllGather | What::AllGatherInPlace => Collective::AllGather,
            What::Broadcast => Collective::Broadcast,
        };
        let mut desc = CallDesc::new(collective, dtype);
        desc.equal_blocks = true;
        match timed.what {
            What::AllReduce | What::Broadcast => desc.outputs = Blocks::of(tensor(&mut self.output, 0, count)),
            What::ReduceScatter => {
                desc.inputs = halves(&mut self.input);
                desc.outputs = Blocks::of(tensor(&mut self.output, 0, half));
            }
            What::AllGather => {
                desc.inputs = Blocks::of(tensor(&mut self.input, 0, half));
                desc.outputs = halves(&mut self.output);
            }
            What::AllGatherInPlace => {
                desc.inputs = Blocks::of(tensor(&mut self.output, self.rank as usize * half, half));
                desc.outputs = halves(&mut self.output);
            }
        }
        desc
    }

    fn barrier(&self) -> Result<()> {
        self.call(&mut CallDesc::new(Collective::Barrier, Dtype::U8))
    }

    fn call(&self, desc: &mut CallDesc) -> Result<()> {
        let call = match self.group.submit_blocking(desc)? {
            Submitted::Done(_) => return Ok(()),
            Submitted::Pending(call) => *call,
        };
        match call.wait(None, &mut || false) {
            Waited::Done => Ok(()),
            Waited::Failed(error) => Err(error),
            Waited::TimedOut(_) | Waited::Interrupted => Err(Error::timeout("a calibration call did not complete")),
        }
    }
}

impl Drop for CalibrationRank {
    fn drop(&mut self) {
        self.engine.shutdown();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_threads_measure_what_calls_take() {
        let until = Instant::now() + Duration::from_secs(60);
        let took = run("shm", (None, None), &[TimedCalls::small(What::AllReduce, 4, 3)], until).unwrap();
        assert!(took.len() == 1 && took[0] > 0 && took[0] < u64::MAX);
    }

    #[test]
    fn a_machine_that_is_too_busy_is_given_up() {
        let error = run("shm", (None, None), &[TimedCalls::small(What::AllReduce, 4, 3)], Instant::now()).unwrap_err();
        assert!(error.message.contains("too busy"), "{error}");
    }
}

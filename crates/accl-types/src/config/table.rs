//! The rows of the settings table. To add a setting, add one row here and one field in [`super::Config`].
//! Also lists variables of other projects under our prefix.

use super::Config;
use super::parse;
use crate::show_size;

/// The event from which on a setting is fixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Fixed by the first group of the process.
    Process,
    /// May differ from group to group.
    Group,
}

/// The values that a setting accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accepted {
    /// A description in words.
    Words(&'static str),
    /// A codec. The description and the check come from the table of codecs, which is in a higher layer.
    Codec,
}

impl Accepted {
    /// The description in words; for a codec, `codecs`, which the table of codecs supplies.
    pub fn words(self, codecs: &str) -> &str {
        match self {
            Accepted::Words(words) => words,
            Accepted::Codec => codecs,
        }
    }
}

/// One setting.
pub struct Row {
    /// The environment variable.
    pub name: &'static str,
    /// The argument of `torch_accl.Options`.
    pub option: &'static str,
    /// The event from which on the setting is fixed.
    pub scope: Scope,
    /// Whether all ranks of a group must have the same value.
    pub agreed: bool,
    /// The default, as a user would write it.
    pub default: &'static str,
    /// The accepted values.
    pub accepted: Accepted,
    /// One sentence on what the setting does, with its unit.
    pub effect: &'static str,
    /// Parses a value into the configuration. The error is a clause to append to the message, or empty.
    pub set: fn(&mut Config, &str) -> Result<(), String>,
    /// Returns the value in canonical text, which `set` accepts.
    pub show: fn(&Config) -> String,
}

impl Row {
    /// Whether the environment may set it. `compressed_calls` changes the results of ordinary calls, so only the
    /// program may set it.
    pub fn is_variable(&self) -> bool {
        self.option != "compressed_calls"
    }
}

/// Every setting.
pub const ROWS: &[Row] = &[
    Row {
        name: "ACCL_LOG",
        option: "log",
        scope: Scope::Process,
        agreed: false,
        default: "warn",
        accepted: Accepted::Words("one of off, warn, info, debug, trace"),
        effect: "Log level for standard error; `info` names the transport, address and algorithm chosen, `debug` logs calls, `trace` also their frames.",
        set: |c, v| parse::log_level(v).map(|x| c.log = x),
        show: |c| parse::show_log_level(c.log).to_owned(),
    },
    Row {
        name: "ACCL_SOCKET_IFNAME",
        option: "socket_ifname",
        scope: Scope::Process,
        agreed: false,
        default: "",
        accepted: Accepted::Words(
            "a comma-separated list of interface prefixes; `=` before the list means exact names, `^` excludes the listed interfaces",
        ),
        effect: "Network interfaces whose addresses are offered to peers. Empty means all interfaces that are up; the one with the route to the master comes first.",
        set: |c, v| {
            c.socket_ifname = parse::ifname_filter(v);
            Ok(())
        },
        show: |c| parse::show_ifname_filter(&c.socket_ifname),
    },
    Row {
        name: "ACCL_PORT_RANGE",
        option: "port_range",
        scope: Scope::Process,
        agreed: false,
        default: "",
        accepted: Accepted::Words(
            "`first-last` with 1 <= first <= last <= 65535, or empty for a port that the system chooses",
        ),
        effect: "Ports the process may listen on; one is used per process.",
        set: |c, v| parse::port_range(v).map(|x| c.port_range = x),
        show: |c| c.port_range.map(|(a, b)| format!("{a}-{b}")).unwrap_or_default(),
    },
    Row {
        name: "ACCL_TRANSPORTS",
        option: "transports",
        scope: Scope::Process,
        agreed: true,
        default: "shm,tcp",
        accepted: Accepted::Words("a comma-separated list of shm, tcp and registered transports"),
        effect: "Transports in the order in which they are tried for a pair of ranks.",
        set: |c, v| parse::names(v).map(|x| c.transports = x),
        show: |c| c.transports.join(","),
    },
    Row {
        name: "ACCL_HOST_ID",
        option: "host_id",
        scope: Scope::Process,
        agreed: false,
        default: "",
        accepted: Accepted::Words(
            "text of at most 128 bytes without white space, or empty for the host's own identity",
        ),
        effect: "Identity of the host. Ranks with different identities do not share memory and count as different hosts for two-level algorithms.",
        set: |c, v| {
            if v.contains(char::is_whitespace) {
                return Err(" (it contains white space)".into());
            }
            // Every rank reads this value from every other rank at the rendezvous.
            if v.len() > 128 {
                return Err(format!(" (it has {} bytes)", v.len()));
            }
            c.host_id = (!v.is_empty()).then(|| v.to_owned());
            Ok(())
        },
        show: |c| c.host_id.clone().unwrap_or_default(),
    },
    Row {
        name: "ACCL_RING_BYTES",
        option: "ring_bytes",
        scope: Scope::Process,
        agreed: false,
        default: "1MiB",
        accepted: Accepted::Words("a size from 16KiB to 64MiB, as bytes or with KiB, MiB, GiB"),
        effect: "Maximum shared memory per direction between two processes on a host; starts at 16KiB and grows with use.",
        set: |c, v| parse::size(v, 16 << 10, 64 << 20).map(|x| c.ring_bytes = x),
        show: |c| show_size(c.ring_bytes),
    },
    Row {
        name: "ACCL_SHM_LIMIT",
        option: "shm_limit",
        scope: Scope::Process,
        agreed: false,
        default: "256MiB",
        accepted: Accepted::Words("a size from 0 to 1TiB, as bytes or with KiB, MiB, GiB"),
        effect: "Maximum shared memory that one process creates for its links, each counted at its maximum size. Rings shrink to fit; then tcp is used.",
        set: |c, v| parse::size(v, 0, 1 << 40).map(|x| c.shm_limit = x),
        show: |c| show_size(c.shm_limit),
    },
    Row {
        name: "ACCL_GPU_PINNED",
        option: "gpu_pinned",
        scope: Scope::Process,
        agreed: false,
        default: "1GiB",
        accepted: Accepted::Words("a size from 0 to 1TiB, as bytes or with KiB, MiB, GiB"),
        effect: "Maximum pinned host memory that a process keeps for later calls on tensors of accelerators. A call may use more while it runs.",
        set: |c, v| parse::size(v, 0, 1 << 40).map(|x| c.gpu_pinned = x),
        show: |c| show_size(c.gpu_pinned),
    },
    Row {
        name: "ACCL_GPU_ROUTE",
        option: "gpu_route",
        scope: Scope::Group,
        agreed: true,
        default: "auto",
        accepted: Accepted::Words("one of auto, peer, staged"),
        effect: "Way of collectives on GPU tensors inside a host: `peer` lets ranks read each other's device memory, also for messages; `staged` copies through host memory; `auto` uses `peer` for collectives where the GPUs allow it.",
        set: |c, v| parse::gpu_route(v).map(|x| c.gpu_route = x),
        show: |c| parse::show_gpu_route(c.gpu_route).to_owned(),
    },
    Row {
        name: "ACCL_GPU_WINDOW",
        option: "gpu_window",
        scope: Scope::Group,
        agreed: true,
        default: "1GiB",
        accepted: Accepted::Words("a size from 0 to 1TiB, as bytes or with KiB, MiB, GiB"),
        effect: "Maximum bytes of a collective for which a rank uses device memory that other ranks read. Larger collectives are copied through host memory, but for an all_to_all with split sizes.",
        set: |c, v| parse::size(v, 0, 1 << 40).map(|x| c.gpu_window = x),
        show: |c| show_size(c.gpu_window),
    },
    Row {
        name: "ACCL_SEGMENT_BYTES",
        option: "segment_bytes",
        scope: Scope::Process,
        agreed: true,
        default: "64KiB",
        accepted: Accepted::Words("a size from 1KiB to 4MiB, as bytes or with KiB, MiB, GiB"),
        effect: "Maximum payload bytes of one frame: the unit of pipelining.",
        set: |c, v| parse::size(v, 1 << 10, 4 << 20).map(|x| c.segment_bytes = x),
        show: |c| show_size(c.segment_bytes),
    },
    Row {
        name: "ACCL_EAGER_BYTES",
        option: "eager_bytes",
        scope: Scope::Group,
        agreed: true,
        default: "256KiB",
        accepted: Accepted::Words("a size from 0 to 64MiB, as bytes or with KiB, MiB, GiB"),
        effect: "Maximum bytes sent before the receiver issues the matching call, per group and peer. A message counts as its size plus 128.",
        set: |c, v| parse::size(v, 0, 64 << 20).map(|x| c.eager_bytes = x),
        show: |c| show_size(c.eager_bytes),
    },
    Row {
        name: "ACCL_SPIN_US",
        option: "spin_us",
        scope: Scope::Process,
        agreed: false,
        default: "auto",
        accepted: Accepted::Words("auto, or microseconds from 0 to 1000000"),
        effect: "Time that a waiting thread spins before it yields its core; `auto` adapts to cores and ranks per host.",
        set: |c, v| parse::spin(v).map(|x| c.spin_us = x),
        show: |c| c.spin_us.map_or_else(|| "auto".to_owned(), |us| us.to_string()),
    },
    Row {
        name: "ACCL_WORKER_COUNT",
        option: "worker_count",
        scope: Scope::Process,
        agreed: false,
        default: "0",
        accepted: Accepted::Words("auto, or a number of threads from 0 to 63"),
        effect: "Number of worker threads, in addition to the caller's thread, that run parts of large calls; each has its own links. Useful if each rank has a core for each thread. A group uses as many as its rank with the fewest. `auto`: none if the ranks of a host have one core each or fewer; otherwise as many as the cores allow and memory or network can keep busy.",
        set: |c, v| parse::worker_count(v).map(|x| c.worker_count = x),
        show: |c| parse::show_worker_count(c.worker_count),
    },
    Row {
        name: "ACCL_WORKER_AFFINITY",
        option: "worker_affinity",
        scope: Scope::Process,
        agreed: false,
        default: "auto",
        accepted: Accepted::Words("auto, or a list of CPUs such as 0-3,28-31"),
        effect: "CPUs of the worker threads: one for each thread on the host, in rank order; CPUs outside the launcher's binding of a rank are allowed. `auto`: wherever the process may run. If a CPU is not available, its thread also runs wherever the process may run, and a warning gives the reason.",
        set: |c, v| parse::worker_affinity(v).map(|x| c.worker_affinity = x),
        show: |c| parse::show_worker_affinity(&c.worker_affinity),
    },
    Row {
        name: "ACCL_ALGORITHM",
        option: "algorithm",
        scope: Scope::Group,
        agreed: true,
        default: "",
        accepted: Accepted::Words(
            "a comma-separated list of `collective=algorithm` or `collective=algorithm:min-max` with sizes such as 64KiB",
        ),
        effect: "Overrides the algorithm of a collective, for all sizes or for a range of sizes in bytes; `docs/algorithms.md` lists the names.",
        set: |c, v| parse::algorithm_rules(v).map(|x| c.algorithm = x),
        show: |c| parse::show_algorithm_rules(&c.algorithm),
    },
    Row {
        name: "ACCL_DETERMINISTIC",
        option: "deterministic",
        scope: Scope::Group,
        agreed: true,
        default: "0",
        accepted: Accepted::Words("0 or 1"),
        effect: "With 1, the algorithm depends only on collective, size, dtype and world size, so that results are the same on every machine. It does not depend on hosts, cores or `ACCL_CALIBRATION`.",
        set: |c, v| parse::flag(v).map(|x| c.deterministic = x),
        show: |c| u8::from(c.deterministic).to_string(),
    },
    Row {
        name: "ACCL_CALIBRATION",
        option: "calibration",
        scope: Scope::Process,
        agreed: false,
        default: "auto",
        accepted: Accepted::Words("auto, off, or the path of a file (with a `/`)"),
        effect: "Source of the constants by which algorithms are chosen. `auto` measures them once per machine, in 0.1 to 0.3 seconds, and stores them in `$XDG_CACHE_HOME/torch-accl` or `~/.cache/torch-accl`. A path names another file; `off` uses the built-in constants. The constants of rank 0 apply to all ranks of a group.",
        set: |c, v| parse::calibration(v).map(|x| c.calibration = x),
        show: |c| parse::show_calibration(&c.calibration).to_owned(),
    },
    Row {
        name: "ACCL_CODEC",
        option: "compression",
        scope: Scope::Group,
        agreed: true,
        default: "maxmin:4",
        accepted: Accepted::Codec,
        effect: "Codec that `torch_accl.compression` uses if no other is given; the setting alone compresses nothing.",
        set: |c, v| {
            if v.is_empty() {
                return Err(String::new());
            }
            c.codec = v.to_owned();
            Ok(())
        },
        show: |c| c.codec.clone(),
    },
    Row {
        name: "ACCL_COMPRESSED_CALLS",
        option: "compressed_calls",
        scope: Scope::Group,
        agreed: true,
        default: "hooks",
        accepted: Accepted::Words("hooks or all"),
        effect: "Calls that are compressed. `hooks`: only calls of the hooks and functions of `torch_accl.compression`. `all`: also every all_reduce that adds at least 1,024 float32, float16 or bfloat16 elements, with the codec `compression`. The same applies to every reduce_scatter and all_gather whose blocks all have as many elements.",
        set: |c, v| parse::compress_all(v).map(|x| c.compress_all = x),
        show: |c| parse::show_compress_all(c.compress_all).to_owned(),
    },
    Row {
        name: "ACCL_DEVICE",
        option: "device",
        scope: Scope::Group,
        agreed: false,
        default: "none",
        accepted: Accepted::Words(
            "none, sim (or 1), sim://?KEY=VALUE, emulator://HOST:PORT,..., emulator://@FILE, xrt://INDEX?xclbin=FILE or coyote://INDEX, with keys that `accl device --help` lists",
        ),
        effect: "Collective engine (CCLO) for collectives of the default process group; its kind and keys must be the same on all ranks. Sub-groups, point-to-point messages and calls that no engine supports run on the host.",
        set: |c, v| parse::device(v).map(|x| c.device = x),
        show: |c| c.device.clone(),
    },
    Row {
        name: "ACCL_SIDESTEP",
        option: "sidestep",
        scope: Scope::Group,
        agreed: true,
        default: "",
        accepted: Accepted::Words(
            "a comma-separated list of `collective=host` and `collective=mpi`, or of collectives alone in a group with a device; `all` stands for every collective that is not listed",
        ),
        effect: "Where a collective runs instead. `host`: in the engine's own schedules, if the group has a device; a collective alone means the same there. `mpi`: as a whole in the MPI library of the job ([MPI](mpi.md#collectives-of-the-mpi-library)).",
        set: |c, v| parse::redirects(v).map(|x| c.redirects = x),
        show: |c| parse::show_redirects(&c.redirects),
    },
    Row {
        name: "ACCL_TIMING",
        option: "timing",
        scope: Scope::Group,
        agreed: false,
        default: "0",
        accepted: Accepted::Words("0 or 1"),
        effect: "With 1 every call records its duration, as after `enable_collectives_timing()`.",
        set: |c, v| parse::flag(v).map(|x| c.timing = x),
        show: |c| u8::from(c.timing).to_string(),
    },
    Row {
        name: "ACCL_PROFILE_NAMES",
        option: "profile_names",
        scope: Scope::Group,
        agreed: false,
        default: "accl",
        accepted: Accepted::Words("accl, ccl or pg"),
        effect: "Names of calls and waits in torch's profiler. `accl`: `accl:all_reduce`, asynchronous, and `accl:wait:all_reduce`. `ccl`, as in torch-ccl: `oneccl_bindings_for_pytorch::allreduce` and `oneccl_bindings_for_pytorch::wait::cpu::allreduce`, both synchronous. `pg`: `pg::allreduce` and, for a call with 16 elements, `pg::wait::allreduce::sz:16`.",
        set: |c, v| parse::profile_names(v).map(|x| c.profile_names = x),
        show: |c| parse::show_profile_names(c.profile_names).to_owned(),
    },
];

/// Another name for one value of a setting, known to users of another project.
pub struct Alias {
    /// The variable.
    pub name: &'static str,
    /// The value of the variable.
    pub value: &'static str,
    /// The setting that the alias stands for.
    pub setting: &'static str,
    /// The setting's value that the alias stands for.
    pub means: &'static str,
}

/// All aliases. If both the alias and its setting are set, the setting wins.
pub const ALIASES: &[Alias] = &[
    Alias { name: "ACCL_DEBUG", value: "0", setting: "ACCL_LOG", means: "warn" },
    Alias { name: "ACCL_DEBUG", value: "1", setting: "ACCL_LOG", means: "debug" },
];

/// A variable under our prefix that belongs to another project or package.
pub struct Foreign {
    /// The variable's name; a `*` at the end matches any ending.
    pub name: &'static str,
    /// The owner and purpose of the variable.
    pub owner: &'static str,
}

impl Foreign {
    /// Whether the variable belongs to another package of this project and is therefore expected.
    pub fn is_companion(&self) -> bool {
        self.owner == MPI
    }

    /// Whether `name` matches this entry.
    pub(super) fn is(&self, name: &str) -> bool {
        self.name.strip_suffix('*').map_or(self.name == name, |start| name.starts_with(start))
    }
}

const FPGA: &str = "ACCL, collectives on FPGAs, and its process group for PyTorch";
const GPU_NETWORK: &str = "ACCL, a communication library for GPU clusters that builds on NCCL's interface";
const GPU_TRANSFER: &str = "ACCL's RDMA transport for GPU clusters (barex)";
const EXPERTS: &str = "ACCL's kernels for expert parallelism";

const MPI: &str = "torch-accl-mpi, the package with the transport `mpi`: docs/mpi.md";

/// Names that other projects are known to use. For any other name, the warning cannot name the owner.
pub const FOREIGN: &[Foreign] = &[
    Foreign { name: "ACCL_COMMS", owner: FPGA },
    Foreign { name: "ACCL_DEVICE_ID", owner: FPGA },
    Foreign { name: "ACCL_NP", owner: FPGA },
    Foreign { name: "ACCL_SCRIPT", owner: FPGA },
    Foreign { name: "ACCL_SIM", owner: FPGA },
    Foreign { name: "ACCL_SIM_START_PORT", owner: FPGA },
    Foreign { name: "ACCL_C4_*", owner: GPU_NETWORK },
    Foreign { name: "ACCL_IB_*", owner: GPU_NETWORK },
    Foreign { name: "ACCL_LOAD_BALANCE", owner: GPU_NETWORK },
    Foreign { name: "ACCL_LOG_TIME", owner: GPU_NETWORK },
    Foreign { name: "ACCL_TOPO_FIX", owner: GPU_NETWORK },
    Foreign { name: "ACCL_MAX_PORT", owner: GPU_TRANSFER },
    Foreign { name: "ACCL_MAX_USER_MR_GB", owner: GPU_TRANSFER },
    Foreign { name: "ACCL_MIN_PORT", owner: GPU_TRANSFER },
    Foreign { name: "ACCL_NIC_GPU_AFFINITY", owner: GPU_TRANSFER },
    Foreign { name: "ACCL_USE_CPU", owner: GPU_TRANSFER },
    Foreign { name: "ACCL_EP_*", owner: EXPERTS },
    Foreign { name: "ACCL_FP8_CAST_LEVEL", owner: EXPERTS },
    Foreign { name: "ACCL_LOW_LATENCY_OPTIMIZE", owner: EXPERTS },
    Foreign { name: "ACCL_NORMAL_MODE", owner: EXPERTS },
    Foreign { name: "ACCL_PROFILER_*", owner: "the ACCL profiler plug-in of RCCL" },
    Foreign { name: "ACCL_MPI_EXCLUSIVE", owner: MPI },
    Foreign { name: "ACCL_MPI_EXIT_TIMEOUT", owner: MPI },
    Foreign { name: "ACCL_MPI_THREAD_LEVEL", owner: MPI },
    Foreign { name: "ACCL_MPI_TIMEOUT", owner: MPI },
];

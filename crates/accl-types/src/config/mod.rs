//! The one table of settings: every `ACCL_*` variable and the option of `torch_accl.Options` with the same meaning.
//!
//! Owns names, types, defaults, accepted values and effects, and parses given name-value pairs. It does not read the
//! environment: one function of `accl-engine` does. Read [`ROWS`] first; [`Config`] holds the parsed values.

mod meaning;
mod parse;
mod profile;
mod table;

pub use meaning::{Meaning, meaning};
pub use profile::c10d_name;
pub use table::{ALIASES, Accepted, Alias, FOREIGN, Foreign, ROWS, Row, Scope};

use crate::{Collective, Error, Result, nearest};

/// Prefix of all our environment variables.
pub const PREFIX: &str = "ACCL_";

/// The log level for standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Nothing, not even warnings.
    Off,
    /// Warnings: fallbacks that cost speed, with their remedy.
    Warn,
    /// Also the chosen transport, address and algorithm.
    Info,
    /// Also the creation and end of connections and groups.
    Debug,
    /// Also every call.
    Trace,
}

/// The network interfaces that may be used, in NCCL's syntax: prefixes, `=` for exact names, `^` for exclusion.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IfnameFilter {
    /// Names or prefixes; empty accepts every interface.
    pub names: Vec<String>,
    /// Whether a name must match exactly; otherwise a matching prefix is enough.
    pub exact: bool,
    /// Whether the list names the refused interfaces instead of the accepted ones.
    pub exclude: bool,
}

impl IfnameFilter {
    /// Whether the interface called `name` may be used.
    pub fn accepts(&self, name: &str) -> bool {
        if self.names.is_empty() {
            return true;
        }
        let listed = self.names.iter().any(|n| if self.exact { n == name } else { name.starts_with(n.as_str()) });
        listed != self.exclude
    }
}

/// One `collective=algorithm:range` of an override list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AlgorithmRule {
    /// The collective that the rule applies to.
    pub collective: Collective,
    /// Name of the algorithm's table row.
    pub algorithm: String,
    /// Smallest size in bytes that the rule applies to.
    pub min_bytes: u64,
    /// Largest size in bytes that the rule applies to.
    pub max_bytes: u64,
}

/// The source of the cost model's constants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Calibration {
    /// The user's cache directory. If the constants are not there, they are measured and stored there.
    Auto,
    /// The built-in constants.
    Off,
    /// This file. If it does not exist, the constants are measured and stored in it.
    File(String),
}

/// Number of worker threads that run parts of large calls, in addition to the caller's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerCount {
    /// A fixed number.
    Exactly(u32),
    /// A number that depends on the host: limited by the cores per rank, and by how much work memory or network can
    /// supply.
    Auto,
}

/// The naming scheme of the profiler's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ProfileNames {
    /// `accl:all_reduce` and `accl:wait:all_reduce`.
    Accl,
    /// The names that torch-ccl uses.
    Ccl,
    /// The names that torch-ccl's predecessors use.
    Pg,
}

/// The implementation that a collective is redirected to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RedirectTo {
    /// No implementation was named. In a group with a device, the host runs the collective.
    Unnamed,
    /// The schedules of this engine, on the host.
    Host,
    /// The kind of offload with this name, such as `mpi` for the MPI library of the job. Kinds are registered with the
    /// engine, which refuses unknown names.
    Offload(String),
}

/// A collective that is redirected to another implementation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redirect {
    /// The collective.
    pub collective: Collective,
    /// The implementation that runs it.
    pub to: RedirectTo,
}

/// Way of collectives on GPU tensors inside a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuRoute {
    /// [`GpuRoute::Peer`] where the GPUs of all ranks allow it, otherwise [`GpuRoute::Staged`].
    Auto,
    /// Ranks read each other's device memory.
    Peer,
    /// Tensors are copied through host memory.
    Staged,
}

/// The parsed settings of one process or group. They do not change once a group is created from them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `ACCL_LOG`
    pub log: LogLevel,
    /// `ACCL_SOCKET_IFNAME`
    pub socket_ifname: IfnameFilter,
    /// `ACCL_PORT_RANGE`: first and last port; `None` lets the system choose.
    pub port_range: Option<(u16, u16)>,
    /// `ACCL_TRANSPORTS`: names in the order in which they are tried.
    pub transports: Vec<String>,
    /// `ACCL_HOST_ID`: replaces the host's own identity; ranks with different ids do not share memory.
    pub host_id: Option<String>,
    /// `ACCL_RING_BYTES`: maximum size in bytes of one direction of a shared-memory link.
    pub ring_bytes: u64,
    /// `ACCL_SHM_LIMIT`: maximum shared memory that this process may map, in bytes.
    pub shm_limit: u64,
    /// Maximum bytes of idle pinned host memory.
    pub gpu_pinned: u64,
    /// `ACCL_GPU_ROUTE`: way of collectives on GPU tensors inside a host.
    pub gpu_route: GpuRoute,
    /// `ACCL_GPU_WINDOW`: maximum bytes of a collective on the way `peer`.
    pub gpu_window: u64,
    /// `ACCL_SEGMENT_BYTES`: maximum payload of one frame, in bytes.
    pub segment_bytes: u64,
    /// `ACCL_EAGER_BYTES`: maximum bytes sent before the receiver issues the matching call, per group and peer.
    pub eager_bytes: u64,
    /// `ACCL_SPIN_US`: microseconds that a waiting thread spins before it parks; `None` adapts to cores and ranks.
    pub spin_us: Option<u64>,
    /// `ACCL_WORKER_COUNT`: worker threads that run parts of large calls, in addition to the caller's thread.
    pub worker_count: WorkerCount,
    /// `ACCL_WORKER_AFFINITY`: a CPU for each worker thread of the host, in the order of the host's ranks. If it is
    /// empty, worker threads may run on every CPU of the process.
    pub worker_affinity: Vec<u32>,
    /// `ACCL_ALGORITHM`: rules that override the choice of algorithm.
    pub algorithm: Vec<AlgorithmRule>,
    /// `ACCL_DETERMINISTIC`: the choice of algorithm depends only on size, dtype and world.
    pub deterministic: bool,
    /// `ACCL_CALIBRATION`: source of the constants by which algorithms are chosen.
    pub calibration: Calibration,
    /// `ACCL_TIMING`: calls record their duration from the start.
    pub timing: bool,
    /// `ACCL_PROFILE_NAMES`: naming scheme of the profiler's events.
    pub profile_names: ProfileNames,
    /// `ACCL_CODEC`: codec of compressed calls that do not name one.
    pub codec: String,
    /// `ACCL_DEVICE`: the device that runs collectives of the default process group, or `none`.
    pub device: String,
    /// `ACCL_SIDESTEP`: collectives that are redirected to another implementation, in the order of their codes.
    pub redirects: Vec<Redirect>,
    /// The option `compressed_calls`: ordinary calls are also compressed.
    pub compress_all: bool,
}

impl Default for Config {
    fn default() -> Self {
        let mut config = Self {
            log: LogLevel::Warn,
            socket_ifname: IfnameFilter::default(),
            port_range: None,
            transports: Vec::new(),
            host_id: None,
            ring_bytes: 0,
            shm_limit: 0,
            gpu_pinned: 0,
            gpu_route: GpuRoute::Auto,
            gpu_window: 0,
            segment_bytes: 0,
            eager_bytes: 0,
            spin_us: None,
            worker_count: WorkerCount::Exactly(0),
            worker_affinity: Vec::new(),
            algorithm: Vec::new(),
            deterministic: false,
            calibration: Calibration::Auto,
            timing: false,
            profile_names: ProfileNames::Accl,
            codec: String::new(),
            device: String::new(),
            redirects: Vec::new(),
            compress_all: false,
        };
        for row in ROWS {
            // The defaults go through the same parser as a user's value, so the documented defaults are the actual
            // ones. The test `every_default_is_accepted` ensures that parsing does not fail.
            if (row.set)(&mut config, row.default).is_err() {
                unreachable!("default of {} is refused by its own parser", row.name);
            }
        }
        config
    }
}

impl Config {
    /// Parses `pairs` of variable names and values over the defaults. Ignores names without our prefix and names that,
    /// by their [`meaning()`], belong to others.
    ///
    /// # Errors
    /// `Configuration` for a mistyped `ACCL_*` name (the message has the right name) or a value that is not accepted.
    pub fn from_variables<N: AsRef<str>, V: AsRef<str>>(pairs: impl IntoIterator<Item = (N, V)>) -> Result<Self> {
        let mut config = Self::default();
        let pairs: Vec<(N, V)> = pairs.into_iter().collect();
        for (name, value) in &pairs {
            let of_name = || ALIASES.iter().filter(|alias| alias.name == name.as_ref());
            if of_name().next().is_none() {
                continue;
            }
            let alias = of_name().find(|alias| alias.value == value.as_ref().trim()).ok_or_else(|| {
                let values: Vec<_> = of_name().map(|alias| alias.value).collect();
                let (name, value) = (name.as_ref(), value.as_ref());
                Error::configuration(format!(
                    "{name}: value `{value}` is not accepted; expected {}",
                    values.join(" or ")
                ))
            })?;
            config.set_variable(alias.setting, alias.means)?;
        }
        let is_alias = |name: &str| ALIASES.iter().any(|alias| alias.name == name);
        for (name, value) in pairs {
            if is_alias(name.as_ref()) {
                continue;
            }
            if !name.as_ref().starts_with(PREFIX) {
                continue;
            }
            match meaning(name.as_ref(), value.as_ref()) {
                Meaning::Setting => config.set_variable(name.as_ref(), value.as_ref())?,
                Meaning::Mistyped { near } => return Err(mistyped(name.as_ref(), near)),
                Meaning::Expected | Meaning::Foreign { .. } | Meaning::Unknown { .. } => {}
            }
        }
        Ok(config)
    }

    /// Sets one variable by its `ACCL_*` name.
    ///
    /// # Errors
    /// `Configuration`, as in [`Config::from_variables`].
    pub fn set_variable(&mut self, name: &str, value: &str) -> Result<()> {
        let row =
            ROWS.iter().find(|row| row.name == name).ok_or_else(|| unknown(name, ROWS.iter().map(|row| row.name)))?;
        if !row.is_variable() {
            return Err(Error::configuration(format!(
                "{name}: the environment cannot set this; pass torch_accl.Options({}=...)",
                row.option
            )));
        }
        self.set_row(row, row.name, value)
    }

    /// Sets one option by its name in `torch_accl.Options`.
    ///
    /// # Errors
    /// `Configuration`, as in [`Config::from_variables`].
    pub fn set_option(&mut self, name: &str, value: &str) -> Result<()> {
        let row =
            ROWS.iter().find(|row| row.option == name).ok_or_else(|| unknown(name, ROWS.iter().map(|r| r.option)))?;
        self.set_row(row, row.option, value)
    }

    fn set_row(&mut self, row: &Row, spelled: &str, value: &str) -> Result<()> {
        (row.set)(self, value.trim()).map_err(|why| {
            let expected = row.accepted.words("a codec such as maxmin:4; `accl codecs` lists them");
            Error::configuration(format!("{spelled}: value `{value}` is not accepted{why}; expected {expected}"))
        })
    }

    /// The rows of process scope in which `self` differs from `other`, with the values of `self` and `other`.
    pub fn process_differences(&self, other: &Config) -> Vec<(&'static Row, String, String)> {
        ROWS.iter()
            .filter(|row| row.scope == Scope::Process)
            .map(|row| (row, (row.show)(self), (row.show)(other)))
            .filter(|(_, a, b)| a != b)
            .collect()
    }

    /// The canonical text of every setting that all ranks of a group must agree on.
    pub fn agreed_text(&self) -> String {
        ROWS.iter()
            .filter(|row| row.agreed)
            .map(|row| format!("{}={}", row.option, (row.show)(self)))
            .collect::<Vec<_>>()
            .join(" ")
    }
}

fn mistyped(name: &str, near: &str) -> Error {
    Error::configuration(format!(
        "{name}: unknown setting; did you mean {near}? Rename or unset {name}; `accl config` lists the settings"
    ))
}

fn unknown(name: &str, known: impl Iterator<Item = &'static str> + Clone) -> Error {
    let hint = nearest(name, known.clone()).map(|n| format!("; did you mean {n}?")).unwrap_or_default();
    let known = known.collect::<Vec<_>>().join(", ");
    Error::configuration(format!("{name}: unknown setting; known settings: {known}{hint}"))
}

/// The page `docs/environment.md`, generated from the table. `codecs` is the description of codec names from the table
/// of codecs.
pub fn environment_page(codecs: &str) -> String {
    let mut page = String::from(
        "# Settings\n\n\
         Generated from the table in `crates/accl-types/src/config/table.rs`; do not edit.\n\n\
         Every setting is an argument of `torch_accl.Options`, which is passed as `pg_options`. Settings with a variable can\n\
         also be set in the environment; the argument has precedence. *Process* settings are fixed by the first group of a\n\
         process; *group* settings may differ from group to group. Settings marked *agreed* must be the same on all ranks of\n\
         a group; a difference is an error that names both values.\n\n\
         | variable | option | scope | default | accepted | effect |\n|---|---|---|---|---|---|\n",
    );
    for row in ROWS {
        let scope = match row.scope {
            Scope::Process => "process",
            Scope::Group => "group",
        };
        let agreed = if row.agreed { ", agreed" } else { "" };
        let default = if row.default.is_empty() { "(empty)".to_owned() } else { format!("`{}`", row.default) };
        page.push_str(&format!(
            "| {} | `{}` | {scope}{agreed} | {default} | {} | {} |\n",
            if row.is_variable() { format!("`{}`", row.name) } else { "none".to_owned() },
            row.option,
            row.accepted.words(codecs).replace('|', "\\|"),
            row.effect
        ));
    }
    page.push_str(
        "\n## Other names\n\n\
         | variable | stands for |\n|---|---|\n",
    );
    for Alias { name, value, setting, means } in ALIASES {
        page.push_str(&format!("| `{name}={value}` | `{setting}={means}` |\n"));
    }
    page.push_str(
        "\n## Unknown names\n\n\
         An `ACCL_*` variable that is not in the tables above has no effect:\n\n\
         | name | effect |\n|---|---|\n\
         | one typing mistake away from a name above: a character missing, added or wrong, or two exchanged | an error on every rank, with the right name |\n\
         | Kubernetes sets it for a service such as `accl` or `accl-train`: `*_SERVICE_HOST`, `*_SERVICE_PORT`, `*_SERVICE_PORT_*`, `*_PORT=tcp://...`, `*_PORT_<number>_TCP*` (also `udp`, `sctp`) | nothing |\n\
         | a name of `torch-accl-mpi` in the table below | nothing: that package reads it |\n\
         | any other name | one warning per process on rank 0; `accl config` prints the same warning |\n\n\
         ## Names of other projects\n\n\
         Other projects and packages are known to use these names; the warning names the owner. `*` matches any text.\n\n\
         | variable | belongs to |\n|---|---|\n",
    );
    for foreign in FOREIGN {
        page.push_str(&format!("| `{}` | {} |\n", foreign.name, foreign.owner));
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ErrorKind;

    #[test]
    fn every_default_is_accepted_and_shown_as_written() {
        let config = Config::default();
        for row in ROWS {
            assert_eq!((row.show)(&config), row.default, "{}", row.name);
        }
    }

    #[test]
    fn what_is_shown_parses_to_the_same_value() {
        let mut config = Config::default();
        for (name, value) in [
            ("ACCL_LOG", "info"),
            ("ACCL_SOCKET_IFNAME", "^=eth0,lo"),
            ("ACCL_PORT_RANGE", "5000-5010"),
            ("ACCL_TRANSPORTS", "tcp"),
            ("ACCL_HOST_ID", "left"),
            ("ACCL_RING_BYTES", "256KiB"),
            ("ACCL_SPIN_US", "17"),
            ("ACCL_WORKER_COUNT", "3"),
            ("ACCL_WORKER_AFFINITY", "28-31,0-3"),
            ("ACCL_ALGORITHM", "all_reduce=ring:1MiB-,broadcast=flat"),
            ("ACCL_DETERMINISTIC", "1"),
            ("ACCL_CALIBRATION", "/some where/constants"),
            ("ACCL_CODEC", "maxmin:8,bucket=64"),
            ("ACCL_SHM_LIMIT", "1GiB"),
            ("ACCL_GPU_PINNED", "2GiB"),
            ("ACCL_GPU_ROUTE", "staged"),
            ("ACCL_GPU_WINDOW", "3MiB"),
            ("ACCL_SEGMENT_BYTES", "16KiB"),
            ("ACCL_EAGER_BYTES", "0"),
            ("ACCL_TIMING", "1"),
            ("ACCL_PROFILE_NAMES", "ccl"),
            ("ACCL_DEVICE", "emulator://h:5500?design=udp"),
            ("ACCL_SIDESTEP", "broadcast=host,all_gather=mpi,all_to_all"),
        ] {
            config.set_variable(name, value).unwrap();
        }
        config.set_option("compressed_calls", "all").unwrap();
        for row in ROWS {
            assert_ne!(
                (row.show)(&config),
                row.default,
                "{}: this test needs a value that is not the default",
                row.name
            );
            let mut again = Config::default();
            (row.set)(&mut again, &(row.show)(&config)).unwrap();
            assert_eq!((row.show)(&again), (row.show)(&config), "{}", row.name);
        }
    }

    #[test]
    fn an_unknown_variable_is_refused_with_the_nearest_name() {
        let error = Config::from_variables([("ACCL_PORTRANGE", "1-2")]).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Configuration);
        assert!(error.message.contains("did you mean ACCL_PORT_RANGE?"), "{error}");
    }

    #[test]
    fn another_name_of_a_setting_sets_it_unless_the_setting_is_there() {
        let log = |pairs: &[(&str, &str)]| Config::from_variables(pairs.iter().copied()).map(|config| config.log);
        assert_eq!(log(&[("ACCL_DEBUG", "1")]).unwrap(), LogLevel::Debug);
        assert_eq!(log(&[("ACCL_DEBUG", "0")]).unwrap(), LogLevel::Warn);
        for pairs in [[("ACCL_DEBUG", "1"), ("ACCL_LOG", "off")], [("ACCL_LOG", "off"), ("ACCL_DEBUG", "1")]] {
            assert_eq!(log(&pairs).unwrap(), LogLevel::Off);
        }
        let error = log(&[("ACCL_DEBUG", "yes")]).unwrap_err();
        assert!(error.message.contains("expected 0 or 1"), "{error}");
    }

    #[test]
    fn names_of_others_are_ignored() {
        assert_eq!(Config::from_variables([("CCL_LOG", "nonsense"), ("PATH", "")]).unwrap(), Config::default());
    }

    #[test]
    fn names_that_are_not_ours_change_nothing_and_mistyped_ones_are_refused() {
        for name in ["ACCL_DEVICE_ID", "ACCL_SERVICE_HOST", "ACCL_MPI_TIMEOUT", "ACCL_TX_DEPTH"] {
            assert_eq!(Config::from_variables([(name, "1")]).unwrap(), Config::default());
        }
        for name in ["ACCL_DEBU", "ACCL_LOGS", "ACCL_MPI_TIMEOUTS"] {
            Config::from_variables([(name, "1")]).unwrap_err();
        }
    }

    #[test]
    fn all_stands_for_the_collectives_that_a_side_step_does_not_name() {
        let shown = |text: &str| {
            let mut config = Config::default();
            config
                .set_option("sidestep", text)
                .map(|()| (ROWS.iter().find(|row| row.option == "sidestep").unwrap().show)(&config))
        };
        let all = shown("gather=host,all=mpi").unwrap();
        assert!(all.contains("gather=host") && all.contains("all_reduce=mpi") && all.contains("scatter=mpi"), "{all}");
        assert!(!all.contains("barrier") && !all.contains("send"), "the host does those: {all}");
        assert_eq!(shown(&all).unwrap(), all);
        for (text, why) in [
            ("all=mpi,all=host", "`all` is listed twice"),
            ("gather=mpi,gather", "`gather` is listed twice"),
            ("barrier=mpi", "every barrier runs on the host"),
            ("allgather=mpi", "did you mean all_gather?"),
        ] {
            let error = shown(text).unwrap_err();
            assert!(error.message.contains(why), "{error}");
        }
    }

    #[test]
    fn a_bad_value_lists_what_is_accepted() {
        let mut config = Config::default();
        let bad = [
            ("port_range", "9-1"),
            ("port_range", "70000"),
            ("log", "loud"),
            ("ring_bytes", "7"),
            ("shm_limit", "2TiB"),
            ("gpu_pinned", "2TiB"),
            ("gpu_route", "nvlink"),
            ("gpu_window", "2TiB"),
            ("segment_bytes", "1"),
            ("eager_bytes", "1GiB"),
            ("transports", "shm,carrier-pigeon"),
            ("host_id", "two words"),
            ("algorithm", "allreduce=ring"),
            ("spin_us", "-1"),
            ("worker_count", "64"),
            ("worker_count", "-1"),
            ("worker_count", "many"),
            ("worker_affinity", "3-1"),
            ("worker_affinity", "0,0"),
            ("worker_affinity", ","),
            ("deterministic", "maybe"),
            ("calibration", "on"),
            ("compression", ""),
            ("compressed_calls", "most"),
            ("timing", "2"),
            ("profile_names", "nccl"),
            ("device", "a device"),
            ("sidestep", "broadcast=a card"),
        ];
        for (option, value) in bad {
            let before = config.clone();
            let error = config.set_option(option, value).unwrap_err();
            assert!(error.message.contains("expected") && error.message.contains(value), "{error}");
            assert_eq!(config, before, "a refused value must change nothing");
        }
        // Every text is a valid list of interface prefixes, so `socket_ifname` refuses none.
        for row in ROWS.iter().filter(|row| row.option != "socket_ifname") {
            assert!(
                bad.iter().any(|(option, _)| *option == row.option),
                "{}: this test needs a value that is refused",
                row.name
            );
        }
    }

    #[test]
    fn no_variable_compresses_ordinary_calls() {
        let error = Config::from_variables([("ACCL_COMPRESSED_CALLS", "all")]).unwrap_err();
        assert!(error.message.contains("pass torch_accl.Options(compressed_calls=...)"), "{error}");
        Config::default().set_option("compressed_calls", "most").unwrap_err();
    }

    #[test]
    fn names_and_options_correspond() {
        for row in ROWS {
            // The option `compression` of a group takes a whole compression; its variable `ACCL_CODEC` only names the
            // codec.
            let spelled = if row.option == "compression" { "codec" } else { row.option };
            assert_eq!(row.name, format!("{PREFIX}{}", spelled.to_uppercase()));
        }
    }

    #[test]
    fn interfaces_follow_the_syntax_of_nccl() {
        let filter = |text: &str| {
            let mut config = Config::default();
            config.set_variable("ACCL_SOCKET_IFNAME", text).unwrap();
            config.socket_ifname
        };
        assert!(filter("").accepts("eth0"));
        assert!(filter("eth").accepts("eth1") && !filter("eth").accepts("ib0"));
        assert!(filter("=eth0,ib0").accepts("ib0") && !filter("=eth0").accepts("eth01"));
        assert!(!filter("^docker,lo").accepts("docker0") && filter("^docker").accepts("eth0"));
        assert!(filter("^=lo").accepts("lo1") && !filter("^=lo").accepts("lo"));
    }
}

//! The source of this machine's constants for the cost model.
//!
//! The constants are measured once, with the engine's own calls between two threads (`measure`, `fit`), and stored in a
//! file (`cache`). Only the first rank of a group needs them: the other ranks use the first rank's. Owns no part of the
//! engine: it uses the engine's public interface and passes the constants to it as data. Read [`find`] first.
#![forbid(unsafe_code)]

mod cache;
mod fit;
mod measure;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use accl_engine::{Engine, cache_home};
use accl_schedule::cost::Machine;
use accl_types::config::{Calibration, Config};
use accl_types::{Error, Result};

use self::fit::Fitted;

/// Time limit of a measurement, and how often it is repeated while its times contradict the model.
struct Patience {
    time: Duration,
    attempts: u32,
}

/// Limits for a measurement that the user did not request. A machine that needs more is too busy, because the program
/// waits meanwhile.
const UNASKED: Patience = Patience { time: Duration::from_millis(600), attempts: 3 };
const ASKED: Patience = Patience { time: Duration::from_secs(10), attempts: 8 };

/// The source of constants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// The constants of the default machine.
    BuiltIn,
    /// Constants that were just measured.
    Measured,
    /// Constants read from or stored in this file.
    File(PathBuf),
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::BuiltIn => f.write_str("built in"),
            Source::Measured => f.write_str("measured"),
            Source::File(path) => path.display().fmt(f),
        }
    }
}

/// Constants and their source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calibrated {
    /// The constants.
    pub machine: Machine,
    /// The source of the constants.
    pub source: Source,
    /// The names of constants that the measurement does not determine. Each takes the nearest possible value.
    pub at_bounds: Vec<&'static str>,
    /// Time since the file was written; `None` without a file or if unknown.
    pub age: Option<Duration>,
}

impl Calibrated {
    fn built_in() -> Self {
        Self { machine: Machine::default(), source: Source::BuiltIn, at_bounds: Vec::new(), age: None }
    }

    fn in_file(path: PathBuf, fitted: Fitted) -> Self {
        let Fitted { machine, at_bounds } = fitted;
        let written = std::fs::metadata(&path).and_then(|facts| facts.modified()).ok();
        let age = written.and_then(|written| SystemTime::now().duration_since(written).ok());
        Self { machine, source: Source::File(path), at_bounds, age }
    }
}

/// Creates an engine that chooses algorithms by the constants of this machine, see [`find`].
pub fn engine(config: Config) -> Arc<Engine> {
    Engine::new(config, |config| find(config).machine)
}

/// Returns the constants that the settings ask for: from the file if they are there, otherwise measured now and stored
/// in it. A failure to read, measure or store is logged as a warning. Impossible constants are logged too; in a cache
/// file they are replaced. There is always a result.
pub fn find(config: &Config) -> Calibrated {
    let (path, of_user) = match &config.calibration {
        Calibration::Off => return Calibrated::built_in(),
        Calibration::Auto => (cache_home().map(|home| cache::path_in(&home)), false),
        Calibration::File(path) => (Some(PathBuf::from(path)), true),
    };
    find_at(path, of_user, &|| measured(&UNASKED))
}

fn find_at(path: Option<PathBuf>, of_user: bool, measure: &dyn Fn() -> Result<Fitted>) -> Calibrated {
    let mut degenerate = None;
    if let Some(path) = &path {
        match cache::read(path) {
            Ok(Some(kept)) => {
                let names = kept.machine.impossible();
                if names.is_empty() {
                    return Calibrated::in_file(path.clone(), kept);
                }
                if of_user {
                    // A file that the user named is used as it is and not overwritten, because its values may be
                    // intended.
                    tracing::warn!(
                        "{}: {} cannot be 0, so slow algorithms may be chosen; run `accl info --calibrate` to measure \
                         again",
                        path.display(),
                        listed(&names)
                    );
                    return Calibrated::in_file(path.clone(), kept);
                }
                tracing::info!("{}: {} cannot be 0; measuring again", path.display(), listed(&names));
                degenerate = Some(kept.machine);
            }
            Ok(None) => {}
            Err(why) if of_user => {
                tracing::warn!("{why}; the built-in constants are used: correct ACCL_CALIBRATION or remove the file");
                return Calibrated::built_in();
            }
            Err(why) => tracing::warn!("{why}; the file will be replaced"),
        }
    }
    match (measure().map(|fitted| keep(path.clone(), fitted)), degenerate, path) {
        (Ok(found), ..) => found,
        (Err(error), Some(machine), Some(path)) => {
            tracing::warn!(
                "{}: {} cannot be 0, and the machine could not be calibrated again: {error}; built-in constants \
                 replace them",
                path.display(),
                listed(&machine.impossible())
            );
            Calibrated::in_file(path, Fitted { machine: machine.made_possible(), at_bounds: Vec::new() })
        }
        (Err(error), ..) => {
            tracing::warn!("the machine was not calibrated: {error}; the built-in constants are used");
            Calibrated::built_in()
        }
    }
}

/// Measures, whatever the cache holds, and stores the result where [`find`] looks for it.
///
/// # Errors
/// If a group of two threads cannot be created, if the machine is too busy to be measured, or if calibration is off.
pub fn calibrate(config: &Config) -> Result<Calibrated> {
    let path = match &config.calibration {
        Calibration::Auto => cache_home().map(|home| cache::path_in(&home)),
        Calibration::File(path) => Some(PathBuf::from(path)),
        Calibration::Off => {
            return Err(Error::configuration("ACCL_CALIBRATION=off disables the measurement; unset it to calibrate"));
        }
    };
    measured(&ASKED).map(|fitted| keep(path, fitted))
}

/// Measures without storing the result.
///
/// # Errors
/// If a group of two threads cannot be created, or the machine is too busy to be measured.
pub fn measure() -> Result<Machine> {
    measured(&ASKED).map(|fitted| fitted.machine)
}

fn measured(patience: &Patience) -> Result<Fitted> {
    let until = Instant::now() + patience.time;
    fit::settle(patience.attempts, || measure::measure(until))
}

/// Reads the constants in a file that the user named.
///
/// # Errors
/// `Configuration` if the file does not exist or does not hold constants.
pub fn read_machine(path: &str) -> Result<Machine> {
    match cache::read(path.as_ref()) {
        Ok(Some(kept)) => Ok(kept.machine),
        Ok(None) => Err(Error::configuration(format!("{path}: there is no such file"))),
        Err(why) => Err(Error::configuration(why)),
    }
}

/// Parses the constants in a text of the cache file's format.
///
/// # Errors
/// `Configuration` for any other text.
pub fn read_text(text: &str) -> Result<Machine> {
    cache::parse(text).map(|kept| kept.machine).map_err(Error::configuration)
}

/// Stores measured constants. Constants at their bounds are not worth a warning: with them, the model still predicts
/// the measured calls, and `accl info` names them.
fn keep(path: Option<PathBuf>, fitted: Fitted) -> Calibrated {
    tracing::info!(machine = %fitted.machine, "calibrated");
    if !fitted.at_bounds.is_empty() {
        tracing::info!(
            "the measurement does not determine {}; the lowest possible values are used",
            listed(&fitted.at_bounds)
        );
    }
    let unkept = |Fitted { machine, at_bounds }| Calibrated { machine, source: Source::Measured, at_bounds, age: None };
    let Some(path) = path else { return unkept(fitted) };
    match cache::write(&path, &fitted) {
        Ok(()) => Calibrated::in_file(path, fitted),
        Err(why) => {
            tracing::warn!(
                "{why}; every start measures again until ACCL_CALIBRATION names a writable file or is `off`"
            );
            unkept(fitted)
        }
    }
}

/// Joins names as in a sentence.
fn listed(names: &[&str]) -> String {
    match names {
        [] => String::new(),
        [name] => (*name).to_owned(),
        [others @ .., last] => format!("{} and {last}", others.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tempfile::{NamedTempFile, TempPath};

    use super::*;

    const DEGENERATE: &str = "shm_call_ps = 0\ntcp_latency_ps = 0\nswitch_ps = 77\n";

    /// Creates a file with the given text, which is removed when the returned value is dropped.
    fn kept(text: &str) -> TempPath {
        let path = NamedTempFile::new().unwrap().into_temp_path();
        std::fs::write(&path, text).unwrap();
        path
    }

    fn text(path: &TempPath) -> String {
        std::fs::read_to_string(path).unwrap()
    }

    fn fitted() -> Fitted {
        Fitted { machine: Machine { switch_ps: 4_444_444, ..Machine::default() }, at_bounds: vec!["shm_call_ps"] }
    }

    #[test]
    fn a_degenerate_cache_is_measured_again_once() {
        let kept = kept(DEGENERATE);
        let measured = Cell::new(0);
        let measure = || {
            measured.set(measured.get() + 1);
            Ok(fitted())
        };
        for _ in 0..3 {
            let found = find_at(Some(kept.to_path_buf()), false, &measure);
            assert_eq!((found.machine, found.source), (fitted().machine, Source::File(kept.to_path_buf())));
            assert_eq!(found.at_bounds, fitted().at_bounds);
        }
        assert_eq!(measured.get(), 1);
        assert_eq!(cache::parse(&text(&kept)), Ok(fitted()));
    }

    #[test]
    fn a_degenerate_cache_of_a_busy_machine_is_used_where_it_can_be_true() {
        let kept = kept(DEGENERATE);
        let found = find_at(Some(kept.to_path_buf()), false, &|| Err(Error::timeout("it is too busy")));
        assert_eq!(found.machine, Machine { switch_ps: 77, ..Machine::default() });
        // The file is unchanged, so the next start measures.
        assert_eq!(text(&kept), DEGENERATE);
    }

    #[test]
    fn a_degenerate_file_that_the_user_named_is_taken_as_it_is() {
        let kept = kept(DEGENERATE);
        let found = find_at(Some(kept.to_path_buf()), true, &|| unreachable!("it is measured"));
        assert_eq!((found.machine.shm.call_ps, found.machine.tcp.latency_ps), (0, 0));
        assert_eq!((found.source, text(&kept)), (Source::File(kept.to_path_buf()), DEGENERATE.to_owned()));
    }

    #[test]
    fn names_make_a_sentence() {
        assert_eq!(listed(&["a"]), "a");
        assert_eq!(listed(&["a", "b"]), "a and b");
        assert_eq!(listed(&["a", "b", "c"]), "a, b and c");
    }
}

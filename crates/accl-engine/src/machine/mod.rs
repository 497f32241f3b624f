//! The constants of this machine for the cost model: where they come from.
//!
//! They are measured once, with the engine's own calls between two threads (`measure`, `fit`), and kept in a file
//! (`cache`). Only the first rank of a group needs them: the others use its own. Read [`find`] first.

mod cache;
mod fit;
mod measure;

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use accl_schedule::cost::Machine;
use accl_types::config::{Calibration, Config};
use accl_types::{Error, Result};

use crate::env::cache_home;

/// A machine on which this is not enough is too busy for a measurement that somebody waits for without having asked.
const PATIENCE: Duration = Duration::from_millis(600);
/// For one that was asked for.
const MORE_PATIENCE: Duration = Duration::from_secs(10);

/// Where constants came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// They are those of the default machine.
    BuiltIn,
    /// They were measured just now.
    Measured,
    /// They lay in this file.
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

/// Constants and where they came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Calibrated {
    /// The constants.
    pub machine: Machine,
    /// Where they came from.
    pub source: Source,
    /// How long ago the file was written.
    pub age: Option<Duration>,
}

impl Calibrated {
    fn built_in() -> Self {
        Self { machine: Machine::default(), source: Source::BuiltIn, age: None }
    }

    fn in_file(path: PathBuf, machine: Machine) -> Self {
        let written = std::fs::metadata(&path).and_then(|facts| facts.modified()).ok();
        let age = written.and_then(|written| SystemTime::now().duration_since(written).ok());
        Self { machine, source: Source::File(path), age }
    }
}

/// The constants that the settings ask for: those that lie in the cache, else measured now and kept there. What cannot
/// be read, measured or kept is a warning; there is always an answer.
pub fn find(config: &Config) -> Calibrated {
    let (path, of_user) = match &config.calibration {
        Calibration::Off => return Calibrated::built_in(),
        Calibration::Auto => (cache_home().map(|home| cache::path_in(&home)), false),
        Calibration::File(path) => (Some(PathBuf::from(path)), true),
    };
    if let Some(path) = &path {
        match cache::read(path) {
            Ok(Some(machine)) => return Calibrated::in_file(path.clone(), machine),
            Ok(None) => {}
            Err(why) if of_user => {
                // A file that the user named is not overwritten: it may be something else.
                tracing::warn!("{why}; the built-in constants are used: correct ACCL_CALIBRATION or remove the file");
                return Calibrated::built_in();
            }
            Err(why) => tracing::warn!("{why}; it is written anew"),
        }
    }
    match measure_and_keep(path, PATIENCE) {
        Ok(found) => found,
        Err(error) => {
            tracing::warn!("the machine was not calibrated: {error}; the built-in constants are used");
            Calibrated::built_in()
        }
    }
}

/// Measures anew, whatever the cache holds, and keeps the result where [`find`] looks for it.
///
/// # Errors
/// When a world of two threads cannot be made, or the machine is too busy to be measured.
pub fn calibrate(config: &Config) -> Result<Calibrated> {
    let path = match &config.calibration {
        Calibration::Auto => cache_home().map(|home| cache::path_in(&home)),
        Calibration::File(path) => Some(PathBuf::from(path)),
        Calibration::Off => {
            return Err(Error::configuration("ACCL_CALIBRATION=off: nothing is measured; take the setting back"));
        }
    };
    measure_and_keep(path, MORE_PATIENCE)
}

/// Measures and keeps nothing.
///
/// # Errors
/// As [`calibrate`].
pub fn measure() -> Result<Machine> {
    measured(MORE_PATIENCE)
}

fn measured(patience: Duration) -> Result<Machine> {
    measure::measure(patience).map(|times| fit::fit(&times))
}

/// The constants in a file, as a user named it.
///
/// # Errors
/// `Configuration` when there is none, or something else.
pub fn read_machine(path: &str) -> Result<Machine> {
    match cache::read(path.as_ref()) {
        Ok(Some(machine)) => Ok(machine),
        Ok(None) => Err(Error::configuration(format!("{path}: there is no such file"))),
        Err(why) => Err(Error::configuration(why)),
    }
}

/// The constants in a text such as that of the cache.
///
/// # Errors
/// `Configuration` for anything else.
pub fn read_text(text: &str) -> Result<Machine> {
    cache::parse(text).map_err(Error::configuration)
}

fn measure_and_keep(path: Option<PathBuf>, patience: Duration) -> Result<Calibrated> {
    let machine = measured(patience)?;
    tracing::info!(%machine, "calibrated");
    let measured = Calibrated { machine, source: Source::Measured, age: None };
    let Some(path) = path else { return Ok(measured) };
    match cache::write(&path, &machine) {
        Ok(()) => Ok(Calibrated::in_file(path, machine)),
        Err(why) => {
            tracing::warn!(
                "{why}; every start measures anew until ACCL_CALIBRATION names a file that can be written, or is `off`"
            );
            Ok(measured)
        }
    }
}

//! The kinds of components that execute whole calls in groups of this process, one line each.
//!
//! Owns their list, and the check of settings that name them. Read [`kinds`] first.

use std::sync::Arc;

use accl_device::DeviceKind;
use accl_engine::offload::{self, OffloadKind};
use accl_library::LibraryKind;
use accl_types::Result;
use accl_types::config::Config;
use pyo3::prelude::*;

use crate::devices::Opener;

/// Creates all kinds, in the order in which a group asks them.
pub(crate) fn kinds() -> Vec<Arc<dyn OffloadKind>> {
    vec![DeviceKind::new(Arc::new(Opener)), LibraryKind::new("mpi")]
}

/// Returns the settings of this process's environment.
///
/// # Errors
/// `Configuration` for a setting that is unknown or cannot work.
pub(crate) fn config_from_environment() -> Result<Config> {
    let config = accl_engine::config_from_environment()?;
    check(&config)?;
    Ok(config)
}

/// Returns the names that `sidestep` accepts in `COLLECTIVE=NAME`, apart from `host`. Each may be the name of a
/// transport whose package must be loaded before.
#[pyfunction]
fn offload_names() -> Vec<&'static str> {
    kinds().iter().filter(|kind| kind.is_named_by_sidestep()).map(|kind| kind.name()).collect()
}

/// Adds this file's function to the module.
pub(crate) fn add_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(offload_names, module)?)
}

/// Refuses settings that parse but cannot work.
///
/// # Errors
/// `Configuration`, with the setting and the accepted values.
pub(crate) fn check_settings(config: &Config) -> Result<()> {
    accl_engine::check_settings(config)?;
    check(config)
}

/// Refuses settings that name a device or library which cannot execute calls.
///
/// # Errors
/// The errors of [`check_settings`] for these settings.
fn check(config: &Config) -> Result<()> {
    accl_device::check(config)?;
    offload::check(config, &kinds())
}

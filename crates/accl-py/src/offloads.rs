//! The kinds of components that execute whole calls in groups of this process, one line each.
//!
//! Owns their registration, and the check of settings that name them. Read [`kinds`] first.

use std::sync::Arc;

use accl_device::DeviceKind;
use accl_engine::offload::{self, OffloadKind};
use accl_library::LibraryKind;
use accl_types::Result;
use accl_types::config::Config;

use crate::devices::Opener;

/// Returns all kinds, in the order in which a group asks them.
pub(crate) fn kinds() -> Vec<Arc<dyn OffloadKind>> {
    vec![DeviceKind::new(Arc::new(Opener)), LibraryKind::new("mpi")]
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
pub(crate) fn check(config: &Config) -> Result<()> {
    accl_device::check(config)?;
    offload::check(config, &kinds())
}

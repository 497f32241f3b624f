//! Settings whose values are names of rows that the table of settings does not know: transports may be handed in at run time.

use accl_schedule::cost::Near;
use accl_types::Result;
use accl_types::config::Config;

/// Sets one option by its name in `torch_accl.Options`.
///
/// # Errors
/// `Configuration` for an unknown option, and for a value that is not accepted.
pub fn set_option(config: &mut Config, name: &str, value: &str) -> Result<()> {
    let mut changed = config.clone();
    changed.set_option(name, value)?;
    if name == "transports" {
        accl_transport::named(&changed.transports, name)?;
    }
    *config = changed;
    Ok(())
}

/// What connects ranks of one host, by the transport that the settings try first.
pub(crate) fn near_of(config: &Config) -> Near {
    match config.transports.first().and_then(|name| accl_transport::find(name)) {
        Some(row) if !row.is_cheap_to_look_at => Near::Tcp,
        Some(_) | None => Near::Shm,
    }
}

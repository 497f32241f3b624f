//! Checks and documentation of settings that the table of settings (in accl-types) cannot describe: codecs and
//! transports. Their tables are in crates that depend on accl-types, and transports may be registered at run time.
//!
//! Owns the descriptions of accepted values, the page `docs/environment.md`, and the check of names in settings. Read
//! [`check_settings`] first.

use std::sync::Arc;

use accl_kernels::codec::{self, Codec};
use accl_schedule::cost::IntraNode;
use accl_types::config::{self, Config};
use accl_types::{Error, Result};

/// Returns the codec that the settings name.
///
/// # Errors
/// `Configuration` if the name is not a codec; the message names the setting and lists the accepted values.
pub(crate) fn codec_of(config: &Config) -> Result<Arc<dyn Codec>> {
    codec::parse(&config.codec)
        .map_err(|error| Error::configuration(format!("compression (ACCL_CODEC): {}", error.message)))
}

/// Refuses a setting that parses but cannot work: an unknown codec or transport. Settings of offloads are checked by
/// their kinds.
///
/// # Errors
/// `Configuration`, naming the setting and the accepted values.
pub fn check_settings(config: &Config) -> Result<()> {
    accl_transport::check(&config.transports)?;
    codec_of(config).map(drop)
}

/// Returns how ranks of one host are connected, judged by the first transport in the settings.
pub(crate) fn intra_node_of(config: &Config) -> IntraNode {
    match config.transports.first().and_then(|name| accl_transport::find(name)) {
        Some(row) if !row.polls_without_syscall => IntraNode::Tcp,
        Some(_) | None => IntraNode::Shm,
    }
}

/// Returns a description of the values that a setting accepts.
pub fn accepted(row: &config::Row) -> String {
    row.accepted.words(&codec::accepted()).to_owned()
}

/// Returns the text of the page `docs/environment.md`.
pub fn settings_page() -> String {
    config::environment_page(&codec::accepted())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_codec_is_one_and_an_unknown_one_is_refused_with_all_that_there_are() {
        check_settings(&Config::default()).unwrap();
        let refused = |codec: &str| {
            let error = check_settings(&Config { codec: codec.to_owned(), ..Config::default() }).unwrap_err();
            assert!(error.message.starts_with("compression (ACCL_CODEC): "), "{}", error.message);
            error.message
        };
        let message = refused("maxmim:4");
        assert!(message.contains("unknown codec `maxmim`") && message.contains("did you mean `maxmin`?"), "{message}");
        assert!(codec::CODECS.iter().all(|row| message.contains(row.name)), "{message}");
        assert!(refused("maxmin:12").contains("bits is 12; expected 1 to 8"));
    }

    #[test]
    fn the_setting_of_the_codec_lists_every_row() {
        let row = config::ROWS.iter().find(|row| row.name == "ACCL_CODEC").unwrap();
        let words = accepted(row);
        assert!(codec::CODECS.iter().all(|row| words.contains(&row.spelled())), "{words}");
        assert!(settings_page().contains(&words));
    }
}

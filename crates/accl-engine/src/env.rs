//! The only place that reads the process environment.

use std::path::PathBuf;

use accl_types::Result;
use accl_types::config::{Config, Meaning, PREFIX, meaning};

use crate::settings::check_settings;

/// Maximum number of characters taken from each launcher variable.
const MAX_LABEL_PART: usize = 40;

/// Returns the user's cache directory: `XDG_CACHE_HOME`, or `.cache` in `HOME`; `None` if neither variable holds an
/// absolute path.
pub fn cache_home() -> Option<PathBuf> {
    #[expect(clippy::disallowed_methods, reason = "the one reader of the environment")]
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    variable("XDG_CACHE_HOME").or_else(|| variable("HOME").map(|home| home.join(".cache")))
}

/// Returns a prefix for session names that identifies this start of an elastic launcher: `run.attempt.`, or the empty
/// string.
///
/// The prefix helps a person who reads the store; it is not an identity. Launchers on two hosts count restarts
/// separately, and ranks of several jobs may create a group together.
pub(crate) fn launch_label() -> String {
    #[expect(clippy::disallowed_methods, reason = "the one reader of the environment")]
    let variable = |name| std::env::var(name).ok();
    let part = |name| {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        variable(name).map(|text| text.chars().filter(|&c| plain(c)).take(MAX_LABEL_PART).collect::<String>() + ".")
    };
    ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"].into_iter().filter_map(part).collect()
}

/// Returns the settings from this process's environment.
///
/// # Errors
/// `Configuration` for a mistyped `ACCL_*` variable or a value that is not accepted.
pub fn config_from_environment() -> Result<Config> {
    let config = Config::from_variables(variables())?;
    check_settings(&config)?;
    Ok(config)
}

/// Returns the variables of this process's environment that start with our prefix but have no effect, each with the
/// reason.
pub fn unused_variables() -> Vec<(String, String)> {
    let mut found: Vec<_> = variables()
        .filter_map(|(name, value)| {
            let why = match meaning(&name, &value) {
                Meaning::Foreign { owner } => format!("it belongs to {owner}"),
                Meaning::Unknown { near: Some(near) } => {
                    format!("did you mean {near}? `accl config` lists the settings")
                }
                Meaning::Unknown { near: None } => "`accl config` lists the settings".to_owned(),
                Meaning::Setting | Meaning::Expected | Meaning::Mistyped { .. } => return None,
            };
            Some((name, why))
        })
        .collect();
    found.sort_unstable();
    found
}

fn variables() -> impl Iterator<Item = (String, String)> {
    #[expect(clippy::disallowed_methods, reason = "the one reader of the environment")]
    let variables = std::env::vars_os();
    variables
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
        // Variables with this prefix configure our own test suite; they are not product settings.
        .filter(|(name, _)| name.starts_with(PREFIX) && !name.starts_with("ACCL_TEST_"))
}

//! The meaning of an environment variable under our prefix: a setting, a typing mistake, or a variable of another
//! owner.
//!
//! Other programs and Kubernetes also use the prefix, so an unknown name alone is no reason to refuse a job. Read
//! [`meaning`] first.

use super::{ALIASES, FOREIGN, ROWS};
use crate::nearest_within;

/// Number of typing mistakes at which a name is refused as a misspelled setting.
const MISTAKES: usize = 1;

/// Largest number of typing mistakes at which a warning names the similar setting.
const HINTED: usize = 2;

/// The meaning of a variable under our prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Meaning {
    /// A setting or an alias of a setting.
    Setting,
    /// Another package of this project reads the variable, or Kubernetes sets it for a service. No report is needed.
    Expected,
    /// Another project is known to use the variable.
    Foreign {
        /// The project.
        owner: &'static str,
    },
    /// One typing mistake away from a known name.
    Mistyped {
        /// The known name.
        near: &'static str,
    },
    /// An unknown name.
    Unknown {
        /// A similar known name, or `None`.
        near: Option<&'static str>,
    },
}

/// Returns the meaning of the variable `name` with this value.
pub fn meaning(name: &str, value: &str) -> Meaning {
    let settings = ROWS.iter().map(|row| row.name).chain(ALIASES.iter().map(|alias| alias.name));
    if is_address(value) && is_of_service(name, value) {
        return Meaning::Expected;
    }
    if settings.clone().any(|setting| setting == name) {
        return Meaning::Setting;
    }
    if is_of_service(name, value) {
        return Meaning::Expected;
    }
    if let Some(foreign) = FOREIGN.iter().find(|foreign| foreign.is(name)) {
        return if foreign.is_companion() { Meaning::Expected } else { Meaning::Foreign { owner: foreign.owner } };
    }
    let companions = FOREIGN.iter().filter(|foreign| foreign.is_companion()).map(|foreign| foreign.name);
    let ours = settings.chain(companions);
    match nearest_within(name, ours.clone(), MISTAKES) {
        Some(near) => Meaning::Mistyped { near },
        None => Meaning::Unknown { near: nearest_within(name, ours, HINTED) },
    }
}

fn is_address(value: &str) -> bool {
    ["tcp://", "udp://", "sctp://"].iter().any(|scheme| value.trim_start().starts_with(scheme))
}

/// Whether Kubernetes sets the variable in every pod for a service whose name begins with our prefix, such as `accl` or
/// `accl-train`.
/// Docker's links have the same forms.
fn is_of_service(name: &str, value: &str) -> bool {
    name.ends_with("_SERVICE_HOST")
        || name.ends_with("_SERVICE_PORT")
        || name.contains("_SERVICE_PORT_")
        // A plain number may be meant for us: only an address marks the variable as Kubernetes'.
        || name.ends_with("_PORT") && is_address(value)
        || is_published_port(name)
}

/// Matches `*_PORT_<number>_TCP` (also `_UDP` and `_SCTP`), optionally followed by `_PROTO`, `_PORT` or `_ADDR`.
fn is_published_port(name: &str) -> bool {
    let without = |name: &'_ str, ends: &[&str]| ends.iter().find_map(|end| name.strip_suffix(end)).map(str::to_owned);
    let name = without(name, &["_PROTO", "_PORT", "_ADDR"]).unwrap_or_else(|| name.to_owned());
    let numbered = without(&name, &["_TCP", "_UDP", "_SCTP"]);
    let number = numbered.as_deref().and_then(|numbered| numbered.rsplit_once("_PORT_")).map(|(_, number)| number);
    number.is_some_and(|number| number.parse::<u16>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Row;

    #[test]
    fn names_of_ours_are_settings_and_belong_to_no_other_project() {
        for name in ROWS.iter().map(|row: &Row| row.name).chain(["ACCL_DEBUG"]) {
            assert_eq!(meaning(name, "1"), Meaning::Setting);
            assert!(!FOREIGN.iter().any(|foreign| foreign.is(name)), "{name}");
        }
    }

    #[test]
    fn only_one_typing_mistake_is_refused() {
        for (name, near) in [
            ("ACCL_PORTRANGE", "ACCL_PORT_RANGE"),
            ("ACCL_LOGS", "ACCL_LOG"),
            ("ACCL_DEBU", "ACCL_DEBUG"),
            ("ACCL_TRANSPROTS", "ACCL_TRANSPORTS"),
            ("ACCL_MPI_TIMEOUTS", "ACCL_MPI_TIMEOUT"),
        ] {
            assert_eq!(meaning(name, "1"), Meaning::Mistyped { near });
        }
        for name in ["ACCL_TX_DEPTH", "ACCL_DB_PATH", "ACCL_HOME", "ACCL_PROFILE", "ACCL_DEVICE_IDS", "ACCL_NAME"] {
            assert_eq!(meaning(name, "1"), Meaning::Unknown { near: None });
        }
        assert_eq!(meaning("ACCL_RING_BYTE_", "1"), Meaning::Mistyped { near: "ACCL_RING_BYTES" });
        assert_eq!(meaning("ACCL_RINGBYTE", "1"), Meaning::Unknown { near: Some("ACCL_RING_BYTES") });
    }

    #[test]
    fn names_of_others_have_an_owner_or_are_expected() {
        for name in ["ACCL_DEVICE_ID", "ACCL_NP", "ACCL_C4_STATS_MODE", "ACCL_PROFILER_OUTPUT_DIR", "ACCL_MAX_PORT"] {
            assert!(matches!(meaning(name, "1"), Meaning::Foreign { .. }), "{name}");
        }
        assert_eq!(meaning("ACCL_MPI_TIMEOUT", "1"), Meaning::Expected);
        assert_eq!(meaning("ACCL_MAX_PORT", "tcp://10.0.0.7:80"), Meaning::Expected, "of a service `accl-max`");
    }

    #[test]
    fn forms_of_kubernetes_are_expected() {
        let address = "sctp://10.0.0.7:53";
        for (name, value) in [
            ("ACCL_SERVICE_HOST", "10.0.0.7"),
            ("ACCL_SERVICE_PORT", "80"),
            ("ACCL_LOG_SERVICE_PORT_HTTP", "80"),
            ("ACCL_PORT", address),
            ("ACCL_PORT_PORT", address),
            ("ACCL_PORT_RANGE_PORT", address),
            ("ACCL_PORT_53_SCTP", address),
            ("ACCL_X_PORT_53_UDP_PROTO", "udp"),
        ] {
            assert_eq!(meaning(name, value), Meaning::Expected, "{name}");
        }
        for (name, value) in
            [("ACCL_PORT", "80"), ("ACCL_PORT_TCP", "80"), ("ACCL_PORT_X_TCP", "80"), ("ACCL_HOST", address)]
        {
            assert!(matches!(meaning(name, value), Meaning::Unknown { .. }), "{name}");
        }
        assert_eq!(meaning("ACCL_PORT_RANGE", address), Meaning::Setting, "a name without such a form is ours");
    }
}

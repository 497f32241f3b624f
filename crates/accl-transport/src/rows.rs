//! The table of transports: the transports of this crate, transports that are registered while the process runs, and
//! names that are announced.
//!
//! Owns the table; [`crate::transport`] defines a row.

use std::sync::{PoisonError, RwLock};

use accl_types::{Error, Result};

use crate::transport::{MAX_NAME_BYTES, Transport};
use crate::{shm, tcp};

/// The transports of this crate, in the order of preference.
pub const TRANSPORTS: &[Transport] = &[shm::ROW, tcp::ROW];

/// Registered transports. They are few, and stay for the life of the process because links name them.
static REGISTERED: RwLock<Vec<&'static Transport>> = RwLock::new(Vec::new());

/// Names that settings may have before the transport is registered. They are few as well.
static ANNOUNCED: RwLock<Vec<String>> = RwLock::new(Vec::new());

/// Lets settings name a transport that is registered later, before an endpoint opens it.
pub fn announce(name: &str) {
    let mut announced = ANNOUNCED.write().unwrap_or_else(PoisonError::into_inner);
    if !announced.iter().any(|known| known == name) {
        announced.push(name.to_owned());
    }
}

fn is_announced(name: &str) -> bool {
    ANNOUNCED.read().unwrap_or_else(PoisonError::into_inner).iter().any(|known| known == name)
}

/// Adds a transport that `ACCL_TRANSPORTS` may then name. Every process of a job must do so before its first group.
///
/// # Errors
/// `InvalidArgument` if the name is taken or is not a valid name.
pub fn register(transport: Transport) -> Result<&'static Transport> {
    let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let name = transport.name;
    if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.chars().all(is_name) {
        return Err(Error::invalid_argument(format!(
            "name of a transport: expected up to {MAX_NAME_BYTES} lower-case letters, digits and _, got `{}`",
            name.escape_default()
        )));
    }
    let mut registered = REGISTERED.write().unwrap_or_else(PoisonError::into_inner);
    if TRANSPORTS.iter().chain(registered.iter().copied()).any(|row| row.name == name) {
        return Err(Error::invalid_argument(format!("a transport `{name}` already exists")));
    }
    let row: &'static Transport = Box::leak(Box::new(transport));
    registered.push(row);
    Ok(row)
}

/// Returns every transport, the transports of this crate first.
pub fn transports() -> Vec<&'static Transport> {
    let registered = REGISTERED.read().unwrap_or_else(PoisonError::into_inner);
    TRANSPORTS.iter().chain(registered.iter().copied()).collect()
}

/// Returns the transport with this name.
pub fn find(name: &str) -> Option<&'static Transport> {
    // The registered transports are searched, under their lock, only if the name is not one of this crate.
    TRANSPORTS.iter().find(|row| row.name == name).or_else(|| transports().into_iter().find(|row| row.name == name))
}

/// Checks whether the setting `transports` may have this value.
///
/// # Errors
/// `Configuration` if a name is neither known nor announced, or if the list is empty.
pub fn check(names: &[String]) -> Result<()> {
    if names.is_empty() {
        return Err(refusal(names, "the list is empty"));
    }
    let is_known = |name: &String| find(name).is_some() || is_announced(name);
    match names.iter().find(|name| !is_known(name)) {
        Some(name) => Err(refusal(names, &format!("unknown transport `{name}`"))),
        None => Ok(()),
    }
}

/// Returns the transports that the setting `transports` names, in its order.
///
/// # Errors
/// The errors of [`check`], and `Configuration` if a transport was announced and not registered.
pub fn named(names: &[String]) -> Result<Vec<&'static Transport>> {
    check(names)?;
    let is_missing = |name: &str| refusal(names, &format!("transport `{name}` is announced but not registered"));
    names.iter().map(|name| find(name).ok_or_else(|| is_missing(name))).collect()
}

fn refusal(names: &[String], why: &str) -> Error {
    let mut known: Vec<String> = transports().iter().map(|row| row.name.to_owned()).collect();
    let announced = ANNOUNCED.read().unwrap_or_else(PoisonError::into_inner);
    known.extend(announced.iter().filter(|name| find(name).is_none()).cloned());
    let expected = format!("expected a comma-separated list of {}", known.join(", "));
    let value = names.join(",");
    Error::configuration(format!("transports (ACCL_TRANSPORTS): value `{value}` is not accepted ({why}); {expected}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;

    #[test]
    fn the_default_has_the_order_of_the_table_and_the_setting_names_every_transport() {
        let names: Vec<_> = TRANSPORTS.iter().map(|row| row.name).collect();
        let default = Settings::default().transports;
        let in_order: Vec<_> = names.iter().filter(|name| default.iter().any(|tried| tried == *name)).collect();
        assert!(in_order.into_iter().eq(&default), "{default:?}");
        let setting = accl_types::config::ROWS.iter().find(|row| row.name == "ACCL_TRANSPORTS").unwrap();
        let words = setting.accepted.words("");
        assert!(words.contains(&names.join(", ")), "{words}");
    }

    #[test]
    fn what_cannot_be_a_row_is_refused() {
        for name in ["", "Shm", "carrier-pigeon", "shm", "a name of more than thirty-one bytes"] {
            let why = register(Transport { name, ..shm::ROW }).unwrap_err();
            assert!(why.message.contains(name), "{why}");
        }
        assert_eq!(transports().len(), TRANSPORTS.len());
    }

    #[test]
    fn a_name_without_a_transport_is_refused_with_those_that_there_are() {
        let names = ["tcp", "udp"].map(str::to_owned);
        let why = named(&names).unwrap_err();
        assert!(why.message.contains("`udp`") && why.message.contains("shm, tcp"), "{why}");
        assert_eq!(named(&names[..1]).unwrap()[0].name, "tcp");
    }

    #[test]
    fn settings_may_name_what_was_announced_and_endpoints_what_was_handed_in() {
        let names = ["tcp", "of_a_package"].map(str::to_owned);
        assert!(check(&names).is_err());
        announce("of_a_package");
        check(&names).unwrap();
        let why = named(&names).unwrap_err();
        assert!(why.message.contains("transport `of_a_package` is announced but not registered"), "{why}");
    }
}

//! URL of a device, as data.
//!
//! Owns the values that `device=` accepts, the ranks file that it may name, and the driver settings that follow from both. Opens nothing but that
//! file. The rows of [`crate::buses::BUSES`] own everything that differs between kinds of devices. Read [`DeviceUrl`] first.

mod parse;
pub(crate) mod ranks;
mod settings;
#[cfg(test)]
mod tests;
mod url;

pub use parse::keys;
pub use ranks::FIRST_PORT;
pub use url::{BusKind, Design, DeviceAddress, DeviceUrl, Key, Open, SHARED_KEYS, Sessions, Wire};

//! URL of a device, as data.
//!
//! Owns the values that `device=` accepts, the ranks file that it may name, and the driver settings that follow from both. Opens nothing but that
//! file. Read [`DeviceUrl`] first.

mod ranks;
mod settings;
#[cfg(test)]
mod tests;
mod url;

pub use ranks::FIRST_PORT;
pub use url::{Address, Addresses, Design, DeviceUrl, KEYS, Key, Location, Wire};

//! The text that names a device, as data.
//!
//! Owns what `device=` may say, the file of ranks that it may name, and the settings of the driver that follow from both. Opens nothing but
//! that file. Read [`DeviceUrl`] first.

mod ranks;
mod settings;
#[cfg(test)]
mod tests;
mod url;

pub use ranks::FIRST_PORT;
pub use url::{Address, Addresses, Design, DeviceUrl, KEYS, Key, Place, Wire};

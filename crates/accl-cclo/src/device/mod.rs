//! URL of a device, as data.
//!
//! Owns the values that `device=` accepts, the ranks file that it may name, and the driver settings that follow from both. Opens nothing but that
//! file. The parser of URLs is in [`crate::parse`]. The rows of [`crate::buses::BUSES`] own everything that differs between kinds of devices. Read
//! [`DeviceUrl`] first.

pub(crate) mod ranks;
mod settings;
mod url;

pub use crate::design::Design;
pub use ranks::FIRST_PORT;
pub(crate) use url::memory_name;
pub use url::{BusKind, DeviceAddress, DeviceUrl, Key, Open, SHARED_KEYS, Sessions, Wire};

//! A device URL as data, and the kinds of bus that a URL can name.
//!
//! Owns both types, because each refers to the other: a URL has a kind, and a kind has functions of a URL. Does not know any kind of bus: they are in
//! [`crate::buses`], one file for each. The parser is in `parse`, and the driver settings are in `settings.rs`. Read [`BusKind`] first.

use std::fmt;
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};

use accl_types::{Error, ErrorKind, Result, show_size};

use crate::bus::{Bus, Memory};
use crate::design::Design;
use crate::memory_map::DataType;

/// A device, as `device=` names it. [`DeviceUrl::parse`] and [`fmt::Display`] are inverse to each other. Omitted keys are stored as `None`; accessors
/// such as [`DeviceUrl::design`] return their defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceUrl {
    pub(crate) bus: &'static BusKind,
    pub(crate) address: DeviceAddress,
    /// Names and values of the given keys that only this bus accepts, in the order of [`BusKind::keys`].
    pub(crate) own: Vec<(&'static str, String)>,
    /// Network design of the device, if given; see [`DeviceUrl::design`].
    pub(crate) design: Option<Design>,
    /// Path of a file with the addresses of all ranks; see [`DeviceUrl::ranks_file`].
    pub(crate) ranks: Option<PathBuf>,
    pub(crate) rx_buffers: Option<u32>,
    pub(crate) rx_bytes: Option<u32>,
    pub(crate) eager: Option<u32>,
    pub(crate) rendezvous: Option<u32>,
    pub(crate) memory: Option<Memory>,
    pub(crate) compression: Option<Wire>,
}

/// Kind of bus: a row of [`crate::buses::BUSES`]. Its functions may be called from any thread. They open nothing, except for `open` and files that a
/// URL names.
pub struct BusKind {
    /// Scheme of its URLs, which precedes `://`. Also the name of its file in `src/buses`, and of the device in messages.
    pub scheme: &'static str,
    /// A second name for the URL that consists of the scheme only.
    pub alias: Option<&'static str>,
    /// Forms of its URLs, as messages show them. Up to its question mark, the first form names the kind in messages about keys.
    pub forms: &'static [&'static str],
    /// A URL that is parsed, and is shown in the same form. Tests use it.
    pub example: &'static str,
    /// Keys that only this kind accepts, in addition to [`SHARED_KEYS`]. Their values are texts of at least one byte; see [`DeviceUrl::own_key`].
    pub keys: &'static [Key],
    /// Parses the address part of a URL, which is empty if the URL has none. An error is a clause that says what is expected.
    pub parse: fn(&str) -> std::result::Result<DeviceAddress, String>,
    /// Network design of a device whose URL has no key `design`.
    pub design: Design,
    /// Whether a URL without the key `design` accepts a device of any design. `design` must then be a design whose messages every design supports.
    pub suits_any_network: bool,
    /// Memory of a device whose URL has no key `memory`.
    pub memory: Memory,
    /// Source of the sessions between the devices of the ranks.
    pub sessions: Sessions,
    /// Returns the address at which other ranks' devices reach the device of a rank. Is not called if a ranks file has the addresses. Its arguments
    /// are the URL, the rank, and the number of ranks.
    pub rank_address: fn(&DeviceUrl, u32, u32) -> Result<SocketAddrV4>,
    /// Refuses a URL whose keys do not suit this kind, with a clause as error. Its arguments are the URL and the number of ranks, which is 1 as long
    /// as the number is unknown.
    pub check: fn(&DeviceUrl, u32) -> std::result::Result<(), String>,
    /// Way in which a device is opened.
    pub open: Open,
}

/// Way in which a device is opened.
#[derive(Clone, Copy, Debug)]
pub enum Open {
    /// This function opens the device of a rank. Its arguments are the URL and the rank.
    Here(fn(&DeviceUrl, u32) -> Result<Box<dyn Bus>>),
    /// The layer above this crate opens the device, which exists only in the process of its rank. The text is the error for other processes.
    Above(&'static str),
}

/// Source of the sessions with which devices address one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sessions {
    /// The session of a rank is always the rank. A ranks file may not give another one.
    Ranks,
    /// The bus sets the sessions in [`Bus::receive_info`], once the ranks have exchanged their texts.
    Exchanged,
    /// The ranks file gives the sessions. The default for UDP is the rank, because a UDP session is the index of a socket. The text is the
    /// explanation in the error about a missing session.
    RanksFile(&'static str),
}

/// Parsed address part of a URL. Two URLs of one kind with equal addresses name the same device. Addresses are equal if their ranks files have equal
/// paths, or, without ranks files, if their texts are equal.
#[derive(Clone, Debug)]
pub struct DeviceAddress {
    /// The address as URLs show it. [`BusKind::parse`] returns an equal address for this text, and the same text for all forms of one address. It may
    /// keep the path of a ranks file as written.
    pub text: String,
    /// Path of the ranks file, if the address names one. The bus looks the names of hosts in this file up, so they need not be IPv4 addresses.
    pub ranks_file: Option<PathBuf>,
}

/// Representation of float32 between devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Wire {
    /// Same as in memory.
    Full,
    /// Half precision.
    Half,
}

/// Key of a device URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// Name of the key.
    pub name: &'static str,
    /// Accepted values.
    pub accepted: &'static str,
    /// A value that the key accepts. Tests use it.
    pub example: &'static str,
    /// Purpose of the key, in a sentence.
    pub about: &'static str,
    /// Error for a URL without the key, as a clause; `None` if the key is optional.
    pub missing: Option<&'static str>,
}

impl Key {
    /// Returns a key that a URL may omit.
    pub const fn optional(
        name: &'static str,
        accepted: &'static str,
        example: &'static str,
        about: &'static str,
    ) -> Self {
        Self { name, accepted, example, about, missing: None }
    }

    /// Returns the error for a value that the key does not accept, as a clause.
    pub fn refused(&self, value: &str) -> String {
        format!("`{}` cannot be `{value}`; expected {}", self.name, self.accepted)
    }
}

const SIZE: &str = "a size below 4 GiB, as bytes or with KiB, MiB, GiB";

/// Keys of all kinds of bus.
pub const SHARED_KEYS: [Key; 8] = [
    Key::optional("design", "udp, tcp, cyt_rdma", "udp", "Network for which the devices were built."),
    Key::optional(
        "ranks",
        "the path of a file",
        "ranks.json",
        "File with the addresses of all ranks. Refused if the address part already gives them.",
    ),
    Key::optional(
        "rx_buffers",
        "a number from 1 to about 280, fewer with more ranks",
        "100",
        "Number of rx buffers, which hold eager messages.",
    ),
    Key::optional("rx_bytes", SIZE, "64KiB", "Size of each rx buffer, a multiple of 64."),
    Key::optional("eager", SIZE, "1MiB", "Largest message that is sent before its receiver has requested it."),
    Key::optional("rendezvous", SIZE, "16MiB", "Size of each buffer for sums of larger messages."),
    Key::optional("memory", "host, device", "host", "Memory that holds the buffers of calls."),
    Key::optional(
        "compression",
        "none, fp16",
        "fp16",
        "Type in which float32 is added and sent in sums. Data that is only moved stays unchanged.",
    ),
];

impl DeviceUrl {
    /// Returns a device without any shared key.
    pub(crate) fn at(bus: &'static BusKind, address: DeviceAddress, own: Vec<(&'static str, String)>) -> Self {
        Self {
            bus,
            address,
            own,
            design: None,
            ranks: None,
            rx_buffers: None,
            rx_bytes: None,
            eager: None,
            rendezvous: None,
            memory: None,
            compression: None,
        }
    }

    /// Returns the kind of bus that reaches the device.
    pub fn bus(&self) -> &'static BusKind {
        self.bus
    }

    /// Returns the scheme, which precedes `://`.
    pub fn scheme(&self) -> &'static str {
        self.bus.scheme
    }

    /// Returns the address part, which [`BusKind::parse`] has accepted.
    pub fn address(&self) -> &str {
        &self.address.text
    }

    /// Returns the value of a key that only this kind of bus accepts, or `None` if it was not given.
    pub fn own_key(&self, name: &str) -> Option<&str> {
        self.own.iter().find(|(own, _)| *own == name).map(|(_, value)| &**value)
    }

    /// Returns whether two URLs name the same device, even if they set it up differently.
    pub fn is_same_device(&self, other: &Self) -> bool {
        self.bus == other.bus && self.address == other.address
    }

    /// Returns the path of the file with the addresses of all ranks, if the address part or the key `ranks` names one.
    pub fn ranks_file(&self) -> Option<&Path> {
        self.address.ranks_file.as_deref().or(self.ranks.as_deref())
    }

    /// Returns whether the URL has the key `ranks`.
    pub fn has_ranks_key(&self) -> bool {
        self.ranks.is_some()
    }

    /// Returns the network design of the devices.
    pub fn design(&self) -> Design {
        self.design.unwrap_or(self.bus.design)
    }

    /// Returns the memory that holds the buffers of calls.
    pub fn memory(&self) -> Memory {
        self.memory.unwrap_or(self.bus.memory)
    }

    /// Returns the representation of float32 between devices.
    pub fn wire(&self) -> Wire {
        self.compression.unwrap_or(Wire::Full)
    }

    /// Returns the port of a rank, if the port of rank 0 is `first` and each further rank has the next port.
    ///
    /// # Errors
    /// `Configuration` if the port would exceed 65535.
    pub fn port_of(&self, first: u16, rank: u32) -> Result<u16> {
        let port = u16::try_from(rank).ok().and_then(|rank| first.checked_add(rank));
        port.ok_or_else(|| self.refused(&format!("rank {rank} has no port below 65536: ports begin at {first}")))
    }

    /// Returns the error for a URL that cannot be used; `why` is a clause.
    pub fn refused(&self, why: &str) -> Error {
        Error::new(ErrorKind::Configuration, format!("device `{self}`: {why}"))
    }
}

/// Writes the URL with each given key: the required keys of its bus, the shared keys, and the optional keys of its bus.
impl fmt::Display for DeviceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = [
            ("design", self.design.map(|design| design.name().to_owned())),
            ("ranks", self.ranks.as_ref().map(|path| path.display().to_string())),
            ("rx_buffers", self.rx_buffers.map(|count| count.to_string())),
            ("rx_bytes", self.rx_bytes.map(show_size)),
            ("eager", self.eager.map(show_size)),
            ("rendezvous", self.rendezvous.map(show_size)),
            ("memory", self.memory.map(|memory| memory_name(memory).to_owned())),
            ("compression", self.compression.map(|wire| wire.name().to_owned())),
        ];
        let own = |is_required: bool| {
            let keys = self.bus.keys.iter().filter(move |key| key.missing.is_some() == is_required);
            keys.filter_map(|key| self.own_key(key.name).map(|value| format!("{}={value}", key.name)))
        };
        let shared = shared.into_iter().filter_map(|(key, value)| value.map(|value| format!("{key}={value}")));
        let given: Vec<String> = own(true).chain(shared).chain(own(false)).collect();
        f.write_str(self.scheme())?;
        if !self.address().is_empty() || !given.is_empty() {
            write!(f, "://{}", self.address())?;
        }
        if given.is_empty() { Ok(()) } else { write!(f, "?{}", given.join("&")) }
    }
}

impl BusKind {
    /// Returns the form of the URLs without keys, as messages about keys show it.
    pub(crate) fn short_form(&self) -> &'static str {
        let form = self.forms.first().copied().unwrap_or(self.scheme);
        form.split_once('?').map_or(form, |(form, _)| form)
    }
}

/// Kinds of bus are equal if their schemes are, which differ between rows.
impl PartialEq for BusKind {
    fn eq(&self, other: &Self) -> bool {
        self.scheme == other.scheme
    }
}

impl Eq for BusKind {}

impl fmt::Debug for BusKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("BusKind").field(&self.scheme).finish()
    }
}

impl PartialEq for DeviceAddress {
    fn eq(&self, other: &Self) -> bool {
        match (&self.ranks_file, &other.ranks_file) {
            (Some(path), Some(others)) => path == others,
            (None, None) => self.text == other.text,
            (Some(_), None) | (None, Some(_)) => false,
        }
    }
}

impl Eq for DeviceAddress {}

/// Address that names no ranks file.
impl From<String> for DeviceAddress {
    fn from(text: String) -> Self {
        Self { text, ranks_file: None }
    }
}

impl Wire {
    /// Returns the value of the key `compression`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "none",
            Self::Half => "fp16",
        }
    }

    /// Returns the type on the wire for elements of a reduction. Elements that are only moved are bytes, and never compressed.
    pub fn carries(self, dtype: DataType) -> DataType {
        if self == Self::Half && dtype == DataType::F32 { DataType::F16 } else { dtype }
    }
}

pub(crate) fn memory_name(memory: Memory) -> &'static str {
    if memory.is_host() { "host" } else { "device" }
}

//! Parser of device URLs.

use std::fmt;
use std::path::PathBuf;

use accl_types::{Error, ErrorKind, Result, nearest, parse_size, show_size};

use crate::bus::Memory;
use crate::memory_map::{DataType, Network};

/// A device, as `device=` names it. [`DeviceUrl::parse`] and [`fmt::Display`] are inverse to each other. Omitted keys are stored as `None`; accessors
/// such as [`DeviceUrl::design`] return their defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceUrl {
    /// Kind and location of the device.
    pub location: Location,
    /// Network design of the device, if given; see [`DeviceUrl::design`].
    pub(super) design: Option<Design>,
    /// Path of a file with the addresses of all ranks.
    pub(super) ranks: Option<PathBuf>,
    pub(super) rx_buffers: Option<u32>,
    pub(super) rx_bytes: Option<u32>,
    pub(super) eager: Option<u32>,
    pub(super) rendezvous: Option<u32>,
    pub(super) memory: Option<Memory>,
    pub(super) compression: Option<Wire>,
    pub(super) engine: Option<String>,
    pub(super) hostctrl: Option<String>,
}

/// Kind and location of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Location {
    /// A software engine in the process of its rank.
    Sim,
    /// Software engines behind the sockets of the emulator's protocol.
    Emulator(Addresses),
    /// A card behind XRT, by its index, with the bitstream that is loaded on it.
    Xrt {
        /// Index of the card.
        index: u32,
        /// Path of the bitstream.
        xclbin: PathBuf,
    },
    /// A card behind Coyote, by the number of its region.
    Coyote {
        /// Number of the region.
        index: u32,
    },
}

/// Addresses of the emulators of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// One host for all ranks. The rank is added to the port.
    One(Address),
    /// One address per rank.
    Each(Vec<Address>),
    /// Addresses from a ranks file.
    File(PathBuf),
}

/// Address of an emulator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Host name or IP address; an IPv6 address is in brackets.
    pub host: String,
    /// Port.
    pub port: u16,
}

/// Network design that engines were built for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Design {
    /// Datagrams (UDP).
    Udp,
    /// Streams (TCP).
    Tcp,
    /// Queue pairs of Coyote (RDMA).
    CytRdma,
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
    /// Purpose of the key, in a sentence.
    pub about: &'static str,
}

const fn key(name: &'static str, accepted: &'static str, about: &'static str) -> Key {
    Key { name, accepted, about }
}

const SIZE: &str = "a size below 4 GiB, as bytes or with KiB, MiB, GiB";

const KERNEL: &str = "the name of a kernel, as KERNEL:{INSTANCE}";
/// Names of the kernels of a design with one engine, as in ACCL's own bitstreams.
const ENGINE_KERNEL: &str = "ccl_offload:{ccl_offload_0}";
const HOSTCTRL_KERNEL: &str = "hostctrl:{hostctrl_0_0}";

/// All keys.
pub const KEYS: [Key; 11] = [
    key(
        "xclbin",
        "the path of a file",
        "Bitstream of a card behind XRT: required for these cards, refused for other devices.",
    ),
    key("design", "udp, tcp, cyt_rdma", "Network for which the devices were built."),
    key("ranks", "the path of a file", "File with the addresses of all ranks. Emulators name it after `@` instead."),
    key(
        "rx_buffers",
        "a number from 1 to about 280, fewer with more ranks",
        "Number of rx buffers, which hold eager messages.",
    ),
    key("rx_bytes", SIZE, "Size of each rx buffer, a multiple of 64."),
    key("eager", SIZE, "Largest message that is sent before its receiver has requested it."),
    key("rendezvous", SIZE, "Size of each buffer for sums of larger messages."),
    key("memory", "host, device", "Memory that holds the buffers of calls."),
    key(
        "compression",
        "none, fp16",
        "Type in which float32 is added and sent in sums. Data that is only moved stays unchanged.",
    ),
    key("engine", KERNEL, "Kernel of the engine in a bitstream for XRT."),
    key("hostctrl", KERNEL, "Kernel that starts the engine's calls in a bitstream for XRT."),
];

/// Accepted schemes, which precede `://`.
const SCHEMES: [&str; 4] = ["sim", "emulator", "xrt", "coyote"];
const EXPECTED: &str = "expected one of none, 1, sim, sim://?KEY=VALUE, emulator://HOST:PORT, emulator://HOST:PORT,HOST:PORT, \
                        emulator://@FILE, xrt://INDEX?xclbin=FILE, coyote://INDEX";

const DESIGNS: [Design; 3] = [Design::Udp, Design::Tcp, Design::CytRdma];
const MEMORIES: [Memory; 2] = [Memory::Host, Memory::Device];
const WIRES: [Wire; 2] = [Wire::Full, Wire::Half];

impl DeviceUrl {
    /// Parses a URL: `sim` or its synonym `1`, `sim://?design=udp`, `emulator://h0:5500,h1:5500`, `emulator://@ranks.json`,
    /// `xrt://0?xclbin=a.xclbin&design=udp`, `coyote://0`. Returns `None` if the text is empty or `none`, which means no device.
    ///
    /// # Errors
    /// The text is malformed, or firmware would refuse the values for any set of ranks. The message says what is expected.
    pub fn parse(text: &str) -> Result<Option<Self>> {
        let url = match text.trim() {
            "" | "none" => return Ok(None),
            "1" => Self::at(Location::Sim),
            text => Self::read(text).map_err(|why| refused(text, &why))?,
        };
        url.check_alone().map_err(|error| refused(text, &error.message))?;
        Ok(Some(url))
    }

    /// Returns whether two URLs name the same device, even if they set it up differently.
    pub fn is_same_device(&self, other: &Self) -> bool {
        match (&self.location, &other.location) {
            (Location::Xrt { index: mine, .. }, Location::Xrt { index: theirs, .. }) => mine == theirs,
            (mine, theirs) => mine == theirs,
        }
    }

    /// Returns a device without any key.
    fn at(location: Location) -> Self {
        Self {
            location,
            design: None,
            ranks: None,
            rx_buffers: None,
            rx_bytes: None,
            eager: None,
            rendezvous: None,
            memory: None,
            compression: None,
            engine: None,
            hostctrl: None,
        }
    }

    fn read(text: &str) -> std::result::Result<Self, String> {
        let (scheme, rest) = text.split_once("://").unwrap_or((text, ""));
        let (location, keys) = rest.split_once('?').unwrap_or((rest, ""));
        let mut pairs = Vec::new();
        for pair in keys.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| format!("`{pair}` has no `=`"))?;
            if pairs.iter().any(|(known, _)| *known == key) {
                return Err(format!("`{key}` is given twice"));
            }
            pairs.push((key, value));
        }
        let mut url = Self::at(match scheme {
            "sim" if location.is_empty() => Location::Sim,
            "sim" => return Err(format!("`sim` runs in the process of its rank and has no address; got `{location}`")),
            "emulator" => Location::Emulator(Addresses::parse(location)?),
            "xrt" => {
                let at = pairs.iter().position(|(key, value)| *key == "xclbin" && !value.is_empty());
                let at = at.ok_or("a card behind XRT needs its bitstream; add `xclbin=FILE`")?;
                Location::Xrt { index: index(location)?, xclbin: pairs.swap_remove(at).1.into() }
            }
            "coyote" => Location::Coyote { index: index(location)? },
            other => {
                let near = nearest(other, SCHEMES).unwrap_or_default();
                return Err(format!("unknown scheme `{other}`; did you mean {near}? {EXPECTED}"));
            }
        });
        for (key, value) in pairs {
            url.set(key, value)?;
        }
        url.agrees_with_location()?;
        Ok(url)
    }

    fn set(&mut self, name: &str, value: &str) -> std::result::Result<(), String> {
        let key = KEYS.iter().find(|key| key.name == name).ok_or_else(|| {
            let near = nearest(name, KEYS.map(|key| key.name)).unwrap_or_default();
            let all = KEYS.map(|key| key.name).join(", ");
            format!("unknown key `{name}`; did you mean {near}? expected one of {all}")
        })?;
        let unknown = || format!("`{name}` cannot be `{value}`; expected {}", key.accepted);
        let bytes = || parse_size(value).and_then(|bytes| u32::try_from(bytes).ok()).map(Some).ok_or_else(unknown);
        match name {
            "design" => self.design = Some(find(&DESIGNS, Design::name, value).ok_or_else(unknown)?),
            "ranks" if value.is_empty() => return Err(unknown()),
            "ranks" => self.ranks = Some(value.into()),
            "rx_buffers" => self.rx_buffers = Some(value.parse().map_err(|_| unknown())?),
            "rx_bytes" => self.rx_bytes = bytes()?,
            "eager" => self.eager = bytes()?,
            "rendezvous" => self.rendezvous = bytes()?,
            "memory" => self.memory = Some(find(&MEMORIES, memory_name, value).ok_or_else(unknown)?),
            "compression" => self.compression = Some(find(&WIRES, Wire::name, value).ok_or_else(unknown)?),
            "engine" | "hostctrl" if value.is_empty() => return Err(unknown()),
            "engine" if matches!(self.location, Location::Xrt { .. }) => self.engine = Some(value.to_owned()),
            "hostctrl" if matches!(self.location, Location::Xrt { .. }) => self.hostctrl = Some(value.to_owned()),
            other => return Err(format!("`{other}` is a key of xrt://INDEX only, not of {}", self.scheme())),
        }
        Ok(())
    }

    /// Checks that devices of this design exist at such a location.
    fn agrees_with_location(&self) -> std::result::Result<(), String> {
        match (&self.location, self.design()) {
            (Location::Emulator(_), _) if self.ranks.is_some() => {
                Err("emulators have no key `ranks`; name the file after an at sign: emulator://@FILE".to_owned())
            }
            (Location::Xrt { .. }, Design::CytRdma) => Err("cards behind XRT are built for udp or tcp".to_owned()),
            (Location::Coyote { .. }, Design::Udp | Design::Tcp) => {
                Err("cards behind Coyote support cyt_rdma only".to_owned())
            }
            (Location::Coyote { .. }, Design::CytRdma) if self.memory == Some(Memory::Device) => Err(
                "buffers of cards behind Coyote lie in host memory; moving them to the card (offload) is not supported"
                    .to_owned(),
            ),
            (Location::Sim | Location::Emulator(_) | Location::Xrt { .. } | Location::Coyote { .. }, _) => Ok(()),
        }
    }

    /// Returns the scheme, which precedes `://`.
    pub fn scheme(&self) -> &'static str {
        match self.location {
            Location::Sim => "sim",
            Location::Emulator(_) => "emulator",
            Location::Xrt { .. } => "xrt",
            Location::Coyote { .. } => "coyote",
        }
    }

    /// Returns the network design of the devices. The default for an emulator is TCP: every message over TCP is eager, which the other designs
    /// support as well.
    pub fn design(&self) -> Design {
        self.design.unwrap_or(match self.location {
            Location::Sim | Location::Coyote { .. } => Design::CytRdma,
            Location::Emulator(_) => Design::Tcp,
            Location::Xrt { .. } => Design::Udp,
        })
    }

    /// Returns the memory that holds the buffers of calls. Only some boards behind XRT have host memory. Cards behind Coyote use host memory until
    /// buffers are moved.
    pub fn memory(&self) -> Memory {
        self.memory.unwrap_or(match self.location {
            Location::Sim | Location::Coyote { .. } => Memory::Host,
            Location::Emulator(_) | Location::Xrt { .. } => Memory::Device,
        })
    }

    /// Returns the name of the engine's kernel, behind XRT.
    pub fn engine_kernel(&self) -> &str {
        self.engine.as_deref().unwrap_or(ENGINE_KERNEL)
    }

    /// Returns the name of the kernel that starts the engine's calls, behind XRT.
    pub fn hostctrl_kernel(&self) -> &str {
        self.hostctrl.as_deref().unwrap_or(HOSTCTRL_KERNEL)
    }

    /// Returns the representation of float32 between devices.
    pub fn wire(&self) -> Wire {
        self.compression.unwrap_or(Wire::Full)
    }
}

/// Writes the URL with each given key, in the order of [`KEYS`].
impl fmt::Display for DeviceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (location, xclbin) = match &self.location {
            Location::Sim => (String::new(), None),
            Location::Emulator(addresses) => (addresses.to_string(), None),
            Location::Xrt { index, xclbin } => (index.to_string(), Some(xclbin.display().to_string())),
            Location::Coyote { index } => (index.to_string(), None),
        };
        let said = [
            ("xclbin", xclbin),
            ("design", self.design.map(|design| design.name().to_owned())),
            ("ranks", self.ranks.as_ref().map(|path| path.display().to_string())),
            ("rx_buffers", self.rx_buffers.map(|count| count.to_string())),
            ("rx_bytes", self.rx_bytes.map(show_size)),
            ("eager", self.eager.map(show_size)),
            ("rendezvous", self.rendezvous.map(show_size)),
            ("memory", self.memory.map(|memory| memory_name(memory).to_owned())),
            ("compression", self.compression.map(|wire| wire.name().to_owned())),
            ("engine", self.engine.clone()),
            ("hostctrl", self.hostctrl.clone()),
        ];
        let said: Vec<String> =
            said.into_iter().filter_map(|(key, value)| value.map(|value| format!("{key}={value}"))).collect();
        f.write_str(self.scheme())?;
        if !location.is_empty() || !said.is_empty() {
            write!(f, "://{location}")?;
        }
        if said.is_empty() { Ok(()) } else { write!(f, "?{}", said.join("&")) }
    }
}

impl Addresses {
    fn parse(text: &str) -> std::result::Result<Self, String> {
        if let Some(path) = text.strip_prefix('@') {
            let path = Some(path).filter(|path| !path.is_empty()).ok_or("expected a ranks file after the `@`")?;
            return Ok(Self::File(path.into()));
        }
        let all = text.split(',').map(Address::parse).collect::<std::result::Result<Vec<Address>, String>>()?;
        Ok(match <[Address; 1]>::try_from(all) {
            Ok([one]) => Self::One(one),
            Err(each) => Self::Each(each),
        })
    }
}

impl fmt::Display for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(address) => write!(f, "{address}"),
            Self::Each(all) => f.write_str(&all.iter().map(Address::to_string).collect::<Vec<_>>().join(",")),
            Self::File(path) => write!(f, "@{}", path.display()),
        }
    }
}

impl Address {
    fn parse(text: &str) -> std::result::Result<Self, String> {
        let parts = text.trim().rsplit_once(':').filter(|(host, _)| !host.is_empty());
        let parts = parts.and_then(|(host, port)| Some((host, port.parse().ok().filter(|port| *port > 0)?)));
        let (host, port) = parts.ok_or_else(|| format!("expected HOST:PORT of an emulator, got `{text}`"))?;
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

impl Design {
    /// Returns the value of the key `design`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Udp => "udp",
            Self::Tcp => "tcp",
            Self::CytRdma => "cyt_rdma",
        }
    }

    /// Returns the design whose engines use this network.
    pub fn of(network: Network) -> Self {
        match network {
            Network::Udp => Self::Udp,
            Network::Tcp => Self::Tcp,
            Network::Rdma => Self::CytRdma,
        }
    }

    /// Returns the network of the design.
    pub fn network(self) -> Network {
        match self {
            Self::Udp => Network::Udp,
            Self::Tcp => Network::Tcp,
            Self::CytRdma => Network::Rdma,
        }
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

pub(super) fn memory_name(memory: Memory) -> &'static str {
    if memory.is_host() { "host" } else { "device" }
}

fn find<T: Copy>(all: &[T], name: impl Fn(T) -> &'static str, text: &str) -> Option<T> {
    all.iter().copied().find(|one| name(*one) == text)
}

fn index(text: &str) -> std::result::Result<u32, String> {
    text.parse().map_err(|_| format!("expected the index of a card, got `{text}`"))
}

fn refused(text: &str, why: &str) -> Error {
    Error::new(ErrorKind::Configuration, format!("device `{text}`: {why}"))
}

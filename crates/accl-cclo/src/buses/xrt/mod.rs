//! Bus to a card behind XRT, whose library is loaded at run time and called through its C interface.
//!
//! Calls are runs of the kernel `hostctrl`, and registers belong to the engine's own kernel. Each buffer lies in a memory bank of the card, or in
//! host memory on boards that support it. The engine's kernel is opened exclusively, so a driver in another process gets an error that the card is in
//! use, if XRT reports it. This bus does not set up the network kernels of a design.
//!
//! The bus was never run on a real card. Tests use a replacement library that records its calls, and compare prototypes with XRT's headers. Read
//! [`XrtBus::open`] first.

#[allow(unsafe_code)]
mod library;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use accl_types::{Error, ErrorKind, Result};

use crate::bus::{Bus, Memory};
use crate::call::Descriptor;
use crate::cards;
use crate::device::{BusKind, Design, DeviceUrl, Key, Open, Sessions};
use crate::memory_map::EXCHANGE_MEMORY_BYTES;
use library::{Card, Failure, Names};

/// File names of the library, in search order: the runtime name, then the name in the development package.
const LIBRARIES: [&str; 2] = ["libxrt_coreutil.so.2", "libxrt_coreutil.so"];

/// Memory banks of a design with one engine: the bank of data, and the bank of rx buffers.
const DATA_BANK: u32 = 0;
const RX_BANK: u32 = 1;
/// Flags of buffers.
const PLAIN: u64 = 0;
const HOST_ONLY: u64 = 1 << 29;

/// Number of words of a call before its addresses.
const HEAD_WORDS: usize = 9;
/// States of a run, in XRT's numbering.
const COMPLETED: u32 = 4;
const UNDER_WAY: [u32; 4] = [1, 2, 3, 7];

/// Keys of the URL that no other bus has.
const XCLBIN: Key = Key {
    name: "xclbin",
    accepted: "the path of a file",
    example: "a.xclbin",
    about: "Bitstream of a card behind XRT: required for these cards, refused for other devices.",
    missing: Some("a card behind XRT needs its bitstream; add `xclbin=FILE`"),
};
const ENGINE: Key =
    Key::optional("engine", KERNEL, "ccl_offload:{ccl_offload_1}", "Kernel of the engine in a bitstream for XRT.");
const HOSTCTRL: Key = Key::optional(
    "hostctrl",
    KERNEL,
    "hostctrl:{hostctrl_1_0}",
    "Kernel that starts the engine's calls in a bitstream for XRT.",
);
const KERNEL: &str = "the name of a kernel, as KERNEL:{INSTANCE}";
/// Names of the kernels of a design with one engine, as in ACCL's own bitstreams.
const ENGINE_KERNEL: &str = "ccl_offload:{ccl_offload_0}";
const HOSTCTRL_KERNEL: &str = "hostctrl:{hostctrl_0_0}";
/// Number of ranks that a UDP design has sockets for.
const MAX_UDP_RANKS: u32 = 16;

pub(super) const ROW: BusKind = BusKind {
    scheme: "xrt",
    alias: None,
    forms: &["xrt://INDEX?xclbin=FILE"],
    example: "xrt://0?xclbin=a.xclbin",
    keys: &[XCLBIN, ENGINE, HOSTCTRL],
    parse: cards::parse_index,
    design: Design::Udp,
    suits_any_network: false,
    // Only some boards have host memory.
    memory: Memory::Device,
    sessions: Sessions::RanksFile(
        "torch-accl does not set up the network kernels of a tcp design (network_krnl, tcp_session_handler), which open sessions; open the \
         sessions first, and give each rank its own numbers by `ranks=FILE`, with a `session` for each rank",
    ),
    rank_address: cards::rank_address,
    check,
    open: Open::Here(|url, _| Ok(Box::new(XrtBus::open(place_of(url)?)?))),
};

fn check(url: &DeviceUrl, world: u32) -> std::result::Result<(), String> {
    match url.design() {
        Design::CytRdma => Err("cards behind XRT are built for udp or tcp".to_owned()),
        Design::Udp if world > MAX_UDP_RANKS => {
            Err(format!("over udp, cards reach at most {MAX_UDP_RANKS} ranks, not {world}; use a tcp design"))
        }
        Design::Udp | Design::Tcp => Ok(()),
    }
}

/// Returns the card and the kernels that a URL names.
fn place_of(url: &DeviceUrl) -> Result<XrtPlace<'_>> {
    Ok(XrtPlace {
        index: cards::index_of(url)?,
        xclbin: Path::new(url.own_key(XCLBIN.name).unwrap_or_default()),
        engine: url.own_key(ENGINE.name).unwrap_or(ENGINE_KERNEL),
        hostctrl: url.own_key(HOSTCTRL.name).unwrap_or(HOSTCTRL_KERNEL),
    })
}

/// Connection to a card behind XRT.
pub struct XrtBus {
    card: Arc<Mutex<Card>>,
    index: u32,
    /// Whether this connection may only read registers.
    is_read_only: bool,
}

/// Card and kernels to open.
#[derive(Clone, Copy, Debug)]
pub struct XrtPlace<'a> {
    /// Index of the card.
    pub index: u32,
    /// Path of the bitstream.
    pub xclbin: &'a Path,
    /// Name of the engine's kernel.
    pub engine: &'a str,
    /// Name of the kernel that starts the engine's calls.
    pub hostctrl: &'a str,
}

impl XrtBus {
    /// Opens a card with the installed XRT, and loads its bitstream.
    ///
    /// # Errors
    /// XRT, the card or the bitstream is missing, or the bitstream has other kernels.
    pub fn open(place: XrtPlace) -> Result<Self> {
        let [first, second] = LIBRARIES.map(Path::new);
        match Self::open_with(first, place) {
            Err((Failure::NoLibrary(_), _)) => Self::open_with(second, place).map_err(|(_, error)| error),
            opened => opened.map_err(|(_, error)| error),
        }
    }

    /// Same as [`XrtBus::open`], with the library at a path.
    fn open_with(library: &Path, place: XrtPlace) -> std::result::Result<Self, (Failure, Error)> {
        let XrtPlace { index, xclbin, engine, hostctrl } = place;
        if !xclbin.is_file() {
            let text = format!("{} needs its bitstream, and there is no file {}", name(index), xclbin.display());
            return Err((Failure::NoCard, Error::new(ErrorKind::Configuration, text)));
        }
        let names = Names { index, xclbin, engine, hostctrl };
        let card = Card::open(library, &names).map_err(|failure| {
            let error = refused(index, xclbin, &failure);
            (failure, error)
        })?;
        Ok(Self { card: Arc::new(Mutex::new(card)), index, is_read_only: false })
    }

    /// Locks the card. A connection that may only read registers does not wait for the lock.
    fn card(&self) -> Result<MutexGuard<'_, Card>> {
        if !self.is_read_only {
            return Ok(self.card.lock().unwrap_or_else(PoisonError::into_inner));
        }
        self.card
            .try_lock()
            .map_err(|_| Error::new(ErrorKind::Device, format!("{} is busy with another request", name(self.index))))
    }

    fn acting(&self) -> Result<MutexGuard<'_, Card>> {
        if self.is_read_only {
            return Err(Error::internal(format!(
                "{}: a read-only connection can only read registers",
                name(self.index)
            )));
        }
        self.card()
    }

    fn register(&self, offset: u32) -> Result<u32> {
        let known = Some(offset).filter(|offset| offset.is_multiple_of(4) && *offset < EXCHANGE_MEMORY_BYTES);
        known.ok_or_else(|| {
            Error::new(ErrorKind::Device, format!("{} has no register at {offset:#x}", name(self.index)))
        })
    }

    fn failed(&self, what: &str, failure: &Failure) -> Error {
        let why = match failure {
            Failure::Failed(function, returned) => format!("{function} returned {returned}"),
            Failure::NoBytes => "no buffer contains these bytes".to_owned(),
            other => format!("{other:?}"),
        };
        Error::new(ErrorKind::Device, format!("{} could not {what}: {why}", name(self.index)))
    }

    fn buffer(&self, bytes: u64, flags: u64, bank: u32) -> Result<u64> {
        let length = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        self.acting()?.allocate(length, flags, bank).map_err(|_| {
            let (index, host_only) = (name(self.index), flags & HOST_ONLY != 0);
            let remedy =
                if host_only { "few boards can use host memory; use `memory=device`" } else { "the bank is full" };
            Error::new(ErrorKind::Exhausted, format!("{index} cannot allocate {bytes} bytes in bank {bank}: {remedy}"))
        })
    }
}

impl Bus for XrtBus {
    fn read_register(&mut self, offset: u32) -> Result<u32> {
        let offset = self.register(offset)?;
        let read = self.card()?.read_register(offset);
        read.map_err(|failure| self.failed(&format!("read the register at {offset:#x}"), &failure))
    }

    fn write_register(&mut self, offset: u32, value: u32) -> Result<()> {
        let offset = self.register(offset)?;
        let written = self.acting()?.write_register(offset, value);
        written.map_err(|failure| self.failed(&format!("write the register at {offset:#x}"), &failure))
    }

    fn allocate(&mut self, memory: Memory, bytes: u64) -> Result<u64> {
        self.buffer(bytes, if memory.is_host() { HOST_ONLY } else { PLAIN }, DATA_BANK)
    }

    fn allocate_rx(&mut self, bytes: u64) -> Result<u64> {
        self.buffer(bytes, PLAIN, RX_BANK)
    }

    fn read_memory(&mut self, _: Memory, address: u64, into: &mut [u8]) -> Result<()> {
        let read = self.acting()?.read(address, into);
        read.map_err(|failure| self.failed(&format!("read {} bytes at {address:#x}", into.len()), &failure))
    }

    fn write_memory(&mut self, _: Memory, address: u64, from: &[u8]) -> Result<()> {
        let written = self.acting()?.write(address, from);
        written.map_err(|failure| self.failed(&format!("write {} bytes at {address:#x}", from.len()), &failure))
    }

    fn start(&mut self, call: &Descriptor) -> Result<()> {
        let words = call.to_words();
        let started = self.acting()?.start(&words[..HEAD_WORDS], &[call.first, call.second, call.result]);
        started.map_err(|failure| self.failed(&format!("start `{call}`"), &failure))
    }

    fn poll(&mut self) -> Result<bool> {
        let mut card = self.acting()?;
        if !card.is_busy {
            return Ok(false);
        }
        match card.state() {
            COMPLETED => {
                card.is_busy = false;
                Ok(true)
            }
            state if UNDER_WAY.contains(&state) => Ok(false),
            state => {
                Err(Error::new(ErrorKind::Device, format!("{}: a run failed with XRT state {state}", name(self.index))))
            }
        }
    }

    /// Shares the card with the new connection, since an engine's kernel can be opened only once. The new connection never waits for the lock.
    fn reconnect(&self) -> Result<Box<dyn Bus>> {
        Ok(Box::new(Self { card: self.card.clone(), index: self.index, is_read_only: true }))
    }

    fn keep_buffers(&mut self) {
        self.card.lock().unwrap_or_else(PoisonError::into_inner).may_write = true;
    }

    fn describe(&self) -> String {
        name(self.index)
    }
}

fn name(index: u32) -> String {
    format!("card {index} behind XRT")
}

/// Returns the error for a card that cannot be opened.
fn refused(index: u32, xclbin: &Path, failure: &Failure) -> Error {
    let (card, xclbin) = (name(index), xclbin.display());
    let text = match failure {
        Failure::NoLibrary(why) => {
            format!(
                "{card} needs XRT, whose library cannot be opened: {why}; install it (Debian: libxrt1), or source its setup.sh"
            )
        }
        Failure::NoFunction(function, version) => format!(
            "{card} needs XRT's C interface, but the installed library, version {version}, lacks `{function}`; install a version that has \
             it, such as 2.13"
        ),
        Failure::NoCard => format!("XRT has no card {index}; `xbutil examine` lists the cards"),
        Failure::NotLoaded(returned) => {
            format!("{card} did not load the bitstream {xclbin} (XRT returned {returned}); it may be for another board")
        }
        Failure::InUse => format!(
            "{card} is in use: another process has its engine's kernel or another bitstream, or the last call of an earlier group of this \
             process did not complete; a device has one driver at a time: end the other driver, or give this group another card"
        ),
        Failure::NoKernel(kernel) => format!(
            "the bitstream {xclbin} has no kernel `{kernel}`, or another process has it; name the kernels with the keys `engine` and `hostctrl`"
        ),
        Failure::NoBuffer | Failure::NoBytes => format!("{card} has no memory"),
        Failure::Failed(function, returned) => format!("{card} cannot be opened: {function} returned {returned}"),
    };
    let kind = match failure {
        Failure::NoKernel(_) | Failure::NotLoaded(_) => ErrorKind::Configuration,
        _ => ErrorKind::Device,
    };
    Error::new(kind, text)
}

//! The bus to a card behind XRT, whose library is opened at run time and called by its C interface.
//!
//! Calls are runs of the kernel `hostctrl`; registers are those of the engine's own kernel; each buffer lies in a bank of the card, or in
//! memory of the host on the boards that have that. The kernel of the engine is opened for one process alone, so a second driver, of another
//! process, is told that the card is in use, as far as XRT says so. The network kernels of a design are set up by nobody here. No card was there
//! to try it on: a library that records its calls stands in, and a test compares prototypes with XRT's headers. Read [`XrtBus::open`] first.

#[allow(unsafe_code)]
mod library;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use accl_types::{Error, ErrorKind, Result};

use crate::bus::{Bus, Memory};
use crate::call::Descriptor;
use crate::memory_map::EXCHANGE_MEMORY_BYTES;
use library::{Card, Failure, Names};

/// The library, as it is looked for: the name of its interface, then that of its development files.
const LIBRARIES: [&str; 2] = ["libxrt_coreutil.so.2", "libxrt_coreutil.so"];

/// Banks of a design with one engine: of data, and of rx buffers.
const DATA_BANK: u32 = 0;
const RX_BANK: u32 = 1;
/// Flags of buffers.
const PLAIN: u64 = 0;
const HOST_ONLY: u64 = 1 << 29;

/// Words of a call before its addresses.
const HEAD_WORDS: usize = 9;
/// States of a run, as XRT numbers them.
const COMPLETED: u32 = 4;
const UNDER_WAY: [u32; 4] = [1, 2, 3, 7];

/// A card behind XRT.
pub struct XrtBus {
    card: Arc<Mutex<Card>>,
    index: u32,
    /// Registers can be read, and nothing else be done.
    only_looks: bool,
}

/// What is to be opened.
#[derive(Clone, Copy, Debug)]
pub struct XrtPlace<'a> {
    /// Which card.
    pub index: u32,
    /// Its bitstream.
    pub xclbin: &'a Path,
    /// The kernel of the engine.
    pub engine: &'a str,
    /// The kernel that starts its calls.
    pub hostctrl: &'a str,
}

impl XrtBus {
    /// Opens a card, with the XRT that is installed, and loads its bitstream.
    ///
    /// # Errors
    /// There is no XRT, no such card, no such bitstream, or it has other kernels.
    pub fn open(place: XrtPlace) -> Result<Self> {
        let [first, second] = LIBRARIES.map(Path::new);
        match Self::open_with(first, place) {
            Err((Failure::NoLibrary(_), _)) => Self::open_with(second, place).map_err(|(_, error)| error),
            opened => opened.map_err(|(_, error)| error),
        }
    }

    /// As [`XrtBus::open`], with the library at a path.
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
        Ok(Self { card: Arc::new(Mutex::new(card)), index, only_looks: false })
    }

    /// The card, which a connection that only looks does not wait for.
    fn card(&self) -> Result<MutexGuard<'_, Card>> {
        if !self.only_looks {
            return Ok(self.card.lock().unwrap_or_else(PoisonError::into_inner));
        }
        self.card
            .try_lock()
            .map_err(|_| Error::new(ErrorKind::Device, format!("{} is in the middle of something", name(self.index))))
    }

    fn acting(&self) -> Result<MutexGuard<'_, Card>> {
        if self.only_looks {
            return Err(Error::internal(format!(
                "{}: a connection that only looks was asked for more",
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
            Failure::Failed(function, returned) => format!("{function} has returned {returned}"),
            Failure::NoBytes => "no buffer has such bytes".to_owned(),
            other => format!("{other:?}"),
        };
        Error::new(ErrorKind::Device, format!("{} could not {what}: {why}", name(self.index)))
    }

    fn buffer(&self, bytes: u64, flags: u64, bank: u32) -> Result<u64> {
        let length = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        self.acting()?.allocate(length, flags, bank).map_err(|_| {
            let (index, host_only) = (name(self.index), flags & HOST_ONLY != 0);
            let remedy =
                if host_only { "few boards have memory of the host; take `memory=device`" } else { "it is full" };
            Error::new(ErrorKind::Exhausted, format!("{index} has no {bytes} bytes in bank {bank}: {remedy}"))
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
            state => Err(Error::new(
                ErrorKind::Device,
                format!("{} has ended a run in state {state} of XRT's, which is no good end", name(self.index)),
            )),
        }
    }

    /// The kernel of an engine is open once, so the fresh connection shares it, and waits for nobody.
    fn reconnect(&self) -> Result<Box<dyn Bus>> {
        Ok(Box::new(Self { card: self.card.clone(), index: self.index, only_looks: true }))
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

/// Why a card cannot be opened.
fn refused(index: u32, xclbin: &Path, failure: &Failure) -> Error {
    let (card, xclbin) = (name(index), xclbin.display());
    let text = match failure {
        Failure::NoLibrary(why) => {
            format!(
                "{card} needs XRT, whose library cannot be opened: {why}; install it (Debian: libxrt1), or source its setup.sh"
            )
        }
        Failure::NoFunction(function, version) => format!(
            "{card} needs XRT's C interface, and the library that is installed, version {version}, lacks `{function}`; install one that has \
             it, such as 2.13"
        ),
        Failure::NoCard => format!("XRT knows no card {index}; `xbutil examine` says which there are"),
        Failure::NotLoaded(returned) => {
            format!(
                "{card} has not taken the bitstream {xclbin} (XRT returned {returned}); it may be for another board"
            )
        }
        Failure::InUse => format!(
            "{card} is in use by another process, which has the kernel of its engine or another bitstream, or by an earlier group of this \
             process whose last call never ended; a device has one driver at a time: end that one, or give this group another card"
        ),
        Failure::NoKernel(kernel) => format!(
            "the bitstream {xclbin} has no kernel `{kernel}`, or another process has it; name kernels by the keys `engine` and `hostctrl`"
        ),
        Failure::NoBuffer | Failure::NoBytes => format!("{card} has no memory"),
        Failure::Failed(function, returned) => format!("{card} cannot be opened: {function} has returned {returned}"),
    };
    let kind = match failure {
        Failure::NoKernel(_) | Failure::NotLoaded(_) => ErrorKind::Configuration,
        _ => ErrorKind::Device,
    };
    Error::new(kind, text)
}

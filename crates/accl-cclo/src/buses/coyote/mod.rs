//! Bus to a card behind Coyote v1. Registers are mapped into the process, and buffers lie in huge pages of the host.
//!
//! The bus does not move buffers to the card (offload), and does not support the driver of Coyote v2, whose requests differ. It was never run on a
//! real card. Instead, tests record the requests to the kernel and compare them with the reference. Read [`CoyoteBus::open`] first.

mod calls;
mod hostctrl;
#[allow(unsafe_code)]
mod kernel;
mod queue_pair;
#[cfg(test)]
mod tests;

use queue_pair::QueuePair;

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io;
use std::net::Ipv4Addr;
use std::path::Path;

use accl_types::{Error, ErrorKind, Result};

use crate::bus::{Bus, Memory};
use crate::call::Descriptor;
use crate::cards;
use crate::device::{BusKind, Design, DeviceUrl, Open, Sessions};
use crate::driver::claim;
use crate::memory_map::EXCHANGE_MEMORY_BYTES;
use crate::settings::Settings;
use calls::{Calls, DriverRequest, MAX_WORDS, PAGE_BYTES};
use kernel::Kernel;

/// Folder of device files.
const DEVICES: &str = "/dev";
/// Byte offset of the registers that start calls, which follow exchange memory.
const HOSTCTRL: u32 = 0x2000;
/// Bits of the shell's configuration that report RDMA on port 0 and on port 1.
const HAS_RDMA: [u64; 2] = [1 << 16, 1 << 17];
/// Index of the context for control and buffers; queue pairs use the contexts after it.
const CONTROL_CONTEXT: usize = 0;
/// Number of contexts in a region.
const MAX_CONTEXTS: u32 = 64;
/// Possible holders of a region's lock, for messages. The lock lives as long as the open device file, which stays open if the card may still write to
/// buffers.
const HOLDER: &str =
    "another driver on this host, or by an earlier group of this process whose last call did not complete";
/// Memory key of a queue pair; Coyote v1 ignores it.
const KEY: u16 = 0;

pub(super) const ROW: BusKind = BusKind {
    scheme: "coyote",
    alias: None,
    forms: &["coyote://INDEX"],
    example: "coyote://0",
    keys: &[],
    parse: cards::parse_index,
    design: Design::CytRdma,
    suits_any_network: false,
    memory: Memory::Host,
    sessions: Sessions::Exchanged,
    rank_address: cards::rank_address,
    check,
    open: Open::Here(|url, _| Ok(Box::new(CoyoteBus::open(cards::index_of(url)?)?))),
};

fn check(url: &DeviceUrl, _world: u32) -> std::result::Result<(), String> {
    match url.design() {
        Design::Udp | Design::Tcp => Err("cards behind Coyote support cyt_rdma only".to_owned()),
        Design::CytRdma if url.memory() == Memory::Device => {
            Err("buffers of cards behind Coyote lie in host memory; moving them to the card (offload) is not supported"
                .to_owned())
        }
        Design::CytRdma => Ok(()),
    }
}

/// Connection to a region of a card.
pub struct CoyoteBus {
    calls: Box<dyn Calls>,
    region: u32,
    /// Driver's number of each context, by index.
    contexts: Vec<u64>,
    /// Port of the card that has RDMA.
    port: u64,
    /// Address of each buffer, and the index of the context in which it was mapped.
    buffers: Vec<(u64, usize)>,
    /// This rank's ends of queue pairs, by peer rank, with `None` for this rank. Empty until [`Bus::local_info`].
    ends: Vec<Option<QueuePair>>,
    /// Whether a started call has not been seen to end, so that the card may write to buffers.
    is_busy: bool,
    /// Whether packets may still arrive in buffers although no call runs.
    may_write: bool,
    /// Whether this connection may only read registers.
    is_read_only: bool,
}

impl CoyoteBus {
    /// Opens a region of a card.
    ///
    /// # Errors
    /// There is no such region, the loaded driver is Coyote v2, or the shell has no RDMA.
    pub fn open(region: u32) -> Result<Self> {
        let kernel =
            Kernel::open(Path::new(DEVICES), region).map_err(|error| missing(Path::new(DEVICES), region, &error))?;
        Self::with(Box::new(kernel), region)
    }

    fn with(mut calls: Box<dyn Calls>, region: u32) -> Result<Self> {
        let mut words = [0; MAX_WORDS];
        let failed = |what, error| failed(region, what, &error);
        let read = calls.request(CONTROL_CONTEXT, DriverRequest::ReadConfig, &mut words);
        read.map_err(|error| failed("read its configuration", error))?;
        let port = (0..).zip(HAS_RDMA).find(|(_, bit)| words[0] & bit != 0).map(|(port, _)| port);
        let port = port.ok_or_else(|| {
            let text = format!("{} has a shell without RDMA; load one with RDMA", name(region));
            Error::new(ErrorKind::Configuration, text)
        })?;
        let mut bus = Self {
            calls,
            region,
            contexts: Vec::new(),
            port,
            buffers: Vec::new(),
            ends: Vec::new(),
            is_busy: false,
            may_write: false,
            is_read_only: false,
        };
        bus.register(CONTROL_CONTEXT)?;
        Ok(bus)
    }

    /// Registers this process in a context.
    fn register(&mut self, context: usize) -> Result<()> {
        let mut words = words([u64::from(std::process::id())]);
        self.ask(context, DriverRequest::RegisterProcess, &mut words, "register this process")?;
        self.contexts.push(words[1]);
        Ok(())
    }

    /// Creates this rank's ends of `peers` queue pairs, one per other rank. Each end has its own context and one page of memory. Ranks exchange the
    /// ends, and each rank then connects its end with the peer's. [`QueuePair::number`] of the local end is the session of the peer.
    ///
    /// # Errors
    /// The region has too few contexts, or the host has no free huge pages.
    fn queue_pairs(&mut self, ip: Ipv4Addr, peers: u32) -> Result<Vec<QueuePair>> {
        if peers >= MAX_CONTEXTS {
            let text = format!("{} has contexts for {} peers, not for {peers}", name(self.region), MAX_CONTEXTS - 1);
            return Err(Error::new(ErrorKind::Exhausted, text));
        }
        (0..peers).map(|_| self.queue_pair(ip)).collect()
    }

    fn queue_pair(&mut self, ip: Ipv4Addr) -> Result<QueuePair> {
        let context = self.calls.open_context().map_err(|error| failed(self.region, "open a context", &error))?;
        self.register(context)?;
        let address = self.map(context, PAGE_BYTES)?;
        Ok(QueuePair {
            ip,
            number: QueuePair::number_of(self.region, self.contexts[context]),
            first_packet: QueuePair::first_packet_of(RandomState::new().build_hasher().finish()),
            key: KEY,
            address,
            bytes: PAGE_BYTES,
        })
    }

    /// Connects one end of a queue pair with the other. All ranks must have done this before any rank starts a call.
    ///
    /// # Errors
    /// The driver refuses a request.
    fn connect(&mut self, local: &QueuePair, remote: &QueuePair) -> Result<()> {
        let port = self.port;
        let [first, second, third] = local.context_words(remote);
        let mut context = words([port, first, second, third]);
        self.ask(CONTROL_CONTEXT, DriverRequest::WriteContext, &mut context, "set up a queue pair")?;
        let [first, second, third] = local.connection_words(remote, port);
        let mut connection = words([port, first, second, third]);
        self.ask(CONTROL_CONTEXT, DriverRequest::WriteConnection, &mut connection, "connect a queue pair")?;
        let mut address = words([port, u64::from(remote.ip.to_bits())]);
        self.ask(CONTROL_CONTEXT, DriverRequest::LookUpAddress, &mut address, "look up the address of a peer")
    }

    fn ask(&mut self, context: usize, what: DriverRequest, words: &mut [u64; MAX_WORDS], said: &str) -> Result<()> {
        if self.is_read_only {
            return Err(Error::internal(format!("{}: a read-only connection was asked to {said}", self.describe())));
        }
        self.calls.request(context, what, words).map_err(|error| failed(self.region, said, &error))
    }

    /// Maps host memory in whole huge pages that the card can access as well. Returns its address.
    fn map(&mut self, context: usize, bytes: u64) -> Result<u64> {
        if self.is_read_only {
            return Err(Error::internal(format!("{}: a read-only connection has no buffers", self.describe())));
        }
        let whole = bytes.max(1).div_ceil(PAGE_BYTES).checked_mul(PAGE_BYTES);
        let whole = whole.and_then(|whole| Some((whole, usize::try_from(whole).ok()?)));
        let (whole, length) = whole
            .ok_or_else(|| Error::new(ErrorKind::Exhausted, format!("cannot allocate a buffer of {bytes} bytes")))?;
        let address = self.calls.map_pages(length).map_err(|error| {
            let pages = whole / PAGE_BYTES;
            let text = format!(
                "{} needs {pages} free huge pages of 2 MiB for a buffer of {bytes} bytes: {error}; reserve more with \
                 `sysctl vm.nr_hugepages=N`",
                self.describe()
            );
            Error::new(ErrorKind::Exhausted, text)
        })?;
        let number = self.contexts.get(context).copied().unwrap_or(0);
        let mut words = words([address, whole, number]);
        let mapped = self.ask(context, DriverRequest::MapMemory, &mut words, "map a buffer");
        if mapped.is_err() {
            self.calls.unmap_pages(address);
        } else {
            self.buffers.push((address, context));
        }
        mapped.map(|()| address)
    }

    fn register_at(&self, offset: u32) -> Result<usize> {
        let known = Some(offset).filter(|offset| offset.is_multiple_of(4) && *offset < EXCHANGE_MEMORY_BYTES);
        known
            .map(word_of)
            .ok_or_else(|| Error::new(ErrorKind::Device, format!("{} has no register at {offset:#x}", self.describe())))
    }
}

impl Bus for CoyoteBus {
    /// Returns the ends of this rank's queue pairs, one for each other rank.
    fn local_info(&mut self, settings: &Settings) -> Result<Option<String>> {
        // Queue pairs belong to the region, so this process must claim the region before it creates any.
        claim(self, || true)?;
        let own = settings.rank as usize;
        let ip = settings.peers.get(own).map(|peer| peer.ip);
        let ip = ip.ok_or_else(|| Error::internal(format!("rank {own} is not among the ranks of its device")))?;
        let mut ends = self.queue_pairs(ip, settings.world().saturating_sub(1))?.into_iter();
        self.ends = (0..settings.peers.len()).map(|rank| if rank == own { None } else { ends.next() }).collect();
        Ok(Some(QueuePair::all_to_text(&self.ends)))
    }

    /// Connects each local end with the end that the peer created for this rank. The number of the local end becomes the peer's session.
    fn receive_info(&mut self, infos: &[String], settings: &mut Settings) -> Result<()> {
        let own = settings.rank as usize;
        let senseless = |rank: usize, why: &str| {
            let text = format!(
                "rank {own}: invalid queue pairs from rank {rank}: {why}; install the same version of torch-accl on all hosts"
            );
            Error::new(ErrorKind::Device, text)
        };
        let mut pairs = Vec::new();
        for (rank, text) in infos.iter().enumerate() {
            let ends = QueuePair::all_from_text(text).map_err(|error| senseless(rank, &error.to_string()))?;
            if ends.len() != settings.peers.len() {
                return Err(senseless(rank, &format!("got {} of {}", ends.len(), settings.peers.len())));
            }
            if rank == own {
                if ends != self.ends {
                    return Err(senseless(rank, "they differ from the queue pairs that this rank sent"));
                }
                continue;
            }
            let remote = ends[own].ok_or_else(|| senseless(rank, "none of them is for this rank"))?;
            if !remote.is_sound() {
                return Err(senseless(rank, "a number is too large for a card"));
            }
            let local = self.ends.get(rank).copied().flatten();
            pairs.push((rank, local.ok_or_else(|| Error::internal("this rank has no queue pairs yet"))?, remote));
        }
        if pairs.len() + 1 != settings.peers.len() {
            return Err(Error::internal(format!(
                "queue pairs arrived from {} of {} ranks",
                infos.len(),
                settings.peers.len()
            )));
        }
        for (rank, local, remote) in pairs {
            self.connect(&local, &remote)?;
            settings.peers[rank].session = local.number;
        }
        Ok(())
    }

    /// Claims the region by a lock on the device's file. Only processes of this project on this host respect the lock.
    fn claim(&mut self) -> Result<Option<String>> {
        if self.is_read_only {
            return Err(Error::internal(format!("{}: a read-only connection cannot claim a device", self.describe())));
        }
        let is_ours = self.calls.claim().map_err(|error| failed(self.region, "be locked", &error))?;
        Ok((!is_ours).then(|| HOLDER.to_owned()))
    }

    fn read_register(&mut self, offset: u32) -> Result<u32> {
        Ok(self.calls.read_word(self.register_at(offset)?) as u32)
    }

    fn write_register(&mut self, offset: u32, value: u32) -> Result<()> {
        let index = self.register_at(offset)?;
        if self.is_read_only {
            return Err(Error::internal(format!("{}: a read-only connection cannot write", self.describe())));
        }
        self.calls.write_word(index, value.into());
        Ok(())
    }

    /// Allocates host memory for either kind, since buffers stay in host memory unless moved to the card, which this bus never does.
    fn allocate(&mut self, _: Memory, bytes: u64) -> Result<u64> {
        self.map(CONTROL_CONTEXT, bytes)
    }

    fn read_memory(&mut self, _: Memory, address: u64, into: &mut [u8]) -> Result<()> {
        self.calls.read_pages(address, into).map_err(|error| failed(self.region, "read a buffer", &error))
    }

    fn write_memory(&mut self, _: Memory, address: u64, from: &[u8]) -> Result<()> {
        self.calls.write_pages(address, from).map_err(|error| failed(self.region, "write a buffer", &error))
    }

    fn start(&mut self, call: &Descriptor) -> Result<()> {
        if self.is_read_only {
            return Err(Error::internal(format!("{}: a read-only connection cannot start calls", self.describe())));
        }
        for (offset, word) in hostctrl::WORD_OFFSETS.into_iter().zip(call.to_words()) {
            self.calls.write_word(word_of(HOSTCTRL + offset), word.into());
        }
        self.is_busy = true;
        self.calls.write_word(word_of(HOSTCTRL + hostctrl::CONTROL), hostctrl::START.into());
        Ok(())
    }

    fn poll(&mut self) -> Result<bool> {
        let control = self.calls.read_word(word_of(HOSTCTRL + hostctrl::CONTROL)) as u32;
        let is_done = self.is_busy && control & hostctrl::DONE != 0;
        self.is_busy &= !is_done;
        Ok(is_done)
    }

    fn drain(&mut self) -> Result<()> {
        // Reading the register clears its report of an ended call.
        let _ = self.calls.read_word(word_of(HOSTCTRL + hostctrl::CONTROL));
        Ok(())
    }

    fn reconnect(&self) -> Result<Box<dyn Bus>> {
        let calls = self.calls.again().map_err(|error| failed(self.region, "be opened again", &error))?;
        Ok(Box::new(Self {
            calls,
            region: self.region,
            contexts: Vec::new(),
            port: self.port,
            buffers: Vec::new(),
            ends: Vec::new(),
            is_busy: false,
            may_write: false,
            is_read_only: true,
        }))
    }

    fn keep_buffers(&mut self) {
        self.may_write = true;
    }

    fn describe(&self) -> String {
        name(self.region)
    }
}

/// Frees everything, unless the card may still write to buffers. In that case everything stays open and mapped.
impl Drop for CoyoteBus {
    fn drop(&mut self) {
        if self.is_busy || self.may_write {
            return self.calls.keep_open();
        }
        if self.is_read_only {
            return;
        }
        for (address, context) in std::mem::take(&mut self.buffers) {
            let number = self.contexts.get(context).copied().unwrap_or(0);
            // The error cannot be reported here. Memory that the driver has not unmapped stays mapped.
            if self.calls.request(context, DriverRequest::UnmapMemory, &mut words([address, number])).is_ok() {
                self.calls.unmap_pages(address);
            }
        }
        for (context, number) in std::mem::take(&mut self.contexts).into_iter().enumerate().rev() {
            let _ = self.calls.request(context, DriverRequest::UnregisterProcess, &mut words([number]));
        }
    }
}

/// Returns the words of a request, padded with zeros.
fn words<const N: usize>(given: [u64; N]) -> [u64; MAX_WORDS] {
    let mut words = [0; MAX_WORDS];
    words[..N].copy_from_slice(&given);
    words
}

/// Returns the index of a register's word. Registers have 32 bits and lie in words of 64 bits.
fn word_of(offset: u32) -> usize {
    (offset >> 2) as usize
}

fn name(region: u32) -> String {
    format!("card behind Coyote, region {region}")
}

fn failed(region: u32, what: &str, error: &io::Error) -> Error {
    let in_use = if error.kind() == io::ErrorKind::ResourceBusy { IN_USE } else { "" };
    Error::new(ErrorKind::Device, format!("{} could not {what}: {error}{in_use}", name(region)))
}

/// Hint in messages if the kernel reports that a resource is busy.
const IN_USE: &str = "; another process uses the card: end that process, or use another region";

/// Returns the error for a region that cannot be opened.
fn missing(devices: &Path, region: u32, error: &io::Error) -> Error {
    let place = devices.join(format!("fpga{region}"));
    if error.kind() == io::ErrorKind::ResourceBusy {
        let text = format!("card behind Coyote at {} cannot be opened: {error}{IN_USE}", place.display());
        return Error::new(ErrorKind::Device, text);
    }
    let is_v2 = std::fs::read_dir(devices)
        .is_ok_and(|entries| entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with(V2_PREFIX)));
    let remedy = if is_v2 {
        "the loaded driver is Coyote v2, which has other requests and is not supported; load the driver of Coyote v1"
    } else {
        "load the driver of Coyote v1 and a shell with an engine"
    };
    Error::new(ErrorKind::Device, format!("no card behind Coyote at {}: {error}; {remedy}", place.display()))
}

/// Prefix of the device names of Coyote v2.
const V2_PREFIX: &str = "coyote_fpga_";

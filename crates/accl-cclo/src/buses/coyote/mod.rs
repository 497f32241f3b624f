//! The bus to a card behind Coyote, v1: its registers are mapped, and buffers lie in huge pages of the host.
//!
//! Moving buffers to the card (offload) is refused, as is the driver of Coyote v2, which has other requests. No card was there to try it on:
//! a stand-in records what is asked of the kernel, and tests compare that with the reference. Read [`CoyoteBus::open`] first.

mod calls;
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

use super::hostctrl;
use crate::bus::{Bus, Memory};
use crate::call::Descriptor;
use crate::driver::{Settings, claim};
use crate::memory_map::EXCHANGE_MEMORY_BYTES;
use calls::{Calls, MAX_WORDS, PAGE_BYTES, Request};
use kernel::Kernel;

/// Where devices are.
const DEVICES: &str = "/dev";
/// Where the registers that start calls stand, behind exchange memory.
const HOSTCTRL: u32 = 0x2000;
/// Bits of what a shell was built with: RDMA on either port.
const HAS_RDMA: [u64; 2] = [1 << 16, 1 << 17];
/// The context of control and buffers; queue pairs have those after it.
const CONTROL_CONTEXT: usize = 0;
/// Contexts of a region.
const MAX_CONTEXTS: u32 = 64;
/// Who may hold the lock of a region: it goes with the file, which stays open where the card may still write to buffers.
const HOLDER: &str = "another driver of this host, or by an earlier group of this process whose last call never ended";
/// The key of memory that a queue pair names; nothing looks at it in v1.
const KEY: u16 = 0;

/// A region of a card.
pub struct CoyoteBus {
    calls: Box<dyn Calls>,
    region: u32,
    /// The numbers that the driver gave the contexts.
    contexts: Vec<u64>,
    /// The port of the card that has RDMA.
    port: u64,
    /// Where each buffer is, and in which context it was mapped.
    buffers: Vec<(u64, usize)>,
    /// This rank's ends of queue pairs, one for each rank and none for itself, once they were told.
    ends: Vec<Option<QueuePair>>,
    /// A call was started whose end was not seen: the card may write to buffers.
    is_busy: bool,
    /// Packets may still come to buffers, although no call is under way.
    may_write: bool,
    /// Registers can be read, and nothing else be done.
    only_looks: bool,
}

impl CoyoteBus {
    /// Opens a region of a card.
    ///
    /// # Errors
    /// There is none, the driver is that of v2, or the shell has no RDMA.
    pub fn open(region: u32) -> Result<Self> {
        let kernel =
            Kernel::open(Path::new(DEVICES), region).map_err(|error| missing(Path::new(DEVICES), region, &error))?;
        Self::with(Box::new(kernel), region)
    }

    fn with(mut calls: Box<dyn Calls>, region: u32) -> Result<Self> {
        let mut words = [0; MAX_WORDS];
        let failed = |what, error| failed(region, what, &error);
        let read = calls.request(CONTROL_CONTEXT, Request::ReadConfig, &mut words);
        read.map_err(|error| failed("say what it was built with", error))?;
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
            only_looks: false,
        };
        bus.register(CONTROL_CONTEXT)?;
        Ok(bus)
    }

    /// Registers this process in a context.
    fn register(&mut self, context: usize) -> Result<()> {
        let mut words = words([u64::from(std::process::id())]);
        self.ask(context, Request::RegisterProcess, &mut words, "register this process")?;
        self.contexts.push(words[1]);
        Ok(())
    }

    /// Makes this rank's ends of queue pairs, one for each other rank, each with a context and a page of memory of its own. Ranks exchange
    /// them, and each connects both ends; [`QueuePair::number`] of the local end is the session of that peer.
    ///
    /// # Errors
    /// The region has no contexts or the host no pages left.
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

    /// Connects one end of a queue pair with the other. All ranks must have done so before the first of them makes a call.
    ///
    /// # Errors
    /// The driver refuses it.
    fn connect(&mut self, local: &QueuePair, remote: &QueuePair) -> Result<()> {
        let port = self.port;
        let [first, second, third] = local.context_words(remote);
        let mut context = words([port, first, second, third]);
        self.ask(CONTROL_CONTEXT, Request::WriteContext, &mut context, "set up a queue pair")?;
        let [first, second, third] = local.connection_words(remote, port);
        let mut connection = words([port, first, second, third]);
        self.ask(CONTROL_CONTEXT, Request::WriteConnection, &mut connection, "connect a queue pair")?;
        let mut address = words([port, u64::from(remote.ip.to_bits())]);
        self.ask(CONTROL_CONTEXT, Request::LookUpAddress, &mut address, "look up the address of a peer")
    }

    fn ask(&mut self, context: usize, what: Request, words: &mut [u64; MAX_WORDS], said: &str) -> Result<()> {
        if self.only_looks {
            return Err(Error::internal(format!(
                "{}: a connection that only looks was asked to {said}",
                self.describe()
            )));
        }
        self.calls.request(context, what, words).map_err(|error| failed(self.region, said, &error))
    }

    /// Memory of the host in whole pages, which the card reaches as well.
    fn map(&mut self, context: usize, bytes: u64) -> Result<u64> {
        if self.only_looks {
            return Err(Error::internal(format!("{}: a connection that only looks has no buffers", self.describe())));
        }
        let whole = bytes.max(1).div_ceil(PAGE_BYTES).checked_mul(PAGE_BYTES);
        let whole = whole.and_then(|whole| Some((whole, usize::try_from(whole).ok()?)));
        let (whole, length) =
            whole.ok_or_else(|| Error::new(ErrorKind::Exhausted, format!("no buffer has {bytes} bytes")))?;
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
        let mapped = self.ask(context, Request::MapMemory, &mut words, "map a buffer");
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
    /// The ends of this rank's queue pairs, one for each other rank.
    fn tell(&mut self, settings: &Settings) -> Result<Option<String>> {
        // Queue pairs are the region's, so that is this process's alone before there are any.
        claim(self, || true)?;
        let own = settings.rank as usize;
        let ip = settings.peers.get(own).map(|peer| peer.ip);
        let ip = ip.ok_or_else(|| Error::internal(format!("rank {own} is none of its device's")))?;
        let mut ends = self.queue_pairs(ip, settings.world().saturating_sub(1))?.into_iter();
        self.ends = (0..settings.peers.len()).map(|rank| if rank == own { None } else { ends.next() }).collect();
        Ok(Some(QueuePair::all_to_text(&self.ends)))
    }

    /// Connects each with the end that its rank has made for this one; the number of the end here is the session.
    fn hear(&mut self, told: &[String], settings: &mut Settings) -> Result<()> {
        let own = settings.rank as usize;
        let senseless = |rank: usize, why: &str| {
            let text = format!(
                "what rank {rank} has told of its queue pairs makes no sense to rank {own}: {why}; install the same version of torch-accl \
                 on all hosts"
            );
            Error::new(ErrorKind::Device, text)
        };
        let mut pairs = Vec::new();
        for (rank, text) in told.iter().enumerate() {
            let ends = QueuePair::all_from_text(text).map_err(|error| senseless(rank, &error.to_string()))?;
            if ends.len() != settings.peers.len() {
                return Err(senseless(rank, &format!("it has {} of {}", ends.len(), settings.peers.len())));
            }
            if rank == own {
                if ends != self.ends {
                    return Err(senseless(rank, "it is not what this rank has told"));
                }
                continue;
            }
            let remote = ends[own].ok_or_else(|| senseless(rank, "it has none for this rank"))?;
            if !remote.is_sound() {
                return Err(senseless(rank, "it has numbers that no card has"));
            }
            let local = self.ends.get(rank).copied().flatten();
            pairs.push((rank, local.ok_or_else(|| Error::internal("nothing was told before it was heard"))?, remote));
        }
        if pairs.len() + 1 != settings.peers.len() {
            return Err(Error::internal(format!("{} of {} ranks were heard", told.len(), settings.peers.len())));
        }
        for (rank, local, remote) in pairs {
            self.connect(&local, &remote)?;
            settings.peers[rank].session = local.number;
        }
        Ok(())
    }

    /// Drivers of ours hold a lock on the device's file. Others are not noticed, and neither are those of other hosts.
    fn claim(&mut self) -> Result<Option<String>> {
        if self.only_looks {
            return Err(Error::internal(format!("{}: a connection that only looks takes nothing", self.describe())));
        }
        let is_ours = self.calls.claim().map_err(|error| failed(self.region, "be locked", &error))?;
        Ok((!is_ours).then(|| HOLDER.to_owned()))
    }

    fn read_register(&mut self, offset: u32) -> Result<u32> {
        Ok(self.calls.read_word(self.register_at(offset)?) as u32)
    }

    fn write_register(&mut self, offset: u32, value: u32) -> Result<()> {
        let index = self.register_at(offset)?;
        if self.only_looks {
            return Err(Error::internal(format!("{}: a connection that only looks writes nothing", self.describe())));
        }
        self.calls.write_word(index, value.into());
        Ok(())
    }

    /// Both memories are one, in which buffers are the host's until they are moved to the card, which nothing here does.
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
        if self.only_looks {
            return Err(Error::internal(format!("{}: a connection that only looks starts nothing", self.describe())));
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
        // To read it clears what it says of an end.
        let _ = self.calls.read_word(word_of(HOSTCTRL + hostctrl::CONTROL));
        Ok(())
    }

    fn reconnect(&self) -> Result<Box<dyn Bus>> {
        let calls = self.calls.again().map_err(|error| failed(self.region, "open it once more", &error))?;
        Ok(Box::new(Self {
            calls,
            region: self.region,
            contexts: Vec::new(),
            port: self.port,
            buffers: Vec::new(),
            ends: Vec::new(),
            is_busy: false,
            may_write: false,
            only_looks: true,
        }))
    }

    fn keep_buffers(&mut self) {
        self.may_write = true;
    }

    fn describe(&self) -> String {
        name(self.region)
    }
}

/// Gives everything back, unless the card may still write to buffers: then nothing ever is.
impl Drop for CoyoteBus {
    fn drop(&mut self) {
        if self.is_busy || self.may_write {
            return self.calls.keep_open();
        }
        if self.only_looks {
            return;
        }
        for (address, context) in std::mem::take(&mut self.buffers) {
            let number = self.contexts.get(context).copied().unwrap_or(0);
            // Nobody is left to hear of an error; what the driver has not taken back stays mapped.
            if self.calls.request(context, Request::UnmapMemory, &mut words([address, number])).is_ok() {
                self.calls.unmap_pages(address);
            }
        }
        for (context, number) in std::mem::take(&mut self.contexts).into_iter().enumerate().rev() {
            let _ = self.calls.request(context, Request::UnregisterProcess, &mut words([number]));
        }
    }
}

/// The words of a request, with zeros behind.
fn words<const N: usize>(given: [u64; N]) -> [u64; MAX_WORDS] {
    let mut words = [0; MAX_WORDS];
    words[..N].copy_from_slice(&given);
    words
}

/// Registers are 32 bits in words of 64: the index of one.
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

/// What is said where the kernel says that something is busy.
const IN_USE: &str = "; another process uses the card: end that first, or take another region";

/// Why there is no such region.
fn missing(devices: &Path, region: u32, error: &io::Error) -> Error {
    let place = devices.join(format!("fpga{region}"));
    if error.kind() == io::ErrorKind::ResourceBusy {
        let text = format!("card behind Coyote at {} cannot be opened: {error}{IN_USE}", place.display());
        return Error::new(ErrorKind::Device, text);
    }
    let is_v2 = std::fs::read_dir(devices)
        .is_ok_and(|entries| entries.flatten().any(|entry| entry.file_name().to_string_lossy().starts_with(V2_PREFIX)));
    let remedy = if is_v2 {
        "the driver of Coyote v2 is loaded, which has other requests and is not offered; load that of v1"
    } else {
        "load the driver of Coyote v1 and a shell with an engine"
    };
    Error::new(ErrorKind::Device, format!("no card behind Coyote at {}: {error}; {remedy}", place.display()))
}

/// Devices of v2 have these names.
const V2_PREFIX: &str = "coyote_fpga_";

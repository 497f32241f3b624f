//! The way of a group's collectives on GPU tensors: by reference, or through host memory.
//!
//! Owns the decision, which is the same on all ranks. A call is by reference if all ranks are on one host, its size is
//! between two bounds, and the GPUs of all ranks have read each other's memory in a trial. The first such call of a group
//! makes the trial, in which all ranks exchange windows twice over the host. Messages have no trial, and are by reference if
//! the setting says so. Read [`GroupRoute::of_call`] first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use accl_engine::{Blocks, CallDesc, Group, Mode, REFERENCE_BYTES, TensorDesc};
use accl_gpu::{DeviceMemory, HostMemory, Stream};
use accl_types::config::{Config, GpuRoute};
use accl_types::{Collective, Dtype, Elems, Error, Rank, ReduceOp, Result};
use parking_lot::Mutex;

use super::launcher::SeenWindows;
use super::reference::Reference;
use super::windows::{AllGpuPeers, GpuPeers, Lease};
use crate::streams::GpuDevice;

/// Time for which the trial waits for the device.
const PATIENCE: Duration = Duration::from_secs(60);

/// Bytes that ranks exchange in a trial.
const RECORD_BYTES: usize = 512;
/// First byte of the text in such a record.
const TEXT_AT: usize = 16 + REFERENCE_BYTES;

/// A value, or why a rank is not able to have it.
type Able<T> = std::result::Result<T, String>;

/// Issues a call on host memory, and waits for it.
pub type Complete<'a> = &'a mut dyn FnMut(&mut CallDesc) -> Result<()>;

/// The way of a group's collectives on GPU tensors.
#[derive(Debug)]
pub struct GroupRoute {
    setting: GpuRoute,
    /// Calls of at most this many bytes are staged: if they block, their caller's thread does that alone.
    eager_bytes: u64,
    /// Maximum bytes of a call by reference.
    most_bytes: u64,
    /// `None` until the first call that may be by reference.
    agreed: Mutex<Option<Agreed>>,
    /// Windows of other ranks that messages have seen.
    seen_by_messages: Arc<SeenWindows>,
    peer_bytes: AtomicU64,
    staged_bytes: AtomicU64,
}

#[derive(Clone, Debug)]
enum Agreed {
    Peer(Arc<GroupPeers>),
    /// The GPUs do not allow it, and the calls are staged.
    Staged,
    /// The GPUs do not allow it, and the setting does not allow another way.
    Refused(Error),
}

/// Windows of a group whose ranks read each other's memory.
#[derive(Debug)]
pub(crate) struct GroupPeers {
    pub(crate) peers: Arc<GpuPeers>,
    pub(crate) seen: Arc<SeenWindows>,
    /// Whether all ranks have a compiler for kernels that reduce.
    reduces: bool,
}

/// The way of one call by reference.
#[derive(Clone, Debug)]
pub struct PeerRoute(pub(crate) Arc<GroupPeers>);

impl GroupRoute {
    /// Creates the state of a group from its settings, which are the same on all ranks.
    pub fn new(config: &Config) -> Self {
        let Config { gpu_route: setting, eager_bytes, gpu_window: most_bytes, .. } = *config;
        let (agreed, seen_by_messages) = Default::default();
        Self {
            setting,
            eager_bytes,
            most_bytes,
            agreed,
            seen_by_messages,
            peer_bytes: AtomicU64::new(0),
            staged_bytes: AtomicU64::new(0),
        }
    }

    /// Returns the way of a call on tensors of a device, if it is by reference; `None` if it is staged. The first call that may
    /// be by reference waits for all ranks. `device` is `None` if the type of device has no driver in the table. `complete`
    /// issues a call on host memory and waits for it.
    ///
    /// # Errors
    /// `Unsupported` on all ranks if the setting allows no other way and the GPUs do not allow this one. The errors of a call.
    pub(crate) fn of_call(
        &self,
        group: &Group,
        desc: &CallDesc,
        device: Option<&GpuDevice>,
        all: &AllGpuPeers,
        complete: Complete<'_>,
    ) -> Result<Option<PeerRoute>> {
        if self.setting == GpuRoute::Staged || !group.can_be_by_reference(desc) {
            return Ok(None);
        }
        if desc.collective.is_point_to_point() {
            return self.of_message(group, desc, device, all);
        }
        let size = desc.size_bytes(group.world());
        let is_sized =
            desc.collective == Collective::AllToAll || (self.eager_bytes + 1..=self.most_bytes).contains(&size);
        if !is_sized || self.most_bytes == 0 {
            return Ok(None);
        }
        let is_peer = self.setting == GpuRoute::Peer;
        let refused = |why: &str| refused(why).of(desc.collective);
        if !group.is_on_one_host() {
            return if is_peer { Err(refused(SEVERAL_HOSTS)) } else { Ok(None) };
        }
        let Some(device) = device else {
            return if is_peer { Err(refused(NO_DRIVER)) } else { Ok(None) };
        };
        // Held during the trial: other threads' calls on the group follow this one.
        let mut agreed = self.agreed.lock();
        let agreed = match &*agreed {
            Some(agreed) => agreed,
            None => {
                let found = Trial::new(group, device, all).run(complete)?;
                agreed.insert(match found {
                    Ok(peers) => Agreed::Peer(Arc::new(peers)),
                    Err(why) if is_peer => Agreed::Refused(refused(&why)),
                    Err(why) => {
                        if group.rank() == Rank(0) {
                            warn_once(&why);
                        }
                        Agreed::Staged
                    }
                })
            }
        };
        match agreed {
            Agreed::Peer(peers) if peers.reduces || !desc.collective.reduces() => Ok(Some(PeerRoute(peers.clone()))),
            Agreed::Peer(_) | Agreed::Staged => Ok(None),
            Agreed::Refused(error) => Err(error.clone()),
        }
    }

    /// Returns the way of a message. Ranks issue messages in orders of their own, so no trial can precede one on both: messages are
    /// by reference only if the setting says so.
    fn of_message(
        &self,
        group: &Group,
        desc: &CallDesc,
        device: Option<&GpuDevice>,
        all: &AllGpuPeers,
    ) -> Result<Option<PeerRoute>> {
        let is_sized = (self.eager_bytes + 1..=self.most_bytes).contains(&desc.bytes());
        if self.setting != GpuRoute::Peer || !is_sized {
            return Ok(None);
        }
        if !group.is_on_one_host() {
            return Err(refused(SEVERAL_HOSTS).of(desc.collective));
        }
        let device = device.ok_or_else(|| refused(NO_DRIVER).of(desc.collective))?;
        let peers = all.of(device).map_err(|error| refused(&error.message).of(desc.collective))?;
        let seen = self.seen_by_messages.clone();
        Ok(Some(PeerRoute(Arc::new(GroupPeers { peers, seen, reduces: false }))))
    }

    /// Counts the bytes of a call on tensors of a device.
    pub fn count(&self, bytes: u64, is_by_reference: bool) {
        let counter = if is_by_reference { &self.peer_bytes } else { &self.staged_bytes };
        counter.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Describes the way and the bytes so far, on one line; empty if no call was on a device.
    pub fn describe(&self) -> String {
        let [peer, staged] = [&self.peer_bytes, &self.staged_bytes].map(|bytes| bytes.load(Ordering::Relaxed));
        if peer + staged == 0 {
            return String::new();
        }
        // A call in its trial holds the lock.
        let agreed = self.agreed.try_lock().and_then(|agreed| agreed.clone());
        let way = match agreed {
            Some(Agreed::Peer(_)) => "peer",
            Some(Agreed::Staged | Agreed::Refused(_)) => "staged",
            None => "not tried",
        };
        format!("tensors of accelerators: peer memory {way}, {peer} bytes by peer, {staged} bytes staged\n")
    }
}

/// Reasons of a refusal.
const SEVERAL_HOSTS: &str = "the ranks of the group are on several hosts";
const NO_DRIVER: &str = "devices of this type have no table of driver functions";

/// Returns the error of a call that the setting does not let go another way.
fn refused(why: &str) -> Error {
    Error::unsupported(format!("ACCL_GPU_ROUTE=peer is impossible: {why}; set it to auto or staged on all ranks"))
}

/// Says why the calls of a process are staged.
fn warn_once(why: &str) {
    static HAS_WARNED: AtomicBool = AtomicBool::new(false);
    if !HAS_WARNED.swap(true, Ordering::Relaxed) {
        tracing::warn!("ranks cannot read each other's GPU memory, so tensors are copied through host memory: {why}");
    }
}

/// The exchange in which the ranks of a group find whether their GPUs read each other's memory.
struct Trial<'a> {
    group: &'a Group,
    device: &'a GpuDevice,
    all: &'a AllGpuPeers,
}

/// What a rank offers for a trial.
struct Offer {
    peers: Arc<GpuPeers>,
    window: Lease,
    reduces: bool,
}

impl<'a> Trial<'a> {
    fn new(group: &'a Group, device: &'a GpuDevice, all: &'a AllGpuPeers) -> Self {
        Self { group, device, all }
    }

    /// Exchanges windows, reads those of the others, and exchanges the outcome. Returns the reason of the lowest rank that
    /// has one if the GPUs do not allow it, which is the same text on all ranks.
    ///
    /// # Errors
    /// The errors of a call.
    fn run(&self, complete: Complete<'_>) -> Result<Able<GroupPeers>> {
        let offer = self.offer();
        let first = self.exchange(&Record::of(&offer), complete)?;
        let seen: Arc<SeenWindows> = Arc::default();
        let outcome = match (&offer, first.iter().all(|record| record.is_able)) {
            (Ok(offer), true) => self.read_all(offer, &first, &seen).map(|()| offer.reduces),
            (Ok(_), false) => Err("another rank is not able".to_owned()),
            (Err(why), _) => Err(why.clone()),
        };
        let second = self.exchange(&Record::of_outcome(&outcome), complete)?;
        // A reason of the first exchange comes first: the second may follow from it.
        let blamed = first.iter().chain(&second).zip((0..self.group.world()).cycle());
        if let Some((record, rank)) = blamed.into_iter().find(|(record, _)| !record.is_able) {
            return Ok(Err(format!("rank {rank}: {}", record.text)));
        }
        let Ok(Offer { peers, .. }) = offer else { return Err(Error::internal("a rank without an offer agreed")) };
        Ok(Ok(GroupPeers { peers, seen, reduces: second.iter().all(|record| record.reduces) }))
    }

    /// Prepares a window whose first bytes are its number.
    fn offer(&self) -> Able<Offer> {
        let offer = || {
            let peers = self.all.of(self.device)?;
            let window = peers.lend(1)?;
            // Never freed: a device that does not answer in time may still read it.
            let number = Box::leak(Box::new(window.id().number.to_ne_bytes()));
            // SAFETY: the window is lent to this call, which waits for the copy.
            let (to, from) = unsafe {
                let from = HostMemory::new(number.as_mut_ptr(), number.len() as u64);
                (DeviceMemory::new(window.address(), number.len() as u64), from)
            };
            peers.gpu.copy_to_device(to, from, default_stream())?;
            wait(&peers)?;
            let reduces = peers.reduction(ReduceOp::Sum, Dtype::F32);
            if let Err(error) = &reduces {
                tracing::warn!(error = error.message, "sums of GPU tensors are copied through host memory");
            }
            Ok(Offer { reduces: reduces.is_ok(), peers, window })
        };
        offer().map_err(|error: Error| error.message)
    }

    /// Reads the windows of all other ranks.
    fn read_all(&self, offer: &Offer, records: &[Record], seen: &SeenWindows) -> Able<()> {
        let Offer { peers, .. } = offer;
        for (rank, record) in (0..).map(Rank).zip(records).filter(|(rank, _)| *rank != self.group.rank()) {
            let read = || {
                let Reference { window, .. } = record.reference;
                let of_rank = peers.see(window)?;
                // Never freed: a device that does not answer in time may still write it.
                let number = Box::leak(Box::new([0; 8]));
                // SAFETY: the other rank keeps the window until all ranks have exchanged the outcome.
                let (to, from) = unsafe {
                    let to = HostMemory::new(number.as_mut_ptr(), number.len() as u64);
                    (to, DeviceMemory::new(of_rank.address(), number.len() as u64))
                };
                peers.gpu.copy_to_host(to, from, default_stream())?;
                wait(peers)?;
                if u64::from_ne_bytes(*number) != window.number {
                    return Err(Error::device("it read other bytes than were written"));
                }
                seen.lock().insert(window.number, of_rank);
                Ok(())
            };
            read().map_err(|error: Error| format!("it cannot read the memory of rank {rank}: {}", error.message))?;
        }
        Ok(())
    }

    /// Gives a record to all ranks. Returns the records in the order of ranks.
    fn exchange(&self, mine: &Record, complete: Complete<'_>) -> Result<Vec<Record>> {
        let mut mine = mine.to_bytes();
        let mut all = vec![0_u8; RECORD_BYTES * self.group.world() as usize];
        let tensor = |bytes: &mut [u8]| TensorDesc::dense(bytes.as_mut_ptr(), Dtype::U8, Elems(bytes.len() as u64));
        let mut desc = CallDesc::new(Collective::AllGather, Dtype::U8);
        desc.inputs = Blocks::of(tensor(&mut mine));
        desc.outputs = all.chunks_mut(RECORD_BYTES).map(|bytes| [tensor(bytes)]).collect();
        desc.mode = Mode::Blocking;
        complete(&mut desc)?;
        Ok(all.chunks(RECORD_BYTES).map(Record::from_bytes).collect())
    }
}

/// Returns the default stream, for copies that their caller waits for.
fn default_stream() -> Stream {
    // SAFETY: every device has the stream 0.
    unsafe { Stream::new(0) }
}

/// Waits for everything on the default stream.
fn wait(peers: &GpuPeers) -> Result<()> {
    let event = peers.gpu.event()?;
    event.record(default_stream())?;
    let begin = Instant::now();
    while !event.has_come()? {
        if begin.elapsed() > PATIENCE {
            return Err(Error::device(format!("the device has not copied 8 bytes for {} s", PATIENCE.as_secs())));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// What a rank tells the others in a trial.
struct Record {
    is_able: bool,
    reduces: bool,
    reference: Reference,
    /// Why the rank is not able.
    text: String,
}

impl Record {
    fn of(offer: &Able<Offer>) -> Self {
        match offer {
            Ok(offer) => {
                let reference = Reference { window: offer.window.id(), offset: 0 };
                Self { is_able: true, reduces: offer.reduces, reference, text: String::new() }
            }
            Err(why) => Self::unable(why),
        }
    }

    fn of_outcome(outcome: &Able<bool>) -> Self {
        match outcome {
            Ok(reduces) => Self { is_able: true, reduces: *reduces, ..Self::unable("") },
            Err(why) => Self::unable(why),
        }
    }

    fn unable(why: &str) -> Self {
        let reference = Reference::from_bytes(&[0; REFERENCE_BYTES]);
        Self { is_able: false, reduces: false, reference, text: why.to_owned() }
    }

    fn to_bytes(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        (bytes[0], bytes[1]) = (u8::from(self.is_able), u8::from(self.reduces));
        bytes[16..TEXT_AT].copy_from_slice(&self.reference.to_bytes());
        let text = &self.text.as_bytes()[..self.text.len().min(RECORD_BYTES - TEXT_AT)];
        bytes[TEXT_AT..TEXT_AT + text.len()].copy_from_slice(text);
        bytes
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let mut reference = [0; REFERENCE_BYTES];
        reference.copy_from_slice(&bytes[16..TEXT_AT]);
        let text = bytes[TEXT_AT..].split(|&byte| byte == 0).next().unwrap_or_default();
        Self {
            is_able: bytes[0] == 1,
            reduces: bytes[1] == 1,
            reference: Reference::from_bytes(&reference),
            text: String::from_utf8_lossy(text).into_owned(),
        }
    }
}

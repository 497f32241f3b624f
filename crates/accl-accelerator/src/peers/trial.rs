//! The trial of a group: whether the GPUs of all ranks read each other's memory.
//!
//! Owns the exchange. Each rank offers a window whose first bytes are its number, reads the windows of the others, and says
//! what it has found. All ranks get the same outcome. Read [`Trial::run`] first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use accl_engine::{Blocks, CallDesc, Group, Mode, REFERENCE_BYTES, TRIAL, TensorDesc};
use accl_gpu::{DeviceMemory, HostMemory};
use accl_types::{Collective, Dtype, Elems, Error, Rank, ReduceOp, Result};

use super::launcher::SeenWindows;
use super::reference::Reference;
use super::windows::{AllGpuPeers, GpuPeers, Lease};
use crate::streams::GpuDevice;

/// Time for which a trial waits for the device. Its stream waits for no work of the program.
const PATIENCE: Duration = Duration::from_secs(10);

/// Bytes that ranks exchange in a trial.
const RECORD_BYTES: usize = 512;
/// First byte of the text in such a record.
const TEXT_AT: usize = 16 + REFERENCE_BYTES;

/// A value, or why a rank is not able to have it.
pub(super) type Able<T> = std::result::Result<T, String>;

/// The trial before a call.
pub(super) struct Trial<'a> {
    pub(super) group: &'a Group,
    pub(super) desc: &'a CallDesc,
    pub(super) device: &'a GpuDevice,
    pub(super) all: &'a AllGpuPeers,
    /// The windows of other ranks are added here.
    pub(super) seen: &'a SeenWindows,
}

/// Window and abilities that a rank offers in a trial.
struct Offer {
    peers: Arc<GpuPeers>,
    window: Lease,
    reduces: bool,
}

impl Trial<'_> {
    /// Exchanges windows, reads the windows of the others, and exchanges the outcome: whether all ranks have a compiler for kernels that
    /// reduce. If the GPUs do not allow it, the reason of the lowest rank that has one, which is the same text on all ranks.
    ///
    /// # Errors
    /// The errors of a call.
    pub(super) fn run(&self, complete: &mut dyn FnMut(&mut CallDesc) -> Result<()>) -> Result<Able<bool>> {
        let offer = self.offer();
        let first = self.exchange(&Record::of(&offer), complete)?;
        let outcome = match (&offer, first.iter().all(|record| record.is_able)) {
            (Ok(offer), true) => self.read_all(offer, &first).map(|()| offer.reduces),
            (Ok(_), false) => Err("another rank is not able".to_owned()),
            (Err(why), _) => Err(why.clone()),
        };
        let second = self.exchange(&Record::of_outcome(&outcome), complete)?;
        // A reason of the first exchange comes first: the second may follow from it.
        let mut blamed = first.iter().chain(&second).zip((0..self.group.world()).cycle());
        if let Some((record, rank)) = blamed.find(|(record, _)| !record.is_able) {
            self.seen.lock().clear();
            return Ok(Err(format!("rank {rank}: {}", record.text)));
        }
        Ok(Ok(second.iter().all(|record| record.reduces)))
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
            peers.gpu.copy_to_device(to, from, peers.stream)?;
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
    fn read_all(&self, offer: &Offer, records: &[Record]) -> Able<()> {
        let Offer { peers, window: own, .. } = offer;
        for (rank, record) in (0..).map(Rank).zip(records).filter(|(rank, _)| *rank != self.group.rank()) {
            let read = || {
                let Reference { window, .. } = record.reference;
                if window.number == own.id().number {
                    return Err(Error::internal("its window has the number of this rank's window"));
                }
                let of_rank = peers.see(window)?;
                // Never freed: a device that does not answer in time may still write it.
                let number = Box::leak(Box::new([0; 8]));
                // SAFETY: the other rank keeps the window until all ranks have exchanged the outcome.
                let (to, from) = unsafe {
                    let to = HostMemory::new(number.as_mut_ptr(), number.len() as u64);
                    (to, DeviceMemory::new(of_rank.address(), number.len() as u64))
                };
                peers.gpu.copy_to_host(to, from, peers.stream)?;
                wait(peers)?;
                if u64::from_ne_bytes(*number) != window.number {
                    return Err(Error::device("it read other bytes than were written"));
                }
                self.seen.lock().insert(window.number, of_rank);
                Ok(())
            };
            read().map_err(|error: Error| format!("it cannot read the memory of rank {rank}: {}", error.message))?;
        }
        Ok(())
    }

    /// Gives a record to all ranks. Returns the records in the order of ranks.
    fn exchange(&self, mine: &Record, complete: &mut dyn FnMut(&mut CallDesc) -> Result<()>) -> Result<Vec<Record>> {
        let mut mine = mine.to_bytes().to_vec();
        let mut all = vec![0_u8; RECORD_BYTES * self.group.world() as usize];
        let tensor = |bytes: &mut [u8]| TensorDesc::dense(bytes.as_mut_ptr(), Dtype::U8, Elems(bytes.len() as u64));
        let mut desc = CallDesc::new(Collective::AllGather, Dtype::U8);
        desc.inputs = Blocks::of(tensor(&mut mine));
        desc.outputs = all.chunks_mut(RECORD_BYTES).map(|bytes| [tensor(bytes)]).collect();
        (desc.mode, desc.timeout, desc.note) = (Mode::Blocking, self.desc.timeout, TRIAL);
        if let Err(error) = complete(&mut desc) {
            // A call that was interrupted may still use the memory.
            std::mem::forget((mine, all));
            let message = format!(
                "{}; in the trial whether GPUs read each other's memory, which precedes this group's first large collective on GPU tensors",
                error.message
            );
            return Err(Error { message, ..error });
        }
        Ok(all.chunks(RECORD_BYTES).map(Record::from_bytes).collect())
    }
}

/// Waits for everything on the stream of trials.
fn wait(peers: &GpuPeers) -> Result<()> {
    let event = peers.gpu.event()?;
    event.record(peers.stream)?;
    let begin = Instant::now();
    while !event.has_come()? {
        if begin.elapsed() > PATIENCE {
            return Err(Error::device(format!("the device has not copied 8 bytes for {} s", PATIENCE.as_secs())));
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Message of a rank to the others in a trial.
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

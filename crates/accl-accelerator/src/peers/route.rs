//! The way of a group's collectives on GPU tensors: by reference, or through host memory.
//!
//! Owns the decision, which is the same on all ranks. A call is by reference if all ranks are on one host, its size is
//! between two bounds, and the GPUs of all ranks have read each other's memory in a trial. The first such call of a group
//! makes the trial: see `trial`. Messages have no trial, and are by reference if the setting says so. Read
//! [`GroupRoute::of_call`] first.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use accl_engine::{CallDesc, Group};
use accl_gpu::Vendor;
use accl_types::config::{Config, GpuRoute};
use accl_types::{Collective, Error, Rank, Result};
use parking_lot::{Mutex, MutexGuard};

use super::launcher::SeenWindows;
use super::trial::{Able, Trial};
use super::windows::{AllGpuPeers, GpuPeers};
use crate::streams::GpuDevice;

/// Time after which a thread that waits for another one's trial looks for an interrupt.
const INTERRUPTS: Duration = Duration::from_millis(50);

/// Functions of the thread that issues a call, for its trial.
pub struct Issuing<'a> {
    /// Issues a call on host memory, and waits for it.
    pub complete: &'a mut dyn FnMut(&mut CallDesc) -> Result<()>,
    /// Returns whether the thread wants to stop.
    pub is_interrupted: &'a mut dyn FnMut() -> bool,
}

/// The way of a group's calls on GPU tensors.
#[derive(Debug)]
pub struct GroupRoute {
    setting: GpuRoute,
    /// Calls of at most this many bytes are staged: if they block, their caller's thread does that alone.
    eager_bytes: u64,
    /// Maximum bytes of a call by reference.
    most_bytes: u64,
    /// `None` until the first collective that may be by reference.
    agreed: Mutex<Option<Agreed>>,
    /// Windows of other ranks that this rank has seen, by the GPU that reads them.
    seen: Mutex<HashMap<(Vendor, u32), Arc<SeenWindows>>>,
    peer_bytes: AtomicU64,
    staged_bytes: AtomicU64,
}

#[derive(Clone, Debug)]
enum Agreed {
    /// `reduces`: all ranks have a compiler for kernels that reduce.
    Peer { reduces: bool },
    /// The GPUs do not allow it, and the calls are staged.
    Staged,
    /// The GPUs do not allow it, and the setting does not allow another way.
    Refused(Error),
}

/// The way of one call by reference: the windows of its GPU.
#[derive(Clone, Debug)]
pub struct PeerRoute {
    pub(crate) peers: Arc<GpuPeers>,
    pub(crate) seen: Arc<SeenWindows>,
}

impl GroupRoute {
    /// Creates the state of a group from its settings, which are the same on all ranks.
    pub fn new(config: &Config) -> Self {
        let Config { gpu_route: setting, eager_bytes, gpu_window: most_bytes, .. } = *config;
        let (agreed, seen) = Default::default();
        let (peer_bytes, staged_bytes) = Default::default();
        Self { setting, eager_bytes, most_bytes, agreed, seen, peer_bytes, staged_bytes }
    }

    /// Returns the way of a call on tensors of a device, if it is by reference; `None` if it is staged. The first collective that
    /// may be by reference waits for all ranks. `device` is `None` if the type of device has no driver in the table.
    ///
    /// # Errors
    /// `Unsupported` on all ranks if the setting allows no other way and the GPUs do not allow this one. The errors of a call.
    pub(crate) fn of_call(
        &self,
        group: &Group,
        desc: &CallDesc,
        device: Option<&GpuDevice>,
        all: &AllGpuPeers,
        issuing: Issuing<'_>,
    ) -> Result<Option<PeerRoute>> {
        let is_peer = self.setting == GpuRoute::Peer;
        let is_message = desc.collective.is_point_to_point();
        let may_be = self.setting != GpuRoute::Staged && (is_peer || !is_message) && group.can_be_by_reference(desc);
        if !may_be || !self.is_sized(desc, group.world()) {
            return Ok(None);
        }
        let impossible = |why: &str| match is_peer {
            true => Err(refused(why).of(desc.collective)),
            false => Ok(None),
        };
        if !group.is_on_one_host() {
            return impossible("the ranks of the group are on several hosts");
        }
        let Some(device) = device else {
            return impossible("devices of this type have no table of driver functions");
        };
        // Ranks issue messages in orders of their own, so no trial can precede one on both.
        if !is_message {
            match self.agreed(group, desc, device, all, issuing)? {
                Agreed::Peer { reduces: false } if desc.collective.reduces() => {
                    return impossible("a rank has no compiler for kernels that reduce");
                }
                Agreed::Peer { .. } => {}
                Agreed::Staged => return Ok(None),
                Agreed::Refused(error) => return Err(error),
            }
        }
        let peers = all.of(device).map_err(|error| error.of(desc.collective))?;
        Ok(Some(PeerRoute { peers, seen: self.seen_by(device) }))
    }

    /// Returns whether a call has a size that may be by reference. All ranks get the same answer. In an all_to_all with splits, no
    /// rank knows the sizes of the others.
    fn is_sized(&self, desc: &CallDesc, world: u32) -> bool {
        let bytes = match desc.collective {
            Collective::AllToAll if !desc.equal_blocks => return self.most_bytes > 0,
            Collective::AllToAll | Collective::Send | Collective::Recv => desc.bytes(),
            _ => desc.size_bytes(world),
        };
        (self.eager_bytes + 1..=self.most_bytes).contains(&bytes)
    }

    /// Returns the outcome of the trial, which the first call makes.
    fn agreed(
        &self,
        group: &Group,
        desc: &CallDesc,
        device: &GpuDevice,
        all: &AllGpuPeers,
        issuing: Issuing<'_>,
    ) -> Result<Agreed> {
        // Held during the trial: other threads' calls on the group follow this one.
        let mut agreed = self.lock(issuing.is_interrupted)?;
        if let Some(agreed) = &*agreed {
            return Ok(agreed.clone());
        }
        let seen = self.seen_by(device);
        let found: Able<bool> = Trial { group, desc, device, all, seen: &seen }.run(issuing.complete)?;
        let found = match found {
            Ok(reduces) => Agreed::Peer { reduces },
            Err(why) if self.setting == GpuRoute::Peer => Agreed::Refused(refused(&why).of(desc.collective)),
            Err(why) => {
                if group.rank() == Rank(0) {
                    warn_once(&why);
                }
                Agreed::Staged
            }
        };
        Ok(agreed.insert(found).clone())
    }

    fn lock(&self, is_interrupted: &mut dyn FnMut() -> bool) -> Result<MutexGuard<'_, Option<Agreed>>> {
        loop {
            if let Some(agreed) = self.agreed.try_lock_for(INTERRUPTS) {
                return Ok(agreed);
            }
            if is_interrupted() {
                return Err(Error::aborted(
                    "interrupted while another thread tries whether GPUs read each other's memory",
                ));
            }
        }
    }

    fn seen_by(&self, device: &GpuDevice) -> Arc<SeenWindows> {
        self.seen.lock().entry((device.vendor, device.ordinal)).or_default().clone()
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
            Some(Agreed::Peer { .. }) => "peer",
            Some(Agreed::Staged | Agreed::Refused(_)) => "staged",
            None => "not tried",
        };
        format!("tensors of accelerators: peer memory {way}, {peer} bytes by peer, {staged} bytes staged\n")
    }
}

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

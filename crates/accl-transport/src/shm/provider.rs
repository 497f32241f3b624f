//! The transport `shm`. The connecting process creates the memory and sends its descriptor; the accepting process maps
//! it. Each gets the other's event descriptor and bitmap.
//!
//! Owns the creation of links, and the budget of one endpoint.

use std::os::fd::AsFd;
use std::sync::Arc;

use super::budget::Budget;
use super::link::{Parts, ShmLink};
use super::region::{Region, region_bytes, ring_bytes_for};
use crate::bitmap::PeerBitmap;
use crate::credentials::peer_process;
use crate::fork::Fd;
use crate::mapping::PAGE;
use crate::transport::{Address, Agreed, Bootstrap, HalfLink, Local, PeerAddress, Provider, Transport};
use crate::{Waker, Watched, ring};

pub(crate) const ROW: Transport = Transport {
    name: "shm",
    about: "rings in shared memory between processes of one host and user",
    bootstrap: Bootstrap::Unix,
    // The socket, the peer's event descriptor and the peer's process descriptor.
    descriptors: 3,
    polls_without_syscall: true,
    open: &|local: &Local<'_>| Box::new(Shm::new(local)),
    collectives: None,
};

/// Sides of a region: `CREATOR` is the process that created the memory, `GUEST` the process that mapped it.
const CREATOR: usize = 0;
const GUEST: usize = 1;

const NO_EVENTS: &str = "its event descriptor and event bitmap did not arrive";

struct Shm {
    ring_bytes: u64,
    max_payload_bytes: usize,
    waker: Arc<Waker>,
    budget: Budget,
}

impl Shm {
    fn new(local: &Local<'_>) -> Shm {
        Shm {
            ring_bytes: local.settings.ring_bytes,
            max_payload_bytes: local.settings.max_payload_bytes(),
            waker: Arc::clone(local.waker),
            budget: Budget::new(local.settings.shm_limit),
        }
    }
}

impl Provider for Shm {
    fn offer(&self) -> Result<Box<dyn HalfLink>, String> {
        let wanted = ring_bytes_for(self.ring_bytes, self.max_payload_bytes);
        // Without a bitmap for its events, no link over shared memory is created.
        self.waker.bitmap_descriptor()?;
        let (region, memory, refused) = create_region(wanted, self.max_payload_bytes, &self.budget)?;
        let waker = Arc::clone(&self.waker);
        Ok(Box::new(Half { region, side: CREATOR, memory: Some(memory), waker, events: None, refused }))
    }

    fn accept(&self, peer: PeerAddress, max_payload_bytes: usize) -> Result<Box<dyn HalfLink>, String> {
        let Ok([memory, event, bitmap]) = <[Fd; 3]>::try_from(peer.descriptors) else {
            return Err("the descriptors of memory and events did not arrive".to_owned());
        };
        self.waker.bitmap_descriptor()?;
        let ring_bytes = <[u8; 8]>::try_from(&peer.bytes[..]).map_or(u64::MAX, u64::from_le_bytes);
        let ring_bytes = usize::try_from(ring_bytes).unwrap_or(usize::MAX);
        if ring_bytes < ring::min_data_bytes(max_payload_bytes)
            || ring_bytes > usize::MAX / 4
            || !ring_bytes.is_multiple_of(PAGE)
        {
            return Err(format!("invalid ring size: {ring_bytes} bytes"));
        }
        let region = Region::open(memory.as_fd(), ring_bytes, &self.budget)
            .map_err(|why| format!("cannot use {} bytes of shared memory: {why}", region_bytes(ring_bytes)))?;
        let waker = Arc::clone(&self.waker);
        let events = Some(PeerEvents::new(event, &bitmap)?);
        Ok(Box::new(Half { region, side: GUEST, memory: None, waker, events, refused: None }))
    }

    fn sibling(&self, waker: &Arc<Waker>) -> Box<dyn Provider> {
        Box::new(Shm { waker: Arc::clone(waker), budget: self.budget.clone(), ..*self })
    }
}

/// Creates the largest region that is granted, halving from `wanted` down to what the longest frame needs. Also returns
/// the reason if it is smaller than `wanted`.
fn create_region(
    wanted: usize,
    max_payload_bytes: usize,
    budget: &Budget,
) -> Result<(Region, Fd, Option<String>), String> {
    let least = ring_bytes_for(0, max_payload_bytes);
    let mut refused = None;
    let mut ring_bytes = wanted;
    loop {
        match Region::create(ring_bytes, budget) {
            Ok((region, memory)) => return Ok((region, memory, refused)),
            Err(why) if ring_bytes <= least => return Err(refused.unwrap_or(why)),
            Err(why) => {
                refused.get_or_insert(why);
                ring_bytes = ring_bytes_for(ring_bytes as u64 / 2, max_payload_bytes);
            }
        }
    }
}

/// Event descriptor and bitmap with which this process notifies the peer.
struct PeerEvents {
    event: Fd,
    bitmap: PeerBitmap,
}

impl PeerEvents {
    fn new(event: Fd, bitmap: &Fd) -> Result<PeerEvents, String> {
        Ok(PeerEvents {
            event,
            bitmap: PeerBitmap::open(bitmap.as_fd())
                .map_err(|why| format!("cannot map the peer's event bitmap: {why}"))?,
        })
    }
}

struct Half {
    region: Region,
    side: usize,
    /// The memory's descriptor, kept for the guest until it has been sent; `None` on the guest's side.
    memory: Option<Fd>,
    waker: Arc<Waker>,
    /// The guest has it from the beginning; the creator gets it with the answer.
    events: Option<PeerEvents>,
    /// Reason why the rings are smaller than configured, if they are.
    refused: Option<String>,
}

impl HalfLink for Half {
    fn address(&self) -> Address<'_> {
        let events = std::iter::once(self.waker.as_fd()).chain(self.waker.bitmap_descriptor());
        match &self.memory {
            Some(memory) => Address {
                bytes: (self.region.ring_bytes() as u64).to_le_bytes().to_vec(),
                descriptors: std::iter::once(memory.as_fd()).chain(events).collect(),
            },
            None => Address { bytes: Vec::new(), descriptors: events.collect() },
        }
    }

    fn forget_address(&mut self) {
        self.memory = None;
    }

    fn take_answer(&mut self, peer: PeerAddress, _max_payload_bytes: usize) -> Result<(), String> {
        let [event, bitmap] = <[Fd; 2]>::try_from(peer.descriptors).map_err(|_| NO_EVENTS.to_owned())?;
        self.events = Some(PeerEvents::new(event, &bitmap)?);
        Ok(())
    }

    fn compromise(&self) -> Option<(String, String)> {
        let why = self.refused.clone()?;
        let kib = self.region.ring_bytes() / 1024;
        Some((format!("shm uses rings of {kib} KiB instead of ACCL_RING_BYTES"), why))
    }

    fn finish(self: Box<Self>, agreed: Agreed) -> Result<Box<dyn Watched>, String> {
        let Agreed { socket, max_payload_bytes, peer } = agreed;
        let peer_process = peer_process(&socket);
        let Half { region, side, events, .. } = *self;
        let PeerEvents { event: peer_event, bitmap: peer_bitmap } = events.ok_or(NO_EVENTS)?;
        let parts = Parts { region, side, socket, peer_event, peer_bitmap, peer_process, max_payload_bytes, peer };
        Ok(Box::new(ShmLink::new(parts)))
    }
}

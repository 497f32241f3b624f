//! Transports from other packages: a table of C functions that is handed in while the process runs.
//!
//! Owns the link over such a table, and what a peer's death means there: the carrier's socket tells of it, and what is under way besides
//! gets some time. The table is described in `accl_transport.h`, which is installed with the Python package. Read [`TransportV1`] first.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accl_types::{Error, Result};
use accl_wire::table::{AGAIN, ENDED, IN_MEMORY, OK, ONE_HOST, TRANSPORT_ABI, TransportV1};
use accl_wire::{Frame, HEAD_BYTES, Link, Place};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;
use rustix::net::sockopt::set_tcp_nodelay;

use crate::collectives::Collectives;
use crate::fork::Fd;
use crate::table_collectives::TableCollectives;
use crate::transport::{
    Address, Agreed, Carrier, HalfLink, Local, MAX_ADDRESS_BYTES, PeerAddress, Provider, Transport,
};
use crate::{News, Waker, Watched, refusal, rows};

/// What a link is taken to keep open, besides the carrier's socket a few of its own.
const USUAL_DESCRIPTORS: usize = 3;
/// Most descriptors of one link that are watched.
const MAX_DESCRIPTORS: usize = 8;
/// A frame may be under way for so long after the carrier has ended, and is looked for so often.
const LAST_FRAMES: Duration = Duration::from_secs(1);
const LAST_FRAMES_INTERVAL: Duration = Duration::from_millis(50);
/// How long a dropped link tries to get rid of its last frames: so many times so long.
const LINGER_STEPS: u32 = 10;
const LINGER_STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// A checked table: what must be there is.
struct Table {
    name: &'static str,
    flags: u64,
    poll_interval: Option<Duration>,
    context: *mut c_void,
    open: unsafe extern "C" fn(
        *mut c_void,
        usize,
        *const c_void,
        usize,
        *mut *mut c_void,
        *mut c_void,
        *mut usize,
    ) -> c_int,
    connect: unsafe extern "C" fn(*mut c_void, *const c_void, usize, usize) -> c_int,
    reserve: unsafe extern "C" fn(*mut c_void, usize, *mut *mut c_void, *mut *mut c_void) -> c_int,
    commit: unsafe extern "C" fn(*mut c_void),
    peek: unsafe extern "C" fn(*mut c_void, *mut *const c_void, *mut *const c_void, *mut usize) -> c_int,
    release: unsafe extern "C" fn(*mut c_void),
    progress: unsafe extern "C" fn(*mut c_void) -> c_int,
    descriptors: Option<unsafe extern "C" fn(*mut c_void, *mut c_int, usize) -> usize>,
    error: Option<unsafe extern "C" fn(*mut c_void) -> *const c_char>,
    close: unsafe extern "C" fn(*mut c_void),
    destroy: unsafe extern "C" fn(*mut c_void),
    attach: Option<unsafe extern "C" fn(*mut c_void, c_int)>,
    arm: Option<unsafe extern "C" fn(*mut c_void) -> u64>,
}

// SAFETY: functions and constants; `context` is for the table's own functions, which any thread may call.
unsafe impl Send for Table {}
// SAFETY: as for `Send`.
unsafe impl Sync for Table {}

/// Adds the transport that a table describes; see [`rows::register`].
///
/// # Errors
/// `InvalidArgument` for another version, for a table that lacks something, and as [`rows::register`].
///
/// # Safety
/// `table` points to an `accl_transport_v1` that keeps the promises of its header, or at least to its first 8 bytes with another version
/// or size in them.
pub unsafe fn register_table(table: *const TransportV1) -> Result<&'static Transport> {
    let Some(table) = NonNull::new(table.cast_mut()) else {
        return Err(Error::invalid_argument("the table of a transport is at address 0"));
    };
    // SAFETY: these two fields are there in every version.
    let (abi, size) = unsafe { ((*table.as_ptr()).abi, (*table.as_ptr()).size as usize) };
    if abi != TRANSPORT_ABI || size < TransportV1::LEAST_BYTES {
        return Err(Error::invalid_argument(format!(
            "the table of a transport has version {abi} and {size} bytes, this torch-accl takes version {TRANSPORT_ABI} of at least {} \
             bytes; build the transport with the accl_transport.h of this version",
            TransportV1::LEAST_BYTES
        )));
    }
    // SAFETY: its version and size say that so many bytes of it are there; what is behind them is null here, which every field that may be
    // missing can be.
    let table = unsafe {
        let mut whole = MaybeUninit::<TransportV1>::zeroed();
        let known = size.min(size_of::<TransportV1>());
        table.as_ptr().cast::<u8>().copy_to_nonoverlapping(whole.as_mut_ptr().cast(), known);
        whole.assume_init()
    };
    // SAFETY: the header wants a string in each.
    let (name, about) = unsafe { (text_of(table.name, "name")?, text_of(table.about, "about")?) };
    let lacks = |what: &str| Error::invalid_argument(format!("the table of transport `{name}` has no {what}"));
    let checked: &'static Table = Box::leak(Box::new(Table {
        name,
        flags: table.flags,
        poll_interval: (table.poll_interval_us > 0).then(|| Duration::from_micros(table.poll_interval_us)),
        context: table.context,
        open: table.open.ok_or_else(|| lacks("open"))?,
        connect: table.connect.ok_or_else(|| lacks("connect"))?,
        reserve: table.reserve.ok_or_else(|| lacks("reserve"))?,
        commit: table.commit.ok_or_else(|| lacks("commit"))?,
        peek: table.peek.ok_or_else(|| lacks("peek"))?,
        release: table.release.ok_or_else(|| lacks("release"))?,
        progress: table.progress.ok_or_else(|| lacks("progress"))?,
        descriptors: table.descriptors,
        error: table.error,
        close: table.close.ok_or_else(|| lacks("close"))?,
        destroy: table.destroy.ok_or_else(|| lacks("destroy"))?,
        attach: table.attach,
        arm: table.arm,
    }));
    if checked.arm.is_some() != checked.attach.is_some() {
        return Err(lacks("attach, or no arm: one is of no use without the other"));
    }
    if checked.descriptors.is_none() && checked.poll_interval.is_none() && checked.arm.is_none() {
        return Err(lacks("descriptors and no poll_interval_us, so nothing would end a sleep"));
    }
    let collectives = TableCollectives::of(&table, name).map_err(lacks)?;
    let refuse = |why: &str| {
        Error::invalid_argument(format!("the table of transport `{name}` has flags {}: {why}", table.flags))
    };
    if table.flags & !(ONE_HOST | IN_MEMORY) != 0 {
        return Err(refuse("this torch-accl does not know all of them"));
    }
    if table.flags & IN_MEMORY != 0 && table.flags & ONE_HOST == 0 {
        return Err(refuse(
            "memory is shared within a host alone, so ACCL_TRANSPORT_IN_MEMORY needs ACCL_TRANSPORT_ONE_HOST",
        ));
    }
    rows::register(Transport {
        name,
        about,
        carrier: if table.flags & ONE_HOST != 0 { Carrier::Unix } else { Carrier::Tcp },
        descriptors: USUAL_DESCRIPTORS,
        is_cheap_to_look_at: table.flags & IN_MEMORY != 0,
        open: Box::leak(Box::new(move |local: &Local<'_>| -> Box<dyn Provider> {
            Box::new(Plugin { table: checked, max_payload_bytes: local.settings.max_payload_bytes() })
        })),
        collectives: collectives.map(|all| Box::leak(Box::new(all)) as &'static dyn Collectives),
    })
}

/// A copy of a string of the table, for the life of the process.
///
/// # Safety
/// `text` is null or a C string.
unsafe fn text_of(text: *const c_char, what: &str) -> Result<&'static str> {
    if text.is_null() {
        return Err(Error::invalid_argument(format!("the table of a transport has no {what}")));
    }
    // SAFETY: it is not null, so it is a C string.
    let text = unsafe { CStr::from_ptr(text) };
    Ok(Box::leak(text.to_string_lossy().into_owned().into_boxed_str()))
}

#[derive(Clone, Copy)]
struct Plugin {
    table: &'static Table,
    max_payload_bytes: usize,
}

impl Plugin {
    fn open(&self, max_payload_bytes: usize, peer: Option<&[u8]>) -> std::result::Result<Box<dyn HalfLink>, String> {
        let mut address = vec![0; MAX_ADDRESS_BYTES];
        let mut address_bytes = address.len();
        let mut link = std::ptr::null_mut();
        let (peer, peer_bytes) = peer.map_or((std::ptr::null(), 0), |peer| (peer.as_ptr(), peer.len()));
        // SAFETY: the header promises this of `open`; all pointers are to memory of the lengths that go with them.
        let opened = unsafe {
            (self.table.open)(
                self.table.context,
                max_payload_bytes,
                peer.cast(),
                peer_bytes,
                &raw mut link,
                address.as_mut_ptr().cast(),
                &raw mut address_bytes,
            )
        };
        if opened != OK {
            return Err(self.table.why(std::ptr::null_mut()));
        }
        let handle = Handle { table: self.table, link, generation: crate::fork_generation() };
        if address_bytes > MAX_ADDRESS_BYTES {
            return Err(format!("transport {} has an address of {address_bytes} bytes", self.table.name));
        }
        address.truncate(address_bytes);
        Ok(Box::new(Half { handle, address }))
    }
}

impl Provider for Plugin {
    fn offer(&self) -> std::result::Result<Box<dyn HalfLink>, String> {
        self.open(self.max_payload_bytes, None)
    }

    fn accept(&self, peer: PeerAddress, max_payload_bytes: usize) -> std::result::Result<Box<dyn HalfLink>, String> {
        self.open(max_payload_bytes, Some(&peer.bytes))
    }

    fn beside(&self, _waker: &Arc<Waker>) -> Box<dyn Provider> {
        Box::new(*self)
    }
}

impl Table {
    /// Why the last function failed.
    fn why(&self, link: *mut c_void) -> String {
        let text = match self.error {
            // SAFETY: the header promises a string or null.
            Some(error) => unsafe { error(link) },
            None => std::ptr::null(),
        };
        if text.is_null() {
            return format!("transport {} gives no reason", self.name);
        }
        // SAFETY: it is not null, so it is a C string that stays until the next call.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// Where the head and the payload of a frame are.
type Parts = (NonNull<[u8; HEAD_BYTES]>, NonNull<[u8]>);

/// A link of the table, destroyed in the end.
struct Handle {
    table: &'static Table,
    link: *mut c_void,
    generation: u64,
}

// SAFETY: the header allows any thread, one at a time.
unsafe impl Send for Handle {}

impl Handle {
    fn why(&self) -> String {
        self.table.why(self.link)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // What a forked child has a copy of is its parent's.
        if self.generation == crate::fork_generation() {
            // SAFETY: `open` made it, and this is its only owner.
            unsafe { (self.table.destroy)(self.link) };
        }
    }
}

struct Half {
    handle: Handle,
    address: Vec<u8>,
}

impl HalfLink for Half {
    fn address(&self) -> Address<'_> {
        Address { bytes: self.address.clone(), descriptors: Vec::new() }
    }

    fn take_answer(&mut self, peer: PeerAddress, max_payload_bytes: usize) -> std::result::Result<(), String> {
        let Handle { table, link, .. } = self.handle;
        // SAFETY: the header promises this of `connect`; the bytes are as many as it is told.
        let connected =
            unsafe { (table.connect)(link, peer.bytes.as_ptr().cast(), peer.bytes.len(), max_payload_bytes) };
        if connected == OK { Ok(()) } else { Err(self.handle.why()) }
    }

    fn finish(self: Box<Self>, agreed: Agreed) -> std::result::Result<Box<dyn Watched>, String> {
        Ok(Box::new(PluginLink::new(self.handle, agreed)?))
    }
}

/// One end of a link over a table.
struct PluginLink {
    // Destroyed before the socket is closed, which the table may have been given.
    handle: Handle,
    /// The carrier's: nothing but the table's own bytes is sent over it, and its end tells of the peer's.
    socket: Fd,
    /// Copies of the link's: several links of a table may have one in common.
    fds: Vec<Fd>,
    max_payload_bytes: usize,
    peer: String,
    is_reserved: bool,
    shown: bool,
    closed: bool,
    /// The link is over, and why.
    lost: Option<Error>,
    /// The loss was returned to the caller: it is no longer a reason to stay awake.
    told: bool,
    /// Since when the carrier is known to have ended.
    hung_up: Option<Instant>,
    /// Length of the shortest payload that found no room since the link was last disarmed.
    refused_bytes: Option<usize>,
    news: Option<News>,
    /// There was no frame when it was last looked for.
    is_empty: bool,
    /// The system was asked for the carrier's end.
    has_asked: bool,
    /// What the table said when the link was last armed: how long it may be left alone.
    armed_for: Option<Duration>,
}

impl PluginLink {
    fn new(handle: Handle, agreed: Agreed) -> std::result::Result<PluginLink, String> {
        let Agreed { socket, max_payload_bytes, peer } = agreed;
        let mut theirs: Vec<RawFd> = vec![-1; MAX_DESCRIPTORS];
        let count = match handle.table.descriptors {
            // SAFETY: there is room for as many as it is told.
            Some(descriptors) => unsafe { descriptors(handle.link, theirs.as_mut_ptr(), theirs.len()) },
            None => 0,
        };
        let name = handle.table.name;
        let mut fds = Vec::new();
        for fd in theirs.into_iter().take(count).filter(|&fd| fd >= 0) {
            // SAFETY: the header promises that it is open now, and the borrow ends here.
            let theirs = unsafe { BorrowedFd::borrow_raw(fd) };
            let copy = Fd::adopt(|| rustix::io::fcntl_dupfd_cloexec(theirs, 3));
            fds.push(copy.map_err(|why| format!("a descriptor of transport {name} cannot be watched: {why}"))?);
        }
        if fds.is_empty() && handle.table.poll_interval.is_none() && handle.table.arm.is_none() {
            return Err(format!("a link of transport {name} has no descriptor, and there is no poll_interval_us"));
        }
        if let Some(attach) = handle.table.attach {
            // A doorbell is a few bytes that nobody should wait for. A Unix socket has no such delay, and says that it does not know of one.
            let _ = set_tcp_nodelay(&socket, true);
            // SAFETY: the header promises this of `attach`; the socket stays open as long as the link, which is destroyed first.
            unsafe { attach(handle.link, socket.as_fd().as_raw_fd()) };
        }
        Ok(PluginLink {
            handle,
            socket,
            fds,
            max_payload_bytes,
            peer,
            is_reserved: false,
            shown: false,
            closed: false,
            lost: None,
            told: false,
            hung_up: None,
            refused_bytes: None,
            news: None,
            is_empty: false,
            has_asked: false,
            armed_for: None,
        })
    }

    fn guard_fork(&self) -> Result<()> {
        refusal::guard_fork(self.socket.is_ours())
    }

    fn error_of(&self, result: c_int) -> Error {
        if result == ENDED {
            refusal::ended(&self.peer)
        } else {
            Error::network(format!("{} with {}: {}", self.handle.table.name, self.peer, self.handle.why()))
        }
    }

    /// The first error stays.
    fn fail(&mut self, error: Error) -> Error {
        self.lost.get_or_insert(error).clone()
    }

    fn report_loss(&mut self) -> Result<()> {
        let Some(lost) = &self.lost else { return Ok(()) };
        self.told = true;
        Err(lost.clone())
    }

    /// Takes notice of what the poller has seen; without one, anything may have happened.
    fn hear_news(&mut self) {
        if self.news.as_ref().is_none_or(|news| news.take() || news.has_hung_up()) {
            (self.is_empty, self.has_asked) = (false, false);
        }
    }

    /// Whether nothing can have come since it was last looked for.
    fn is_known_empty(&mut self) -> bool {
        let Table { poll_interval, flags, arm, .. } = self.handle.table;
        if poll_interval.is_some() || arm.is_some() || flags & IN_MEMORY != 0 {
            return false;
        }
        self.hear_news();
        self.is_empty && self.hung_up.is_none()
    }

    /// The next frame.
    fn look(&mut self) -> Option<Parts> {
        if self.is_known_empty() {
            return None;
        }
        let (mut head, mut payload, mut bytes) = (std::ptr::null(), std::ptr::null(), 0);
        let Handle { table, link, .. } = self.handle;
        // SAFETY: the header promises this of `peek`.
        let found = unsafe { (table.peek)(link, &raw mut head, &raw mut payload, &raw mut bytes) };
        match found {
            OK => {
                let fits = bytes <= self.max_payload_bytes;
                let frame = parts(head.cast_mut(), payload.cast_mut(), bytes).filter(|_| fits);
                if frame.is_none() {
                    let why = format!("{} with {}: what came cannot be a frame", self.handle.table.name, self.peer);
                    self.fail(Error::protocol(why));
                }
                frame
            }
            AGAIN => {
                self.is_empty = true;
                None
            }
            over => {
                let error = self.error_of(over);
                self.fail(error);
                None
            }
        }
    }

    /// Asks the system, without blocking, whether the carrier has ended, and decides what that means.
    fn look_for_death(&mut self) {
        if self.lost.is_some() {
            return;
        }
        self.hear_news();
        if self.hung_up.is_none() && !self.has_asked {
            self.has_asked = true;
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN | PollFlags::RDHUP)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            if matches!(poll(&mut fds, Some(&now)), Ok(1..)) && self.is_carrier_at_end() {
                self.hung_up = Some(Instant::now());
            }
        }
        if self.hung_up.is_some_and(|since| since.elapsed() >= LAST_FRAMES) && self.look().is_none() {
            self.fail(refusal::ended(&self.peer));
        }
    }

    /// What the table itself says over the carrier is left there.
    fn is_carrier_at_end(&self) -> bool {
        if self.handle.table.attach.is_some() {
            refusal::is_about_to_end(&self.socket)
        } else {
            refusal::is_at_end(&self.socket)
        }
    }

    fn progress(&mut self) -> bool {
        // SAFETY: the header promises this of `progress`.
        match unsafe { (self.handle.table.progress)(self.handle.link) } {
            OK => true,
            AGAIN => false,
            over => {
                let error = self.error_of(over);
                self.fail(error);
                true
            }
        }
    }

    /// A place for a frame: its head and its payload.
    fn reserve(&mut self, payload_bytes: usize) -> Result<Option<Parts>> {
        let (mut head, mut payload) = (std::ptr::null_mut(), std::ptr::null_mut());
        let Handle { table, link, .. } = self.handle;
        // SAFETY: the header promises this of `reserve`.
        match unsafe { (table.reserve)(link, payload_bytes, &raw mut head, &raw mut payload) } {
            OK => {
                let Some(place) = parts(head, payload, payload_bytes) else {
                    let why = format!("{} has reserved what is no place for a frame", table.name);
                    return Err(self.fail(Error::internal(why)));
                };
                self.is_reserved = true;
                Ok(Some(place))
            }
            AGAIN => Ok(None),
            over => {
                let error = self.error_of(over);
                Err(self.fail(error))
            }
        }
    }
}

/// Head and payload where a table says that they are, unless they cannot be there.
fn parts(head: *mut c_void, payload: *mut c_void, bytes: usize) -> Option<Parts> {
    let payload = if bytes == 0 { NonNull::<u64>::dangling() } else { NonNull::new(payload.cast())? };
    let payload = payload.is_aligned().then(|| NonNull::slice_from_raw_parts(payload.cast(), bytes))?;
    Some((NonNull::new(head.cast())?, payload))
}

// SAFETY: the header promises that frames and places stay; sending does not touch the one, nor receiving the other.
unsafe impl Link for PluginLink {
    fn max_payload_bytes(&self) -> usize {
        self.max_payload_bytes
    }

    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<Place<'_>>> {
        self.guard_fork()?;
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        if self.closed || payload_bytes > self.max_payload_bytes {
            return Err(refusal::unfit_payload(payload_bytes, self.max_payload_bytes, !self.closed));
        }
        // An earlier place is given up, also where there is none now.
        self.is_reserved = false;
        let mut place = self.reserve(payload_bytes)?;
        if place.is_none() {
            self.progress();
            place = self.reserve(payload_bytes)?;
        }
        let Some((mut head, mut payload)) = place else {
            self.refused_bytes = Some(self.refused_bytes.map_or(payload_bytes, |shorter| shorter.min(payload_bytes)));
            return Ok(None);
        };
        // SAFETY: the header promises that both are ours, in these lengths, until the frame is committed or given up, for which the
        // borrow of the link has to end.
        Ok(Some(unsafe { Place { head: head.as_mut(), payload: payload.as_mut() } }))
    }

    fn commit(&mut self) {
        if std::mem::take(&mut self.is_reserved) && self.guard_fork().is_ok() {
            // SAFETY: a frame is reserved.
            unsafe { (self.handle.table.commit)(self.handle.link) };
        }
    }

    fn peek(&mut self) -> Result<Option<Frame<'_>>> {
        self.guard_fork()?;
        let Some((head, payload)) = self.look() else { return self.report_loss().map(|()| None) };
        self.shown = true;
        // SAFETY: the header promises that both stay unchanged until the frame is released.
        Ok(Some(unsafe { Frame { head: head.as_ref(), payload: payload.as_ref() } }))
    }

    fn release(&mut self) {
        if std::mem::take(&mut self.shown) && self.guard_fork().is_ok() {
            // SAFETY: a frame is shown.
            unsafe { (self.handle.table.release)(self.handle.link) };
        }
    }

    fn flush(&mut self) -> Result<bool> {
        self.guard_fork()?;
        let is_done = self.lost.is_some() || self.progress();
        self.lost.clone().map_or(Ok(is_done), Err)
    }

    fn arm(&mut self, wants_room: bool) -> bool {
        if self.guard_fork().is_err() {
            return true;
        }
        let wanted = self.refused_bytes.unwrap_or(self.max_payload_bytes);
        let is_open = self.lost.is_none() && !self.closed;
        if self.lost.is_none() {
            self.progress();
        }
        let has_room = wants_room && is_open && matches!(self.reserve(wanted), Ok(Some(_)));
        // It was to see whether there is room: whoever wants the place asks for it.
        self.is_reserved = false;
        if let (Some(arm), None) = (self.handle.table.arm, &self.lost) {
            // SAFETY: the header promises this of `arm`.
            let interval_us = unsafe { arm(self.handle.link) };
            self.armed_for = (interval_us > 0).then(|| Duration::from_micros(interval_us));
        }
        // The last look comes after everything that may take in what has come, and with it the event that would tell of it.
        self.is_empty = false;
        let has_frame = self.look().is_some();
        self.look_for_death();
        has_room || has_frame || (self.lost.is_some() && !self.told)
    }

    fn disarm(&mut self) {
        self.refused_bytes = None;
    }

    fn check_peer(&mut self) -> Result<()> {
        self.guard_fork()?;
        self.look_for_death();
        if self.look().is_some() { Ok(()) } else { self.report_loss() }
    }

    fn close(&mut self) {
        if !self.closed && self.guard_fork().is_ok() {
            self.closed = true;
            self.progress();
            // SAFETY: the header promises this of `close`.
            unsafe { (self.handle.table.close)(self.handle.link) };
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        }
    }

    /// By the table's word, which is about all frames and not about some.
    fn is_delivered(&mut self, _position: u64) -> bool {
        self.lost.is_some() || self.guard_fork().is_err() || self.progress()
    }

    fn is_cheap_to_look_at(&self) -> bool {
        self.handle.table.flags & IN_MEMORY != 0
    }

    /// Nobody flushes what was committed quietly. A table that holds it back has not kept its promise, and its peer would wait for ever.
    fn wake_peer(&mut self) {
        if self.lost.is_none() && self.guard_fork().is_ok() && !self.progress() {
            let why = format!("{} says that frames are in shared memory, and holds some back", self.handle.table.name);
            self.fail(Error::internal(why));
        }
    }

    fn look_again(&mut self) {
        (self.is_empty, self.has_asked) = (false, false);
    }

    fn poll_interval(&self) -> Option<Duration> {
        let last_frames = (self.hung_up.is_some() && self.lost.is_none()).then_some(LAST_FRAMES_INTERVAL);
        match last_frames {
            Some(soon) => Some(self.armed_for.map_or(soon, |sooner| sooner.min(soon))),
            None if self.handle.table.arm.is_some() => self.armed_for,
            None => self.handle.table.poll_interval,
        }
    }

    fn is_polled(&self) -> bool {
        self.handle.table.arm.is_some() || self.handle.table.poll_interval.is_some()
    }

    fn needs_listener(&self) -> bool {
        self.handle.table.arm.is_some()
    }

    fn transport(&self) -> &'static str {
        self.handle.table.name
    }

    fn describe(&self) -> String {
        format!("{}, {}", self.handle.table.name, self.peer)
    }
}

impl Drop for PluginLink {
    fn drop(&mut self) {
        self.close();
        for _ in 0..LINGER_STEPS {
            // Whoever has gone reads nothing more.
            if self.guard_fork().is_err() || self.lost.is_some() || self.hung_up.is_some() || self.progress() {
                break;
            }
            let fds = self.fds();
            let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::new(fd, PollFlags::OUT)).collect();
            let _ = poll(&mut fds[1..], Some(&LINGER_STEP));
        }
    }
}

impl Watched for PluginLink {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(&self.socket).chain(&self.fds).map(AsFd::as_fd).collect()
    }

    /// Every pass looks: what comes on one link may be taken in with what another one does, or be told on a descriptor that both have in
    /// common, and then there is no event of its own.
    fn set_news(&mut self, news: News) -> bool {
        self.news = Some(news);
        false
    }
}

#[cfg(test)]
mod tests {
    use accl_types::ErrorKind;

    use super::*;

    fn empty() -> TransportV1 {
        TransportV1 {
            abi: TRANSPORT_ABI,
            size: size_of::<TransportV1>() as u32,
            name: c"empty".as_ptr(),
            about: c"nothing".as_ptr(),
            flags: 0,
            poll_interval_us: 1,
            context: std::ptr::null_mut(),
            open: None,
            connect: None,
            reserve: None,
            commit: None,
            peek: None,
            release: None,
            progress: None,
            descriptors: None,
            error: None,
            close: None,
            destroy: None,
            attach: None,
            arm: None,
            coll_address: None,
            coll_open: None,
            coll_start: None,
            coll_test: None,
            coll_abandon: None,
            coll_error: None,
            coll_close: None,
        }
    }

    extern "C" fn open(
        _: *mut c_void,
        _: usize,
        _: *const c_void,
        _: usize,
        _: *mut *mut c_void,
        _: *mut c_void,
        _: *mut usize,
    ) -> c_int {
        ENDED
    }

    extern "C" fn connect(_: *mut c_void, _: *const c_void, _: usize, _: usize) -> c_int {
        ENDED
    }

    extern "C" fn reserve(_: *mut c_void, _: usize, _: *mut *mut c_void, _: *mut *mut c_void) -> c_int {
        ENDED
    }

    extern "C" fn peek(_: *mut c_void, _: *mut *const c_void, _: *mut *const c_void, _: *mut usize) -> c_int {
        ENDED
    }

    extern "C" fn progress(_: *mut c_void) -> c_int {
        ENDED
    }

    extern "C" fn nothing(_: *mut c_void) {}

    extern "C" fn arm(_: *mut c_void) -> u64 {
        0
    }

    /// With every function that must be there.
    fn whole() -> TransportV1 {
        TransportV1 {
            open: Some(open),
            connect: Some(connect),
            reserve: Some(reserve),
            commit: Some(nothing),
            peek: Some(peek),
            release: Some(nothing),
            progress: Some(progress),
            close: Some(nothing),
            destroy: Some(nothing),
            ..empty()
        }
    }

    fn refused(table: &TransportV1) -> String {
        // SAFETY: what is null is refused before anything is called.
        let why = unsafe { register_table(table) }.unwrap_err();
        assert_eq!(why.kind, ErrorKind::InvalidArgument);
        why.message
    }

    #[test]
    fn a_table_of_another_version_or_with_holes_is_refused_by_what_is_wrong() {
        assert!(refused(&TransportV1 { abi: 2, ..empty() }).contains("has version 2"));
        assert!(
            refused(&TransportV1 { size: 16, ..empty() }).contains("and 16 bytes, this torch-accl takes version 1")
        );
        let as_at_first = TransportV1 { size: TransportV1::LEAST_BYTES as u32, arm: Some(arm), ..whole() };
        assert!(
            refused(&TransportV1 { flags: 8, ..as_at_first }).contains("flags 8"),
            "what is behind its end is no part of it"
        );
        assert!(refused(&TransportV1 { coll_abandon: Some(nothing), ..whole() }).contains("has no coll_address"));
        assert!(refused(&TransportV1 { arm: Some(arm), ..whole() }).contains("no attach, or no arm"));
        assert!(refused(&TransportV1 { name: std::ptr::null(), ..empty() }).contains("no name"));
        assert!(refused(&empty()).contains("`empty` has no open"));
        assert!(
            refused(&TransportV1 { flags: 8, ..whole() })
                .contains("flags 8: this torch-accl does not know all of them")
        );
        assert!(refused(&TransportV1 { flags: IN_MEMORY, ..whole() }).contains("needs ACCL_TRANSPORT_ONE_HOST"));
        // SAFETY: a null table is refused.
        assert!(unsafe { register_table(std::ptr::null()) }.unwrap_err().message.contains("address 0"));
    }
}

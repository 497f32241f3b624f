//! Transports from other packages: a table of C functions that is registered while the process runs.
//!
//! Owns the link over such a table, and the handling of a peer's death. The end of the bootstrap socket reports the
//! death. Frames in flight at that time then get some time to arrive.
//! `accl_transport.h`, which is installed with the Python package, describes the table. Read [`TransportV1`] first.
//!
//! This file is long because every function of the table has a checked wrapper, and the tests need a table of their
//! own.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use accl_types::{Error, Result};
use accl_wire::table::{AGAIN, ENDED, IN_MEMORY, OK, ONE_HOST, TRANSPORT_ABI, TransportV1};
use accl_wire::{Frame, FrameSlot, HEAD_BYTES, Link};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;
use rustix::net::sockopt::set_tcp_nodelay;

use crate::collectives::Collectives;
use crate::fork::Fd;
use crate::table_collectives::TableCollectives;
use crate::transport::{
    Address, Agreed, Bootstrap, HalfLink, Local, MAX_ADDRESS_BYTES, PeerAddress, Provider, Transport,
};
use crate::{LinkEvents, Waker, Watched, refusal, rows};

/// Assumed number of descriptors that a link keeps open: the bootstrap socket and a few of its own.
const USUAL_DESCRIPTORS: usize = 3;
/// Maximum number of descriptors of one link that are watched.
const MAX_DESCRIPTORS: usize = 8;
/// After the bootstrap connection has ended, time for which a frame may still arrive. In that time the link is polled
/// every `LAST_FRAMES_INTERVAL`.
const LAST_FRAMES: Duration = Duration::from_secs(1);
const LAST_FRAMES_INTERVAL: Duration = Duration::from_millis(50);
/// A dropped link tries this many times to send its last frames, and waits `LINGER_STEP` each time.
const LINGER_STEPS: u32 = 10;
const LINGER_STEP: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };

/// A checked table: every required function is present.
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

// SAFETY: functions and constants; `context` is only passed to the table's own functions, which any thread may call.
unsafe impl Send for Table {}
// SAFETY: a shared table is only read; `context` is only passed to the table's own functions, which any thread may
// call.
unsafe impl Sync for Table {}

/// Adds the transport that a table describes; see [`rows::register`].
///
/// # Errors
/// `InvalidArgument` for another version and for a table that lacks something; also the errors of [`rows::register`].
///
/// # Safety
/// `table` points to an `accl_transport_v1` that fulfils the contract of its header. If its version or size differs, at
/// least its first 8 bytes are readable.
pub unsafe fn register_table(table: *const TransportV1) -> Result<&'static Transport> {
    let Some(table) = NonNull::new(table.cast_mut()) else {
        return Err(Error::invalid_argument("the table of a transport is at address 0"));
    };
    // SAFETY: every version begins with these two fields.
    let (abi, size) = unsafe { ((*table.as_ptr()).abi, (*table.as_ptr()).size as usize) };
    if abi != TRANSPORT_ABI || size < TransportV1::LEAST_BYTES {
        return Err(Error::invalid_argument(format!(
            "the table of a transport has version {abi} and {size} bytes, this torch-accl takes version {TRANSPORT_ABI} of at least {} \
             bytes; build the transport with the accl_transport.h of this version",
            TransportV1::LEAST_BYTES
        )));
    }
    // SAFETY: version and size say that the first `size` bytes are readable. The bytes after them are zero here, and
    // every field that may be missing can be null.
    let table = unsafe {
        let mut whole = MaybeUninit::<TransportV1>::zeroed();
        let known = size.min(size_of::<TransportV1>());
        table.as_ptr().cast::<u8>().copy_to_nonoverlapping(whole.as_mut_ptr().cast(), known);
        whole.assume_init()
    };
    // SAFETY: the header requires a C string in each of the two fields.
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
        return Err(lacks("attach or no arm; set both or neither"));
    }
    if checked.descriptors.is_none() && checked.poll_interval.is_none() && checked.arm.is_none() {
        return Err(lacks("descriptors and no poll_interval_us, so a sleeping thread would never wake"));
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
            "processes share memory only within a host, so ACCL_TRANSPORT_IN_MEMORY needs ACCL_TRANSPORT_ONE_HOST",
        ));
    }
    rows::register(Transport {
        name,
        about,
        bootstrap: if table.flags & ONE_HOST != 0 { Bootstrap::Unix } else { Bootstrap::Tcp },
        descriptors: USUAL_DESCRIPTORS,
        polls_without_syscall: table.flags & IN_MEMORY != 0,
        open: Box::leak(Box::new(move |local: &Local<'_>| -> Box<dyn Provider> {
            Box::new(Plugin { table: checked, max_payload_bytes: local.settings.max_payload_bytes() })
        })),
        collectives: collectives.map(|all| Box::leak(Box::new(all)) as &'static dyn Collectives),
    })
}

/// Copies a string of the table for the life of the process.
///
/// # Safety
/// `text` is null or a C string.
unsafe fn text_of(text: *const c_char, what: &str) -> Result<&'static str> {
    if text.is_null() {
        return Err(Error::invalid_argument(format!("the table of a transport has no {what}")));
    }
    // SAFETY: `text` is not null, so it is a C string.
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
        // SAFETY: the arguments are what the header requires for `open`; each pointer refers to memory of the length
        // passed with it.
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
            return Err(format!(
                "transport {} returned an address of {address_bytes} bytes, which is too long",
                self.table.name
            ));
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

    fn sibling(&self, _waker: &Arc<Waker>) -> Box<dyn Provider> {
        Box::new(*self)
    }
}

impl Table {
    /// Returns the reason why the last function failed.
    fn why(&self, link: *mut c_void) -> String {
        let text = match self.error {
            // SAFETY: by the header, `error` takes a link or null, and returns a string or null.
            Some(error) => unsafe { error(link) },
            None => std::ptr::null(),
        };
        if text.is_null() {
            return format!("transport {} gives no reason", self.name);
        }
        // SAFETY: `text` is not null, so it is a C string that stays until the next call.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

/// Addresses of a frame's head and payload.
type RawFrame = (NonNull<[u8; HEAD_BYTES]>, NonNull<[u8]>);

/// A link of the table, destroyed on drop.
struct Handle {
    table: &'static Table,
    link: *mut c_void,
    generation: u64,
}

// SAFETY: the header allows calls from any thread, one at a time.
unsafe impl Send for Handle {}

impl Handle {
    fn why(&self) -> String {
        self.table.why(self.link)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // In a forked child the link still belongs to the parent.
        if self.generation == crate::fork_generation() {
            // SAFETY: `open` made the link, and this is its only owner.
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
        // SAFETY: the arguments are what the header requires for `connect`; the pointer refers to as many bytes as
        // passed.
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
    // The handle is destroyed before the socket is closed, since the table may have been given the socket.
    handle: Handle,
    /// The bootstrap socket. Only the table's own bytes are sent over it, and its end reports the peer's end.
    socket: Fd,
    /// Copies of the link's descriptors: several links of a table may share a descriptor.
    fds: Vec<Fd>,
    max_payload_bytes: usize,
    peer: String,
    is_reserved: bool,
    shown: bool,
    closed: bool,
    /// Reason why the link has ended, if so.
    lost: Option<Error>,
    /// Whether the loss was returned to the caller; then it is no longer a reason to stay awake.
    is_reported: bool,
    /// Time at which the bootstrap connection was found to have ended.
    hung_up: Option<Instant>,
    /// Length of the shortest payload that found no room since the link was last disarmed.
    refused_bytes: Option<usize>,
    events: Option<LinkEvents>,
    /// Whether there was no frame at the last poll.
    is_empty: bool,
    /// Whether the system was asked for the bootstrap connection's end.
    has_asked: bool,
    /// Time for which the link may be left alone, as the table returned it when the link was last armed.
    armed_for: Option<Duration>,
}

impl PluginLink {
    fn new(handle: Handle, agreed: Agreed) -> std::result::Result<PluginLink, String> {
        let Agreed { socket, max_payload_bytes, peer } = agreed;
        let mut theirs: Vec<RawFd> = vec![-1; MAX_DESCRIPTORS];
        let count = match handle.table.descriptors {
            // SAFETY: `theirs` has room for the passed number of descriptors.
            Some(descriptors) => unsafe { descriptors(handle.link, theirs.as_mut_ptr(), theirs.len()) },
            None => 0,
        };
        let name = handle.table.name;
        let mut fds = Vec::new();
        for fd in theirs.into_iter().take(count).filter(|&fd| fd >= 0) {
            // SAFETY: the header guarantees that the descriptor is open now, and the borrow ends in this iteration.
            let theirs = unsafe { BorrowedFd::borrow_raw(fd) };
            let copy = Fd::adopt(|| rustix::io::fcntl_dupfd_cloexec(theirs, 3));
            fds.push(copy.map_err(|why| format!("cannot watch a descriptor of transport {name}: {why}"))?);
        }
        if fds.is_empty() && handle.table.poll_interval.is_none() && handle.table.arm.is_none() {
            return Err(format!("a link of transport {name} has no descriptor, and its table has no poll_interval_us"));
        }
        if let Some(attach) = handle.table.attach {
            // A doorbell is a few bytes that must not be delayed. A Unix socket has no such delay, and refuses the
            // option.
            let _ = set_tcp_nodelay(&socket, true);
            // SAFETY: the arguments are what the header requires for `attach`. The socket stays open as long as the
            // link, which is destroyed first.
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
            is_reported: false,
            hung_up: None,
            refused_bytes: None,
            events: None,
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

    /// Records an error and returns the link's first error.
    fn fail(&mut self, error: Error) -> Error {
        self.lost.get_or_insert(error).clone()
    }

    fn report_loss(&mut self) -> Result<()> {
        let Some(lost) = &self.lost else { return Ok(()) };
        self.is_reported = true;
        Err(lost.clone())
    }

    /// Takes the events that the poller has seen. Without a poller, anything may have happened.
    fn take_events(&mut self) {
        if self.events.as_ref().is_none_or(|events| events.take() || events.has_hung_up()) {
            (self.is_empty, self.has_asked) = (false, false);
        }
    }

    /// Whether nothing can have arrived since the last poll.
    fn is_known_empty(&mut self) -> bool {
        let Table { poll_interval, flags, arm, .. } = self.handle.table;
        if poll_interval.is_some() || arm.is_some() || flags & IN_MEMORY != 0 {
            return false;
        }
        self.take_events();
        self.is_empty && self.hung_up.is_none()
    }

    /// Returns the next frame.
    fn poll(&mut self) -> Option<RawFrame> {
        if self.is_known_empty() {
            return None;
        }
        let (mut head, mut payload, mut bytes) = (std::ptr::null(), std::ptr::null(), 0);
        let Handle { table, link, .. } = self.handle;
        // SAFETY: the arguments are what the header requires for `peek`; the pointers refer to variables of the right
        // types.
        let found = unsafe { (table.peek)(link, &raw mut head, &raw mut payload, &raw mut bytes) };
        match found {
            OK => {
                let fits = bytes <= self.max_payload_bytes;
                let frame = parts(head.cast_mut(), payload.cast_mut(), bytes).filter(|_| fits);
                if frame.is_none() {
                    let why = format!("{} with {}: received an invalid frame", self.handle.table.name, self.peer);
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

    /// Asks the system, without blocking, whether the bootstrap connection has ended, and decides whether the link is
    /// lost.
    fn check_death(&mut self) {
        if self.lost.is_some() {
            return;
        }
        self.take_events();
        if self.hung_up.is_none() && !self.has_asked {
            self.has_asked = true;
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN | PollFlags::RDHUP)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            if matches!(poll(&mut fds, Some(&now)), Ok(1..)) && self.is_bootstrap_at_end() {
                self.hung_up = Some(Instant::now());
            }
        }
        if self.hung_up.is_some_and(|since| since.elapsed() >= LAST_FRAMES) && self.poll().is_none() {
            self.fail(refusal::ended(&self.peer));
        }
    }

    /// Whether the bootstrap connection has ended. Bytes that the table itself sent over it stay unread.
    fn is_bootstrap_at_end(&self) -> bool {
        if self.handle.table.attach.is_some() {
            refusal::is_about_to_end(&self.socket)
        } else {
            refusal::is_at_end(&self.socket)
        }
    }

    fn progress(&mut self) -> bool {
        // SAFETY: the link was opened and is not destroyed yet, which is all that `progress` requires.
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

    /// Reserves space for a frame and returns its head and its payload. `None`: there is no room now.
    fn reserve(&mut self, payload_bytes: usize) -> Result<Option<RawFrame>> {
        let (mut head, mut payload) = (std::ptr::null_mut(), std::ptr::null_mut());
        let Handle { table, link, .. } = self.handle;
        // SAFETY: the arguments are what the header requires for `reserve`; the pointers refer to variables of the
        // right types.
        match unsafe { (table.reserve)(link, payload_bytes, &raw mut head, &raw mut payload) } {
            OK => {
                let Some(slot) = parts(head, payload, payload_bytes) else {
                    let why = format!("transport {}: reserve returned an invalid address for a frame", table.name);
                    return Err(self.fail(Error::internal(why)));
                };
                self.is_reserved = true;
                Ok(Some(slot))
            }
            AGAIN => Ok(None),
            over => {
                let error = self.error_of(over);
                Err(self.fail(error))
            }
        }
    }
}

/// Returns head and payload at the addresses that a table gave. `None`: the addresses cannot be valid.
fn parts(head: *mut c_void, payload: *mut c_void, bytes: usize) -> Option<RawFrame> {
    let payload = if bytes == 0 { NonNull::<u64>::dangling() } else { NonNull::new(payload.cast())? };
    let payload = payload.is_aligned().then(|| NonNull::slice_from_raw_parts(payload.cast(), bytes))?;
    Some((NonNull::new(head.cast())?, payload))
}

// SAFETY: the header guarantees that frames and reserved places stay. Sending does not touch frames, and receiving does
// not touch places.
unsafe impl Link for PluginLink {
    fn max_payload_bytes(&self) -> usize {
        self.max_payload_bytes
    }

    fn try_reserve(&mut self, payload_bytes: usize) -> Result<Option<FrameSlot<'_>>> {
        self.guard_fork()?;
        if let Some(lost) = &self.lost {
            return Err(lost.clone());
        }
        if self.closed || payload_bytes > self.max_payload_bytes {
            return Err(refusal::unfit_payload(payload_bytes, self.max_payload_bytes, !self.closed));
        }
        // An earlier slot is given up, even if there is no room now.
        self.is_reserved = false;
        let mut slot = self.reserve(payload_bytes)?;
        if slot.is_none() {
            self.progress();
            slot = self.reserve(payload_bytes)?;
        }
        let Some((mut head, mut payload)) = slot else {
            self.refused_bytes = Some(self.refused_bytes.map_or(payload_bytes, |shorter| shorter.min(payload_bytes)));
            return Ok(None);
        };
        // SAFETY: the header guarantees that both are ours, in these lengths, until the frame is committed or given up.
        // Either needs the borrow of the link to end first.
        Ok(Some(unsafe { FrameSlot { head: head.as_mut(), payload: payload.as_mut() } }))
    }

    fn commit(&mut self) {
        if std::mem::take(&mut self.is_reserved) && self.guard_fork().is_ok() {
            // SAFETY: a frame is reserved, as `commit` requires.
            unsafe { (self.handle.table.commit)(self.handle.link) };
        }
    }

    fn peek(&mut self) -> Result<Option<Frame<'_>>> {
        self.guard_fork()?;
        let Some((head, payload)) = self.poll() else { return self.report_loss().map(|()| None) };
        self.shown = true;
        // SAFETY: the header guarantees that both stay unchanged until the frame is released.
        Ok(Some(unsafe { Frame { head: head.as_ref(), payload: payload.as_ref() } }))
    }

    fn release(&mut self) {
        if std::mem::take(&mut self.shown) && self.guard_fork().is_ok() {
            // SAFETY: a frame is shown, as `release` requires.
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
        // The reservation only tested for room. A caller that wants the slot reserves it again.
        self.is_reserved = false;
        if let (Some(arm), None) = (self.handle.table.arm, &self.lost) {
            // SAFETY: the link was opened and is not destroyed yet, which is all that `arm` requires.
            let interval_us = unsafe { arm(self.handle.link) };
            self.armed_for = (interval_us > 0).then(|| Duration::from_micros(interval_us));
        }
        // The last poll comes after everything that may take in arrived data. Such a step also consumes the event that
        // would report the data.
        self.is_empty = false;
        let has_frame = self.poll().is_some();
        self.check_death();
        has_room || has_frame || (self.lost.is_some() && !self.is_reported)
    }

    fn disarm(&mut self) {
        self.refused_bytes = None;
    }

    fn check_peer(&mut self) -> Result<()> {
        self.guard_fork()?;
        self.check_death();
        if self.poll().is_some() { Ok(()) } else { self.report_loss() }
    }

    fn close(&mut self) {
        if !self.closed && self.guard_fork().is_ok() {
            self.closed = true;
            self.progress();
            // SAFETY: the link is not destroyed yet, and `closed` ensures that this is the only call of `close`.
            unsafe { (self.handle.table.close)(self.handle.link) };
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        }
    }

    /// Whether everything is delivered, by the table's `progress`. It answers for all frames, not for a position.
    fn is_delivered(&mut self, _position: u64) -> bool {
        self.lost.is_some() || self.guard_fork().is_err() || self.progress()
    }

    fn polls_without_syscall(&self) -> bool {
        self.handle.table.flags & IN_MEMORY != 0
    }

    /// No later flush sends what was committed quietly. A table that holds it back violates its contract, and its peer
    /// would wait for ever.
    fn wake_peer(&mut self) {
        if self.lost.is_none() && self.guard_fork().is_ok() && !self.progress() {
            let why =
                format!("transport {} has ACCL_TRANSPORT_IN_MEMORY but holds frames back", self.handle.table.name);
            self.fail(Error::internal(why));
        }
    }

    fn force_poll(&mut self) {
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
            // A peer that has gone reads nothing more.
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

    /// Every progress pass polls this link. Data of one link may be taken in by an operation on another link, or
    /// reported on a descriptor that both share. In these cases the link gets no event.
    fn set_events(&mut self, events: LinkEvents) -> bool {
        self.events = Some(events);
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

    /// A table with every required function.
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
        // SAFETY: the table lacks a required field or has a wrong one, so it is refused before any of its functions is
        // called.
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
            "bytes behind its end do not belong to it"
        );
        assert!(refused(&TransportV1 { coll_abandon: Some(nothing), ..whole() }).contains("has no coll_address"));
        assert!(refused(&TransportV1 { arm: Some(arm), ..whole() }).contains("no attach or no arm; set both"));
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

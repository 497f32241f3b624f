//! Connecting to peers: listeners, the handshake, and the choice of transport for each pair.
//!
//! Owns the identity of this process and everything until a link exists; links then work on their own. [`accept`] and
//! [`dial`] have the two halves of the handshake, [`wire`] has its bytes. Read [`Endpoint::want`] and
//! [`Endpoint::turn`] first.
//!
//! **One link per pair.** Either of two peers may connect, or both at once. If both do, the effort of the process with
//! the smaller identity counts:
//! * The smaller identity refuses the other's hello once it has sent its own.
//! * The larger identity gives its effort up when it receives a hello.
//! * A process that has promised a link to a peer, or has one, starts nothing.
//!
//! This file is long because the handshake of two ends is one state machine, and its rules stand next to it.

mod accept;
mod dial;
mod identity;
mod note;
mod route;
mod stream;
mod warnings;
mod wire;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use accl_types::{Error, Result};
use accl_wire::{EndpointInfo, PROTOCOL_VERSION, Stance, hex};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::fork::Fd;
use crate::loopback;
use crate::transport::{Bootstrap, Local, Transport};
use crate::{Settings, Waker, Watched, descriptors, host, net, rows};

pub use accept::Host;
use accept::{Handshake, Incoming};
use dial::{Dial, Progress};
use identity::{Identity, Opened};
use note::OutgoingNote;
use route::routes;
use warnings::Warnings;
pub use wire::{MAX_ANSWER_BYTES, MAX_NOTE_BYTES};

/// Interval at which `interrupted` is called, and the longest sleep while anything is in progress.
const TURN: Duration = Duration::from_millis(50);
/// Head start of the process with the smaller identity if both sides want the link.
const HEAD_START: Duration = Duration::from_millis(500);
/// An effort to reach a peer is given up if no caller has asked for the peer for this long.
const FORGOTTEN: Duration = Duration::from_secs(10);
/// Descriptors needed in addition to the descriptors of links: for connections in progress, and for whatever else the
/// process opens meanwhile.
const SPARE_FDS: usize = 16;
/// Maximum number of connections whose peer is not yet known. If there are more, the oldest is dropped.
const MAX_STRANGERS: usize = 1024;
/// Maximum number of connections taken from a listener in one turn, so that a flood does not delay other work.
const MAX_ACCEPTS: usize = 256;
/// Maximum number of missing peers that a message names.
const MAX_LISTED: usize = 8;

/// A peer that was not reached.
#[derive(Clone, Debug)]
pub struct Missing {
    /// The peer's index in the list of peers.
    pub index: usize,
    /// Reason, as a clause: `no connection from it yet`, `connection refused (10.0.0.2:4000)`.
    pub why: String,
}

/// A peer to which there will be no link.
#[derive(Clone, Debug)]
pub struct Unreachable {
    /// The lane of this process that wants the link.
    pub lane: u32,
    /// The peer.
    pub peer: EndpointInfo,
    /// Reason why there will be no link.
    pub error: Error,
    /// Whether the peer no longer listens: its process is ending, or has ended.
    pub has_ended: bool,
}

/// Which side wants a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// This process wants the link, and the peer may not know.
    Here,
    /// Both sides want the link. The larger identity lets the smaller connect first, and connects itself if that does
    /// not happen. A silent peer may only be late, and is not given up.
    OnBothSides,
}

/// Reason why [`Endpoint::connect`] gave up.
#[derive(Clone, Debug)]
pub struct ConnectError {
    /// `Timeout` if the deadline passed, `Aborted` if interrupted; else an error that waiting cannot help.
    pub error: Error,
    /// Every peer without a link. Links that exist are kept for the next attempt.
    pub missing: Vec<Missing>,
}

/// This process as its peers see it: one listening port, one Unix socket, one identity.
pub struct Endpoint {
    me: Identity,
    waker: Arc<Waker>,
    info: EndpointInfo,
    settings: Settings,
    listeners: Vec<(Bootstrap, Fd)>,
    incoming: Vec<Incoming>,
    /// Efforts to reach peers, by the peer's identity.
    dials: HashMap<[u8; 16], Dial>,
    /// Notes in flight. `replies` has the results of earlier notes, with the number that the sender chose.
    outgoing_notes: Vec<OutgoingNote>,
    replies: Vec<(u64, std::result::Result<String, String>)>,
    /// Peers that were given up, with the reason, until a caller takes them.
    unreachable: Vec<Unreachable>,
    /// Descriptors of links that were wanted since the limit of descriptors was last checked.
    unchecked_fds: usize,
    /// Links that no caller has taken yet, by the peer's identity.
    kept: HashMap<[u8; 16], Kept>,
    /// Reasons why kept links were dropped, by the peer's identity.
    departed: HashMap<[u8; 16], String>,
    /// Whether the last accept found no descriptor; then the queue is left alone for a turn.
    starved: bool,
    warnings: Warnings,
}

/// A link that no caller has taken, and the lane that it is for.
struct Kept {
    lane: u32,
    link: Box<dyn Watched>,
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoint").field("info", &self.info).field("kept", &self.kept.len()).finish_non_exhaustive()
    }
}

impl Endpoint {
    /// Opens the listeners. Peers on this host will write to `waker` when this process sleeps.
    ///
    /// # Errors
    /// `Configuration` if no interface or port fits the settings; `Network` or `Exhausted` if the system refuses.
    pub fn new(settings: Settings, waker: Arc<Waker>) -> Result<Endpoint> {
        let rows = rows::named(&settings.transports)?;
        let info = host::process_info()?;
        let uuid = info.uuid;
        let local = Local { settings: &settings, waker: &waker };
        let me = Identity {
            uuid,
            uid: info.uid,
            host_id: settings.host_id.clone().unwrap_or_else(|| info.host_id.clone()),
            hostname: info.hostname.clone(),
            max_payload_bytes: settings.max_payload_bytes(),
            nonces: AtomicU64::new(u64::from_le_bytes(std::array::from_fn(|i| uuid[i] ^ uuid[i + 8]))),
            lanes: vec![rows.into_iter().map(|row| Opened { row, provider: (row.open)(&local) }).collect()],
        };
        let (over_unix, over_tcp) = (me.names_over(Bootstrap::Unix), me.names_over(Bootstrap::Tcp));
        let mut listeners = Vec::new();
        let mut warnings = Warnings::default();
        let mut unix_name = String::new();
        if !over_unix.is_empty() {
            // A name of its own, because the identity proper is the secret that admits connections.
            let name = format!("accl-{}", hex(&host::random_uuid().map_err(Error::network)?));
            match listen_unix(&name) {
                Ok(fd) => {
                    listeners.push((Bootstrap::Unix, fd));
                    unix_name = name;
                }
                Err(why) if !over_tcp.is_empty() => warnings.no_unix_socket(&over_unix, &over_tcp, &why.to_string()),
                Err(why) => {
                    let names = over_unix.join(",");
                    return Err(Error::network(format!("{names}: cannot create a Unix socket: {why}")));
                }
            }
        }
        let mut addresses = Vec::new();
        if !over_tcp.is_empty() {
            let route = settings.master.and_then(net::route_to);
            let offered = net::choose(&net::interfaces()?, &settings.socket_ifname, route)?;
            let (fd, port, families) = net::listen(settings.port_range, std::process::id())?;
            listeners.push((Bootstrap::Tcp, fd));
            let reachable = |ip: &std::net::IpAddr| ip.is_ipv4() || families == net::Families::Both;
            addresses = offered.into_iter().filter(reachable).map(|ip| SocketAddr::new(ip, port)).collect();
        }
        let (host_id, transports) = (me.host_id.clone(), settings.transports.clone());
        let info = EndpointInfo { host_id, addresses, unix_name, transports, ..info };
        Ok(Endpoint {
            me,
            waker,
            info,
            settings,
            listeners,
            incoming: Vec::new(),
            dials: HashMap::new(),
            outgoing_notes: Vec::new(),
            replies: Vec::new(),
            unreachable: Vec::new(),
            unchecked_fds: 0,
            kept: HashMap::new(),
            departed: HashMap::new(),
            starved: false,
            warnings,
        })
    }

    /// Adds a lane and returns its number. Its links are made at the same listeners. Its peers on this host write to
    /// `waker` when it sleeps.
    pub fn add_lane(&mut self, waker: &Arc<Waker>) -> u32 {
        let first = self.me.lanes.first().into_iter().flatten();
        let opened = first.map(|Opened { row, provider }| Opened { row, provider: provider.sibling(waker) }).collect();
        self.me.lanes.push(opened);
        self.info.lanes = self.me.lanes.len() as u32;
        self.info.lanes - 1
    }

    /// Returns the endpoint address to publish in the store.
    pub fn info(&self) -> &EndpointInfo {
        &self.info
    }

    /// Begins to create a link to a peer. [`Endpoint::turn`] makes progress until [`Endpoint::take_link`] or
    /// [`Endpoint::take_unreachable`] returns the result. Does nothing for a peer that is wanted already, or has
    /// connected.
    pub fn want(&mut self, lane: u32, peer: &EndpointInfo, wanted: Wanted, now: Instant) {
        let is_patient = wanted == Wanted::OnBothSides;
        if let Some(dial) = self.dials.get_mut(&peer.uuid) {
            dial.is_patient |= is_patient;
            return;
        }
        let own = self.me.uuid_of(lane);
        if self.kept.contains_key(&peer.uuid) || peer.uuid == own {
            return;
        }
        self.unchecked_fds += self.fds_for(peer);
        if self.unchecked_fds > SPARE_FDS {
            let fds = std::mem::take(&mut self.unchecked_fds);
            self.check_room(fds);
        }
        let head_start = if is_patient && peer.uuid < own { HEAD_START } else { Duration::ZERO };
        let mut dial = Dial::new((lane, &self.info), peer, now, head_start);
        dial.is_patient = is_patient;
        self.dials.insert(peer.uuid, dial);
    }

    /// Ends the patience for a peer that was [`Wanted::OnBothSides`]. A vain effort is then given up after a while, as
    /// if only this process wanted the link.
    pub fn lose_patience(&mut self, peer: &[u8; 16]) {
        if let Some(dial) = self.dials.get_mut(peer) {
            dial.is_patient = false;
        }
    }

    /// Processes everything in progress; never blocks. `host` answers peers that connect.
    pub fn turn(&mut self, now: Instant, host: &mut dyn Host) {
        self.take_incoming(now, host);
        self.go_on_dialling(now);
        let Self { me, outgoing_notes, replies, .. } = self;
        outgoing_notes.retain_mut(|outgoing| match outgoing.poll(me, now) {
            Some(reply) => {
                replies.push((outgoing.token, reply));
                false
            }
            None => true,
        });
    }

    /// Returns the peers of links that no caller has taken, and for each the lane of this process that it is for.
    pub fn reached(&self) -> impl Iterator<Item = (u32, [u8; 16])> {
        self.kept.iter().map(|(uuid, kept)| (kept.lane, *uuid))
    }

    /// Takes the link to a peer that either side has made.
    pub fn take_link(&mut self, peer: &[u8; 16]) -> Option<Box<dyn Watched>> {
        let link = self.kept.remove(peer)?.link;
        // The link ends this side's effort as well.
        self.dials.remove(peer);
        Some(link)
    }

    /// Begins to send an out-of-band message to a process that may poll no link. The thread that makes links there
    /// answers it. [`Endpoint::take_replies`] returns the result under this number. A note has at most
    /// [`MAX_NOTE_BYTES`].
    pub fn send_note(&mut self, lane: u32, peer: &EndpointInfo, note: &[u8], number: u64, now: Instant) {
        self.outgoing_notes.push(OutgoingNote::new(&self.info.of_lane(lane), peer, note, number, now));
    }

    /// Takes the results of notes: for each number the answer, or the reason why there will be none.
    pub fn take_replies(&mut self) -> Vec<(u64, std::result::Result<String, String>)> {
        std::mem::take(&mut self.replies)
    }

    /// Drops a link that no caller is going to take. The peer detects the drop.
    pub fn drop_link(&mut self, peer: &[u8; 16]) {
        self.kept.remove(peer);
    }

    /// Takes the wanted peers to which there will be no link, with the reason: the process has ended, or no route leads
    /// to it.
    pub fn take_unreachable(&mut self) -> Vec<Unreachable> {
        std::mem::take(&mut self.unreachable)
    }

    /// Returns the reason why a wanted peer has no link yet, as a clause: `no answer from 10.0.0.2:4000 yet`.
    pub fn why_not(&self, peer: &EndpointInfo) -> String {
        self.dials.get(&peer.uuid).map_or_else(|| self.silence(peer).to_owned(), Dial::state)
    }

    /// Returns the peers that a lane wants and that have no link although there has been time for one, each with the
    /// reason.
    pub fn troubles(&self, lane: u32, now: Instant) -> impl Iterator<Item = ([u8; 16], String)> {
        let dials = self.dials.iter().filter(move |(_, dial)| dial.lane == lane);
        dials.filter_map(move |(uuid, dial)| Some((*uuid, dial.trouble(now)?)))
    }

    /// Sleeps until [`Endpoint::turn`] has something to do, `wake` is written to, or the time is up. `None` as time
    /// means for ever, but never long while a link is being made.
    pub fn sleep(&self, wake: &Waker, at_most: Option<Duration>) {
        let is_under_way = !self.dials.is_empty() || !self.incoming.is_empty() || !self.outgoing_notes.is_empty();
        let is_busy = self.starved || is_under_way;
        let at_most = if is_busy { Some(at_most.unwrap_or(TURN).min(TURN)) } else { at_most };
        self.sleep_on(Some(wake.as_fd()), at_most);
    }

    /// Creates links to all `peers`, in their order, by connecting and accepting at once. The smaller identity of a
    /// pair connects.
    /// For this process's own info the link is a [`loopback::self_link`]. A connection from a peer that is not in
    /// `peers` is kept and returned by a later call. Calls `interrupted` about every 50 ms.
    ///
    /// # Errors
    /// A [`ConnectError`] that lists the missing peers. Links that exist are kept.
    pub fn connect(
        &mut self,
        peers: &[EndpointInfo],
        deadline: Instant,
        interrupted: &mut dyn FnMut() -> bool,
    ) -> std::result::Result<Vec<Box<dyn Watched>>, ConnectError> {
        check_peers(&self.info, peers)?;
        self.drop_departed();
        self.make_room(peers);
        let mut links: Vec<Option<Box<dyn Watched>>> = peers.iter().map(|_| None).collect();
        let begin = Instant::now();
        for (index, peer) in peers.iter().enumerate() {
            if peer.uuid == self.me.uuid {
                links[index] = Some(Box::new(loopback::self_link(self.me.max_payload_bytes, Arc::clone(&self.waker))));
            } else if peer.uuid > self.me.uuid && !self.kept.contains_key(&peer.uuid) {
                let new = || Dial::new((0, &self.info), peer, begin, Duration::ZERO);
                self.dials.entry(peer.uuid).or_insert_with(new).asked = Some(begin);
            }
        }
        let is_forgotten =
            |dial: &Dial| dial.asked.is_some_and(|asked| begin.saturating_duration_since(asked) >= FORGOTTEN);
        self.dials.retain(|_, dial| !is_forgotten(dial));
        let mut asked = begin;
        loop {
            let now = Instant::now();
            self.turn(now, &mut Alone);
            for (peer, link) in peers.iter().zip(&mut links).filter(|(_, link)| link.is_none()) {
                *link = self.take_link(&peer.uuid);
            }
            if links.iter().all(Option::is_some) {
                return Ok(links.into_iter().flatten().collect());
            }
            let error = if !self.listeners.iter().all(|(_, fd)| fd.is_ours()) {
                Some(Error::internal("the endpoint belongs to the parent of this forked process"))
            } else if now >= deadline {
                Some(Error::timeout("the deadline passed"))
            } else if now.saturating_duration_since(asked) >= TURN {
                asked = now;
                interrupted().then(|| Error::aborted("interrupted"))
            } else {
                None
            };
            if let Some(error) = error {
                return Err(self.give_up(error, peers, links));
            }
            self.sleep_on(None, Some(TURN.min(deadline.saturating_duration_since(now))));
        }
    }

    /// Takes the fallbacks since the last call, one sentence each with its remedy.
    pub fn take_warnings(&mut self) -> Vec<String> {
        self.warnings.take()
    }

    /// Ensures that there are descriptors for links to all peers, or warns.
    fn make_room(&mut self, peers: &[EndpointInfo]) {
        let missing = peers.iter().filter(|peer| peer.uuid != self.me.uuid && !self.kept.contains_key(&peer.uuid));
        let fds = missing.map(|peer| self.fds_for(peer)).sum::<usize>();
        self.check_room(fds);
    }

    fn check_room(&mut self, fds: usize) {
        if let Err(why) = descriptors::make_room(fds + SPARE_FDS) {
            self.warnings.no_descriptors(&why);
        }
    }

    /// Returns the maximum number of descriptors that a link to a peer keeps open.
    fn fds_for(&self, peer: &EndpointInfo) -> usize {
        routes(&self.info, peer).iter().map(|route| route.row.descriptors).max().unwrap_or(1)
    }

    /// Accepts queued connections and continues every handshake.
    fn take_incoming(&mut self, now: Instant, host: &mut dyn Host) {
        self.starved = false;
        for (bootstrap, listener) in &self.listeners {
            for _ in 0..MAX_ACCEPTS {
                match accept::accept(listener, *bootstrap, now) {
                    Ok(Some(incoming)) => self.incoming.push(incoming),
                    Ok(None) => break,
                    Err(why) => {
                        // Usually out of descriptors. Peers that wait in the queue stay there.
                        self.starved = true;
                        match why {
                            Errno::MFILE => self.warnings.no_descriptors("all allowed descriptors are open"),
                            Errno::NFILE => self.warnings.no_files_on_host(),
                            _ => {}
                        }
                        break;
                    }
                }
            }
        }
        let Self { me, dials, kept, departed, incoming, .. } = self;
        // Connections that were promised a link come first: their outcome matters for the answers to the others.
        let (promised, greeting): (Vec<_>, Vec<_>) =
            std::mem::take(incoming).into_iter().partition(Incoming::is_promised);
        for handshake in promised.into_iter().chain(greeting) {
            match handshake.poll(me, now, &mut EndpointHost { me, now, dials, kept, host }) {
                Handshake::Wait(handshake) => incoming.push(*handshake),
                Handshake::Done(accepted) => {
                    departed.remove(&accepted.from);
                    kept.insert(accepted.from, Kept { lane: accepted.lane, link: accepted.link });
                }
                Handshake::Drop => {}
            }
        }
        self.drop_strangers();
    }

    /// Drops connections if there are too many, or if no descriptor is left for the next one. Drops only connections
    /// that were polled and whose peer is not yet known, the oldest first. A peer that was promised a link relies on
    /// it.
    fn drop_strangers(&mut self) {
        let strangers = self.incoming.iter().filter(|incoming| !incoming.is_promised()).count();
        let mut surplus = strangers.saturating_sub(MAX_STRANGERS).max(usize::from(self.starved));
        self.incoming.retain(|incoming| {
            let goes = surplus > 0 && !incoming.is_promised();
            surplus -= usize::from(goes);
            !goes
        });
    }

    /// Drops kept links whose peer has gone since an earlier call. The peer will make another link or be reported as
    /// missing. A link that breaks during this call is returned to the caller, so that its loss is noticed at once.
    fn drop_departed(&mut self) {
        let departed = &mut self.departed;
        self.kept.retain(|uuid, kept| match kept.link.check_peer() {
            Ok(()) => true,
            Err(why) => {
                departed.insert(*uuid, why.message);
                false
            }
        });
    }

    /// Continues the efforts to reach peers.
    fn go_on_dialling(&mut self, now: Instant) {
        if self.dials.is_empty() {
            return;
        }
        let promised: HashSet<[u8; 16]> = self.incoming.iter().filter_map(Incoming::promised_to).collect();
        let Self { me, settings, dials, kept, warnings, unreachable, .. } = self;
        dials.retain(|uuid, dial| {
            if kept.contains_key(uuid) {
                return false;
            }
            if promised.contains(uuid) {
                return true;
            }
            match dial.poll(me, settings, now) {
                Progress::Waits => true,
                Progress::Done(link, troubles) => {
                    kept.insert(*uuid, Kept { lane: dial.lane, link });
                    troubles.iter().for_each(|trouble| warnings.add(trouble, dial.peer()));
                    false
                }
                // A caller that asks again and again has a deadline of its own.
                Progress::Unreachable { .. } if dial.asked.is_some() => true,
                Progress::Unreachable { why, has_ended } => {
                    unreachable.push(Unreachable {
                        lane: dial.lane,
                        peer: dial.peer().clone(),
                        error: Error::peer_lost(why),
                        has_ended,
                    });
                    false
                }
            }
        });
    }

    fn give_up(
        &mut self,
        mut error: Error,
        peers: &[EndpointInfo],
        links: Vec<Option<Box<dyn Watched>>>,
    ) -> ConnectError {
        let mut missing = Vec::new();
        for (index, link) in links.into_iter().enumerate() {
            match link {
                Some(link) if peers[index].uuid != self.me.uuid => {
                    self.kept.insert(peers[index].uuid, Kept { lane: 0, link });
                }
                Some(_) => {}
                None => {
                    missing.push(Missing { index, why: self.why_not(&peers[index]) });
                }
            }
        }
        let listed: Vec<_> =
            missing.iter().take(MAX_LISTED).map(|m| format!("{}: {}", peers[m.index].host_and_pid(), m.why)).collect();
        let more = if missing.len() > MAX_LISTED { "; ..." } else { "" };
        error.message = format!(
            "{}; {} of {} peers have no link: {}{more}",
            error.message,
            missing.len(),
            peers.len(),
            listed.join("; ")
        );
        ConnectError { error, missing }
    }

    /// Returns the reason why the peer has not connected.
    fn silence(&self, peer: &EndpointInfo) -> &str {
        if let Some(why) = self.departed.get(&peer.uuid) {
            why
        } else if self.starved {
            "no descriptor left for its connection; raise the limit with `ulimit -n`"
        } else {
            "no connection from it yet"
        }
    }

    /// Sleeps until a socket is ready.
    fn sleep_on(&self, wake: Option<BorrowedFd<'_>>, at_most: Option<Duration>) {
        let queues = if self.starved { &[][..] } else { &self.listeners };
        let listening = queues.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN));
        let greeting = self.incoming.iter().map(|i| PollFd::new(i.socket(), PollFlags::IN));
        let calling = self
            .dials
            .values()
            .flat_map(Dial::sockets)
            .chain(self.outgoing_notes.iter().filter_map(OutgoingNote::socket))
            .map(|(fd, connecting)| PollFd::new(fd, if connecting { PollFlags::OUT } else { PollFlags::IN }));
        let wake = wake.map(|wake| PollFd::from_borrowed_fd(wake, PollFlags::IN));
        let mut fds: Vec<_> = listening.chain(greeting).chain(calling).chain(wake).collect();
        let timeout = at_most.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
        // A signal ends the sleep early, which does no harm.
        let _ = poll(&mut fds, timeout.as_ref());
    }
}

/// Answers peers that connect, with the endpoint's own knowledge and the caller's [`Host`].
struct EndpointHost<'a> {
    me: &'a Identity,
    now: Instant,
    dials: &'a mut HashMap<[u8; 16], Dial>,
    kept: &'a mut HashMap<[u8; 16], Kept>,
    host: &'a mut dyn Host,
}

impl Host for EndpointHost<'_> {
    fn stance_to(&mut self, lane: u32, from: &[u8; 16]) -> Stance {
        // A link that its peer has given up makes room for the next.
        if self.kept.get_mut(from).is_some_and(|kept| kept.link.check_peer().is_ok()) {
            return Stance::Linked;
        }
        match self.host.stance_to(lane, from) {
            Stance::Unlinked => {}
            other => return other,
        }
        let Some(dial) = self.dials.get_mut(from) else { return Stance::Unlinked };
        if self.me.uuid_of(lane) < *from && dial.has_greeted() {
            return Stance::Crossing;
        }
        dial.yield_to_peer(self.now);
        Stance::Unlinked
    }

    fn on_note(&mut self, lane: u32, from: &[u8; 16], note: &[u8]) -> String {
        self.host.on_note(lane, from, note)
    }
}

/// Answers peers in [`Endpoint::connect`]: no link was taken before, and notes get an empty answer.
struct Alone;

impl Host for Alone {
    fn stance_to(&mut self, _lane: u32, _peer: &[u8; 16]) -> Stance {
        Stance::Unlinked
    }

    fn on_note(&mut self, _lane: u32, _from: &[u8; 16], _note: &[u8]) -> String {
        String::new()
    }
}

/// Returns the transport of a link between two processes, unless it is refused when the link is made.
pub fn likely_transport(one: &EndpointInfo, other: &EndpointInfo) -> Option<&'static Transport> {
    routes(one, other).first().map(|route| route.row)
}

/// Checks whether a process can have links to all `peers`, as far as their infos show.
///
/// # Errors
/// Errors that waiting cannot help: `Mismatch` for another protocol version, `InvalidArgument` for a peer that is twice
/// in the list. `Configuration` if no transport leads to a peer, whichever of the two connects.
pub fn check_peers(me: &EndpointInfo, peers: &[EndpointInfo]) -> std::result::Result<(), ConnectError> {
    let mut missing = Vec::new();
    let mut seen = HashSet::new();
    for (index, peer) in peers.iter().enumerate() {
        if peer.version != PROTOCOL_VERSION {
            missing.push(Missing { index, why: format!("it has protocol version {}", peer.version) });
        } else if !seen.insert(peer.uuid) {
            let error = Error::invalid_argument(format!("{} is in the list of peers twice", peer.host_and_pid()));
            let missing = vec![Missing { index, why: error.message.clone() }];
            return Err(ConnectError { error, missing });
        }
    }
    let Some(first) = missing.first().map(|m| &peers[m.index]) else { return check_routes(me, peers) };
    let error = Error::mismatch(format!(
        "{} has protocol version {}, this process {PROTOCOL_VERSION}; install the same torch-accl everywhere",
        first.host_and_pid(),
        first.version
    ));
    Err(ConnectError { error, missing })
}

/// Checks whether some transport leads to every peer, whichever of the two connects.
fn check_routes(me: &EndpointInfo, peers: &[EndpointInfo]) -> std::result::Result<(), ConnectError> {
    let is_apart =
        |peer: &EndpointInfo| peer.uuid != me.uuid && routes(me, peer).is_empty() && routes(peer, me).is_empty();
    let missing: Vec<Missing> = peers
        .iter()
        .enumerate()
        .filter(|(_, peer)| is_apart(peer))
        .map(|(index, peer)| {
            let (mine, theirs) = (me.transports.join(","), peer.transports.join(","));
            Missing { index, why: format!("no common transport reaches it: it uses {theirs}, this process {mine}") }
        })
        .collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let error = Error::configuration(format!(
        "{}: {}; check ACCL_TRANSPORTS and ACCL_SOCKET_IFNAME: shm needs one host and one user, tcp needs an address that \
         the peer can reach",
        peers[first.index].host_and_pid(),
        first.why
    ));
    Err(ConnectError { error, missing })
}

fn listen_unix(name: &str) -> std::result::Result<Fd, rustix::io::Errno> {
    let fd = Fd::adopt(|| {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
    })?;
    rustix::net::bind(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
    rustix::net::listen(&fd, 4096)?;
    Ok(fd)
}

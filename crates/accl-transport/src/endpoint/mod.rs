//! Connecting to peers: listeners, the handshake, and the choice of transport for each pair.
//!
//! Owns the identity of this process and everything until a link exists; links carry on alone. [`accept`] and [`dial`]
//! have the two halves of the handshake, [`wire`] its bytes. Read [`Endpoint::want`] and [`Endpoint::turn`] first.
//!
//! **One link a pair.** Either of two peers may connect, also both at once. Then the effort of the smaller identity counts:
//! it refuses the other's greeting once its own is out, and the larger gives its effort up when it is greeted. Who has promised
//! a link to a peer, or has one, starts nothing.

mod accept;
mod dial;
mod identity;
mod note;
mod stream;
mod warnings;
mod way;
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
use crate::transport::{Carrier, Local, Transport};
use crate::{Settings, Waker, Watched, descriptors, host, net, rows};

pub use accept::Host;
use accept::{Incoming, Step};
use dial::{Dial, Progress};
use identity::{Identity, Opened};
use note::Letter;
use warnings::Warnings;
use way::ways;
pub use wire::{MAX_ANSWER_BYTES, MAX_NOTE_BYTES};

/// How often `interrupted` is asked, and the longest sleep while anything is under way.
const TURN: Duration = Duration::from_millis(50);
/// What the smaller identity has in advance when both sides want the link.
const HEAD_START: Duration = Duration::from_millis(500);
/// An effort to reach a peer that nobody has asked for this long is given up.
const FORGOTTEN: Duration = Duration::from_secs(10);
/// Descriptors that are needed besides those of links: connections under way, and what else the process does meanwhile.
const SPARE_FDS: usize = 16;
/// Connections that have not introduced themselves; the oldest goes when there are more.
const MAX_STRANGERS: usize = 1024;
/// Connections taken from a listener in one turn, so that a flood does not hold up the rest.
const MAX_ACCEPTS: usize = 256;
/// Missing peers that are spelled out in a message.
const MAX_LISTED: usize = 8;

/// A peer that was not reached.
#[derive(Clone, Debug)]
pub struct Missing {
    /// Its index in the list of peers.
    pub index: usize,
    /// Why, as a clause: `no connection from it yet`, `connection refused (10.0.0.2:4000)`.
    pub why: String,
}

/// A peer to which there will be no link.
#[derive(Clone, Debug)]
pub struct Unreachable {
    /// The lane of this process that wants the link.
    pub lane: u32,
    /// Who it is.
    pub peer: EndpointInfo,
    /// Why not.
    pub error: Error,
    /// Nobody listens there any more: its process is ending, or has ended.
    pub has_ended: bool,
}

/// Who wants a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// This process does, and the peer may not know.
    Here,
    /// Both sides do: the larger identity lets the smaller one connect, unless that does not come. A peer of which nothing is
    /// known may be late, and is not given up.
    OnBothSides,
}

/// Why [`Endpoint::connect`] gave up.
#[derive(Clone, Debug)]
pub struct ConnectError {
    /// `Timeout` when the deadline passed, `Aborted` when interrupted, else what cannot be helped by waiting.
    pub error: Error,
    /// Every peer without a link. Links that were made are kept for the next attempt.
    pub missing: Vec<Missing>,
}

/// This process as its peers see it: one listening port, one Unix socket, one identity.
pub struct Endpoint {
    me: Identity,
    waker: Arc<Waker>,
    info: EndpointInfo,
    settings: Settings,
    listeners: Vec<(Carrier, Fd)>,
    incoming: Vec<Incoming>,
    /// Efforts to reach peers, by their identity.
    dials: HashMap<[u8; 16], Dial>,
    /// Notes under way, and what came of others: by the number that their sender gave.
    letters: Vec<Letter>,
    replies: Vec<(u64, std::result::Result<String, String>)>,
    /// Peers that were given up, and why, until somebody asks.
    unreachable: Vec<Unreachable>,
    /// Descriptors of links that are wanted since there was last looked whether so many are allowed.
    unchecked_fds: usize,
    /// Links that are not asked for yet, by the peer's identity.
    kept: HashMap<[u8; 16], Kept>,
    /// Why kept links were dropped.
    departed: HashMap<[u8; 16], String>,
    /// The last accept found no descriptor: the queue is left alone for a turn.
    starved: bool,
    warnings: Warnings,
}

/// A link that nobody has taken, and the lane that it is for.
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
    /// Opens the listeners. Peers on this host will write to `waker` when it sleeps.
    ///
    /// # Errors
    /// `Configuration` when no interface or port fits the settings; `Network` or `Exhausted` when the system refuses.
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
        let (over_unix, over_tcp) = (me.names_over(Carrier::Unix), me.names_over(Carrier::Tcp));
        let mut listeners = Vec::new();
        let mut warnings = Warnings::default();
        let mut unix_name = String::new();
        if !over_unix.is_empty() {
            // A name of its own: the identity proper is the secret that admits connections.
            let name = format!("accl-{}", hex(&host::random_uuid().map_err(Error::network)?));
            match listen_unix(&name) {
                Ok(fd) => {
                    listeners.push((Carrier::Unix, fd));
                    unix_name = name;
                }
                Err(why) if !over_tcp.is_empty() => warnings.no_unix_socket(&over_unix, &over_tcp, &why.to_string()),
                Err(why) => {
                    let names = over_unix.join(",");
                    return Err(Error::network(format!("no Unix socket, which {names} needs: {why}")));
                }
            }
        }
        let mut addresses = Vec::new();
        if !over_tcp.is_empty() {
            let route = settings.master.and_then(net::route_to);
            let offered = net::choose(&net::interfaces()?, &settings.socket_ifname, route)?;
            let (fd, port, families) = net::listen(settings.port_range, std::process::id())?;
            listeners.push((Carrier::Tcp, fd));
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
            letters: Vec::new(),
            replies: Vec::new(),
            unreachable: Vec::new(),
            unchecked_fds: 0,
            kept: HashMap::new(),
            departed: HashMap::new(),
            starved: false,
            warnings,
        })
    }

    /// One lane more: links to it and from it are made at the same listeners, and its peers on this host write to `waker` when it sleeps. Returns
    /// its number.
    pub fn add_lane(&mut self, waker: &Arc<Waker>) -> u32 {
        let first = self.me.lanes.first().into_iter().flatten();
        let opened = first.map(|Opened { row, provider }| Opened { row, provider: provider.beside(waker) }).collect();
        self.me.lanes.push(opened);
        self.info.lanes = self.me.lanes.len() as u32;
        self.info.lanes - 1
    }

    /// What to publish in the store.
    pub fn info(&self) -> &EndpointInfo {
        &self.info
    }

    /// Begins to make a link to a peer; [`Endpoint::turn`] goes on with it until [`Endpoint::take_link`] or
    /// [`Endpoint::take_unreachable`] has it. A peer that is wanted already, or has connected, is left as it is.
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

    /// Who wanted a link on both sides waits for it no more: an effort that leads nowhere is given up after a while, as one that
    /// is wanted here alone.
    pub fn lose_patience(&mut self, peer: &[u8; 16]) {
        if let Some(dial) = self.dials.get_mut(peer) {
            dial.is_patient = false;
        }
    }

    /// One look at everything that is under way; never blocks. `host` answers those that connect.
    pub fn turn(&mut self, now: Instant, host: &mut dyn Host) {
        self.take_incoming(now, host);
        self.go_on_dialling(now);
        let Self { me, letters, replies, .. } = self;
        letters.retain_mut(|letter| match letter.poll(me, now) {
            Some(reply) => {
                replies.push((letter.token, reply));
                false
            }
            None => true,
        });
    }

    /// The peers to which there are links that nobody has taken, and the lane of this process that each is for.
    pub fn reached(&self) -> impl Iterator<Item = (u32, [u8; 16])> {
        self.kept.iter().map(|(uuid, kept)| (kept.lane, *uuid))
    }

    /// A link that was made, by either side.
    pub fn take_link(&mut self, peer: &[u8; 16]) -> Option<Box<dyn Watched>> {
        let link = self.kept.remove(peer)?.link;
        // Whoever wanted one has it.
        self.dials.remove(peer);
        Some(link)
    }

    /// Begins to send a note to a process that may look at no link: it is answered by whoever makes links there. What comes of it is
    /// in [`Endpoint::take_replies`] under this number. A note has at most [`MAX_NOTE_BYTES`].
    pub fn send_note(&mut self, lane: u32, peer: &EndpointInfo, note: &[u8], number: u64, now: Instant) {
        self.letters.push(Letter::new(&self.info.of_lane(lane), peer, note, number, now));
    }

    /// The answers to notes that have come, or why there will be none.
    pub fn take_replies(&mut self) -> Vec<(u64, std::result::Result<String, String>)> {
        std::mem::take(&mut self.replies)
    }

    /// Ends a link that nobody is going to take, and its peer learns of it.
    pub fn drop_link(&mut self, peer: &[u8; 16]) {
        self.kept.remove(peer);
    }

    /// Wanted peers to which there will be no link, and why: their process has ended, or none of their ways leads there.
    pub fn take_unreachable(&mut self) -> Vec<Unreachable> {
        std::mem::take(&mut self.unreachable)
    }

    /// Why a wanted peer has no link yet, as a clause: `no answer from 10.0.0.2:4000 yet`.
    pub fn why_not(&self, peer: &EndpointInfo) -> String {
        self.dials.get(&peer.uuid).map_or_else(|| self.silence(peer).to_owned(), Dial::state)
    }

    /// Peers that are wanted by a lane and have no link although there has been time for one, and why.
    pub fn troubles(&self, lane: u32, now: Instant) -> impl Iterator<Item = ([u8; 16], String)> {
        let dials = self.dials.iter().filter(move |(_, dial)| dial.lane == lane);
        dials.filter_map(move |(uuid, dial)| Some((*uuid, dial.trouble(now)?)))
    }

    /// Sleeps until something has come for [`Endpoint::turn`], `wake` is written to, or the time is up (`None`: for ever, but
    /// never long while a link is being made).
    pub fn sleep(&self, wake: &Waker, at_most: Option<Duration>) {
        let is_under_way = !self.dials.is_empty() || !self.incoming.is_empty() || !self.letters.is_empty();
        let is_busy = self.starved || is_under_way;
        let at_most = if is_busy { Some(at_most.unwrap_or(TURN).min(TURN)) } else { at_most };
        self.sleep_on(Some(wake.as_fd()), at_most);
    }

    /// Links to all `peers`, in their order, made by connecting and accepting at once; the smaller identity of a pair
    /// connects. For our own info it is a [`loopback::self_link`]. A connection from somebody who was not asked for is
    /// kept and returned by a later call. Calls `interrupted` about every 50 ms.
    ///
    /// # Errors
    /// A [`ConnectError`] that lists the missing peers. The links that were made are kept.
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
            for (peer, place) in peers.iter().zip(&mut links).filter(|(_, place)| place.is_none()) {
                *place = self.take_link(&peer.uuid);
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

    /// Fallbacks since the last call, one sentence each with its remedy.
    pub fn take_warnings(&mut self) -> Vec<String> {
        self.warnings.take()
    }

    /// Sees to it that there are descriptors for links to all peers, or warns.
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

    /// Descriptors of a link to a peer.
    fn fds_for(&self, peer: &EndpointInfo) -> usize {
        ways(&self.info, peer).iter().map(|way| way.row.descriptors).max().unwrap_or(1)
    }

    /// Accepts what is queued and moves every handshake on.
    fn take_incoming(&mut self, now: Instant, host: &mut dyn Host) {
        self.starved = false;
        for (carrier, listener) in &self.listeners {
            for _ in 0..MAX_ACCEPTS {
                match accept::accept(listener, *carrier, now) {
                    Ok(Some(incoming)) => self.incoming.push(incoming),
                    Ok(None) => break,
                    Err(why) => {
                        // Out of descriptors as a rule. Whoever waits in the queue stays there.
                        self.starved = true;
                        match why {
                            Errno::MFILE => self.warnings.no_descriptors("all that are allowed are open"),
                            Errno::NFILE => self.warnings.no_files_on_host(),
                            _ => {}
                        }
                        break;
                    }
                }
            }
        }
        let Self { me, dials, kept, departed, incoming, .. } = self;
        // Those that were promised a link come first: whether they have it matters to those that greet.
        let (promised, greeting): (Vec<_>, Vec<_>) =
            std::mem::take(incoming).into_iter().partition(Incoming::is_promised);
        for handshake in promised.into_iter().chain(greeting) {
            match handshake.poll(me, now, &mut Doorkeeper { me, now, dials, kept, host }) {
                Step::Wait(handshake) => incoming.push(*handshake),
                Step::Done(accepted) => {
                    departed.remove(&accepted.from);
                    kept.insert(accepted.from, Kept { lane: accepted.lane, link: accepted.link });
                }
                Step::Drop => {}
            }
        }
        self.drop_strangers();
    }

    /// Makes room when there are too many connections, or no descriptor for the next. Only those go that have had a look
    /// at what they sent and have not introduced themselves, the oldest first: a peer that was promised a link relies on
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

    /// Drops kept links whose peer has gone since an earlier call: it will make another or be reported as missing. A
    /// link that breaks during this call is handed out, so that its loss is noticed at once.
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

    /// Moves the efforts to reach peers on.
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
                // Who asks again and again has a deadline.
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

    /// Why nobody has connected.
    fn silence(&self, peer: &EndpointInfo) -> &str {
        if let Some(why) = self.departed.get(&peer.uuid) {
            why
        } else if self.starved {
            "no descriptor left for its connection; raise the limit with `ulimit -n`"
        } else {
            "no connection from it yet"
        }
    }

    /// Until something moves.
    fn sleep_on(&self, wake: Option<BorrowedFd<'_>>, at_most: Option<Duration>) {
        let queues = if self.starved { &[][..] } else { &self.listeners };
        let listening = queues.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN));
        let greeting = self.incoming.iter().map(|i| PollFd::new(i.socket(), PollFlags::IN));
        let calling = self
            .dials
            .values()
            .flat_map(Dial::sockets)
            .chain(self.letters.iter().filter_map(Letter::socket))
            .map(|(fd, connecting)| PollFd::new(fd, if connecting { PollFlags::OUT } else { PollFlags::IN }));
        let wake = wake.map(|wake| PollFd::from_borrowed_fd(wake, PollFlags::IN));
        let mut fds: Vec<_> = listening.chain(greeting).chain(calling).chain(wake).collect();
        let timeout = at_most.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
        // A signal ends the sleep early, which is as well.
        let _ = poll(&mut fds, timeout.as_ref());
    }
}

/// What answers those that connect, with what an endpoint knows besides.
struct Doorkeeper<'a> {
    me: &'a Identity,
    now: Instant,
    dials: &'a mut HashMap<[u8; 16], Dial>,
    kept: &'a mut HashMap<[u8; 16], Kept>,
    host: &'a mut dyn Host,
}

impl Host for Doorkeeper<'_> {
    fn stance_to(&mut self, lane: u32, from: &[u8; 16]) -> Stance {
        // One that its peer has given up makes room for the next.
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
        dial.stand_back(self.now);
        Stance::Unlinked
    }

    fn on_note(&mut self, lane: u32, from: &[u8; 16], note: &[u8]) -> String {
        self.host.on_note(lane, from, note)
    }
}

/// What answers in [`Endpoint::connect`]: links were not taken, and nobody has anything to say.
struct Alone;

impl Host for Alone {
    fn stance_to(&mut self, _lane: u32, _peer: &[u8; 16]) -> Stance {
        Stance::Unlinked
    }

    fn on_note(&mut self, _lane: u32, _from: &[u8; 16], _note: &[u8]) -> String {
        String::new()
    }
}

/// The transport of a link between two processes, unless that is refused when it is made.
pub fn likely_transport(one: &EndpointInfo, other: &EndpointInfo) -> Option<&'static Transport> {
    ways(one, other).first().map(|way| way.row)
}

/// Whether a process can have links to all `peers`, as far as their infos say.
///
/// # Errors
/// What no waiting can help: `Mismatch` for another protocol version, `InvalidArgument` for a peer that stands twice in the list,
/// `Configuration` for peers to which no transport leads, whoever of the two connects.
pub fn check_peers(me: &EndpointInfo, peers: &[EndpointInfo]) -> std::result::Result<(), ConnectError> {
    let mut missing = Vec::new();
    let mut seen = HashSet::new();
    for (index, peer) in peers.iter().enumerate() {
        if peer.version != PROTOCOL_VERSION {
            missing.push(Missing { index, why: format!("it has protocol version {}", peer.version) });
        } else if !seen.insert(peer.uuid) {
            let error = Error::invalid_argument(format!("{} stands twice in the list of peers", peer.host_and_pid()));
            let missing = vec![Missing { index, why: error.message.clone() }];
            return Err(ConnectError { error, missing });
        }
    }
    let Some(first) = missing.first().map(|m| &peers[m.index]) else { return check_ways(me, peers) };
    let error = Error::mismatch(format!(
        "{} has protocol version {}, this process {PROTOCOL_VERSION}; install the same torch-accl everywhere",
        first.host_and_pid(),
        first.version
    ));
    Err(ConnectError { error, missing })
}

/// Whether some transport leads to every peer, whoever of the two connects.
fn check_ways(me: &EndpointInfo, peers: &[EndpointInfo]) -> std::result::Result<(), ConnectError> {
    let is_apart = |peer: &EndpointInfo| peer.uuid != me.uuid && ways(me, peer).is_empty() && ways(peer, me).is_empty();
    let missing: Vec<Missing> = peers
        .iter()
        .enumerate()
        .filter(|(_, peer)| is_apart(peer))
        .map(|(index, peer)| {
            let (mine, theirs) = (me.transports.join(","), peer.transports.join(","));
            Missing { index, why: format!("no transport leads there: it uses {theirs}, this process {mine}") }
        })
        .collect();
    let Some(first) = missing.first() else { return Ok(()) };
    let error = Error::configuration(format!(
        "{}: {}; shm needs one host and one user, tcp an address that the other can reach (ACCL_TRANSPORTS, \
         ACCL_SOCKET_IFNAME)",
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

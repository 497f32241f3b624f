//! Driver settings that follow from a device URL.
//!
//! Owns the sizes of buffers, and the rules for addresses and sessions in a ranks file. The row of each kind of bus owns its addresses without such a
//! file, its defaults, and the keys that it refuses. Read [`DeviceUrl::settings`] first.

use std::net::Ipv4Addr;
use std::path::Path;

use accl_types::{Error, ErrorKind, Result, show_size};

use super::ranks::{self, FIRST_PORT, RankLine};
use super::url::{DeviceUrl, Sessions, memory_name};
use crate::design::Design;
use crate::memory_map::NO_SESSION;
use crate::settings::{Peer, Settings, Tables};

/// Size of the largest eager message in bytes. Reductions are eager, so their calls are split into messages of this size.
const EAGER_BYTES: u32 = 4 << 20;
/// Default maximum size of an rx buffer in bytes. Larger buffers waste memory if messages are short.
const RX_BYTES: u32 = 64 << 10;
/// The size of an rx buffer is a multiple of this many bytes.
const RX_UNIT: u32 = 64;
/// Maximum number of segments of a message: a receive can hold this many rx buffers before it releases them.
const MAX_SEGMENTS: u32 = 64;
/// Rx buffers in addition to those that hold one whole message. In a collective of several pieces a rank may be one piece ahead. Its message then
/// begins to arrive while the end of the previous piece is still in use.
const MORE_RX_BUFFERS: u32 = 16;

impl DeviceUrl {
    /// Returns the driver settings for a rank. Depending on [`Sessions`], the field [`Peer::session`] may be unknown until the bus sets it.
    ///
    /// # Errors
    /// The ranks file is invalid or names another number of ranks, firmware would refuse a size, or the tables do not fit into exchange memory.
    pub fn settings(&self, rank: u32, world: u32) -> Result<Settings> {
        let settings = self.sized(rank, self.peers(world)?);
        self.check(&settings).map_err(|error| self.refused(&error.message))?;
        Ok(settings)
    }

    /// Checks that ranks can reach one another with these settings, before any device is opened.
    ///
    /// # Errors
    /// The design needs sessions that neither this crate nor the ranks file provides.
    pub fn check_sessions(&self, settings: &Settings) -> Result<()> {
        match self.bus.sessions {
            Sessions::RanksFile(explanation) if self.design() != Design::Udp => {
                settings.check_sessions().map_err(|error| self.refused(&format!("{}: {explanation}", error.message)))
            }
            Sessions::RanksFile(_) | Sessions::Ranks | Sessions::Exchanged => Ok(()),
        }
    }

    /// Returns the settings that all ranks must share, as text: the kind of device and all keys, with the defaults of omitted keys. The index of a
    /// card, file paths, addresses and kernel names are not included.
    pub fn agreed(&self) -> String {
        let Settings { rx_buffers, rx_bytes, max_eager_bytes, max_rendezvous_bytes, memory, .. } =
            self.sized(0, Vec::new());
        format!(
            "{}://?design={}&rx_buffers={rx_buffers}&rx_bytes={}&eager={}&rendezvous={}&memory={}&compression={}",
            self.scheme(),
            self.design().name(),
            show_size(rx_bytes),
            show_size(max_eager_bytes),
            show_size(max_rendezvous_bytes),
            memory_name(memory),
            self.wire().name()
        )
    }

    /// Checks the values of the keys, without knowledge of the ranks.
    pub(crate) fn check_alone(&self) -> Result<()> {
        let some_peer = Peer { ip: Ipv4Addr::LOCALHOST, port: FIRST_PORT, session: 0 };
        self.check(&self.sized(0, vec![some_peer]))
    }

    fn check(&self, settings: &Settings) -> Result<()> {
        let refused = |text: String| Err(Error::new(ErrorKind::Configuration, text));
        if let Err(why) = (self.bus.check)(self, settings.world()) {
            return refused(why);
        }
        settings.check()?;
        Tables::lay_out(settings)?;
        let (rx_bytes, eager) = (settings.rx_bytes, settings.max_eager_bytes);
        if eager.div_ceil(rx_bytes) > MAX_SEGMENTS {
            return refused(format!(
                "an eager message of {} has more than {MAX_SEGMENTS} segments of {}; use a smaller `eager` or larger `rx_bytes`",
                show_size(eager),
                show_size(rx_bytes)
            ));
        }
        if settings.rx_buffers < eager.div_ceil(rx_bytes) {
            return refused(format!(
                "{} rx buffers of {} cannot hold an eager message of {}, so ranks that all send before they receive would hang; use more or \
                 larger rx buffers, or a smaller `eager`",
                settings.rx_buffers,
                show_size(rx_bytes),
                show_size(eager)
            ));
        }
        Ok(())
    }

    /// Returns the settings for these peers, with defaults that suit the given keys.
    fn sized(&self, rank: u32, peers: Vec<Peer>) -> Settings {
        // The rx buffers together hold a whole eager message.
        let rx_size = self.rx_bytes.unwrap_or(RX_BYTES);
        let held = self.rx_buffers.map_or(EAGER_BYTES, |count| count.saturating_mul(rx_size));
        let eager = self.eager.unwrap_or_else(|| EAGER_BYTES.min(held).max(self.rx_bytes.unwrap_or(0)));
        let rx_bytes = self.rx_bytes.unwrap_or_else(|| {
            let least = eager.div_ceil(MAX_SEGMENTS).max(1).next_multiple_of(RX_UNIT);
            RX_BYTES.min(eager / RX_UNIT * RX_UNIT).max(least)
        });
        let segments = eager.div_ceil(rx_bytes.max(1)).min(MAX_SEGMENTS);
        Settings {
            rx_buffers: self.rx_buffers.unwrap_or(segments + MORE_RX_BUFFERS),
            rx_bytes,
            max_eager_bytes: eager,
            max_rendezvous_bytes: self.rendezvous.unwrap_or(eager.saturating_mul(2)),
            memory: self.memory(),
            suits_any_network: self.bus.suits_any_network && self.design.is_none(),
            ..Settings::new(self.design().network(), rank, peers)
        }
    }

    fn peers(&self, world: u32) -> Result<Vec<Peer>> {
        match self.ranks_file() {
            Some(path) => self.peers_of(path, world),
            None => (0..world).map(|rank| self.peer(rank, world)).collect(),
        }
    }

    fn peers_of(&self, path: &Path, world: u32) -> Result<Vec<Peer>> {
        let lines = ranks::read(path)?;
        if lines.len() != world as usize {
            return Err(ranks::refused(path, &format!("names {} ranks, but there are {world}", lines.len())));
        }
        let rx_bytes = self.sized(0, Vec::new()).rx_bytes;
        let peer = |(rank, line): (u32, &RankLine)| {
            // A segment is as large as an rx buffer.
            if let Some(bytes) = line.segment_bytes.filter(|bytes| *bytes != rx_bytes) {
                let why = format!(
                    "gives rank {rank} segments of {bytes} bytes; add `rx_bytes={bytes}`, or remove `max_segment`"
                );
                return Err(ranks::refused(path, &why));
            }
            // Devices of a kind whose addresses are host names address one another by rank, and ignore this address.
            let ip = match self.address.ranks_file {
                Some(_) => line.ip.parse().unwrap_or(Ipv4Addr::LOCALHOST),
                None => line.address(path, rank as usize)?,
            };
            let usual = self.session(rank);
            if let Some(session) = line.session.filter(|session| self.sessions_are_ranks() && *session != usual) {
                let why = format!("gives rank {rank} session {session}; the session of this device is its rank");
                return Err(ranks::refused(path, &why));
            }
            Ok(Peer { ip, port: line.port, session: line.session.unwrap_or(usual) })
        };
        (0..world).zip(&lines).map(peer).collect()
    }

    fn peer(&self, rank: u32, world: u32) -> Result<Peer> {
        let address = (self.bus.rank_address)(self, rank, world)?;
        Ok(Peer { ip: *address.ip(), port: address.port(), session: self.session(rank) })
    }

    fn sessions_are_ranks(&self) -> bool {
        self.bus.sessions == Sessions::Ranks
    }

    /// Returns the default session of a rank. A UDP socket index equals the rank. Sessions and queue pairs are unknown until they are opened.
    fn session(&self, rank: u32) -> u32 {
        if self.sessions_are_ranks() || self.design() == Design::Udp { rank } else { NO_SESSION }
    }
}

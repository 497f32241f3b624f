//! Endpoint addresses, which processes publish in the store, and a process's stance towards a peer that connects.
//!
//! This module owns the text form. Parsing must survive arbitrary input, because other programs share the store. Read
//! [`EndpointInfo`] first.

use core::net::SocketAddr;

use accl_types::{Error, Result};

const INTRODUCTION: &str = "accl-endpoint";
/// Maximum length of a text that is parsed. A longer text was not written by this library; refusing it keeps hostile
/// input cheap.
const MAX_TEXT_BYTES: usize = 64 << 10;

/// Identity of an endpoint and the ways to reach it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointInfo {
    /// [`crate::PROTOCOL_VERSION`] of the process.
    pub version: u32,
    /// Random identity of the endpoint. If both processes of a pair connect, the smaller `uuid` has precedence. A peer
    /// must know the `uuid` to be admitted.
    pub uuid: [u8; 16],
    /// Process id in its own namespace.
    pub pid: u32,
    /// Effective user id.
    pub uid: u32,
    /// Host name, for messages.
    pub hostname: String,
    /// Identity of the host. Two endpoints share memory only if their host identities are equal.
    pub host_id: String,
    /// Addresses on which the endpoint listens, best first. Loopback addresses are for endpoints with the same
    /// `host_id`.
    pub addresses: Vec<SocketAddr>,
    /// Abstract name of the endpoint's Unix socket; empty if it has none.
    pub unix_name: String,
    /// Names of the transports that the endpoint accepts, in its order of preference.
    pub transports: Vec<String>,
    /// Number of lanes of the endpoint.
    pub lanes: u32,
}

/// A process's stance towards a peer that wants a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stance {
    /// No link to the peer exists, and one may be made.
    Unlinked,
    /// A link to the peer exists, and it is not known to be broken.
    Linked,
    /// This process is already making a link to the peer; the peer must wait for that link.
    Crossing,
    /// The peer has left, and this process wants nothing more from it.
    GivenUp,
}

/// Returns the identity of one lane of a process. Lane 0 has the identity of the endpoint itself.
pub fn lane_uuid(uuid: &[u8; 16], lane: u32) -> [u8; 16] {
    let mut own = *uuid;
    // Random identities differ in more bits than a lane number changes, so identities stay distinct.
    own.iter_mut().rev().zip(lane.to_le_bytes()).for_each(|(byte, of_lane)| *byte ^= of_lane);
    own
}

impl EndpointInfo {
    /// Describes another lane of the same process: equal addresses, but the identity of that lane.
    pub fn of_lane(&self, lane: u32) -> EndpointInfo {
        EndpointInfo { uuid: lane_uuid(&self.uuid, lane), ..self.clone() }
    }

    /// Returns one line of printable ASCII, which [`EndpointInfo::from_text`] reads.
    pub fn to_text(&self) -> String {
        let addresses: Vec<_> = self.addresses.iter().map(SocketAddr::to_string).collect();
        let transports: Vec<_> = self.transports.iter().map(|name| escape(name)).collect();
        format!(
            "{INTRODUCTION} version={} uuid={} pid={} uid={} hostname={} host_id={} addresses={} unix={} transports={} lanes={}",
            self.version,
            hex(&self.uuid),
            self.pid,
            self.uid,
            escape(&self.hostname),
            escape(&self.host_id),
            addresses.join(","),
            escape(&self.unix_name),
            transports.join(","),
            self.lanes
        )
    }

    /// Parses the text that [`EndpointInfo::to_text`] writes. Unknown names are skipped, so that later versions can add
    /// some.
    ///
    /// # Errors
    /// `Rendezvous` for any other text.
    pub fn from_text(text: &str) -> Result<EndpointInfo> {
        parse(text).map_err(|why| {
            let start: String = text.chars().take(60).flat_map(char::escape_default).collect();
            Error::rendezvous(format!("`{start}` is not an endpoint address: {why}"))
        })
    }

    /// Host and process, for messages: `node3 pid 4711`.
    pub fn host_and_pid(&self) -> String {
        format!("{} pid {}", self.hostname, self.pid)
    }
}

fn parse(text: &str) -> std::result::Result<EndpointInfo, String> {
    if text.len() > MAX_TEXT_BYTES {
        return Err(format!("it has {} bytes", text.len()));
    }
    let mut words = text.split_ascii_whitespace();
    if words.next() != Some(INTRODUCTION) {
        return Err("its first word is unknown".to_owned());
    }
    let pairs: Vec<_> = words.filter_map(|word| word.split_once('=')).collect();
    let value = |name: &str| {
        pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| *v).ok_or_else(|| format!("`{name}` is missing"))
    };
    let number = |name: &str| value(name)?.parse::<u32>().map_err(|_| format!("`{name}` is not a number"));
    let string = |name: &str| unescape(value(name)?).ok_or_else(|| format!("`{name}` is garbled"));
    let list = |name: &str| Ok::<_, String>(value(name)?.split(',').filter(|item| !item.is_empty()));
    let addresses = list("addresses")?
        .map(|item| item.parse::<SocketAddr>().map_err(|_| format!("`{item}` is not an address")))
        .collect::<std::result::Result<_, _>>()?;
    let transports = list("transports")?
        .map(|item| unescape(item).ok_or_else(|| "`transports` is garbled".to_owned()))
        .collect::<std::result::Result<_, _>>()?;
    Ok(EndpointInfo {
        version: number("version")?,
        uuid: unhex(value("uuid")?).ok_or("`uuid` is garbled")?,
        pid: number("pid")?,
        uid: number("uid")?,
        hostname: string("hostname")?,
        host_id: string("host_id")?,
        addresses,
        unix_name: string("unix")?,
        transports,
        // A description without `lanes` means one lane.
        lanes: value("lanes").map_or(Ok(1), |_| number("lanes"))?.max(1),
    })
}

/// Replaces every byte outside a set of plain ASCII characters with `%xx`.
fn escape(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._/:@".contains(&b);
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02x}") }).collect()
}

fn unescape(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(if byte == b'%' { digit(rest.next()?)? << 4 | digit(rest.next()?)? } else { byte });
    }
    String::from_utf8(bytes).ok()
}

/// Returns `bytes` as lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn unhex(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> = text.bytes().map(digit).collect::<Option<_>>()?;
    let bytes: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    if digits.len() == 32 { bytes.try_into().ok() } else { None }
}

fn digit(byte: u8) -> Option<u8> {
    char::from(byte).to_digit(16).map(|d| d as u8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use accl_types::ErrorKind;
    use proptest::prelude::*;

    fn info() -> impl Strategy<Value = EndpointInfo> {
        let address = any::<SocketAddr>().prop_map(|a| match a {
            // IPv6 scopes are not generated, because a link-local address means nothing on another machine.
            SocketAddr::V6(v6) => SocketAddr::new((*v6.ip()).into(), v6.port()),
            v4 @ SocketAddr::V4(_) => v4,
        });
        (
            (any::<u32>(), any::<[u8; 16]>(), any::<u32>(), any::<u32>()),
            (any::<String>(), any::<String>(), any::<String>()),
            proptest::collection::vec(address, 0..5),
            proptest::collection::vec("[a-z]{1,9}", 0..3),
        )
            .prop_map(|((version, uuid, pid, uid), (hostname, host_id, unix_name), addresses, transports)| {
                EndpointInfo { version, uuid, pid, uid, hostname, host_id, addresses, unix_name, transports, lanes: 3 }
            })
    }

    proptest! {
        #[test]
        fn an_info_comes_back_as_it_went(info in info()) {
            let text = info.to_text();
            prop_assert!(text.bytes().all(|b| (b' '..=b'~').contains(&b)), "{}", text);
            prop_assert_eq!(EndpointInfo::from_text(&text).unwrap(), info);
        }

        #[test]
        fn arbitrary_text_is_refused_without_a_panic(text: String) {
            prop_assert_eq!(EndpointInfo::from_text(&text).unwrap_err().kind, ErrorKind::Rendezvous);
        }

        #[test]
        fn a_damaged_info_does_not_panic(info in info(), at in any::<prop::sample::Index>(), with: char, cut: bool) {
            let mut text: Vec<char> = info.to_text().chars().collect();
            let at = at.index(text.len());
            if cut { text.truncate(at) } else { text[at] = with }
            let _ = EndpointInfo::from_text(&text.into_iter().collect::<String>());
        }
    }

    #[test]
    fn an_unknown_name_is_skipped() {
        let info = EndpointInfo {
            version: 1,
            uuid: [7; 16],
            pid: 1,
            uid: 2,
            hostname: "a b".to_owned(),
            host_id: "ü".to_owned(),
            addresses: vec!["[::1]:5".parse().unwrap()],
            unix_name: String::new(),
            transports: vec!["shm".to_owned()],
            lanes: 1,
        };
        assert_eq!(EndpointInfo::from_text(&format!("{} later=1", info.to_text())).unwrap(), info);
        assert_eq!(info.host_and_pid(), "a b pid 1");
    }
}

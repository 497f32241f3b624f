//! Addresses of emulators: the address part of their URLs, and the address of each rank's emulator.
//!
//! Owns the three forms of the address part. Opens no connection. Read [`Addresses`] first.

use std::fmt;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::path::PathBuf;

use accl_types::Result;

use crate::device::ranks::{self, RankLine};
use crate::device::{DeviceAddress, DeviceUrl};

/// Addresses of the emulators of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Addresses {
    /// One host for all ranks. The rank is added to the port.
    One(Address),
    /// One address per rank.
    Each(Vec<Address>),
    /// Addresses from a ranks file.
    File(PathBuf),
}

/// Address of an emulator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    /// Host name or IP address; an IPv6 address is in brackets.
    pub host: String,
    /// Port.
    pub port: u16,
}

/// Parses the address part of a URL: `h0:5500`, `h0:5500,h1:5500` or `@ranks.json`.
pub(super) fn parse(text: &str) -> std::result::Result<DeviceAddress, String> {
    let addresses = Addresses::parse(text)?;
    let text = addresses.to_string();
    Ok(match addresses {
        Addresses::File(path) => DeviceAddress { text, ranks_file: Some(path) },
        Addresses::One(_) | Addresses::Each(_) => DeviceAddress { text, ranks_file: None },
    })
}

/// Returns the address of a rank's emulator.
///
/// # Errors
/// There is no emulator for this rank, or the ranks file is invalid.
pub(super) fn emulator_of(url: &DeviceUrl, rank: u32) -> Result<Address> {
    let nth = |count: usize| {
        usize::try_from(rank)
            .ok()
            .filter(|index| *index < count)
            .ok_or_else(|| url.refused(&format!("it names {count} emulators, but none for rank {rank}")))
    };
    match Addresses::of(url)? {
        Addresses::One(Address { host, port }) => Ok(Address { host, port: url.port_of(port, rank)? }),
        Addresses::Each(all) => Ok(all[nth(all.len())?].clone()),
        Addresses::File(path) => {
            let lines = ranks::read(&path)?;
            let RankLine { ip, port, .. } = &lines[nth(lines.len())?];
            Ok(Address { host: ip.clone(), port: *port })
        }
    }
}

/// Returns the address of a rank's emulator for its peers, which ignore it: emulators address one another by rank.
///
/// # Errors
/// The URL names another number of emulators.
pub(super) fn rank_address(url: &DeviceUrl, rank: u32, world: u32) -> Result<SocketAddrV4> {
    if let Addresses::Each(all) = Addresses::of(url)?
        && all.len() != world as usize
    {
        return Err(url.refused(&format!("it names {} emulators, but there are {world} ranks", all.len())));
    }
    let Address { host, port } = emulator_of(url, rank)?;
    Ok(SocketAddrV4::new(host.parse().unwrap_or(Ipv4Addr::LOCALHOST), port))
}

impl Addresses {
    fn of(url: &DeviceUrl) -> Result<Self> {
        Self::parse(url.address()).map_err(|why| url.refused(&why))
    }

    fn parse(text: &str) -> std::result::Result<Self, String> {
        if let Some(path) = text.strip_prefix('@') {
            let path = Some(path).filter(|path| !path.is_empty()).ok_or("expected a ranks file after the `@`")?;
            return Ok(Self::File(path.into()));
        }
        let all = text.split(',').map(Address::parse).collect::<std::result::Result<Vec<Address>, String>>()?;
        Ok(match <[Address; 1]>::try_from(all) {
            Ok([one]) => Self::One(one),
            Err(each) => Self::Each(each),
        })
    }
}

impl fmt::Display for Addresses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::One(address) => write!(f, "{address}"),
            Self::Each(all) => f.write_str(&all.iter().map(Address::to_string).collect::<Vec<_>>().join(",")),
            Self::File(path) => write!(f, "@{}", path.display()),
        }
    }
}

impl Address {
    fn parse(text: &str) -> std::result::Result<Self, String> {
        let parts = text.trim().rsplit_once(':');
        // At the beginning of an address part, `@` names a ranks file.
        let parts = parts.filter(|(host, _)| !host.is_empty() && !host.starts_with('@'));
        let parts = parts.and_then(|(host, port)| Some((host, port.parse().ok().filter(|port| *port > 0)?)));
        let (host, port) = parts.ok_or_else(|| format!("expected HOST:PORT of an emulator, got `{text}`"))?;
        Ok(Self { host: host.to_owned(), port })
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_after_a_blank_is_not_shown_as_a_ranks_file() {
        for text in [" @x:5", "\t@x:5", "\u{a0}@x:5", "h:1, @x:5", "h:1,@x:5"] {
            let why = parse(text).unwrap_err();
            assert!(why.starts_with("expected HOST:PORT of an emulator, got `"), "{text:?}: {why}");
            assert!(DeviceUrl::parse(&format!("emulator://{text}")).is_err(), "{text:?}");
        }
    }

    #[test]
    fn each_rank_has_an_emulator() {
        let path = tempfile::NamedTempFile::new().unwrap().into_temp_path();
        std::fs::write(&path, r#"{"ips": ["h0", "127.0.0.1"]}"#).unwrap();
        let ranks = path.display();
        let parsed = |text: &str| DeviceUrl::parse(text).unwrap().unwrap();
        let at = |text: &str, rank| emulator_of(&parsed(text), rank).map(|address| address.to_string());
        assert_eq!(at("emulator://h:5500", 3), Ok("h:5503".to_owned()));
        assert_eq!(at("emulator://h:5500,i:7", 1), Ok("i:7".to_owned()));
        assert_eq!(at(&format!("emulator://@{ranks}"), 0), Ok("h0:5500".to_owned()));
        assert_eq!(at(&format!("emulator://@{ranks}"), 1), Ok("127.0.0.1:5501".to_owned()));
        let text = at("emulator://h:5500,i:7", 2).unwrap_err().message;
        assert!(text.ends_with("it names 2 emulators, but none for rank 2"), "{text}");
        assert!(at("emulator://h:65535", 1).unwrap_err().message.contains("rank 1 has no port below 65536"));
        let text = parsed("emulator://h:5500,i:7").settings(0, 3).unwrap_err().message;
        assert!(text.ends_with("it names 2 emulators, but there are 3 ranks"), "{text}");
        let peers = parsed(&format!("emulator://@{ranks}")).settings(0, 2).unwrap().peers;
        let peers: Vec<_> = peers.iter().map(|peer| (peer.ip.to_string(), peer.port, peer.session)).collect();
        assert_eq!(peers, [("127.0.0.1".to_owned(), 5500, 0), ("127.0.0.1".to_owned(), 5501, 1)]);
        let other = parsed(&format!("emulator://@{ranks}")).settings(0, 3).unwrap_err().message;
        assert_eq!(other, format!("the ranks file {ranks} names 2 ranks, but there are 3"));
    }
}

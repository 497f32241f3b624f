//! Addresses of cards, for the buses that reach one.
//!
//! Owns the index of a card on its host, and the default address of a card in the network of the cards. Read [`parse_index`] first.

use std::net::{Ipv4Addr, SocketAddrV4};

use accl_types::Result;

use crate::device::{DeviceAddress, DeviceUrl, FIRST_PORT};

/// First three octets of a card's address without a ranks file; the last octet is the rank plus one.
const NETWORK: [u8; 3] = [10, 10, 10];

/// Parses the address part of a URL that is the index of a card on its host.
pub(crate) fn parse_index(text: &str) -> std::result::Result<DeviceAddress, String> {
    index(text).map(|index| index.to_string().into())
}

/// Returns the index of a card whose URL [`parse_index`] has parsed.
///
/// # Errors
/// `Configuration` if the address part is not an index.
pub(crate) fn index_of(url: &DeviceUrl) -> Result<u32> {
    index(url.address()).map_err(|why| url.refused(&why))
}

fn index(text: &str) -> std::result::Result<u32, String> {
    text.parse().map_err(|_| format!("expected the index of a card, got `{text}`"))
}

/// Returns the address of a rank's card without a ranks file.
///
/// # Errors
/// `Configuration` if the network has no address for this rank.
pub(crate) fn rank_address(url: &DeviceUrl, rank: u32, _world: u32) -> Result<SocketAddrV4> {
    let [first, second, third] = NETWORK;
    let last = u8::try_from(rank + 1).ok().filter(|last| *last < u8::MAX);
    let last = last.ok_or_else(|| {
        url.refused(&format!("rank {rank} has no address in {first}.{second}.{third}.0/24; add `ranks=FILE`"))
    })?;
    Ok(SocketAddrV4::new(Ipv4Addr::new(first, second, third, last), url.port_of(FIRST_PORT, rank)?))
}

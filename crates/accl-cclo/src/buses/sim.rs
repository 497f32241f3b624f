//! Software engine in the process of its rank, as a kind of bus.
//!
//! Owns the form of its URLs and its defaults. Does not own the engine, which is in a crate above this one. Read [`ROW`] first.

use std::net::{Ipv4Addr, SocketAddrV4};

use crate::bus::Memory;
use crate::device::{BusKind, Design, DeviceAddress, FIRST_PORT, Open, Sessions};

pub(super) const ROW: BusKind = BusKind {
    scheme: "sim",
    alias: Some("1"),
    forms: &["sim", "sim://?KEY=VALUE"],
    example: "sim://?design=udp",
    keys: &[],
    parse,
    design: Design::CytRdma,
    suits_any_network: false,
    memory: Memory::Host,
    sessions: Sessions::Ranks,
    rank_address: |url, rank, _| Ok(SocketAddrV4::new(Ipv4Addr::LOCALHOST, url.port_of(FIRST_PORT, rank)?)),
    check: |_, _| Ok(()),
    open: Open::Above(
        "the engines of `sim` exist only in the processes of their ranks; use emulator://HOST:PORT or a card",
    ),
};

fn parse(text: &str) -> Result<DeviceAddress, String> {
    if text.is_empty() {
        return Ok(DeviceAddress::from(String::new()));
    }
    Err(format!("`sim` runs in the process of its rank and has no address; got `{text}`"))
}

//! What a process says, and does not say, when a rank goes: cores without a driver, and the bare ends of their links.

use std::time::Duration;

use accl_executor::group::{Core, Fate, GroupState, Notify};
use accl_executor::peers::{Members, PeerId};
use accl_transport::Poller;
use accl_transport::loopback::{self, Capacity};
use accl_types::{Bytes, Error, Moment, Rank};
use accl_wire::frame::{Header, Kind, OVERHEAD_BYTES};
use accl_wire::{EndpointInfo, Link, PROTOCOL_VERSION};

const NOW: Moment = Moment::from_nanos(1);
const SEGMENT: usize = 4096;
const GROUP: u64 = 7;

fn info(process: u8) -> EndpointInfo {
    EndpointInfo {
        version: PROTOCOL_VERSION,
        uuid: [process; 16],
        pid: u32::from(process),
        uid: 0,
        hostname: format!("host-{process}"),
        host_id: "one".to_owned(),
        addresses: Vec::new(),
        unix_name: String::new(),
        transports: Vec::new(),
    }
}

/// Rank 0 of a group of so many processes, which has no links, and the peers by rank.
fn rank_0_of(world: u8) -> (Core, Vec<PeerId>) {
    let mut core = Core::new(SEGMENT as u64, || NOW);
    let peers: Vec<PeerId> = (0..world).map(|process| core.net.introduce(&info(process), false)).collect();
    let members = Members::new(peers.clone(), Bytes(0));
    core.add_group(GroupState::new(GROUP, "g".into(), Rank(0), Duration::from_secs(1), members), NOW);
    (core, peers)
}

/// The kinds of the group's frames that have come, in order.
fn heard(link: &mut impl Link) -> Vec<Kind> {
    let mut kinds = Vec::new();
    while let Some(frame) = link.peek().unwrap() {
        let header = Header::parse(frame.head).unwrap();
        if header.group == GROUP {
            kinds.push(header.kind);
        }
        link.release();
    }
    kinds
}

#[test]
fn who_asks_is_not_misled_by_a_goodbye_that_was_only_assumed() {
    for (is_assumed, answer) in [(true, Fate::Unknown), (false, Fate::Left)] {
        let (mut core, peers) = rank_0_of(3);
        core.depart(peers[1], is_assumed, NOW);
        let question = [&Header::new(Kind::Fate).to_bytes()[..], &info(1).uuid].concat();
        assert_eq!(core.on_note(&info(2).uuid, &question, NOW), answer, "assumed: {is_assumed}");
    }
}

#[test]
fn a_rank_that_linked_after_the_failure_hears_the_cause_before_the_goodbye() {
    let (mut core, peers) = rank_0_of(6);
    core.with_group(GROUP, NOW, |group, context| group.fail(Error::exhausted("no memory"), context, Notify::Peers));
    let poller = Poller::new().unwrap();
    let waker = || poller.waker();
    let (near, mut far) = loopback::pair(SEGMENT + OVERHEAD_BYTES, Capacity::Unbounded, waker(), waker());
    core.attach(peers[3], Box::new(near), None, NOW);
    core.leave_group(GROUP, NOW);
    core.net.flush_all();
    assert_eq!(heard(&mut far), [Kind::Cause, Kind::Goodbye]);
}

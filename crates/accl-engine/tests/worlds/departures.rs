//! Frames that a process sends, and does not send, when a rank leaves. Tests cores without a driver and the far ends of
//! their links.

use std::sync::Arc;

use accl_executor::call::{Blocks, CallDesc, Mode, TensorDesc};
use accl_executor::group::{Caller, Notify, PeerFate};
use accl_transport::Poller;
use accl_transport::loopback::{self, Capacity};
use accl_types::{Collective, Dtype, Elems, Error, Rank};
use accl_wire::Link;
use accl_wire::frame::{Header, Kind, OVERHEAD_BYTES};

use crate::cores::{GROUP, NOW, NoObserver, SEGMENT, core_of, info};

/// Returns the kinds of the group's frames that have arrived, in order.
fn received_kinds(link: &mut impl Link) -> Vec<Kind> {
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
fn an_assumed_disconnect_does_not_mislead_a_process_that_asks() {
    for (is_assumed, answer) in [(true, PeerFate::Unknown), (false, PeerFate::Left)] {
        let (mut core, peers) = core_of(0, 3);
        core.depart(peers[1], is_assumed, NOW);
        let question = [&Header::new(Kind::PeerFate).to_bytes()[..], &info(1).uuid].concat();
        assert_eq!(core.on_note(&info(2).uuid, &question, NOW), answer, "assumed: {is_assumed}");
    }
}

#[test]
fn a_rank_that_linked_after_the_failure_receives_the_cause_before_the_disconnect() {
    let (mut core, peers) = core_of(0, 6);
    core.with_group(GROUP, NOW, |group, context| group.fail(Error::exhausted("no memory"), context, Notify::Peers));
    let poller = Poller::new().unwrap();
    let waker = || poller.waker();
    let (near, mut far) = loopback::pair(SEGMENT + OVERHEAD_BYTES, Capacity::Unbounded, waker(), waker());
    core.attach(peers[3], Box::new(near), None, NOW);
    core.leave_group(GROUP, NOW);
    core.net.flush_all();
    assert_eq!(received_kinds(&mut far), [Kind::Cause, Kind::Disconnect]);
}

#[test]
fn a_sleeping_driver_learns_of_room_found_by_another_thread() {
    let (mut core, peers) = core_of(0, 2);
    let poller = Poller::new().unwrap();
    core.net.set_bitmap(poller.bitmap());
    let waker = || poller.waker();
    let (mut near, mut far) = loopback::pair(SEGMENT + OVERHEAD_BYTES, Capacity::Frames(1), waker(), waker());
    let slot = poller.watch(&mut near).unwrap();
    // The question that is sent on a new link fills it, so the message waits for room.
    core.attach(peers[1], Box::new(near), slot, NOW);
    let caller = Caller { group: GROUP, name: "g".into(), rank: Rank(0), world: 2, global_rank: 0 };
    let mut data = [7_u8; 100];
    let mut desc = CallDesc::new(Collective::Send, Dtype::U8);
    (desc.peer, desc.mode) = (Some(Rank(1)), Mode::Async);
    desc.inputs = Blocks::of(TensorDesc::dense(data.as_mut_ptr(), Dtype::U8, Elems(100)));
    let prepared = caller.prepare(&desc, None).unwrap();
    let call = caller.start(&mut core, &desc, prepared, None, Arc::new(NoObserver), NOW).unwrap().call;
    assert!(core.park(None, None, false, NOW).unwrap().is_some(), "there is nothing to do but to wait for room");
    // Another thread's small call polls for its own frames only, and no thread is woken meanwhile.
    assert!(core.watch());
    far.peek().unwrap().unwrap();
    far.release();
    core.unwatch(NOW);
    assert_eq!(received_kinds(&mut far), [Kind::P2pBegin]);
    assert!(call.is_done());
}

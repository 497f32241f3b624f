//! A driver that sleeps in the poller is notified of events that another thread's poll has found. No other thread would
//! wake it for them.

use std::sync::Arc;

use accl_executor::call::{Blocks, CallDesc, CallState, Mode, TensorDesc};
use accl_executor::group::{Caller, Core, Started, WakeDecision};
use accl_executor::peers::PeerId;
use accl_transport::Poller;
use accl_transport::loopback::{self, Capacity, LoopbackLink};
use accl_types::{Collective, Dtype, Elems, ErrorKind, Rank};
use accl_wire::Link;
use accl_wire::frame::{Cause, Header, Kind, LAST, OVERHEAD_BYTES};

use crate::cores::{GROUP, NOW, NoObserver, SEGMENT, core_of};

/// A process in a group, with a poller.
struct Process {
    core: Core,
    peers: Vec<PeerId>,
    poller: Poller,
    rank: u32,
}

impl Process {
    fn new(rank: u32, world: u8) -> Self {
        let (mut core, peers) = core_of(rank, world);
        let poller = Poller::new().unwrap();
        core.net.set_bitmap(poller.bitmap());
        Self { core, peers, poller, rank }
    }

    fn attach(&mut self, rank: u32, mut link: LoopbackLink) {
        let slot = self.poller.watch(&mut link).unwrap();
        self.core.attach(self.peers[rank as usize], Box::new(link), slot, NOW);
    }

    fn message(&mut self, what: Collective, peer: u32, tag: u32, data: &mut [u8]) -> Started {
        let caller = Caller {
            group: GROUP,
            name: "g".into(),
            rank: Rank(self.rank),
            world: 3,
            global_rank: u64::from(self.rank),
        };
        let mut desc = CallDesc::new(what, Dtype::U8);
        (desc.peer, desc.mode, desc.tag) = (Some(Rank(peer)), Mode::Async, tag);
        let blocks = Blocks::of(TensorDesc::dense(data.as_mut_ptr(), Dtype::U8, Elems(data.len() as u64)));
        if what == Collective::Send {
            desc.inputs = blocks
        } else {
            desc.outputs = blocks
        }
        let prepared = caller.prepare(&desc, None).unwrap();
        caller.start(&mut self.core, &desc, prepared, None, Arc::new(NoObserver), NOW).unwrap()
    }

    /// Issues a receive from rank 1 and parks the driver for it.
    fn parks_for(&mut self, data: &mut [u8]) -> Arc<CallState> {
        let call = self.message(Collective::Recv, 1, 5, data).call;
        assert!(self.core.park(Some(&call), None, false, NOW).unwrap().is_some());
        call
    }
}

/// Returns ranks 0 and 1, linked, with nothing in flight.
fn pair() -> (Process, Process) {
    let (mut near, mut far) = (Process::new(0, 2), Process::new(1, 2));
    let (wakers, room) = ([near.poller.waker(), far.poller.waker()], SEGMENT + OVERHEAD_BYTES);
    let [one, other] = wakers;
    let (here, there) = loopback::pair(room, Capacity::Unbounded, one, other);
    near.attach(1, here);
    far.attach(0, there);
    for _ in 0..3 {
        near.core.pass_whole(NOW);
        far.core.pass_whole(NOW);
    }
    (near, far)
}

#[test]
fn a_driver_learns_that_its_call_ended_in_the_pass_of_another_thread() {
    let (mut near, mut far) = pair();
    let (mut taken, mut given, mut small) = ([0_u8; 4], [3_u8; 4], [5_u8; 4]);
    let awaited = near.parks_for(&mut taken);
    // A second thread polls for frames of its own call; no thread is woken.
    assert!(near.core.watch());
    far.message(Collective::Send, 0, 5, &mut given);
    far.core.pass(NOW);
    assert!(!awaited.is_done());
    // A third thread sends small messages, and polls the links now and then.
    let mut is_woken = false;
    for _ in 0..64 {
        is_woken |= near.message(Collective::Send, 1, 9, &mut small).wakes_driver;
    }
    assert!(awaited.is_done(), "the third thread has ended it");
    let decision = near.core.unwatch(NOW);
    assert!(is_woken || decision != WakeDecision::KeepAsleep, "the driver sleeps on, and no thread will wake it");
}

#[test]
fn a_call_that_ends_in_a_poll_of_all_links_notifies_the_driver() {
    let (mut near, mut far) = pair();
    let (mut taken, mut given) = ([0_u8; 4], [3_u8; 4]);
    let awaited = near.parks_for(&mut taken);
    near.core.net.force_poll_all();
    far.message(Collective::Send, 0, 5, &mut given);
    far.core.pass(NOW);
    near.core.pass_whole(NOW);
    assert!(awaited.is_done());
    assert!(near.core.take_driver_unnotified());
    assert!(!near.core.take_driver_unnotified(), "it is notified once");
    near.core.unpark(NOW);
}

#[test]
fn a_deadline_that_comes_up_in_the_pass_of_another_thread_wakes_the_driver() {
    let mut core = Process::new(0, 4);
    let waker = core.poller.waker();
    let (near, mut far) = loopback::pair(SEGMENT + OVERHEAD_BYTES, Capacity::Unbounded, waker.clone(), waker);
    core.attach(1, near);
    let mut emit = |header: Header, payload: &[u8]| {
        let place = far.try_reserve(payload.len()).unwrap().unwrap();
        header.emit(place.head);
        place.payload.copy_from_slice(payload);
        far.commit();
    };
    let mut taken = [0_u8; 4];
    core.message(Collective::Recv, 1, 5, &mut taken);
    emit(Header { flags: LAST, ..Header::new(Kind::Hello) }, &[]);
    core.core.pass_whole(NOW);
    let until = core.core.park(None, None, false, NOW).unwrap().unwrap();
    // Another thread polls for its own call and learns that rank 2 has failed the group. That counts a while later.
    assert!(core.core.watch());
    let cause = Cause { kind: ErrorKind::Timeout, origin: Rank(2), text: "late".to_owned() };
    emit(Header { group: GROUP, ..Header::new(Kind::Cause) }, &cause.to_bytes(1024));
    core.core.pass(NOW);
    assert_eq!(core.core.unwatch(NOW), WakeDecision::Wake, "the driver sleeps until {until:?}");
}

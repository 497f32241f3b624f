//! Runs the sleep of a device's thread in every interleaving with the events that should wake it. Time does not pass,
//! so a lost wake-up is a deadlock, which loom reports.

use std::sync::Arc;
use std::time::Duration;

use accl_cclo::packets::Packets;
use accl_engine::PacketSink;
use accl_types::Rank;
use loom::thread;

use super::port::{Port, WINDOW};

/// Returns a packet as it arrives in a frame.
fn framed(packet: &[u8]) -> Vec<u8> {
    [&(packet.len() as u32).to_le_bytes()[..], packet].concat()
}

fn wait_until<T>(port: &Port, mut poll: impl FnMut() -> Option<T>) -> T {
    loop {
        if let Some(found) = poll() {
            return found;
        }
        port.wait(Duration::ZERO);
    }
}

#[test]
fn loom_a_packet_that_comes_before_or_during_a_sleep_ends_it() {
    loom::model(|| {
        let port = Port::new(0, 3, 1 << 16, 0);
        port.belongs_to_this_thread();
        let others: Vec<_> = [1, 2]
            .map(|from| {
                let port: Arc<Port> = port.clone();
                thread::spawn(move || {
                    // The first frame ends within the packet.
                    let frame = framed(&[from as u8; 3]);
                    port.arrive(Rank(from), 0, &frame[..5]).unwrap();
                    port.arrive(Rank(from), 0, &frame[5..]).unwrap();
                })
            })
            .into();
        let mut came = [(); 2].map(|()| wait_until(&port, || port.receive(&|_| true)).0);
        came.sort_unstable();
        assert_eq!(came, [1, 2]);
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}

#[test]
fn loom_room_that_comes_before_or_during_a_sleep_ends_it() {
    loom::model(|| {
        let port = Port::new(0, 2, 2 * WINDOW as usize, 0);
        port.belongs_to_this_thread();
        port.send(1, &vec![0; WINDOW as usize]);
        assert!(!port.has_room(1));
        let other = {
            let port: Arc<Port> = port.clone();
            thread::spawn(move || port.arrive(Rank(1), WINDOW + 4, &[]).unwrap())
        };
        wait_until(&port, || port.has_room(1).then_some(()));
        other.join().unwrap();
    });
}

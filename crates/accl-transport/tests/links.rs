//! The contract of every link, over every transport.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use accl_transport::{Faults, Faulty, FrameDirection, FrameObserver, Poller, Traced, loopback};
use accl_types::ErrorKind;
use accl_wire::{HEAD_BYTES, Link, Slot};
use common::{Node, frames, kinds, pair, within_limit};
use proptest::prelude::*;

fn for_every_kind(body: fn(&'static str, Node, Node)) {
    for kind in kinds() {
        within_limit(move || {
            let (a, b) = pair(kind);
            body(kind, a, b);
        });
    }
}

#[test]
fn frames_arrive_whole_and_in_order_both_ways_at_once() {
    for_every_kind(|kind, mut a, mut b| {
        for seed in 0..3 {
            let longest = a.link.max_payload_bytes();
            let (there, back) = (frames(seed, 300, longest), frames(seed + 100, 200, longest));
            let (there_too, back_too) = (there.clone(), back.clone());
            let thread = std::thread::spawn(move || {
                let received = b.exchange(&back_too, there_too.len());
                (b, received)
            });
            let received = a.exchange(&there, back.len());
            let (same_b, received_there) = thread.join().unwrap();
            b = same_b;
            assert!(received == back && received_there == there, "{kind} seed {seed}");
        }
    });
}

#[test]
fn a_sleeper_is_woken_by_every_frame() {
    for_every_kind(|_, mut a, mut b| {
        // Ping-pong in which both sides sleep each time: a lost wake-up is a failure and not a delay.
        let thread = std::thread::spawn(move || {
            for i in 0..2000u64 {
                assert_eq!(b.receive().unwrap(), i.to_le_bytes());
                b.send(&i.to_le_bytes());
            }
            b
        });
        for i in 0..2000u64 {
            a.send(&i.to_le_bytes());
            assert_eq!(a.receive().unwrap(), i.to_le_bytes());
        }
        thread.join().unwrap();
    });
}

#[test]
fn a_sender_without_room_is_woken_when_there_is_some() {
    for_every_kind(|_, mut a, mut b| {
        let frame = vec![7; a.link.max_payload_bytes()];
        let mut filled = 0;
        while a.try_send(&frame).unwrap() {
            filled += 1;
            assert!(filled < 100_000, "a link has bounds");
        }
        let count = filled + 50;
        let sender = std::thread::spawn(move || {
            for _ in filled..count {
                a.send(&frame);
            }
            a.send_the_rest();
            a
        });
        for _ in 0..count {
            assert!(b.receive().unwrap().iter().all(|&byte| byte == 7));
        }
        sender.join().unwrap();
    });
}

#[test]
fn a_wait_without_events_sleeps() {
    for_every_kind(|kind, mut a, _b| {
        // The first sleeps may end because of earlier events; after that no event may come.
        for attempt in 0.. {
            assert!(!a.link.arm(false), "{kind} has no news");
            let before = Instant::now();
            a.sleep(Duration::from_millis(100));
            a.link.disarm();
            if before.elapsed() >= Duration::from_millis(99) {
                break;
            }
            assert!(attempt < 10, "{kind} keeps waking without a reason");
        }
    });
}

#[test]
fn what_was_sent_before_closing_is_received_before_the_loss() {
    for_every_kind(|kind, mut a, mut b| {
        for i in 0..3u8 {
            a.send(&[i; 100]);
        }
        a.link.close();
        for i in 0..3u8 {
            assert!(b.link.check_peer().is_ok(), "{kind}: frames are left");
            assert_eq!(b.receive().unwrap(), [i; 100]);
        }
        assert_eq!(b.receive().unwrap_err().kind, ErrorKind::PeerLost);
        assert_eq!(b.link.check_peer().unwrap_err().kind, ErrorKind::PeerLost);
        assert_eq!(b.link.peek().unwrap_err().kind, ErrorKind::PeerLost, "once lost, always lost");
        assert!(!b.link.arm(false), "{kind}: a reported loss keeps no thread awake");
        b.link.disarm();
    });
}

#[test]
fn a_closed_link_can_still_be_read() {
    for_every_kind(|kind, mut a, mut b| {
        a.link.close();
        if b.try_send(b"late").is_ok() {
            let _ = b.link.flush();
            assert_eq!(a.receive().unwrap(), b"late", "{kind}");
        }
    });
}

#[test]
fn dropping_a_link_wakes_the_sleeping_peer() {
    for_every_kind(|_, a, mut b| {
        let thread = std::thread::spawn(move || b.receive().unwrap_err());
        drop(a);
        assert_eq!(thread.join().unwrap().kind, ErrorKind::PeerLost);
    });
}

#[test]
fn a_frame_that_is_too_long_is_refused_and_the_link_goes_on() {
    for_every_kind(|_, mut a, mut b| {
        let longest = a.link.max_payload_bytes();
        assert_eq!(a.link.try_reserve(longest + 1).unwrap_err().kind, ErrorKind::Internal);
        let sender = std::thread::spawn(move || {
            a.send(&vec![1; longest]);
            a.send_the_rest();
            a
        });
        assert_eq!(b.receive().unwrap().len(), longest);
        sender.join().unwrap();
    });
}

#[test]
fn reserving_again_gives_up_the_first_place_and_peeking_again_shows_the_same_frame() {
    for_every_kind(|_, mut a, mut b| {
        a.link.try_reserve(1000).unwrap().unwrap().payload.fill(1);
        let slot = a.link.try_reserve(8).unwrap().unwrap();
        slot.payload.fill(2);
        slot.head.fill(4);
        a.link.commit();
        a.link.commit();
        a.link.flush().unwrap();
        while b.link.peek().unwrap().is_none() {
            b.park(false);
        }
        let frame = b.link.peek().unwrap().unwrap();
        assert_eq!((frame.head, frame.payload), (&[4; HEAD_BYTES], &[2; 8][..]));
        b.link.release();
        a.send(&[3; 8]);
        while !b.link.arm(false) {
            b.sleep(common::LIMIT);
            b.link.disarm();
        }
        b.link.disarm();
        // The frame was noticed but not peeked at, so there is nothing to release.
        b.link.release();
        assert_eq!(b.link.peek().unwrap().unwrap().payload, [3; 8]);
    });
}

#[test]
fn polling_for_a_while_finds_frames_and_ends_without_them() {
    for_every_kind(|_, mut a, mut b| {
        assert!(b.link.await_frame(100).unwrap().is_none());
        assert!(b.link.await_frame(0).unwrap().is_none());
        a.send(&[7; 9]);
        while b.link.await_frame(1000).unwrap().is_none() {}
        // The next frame, as for `peek`; it stays until it is released.
        assert_eq!(b.link.await_frame(1).unwrap().unwrap().payload, [7; 9]);
        assert_eq!(b.link.peek().unwrap().unwrap().payload, [7; 9]);
        b.link.release();
        assert!(b.link.await_frame(100).unwrap().is_none());
    });
}

#[test]
fn a_quarter_of_a_gigabyte_passes_in_time() {
    for_every_kind(|kind, mut a, mut b| {
        const BYTES: usize = 256 << 20;
        let longest = a.link.max_payload_bytes();
        let count = BYTES / longest;
        let before = Instant::now();
        let sender = std::thread::spawn(move || {
            for i in 0..count {
                loop {
                    if let Some(slot) = a.link.try_reserve(longest).unwrap() {
                        slot.head[..8].copy_from_slice(&i.to_le_bytes());
                        slot.payload.fill(i as u8);
                        a.link.commit();
                        break;
                    }
                    a.park(true);
                }
            }
            // Keep the link until the peer has everything.
            while a.link.check_peer().is_ok() {
                let _ = a.link.flush();
                a.park(false);
            }
        });
        for i in 0..count {
            while b.link.peek().unwrap().is_none() {
                b.park(false);
            }
            let frame = b.link.peek().unwrap().unwrap();
            assert_eq!(frame.head[..8], i.to_le_bytes());
            assert_eq!(frame.payload[longest - 1], i as u8);
            b.link.release();
        }
        let rate = BYTES as f64 / before.elapsed().as_secs_f64() / 1e9;
        println!("{kind}: {rate:.2} GB/s");
        drop(b);
        sender.join().unwrap();
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_sequence_of_lengths_arrives(lens in proptest::collection::vec(0usize..2000, 1..80), kind in 0..kinds().len()) {
        within_limit(move || {
            let (mut a, mut b) = pair(kinds()[kind]);
            let sent: Vec<Vec<u8>> = lens.iter().enumerate().map(|(i, &len)| vec![i as u8; len]).collect();
            let expected = sent.clone();
            let thread = std::thread::spawn(move || { a.exchange(&sent, 0); a });
            for (i, frame) in expected.iter().enumerate() {
                assert!(&b.receive().unwrap() == frame, "frame {i} of {lens:?} over {}", kinds()[kind]);
            }
            thread.join().unwrap();
        });
    }
}

#[test]
fn a_link_to_oneself_returns_what_was_sent() {
    within_limit(|| {
        let poller = Poller::new().unwrap();
        let link = loopback::self_link(4096, poller.waker());
        let mut node = Node::new(Arc::new(poller), Box::new(link), Vec::new());
        for i in 0..10u8 {
            node.send(&[i; 9]);
        }
        for i in 0..10u8 {
            assert_eq!(node.receive().unwrap(), [i; 9]);
        }
        node.link.close();
        assert_eq!(node.receive().unwrap_err().kind, ErrorKind::PeerLost);
    });
}

#[test]
fn faults_repeat_and_break_the_link_for_both() {
    within_limit(|| {
        let faults =
            Faults { seed: 42, most_empty_peeks: 3, refused_percent: 30, lost_after: Some(20), ..Faults::default() };
        let run = || {
            let (a, b) = pair("loopback");
            let mut a = Node { link: Box::new(Faulty::new(a.link, faults)), ..a };
            let mut b = b;
            let mut polls = 0;
            for i in 0..20u8 {
                b.send(&[i]);
                loop {
                    polls += 1;
                    if let Some(frame) = a.try_receive().unwrap() {
                        assert_eq!(frame, [i]);
                        break;
                    }
                }
            }
            assert_eq!(a.receive().unwrap_err().kind, ErrorKind::PeerLost);
            assert_eq!(b.receive().unwrap_err().kind, ErrorKind::PeerLost);
            polls
        };
        let polls = run();
        assert!(polls > 20 && polls == run());
    });
}

#[test]
fn a_frame_observer_gets_each_frame_once() {
    within_limit(|| {
        for fabric in ["shm", "tcp", "loopback"] {
            let (a, mut b) = pair(fabric);
            let observed = Arc::new(Mutex::new(Vec::new()));
            let recorder = observed.clone();
            let observe: FrameObserver =
                Box::new(move |direction, head, bytes| recorder.lock().unwrap().push((direction, head[0], bytes)));
            let mut a = Node { link: Box::new(Traced::new(a.link, observe)), ..a };
            a.send(&[1; 10]);
            // A reservation that is given up is no frame.
            assert!(a.link.try_reserve(3).unwrap().is_some());
            a.send(&[1; 5]);
            b.send(&[2; 7]);
            assert_eq!(a.receive().unwrap().len(), 7);
            let heads: Vec<_> =
                observed.lock().unwrap().iter().map(|&(direction, _, bytes)| (direction, bytes)).collect();
            assert_eq!(
                heads,
                [(FrameDirection::Out, 10), (FrameDirection::Out, 5), (FrameDirection::In, 7)],
                "{fabric}"
            );
        }
    });
}

#[test]
fn one_bit_of_one_long_payload_is_flipped() {
    let (mut a, b) = pair("loopback");
    let mut b = Faulty::new(b.link, Faults { seed: 3, flipped_from_bytes: Some(100), ..Faults::default() });
    for (len, flipped) in [(8, 0), (100, 1), (200, 0)] {
        a.send(&vec![0x5a; len]);
        // The payload stays the same until it is released.
        for _ in 0..2 {
            let frame = b.peek().unwrap().unwrap();
            let bits: u32 = frame.payload.iter().map(|byte| (byte ^ 0x5a).count_ones()).sum();
            assert_eq!((frame.payload.len(), bits), (len, flipped));
        }
        b.release();
    }
}

#[test]
fn a_sleep_of_weeks_is_a_sleep() {
    within_limit(|| {
        let poller = Arc::new(Poller::new().unwrap());
        // Takes the events that were there when the descriptor was added.
        poller.wait(Some(Duration::ZERO)).unwrap();
        let (waker, is_woken) = (poller.waker(), Arc::new(AtomicBool::new(false)));
        for weeks in [1, 10, 1000, u64::MAX / (7 * 24 * 3600)] {
            is_woken.store(false, Ordering::SeqCst);
            let (waker, woken) = (Arc::clone(&waker), Arc::clone(&is_woken));
            let thread = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                woken.store(true, Ordering::SeqCst);
                waker.wake();
            });
            // A few early returns are allowed.
            let mut sleeps = 0;
            while !is_woken.load(Ordering::SeqCst) {
                poller.wait(Some(Duration::from_secs(weeks * 7 * 24 * 3600))).unwrap();
                sleeps += 1;
            }
            assert!(sleeps < 10, "{sleeps} sleeps of {weeks} weeks");
            thread.join().unwrap();
        }
    });
}

/// Takes the slots that were posted.
fn posted(node: &Node) -> Vec<Slot> {
    let mut slots = Vec::new();
    node.bitmap.take(&mut |slot| slots.push(slot));
    slots
}

#[test]
fn what_comes_on_an_armed_link_is_posted_and_wakes_only_who_listens() {
    for kind in ["shm", "shm in small rings", "loopback"] {
        within_limit(move || {
            let (mut a, mut b) = pair(kind);
            let slot = a.slot.expect("its news are posted");
            // No thread sleeps: the event is on the bitmap, and no system call was made for it.
            assert!(!a.link.arm(false), "{kind}");
            a.poller.poll().unwrap();
            posted(&a);
            let before = a.link.system_calls() + b.link.system_calls();
            b.send(b"meanwhile");
            assert_eq!(posted(&a), [slot], "{kind}");
            assert_eq!(a.link.system_calls() + b.link.system_calls(), before, "{kind} woke no thread");
            // Later frames are not posted: the receiver has its event and polls.
            b.send(b"and this");
            assert_eq!(posted(&a), [], "{kind}");
            assert!(a.link.arm(false), "{kind}: there is something");
            for frame in [&b"meanwhile"[..], b"and this"] {
                assert_eq!(a.try_receive().unwrap().unwrap(), frame, "{kind}");
            }
            // A listening process is woken.
            a.link.disarm();
            assert!(!a.link.arm(false) && !a.bitmap.listen(), "{kind}");
            let sender = std::thread::spawn(move || {
                b.send(b"later");
                b
            });
            let before = Instant::now();
            while a.link.peek().unwrap().is_none() {
                a.poller.wait(Some(Duration::from_secs(15))).unwrap();
                assert!(before.elapsed() < Duration::from_secs(10), "no peer woke {kind}");
            }
            a.link.release();
            a.link.disarm();
            a.bitmap.mute();
            assert_eq!(posted(&a), [slot], "{kind}");
            // If room is wanted, it is posted, too.
            let mut b = sender.join().unwrap();
            let frame = vec![1; a.link.max_payload_bytes()];
            while a.try_send(&frame).unwrap() {}
            assert!(!a.link.arm(true), "{kind}");
            b.receive().unwrap();
            assert_eq!(posted(&a), [slot], "{kind} says nothing of room");
            // Room that is not wanted is not posted.
            while a.try_send(&frame).unwrap() {}
            a.link.disarm();
            assert!(!a.link.arm(false), "{kind}");
            b.receive().unwrap();
            assert_eq!(posted(&a), [], "{kind}");
        });
    }
}

#[test]
fn the_end_of_a_peer_is_posted_by_the_thread_that_polls_the_system() {
    for_every_kind(|kind, mut a, b| {
        // A link whose events are not posted is polled again and again.
        let Some(slot) = a.slot.filter(|_| kind != "loopback") else { return };
        assert!(!a.link.arm(false), "{kind}");
        a.poller.poll().unwrap();
        posted(&a);
        drop(b);
        let before = Instant::now();
        while !posted(&a).contains(&slot) {
            a.poller.wait(Some(Duration::from_millis(100))).unwrap();
            assert!(before.elapsed() < Duration::from_secs(10), "{kind}: no thread posts the end");
        }
    });
}

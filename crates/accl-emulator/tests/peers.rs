//! Peers of other processes that are late, stop or go away are found, named, and waited for with a bounded memory.

#[path = "common/host.rs"]
mod host;

use std::io::Read;
use std::process::Stdio;

use accl_cclo::call::{ConfigFunction, Descriptor, Operation};
use accl_cclo::memory_map::{Communicator, RankEntry};
use accl_cclo::return_code::ReturnCode;
use host::{
    Emulators, Host, Setup, call, free_ports, hosts, ports, resident_bytes, run, signal, start, start_with, sum, words,
};

/// Bits with which calls end that wait for a peer that has gone, and that cannot let packets in.
const NOT_HEARD: ReturnCode = ReturnCode(1 << 11);
const NOT_SENT: ReturnCode = ReturnCode(1 << 20);

#[test]
fn a_peer_that_stops_in_mid_call_holds_up_its_sender_and_no_memory() {
    const BYTES: u32 = 32 << 20;
    // What sockets hold is not the process's. Messages of this size would be many times more.
    const MOST_GROWTH: u64 = 8 << 20;
    for comms in ["udp", "cyt_rdma"] {
        let port = free_ports(8);
        let one = |rank| start(&words(&format!("-s 2 -r {rank} -p {port} -c {comms}")));
        let emulators = Emulators(vec![one(0), one(1)]);
        run(async {
            let setup = Setup { max_rendezvous: 64 << 10, memory: BYTES, ..Setup::default() };
            let mut hosts = hosts(&ports(port, 2), &setup).await;
            let at = u64::from(setup.buffers());
            let marks = [0, 12_345_678, BYTES - 3].map(|behind| at + u64::from(behind));
            for mark in marks {
                hosts[0].0.write(mark, vec![7, 8, 9]).await;
            }
            let before = resident_bytes(&emulators.0[0]);
            // The receiver says its address before it stops.
            for rank in [1, 0] {
                let (host, places) = &mut hosts[rank];
                if rank == 0 {
                    signal(&emulators.0[1], "STOP");
                }
                host.begin(Descriptor { first: at, ..call(Operation::Broadcast, places, BYTES / 4) }).await;
            }
            let outbound = hosts[0].1.communicator + 4 * (Communicator::entry_at(1) as u32 + 3);
            let mut last = (u32::MAX, 0);
            while last.1 < 300 {
                let now = hosts[0].0.register(outbound).await;
                last = if now == last.0 { (now, last.1 + 1) } else { (now, 0) };
            }
            let growth = resident_bytes(&emulators.0[0]).saturating_sub(before);
            assert!(growth < MOST_GROWTH, "{comms}: {growth} bytes more with message {}", last.0);
            signal(&emulators.0[1], "CONT");
            for (host, _) in &mut hosts {
                host.end_well().await;
            }
            for mark in marks {
                assert_eq!(hosts[1].0.read(mark, 3).await, [7, 8, 9], "{comms}");
            }
            assert_eq!(hosts[1].0.read(at + 4, 8).await, [0; 8]);
        });
    }
}

#[test]
fn a_call_that_waits_for_a_peer_that_is_killed_ends_with_an_error() {
    let port = free_ports(12);
    let one = |rank| start_with(&words(&format!("-s 3 -r {rank} -p {port} -c tcp")), Stdio::null());
    let mut emulators = Emulators(vec![one(0), one(1), one(2)]);
    run(async {
        let mut hosts = hosts(&ports(port, 3), &Setup::default()).await;
        sum(&mut hosts, 300).await;
        let (survivors, _) = hosts.split_at_mut(2);
        for (host, places) in &mut *survivors {
            host.begin(Descriptor { first: 1 << 20, result: 1 << 20, ..call(Operation::AllReduce, places, 300) }).await;
        }
        emulators.0[2].kill().unwrap();
        for (host, _) in &mut *survivors {
            assert_eq!(host.end().await, NOT_HEARD);
            let about = host.about().await;
            assert_eq!((about.missing, about.trouble.as_str()), (vec![2], "rank 2 has gone"));
        }
        // Another one in its place is a peer like the first.
        emulators.0.push(one(2));
        let mut again = host::hosts(&ports(port, 3), &Setup::default()).await;
        sum(&mut again, 300).await;
        assert_eq!(again[0].0.about().await.trouble, "");
    });
}

#[test]
fn ranks_whose_emulators_are_not_there_are_named_and_the_call_ends() {
    let port = free_ports(12);
    let one = |rank| start_with(&words(&format!("-s 3 -r {rank} -p {port} --peer-timeout 1")), Stdio::piped());
    let mut emulators = Emulators(vec![one(0), one(1)]);
    run(async {
        let mut host = Host::connect(port).await;
        host.lay_out(0, 3, &Setup::default()).await;
        host.begin(Descriptor::config(ConfigFunction::EnablePackets, 0)).await;
        assert_eq!(host.end().await, NOT_SENT);
        let about = host.about().await;
        assert_eq!(about.missing, [2]);
        assert_eq!(
            about.trouble,
            "rank 0: packets cannot be let in after 1 s, because the emulators of these ranks do not listen: 2; start them, or correct --hosts"
        );
        emulators.0.push(one(2));
        sum(&mut hosts(&ports(port, 3), &Setup::default()).await, 300).await;
        assert_eq!(host.about().await.trouble, "");
        emulators.0[0].kill().unwrap();
        let mut said = String::new();
        emulators.0[0].stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(said.contains(&about.trouble), "{said}");
    });
}

#[test]
fn a_communicator_of_ranks_that_there_are_not_holds_up_nobody_else() {
    let port = free_ports(8);
    let _emulators = Emulators(vec![start(&words(&format!("--ranks 2 --port {port} --comms udp")))]);
    run(async {
        let mut hosts = hosts(&ports(port, 2), &Setup { memory: 16 << 20, ..Setup::default() }).await;
        let (host, places) = &mut hosts[0];
        let entry = |session| RankEntry::new([127, 0, 0, 1].into(), 5500, session, 1024);
        let communicator = Communicator { local: 0, ranks: vec![entry(0), entry(77)] };
        for (word, at) in communicator.to_words().into_iter().zip((0x1000..).step_by(4)) {
            host.good(&accl_cclo::control::Request::WriteRegister { offset: at, value: word }).await;
        }
        let places = host::Places { communicator: 0x1000, ..*places };
        host.begin(Descriptor { root: 1, tag: 3, first: 1 << 18, ..call(Operation::Send, &places, 2 << 20) }).await;
        host.end_well().await;
        sum(&mut hosts, 300).await;
    });
}

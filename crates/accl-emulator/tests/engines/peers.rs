//! Tests of peers in other processes that are late, stop or disconnect: they are detected, named, and waited for with bounded memory.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::host::{
    self, Emulators, Host, PATIENCE, Setup, call, free_ports, hosts, ports, resident_bytes, run, signal, start,
    start_with, sum, words,
};
use accl_cclo::call::{ConfigFunction, Descriptor, Operation};
use accl_cclo::memory_map::{Communicator, RankEntry};
use accl_cclo::return_code::ReturnCode;
use accl_cclo::zmtp;

/// Return codes of calls that wait for a disconnected peer, and of calls that cannot let packets in.
const PEER_LOST: ReturnCode = ReturnCode(1 << 11);
const NOT_SENT: ReturnCode = ReturnCode(1 << 20);

#[test]
fn a_peer_that_stops_in_mid_call_holds_up_its_sender_and_no_memory() {
    const BYTES: u32 = 32 << 20;
    // Buffers of sockets do not count as memory of the process. Unlimited queues of this data would take many times more.
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
            // The receiver announces its address before it stops.
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
            assert_eq!(host.end().await, PEER_LOST);
            let about = host.about().await;
            assert_eq!((about.missing, about.trouble.as_str()), (vec![2], "rank 2 disconnected"));
        }
        // A new process in its place is a full peer.
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
            "rank 0: cannot enable packets: after 1 s, the emulators of these ranks are missing: 2; start them, or correct --hosts"
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
fn a_communicator_of_missing_ranks_delays_no_other_call() {
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

/// Exchanges greetings and READY commands on a ZeroMQ connection.
fn greeted(mut stream: TcpStream, ready: &[u8]) -> TcpStream {
    stream.write_all(&zmtp::greeting()).unwrap();
    stream.read_exact(&mut [0; zmtp::GREETING_BYTES]).unwrap();
    stream.write_all(ready).unwrap();
    let mut head = [0; 2];
    stream.read_exact(&mut head).unwrap();
    stream.read_exact(&mut vec![0; usize::from(head[1])]).unwrap();
    stream
}

/// Subscribes to packets, as this rank of an emulator or without a rank.
fn subscriber(port: u16, rank: Option<u32>, topic: &str) -> TcpStream {
    let ready = rank.map_or_else(|| zmtp::ready(b"SUB"), |rank| zmtp::ready_of_rank(b"SUB", rank));
    let mut stream = greeted(TcpStream::connect(("127.0.0.1", port)).unwrap(), &ready);
    stream.write_all(&zmtp::frame(0, &[b"\x01", topic.as_bytes()].concat())).unwrap();
    stream
}

/// Waits until a rank reports exactly these ranks as missing.
async fn await_missing(host: &mut Host, missing: &[u32]) {
    let begin = Instant::now();
    loop {
        let now = host.about().await.missing;
        if now == missing {
            return;
        }
        assert!(begin.elapsed() < PATIENCE, "{now:?} are missing");
    }
}

#[test]
fn an_outside_subscriber_is_not_mistaken_for_a_missing_rank() {
    let port = free_ports(8);
    let _emulators = Emulators(vec![start(&words(&format!("-s 2 -r 0 -p {port} --peer-timeout 1")))]);
    let [_all, _digit, _exact] = ["", "1", "0001"].map(|topic| subscriber(port + 2, None, topic));
    run(async {
        let mut host = Host::connect(port).await;
        host.lay_out(0, 2, &Setup::default()).await;
        host.begin(Descriptor::config(ConfigFunction::EnablePackets, 0)).await;
        assert_eq!(host.end().await, NOT_SENT);
        assert_eq!(host.about().await.missing, [1]);
    });
}

#[test]
fn a_peer_is_connected_while_both_are_subscribed_in_any_order_of_connections() {
    let port = free_ports(8);
    let wire = TcpListener::bind(("127.0.0.1", port + 3)).unwrap();
    let _emulators = Emulators(vec![start(&words(&format!("-s 2 -r 0 -p {port}")))]);
    let publishes = || greeted(wire.accept().unwrap().0, &zmtp::ready(b"PUB"));
    let listens = || subscriber(port + 2, Some(1), "0001");
    run(async {
        let mut host = Host::connect(port).await;
        let [first, publisher] = [listens(), publishes()];
        await_missing(&mut host, &[]).await;
        // The peer was restarted, and connects again before the end of its previous connection is known.
        let second = listens();
        drop(publisher);
        await_missing(&mut host, &[1]).await;
        let publisher = publishes();
        await_missing(&mut host, &[]).await;
        drop(first);
        tokio::time::sleep(Duration::from_millis(50)).await;
        await_missing(&mut host, &[]).await;
        // Only one direction breaks.
        drop(second);
        await_missing(&mut host, &[1]).await;
        let _second = listens();
        await_missing(&mut host, &[]).await;
        drop(publisher);
    });
}

#[test]
fn a_subscriber_that_reads_nothing_delays_the_ranks_for_some_seconds_at_most() {
    const BYTES: u32 = 8 << 20;
    let port = free_ports(8);
    let one = |rank| start_with(&words(&format!("-s 2 -r {rank} -p {port} -c udp")), Stdio::piped());
    let mut emulators = Emulators(vec![one(0), one(1)]);
    let stuck = ["", "0", "0001"].map(|topic| subscriber(port + 2, None, topic));
    run(async {
        let setup = Setup { memory: BYTES, ..Setup::default() };
        let mut hosts = hosts(&ports(port, 2), &setup).await;
        let at = u64::from(setup.buffers());
        hosts[0].0.write(at + u64::from(BYTES) - 3, vec![7, 8, 9]).await;
        for (host, places) in &mut hosts {
            host.begin(Descriptor { first: at, ..call(Operation::Broadcast, places, BYTES / 4) }).await;
        }
        for (host, _) in &mut hosts {
            host.end_well().await;
        }
        assert_eq!(hosts[1].0.read(at + u64::from(BYTES) - 3, 3).await, [7, 8, 9]);
    });
    for mut stuck in stuck {
        stuck.set_read_timeout(Some(PATIENCE)).unwrap();
        // The end of the stream, after the data that was in flight.
        match stuck.read_to_end(&mut Vec::new()) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }
    emulators.0[0].kill().unwrap();
    let mut said = String::new();
    emulators.0[0].stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(
        said.contains("is disconnected: it reads too slowly; a subscriber without a rank may delay packets for 5 s"),
        "{said}"
    );
}

#[test]
fn hosts_that_say_nothing_of_jobs_are_understood_after_a_job_that_did() {
    let port = free_ports(8);
    let one = |rank| start(&words(&format!("-s 2 -r {rank} -p {port} -c udp")));
    let mut emulators = Emulators(vec![one(0), one(1)]);
    run(async {
        let mut owner = Host::connect(port).await;
        owner.good(&accl_cclo::control::Request::Claim { owner: "a job".to_owned(), job: 7 }).await;
        owner.set_up(0, 2, &Setup::default()).await;
        owner.configure(ConfigFunction::Reset, 0).await;
        drop(owner);
        let mut host = Host::connect(port).await;
        let begin = Instant::now();
        while !host.about().await.owner.is_empty() {
            assert!(begin.elapsed() < PATIENCE);
        }
        emulators.0[1].kill().unwrap();
        emulators.0[1].wait().unwrap();
        emulators.0[1] = one(1);
        await_missing(&mut host, &[]).await;
        // Sets up like the original's driver, which resets only an engine that is set up.
        let mut hosts = Vec::new();
        for (rank, mut host) in [(0, host), (1, Host::connect(port + 1).await)] {
            let places = host.write_tables(rank, 2, &Setup::default()).await;
            host.configure(ConfigFunction::EnablePackets, 0).await;
            hosts.push((host, places));
        }
        sum(&mut hosts, 300).await;
    });
}

#[test]
fn a_connection_that_a_crashed_host_has_left_holds_up_no_packets_for_its_successor() {
    const BYTES: u32 = 8 << 20;
    let port = free_ports(8);
    let one = |rank| start_with(&words(&format!("-s 2 -r {rank} -p {port} -c udp")), Stdio::null());
    let mut emulators = Emulators(vec![one(0)]);
    // Connection of rank 1 from before its host lost power: nothing is ever read from it, and nothing closes it.
    let _left = subscriber(port + 2, Some(1), "0001");
    emulators.0.push(one(1));
    run(async {
        let setup = Setup { memory: BYTES, ..Setup::default() };
        let mut hosts = hosts(&ports(port, 2), &setup).await;
        let at = u64::from(setup.buffers());
        for (host, places) in &mut hosts {
            host.begin(Descriptor { first: at, ..call(Operation::Broadcast, places, BYTES / 4) }).await;
        }
        for (host, _) in &mut hosts {
            host.end_well().await;
        }
    });
}

//! How an endpoint reaches its peers, and which disturbances it tolerates.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use accl_transport::{Endpoint, Poller, Settings, Watched};
use accl_types::ErrorKind;
use accl_types::config::IfnameFilter;
use accl_wire::{EndpointInfo, Link, PROTOCOL_VERSION};
use common::{Host, connected, deadline, settings, within_limit};
use proptest::prelude::*;
use rustix::process::{Resource, Rlimit};

/// Well before the deadline of a connection.
const SOON: Duration = Duration::from_secs(10);
const BOTH: &[&str] = &["shm", "tcp"];

/// Returns the side that connects, then the side that accepts.
fn caller_and_callee(settings: &Settings) -> (Host, Host) {
    let (a, b) = (Host::new(settings.clone()), Host::new(settings.clone()));
    if a.info().uuid < b.info().uuid { (a, b) } else { (b, a) }
}

/// Connects the caller with the given `info`, and the callee in its thread.
fn connect_by(mut caller: Host, mut callee: Host, info: &EndpointInfo) -> Box<dyn Watched> {
    let caller_info = caller.info();
    let thread = std::thread::spawn(move || {
        let links = callee.connect(&[caller_info]).unwrap();
        (callee, links)
    });
    let link = caller.connect(std::slice::from_ref(info)).unwrap().remove(0);
    thread.join().unwrap();
    link
}

fn on_host(name: &str, transports: &[&str]) -> Settings {
    Settings { host_id: Some(name.to_owned()), ..settings(transports) }
}

fn is_loopback(link: &dyn Link) -> bool {
    link.describe().contains("127.0.0.1") || link.describe().contains("[::1]")
}

#[test]
fn one_host_shares_memory_and_two_hosts_use_tcp_without_loopback() {
    within_limit(|| {
        let (a, b) = connected(settings(BOTH), settings(BOTH));
        assert_eq!((a.link.transport(), b.link.transport()), ("shm", "shm"));
        assert!(a.warnings.is_empty() && b.warnings.is_empty());

        let outside = Host::new(settings(BOTH)).info().addresses.iter().any(|a| !a.ip().is_loopback());
        if !outside {
            println!("skipped the second half: this machine has loopback addresses only");
            return;
        }
        let (a, b) = connected(on_host("left", BOTH), on_host("right", BOTH));
        for node in [&a, &b] {
            assert_eq!(node.link.transport(), "tcp");
            assert!(!is_loopback(&*node.link), "{}", node.link.describe());
            assert!(node.warnings.is_empty(), "what was never possible is no fallback");
        }
    });
}

#[test]
fn the_order_of_transports_is_that_of_the_settings() {
    within_limit(|| {
        let (a, _) = connected(settings(&["tcp", "shm"]), settings(&["tcp", "shm"]));
        assert_eq!(a.link.transport(), "tcp");
    });
}

#[test]
fn without_memory_tcp_is_used_and_one_warning_says_so() {
    within_limit(|| {
        let none = Settings { shm_limit: 0, ..settings(BOTH) };
        let mut hosts: Vec<Host> = (0..3).map(|_| Host::new(none.clone())).collect();
        hosts.sort_by_key(|host| host.info().uuid);
        let infos: Vec<EndpointInfo> = hosts.iter().map(Host::info).collect();
        let threads: Vec<_> = hosts
            .into_iter()
            .map(|mut host| {
                let others: Vec<_> = infos.iter().filter(|c| c.uuid != host.info().uuid).cloned().collect();
                std::thread::spawn(move || {
                    let links = host.connect(&others).unwrap();
                    assert!(links.iter().all(|link| link.transport() == "tcp"));
                    (host.endpoint.take_warnings(), links)
                })
            })
            .collect();
        // The links live until all hosts are connected: a link that is dropped earlier counts as gone.
        let (warnings, _links): (Vec<_>, Vec<_>) = threads.into_iter().map(|t| t.join().unwrap()).unzip();
        // The first host connects to two others, and warns once.
        assert_eq!(warnings[0].len(), 1, "{warnings:?}");
        assert!(warnings[0][0].contains("ACCL_SHM_LIMIT allows 0 bytes"), "{warnings:?}");
        assert!(warnings[2].is_empty(), "the last is only called: {warnings:?}");
    });
}

#[test]
fn rings_shrink_before_tcp_is_used() {
    within_limit(|| {
        let tight = Settings { shm_limit: 1 << 20, ..settings(BOTH) };
        let (mut a, mut b) = connected(tight.clone(), tight);
        assert_eq!(a.link.transport(), "shm");
        assert!(!a.link.describe().contains("1024 KiB"), "{}", a.link.describe());
        let warnings = [&a.warnings[..], &b.warnings[..]].concat();
        assert!(warnings.len() == 1 && warnings[0].contains("instead of ACCL_RING_BYTES"), "{warnings:?}");
        let longest = vec![9; a.link.max_payload_bytes()];
        a.send(&longest);
        assert_eq!(b.receive().unwrap(), longest);
    });
}

#[test]
fn memory_that_was_given_back_is_used_again() {
    within_limit(|| {
        let tight = Settings { shm_limit: 3 << 20, ..settings(BOTH) };
        let (mut caller, mut callee) = caller_and_callee(&tight);
        for round in 0..3 {
            let (info, back) = (callee.info(), caller.info());
            let thread = std::thread::spawn(move || {
                let links = callee.connect(&[back]).unwrap();
                (callee, links)
            });
            let links = caller.connect(&[info]).unwrap();
            callee = thread.join().unwrap().0;
            assert!(links[0].describe().contains("1024 KiB"), "round {round}: {}", links[0].describe());
        }
    });
}

#[test]
fn what_cannot_be_is_an_error_that_says_why() {
    within_limit(|| {
        let (mut caller, callee) = caller_and_callee(&Settings { shm_limit: 0, ..settings(&["shm"]) });
        let soon = Instant::now() + Duration::from_millis(300);
        let error = caller.endpoint.connect(&[callee.info()], soon, &mut || false).err().unwrap();
        assert_eq!(error.error.kind, ErrorKind::Timeout);
        assert!(error.missing[0].why.contains("ACCL_SHM_LIMIT"), "{error:?}");
        assert!(error.error.message.contains("1 of 1 peers") && error.error.message.contains("pid"), "{error:?}");
    });
}

#[test]
fn ipv6_alone_will_do() {
    within_limit(|| {
        let (caller, callee) = caller_and_callee(&settings(&["tcp"]));
        let mut info = callee.info();
        info.addresses.retain(SocketAddr::is_ipv6);
        if info.addresses.is_empty() {
            println!("skipped: this machine has no IPv6 address");
            return;
        }
        let link = connect_by(caller, callee, &info);
        assert!(link.describe().contains("]:"), "{}", link.describe());
    });
}

#[test]
fn addresses_that_lead_nowhere_or_to_others_are_passed_over() {
    within_limit(|| {
        let (caller, callee) = caller_and_callee(&settings(&["tcp"]));
        let (other, done) = (Host::new(settings(&["tcp"])), Arc::new(AtomicBool::new(false)));
        let loopback = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let refused = TcpListener::bind(loopback(0)).unwrap().local_addr().unwrap();
        // Only the kernel's queue accepts connections; no data is ever sent.
        let silent = TcpListener::bind(loopback(0)).unwrap();
        let rude = TcpListener::bind(loopback(0)).unwrap();
        let rude_address = rude.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = rude.accept().unwrap();
            let _ = stream.write_all(&b"HTTP/1.1 400 Bad Request\r\n".repeat(20));
            let _ = stream.read(&mut [0; 1]);
        });
        let unreachable: SocketAddr = "198.51.100.1:9".parse().unwrap();
        let other_port = other.info().addresses[0].port();
        let other_thread = {
            // Replies to every connection, and must refuse this one because it is meant for another process.
            let (mut other, done) = (other, Arc::clone(&done));
            std::thread::spawn(move || {
                let stranger = EndpointInfo { uuid: [0; 16], ..other.info() };
                let mut until_done = || done.load(Ordering::Relaxed);
                assert!(other.endpoint.connect(&[stranger], deadline(), &mut until_done).is_err());
            })
        };
        let mut info = callee.info();
        let right = loopback(info.addresses[0].port());
        info.addresses =
            vec![unreachable, refused, rude_address, loopback(other_port), silent.local_addr().unwrap(), right];
        let link = connect_by(caller, callee, &info);
        assert!(link.describe().contains(&right.to_string()), "{}", link.describe());
        done.store(true, Ordering::Relaxed);
        other_thread.join().unwrap();
    });
}

/// A caller that connects in several short calls succeeds even if one attempt takes longer than a call.
#[test]
fn efforts_to_reach_a_peer_go_on_from_call_to_call() {
    within_limit(|| {
        let (mut caller, mut callee) = caller_and_callee(&settings(&["tcp"]));
        // Only the kernel's queue accepts connections; no data is ever sent.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut info = callee.info();
        info.addresses.insert(0, silent.local_addr().unwrap());
        let caller_info = caller.info();
        let thread = std::thread::spawn(move || callee.connect(&[caller_info]).unwrap());
        let end = deadline();
        let links = loop {
            let slice = Instant::now() + Duration::from_millis(100);
            match caller.endpoint.connect(std::slice::from_ref(&info), slice, &mut || false) {
                Ok(links) => break links,
                Err(failed) => assert!(Instant::now() < end, "{:?}", failed.missing),
            }
        };
        assert!(!links[0].describe().contains(&silent.local_addr().unwrap().to_string()));
        thread.join().unwrap();
    });
}

#[test]
fn peers_without_a_common_transport_are_named_at_once() {
    within_limit(|| {
        let (mut a, mut b) = (Host::new(on_host("one", &["shm"])), Host::new(on_host("two", BOTH)));
        let infos = [a.info(), b.info()];
        let began = Instant::now();
        for (host, other) in [(&mut a, &infos[1]), (&mut b, &infos[0])] {
            let failed = host.endpoint.connect(std::slice::from_ref(other), deadline(), &mut || false).map(drop);
            let failed = failed.expect_err("nothing leads there");
            assert_eq!(failed.error.kind, ErrorKind::Configuration);
            assert!(failed.error.message.contains("no common transport reaches it: it uses"), "{}", failed.error);
            assert_eq!(failed.missing.len(), 1);
        }
        assert!(began.elapsed() < SOON);
    });
}

#[test]
fn strangers_at_the_listener_do_not_disturb_connections() {
    within_limit(|| {
        let (caller, callee) = caller_and_callee(&settings(&["tcp"]));
        let address = SocketAddr::from(([127, 0, 0, 1], callee.info().addresses[0].port()));
        let visit = |bytes: &[u8]| {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(bytes).unwrap();
            stream
        };
        let mut visitors = Vec::new();
        for i in 0..100 {
            visitors.push(visit(b""));
            visitors.push(visit(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"));
            visitors.push(visit(&vec![i; 5000]));
            visitors.push(visit(b"\x7faccl>\r\n\x01\0\0\0"));
            drop(visit(b"\x7facc"));
        }
        let info = callee.info();
        let before = Instant::now();
        connect_by(caller, callee, &info);
        assert!(before.elapsed() < SOON, "{:?}", before.elapsed());
    });
}

#[test]
fn a_flood_of_strangers_drops_no_connection_that_was_promised_a_link() {
    within_limit(|| {
        let limit = rustix::process::getrlimit(Resource::Nofile);
        rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
        let (mut caller, mut callee) = caller_and_callee(&settings(&["tcp"]));
        let (info, back) = (callee.info(), caller.info());
        let soon = || Instant::now() + Duration::from_millis(100);
        // The hello is sent, then answered; the caller does not read the answer for now.
        assert!(caller.endpoint.connect(std::slice::from_ref(&info), soon(), &mut || false).is_err());
        assert!(callee.endpoint.connect(std::slice::from_ref(&back), soon(), &mut || false).is_err());
        let address = SocketAddr::from(([127, 0, 0, 1], info.addresses[0].port()));
        let mut strangers: Vec<TcpStream> = (0..1200).map(|_| TcpStream::connect(address).unwrap()).collect();
        strangers[0].set_nonblocking(true).unwrap();
        // More connections than the endpoint keeps: the first of them is dropped.
        let end = deadline();
        while !matches!(strangers[0].read(&mut [0; 1]), Ok(0)) {
            assert!(Instant::now() < end, "no peer was dropped");
            assert!(callee.endpoint.connect(std::slice::from_ref(&back), soon(), &mut || false).is_err());
        }
        let _link = connect_by(caller, callee, &info);
    });
}

#[test]
fn another_version_is_named_before_and_during_the_handshake() {
    within_limit(|| {
        let (mut caller, mut callee) = caller_and_callee(&settings(&["tcp"]));
        let later = EndpointInfo { version: PROTOCOL_VERSION + 1, ..callee.info() };
        let error = caller.connect(&[later]).err().unwrap();
        assert_eq!(error.error.kind, ErrorKind::Mismatch);
        assert!(error.error.message.contains("install the same torch-accl"), "{error:?}");

        let address = SocketAddr::from(([127, 0, 0, 1], callee.info().addresses[0].port()));
        let mut stream = TcpStream::connect(address).unwrap();
        let mut hello = [0; 128];
        hello[..9].copy_from_slice(b"\x7faccl>\r\n\x63");
        stream.write_all(&hello).unwrap();
        let soon = Instant::now() + Duration::from_millis(300);
        assert!(callee.endpoint.connect(&[caller.info()], soon, &mut || false).is_err());
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).unwrap();
        let text = String::from_utf8_lossy(&reply);
        assert!(text.contains(&format!("protocol version {PROTOCOL_VERSION}, this process 99")), "{text:?}");
    });
}

#[test]
fn an_unrequested_connection_is_kept_for_the_call_that_needs_it() {
    within_limit(|| {
        let mut hosts: Vec<Host> = (0..3).map(|_| Host::new(settings(BOTH))).collect();
        // The last host accepts from both others.
        hosts.sort_by_key(|host| host.info().uuid);
        let mut last = hosts.pop().unwrap();
        let mut second = hosts.pop().unwrap();
        let mut first = hosts.pop().unwrap();
        let (info, first_info, second_info) = (last.info(), first.info(), second.info());
        let for_second = info.clone();
        let early = std::thread::spawn(move || {
            let links = second.connect(&[for_second]).unwrap();
            (second, links)
        });
        // `last` asks only for `first`, whose call comes after the unwanted link was made: by then that link is kept.
        let thread = std::thread::spawn(move || {
            let links = last.connect(&[first_info]).unwrap();
            (last, links)
        });
        let (_second, _links) = early.join().unwrap();
        first.connect(&[info]).unwrap();
        let (mut last, _links) = thread.join().unwrap();
        // `second` no longer takes part in a handshake.
        let links = last.connect(&[second_info]).unwrap();
        assert_eq!(links[0].transport(), "shm");
    });
}

#[test]
fn the_missing_are_listed_and_the_links_that_were_made_are_kept() {
    within_limit(|| {
        let (mut caller, mut callee) = caller_and_callee(&settings(BOTH));
        let absent = Host::new(settings(BOTH));
        let infos = [callee.info(), absent.info()];
        let caller_info = caller.info();
        let thread = std::thread::spawn(move || {
            let links = callee.connect(&[caller_info]).unwrap();
            (callee, links)
        });
        let soon = Instant::now() + Duration::from_millis(1500);
        let error = caller.endpoint.connect(&infos, soon, &mut || false).err().unwrap();
        let (_callee, mut links) = thread.join().unwrap();
        assert_eq!(error.missing.iter().map(|m| m.index).collect::<Vec<_>>(), [1]);
        assert_eq!(error.error.kind, ErrorKind::Timeout);
        let again = caller.connect(&infos[..1]).unwrap();
        assert!(links[0].check_peer().is_ok() && again[0].transport() == "shm");
    });
}

#[test]
fn a_peer_that_went_away_while_kept_is_connected_again() {
    within_limit(|| {
        let (mut caller, mut callee) = caller_and_callee(&settings(BOTH));
        let absent = Host::new(settings(BOTH));
        for round in 0..3 {
            // Both sides keep a link that they did not get, because the call failed for another peer.
            let infos = [callee.info(), absent.info()];
            let back = [caller.info(), absent.info()];
            let soon = Instant::now() + Duration::from_millis(700);
            let thread = std::thread::spawn(move || {
                assert!(callee.endpoint.connect(&back, soon, &mut || false).is_err());
                callee
            });
            assert!(caller.endpoint.connect(&infos, soon, &mut || false).is_err());
            callee = thread.join().unwrap();
            // One of the two takes its link and drops it.
            if round % 2 == 0 {
                drop(caller.connect(&infos[..1]).unwrap());
            } else {
                drop(callee.connect(&[caller.info()]).unwrap());
            }
            let (info, back) = (callee.info(), caller.info());
            let thread = std::thread::spawn(move || {
                let link = callee.connect(&[back]).unwrap().remove(0);
                (callee, link)
            });
            let mut link = caller.connect(&[info]).unwrap().remove(0);
            let (same, mut other) = thread.join().unwrap();
            callee = same;
            assert!(link.check_peer().is_ok() && other.check_peer().is_ok(), "round {round}");
        }
    });
}

#[test]
fn an_interrupt_ends_the_wait() {
    within_limit(|| {
        let (mut host, absent) = (Host::new(settings(BOTH)), Host::new(settings(BOTH)));
        let mut asked = 0;
        let before = Instant::now();
        let mut interrupted = || {
            asked += 1;
            asked == 2
        };
        let error = host.endpoint.connect(&[absent.info()], deadline(), &mut interrupted).err().unwrap();
        assert_eq!(error.error.kind, ErrorKind::Aborted);
        assert!(before.elapsed() < SOON);
    });
}

#[test]
fn many_endpoints_on_two_hosts_all_reach_each_other_and_themselves() {
    within_limit(|| {
        let hosts: Vec<Host> = (0..7).map(|i| Host::new(on_host(["left", "right"][i % 2], BOTH))).collect();
        let infos: Vec<EndpointInfo> = hosts.iter().map(Host::info).collect();
        let threads: Vec<_> = hosts
            .into_iter()
            .enumerate()
            .map(|(me, mut host)| {
                let infos = infos.clone();
                std::thread::spawn(move || {
                    let mut links = host.connect(&infos).unwrap();
                    for (i, link) in links.iter_mut().enumerate() {
                        let expected = if i == me { "loopback" } else { ["shm", "tcp"][(i + me) % 2] };
                        assert_eq!(link.transport(), expected, "{me} to {i}");
                        link.try_reserve(2).unwrap().unwrap().payload.copy_from_slice(&[me as u8, i as u8]);
                        link.commit();
                        link.flush().unwrap();
                    }
                    for (i, link) in links.iter_mut().enumerate() {
                        while link.peek().unwrap().is_none() {
                            std::thread::yield_now();
                        }
                        assert_eq!(link.peek().unwrap().unwrap().payload, [i as u8, me as u8]);
                    }
                    links
                })
            })
            .collect();
        let _links: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
    });
}

#[test]
fn a_filter_without_a_match_and_a_full_port_range_are_refused_by_name() {
    let refused = |settings: Settings| {
        let poller = Poller::new().unwrap();
        Endpoint::new(settings, poller.waker()).unwrap_err()
    };
    let names = IfnameFilter { names: vec!["nosuch".to_owned()], ..IfnameFilter::default() };
    let error = refused(Settings { socket_ifname: names, ..settings(BOTH) });
    assert_eq!(error.kind, ErrorKind::Configuration);
    assert!(error.message.contains("`nosuch`") && error.message.contains("lo"), "{error}");

    let taken = TcpListener::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = refused(Settings { port_range: Some((port, port)), ..settings(BOTH) });
    assert_eq!(error.kind, ErrorKind::Configuration);
    assert!(error.message.contains(&format!("{port}-{port}")), "{error}");
}

#[test]
fn an_accepted_interface_is_the_only_one_offered_and_the_route_to_the_master_comes_first() {
    let names = IfnameFilter { names: vec!["lo".to_owned()], exact: true, exclude: false };
    let info = Host::new(Settings { socket_ifname: names, ..settings(BOTH) }).info();
    assert!(!info.addresses.is_empty() && info.addresses.iter().all(|a| a.ip().is_loopback()), "{info:?}");

    let all = Host::new(settings(BOTH)).info();
    let Some(last) = all.addresses.iter().rfind(|a| !a.ip().is_loopback()) else {
        println!("skipped the second half: this machine has loopback addresses only");
        return;
    };
    let info = Host::new(Settings { master: Some(last.ip()), ..settings(BOTH) }).info();
    assert_eq!(info.addresses[0].ip(), last.ip());
}

#[test]
fn a_peer_that_stands_twice_in_the_list_is_refused() {
    let (mut host, peer) = (Host::new(settings(BOTH)), Host::new(settings(BOTH)));
    let error = host.connect(&[peer.info(), peer.info()]).err().unwrap();
    assert_eq!(error.error.kind, ErrorKind::InvalidArgument);
}

#[test]
fn an_info_from_the_store_is_the_one_that_was_published() {
    let info = Host::new(settings(BOTH)).info();
    assert_eq!(EndpointInfo::from_text(&info.to_text()).unwrap(), info);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_bytes_at_the_listener_keep_a_peer_out(
        visits in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 0..300), 0usize..13), 1..6),
    ) {
        within_limit(move || {
            let (caller, callee) = caller_and_callee(&settings(&["tcp"]));
            let info = callee.info();
            let address = SocketAddr::from(([127, 0, 0, 1], info.addresses[0].port()));
            let _visitors: Vec<TcpStream> = visits
                .iter()
                .map(|(bytes, ours)| {
                    // Some begin like a hello, up to the right version.
                    let mut stream = TcpStream::connect(address).unwrap();
                    let _ = stream.write_all(&b"\x7faccl>\r\n\x01\0\0\0"[..*ours.min(&12)]);
                    let _ = stream.write_all(bytes);
                    stream
                })
                .collect();
            connect_by(caller, callee, &info);
        });
    }
}

//! Links between real processes: death, forks, and limits that only a process of its own can have.
//!
//! The parent runs this same program with the test `child`, which reads its part from standard input.

mod common;

use std::io::{BufRead, BufReader, Lines, Write};
use std::os::fd::AsFd;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use accl_testkit::every_transport;
use accl_transport::{Settings, Watched};
use accl_types::ErrorKind;
use accl_wire::{EndpointInfo, Link};
use common::{Host, Node, frames, settings, within_limit};
use rustix::process::{Resource, Rlimit};

const BOTH: &[&str] = &["shm", "tcp"];

/// A child process that has published its info.
struct Process {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(part: &str) -> Process {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--ignored", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut process = Process { child, lines };
        process.send(part);
        process
    }

    fn send(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Returns the rest of the next line that contains `mark`.
    fn await_line(&mut self, mark: &str) -> String {
        loop {
            let line = self.lines.next().unwrap_or_else(|| panic!("the child ended before `{mark}`")).unwrap();
            // The harness writes `test child ... ` without a line end before the child's first line.
            if let Some((_, rest)) = line.split_once(mark) {
                return rest.trim().to_owned();
            }
        }
    }

    fn info(&mut self) -> EndpointInfo {
        EndpointInfo::from_text(&self.await_line("INFO")).unwrap()
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn node(host: Host, link: Box<dyn Watched>) -> Node {
    Node::new(host.poller.into(), link, Vec::new())
}

/// Plays `part` with a child over `transport`.
fn with_child(part: &str, transport: &str) -> (Node, Process) {
    every_transport();
    let mut process = Process::start(part);
    process.send(transport);
    let mut host = Host::new(settings(&[transport]));
    process.send(&host.info().to_text());
    let info = process.info();
    let link = host.connect(&[info]).unwrap().remove(0);
    (node(host, link), process)
}

// The parts of the child.

/// Returns the next line of standard input; `None` if the parent has gone.
fn listen() -> Option<String> {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    (!line.is_empty()).then(|| line.trim().to_owned())
}

fn say(line: &str) {
    println!("\n{line}");
    std::io::stdout().flush().unwrap();
}

#[test]
#[ignore = "a part of the other tests, which run it in a process of its own"]
fn child() {
    let Some(part) = listen() else {
        println!("skipped: no variable says which part to play");
        return;
    };
    match part.as_str() {
        "echo" => play(|mut node| {
            while let Ok(frame) = node.receive() {
                node.send(&frame);
            }
        }),
        "send and hang" => play(|mut node| {
            for i in 0..5u8 {
                node.send(&[i; 1000]);
            }
            say("SENT");
            listen();
        }),
        "fork and die" => play(fork_and_die),
        "file size limit" => with_little_memory(100 << 10),
        "smaller file size limit" => with_little_memory(1 << 20),
        "no descriptors" => without_descriptors(),
        "low limit" => with_a_low_limit(),
        "stranger" => as_a_stranger(),
        "another user" => as_another_user(),
        "no network" => without_network(),
        "leak check" => count_descriptors(),
        other => panic!("unknown part {other}"),
    }
}

/// Connects to the parent over the transport that the parent names.
fn play(body: impl FnOnce(Node)) {
    every_transport();
    let transport = listen().unwrap();
    let mut host = Host::new(settings(&[&transport]));
    say(&format!("INFO {}", host.info().to_text()));
    let parent = EndpointInfo::from_text(&listen().unwrap()).unwrap();
    let link = host.connect(&[parent]).unwrap().remove(0);
    body(node(host, link));
}

/// Returns a host of this process that connects to the parent's info, because it has the smaller identity.
fn caller_of(parent: &EndpointInfo, settings: &Settings) -> Host {
    loop {
        let host = Host::new(settings.clone());
        if host.info().uuid < parent.uuid {
            return host;
        }
    }
}

fn call_parent_and_report() {
    let parent = EndpointInfo::from_text(&listen().unwrap()).unwrap();
    let mut host = caller_of(&parent, &settings(BOTH));
    say(&format!("INFO {}", host.info().to_text()));
    let link = host.connect(&[parent]).unwrap().remove(0);
    say(&format!("LINK {}", link.describe()));
    say(&format!("WARNINGS {:?}", host.endpoint.take_warnings()));
    listen();
}

fn with_little_memory(bytes: u64) {
    let limit = Rlimit { current: Some(bytes), maximum: None };
    rustix::process::setrlimit(Resource::Fsize, limit).unwrap();
    call_parent_and_report();
}

fn as_another_user() {
    rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65534)).unwrap();
    call_parent_and_report();
}

fn without_descriptors() {
    let parent = EndpointInfo::from_text(&listen().unwrap()).unwrap();
    let mut host = loop {
        let host = Host::new(settings(BOTH));
        if host.info().uuid > parent.uuid {
            break host;
        }
    };
    let mut hoard = Vec::new();
    let limit = Rlimit { current: Some(64), maximum: Some(64) };
    rustix::process::setrlimit(Resource::Nofile, limit).unwrap();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        hoard.push(file);
    }
    say(&format!("INFO {}", host.info().to_text()));
    // The parent is in the queue before this process polls.
    listen();
    let mut warnings = Vec::new();
    let mut error = String::new();
    for _ in 0..3 {
        let soon = Instant::now() + Duration::from_millis(100);
        let failed = host.endpoint.connect(std::slice::from_ref(&parent), soon, &mut || false).err().unwrap();
        error = failed.error.message;
        warnings.extend(host.endpoint.take_warnings());
    }
    say(&format!("ERROR {error}"));
    say(&format!("WARNINGS {} {warnings:?}", warnings.len()));
    drop(hoard);
    let link = host.connect(&[parent]).unwrap().remove(0);
    say(&format!("LINK {}", link.describe()));
    listen();
}

/// Has fewer descriptors than it needs until the soft limit is raised.
fn with_a_low_limit() {
    let parent = EndpointInfo::from_text(&listen().unwrap()).unwrap();
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let mut hosts: Vec<Host> = (0..8).map(|_| Host::new(settings(BOTH))).collect();
    let low = Some(open_descriptors() as u64 + 2);
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: low, maximum: limit.maximum }).unwrap();
    let infos: Vec<String> = hosts.iter().map(|host| host.info().to_text()).collect();
    say(&format!("INFOS {}", infos.join("|")));
    let _links: Vec<_> = hosts.iter_mut().map(|host| host.connect(std::slice::from_ref(&parent)).unwrap()).collect();
    let warnings: Vec<String> = hosts.iter_mut().flat_map(|host| host.endpoint.take_warnings()).collect();
    say(&format!("WARNINGS {warnings:?}"));
    let raised = rustix::process::getrlimit(Resource::Nofile);
    say(&format!("RAISED {}", raised.current == limit.maximum));
    listen();
}

/// Sends descriptors to the parent's socket, as another user.
fn as_a_stranger() {
    let parent = EndpointInfo::from_text(&listen().unwrap()).unwrap();
    rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(65534)).unwrap();
    let (_read, write) = rustix::pipe::pipe().unwrap();
    let socket = {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        let address = SocketAddrUnix::new_abstract_name(parent.unix_name.as_bytes()).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        socket
    };
    let mut hello = b"\x7faccl>\r\n".to_vec();
    hello.extend(accl_wire::PROTOCOL_VERSION.to_le_bytes());
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
    let fds = [write.as_fd()];
    assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&fds)));
    let flags = rustix::net::SendFlags::empty();
    rustix::net::sendmsg(&socket, &[std::io::IoSlice::new(&hello)], &mut control, flags).unwrap();
    say(&format!("SENT {}", rustix::fs::fstat(&write).unwrap().st_ino));
    let mut reply = Vec::new();
    std::io::Read::read_to_end(&mut std::fs::File::from(socket), &mut reply).unwrap_or_default();
    say(&format!("REPLY {}", String::from_utf8_lossy(&reply).replace(['\n', '\r'], " ")));
    listen();
}

fn without_network() {
    // SAFETY: moves this thread into a namespace of its own; no memory is involved.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        say("SKIPPED no permission to make a network namespace");
        return;
    }
    let (mut a, mut b) = (Host::new(settings(BOTH)), Host::new(settings(BOTH)));
    assert!(a.info().addresses.is_empty(), "loopback is down in a new namespace");
    say(&format!("HOST {}", a.info().host_id));
    let (info_a, info_b) = (a.info(), b.info());
    let thread = std::thread::spawn(move || b.connect(&[info_a]).unwrap());
    let links = a.connect(&[info_b]).unwrap();
    say(&format!("LINK {}", links[0].describe()));
    thread.join().unwrap();
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn count_descriptors() {
    every_transport();
    let before = open_descriptors();
    for name in every_transport() {
        let (a, b) = common::connected(settings(&[name]), settings(&[name]));
        say(&format!("USED {}", open_descriptors() - before));
        drop((a, b));
        assert_eq!(open_descriptors(), before, "{name}");
    }
    say("CLEAN");
}

fn fork_and_die(mut node: Node) {
    node.send(b"before");
    let generation = accl_transport::fork_generation();
    assert!(!accl_transport::forked());
    // SAFETY: the child continues with this thread alone. It uses nothing that another thread could have locked, except
    // the allocator, which glibc makes usable in the child.
    if unsafe { libc::fork() } == 0 {
        let kinds: Vec<_> = std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
            .map(|target| target.to_string_lossy().into_owned())
            .filter(|target| ["socket:", "anon_inode:", "memfd:"].iter().any(|kind| target.contains(kind)))
            .collect();
        let refused = node.try_send(b"from the child").is_err()
            && node.link.peek().is_err()
            && node.link.check_peer().is_err()
            && node.link.arm(false);
        node.link.disarm();
        node.link.close();
        let counted = accl_transport::forked() && accl_transport::fork_generation() == generation + 1;
        // New endpoints work here, and dropping the parent's endpoint must not touch their descriptors.
        let mut fresh = (Host::new(settings(&["tcp"])), Host::new(settings(&["tcp"])));
        drop(node);
        let infos = (fresh.0.info(), fresh.1.info());
        let thread = std::thread::spawn(move || fresh.1.connect(&[infos.0]).map_err(|e| eprintln!("{e:?}")).is_ok());
        let connects = fresh.0.connect(&[infos.1]).map_err(|e| eprintln!("{e:?}")).is_ok() && thread.join().unwrap();
        say(&format!("CHILD refused={refused} counted={counted} connects={connects} kept={kinds:?}"));
        // The child outlives its parent, like a data loader does.
        listen();
        // SAFETY: ends the process without running the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    // The parent continues unharmed after the fork.
    let asked = node.receive().unwrap();
    node.send(&asked);
    node.receive().unwrap();
    say("DYING");
    // SAFETY: ends the process like a crash, without closing anything in good order.
    unsafe { libc::_exit(3) };
}

// The tests.

#[test]
fn frames_pass_between_processes_in_order() {
    for transport in every_transport() {
        within_limit(move || {
            let (mut node, process) = with_child("echo", transport);
            let sent = frames(7, 500, node.link.max_payload_bytes());
            // At most one frame is in flight, so that neither side waits for the other to read first.
            for frame in &sent {
                node.send(frame);
                assert!(&node.receive().unwrap() == frame, "{transport}");
            }
            drop((node, process));
        });
    }
}

#[test]
fn a_killed_process_is_noticed_after_what_it_had_sent() {
    for transport in every_transport() {
        within_limit(move || {
            let (mut node, mut process) = with_child("send and hang", transport);
            process.await_line("SENT");
            process.kill();
            for i in 0..5u8 {
                assert_eq!(node.receive().unwrap(), [i; 1000], "{transport}");
            }
            let error = node.receive().unwrap_err();
            assert_eq!(error.kind, ErrorKind::PeerLost);
            assert!(error.message.contains(&format!("pid {}", process.child.id())), "{error}");
        });
    }
}

#[test]
fn a_sleeper_is_woken_by_the_death_of_its_peer() {
    for transport in every_transport() {
        within_limit(move || {
            let (mut node, mut process) = with_child("send and hang", transport);
            for _ in 0..5 {
                node.receive().unwrap();
            }
            let killer = std::thread::spawn(move || process.kill());
            assert_eq!(node.receive().unwrap_err().kind, ErrorKind::PeerLost, "{transport}");
            killer.join().unwrap();
        });
    }
}

#[test]
fn a_forked_child_holds_nothing_and_hides_no_death() {
    for transport in BOTH {
        within_limit(move || {
            let (mut node, mut process) = with_child("fork and die", transport);
            assert_eq!(node.receive().unwrap(), b"before");
            assert_eq!(process.await_line("CHILD"), "refused=true counted=true connects=true kept=[]", "{transport}");
            node.send(b"still there?");
            assert_eq!(node.receive().unwrap(), b"still there?");
            node.send(b"now die");
            process.await_line("DYING");
            // The grandchild is alive and reads our pipe; the death of its parent is detected nevertheless.
            assert_eq!(node.receive().unwrap_err().kind, ErrorKind::PeerLost, "{transport}");
            assert_eq!(process.child.wait().unwrap().code(), Some(3));
        });
    }
}

/// Accepts the connection of a child; returns the child's link and warnings as the child reports them.
fn be_called_by(part: &str) -> (String, String) {
    let mut process = Process::start(part);
    let mut host = Host::new(settings(BOTH));
    process.send(&host.info().to_text());
    let info = process.info();
    let mut node = {
        let link = host.connect(&[info]).unwrap().remove(0);
        node(host, link)
    };
    node.send(&vec![1; node.link.max_payload_bytes()]);
    (process.await_line("LINK"), process.await_line("WARNINGS"))
}

#[test]
fn memory_that_the_system_refuses_leads_to_smaller_rings_and_then_to_tcp() {
    within_limit(|| {
        // A limit on file size has the effect of a kernel without memory, without disturbing the machine.
        let (link, warnings) = be_called_by("smaller file size limit");
        assert!(link.starts_with("shm, ") && !link.contains("1024 KiB"), "{link}");
        assert!(warnings.contains("ulimit -f") && warnings.contains("instead of ACCL_RING_BYTES"), "{warnings}");
        let (link, warnings) = be_called_by("file size limit");
        assert!(link.starts_with("tcp "), "{link}");
        assert!(warnings.contains("ulimit -f") && warnings.contains("tcp is used instead"), "{warnings}");
    });
}

#[test]
fn another_user_is_reached_by_tcp() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can start a process of another user");
        return;
    }
    within_limit(|| {
        let (link, warnings) = be_called_by("another user");
        assert!(link.starts_with("tcp "), "{link}");
        assert_eq!(warnings, "[]");
    });
}

#[test]
fn without_descriptors_the_error_names_the_remedy_and_the_next_attempt_works() {
    within_limit(|| {
        let mut process = Process::start("no descriptors");
        let mut host = Host::new(settings(BOTH));
        process.send(&host.info().to_text());
        let info = process.info();
        let thread = std::thread::spawn(move || {
            let links = host.connect(&[info]).unwrap();
            (host, links)
        });
        process.send("go");
        let error = process.await_line("ERROR");
        assert!(error.contains("ulimit -n") || error.contains("no connection from it yet"), "{error}");
        let warnings = process.await_line("WARNINGS");
        assert!(
            warnings.starts_with("1 ") && warnings.contains("ulimit -Hn"),
            "reported once, with the remedy: {warnings}"
        );
        process.await_line("LINK");
        thread.join().unwrap();
    });
}

#[test]
fn a_low_limit_of_descriptors_is_raised_when_links_need_more() {
    within_limit(|| {
        let mut process = Process::start("low limit");
        let mut host = Host::new(settings(BOTH));
        process.send(&host.info().to_text());
        let infos: Vec<EndpointInfo> =
            process.await_line("INFOS").split('|').map(|text| EndpointInfo::from_text(text).unwrap()).collect();
        let _links = host.connect(&infos).unwrap();
        assert_eq!(process.await_line("WARNINGS"), "[]");
        assert_eq!(process.await_line("RAISED"), "true");
    });
}

#[test]
fn a_stranger_cannot_make_this_process_hold_descriptors() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can start a process of another user");
        return;
    }
    within_limit(|| {
        let mut process = Process::start("stranger");
        let (mut host, absent) = (Host::new(settings(&["shm"])), Host::new(settings(&["shm"])));
        process.send(&host.info().to_text());
        let pipe = format!("pipe:[{}]", process.await_line("SENT"));
        let soon = Instant::now() + Duration::from_millis(300);
        assert!(host.endpoint.connect(&[absent.info()], soon, &mut || false).is_err());
        let held = std::fs::read_dir("/proc/self/fd").unwrap();
        let held = held.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
        assert!(!held.into_iter().any(|target| target.to_string_lossy() == pipe), "{pipe} is open here");
        let reply = process.await_line("REPLY");
        assert!(reply.contains("it belongs to user"), "{reply:?}");
    });
}

#[test]
fn a_namespace_without_network_is_another_host_and_shares_memory_inside() {
    within_limit(|| {
        let mut process = Process::start("no network");
        let mine = Host::new(settings(BOTH)).info().host_id;
        loop {
            let line = process.lines.next().expect("the child says something").unwrap();
            if let Some((_, why)) = line.split_once("SKIPPED") {
                println!("skipped:{why}");
                return;
            }
            if let Some((_, host_id)) = line.split_once("HOST ") {
                assert_ne!(host_id, mine);
                break;
            }
        }
        assert!(process.await_line("LINK").starts_with("shm"));
    });
}

#[test]
fn links_cost_few_descriptors_and_leave_none() {
    within_limit(|| {
        let mut process = Process::start("leak check");
        // Both sides live in the one process. Poller, epoll, event descriptor, bitmap and endpoints are dropped by
        // then.
        for name in every_transport() {
            let used: usize = process.await_line("USED").parse().unwrap();
            let most = 2 * (3 + accl_transport::find(name).unwrap().descriptors);
            assert!(used <= most, "{used} descriptors over {name}");
        }
        process.await_line("CLEAN");
    });
}

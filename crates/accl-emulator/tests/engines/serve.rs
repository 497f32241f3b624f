//! Tests with an ordinary ZeroMQ client, on engines of one process and of several.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::host::{
    self, Emulators, Host, Setup, call, free_ports, hosts, ports, resident_bytes, run, start, start_with, sum, words,
};
use accl_cclo::call::{ConfigFunction, Descriptor, Operation, Streams};
use accl_cclo::control::{About, Reply, Request, Status, data_from_json, data_to_json, difference};
use accl_cclo::memory_map::{self as map, Network};
use accl_cclo::return_code::ReturnCode;
use zeromq::{Socket, SocketRecv, SocketSend, SubSocket, XPubSocket, ZmqMessage};

#[test]
fn ranks_of_one_process_add_for_their_hosts() {
    let port = free_ports(12);
    let _emulators = Emulators(vec![start(&words(&format!("--ranks 3 --port {port} --comms udp")))]);
    run(async { sum(&mut hosts(&ports(port, 3), &Setup::default()).await, 3000).await });
}

#[test]
fn ranks_of_several_processes_add_for_their_hosts() {
    for comms in ["udp", "tcp", "cyt_rdma"] {
        let port = free_ports(8);
        let one = |rank| start(&words(&format!("-s 2 -r {rank} -p {port} -c {comms} -l 3 -b")));
        let _emulators = Emulators(vec![one(0), one(1)]);
        run(async { sum(&mut hosts(&ports(port, 2), &Setup::default()).await, 3000).await });
    }
}

#[test]
fn what_makes_no_sense_is_answered_and_the_next_request_too() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&words(&format!("--port {port}")))]);
    run(async {
        let mut host = Host::connect(port).await;
        for text in ["", "nonsense", "{}", r#"{"type":9}"#, r#"{"type":0}"#, r#"{"type":0,"addr":8192}"#] {
            assert_eq!(host.ask_text(text.to_owned()).await, Reply::Status(Status::Not), "{text}");
        }
        assert_eq!(host.ask(&Request::Poll { control: 3 }).await, Reply::Status(Status::NoControl));
        assert_eq!(host.ask(&Request::Poll { control: 0 }).await, Reply::Status(Status::Not), "no call was started");
        drop(host);
        let mut next = Host::connect(port).await;
        assert_eq!(next.register(8184).await, 0);
    });
}

#[test]
fn calls_whose_words_mean_nothing_end_with_a_return_code_and_not_with_a_refusal() {
    let port = free_ports(8);
    let _emulators = Emulators(vec![start(&words(&format!("--ranks 2 --port {port}")))]);
    run(async {
        let mut hosts = hosts(&ports(port, 2), &Setup::default()).await;
        let (host, _) = &mut hosts[0];
        let nop = Request::Call { control: 0, call: Descriptor::new(Operation::Nop) }.to_json();
        for (name, value) in [("scenario", 14), ("scenario", 254), ("compression_flags", 16), ("stream_flags", 4)] {
            let (before, after) = nop.split_once(&format!("\"{name}\":")).unwrap();
            let after = &after[after.find(',').unwrap()..];
            let text = format!("{before}\"{name}\":{value}{after}");
            assert_eq!(host.ask_text(text.clone()).await, Reply::Status(Status::Good), "{text}");
            assert_eq!(host.end().await, ReturnCode::NOT_IMPLEMENTED, "{text}");
        }
        sum(&mut hosts, 300).await;
    });
}

#[test]
fn missing_control_streams_are_distinguished_from_idle_ones() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&words(&format!("--port {port}")))]);
    run(async {
        let mut host = Host::connect(port).await;
        let nop = Request::Call { control: 0, call: Descriptor::new(Operation::Nop) }.to_json();
        for control in ["-1", "-9223372036854775808", "3", "4294967296"] {
            let poll = format!(r#"{{"type":6,"ctrl_id":{control}}}"#);
            let call = nop.replace(r#""ctrl_id":0"#, &format!(r#""ctrl_id":{control}"#));
            let unknown = call.replace(r#""scenario":255"#, r#""scenario":14"#);
            for text in [poll, call, unknown] {
                assert_eq!(host.ask_text(text.clone()).await, Reply::Status(Status::NoControl), "{text}");
            }
        }
    });
}

#[test]
fn wrong_arguments_are_refused_in_a_sentence() {
    let refused = |text: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_accl-emulator")).args(words(text)).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(refused("-s 2 -r 2"), "accl-emulator: --rank: rank 2 is not below --ranks, which is 2\n");
    assert_eq!(refused("-s 4 -r 2-4"), "accl-emulator: --rank: rank 4 is not below --ranks, which is 4\n");
    for range in ["2-1", "a", "1-", "-1"] {
        let text =
            format!("accl-emulator: --rank: expected a rank or a range of ranks, such as 3 or 4-7, got `{range}`\n");
        assert_eq!(refused(&format!("-s 4 --rank={range}")), text);
    }
    assert!(
        refused("--trace /nowhere/out.jsonl")
            .starts_with("accl-emulator: --trace: /nowhere/out.jsonl cannot be written: ")
    );
    assert_eq!(refused("--faithful 4,14"), "accl-emulator: --faithful: expected numbers from 1 to 13, got `14`\n");
    assert!(refused("--port 0").contains("invalid value '0' for '--port <PORT>'"));
    assert_eq!(refused("--hosts a:0"), "accl-emulator: --hosts: expected HOST:PORT, got port `0`\n");
    assert_eq!(refused("-s 2 --hosts a:1"), "accl-emulator: --hosts names 1 ranks, but --ranks is 2\n");
    assert!(
        refused("--clock fast")
            .starts_with("accl-emulator: --clock: got `fast`; expected a number above zero in Hz, kHz,")
    );
    assert!(refused("--link 100Gbit/s").starts_with("accl-emulator: --link: got `100Gbit/s`; expected a rate above"));
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    assert!(
        refused(&format!("--port {port}"))
            .starts_with(&format!("accl-emulator: rank 0 cannot listen at tcp://127.0.0.1:{port}: "))
    );
}

#[test]
fn emulators_say_what_they_are_whatever_they_keep() {
    let port = free_ports(12);
    let options = format!("--ranks 3 --port {port} --comms cyt_rdma --clock 300MHz --link 25Gbit/s,1us --faithful");
    for (faithful, hazards) in [("=4,10", vec![4, 10]), ("", (1..=13).collect())] {
        let _emulators = Emulators(vec![start(&words(&format!("{options}{faithful}")))]);
        run(async {
            let mut abouts = Vec::new();
            for port in ports(port, 3) {
                abouts.push(Some(Host::connect(port).await.about().await));
            }
            assert_eq!(difference(&abouts), None);
            let process = abouts[0].as_ref().map_or(0, |about| about.process);
            assert!(process != 0);
            let wanted = About {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                ranks: 3,
                rank: 1,
                network: Network::Rdma,
                hazards: hazards.clone(),
                clock_hz: 300_000_000,
                link_bits_per_second: 25_000_000_000,
                hop_ps: 1_000_000,
                missing: vec![],
                trouble: String::new(),
                owner: String::new(),
                owner_s: 0,
                process,
                served: [0, 3],
            };
            assert_eq!(abouts[1], Some(wanted));
        });
    }
}

#[test]
fn fourteen_ranks_in_three_processes_at_ports_of_their_own_add() {
    const RANKS: u16 = 14;
    let all = free_ports(3 * 4 * RANKS);
    let bases = [0, 1, 2].map(|process| all + process * 4 * RANKS);
    let process = |rank: u16| usize::from(rank / 5);
    let hosts_of: Vec<String> = (0..RANKS).map(|rank| format!("127.0.0.1:{}", bases[process(rank)])).collect();
    let one =
        |ranks: &str| start(&words(&format!("--ranks {RANKS} -r {ranks} --comms udp --hosts {}", hosts_of.join(","))));
    let _emulators = Emulators(vec![one("0-4"), one("5-9"), one("10-13")]);
    let ports: Vec<u16> = (0..RANKS).map(|rank| bases[process(rank)] + rank).collect();
    run(async { sum(&mut hosts(&ports, &Setup::default()).await, 1400).await });
}

#[test]
fn blocks_that_no_rx_buffers_hold_get_round_without_a_wait_for_ever() {
    const COUNT: u32 = 200_000;
    const RANKS: u32 = 3;
    for processes in [1, 3] {
        let port = free_ports(12);
        let one = |ranks: &str| start(&words(&format!("-s 3 -r {ranks} -p {port} -c udp")));
        let _emulators = Emulators(if processes == 1 { vec![one("0-2")] } else { vec![one("0"), one("1"), one("2")] });
        run(async {
            let setup = Setup { memory: 8 * COUNT * RANKS, ..Setup::default() };
            let mut hosts = hosts(&ports(port, 3), &setup).await;
            let first = u64::from(setup.buffers());
            let result = first + u64::from(4 * COUNT * RANKS);
            for (rank, (host, _)) in (1u8..).zip(&mut hosts) {
                let data = (0..COUNT * RANKS).flat_map(|_| f32::from(rank).to_le_bytes()).collect();
                host.write(first, data).await;
            }
            for operation in [
                Operation::AllGather,
                Operation::ReduceScatter,
                Operation::AllToAll,
                Operation::Gather,
                Operation::Scatter,
                Operation::Reduce,
                Operation::AllReduce,
            ] {
                for (host, places) in &mut hosts {
                    host.begin(Descriptor { first, second: result, result, ..call(operation, places, COUNT) }).await;
                }
                for (host, _) in &mut hosts {
                    host.end_well().await;
                }
                let blocks: &[f32] = match operation {
                    Operation::AllGather | Operation::AllToAll | Operation::Gather => &[1.0, 2.0, 3.0],
                    Operation::Scatter => &[1.0],
                    _ => &[6.0],
                };
                let bytes = hosts[0].0.read(result, 4 * COUNT * blocks.len() as u32).await;
                let mut wanted = blocks.iter().flat_map(|&block| std::iter::repeat_n(block, COUNT as usize));
                let wrong = bytes.as_chunks().0.iter().position(|&got| Some(f32::from_le_bytes(got)) != wanted.next());
                assert_eq!(wrong, None, "{operation:?} in {processes} processes");
            }
        });
    }
}

/// Returns the next message of a kernel on this stream, or `None` if none arrives within a time limit.
async fn received(kernel: &mut SubSocket, stream: u32, within: Duration) -> Option<Vec<u8>> {
    let frames = tokio::time::timeout(within, kernel.recv()).await.ok()?.unwrap().into_vec();
    assert_eq!(frames[0], stream.to_string().as_bytes());
    data_from_json(&frames[1])
}

#[test]
fn kernels_send_and_receive_and_none_is_too_slow() {
    const STREAM: u32 = 7;
    // Many more messages than the queues have room for.
    const COUNT: u32 = 2 << 20;
    let port = free_ports(8);
    let emulators = Emulators(vec![start(&words(&format!("-s 2 -p {port} -c tcp")))]);
    run(async {
        let mut hosts = hosts(&ports(port, 2), &Setup { memory: 8 * COUNT, ..Setup::default() }).await;
        let first = u64::from(Setup::default().buffers());
        let mark = u64::from(4 * COUNT - 4);
        hosts[0].0.write(first, vec![1, 2, 3, 4]).await;
        hosts[0].0.write(first + mark, vec![5, 6, 7, 8]).await;
        let mut out = SubSocket::new();
        out.connect(&format!("tcp://127.0.0.1:{}", port + 5)).await.unwrap();
        out.subscribe("").await.unwrap();
        let (host, places) = &mut hosts[0];
        let streams = Streams { first: false, result: true };
        let put = |count| Descriptor { root: 1, tag: STREAM, streams, first, ..call(Operation::Send, places, count) };
        // The client cannot know whether its subscription has arrived. Messages sent before that are not delivered to it.
        let mut come = None;
        while come.is_none() {
            host.begin(put(1)).await;
            host.end_well().await;
            come = received(&mut out, STREAM, Duration::from_millis(50)).await;
        }
        assert_eq!(come, Some(vec![1, 2, 3, 4]));
        let before = resident_bytes(&emulators.0[0]);
        host.begin(put(COUNT)).await;
        // The call makes no progress while the kernel does not read.
        let mut quiet = 0;
        let mut ticks = 0;
        while quiet < 200 {
            assert_eq!(
                host.ask(&Request::Poll { control: 0 }).await,
                Reply::Status(Status::Not),
                "it has not all gone"
            );
            let now = resident_bytes(&emulators.0[0]);
            quiet = if now == ticks { quiet + 1 } else { 0 };
            ticks = now;
        }
        assert!(ticks.saturating_sub(before) < 8 << 20, "{} bytes more", ticks - before);
        let mut got: Vec<u8> = Vec::new();
        while got.len() < 4 * COUNT as usize {
            let more = received(&mut out, STREAM, host::PATIENCE).await.expect("the rest");
            got.extend(more);
        }
        host.end_well().await;
        let (mark, len) = (mark as usize, got.len());
        assert_eq!((&got[..4], &got[mark..], len), (&[1, 2, 3, 4][..], &[5, 6, 7, 8][..], 4 * COUNT as usize));
        assert!(got[4..mark].iter().all(|&byte| byte == 0));

        // Now the other direction: a kernel feeds rank 1, which copies the bytes to memory.
        let mut kernel = XPubSocket::new();
        kernel.bind(&format!("tcp://127.0.0.1:{}", port + 7)).await.unwrap();
        tokio::time::timeout(host::PATIENCE, kernel.recv()).await.expect("a subscription").unwrap();
        let (host, places) = &mut hosts[1];
        let streams = Streams { first: true, result: false };
        let result = first + 4096;
        host.begin(Descriptor { streams, result, ..call(Operation::Copy, places, 6) }).await;
        for part in 0..3u8 {
            let mut message = ZmqMessage::from("0");
            message.push_back(data_to_json(&[part; 8]).into());
            kernel.send(message).await.unwrap();
        }
        host.end_well().await;
        let wanted: Vec<u8> = (0..3).flat_map(|part| [part; 8]).collect();
        assert_eq!(host.read(result, 24).await, wanted);
    });
}

#[test]
fn memory_after_a_thousand_calls_is_that_after_ten() {
    const MOST_GROWTH: u64 = 512 << 10;
    for processes in [1, 2] {
        let port = free_ports(8);
        let one = |ranks: &str| start(&words(&format!("-s 2 -r {ranks} --port {port} --comms cyt_rdma")));
        let emulators = Emulators(if processes == 1 { vec![one("0-1")] } else { vec![one("0"), one("1")] });
        run(async {
            let mut hosts = hosts(&ports(port, 2), &Setup { memory: 64 << 10, ..Setup::default() }).await;
            let resident = || emulators.0.iter().map(resident_bytes).max().unwrap();
            let mut after_ten = 0;
            for number in 0..1000 {
                // Alternates between eager and rendezvous.
                let count = if number % 2 == 0 { 100 } else { 5000 };
                for (host, places) in &mut hosts {
                    let at = u64::from(Setup::default().buffers());
                    host.begin(Descriptor {
                        first: at,
                        result: at + 32768,
                        ..call(Operation::AllReduce, places, count)
                    })
                    .await;
                }
                for (host, _) in &mut hosts {
                    host.end_well().await;
                }
                if number == 10 {
                    after_ten = resident();
                }
            }
            let growth = resident().saturating_sub(after_ten);
            assert!(growth < MOST_GROWTH, "{growth} bytes more in {processes} processes");
        });
    }
}

/// Returns the greeting of ZMTP 3.0 without security. `READY` is the command of a REQ socket that follows it.
fn greeting() -> Vec<u8> {
    [&[0xFF, 0, 0, 0, 0, 0, 0, 0, 1, 0x7F, 3, 0][..], b"NULL", &[0; 48]].concat()
}

const READY: &[u8] = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03REQ";

/// Returns the first bytes that a host sends, with this request.
fn first_request(request: &Request) -> Vec<u8> {
    let text = request.to_json();
    [&greeting()[..], READY, &[1, 0, 0, text.len() as u8], text.as_bytes()].concat()
}

#[test]
fn a_host_that_does_not_fetch_its_answer_holds_up_no_other_and_is_disconnected() {
    use std::io::Write;
    const BYTES: u32 = 32 << 20;
    let port = free_ports(4);
    let emulators = Emulators(vec![start_with(&words(&format!("--port {port}")), Stdio::null())]);
    run(async {
        let mut host = Host::connect(port).await;
        host.good(&Request::Allocate { address: 0, bytes: BYTES, is_host: false }).await;
        let before = resident_bytes(&emulators.0[0]);
        let read = Request::ReadMemory { address: 0, bytes: BYTES, is_host: false };
        let mut idle = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        idle.write_all(&first_request(&read)).unwrap();
        let growth = || resident_bytes(&emulators.0[0]).saturating_sub(before);
        let begin = Instant::now();
        while growth() < u64::from(BYTES) {
            assert!(begin.elapsed() < host::PATIENCE, "no answer is on its way");
        }
        for number in 0..100 {
            assert_eq!(host.register(8184).await, 0);
            assert!(Host::is_answered(port, host::PATIENCE).await, "a host that comes later");
            // On a busy machine all of these may take longer than the other host's answer is kept.
            let is_kept = growth() > u64::from(BYTES) / 2;
            assert!(is_kept || number > 0, "others were answered when the answer was given up");
            if !is_kept {
                break;
            }
        }
        // The answer is not kept forever.
        let begin = Instant::now();
        while growth() > u64::from(BYTES) / 2 {
            assert!(begin.elapsed() < host::PATIENCE, "{} bytes are still kept", growth());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(host.register(8184).await, 0);
        let more = Request::ReadMemory { address: 0, bytes: BYTES + 1, is_host: false };
        host.good(&Request::Allocate { address: 0, bytes: 2 * BYTES, is_host: false }).await;
        assert_eq!(host.ask(&more).await, Reply::Status(Status::Not), "answers have a bound");
        assert_eq!(host.read(0, 64).await, [0; 64]);
    });
}

#[test]
fn connections_that_speak_another_language_take_no_rank_away() {
    use std::io::Write;
    let port = free_ports(8);
    let _emulators = Emulators(vec![start_with(&words(&format!("-s 2 --port {port}")), Stdio::null())]);
    let (greeting, ready) = (greeting(), READY);
    for garbage in [
        vec![0; 200],
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        greeting.clone(),
        [&greeting[..], &[0x55; 300]].concat(),
        // Frames of an unknown kind, incomplete frames, and a request without the empty frame before it.
        [&greeting[..], ready, &[0xF8, 1, 0]].concat(),
        [&greeting[..], ready, &[1, 0]].concat(),
        [&greeting[..], ready, &[0, 3, 1, 2, 3]].concat(),
        [&greeting[..], ready, &[1, 0, 0, 3, b'{', b'}', 0xFF]].concat(),
        // Endless frames, all of them empty.
        [&greeting[..], ready, &[1, 0].repeat(100)].concat(),
        // A frame that is longer than any memory.
        [&greeting[..], ready, &[2], &[0xFF; 8]].concat(),
    ] {
        let connections = [port, port + 2].map(|at| {
            let mut stream = std::net::TcpStream::connect(("127.0.0.1", at)).unwrap();
            stream.write_all(&garbage).unwrap();
            stream
        });
        // A client that connects while others are being disconnected may be disconnected as well.
        let begin = Instant::now();
        run(async {
            while !Host::is_answered(port, Duration::from_secs(1)).await {
                assert!(begin.elapsed() < host::PATIENCE, "{garbage:?}");
            }
        });
        drop(connections);
    }
    run(async { sum(&mut hosts(&ports(port, 2), &Setup::default()).await, 300).await });
}

#[test]
fn a_message_of_empty_frames_takes_no_memory() {
    use std::io::Write;
    let port = free_ports(4);
    let emulators = Emulators(vec![start_with(&words(&format!("--port {port}")), Stdio::null())]);
    run(async { assert!(Host::is_answered(port, host::PATIENCE).await) });
    let before = resident_bytes(&emulators.0[0]);
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(&[&greeting()[..], READY].concat()).unwrap();
    let frames = [1, 0].repeat(1 << 20);
    // The emulator disconnects before all frames were sent.
    let begin = Instant::now();
    while stream.write_all(&frames).is_ok() {
        assert!(begin.elapsed() < host::PATIENCE, "it goes on for ever");
    }
    assert!(resident_bytes(&emulators.0[0]).saturating_sub(before) < 4 << 20);
}

#[test]
fn a_host_that_pings_and_reads_nothing_keeps_no_place() {
    use std::io::Write;
    let port = free_ports(4);
    let _emulators = Emulators(vec![start_with(&words(&format!("--port {port}")), Stdio::null())]);
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.write_all(&[&greeting()[..], READY].concat()).unwrap();
    // A ping with a time-to-live and nothing else. The command `PING` has 7 bytes here.
    let pings = b"\x04\x07\x04PING\x00\x00".repeat(1 << 16);
    let begin = Instant::now();
    while stream.write_all(&pings).is_ok() {
        assert!(begin.elapsed() < host::PATIENCE, "it goes on for ever");
    }
}

#[test]
fn a_reset_reports_only_its_own_end_to_its_host_and_dropped_calls_to_others() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&words(&format!("-s 2 --port {port}")))]);
    let poll = Request::Poll { control: 0 };
    let claim = Request::Claim { owner: "a driver".to_owned(), job: 7 };
    run(async {
        // Hosts of the original do not claim an engine. The host that resets it may have claimed it.
        for claims in [false, true] {
            let mut others = hosts(&ports(port, 2), &Setup::default()).await;
            let (host, places) = &mut others[0];
            // One call that has ended but was not polled, and two calls that rank 1 does not start.
            host.begin(call(Operation::Nop, places, 0)).await;
            for _ in 0..2 {
                host.begin(call(Operation::Barrier, places, 0)).await;
            }
            let mut resets = Host::connect(port).await;
            if claims {
                resets.good(&claim).await;
            }
            resets.configure(ConfigFunction::Reset, 0).await;
            host.end_well().await;
            for _ in 0..2 {
                assert_eq!(host.end().await, ReturnCode(1 << 31), "{claims}");
            }
            assert_eq!(host.ask(&poll).await, Reply::Status(Status::Not));
            assert_eq!(resets.ask(&poll).await, Reply::Status(Status::Not));
            assert_eq!(resets.register(map::RETURN_CODE.offset).await, 0);
        }
    });
    run(async {
        // A host that resets its own calls neither waits for them nor receives their ends.
        let mut hosts = hosts(&ports(port, 2), &Setup::default()).await;
        let (host, places) = &mut hosts[0];
        for operation in [Operation::Nop, Operation::Barrier] {
            host.begin(call(operation, places, 0)).await;
        }
        host.configure(ConfigFunction::Reset, 0).await;
        assert_eq!(host.ask(&poll).await, Reply::Status(Status::Not));
    });
}

#[test]
fn a_client_may_ask_for_ends_over_another_connection_than_it_calls_by() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&words(&format!("-s 1 --port {port}")))]);
    run(async {
        let mut hosts = hosts(&ports(port, 1), &Setup::default()).await;
        let (calls, places) = &mut hosts[0];
        let mut asks = Host::connect(port).await;
        for _ in 0..3 {
            calls.begin(call(Operation::Nop, places, 0)).await;
            asks.end_well().await;
        }
        // The end that a disconnected host has left is not taken for the end of a later call.
        calls.begin(call(Operation::Nop, places, 0)).await;
        drop(hosts);
        let mut next = Host::connect(port).await;
        next.configure(ConfigFunction::Reset, 0).await;
        assert_eq!(next.ask(&Request::Poll { control: 0 }).await, Reply::Status(Status::Not));
    });
}

#[test]
fn ends_are_those_of_their_control_stream_and_a_reset_on_none_takes_nothing() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&words(&format!("-s 2 --port {port}")))]);
    run(async {
        let mut hosts = hosts(&ports(port, 2), &Setup::default()).await;
        let (host, places) = &mut hosts[0];
        for control in [0, 1] {
            host.good(&Request::Call { control, call: call(Operation::Barrier, places, 0) }).await;
        }
        let mut other = Host::connect(port).await;
        let reset = |control| Request::Call { control, call: Descriptor::config(ConfigFunction::Reset, 0) };
        assert_eq!(other.ask(&reset(3)).await, Reply::Status(Status::NoControl));
        let poll = |control| Request::Poll { control };
        assert_eq!(host.ask(&poll(0)).await, Reply::Status(Status::Not), "the calls go on");
        other.good(&reset(0)).await;
        for (control, status) in [(9, Status::NoControl), (1, Status::Good), (1, Status::Not), (0, Status::Good)] {
            assert_eq!(host.ask(&poll(control)).await, Reply::Status(status), "{control}");
        }
    });
}

/// Regression test: the owner took the end of a call that another host had left for the end of its own call, which had not ended.
#[test]
fn the_owner_of_a_rank_receives_no_end_that_other_hosts_have_left() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&words(&format!("-s 2 --port {port}")))]);
    let poll = Request::Poll { control: 0 };
    let claim = |name: &str| Request::Claim { owner: name.to_owned(), job: 7 };
    run(async {
        // One host without a claim leaves the end of a successful call. A second host, whose rank was taken, leaves the end of a dropped call. Both
        // stay connected.
        let mut others = hosts(&ports(port, 2), &Setup::default()).await;
        let (host, its_places) = &mut others[0];
        host.begin(call(Operation::Nop, its_places, 0)).await;
        let mut taken = Host::connect(port).await;
        taken.good(&claim("taken")).await;
        let places = taken.set_up(0, 2, &Setup::default()).await;
        taken.begin(call(Operation::Barrier, &places, 0)).await;
        // The host that takes the rank away receives the successful end of its reset, regardless of earlier ends.
        let mut resets = Host::connect(port).await;
        resets.configure(ConfigFunction::Reset, 0).await;
        assert_eq!(resets.ask(&poll).await, Reply::Status(Status::Not));
        assert_eq!(resets.register(map::RETURN_CODE.offset).await, 0);
        assert_eq!(taken.ask(&poll).await, Reply::Status(Status::Taken));
        drop(resets);
        let mut owner = Host::connect(port).await;
        owner.good(&claim("owner")).await;
        let places = owner.set_up(0, 2, &Setup::default()).await;
        owner.begin(call(Operation::Barrier, &places, 0)).await;
        drop(taken);
        let left = others.remove(0);
        drop(left);
        let begin = Instant::now();
        while begin.elapsed() < Duration::from_millis(200) {
            assert_eq!(owner.ask(&poll).await, Reply::Status(Status::Not), "the call goes on");
        }
        owner.configure(ConfigFunction::Reset, 0).await;
    });
}

#[test]
fn uncollected_ends_of_one_client_do_not_block_another() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&words(&format!("-s 1 --port {port} --faithful=9")))]);
    run(async {
        let mut leaves = hosts(&ports(port, 1), &Setup::default()).await;
        for _ in 0..3 {
            let (host, places) = &mut leaves[0];
            host.begin(call(Operation::Nop, places, 0)).await;
        }
        let mut owner = Host::connect(port).await;
        owner.good(&Request::Claim { owner: "owner".to_owned(), job: 7 }).await;
        owner.set_up(0, 1, &Setup::default()).await;
    });
}

//! Tests of the driver over the bus to an emulator: its operations, its speed, and its errors if the emulator is not as expected.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::bus::{PATIENCE, answering, end, opened, start};
use crate::support::process::{Emulators, free_ports, signal_to};
use accl_cclo::bus::{Bus, Memory};
use accl_cclo::buses;
use accl_cclo::call::{Descriptor, Hosts, Operation};
use accl_cclo::device::DeviceUrl;
use accl_cclo::driver::Driver;
use accl_cclo::memory_map::{self as map, DataType, ReduceFunction};

const COUNT: u32 = 1000;
const DESIGNS: [&str; 3] = ["udp", "tcp", "cyt_rdma"];

fn url(text: &str) -> DeviceUrl {
    DeviceUrl::parse(text).unwrap().unwrap()
}

fn value(rank: u32, index: u32) -> i32 {
    (1000 * rank + index) as i32
}

fn bytes(values: impl Iterator<Item = i32>) -> Vec<u8> {
    values.flat_map(i32::to_le_bytes).collect()
}

/// Returns the expected result of an operation on a rank, or `None` if the result is not specified.
fn expected(operation: Operation, ranks: u32, rank: u32, root: u32) -> Option<Vec<u8>> {
    let own = |rank: u32, block: u32| bytes((block * COUNT..(block + 1) * COUNT).map(move |index| value(rank, index)));
    let sum = |block: u32| {
        bytes((block * COUNT..(block + 1) * COUNT).map(|index| (0..ranks).map(|rank| value(rank, index)).sum()))
    };
    let is_root = rank == root;
    match operation {
        Operation::Copy => Some(own(rank, 0)),
        Operation::Combine => Some(bytes((0..COUNT).map(|index| 2 * value(rank, index)))),
        Operation::Broadcast | Operation::Recv => (!is_root).then(|| own(root, 0)),
        Operation::Scatter => Some(own(root, rank)),
        Operation::Gather => is_root.then(|| (0..ranks).flat_map(|from| own(from, 0)).collect()),
        Operation::AllGather => Some((0..ranks).flat_map(|from| own(from, 0)).collect()),
        Operation::Reduce => is_root.then(|| sum(0)),
        Operation::AllReduce => Some(sum(0)),
        Operation::ReduceScatter => Some(sum(rank)),
        Operation::AllToAll => Some((0..ranks).flat_map(|from| own(from, rank)).collect()),
        Operation::Send | Operation::Barrier | Operation::Nop | Operation::Config => None,
    }
}

/// Runs an operation on all ranks and checks every result.
fn run(drivers: &mut [Driver<Box<dyn Bus>>], operation: Operation, root: u32) {
    let ranks = drivers.len() as u32;
    let mut results = Vec::new();
    for (rank, driver) in (0..).zip(&mut *drivers) {
        let memory = driver.settings().memory;
        let all = bytes((0..ranks * COUNT).map(|index| value(rank, index)));
        let [first, result] = [0, 1].map(|_| driver.bus().allocate(memory, all.len() as u64).unwrap());
        driver.bus().write_memory(memory, first, &all).unwrap();
        let call = driver.call(operation, DataType::I32, DataType::I32, COUNT).unwrap();
        let function = ReduceFunction::Sum.number();
        let second = if operation == Operation::Combine { first } else { result };
        let mut call = Descriptor { root, function, first, second, result, ..call };
        if operation == Operation::Broadcast {
            call.result = first;
        }
        if operation == Operation::Recv && rank == root {
            call = Descriptor { operation: Operation::Nop, hosts: Hosts::default(), ..call };
        }
        driver.start(&call).unwrap();
        results.push(call.result);
    }
    for (rank, driver) in (0..).zip(&mut *drivers) {
        end(driver);
        if let Some(wanted) = expected(operation, ranks, rank, root) {
            let memory = driver.settings().memory;
            let mut seen = vec![0; wanted.len()];
            driver.bus().read_memory(memory, results[rank as usize], &mut seen).unwrap();
            assert!(seen == wanted, "{operation:?} with root {root} on rank {rank} over {}", driver.bus().describe());
        }
    }
}

#[test]
fn each_operation_is_done_over_each_network() {
    for design in DESIGNS {
        let port = free_ports(12);
        let _emulators = Emulators(vec![start(&format!("--ranks 3 --port {port} --comms {design}"))]);
        for memory in ["device", "host"] {
            let text = format!("emulator://127.0.0.1:{port}?design={design}&eager=16KiB&rx_bytes=1KiB&memory={memory}");
            let mut drivers = opened(&url(&text), 3);
            for operation in [
                Operation::Copy,
                Operation::Combine,
                Operation::AllGather,
                Operation::AllReduce,
                Operation::ReduceScatter,
                Operation::Nop,
            ] {
                run(&mut drivers, operation, 0);
            }
            for root in 0..3 {
                for operation in [Operation::Broadcast, Operation::Scatter, Operation::Gather, Operation::Reduce] {
                    run(&mut drivers, operation, root);
                }
            }
            if design == "cyt_rdma" {
                run(&mut drivers, Operation::AllToAll, 0);
                run(&mut drivers, Operation::Barrier, 0);
            }
        }
    }
}

#[test]
fn a_send_meets_its_receive() {
    for design in DESIGNS {
        let port = free_ports(8);
        let _emulators = Emulators(vec![start(&format!("--ranks 2 --port {port} --comms {design}"))]);
        let text = format!("emulator://127.0.0.1:{port}?design={design}&eager=16KiB&rx_bytes=1KiB");
        let mut drivers = opened(&url(&text), 2);
        let call = |driver: &Driver<Box<dyn Bus>>, operation, root| {
            let call = driver.call(operation, DataType::I32, DataType::I32, COUNT).unwrap();
            Descriptor { root, tag: 7, ..call }
        };
        let data = bytes((0..COUNT).map(|index| value(5, index)));
        let first = drivers[0].bus().allocate(Memory::Device, data.len() as u64).unwrap();
        drivers[0].bus().write_memory(Memory::Device, first, &data).unwrap();
        let send = Descriptor { first, ..call(&drivers[0], Operation::Send, 1) };
        drivers[0].start(&send).unwrap();
        let result = drivers[1].bus().allocate(Memory::Device, data.len() as u64).unwrap();
        let recv = Descriptor { result, ..call(&drivers[1], Operation::Recv, 0) };
        drivers[1].start(&recv).unwrap();
        drivers.iter_mut().for_each(end);
        let mut seen = vec![0; data.len()];
        drivers[1].bus().read_memory(Memory::Device, result, &mut seen).unwrap();
        assert!(seen == data, "{design}");
    }
}

#[test]
fn an_emulator_that_ends_is_noticed_at_once() {
    let port = free_ports(4);
    let mut emulators = Emulators(vec![start(&format!("--ranks 1 --port {port}"))]);
    let mut drivers = opened(&url(&format!("emulator://127.0.0.1:{port}")), 1);
    emulators.0[0].kill().unwrap();
    emulators.0[0].wait().unwrap();
    let call = drivers[0].call(Operation::Nop, DataType::I32, DataType::I32, 0).unwrap();
    let text = drivers[0].start(&call).unwrap_err().message;
    let begins = format!("emulator at 127.0.0.1:{port} closed the connection");
    assert!(text.starts_with(&begins) && text.ends_with("if it has exited, start it again"), "{text}");
    assert_eq!(drivers[0].start(&call).unwrap_err().message, text, "later calls say why");
    let text = drivers[0].bus().reconnect().err().unwrap().message;
    assert!(text.starts_with(&format!("no emulator answers at 127.0.0.1:{port}: ")), "{text}");
}

#[test]
fn an_emulator_that_is_stopped_is_noticed_at_the_deadline() {
    let port = free_ports(4);
    let emulators = Emulators(vec![start(&format!("--ranks 1 --port {port}"))]);
    let mut bus = buses::open(&url(&format!("emulator://127.0.0.1:{port}")), 0).unwrap();
    let at = bus.allocate(Memory::Device, 1 << 20).unwrap();
    signal_to(emulators.0[0].id(), "STOP");
    let begin = Instant::now();
    let text = bus.read_register(map::RETURN_CODE.offset).unwrap_err().message;
    assert!(begin.elapsed() > Duration::from_millis(900), "{:?}", begin.elapsed());
    assert_eq!(
        text,
        format!(
            "emulator at 127.0.0.1:{port} has not answered a read of the register at 0x1ffc in 1000 ms; it is stopped, stuck or busy with \
             something else"
        )
    );
    assert_eq!(
        bus.write_memory(Memory::Device, at, &[0; 64]).unwrap_err().message,
        text,
        "a bus that has failed is dead"
    );
    let text = bus.reconnect().err().unwrap().message;
    assert!(text.contains("did not complete the ZeroMQ greeting within 400 ms"), "{text}");
}

#[test]
fn a_call_that_does_not_end_is_explained_over_a_fresh_connection() {
    let port = free_ports(8);
    let _emulators = Emulators(vec![start(&format!("--ranks 2 --port {port} --comms udp --faithful"))]);
    let mut drivers = opened(&url(&format!("emulator://127.0.0.1:{port}?design=udp")), 2);
    let buffer = drivers[0].bus().allocate(Memory::Device, 64).unwrap();
    let call = |driver: &Driver<Box<dyn Bus>>, operation, root, tag| {
        let call = driver.call(operation, DataType::F32, DataType::F32, 4).unwrap();
        Descriptor { root, tag, first: buffer, result: buffer, ..call }
    };
    let send = call(&drivers[0], Operation::Send, 1, 7);
    drivers[0].start(&send).unwrap();
    end(&mut drivers[0]);
    drivers[1].bus().allocate(Memory::Device, 64).unwrap();
    let recv = call(&drivers[1], Operation::Recv, 0, 8);
    drivers[1].start(&recv).unwrap();
    assert!(drivers[1].poll().unwrap().is_none());
    let begin = Instant::now();
    let text = drivers[1].give_up("has not ended in 300 ms", || begin.elapsed() < PATIENCE).message;
    assert!(begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
    assert!(
        text.contains(
            "has not ended in 300 ms; it expects seq 0 from rank 0; rx buffer 0 holds seq 0 from rank 0 with tag 0x7"
        ),
        "{text}"
    );
}

#[test]
fn an_emulator_that_is_stopped_in_the_middle_of_memory_is_noticed() {
    let port = free_ports(4);
    let emulators = Emulators(vec![start(&format!("--ranks 1 --port {port}"))]);
    let mut bus = buses::open(&url(&format!("emulator://127.0.0.1:{port}")), 0).unwrap();
    let at = bus.allocate(Memory::Device, 64 << 20).unwrap();
    let pid = emulators.0[0].id();
    let stopper = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        signal_to(pid, "STOP");
        Instant::now()
    });
    let text = bus.write_memory(Memory::Device, at, &vec![1; 64 << 20]).unwrap_err().message;
    let waited = stopper.join().unwrap().elapsed();
    assert!(waited < PATIENCE, "{waited:?}");
    assert!(text.contains("has not answered a write of 65536 bytes of device memory at 0x"), "{text}");
}

#[test]
fn an_emulator_that_is_another_than_was_asked_for_is_refused_before_anything_starts() {
    let port = free_ports(8);
    let _emulators = Emulators(vec![start(&format!("--ranks 2 --port {port} --comms udp"))]);
    let refused = |design: &str, rank, ranks, asked| {
        let url = url(&format!("emulator://127.0.0.1:{port}?design={design}"));
        let bus = buses::open(&url, asked).unwrap();
        Driver::open(bus, url.settings(rank, ranks).unwrap(), || true).err().unwrap().message
    };
    let at = |rank: u16| format!("emulator at 127.0.0.1:{}", port + rank);
    assert_eq!(
        refused("tcp", 0, 2, 0),
        format!(
            "{} was started for udp, but `design` requests tcp; add `design=udp`, or start it with another `--comms`",
            at(0)
        )
    );
    assert_eq!(
        refused("udp", 0, 3, 0),
        format!("{} was started for 2 ranks, but there are 3; start it with another `--ranks`", at(0))
    );
    assert_eq!(
        refused("udp", 0, 2, 1),
        format!("{} serves rank 1, but this is rank 0; correct the address of this rank's emulator", at(1))
    );
}

#[test]
fn packets_that_are_not_let_in_in_time_are_blamed_on_the_ranks_that_are_missing() {
    let port = free_ports(16);
    let _emulators = Emulators(vec![start(&format!("--ranks 4 --rank 0-1 --port {port} --comms udp"))]);
    let url = url(&format!("emulator://127.0.0.1:{port}?design=udp"));
    let bus = buses::open(&url, 0).unwrap();
    let begin = Instant::now();
    let go_on = || begin.elapsed() < Duration::from_secs(2);
    let text = Driver::open(bus, url.settings(0, 4).unwrap(), go_on).err().unwrap().message;
    assert_eq!(
        text,
        format!(
            "emulator at 127.0.0.1:{port} did not answer `config EnablePackets = 0` in time; it waits for the emulators of ranks 2, 3: start \
             them, or correct their addresses"
        )
    );
}

#[test]
fn a_device_that_a_call_holds_says_so_and_does_not_wait_for_the_deadline_of_the_group() {
    let port = free_ports(8);
    let _emulators = Emulators(vec![start(&format!("--ranks 2 --port {port} --comms udp --faithful=13"))]);
    let url = url(&format!("emulator://127.0.0.1:{port}?design=udp"));
    let begin = Instant::now();
    let text = opened_after_a_call_without_end(&url).err().unwrap().message;
    assert!(begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
    let said = "does not complete a reset: a call in flight holds it, and nothing can end this call";
    assert!(text.contains(said), "{text}");
}

#[test]
fn the_next_job_has_the_emulators_of_one_that_was_killed_in_the_middle_of_a_call() {
    let port = free_ports(8);
    let _emulators = Emulators(vec![start(&format!("--ranks 2 --port {port} --comms udp"))]);
    let url = url(&format!("emulator://127.0.0.1:{port}?design=udp"));
    drop(opened_after_a_call_without_end(&url).unwrap());
    run(&mut opened(&url, 2), Operation::AllReduce, 0);
}

/// Opens a driver of rank 0, after a driver whose call waits for a rank that never starts the call.
fn opened_after_a_call_without_end(url: &DeviceUrl) -> accl_types::Result<Driver<Box<dyn Bus>>> {
    let mut drivers = opened(url, 2);
    let memory = drivers[0].settings().memory;
    let [first, result] = [0, 1].map(|_| drivers[0].bus().allocate(memory, 4096).unwrap());
    let call = drivers[0].call(Operation::AllReduce, DataType::I32, DataType::I32, COUNT).unwrap();
    drivers[0].start(&Descriptor { first, result, second: result, ..call }).unwrap();
    drop(drivers);
    Driver::open(buses::open(url, 0).unwrap(), url.settings(0, 2).unwrap(), || true)
}

#[test]
fn a_second_driver_of_emulators_in_use_is_refused_and_the_first_continues() {
    let port = free_ports(8);
    let _emulators = Emulators(vec![start(&format!("--ranks 2 --port {port} --comms udp"))]);
    let url = url(&format!("emulator://127.0.0.1:{port}?design=udp"));
    let mut first = opened(&url, 2);
    run(&mut first, Operation::AllReduce, 0);
    let second = |rank| {
        let bus = buses::open(&url, rank).unwrap();
        Driver::open(bus, url.settings(rank, 2).unwrap(), || true).err().map(|error| error.message)
    };
    for rank in 0..2 {
        let text = second(rank).unwrap();
        let at = port + u16::try_from(rank).unwrap();
        let holder = format!("emulator at 127.0.0.1:{at} is in use by process {} of host ", std::process::id());
        assert!(
            text.starts_with(&holder) && text.ends_with("or take the device away with `accl device reset`"),
            "{text}"
        );
        let mut looks = buses::open(&url, rank).unwrap();
        assert!(!looks.about().unwrap().unwrap().owner.is_empty(), "a second connection may read");
    }
    run(&mut first, Operation::AllReduce, 0);
    drop(first);
    run(&mut opened(&url, 2), Operation::AllReduce, 0);
}

#[test]
fn an_emulator_whose_driver_was_killed_is_there_for_the_next() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&format!("--ranks 1 --port {port}"))]);
    let url = url(&format!("emulator://127.0.0.1:{port}"));
    // A process that has claimed the rank, and sends nothing more.
    let claim = accl_cclo::control::Request::Claim { owner: "it".to_owned(), job: 0 }.to_json();
    let says = [&GREETING_THAT_ASKS.concat()[..], &[1, 0, 0, claim.len() as u8], claim.as_bytes()].concat();
    let says: String = says.iter().map(|byte| format!("\\{byte:03o}")).collect();
    let script = format!("exec 3<>/dev/tcp/127.0.0.1/{port}; printf '{says}' >&3; exec cat <&3");
    let mut owner = Command::new("bash").args(["-c", &script]).stdout(Stdio::null()).spawn().unwrap();
    let mut looks = buses::open(&url, 0).unwrap();
    let begin = Instant::now();
    while looks.about().unwrap().unwrap().owner != "it" {
        assert!(begin.elapsed() < PATIENCE, "it has not taken the rank");
    }
    assert!(looks.claim().unwrap().unwrap().starts_with("it (for "));
    signal_to(owner.id(), "KILL");
    owner.wait().unwrap();
    drop(looks);
    run(&mut opened(&url, 1), Operation::Copy, 0);
}

#[test]
fn a_reset_takes_an_emulator_from_its_owner() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&format!("--ranks 1 --port {port}"))]);
    let url = url(&format!("emulator://127.0.0.1:{port}"));
    let first = opened(&url, 1);
    accl_cclo::driver::reset(&mut *buses::open(&url, 0).unwrap(), || true).unwrap();
    let mut second = opened(&url, 1);
    // The end of the first connection does not affect the second.
    drop(first);
    run(&mut second, Operation::Copy, 0);
    let mut third = buses::open(&url, 0).unwrap();
    assert!(third.claim().unwrap().is_some());
}

#[test]
fn an_emulator_that_reports_no_owner_is_set_up_as_usual() {
    let port = free_ports(1);
    let _answering = answering(port, r#"{"status":1}"#);
    let mut bus = buses::open(&url(&format!("emulator://127.0.0.1:{port}")), 0).unwrap();
    assert_eq!(bus.claim(), Ok(None));
}

/// Exchanges the texts of all ranks' buses, and returns the result of [`Bus::receive_info`] on each rank.
fn exchange_infos(url: &DeviceUrl, ranks: u32) -> Vec<accl_types::Result<()>> {
    let mut buses: Vec<_> = (0..ranks).map(|rank| buses::open(url, rank).unwrap()).collect();
    let settings = |rank| url.settings(rank, ranks).unwrap();
    let infos: Vec<String> =
        (0..).zip(&mut buses).map(|(rank, bus)| bus.local_info(&settings(rank)).unwrap().unwrap()).collect();
    (0..).zip(&mut buses).map(|(rank, bus)| bus.receive_info(&infos, &mut settings(rank))).collect()
}

#[test]
fn emulators_that_do_not_understand_each_other_are_refused_on_all_ranks_in_one_sentence() {
    for (first, second, why) in [
        ("-s 2 -c udp", "-s 2 -c udp", None),
        ("-s 2 -c udp --faithful=4", "-s 2 -c udp", None),
        ("-s 2 -c udp", "-s 2 -c tcp", Some("cannot reach each other: they use udp and tcp")),
        ("-s 2 -c udp", "-s 2 -c udp --faithful", Some("send different packets: they keep hazards none and 1,2,3,12")),
        ("-s 2 -c udp", "-s 3 -c udp", Some("the emulator of rank 1 was started for 3 ranks, but there are 2")),
        ("-s 2 -c udp", "", Some("rank 1 is ACCL's own, or does not describe itself")),
        ("-s 2 -c udp", "", Some("start the emulators of torch-accl with --faithful=1,2,3,12")),
        ("-s 2 -c udp --faithful=1,2,3,12", "", None),
    ] {
        // Worlds of other sizes use other ports, so each has its own range.
        let [port, other] = [12, 12].map(free_ports);
        let mut emulators = Emulators(vec![start(&format!("-r 0 -p {port} {first}"))]);
        let original = second.is_empty().then(|| answering(other + 1, r#"{"status":1}"#));
        if original.is_none() {
            emulators.0.push(start(&format!("-r 1 -p {other} {second}")));
        }
        let url = url(&format!("emulator://127.0.0.1:{port},127.0.0.1:{}?design=udp", other + 1));
        for result in exchange_infos(&url, 2) {
            let text = result.err().map(|error| error.message);
            match why {
                None => assert_eq!(text, None, "{first} {second}"),
                Some(why) => assert!(text.as_ref().is_some_and(|text| text.contains(why)), "{text:?}"),
            }
        }
    }
}

#[test]
fn an_invalid_self_description_of_a_rank_is_refused() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&format!("--ranks 1 --port {port}"))]);
    let url = url(&format!("emulator://127.0.0.1:{port}"));
    let mut bus = buses::open(&url, 0).unwrap();
    let mut settings = url.settings(0, 2).unwrap();
    let own = bus.local_info(&settings).unwrap().unwrap();
    for (text, why) in [
        ("1 nonsense", "expected ident"),
        (r#"1 {"status":0}"#, "the text is not a self-description"),
        ("1 ", "EOF"),
        ("nonsense", "the text does not begin with a number"),
        ("", "the text does not begin with a number"),
    ] {
        let message = bus.receive_info(&[own.clone(), text.to_owned()], &mut settings).unwrap_err().message;
        assert!(
            message.starts_with(&format!("invalid self-description of the emulator of rank 1: {why}")),
            "{message}"
        );
    }
}

/// Starts a listener that runs `serve` on each connection, and returns its port.
fn listener(serve: impl Fn(std::net::TcpStream) + Send + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || listener.incoming().flatten().for_each(&serve));
    port
}

fn refusal(port: u16) -> (String, Duration) {
    let begin = Instant::now();
    let text = buses::open(&url(&format!("emulator://127.0.0.1:{port}")), 0).err().unwrap().message;
    (text, begin.elapsed())
}

#[test]
fn a_port_without_an_emulator_is_recognized_in_time() {
    let (text, took) = refusal(listener(std::mem::forget));
    assert!(
        text.contains("did not complete the ZeroMQ greeting within 1000 ms; it is stopped, or is not an emulator"),
        "{text}"
    );
    assert!(took < Duration::from_millis(1400), "{took:?}");
    let (text, took) = refusal(listener(|mut stream| {
        let mut bytes = [0; 64];
        while let Ok(read @ 1..) = stream.read(&mut bytes) {
            if stream.write_all(&bytes[..read]).is_err() {
                return;
            }
        }
    }));
    assert!(text.contains("does not speak the protocol of an emulator: "), "an echo: {text}");
    assert!(took < Duration::from_millis(500), "{took:?}");
    let (text, took) = refusal(listener(|mut stream| drop(stream.write_all(&[b'x'; 100]))));
    assert!(text.contains("does not speak the protocol of an emulator: "), "{text}");
    assert!(took < Duration::from_millis(500), "{took:?}");
    let port = free_ports(1);
    let (text, took) = refusal(port);
    assert!(text.starts_with(&format!("no emulator answers at 127.0.0.1:{port}: ")), "{text}");
    assert!(
        text.ends_with("; start `accl-emulator` there first") && took < Duration::from_millis(500),
        "{text} {took:?}"
    );
}

#[test]
fn invalid_answers_are_reported_in_a_sentence() {
    for (answer, why) in [
        ("nonsense", "does not speak the protocol of an emulator: expected ident at line 1 column 2; check the port"),
        (r#"{"status":7}"#, "does not speak the protocol of an emulator: unknown status 7; check the port"),
        (r#"{"status":1}"#, "refuses a read of the register at 0x0"),
        (r#"{"status":0,"rdata":[1]}"#, "sent an unexpected reply to a read of the register at 0x0"),
    ] {
        let port = free_ports(1);
        let answering = answering(port, answer);
        let mut bus = buses::open(&url(&format!("emulator://127.0.0.1:{port}")), 0).unwrap();
        let text = bus.read_register(0).unwrap_err().message;
        assert!(text.ends_with(why) && text.contains(&format!("127.0.0.1:{port}")), "{text}");
        drop(answering);
    }
}

/// Greeting of ZeroMQ without security, from the replying end.
const GREETING: [&[u8]; 5] =
    [b"\xFF\0\0\0\0\0\0\0\0\x7F\x03\0", b"NULL", &[0; 16], &[0; 32], b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03REP"];

/// The same greeting, from the requesting end.
const GREETING_THAT_ASKS: [&[u8]; 5] =
    [b"\xFF\0\0\0\0\0\0\0\0\x7F\x03\0", b"NULL", &[0; 16], &[0; 32], b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03REQ"];

#[test]
fn frames_of_invalid_lengths_are_reported_in_a_sentence() {
    // One length exceeds any address, and the other exceeds the memory.
    impossible_length(0x7FFF_FFFF_FFFF_FFFF);
    impossible_length(1 << 44);
}

fn impossible_length(length: u64) {
    let port = listener(move |mut stream| {
        stream.write_all(&GREETING.concat()).unwrap();
        let mut bytes = [0; 256];
        // Waits for the request, which follows the greeting.
        let mut seen = Vec::new();
        while !seen.ends_with(b"}") {
            let Ok(read @ 1..) = stream.read(&mut bytes) else { return };
            seen.extend(&bytes[..read]);
        }
        stream.write_all(&[&[2][..], &length.to_be_bytes()].concat()).unwrap();
        let _ = stream.read(&mut bytes);
    });
    let mut bus = buses::open(&url(&format!("emulator://127.0.0.1:{port}")), 0).unwrap();
    let text = bus.read_register(0).unwrap_err().message;
    assert!(
        text.ends_with(
            "does not speak the protocol of an emulator: it sent a frame of an invalid length; check the port"
        ),
        "{text}"
    );
    assert_eq!(bus.read_register(0).unwrap_err().message, text);
}

#[test]
fn an_emulator_says_what_it_is_or_nothing() {
    let about = r#"{"status":0,"version":"0.1.0","ranks":3,"rank":2,"comms":"udp","hazards":[],"clock_hz":1,"link_bits_per_second":1,"hop_ps":0,"missing":[],"trouble":""}"#;
    for (answer, ranks) in [(about, Some(3)), (r#"{"status":1}"#, None)] {
        let port = free_ports(1);
        let _answering = answering(port, answer);
        let mut bus = buses::open(&url(&format!("emulator://127.0.0.1:{port}")), 0).unwrap();
        assert_eq!(bus.about().unwrap().map(|about| about.ranks), ranks);
    }
}

#[test]
fn memory_that_there_is_not_is_refused() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&format!("--ranks 1 --port {port}"))]);
    let mut bus = buses::open(&url(&format!("emulator://127.0.0.1:{port}")), 0).unwrap();
    assert_eq!(bus.allocate(Memory::Device, 5), Ok(0));
    assert_eq!(bus.allocate(Memory::Device, 5000), Ok(4096));
    assert_eq!(bus.allocate(Memory::Host, 1), Ok(0), "each memory has addresses of its own");
    let mut fresh = bus.reconnect().unwrap();
    assert_eq!(fresh.allocate(Memory::Device, 1), Ok(12288), "connections share them");
    let text = bus.allocate(Memory::Device, 2 << 30).unwrap_err().message;
    assert!(text.contains("cannot allocate 2147483648 bytes of memory: "), "{text}");
    let text = bus.read_memory(Memory::Device, 1 << 30, &mut [0; 4]).unwrap_err().message;
    assert!(text.ends_with("refuses a read of 4 bytes of device memory at 0x40000000"), "{text}");
    assert_eq!(bus.read_register(map::HARDWARE_ID.offset), Ok(0), "a refusal is an answer");
}

/// Not a test: the other end of the plain ping-pong, in its own process like an emulator.
#[test]
#[ignore = "another test starts it as a process, and says at which port"]
fn echoes() {
    let mut port = String::new();
    std::io::stdin().read_line(&mut port).unwrap();
    let Ok(port) = port.trim().parse::<u16>() else { return };
    let (mut stream, _) = TcpListener::bind(("127.0.0.1", port)).unwrap().accept().unwrap();
    stream.set_nodelay(true).unwrap();
    let mut ball = [0; 32];
    while stream.read_exact(&mut ball).is_ok() && stream.write_all(&ball).is_ok() {}
}

/// The limits hold for a release build on a quiet machine; other builds have twenty times as long. The times taken are printed.
#[test]
fn speed_is_within_the_bars() {
    let slack = if cfg!(debug_assertions) { 20 } else { 1 };
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&format!("--ranks 1 --port {port}"))]);
    let mut bus = buses::open(&url(&format!("emulator://127.0.0.1:{port}")), 0).unwrap();
    let mut echo = Command::new(std::env::current_exe().unwrap());
    echo.args(["--exact", "bus::echoes", "--ignored", "--nocapture"]);
    let mut echo = Emulators(vec![echo.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap()]);
    writeln!(echo.0[0].stdin.take().unwrap(), "{}", port + 3).unwrap();
    let begin = Instant::now();
    let mut raw = loop {
        match std::net::TcpStream::connect(("127.0.0.1", port + 3)) {
            Ok(raw) => break raw,
            Err(error) => assert!(begin.elapsed() < PATIENCE, "{error}"),
        }
    };
    raw.set_nodelay(true).unwrap();
    let (mut pings, mut reads) = (Vec::new(), Vec::new());
    for _ in 0..2000 {
        let begin = Instant::now();
        raw.write_all(&[0; 32]).and_then(|()| raw.read_exact(&mut [0; 32])).unwrap();
        pings.push(begin.elapsed());
        let begin = Instant::now();
        bus.read_register(map::RETURN_CODE.offset).unwrap();
        reads.push(begin.elapsed());
    }
    let median = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let (ping, read) = (median(&mut pings), median(&mut reads));
    let data: Vec<u8> = (0..4 << 20).map(|index: u32| (index * 7) as u8).collect();
    let at = bus.allocate(Memory::Device, data.len() as u64).unwrap();
    let begin = Instant::now();
    bus.write_memory(Memory::Device, at, &data).unwrap();
    let write_all = begin.elapsed();
    let mut seen = vec![0; data.len()];
    let begin = Instant::now();
    bus.read_memory(Memory::Device, at, &mut seen).unwrap();
    let read_all = begin.elapsed();
    assert!(seen == data);
    println!("register {read:?}, raw ping-pong {ping:?}; 4 MiB written in {write_all:?}, read in {read_all:?}");
    let begin = Instant::now();
    drop(opened(&url(&format!("emulator://127.0.0.1:{port}")), 1));
    let set_up = begin.elapsed();
    println!("a rank set up in {set_up:?}");
    assert!(write_all.max(read_all) < slack * Duration::from_millis(250), "{write_all:?} {read_all:?}");
    assert!(set_up < slack * Duration::from_millis(50), "{set_up:?}");
}

#[test]
fn too_many_connected_hosts_are_reported_to_the_driver() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&format!("--ranks 1 --port {port}"))]);
    let url = url(&format!("emulator://127.0.0.1:{port}"));
    // Connections that send nothing take no place.
    let _silent: Vec<_> = (0..100).map(|_| std::net::TcpStream::connect(("127.0.0.1", port)).unwrap()).collect();
    let hosts: Vec<_> = (0..64).map(|_| buses::open(&url, 0).unwrap()).collect();
    let text = buses::open(&url, 0).err().unwrap().message;
    assert_eq!(
        text,
        format!("the service at 127.0.0.1:{port} refused the connection: `64 hosts are connected already`")
    );
    drop(hosts);
    let begin = Instant::now();
    while let Err(error) = buses::open(&url, 0) {
        assert!(begin.elapsed() < PATIENCE, "{error}");
    }
}

#[test]
fn no_request_of_an_emulator_that_is_stopped_outlasts_the_time_that_is_left() {
    let port = free_ports(4);
    let emulators = Emulators(vec![start(&format!("--ranks 1 --port {port}"))]);
    let mut bus = buses::open(&url(&format!("emulator://127.0.0.1:{port}")), 0).unwrap();
    bus.allocate(Memory::Device, 64).unwrap();
    signal_to(emulators.0[0].id(), "STOP");
    let begin = Instant::now();
    bus.set_deadline(Some(begin + Duration::from_millis(200)));
    let text = bus.write_memory(Memory::Device, 0, &[0; 64]).unwrap_err().message;
    assert!(text.contains("has not answered a write of 64 bytes of device memory at 0x0 in "), "{text}");
    assert!(begin.elapsed() < PATIENCE, "{:?}", begin.elapsed());
}

#[test]
fn an_emulator_is_reset_when_it_is_left_however_long_after_the_deadline_of_the_last_call() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&format!("--ranks 1 --port {port} --comms udp"))]);
    let url = url(&format!("emulator://127.0.0.1:{port}?design=udp"));
    let mut drivers = opened(&url, 1);
    drivers[0].bus().set_deadline(Some(Instant::now()));
    drop(drivers);
    let mut bus = buses::open(&url, 0).unwrap();
    assert_eq!(bus.read_register(map::IS_CONFIGURED.offset), Ok(0));
}

/// Regression test: the driver reported that the sum was complete, because it read the return code 0 of the reset.
#[test]
fn a_call_that_the_reset_of_another_host_ends_fails() {
    let port = free_ports(8);
    let _emulators = Emulators(vec![start(&format!("--ranks 2 --port {port} --comms udp"))]);
    let url = url(&format!("emulator://127.0.0.1:{port}?design=udp"));
    let mut drivers = opened(&url, 2);
    let memory = drivers[0].settings().memory;
    let [first, result] = [0, 1].map(|_| drivers[0].bus().allocate(memory, 4096).unwrap());
    let call = drivers[0].call(Operation::AllReduce, DataType::I32, DataType::I32, COUNT).unwrap();
    // Rank 1 has not started the call yet.
    drivers[0].start(&Descriptor { first, result, second: result, ..call }).unwrap();
    let mut other = buses::open(&url, 0).unwrap();
    accl_cclo::driver::reset(&mut *other, || true).unwrap();
    let text = drivers[0].poll().unwrap_err().message;
    let said = format!(
        "emulator at 127.0.0.1:{port} was reset by another connection (`accl device reset` or another driver) and refuses "
    );
    assert!(text.starts_with(&said), "{text}");
    // The host that lost the emulator does not reset it for the next host.
    other.write_register(map::IS_CONFIGURED.offset, 1).unwrap();
    drop(drivers);
    assert_eq!(other.read_register(map::IS_CONFIGURED.offset), Ok(1));
    other.write_register(map::IS_CONFIGURED.offset, 0).unwrap();
    drop(opened(&url, 2));
}

/// Regression test: a call of another host ended, and the owner took that end for the end of its own call.
#[test]
fn a_host_without_a_claim_may_read_a_rank_but_changes_nothing() {
    use accl_cclo::call::ConfigFunction;
    let port = free_ports(8);
    let _emulators = Emulators(vec![start(&format!("--ranks 2 --port {port} --comms udp"))]);
    let url = url(&format!("emulator://127.0.0.1:{port}?design=udp"));
    let mut drivers = opened(&url, 2);
    let mut other = buses::open(&url, 0).unwrap();
    let said = "refuses the start of `config Timeout = 7`";
    let text = other.start(&Descriptor::config(ConfigFunction::Timeout, 7)).unwrap_err().message;
    assert!(text.contains(said), "{text}");
    assert_eq!(other.poll(), Ok(false));
    assert!(other.write_register(map::IS_CONFIGURED.offset, 0).is_err());
    assert!(other.allocate(Memory::Device, 64).is_err() && other.write_memory(Memory::Device, 0, &[7]).is_err());
    assert_eq!(other.read_register(map::IS_CONFIGURED.offset), Ok(1));
    run(&mut drivers, Operation::AllReduce, 0);
    // The end of the owner's call is not reported to another host that polls.
    let call = drivers[0].call(Operation::Nop, DataType::I32, DataType::I32, 0).unwrap();
    drivers[0].start(&call).unwrap();
    assert_eq!(other.poll(), Ok(false));
    end(&mut drivers[0]);
}

//! Emulators of a test, and drivers that reach them over sockets.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use accl_cclo::bus::Bus;
use accl_cclo::buses;
use accl_cclo::device::DeviceUrl;
use accl_cclo::driver::Driver;
use zeromq::{RepSocket, Socket, SocketRecv, SocketSend};

/// As long as anything may take.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Processes that end with the test.
pub struct Emulators(pub Vec<Child>);

impl Drop for Emulators {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A first port of so many that nobody listens at, and that no other test is given. Processes of one time begin far from each other.
pub fn free_ports(count: u16) -> u16 {
    static NEXT: std::sync::Mutex<u16> = std::sync::Mutex::new(0);
    let mut next = NEXT.lock().unwrap();
    let is_free = |port: u16| std::net::TcpListener::bind(("127.0.0.1", port)).is_ok();
    let begin = 20_000 + (std::process::id() * 41 % 8_000) as u16;
    let found = (*next..2_000).find(|&at| (begin + at..begin + at + count).all(is_free)).expect("free ports");
    *next = found + count;
    begin + found
}

/// An emulator with these arguments, once it listens.
pub fn start(arguments: &str) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_accl-emulator"))
        .args(arguments.split(' '))
        .stdout(Stdio::piped())
        .spawn()
        .expect("the emulator starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("listen from port"), "{line}");
    child
}

/// Drivers of all ranks of a device, set up.
pub fn opened(url: &DeviceUrl, ranks: u32) -> Vec<Driver<Box<dyn Bus>>> {
    let open = |rank| {
        let begin = Instant::now();
        let bus = buses::open(url, rank).unwrap();
        Driver::open(bus, url.settings(rank, ranks).unwrap(), || begin.elapsed() < PATIENCE).unwrap()
    };
    (0..ranks).map(open).collect()
}

/// The call of a driver ends well.
pub fn end(driver: &mut Driver<Box<dyn Bus>>) {
    let begin = Instant::now();
    while driver.poll().unwrap().is_none() {
        if begin.elapsed() > PATIENCE {
            panic!("{}", driver.give_up("has not ended", || true).message);
        }
    }
}

/// Sends a signal to a child, by its name.
pub fn signal_to(child: u32, name: &str) {
    let sent = Command::new("kill").args([format!("-{name}"), child.to_string()]).status().unwrap();
    assert!(sent.success());
}

/// Somebody who answers each request with this text, until it is dropped.
pub fn answering(port: u16, answer: &'static str) -> tokio::runtime::Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut socket = RepSocket::new();
    runtime.block_on(socket.bind(&format!("tcp://127.0.0.1:{port}"))).unwrap();
    runtime.spawn(async move {
        while socket.recv().await.is_ok() {
            socket.send(answer.into()).await.unwrap();
        }
    });
    runtime
}

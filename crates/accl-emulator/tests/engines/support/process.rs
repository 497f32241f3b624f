//! Emulators as processes of a test, and ports for them.

use std::io::{BufRead, BufReader};
use std::net::{TcpListener, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

/// Processes that are killed at the end of the test.
pub struct Emulators(pub Vec<Child>);

impl Drop for Emulators {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Returns the first of `count` successive free ports, which no other test in this process or another receives. A UDP socket reserves each port for
/// the life of the process.
pub fn free_ports(count: u16) -> u16 {
    static HELD: Mutex<Vec<UdpSocket>> = Mutex::new(Vec::new());
    const FIRST: u16 = 20_000;
    const PORTS: u16 = 12_000;
    let hold = |port: u16| {
        let token = UdpSocket::bind(("127.0.0.1", port)).ok()?;
        TcpListener::bind(("127.0.0.1", port)).ok().map(|_| token)
    };
    // Tests that start at the same time search from different ports.
    let begin = (std::process::id().wrapping_mul(977) % u32::from(PORTS)) as u16;
    let found = (0..PORTS / count).find_map(|step| {
        let first = FIRST + (begin + step * count) % (PORTS - count);
        let tokens: Option<Vec<UdpSocket>> = (first..first + count).map(hold).collect();
        tokens.map(|tokens| (first, tokens))
    });
    let (first, tokens) = found.expect("free ports");
    HELD.lock().unwrap().extend(tokens);
    first
}

/// Starts an emulator with these arguments, and waits until it listens.
pub fn start(arguments: &[String]) -> Child {
    start_with(arguments, Stdio::inherit())
}

/// Same as [`start`], with another destination for its standard error.
pub fn start_with(arguments: &[String], stderr: Stdio) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_accl-emulator"))
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(stderr)
        .spawn()
        .expect("the emulator starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("listen from port"), "{line}");
    child
}

/// Sends a signal, given by name, to a process.
pub fn signal(child: &Child, name: &str) {
    signal_to(child.id(), name);
}

/// Same as [`signal`], for a process id.
pub fn signal_to(pid: u32, name: &str) {
    let status = Command::new("kill").arg(format!("-{name}")).arg(pid.to_string()).status().unwrap();
    assert!(status.success());
}

//! Emulator processes for tests, and drivers that reach them over sockets.

use std::process::Child;
use std::time::{Duration, Instant};

use super::process;
use accl_cclo::bus::Bus;
use accl_cclo::buses;
use accl_cclo::device::DeviceUrl;
use accl_cclo::driver::Driver;
use zeromq::{RepSocket, Socket, SocketRecv, SocketSend};

/// Time limit for any operation.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Starts an emulator with these arguments, and waits until it listens.
pub fn start(arguments: &str) -> Child {
    process::start(&arguments.split(' ').map(str::to_owned).collect::<Vec<_>>())
}

/// Returns drivers of all ranks of a device, set up.
pub fn opened(url: &DeviceUrl, ranks: u32) -> Vec<Driver<Box<dyn Bus>>> {
    let open = |rank| {
        let begin = Instant::now();
        let bus = buses::open(url, rank).unwrap();
        Driver::open(bus, url.settings(rank, ranks).unwrap(), || begin.elapsed() < PATIENCE).unwrap()
    };
    (0..ranks).map(open).collect()
}

/// Waits for the call of a driver to succeed.
pub fn end(driver: &mut Driver<Box<dyn Bus>>) {
    let begin = Instant::now();
    while driver.poll().unwrap().is_none() {
        if begin.elapsed() > PATIENCE {
            panic!("{}", driver.give_up("has not ended", || true).message);
        }
    }
}

/// Starts a server that answers each request with this text, until it is dropped.
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

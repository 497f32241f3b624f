//! Emulators as processes, and hosts that send them requests over their sockets.

use std::process::Child;
use std::time::{Duration, Instant};

use accl_cclo::call::{ConfigFunction, Descriptor, Operation};
use accl_cclo::control::{About, Reply, Request, Status};
use accl_cclo::memory_map::{self as map, ARITHMETIC_CONFIGS, Communicator, RankEntry, RxBuffer, TableAllocator};
use accl_cclo::return_code::ReturnCode;
use zeromq::{ReqSocket, Socket, SocketRecv, SocketSend};

pub use super::process::*;

pub const PATIENCE: Duration = Duration::from_secs(30);

/// Returns the resident memory of a process in bytes.
pub fn resident_bytes(child: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// Parameters with which engines are set up.
#[derive(Clone, Copy)]
pub struct Setup {
    pub rx_buffers: u32,
    pub rx_bytes: u32,
    pub max_eager: u32,
    pub max_rendezvous: u32,
    /// Device memory for the hosts' own buffers, in bytes; it begins at `buffers()`.
    pub memory: u32,
}

impl Default for Setup {
    fn default() -> Self {
        Self { rx_buffers: 16, rx_bytes: 1024, max_eager: 16 << 10, max_rendezvous: 32 << 10, memory: 0 }
    }
}

impl Setup {
    /// Returns the address at which rx and spare buffers end.
    pub fn buffers(&self) -> u32 {
        self.rx_buffers * self.rx_bytes + 3 * self.max_rendezvous
    }
}

/// Offsets of an engine's tables.
#[derive(Clone, Copy)]
pub struct Places {
    pub communicator: u32,
    /// Arithmetic config for single precision.
    pub arithmetic: u32,
}

pub struct Host {
    socket: ReqSocket,
}

impl Host {
    pub async fn connect(port: u16) -> Self {
        let mut socket = ReqSocket::new();
        socket.connect(&format!("tcp://127.0.0.1:{port}")).await.unwrap();
        Self { socket }
    }

    /// Returns whether a rank answers a new connection within a time limit.
    pub async fn is_answered(port: u16, within: Duration) -> bool {
        let ask = async {
            let mut socket = ReqSocket::new();
            socket.connect(&format!("tcp://127.0.0.1:{port}")).await.ok()?;
            socket.send(Request::Poll { control: 0 }.to_json().into()).await.ok()?;
            socket.recv().await.ok()
        };
        tokio::time::timeout(within, ask).await.ok().flatten().is_some()
    }

    pub async fn ask(&mut self, request: &Request) -> Reply {
        self.ask_text(request.to_json()).await
    }

    pub async fn ask_text(&mut self, text: String) -> Reply {
        self.answer(text, PATIENCE).await.expect("an answer in time")
    }

    /// Returns the answer, or `None` if there is none within a time limit.
    pub async fn answer(&mut self, text: String, within: Duration) -> Option<Reply> {
        self.socket.send(text.into()).await.unwrap();
        let answer = tokio::time::timeout(within, self.socket.recv()).await.ok()?.unwrap();
        let text: Vec<u8> = answer.into_vec().into_iter().flatten().collect();
        Some(Reply::from_json(&text).unwrap())
    }

    pub async fn about(&mut self) -> About {
        match self.ask(&Request::About).await {
            Reply::About(about) => about,
            other => panic!("{other:?}"),
        }
    }

    pub async fn good(&mut self, request: &Request) {
        assert_eq!(self.ask(request).await, Reply::Status(Status::Good), "{request:?}");
    }

    pub async fn register(&mut self, offset: u32) -> u32 {
        match self.ask(&Request::ReadRegister { offset }).await {
            Reply::Register(value) => value,
            other => panic!("{other:?}"),
        }
    }

    pub async fn read(&mut self, address: u64, bytes: u32) -> Vec<u8> {
        match self.ask(&Request::ReadMemory { address, bytes, is_host: false }).await {
            Reply::Memory(bytes) => bytes,
            other => panic!("{other:?}"),
        }
    }

    pub async fn write(&mut self, address: u64, data: Vec<u8>) {
        self.good(&Request::WriteMemory { address, data, is_host: false }).await;
    }

    async fn write_all(&mut self, offset: u32, words: &[u32]) {
        for (value, offset) in words.iter().zip((offset..).step_by(4)) {
            self.good(&Request::WriteRegister { offset, value: *value }).await;
        }
    }

    pub async fn begin(&mut self, call: Descriptor) {
        self.good(&Request::Call { control: 0, call }).await;
    }

    /// Waits for the end of the call, and returns its return code.
    pub async fn end(&mut self) -> ReturnCode {
        let begin = Instant::now();
        while self.ask(&Request::Poll { control: 0 }).await != Reply::Status(Status::Good) {
            assert!(begin.elapsed() < PATIENCE, "the call has not ended");
        }
        ReturnCode(self.register(map::RETURN_CODE.offset).await)
    }

    pub async fn end_well(&mut self) {
        assert_eq!(self.end().await, ReturnCode::default());
    }

    pub async fn configure(&mut self, function: ConfigFunction, value: u32) {
        self.begin(Descriptor::config(function, value)).await;
        self.end_well().await;
    }

    /// Sets up an engine as the reference describes.
    pub async fn set_up(&mut self, rank: u32, ranks: u32, setup: &Setup) -> Places {
        let places = self.lay_out(rank, ranks, setup).await;
        self.configure(ConfigFunction::EnablePackets, 0).await;
        places
    }

    /// Same as [`Host::set_up`], without letting packets in.
    pub async fn lay_out(&mut self, rank: u32, ranks: u32, setup: &Setup) -> Places {
        assert_eq!(self.register(map::HARDWARE_ID.offset).await, 0);
        self.configure(ConfigFunction::Reset, 0).await;
        self.write_tables(rank, ranks, setup).await
    }

    /// Same as [`Host::lay_out`], without the reset.
    pub async fn write_tables(&mut self, rank: u32, ranks: u32, setup: &Setup) -> Places {
        let Setup { rx_buffers, rx_bytes, max_eager, max_rendezvous, memory } = *setup;
        let mut allocator = TableAllocator::default();
        let table = allocator.take(rx_buffers as usize * RxBuffer::COUNT).unwrap();
        self.good(&Request::Allocate { address: 0, bytes: setup.buffers() + memory, is_host: false }).await;
        for index in 0..rx_buffers {
            let buffer = RxBuffer::idle(u64::from(index * rx_bytes));
            self.write_all(table.word(RxBuffer::COUNT * index as usize), &buffer.to_words()).await;
        }
        self.write_all(map::RX_BUFFER_BYTES.offset, &[rx_bytes]).await;
        self.write_all(map::RX_BUFFER_COUNT.offset, &[rx_buffers]).await;
        for (index, [low, _]) in (0u32..).zip(map::SPARE_BUFFERS) {
            self.write_all(low.offset, &[rx_buffers * rx_bytes + index * max_rendezvous]).await;
        }
        let entry = |peer| RankEntry::new([127, 0, 0, 1].into(), 5500, peer, rx_bytes);
        let communicator = Communicator { local: rank, ranks: (0..ranks).map(entry).collect() };
        let place = allocator.take(Communicator::word_count(ranks as usize)).unwrap();
        self.write_all(place.offset, &communicator.to_words()).await;
        let single = &ARITHMETIC_CONFIGS[2];
        let config = allocator.take(single.word_count()).unwrap();
        self.write_all(config.offset, &single.to_words()).await;
        self.write_all(map::IS_CONFIGURED.offset, &[1]).await;
        self.configure(ConfigFunction::MaxEagerBytes, max_eager).await;
        self.configure(ConfigFunction::MaxRendezvousBytes, max_rendezvous).await;
        Places { communicator: place.offset, arithmetic: config.offset }
    }
}

/// Returns hosts of all ranks, whose engines are set up.
pub async fn hosts(ports: &[u16], setup: &Setup) -> Vec<(Host, Places)> {
    let mut hosts = Vec::new();
    for port in ports {
        hosts.push(Host::connect(*port).await);
    }
    let ranks = ports.len() as u32;
    let set_up = hosts.iter_mut().zip(0..).map(|(host, rank)| host.set_up(rank, ranks, setup));
    let places = all(set_up).await;
    hosts.into_iter().zip(places).collect()
}

/// Returns the ports of `ranks` ranks.
pub fn ports(first: u16, ranks: u16) -> Vec<u16> {
    (first..first + ranks).collect()
}

/// Runs an all_reduce of `count` floats that are 1 on every rank, and checks the sums.
pub async fn sum(hosts: &mut [(Host, Places)], count: u32) {
    const AT: u64 = 1 << 20;
    let result = AT + u64::from(4 * count).next_multiple_of(4096);
    let ones: Vec<u8> = (0..count).flat_map(|_| 1f32.to_le_bytes()).collect();
    let ranks = hosts.len();
    for (host, places) in &mut *hosts {
        host.write(AT, ones.clone()).await;
        host.good(&Request::Allocate { address: result, bytes: 4 * count, is_host: false }).await;
        host.begin(Descriptor { first: AT, second: result, result, ..call(Operation::AllReduce, places, count) }).await;
    }
    for (host, _) in hosts {
        host.end_well().await;
        let bytes = host.read(result, 4 * count).await;
        let wrong = bytes.as_chunks().0.iter().position(|&sum| f32::from_le_bytes(sum) != ranks as f32);
        assert_eq!(wrong, None);
    }
}

/// Returns a call on `count` floats.
pub fn call(operation: Operation, places: &Places, count: u32) -> Descriptor {
    Descriptor { count, communicator: places.communicator, arithmetic: places.arithmetic, ..Descriptor::new(operation) }
}

/// Runs all futures concurrently.
pub async fn all<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut all: Vec<_> = futures.map(Box::pin).collect();
    let mut done: Vec<Option<F::Output>> = all.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        let mut is_pending = false;
        for (future, done) in all.iter_mut().zip(&mut done).filter(|(_, done)| done.is_none()) {
            match future.as_mut().poll(context) {
                std::task::Poll::Ready(output) => *done = Some(output),
                std::task::Poll::Pending => is_pending = true,
            }
        }
        if is_pending { std::task::Poll::Pending } else { std::task::Poll::Ready(()) }
    })
    .await;
    done.into_iter().flatten().collect()
}

pub fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}

pub fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

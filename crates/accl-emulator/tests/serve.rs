//! An ordinary ZeroMQ client is served, by engines of one process and by those of several.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use accl_cclo::call::{ConfigFunction, Descriptor, Operation};
use accl_cclo::control::{Reply, Request, Status};
use accl_cclo::memory_map::{self as map, ARITHMETIC_CONFIGS, Communicator, Layout, RankEntry, RxBuffer};
use zeromq::{ReqSocket, Socket, SocketRecv, SocketSend};

const RX_BUFFERS: u32 = 16;
const RX_BYTES: u32 = 1024;
const PATIENCE: Duration = Duration::from_secs(20);

/// Processes that end with the test.
struct Emulators(Vec<Child>);

impl Drop for Emulators {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A first port of so many that nobody listens at, and that no other test is given.
fn free_ports(count: u16) -> u16 {
    static NEXT: std::sync::Mutex<u16> = std::sync::Mutex::new(0);
    let mut next = NEXT.lock().unwrap();
    let is_free = |port: u16| std::net::TcpListener::bind(("127.0.0.1", port)).is_ok();
    let begin = 20_000 + std::process::id() as u16 % 10_000;
    let found = (*next..10_000).find(|&at| (begin + at..begin + at + count).all(is_free)).expect("free ports");
    *next = found + count;
    begin + found
}

fn start(arguments: &[String]) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_accl-emulator"))
        .args(arguments)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the emulator starts");
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("listen from port"), "{line}");
    child
}

struct Host {
    socket: ReqSocket,
}

impl Host {
    async fn connect(port: u16) -> Self {
        let mut socket = ReqSocket::new();
        socket.connect(&format!("tcp://127.0.0.1:{port}")).await.unwrap();
        Self { socket }
    }

    async fn ask(&mut self, request: &Request) -> Reply {
        self.ask_text(request.to_json()).await
    }

    async fn ask_text(&mut self, text: String) -> Reply {
        self.socket.send(text.into()).await.unwrap();
        let answer = tokio::time::timeout(PATIENCE, self.socket.recv()).await.expect("an answer in time").unwrap();
        let text: Vec<u8> = answer.into_vec().into_iter().flatten().collect();
        Reply::from_json(&text).unwrap()
    }

    async fn good(&mut self, request: &Request) {
        assert_eq!(self.ask(request).await, Reply::Status(Status::Good), "{request:?}");
    }

    async fn write_all(&mut self, offset: u32, words: &[u32]) {
        for (value, offset) in words.iter().zip((offset..).step_by(4)) {
            self.good(&Request::WriteRegister { offset, value: *value }).await;
        }
    }

    async fn begin(&mut self, call: Descriptor) {
        self.good(&Request::Call { control: 0, call }).await;
    }

    async fn end(&mut self) {
        let begin = Instant::now();
        while self.ask(&Request::Poll { control: 0 }).await != Reply::Status(Status::Good) {
            assert!(begin.elapsed() < PATIENCE, "the call has not ended");
        }
        assert_eq!(self.ask(&Request::ReadRegister { offset: map::RETURN_CODE.offset }).await, Reply::Register(0));
    }

    async fn configure(&mut self, function: ConfigFunction, value: u32) {
        self.begin(Descriptor::config(function, value)).await;
        self.end().await;
    }

    /// As the reference says; the offsets of the communicator and of the config of single precision.
    async fn set_up(&mut self, rank: u32, ranks: u32) -> (u32, u32) {
        assert_eq!(self.ask(&Request::ReadRegister { offset: map::HARDWARE_ID.offset }).await, Reply::Register(0));
        self.configure(ConfigFunction::Reset, 0).await;
        let mut layout = Layout::default();
        let table = layout.take(RX_BUFFERS as usize * RxBuffer::COUNT).unwrap();
        self.good(&Request::Allocate { address: 0, bytes: RX_BUFFERS * RX_BYTES, is_host: false }).await;
        for index in 0..RX_BUFFERS {
            let buffer = RxBuffer::idle(u64::from(index * RX_BYTES));
            self.write_all(table.word(RxBuffer::COUNT * index as usize), &buffer.to_words()).await;
        }
        self.write_all(map::RX_BUFFER_BYTES.offset, &[RX_BYTES]).await;
        self.write_all(map::RX_BUFFER_COUNT.offset, &[RX_BUFFERS]).await;
        let entry = |peer| RankEntry::new([127, 0, 0, 1].into(), 5500, peer, RX_BYTES);
        let communicator = Communicator { local: rank, ranks: (0..ranks).map(entry).collect() };
        let place = layout.take(Communicator::word_count(ranks as usize)).unwrap();
        self.write_all(place.offset, &communicator.to_words()).await;
        let single = &ARITHMETIC_CONFIGS[2];
        let config = layout.take(single.word_count()).unwrap();
        self.write_all(config.offset, &single.to_words()).await;
        self.write_all(map::IS_CONFIGURED.offset, &[1]).await;
        self.configure(ConfigFunction::MaxEagerBytes, 16 << 10).await;
        self.configure(ConfigFunction::MaxRendezvousBytes, 32 << 10).await;
        self.configure(ConfigFunction::EnablePackets, 0).await;
        (place.offset, config.offset)
    }
}

/// Sums of ones of all ranks, over sockets.
async fn sums(port: u16, ranks: u32) {
    const COUNT: u32 = 3000;
    const AT: u64 = 1 << 20;
    let mut hosts = Vec::new();
    for rank in 0..ranks {
        hosts.push(Host::connect(port + rank as u16).await);
    }
    let set_up = hosts.iter_mut().zip(0..).map(|(host, rank)| host.set_up(rank, ranks));
    let places = futures(set_up).await;
    let ones: Vec<u8> = (0..COUNT).flat_map(|_| 1f32.to_le_bytes()).collect();
    for (host, (communicator, arithmetic)) in hosts.iter_mut().zip(&places) {
        host.good(&Request::WriteMemory { address: AT, data: ones.clone(), is_host: false }).await;
        host.good(&Request::Allocate { address: 2 * AT, bytes: 4 * COUNT, is_host: false }).await;
        host.begin(Descriptor {
            count: COUNT,
            communicator: *communicator,
            arithmetic: *arithmetic,
            first: AT,
            second: 2 * AT,
            result: 2 * AT,
            ..Descriptor::new(Operation::AllReduce)
        })
        .await;
    }
    for host in &mut hosts {
        host.end().await;
        let read = Request::ReadMemory { address: 2 * AT, bytes: 4 * COUNT, is_host: false };
        let Reply::Memory(bytes) = host.ask(&read).await else { panic!("no memory") };
        let wrong = bytes.as_chunks().0.iter().position(|&sum| f32::from_le_bytes(sum) != ranks as f32);
        assert_eq!(wrong, None);
    }
}

/// All at once.
async fn futures<F: Future>(all: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut all: Vec<_> = all.map(Box::pin).collect();
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

fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}

fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

#[test]
fn ranks_of_one_process_add_for_their_hosts() {
    let port = free_ports(12);
    let _emulators = Emulators(vec![start(&words(&format!("--ranks 3 --port {port} --comms udp")))]);
    run(sums(port, 3));
}

#[test]
fn ranks_of_several_processes_add_for_their_hosts() {
    for comms in ["udp", "tcp", "cyt_rdma"] {
        let port = free_ports(8);
        let one = |rank| start(&words(&format!("-s 2 -r {rank} -p {port} -c {comms} -l 3 -b")));
        let _emulators = Emulators(vec![one(0), one(1)]);
        run(sums(port, 2));
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
        assert_eq!(next.ask(&Request::ReadRegister { offset: 8184 }).await, Reply::Register(0));
    });
}

#[test]
fn wrong_arguments_are_refused_in_a_sentence() {
    let refused = |text: &str| {
        let output = Command::new(env!("CARGO_BIN_EXE_accl-emulator")).args(words(text)).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{text}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(refused("-s 2 -r 2"), "accl-emulator: rank 2 is none of 2 ranks\n");
    assert_eq!(refused("--faithful 4,13"), "accl-emulator: --faithful takes numbers from 1 to 12, not `13`\n");
    assert_eq!(refused("-s 2 --hosts a:1"), "accl-emulator: --hosts names 1 ranks, and --ranks 2\n");
    assert!(
        refused("--clock fast")
            .starts_with("accl-emulator: --clock: `fast` is no clock; expected a number above zero in Hz, kHz,")
    );
    assert!(
        refused("--link 100Gbit/s")
            .starts_with("accl-emulator: --link: `100Gbit/s` is no rate and time; expected a rate above")
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    assert!(
        refused(&format!("--port {port}"))
            .starts_with(&format!("accl-emulator: rank 0 cannot listen at tcp://127.0.0.1:{port}: "))
    );
}

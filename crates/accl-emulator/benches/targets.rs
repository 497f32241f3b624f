//! Benchmarks of emulators over their sockets, and of engines in the process of their rank: `cargo bench -p accl-emulator --bench targets`.
//! Figures are medians of a few turns, and are comparable on the same machine only.

#[path = "../tests/engines/support/mod.rs"]
#[expect(dead_code, reason = "the tests use the rest")]
mod support;

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Barrier, Condvar, Mutex};
use std::time::{Duration, Instant};

use accl_cclo::bus::Bus;
use accl_cclo::call::{Descriptor, Operation};
use accl_cclo::device::DeviceUrl;
use accl_cclo::driver::Driver;
use accl_cclo::memory_map::{self as map, DataType};
use accl_cclo::packets::Packets;
use accl_emulator::Faithful;
use accl_emulator::sim::SimBus;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use support::host::{
    Emulators, Host, Places, Setup, call, free_ports, hosts, ports, resident_bytes, run, start, sum, words,
};

const TURNS: usize = 5;
const RANKS: u16 = 32;
const IDLE: Duration = Duration::from_secs(10);
const MEMORY_BYTES: u32 = 4 << 20;
const ELEMENTS: u32 = 1 << 20;

fn main() {
    let names = std::env::args().skip(1).filter(|name| !name.starts_with('-')).collect::<Vec<_>>();
    let all: [(&str, fn()); 6] = [
        ("register", register),
        ("memory", memory),
        ("all_reduce", all_reduce),
        ("many", many_ranks),
        ("sim_register", sim_register),
        ("sim_all_reduce", sim_all_reduce),
    ];
    for (_, measure) in all.iter().filter(|(name, _)| names.is_empty() || names.iter().any(|wanted| wanted == name)) {
        measure();
    }
}

fn median(mut of: Vec<Duration>) -> Duration {
    of.sort_unstable();
    of[of.len() / 2]
}

fn print(id: &str, figure: impl std::fmt::Display, target: &str) {
    println!("{id:<44} {figure:>14}   {target}");
}

/// Measures a register access over ZeroMQ, and a byte over a plain connection for comparison. Both ends run on one core, and then on two. Without
/// pinning, the scheduler's choice between the two matters more than everything measured here, and may differ between the two measurements.
fn register() {
    let cores = sched_getaffinity(None).expect("the cores of the process");
    let allowed: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| cores.is_set(core)).collect();
    register_on("one core", allowed[0], allowed[0]);
    match allowed.get(1) {
        Some(&other) => register_on("two cores", allowed[0], other),
        None => println!("register/two cores: not measured, as the process may use one core"),
    }
    sched_setaffinity(None, &cores).expect("the cores from before");
}

/// Pins the calling thread, and all threads and processes that it starts later, to this core.
fn pin(core: usize) {
    let mut one = CpuSet::new();
    one.set(core);
    sched_setaffinity(None, &one).expect("a core of the process");
}

fn register_on(place: &str, asks: usize, answers: usize) {
    const TIMES: u32 = 2000;
    pin(answers);
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&words(&format!("--port {port}")))]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_nodelay(true).unwrap();
        let mut byte = [0];
        while stream.read_exact(&mut byte).is_ok() && stream.write_all(&byte).is_ok() {}
    });
    pin(asks);
    let mut plain = TcpStream::connect(address).unwrap();
    plain.set_nodelay(true).unwrap();
    let [mut zeromq, mut tcp] = [vec![], vec![]];
    run(async {
        let mut host = Host::connect(port).await;
        for _ in 0..TURNS {
            let begin = Instant::now();
            for _ in 0..TIMES {
                host.register(map::RETURN_CODE.offset).await;
            }
            zeromq.push(begin.elapsed() / TIMES);
            let begin = Instant::now();
            let mut byte = [0];
            for _ in 0..TIMES {
                plain.write_all(&byte).unwrap();
                plain.read_exact(&mut byte).unwrap();
            }
            tcp.push(begin.elapsed() / TIMES);
        }
    });
    let (zeromq, tcp) = (median(zeromq), median(tcp));
    print(
        &format!("register/{place}/zeromq"),
        format!("{zeromq:.1?}"),
        &format!("{:.2} times a plain ping-pong; target 1.6", zeromq.as_secs_f64() / tcp.as_secs_f64()),
    );
    print(&format!("register/{place}/tcp"), format!("{tcp:.1?}"), "");
}

/// Measures writing and reading memory, including the host's own JSON work.
fn memory() {
    let port = free_ports(4);
    let _emulators = Emulators(vec![start(&words(&format!("--port {port}")))]);
    let data: Vec<u8> = (0..MEMORY_BYTES).map(|index| (index.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let [mut writes, mut reads] = [vec![], vec![]];
    run(async {
        let mut host = Host::connect(port).await;
        for _ in 0..TURNS {
            let begin = Instant::now();
            host.write(0, data.clone()).await;
            writes.push(begin.elapsed());
            let begin = Instant::now();
            assert_eq!(host.read(0, MEMORY_BYTES).await, data);
            reads.push(begin.elapsed());
        }
    });
    print(&format!("memory/write/{MEMORY_BYTES}"), format!("{:.1?}", median(writes)), "target 250 ms");
    print(&format!("memory/read/{MEMORY_BYTES}"), format!("{:.1?}", median(reads)), "target 250 ms");
}

/// Returns the time from starting a call on all ranks until all polls report its end.
async fn timed(hosts: &mut [(Host, Places)], at: u32, count: u32) -> Duration {
    let (first, result) = (u64::from(at), u64::from(at + (4 * count).next_multiple_of(4096)));
    let begin = Instant::now();
    for (host, places) in &mut *hosts {
        host.begin(Descriptor { first, second: result, result, ..call(Operation::AllReduce, places, count) }).await;
    }
    for (host, _) in hosts {
        host.end_well().await;
    }
    begin.elapsed()
}

fn all_reduce() {
    for comms in ["udp", "cyt_rdma"] {
        let port = free_ports(8);
        let one = |rank| start(&words(&format!("-s 2 -r {rank} -p {port} -c {comms}")));
        let _emulators = Emulators(vec![one(0), one(1)]);
        let setup = Setup {
            rx_buffers: 16,
            rx_bytes: 64 << 10,
            max_eager: 4 << 20,
            max_rendezvous: 8 << 20,
            memory: 8 * ELEMENTS + 8192,
        };
        let mut taken = vec![];
        run(async {
            let mut hosts = hosts(&ports(port, 2), &setup).await;
            for (host, _) in &mut hosts {
                let data: Vec<u8> = (0..ELEMENTS).flat_map(|index| (index as f32 * 0.37).to_le_bytes()).collect();
                host.write(u64::from(setup.buffers()), data).await;
            }
            for _ in 0..TURNS {
                taken.push(timed(&mut hosts, setup.buffers(), ELEMENTS).await);
            }
        });
        let id = format!("all_reduce/{comms}/2 processes/{}", 4 * ELEMENTS);
        print(&id, format!("{:.1?}", median(taken)), "target 500 ms over udp; the original: 46 s");
    }
}

/// Packets between engines on threads of this process.
struct Between {
    rank: u32,
    inboxes: Arc<Vec<Inbox>>,
}

#[derive(Default)]
struct Inbox {
    packets: Mutex<VecDeque<(u32, Vec<u8>)>>,
    has_come: Condvar,
}

impl Packets for Between {
    fn send(&self, to: u32, packet: &[u8]) {
        let inbox = &self.inboxes[to as usize];
        inbox.packets.lock().unwrap().push_back((self.rank, packet.to_vec()));
        inbox.has_come.notify_one();
    }

    fn has_room(&self, to: u32) -> bool {
        self.inboxes[to as usize].packets.lock().unwrap().len() < 256
    }

    fn flush(&self) {}

    fn receive(&self, is_wanted: &dyn Fn(u32) -> bool) -> Option<(u32, Vec<u8>)> {
        let mut packets = self.inboxes[self.rank as usize].packets.lock().unwrap();
        let at = packets.iter().position(|(from, _)| is_wanted(*from))?;
        packets.remove(at)
    }

    fn wait(&self, at_most: Duration) {
        let inbox = &self.inboxes[self.rank as usize];
        let packets = inbox.packets.lock().unwrap();
        if packets.is_empty() {
            drop(inbox.has_come.wait_timeout(packets, at_most).unwrap());
        }
    }
}

fn sim_url(design: &str) -> DeviceUrl {
    DeviceUrl::parse(&format!("sim://?design={design}")).unwrap().unwrap()
}

fn sim_bus(url: &DeviceUrl, rank: u32, inboxes: &Arc<Vec<Inbox>>) -> SimBus {
    let packets = Arc::new(Between { rank, inboxes: inboxes.clone() });
    SimBus::new(url.design().network(), Faithful::default(), rank, packets)
}

fn inboxes(ranks: u32) -> Arc<Vec<Inbox>> {
    Arc::new((0..ranks).map(|_| Inbox::default()).collect())
}

/// Measures a register access to an engine in the process of its rank.
fn sim_register() {
    const TIMES: u32 = 100_000;
    let mut bus: Box<dyn Bus> = Box::new(sim_bus(&sim_url("udp"), 0, &inboxes(1)));
    let turn = |_| {
        let begin = Instant::now();
        for value in 0..TIMES {
            bus.write_register(map::RX_BUFFER_BYTES.offset, value).unwrap();
            assert_eq!(bus.read_register(map::RX_BUFFER_BYTES.offset), Ok(value));
        }
        begin.elapsed() / (2 * TIMES)
    };
    print("register/sim", format!("{:.1?}", median((0..TURNS).map(turn).collect())), "target 1 us");
}

/// Measures two engines on two threads, each with the driver of its rank, without the links between processes.
fn sim_all_reduce() {
    for design in ["udp", "cyt_rdma"] {
        let (url, inboxes, both) = (sim_url(design), inboxes(2), Barrier::new(2));
        let rank = |rank: u32| {
            let mut driver =
                Driver::open(sim_bus(&url, rank, &inboxes), url.settings(rank, 2).unwrap(), || true).unwrap();
            let memory = driver.settings().memory;
            let data: Vec<u8> = (0..ELEMENTS).flat_map(|index| (index as f32 * 0.37).to_le_bytes()).collect();
            let [first, result] = [0, 1].map(|_| driver.bus().allocate(memory, data.len() as u64).unwrap());
            driver.bus().write_memory(memory, first, &data).unwrap();
            let call = driver.call(Operation::AllReduce, DataType::F32, DataType::F32, ELEMENTS).unwrap();
            let call = Descriptor { first, second: result, result, ..call };
            let turn = |_| {
                both.wait();
                let begin = Instant::now();
                driver.start(&call).unwrap();
                while driver.poll().unwrap().is_none() {
                    driver.bus().pause(Duration::from_millis(1));
                }
                begin.elapsed()
            };
            let taken = median((0..TURNS).map(turn).collect());
            let mut sums = vec![0; data.len()];
            driver.bus().read_memory(memory, result, &mut sums).unwrap();
            let float = |bytes: &[u8]| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            assert!(sums.chunks(4).zip(data.chunks(4)).all(|(sum, one)| float(sum) == 2.0 * float(one)));
            taken
        };
        let taken = std::thread::scope(|scope| {
            let other = scope.spawn(|| rank(1));
            rank(0).max(other.join().unwrap())
        });
        let id = format!("all_reduce/sim/{design}/2 threads/{}", 4 * ELEMENTS);
        print(&id, format!("{taken:.1?}"), "target between processes: 10 times the host path, about 50 ms");
    }
}

fn cpu_ticks(child: &Child) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    // After the name in brackets, user and system time are the 12th and 13th fields.
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    fields.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

fn many_ranks() {
    const TICKS_PER_SECOND: f64 = 100.0;
    let port = free_ports(4 * RANKS);
    let begin = Instant::now();
    let program = env!("CARGO_BIN_EXE_accl-emulator");
    let text = format!("ulimit -n 1024; exec {program} --ranks {RANKS} --port {port} --comms udp");
    let mut child = Command::new("sh").args(["-c", &text]).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    print(&format!("up/{RANKS}"), format!("{:.1?}", begin.elapsed()), "target 3 s");
    let emulators = Emulators(vec![child]);
    let child = &emulators.0[0];
    let before = cpu_ticks(child);
    std::thread::sleep(IDLE);
    let share = (cpu_ticks(child) - before) as f64 / TICKS_PER_SECOND / IDLE.as_secs_f64();
    print(&format!("idle/{RANKS}"), format!("{:.2} %", 100.0 * share), "target 1 % of a processor");
    run(async {
        // Segments must hold an element for each rank.
        let setup = Setup { memory: 1 << 20, ..Setup::default() };
        let mut hosts = hosts(&ports(port, RANKS), &setup).await;
        let mut taken = vec![];
        for _ in 0..TURNS {
            taken.push(timed(&mut hosts, setup.buffers(), 1024).await);
        }
        print(&format!("all_reduce/udp/{RANKS}/4096"), format!("{:.1?}", median(taken)), "target 2 s");
        let per_rank = resident_bytes(child) as f64 / f64::from(RANKS) / f64::from(1 << 20);
        print(&format!("resident/{RANKS}"), format!("{per_rank:.2} MiB"), "a rank; target 4 MiB");
        for _ in 0..10 {
            timed(&mut hosts, setup.buffers(), 1024).await;
        }
        let after_ten = resident_bytes(child);
        for _ in 0..990 {
            timed(&mut hosts[..], setup.buffers(), 1024).await;
        }
        let growth = resident_bytes(child).saturating_sub(after_ten) >> 10;
        print("growth/1000", format!("{growth} KiB"), "from 10 calls to 1000; no target");
        sum(&mut hosts, 1024).await;
    });
}

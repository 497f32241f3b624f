use std::io;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use tempfile::tempdir;

use super::calls::{Calls, DriverRequest, MAX_WORDS, PAGE_BYTES};
use super::kernel::Kernel;
use super::{CoyoteBus, QueuePair, missing};
use crate::bus::{Bus, Memory};
use crate::call::{Compression, Descriptor, Hosts, Operation, Streams};
use crate::memory_map as map;
use crate::settings::{Peer, Settings};

/// Operations in the order in which they were performed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Done {
    Request(usize, u8, Vec<u64>),
    Context(usize),
    Read(usize),
    Write(usize, u64),
    Map(usize),
    Unmap(u64),
    KeepOpen,
}

/// A region that records the requests to it.
#[derive(Clone)]
struct Recorder {
    done: Arc<Mutex<Vec<Done>>>,
    config: u64,
    /// Value that a register read returns.
    word: u64,
    contexts: usize,
    mapped: u64,
    refuses: Option<DriverRequest>,
    is_taken: bool,
}

const RDMA_ON_0: u64 = 1 << 16;
const RDMA_ON_1: u64 = 1 << 17;
const FIRST_PAGE: u64 = 0x7f00_0020_0000;

impl Recorder {
    fn new(config: u64) -> Self {
        Self { done: Arc::default(), config, word: 0, contexts: 1, mapped: 0, refuses: None, is_taken: false }
    }

    fn note(&self, done: Done) {
        self.done.lock().unwrap().push(done);
    }
}

impl Calls for Recorder {
    fn request(&mut self, context: usize, what: DriverRequest, words: &mut [u64; MAX_WORDS]) -> io::Result<()> {
        let used = words.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
        self.note(Done::Request(context, what.number(), words[..used].to_vec()));
        if self.refuses == Some(what) {
            return Err(io::Error::from_raw_os_error(22));
        }
        match what {
            DriverRequest::ReadConfig => words[0] = self.config,
            // The driver numbers contexts itself.
            DriverRequest::RegisterProcess => words[1] = 5 + context as u64,
            _ => {}
        }
        Ok(())
    }

    fn open_context(&mut self) -> io::Result<usize> {
        self.contexts += 1;
        self.note(Done::Context(self.contexts - 1));
        Ok(self.contexts - 1)
    }

    fn read_word(&self, index: usize) -> u64 {
        self.note(Done::Read(index));
        self.word
    }

    fn write_word(&mut self, index: usize, value: u64) {
        self.note(Done::Write(index, value));
    }

    fn map_pages(&mut self, bytes: usize) -> io::Result<u64> {
        self.note(Done::Map(bytes));
        if bytes > 1 << 30 {
            return Err(io::Error::from_raw_os_error(12));
        }
        self.mapped += bytes as u64;
        Ok(FIRST_PAGE + self.mapped - bytes as u64)
    }

    fn unmap_pages(&mut self, address: u64) {
        self.note(Done::Unmap(address));
    }

    fn read_pages(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
        Ok(())
    }

    fn write_pages(&mut self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }

    fn claim(&mut self) -> io::Result<bool> {
        Ok(!self.is_taken)
    }

    fn keep_open(&mut self) {
        self.note(Done::KeepOpen);
    }

    fn again(&self) -> io::Result<Box<dyn Calls>> {
        Ok(Box::new(self.clone()))
    }
}

fn opened(recorder: &Recorder) -> CoyoteBus {
    CoyoteBus::with(Box::new(recorder.clone()), 2).unwrap()
}

fn taken(recorder: &Recorder) -> Vec<Done> {
    std::mem::take(&mut recorder.done.lock().unwrap())
}

#[test]
fn opening_asks_for_the_shell_and_registers_the_process() {
    let recorder = Recorder::new(RDMA_ON_0);
    let bus = opened(&recorder);
    let pid = u64::from(std::process::id());
    assert_eq!(taken(&recorder), [Done::Request(0, 32, vec![]), Done::Request(0, 7, vec![pid])]);
    drop(bus);
    assert_eq!(taken(&recorder), [Done::Request(0, 8, vec![5])]);
    let text = CoyoteBus::with(Box::new(Recorder::new(1 << 18)), 2).err().unwrap().message;
    assert_eq!(text, "card behind Coyote, region 2 has a shell without RDMA; load one with RDMA");
    let refuses = Recorder { refuses: Some(DriverRequest::RegisterProcess), ..Recorder::new(RDMA_ON_1) };
    let text = CoyoteBus::with(Box::new(refuses), 2).err().unwrap().message;
    assert!(text.starts_with("card behind Coyote, region 2 could not register this process: "), "{text}");
}

#[test]
fn registers_are_words_of_eight_bytes() {
    let recorder = Recorder { word: 0xFFFF_FFFF_0000_0007, ..Recorder::new(RDMA_ON_0) };
    let mut bus = opened(&recorder);
    taken(&recorder);
    assert_eq!(bus.read_register(map::RETURN_CODE.offset), Ok(7), "the upper half is nothing");
    bus.write_register(map::RX_BUFFER_BYTES.offset, 0x8000_0000).unwrap();
    assert_eq!(taken(&recorder), [Done::Read(0x1FFC >> 2), Done::Write(1, 0x8000_0000)]);
    for offset in [2, 0x2000] {
        assert!(bus.read_register(offset).unwrap_err().message.contains("has no register at"));
        assert!(bus.write_register(offset, 1).is_err());
    }
    assert_eq!(taken(&recorder), []);
}

#[test]
fn a_call_is_fifteen_words_and_a_start_bit() {
    let mut recorder = Recorder::new(RDMA_ON_0);
    let mut bus = opened(&recorder);
    taken(&recorder);
    let call = Descriptor {
        count: 101,
        communicator: 102,
        root: 103,
        function: 1,
        tag: 105,
        arithmetic: 106,
        compression: Compression { wire: true, ..Compression::default() },
        streams: Streams { first: true, result: false },
        hosts: Hosts::all(true),
        first: 0x1_0000_0002,
        second: 0x3_0000_0004,
        result: 0x5_0000_0006,
        ..Descriptor::new(Operation::AllReduce)
    };
    bus.start(&call).unwrap();
    // Offsets of the reference, from 0x2000.
    let expected = [
        (0x2010, 10),
        (0x2018, 101),
        (0x2020, 102),
        (0x2028, 103),
        (0x2030, 1),
        (0x2038, 105),
        (0x2040, 106),
        (0x2048, 8),
        (0x2050, 0x701),
        (0x2058, 2),
        (0x205C, 1),
        (0x2064, 4),
        (0x2068, 3),
        (0x2070, 6),
        (0x2074, 5),
        (0x2000, 1),
    ];
    assert_eq!(taken(&recorder), expected.map(|(offset, value)| Done::Write(offset >> 2, value)));
    assert_eq!(bus.poll(), Ok(false));
    assert_eq!(taken(&recorder), [Done::Read(0x2000 >> 2)]);

    // A started call may still write to buffers, so nothing is freed.
    bus.allocate(Memory::Host, 1).unwrap();
    taken(&recorder);
    drop(bus);
    assert_eq!(taken(&recorder), [Done::KeepOpen]);

    recorder.word = 0b1110;
    let mut bus = opened(&recorder);
    assert_eq!(bus.poll(), Ok(false), "nothing was started");
    bus.start(&Descriptor::new(Operation::Nop)).unwrap();
    assert_eq!((bus.poll(), bus.poll()), (Ok(true), Ok(false)), "an end is said once");
}

#[test]
fn buffers_are_whole_huge_pages_of_the_control_context() {
    let recorder = Recorder::new(RDMA_ON_0);
    let mut bus = opened(&recorder);
    taken(&recorder);
    let first = bus.allocate(Memory::Host, 1).unwrap();
    let second = bus.allocate(Memory::Device, PAGE_BYTES + 1).unwrap();
    assert_eq!((first, second), (FIRST_PAGE, FIRST_PAGE + PAGE_BYTES));
    assert_eq!(
        taken(&recorder),
        [
            Done::Map(2 << 20),
            Done::Request(0, 5, vec![first, 2 << 20, 5]),
            Done::Map(4 << 20),
            Done::Request(0, 5, vec![second, 4 << 20, 5]),
        ]
    );
    let text = bus.allocate(Memory::Host, 2 << 30).unwrap_err().message;
    assert!(
        text.starts_with(
            "card behind Coyote, region 2 needs 1024 free huge pages of 2 MiB for a buffer of 2147483648 bytes"
        ),
        "{text}"
    );
    assert!(text.contains("sysctl vm.nr_hugepages"), "{text}");
    assert!(bus.allocate(Memory::Host, u64::MAX).is_err());
    taken(&recorder);
    drop(bus);
    assert_eq!(
        taken(&recorder),
        [
            Done::Request(0, 6, vec![first, 5]),
            Done::Unmap(first),
            Done::Request(0, 6, vec![second, 5]),
            Done::Unmap(second),
            Done::Request(0, 8, vec![5]),
        ]
    );
}

#[test]
fn queue_pairs_have_contexts_of_their_own_and_the_words_of_the_reference() {
    let recorder = Recorder::new(RDMA_ON_1);
    let mut bus = opened(&recorder);
    taken(&recorder);
    let ip = Ipv4Addr::new(10, 1, 2, 3);
    let local = bus.queue_pairs(ip, 2).unwrap();
    let pid = u64::from(std::process::id());
    assert_eq!(
        taken(&recorder),
        [
            Done::Context(1),
            Done::Request(1, 7, vec![pid]),
            Done::Map(2 << 20),
            Done::Request(1, 5, vec![local[0].address, 2 << 20, 6]),
            Done::Context(2),
            Done::Request(2, 7, vec![pid]),
            Done::Map(2 << 20),
            Done::Request(2, 5, vec![local[1].address, 2 << 20, 7]),
        ]
    );
    // The region, 2, is in the upper four bits, and the driver's context number in the lower six.
    assert_eq!([local[0].number, local[1].number], [2 << 6 | 6, 2 << 6 | 7]);
    assert!(local.iter().all(|pair| pair.first_packet < 1 << 24 && pair.bytes == 2 << 20 && pair.ip == ip));

    let local = QueuePair { first_packet: 0xABCDEF, ..local[0] };
    let remote = QueuePair {
        ip: Ipv4Addr::new(10, 1, 2, 4),
        number: 0x1C5,
        first_packet: 0x123456,
        key: 0x9876,
        address: 0x7fff_1234_5678,
        bytes: 2 << 20,
    };
    bus.connect(&local, &remote).unwrap();
    let gid = 0x0A01_0204_0A01_0204;
    assert_eq!(
        taken(&recorder),
        [
            Done::Request(0, 13, vec![1, 0x86 << 32, 0xABCD_EF12_3456, 0x7fff_1234_5678_9876]),
            Done::Request(0, 14, vec![1, 0x100_01C5_0086, gid, gid]),
            Done::Request(0, 10, vec![1, 0x0A01_0204]),
        ]
    );
    let text = bus.queue_pairs(ip, 64).unwrap_err().message;
    assert_eq!(text, "card behind Coyote, region 2 has contexts for 63 peers, not for 64");
    drop(bus);
    let pages = [FIRST_PAGE, FIRST_PAGE + PAGE_BYTES];
    assert_eq!(
        taken(&recorder),
        [
            Done::Request(1, 6, vec![pages[0], 6]),
            Done::Unmap(pages[0]),
            Done::Request(2, 6, vec![pages[1], 7]),
            Done::Unmap(pages[1]),
            Done::Request(2, 8, vec![7]),
            Done::Request(1, 8, vec![6]),
            Done::Request(0, 8, vec![5]),
        ]
    );
}

/// Returns the cards of a world with their settings, and the text that each returned from [`Bus::local_info`].
fn world(ranks: u32) -> (Vec<(Recorder, CoyoteBus, Settings)>, Vec<String>) {
    let peer = |rank: u32| Peer { ip: Ipv4Addr::new(10, 10, 10, rank as u8 + 1), port: 5500, session: map::NO_SESSION };
    let peers: Vec<Peer> = (0..ranks).map(peer).collect();
    let mut cards: Vec<_> = (0..ranks)
        .map(|rank| {
            let recorder = Recorder::new(RDMA_ON_0);
            let bus = opened(&recorder);
            (recorder, bus, Settings::new(map::Network::Rdma, rank, peers.clone()))
        })
        .collect();
    let infos = cards.iter_mut().map(|(_, bus, settings)| bus.local_info(settings).unwrap().unwrap()).collect();
    (cards, infos)
}

#[test]
fn each_pair_of_ranks_connects_the_ends_that_they_have_made_for_each_other() {
    for ranks in [1, 2, 3, 5] {
        let (mut cards, infos) = world(ranks);
        let ends: Vec<_> = infos.iter().map(|text| QueuePair::all_from_text(text).unwrap()).collect();
        for (rank, (recorder, bus, settings)) in cards.iter_mut().enumerate() {
            taken(recorder);
            bus.receive_info(&infos, settings).unwrap();
            let mut wanted = Vec::new();
            for (peer, of_peer) in ends.iter().enumerate().filter(|(peer, _)| *peer != rank) {
                let (local, remote) = (ends[rank][peer].unwrap(), of_peer[rank].unwrap());
                let with = |words: [u64; 3]| [vec![0], words.to_vec()].concat();
                wanted.push(Done::Request(0, 13, with(local.context_words(&remote))));
                wanted.push(Done::Request(0, 14, with(local.connection_words(&remote, 0))));
                wanted.push(Done::Request(0, 10, vec![0, u64::from(remote.ip.to_bits())]));
                assert_eq!(settings.peers[peer].session, local.number);
            }
            assert_eq!(taken(recorder), wanted, "rank {rank} of {ranks}");
            assert_eq!(settings.check_sessions(), Ok(()));
        }
    }
}

#[test]
fn invalid_queue_pairs_are_reported_with_the_rank_that_sent_them() {
    let (mut cards, infos) = world(3);
    let ends = QueuePair::all_from_text(&infos[1]).unwrap();
    let text = |change: &dyn Fn(&mut Vec<Option<QueuePair>>)| {
        let mut ends = ends.clone();
        change(&mut ends);
        QueuePair::all_to_text(&ends)
    };
    let pair = |ends: &mut Vec<Option<QueuePair>>, change: &dyn Fn(&mut QueuePair)| change(ends[0].as_mut().unwrap());
    for (text, why) in [
        (String::new(), "EOF while parsing a value"),
        ("{}".to_owned(), "invalid type: map"),
        (text(&|ends| ends.truncate(2)), "got 2 of 3"),
        (text(&|ends| ends[0] = None), "none of them is for this rank"),
        (text(&|ends| pair(ends, &|pair| pair.first_packet = 1 << 24)), "a number is too large for a card"),
        (text(&|ends| pair(ends, &|pair| pair.number = 1 << 10)), "a number is too large for a card"),
    ] {
        let infos = [infos[0].clone(), text, infos[2].clone()];
        let (recorder, bus, settings) = &mut cards[0];
        taken(recorder);
        let message = bus.receive_info(&infos, settings).unwrap_err().message;
        let begins = "rank 0: invalid queue pairs from rank 1: ";
        assert!(message.starts_with(&format!("{begins}{why}")), "{message}");
        assert_eq!(taken(recorder), [], "nothing is connected");
    }
    let (_, bus, settings) = &mut cards[0];
    let message =
        bus.receive_info(&[infos[1].clone(), infos[1].clone(), infos[2].clone()], settings).unwrap_err().message;
    assert!(message.contains("they differ from the queue pairs that this rank sent"), "{message}");
    assert_eq!(settings.check_sessions().unwrap_err().message, "the device of rank 0 has no session to ranks 1, 2");
}

#[test]
fn a_fresh_connection_only_looks() {
    let recorder = Recorder { word: 3, ..Recorder::new(RDMA_ON_0) };
    let bus = opened(&recorder);
    taken(&recorder);
    let mut fresh = bus.reconnect().unwrap();
    assert_eq!(fresh.read_register(0), Ok(3));
    assert!(fresh.write_register(0, 1).is_err());
    assert!(fresh.start(&Descriptor::new(Operation::Nop)).is_err());
    assert!(fresh.allocate(Memory::Host, 1).is_err());
    drop(fresh);
    assert_eq!(taken(&recorder), [Done::Read(0)]);
}

#[test]
fn a_missing_card_and_the_driver_of_v2_have_different_errors() {
    let text = CoyoteBus::open(4_000_000).err().unwrap().message;
    assert!(text.starts_with("no card behind Coyote at /dev/fpga4000000: "), "{text}");
    let devices = tempdir().unwrap();
    let said = |devices: &Path| missing(devices, 0, &Kernel::open(devices, 0).err().unwrap()).message;
    assert!(said(devices.path()).ends_with("; load the driver of Coyote v1 and a shell with an engine"));
    std::fs::write(devices.path().join("coyote_fpga_0_v0"), "").unwrap();
    assert!(said(devices.path()).ends_with("is not supported; load the driver of Coyote v1"));
}

/// An ordinary file can be opened and mapped, but it refuses requests, so it is reported as no device.
#[test]
fn what_is_no_device_is_refused() {
    let devices = tempdir().unwrap();
    std::fs::write(devices.path().join("fpga0"), vec![0; 64 << 10]).unwrap();
    let mut kernel = Kernel::open(devices.path(), 0).unwrap();
    kernel.write_word(3, 7);
    assert_eq!(kernel.read_word(3), 7);
    let again = kernel.again().unwrap();
    assert_eq!(again.read_word(3), 7, "both map the same registers");
    let text = CoyoteBus::with(Box::new(kernel), 0).err().unwrap().message;
    assert!(text.starts_with("card behind Coyote, region 0 could not read its configuration: "), "{text}");
}

/// Tests accesses to buffers if huge pages are free, and otherwise prints that none are.
#[test]
fn pages_are_read_and_written_within_their_bounds() {
    let devices = tempdir().unwrap();
    std::fs::write(devices.path().join("fpga0"), vec![0; 64 << 10]).unwrap();
    let mut kernel = Kernel::open(devices.path(), 0).unwrap();
    assert!(kernel.write_pages(0x1000, &[1]).is_err(), "no buffer is there");
    let address = match kernel.map_pages(PAGE_BYTES as usize) {
        Ok(address) => address,
        Err(error) => return println!("skipped: no huge page is free: {error}"),
    };
    kernel.write_pages(address + PAGE_BYTES - 4, b"abcd").unwrap();
    let mut seen = [0; 4];
    kernel.read_pages(address + PAGE_BYTES - 4, &mut seen).unwrap();
    assert_eq!(&seen, b"abcd");
    assert!(kernel.write_pages(address + PAGE_BYTES - 3, b"abcd").is_err());
    assert!(kernel.read_pages(address - 1, &mut seen).is_err());
    kernel.unmap_pages(address);
    assert!(kernel.read_pages(address, &mut seen).is_err());
}

#[test]
fn a_region_that_another_driver_has_is_refused_before_anything_of_it_changes() {
    let recorder = Recorder { is_taken: true, ..Recorder::new(RDMA_ON_0) };
    let mut bus = opened(&recorder);
    taken(&recorder);
    let peer = |session| Peer { ip: [127, 0, 0, 1].into(), port: 5500, session };
    let settings = Settings::new(map::Network::Rdma, 0, vec![peer(0), peer(1)]);
    let text = bus.local_info(&settings).unwrap_err().message;
    let said = "card behind Coyote, region 2 is in use by another driver on this host, or by an earlier group of this process whose last call did \
                not complete, and a device has one driver at a time; ";
    assert!(text.starts_with(said), "{text}");
    assert_eq!(taken(&recorder), []);
    let busy = io::Error::from_raw_os_error(16);
    let text = missing(Path::new("/dev"), 0, &busy).message;
    assert!(text.ends_with("; another process uses the card: end that process, or use another region"), "{text}");
}

#[test]
fn a_region_has_one_driver_until_its_file_is_closed() {
    let devices = tempdir().unwrap();
    std::fs::write(devices.path().join("fpga0"), vec![0; 64 << 10]).unwrap();
    let open = || Kernel::open(devices.path(), 0).unwrap();
    let (mut first, mut second) = (open(), open());
    assert!(first.claim().unwrap() && first.claim().unwrap(), "it may be asked for again");
    assert!(!second.claim().unwrap());
    let looks = first.again().unwrap();
    drop(first);
    assert!(second.claim().unwrap());
    drop(looks);
    second.keep_open();
    drop(second);
    assert!(!open().claim().unwrap(), "the card may still write to the buffers of one that is kept open");
}

#[test]
fn a_card_that_may_still_write_to_its_buffers_keeps_them() {
    let recorder = Recorder::new(RDMA_ON_0);
    let mut bus = opened(&recorder);
    bus.allocate(Memory::Device, 4096).unwrap();
    bus.keep_buffers();
    taken(&recorder);
    drop(bus);
    assert_eq!(taken(&recorder), [Done::KeepOpen]);
}

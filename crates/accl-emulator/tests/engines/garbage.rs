//! Engines survive any requests and packets: nothing panics, loops forever, or takes unbounded memory.

use crate::support::world::{Settings, World};
use accl_cclo::call::{ConfigFunction, Descriptor, Operation, Words};
use accl_cclo::control::Request;
use accl_cclo::memory_map::{self as map, DataType, Network};
use accl_cclo::wire::{Header, MessageKind, RequestWord, Verb, WORD_BYTES, packets};
use accl_emulator::{Caller, Engine, Faithful};
use proptest::prelude::*;

/// Maximum number of turns that engines may take to become idle without new input. Sending all memory, in segments of one byte, to as many ranks as a
/// table holds takes about five thousand turns.
const MOST_TURNS: usize = 8192;
/// Size in bytes of the memory that requests reach. A table may ask for rx buffers of one element. Then all memory is as many segments, and a
/// broadcast sends each segment to every rank.
const MOST_MEMORY: u64 = 1 << 14;
/// Maximum number of packets in one turn. Each has at most a page and its words. Once `Vec` accepts no more data, only notices are added.
const MOST_SENT: usize = 2048;

#[derive(Clone, Debug)]
enum Act {
    Ask(Request),
    Text(Vec<u8>),
    Unknown(u32),
    Packet(u32, Vec<u8>),
    Feed(Vec<u8>),
    Lose(u32),
    Find(u32),
}

/// Returns words that are significant for engines, and any others.
fn word() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => 0u32..20,
        2 => prop::sample::select(vec![0x1C8, 0x200, 0x248, 256, 1024, 8184, 8188, 8192, 1 << 20, 1 << 31]),
        2 => prop::sample::select(vec![u32::MAX, u32::MAX - 1, u32::MAX - 9, i32::MAX as u32]),
        1 => any::<u32>(),
    ]
}

fn address() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => 0u64..10_000,
        2 => word().prop_map(u64::from),
        1 => any::<u64>(),
        1 => (0u64..5000).prop_map(|before| u64::MAX - before),
    ]
}

fn call() -> impl Strategy<Value = Descriptor> {
    let words = prop::collection::vec(word(), Words::COUNT);
    (0u32..16, 0u32..20, 0u32..3, 0u32..8, words, address(), address(), address()).prop_filter_map(
        "a call",
        |(operation, compression, streams, hosts, mut words, first, second, result)| {
            words[0] = if operation == 15 { 255 } else { operation };
            (words[7], words[8]) = (compression % 16, hosts << 8 | streams);
            let call = Descriptor::from_words(words[..].try_into().ok()?).ok()?;
            Some(Descriptor { first, second, result, ..call })
        },
    )
}

/// Returns a plausible call for an engine that is set up, with perhaps a few arbitrary fields.
fn likely_call() -> impl Strategy<Value = Descriptor> {
    let tag = prop::sample::select(vec![0u32, 1, 7, u32::MAX]);
    let is_likely = prop::collection::vec(prop::bool::weighted(0.8), 8);
    (call(), 0u32..600, 0u32..3, tag, is_likely).prop_map(|(call, count, root, tag, is_likely)| {
        let or = |index: usize, likely: u32, other: u32| if is_likely[index] { likely } else { other };
        let below = |index: usize, address: u64| if is_likely[index] { address % MOST_MEMORY } else { address };
        Descriptor {
            count: or(0, count, call.count),
            root: or(1, root, call.root),
            tag: or(2, tag, call.tag),
            function: or(3, call.function % 3, call.function),
            communicator: or(4, LIKELY.0, call.communicator),
            arithmetic: or(5, LIKELY.1, call.arithmetic),
            first: below(6, call.first),
            result: below(7, call.result),
            ..call
        }
    })
}

/// Offsets of the communicator and of the config for single precision in worlds of three ranks.
const LIKELY: (u32, u32) = (0x1C8, 0x23C);

fn header() -> impl Strategy<Value = Header> {
    let kind = prop::sample::select(vec![
        MessageKind::Eager,
        MessageKind::Rendezvous,
        MessageKind::Address,
        MessageKind::Done,
    ]);
    (kind, prop::array::uniform8(word()), address(), any::<bool>()).prop_map(|(kind, words, address, is_host)| Header {
        count: words[0],
        tag: words[1],
        source: words[2],
        sequence: words[3],
        stream: words[4],
        destination: words[5] as u16,
        kind,
        is_host,
        address,
        communicator: words[6],
        packet_number: words[7],
    })
}

fn packet() -> impl Strategy<Value = Vec<u8>> {
    let any_bytes = prop::collection::vec(any::<u8>(), 0..300);
    let with_header = (header(), prop::collection::vec(any::<u8>(), 0..200))
        .prop_map(|(header, data)| [&header.to_bytes()[..], &data].concat());
    let over_rdma = (header(), address(), word(), any::<bool>(), prop::collection::vec(any::<u8>(), 0..200)).prop_map(
        |(header, address, bytes, is_host, data)| {
            let verb = if is_host { Verb::Write } else { Verb::Send };
            let word = RequestWord { address, bytes, is_host, queue_pair: 1, verb };
            [&word.to_bytes()[..], &header.to_bytes()[..], &data].concat()
        },
    );
    let whole =
        (header(), prop::collection::vec(any::<u8>(), 0..200), any::<bool>()).prop_map(|(header, data, is_rdma)| {
            let network = if is_rdma { Network::Rdma } else { Network::Tcp };
            let header = Header { count: data.len() as u32, ..header };
            packets(network, &header, &data, 0).next().map(|packet| packet.to_bytes()).unwrap_or_default()
        });
    prop_oneof![any_bytes, with_header, over_rdma, whole]
}

fn request() -> impl Strategy<Value = Request> {
    // Far less than an engine allows, since there are many requests.
    let small = 0u32..100_000;
    prop_oneof![
        word().prop_map(|offset| Request::ReadRegister { offset }),
        (0u32..2100, word()).prop_map(|(index, value)| Request::WriteRegister { offset: 4 * index, value }),
        (prop::sample::select(map::REGISTERS.to_vec()), word())
            .prop_map(|(register, value)| Request::WriteRegister { offset: register.offset, value }),
        (address(), word(), any::<bool>()).prop_map(|(address, bytes, is_host)| Request::ReadMemory {
            address,
            bytes,
            is_host
        }),
        (address(), prop::collection::vec(any::<u8>(), 0..100), any::<bool>()).prop_map(|(address, data, is_host)| {
            Request::WriteMemory { address: address % MOST_MEMORY, data, is_host }
        }),
        (address(), small, any::<bool>()).prop_map(|(address, bytes, is_host)| Request::Allocate {
            address: address % MOST_MEMORY,
            bytes,
            is_host
        }),
        (0u32..5, call()).prop_map(|(control, call)| Request::Call { control, call }),
        (0u32..5, likely_call()).prop_map(|(control, call)| Request::Call { control, call }),
        (0u32..5, 0u32..6, word()).prop_map(|(control, function, count)| Request::Call {
            control,
            call: Descriptor { function, count, ..Descriptor::config(ConfigFunction::Reset, 0) }
        }),
        (0u32..5).prop_map(|control| Request::Poll { control }),
        Just(Request::About),
        ("[a-z]{0,9}", any::<u32>()).prop_map(|(owner, job)| Request::Claim { owner, job }),
    ]
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        8 => request().prop_map(Act::Ask),
        1 => prop::collection::vec(any::<u8>(), 0..60).prop_map(Act::Text),
        1 => (0u32..5).prop_map(Act::Unknown),
        4 => (0u32..4, packet()).prop_map(|(sender, packet)| Act::Packet(sender, packet)),
        1 => prop::collection::vec(any::<u8>(), 0..200).prop_map(Act::Feed),
        1 => (0u32..4).prop_map(Act::Lose),
        1 => (0u32..4).prop_map(Act::Find),
    ]
}

/// Performs all acts on rank 0 of a world that is set up correctly; its peers behave as they should.
fn survives(network: Network, faithful: Faithful, acts: Vec<Act>) -> Result<(), TestCaseError> {
    let settings = Settings { faithful, ..Settings::new(network, 3) };
    let mut world = World::new(settings);
    let likely = world.call(Operation::Send, DataType::F32, 1);
    prop_assert_eq!((likely.communicator, likely.arithmetic), LIKELY);
    for act in acts {
        let engine = &mut world.engines[0];
        match act {
            Act::Ask(request) => drop(engine.answer(&request)),
            Act::Text(text) => drop(Request::from_json(&text).map(|request| engine.answer(&request))),
            Act::Unknown(control) => drop(engine.start_unknown(Caller::default(), control)),
            Act::Packet(sender, packet) => engine.take(sender, &packet),
            Act::Feed(bytes) => engine.feed(&bytes),
            Act::Lose(sender) => engine.lose(sender),
            Act::Find(sender) => engine.find(sender),
        }
        for turn in 0.. {
            prop_assert!(turn < MOST_TURNS, "{:?} goes on for ever", world.engines[0].running());
            let mut sent = Vec::new();
            let has_moved = world.engines[0].advance(&mut sent);
            prop_assert!(sent.len() < MOST_SENT, "{} packets at a time", sent.len());
            prop_assert!(sent.iter().all(|(_, packet)| packet.len() <= 4096 + 2 * WORD_BYTES));
            for (to, packet) in sent {
                if let Some(peer) = world.engines[1..].get_mut((to as usize).wrapping_sub(1)) {
                    peer.take(0, &packet);
                }
            }
            while world.engines[0].take_fed().is_some() {}
            if !has_moved {
                break;
            }
        }
        let _ = world.engines[0].trouble();
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn engines_survive_whatever_is_asked_and_sent(
        network in prop::sample::select(vec![Network::Udp, Network::Tcp, Network::Rdma]),
        is_faithful in any::<bool>(),
        acts in prop::collection::vec(act(), 0..60),
    ) {
        survives(network, if is_faithful { Faithful::all() } else { Faithful::default() }, acts)?;
    }

    #[test]
    fn calls_of_any_words_on_any_tables_end_or_wait(
        network in prop::sample::select(vec![Network::Udp, Network::Tcp, Network::Rdma]),
        is_faithful in any::<bool>(),
        table in prop::collection::vec((0u32..2048, word()), 0..40),
        likely in any::<bool>(),
        calls in prop::collection::vec((call(), likely_call()), 1..8),
    ) {
        let writes = table.into_iter().map(|(index, value)| Act::Ask(Request::WriteRegister { offset: 4 * index, value }));
        let calls = calls.into_iter().map(|(any, call)| Act::Ask(Request::Call { control: 0, call: if likely { call } else { any } }));
        survives(network, if is_faithful { Faithful::all() } else { Faithful::default() }, writes.chain(calls).collect())?;
    }
}

/// Regression test, found by random testing with 4 MiB of memory. The segments took more turns than this test allows, but the call did end.
#[test]
fn a_send_of_all_memory_in_segments_of_one_element_ends() {
    let call = Descriptor {
        operation: Operation::Send,
        count: u32::MAX,
        communicator: LIKELY.0,
        arithmetic: LIKELY.1,
        ..Descriptor::config(ConfigFunction::Reset, 0)
    };
    for communicator in [0, LIKELY.0] {
        let acts = vec![
            Act::Ask(Request::WriteRegister { offset: 4, value: 0 }),
            Act::Ask(Request::WriteMemory { address: MOST_MEMORY - 1, data: Vec::new(), is_host: false }),
            Act::Ask(Request::Call { control: 0, call: Descriptor { communicator, ..call } }),
        ];
        survives(Network::Udp, Faithful::default(), acts).unwrap();
    }
}

/// Regression test, found by random testing. The table's words looked like hundreds of ranks, so the packets took 250 turns, but the call did end.
#[test]
fn a_broadcast_in_segments_of_one_element_to_all_ranks_that_a_table_seems_to_have_ends() {
    let mut call = Descriptor {
        operation: Operation::Broadcast,
        count: 1024,
        communicator: 4,
        arithmetic: LIKELY.1,
        ..Descriptor::config(ConfigFunction::Reset, 0)
    };
    call.streams.result = true;
    call.hosts.second = true;
    let calls = [Descriptor::config(ConfigFunction::Reset, 0), call];
    let acts = calls.map(|call| Act::Ask(Request::Call { control: 0, call })).to_vec();
    survives(Network::Udp, Faithful::default(), acts).unwrap();
}

#[test]
fn packets_that_no_call_receives_are_kept_up_to_a_bound() {
    const PACKET: usize = 4096;
    let mut world = World::new(Settings::new(Network::Tcp, 2));
    let header = Header {
        count: u32::MAX,
        tag: 1,
        source: 1,
        sequence: 0,
        stream: 0,
        destination: 0,
        kind: MessageKind::Eager,
        is_host: false,
        address: 0,
        communicator: 0,
        packet_number: 0,
    };
    let mut first = header.to_bytes().to_vec();
    first.resize(PACKET, 0);
    let mut taken = 0;
    while world.engines[0].trouble().is_empty() {
        world.engines[0].take(1, &first);
        taken += PACKET;
        assert!(taken <= 65 << 20, "it takes everything");
    }
    assert_eq!(
        world.engines[0].trouble(),
        "cannot receive from rank 1: it sent more packets than this engine can hold"
    );
    assert_eq!(world.engines[0].held(1), 0);
}

#[test]
fn notices_that_no_call_takes_are_kept_up_to_a_bound() {
    let mut world = World::new(Settings::new(Network::Rdma, 2));
    let header = Header {
        count: 1,
        tag: 1,
        source: 1,
        sequence: 0,
        stream: 0,
        destination: 0,
        kind: MessageKind::Address,
        is_host: false,
        address: 0,
        communicator: 0,
        packet_number: 0,
    };
    let packet = packets(Network::Rdma, &header, &[], 0).next().unwrap().to_bytes();
    for _ in 0..1 << 15 {
        world.engines[0].take(1, &packet);
    }
    assert!(!world.engines[0].has_room(1), "what comes then waits, and is not taken any more");
}

#[test]
fn unwritten_memory_takes_up_address_space_only() {
    const LARGE: u64 = 1 << 30;
    let resident_kib = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
    let before = resident_kib();
    let mut engine = Engine::new(Network::Udp, Faithful::default());
    let memory = engine.memory(false);
    assert!(memory.grow(0, LARGE));
    memory.read_mut(LARGE - 2, 2).unwrap().fill(7);
    assert!(memory.grow(LARGE, 1));
    assert_eq!(memory.read(LARGE - 3, 4), Some(&[0, 7, 7, 0][..]));
    assert!(resident_kib().saturating_sub(before) < LARGE >> 14, "unwritten memory is resident");
}

#[test]
fn memory_of_no_engine_is_read_without_a_bound() {
    let mut engine = Engine::new(Network::Udp, Faithful::default());
    let most = (1u32 << 31) - 1;
    for request in [
        Request::Allocate { address: 0, bytes: most, is_host: false },
        Request::ReadMemory { address: 0, bytes: most, is_host: false },
        Request::Allocate { address: 1 << 40, bytes: 1, is_host: true },
        Request::WriteMemory { address: u64::MAX, data: vec![1], is_host: true },
    ] {
        drop(engine.answer(&request));
    }
    assert_eq!(engine.memory(true).len_bytes(), 0);
}

//! Tests of hazards 8 to 13 on faithful and on repaired engines. Hazards 1 to 7 are in the matrix.

use std::time::Duration;

use crate::support::host::{self, Emulators, Host, free_ports, run, start, words};
use crate::support::world::{Ended, Settings, World};
use accl_cclo::call::{ConfigFunction, Descriptor, Operation, Streams};
use accl_cclo::control::{Reply, Request, Status};
use accl_cclo::memory_map::{Communicator, DataType, NO_SESSION, Network};
use accl_cclo::return_code::ReturnCode;
use accl_emulator::{Engine, Faithful};

const GOOD: Ended = Some(ReturnCode(0));
const COUNT: u32 = 300;

/// Returns floats that identify their rank and index.
fn floats(rank: u32, count: u32) -> Vec<u8> {
    (0..count).flat_map(|index| ((rank * 1000 + index) as f32).to_le_bytes()).collect()
}

/// Returns a world whose ranks hold such floats.
fn world(settings: Settings) -> World {
    let mut world = World::new(settings);
    for rank in 0..settings.world {
        world.fill(rank, &floats(rank, COUNT * settings.world));
    }
    world
}

fn both(hazard: u8) -> [(Faithful, bool); 2] {
    [(Faithful::default().with(hazard), true), (Faithful::default(), false)]
}

#[test]
fn ranks_that_send_in_different_orders_wait_for_each_other_either_way() {
    for (faithful, _) in both(8) {
        let mut world = world(Settings { faithful, ..Settings::new(Network::Udp, 2) });
        let recv = world.call(Operation::Recv, DataType::F32, 4);
        let calls = [1, 0].map(|root| Descriptor { root, tag: 1, ..recv });
        assert_eq!(world.run(&calls), [None, None]);
        let sends = calls.map(|call| Descriptor { operation: Operation::Send, ..call });
        assert_eq!(world.run(&sends), [None, None], "a call holds its engine until it ends");
    }
}

#[test]
fn a_fourth_call_that_is_started_before_the_end_of_the_first_was_asked_for_silences_the_rank() {
    let nop = Request::Call { control: 0, call: Descriptor::new(Operation::Nop) }.to_json();
    let is_answered = |faithful: &str, stays_quiet: Duration| {
        let port = free_ports(8);
        let _emulators = Emulators(vec![start(&words(&format!("-s 2 --port {port}{faithful}")))]);
        let mut answered = 0;
        run(async {
            let mut host = Host::connect(port).await;
            while answered < 5 && host.answer(nop.clone(), stays_quiet).await.is_some() {
                answered += 1;
            }
            let mut other = Host::connect(port + 1).await;
            assert_eq!(other.register(8184).await, 0, "another rank is not held up");
        });
        answered
    };
    // Only a timeout can show that no answer comes. If an answer must come, the test waits longer.
    assert_eq!(is_answered(" --faithful=9", Duration::from_millis(500)), 3);
    assert_eq!(is_answered("", host::PATIENCE), 5);
}

#[test]
fn three_calls_may_wait_for_their_end_to_be_asked_for_at_a_time() {
    let mut engine = Engine::new(Network::Udp, Faithful::all());
    let mut sent = Vec::new();
    let nop = Descriptor::new(Operation::Nop);
    for control in 0..3 {
        for _ in 0..3 {
            assert!(engine.start(control, nop));
            engine.advance(&mut sent);
        }
    }
    assert!(!engine.is_hung(), "each control stream counts for itself");
    engine.answer(&Request::Poll { control: 1 });
    assert!(engine.start(1, nop) && !engine.is_hung());
    assert!(engine.start(1, nop) && engine.is_hung());
}

/// Returns which of 40 messages to a kernel stream hangs its sender: a list with the first such message, or an empty list.
fn hanging(faithful: Faithful, network: Network, seed: u64) -> Vec<u32> {
    let mut world = world(Settings { faithful, ..Settings::new(network, 2) });
    world.engines = world.engines.into_iter().map(|engine| engine.with_seed(seed)).collect();
    let send = world.call(Operation::Send, DataType::F32, 4);
    let put = Descriptor { root: 1, tag: 9, streams: Streams { first: false, result: true }, ..send };
    let mut hanging = Vec::new();
    for message in 0..40 {
        let [ended, _] = world.run(&[put, Descriptor::new(Operation::Nop)])[..] else { panic!("two ranks") };
        if ended.is_none() {
            // Nothing ends the hang of the engine, so no further message can be sent.
            hanging.push(message);
            return hanging;
        }
        assert_eq!(world.engines[1].take_fed(), Some((9, floats(0, 4))));
    }
    hanging
}

#[test]
fn a_message_to_a_kernel_stream_hangs_over_rdma_now_and_then_by_seed() {
    let tenth = Faithful::default().with(10);
    let first: Vec<Vec<u32>> = (0..20).map(|seed| hanging(tenth, Network::Rdma, seed)).collect();
    let again: Vec<Vec<u32>> = (0..20).map(|seed| hanging(tenth, Network::Rdma, seed)).collect();
    assert_eq!(first, again, "the same seed hangs the same message");
    assert!(first.iter().any(|hanging| *hanging != first[0]), "seeds differ: {first:?}");
    assert!(first.iter().all(|hanging| !hanging.is_empty()), "one in four of 40 hangs: {first:?}");
    for network in [Network::Udp, Network::Tcp] {
        assert_eq!(hanging(tenth, network, 0), [0; 0]);
    }
    assert_eq!(hanging(Faithful::default(), Network::Rdma, 0), [0; 0]);
}

/// Returns whether a rendezvous call gives correct results on all ranks if some of the buffers lie in host memory.
fn is_right(faithful: Faithful, operation: Operation, is_flat: bool, in_host: u32) -> bool {
    let ranks = 3;
    let flat_ranks = if is_flat { ranks } else { 1 };
    let settings = Settings { faithful, others: in_host, flat_ranks, ..Settings::new(Network::Rdma, ranks) };
    let mut world = world(settings);
    let call = world.call(operation, DataType::F32, COUNT);
    let ended = world.run(&[call; 3]);
    let block = |rank: u32, at: u32| {
        let begin = (4 * COUNT * at) as usize;
        floats(rank, COUNT * ranks)[begin..begin + 4 * COUNT as usize].to_vec()
    };
    ended.iter().all(|ended| *ended == GOOD)
        && (0..ranks).all(|rank| match operation {
            Operation::Broadcast => world.source(rank, 4 * COUNT as usize) == floats(0, COUNT),
            Operation::AllToAll => {
                let wanted: Vec<u8> = (0..ranks).flat_map(|from| block(from, rank)).collect();
                world.result(rank, wanted.len()) == wanted
            }
            _ => {
                let sums = (0..COUNT).flat_map(|index| ((3000 + 3 * index) as f32).to_le_bytes());
                world.result(rank, 4 * COUNT as usize) == sums.collect::<Vec<u8>>()
            }
        })
}

#[test]
fn buffers_of_one_rendezvous_collective_in_both_memories_are_written_to_the_wrong_one() {
    let eleventh = Faithful::default().with(11);
    let (flat, tree) = (true, false);
    // The bit mask names the ranks in host memory.
    for (operation, is_flat, in_host, how) in [
        (Operation::Broadcast, flat, 0b000, true),
        (Operation::Broadcast, flat, 0b111, true),
        (Operation::Broadcast, flat, 0b001, false),
        (Operation::Broadcast, flat, 0b110, true),
        (Operation::Broadcast, flat, 0b010, true),
        (Operation::Broadcast, tree, 0b000, true),
        (Operation::Broadcast, tree, 0b111, true),
        (Operation::Broadcast, tree, 0b001, false),
        (Operation::Broadcast, tree, 0b110, false),
        (Operation::Broadcast, tree, 0b010, false),
        (Operation::AllToAll, flat, 0b000, true),
        (Operation::AllToAll, flat, 0b111, true),
        (Operation::AllToAll, flat, 0b001, false),
        (Operation::AllReduce, flat, 0b000, true),
        (Operation::AllReduce, flat, 0b111, true),
        (Operation::AllReduce, flat, 0b001, false),
        (Operation::AllReduce, flat, 0b110, true),
    ] {
        assert_eq!(is_right(eleventh, operation, is_flat, in_host), how, "{operation:?}, flat {is_flat}, {in_host:#b}");
        assert!(
            is_right(Faithful::default(), operation, is_flat, in_host),
            "{operation:?}, flat {is_flat}, {in_host:#b}"
        );
    }
}

/// Sends one message on each of two communicators from rank 0, with the same tag; rank 1 receives them in the other order. Returns whether each
/// message was received on the communicator on which it was sent.
fn are_matched_to_communicators(network: Network, count: u32, [sender, receiver]: [Faithful; 2]) -> Vec<bool> {
    let settings = Settings { rx_count: 64, ..Settings::new(network, 2) };
    let mut world = world(settings);
    world.engines = [sender, receiver].into_iter().map(|faithful| Engine::new(network, faithful)).collect();
    world.set_up_all();
    for rank in 0..2 {
        world.fill(rank, &floats(rank, 2 * COUNT));
    }
    let second = world.second_communicator();
    let [send, recv] = [Operation::Send, Operation::Recv].map(|operation| world.call(operation, DataType::F32, count));
    let bytes = u64::from(4 * count);
    let sends = [0, 1].map(|which| {
        let communicator = [send.communicator, second][which as usize];
        Descriptor { root: 1, tag: 7, communicator, first: send.first + which * bytes, ..send }
    });
    let takes = [1, 0].map(|which| {
        let communicator = [recv.communicator, second][which as usize];
        Descriptor { root: 0, tag: 7, communicator, result: recv.result + which * bytes, ..recv }
    });
    for (send, take) in sends.into_iter().zip(takes) {
        for (engine, call) in world.engines.iter_mut().zip([send, take]) {
            assert!(engine.start(0, call));
        }
    }
    world.run(&[Descriptor::new(Operation::Nop); 2]);
    let got = world.result(1, 2 * bytes as usize);
    got.chunks(bytes as usize).zip(floats(0, 2 * count).chunks(bytes as usize)).map(|(got, sent)| got == sent).collect()
}

#[test]
fn messages_of_two_communicators_of_the_same_ranks_are_swapped() {
    let (twelfth, repaired) = (Faithful::default().with(12), Faithful::default());
    for network in [Network::Udp, Network::Tcp, Network::Rdma] {
        assert_eq!(are_matched_to_communicators(network, 30, [twelfth; 2]), [false; 2], "{network:?}");
        assert_eq!(are_matched_to_communicators(network, 30, [repaired; 2]), [true; 2], "{network:?}");
        // If one end names no communicator, messages are matched as by firmware.
        assert_eq!(are_matched_to_communicators(network, 30, [twelfth, repaired]), [false; 2], "{network:?}");
        assert_eq!(are_matched_to_communicators(network, 30, [repaired, twelfth]), [false; 2], "{network:?}");
    }
}

#[test]
fn a_host_that_leaves_its_own_session_out_is_of_the_same_communicator() {
    let settings = Settings::new(Network::Udp, 3);
    let mut world = world(settings);
    let call = world.call(Operation::AllReduce, DataType::F32, 30);
    for rank in 0..3u32 {
        let engine =
            std::mem::replace(&mut world.engines[rank as usize], Engine::new(Network::Udp, Faithful::default()));
        world.engines[rank as usize] = engine.with_session(rank);
        let session = call.communicator + 4 * (Communicator::entry_at(rank as usize) as u32 + 4);
        world.engines[rank as usize].answer(&Request::WriteRegister { offset: session, value: NO_SESSION });
    }
    assert_eq!(world.run(&[call; 3]), [GOOD; 3]);
}

#[test]
fn a_packet_that_was_lost_ends_the_call_that_waits_for_its_sender() {
    for network in [Network::Udp, Network::Tcp, Network::Rdma] {
        let mut world = world(Settings::new(network, 2));
        let [send, recv] = [Operation::Send, Operation::Recv].map(|operation| world.call(operation, DataType::F32, 40));
        for message in 0..3 {
            assert!(world.engines[0].start(0, Descriptor { root: 1, tag: 7, ..send }));
            let mut packets = Vec::new();
            world.engines[0].advance(&mut packets);
            for (_, packet) in packets.iter().filter(|_| message != 1) {
                world.engines[1].take(0, packet);
            }
        }
        assert_eq!(world.engines[1].trouble(), "cannot receive from rank 0: packets from it were lost", "{network:?}");
        // The first message has arrived, the second has not.
        for wanted in [ReturnCode::default(), ReturnCode::WRONG_SEQUENCE] {
            assert!(world.engines[1].start(0, Descriptor { root: 0, tag: 7, ..recv }));
            assert_eq!(world.run(&[])[1], Some(wanted), "{network:?}");
        }
    }
}

#[test]
fn a_reset_waits_for_the_call_that_is_under_way_or_ends_it_and_those_behind_it() {
    for (faithful, is_held) in [(Faithful::default().with(13), true), (Faithful::default(), false)] {
        let mut world = world(Settings { faithful, ..Settings::new(Network::Udp, 2) });
        let call = world.call(Operation::AllReduce, DataType::F32, 30);
        let engine = &mut world.engines[0];
        for call in [call, call, Descriptor::config(ConfigFunction::Reset, 0)] {
            assert!(engine.start(0, call));
            engine.advance(&mut Vec::new());
        }
        let mut ends = 0;
        while engine.answer(&Request::Poll { control: 0 }) == Reply::Status(Status::Good) {
            ends += 1;
        }
        assert_eq!(ends, if is_held { 0 } else { 1 }, "the resetting host receives the end of its reset only");
        assert_eq!(engine.running().is_some(), is_held);
    }
}

//! The counter register holds the estimated duration of a call on a card, computed from the work of the engine.

use crate::support::world::{Settings, World};
use accl_cclo::call::{ConfigFunction, Descriptor, Operation};
use accl_cclo::control::{Reply, Request};
use accl_cclo::memory_map::{self as map, DataType, NANOSECONDS_PER_CYCLE, Network};
use accl_cclo::return_code::ReturnCode;
use accl_emulator::{CONSTANTS, Speed};

fn constant(name: &str) -> u64 {
    CONSTANTS.iter().find(|constant| constant.name == name).unwrap().value
}

fn cycles(world: &mut World, rank: u32) -> u64 {
    match world.engines[rank as usize].answer(&Request::ReadRegister { offset: map::CYCLES.offset }) {
        Reply::Register(cycles) => u64::from(cycles),
        other => panic!("{other:?}"),
    }
}

/// Returns each rank's cycles for an operation on single precision.
fn taken(settings: Settings, speed: Speed, operation: Operation, count: u32) -> Vec<u64> {
    let mut world = World::new(settings);
    world.engines = world.engines.into_iter().map(|engine| engine.with_speed(speed)).collect();
    let call = world.call(operation, DataType::F32, count);
    for rank in 0..settings.world {
        world.fill(rank, &vec![0; 4 * (count * settings.world) as usize]);
    }
    let ended = world.run(&vec![call; settings.world as usize]);
    assert!(ended.iter().all(|code| *code == Some(ReturnCode(0))), "{operation:?}: {ended:?}");
    (0..settings.world).map(|rank| cycles(&mut world, rank)).collect()
}

#[test]
fn a_nop_and_a_config_call_take_the_overhead_of_a_call() {
    let settings = Settings::new(Network::Udp, 1);
    assert_eq!(taken(settings, Speed::default(), Operation::Nop, 0), [constant("call")]);
    let mut world = World::new(settings);
    world.run(&[Descriptor::config(ConfigFunction::Timeout, 7)]);
    assert_eq!(cycles(&mut world, 0), constant("call"));
}

#[test]
fn a_copy_takes_a_move_and_a_cycle_for_each_word() {
    let settings = Settings::new(Network::Udp, 1);
    let wanted = constant("call") + constant("move") + 4 * 1600 / constant("width");
    assert_eq!(taken(settings, Speed::default(), Operation::Copy, 1600), [wanted]);
}

#[test]
fn a_slower_clock_takes_longer_by_the_register_whose_unit_stays() {
    let settings = Settings::new(Network::Udp, 1);
    let speed = Speed { clock_hz: 125_000_000, ..Speed::default() };
    assert_eq!(taken(settings, speed, Operation::Nop, 0), [2 * constant("call")]);
}

#[test]
fn an_eager_all_reduce_takes_a_hop_for_each_step_of_its_two_rings() {
    // Infinitely fast links and engines leave only the time of the hops.
    let speed = Speed { clock_hz: 1 << 50, link_bits_per_second: 1 << 50, hop_ps: 1_000_000 };
    for ranks in [2u64, 3, 5] {
        let settings = Settings { rx_bytes: 1024, ..Settings::new(Network::Udp, ranks as u32) };
        for nanoseconds in
            taken(settings, speed, Operation::AllReduce, 15 * ranks as u32).iter().map(|it| it * NANOSECONDS_PER_CYCLE)
        {
            assert_eq!(nanoseconds, 2 * (ranks - 1) * 1000, "{ranks} ranks");
        }
    }
}

#[test]
fn bytes_on_the_wire_take_what_the_link_says() {
    let speed = Speed { clock_hz: 1 << 50, link_bits_per_second: 8_000_000_000, hop_ps: 0 };
    // The link carries a byte per nanosecond: one message of 1,000 bytes with its header, and nothing in return.
    let settings = Settings { rx_bytes: 1024, ..Settings::new(Network::Tcp, 2) };
    let taken = taken(settings, speed, Operation::Broadcast, 250);
    assert_eq!(taken, [1064 / NANOSECONDS_PER_CYCLE, 1064 / NANOSECONDS_PER_CYCLE]);
}

#[test]
fn a_call_takes_as_long_in_every_run_and_longer_for_more() {
    for (network, operation) in
        [(Network::Udp, Operation::AllReduce), (Network::Rdma, Operation::AllToAll), (Network::Rdma, Operation::Gather)]
    {
        let of = |count| taken(Settings::new(network, 3), Speed::default(), operation, count);
        assert_eq!(of(300), of(300));
        assert!(of(300).iter().zip(of(900)).all(|(less, more)| *less < more), "{operation:?}");
    }
}

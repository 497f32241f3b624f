//! Tests of the driver on engines of the same process: setup, results of calls, and the report on a call that does not end.

use crate::support::local::{open, settings};
use accl_cclo::bus::{Bus, Memory};
use accl_cclo::call::{Descriptor, Operation};
use accl_cclo::driver::{Driver, Picture, Settings};
use accl_cclo::memory_map::{self as map, DataType, Network};
use accl_emulator::Faithful;
use accl_emulator::local::{LocalBus, LocalEngines};
use accl_types::Result;

fn drivers(network: Network, faithful: Faithful, ranks: u32) -> Vec<Driver<LocalBus>> {
    let world = LocalEngines::new(network, faithful, ranks);
    (0..ranks).map(|rank| open(&world, settings(network, rank, ranks)).unwrap()).collect()
}

fn message(result: Result<impl std::fmt::Debug>) -> String {
    result.unwrap_err().message
}

/// Returns an all_reduce of `count` floats that are 1 on each rank, and the address of its result.
fn all_reduce(driver: &mut Driver<LocalBus>, count: u32) -> (Descriptor, u64) {
    let memory = driver.settings().memory;
    let [from, to] = [0, 1].map(|_| driver.bus().allocate(memory, 4 * u64::from(count)).unwrap());
    let ones: Vec<u8> = (0..count).flat_map(|_| 1f32.to_le_bytes()).collect();
    driver.bus().write_memory(memory, from, &ones).unwrap();
    let call = driver.call(Operation::AllReduce, DataType::F32, DataType::F32, count).unwrap();
    (Descriptor { first: from, second: to, result: to, ..call }, to)
}

#[test]
fn calls_end_with_sums_on_all_ranks() {
    for network in [Network::Udp, Network::Tcp, Network::Rdma] {
        for memory in [Memory::Device, Memory::Host] {
            let world = LocalEngines::new(network, Faithful::all(), 3);
            let mut drivers: Vec<_> =
                (0..3).map(|rank| open(&world, Settings { memory, ..settings(network, rank, 3) }).unwrap()).collect();
            let calls: Vec<(Descriptor, u64)> = drivers.iter_mut().map(|driver| all_reduce(driver, 300)).collect();
            for (driver, (call, _)) in drivers.iter_mut().zip(&calls) {
                driver.start(call).unwrap();
            }
            for (driver, (_, result)) in drivers.iter_mut().zip(&calls) {
                assert!(driver.poll().unwrap().is_some());
                assert!(driver.poll().unwrap().is_none(), "an end is said once");
                let mut sums = vec![0; 1200];
                driver.bus().read_memory(memory, *result, &mut sums).unwrap();
                assert!(sums.as_chunks().0.iter().all(|&sum| f32::from_le_bytes(sum) == 3.0));
            }
        }
    }
}

#[test]
fn a_call_that_does_not_end_says_what_the_device_waits_for() {
    let mut drivers = drivers(Network::Udp, Faithful::all(), 2);
    let memory = drivers[0].settings().memory;
    let buffer = drivers[0].bus().allocate(memory, 4096).unwrap();
    let send = drivers[0].call(Operation::Send, DataType::F32, DataType::F32, 4).unwrap();
    drivers[0].start(&Descriptor { root: 1, tag: 7, first: buffer, ..send }).unwrap();
    assert!(drivers[0].poll().unwrap().is_some());
    let buffer = drivers[1].bus().allocate(memory, 4096).unwrap();
    let recv = drivers[1].call(Operation::Recv, DataType::F32, DataType::F32, 4).unwrap();
    drivers[1].start(&Descriptor { root: 0, tag: 8, result: buffer, ..recv }).unwrap();
    assert!(drivers[1].poll().unwrap().is_none());
    let text = drivers[1].give_up("has not ended in 300 ms", || true).message;
    assert_eq!(
        text,
        "the engine of rank 1 in this process: `recv of 4 elements, rank 0, communicator at 0x1c8` has not ended in 300 ms; it expects seq 0 from rank 0; \
         rx buffer 0 holds seq 0 from rank 0 with tag 0x7 and 16 bytes; the device takes no more calls until it is reset"
    );
    assert_eq!(message(drivers[1].start(&recv)), text, "later calls say why");
    assert_eq!(message(drivers[1].poll()), text);
}

#[test]
fn a_device_that_goes_away_takes_no_more_calls() {
    let world = LocalEngines::new(Network::Udp, Faithful::default(), 1);
    let mut driver = open(&world, settings(Network::Udp, 0, 1)).unwrap();
    let (call, _) = all_reduce(&mut driver, 4);
    driver.start(&call).unwrap();
    let there = std::mem::replace(driver.bus(), LocalBus::new(&world, 1));
    let gone = "the engine of rank 1 in this process: there is no such engine";
    assert_eq!(message(driver.poll()), gone);
    *driver.bus() = there;
    assert_eq!(message(driver.start(&call)), gone);
}

#[test]
fn an_error_of_firmware_is_decoded() {
    let mut drivers = drivers(Network::Udp, Faithful::default(), 1);
    let call = drivers[0].call(Operation::Copy, DataType::F32, DataType::F32, 4).unwrap();
    drivers[0].start(&Descriptor { first: 1 << 40, result: 0, ..call }).unwrap();
    assert_eq!(
        message(drivers[0].poll()),
        "the engine of rank 0 in this process: `copy of 4 elements, communicator at 0x1c8` failed: return code 0x4: DMA to an address outside all memories (bit 2)"
    );
}

#[test]
fn a_device_of_another_design_is_refused() {
    let world = LocalEngines::new(Network::Udp, Faithful::default(), 1);
    LocalBus::new(&world, 0).write_register(map::HARDWARE_ID.offset, 0x101).unwrap();
    let refused = message(open(&world, settings(Network::Udp, 0, 1)).map(drop));
    assert_eq!(refused, "the engine of rank 0 in this process was built for tcp, but `design` requests udp");
}

#[test]
fn settings_that_firmware_refuses_are_refused_in_a_sentence() {
    let good = settings(Network::Udp, 0, 2);
    assert!(good.check().is_ok());
    for (settings, text) in [
        (Settings { rank: 2, ..good.clone() }, "rank 2 is not among the 2 ranks of the device"),
        (
            Settings { rx_buffers: 0, ..good.clone() },
            "rx buffers: expected from 1 to about 280, fewer with more ranks, got 0",
        ),
        (
            Settings { rx_buffers: 513, ..good.clone() },
            "rx buffers: expected from 1 to about 280, fewer with more ranks, got 513",
        ),
        (Settings { rx_bytes: 100, ..good.clone() }, "size of an rx buffer: expected a multiple of 64 bytes, got 100"),
        (
            Settings { max_eager_bytes: 64, ..good.clone() },
            "largest eager message: expected at least the 1024 bytes of an rx buffer, got 64",
        ),
        (
            Settings { max_rendezvous_bytes: 16 << 10, ..good.clone() },
            "largest rendezvous message: expected more than the 16384 bytes of the largest eager message, got 16384",
        ),
    ] {
        assert_eq!(message(settings.check()), text);
    }
    let many = settings(Network::Udp, 0, 64);
    let text = "an rx buffer must hold an element for each of 64 ranks: expected at least 512 bytes, got 64";
    assert_eq!(message(Settings { rx_bytes: 64, ..many.clone() }.check()), text);
    let world = LocalEngines::new(Network::Udp, Faithful::default(), 1);
    let refused = message(open(&world, Settings { rx_buffers: 280, ..many }).map(drop));
    assert!(refused.starts_with("the tables of 64 ranks and 280 rx buffers do not fit"), "{refused}");
}

#[test]
fn the_end_of_a_call_of_a_host_that_has_gone_is_not_taken_for_that_of_another() {
    let engines = LocalEngines::new(Network::Udp, Faithful::all(), 2);
    for rank in 0..2 {
        // This host starts calls, and disconnects before their ends are collected.
        let mut gone = LocalBus::new(&engines, rank);
        (0..2).for_each(|_| gone.start(&Descriptor::new(Operation::Nop)).unwrap());
    }
    let mut drivers: Vec<_> = (0..2)
        .map(|rank| {
            let bus = LocalBus::new(&engines, rank);
            Driver::open(bus, settings(Network::Udp, rank, 2), || true).unwrap()
        })
        .collect();
    let at = drivers[0].bus().allocate(Memory::Device, 64).unwrap();
    let call = drivers[0].call(Operation::Recv, DataType::F32, DataType::F32, 4).unwrap();
    drivers[0].start(&Descriptor { root: 1, tag: 7, result: at, ..call }).unwrap();
    assert_eq!(drivers[0].poll().unwrap(), None, "rank 1 has sent nothing yet");
}

#[test]
fn a_dump_with_other_settings_than_the_devices_reads_what_the_device_was_set_up_with() {
    let world = LocalEngines::new(Network::Udp, Faithful::all(), 3);
    let mut drivers: Vec<_> = (0..3).map(|rank| open(&world, settings(Network::Udp, rank, 3)).unwrap()).collect();
    let at = drivers[0].bus().allocate(Memory::Device, 64).unwrap();
    let send = drivers[0].call(Operation::Send, DataType::F32, DataType::F32, 4).unwrap();
    drivers[0].start(&Descriptor { root: 1, tag: 7, first: at, ..send }).unwrap();
    assert!(drivers[0].poll().unwrap().is_some());
    let mut bus = LocalBus::new(&world, 1);
    let mut look = |settings: &Settings| {
        Picture::read(&mut bus, settings, || true).map(|picture| picture.tables.unwrap().to_string())
    };
    let holds = "it expects seq 0 from rank 0 and seq 0 from rank 2; rx buffer 0 holds seq 0 from rank 0 with tag 0x7 and 16 bytes";
    let right = settings(Network::Udp, 1, 3);
    assert_eq!(look(&right).unwrap(), holds);
    let other = Settings { rx_buffers: 5, rx_bytes: 2048, ..settings(Network::Udp, 0, 2) };
    assert_eq!(
        look(&other).unwrap(),
        format!(
            "it was set up with `rx_buffers` 16, and not with 5; it was set up with `rx_bytes` 1024, and not with 2048; it was set up with \
             `--ranks` 3, and not with 2; it was set up with `--rank` 1, and not with 0; {holds}"
        )
    );
    // A host that lays out its tables differently.
    let mut host = LocalBus::new(&world, 1);
    host.write_register(0x1C8, 0x0A0A_0A01).unwrap();
    assert_eq!(
        message(look(&right)),
        "the engine of rank 1 in this process: the position of its communicator, 0x1c8, holds rank 1 of 168430081, so a program \
         with another layout of tables has set it up, and only its registers can be read"
    );
    host.write_register(map::RX_BUFFER_COUNT.offset, 513).unwrap();
    assert!(message(look(&right)).contains("its register 0x0 holds 513 rx buffers"));
}

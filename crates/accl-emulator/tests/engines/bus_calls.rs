//! Tests of single calls: one at a time, with element types that differ between buffers, and with kernel streams.

use crate::support::local::{open, settings};
use accl_cclo::bus::{Bus, Memory};
use accl_cclo::call::{Descriptor, Operation, Streams};
use accl_cclo::driver::{Driver, Elements};
use accl_cclo::memory_map::{DataType, Network};
use accl_emulator::local::{LocalBus, LocalEngines};
use accl_emulator::{Engine, Faithful};

fn drivers(network: Network, ranks: u32) -> Vec<Driver<LocalBus>> {
    let world = LocalEngines::new(network, Faithful::all(), ranks);
    (0..ranks).map(|rank| open(&world, settings(network, rank, ranks)).unwrap()).collect()
}

fn buffer(driver: &mut Driver<LocalBus>, data: &[u8]) -> u64 {
    let at = driver.bus().allocate(Memory::Device, data.len().max(1) as u64).unwrap();
    driver.bus().write_memory(Memory::Device, at, data).unwrap();
    at
}

fn seen(driver: &mut Driver<LocalBus>, at: u64, bytes: usize) -> Vec<u8> {
    let mut seen = vec![0; bytes];
    driver.bus().read_memory(Memory::Device, at, &mut seen).unwrap();
    seen
}

#[test]
fn a_call_is_refused_while_another_one_runs() {
    let driver = &mut drivers(Network::Udp, 1)[0];
    let place = buffer(driver, b"abcd");
    let call = driver.call(Operation::Copy, DataType::Bytes, DataType::Bytes, 4).unwrap();
    let call = Descriptor { first: place, result: place, ..call };
    driver.start(&call).unwrap();
    let text = driver.start(&call).unwrap_err().message;
    assert!(text.contains("was started while `copy of 4 elements"), "{text}");
}

#[test]
fn single_precision_travels_as_half_and_lies_as_half() {
    let halves = |values: &[f32]| -> Vec<u8> {
        values.iter().flat_map(|value| half::f16::from_f32(*value).to_le_bytes()).collect()
    };
    let singles = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|value| value.to_le_bytes()).collect() };
    // A value that half precision cannot hold shows that the conversion took place.
    let (values, rounded) = ([1.0, 2.5, 2049.0, 0.5], [2.0, 5.0, 4096.0, 1.0]);
    for network in [Network::Udp, Network::Tcp, Network::Rdma] {
        let mut drivers = drivers(network, 2);
        let mut results = Vec::new();
        for driver in &mut drivers {
            let first = buffer(driver, &singles(&values));
            let result = buffer(driver, &[0; 16]);
            let call = driver.call(Operation::AllReduce, DataType::F32, DataType::F16, 4).unwrap();
            driver.start(&Descriptor { first, second: result, result, ..call }).unwrap();
            results.push(result);
        }
        for (driver, result) in drivers.iter_mut().zip(results) {
            assert!(driver.poll().unwrap().is_some());
            assert_eq!(seen(driver, result, 16), singles(&rounded), "{network:?}");
        }
    }
    let driver = &mut drivers(Network::Udp, 1)[0];
    let first = buffer(driver, &singles(&values));
    let result = buffer(driver, &[0; 8]);
    let elements = Elements { first: Some(DataType::F32), result: Some(DataType::F16), ..Elements::default() };
    let call = driver.call_on(Operation::Copy, elements, 4).unwrap();
    driver.start(&Descriptor { first, result, ..call }).unwrap();
    assert!(driver.poll().unwrap().is_some());
    assert_eq!(seen(driver, result, 8), halves(&values));
    let text = driver.call(Operation::Copy, DataType::F64, DataType::F16, 4).unwrap_err().message;
    assert_eq!(text, "no device has arithmetic for F64 that is sent as F16");
}

#[test]
fn calls_take_from_kernel_streams_and_give_to_them() {
    let world = LocalEngines::new(Network::Udp, Faithful::all(), 2);
    let mut drivers: Vec<_> = (0..2).map(|rank| open(&world, settings(Network::Udp, rank, 2)).unwrap()).collect();
    let data: Vec<u8> = (0..64).collect();
    let feed = |rank, data: &[u8]| world.with(rank, |engine| engine.feed(data)).unwrap();
    let fed = |rank| world.with(rank, Engine::take_fed).unwrap();
    let from_stream = Streams { first: true, result: false };
    let to_stream = Streams { first: false, result: true };
    let call = |driver: &Driver<LocalBus>, operation, root, tag| {
        let call = driver.call(operation, DataType::F32, DataType::F32, 16).unwrap();
        Descriptor { root, tag, ..call }
    };

    // A kernel's data goes to the memory of the other rank.
    feed(0, &data);
    let send = Descriptor { streams: from_stream, ..call(&drivers[0], Operation::Send, 1, 7) };
    drivers[0].start(&send).unwrap();
    let result = buffer(&mut drivers[1], &[0; 64]);
    let recv = Descriptor { result, ..call(&drivers[1], Operation::Recv, 0, 7) };
    drivers[1].start(&recv).unwrap();
    assert!(drivers.iter_mut().all(|driver| driver.poll().unwrap().is_some()));
    assert_eq!(seen(&mut drivers[1], result, 64), data);

    // Memory goes to a kernel of the other rank, which starts no call.
    let first = buffer(&mut drivers[0], &data);
    let put = Descriptor { first, streams: to_stream, ..call(&drivers[0], Operation::Send, 1, 9) };
    drivers[0].start(&put).unwrap();
    assert!(drivers[0].poll().unwrap().is_some());
    assert!(drivers[1].poll().unwrap().is_none(), "nothing was started there");
    assert_eq!(fed(1), Some((9, data.clone())));

    // A receive passes its data to a kernel.
    let send = Descriptor { first, ..call(&drivers[0], Operation::Send, 1, 5) };
    drivers[0].start(&send).unwrap();
    let recv = Descriptor { streams: to_stream, ..call(&drivers[1], Operation::Recv, 0, 5) };
    drivers[1].start(&recv).unwrap();
    assert!(drivers.iter_mut().all(|driver| driver.poll().unwrap().is_some()));
    assert_eq!(fed(1).map(|(_, data)| data), Some(data.clone()));

    // Data goes from a kernel to a kernel of the same engine.
    feed(0, &data);
    let both = Streams { first: true, result: true };
    let copy = Descriptor { streams: both, ..call(&drivers[0], Operation::Copy, 0, 3) };
    drivers[0].start(&copy).unwrap();
    assert!(drivers[0].poll().unwrap().is_some());
    assert_eq!(fed(0).map(|(_, data)| data), Some(data));
}

//! Tests of calls that are posted to a driver, on a clock that the test sets, and of calls whose element types differ between buffers.

use std::time::Duration;

use crate::support::local::{open, settings};
use accl_cclo::bus::{Bus, Memory};
use accl_cclo::call::{Descriptor, Operation, Streams};
use accl_cclo::driver::{Driver, Elements, Finished, RequestId};
use accl_cclo::memory_map::{DataType, Network};
use accl_emulator::local::{LocalBus, LocalEngines};
use accl_emulator::{Engine, Faithful};
use accl_types::{Moment, Result};

const LATER: Moment = Moment::from_nanos(1_000_000);

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

fn poll(driver: &mut Driver<LocalBus>, id: RequestId, nanos: u64) -> Result<Option<Finished>> {
    driver.poll_request(id, || Moment::from_nanos(nanos))
}

fn copy(driver: &mut Driver<LocalBus>, first: u64, result: u64) -> Descriptor {
    let call = driver.call(Operation::Copy, DataType::Bytes, DataType::Bytes, 4).unwrap();
    Descriptor { first, result, ..call }
}

#[test]
fn posted_calls_run_in_order_and_each_end_is_said_once() {
    let driver = &mut drivers(Network::Udp, 1)[0];
    let places = [b"abcd", b"----", b"----"].map(|data| buffer(driver, data));
    let first = copy(driver, places[0], places[1]);
    let second = copy(driver, places[1], places[2]);
    let first = driver.post(first, LATER).unwrap();
    let second = driver.post_after(first, second, LATER).unwrap();
    assert!(poll(driver, second, 0).unwrap().is_some());
    assert!(poll(driver, first, 0).unwrap().is_some());
    assert_eq!(seen(driver, places[2], 4), b"abcd");
    let text = poll(driver, first, 0).unwrap_err().message;
    assert_eq!(text, "polled a request whose end was reported before, or that was not posted here");
    let third = copy(driver, places[0], places[1]);
    driver.start(&third).unwrap();
    assert!(driver.poll().unwrap().is_some(), "calls can be started again once nothing is posted");
}

#[test]
fn what_was_not_posted_cannot_be_followed() {
    let mut drivers = drivers(Network::Udp, 2);
    let place = buffer(&mut drivers[0], b"abcd");
    let call = copy(&mut drivers[0], place, place);
    let id = drivers[0].post(call, LATER).unwrap();
    let text = drivers[1].post_after(id, call, LATER).unwrap_err().message;
    assert!(text.ends_with("was posted after a request that was not posted here"), "{text}");
    let text = drivers[0].start(&call).unwrap_err().message;
    assert!(text.contains("was started while `copy of 4 elements"), "{text}");
}

#[test]
fn a_posted_call_that_fails_takes_those_after_it_along() {
    let driver = &mut drivers(Network::Udp, 1)[0];
    let place = buffer(driver, b"abcd");
    let good = copy(driver, place, place);
    let bad = copy(driver, 1 << 40, place);
    let [first, second, third] = [good, bad, good].map(|call| driver.post(call, LATER).unwrap());
    let text = poll(driver, third, 0).unwrap_err().message;
    assert!(text.contains("`copy of 4 elements, communicator at 0x1c8` failed: return code 0x4: "), "{text}");
    assert!(poll(driver, first, 0).unwrap().is_some(), "what has ended well has");
    assert_eq!(poll(driver, second, 0).unwrap_err().message, text);
    assert_eq!(driver.post(good, LATER).unwrap_err().message, text);
}

#[test]
fn a_posted_call_that_misses_its_deadline_says_what_the_device_waits_for() {
    let mut drivers = drivers(Network::Udp, 2);
    let driver = &mut drivers[1];
    let place = buffer(driver, b"abcd");
    let recv = driver.call(Operation::Recv, DataType::F32, DataType::F32, 1).unwrap();
    let recv = Descriptor { root: 0, tag: 8, result: place, ..recv };
    let copy = copy(driver, place, place);
    let recv = driver.post(recv, LATER).unwrap();
    let copy = driver.post(copy, LATER + Duration::from_secs(1)).unwrap();
    assert_eq!(poll(driver, copy, 999_999), Ok(None));
    let text = poll(driver, copy, 1_000_000).unwrap_err().message;
    assert_eq!(
        text,
        "the engine of rank 1 in this process: `recv of 1 elements, rank 0, communicator at 0x1c8` has not ended before its deadline; it expects seq 0 from \
         rank 0; its rx buffers are empty; the device takes no more calls until it is reset"
    );
    for id in [recv, copy] {
        assert_eq!(poll(driver, id, 2_000_000).unwrap_err().message, text);
    }
}

#[test]
fn a_posted_call_that_is_kept_from_its_deadline_names_the_one_that_keeps_it() {
    let mut drivers = drivers(Network::Udp, 2);
    let driver = &mut drivers[1];
    let place = buffer(driver, b"abcd");
    let recv = driver.call(Operation::Recv, DataType::F32, DataType::F32, 1).unwrap();
    driver.post(Descriptor { root: 0, tag: 8, result: place, ..recv }, Moment::FAR).unwrap();
    let copy = copy(driver, place, place);
    let copy = driver.post(copy, LATER).unwrap();
    let mut now = 0;
    let text = driver.poll_request(copy, || {
        now += 300_000_000;
        Moment::from_nanos(now)
    });
    let text = text.unwrap_err().message;
    assert!(
        text.contains("`recv of 1 elements, rank 0, communicator at 0x1c8` has delayed `copy of 4 elements"),
        "{text}"
    );
    assert!(text.contains("; no time was left to read more than 2 of 16 rx buffers; "), "{text}");
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

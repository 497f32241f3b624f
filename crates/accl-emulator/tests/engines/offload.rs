//! Runs offloaded collectives through the driver, on engines that reproduce all hazards: the driver must work round them.

use crate::support::local::{open, settings};
use accl_cclo::bus::{Bus, Memory};
use accl_cclo::call::Descriptor;
use accl_cclo::driver::{Driver, Settings};
use accl_cclo::memory_map::{DataType, Network};
use accl_cclo::offload::{CollectiveRequest, DeviceRoute, PieceBuffer, Pieces, route};
use accl_emulator::Faithful;
use accl_emulator::local::{LocalBus, LocalEngines};
use accl_types::{Collective, Dtype, Rank, ReduceOp};

const COLLECTIVES: [Collective; 8] = [
    Collective::Broadcast,
    Collective::Scatter,
    Collective::Gather,
    Collective::Reduce,
    Collective::AllGather,
    Collective::AllReduce,
    Collective::ReduceScatter,
    Collective::AllToAll,
];
const STAGING: u64 = 8 << 10;

struct Member {
    driver: Driver<LocalBus>,
    first: u64,
    result: u64,
    pieces: Vec<accl_cclo::offload::Piece>,
    input: Vec<u8>,
    output: Vec<u8>,
}

fn element(dtype: Dtype, value: u32) -> Vec<u8> {
    match dtype {
        Dtype::F16 => half::f16::from_f32(value as f32).to_le_bytes().to_vec(),
        Dtype::F32 => (value as f32).to_le_bytes().to_vec(),
        Dtype::F64 => f64::from(value).to_le_bytes().to_vec(),
        Dtype::I32 => (value as i32).to_le_bytes().to_vec(),
        Dtype::I64 => i64::from(value).to_le_bytes().to_vec(),
        other => vec![value as u8; other.size_bytes()],
    }
}

fn value(rank: u32, index: u64) -> u32 {
    (rank * 5 + index as u32 * 3) % 13 + 1
}

/// Returns the elements of some of a rank's blocks.
fn elements(dtype: Dtype, indexes: std::ops::Range<u64>, value: impl Fn(u64) -> u32) -> Vec<u8> {
    indexes.flat_map(|index| element(dtype, value(index))).collect()
}

/// Returns a rank's input and its expected output; `None` if the output must stay unchanged.
fn expected(request: &CollectiveRequest, world: u32, rank: u32) -> (Vec<u8>, Option<Vec<u8>>) {
    let dtype = request.dtype;
    let count = request.block_bytes / dtype.size_bytes() as u64;
    let is_root = rank == request.root.0;
    let reduced = |index: u64| match request.op {
        ReduceOp::Max => (0..world).map(|rank| value(rank, index)).max().unwrap(),
        _ => (0..world).map(|rank| value(rank, index)).sum(),
    };
    let own = |blocks: u64| elements(dtype, 0..blocks * count, |index| value(rank, index));
    let from_each = |at: u64| -> Vec<u8> {
        (0..world).flat_map(|from| elements(dtype, at * count..(at + 1) * count, |index| value(from, index))).collect()
    };
    let all = u64::from(world);
    let this = u64::from(rank);
    let at_root = |index: u64| value(request.root.0, index);
    match request.collective {
        Collective::Broadcast => (own(1), (!is_root).then(|| elements(dtype, 0..count, at_root))),
        Collective::Scatter => (own(all), Some(elements(dtype, this * count..(this + 1) * count, at_root))),
        Collective::Gather => (own(1), is_root.then(|| from_each(0))),
        Collective::AllGather => (own(1), Some(from_each(0))),
        Collective::Reduce => (own(1), is_root.then(|| elements(dtype, 0..count, reduced))),
        Collective::AllReduce => (own(1), Some(elements(dtype, 0..count, reduced))),
        Collective::ReduceScatter => (own(all), Some(elements(dtype, this * count..(this + 1) * count, reduced))),
        Collective::AllToAll => (own(all), Some(from_each(this))),
        other => panic!("{other:?}"),
    }
}

/// Runs a collective on all ranks, piece by piece.
fn run(drivers: Vec<Driver<LocalBus>>, request: &CollectiveRequest) -> (Vec<Driver<LocalBus>>, Result<(), String>) {
    let world = drivers.len() as u32;
    let memory = drivers[0].settings().memory;
    let Ok(DeviceRoute { operation, elements, function }) = route(request, drivers[0].settings()) else {
        return (drivers, Err("it goes to the host".to_owned()));
    };
    let mut ranks: Vec<Member> = Vec::new();
    for (rank, mut driver) in (0..).zip(drivers) {
        let [first, result] = [0, 1].map(|_| driver.bus().allocate(memory, STAGING).unwrap());
        let pieces = Pieces::new(request, operation, elements, driver.settings(), STAGING).collect();
        let (input, _) = expected(request, world, rank);
        let output = vec![0xEE; request.block_bytes as usize * world as usize];
        ranks.push(Member { driver, first, result, pieces, input, output });
    }
    for piece in 0..ranks[0].pieces.len() {
        for this in &mut ranks {
            let piece = &this.pieces[piece];
            let mut staged = vec![0; piece.given_bytes as usize];
            for span in &piece.gives {
                let (from, to) = (span.tensor as usize, span.staging as usize);
                let bytes = span.bytes as usize;
                staged[to..to + bytes].copy_from_slice(&this.input[from..from + bytes]);
            }
            this.driver.bus().write_memory(memory, this.first, &staged).unwrap();
            let call = this.driver.call(operation, elements, elements, piece.count).unwrap();
            let root = if operation.row().has_root { request.root.0 } else { 0 };
            let call = Descriptor {
                root,
                function: function.number(),
                first: this.first,
                second: this.result,
                result: this.result,
                ..call
            };
            this.driver.start(&call).unwrap();
        }
        for (rank, this) in ranks.iter_mut().enumerate() {
            match this.driver.poll() {
                Ok(Some(_)) => {}
                Ok(None) => {
                    let text = format!("piece {piece} hangs on rank {rank}");
                    return (ranks.into_iter().map(|this| this.driver).collect(), Err(text));
                }
                Err(error) => return (ranks.into_iter().map(|this| this.driver).collect(), Err(error.message)),
            }
        }
        for this in &mut ranks {
            let piece = this.pieces[piece].clone();
            let from = if piece.takes_from == PieceBuffer::First { this.first } else { this.result };
            for span in &piece.takes {
                let to = span.tensor as usize..(span.tensor + span.bytes) as usize;
                let Member { driver, output, .. } = this;
                driver.bus().read_memory(memory, from + span.staging, &mut output[to]).unwrap();
            }
        }
    }
    let mut right = Ok(());
    for (rank, this) in (0..).zip(&ranks) {
        let (_, wanted) = expected(request, world, rank);
        let wanted = wanted.unwrap_or_default();
        if this.output[..wanted.len()] != wanted || this.output[wanted.len()..].iter().any(|&byte| byte != 0xEE) {
            right = Err(format!("rank {rank} has something else"));
        }
    }
    (ranks.into_iter().map(|this| this.driver).collect(), right)
}

#[test]
fn the_driver_works_round_every_hazard_of_firmware() {
    let mut calls = 0;
    for network in [Network::Udp, Network::Tcp, Network::Rdma] {
        for ranks in 1..=5 {
            for memory in [Memory::Device, Memory::Host] {
                let world = LocalEngines::new(network, Faithful::all(), ranks);
                let open_one = |rank| {
                    let good = settings(network, rank, ranks);
                    let limits =
                        Settings { rx_bytes: 256, max_eager_bytes: 1024, max_rendezvous_bytes: 4096, memory, ..good };
                    open(&world, limits).unwrap()
                };
                let mut drivers: Vec<_> = (0..ranks).map(open_one).collect();
                for (index, collective) in COLLECTIVES.into_iter().enumerate() {
                    let adds =
                        matches!(collective, Collective::Reduce | Collective::AllReduce | Collective::ReduceScatter);
                    let dtypes = match adds {
                        true => [Dtype::F16, Dtype::F32, Dtype::F64, Dtype::I32, Dtype::I64],
                        false => [Dtype::Bool, Dtype::BF16, Dtype::C64, Dtype::U8, Dtype::F32],
                    };
                    let dtype = dtypes[(index + ranks as usize) % dtypes.len()];
                    for count in [0, 1, ranks - 1, ranks, ranks + 1, 63, 64, 65, 255, 257, 600, 2049] {
                        for root in [0, 1, ranks - 1].into_iter().filter(|&root| root < ranks) {
                            let op = match dtype {
                                Dtype::I32 | Dtype::I64 if count % 2 == 0 => ReduceOp::Max,
                                _ => ReduceOp::Sum,
                            };
                            let block_bytes = u64::from(count) * dtype.size_bytes() as u64;
                            let request = CollectiveRequest {
                                collective,
                                dtype,
                                op,
                                root: Rank(root),
                                block_bytes,
                                equal_blocks: true,
                            };
                            let (back, right) = run(drivers, &request);
                            drivers = back;
                            let is_host = collective == Collective::AllToAll && network != Network::Rdma;
                            let wanted = if is_host { Err("it goes to the host".to_owned()) } else { Ok(()) };
                            assert_eq!(right, wanted, "{network:?}, {ranks} ranks, {memory:?}: {request:?}");
                            calls += 1;
                        }
                    }
                }
            }
        }
    }
    assert!(calls > 4000, "{calls}");
}

#[test]
fn what_a_device_cannot_do_goes_to_the_host_with_a_reason() {
    let on = settings(Network::Udp, 0, 2);
    let all_reduce = CollectiveRequest {
        collective: Collective::AllReduce,
        dtype: Dtype::F32,
        op: ReduceOp::Sum,
        root: Rank(0),
        block_bytes: 64,
        equal_blocks: true,
    };
    let goes_to_host = |request: CollectiveRequest| route(&request, &on).is_err();
    assert!(!goes_to_host(all_reduce));
    for dtype in [Dtype::Bool, Dtype::BF16, Dtype::U8, Dtype::I16, Dtype::C64] {
        assert!(goes_to_host(CollectiveRequest { dtype, ..all_reduce }), "{dtype:?}");
        assert!(
            !goes_to_host(CollectiveRequest { dtype, collective: Collective::AllGather, ..all_reduce }),
            "{dtype:?}"
        );
    }
    for op in [ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max, ReduceOp::Band, ReduceOp::PremulSum] {
        assert!(goes_to_host(CollectiveRequest { op, ..all_reduce }), "{op:?}");
    }
    assert!(!goes_to_host(CollectiveRequest { op: ReduceOp::Max, dtype: Dtype::I64, ..all_reduce }));
    assert!(goes_to_host(CollectiveRequest { equal_blocks: false, collective: Collective::AllGather, ..all_reduce }));
    for collective in [Collective::Barrier, Collective::Send, Collective::Recv, Collective::AllToAll] {
        assert!(goes_to_host(CollectiveRequest { collective, ..all_reduce }), "{collective:?}");
    }
    let elements = |dtype| route(&CollectiveRequest { dtype, ..all_reduce }, &on).ok().map(|route| route.elements);
    assert_eq!(elements(Dtype::F16), Some(DataType::F16));
}

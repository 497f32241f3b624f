//! Encoded calls in whole worlds: all ranks end with the same bits, close to the exact result.

use std::sync::Arc;
use std::time::Duration;

use crate::calls::{
    all_reduce, bits_of, blocks, both_ways, data, encoded, encoding, max_min, options, raw, rows, tensor,
};
use accl_engine::codec::{Codec, RngKey, Rounding, Settings, Slice, codec};
use accl_engine::{ALGORITHMS, Blocks, CallDesc, Mode};
use accl_engine::{Encoded, Residuals, TensorCodecs};
use accl_testkit::{Fabric, World, WorldOptions};
use accl_transport::loopback::{self, Capacity};
use accl_transport::{Faults, Faulty};
use accl_types::{Collective, Dtype, ErrorKind, Rank, ReduceOp};
use accl_wire::frame::OVERHEAD_BYTES;

const ROUNDINGS: [Rounding; 3] = [Rounding::Nearest, Rounding::Stochastic, Rounding::Correlated];

/// Element counts around buckets and tiles, and fewer than ranks.
const SIZES: [usize; 9] = [0, 1, 5, 8, 63, 64, 65, 1000, 40_007];

#[test]
fn all_ranks_end_with_the_same_bits_near_the_exact_sum() {
    let flat = (1..=8).map(|world| vec![0; world as usize]);
    let two_level = [vec![0, 0, 1, 1], vec![0, 0, 1, 1, 2, 2], vec![0, 1, 0, 1, 1], vec![0, 0, 0, 1, 1, 1]];
    for hosts in flat.chain(two_level) {
        for algorithm in rows(Collective::AllReduce, &hosts) {
            let world = hosts.len();
            World::new(options(&hosts, "all_reduce", algorithm)).run("g", |member| {
                for (index, &count) in SIZES.iter().enumerate() {
                    for bits in 1..=8 {
                        let rounding = ROUNDINGS[(index + usize::from(bits)) % 3];
                        let encoding = encoding(vec![both_ways(max_min(bits, 64, rounding), 5)]);
                        let mut mine = data(member.rank, count, 1);
                        all_reduce(&member, &mut mine, ReduceOp::Sum, &encoding);
                        // Each rank compares the bits of all ranks.
                        let mut all = vec![0.0f32; count * world];
                        member.all_gather(&mine, &mut all, &vec![count; world]).unwrap();
                        for theirs in all.chunks(count.max(1)) {
                            assert_eq!(bits_of(theirs), bits_of(&mine), "{algorithm}, {bits} bits, {count}");
                        }
                        let exact: Vec<f64> = (0..world).fold(vec![0.0; count], |sum, rank| {
                            sum.iter().zip(data(rank, count, 1)).map(|(sum, value)| sum + f64::from(value)).collect()
                        });
                        // At most `2 * world` encodings contribute, each off by less than one level of a range of
                        // `2 * world`.
                        let level = 2.0 * world as f64 / f64::from((1u32 << bits) - 1);
                        let bound = 2.0 * world as f64 * level * 1.5;
                        let far =
                            mine.iter().zip(&exact).find(|(value, exact)| (f64::from(**value) - **exact).abs() > bound);
                        assert_eq!(far, None, "{algorithm}, {bits} bits, {count}");
                    }
                }
            });
        }
    }
}

/// Returns the values that a tile decodes to when `rank` encodes it. Tensors here are smaller than a tile.
fn decoded(
    codec: &dyn Codec,
    values: &[f32],
    first: usize,
    (rank, world): (usize, usize),
    pass: u64,
    id: u64,
) -> Vec<f32> {
    let mut bytes = vec![0; codec.encoded_bytes(Dtype::F32, values.len())];
    let src = values.as_ptr().cast();
    let slice = Slice { src, dtype: Dtype::F32, tensor: Dtype::F32, count: values.len(), first: first as u64 };
    let mut rng_key = RngKey::keyed(&[11, 3, id, 0, pass, rank as u64]);
    if pass == 0 {
        rng_key = rng_key.among(&[11, 3, id, 0], Rank(rank as u32), world as u32);
    }
    let mut result = vec![0.0; values.len()];
    // SAFETY: `slice` covers `values`, `bytes` has the length that the codec requires, and `result` has as many
    // elements as `values`.
    unsafe {
        codec.encode(&mut bytes, slice, rng_key);
        codec.decode(result.as_mut_ptr().cast(), Dtype::F32, &bytes, Dtype::F32, values.len());
    }
    result
}

#[test]
fn owners_add_in_the_order_of_ranks_and_decode_their_own_bytes() {
    const COUNT: usize = 1000;
    for world in 2..=5usize {
        for rounding in ROUNDINGS {
            let codec = max_min(4, 64, rounding);
            let encoding = encoding(vec![both_ways(codec.clone(), 9)]);
            let hosts = vec![0; world];
            let results = World::new(options(&hosts, "all_reduce", "direct_two_phase")).run("g", |member| {
                let mut mine = data(member.rank, COUNT, 2);
                all_reduce(&member, &mut mine, ReduceOp::Avg, &encoding);
                mine
            });
            // Rank r owns the buckets from the cut nearest to r/n of all buckets on.
            let buckets = COUNT.div_ceil(64);
            let cut = |rank: usize| {
                let wire = |elems: usize| 2 * (16 + codec.encoded_bytes(Dtype::F32, elems));
                let wanted = wire(COUNT) * rank / world;
                ((wanted * buckets + wire(COUNT) / 2) / wire(COUNT) * 64).min(COUNT)
            };
            let mut expected = Vec::new();
            for owner in 0..world {
                let (start, end) = (cut(owner), cut(owner + 1));
                let mut sum = vec![0.0; end - start];
                for rank in 0..world {
                    let theirs = &data(rank, COUNT, 2)[start..end];
                    let theirs = match rank == owner {
                        true => theirs.to_vec(),
                        false => decoded(&*codec, theirs, start, (rank, world), 0, 9),
                    };
                    match rank {
                        0 => sum = theirs,
                        _ => sum.iter_mut().zip(theirs).for_each(|(sum, value)| *sum += value),
                    }
                }
                sum.iter_mut().for_each(|sum| *sum /= world as f32);
                expected.extend(decoded(&*codec, &sum, start, (owner, world), 1, 9));
            }
            for result in results {
                assert_eq!(bits_of(&result), bits_of(&expected), "{world} ranks, {rounding:?}");
            }
        }
    }
}

/// Four ranks with the same values.
#[test]
fn gradients_that_are_alike_lose_less_with_correlated_rounding() {
    const COUNT: usize = 40_007;
    let alike = data(0, COUNT, 8);
    for (algorithm, passes) in [("direct", 1), ("direct_two_phase", 2)] {
        let error = |rounding| {
            // Errors of encoded results would hide the errors of encoded contributions.
            let codecs = TensorCodecs { intra_node: raw(), reduce: max_min(4, 512, rounding), result: raw(), id: 2 };
            let codecs = if passes == 1 { both_ways(max_min(4, 512, rounding), 2) } else { codecs };
            let results = World::new(options(&[0; 4], "all_reduce", algorithm)).run("g", |member| {
                let mut mine = alike.clone();
                all_reduce(&member, &mut mine, ReduceOp::Avg, &encoding(vec![codecs.clone()]));
                mine
            });
            results.iter().for_each(|result| assert_eq!(bits_of(result), bits_of(&results[0])));
            let square = |(a, b): (&f32, &f32)| f64::from(a - b).powi(2);
            results[0].iter().zip(&alike).map(square).sum::<f64>() / COUNT as f64
        };
        let (stochastic, correlated) = (error(Rounding::Stochastic), error(Rounding::Correlated));
        // In units of a step's square over 16, one encoding loses 1/6 on average. Four independent encodings lose 4/6;
        // four evenly spread ones lose 1/6. With two phases, the owner's own values are not encoded. Then three
        // independent encodings lose 3/6, and evenly spread ones 1/6 (1 - 2/4) + 1/6.
        let expected = if passes == 1 { 4.0 } else { 2.0 };
        let found = stochastic / correlated;
        assert!((found / expected - 1.0).abs() < 0.05, "{algorithm}: {found} times less, expected {expected}");
    }
}

/// An all_gather adds nothing up, so ranks have no errors that could cancel.
#[test]
fn what_is_not_added_up_is_rounded_the_same_with_stochastic_and_correlated_rounding() {
    for collective in [Collective::AllGather, Collective::ReduceScatter] {
        let of = |rounding| {
            let encoding = encoding(vec![both_ways(max_min(4, 64, rounding), 5)]);
            World::new(options(&[0; 3], collective.name(), "direct")).run("g", |member| {
                let (short, long) = (data(member.rank, 1000, 3), data(member.rank, 3000, 3));
                let gathers = collective == Collective::AllGather;
                let (one, three) = (blocks(&short, &[1000]), blocks(&long, &[1000; 3]));
                let (inputs, outputs) = if gathers { (one, three) } else { (three, one) };
                member.call(encoded(collective, inputs, outputs, &encoding)).unwrap();
                if gathers { bits_of(&long) } else { bits_of(&short) }
            })
        };
        let is_same = of(Rounding::Stochastic) == of(Rounding::Correlated);
        assert_eq!(is_same, collective == Collective::AllGather, "{collective}");
    }
}

#[test]
fn blocks_of_uneven_sizes_are_scattered_gathered_and_exchanged() {
    for hosts in [vec![0; 1], vec![0; 2], vec![0; 3], vec![0; 4], vec![0; 7], vec![0, 0, 1, 1], vec![0, 1, 0, 1, 1]] {
        let world = hosts.len();
        let level = |range: f64| range / 255.0;
        for (collective, name) in [
            (Collective::ReduceScatter, "reduce_scatter"),
            (Collective::AllGather, "all_gather"),
            (Collective::AllToAll, "all_to_all"),
        ] {
            for algorithm in rows(collective, &hosts) {
                let row = ALGORITHMS.iter().find(|row| row.collective == collective && row.name == algorithm).unwrap();
                let uneven = |block: usize| if row.needs_equal_blocks { 777 } else { [777, 0, 5, 1024][block % 4] };
                let encoding = encoding(vec![both_ways(max_min(8, 64, Rounding::Stochastic), 5)]);
                World::new(options(&hosts, name, algorithm)).run("g", |member| {
                    let (rank, counts) = (member.rank, (0..world).map(uneven).collect::<Vec<_>>());
                    let starts: Vec<usize> = (0..world).map(|block| counts[..block].iter().sum()).collect();
                    let total = counts.iter().sum::<usize>();
                    match collective {
                        Collective::ReduceScatter => {
                            let (input, mut output) = (data(rank, total, 3), vec![0.0f32; counts[rank]]);
                            let outputs = Blocks::of(tensor(&output, Dtype::F32));
                            member.call(encoded(collective, blocks(&input, &counts), outputs, &encoding)).unwrap();
                            for (element, value) in output.iter_mut().enumerate() {
                                let of = |other: usize| f64::from(data(other, total, 3)[starts[rank] + element]);
                                let exact: f64 = (0..world).map(of).sum();
                                // The sum of all other ranks' contributions is encoded before it arrives.
                                let bound = 1e-6 + 4.0 * level(2.0 * world as f64) * world as f64;
                                let error = (f64::from(*value) - exact).abs();
                                assert!(
                                    error <= bound,
                                    "{algorithm} of {world}: element {element} of rank {rank}: {value} for {exact}"
                                );
                                assert!(world > 1 || f64::from(*value) == exact);
                            }
                        }
                        Collective::AllGather => {
                            let (input, output) = (data(rank, counts[rank], 3), vec![0.0f32; total]);
                            let inputs = Blocks::of(tensor(&input, Dtype::F32));
                            member.call(encoded(collective, inputs, blocks(&output, &counts), &encoding)).unwrap();
                            for other in 0..world {
                                let theirs = &output[starts[other]..starts[other] + counts[other]];
                                for (value, exact) in theirs.iter().zip(data(other, counts[other], 3)) {
                                    assert!(f64::from((value - exact).abs()) <= level(2.0) * 1.01);
                                }
                            }
                            let mut all = vec![0.0f32; total * world];
                            member.all_gather(&output, &mut all, &vec![total; world]).unwrap();
                            all.chunks(total).for_each(|theirs| assert_eq!(bits_of(theirs), bits_of(&output)));
                        }
                        _ => {
                            // Rank i sends rank j as many elements as rank j sends rank i.
                            let count = |other: usize| uneven(rank + other);
                            let counts: Vec<usize> = (0..world).map(count).collect();
                            let total = counts.iter().sum();
                            let (input, output) = (data(rank, total, 3), vec![0.0f32; total]);
                            let (inputs, outputs) = (blocks(&input, &counts), blocks(&output, &counts));
                            let mut desc = encoded(collective, inputs, outputs, &encoding);
                            desc.equal_blocks = row.needs_equal_blocks;
                            member.call(desc).unwrap();
                            for other in 0..world {
                                let here: usize = counts[..other].iter().sum();
                                let of_theirs: Vec<usize> = (0..world).map(|to| uneven(other + to)).collect();
                                let there: usize = of_theirs[..rank].iter().sum();
                                let theirs = data(other, of_theirs.iter().sum(), 3);
                                for element in 0..counts[other] {
                                    let error = (output[here + element] - theirs[there + element]).abs();
                                    assert!(f64::from(error) <= if other == rank { 0.0 } else { level(2.0) * 1.01 });
                                }
                            }
                        }
                    }
                });
            }
        }
    }
}

#[test]
fn an_uncompressed_tensor_stays_exact_next_to_compressed_ones() {
    let tensors = vec![
        both_ways(max_min(2, 64, Rounding::Nearest), 1),
        TensorCodecs { intra_node: raw(), reduce: raw(), result: raw(), id: 2 },
        TensorCodecs {
            intra_node: raw(),
            reduce: max_min(4, 128, Rounding::Nearest),
            result: max_min(8, 64, Rounding::Nearest),
            id: 3,
        },
    ];
    let encoding = encoding(tensors);
    for world in [2, 3, 4] {
        for algorithm in rows(Collective::AllReduce, &vec![0; world]) {
            World::new(options(&vec![0; world], "all_reduce", algorithm)).run("g", |member| {
                let tensors: [Vec<f32>; 3] = [70_001, 333, 5000]
                    .map(|count| data(member.rank, count, 4).into_iter().map(|value| (value * 64.0).round()).collect());
                let outputs = [tensors.iter().map(|values| tensor(values, Dtype::F32))].into_iter().collect();
                member.call(encoded(Collective::AllReduce, Blocks::default(), outputs, &encoding)).unwrap();
                // Sums of small integers are exact in any order.
                let exact = |element: usize| (0..world).map(|rank| (data(rank, 333, 4)[element] * 64.0).round()).sum();
                let exact: Vec<f32> = (0..333).map(exact).collect();
                assert_eq!(tensors[1], exact, "{algorithm}");
                for values in &tensors {
                    let mut all = vec![0.0f32; values.len() * world];
                    member.all_gather(values, &mut all, &vec![values.len(); world]).unwrap();
                    all.chunks(values.len()).for_each(|theirs| assert_eq!(bits_of(theirs), bits_of(values)));
                }
            });
        }
    }
}

#[test]
fn a_nan_on_one_rank_spoils_its_bucket_on_all_and_no_other() {
    for world in [2, 3, 5] {
        for algorithm in rows(Collective::AllReduce, &vec![0; world]) {
            let encoding = encoding(vec![both_ways(max_min(4, 64, Rounding::Stochastic), 1)]);
            World::new(options(&vec![0; world], "all_reduce", algorithm)).run("g", |member| {
                for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    for culprit in 0..world {
                        let mut mine = data(member.rank, 1000, 1);
                        if member.rank == culprit {
                            mine[500] = wrong;
                        }
                        all_reduce(&member, &mut mine, ReduceOp::Sum, &encoding);
                        for (element, value) in mine.iter().enumerate() {
                            let is_bucket = (448..512).contains(&element);
                            assert_eq!(value.is_nan(), is_bucket, "{algorithm}: element {element} is {value}");
                            assert!(!is_bucket || value.to_bits() == f32::NAN.to_bits());
                        }
                    }
                }
            });
        }
    }
}

#[test]
fn sums_of_16_bit_floats_are_rounded_once_and_overflow_is_not_hidden() {
    for dtype in [Dtype::F16, Dtype::BF16] {
        let from = |value: f32| match dtype {
            Dtype::F16 => half::f16::from_f32(value).to_bits(),
            _ => half::bf16::from_f32(value).to_bits(),
        };
        let to = |bits: u16| match dtype {
            Dtype::F16 => half::f16::from_bits(bits).to_f32(),
            _ => half::bf16::from_bits(bits).to_f32(),
        };
        let raw = TensorCodecs { intra_node: raw(), reduce: raw(), result: raw(), id: 1 };
        for (codecs, exact) in [(raw, true), (both_ways(max_min(8, 64, Rounding::Nearest), 1), false)] {
            let encoding = encoding(vec![codecs]);
            World::new(options(&[0; 3], "all_reduce", "direct_two_phase")).run("g", |member| {
                let mut mine: Vec<u16> = data(member.rank, 640, 6).into_iter().map(from).collect();
                // The value is finite on every rank, and the sum overflows.
                mine[100] = from(if dtype == Dtype::F16 { 60_000.0 } else { 3e38 });
                let mut desc = CallDesc::new(Collective::AllReduce, dtype);
                desc.outputs = Blocks::of(tensor(&mine, dtype));
                desc.encoding = encoding.clone().into();
                member.call(desc).unwrap();
                let sum = |element: usize| (0..3).map(|rank| to(from(data(rank, 640, 6)[element]))).sum::<f32>();
                for (element, &bits) in mine.iter().enumerate() {
                    let value = to(bits);
                    match (exact, element) {
                        (true, 100) => assert_eq!(value, f32::INFINITY),
                        (false, 64..128) => assert!(value.is_nan(), "element {element} is {value}"),
                        (true, _) => assert_eq!(bits, from(sum(element)), "element {element}"),
                        (false, _) => assert!((value - sum(element)).abs() < 0.1, "element {element}"),
                    }
                }
                mine.clear();
            });
        }
    }
}

#[test]
fn what_cannot_be_encoded_travels_as_it_is() {
    let encoding = encoding(vec![both_ways(max_min(1, 64, Rounding::Nearest), 1)]);
    World::new(WorldOptions::new(3)).run("g", |member| {
        let mut integers = vec![member.rank as i64; 100];
        let mut desc = member.all_reduce_desc(&mut integers, ReduceOp::Sum, Mode::Blocking);
        desc.encoding = encoding.clone().into();
        member.call(desc).unwrap();
        assert_eq!(integers, [3; 100]);
        let mut mine = data(member.rank, 100, 1);
        all_reduce(&member, &mut mine, ReduceOp::Max, &encoding);
        let most = |element: usize| (0..3).map(|rank| data(rank, 100, 1)[element]).fold(f32::MIN, f32::max);
        assert_eq!(mine, (0..100).map(most).collect::<Vec<_>>());
    });
}

/// Random numbers depend on a call's sequence number. A call that one rank refused must have no number, or ranks would
/// use different random numbers afterwards.
#[test]
fn a_call_that_one_rank_was_refused_does_not_count_where_all_calls_are_encoded() {
    let results = |is_refused: bool| {
        let options = WorldOptions::new(2)
            .with("compression", "maxmin:3,rounding=stochastic")
            .with("compressed_calls", "all")
            .with("algorithm", "all_reduce=direct_two_phase");
        World::new(options).run("g", |member| {
            if is_refused && member.rank == 1 {
                let mut output = vec![0.0f32; 5000];
                let error = member.all_gather(&data(1, 5000, 2), &mut output, &[5000]).unwrap_err();
                assert_eq!(error.kind, ErrorKind::InvalidArgument);
            }
            let mut found = Vec::new();
            for _ in 0..2 {
                let mut mine = data(member.rank, 5000, 1);
                member.all_reduce(&mut mine, ReduceOp::Sum).unwrap();
                found.push(bits_of(&mine));
            }
            assert_ne!(found[0], found[1], "each call has numbers of its own");
            found
        })
    };
    assert_eq!(results(true), results(false));
}

#[test]
fn ranks_that_compress_differently_are_both_named() {
    for (other, expected) in [
        (
            Some(both_ways(max_min(8, 512, Rounding::Stochastic), 1)),
            "rank 1 with maxmin:8,bucket=512,meta=float32,rounding=stochastic",
        ),
        (None, "rank 1 with no codec"),
    ] {
        let errors =
            World::new(WorldOptions::new(2).with("algorithm", "all_reduce=direct_two_phase")).run("g", |member| {
                let mut mine = data(member.rank, 5000, 1);
                let mut desc = member.all_reduce_desc(&mut mine, ReduceOp::Sum, Mode::Blocking);
                let codecs = both_ways(max_min(4, 64, Rounding::Nearest), 1);
                let codecs = if member.rank == 0 { Some(codecs) } else { other.clone() };
                desc.encoding = codecs.map_or(Encoded::GroupDefault, |codecs| encoding(vec![codecs]).into());
                member.call(desc).unwrap_err()
            });
        for error in errors {
            assert_eq!(error.kind, ErrorKind::Mismatch);
            let first = "rank 0 with maxmin:4,bucket=64,meta=float32,rounding=nearest";
            assert!(error.message.contains(first) && error.message.contains(expected), "{}", error.message);
        }
    }
}

#[test]
fn an_algorithm_that_would_end_with_different_bits_is_refused() {
    let encoding = encoding(vec![both_ways(max_min(4, 64, Rounding::Nearest), 1)]);
    World::new(WorldOptions::new(4).with("algorithm", "all_reduce=recursive_doubling")).run("g", |member| {
        let mut mine = data(member.rank, 100, 1);
        let mut desc = member.all_reduce_desc(&mut mine, ReduceOp::Sum, Mode::Blocking);
        desc.encoding = encoding.clone().into();
        let error = member.call(desc).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Configuration);
        assert!(error.message.contains("recursive_doubling") && error.message.contains("ring"), "{}", error.message);
        // The call was refused before it began, so the group is still usable.
        member.all_reduce(&mut mine, ReduceOp::Sum).unwrap();
    });
}

#[test]
fn the_order_of_arrival_and_the_transport_do_not_change_a_bit() {
    let encoding = encoding(vec![both_ways(max_min(3, 64, Rounding::Stochastic), 1)]);
    for algorithm in rows(Collective::AllReduce, &[0; 4]) {
        let mut seen: Option<Vec<u32>> = None;
        for fabric in [Fabric::Loopback(64), Fabric::Loopback(2), Fabric::Shm, Fabric::Tcp] {
            for late in 0..2 {
                let world = World::new(options(&[0; 4], "all_reduce", algorithm).over(fabric));
                let results = world.run("g", |member| {
                    let mut mine = data(member.rank, 70_000, 7);
                    if member.rank == late {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    all_reduce(&member, &mut mine, ReduceOp::Sum, &encoding);
                    bits_of(&mine)
                });
                for result in results {
                    assert!(*seen.get_or_insert_with(|| result.clone()) == result, "{algorithm} over {fabric:?}");
                }
            }
        }
    }
}

#[test]
fn no_bit_depends_on_how_many_tiles_a_frame_has_or_on_who_waits_for_room() {
    let cast = |name: &str| codec(name).unwrap().build(&Settings::default()).unwrap();
    let max_min = |bits| max_min(bits, 64, Rounding::Stochastic);
    let different = TensorCodecs { reduce: max_min(5), ..both_ways(cast("bf16"), 1) };
    let encodings = [both_ways(cast("bf16"), 1), both_ways(cast("fp16"), 1), both_ways(max_min(8), 1), different];
    for (world, tensor) in [2, 4].into_iter().flat_map(|world| encodings.iter().map(move |tensor| (world, tensor))) {
        let encoding = encoding(vec![tensor.clone()]);
        for algorithm in rows(Collective::AllReduce, &vec![0; world]) {
            let mut seen: Option<Vec<u32>> = None;
            // A tile is longer than the shortest of these frames; the longest holds many tiles.
            for segment in ["1KiB", "9000", "64KiB", "1MiB"] {
                for fabric in [Fabric::Loopback(2), Fabric::Shm] {
                    let options = options(&vec![0; world], "all_reduce", algorithm).over(fabric);
                    let world = World::new(options.with("segment_bytes", segment).with("ring_bytes", "16KiB"));
                    let results = world.run("g", |member| {
                        let mut mine = data(member.rank, 150_001, 7);
                        all_reduce(&member, &mut mine, ReduceOp::Sum, &encoding);
                        bits_of(&mine)
                    });
                    for result in results {
                        let is_same = *seen.get_or_insert_with(|| result.clone()) == result;
                        assert!(is_same, "{algorithm} over {fabric:?} with {} in frames of {segment}", encoding.codecs);
                    }
                }
            }
        }
    }
}

#[test]
fn a_damaged_tile_ends_the_group_on_all_ranks_and_names_its_sender() {
    let encoding = encoding(vec![both_ways(max_min(4, 64, Rounding::Nearest), 1)]);
    for algorithm in ["direct_two_phase", "ring", "direct"] {
        for seed in 0..8 {
            let mut options = options(&[0; 3], "all_reduce", algorithm);
            options.adopt = false;
            let world = World::new(options);
            // Damages the bytes that rank 1 receives from rank 0. A faulty link counts as a link between hosts, so
            // tiles have checksums.
            connect(&world, |from, to| (from, to) == (0, 1), seed);
            let errors = world.run("g", |member| {
                let mut mine = data(member.rank, 100_000, 7);
                let mut desc = member.all_reduce_desc(&mut mine, ReduceOp::Sum, Mode::Blocking);
                desc.encoding = encoding.clone().into();
                // A rank that needs nothing more from rank 1 may have completed its call by then. Its next call fails.
                member.call(desc).and_then(|()| member.barrier()).unwrap_err()
            });
            for error in errors {
                // A rank that issues its call after the group has failed gets the cause.
                assert!(matches!(error.kind, ErrorKind::Protocol | ErrorKind::Aborted), "{error}");
                let texts = ["data from rank 0 is corrupted: tile", "check the network between the two ranks"];
                assert!(texts.iter().all(|text| error.message.contains(text)), "{error}");
            }
        }
    }
}

/// Connects all ranks by loopback links; links for which `is_faulty` holds flip a bit.
fn connect(world: &World, is_faulty: impl Fn(usize, usize) -> bool, seed: u64) {
    const FRAME_BYTES: usize = (64 << 10) + OVERHEAD_BYTES;
    for (a, one) in world.engines.iter().enumerate() {
        for (b, other) in world.engines.iter().enumerate().skip(a + 1) {
            let (one_waker, other_waker) = (one.waker().unwrap(), other.waker().unwrap());
            let (left, right) = loopback::pair(FRAME_BYTES, Capacity::Frames(64), one_waker, other_waker);
            let faulty = |from, to| {
                let flipped_from_bytes = is_faulty(from, to).then_some(1000);
                Faults { seed, flipped_from_bytes, ..Faults::default() }
            };
            one.adopt_link(other.info().unwrap(), Box::new(Faulty::new(left, faulty(b, a)))).unwrap();
            other.adopt_link(one.info().unwrap(), Box::new(Faulty::new(right, faulty(a, b)))).unwrap();
        }
    }
}

#[test]
fn what_an_encoding_loses_is_added_to_the_next_one() {
    const COUNT: usize = 50_000;
    let codecs = || vec![both_ways(max_min(2, 64, Rounding::Nearest), 1)];
    for algorithm in rows(Collective::AllReduce, &[0; 3]) {
        World::new(options(&[0; 3], "all_reduce", algorithm)).run("g", |member| {
            // The same gradient is reduced repeatedly. With error feedback, the mean of the results approaches the
            // exact sum.
            let exact = (0..3).fold(vec![0.0; COUNT], |sum: Vec<f32>, rank| {
                sum.iter().zip(data(rank, COUNT, 8)).map(|(sum, value)| sum + value).collect()
            });
            let mean_error = |with: bool, steps: u64| {
                let (kept, of_sums) = (vec![0.0f32; COUNT], vec![0.0f32; COUNT]);
                let residuals = Residuals {
                    contributions: vec![kept.as_ptr() as usize],
                    sums: vec![of_sums.as_ptr() as usize],
                    ..Residuals::default()
                };
                let mut encoding = encoding(codecs());
                encoding.residuals = with.then(|| Arc::new(residuals));
                let mut mean = vec![0.0; COUNT];
                for step in 0..steps {
                    encoding.step = step;
                    let mut mine = data(member.rank, COUNT, 8);
                    all_reduce(&member, &mut mine, ReduceOp::Sum, &encoding);
                    mean.iter_mut().zip(&mine).for_each(|(mean, value)| *mean += value / steps as f32);
                }
                let error = mean.iter().zip(&exact).map(|(mean, exact)| f64::from(mean - exact).powi(2)).sum::<f64>();
                (error / exact.iter().map(|exact| f64::from(*exact).powi(2)).sum::<f64>()).sqrt()
            };
            let (without, with, longer) = (mean_error(false, 16), mean_error(true, 16), mean_error(true, 64));
            // The residual is bounded, so its share falls with the number of steps. Partial sums in flight have no
            // residual, so in a ring their errors stay.
            assert!(with < without, "{algorithm}: {without} {with} {longer}");
            if ["direct", "direct_two_phase"].contains(&algorithm) {
                assert!(with < without / 4.0 && longer < with / 2.5, "{algorithm}: {without} {with} {longer}");
            }
        });
    }
}

#[test]
fn a_sum_of_zeros_keeps_the_residual() {
    let encoding = encoding(vec![both_ways(max_min(2, 64, Rounding::Nearest), 1)]);
    World::new(options(&[0; 2], "all_reduce", "direct_two_phase")).run("g", |member| {
        let of_sums = vec![0.5f32; 1000];
        let mut encoding = encoding.clone();
        encoding.residuals = Some(Arc::new(Residuals {
            contributions: vec![0],
            sums: vec![of_sums.as_ptr() as usize],
            ..Residuals::default()
        }));
        let mut mine = vec![0.0; 1000];
        all_reduce(&member, &mut mine, ReduceOp::Sum, &encoding);
        assert!(mine.iter().all(|value| *value == 0.0));
        assert!(of_sums.iter().all(|kept| *kept == 0.5));
        // For ones, each rank spends the residual of its own part, so both parts of the result include it.
        let mut mine = vec![1.0; 1000];
        all_reduce(&member, &mut mine, ReduceOp::Sum, &encoding);
        assert!(mine.iter().all(|value| *value == 2.5), "{mine:?}");
        assert_eq!(of_sums.iter().filter(|kept| **kept == 0.0).count(), if member.rank == 0 { 512 } else { 488 });
    });
}

#[test]
fn a_bucket_that_is_not_finite_has_no_residual() {
    let encoding = encoding(vec![both_ways(max_min(4, 64, Rounding::Nearest), 1)]);
    World::new(options(&[0; 2], "all_reduce", "direct_two_phase")).run("g", |member| {
        let (kept, of_sums) = (vec![0.5f32; 1000], vec![0.5f32; 1000]);
        let (contributions, sums) = (vec![kept.as_ptr() as usize], vec![of_sums.as_ptr() as usize]);
        let mut encoding = encoding.clone();
        encoding.residuals = Some(Arc::new(Residuals { contributions, sums, ..Residuals::default() }));
        let mut mine = vec![f32::NAN; 1000];
        all_reduce(&member, &mut mine, ReduceOp::Sum, &encoding);
        assert!(mine.iter().all(|value| value.is_nan()));
        // The residuals of the contribution that a rank sent and of the part that it summed are zero. The rest is
        // unchanged.
        for (element, (kept, of_sums)) in kept.iter().zip(&of_sums).enumerate() {
            assert_eq!((*kept, *of_sums), if (element < 512) == (member.rank == 0) { (0.5, 0.0) } else { (0.0, 0.5) });
        }
    });
}

//! Measured errors of encoded calls, compared with errors that a test computes itself.

use std::sync::Arc;

use crate::calls::{all_reduce, blocks, both_ways, data, encoded, encoding, max_min, options, raw, rows, tensor};
use accl_engine::codec::{NonFinite, Rounding, Settings, codec};
use accl_engine::{Blocks, TensorDesc};
use accl_engine::{Encoding, Residuals, TensorCodecs};
use accl_engine::{ErrorStats, Measured, Probe};
use accl_testkit::{Fabric, World};
use accl_types::config::WorkerCount;
use accl_types::{Collective, Dtype, Elems, ReduceOp};

pub(crate) fn probed(tensors: Vec<TensorCodecs>, one_in: u64) -> (Encoding, Arc<ErrorStats>) {
    let stats = ErrorStats::new(tensors.len());
    let probe = Some(Probe::new(stats.clone(), one_in));
    (Encoding { probe, ..encoding(tensors) }, stats)
}

fn relative(row: &Measured) -> f64 {
    row.error / row.square
}

fn exact_sum(world: usize, count: usize, seed: u64) -> Vec<f64> {
    (0..world).fold(vec![0.0; count], |sum, rank| {
        sum.iter().zip(data(rank, count, seed)).map(|(sum, value)| sum + f64::from(value)).collect()
    })
}

fn squares(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value).powi(2)).sum()
}

/// Squared error of `found` divided by the square of `exact`.
fn error_of(found: &[f32], exact: &[f64]) -> f64 {
    let error: f64 = found.iter().zip(exact).map(|(found, exact)| (f64::from(*found) - exact).powi(2)).sum();
    error / exact.iter().map(|exact| exact * exact).sum::<f64>()
}

#[test]
fn the_error_of_sums_is_found() {
    const COUNT: usize = 300_007;
    for hosts in [vec![0; 2], vec![0; 3], vec![0, 0, 1, 1]] {
        let world = hosts.len();
        for algorithm in rows(Collective::AllReduce, &hosts) {
            for op in [ReduceOp::Sum, ReduceOp::Avg] {
                let found = World::new(options(&hosts, "all_reduce", algorithm)).run("g", |member| {
                    let (encoding, stats) = probed(vec![both_ways(max_min(4, 64, Rounding::Stochastic), 5)], 2);
                    let mut mine = data(member.rank, COUNT, 1);
                    all_reduce(&member, &mut mine, op, &encoding);
                    let by = if op == ReduceOp::Avg { world as f64 } else { 1.0 };
                    let exact: Vec<f64> = exact_sum(world, COUNT, 1).iter().map(|sum| sum / by).collect();
                    let [row] = stats.read()[..] else { panic!("one tensor") };
                    assert_eq!(row.calls, 1);
                    assert!(row.nanos > 0);
                    // Half of the elements are compared, some of them twice.
                    assert!((row.compared as f64 / COUNT as f64 - 0.5).abs() < 0.01, "{}", row.compared);
                    let (estimate, error) = (relative(&row), error_of(&mine, &exact));
                    assert!((estimate / error - 1.0).abs() < 0.05, "{algorithm}: {estimate} for {error}");
                    (row.error, row.square)
                });
                // All ranks have the same figures, so that they reach the same decision.
                assert!(found.windows(2).all(|pair| pair[0] == pair[1]), "{algorithm}: {found:?}");
            }
        }
    }
}

#[test]
fn a_call_that_several_lanes_do_has_the_figures_of_one() {
    const COUNT: usize = 300_007;
    let [one, three] = [0, 2].map(|workers| {
        let mut options = options(&[0, 1], "all_reduce", "direct_two_phase").over(Fabric::Tcp);
        options.config.worker_count = WorkerCount::Exactly(workers);
        World::new(options).run("g", move |member| {
            let (mut encoding, stats) = probed(vec![both_ways(max_min(4, 64, Rounding::Stochastic), 5)], 64);
            let kept = vec![0.0_f32; COUNT];
            let contributions = vec![kept.as_ptr() as usize];
            encoding.residuals = Some(Arc::new(Residuals { contributions, sums: vec![], ..Residuals::default() }));
            for step in 0..2 {
                encoding.step = step;
                all_reduce(&member, &mut data(member.rank, COUNT, 1 + step), ReduceOp::Sum, &encoding);
            }
            let lanes = member.group.snapshot().groups[0].lanes.clone();
            assert!(lanes.len() == workers as usize + 1 && lanes.iter().all(|lane| lane.bytes_sent > 0), "{lanes:?}");
            let [row] = stats.read()[..] else { panic!("one tensor") };
            row
        })
    });
    for (one, three) in one.iter().zip(&three) {
        let alike = |row: &Measured| (row.calls, row.compared, row.error, row.square, row.residual_calls);
        assert_eq!(alike(one), alike(three));
        assert_eq!(one.calls, 2);
        // The squares are added up in another order.
        assert!((one.residual / three.residual - 1.0).abs() < 1e-6 && one.residual > 0.0, "{one:?} {three:?}");
    }
}

#[test]
fn each_tensor_of_a_call_has_figures_of_its_own() {
    const COUNT: usize = 100_000;
    let codecs = || {
        let [exact, two, eight] = [raw(), max_min(2, 64, Rounding::Nearest), max_min(8, 64, Rounding::Nearest)];
        vec![both_ways(exact, 1), both_ways(two, 2), both_ways(eight, 3)]
    };
    World::new(options(&[0; 3], "all_reduce", "direct_two_phase")).run("g", |member| {
        let (encoding, stats) = probed(codecs(), 1);
        let tensors: Vec<Vec<f32>> = (0..3).map(|seed| data(member.rank, COUNT, seed)).collect();
        let outputs: Blocks =
            [tensors.iter().map(|values| tensor(values, Dtype::F32)).collect::<Vec<_>>()].into_iter().collect();
        member.call(encoded(Collective::AllReduce, Blocks::default(), outputs, &encoding)).unwrap();
        for ((row, values), seed) in stats.read().iter().zip(&tensors).zip(0..) {
            assert!(row.compared as usize > COUNT / 2);
            let error = error_of(values, &exact_sum(3, COUNT, seed));
            if seed == 0 {
                assert_eq!(row.error, 0.0);
            } else {
                assert!((relative(row) / error - 1.0).abs() < 0.1, "{} for {error}", relative(row));
            }
        }
    });
}

#[test]
fn parts_that_are_scattered_are_compared_by_their_owner() {
    const COUNT: usize = 70_001;
    for (strided, in_place) in [(false, false), (true, false), (false, true)] {
        for algorithm in rows(Collective::ReduceScatter, &[0; 3]) {
            World::new(options(&[0; 3], "reduce_scatter", algorithm)).run("g", |member| {
                let (encoding, stats) = probed(vec![both_ways(max_min(4, 64, Rounding::Nearest), 5)], 1);
                let values = data(member.rank, 3 * COUNT, 2);
                let apart: Vec<f32> = values.iter().flat_map(|&value| [value, f32::NAN]).collect();
                let own = vec![0.0f32; COUNT];
                let every_second = |block: usize| {
                    let first = apart[2 * block * COUNT..].as_ptr().cast_mut().cast();
                    [TensorDesc::strided(first, Dtype::F32, &[COUNT as i64], &[2]).unwrap()]
                };
                let inputs = if strided { (0..3).map(every_second).collect() } else { blocks(&values, &[COUNT; 3]) };
                let own = if in_place { &values[member.rank * COUNT..][..COUNT] } else { &own };
                let outputs = Blocks::of(tensor(own, Dtype::F32));
                member.call(encoded(Collective::ReduceScatter, inputs, outputs, &encoding)).unwrap();
                let exact = &exact_sum(3, 3 * COUNT, 2)[member.rank * COUNT..][..COUNT];
                let (estimate, error) = (relative(&stats.read()[0]), error_of(own, exact));
                assert!((estimate / error - 1.0).abs() < 0.1, "{algorithm}: {estimate} for {error}");
            });
        }
    }
}

#[test]
fn a_tensor_without_elements_next_to_others_changes_nothing() {
    const COUNT: usize = 20_000;
    World::new(options(&[0; 2], "reduce_scatter", "direct")).run("g", |member| {
        let codecs = (1..=2).map(|id| both_ways(max_min(4, 64, Rounding::Nearest), id)).collect();
        let (encoding, stats) = probed(codecs, 1);
        let (values, own) = (data(member.rank, 2 * COUNT, 2), vec![0.0f32; COUNT]);
        let nothing = || TensorDesc::dense(std::ptr::null_mut(), Dtype::F32, Elems(0));
        let block = |values: &[f32]| [nothing(), tensor(values, Dtype::F32)];
        let inputs = values.chunks(COUNT).map(block).collect();
        let desc = encoded(Collective::ReduceScatter, inputs, [block(&own)].into_iter().collect(), &encoding);
        member.call(desc).unwrap();
        let exact = &exact_sum(2, 2 * COUNT, 2)[member.rank * COUNT..][..COUNT];
        let (estimate, error) = (relative(&stats.read()[1]), error_of(&own, exact));
        assert!((estimate / error - 1.0).abs() < 0.1, "{estimate} for {error}");
    });
}

#[test]
fn about_one_element_in_so_many_is_compared_of_tensors_of_any_size() {
    World::new(options(&[0; 2], "all_reduce", "direct_two_phase")).run("g", |member| {
        let compared = |count: usize, one_in: u64, step: u64| {
            let (mut encoding, stats) = probed(vec![both_ways(max_min(4, 64, Rounding::Nearest), 5)], one_in);
            encoding.step = step;
            let mut mine = data(member.rank, count, 1);
            all_reduce(&member, &mut mine, ReduceOp::Sum, &encoding);
            assert_eq!(stats.read()[0].calls, 1);
            stats.read()[0]
        };
        for (count, most) in [(1, 1), (300, 8), (40_000, 40), (262_144, 256), (1_000_000, 4 * 248)] {
            // A run of compared elements that meets the end of its tensor is shorter.
            let found: Vec<u64> = (0..50).map(|step| compared(count, 1024, step).compared).collect();
            assert_eq!(found.iter().max(), Some(&most), "{count}");
            assert!(found.iter().sum::<u64>() * 10 > 50 * most * 9, "{count}: {found:?}");
        }
        // Each step compares other elements, so that all are compared eventually.
        assert_ne!(compared(40_000, 1024, 1).error, compared(40_000, 1024, 2).error);
        assert_eq!(compared(10_000, 0, 1).compared, 0);
    });
}

#[test]
fn the_residual_is_divided_by_the_norm_of_the_gradient() {
    const COUNT: usize = 50_000;
    for collective in [Collective::AllReduce, Collective::ReduceScatter] {
        let name = if collective == Collective::AllReduce { "all_reduce" } else { "reduce_scatter" };
        World::new(options(
            &[0; 2],
            name,
            if collective == Collective::AllReduce { "direct_two_phase" } else { "direct" },
        ))
        .run("g", |member| {
            let (mut encoding, stats) = probed(vec![both_ways(max_min(2, 64, Rounding::Nearest), 1)], 1024);
            let blocks_of = if collective == Collective::AllReduce { 1 } else { 2 };
            let kept = vec![0.0f32; COUNT * blocks_of];
            let contributions = (0..blocks_of).map(|block| kept[block * COUNT..].as_ptr() as usize).collect();
            encoding.residuals = Some(Arc::new(Residuals { contributions, sums: vec![], ..Residuals::default() }));
            let mut expected = 0.0;
            for step in 0..5 {
                encoding.step = step;
                let values = data(member.rank, COUNT * blocks_of, 8);
                let gradient = squares(&values);
                let own = vec![0.0f32; COUNT];
                let desc = match collective {
                    Collective::AllReduce => {
                        encoded(collective, Blocks::default(), Blocks::of(tensor(&values, Dtype::F32)), &encoding)
                    }
                    _ => encoded(
                        collective,
                        blocks(&values, &[COUNT; 2]),
                        Blocks::of(tensor(&own, Dtype::F32)),
                        &encoding,
                    ),
                };
                member.call(desc).unwrap();
                expected += (squares(&kept) / gradient).sqrt();
            }
            let row = stats.read()[0];
            assert_eq!(row.residual_calls, 5);
            // A rank's own part is not encoded on its way to itself, so it has no residual and is not counted.
            assert!((row.residual / expected / 2f64.sqrt() - 1.0).abs() < 0.02, "{} for {expected}", row.residual);
        });
    }
}

#[test]
fn buckets_that_could_not_be_encoded_are_counted_by_their_reason() {
    let settings = Settings { bits: 8, bucket: 64, meta: Dtype::F16, ..Settings::default() };
    let codec = codec("maxmin").unwrap().build(&settings).unwrap();
    World::new(options(&[0; 2], "all_reduce", "direct_two_phase")).run("g", |member| {
        let (encoding, stats) = probed(vec![both_ways(codec.clone(), 1)], 64);
        let mut mine = data(member.rank, 1024, 1);
        if member.rank == 0 {
            // Both values are in the half that is sent to rank 1. Float16 metadata cannot hold the second one.
            (mine[600], mine[700]) = (f32::NAN, 1e30);
        }
        all_reduce(&member, &mut mine, ReduceOp::Sum, &encoding);
        let expected = match member.rank {
            0 => NonFinite { not_finite: 1, too_large: 1 },
            // Two buckets of the sums are NaN.
            _ => NonFinite { not_finite: 2, too_large: 0 },
        };
        let row = stats.read()[0];
        assert_eq!(row.non_finite, expected);
        // Elements of such buckets have no error.
        assert!(row.compared == 16 && row.error.is_finite() && relative(&row) < 1e-4, "{row:?}");
    });
}

//! The simulator agrees with the closed formulas of multigrid over layers.

use accl_multigrid::cost::{Costs, LayerTimes, Rates, Share, predict_times};
use accl_multigrid::{Cycle, Grid, Kind, Layer, Norms, Pass, Placement, Plan, Reuse, Schedule, mgrit, pipeline};
use accl_types::Bytes;

fn costs(layers: u32) -> Costs {
    let each = LayerTimes { plain: 1, recorded: 1, input_vjp: 2, full_vjp: 2 };
    Costs {
        layers: vec![each; layers as usize],
        state: vec![Bytes(0); layers as usize + 1],
        shares: Vec::new(),
        rates: Rates::default(),
    }
}

fn plan(layers: u32, ranks: u32, factors: &[u32], pass: Pass, cycle: &Cycle) -> Plan {
    let grid = Grid::new(&vec![Layer::of(Kind::Increment); layers as usize], factors).unwrap();
    mgrit(&grid, &Placement::even(layers, ranks).unwrap(), pass, cycle).unwrap()
}

/// Number of evaluations on the critical path: for the start, each cycle, and the last sweep.
fn formula(layers: u64, ranks: u64, factor: u64, levels: u32, relaxations: &[u64], iterations: u64) -> u64 {
    let n = |level: u32| layers / factor.pow(level);
    let inner: u64 = (1..levels - 1).map(|level| n(level) * (factor - 1) / factor / ranks).sum();
    let cycle: u64 = (0..levels - 1)
        .map(|level| (relaxations[level as usize] + 1) * n(level) / ranks + n(level + 1) / ranks)
        .sum::<u64>()
        + inner
        + n(levels - 1);
    n(levels - 1) + inner + (iterations - 1) * cycle + layers / ranks
}

#[test]
fn with_norms_that_block_a_plan_takes_what_the_formula_says() {
    for (layers, factor, levels, relaxations) in
        [(64, 4, 2, vec![0]), (64, 8, 2, vec![1]), (256, 4, 3, vec![0, 1]), (1024, 8, 3, vec![1, 1])]
    {
        for ranks in [1, 2, 4] {
            for iterations in [2, 3] {
                let factors = vec![factor as u32; levels as usize - 1];
                let blocking = Cycle {
                    relaxations: relaxations.iter().map(|&times| times as u32).collect(),
                    norms: Norms::Blocking,
                    reuse: Reuse::Nothing,
                    ..Cycle::new(iterations)
                };
                let lagged = Cycle { norms: Norms::Lagged, ..blocking.clone() };
                let reusing = Cycle { reuse: Reuse::Values, ..lagged.clone() };
                let wanted = formula(u64::from(layers), ranks, factor, levels, &relaxations, u64::from(iterations));
                for (pass, unit) in [(Pass::Forward, 1), (Pass::Adjoint, 2)] {
                    let total =
                        |cycle| predict_times(&plan(layers, ranks as u32, &factors, pass, cycle), &costs(layers)).total;
                    assert_eq!(
                        total(&blocking),
                        unit * wanted,
                        "{layers} {factor} {levels} {ranks} {iterations} {pass:?}"
                    );
                    assert!(total(&lagged) <= total(&blocking));
                    assert!(total(&reusing) <= total(&lagged));
                    // The same holds if final evaluations take longer.
                    let each = LayerTimes { plain: 10, recorded: 15, input_vjp: 20, full_vjp: 35 };
                    let dear = Costs { layers: vec![each; layers as usize], ..costs(layers) };
                    let total = |cycle| predict_times(&plan(layers, ranks as u32, &factors, pass, cycle), &dear).total;
                    assert!(total(&reusing) <= total(&lagged), "{layers} {factor} {levels} {ranks} {pass:?}");
                }
            }
        }
    }
}

#[test]
fn on_a_coarser_mesh_layers_and_messages_take_their_share() {
    let cycle = Cycle { norms: Norms::Blocking, reuse: Reuse::Nothing, ..Cycle::new(3) };
    let placement = Placement::even(64, 4).unwrap();
    let grid = || Grid::new(&[Layer::of(Kind::Increment); 64], &[4]).unwrap();
    let coarser = grid().with_coarser_states(&[true]).unwrap();
    let [plain, coarse] = [grid(), coarser].map(|grid| mgrit(&grid, &placement, Pass::Forward, &cycle).unwrap());
    let each = LayerTimes { plain: 1000, recorded: 1000, input_vjp: 0, full_vjp: 0 };
    let shares = vec![Share { bytes: 500, time: 250 }];
    let costs = Costs { layers: vec![each; 64], shares, ..costs(64) };
    // The start; F-relaxation, right-hand side and coarsest-level solve in each of two cycles; the last sweep.
    assert_eq!(predict_times(&plain, &costs).total, 1000 * (16 + 2 * (16 + 4 + 16) + 16));
    assert_eq!(predict_times(&coarse, &costs).total, 1000 * (2 * 16 + 16) + 250 * (16 + 2 * (4 + 16)));
    // If layers take no time, only the messages remain: three marches of three consecutive messages each. On the
    // coarser mesh a message takes half the time.
    let rates = Rates { wire_per_kib: 1000, ..Rates::default() };
    let idle = LayerTimes { plain: 0, recorded: 0, input_vjp: 0, full_vjp: 0 };
    let costs = Costs { layers: vec![idle; 64], state: vec![Bytes(1024); 65], rates, ..costs };
    let [plain, coarse] = [plain, coarse].map(|plan| predict_times(&plan, &costs).total);
    assert_eq!(plain, 9000);
    assert!((4500..9000).contains(&coarse), "{coarse}");
}

#[test]
fn a_pipeline_takes_its_micro_batches_and_the_filling() {
    let grid = Grid::new(&[Layer::of(Kind::Increment); 8], &[]).unwrap();
    let placement = Placement::even(8, 4).unwrap();
    for schedule in [Schedule::FillDrain, Schedule::OneForwardOneBackward] {
        let plan = pipeline(&grid, &placement, schedule, 8).unwrap();
        // Two layers per rank, three time units each.
        assert_eq!(predict_times(&plan, &costs(8)).total, (8 + 3) * 2 * 3, "{schedule:?}");
    }
}

#[test]
fn messages_take_their_way_and_what_needs_them_waits() {
    let rates = Rates { message: 1, latency: 100, wire_per_kib: 10, ..Rates::default() };
    let costs = Costs { state: vec![Bytes(2048); 5], rates, ..costs(4) };
    let timing = predict_times(&plan(4, 2, &[], Pass::Forward, &Cycle::new(1)), &costs);
    // Two layers, the sending, the transfer, two layers. The receive is posted meanwhile.
    assert_eq!(timing.total, 2 + 1 + 120 + 2);
    let last = timing.ranks[1].last().unwrap();
    assert_eq!((last.begin, last.end), (124, 125));
}

#[test]
fn on_two_ranks_it_pays_that_the_march_evaluates_for_good_and_on_many_it_does_not() {
    let each = LayerTimes { plain: 100, recorded: 150, ..LayerTimes::default() };
    let total = |ranks, reuse| {
        let costs = Costs { layers: vec![each; 64], ..costs(64) };
        predict_times(&plan(64, ranks, &[4], Pass::Forward, &Cycle { reuse, ..Cycle::new(2) }), &costs).total
    };
    assert!(total(2, Reuse::All) < total(2, Reuse::Values) && total(2, Reuse::Values) < total(2, Reuse::Nothing));
    assert!(total(16, Reuse::Values) < total(16, Reuse::All));
}

#[test]
fn what_comes_out_is_waited_for_where_it_belongs() {
    let rates = Rates { latency: 1000, ..Rates::default() };
    let total = |counts: &[u32]| {
        let grid = Grid::new(&[Layer::of(Kind::Increment); 4], &[]).unwrap();
        let plan = mgrit(&grid, &Placement::of_counts(counts).unwrap(), Pass::Forward, &Cycle::new(1)).unwrap();
        predict_times(&plan, &Costs { rates, ..costs(4) }).total
    };
    assert_eq!([total(&[2, 2]), total(&[2, 2, 0]), total(&[0, 2, 2])], [1004, 2004, 2004]);
}

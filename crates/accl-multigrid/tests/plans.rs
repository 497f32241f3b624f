//! Plans compute what the algorithm defines, for every placement, and the checker accepts all of them.

mod walk;

use accl_multigrid::check::check;
use accl_multigrid::{
    Cycle, Grid, Kind, Layer, Norms, Pass, Placement, Reuse, Schedule, Shape, Start, mgrit, pipeline,
};
use accl_types::Rank;
use proptest::prelude::*;
use walk::{Net, Reference, Solved, walk};

const ODE: Layer = Layer::of(Kind::Increment);

fn ode(layers: u32) -> Vec<Layer> {
    vec![ODE; layers as usize]
}

fn is_near(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-11 * a.abs().max(b.abs()).max(1.0)
}

fn assert_near(found: &Solved, wanted: &Solved, what: &str) {
    assert_eq!(found.outputs.len(), wanted.outputs.len(), "{what}");
    assert_eq!(found.norms.len(), wanted.norms.len(), "{what}");
    let numbers = |solved: &Solved| solved.outputs.iter().chain(&solved.norms).copied().collect::<Vec<_>>();
    for (a, b) in numbers(found).into_iter().zip(numbers(wanted)) {
        assert!(is_near(a, b), "{what}: {a} for {b}");
    }
    assert_eq!(found.finals.len(), wanted.finals.len(), "{what}");
    for (layer, &b) in &wanted.finals {
        assert!(
            is_near(found.finals[layer], b),
            "{what}: layer {layer:?} was evaluated at {} for {b}",
            found.finals[layer]
        );
    }
}

/// Layers of any kind.
fn layers() -> impl Strategy<Value = Vec<Layer>> {
    let kind = prop_oneof![4 => Just(Kind::Increment), 2 => Just(Kind::Timed), 2 => Just(Kind::Residual), 2 => Just(Kind::Custom), 1 => Just(Kind::Plain)];
    let layer =
        (kind, prop::bool::weighted(0.1)).prop_map(|(kind, apart)| Layer { is_apart: apart, ..Layer::of(kind) });
    prop::collection::vec(layer, 1..40)
}

fn cycles() -> impl Strategy<Value = Cycle> {
    let start = prop_oneof![Just(Start::Coarsest), Just(Start::FullMultigrid), Just(Start::Guess)];
    let shape = prop_oneof![Just(Shape::V), Just(Shape::F)];
    let norms = prop_oneof![Just(Norms::Blocking), Just(Norms::Lagged)];
    let relaxations = prop::collection::vec(0_u32..3, 0..3);
    (1_u32..5, start, shape, norms, relaxations).prop_map(|(iterations, start, shape, norms, relaxations)| Cycle {
        shape,
        relaxations,
        start,
        norms,
        ..Cycle::new(iterations)
    })
}

/// A grid with as many of the levels as the layers allow.
fn grid_of(layers: &[Layer], factors: &[u32]) -> Grid {
    (0..=factors.len()).rev().find_map(|count| Grid::new(layers, &factors[..count]).ok()).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_plan_solves_what_the_textbook_solves(
        layers in layers(),
        factors in prop::collection::vec(2_u32..5, 0..4),
        counts in prop::collection::vec(0_u32..12, 1..6),
        cycle in cycles(),
        is_coarser in prop::collection::vec(prop::bool::weighted(0.3), 4),
    ) {
        let grid = grid_of(&layers, &factors);
        let levels = grid.levels().len();
        let grid = grid.with_coarser_states(&is_coarser[..levels - 1]).unwrap();
        let mut counts = counts;
        // The counts are cut or extended to the net's length; ranks without layers remain.
        let mut left = layers.len() as u32;
        for count in &mut counts {
            *count = (*count).min(left);
            left -= *count;
        }
        *counts.last_mut().unwrap() += left;
        let placement = Placement::of_counts(&counts).unwrap();
        let mut net = Net::new(layers);
        for pass in [Pass::Forward, Pass::Adjoint] {
            let plan = mgrit(&grid, &placement, pass, &cycle).unwrap();
            check(&plan).unwrap_or_else(|violation| panic!("{pass:?} {counts:?} {factors:?} {cycle:?}: {violation}"));
            let guesses: Vec<f64> = (0..plan.guesses.len()).map(|index| 0.1 * index as f64).collect();
            let found = walk(&plan, &net, &[0.7], &guesses);
            let wanted = Reference::new(&grid, &net, pass, &cycle).solve(0.7, &guesses);
            assert_near(&found, &wanted, &format!("{pass:?} {counts:?} {factors:?} {cycle:?}"));
            // Neither reuse nor placement changes a bit of the result.
            let alone = Placement::even(net.layers.len() as u32, 1).unwrap();
            let with_reuse = |reuse| mgrit(&grid, &placement, pass, &Cycle { reuse, ..cycle.clone() });
            for plan in [with_reuse(Reuse::Nothing), with_reuse(Reuse::Values), mgrit(&grid, &alone, pass, &cycle)] {
                let plan = plan.unwrap();
                prop_assert!(check(&plan).is_ok());
                prop_assert_eq!(&walk(&plan, &net, &[0.7], &guesses), &found);
            }
            if pass == Pass::Forward {
                for ((_, layer), &state) in &found.finals {
                    net.states[*layer as usize] = state;
                }
            }
        }
    }

    #[test]
    fn a_pipeline_does_every_layer_for_every_micro_batch(
        layers in layers(),
        ranks in 1_u32..7,
        micro_batches in 1_u32..9,
    ) {
        let grid = Grid::new(&layers, &[]).unwrap();
        let count = layers.len() as u32;
        let net = Net::new(layers);
        let placement = Placement::even(count, ranks).unwrap();
        let inputs: Vec<f64> = (0..micro_batches).map(|micro| 0.3 + f64::from(micro)).collect();
        let cycle = Cycle::new(1);
        for schedule in [Schedule::Forward, Schedule::Adjoint, Schedule::FillDrain, Schedule::OneForwardOneBackward] {
            let plan = pipeline(&grid, &placement, schedule, micro_batches).unwrap();
            check(&plan).unwrap_or_else(|violation| panic!("{schedule:?} {ranks} {micro_batches}: {violation}"));
            let found = walk(&plan, &net, &inputs, &[]).outputs;
            let pass = |pass, input| Reference::new(&grid, &net, pass, &cycle).solve(input, &[]).outputs[0];
            for (&input, output) in inputs.iter().zip(found) {
                let wanted = match schedule {
                    Schedule::Forward => pass(Pass::Forward, input),
                    Schedule::Adjoint => pass(Pass::Adjoint, input),
                    Schedule::FillDrain | Schedule::OneForwardOneBackward => {
                        pass(Pass::Adjoint, 2.0 * pass(Pass::Forward, input))
                    }
                };
                prop_assert!(is_near(output, wanted));
            }
        }
    }
}

#[test]
fn every_plan_of_up_to_64_layers_and_8_ranks_is_right() {
    let mut plans = 0;
    for layers in 1..=64 {
        for factor in [2, 3, 4, 8] {
            let mut factors = Vec::new();
            while let Ok(grid) = Grid::new(&ode(layers), &factors) {
                for ranks in 1..=8 {
                    let placement = Placement::even(layers, ranks).unwrap();
                    for (pass, relaxation) in [(Pass::Forward, 1), (Pass::Adjoint, 0)] {
                        let cycle = Cycle { relaxations: vec![relaxation], ..Cycle::new(2) };
                        let plan = mgrit(&grid, &placement, pass, &cycle).unwrap();
                        if let Err(violation) = check(&plan) {
                            panic!("{layers} layers, {ranks} ranks, {factors:?}, {pass:?}: {violation}");
                        }
                        plans += 1;
                    }
                }
                factors.push(factor);
                if factors.len() == 4 {
                    break;
                }
            }
        }
    }
    assert!(plans > 8_000, "{plans}");
}

#[test]
fn evaluations_are_as_many_as_the_formulas_say_and_fewer_where_values_are_used_again() {
    let grid = Grid::new(&ode(64), &[4]).unwrap();
    let placement = Placement::even(64, 2).unwrap();
    let evaluations = |reuse| {
        let plan = mgrit(&grid, &placement, Pass::Forward, &Cycle { reuse, ..Cycle::new(2) }).unwrap();
        check(&plan).unwrap().evaluations
    };
    // Fine: two sweeps. Coarse: the start, then the right-hand side and the coarsest-level solve of one cycle.
    assert_eq!(evaluations(Reuse::Nothing), 128 + 48);
    // The start; one sweep without the first steps, which the coarsest-level solve has done; that solve without its
    // first step. Then the last sweep without the first steps, and without the first interval, which is exact.
    assert_eq!(evaluations(Reuse::All), 16 + 48 + 15 + 45);
    // The last sweep evaluates every layer again.
    assert_eq!(evaluations(Reuse::Values), 16 + 48 + 15 + 64);
}

#[test]
fn a_boundary_sees_as_many_messages_as_there_are_sweeps_and_marches() {
    let placement = Placement::even(64, 2).unwrap();
    let messages = |factors: &[u32], cycle: Cycle| {
        let grid = Grid::new(&ode(64), factors).unwrap();
        check(&mgrit(&grid, &placement, Pass::Forward, &cycle).unwrap()).unwrap().messages
    };
    // Fewer than torchbraid's 5 and 52 messages, because a sent value stays on the receiver.
    assert_eq!(messages(&[4], Cycle::new(2)), 2);
    assert!(messages(&[4, 4], Cycle { relaxations: vec![0, 1], ..Cycle::new(8) }) < 52);
}

#[test]
fn a_guess_goes_on_where_another_plan_has_ended() {
    let grid = Grid::new(&ode(24), &[3, 2]).unwrap();
    let placement = Placement::even(24, 3).unwrap();
    let net = Net::new(ode(24));
    let plan = |cycle: &Cycle| mgrit(&grid, &placement, Pass::Forward, cycle).unwrap();
    let whole = walk(&plan(&Cycle::new(4)), &net, &[0.7], &[]);
    let first = walk(&plan(&Cycle { has_final_sweep: false, ..Cycle::new(2) }), &net, &[0.7], &[]);
    let rest = plan(&Cycle { start: Start::Guess, ..Cycle::new(2) });
    assert_eq!(rest.guesses, plan(&Cycle { has_final_sweep: false, start: Start::Guess, ..Cycle::new(0) }).states);
    let rest = walk(&rest, &net, &[0.7], &first.outputs);
    assert_eq!(rest.outputs, whole.outputs);
    assert_eq!([first.norms, rest.norms].concat(), whole.norms);
}

#[test]
fn a_solve_comes_near_the_wave() {
    let grid = Grid::new(&ode(64), &[4, 4]).unwrap();
    let placement = Placement::even(64, 4).unwrap();
    let net = Net::new(ode(64));
    let one = Grid::new(&ode(64), &[]).unwrap();
    let exact = walk(&mgrit(&one, &placement, Pass::Forward, &Cycle::new(1)).unwrap(), &net, &[0.7], &[]).outputs[0];
    let error = |iterations| {
        let plan = mgrit(&grid, &placement, Pass::Forward, &Cycle::new(iterations)).unwrap();
        (walk(&plan, &net, &[0.7], &[]).outputs[0] - exact).abs()
    };
    assert!(error(2) > error(4) && error(12) < 1e-12, "{} {} {}", error(2), error(4), error(12));
}

#[test]
fn what_comes_in_and_goes_out_is_at_the_ends_of_the_ranks() {
    let grid = Grid::new(&ode(8), &[2]).unwrap();
    // The first and the last rank have no layers.
    let placement = Placement::of_counts(&[0, 4, 4, 0]).unwrap();
    for (pass, first, last) in [(Pass::Forward, 0, 3), (Pass::Adjoint, 3, 0)] {
        let plan = mgrit(&grid, &placement, pass, &Cycle::new(2)).unwrap();
        assert_eq!((plan.inputs[0].0, plan.outputs[0].0), (Rank(first), Rank(last)));
    }
}

#[test]
fn what_cannot_be_planned_is_refused() {
    let grid = Grid::new(&ode(8), &[2]).unwrap();
    let refused = |layers, cycle| {
        let placement = Placement::even(layers, 2).unwrap();
        mgrit(&grid, &placement, Pass::Forward, &cycle).unwrap_err().to_string()
    };
    assert!(refused(7, Cycle::new(2)).contains("the placement has 7 layers, but the net has 8"));
    assert!(refused(8, Cycle::new(0)).contains("0 iterations"));
    let placement = Placement::even(8, 2).unwrap();
    assert!(pipeline(&grid, &placement, Schedule::FillDrain, 0).unwrap_err().to_string().contains("0 micro-batches"));
}

//! The checker refuses plans that are wrong in one place.

use accl_multigrid::check::check;
use accl_multigrid::{Cycle, Grid, Kind, Layer, Norms, Op, Pass, Placement, Plan, Schedule, mgrit, pipeline};

fn plans() -> Vec<Plan> {
    let layers = vec![Layer::of(Kind::Increment); 12];
    let grid = Grid::new(&layers, &[3, 2]).unwrap();
    let mut plans = Vec::new();
    for counts in [vec![6, 6], vec![5, 0, 4, 3]] {
        let placement = Placement::of_counts(&counts).unwrap();
        for pass in [Pass::Forward, Pass::Adjoint] {
            for norms in [Norms::Blocking, Norms::Lagged] {
                let cycle = Cycle { norms, relaxations: vec![1], ..Cycle::new(3) };
                plans.push(mgrit(&grid, &placement, pass, &cycle).unwrap());
            }
        }
        plans.push(pipeline(&grid, &placement, Schedule::OneForwardOneBackward, 3).unwrap());
        plans.push(pipeline(&grid, &placement, Schedule::FillDrain, 3).unwrap());
    }
    plans.iter().for_each(|plan| assert!(check(plan).is_ok()));
    plans
}

/// Checks that every plan that `mutate` changes is refused.
fn refuses(what: &str, mutate: impl Fn(&mut Plan, usize, usize) -> bool) {
    let mut refused = 0;
    for plan in plans() {
        for rank in 0..plan.ranks.len() {
            for at in 0..plan.ranks[rank].len() {
                let mut mutant = plan.clone();
                if mutate(&mut mutant, rank, at) {
                    assert!(check(&mutant).is_err(), "{what} of {:?} of rank {rank} is not seen", plan.ranks[rank][at]);
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 5, "{what}: {refused}");
}

#[test]
fn an_operation_that_is_missing_is_seen() {
    refuses("the loss", |plan, rank, at| !matches!(plan.ranks[rank].remove(at), Op::Phase(_)));
}

#[test]
fn an_operation_that_is_there_twice_is_seen() {
    refuses("the doubling", |plan, rank, at| {
        let op = plan.ranks[rank][at];
        plan.ranks[rank].insert(at, op);
        !matches!(op, Op::Phase(_))
    });
}

#[test]
fn an_evaluation_that_counts_or_does_not_is_seen() {
    refuses("the change", |plan, rank, at| match &mut plan.ranks[rank][at] {
        Op::Eval { is_final, .. } => {
            *is_final = !*is_final;
            true
        }
        _ => false,
    });
}

#[test]
fn a_message_to_another_rank_or_of_another_value_is_seen() {
    refuses("the change", |plan, rank, at| {
        let ranks = plan.ranks.len() as u32;
        match &mut plan.ranks[rank][at] {
            Op::Send { to: other, .. } | Op::Recv { from: other, .. } => {
                other.0 = (other.0 + 1) % ranks;
                true
            }
            _ => false,
        }
    });
    refuses("the change", |plan, rank, at| match &mut plan.ranks[rank][at] {
        Op::Send { value, .. } | Op::Recv { value, .. } => {
            *value += 1;
            true
        }
        _ => false,
    });
}

#[test]
fn messages_in_another_order_are_seen() {
    refuses("the swap", |plan, rank, at| {
        let list = &mut plan.ranks[rank];
        let is_same_way = |a: &Op, b: &Op| match (a, b) {
            (Op::Send { to: a, pass: p, .. }, Op::Send { to: b, pass: q, .. }) => a == b && p == q,
            (Op::Recv { from: a, pass: p, .. }, Op::Recv { from: b, pass: q, .. }) => a == b && p == q,
            _ => false,
        };
        let Some(other) = (at + 1..list.len()).find(|&other| is_same_way(&list[at], &list[other])) else {
            return false;
        };
        list.swap(at, other);
        true
    });
}

#[test]
fn values_that_are_given_up_too_early_are_seen() {
    refuses("the move", |plan, rank, at| {
        let list = &mut plan.ranks[rank];
        let Op::Free { value } = list[at] else { return false };
        let Some(used) = list[..at].iter().rposition(|op| op.reads().any(|read| read == value)) else { return false };
        let op = list.remove(at);
        list.insert(used, op);
        true
    });
}

#[test]
fn an_adjoint_of_another_micro_batch_is_seen() {
    refuses("the change", |plan, rank, at| {
        let micro_batches = plan.micro_batches;
        match &mut plan.ranks[rank][at] {
            Op::Eval { micro_batch, .. } | Op::Loss { micro_batch, .. } | Op::Forget { micro_batch, .. } => {
                *micro_batch = (*micro_batch + 1) % micro_batches.max(2);
                true
            }
            _ => false,
        }
    });
    // Changes all operations of one rank consistently.
    refuses("the change", |plan, rank, at| {
        let micro_batches = plan.micro_batches;
        if at > 0 || micro_batches == 1 || plan.ranks[rank].is_empty() {
            return false;
        }
        let mut has_changed = false;
        for op in &mut plan.ranks[rank] {
            if let Op::Eval { pass: Pass::Adjoint, micro_batch, .. } | Op::Forget { micro_batch, .. } = op {
                *micro_batch = (*micro_batch + 1) % micro_batches;
                has_changed = true;
            }
        }
        has_changed
    });
}

#[test]
fn what_is_not_in_the_plan_is_seen() {
    refuses("the change", |plan, rank, at| match &mut plan.ranks[rank][at] {
        Op::Eval { layer, .. } | Op::Forget { layer, .. } => {
            *layer += 1000;
            true
        }
        Op::PostNorm { iteration } | Op::AwaitNorm { iteration } => {
            *iteration += 40;
            true
        }
        _ => false,
    });
    refuses("the change", |plan, rank, at| match &mut plan.ranks[rank][at] {
        Op::Eval { span, .. } => {
            *span = 0;
            true
        }
        _ => false,
    });
    for mut plan in plans() {
        plan.outputs[0].0.0 = 99;
        assert!(check(&plan).is_err());
    }
    for mut plan in plans().into_iter().filter(|plan| !plan.norms.is_empty()) {
        for list in &mut plan.ranks {
            list.retain(|op| !matches!(op, Op::SquareNorm { .. } | Op::PostNorm { .. } | Op::AwaitNorm { .. }));
        }
        assert!(check(&plan).is_err());
    }
}

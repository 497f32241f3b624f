//! The symbolic checker: proves that the schedules of a whole world satisfy their collective's contract.
//!
//! The checker runs all ranks' programs over symbolic values. It does so with `In` and `Out` apart, and with everything
//! aliased that the engine may alias. It proves that:
//! * the post-condition holds;
//! * every message has a receiver that expects the same sizes;
//! * nothing is read before it is written, and inputs are not written;
//! * reductions combine every contribution once, lowest rank first, finish exactly once, and are the same expression on
//!   all ranks;
//! * conflicting accesses are ordered by dependencies;
//! * no deadlock occurs, even if a sender may be only one segment ahead of its receiver.
//!
//! Read [`check_algorithm`] first.

mod case;
mod model;
mod order;
mod values;

use accl_types::Rank;

use crate::algorithms::{Algorithm, Sums};
use crate::program::{Places, Program};
use crate::topology::Topology;

pub use case::{BlockSizes, Case, Report, Violation};

/// Checks one row of the table in one world, including its documented cost.
///
/// # Errors
/// The first violation that is found.
pub fn check_algorithm(row: &Algorithm, root: Rank, topology: &Topology) -> Result<Report, Violation> {
    let world = topology.world();
    if !(row.applies)(world, topology) {
        return Err(Violation::new(format!("needs {}", row.requires)));
    }
    let blocks = if row.needs_equal_blocks { BlockSizes::Equal } else { BlockSizes::Different };
    let case = Case { collective: row.collective, world, root, topology, blocks };
    let report = check_programs(&case, &case.programs(row.build))?;
    let documented = Report {
        steps: (row.steps)(world, topology),
        bytes: (row.bytes)(world, topology),
        encodings: 0,
        roundings: report.roundings,
    };
    // If hosts differ in size, a row that composes over hosts documents its worst case.
    let bound = !row.requires.is_empty() && topology.smallest_host() < topology.largest_host();
    let as_documented =
        if bound { report.steps <= documented.steps && report.bytes <= documented.bytes } else { report == documented };
    if !as_documented {
        return Err(Violation::new(format!("costs {report:?}, documented {documented:?}")));
    }
    match row.sums {
        Sums::Together if report.roundings > 1 => {
            Err(Violation::new(format!("rounds {} times, but the row states `Sums::Together`", report.roundings)))
        }
        Sums::Together | Sums::InTurn => Ok(report),
    }
}

/// Checks the programs of all ranks of one call.
///
/// # Errors
/// The first violation that is found.
pub fn check_programs(case: &Case, programs: &[Program]) -> Result<Report, Violation> {
    Ok(check_in(&mut values::Pool::default(), case, programs)?.0)
}

/// Checks the programs of all ranks of one call twice, and whether both ways give the same expressions: the same operands of
/// each reduction in the same order.
///
/// # Errors
/// The first violation that is found.
pub fn check_equal(case: &Case, programs: &[Program], others: &[Program]) -> Result<[Report; 2], Violation> {
    let mut pool = values::Pool::default();
    let (report, results) = check_in(&mut pool, case, programs)?;
    let (other, other_results) = check_in(&mut pool, case, others)?;
    match results == other_results {
        true => Ok([report, other]),
        false => Err(Violation::new("the programs reduce in different orders")),
    }
}

fn check_in(pool: &mut values::Pool, case: &Case, programs: &[Program]) -> Result<(Report, Vec<u32>), Violation> {
    if programs.len() != case.world as usize {
        return Err(Violation::new(format!("{} programs for a world of {}", programs.len(), case.world)));
    }
    for rank in 0..case.world {
        let program = &programs[rank as usize];
        model::check_shape(case, rank, program)?;
        order::check_hazards(&places(case, rank, program), rank, program)?;
    }
    let graph = order::Graph::new(case, programs)?;
    graph.check_rendezvous(programs)?;
    let sequence = graph.sequence(programs)?;
    let (mut changes, mut results) = (values::Changes::default(), Vec::new());
    for apart in [true, false] {
        let places = |rank: u32| match apart {
            true => Places::separate(),
            false => places(case, rank, &programs[rank as usize]),
        };
        let (found, outputs) = values::check_values(case, programs, &graph, &sequence, &places, pool)?;
        changes = changes.max(found);
        results.extend(outputs);
    }
    let values::Changes { encodings, roundings } = changes;
    let steps = graph.longest_chain(programs, &sequence);
    Ok((Report { steps, bytes: model::busiest(case, programs), encodings, roundings }, results))
}

/// Checks some ranks without the whole world: each program alone, and the messages among these ranks. Used for worlds
/// in which the programs of all ranks are too many.
///
/// # Errors
/// The first violation that is found.
pub fn check_sample(case: &Case, ranks: &[u32], programs: &[Program]) -> Result<(), Violation> {
    for (&rank, program) in ranks.iter().zip(programs) {
        model::check_shape(case, rank, program)?;
        order::check_hazards(&places(case, rank, program), rank, program)?;
    }
    order::check_messages(case, ranks, programs)
}

fn places(case: &Case, rank: u32, program: &Program) -> Places {
    Places::of(program.in_division, program.out_division, &case.request(rank))
}

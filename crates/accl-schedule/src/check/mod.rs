//! The symbolic checker: proves that the schedules of a whole world do what their collective promises.
//!
//! It runs all ranks' programs over symbolic values and proves, with `In` and `Out` apart and with everything aliased
//! that the engine may alias: the post-condition; that every message has a receiver which expects the same sizes; that
//! nothing is read before it is written; that inputs are not written; that reductions combine every contribution once,
//! lowest rank first, finish exactly once, and are the same expression on all ranks; that conflicting accesses are
//! ordered by dependencies; and that nothing waits in a circle even if a sender may be only one segment ahead of its
//! receiver. Read [`check_algorithm`] first.

mod case;
mod model;
mod order;
mod values;

use accl_types::Rank;

use crate::algorithms::{Algorithm, Sums};
use crate::program::{Places, Program};
use crate::topology::Topology;

pub use case::{BlockSizes, Case, Report, Violation};

/// Checks one row of the table in one world, its documented cost included.
///
/// # Errors
/// The first thing found wrong.
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
    // With hosts of different sizes a row that composes over hosts documents the worst that can happen.
    let bound = !row.requires.is_empty() && topology.smallest_host() < topology.largest_host();
    let as_documented =
        if bound { report.steps <= documented.steps && report.bytes <= documented.bytes } else { report == documented };
    if !as_documented {
        return Err(Violation::new(format!("costs {report:?}, documented {documented:?}")));
    }
    match row.sums {
        Sums::Together if report.roundings > 1 => {
            Err(Violation::new(format!("rounds {} times where it says that it adds up together", report.roundings)))
        }
        Sums::Together | Sums::InTurn => Ok(report),
    }
}

/// Checks the programs of all ranks of one call.
///
/// # Errors
/// The first thing found wrong.
pub fn check_programs(case: &Case, programs: &[Program]) -> Result<Report, Violation> {
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
    let mut changes = values::Changes::default();
    for apart in [true, false] {
        let places = |rank: u32| match apart {
            true => Places::separate(),
            false => places(case, rank, &programs[rank as usize]),
        };
        changes = changes.max(values::check_values(case, programs, &graph, &sequence, &places)?);
    }
    let values::Changes { encodings, roundings } = changes;
    let steps = graph.longest_chain(programs, &sequence);
    Ok(Report { steps, bytes: model::busiest(case, programs), encodings, roundings })
}

/// Checks what can be seen without the whole world: the programs of some ranks, each alone and the messages among them.
/// For worlds in which all programs together are too many.
///
/// # Errors
/// The first thing found wrong.
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

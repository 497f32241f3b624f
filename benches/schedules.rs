//! The cost of a call before its first byte, if its plan is not cached: building the schedule, lowering it, laying it
//! out. Ids are `build/collective/algorithm/world`, likewise `lower` and `layout`.
//!
//! The rank in the middle builds, which is neither a root nor a leaf. Layout is for 1 MiB and resolves every span of
//! the program.

use std::hint::black_box;
use std::process::ExitCode;
use std::time::Duration;

use accl_benches::cases::CollectiveCase;
use accl_benches::sweep::{self, Sweep};
use accl_schedule::{ALGORITHMS, Algorithm, CallShape, Layout, Part, Program, Request, Topology};
use accl_types::{Collective, Dtype, Elems, Rank};
use criterion::{BatchSize, BenchmarkId, Criterion};

const WORLDS: &[u32] = &[2, 8, 64, 1024];
const MORE_WORLDS: &[u32] = &[2, 3, 4, 8, 17, 64, 256, 1024, 4096, 16384];
const BYTES: u64 = 1 << 20;

fn main() -> ExitCode {
    let mut criterion = sweep::criterion(Duration::from_millis(100));
    let worlds = Sweep::chosen().pick(WORLDS, MORE_WORLDS);
    for row in ALGORITHMS {
        for &world in worlds {
            // Algorithms that compose over hosts need several hosts: four ranks on each.
            let hosts = Topology::new((0..world).map(|rank| rank / 4).collect());
            let topology = [Topology::flat(world), hosts].into_iter().find(|hosts| (row.applies)(world, hosts));
            if let Some(topology) = topology {
                bench(&mut criterion, row, world, &topology);
            }
        }
    }
    criterion.final_summary();
    ExitCode::SUCCESS
}

fn bench(criterion: &mut Criterion, row: &'static Algorithm, world: u32, topology: &Topology) {
    let request = Request { collective: row.collective, world, rank: Rank(world / 2), root: Rank(0), topology };
    let id = |what: &str| format!("{what}/{}/{}", row.collective, row.name);
    let schedule = (row.build)(&request);
    let program = schedule.clone().lower(&request);
    let (inputs, outputs) = blocks(row.collective, world);
    let shape = CallShape { elem_bytes: 1, in_blocks: &inputs, out_blocks: &outputs, coding: None, part: Part::WHOLE };

    let parameter = BenchmarkId::from_parameter;
    let mut group = criterion.benchmark_group(id("build"));
    group.bench_function(parameter(world), |bencher| bencher.iter(|| (row.build)(black_box(&request))));
    group.finish();
    let mut group = criterion.benchmark_group(id("lower"));
    group.bench_function(parameter(world), |bencher| {
        let setup = || schedule.clone();
        bencher.iter_batched(setup, |schedule| schedule.lower(black_box(&request)), BatchSize::LargeInput);
    });
    group.finish();
    let mut group = criterion.benchmark_group(id("layout"));
    group.bench_function(parameter(world), |bencher| bencher.iter(|| resolve(&program, black_box(&shape))));
    group.finish();
}

/// Resolves every span, as the engine does once for each plan.
fn resolve(program: &Program, shape: &CallShape) -> usize {
    let layout = Layout::new(program, shape);
    let spans = |op: &accl_schedule::Op| {
        let written = op.kind.writes().iter().map(|span| layout.extents(span).len()).sum::<usize>();
        written + op.kind.reads().iter().map(|span| layout.extents(span).len()).sum::<usize>()
    };
    program.ops.iter().map(spans).sum()
}

/// Returns the blocks of a call of [`BYTES`] bytes on a rank that is not the root. Broadcast and reduce have
/// the whole buffer on every rank.
fn blocks(collective: Collective, world: u32) -> (Vec<Vec<Elems>>, Vec<Vec<Elems>>) {
    let case = CollectiveCase { collective: Collective::AllGather, algorithm: None, dtype: Dtype::U8, bytes: BYTES };
    let whole = || vec![vec![Elems(BYTES)]];
    let all = || (0..world).map(|rank| vec![Elems(case.block_elems(rank, world))]).collect::<Vec<_>>();
    let own = || vec![vec![Elems(case.block_elems(world / 2, world))]];
    match collective {
        Collective::AllReduce | Collective::Reduce => (whole(), whole()),
        Collective::Broadcast => (Vec::new(), whole()),
        Collective::ReduceScatter => (all(), own()),
        Collective::AllGather => (own(), all()),
        Collective::Gather => (own(), Vec::new()),
        Collective::Scatter => (Vec::new(), own()),
        Collective::AllToAll => (all(), all()),
        Collective::Barrier | Collective::Send | Collective::Recv => (Vec::new(), Vec::new()),
    }
}

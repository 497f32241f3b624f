//! Every collective by every algorithm over shm and tcp, with a process per rank. Ids are
//! `collective/algorithm/transport/ranks/bytes`; a table of algorithm and bus bandwidth follows.
//!
//! `src/world.rs` defines an iteration; README.md says how to run the bench and what it measures.

use std::time::Duration;

use accl_benches::cases::{COLLECTIVES, CollectiveCase, algorithm_name, algorithms, usual_dtype};
use accl_benches::sweep::{self, Sweep};
use accl_benches::table::Table;
use accl_benches::world::Worlds;
use accl_types::Collective;
use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};

const TRANSPORTS: &[&str] = &["shm", "tcp"];
const FEW_SIZES: &[u64] = &[4, 16 << 10, 1 << 20, 64 << 20];
const ALL_SIZES: &[u64] =
    &[4, 16, 64, 256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
const FEW_RANKS: &[u32] = &[2];
const ALL_RANKS: &[u32] = &[2, 4];

fn main() {
    let sweep = Sweep::chosen();
    let mut criterion = sweep::criterion(Duration::from_millis(400));
    let mut worlds = Worlds::of(env!("CARGO_BIN_EXE_accl-peers-rank"));
    let mut table = Table::default();
    for transport in TRANSPORTS {
        for &ranks in sweep.pick(FEW_RANKS, ALL_RANKS) {
            for &collective in COLLECTIVES {
                bench(&mut criterion, &mut worlds, &mut table, sweep, (collective, transport, ranks));
            }
        }
    }
    drop(worlds);
    criterion.final_summary();
    if !sweep::is_test() {
        report(&table);
    }
}

fn bench(
    criterion: &mut Criterion,
    worlds: &mut Worlds,
    table: &mut Table,
    sweep: Sweep,
    (collective, transport, ranks): (Collective, &str, u32),
) {
    let sizes = sweep.pick(FEW_SIZES, ALL_SIZES);
    let sizes = if collective == Collective::Barrier { &[0] } else { sizes };
    for &bytes in sizes {
        for algorithm in algorithms(collective, ranks) {
            let case = CollectiveCase { collective, algorithm, dtype: usual_dtype(collective), bytes };
            if !case.exists(ranks) {
                continue;
            }
            let title = format!("{collective}/{}/{transport}/{ranks}", algorithm_name(algorithm));
            let mut group = criterion.benchmark_group(&title);
            group.sampling_mode(SamplingMode::Flat);
            if bytes > 0 {
                group.throughput(Throughput::Bytes(bytes));
            }
            let mut ran = false;
            group.bench_function(BenchmarkId::from_parameter(bytes), |bencher| {
                // Started here, because inside `iter_custom` the start of a world would count as warming up.
                let world = worlds.get(transport, ranks);
                if !std::mem::replace(&mut ran, true) {
                    world.check(case).unwrap_or_else(|error| panic!("{title}/{bytes}: {error}"));
                }
                bencher.iter_custom(|iterations| {
                    world.run(case, iterations).unwrap_or_else(|error| panic!("{title}/{bytes}: {error}"))
                });
            });
            group.finish();
            if ran {
                table.add(case, transport, ranks, &title, &bytes.to_string());
            }
        }
    }
}

/// Prints the table, and writes it next to Criterion's own results.
fn report(table: &Table) {
    let results = sweep::results_dir();
    let text = table.to_text(&results);
    if text.is_empty() {
        return;
    }
    println!("{text}");
    let path = results.join("collectives.txt");
    match std::fs::write(&path, text) {
        Ok(()) => println!("this table is in {}", path.display()),
        Err(why) => eprintln!("{} could not be written: {why}", path.display()),
    }
}

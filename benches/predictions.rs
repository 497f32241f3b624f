//! Predictions of the cost model compared with the times of calls, for every algorithm, and the quality of the choice.
//!
//! The machine is calibrated first and then measured in the same run, since its speed may change from day to day.
//! Algorithms of a cell alternate. Arguments: `TRANSPORT/RANKS` such as `shm/4`, any number of them; none means all
//! four.

use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use accl_benches::cases::{CollectiveCase, algorithms, usual_dtype};
use accl_benches::pin;
use accl_benches::sweep;
use accl_benches::world::BenchWorld;
use accl_engine::config_from_environment;
use accl_schedule::cost::{IntraNode, Placement};
use accl_schedule::{Algorithm, Basis, Chooser, Topology};
use accl_types::{Bytes, Collective, Result};

const PLACES: &[(&str, u32)] = &[("shm", 2), ("shm", 4), ("tcp", 2), ("tcp", 4)];
const COLLECTIVES: &[Collective] =
    &[Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather, Collective::Broadcast];
const SIZES: &[u64] = &[4, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20];
/// Turns of each algorithm in a cell.
const ROUNDS: usize = 5;
/// Approximate duration of a turn.
const TURN: Duration = Duration::from_millis(4);
/// A prediction is good if it is off by no more than this share of the measurement.
const CLOSE: f64 = 0.2;
/// A choice is good if its time is at most the best time multiplied by the first number, plus the second in
/// microseconds.
const GOOD: (f64, f64) = (1.1, 0.2);

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    for &(transport, ranks) in PLACES {
        if !wanted.is_empty() && !wanted.contains(&format!("{transport}/{ranks}")) {
            continue;
        }
        place(transport, ranks)?;
        if sweep::is_test() {
            break;
        }
    }
    Ok(())
}

/// Counts over the cells of one transport and number of ranks.
#[derive(Default)]
struct Score {
    cells: usize,
    /// Good predictions of the chosen algorithm.
    close: usize,
    /// Predictions of all algorithms; `all_close` counts the good ones.
    all: usize,
    all_close: usize,
    /// Good choices.
    good: usize,
}

fn place(transport: &str, ranks: u32) -> Result<()> {
    println!("\n# {transport}, {ranks} ranks");
    let config = config_from_environment()?;
    let intra_node = if transport == "tcp" { IntraNode::Tcp } else { IntraNode::Shm };
    let placement =
        Placement { intra_node, cores: pin::cores().len().max(1) as u32, segment_bytes: config.segment_bytes };
    let mut world = BenchWorld::start(Path::new(env!("CARGO_BIN_EXE_accl-peers-rank")), transport, ranks)?;
    let mut score = Score::default();
    println!(
        "{:>14} {:>10} {:>20} {:>12} {:>12} {:>7}",
        "collective", "bytes", "algorithm", "measured us", "predicted us", "ratio"
    );
    for &collective in COLLECTIVES {
        let began = Instant::now();
        let machine = accl_calibrate::measure()?;
        println!("# calibrated in {:.0} ms: {machine}", began.elapsed().as_secs_f64() * 1e3);
        let basis = Basis { machine, placement, deterministic: false };
        let chooser = Chooser::new(Topology::flat(ranks), Vec::new(), &basis);
        let sizes = if sweep::is_test() { &SIZES[..1] } else { SIZES };
        for &bytes in sizes {
            cell(&mut world, &chooser, ranks, (collective, bytes), &mut score)?;
        }
    }
    println!(
        "# {transport}, {ranks} ranks: predictions within {:.0} %: {} of {} of the chosen algorithms, {} of {} of all; \
         choice within {} times the best + {} us: {} of {} cells",
        CLOSE * 100.0,
        score.close,
        score.cells,
        score.all_close,
        score.all,
        GOOD.0,
        GOOD.1,
        score.good,
        score.cells
    );
    Ok(())
}

fn cell(
    world: &mut BenchWorld,
    chooser: &Chooser,
    ranks: u32,
    (collective, bytes): (Collective, u64),
    score: &mut Score,
) -> Result<()> {
    let case = |row: &'static Algorithm| CollectiveCase {
        collective,
        dtype: usual_dtype(collective),
        algorithm: Some(row),
        bytes,
    };
    let rows: Vec<&'static Algorithm> =
        algorithms(collective, ranks).into_iter().flatten().filter(|&row| case(row).exists(ranks)).collect();
    let mut took: Vec<Vec<f64>> = vec![Vec::new(); rows.len()];
    let mut calls: Vec<u64> = Vec::new();
    for &row in &rows {
        world.check(case(row))?;
        let one = world.run(case(row), 2)? / 2;
        calls.push((TURN.as_nanos() / one.as_nanos().max(1)).clamp(1, 4000) as u64);
    }
    let rounds = if sweep::is_test() { 1 } else { ROUNDS };
    for _ in 0..rounds {
        for (index, &row) in rows.iter().enumerate() {
            took[index].push(world.run(case(row), calls[index])?.as_secs_f64() * 1e6 / calls[index] as f64);
        }
    }
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let measured: Vec<f64> = took.iter_mut().map(median).collect();
    let best = measured.iter().copied().fold(f64::INFINITY, f64::min);
    let chosen = chooser.choose(collective, Bytes(bytes), true)?;
    score.cells += 1;
    for (row, time_ps) in chooser.predict(collective, Bytes(bytes), true) {
        let Some(index) = rows.iter().position(|other| other.id == row.id) else { continue };
        let (measured, predicted) = (measured[index], time_ps as f64 / 1e6);
        let close = (predicted - measured).abs() <= CLOSE * measured;
        let is_chosen = row.id == chosen.id;
        score.all += 1;
        score.all_close += usize::from(close);
        let mut mark = String::new();
        if is_chosen {
            let good = measured <= GOOD.0 * best + GOOD.1;
            score.close += usize::from(close);
            score.good += usize::from(good);
            mark = format!("chosen{}{}", if close { "" } else { ", far" }, if good { "" } else { ", not the best" });
        }
        println!(
            "{:>14} {bytes:>10} {:>20} {measured:>12.2} {predicted:>12.2} {:>7.2} {mark}",
            collective.name(),
            row.name,
            predicted / measured
        );
    }
    Ok(())
}

//! Ranks with different constants choose the same algorithms, because the first rank's constants count.

use std::sync::Arc;
use std::time::Duration;

use accl_engine::{Group, GroupRole, GroupSpec, MemoryStore};
use accl_schedule::cost::{IntraNode, Machine, Placement};
use accl_schedule::{Basis, Chooser, Topology};
use accl_testkit::{Member, finish_submitted};
use accl_types::config::{Calibration, Config};
use accl_types::{Bytes, Collective, ErrorKind, Rank, ReduceOp, Result};
use tempfile::{TempDir, tempdir};

const WORLD: u32 = 4;
const SIZES: [usize; 5] = [1, 300, 5_000, 70_000, 1_000_000];
/// Constants where only waiting costs time, so that one step is best, and constants where only frames do, so that few
/// messages are best.
const WAITING: &str = "shm_latency_ps = 1000000000 # dear\nshm_frame_ps=0\n";
const FRAMES: &str = "shm_latency_ps = 0\nshm_frame_ps = 1000000000\n";

/// Writes a calibration file with this text and returns settings that name it.
fn config(folder: &TempDir, name: &str, text: &str) -> Config {
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    Config { calibration: Calibration::File(path.to_str().unwrap().to_owned()), ..Config::default() }
}

/// Runs `body` on one rank per entry of `configs`.
fn with_ranks<R: Send>(configs: &[Config], body: impl Fn(Result<Arc<Group>>) -> R + Sync) -> Vec<R> {
    let store = MemoryStore::default();
    let world = configs.len() as u32;
    let run = |rank: u32, config: &Config| {
        let engine = accl_calibrate::engine(config.clone());
        let spec = GroupSpec {
            name: "test".to_owned(),
            rank: Rank(rank),
            world,
            timeout: Duration::from_secs(30),
            config: config.clone(),
            master: None,
            global_ranks: Vec::new(),
            role: GroupRole::Default,
        };
        let result = body(engine.create_group(spec, &store, &mut || false));
        engine.shutdown();
        result
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..).zip(configs).map(|(rank, config)| scope.spawn(move || run(rank, config))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn choice(text: &str, bytes: u64) -> &'static str {
    let machine: Machine = accl_calibrate::read_text(text).unwrap();
    let placement = Placement { intra_node: IntraNode::Shm, cores: 64, segment_bytes: 64 << 10 };
    let basis = Basis { machine, placement, deterministic: false };
    Chooser::new(Topology::flat(WORLD), Vec::new(), &basis)
        .choose(Collective::AllReduce, Bytes(bytes), true)
        .unwrap()
        .name
}

#[test]
fn ranks_with_conflicting_constants_take_those_of_the_first() {
    assert!(SIZES.iter().any(|&count| choice(WAITING, 4 * count as u64) != choice(FRAMES, 4 * count as u64)));
    let folder = tempdir().unwrap();
    let configs: Vec<Config> = [WAITING, FRAMES, "garbage", FRAMES]
        .iter()
        .enumerate()
        .map(|(rank, text)| config(&folder, &rank.to_string(), text))
        .collect();
    // If a rank chose another algorithm, its collective fingerprint would differ and the call would fail on all ranks.
    with_ranks(&configs, |group| {
        let group = group.unwrap();
        let member = Member { rank: group.rank().index(), world: WORLD as usize, group: group.clone() };
        for count in SIZES {
            let mut data = vec![1.0f32 + member.rank as f32; count];
            member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!(data.iter().all(|&sum| sum == 10.0));
        }
        let mut desc = accl_engine::CallDesc::new(Collective::Barrier, accl_types::Dtype::U8);
        finish_submitted(&group.submit_blocking(&mut desc).unwrap()).unwrap();
    });
}

#[test]
fn ranks_with_conflicting_overrides_are_refused_on_all() {
    let mut configs = vec![Config { calibration: Calibration::Off, ..Config::default() }; 2];
    configs[1].set_option("algorithm", "all_reduce=ring:1MiB-").unwrap();
    for error in with_ranks(&configs, |group| group.map(drop).unwrap_err()) {
        assert_eq!(error.kind, ErrorKind::Configuration);
        assert!(error.message.contains("all_reduce=ring:1MiB-"), "{error}");
    }
}

#[test]
fn a_file_that_is_missing_is_measured_once_and_then_found() {
    let folder = tempdir().unwrap();
    let path = folder.path().join("below/machine.txt");
    let config = Config { calibration: Calibration::File(path.to_str().unwrap().to_owned()), ..Config::default() };
    let first = accl_calibrate::find(&config);
    // If the machine is too busy to be measured, the built-in constants are used and nothing is stored.
    if first.source == accl_calibrate::Source::BuiltIn {
        assert!(!path.exists());
        return;
    }
    assert_eq!(first.source, accl_calibrate::Source::File(path.clone()));
    let second = accl_calibrate::find(&config);
    assert_eq!((second.machine, &second.source), (first.machine, &first.source));
    assert!(second.age.is_some_and(|age| age < Duration::from_secs(600)));
}

#[test]
fn garbage_that_the_user_named_is_left_alone() {
    let folder = tempdir().unwrap();
    let config = config(&folder, "notes", "buy milk\n");
    let found = accl_calibrate::find(&config);
    assert_eq!((found.machine, found.source), (Machine::default(), accl_calibrate::Source::BuiltIn));
    assert_eq!(std::fs::read_to_string(folder.path().join("notes")).unwrap(), "buy milk\n");
}

#[test]
fn a_place_that_cannot_be_written_gives_constants_all_the_same() {
    let folder = tempdir().unwrap();
    let config = config(&folder, "file", "shm_call_ps = 1");
    let below = folder.path().join("file/machine.txt");
    let config = Config { calibration: Calibration::File(below.to_str().unwrap().to_owned()), ..config };
    let found = accl_calibrate::find(&config);
    assert!(
        matches!(found.source, accl_calibrate::Source::Measured | accl_calibrate::Source::BuiltIn),
        "{:?}",
        found.source
    );
}

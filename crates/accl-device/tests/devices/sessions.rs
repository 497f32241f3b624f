//! Devices that must know one another before they are set up. The text of each device reaches all ranks over the store.
//! A failure in between ends the creation of the group on all ranks, with its cause.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use accl_cclo::call::ConfigFunction;
use accl_device::DeviceKind;
use accl_engine::{Engine, Group, GroupRole, GroupSpec, MemoryStore, Store};
use accl_testkit::Member;
use accl_testkit::devices::{Faithful, LocalDevices, Network};
use accl_types::config::{Calibration, Config};
use accl_types::{Error, ErrorKind, Rank, ReduceOp, Result};

const TIMEOUT: Duration = Duration::from_secs(20);
const SOON: Duration = Duration::from_secs(5);

/// Whether a key of the store holds texts of devices.
fn is_exchange(key: &str) -> bool {
    key.contains("/told")
}

/// A rank's store. The rank dies at the first request for which `dies_of` is true, before the request is answered.
struct DyingStore<'a> {
    store: MemoryStore,
    dies_of: &'a (dyn Fn(&str, &str) -> bool + Sync),
    is_dead: AtomicBool,
    /// Number of requests about texts of devices.
    exchanges: AtomicUsize,
}

impl<'a> DyingStore<'a> {
    fn new(store: &MemoryStore, dies_of: &'a (dyn Fn(&str, &str) -> bool + Sync)) -> Self {
        Self { store: store.clone(), dies_of, is_dead: false.into(), exchanges: 0.into() }
    }

    fn live(&self, what: &str, key: &str) -> Result<()> {
        self.exchanges.fetch_add(usize::from(is_exchange(key)), Ordering::SeqCst);
        let dies = (self.dies_of)(what, key);
        if self.is_dead.fetch_or(dies, Ordering::SeqCst) || dies {
            return Err(Error::rendezvous("this rank is dead"));
        }
        Ok(())
    }
}

impl Store for DyingStore<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.live("set", key)?;
        self.store.set(key, value)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.live("get", key)?;
        self.store.get(key)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.live("add", key)?;
        self.store.add(key, delta)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.live("delete", key)?;
        self.store.delete(key)
    }

    fn identity(&self) -> u64 {
        self.store.identity()
    }
}

fn config() -> Config {
    let mut config = Config { calibration: Calibration::Off, ..Config::default() };
    config.set_option("device", "sim://?design=udp").unwrap();
    config
}

fn devices(ranks: u32) -> Arc<LocalDevices> {
    let devices = LocalDevices::new(Network::Udp, Faithful::all(), ranks);
    devices.faults().have_queue_pairs.store(true, Ordering::SeqCst);
    devices
}

/// A rank's process.
struct Process {
    engine: Arc<Engine>,
    rank: u32,
    world: u32,
    timeout: Duration,
}

impl Process {
    fn new(devices: &Arc<LocalDevices>, rank: u32, world: u32) -> Self {
        let engine = accl_calibrate::engine(config());
        engine.add_offload(DeviceKind::new(devices.clone())).unwrap();
        Self { engine, rank, world, timeout: TIMEOUT }
    }

    fn make(&self, store: &dyn Store, interrupt: &mut dyn FnMut() -> bool) -> Result<Arc<Group>> {
        let spec = GroupSpec {
            name: "g".to_owned(),
            rank: Rank(self.rank),
            world: self.world,
            timeout: self.timeout,
            config: config(),
            master: None,
            global_ranks: Vec::new(),
            role: GroupRole::Default,
        };
        self.engine.create_group(spec, store, interrupt)
    }

    /// Creates the group and lets the devices do an all_reduce.
    fn train(&self, store: &dyn Store) -> Result<Member> {
        let member = Member::new(self.make(store, &mut || false)?);
        let mut data = [1_i64; 100];
        member.all_reduce(&mut data, ReduceOp::Sum)?;
        assert_eq!(data, [i64::from(self.world); 100]);
        assert!(member.group.describe().contains("1 calls: all_reduce int64 SUM 1"));
        member.barrier()?;
        Ok(member)
    }
}

/// Runs all ranks, each on a thread. Returns their results in rank order.
fn all<R: Send>(world: u32, rank: impl Fn(u32) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = (0..world).map(|number| scope.spawn(move || rank(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Checks that each device of the group has the texts of all devices, and that each driver has set up the sessions in
/// these texts.
fn assert_all_know_each_other(devices: &LocalDevices, world: u32) {
    let faults = devices.faults();
    let texts: Vec<String> = faults.local_infos.lock().values().cloned().collect();
    assert_eq!(texts.len(), world as usize);
    let received = faults.received_infos.lock();
    let sessions = faults.sessions.lock();
    for rank in 0..world {
        assert_eq!(received[&rank], texts, "rank {rank}");
        for peer in 0..world {
            let line = format!("qp of rank {rank} for peer {peer}: {}\n", sessions[&(rank, peer)]);
            assert!(
                texts[rank as usize].contains(&line),
                "the driver of rank {rank} has set up another session: {line}"
            );
        }
    }
}

fn failed<T>(results: Vec<Result<T>>) -> Vec<Error> {
    results.into_iter().map(|result| result.err().expect("no group")).collect()
}

#[test]
fn each_device_receives_the_texts_of_all_devices_and_nothing_stays_in_the_store() {
    for world in [1, 2, 3, 5] {
        let (devices, store) = (devices(world), MemoryStore::default());
        let questions = all(world, |rank| {
            let store = DyingStore::new(&store, &|_, _| false);
            let process = Process::new(&devices, rank, world);
            drop(process.train(&store).unwrap());
            process.engine.shutdown();
            store.exchanges.into_inner()
        });
        assert_all_know_each_other(&devices, world);
        assert!(questions.iter().all(|questions| (*questions > 0) == (world > 1)), "{questions:?}");
        assert_eq!(store.keys(), Vec::<String>::new());
    }
}

#[test]
fn packets_of_a_job_that_was_killed_cannot_get_in_since_no_device_lets_any_in_before_all_are_reset() {
    let (devices, store) = (devices(3), MemoryStore::default());
    let faults = devices.faults();
    // The devices have no texts to exchange, so nothing else delays the first ranks.
    faults.have_queue_pairs.store(false, Ordering::SeqCst);
    faults.is_slow.store(2, Ordering::SeqCst);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(200));
            faults.is_slow.store(u32::MAX, Ordering::SeqCst);
        });
        all(3, |rank| drop(Process::new(&devices, rank, 3).train(&store).unwrap()));
    });
    let configured = faults.configured.lock();
    let is_reset = |(_, function): &&(u32, u32)| *function == ConfigFunction::Reset.number();
    let first =
        configured.iter().position(|(_, function)| *function == ConfigFunction::EnablePackets.number()).unwrap();
    assert_eq!(configured[..first].iter().filter(is_reset).count(), 3, "{configured:?}");
    assert_eq!(store.keys(), Vec::<String>::new());
}

#[test]
fn a_rank_that_fails_between_the_steps_is_named_on_all_ranks() {
    for (what, says) in [
        ("opens", "the card of rank 1 has no power"),
        ("receives", "the card of rank 1 connects no queue pair"),
        ("babbles", "rank 1 sent no queue pair for this rank: `qp`"),
    ] {
        let (devices, store) = (devices(3), MemoryStore::default());
        let faults = devices.faults();
        match what {
            "opens" => &faults.does_not_open,
            "receives" => &faults.does_not_receive,
            _ => &faults.babbles,
        }
        .store(1, Ordering::SeqCst);
        let begin = Instant::now();
        let results = all(3, |rank| Process::new(&devices, rank, 3).make(&store, &mut || false));
        assert!(begin.elapsed() < SOON, "{what}: {:?}", begin.elapsed());
        for error in failed(results) {
            assert!(error.to_string().contains(says), "{what}: {error}");
            assert_eq!(error.kind, ErrorKind::Device, "{what}: {error}");
        }
    }
}

#[test]
fn a_store_that_ends_with_rank_0_has_given_all_ranks_the_cause_of_a_device_that_does_not_open() {
    for failing in [0, 1, 2, 3] {
        for _ in 0..5 {
            let (devices, store) = (devices(4), MemoryStore::default());
            devices.faults().does_not_open.store(failing, Ordering::SeqCst);
            let has_ended = AtomicBool::new(false);
            let dies_of = |_: &str, _: &str| has_ended.load(Ordering::SeqCst);
            let results = all(4, |rank| {
                let made = Process::new(&devices, rank, 4).make(&DyingStore::new(&store, &dies_of), &mut || false);
                has_ended.fetch_or(rank == 0, Ordering::SeqCst);
                made
            });
            for error in failed(results) {
                assert!(error.to_string().contains(&format!("the card of rank {failing} has no power")), "{error}");
            }
        }
    }
}

#[test]
fn a_rank_with_a_slow_device_learns_at_once_that_another_device_does_not_open() {
    let (devices, store) = (devices(3), MemoryStore::default());
    devices.faults().is_slow.store(2, Ordering::SeqCst);
    devices.faults().does_not_open.store(1, Ordering::SeqCst);
    let begin = Instant::now();
    let results = all(3, |rank| Process::new(&devices, rank, 3).make(&store, &mut || false));
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    for error in failed(results) {
        assert!(error.to_string().contains("the card of rank 1 has no power"), "{error}");
    }
}

#[test]
fn an_interrupt_ends_the_wait_for_the_texts_of_the_others_on_all_ranks() {
    let (devices, store) = (devices(3), MemoryStore::default());
    devices.faults().is_slow.store(2, Ordering::SeqCst);
    let begin = Instant::now();
    let results = all(3, |rank| {
        let process = Process::new(&devices, rank, 3);
        let result = process.make(&store, &mut || {
            // The interrupt occurs once this rank waits for the third rank.
            rank == 1 && devices.faults().local_infos.lock().len() == 2
        });
        // Ranks 0 and 1 have failed by now or will fail soon: they waited for the device of rank 2.
        if rank == 1 {
            devices.faults().is_slow.store(u32::MAX, Ordering::SeqCst);
        }
        result
    });
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    for error in failed(results) {
        assert_eq!(error.kind, ErrorKind::Aborted, "{error}");
        assert!(error.to_string().contains("interrupted while creating the group"), "{error}");
    }
}

#[test]
fn a_rank_whose_device_does_not_come_is_named_at_the_deadline() {
    let (devices, store) = (devices(3), MemoryStore::default());
    devices.faults().is_slow.store(2, Ordering::SeqCst);
    let results = all(3, |rank| {
        let process = Process { timeout: Duration::from_millis(700), ..Process::new(&devices, rank, 3) };
        process.make(&store, &mut || false)
    });
    for error in failed(results) {
        assert!(error.to_string().contains("the card of rank 2 does not come"), "{error}");
    }
    assert_eq!(store.keys().iter().filter(|key| is_exchange(key)).count(), 0, "{:?}", store.keys());
}

#[test]
fn when_a_rank_is_replaced_all_devices_are_opened_again_with_the_new_texts() {
    type DiesOf = &'static (dyn Fn(&str, &str) -> bool + Sync);
    let moments: [(&str, u32, DiesOf); 8] = [
        ("before it sends its text", 1, &|what, key| what == "set" && is_exchange(key)),
        ("before it receives the texts", 1, &|what, key| what == "get" && key.ends_with("/told/1/all")),
        ("once it is set up", 1, &|what, key| what == "set" && key.ends_with("/told/2/1")),
        ("before it lets packets in", 1, &|what, key| what == "get" && key.ends_with("/told/2/all")),
        ("when it has received the texts", 1, &|what, key| what == "add" && key.ends_with("/ready")),
        ("before it sends the texts of all", 0, &|what, key| what == "set" && key.ends_with("/told/1/all")),
        ("before it says that all are set up", 0, &|what, key| what == "set" && key.ends_with("/told/2/all")),
        ("when it has sent the texts of all", 0, &|what, key| what == "add" && key.ends_with("/ready")),
    ];
    for (when, dies, dies_of) in moments {
        let (devices, store) = (devices(3), MemoryStore::default());
        let groups = all(3, |rank| {
            if rank == dies {
                let process = Process::new(&devices, rank, 3);
                let store = DyingStore::new(&store, dies_of);
                let error = process.make(&store, &mut || false).err().expect("it dies");
                assert!(error.to_string().contains("this rank is dead"), "{when}: {error}");
                drop(process);
            }
            let process = Process::new(&devices, rank, 3);
            let member = process.train(&store).unwrap_or_else(|error| panic!("{when}, rank {rank}: {error}"));
            (process, member)
        });
        assert_all_know_each_other(&devices, 3);
        // The devices of the dead process may take a moment to close.
        let begin = Instant::now();
        while devices.faults().open.load(Ordering::SeqCst) != 3 {
            assert!(begin.elapsed() < SOON, "{when}: more or fewer than one device a rank are open");
            std::thread::yield_now();
        }
        drop(groups);
        assert_eq!(
            store.keys().iter().filter(|key| is_exchange(key)).collect::<Vec<_>>(),
            Vec::<&String>::new(),
            "{when}"
        );
    }
}

/// Ranks that poll rarely learn that group creation failed before they have seen that all ranks were present. In an
/// earlier version the leader waited in vain for their last request, and their count stayed in the store.
#[test]
fn a_rank_that_has_not_seen_that_all_are_there_counts_itself_out_when_a_device_does_not_open() {
    for failing in [0, 1] {
        for _ in 0..2 {
            let (devices, store) = (devices(4), MemoryStore::default());
            devices.faults().does_not_open.store(failing, Ordering::SeqCst);
            let results = all(4, |rank| {
                // Rank 3 comes last, as in a large job: by then the other ranks poll ten times a second.
                std::thread::sleep(Duration::from_secs(u64::from(rank == 3)));
                Process::new(&devices, rank, 4).make(&store, &mut || false)
            });
            failed(results);
            let silent: Vec<String> = store.keys().into_iter().filter(|key| key.ends_with("/silent")).collect();
            assert_eq!(silent, Vec::<String>::new());
        }
    }
}

#[test]
fn texts_that_no_rank_of_the_group_wrote_are_an_error() {
    for (garbage, says) in [
        ("nonsense", "the store holds an invalid list of rank texts"),
        ("1\na\n", "the store holds texts that the ranks of this group did not write"),
    ] {
        let (devices, store) = (devices(2), MemoryStore::default());
        let results = all(2, |rank| {
            let process = Process::new(&devices, rank, 2);
            let store = Garbled { store: store.clone(), garbage };
            process.make(&store, &mut || false)
        });
        for error in failed(results) {
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}

/// A store that replaces the texts of all devices with garbage.
struct Garbled {
    store: MemoryStore,
    garbage: &'static str,
}

impl Store for Garbled {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(key, if key.ends_with("/told/1/all") { self.garbage.as_bytes() } else { value })
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.store.get(key)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.store.add(key, delta)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.store.delete(key)
    }

    fn identity(&self) -> u64 {
        self.store.identity()
    }
}

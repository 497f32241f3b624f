//! Groups are created over a store that outlives the ranks. Whichever rank dies at whatever time, the next attempt
//! succeeds, and no rank waits for a rank that has given up.
//!
//! Each rank is a thread with an engine of its own. A rank dies between two requests to its store, and its engine ends
//! without disconnecting.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use accl_engine::{Engine, Group, GroupRole, GroupSpec, MemoryStore, Store};
use accl_testkit::{Member, Rng};
use accl_types::config::{Calibration, Config};
use accl_types::{Error, ErrorKind, Rank, ReduceOp, Result};

const WORLD: u32 = 3;
/// Maximum time from the start of the last process until all ranks train.
const SOON: Duration = Duration::from_secs(5);
const TIMEOUT: Duration = Duration::from_secs(30);
/// Number of groups that each rank creates.
const MAKINGS: usize = 3;

/// Decides when a rank dies, from its requests to the store.
#[derive(Default)]
struct Life {
    /// Kinds of requests made so far, with the group; a repeated request counts once.
    asked: Mutex<BTreeSet<String>>,
    /// Number of kinds of requests that are answered; the rank dies at the next kind. `None` if it does not die.
    dies_at: Option<usize>,
    dead: AtomicBool,
}

impl Life {
    fn until(dies_at: Option<usize>) -> Arc<Self> {
        Arc::new(Self { dies_at, ..Self::default() })
    }

    fn is_dead(&self) -> bool {
        self.dead.load(Ordering::SeqCst)
    }
}

/// A rank's connection to the store, which ends with the rank.
struct Mortal {
    store: MemoryStore,
    group: &'static str,
    life: Arc<Life>,
}

impl Mortal {
    fn live(&self, what: &str, key: &str) -> Result<()> {
        // The name of a rendezvous round is left out, because it differs each time.
        let key: Vec<&str> = key.split('/').enumerate().filter(|(i, _)| *i != 2).map(|(_, part)| part).collect();
        let mut asked = self.life.asked.lock().unwrap();
        asked.insert(format!("{} {what} {}", self.group, key.join("/")));
        if self.life.dies_at.is_some_and(|moment| asked.len() > moment) {
            self.life.dead.store(true, Ordering::SeqCst);
        }
        if self.life.is_dead() { Err(Error::rendezvous("this rank is dead")) } else { Ok(()) }
    }
}

impl Store for Mortal {
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

fn engine() -> Arc<Engine> {
    accl_calibrate::engine(Config { calibration: Calibration::Off, ..Config::default() })
}

fn spec(name: &str, rank: u32, world: u32, global_ranks: &[u64]) -> GroupSpec {
    GroupSpec {
        name: name.to_owned(),
        rank: Rank(rank),
        world,
        timeout: TIMEOUT,
        config: Config { calibration: Calibration::Off, ..Config::default() },
        master: None,
        global_ranks: global_ranks.to_vec(),
        role: GroupRole::Default,
    }
}

/// Runs a rank's process: creates the default process group, a group of the same ranks, and one of two disjoint groups
/// with the same name. Trains in each.
fn process(rank: u32, store: &MemoryStore, life: &Arc<Life>) -> Result<()> {
    let engine = engine();
    let result = train(&engine, rank, store, life);
    if !life.is_dead() {
        engine.shutdown();
    }
    result
}

fn train(engine: &Arc<Engine>, rank: u32, store: &MemoryStore, life: &Arc<Life>) -> Result<()> {
    let make = |name: &'static str, rank, world, global_ranks: &[u64]| -> Result<Member> {
        let store = Mortal { store: store.prefixed(name), group: name, life: life.clone() };
        let made = engine.create_group(spec(name, rank, world, global_ranks), &store, &mut || life.is_dead())?;
        if life.is_dead() { Err(Error::aborted("dead")) } else { Ok(Member::new(made)) }
    };
    let sum = |member: &Member| -> Result<()> {
        let mut data = [1.0_f32; 8];
        member.all_reduce(&mut data, ReduceOp::Sum)?;
        assert_eq!(data, [member.world as f32; 8]);
        Ok(())
    };
    let job = make("0", rank, WORLD, &[])?;
    sum(&job)?;
    let all = make("1", rank, WORLD, &[0, 1, 2])?;
    sum(&all)?;
    let part = if rank == 2 { make("2", 0, 1, &[2])? } else { make("2", rank, 2, &[0, 1])? };
    sum(&part)?;
    job.barrier()
}

/// Ranks that a launcher restarts together.
#[derive(Clone, Copy, Debug)]
enum Agents {
    One,
    /// One launcher for ranks 0 and 1, and one for rank 2. Each restarts only its own ranks.
    Two,
}

impl Agents {
    fn mates(self, rank: u32) -> std::ops::Range<u32> {
        match self {
            Agents::One => 0..WORLD,
            Agents::Two if rank < 2 => 0..2,
            Agents::Two => 2..3,
        }
    }
}

/// Launchers that start all ranks. If a rank ends with an error, its launcher restarts all its ranks.
struct Launcher<'scope, 'env> {
    scope: &'scope std::thread::Scope<'scope, 'env>,
    store: &'env MemoryStore,
    ended: Sender<(u32, u32, Result<()>)>,
    results: Receiver<(u32, u32, Result<()>)>,
    lives: Vec<Arc<Life>>,
    /// Number of starts of each rank.
    starts: Vec<u32>,
    running: Vec<bool>,
    done: Vec<bool>,
    last_start: Instant,
    errors: Vec<String>,
}

impl Launcher<'_, '_> {
    fn start(&mut self, rank: u32, dies_at: Option<usize>) {
        let (life, store, ended) = (Life::until(dies_at), self.store, self.ended.clone());
        let index = rank as usize;
        self.lives[index] = life.clone();
        self.starts[index] += 1;
        (self.running[index], self.done[index]) = (true, false);
        self.last_start = Instant::now();
        let start = self.starts[index];
        self.scope.spawn(move || ended.send((rank, start, process(rank, store, &life))));
    }

    /// Waits for the end of some rank's process.
    fn next_result(&mut self, what: &str) -> (u32, Result<()>) {
        let (rank, start, result) =
            self.results.recv_timeout(TIMEOUT / 2).unwrap_or_else(|_| panic!("{what}: stuck; {:#?}", self.errors));
        assert_eq!(start, self.starts[rank as usize]);
        self.running[rank as usize] = false;
        if let Err(error) = &result {
            let dead = if self.lives[rank as usize].is_dead() { " (dead)" } else { "" };
            self.errors.push(format!("rank {rank}, start {start}{dead}: {error}"));
        }
        (rank, result)
    }
}

/// Lets ranks die at these moments of their first and second lives. All ranks must train soon after the last start.
fn survive(agents: Agents, deaths: &[(u32, usize)]) {
    let store = MemoryStore::default();
    let what = format!("{agents:?}, {deaths:?}");
    let alive = Life::until(None);
    std::thread::scope(|scope| {
        let (ended, results) = mpsc::channel();
        let world = WORLD as usize;
        let mut launcher = Launcher {
            scope,
            store: &store,
            ended,
            results,
            lives: vec![alive.clone(); world],
            starts: vec![0; world],
            running: vec![false; world],
            done: vec![false; world],
            last_start: Instant::now(),
            errors: Vec::new(),
        };
        let dies_at = |rank: u32, life: u32| {
            let mine = deaths.iter().enumerate().find(|(index, (victim, _))| *victim == rank && *index as u32 == life);
            mine.map(|(_, (_, moment))| *moment)
        };
        (0..WORLD).for_each(|rank| launcher.start(rank, dies_at(rank, 0)));
        while !launcher.done.iter().all(|done| *done) {
            let (rank, result) = launcher.next_result(&what);
            launcher.done[rank as usize] = result.is_ok();
            let mut broken: Vec<u32> = result.err().map(|_| rank).into_iter().collect();
            while let Some(rank) = broken.pop() {
                // Like torchrun, first ends all old processes of the launcher.
                let mates = agents.mates(rank);
                mates.clone().for_each(|mate| launcher.lives[mate as usize].dead.store(true, Ordering::SeqCst));
                while mates.clone().any(|mate| launcher.running[mate as usize]) {
                    let (other, result) = launcher.next_result(&what);
                    launcher.done[other as usize] = result.is_ok();
                    broken.extend(result.err().filter(|_| !mates.contains(&other)).map(|_| other));
                }
                for mate in mates {
                    let life = launcher.starts[mate as usize];
                    assert!(life < 8, "{what}: {:#?}", launcher.errors);
                    launcher.start(mate, dies_at(mate, life));
                }
            }
        }
        let took = launcher.last_start.elapsed();
        assert!(took < SOON, "{what}: {took:?} after the last start; {:#?}", launcher.errors);
    });
    // A rank that dies while it cleans up leaves its endpoint address, and the participants and the count of that
    // rendezvous round. At that moment its launcher also ends other ranks.
    let left = store.keys();
    assert!(left.len() <= (WORLD as usize + 1) * deaths.len(), "{what}: {left:#?}");
}

/// Returns about how many kinds of requests a rank makes; it cannot die at a later moment.
fn moments() -> usize {
    let store = MemoryStore::default();
    let lives: Vec<_> = (0..WORLD).map(|_| Life::until(None)).collect();
    std::thread::scope(|scope| {
        for (rank, life) in lives.iter().enumerate() {
            let store = &store;
            scope.spawn(move || process(rank as u32, store, life).unwrap());
        }
    });
    assert_eq!(store.keys(), Vec::<String>::new());
    let most = lives.iter().map(|life| life.asked.lock().unwrap().len()).max().unwrap();
    assert!(most > 5 * MAKINGS, "{most}");
    most
}

#[test]
fn a_rank_that_dies_at_any_moment_does_not_keep_the_next_attempt_from_forming() {
    for moment in 0..=moments() {
        for victim in 0..WORLD {
            survive(Agents::One, &[(victim, moment)]);
        }
    }
}

#[test]
fn ranks_of_another_launcher_meet_those_that_were_restarted() {
    for moment in 0..=moments() {
        for victim in 0..WORLD {
            survive(Agents::Two, &[(victim, moment)]);
        }
    }
}

#[test]
fn a_second_death_in_the_second_attempt_is_survived_as_well() {
    let moments = moments() as u64;
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let agents = if rng.below(2) == 0 { Agents::One } else { Agents::Two };
        let deaths = [0, 1].map(|_| (rng.below(WORLD.into()) as u32, rng.below(moments) as usize));
        survive(agents, &deaths);
    }
}

#[test]
fn groups_leave_no_keys() {
    let store = MemoryStore::default();
    std::thread::scope(|scope| {
        for rank in 0..WORLD {
            let store = &store;
            scope.spawn(move || {
                let engine = engine();
                for round in 0..20 {
                    // Creates groups repeatedly under one name, and also under new names.
                    for name in ["again", &format!("once-{round}")] {
                        let store = store.prefixed(name);
                        let group = engine.create_group(spec(name, rank, WORLD, &[]), &store, &mut || false).unwrap();
                        Member::new(group).barrier().unwrap();
                    }
                }
                engine.shutdown();
            });
        }
    });
    assert_eq!(store.keys(), Vec::<String>::new());
}

/// Creates a group of three ranks over stores of the test's choice. Returns the result and the duration for each rank.
fn make<S: Store>(store: impl Fn(u32) -> S + Sync) -> Vec<(Result<Arc<Group>>, Duration)> {
    let make = |rank| {
        let engine = engine();
        let began = Instant::now();
        let made = engine.create_group(spec("g", rank, WORLD, &[]), &store(rank), &mut || false);
        let took = began.elapsed();
        if made.is_err() {
            engine.shutdown();
        }
        (made, took)
    };
    let make = &make;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..WORLD).map(|rank| scope.spawn(move || make(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A store that records its rank's requests and may refuse one of them.
struct Counting<'a> {
    store: MemoryStore,
    asked: &'a Mutex<Vec<String>>,
    refuses: Option<(&'static str, &'static str)>,
}

impl Counting<'_> {
    fn ask(&self, what: &str, key: &str) -> Result<()> {
        let question = format!("{what} {key}");
        let refused = self.refuses.is_some_and(|(verb, word)| question.starts_with(verb) && question.contains(word));
        let mut asked = self.asked.lock().unwrap();
        let is_first = !asked.contains(&question);
        asked.push(question);
        drop(asked);
        if !(refused && is_first) {
            return Ok(());
        }
        // Until the others have answered, they cannot distinguish this attempt from an earlier one.
        let late = Instant::now() + Duration::from_secs(10);
        let others = || self.store.keys().iter().filter(|key| key.contains("/info/")).count();
        while what == "set" && others() < WORLD as usize - 2 && Instant::now() < late {
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(Error::exhausted("no memory for that"))
    }
}

impl Store for Counting<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.ask("set", key)?;
        self.store.set(key, value)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.ask("get", key)?;
        self.store.get(key)
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.ask("add", key)?;
        self.store.add(key, delta)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        self.ask("delete", key)?;
        self.store.delete(key)
    }

    fn identity(&self) -> u64 {
        self.store.identity()
    }
}

#[test]
fn a_rank_that_fails_after_the_meeting_notifies_the_others_at_once() {
    // The leader publishes no endpoint address of its own in the store.
    let moments = [("add ", "/ready")].into_iter().flat_map(|moment| [(0, moment), (1, moment), (2, moment)]);
    for (victim, moment) in moments.chain([(1, ("set ", "/info/")), (2, ("set ", "/info/"))]) {
        let (store, asked) = (MemoryStore::default(), [0, 1, 2].map(|_| Mutex::default()));
        let results = make(|rank| Counting {
            store: store.clone(),
            asked: &asked[rank as usize],
            refuses: (rank == victim).then_some(moment),
        });
        for (rank, (result, took)) in results.into_iter().enumerate() {
            let Err(error) = result else { panic!("rank {rank} has made a group without rank {victim}") };
            assert_eq!(error.kind, ErrorKind::Exhausted, "{error}");
            assert!(error.message.contains("no memory for that"), "{error}");
            if rank as u32 != victim {
                assert!(error.message.contains(&format!("rank {victim} could not create the group")), "{error}");
            }
            assert!(took < SOON, "rank {rank} waited {took:?}");
        }
    }
}

#[test]
fn ranks_that_come_when_a_refusing_rank_has_gone_quote_its_cause_at_their_deadline() {
    for (refusing, late) in [(0, 1), (1, 0), (1, 2), (2, 1)] {
        let store = MemoryStore::default();
        let soon = |rank| GroupSpec { timeout: Duration::from_millis(50), ..spec("g", rank, WORLD, &[]) };
        let cause = Error::configuration("no interface has that name");
        accl_engine::refuse_group(&soon(refusing), &store, &cause, &mut || false);
        let engine = engine();
        let Err(error) = engine.create_group(soon(late), &store, &mut || false) else { panic!("made") };
        let quoted = format!("rank {refusing} arrived and failed: no interface has that name");
        assert!(error.kind == ErrorKind::Timeout && error.message.contains(&quoted), "{error}");
        engine.shutdown();
    }
}

#[test]
fn a_rank_that_is_interrupted_while_it_waits_notifies_the_others_at_once() {
    for victim in 0..2 {
        let store = MemoryStore::default();
        std::thread::scope(|scope| {
            for rank in 0..2 {
                let store = &store;
                scope.spawn(move || {
                    let engine = engine();
                    let began = Instant::now();
                    // The third rank does not come. The interrupt occurs when the other rank has met the victim.
                    let mut interrupt = || rank == victim && store.keys().iter().any(|key| key.ends_with("info/1"));
                    let spec = spec("g", rank, WORLD, &[]);
                    let Err(error) = engine.create_group(spec, store, &mut interrupt) else { panic!("made") };
                    assert!(error.message.contains("interrupted"), "{error}");
                    assert!(rank == victim || error.message.contains(&format!("rank {victim} could")), "{error}");
                    assert!(began.elapsed() < SOON);
                    engine.shutdown();
                });
            }
        });
    }
}

#[test]
fn a_rank_that_has_no_endpoint_to_publish_fails_the_others_with_its_cause() {
    for victim in 0..WORLD {
        let store = MemoryStore::default();
        std::thread::scope(|scope| {
            for rank in 0..WORLD {
                let store = &store;
                scope.spawn(move || {
                    let mut spec = spec("g", rank, WORLD, &[]);
                    if rank == victim {
                        spec.config.set_option("transports", "tcp").unwrap();
                        spec.config.set_option("socket_ifname", "=nosuch0").unwrap();
                    }
                    let engine = accl_calibrate::engine(spec.config.clone());
                    let began = Instant::now();
                    let Err(error) = engine.create_group(spec, store, &mut || false) else { panic!("made") };
                    assert!(error.message.contains("nosuch0"), "{error}");
                    let is_of_another = error.message.contains(&format!("rank {victim} could not create the group"));
                    assert_eq!(is_of_another, rank != victim, "{error}");
                    assert!(began.elapsed() < SOON, "rank {rank} waited {:?}", began.elapsed());
                    engine.shutdown();
                });
            }
        });
    }
}

#[test]
fn missing_ranks_are_named_by_all_who_came() {
    let store = MemoryStore::default();
    for present in [vec![0_u32, 2], vec![1, 2]] {
        std::thread::scope(|scope| {
            for &rank in &present {
                let (store, present) = (&store, &present);
                scope.spawn(move || {
                    let engine = engine();
                    let mut spec = spec("g", rank, WORLD, &[]);
                    spec.timeout = Duration::from_millis(300);
                    let Err(error) = engine.create_group(spec, store, &mut || false) else { panic!("made") };
                    let missing = 1 - present[0];
                    let sentence = format!("1 of 3 ranks are missing: {missing}");
                    assert!(error.message.contains(&sentence) && error.kind == ErrorKind::Timeout, "{error}");
                    assert!(error.message.contains("Timed out waiting "), "{error}");
                });
            }
        });
    }
}

/// A store that delays its answer to rank 0 about rank 3, so that rank 0 learns of no failure meanwhile.
struct Slow<'a> {
    store: &'a MemoryStore,
    answers: &'a AtomicBool,
}

impl Store for Slow<'_> {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(key, value)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        while key.ends_with("info/3") && !self.answers.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
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

#[test]
fn a_rank_that_came_and_gave_up_is_not_counted_among_the_missing() {
    let (store, answers) = (MemoryStore::default(), AtomicBool::new(false));
    let has_come = |rank: u32| store.keys().iter().any(|key| key.ends_with(&format!("info/{rank}")));
    let make = |rank: u32, timeout: Duration, store: &dyn Store| {
        let engine = engine();
        let mut spec = spec("g", rank, 4, &[]);
        spec.timeout = timeout;
        let made = engine.create_group(spec, store, &mut || false);
        engine.shutdown();
        made.err().map(|error| error.message).unwrap_or_default()
    };
    std::thread::scope(|scope| {
        // Rank 3 does not come.
        scope.spawn(|| make(0, TIMEOUT, &Slow { store: &store, answers: &answers }));
        // Rank 2 waits longer than rank 1 in any case.
        let patient = scope.spawn(|| make(2, Duration::from_secs(2), &store));
        while !has_come(2) {
            std::thread::yield_now();
        }
        let hasty = make(1, Duration::from_millis(50), &store);
        let message = patient.join().unwrap();
        answers.store(true, Ordering::SeqCst);
        let sentence = "1 of 4 ranks are missing: 3;";
        assert!(hasty.contains(sentence), "{hasty}");
        assert!(message.starts_with("rank 1 could not create the group: ") && message.contains(sentence), "{message}");
    });
}

#[test]
fn of_two_processes_with_one_rank_one_gets_an_error() {
    // Which of the two comes first varies.
    for twice in (0..WORLD).cycle().take(4 * WORLD as usize) {
        let store = MemoryStore::default();
        let mut ranks: Vec<u32> = (0..WORLD).collect();
        ranks.push(twice);
        let make = |rank| {
            let engine = engine();
            let mut spec = spec("g", rank, WORLD, &[]);
            spec.timeout = Duration::from_secs(3);
            let made = engine.create_group(spec, &store, &mut || false);
            (made, engine)
        };
        let make = &make;
        let errors: Vec<Error> = std::thread::scope(|scope| {
            let threads: Vec<_> = ranks.iter().map(|&rank| scope.spawn(move || make(rank))).collect();
            let results: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            results.into_iter().filter_map(|(made, _)| made.err()).collect()
        });
        let [error] = errors.as_slice() else { panic!("rank {twice} twice: {errors:#?}") };
        // The second process may come after the group was created. Then no rank answers it.
        let expected = ["is already used by".to_owned(), format!("another process also has rank {twice}")];
        assert!(expected.iter().any(|expected| error.message.contains(expected)), "{error}");
    }
}

#[test]
fn threads_that_make_groups_over_the_same_keys_take_turns() {
    let store = MemoryStore::default();
    let sums: Vec<f32> = std::thread::scope(|scope| {
        let engines = [engine(), engine()];
        let threads: Vec<_> = (0..8)
            .map(|index| {
                let (engine, store) = (engines[index % 2].clone(), &store);
                scope.spawn(move || {
                    let rank = (index % 2) as u32;
                    let group = engine.create_group(spec("same", rank, 2, &[]), store, &mut || false).unwrap();
                    let mut data = [1.0_f32];
                    Member::new(group).all_reduce(&mut data, ReduceOp::Sum).unwrap();
                    data[0]
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(sums, [2.0; 8]);
    assert_eq!(store.keys(), Vec::<String>::new());
}

#[test]
fn a_rank_that_waits_asks_little() {
    let (store, asked) = (MemoryStore::default(), [0, 1, 2].map(|_| Mutex::default()));
    std::thread::scope(|scope| {
        for rank in 0..WORLD {
            let (store, asked) = (&store, &asked);
            scope.spawn(move || {
                if rank == 2 {
                    // The requests of the other ranks meanwhile are counted.
                    std::thread::sleep(Duration::from_secs(1));
                }
                let engine = engine();
                let store = Counting { store: store.clone(), asked: &asked[rank as usize], refuses: None };
                engine.create_group(spec("g", rank, WORLD, &[]), &store, &mut || false).unwrap();
            });
        }
    });
    for asked in asked {
        // A pause is an eighth of the time waited, from 50 us to 100 ms. That gives some 8 (1 + ln(1 s / 0.4 ms)) = 70
        // polls, and the leader makes three requests in each.
        let count = asked.lock().unwrap().len();
        assert!(count < 280, "{count} questions in a second");
    }
}

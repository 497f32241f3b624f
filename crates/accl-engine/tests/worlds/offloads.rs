//! A component outside of the engine executes whole calls: it is registered by one line, all ranks route alike, and its
//! end is the group's. The component is `sums`, with faults around it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use accl_engine::offload::{Offload, OffloadGroup, OffloadKind, Opening, PacketLinks, Poll, Progress, Route};
use accl_engine::{CallDesc, Engine, External, ExternalTask, GroupSpec, Mode, PacketSink};
use accl_testkit::{Fabric, Member, World, WorldOptions, finish, finish_submitted};
use accl_types::{Collective, Dtype, Error, ErrorKind, Rank, ReduceOp, Result};

use crate::sums::{NAME, SumKind};

/// The component with faults, and a record of what happens to it.
#[derive(Clone)]
struct FaultyKind {
    name: &'static str,
    inner: SumKind,
    fault: Fault,
    facts: Arc<Facts>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// Fails in the step after an exchange.
    OpensLate,
    /// Fails when the ranks agree.
    DisagreesWithAll,
    /// Receives packets.
    HasPackets,
    /// Takes every call.
    TakesAll,
}

/// Events of a group's component.
#[derive(Default)]
struct Facts {
    helped: AtomicU32,
    opened: AtomicU32,
    closed: Mutex<Vec<bool>>,
}

struct FaultyOffload {
    inner: Arc<dyn Offload>,
    fault: Fault,
    facts: Arc<Facts>,
}

impl FaultyKind {
    fn new(name: &'static str, fault: Fault) -> Self {
        Self { name, inner: SumKind::default(), fault, facts: Arc::default() }
    }
}

impl OffloadKind for FaultyKind {
    fn name(&self) -> &'static str {
        self.name
    }

    fn is_named_by_sidestep(&self) -> bool {
        true
    }

    fn agreed(&self, _group: &GroupSpec) -> Result<Option<String>> {
        match self.fault {
            Fault::DisagreesWithAll => Err(Error::configuration("sums: it is not installed")),
            _ => Ok(None),
        }
    }

    fn open(&self, group: &OffloadGroup<'_>, poll: Poll<'_>) -> Result<Opening> {
        let Opening::Open(inner) = self.inner.open(group, poll)? else { return Ok(Opening::Unused) };
        let (world, own) = (group.spec.world, format!("rank {}", group.spec.rank));
        let (fault, facts) = (self.fault, self.facts.clone());
        let next = move |texts: Vec<String>, _: Poll<'_>| {
            assert_eq!(texts, (0..world).map(|rank| format!("rank {rank}")).collect::<Vec<_>>());
            if fault == Fault::OpensLate {
                return Err(Error::device("sums: it has no power"));
            }
            facts.opened.fetch_add(1, Ordering::Relaxed);
            Ok(Opening::Open(Arc::new(FaultyOffload { inner, fault, facts })))
        };
        Ok(Opening::Exchange(own, Box::new(next)))
    }
}

impl Offload for FaultyOffload {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn route(&self, desc: &CallDesc) -> Route {
        if self.fault == Fault::TakesAll { Route::Offload(Arc::new(Refusal)) } else { self.inner.route(desc) }
    }

    fn connect(&self, _links: Arc<dyn PacketLinks>) -> Option<Arc<dyn PacketSink>> {
        (self.fault == Fault::HasPackets).then(|| Arc::new(Refusal) as Arc<dyn PacketSink>)
    }

    fn needs_help(&self) -> bool {
        true
    }

    fn help(&self) -> Progress {
        self.facts.helped.fetch_add(1, Ordering::Relaxed);
        Progress::Idle
    }

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn close(&self, has_failed: bool) {
        self.facts.closed.lock().unwrap().push(has_failed);
        self.inner.close(has_failed);
    }
}

impl std::fmt::Debug for FaultyOffload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} with {:?}", self.inner, self.fault)
    }
}

/// Fails every task, and refuses every packet.
#[derive(Debug)]
struct Refusal;

impl External for Refusal {
    fn name(&self) -> &str {
        "refusal"
    }

    fn begin(&self, task: ExternalTask) {
        task.fail("it does nothing");
    }
}

impl PacketSink for Refusal {
    fn arrive(&self, from: Rank, _taken: u64, _packets: &[u8]) -> Result<()> {
        Err(Error::protocol(format!("rank {from} sent packets to sums")))
    }
}

fn options(world: u32, sidestep: &str) -> WorldOptions {
    let options = WorldOptions::new(world).over(Fabric::Shm).timeout(Duration::from_secs(20));
    options.with("sidestep", sidestep)
}

/// Returns a world with the component, and what happens to it on each rank.
fn world(options: WorldOptions, fault: impl Fn(usize) -> Fault) -> (World, Vec<Arc<Facts>>) {
    let (world, sums) = (World::new(options), SumKind::default());
    let register = |(rank, engine): (usize, &Arc<Engine>)| {
        let kind = FaultyKind { inner: sums.clone(), ..FaultyKind::new(NAME, fault(rank)) };
        engine.add_offload(Arc::new(kind.clone())).unwrap();
        kind.facts
    };
    let facts = world.engines.iter().enumerate().map(register).collect();
    (world, facts)
}

/// Returns the errors of a group of two ranks that registers other kinds on each rank.
fn errors_of(kinds: impl Fn(usize) -> Vec<FaultyKind>) -> Vec<Error> {
    let world = World::new(options(2, "all_reduce=sums"));
    for (rank, engine) in world.engines.iter().enumerate() {
        kinds(rank).into_iter().for_each(|kind| engine.add_offload(Arc::new(kind)).unwrap());
    }
    world.try_run("g").into_iter().map(|made| made.err().expect("there is no such group")).collect()
}

#[test]
fn a_registered_component_executes_the_calls_that_it_takes() {
    let world = World::new(options(3, "all_reduce=sums"));
    let sums = SumKind::default();
    world.engines.iter().for_each(|engine| engine.add_offload(Arc::new(sums.clone())).unwrap());
    world.run("g", |member| {
        for count in [0, 1, 300, 70_000] {
            let mut data: Vec<f32> = (0..count).map(|at| (at % 91 + member.rank) as f32).collect();
            member.all_reduce(&mut data, ReduceOp::Sum).unwrap();
            assert!((0..count).all(|at| data[at] == (3 * (at % 91) + 3) as f32));
        }
        let mut whole = [member.rank as i32 + 1; 5];
        member.all_reduce(&mut whole, ReduceOp::Sum).unwrap();
        assert_eq!(whole, [6; 5], "the host executes it");
        let sum = member.all_reduce_desc(&mut [1.0_f32; 5], ReduceOp::Sum, Mode::Blocking);
        assert_eq!(member.group.algorithm_of(&sum).unwrap(), "sums");
        let sum = member.all_reduce_desc(&mut [1_i32; 5], ReduceOp::Sum, Mode::Blocking);
        assert_ne!(member.group.algorithm_of(&sum).unwrap(), "sums");
        assert!(member.group.describe().ends_with(&format!("sums in the process of rank {}\n", member.rank)));
    });
}

#[test]
fn many_calls_in_flight_are_executed_alongside_calls_of_the_host() {
    let (world, facts) = world(options(2, "all_reduce=sums"), |_| Fault::None);
    world.run("g", |member| {
        let mut sums = vec![[member.rank as f32; 64]; 40];
        let mut others = vec![[member.rank as i32; 64]; 40];
        let mut calls = Vec::new();
        for (sum, other) in sums.iter_mut().zip(&mut others) {
            calls.push(member.group.submit(member.all_reduce_desc(sum, ReduceOp::Sum, Mode::Async)).unwrap());
            calls.push(member.group.submit(member.all_reduce_desc(other, ReduceOp::Sum, Mode::Async)).unwrap());
        }
        calls.iter().for_each(|call| finish(call).unwrap());
        assert!(sums.iter().flatten().all(|sum| *sum == 1.0) && others.iter().flatten().all(|sum| *sum == 1));
    });
    assert!(facts.iter().any(|facts| facts.helped.load(Ordering::Relaxed) > 0), "no waiting thread has helped");
}

#[test]
fn a_component_is_not_asked_for_calls_that_always_run_on_the_host() {
    let (world, _) = world(options(2, "all_reduce=sums"), |_| Fault::TakesAll);
    world.run("g", |member| {
        member.group.submit(CallDesc::new(Collective::Barrier, Dtype::U8)).map(|call| finish(&call)).unwrap().unwrap();
        let mut doubled = [1.0_f32; 4];
        let mut desc = member.all_reduce_desc(&mut doubled, ReduceOp::PremulSum, Mode::Blocking);
        desc.factor = 2.0;
        finish_submitted(&member.group.submit_blocking(&mut desc).unwrap()).unwrap();
        assert_eq!(doubled, [4.0; 4]);
        let error = member.all_reduce(&mut [1.0_f32; 4], ReduceOp::Sum).unwrap_err();
        assert!(error.message.contains("it does nothing"), "{error}");
    });
}

#[test]
fn a_description_is_issued_again_by_the_group_that_is_asked() {
    let (world, _) = world(options(2, "all_reduce=sums"), |_| Fault::None);
    world.run("g", |member| {
        let mut data = [1.0_f32; 8];
        let mut desc = member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Blocking);
        for _ in 0..3 {
            finish_submitted(&member.group.submit_blocking(&mut desc).unwrap()).unwrap();
            assert!(desc.offload.is_none());
        }
        assert_eq!(data, [8.0; 8]);
    });
}

#[test]
fn a_group_that_names_no_component_has_none() {
    let (world, facts) = world(options(2, ""), |_| Fault::None);
    world.run("g", |member: Member| {
        member.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum).unwrap();
        assert!(!member.group.describe().contains("sums"));
    });
    assert!(facts.iter().all(|facts| facts.closed.lock().unwrap().is_empty()));
}

#[test]
fn a_component_learns_whether_its_group_has_failed() {
    for fails in [false, true] {
        let (world, facts) = world(options(2, "all_reduce=sums"), |_| Fault::None);
        let both = Barrier::new(2);
        world.run("g", |member| {
            member.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum).unwrap();
            both.wait();
            if fails {
                member.group.abort("the test wants it");
            }
        });
        assert!(facts.iter().all(|facts| facts.closed.lock().unwrap().first() == Some(&fails)));
    }
}

#[test]
fn all_ranks_fail_if_the_component_of_one_does_not_open_and_the_others_are_closed() {
    for (fault, kind, cause) in [
        (Fault::OpensLate, ErrorKind::Device, "no power"),
        (Fault::DisagreesWithAll, ErrorKind::Configuration, "not installed"),
    ] {
        let (world, facts) = world(options(3, "all_reduce=sums"), |rank| if rank == 1 { fault } else { Fault::None });
        for made in world.try_run("g") {
            let error = made.err().expect("there is no such group");
            assert!(error.kind == kind && error.message.contains(cause), "{error}");
        }
        for facts in facts {
            let closed = facts.closed.lock().unwrap().clone();
            assert_eq!(closed, vec![true; facts.opened.load(Ordering::Relaxed) as usize], "opened but not closed");
        }
    }
}

#[test]
fn a_name_that_no_component_has_is_refused_with_those_that_there_are() {
    let (world, _) = world(options(2, "all_reduce=sum"), |_| Fault::None);
    for made in world.try_run("g") {
        let error = made.err().expect("there is no such group");
        assert_eq!(error.kind, ErrorKind::Configuration);
        for part in ["`all_reduce=sum`", "did you mean sums?", "expected one of host, sums"] {
            assert!(error.message.contains(part), "{error}");
        }
    }
}

#[test]
fn ranks_that_register_other_components_cannot_create_a_group() {
    let named = |name| FaultyKind::new(name, Fault::None);
    let swapped = |rank| if rank == 0 { vec![named(NAME), named("b")] } else { vec![named("b"), named(NAME)] };
    for error in errors_of(swapped) {
        assert_eq!(error.kind, ErrorKind::Configuration);
        assert!(error.message.contains("the order of their offloads differs"), "{error}");
    }
    for error in errors_of(|rank| if rank == 0 { vec![named(NAME)] } else { vec![named(NAME), named("b")] }) {
        assert_eq!(error.kind, ErrorKind::Configuration);
        assert!(error.message.contains("has no b") && error.message.contains("has b="), "{error}");
    }
}

#[test]
fn two_components_that_receive_packets_cannot_be_in_one_group() {
    for error in errors_of(|_| vec![FaultyKind::new(NAME, Fault::HasPackets), FaultyKind::new("b", Fault::HasPackets)])
    {
        assert_eq!(error.kind, ErrorKind::Internal);
        assert!(error.message.contains("both exchange packets"), "{error}");
    }
}

#[test]
fn a_name_is_registered_once() {
    let world = World::new(options(2, ""));
    let engine = &world.engines[0];
    engine.add_offload(Arc::new(SumKind::default())).unwrap();
    for name in [NAME, "host"] {
        let error = engine.add_offload(Arc::new(FaultyKind::new(name, Fault::None))).unwrap_err();
        assert!(error.kind == ErrorKind::InvalidArgument && error.message.contains(name), "{error}");
    }
}

//! A component outside of the engine executes whole calls: it is registered by one line, all ranks route alike, and its
//! end is the group's. `docs/adding-an-offload.md` explains the component of this file.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use accl_engine::offload::{Offload, OffloadGroup, OffloadKind, Opening, Poll, Progress, Route};
use accl_engine::{CallDesc, CollectiveMemory, External, ExternalTask, GroupSpec, Mode};
use accl_testkit::{Fabric, Member, World, WorldOptions, finish, finish_ran};
use accl_types::config::RedirectTo;
use accl_types::{Collective, Dtype, Error, ErrorKind, ReduceOp, Result};

/// Sums float32 tensors of ranks that are threads of one process. The rank that begins its call last adds for all.
struct SumKind {
    /// All calls in flight, shared by the kinds of all ranks: the engines of a world are in one process.
    meetings: Arc<Meetings>,
    /// Behaviour of this rank when its component is opened.
    opens: Opens,
    facts: Arc<Facts>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Opens {
    Well,
    /// Fails in the step after the exchange.
    Late,
    /// Fails when the ranks agree.
    NotAtAll,
}

/// Events of a group's component.
#[derive(Default)]
struct Facts {
    helped: AtomicU32,
    closed: Mutex<Vec<bool>>,
}

/// Tasks of the ranks that have begun a call, by group and sequence number.
type Meetings = Mutex<HashMap<(u64, u64), Vec<(u32, ExternalTask)>>>;

/// The component of one group.
struct Sums {
    group: u64,
    rank: u32,
    world: u32,
    calls: Arc<SumCalls>,
    facts: Arc<Facts>,
}

/// The worker for the group's calls.
struct SumCalls {
    group: u64,
    rank: u32,
    world: u32,
    meetings: Arc<Meetings>,
}

impl OffloadKind for SumKind {
    fn name(&self) -> &'static str {
        "sums"
    }

    fn is_named_by_sidestep(&self) -> bool {
        true
    }

    fn agreed(&self, _group: &GroupSpec) -> Result<Option<String>> {
        match self.opens {
            Opens::NotAtAll => Err(Error::configuration("sums: it is not installed")),
            Opens::Well | Opens::Late => Ok(Some("1".to_owned())),
        }
    }

    fn open(&self, group: &OffloadGroup<'_>, _poll: Poll<'_>) -> Result<Opening> {
        let named = |to: &RedirectTo| *to == RedirectTo::Offload("sums".to_owned());
        if !group.spec.config.redirects.iter().any(|redirect| named(&redirect.to)) {
            return Ok(Opening::Unused);
        }
        let (id, rank, world) = (group.id, group.spec.rank.0, group.spec.world);
        let (meetings, facts, opens) = (self.meetings.clone(), self.facts.clone(), self.opens);
        let next = move |texts: Vec<String>, _: Poll<'_>| {
            let expected: Vec<String> = (0..world).map(|rank| format!("rank {rank}")).collect();
            assert_eq!(texts, expected);
            if opens == Opens::Late {
                return Err(Error::device("sums: it has no power"));
            }
            let calls = Arc::new(SumCalls { group: id, rank, world, meetings });
            Ok(Opening::Open(Arc::new(Sums { group: id, rank, world, calls, facts })))
        };
        Ok(Opening::Exchange(format!("rank {rank}"), Box::new(next)))
    }
}

impl Offload for Sums {
    fn name(&self) -> &'static str {
        "sums"
    }

    fn route(&self, desc: &CallDesc) -> Route {
        if desc.collective != Collective::AllReduce || desc.dtype != Dtype::F32 || desc.op != ReduceOp::Sum {
            return Route::Host("it is no sum of float32");
        }
        if desc.encoding(self.world).is_some() || !desc.uses_host_memory() {
            return Route::Host("it is encoded, or its tensors are not in host memory");
        }
        Route::Offload(self.calls.clone())
    }

    fn begin_help(&self) -> bool {
        true
    }

    fn help(&self) -> Progress {
        self.facts.helped.fetch_add(1, Ordering::Relaxed);
        Progress::Idle
    }

    fn describe(&self) -> String {
        format!("sums in the process of rank {}\n", self.rank)
    }

    fn close(&self, has_failed: bool) {
        self.facts.closed.lock().unwrap().push(has_failed);
        self.calls.meetings.lock().unwrap().retain(|(group, _), _| *group != self.group);
    }
}

impl External for SumCalls {
    fn name(&self) -> &str {
        "sums"
    }

    fn begin(&self, task: ExternalTask) {
        let Some(seq) = task.collective().map(|collective| collective.seq) else {
            return task.fail("it runs only whole collectives");
        };
        let mut meetings = self.meetings.lock().unwrap();
        let tasks = meetings.entry((self.group, seq)).or_default();
        tasks.push((self.rank, task));
        if tasks.len() < self.world as usize {
            return;
        }
        let mut tasks = meetings.remove(&(self.group, seq)).unwrap_or_default();
        drop(meetings);
        tasks.sort_unstable_by_key(|(rank, _)| *rank);
        add(tasks.into_iter().map(|(_, task)| task).collect());
    }
}

/// Adds the contributions in rank order, and gives every rank the sum.
fn add(tasks: Vec<ExternalTask>) {
    let mut sum: Vec<f32> = Vec::new();
    for task in &tasks {
        let Some(memory) = CollectiveMemory::of(task) else { continue };
        let mut bytes = vec![0; memory.input_bytes() as usize];
        if !memory.read_input(0, &mut bytes) {
            continue;
        }
        sum.resize(bytes.len() / 4, 0.0);
        let values = bytes.chunks_exact(4).map(|four| f32::from_ne_bytes([four[0], four[1], four[2], four[3]]));
        sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    }
    let sum: Vec<u8> = sum.iter().flat_map(|value| value.to_ne_bytes()).collect();
    for task in tasks {
        // A task whose call has failed gives its memory back by ending.
        if CollectiveMemory::of(&task).is_some_and(|mut memory| memory.write_output(0, &sum)) {
            task.done();
        }
    }
}

impl fmt::Debug for Sums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.calls.fmt(f)
    }
}

impl fmt::Debug for SumCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sums of rank {}", self.rank)
    }
}

fn options(world: u32, sidestep: &str) -> WorldOptions {
    let options = WorldOptions::new(world).over(Fabric::Shm).timeout(Duration::from_secs(20));
    options.with("sidestep", sidestep)
}

/// Returns a world with the component, and what each rank's group has done with it.
fn world(options: WorldOptions, opens: impl Fn(usize) -> Opens) -> (World, Vec<Arc<Facts>>) {
    let (world, meetings) = (World::new(options), Arc::<Meetings>::default());
    let register = |(rank, engine): (usize, &Arc<accl_engine::Engine>)| {
        let facts: Arc<Facts> = Arc::default();
        engine.add_offload(Arc::new(SumKind { meetings: meetings.clone(), opens: opens(rank), facts: facts.clone() }));
        facts
    };
    let facts = world.engines.iter().enumerate().map(register).collect();
    (world, facts)
}

#[test]
fn a_registered_component_executes_the_calls_that_it_takes() {
    let (world, _) = world(options(3, "all_reduce=sums"), |_| Opens::Well);
    world.run("g", |member| {
        for count in [1, 300, 70_000] {
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
    let (world, facts) = world(options(2, "all_reduce=sums"), |_| Opens::Well);
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
fn a_description_is_issued_again_by_the_group_that_is_asked() {
    let (world, _) = world(options(2, "all_reduce=sums"), |_| Opens::Well);
    world.run("g", |member| {
        let mut data = [1.0_f32; 8];
        let mut desc = member.all_reduce_desc(&mut data, ReduceOp::Sum, Mode::Blocking);
        for _ in 0..3 {
            finish_ran(&member.group.run(&mut desc).unwrap()).unwrap();
            assert!(desc.offload.is_none());
        }
        assert_eq!(data, [8.0; 8]);
    });
}

#[test]
fn a_group_that_names_no_component_has_none() {
    let (world, facts) = world(options(2, ""), |_| Opens::Well);
    world.run("g", |member: Member| {
        member.all_reduce(&mut [1.0_f32; 8], ReduceOp::Sum).unwrap();
        assert!(!member.group.describe().contains("sums"));
    });
    assert!(facts.iter().all(|facts| facts.closed.lock().unwrap().is_empty()));
}

#[test]
fn a_component_learns_whether_its_group_has_failed() {
    for fails in [false, true] {
        let (world, facts) = world(options(2, "all_reduce=sums"), |_| Opens::Well);
        let both = std::sync::Barrier::new(2);
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
fn all_ranks_fail_if_the_component_of_one_does_not_open() {
    for (opens, kind, cause) in
        [(Opens::Late, ErrorKind::Device, "no power"), (Opens::NotAtAll, ErrorKind::Configuration, "not installed")]
    {
        let (world, _) = world(options(3, "all_reduce=sums"), |rank| if rank == 1 { opens } else { Opens::Well });
        for made in world.try_run("g") {
            let error = made.err().expect("there is no such group");
            assert!(error.kind == kind && error.message.contains(cause), "{error}");
        }
    }
}

#[test]
fn a_name_that_no_component_has_is_refused_with_those_that_there_are() {
    let (world, _) = world(options(2, "all_reduce=sum"), |_| Opens::Well);
    for made in world.try_run("g") {
        let error = made.err().expect("there is no such group");
        assert_eq!(error.kind, ErrorKind::Configuration);
        for part in ["`all_reduce=sum`", "did you mean sums?", "expected one of host, sums"] {
            assert!(error.message.contains(part), "{error}");
        }
    }
}

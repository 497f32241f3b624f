//! An offload that sums float32 tensors of ranks that are threads of one process. The rank that begins a call last adds
//! for all. `docs/adding-an-offload.md` quotes this file.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use accl_engine::offload::{Offload, OffloadGroup, OffloadKind, Opening, Poll, Route};
use accl_engine::{CallDesc, CollectiveMemory, External, ExternalTask};
use accl_types::config::RedirectTo;
use accl_types::{Collective, Dtype, ReduceOp, Result};

/// The name in `sidestep`.
pub(crate) const NAME: &str = "sums";

/// Tasks of the ranks that have begun a call, by group and sequence number.
type Meetings = Mutex<HashMap<(u64, u64), Vec<(u32, ExternalTask)>>>;

/// The offload of one rank. All ranks of the process share the meetings.
#[derive(Clone, Debug, Default)]
pub(crate) struct SumKind(Arc<Meetings>);

/// The offload of one rank in one group, which is also the worker for the group's calls.
#[derive(Clone, Debug)]
struct Sums {
    group: u64,
    rank: u32,
    world: u32,
    meetings: Arc<Meetings>,
}

impl OffloadKind for SumKind {
    fn name(&self) -> &'static str {
        NAME
    }

    fn is_named_by_sidestep(&self) -> bool {
        true
    }

    fn open(&self, group: &OffloadGroup<'_>, _poll: Poll<'_>) -> Result<Opening> {
        let wanted = RedirectTo::Offload(NAME.to_owned());
        if !group.spec.config.redirects.iter().any(|redirect| redirect.to == wanted) {
            return Ok(Opening::Unused);
        }
        let (rank, world) = (group.spec.rank.0, group.spec.world);
        Ok(Opening::Open(Arc::new(Sums { group: group.id, rank, world, meetings: self.0.clone() })))
    }
}

impl Offload for Sums {
    fn name(&self) -> &'static str {
        NAME
    }

    fn route(&self, desc: &CallDesc) -> Route {
        match (desc.collective, desc.dtype, desc.op) {
            (Collective::AllReduce, Dtype::F32, ReduceOp::Sum) => Route::Offload(Arc::new(self.clone())),
            _ => Route::Host("it is not a sum of float32"),
        }
    }

    fn describe(&self) -> String {
        format!("sums in the process of rank {}\n", self.rank)
    }

    fn close(&self, _has_failed: bool) {
        self.meetings.lock().unwrap().retain(|(group, _), _| *group != self.group);
    }
}

impl External for Sums {
    fn name(&self) -> &str {
        NAME
    }

    fn begin(&self, task: ExternalTask) {
        let Some(seq) = task.collective().map(|collective| collective.seq) else {
            return task.fail("it runs only whole collectives");
        };
        let mut meetings = self.meetings.lock().unwrap();
        let tasks = meetings.entry((self.group, seq)).or_default();
        tasks.push((self.rank, task));
        if tasks.len() == self.world as usize {
            let mut tasks = meetings.remove(&(self.group, seq)).unwrap_or_default();
            drop(meetings);
            tasks.sort_unstable_by_key(|(rank, _)| *rank);
            add(tasks.into_iter().map(|(_, task)| task).collect());
        }
    }
}

/// Adds the contributions in rank order, and gives every rank the sum.
fn add(tasks: Vec<ExternalTask>) {
    let Some(sum) = sum_of(&tasks) else {
        return tasks.into_iter().for_each(|task| task.fail("the call has failed on another rank"));
    };
    for task in tasks {
        // Without the memory the call has failed, and the task ends by its drop.
        if CollectiveMemory::of(&task).is_some_and(|mut memory| memory.write_output(0, &sum)) {
            task.done();
        }
    }
}

/// Returns the sum; `None` if a rank has taken its memory back.
fn sum_of(tasks: &[ExternalTask]) -> Option<Vec<u8>> {
    let mut sum: Vec<f32> = Vec::new();
    for task in tasks {
        let memory = CollectiveMemory::of(task)?;
        let mut bytes = vec![0; memory.input_bytes() as usize];
        if !memory.read_input(0, &mut bytes) {
            return None;
        }
        sum.resize(bytes.len() / 4, 0.0);
        let values = bytes.as_chunks().0.iter().map(|four| f32::from_ne_bytes(*four));
        sum.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
    }
    Some(sum.iter().flat_map(|value| value.to_ne_bytes()).collect())
}

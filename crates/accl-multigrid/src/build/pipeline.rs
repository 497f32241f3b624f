//! Pipelines over the same placement: every layer once per micro-batch.
//!
//! Owns the order of micro-batches on each rank. It is the order of Huang et al., "GPipe" (2019), or "one forward, one
//! backward" with a flush, of Narayanan et al., "PipeDream" (2019). Read [`pipeline`] first.

use std::ops::Range;

use accl_types::{Error, Rank, Result};

use super::{Builder, Spot};
use crate::cycle::Reuse;
use crate::grid::Grid;
use crate::line::{Line, LineStep, exit};
use crate::placement::Placement;
use crate::plan::{Op, Pass, Phase, PhaseKind, Plan, Value};

/// The order of micro-batches on each rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Schedule {
    /// The forward pass alone.
    Forward,
    /// The adjoint pass alone.
    Adjoint,
    /// All forward tasks, then all backward tasks: GPipe.
    FillDrain,
    /// Just enough forward tasks to keep all ranks busy, then one backward task for each forward one: 1F1B. Holds fewer
    /// graphs at a time.
    OneForwardOneBackward,
}

/// Builds the plan of a pass or two over `micro_batches` micro-batches.
///
/// # Errors
/// `InvalidArgument` if the placement has another number of layers, or if there are no micro-batches.
pub fn pipeline(grid: &Grid, placement: &Placement, schedule: Schedule, micro_batches: u32) -> Result<Plan> {
    if placement.layers() != grid.layers() {
        let text = format!("the placement has {} layers, but the net has {}", placement.layers(), grid.layers());
        return Err(Error::invalid_argument(text));
    }
    if micro_batches == 0 {
        return Err(Error::invalid_argument("0 micro-batches; give 1 or more"));
    }
    let mut pipe = Pipe::new(grid, placement, schedule, micro_batches);
    pipe.run();
    Ok(pipe.plan())
}

type Task = (Pass, u32);

struct Pipe<'a> {
    grid: &'a Grid,
    placement: &'a Placement,
    schedule: Schedule,
    micro_batches: u32,
    builder: Builder,
    /// The ranks that have layers.
    stages: Vec<Rank>,
    /// By pass: its steps, with the points that they lead to.
    lines: [Vec<(LineStep, u32)>; 2],
    inputs: Vec<(Rank, Value)>,
    /// By pass: the output of the last stage that processed each micro-batch.
    came_out: [Vec<Option<Value>>; 2],
}

/// The index of a pass in arrays by pass.
fn of(pass: Pass) -> usize {
    usize::from(pass == Pass::Adjoint)
}

/// The tasks of a stage in order; `stage` counts from 0.
fn tasks(schedule: Schedule, stage: usize, stages: usize, micro_batches: u32) -> Vec<Task> {
    let all = |pass| (0..micro_batches).map(move |micro| (pass, micro));
    match schedule {
        Schedule::Forward => all(Pass::Forward).collect(),
        Schedule::Adjoint => all(Pass::Adjoint).collect(),
        Schedule::FillDrain => all(Pass::Forward).chain(all(Pass::Adjoint)).collect(),
        Schedule::OneForwardOneBackward => {
            let ahead = ((stages - 1 - stage) as u32).min(micro_batches);
            let first = (0..ahead).map(|micro| (Pass::Forward, micro));
            let turns =
                (ahead..micro_batches).flat_map(|micro| [(Pass::Forward, micro), (Pass::Adjoint, micro - ahead)]);
            let rest = (micro_batches - ahead..micro_batches).map(|micro| (Pass::Adjoint, micro));
            first.chain(turns).chain(rest).collect()
        }
    }
}

impl<'a> Pipe<'a> {
    fn new(grid: &'a Grid, placement: &'a Placement, schedule: Schedule, micro_batches: u32) -> Self {
        let mut stages: Vec<_> = (0..placement.layers()).map(|layer| placement.owner(layer)).collect();
        stages.dedup();
        let mut builder = Builder::new(placement.ranks(), Reuse::All);
        let (point, on, pass) = match schedule {
            Schedule::Adjoint => (grid.layers(), exit(placement, Pass::Forward), Pass::Adjoint),
            _ => (0, Rank(0), Pass::Forward),
        };
        let inputs: Vec<_> = (0..micro_batches).map(|_| (on, builder.value(Spot { point, mesh: 0 }, on))).collect();
        let mut came_out = [vec![None; inputs.len()], vec![None; inputs.len()]];
        came_out[of(pass)] = inputs.iter().map(|&(_, value)| Some(value)).collect();
        let lines = [Pass::Forward, Pass::Adjoint].map(|pass| {
            let line = Line::new(grid, placement, pass);
            let finest = line.finest();
            finest.steps.iter().copied().zip(finest.points[1..].iter().copied()).collect()
        });
        Self { grid, placement, lines, schedule, micro_batches, builder, stages, inputs, came_out }
    }

    /// Emits all tasks in the order in which they would begin, if a backward task takes twice as long as a forward one.
    /// Then each value is sent when it exists, and is received before any later task begins.
    fn run(&mut self) {
        let count = self.stages.len();
        let orders: Vec<_> = (0..count).map(|stage| tasks(self.schedule, stage, count, self.micro_batches)).collect();
        let mut next = vec![0; count];
        let mut free_at = vec![0_u64; count];
        let micro_batches = self.micro_batches as usize;
        // The time at which each micro-batch left a stage.
        let mut left = [vec![vec![None; micro_batches]; count], vec![vec![None; micro_batches]; count]];
        loop {
            let ready = |stage: usize| -> Option<u64> {
                let &(pass, micro) = orders[stage].get(next[stage])?;
                let before = match pass {
                    Pass::Forward => stage.checked_sub(1),
                    Pass::Adjoint => Some(stage + 1).filter(|&after| after < count),
                };
                let came = match (before, pass, self.schedule) {
                    (Some(before), _, _) => left[of(pass)][before][micro as usize],
                    (None, Pass::Forward, _) | (None, Pass::Adjoint, Schedule::Adjoint) => Some(0),
                    (None, Pass::Adjoint, _) => left[of(Pass::Forward)][stage][micro as usize],
                };
                came.map(|came: u64| came.max(free_at[stage]))
            };
            let Some((start, stage)) = (0..count).filter_map(|stage| Some((ready(stage)?, stage))).min() else { break };
            let (pass, micro) = orders[stage][next[stage]];
            next[stage] += 1;
            free_at[stage] = start + if pass == Pass::Forward { 1 } else { 2 };
            left[of(pass)][stage][micro as usize] = Some(free_at[stage]);
            self.task(stage, pass, micro);
        }
    }

    /// Emits all layers of a stage, and the message to the next stage.
    fn task(&mut self, stage: usize, pass: Pass, micro: u32) {
        let rank = self.stages[stage];
        self.builder.phase = Some(Phase { kind: PhaseKind::Chunk, level: 0, iteration: micro });
        self.builder.micro_batch = micro;
        let mut value = self.came_out(pass, micro);
        let (steps, points) = (&self.lines[of(pass)], self.ranges(pass, rank));
        for (step, point) in &steps[points] {
            value = self.builder.step(pass, step, *point, value, true);
        }
        self.came_out[of(pass)][micro as usize] = Some(value);
        let next = match pass {
            Pass::Forward => self.stages.get(stage + 1).copied(),
            Pass::Adjoint => stage.checked_sub(1).map(|before| self.stages[before]),
        };
        match next {
            Some(next) => self.builder.need(pass, value, next),
            None => self.end(pass, micro, value),
        }
    }

    /// Handles a value that has passed through all layers.
    fn end(&mut self, pass: Pass, micro: u32, value: Value) {
        let on = exit(self.placement, pass);
        self.builder.need(pass, value, on);
        if pass == Pass::Forward && self.schedule != Schedule::Forward {
            self.builder.phase = Some(Phase { kind: PhaseKind::Loss, level: 0, iteration: micro });
            let dst = self.builder.value(Spot { point: self.grid.layers(), mesh: 0 }, on);
            self.builder.emit(on, Op::Loss { micro_batch: micro, src: value, dst });
            self.came_out[of(Pass::Adjoint)][micro as usize] = Some(dst);
            if let Some(&last) = self.stages.last() {
                self.builder.need(Pass::Adjoint, dst, last);
            }
        }
    }

    /// The steps of a pass on a rank. They are consecutive, because a rank's layers are consecutive.
    fn ranges(&self, pass: Pass, rank: Rank) -> Range<usize> {
        let steps = &self.lines[of(pass)];
        let is_before = |step: &LineStep| match pass {
            Pass::Forward => step.evaluator < rank,
            Pass::Adjoint => step.evaluator > rank,
        };
        let begin = steps.partition_point(|(step, _)| is_before(step));
        begin..begin + steps[begin..].partition_point(|(step, _)| step.evaluator == rank)
    }

    fn came_out(&self, pass: Pass, micro: u32) -> Value {
        let Some(value) = self.came_out[of(pass)][micro as usize] else {
            unreachable!("a task begins after its input has arrived")
        };
        value
    }

    fn plan(self) -> Plan {
        let (last, passes) = match self.schedule {
            Schedule::Forward => (Pass::Forward, vec![Pass::Forward]),
            Schedule::Adjoint => (Pass::Adjoint, vec![Pass::Adjoint]),
            Schedule::FillDrain | Schedule::OneForwardOneBackward => {
                (Pass::Adjoint, vec![Pass::Forward, Pass::Adjoint])
            }
        };
        let on = exit(self.placement, last);
        let outputs = (0..self.micro_batches).map(|micro| (on, self.came_out(last, micro))).collect();
        let plan = Plan {
            ranks: Vec::new(),
            points: Vec::new(),
            meshes: Vec::new(),
            inputs: self.inputs,
            guesses: Vec::new(),
            outputs,
            states: Vec::new(),
            norms: Vec::new(),
            intervals: 0,
            layers: self.placement.layers(),
            micro_batches: self.micro_batches,
            passes,
            is_final: true,
        };
        self.builder.finish(plan)
    }
}

//! Multigrid over layers: builds the plan of one solve.
//!
//! Owns the algorithm. On every level, `u` holds the values of its points, and `f` is added to each step. On the finest
//! level `f` is zero. A visit relaxes, then gives the coarser level `u` of the C-points and `f = (step(u) + f) -
//! coarse_step(u)`, in which `u` itself has cancelled. The coarser level's result replaces the C-points.
//! If states become coarser as well, by R, the coarser level gets `R u` and `f = R(step(u) + f) - coarse_step(R u)`.
//! The change of `R u` is then added to `u` on the finer mesh.
//! Read [`mgrit`] first.

use accl_types::{Error, Rank, Result};

use super::{Builder, Spot};
use crate::cycle::{Cycle, Norms, Shape, Start};
use crate::grid::Grid;
use crate::line::{Line, exit};
use crate::placement::Placement;
use crate::plan::{Op, Pass, Phase, PhaseKind, Plan, Value};

/// Builds the plan of one pass through the net. With one level the plan is sequential, whatever the cycle says: each
/// layer once, one rank after the other.
///
/// # Errors
/// `InvalidArgument` if the placement has another number of layers, or if the cycle has no iterations but its start
/// needs one.
pub fn mgrit(grid: &Grid, placement: &Placement, pass: Pass, cycle: &Cycle) -> Result<Plan> {
    if placement.layers() != grid.layers() {
        let text = format!("the placement has {} layers, but the net has {}", placement.layers(), grid.layers());
        return Err(Error::invalid_argument(text));
    }
    if grid.levels().len() > 1 {
        cycle.check()?;
    }
    Ok(Solve::new(grid, placement, pass, cycle).plan(placement))
}

struct Solve<'a> {
    cycle: &'a Cycle,
    line: Line,
    builder: Builder,
    /// Values by level and position. `None` for positions without a value.
    u: Vec<Vec<Option<Value>>>,
    /// The term that is added to the step to each position, by level and position. `None` if it is zero.
    f: Vec<Vec<Option<Value>>>,
    /// By level and position, on levels whose states are coarser than on the next finer level: the values when they
    /// came from the finer level.
    given: Vec<Vec<Option<Value>>>,
    iteration: u32,
    /// The iteration whose norm was posted and not yet awaited.
    pending_norm: Option<u32>,
    /// The iterations whose norms were posted.
    norms: Vec<u32>,
}

impl<'a> Solve<'a> {
    fn new(grid: &Grid, placement: &Placement, pass: Pass, cycle: &'a Cycle) -> Self {
        let line = Line::new(grid, placement, pass);
        let empty = || line.levels.iter().map(|level| vec![None; level.points.len()]).collect::<Vec<_>>();
        let (u, f, given) = (empty(), empty(), empty());
        Self {
            cycle,
            line,
            builder: Builder::new(placement.ranks(), cycle.reuse),
            u,
            f,
            given,
            iteration: 0,
            pending_norm: None,
            norms: Vec::new(),
        }
    }

    fn plan(mut self, placement: &Placement) -> Plan {
        let (pass, coarsest) = (self.line.pass, self.line.levels.len() - 1);
        let finest = self.line.finest();
        let (end, first) = (finest.end(), (finest.homes[0], finest.points[0]));
        let input = self.builder.value(Spot { point: first.1, mesh: 0 }, first.0);
        let mut on_mesh = input;
        for level in 0..self.u.len() {
            if self.is_coarser(level) {
                on_mesh = self.builder.coarsen(pass, first.0, on_mesh);
            }
            self.u[level][0] = Some(on_mesh);
        }
        let mut guesses = Vec::new();
        if coarsest > 0 {
            guesses = self.start();
            for _ in 0..self.cycle.cycles() {
                self.cycle(0, self.cycle.shape);
                self.iteration += 1;
            }
        }
        let mut outputs = Vec::new();
        let mut states = Vec::new();
        if self.cycle.has_final_sweep || coarsest == 0 {
            self.final_sweep();
            let output = self.at(0, end);
            let on = exit(placement, pass);
            self.builder.need(pass, output, on);
            outputs.push((on, output));
        } else {
            for position in self.coarse_positions(0).skip(1) {
                let (value, on) = (self.at(0, position), self.line.finest().homes[position]);
                self.builder.need(pass, value, on);
                states.push((on, value));
            }
        }
        self.await_norm();
        let plan = Plan {
            ranks: Vec::new(),
            points: Vec::new(),
            meshes: Vec::new(),
            inputs: vec![(first.0, input)],
            guesses,
            outputs,
            states,
            norms: self.norms,
            intervals: self.line.levels.get(1).map_or(0, |level| level.end() as u32),
            layers: placement.layers(),
            micro_batches: 1,
            passes: vec![pass],
            is_final: self.cycle.has_final_sweep || coarsest == 0,
        };
        self.builder.finish(plan)
    }

    // ---- the cycle

    /// Gives every C-point of the finest level a value. Returns the guesses that come from outside, with their ranks.
    fn start(&mut self) -> Vec<(Rank, Value)> {
        let coarsest = self.line.levels.len() - 1;
        match self.cycle.start {
            Start::Guess => {
                let guess = |solve: &mut Self, position: usize| {
                    let finest = solve.line.finest();
                    let (point, on) = (finest.points[position], finest.homes[position]);
                    let value = solve.builder.value(Spot { point, mesh: 0 }, on);
                    solve.u[0][position] = Some(value);
                    (on, value)
                };
                let positions: Vec<_> = self.coarse_positions(0).skip(1).collect();
                return positions.into_iter().map(|position| guess(self, position)).collect();
            }
            Start::Coarsest => {
                self.solve_coarsest();
                for level in (0..coarsest).rev() {
                    self.correct(level);
                }
            }
            Start::FullMultigrid => {
                self.solve_coarsest();
                for level in (0..coarsest).rev() {
                    self.correct(level);
                    // The finest level's cycles are the requested ones and do not belong to the start.
                    if level > 0 {
                        self.cycle(level, Shape::V);
                    }
                }
            }
        }
        self.iteration = 1;
        Vec::new()
    }

    /// Visits a level and the coarser levels below it once.
    fn cycle(&mut self, level: usize, shape: Shape) {
        let coarsest = self.line.levels.len() - 1;
        if level == coarsest {
            return self.solve_coarsest();
        }
        for _ in 0..self.cycle.relaxations_of(level) {
            self.enter(PhaseKind::CRelax, level);
            self.sweep(level, false);
        }
        self.restrict(level);
        self.cycle(level + 1, shape);
        if shape == Shape::F && level + 1 < coarsest {
            self.cycle(level + 1, Shape::V);
        }
        self.correct(level);
    }

    /// Steps from every C-point to the next one, which changes too. All intervals start from the old values of their
    /// C-points.
    fn sweep(&mut self, level: usize, is_final: bool) {
        for (first, last) in self.intervals(level).into_iter().rev() {
            for position in first..last {
                self.u[level][position + 1] = Some(self.stepped(level, position, is_final));
            }
        }
    }

    /// Steps through an interval like [`Solve::sweep`], without changing its last C-point.
    fn relax_f(&mut self, level: usize, (first, last): (usize, usize)) {
        for position in first..last - 1 {
            self.u[level][position + 1] = Some(self.stepped(level, position, false));
        }
    }

    /// Prepares the problem of the next coarser level, after a last F-relaxation.
    fn restrict(&mut self, level: usize) {
        let pass = self.line.pass;
        self.enter(PhaseKind::Restrict, level);
        let intervals = self.intervals(level);
        let mut reached = vec![0; intervals.len()];
        for (index, &(first, last)) in intervals.iter().enumerate().rev() {
            self.relax_f(level, (first, last));
            reached[index] = self.stepped(level, last - 1, false);
            if level == 0 && self.cycle.norms != Norms::None {
                let (a, b, on) = (reached[index], self.at(0, last), self.line.finest().homes[last]);
                self.builder.need(pass, a, on);
                self.builder.need(pass, b, on);
                self.builder.emit(on, Op::SquareNorm { interval: index as u32, a, b });
            }
        }
        if level == 0 {
            self.post_norm();
        }
        let coarse = &self.line.levels[level + 1];
        let places: Vec<_> = coarse.points.iter().copied().zip(coarse.homes.iter().copied()).collect();
        let steps = coarse.steps.clone();
        let is_coarser = self.is_coarser(level + 1);
        for (index, &(first, last)) in intervals.iter().enumerate().rev() {
            let (point, on) = places[index + 1];
            let (mut from, mut reached, mut value) = (self.at(level, first), reached[index], self.at(level, last));
            if is_coarser {
                from = self.builder.coarsen(pass, places[index].1, from);
                reached = self.builder.coarsen(pass, on, reached);
                value = self.builder.coarsen(pass, on, value);
                self.given[level + 1][index + 1] = Some(value);
            }
            let stepped = self.builder.step(pass, &steps[index], point, from, false);
            self.f[level + 1][index + 1] = Some(self.builder.subtract(pass, on, reached, stepped));
            self.u[level + 1][index + 1] = Some(value);
        }
    }

    /// Adopts the values that the next coarser level has computed.
    fn correct(&mut self, level: usize) {
        // The first point is the input and does not change.
        for (index, position) in self.coarse_positions(level).enumerate().skip(1).collect::<Vec<_>>() {
            let found = self.at(level + 1, index);
            self.u[level][position] = Some(match self.is_coarser(level + 1) {
                true => self.finer(level, position, index, found),
                false => found,
            });
        }
        if level > 0 {
            self.enter(PhaseKind::FRelax, level);
            for interval in self.intervals(level).into_iter().rev() {
                self.relax_f(level, interval);
            }
        }
    }

    /// Returns the new value of a position after a level of coarser states has computed `found` there.
    fn finer(&mut self, level: usize, position: usize, index: usize, found: Value) -> Value {
        let (pass, on) = (self.line.pass, self.line.levels[level].homes[position]);
        match self.given[level + 1][index] {
            // The finer level has not given this point a value yet.
            None => self.builder.refine(pass, on, found),
            Some(given) => {
                let change = self.builder.subtract(pass, on, found, given);
                let finer = self.builder.refine(pass, on, change);
                let before = self.at(level, position);
                self.builder.add(pass, on, before, finer)
            }
        }
    }

    /// Whether a level's states are coarser than the next finer level's.
    fn is_coarser(&self, level: usize) -> bool {
        level > 0 && self.line.levels[level].mesh > self.line.levels[level - 1].mesh
    }

    /// Solves the coarsest level sequentially, from its first point to its last.
    fn solve_coarsest(&mut self) {
        let level = self.line.levels.len() - 1;
        self.enter(PhaseKind::CoarsestSolve, level);
        for position in 0..self.line.levels[level].end() {
            self.u[level][position + 1] = Some(self.stepped(level, position, false));
        }
    }

    /// Evaluates every layer finally. With one level this is the whole solve.
    fn final_sweep(&mut self) {
        self.enter(PhaseKind::Final, 0);
        if self.line.levels.len() > 1 {
            return self.sweep(0, true);
        }
        for position in 0..self.line.finest().end() {
            self.u[0][position + 1] = Some(self.stepped(0, position, true));
        }
    }

    // ---- parts of the cycle

    /// Returns the value of the step from a position, including the term `f` that is added to it.
    fn stepped(&mut self, level: usize, position: usize, is_final: bool) -> Value {
        let pass = self.line.pass;
        let from = self.at(level, position);
        let levels = &self.line.levels[level];
        let (step, point, on) = (levels.steps[position], levels.points[position + 1], levels.homes[position + 1]);
        let stepped = self.builder.step(pass, &step, point, from, is_final);
        match self.f[level][position + 1] {
            Some(more) => self.builder.add(pass, on, stepped, more),
            None => stepped,
        }
    }

    fn at(&self, level: usize, position: usize) -> Value {
        let Some(value) = self.u[level][position] else { unreachable!("a position has a value before it is read") };
        value
    }

    /// The positions of a level that the next coarser level also has.
    fn coarse_positions(&self, level: usize) -> impl Iterator<Item = usize> + use<> {
        self.line.levels[level + 1].in_finer.clone().into_iter()
    }

    /// The intervals between consecutive positions that the next coarser level also has.
    fn intervals(&self, level: usize) -> Vec<(usize, usize)> {
        self.line.levels[level + 1].in_finer.windows(2).map(|ends| (ends[0], ends[1])).collect()
    }

    fn enter(&mut self, kind: PhaseKind, level: usize) {
        self.builder.phase = Some(Phase { kind, level: level as u32, iteration: self.iteration });
    }

    fn post_norm(&mut self) {
        let iteration = self.iteration;
        match self.cycle.norms {
            Norms::None => return,
            Norms::Lagged => self.await_norm(),
            Norms::Blocking => {}
        }
        self.on_all_ranks(Op::PostNorm { iteration });
        self.norms.push(iteration);
        self.pending_norm = Some(iteration);
        if self.cycle.norms == Norms::Blocking {
            self.await_norm();
        }
    }

    fn await_norm(&mut self) {
        if let Some(iteration) = self.pending_norm.take() {
            self.on_all_ranks(Op::AwaitNorm { iteration });
        }
    }

    fn on_all_ranks(&mut self, op: Op) {
        for rank in 0..self.builder.ranks.len() as u32 {
            self.builder.emit(Rank(rank), op);
        }
    }
}

//! Nets whose states are numbers, the execution of plans on them, and the same solve without a plan, as in textbooks.
#![allow(dead_code, reason = "each test takes what it needs")]

use std::collections::HashMap;

use accl_multigrid::{Cycle, Grid, Kind, Layer, Op, Pass, Plan, Shape, Start, Value};
use accl_types::Rank;

/// A net whose states are numbers.
pub struct Net {
    pub layers: Vec<Layer>,
    pub dt: f64,
    /// The state of each layer's final evaluation.
    pub states: Vec<f64>,
}

impl Net {
    pub fn new(layers: Vec<Layer>) -> Self {
        let count = layers.len();
        Self { layers, dt: 1.0 / count as f64, states: vec![0.0; count] }
    }

    fn f(&self, layer: u32, x: f64) -> f64 {
        let a = 1.0 + 0.37 * f64::from(layer % 7);
        (a * x + 0.2 * f64::from(layer % 3)).sin()
    }

    fn slope(&self, layer: u32, x: f64) -> f64 {
        let a = 1.0 + 0.37 * f64::from(layer % 7);
        a * (a * x + 0.2 * f64::from(layer % 3)).cos()
    }

    /// The result of an evaluation, as defined for [`Op::Eval`].
    pub fn eval(&self, pass: Pass, layer: u32, span: u32, x: f64) -> f64 {
        match (pass, self.layers[layer as usize].kind) {
            (Pass::Forward, Kind::Increment) => self.f(layer, x),
            (Pass::Forward, Kind::Timed | Kind::Residual) => x + f64::from(span) * self.dt * self.f(layer, x),
            (Pass::Forward, Kind::Custom) => {
                let time = f64::from(span) * self.dt;
                (x + time * self.f(layer, x)) / (1.0 + 0.3 * time)
            }
            (Pass::Forward, Kind::Plain) => 0.9 * x + 0.1 * self.f(layer, x),
            (Pass::Adjoint, Kind::Increment) => self.slope(layer, self.states[layer as usize]) * x,
            (Pass::Adjoint, Kind::Timed | Kind::Residual) => {
                x + self.dt * self.slope(layer, self.states[layer as usize]) * x
            }
            (Pass::Adjoint, Kind::Custom) => {
                let time = f64::from(span) * self.dt;
                (1.0 + time * self.slope(layer, self.states[layer as usize])) * x / (1.0 + 0.3 * time)
            }
            (Pass::Adjoint, Kind::Plain) => (0.9 + 0.1 * self.slope(layer, self.states[layer as usize])) * x,
        }
    }

    /// A whole step of `span` fine steps.
    fn step(&self, pass: Pass, layer: u32, span: u32, x: f64) -> f64 {
        match self.layers[layer as usize].kind {
            Kind::Increment => x + f64::from(span) * self.dt * self.eval(pass, layer, 1, x),
            Kind::Residual => x + f64::from(span) * (self.eval(pass, layer, 1, x) - x),
            Kind::Timed if pass == Pass::Adjoint => x + f64::from(span) * (self.eval(pass, layer, 1, x) - x),
            Kind::Timed | Kind::Custom => self.eval(pass, layer, span, x),
            Kind::Plain => self.eval(pass, layer, 1, x),
        }
    }
}

/// A state on the next coarser mesh.
fn coarsened(x: f64) -> f64 {
    0.7 * x
}

/// A state on the next finer mesh.
fn refined(x: f64) -> f64 {
    1.4 * x + 0.1
}

/// The result of executing a plan, or of the reference solve.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Solved {
    pub outputs: Vec<f64>,
    pub norms: Vec<f64>,
    /// The arguments of the final evaluations, by pass and layer.
    pub finals: HashMap<(Pass, u32), f64>,
}

/// Executes all lists; a send and its receive happen together.
pub fn walk(plan: &Plan, net: &Net, inputs: &[f64], guesses: &[f64]) -> Solved {
    let mut values: HashMap<(Rank, Value), f64> = HashMap::new();
    let given = plan.inputs.iter().zip(inputs).chain(plan.guesses.iter().zip(guesses));
    values.extend(given.map(|(&(rank, value), &number)| ((rank, value), number)));
    let mut solved = Solved::default();
    let mut squares: HashMap<u32, Vec<(u32, f64)>> = HashMap::new();
    let mut waiting: Vec<Vec<(u32, f64)>> = vec![Vec::new(); plan.ranks.len()];
    let mut at = vec![0; plan.ranks.len()];
    while (0..at.len()).any(|rank| at[rank] < plan.ranks[rank].len()) {
        let before = at.clone();
        for rank in 0..at.len() {
            let me = Rank(rank as u32);
            while let Some(&op) = plan.ranks[rank].get(at[rank]) {
                let read = |value: Value| values[&(me, value)];
                match op {
                    Op::Eval { pass, layer, span, src, dst, is_final, .. } => {
                        if is_final {
                            solved.finals.insert((pass, layer), read(src));
                        }
                        values.insert((me, dst), net.eval(pass, layer, span, read(src)));
                    }
                    Op::Advance { span, src, increment, dst } => {
                        values.insert((me, dst), read(src) + f64::from(span) * net.dt * read(increment));
                    }
                    Op::Stretch { span, src, stepped, dst } => {
                        values.insert((me, dst), read(src) + f64::from(span) * (read(stepped) - read(src)));
                    }
                    Op::Coarsen { src, dst } => {
                        values.insert((me, dst), coarsened(read(src)));
                    }
                    Op::Refine { src, dst } => {
                        values.insert((me, dst), refined(read(src)));
                    }
                    Op::Add { a, b, dst } => {
                        values.insert((me, dst), read(a) + read(b));
                    }
                    Op::Subtract { a, b, dst } => {
                        values.insert((me, dst), read(a) - read(b));
                    }
                    Op::SquareNorm { interval, a, b } => waiting[rank].push((interval, (read(a) - read(b)).powi(2))),
                    Op::PostNorm { iteration } => squares.entry(iteration).or_default().append(&mut waiting[rank]),
                    Op::Loss { src, dst, .. } => {
                        values.insert((me, dst), 2.0 * read(src));
                    }
                    Op::Send { pass, to, value } => {
                        let there = plan.ranks[to.index()].get(at[to.index()]);
                        if there != Some(&Op::Recv { pass, from: me, value }) {
                            break;
                        }
                        values.insert((to, value), read(value));
                        at[to.index()] += 1;
                    }
                    Op::Recv { .. } => break,
                    Op::Free { value } => {
                        values.remove(&(me, value));
                    }
                    Op::Phase(_) | Op::AwaitNorm { .. } | Op::Forget { .. } => {}
                }
                at[rank] += 1;
            }
        }
        assert_ne!(at, before, "the walk has come to a stop");
    }
    let mut iterations: Vec<_> = squares.into_iter().collect();
    iterations.sort_unstable_by_key(|&(iteration, _)| iteration);
    for (_, mut squares) in iterations {
        squares.sort_unstable_by_key(|&(interval, _)| interval);
        solved.norms.push(squares.iter().map(|&(_, square)| square).sum::<f64>().sqrt());
    }
    solved.outputs = plan.outputs.iter().chain(&plan.states).map(|key| values[key]).collect();
    solved
}

/// The textbook solve: residuals, corrections that are added, every step computed again.
pub struct Reference<'a> {
    net: &'a Net,
    pass: Pass,
    /// For each level: layer and span of each step of the pass. `coarse`: the positions that the next level also has.
    steps: Vec<Vec<(u32, u32)>>,
    coarse: Vec<Vec<usize>>,
    meshes: Vec<u32>,
    cycle: &'a Cycle,
    u: Vec<Vec<f64>>,
    f: Vec<Vec<f64>>,
    norms: Vec<f64>,
}

impl<'a> Reference<'a> {
    pub fn new(grid: &Grid, net: &'a Net, pass: Pass, cycle: &'a Cycle) -> Self {
        let mut steps = Vec::new();
        let mut coarse = Vec::new();
        for (index, level) in grid.levels().iter().enumerate() {
            let mut all: Vec<_> = level.steps.iter().map(|step| (step.layer, step.span)).collect();
            let end = level.steps.len();
            let next = grid.levels().get(index + 1);
            let mut positions: Vec<usize> =
                next.map_or(vec![], |next| next.in_finer.iter().map(|&p| p as usize).collect());
            if pass == Pass::Adjoint {
                all.reverse();
                positions = positions.into_iter().rev().map(|position| end - position).collect();
            }
            steps.push(all);
            coarse.push(positions);
        }
        let zeros: Vec<Vec<f64>> = steps.iter().map(|steps| vec![0.0; steps.len() + 1]).collect();
        let meshes = grid.levels().iter().map(|level| level.mesh).collect();
        Self { net, pass, steps, coarse, meshes, cycle, u: zeros.clone(), f: zeros, norms: Vec::new() }
    }

    pub fn solve(mut self, input: f64, guesses: &[f64]) -> Solved {
        for (u, &mesh) in self.u.iter_mut().zip(&self.meshes) {
            u[0] = (0..mesh).fold(input, |x, _| coarsened(x));
        }
        let last = self.steps.len() - 1;
        if last > 0 {
            match self.cycle.start {
                Start::Guess => {
                    for (position, &guess) in self.coarse[0].clone()[1..].iter().zip(guesses) {
                        self.u[0][*position] = guess;
                    }
                }
                Start::Coarsest | Start::FullMultigrid => {
                    self.solve_coarsest();
                    for level in (0..last).rev() {
                        for (index, position) in self.coarse[level].clone().into_iter().enumerate().skip(1) {
                            self.u[level][position] = self.to_finer(level, self.u[level + 1][index]);
                        }
                        if level > 0 {
                            self.relax_f(level);
                            if self.cycle.start == Start::FullMultigrid {
                                self.cycle(level, Shape::V);
                            }
                        }
                    }
                }
            }
            for _ in 0..self.cycle.cycles() {
                self.cycle(0, self.cycle.shape);
            }
        }
        let mut solved = Solved::default();
        let end = self.steps[0].len();
        let bounds = if last > 0 { self.coarse[0].clone() } else { vec![0, end] };
        let starts: Vec<f64> = bounds.iter().map(|&position| self.u[0][position]).collect();
        for (ends, start) in bounds.windows(2).zip(starts) {
            let mut x = start;
            for position in ends[0]..ends[1] {
                let (layer, span) = self.steps[0][position];
                solved.finals.insert((self.pass, layer), x);
                x = self.net.step(self.pass, layer, span, x);
            }
            self.u[0][ends[1]] = x;
        }
        solved.outputs = vec![self.u[0][end]];
        solved.norms = self.norms;
        solved
    }

    fn phi(&self, level: usize, position: usize, x: f64) -> f64 {
        let (layer, span) = self.steps[level][position];
        if self.net.layers[layer as usize].kind == Kind::Plain {
            let fine = (0..self.meshes[level]).fold(x, |x, _| refined(x));
            let made = self.net.step(self.pass, layer, span, fine);
            return (0..self.meshes[level]).fold(made, |x, _| coarsened(x));
        }
        self.net.step(self.pass, layer, span, x)
    }

    /// Converts a state to the mesh of the next coarser level.
    fn to_coarser(&self, level: usize, x: f64) -> f64 {
        if self.meshes[level + 1] > self.meshes[level] { coarsened(x) } else { x }
    }

    /// Converts a state back to the mesh of the finer level.
    fn to_finer(&self, level: usize, x: f64) -> f64 {
        if self.meshes[level + 1] > self.meshes[level] { refined(x) } else { x }
    }

    fn solve_coarsest(&mut self) {
        let level = self.steps.len() - 1;
        for position in 0..self.steps[level].len() {
            self.u[level][position + 1] =
                self.phi(level, position, self.u[level][position]) + self.f[level][position + 1];
        }
    }

    fn relax_f(&mut self, level: usize) {
        for ends in self.coarse[level].clone().windows(2) {
            for position in ends[0]..ends[1] - 1 {
                self.u[level][position + 1] =
                    self.phi(level, position, self.u[level][position]) + self.f[level][position + 1];
            }
        }
    }

    fn cycle(&mut self, level: usize, shape: Shape) {
        if level + 1 == self.steps.len() {
            return self.solve_coarsest();
        }
        let coarse = self.coarse[level].clone();
        for _ in 0..self.cycle.relaxations_of(level) {
            self.relax_f(level);
            // From the end: an interval of one step must start from the old value of its C-point.
            for &position in coarse[1..].iter().rev() {
                self.u[level][position] =
                    self.phi(level, position - 1, self.u[level][position - 1]) + self.f[level][position];
            }
        }
        self.relax_f(level);
        let residual = |solve: &Self, position: usize| {
            solve.phi(level, position - 1, solve.u[level][position - 1]) + solve.f[level][position]
                - solve.u[level][position]
        };
        if level == 0 {
            self.norms.push(coarse[1..].iter().map(|&position| residual(self, position).powi(2)).sum::<f64>().sqrt());
        }
        let v: Vec<f64> = coarse.iter().map(|&position| self.u[level][position]).collect();
        for index in 1..coarse.len() {
            // The state itself is taken out of the residual, so R need not be linear.
            let reached = residual(self, coarse[index]) + v[index];
            self.f[level + 1][index] =
                self.to_coarser(level, reached) - self.phi(level + 1, index - 1, self.to_coarser(level, v[index - 1]));
        }
        let given: Vec<f64> = v.iter().map(|&x| self.to_coarser(level, x)).collect();
        self.u[level + 1] = given.clone();
        self.cycle(level + 1, shape);
        if shape == Shape::F && level + 2 < self.steps.len() {
            self.cycle(level + 1, Shape::V);
        }
        for (index, &position) in coarse.iter().enumerate().skip(1) {
            self.u[level][position] += self.to_finer(level, self.u[level + 1][index] - given[index]);
        }
        if level > 0 {
            self.relax_f(level);
        }
    }
}

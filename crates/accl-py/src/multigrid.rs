//! Plans of layer-parallel training as Python values.
//!
//! Owns the translation in both directions. `accl-multigrid` defines, builds and checks plans; Python executes them.
//! Read [`LayerPlan`] first.

use accl_multigrid::cost::{Costs, LayerTimes, Rates, Share, predict_times};
use accl_multigrid::memory::ValueMemory;
use accl_multigrid::{
    Cycle, Grid, Kind, Layer, Norms, Op, Pass, Phase, PhaseKind, Placement, Plan, Reuse, Schedule, Shape, Start, Value,
    check, mgrit, pipeline,
};
use accl_types::{Bytes, Error, Rank};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// The kind of a layer, by name, and whether the layer is apart.
type LayerSpec = (String, bool);

/// Fields of a cycle: iterations, shape, relaxations, start, norms, `has_final_sweep`, reuse.
type CycleSpec = (u32, String, Vec<u32>, String, String, bool, String);

/// Picoseconds of a layer: plain, recorded, VJP of its input, VJP of its input and parameters.
type LayerPs = (u64, u64, u64, u64);

/// Picoseconds: adding a KiB, a message, its latency, a KiB of a message, a norm.
type RatesPs = (u64, u64, u64, u64, u64);

/// The operations of all ranks in a solve or in a pipeline; see the documentation of the crate `accl-multigrid`.
#[pyclass(frozen, module = "torch_accl._native")]
struct LayerPlan {
    plan: Plan,
}

#[pymethods]
impl LayerPlan {
    /// A solve by multigrid; with one level, a sequential pass. `counts` is the number of layers on each rank.
    /// `is_coarser` states between which levels, the finest first, states become coarser.
    #[staticmethod]
    #[pyo3(signature = (layers, factors, counts, pass_, cycle, is_coarser=Vec::new()))]
    fn mgrit(
        py: Python<'_>,
        layers: Vec<LayerSpec>,
        factors: Vec<u32>,
        counts: Vec<u32>,
        pass_: &str,
        cycle: CycleSpec,
        mut is_coarser: Vec<bool>,
    ) -> PyResult<Self> {
        let (layers, pass, cycle) = (layers_of(&layers)?, one_of("pass", pass_, &PASSES)?, cycle_of(cycle)?);
        py.detach(|| {
            is_coarser.resize(is_coarser.len().max(factors.len()), false);
            let grid = Grid::new(&layers, &factors)?.with_coarser_states(&is_coarser)?;
            checked(mgrit(&grid, &Placement::of_counts(&counts)?, pass, &cycle)?)
        })
        .map_err(refused)
    }

    /// A pipeline over the same kind of placement.
    #[staticmethod]
    fn pipeline(
        py: Python<'_>,
        layers: Vec<LayerSpec>,
        counts: Vec<u32>,
        schedule: &str,
        micro_batches: u32,
    ) -> PyResult<Self> {
        let (layers, schedule) = (layers_of(&layers)?, one_of("schedule", schedule, &SCHEDULES)?);
        py.detach(|| {
            let grid = Grid::new(&layers, &[])?;
            checked(pipeline(&grid, &Placement::of_counts(&counts)?, schedule, micro_batches)?)
        })
        .map_err(refused)
    }

    /// The operations of a rank, each a tuple that begins with its name.
    fn ops<'py>(&self, py: Python<'py>, rank: usize) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        self.list(rank)?.iter().map(|op| tuple_of(py, op)).collect()
    }

    /// Number of a rank's operations, by name.
    fn counts<'py>(&self, py: Python<'py>, rank: usize) -> PyResult<Bound<'py, PyDict>> {
        let counts = PyDict::new(py);
        for op in self.list(rank)? {
            let name = name_of(op);
            let before = counts.get_item(name)?.map_or(Ok(0), |count| count.extract::<u64>())?;
            counts.set_item(name, before + 1)?;
        }
        Ok(counts)
    }

    /// The point that each value is a state of.
    #[getter]
    fn points(&self) -> Vec<u32> {
        self.plan.points.clone()
    }

    /// The mesh of each value: how often its state has been made coarser.
    #[getter]
    fn meshes(&self) -> Vec<u32> {
        self.plan.meshes.clone()
    }

    /// The values from outside, with the ranks that get them.
    #[getter]
    fn inputs(&self) -> Vec<(u32, Value)> {
        plain(&self.plan.inputs)
    }

    /// The values of a guess, for the C-points, with their ranks.
    #[getter]
    fn guesses(&self) -> Vec<(u32, Value)> {
        plain(&self.plan.guesses)
    }

    /// The output values, with their ranks.
    #[getter]
    fn outputs(&self) -> Vec<(u32, Value)> {
        plain(&self.plan.outputs)
    }

    /// The final values of the C-points, if there is no final sweep.
    #[getter]
    fn states(&self) -> Vec<(u32, Value)> {
        plain(&self.plan.states)
    }

    /// The iterations that have a norm.
    #[getter]
    fn norms(&self) -> Vec<u32> {
        self.plan.norms.clone()
    }

    /// Number of intervals, whose squares add up to a norm.
    #[getter]
    fn intervals(&self) -> u32 {
        self.plan.intervals
    }

    /// Maximum bytes at a time: of values, and of the graphs that final evaluations leave. `state` is the bytes of a
    /// value at each point, `graph` the bytes of each layer's graph. `shares` is the thousandths of a state's bytes on
    /// each coarser mesh.
    #[pyo3(signature = (rank, state, graph, shares=Vec::new()))]
    fn memory(&self, rank: usize, state: Vec<u64>, graph: Vec<u64>, shares: Vec<u64>) -> PyResult<(u64, u64)> {
        self.list(rank)?;
        self.sizes("state", &state, 1)?;
        self.sizes("graph", &graph, 0)?;
        let bytes = |sizes: Vec<u64>| sizes.into_iter().map(Bytes).collect::<Vec<_>>();
        let memory = ValueMemory::of(&self.plan, Rank(rank as u32), &bytes(state), &bytes(graph), &shares);
        Ok((memory.peak.0, memory.graphs.0))
    }

    /// Returns the total time and each rank's activities as (operation, begin, end), in picoseconds. `shares` is the
    /// thousandths of a state's bytes and of a layer's time on each coarser mesh.
    #[pyo3(signature = (layers, state, rates, shares=Vec::new()))]
    #[allow(clippy::type_complexity, reason = "it is passed to Python")]
    fn simulate(
        &self,
        py: Python<'_>,
        layers: Vec<LayerPs>,
        state: Vec<u64>,
        rates: RatesPs,
        shares: Vec<(u64, u64)>,
    ) -> PyResult<(u64, Vec<Vec<(usize, u64, u64)>>)> {
        self.sizes("state", &state, 1)?;
        self.sizes("layers", &layers, 0)?;
        let times = |(plain, recorded, input_vjp, full_vjp)| LayerTimes { plain, recorded, input_vjp, full_vjp };
        let (add_per_kib, message, latency, wire_per_kib, norm) = rates;
        let costs = Costs {
            layers: layers.into_iter().map(times).collect(),
            state: state.into_iter().map(Bytes).collect(),
            shares: shares.into_iter().map(|(bytes, time)| Share { bytes, time }).collect(),
            rates: Rates { add_per_kib, message, latency, wire_per_kib, norm },
        };
        let timing = py.detach(|| predict_times(&self.plan, &costs));
        let rank = |rank: Vec<accl_multigrid::cost::Activity>| {
            rank.into_iter().map(|activity| (activity.op, activity.begin, activity.end)).collect()
        };
        Ok((timing.total, timing.ranks.into_iter().map(rank).collect()))
    }
}

impl LayerPlan {
    fn list(&self, rank: usize) -> PyResult<&[Op]> {
        self.plan.ranks.get(rank).map(Vec::as_slice).ok_or_else(|| {
            refused(Error::invalid_argument(format!(
                "rank {rank} is out of range for a plan with {} ranks",
                self.plan.ranks.len()
            )))
        })
    }

    fn sizes<T>(&self, name: &str, given: &[T], more: u32) -> PyResult<()> {
        let wanted = (self.plan.layers + more) as usize;
        if given.len() == wanted {
            return Ok(());
        }
        Err(refused(Error::invalid_argument(format!("{name}: got {} numbers, expected {wanted}", given.len()))))
    }
}

/// Number of layers on each rank: `even`, or `aligned` to the points of coarse levels.
#[pyfunction]
fn layer_placement(layers: Vec<LayerSpec>, factors: Vec<u32>, ranks: u32, how: &str) -> PyResult<Vec<u32>> {
    let layers = layers_of(&layers)?;
    let placement = match how {
        "even" => Placement::even(layers.len() as u32, ranks),
        "aligned" => Grid::new(&layers, &factors).and_then(|grid| Placement::aligned(&grid, ranks)),
        _ => return Err(unknown("placement", how, "even, aligned")),
    };
    let placement = placement.map_err(refused)?;
    let mut counts = vec![0; ranks as usize];
    (0..placement.layers()).for_each(|layer| counts[placement.owner(layer).index()] += 1);
    Ok(counts)
}

/// The points of each level, the finest first.
#[pyfunction]
fn layer_levels(layers: Vec<LayerSpec>, factors: Vec<u32>) -> PyResult<Vec<Vec<u32>>> {
    let grid = Grid::new(&layers_of(&layers)?, &factors).map_err(refused)?;
    Ok(grid.levels().iter().map(|level| level.points.clone()).collect())
}

// ---- meanings of names

const PASSES: [(&str, Pass); 2] = [("forward", Pass::Forward), ("adjoint", Pass::Adjoint)];
const SHAPES: [(&str, Shape); 2] = [("V", Shape::V), ("F", Shape::F)];
const STARTS: [(&str, Start); 3] =
    [("coarsest", Start::Coarsest), ("full", Start::FullMultigrid), ("guess", Start::Guess)];
const NORMS: [(&str, Norms); 3] = [("none", Norms::None), ("blocking", Norms::Blocking), ("lagged", Norms::Lagged)];
const REUSES: [(&str, Reuse); 3] = [("nothing", Reuse::Nothing), ("values", Reuse::Values), ("all", Reuse::All)];
const SCHEDULES: [(&str, Schedule); 4] = [
    ("forward", Schedule::Forward),
    ("adjoint", Schedule::Adjoint),
    ("gpipe", Schedule::FillDrain),
    ("1f1b", Schedule::OneForwardOneBackward),
];
const PHASES: [(&str, PhaseKind); 7] = [
    ("F-relaxation", PhaseKind::FRelax),
    ("C-relaxation", PhaseKind::CRelax),
    ("restriction", PhaseKind::Restrict),
    ("coarse march", PhaseKind::CoarsestSolve),
    ("final sweep", PhaseKind::Final),
    ("chunk", PhaseKind::Chunk),
    ("loss", PhaseKind::Loss),
];

fn one_of<T: Copy>(what: &str, name: &str, known: &[(&str, T)]) -> PyResult<T> {
    let found = known.iter().find(|&&(known, _)| known == name).map(|&(_, value)| value);
    found.ok_or_else(|| unknown(what, name, &known.iter().map(|&(name, _)| name).collect::<Vec<_>>().join(", ")))
}

fn unknown(what: &str, name: &str, known: &str) -> PyErr {
    refused(Error::invalid_argument(format!("{what}: expected one of {known}, got `{name}`")))
}

fn layers_of(layers: &[LayerSpec]) -> PyResult<Vec<Layer>> {
    layers.iter().map(|(kind, is_apart)| Ok(Layer { kind: kind_of(kind)?, is_apart: *is_apart })).collect()
}

fn kind_of(name: &str) -> PyResult<Kind> {
    Kind::of(name).ok_or_else(|| unknown("layer", name, &Kind::ALL.map(Kind::name).join(", ")))
}

fn cycle_of((iterations, shape, relaxations, start, norms, has_final_sweep, reuse): CycleSpec) -> PyResult<Cycle> {
    Ok(Cycle {
        iterations,
        shape: one_of("shape", &shape, &SHAPES)?,
        relaxations,
        start: one_of("start", &start, &STARTS)?,
        norms: one_of("mode of norms", &norms, &NORMS)?,
        has_final_sweep,
        reuse: one_of("reuse", &reuse, &REUSES)?,
    })
}

/// Checks a plan. The checker accepts every plan of the builders; if it ever does not, the plan must not be executed.
fn checked(plan: Plan) -> accl_types::Result<LayerPlan> {
    check::check(&plan).map_err(|wrong| Error::internal(format!("the plan checker refused a plan: {wrong}")))?;
    Ok(LayerPlan { plan })
}

// ---- operations

fn name_of(op: &Op) -> &'static str {
    match op {
        Op::Phase(_) => "phase",
        Op::Eval { .. } => "eval",
        Op::Advance { .. } => "advance",
        Op::Stretch { .. } => "stretch",
        Op::Coarsen { .. } => "coarsen",
        Op::Refine { .. } => "refine",
        Op::Add { .. } => "add",
        Op::Subtract { .. } => "subtract",
        Op::SquareNorm { .. } => "square_norm",
        Op::PostNorm { .. } => "post_norm",
        Op::AwaitNorm { .. } => "await_norm",
        Op::Loss { .. } => "loss",
        Op::Send { .. } => "send",
        Op::Recv { .. } => "recv",
        Op::Free { .. } => "free",
        Op::Forget { .. } => "forget",
    }
}

fn tuple_of<'py>(py: Python<'py>, op: &Op) -> PyResult<Bound<'py, PyTuple>> {
    let name = name_of(op);
    match *op {
        Op::Phase(Phase { kind, level, iteration }) => {
            let known = PHASES.iter().find(|&&(_, known)| known == kind).map_or("", |&(name, _)| name);
            (name, known, level, iteration).into_pyobject(py)
        }
        Op::Eval { pass, layer, span, micro_batch, src, dst, is_final } => {
            (name, pass_of(pass), layer, span, micro_batch, src, dst, is_final).into_pyobject(py)
        }
        Op::Advance { span, src, increment, dst } => (name, span, src, increment, dst).into_pyobject(py),
        Op::Stretch { span, src, stepped, dst } => (name, span, src, stepped, dst).into_pyobject(py),
        Op::Coarsen { src, dst } | Op::Refine { src, dst } => (name, src, dst).into_pyobject(py),
        Op::Add { a, b, dst } | Op::Subtract { a, b, dst } => (name, a, b, dst).into_pyobject(py),
        Op::SquareNorm { interval, a, b } => (name, interval, a, b).into_pyobject(py),
        Op::PostNorm { iteration } | Op::AwaitNorm { iteration } => (name, iteration).into_pyobject(py),
        Op::Loss { micro_batch, src, dst } => (name, micro_batch, src, dst).into_pyobject(py),
        Op::Send { pass, to, value } => (name, pass_of(pass), to.0, value).into_pyobject(py),
        Op::Recv { pass, from, value } => (name, pass_of(pass), from.0, value).into_pyobject(py),
        Op::Free { value } => (name, value).into_pyobject(py),
        Op::Forget { layer, micro_batch } => (name, layer, micro_batch).into_pyobject(py),
    }
}

fn pass_of(pass: Pass) -> &'static str {
    PASSES.iter().find(|&&(_, known)| known == pass).map_or("", |&(name, _)| name)
}

fn plain(values: &[(Rank, Value)]) -> Vec<(u32, Value)> {
    values.iter().map(|&(rank, value)| (rank.0, value)).collect()
}

fn refused(error: Error) -> PyErr {
    pyo3::exceptions::PyValueError::new_err(error.to_string())
}

/// Adds this file's functions to the module.
pub(crate) fn add_functions(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<LayerPlan>()?;
    module.add_function(wrap_pyfunction!(layer_placement, module)?)?;
    module.add_function(wrap_pyfunction!(layer_levels, module)?)
}

//! What encodings do to tensors: error, residuals, buckets that become NaN, time.
//!
//! Owns the figures of a call and the way they take. How they are found is in `memory::error_probe`; who sums them up over calls is
//! a [`Statistics`] that is handed in. Read [`Measured`] first.

use std::fmt;
use std::sync::Arc;

use accl_kernels::codec::NonFinite;

/// What was measured of one tensor, summed up over calls that are done.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// Number of calls.
    pub calls: u64,
    /// Elements of results that were compared with exact ones.
    pub compared: u64,
    /// Sum of the squares of their errors.
    pub error: f64,
    /// Sum of the squares of the exact ones.
    pub square: f64,
    /// Calls with error feedback on gradients that were not all zeros.
    pub residual_calls: u64,
    /// Sum over these: norm of this rank's residual, by the norm of its gradient.
    pub residual: f64,
    /// Buckets that this rank encoded as NaN.
    pub non_finite: NonFinite,
    /// Time that this rank took to encode, decode and add, in nanoseconds.
    pub nanos: u64,
}

impl Measured {
    /// Adds what was measured of another call.
    pub fn add(&mut self, other: &Measured) {
        self.calls += other.calls;
        self.compared += other.compared;
        self.error += other.error;
        self.square += other.square;
        self.residual_calls += other.residual_calls;
        self.residual += other.residual;
        self.non_finite += other.non_finite;
        self.nanos += other.nanos;
    }
}

/// Where calls enter what was measured of them when they are done.
pub trait Statistics: Send + Sync + fmt::Debug {
    /// Adds the rows of a call's tensors, in their order. Runs under the engine's lock: it must not wait for long.
    fn enter(&self, measured: &[Measured]);
}

/// That a call is measured, and how closely.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Where it is entered.
    pub stats: Arc<dyn Statistics>,
    /// About one element in so many of a sum is compared with the exact result; 0: none.
    pub one_in: u64,
    /// Of a call that is cut into parts: where the others leave what they have measured for the first.
    pub gathered: Option<Arc<dyn Gather>>,
    /// The memory of the additional tensor, which every part of the call keeps.
    pub(crate) rooms: Option<Arc<dyn Keeps>>,
}

/// What a call keeps for as long as any part of it goes on.
pub trait Keeps: Send + Sync + fmt::Debug {}

impl Probe {
    /// Enters what is measured there.
    pub fn new(stats: Arc<dyn Statistics>, one_in: u64) -> Self {
        Self { stats, one_in, gathered: None, rooms: None }
    }
}

/// What was measured of a part of a call.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Of each of the caller's tensors.
    pub(crate) rows: Vec<Measured>,
    /// Of each of them: squares of the residual, and of the gradient.
    pub(crate) squares: Vec<[f64; 2]>,
}

impl Figures {
    /// Adds those of another part.
    pub fn add(&mut self, other: Figures) {
        self.rows.resize(self.rows.len().max(other.rows.len()), Measured::default());
        self.squares.resize(self.squares.len().max(other.squares.len()), [0.0; 2]);
        for (mine, row) in self.rows.iter_mut().zip(&other.rows) {
            mine.add(row);
        }
        for (mine, [lost, gradient]) in self.squares.iter_mut().zip(other.squares) {
            mine[0] += lost;
            mine[1] += gradient;
        }
    }
}

/// Where the parts of a call leave what they have measured, each under the lock of its own lane.
pub trait Gather: Send + Sync + fmt::Debug {
    /// A part has ended.
    fn add(&self, figures: Figures);

    /// What all that have ended have left.
    fn take(&self) -> Figures;
}

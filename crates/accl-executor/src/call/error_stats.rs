//! Statistics about encodings: error, residuals, buckets that became NaN, and time.
//!
//! This module owns the figures of a call and how they are passed on. `memory::error_probe` measures them. A
//! [`Statistics`] that is passed in sums them over calls. Read [`Measured`] first.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use accl_kernels::codec::NonFinite;

use super::combination::{SampleCopies, SampleCopy, Squares};

/// Measurements of one tensor, summed over completed calls.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// Number of calls.
    pub calls: u64,
    /// Number of result elements that were compared with exact results.
    pub compared: u64,
    /// Sum of the squared errors of the compared elements.
    pub error: f64,
    /// Sum of the squares of the exact results.
    pub square: f64,
    /// Number of calls with error feedback whose gradients were not all zeros.
    pub residual_calls: u64,
    /// Sum over `residual_calls`: norm of this rank's residual divided by the norm of its gradient.
    pub residual: f64,
    /// Buckets that this rank encoded as NaN.
    pub non_finite: NonFinite,
    /// Time that this rank spent encoding, decoding and adding, in nanoseconds.
    pub nanos: u64,
}

impl Measured {
    /// Adds the measurements of another call.
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

/// Collector of the measurements of completed calls.
pub trait Statistics: Send + Sync + fmt::Debug {
    /// Adds the measurements of one call, one row for each of its tensors in order. Runs under the engine's lock: it
    /// must not block for long.
    fn enter(&self, measured: &[Measured]);
}

/// Request to measure a call, and how closely.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Collector of the measurements.
    pub stats: Arc<dyn Statistics>,
    /// About one of `one_in` elements of a sum is compared with the exact result; 0 compares none.
    pub one_in: u64,
    /// If the call is cut into parts: where the parts leave their measurements for the last of them.
    pub gathered: Option<Arc<dyn Gather>>,
    /// Memory of the additional tensor. Every part of the call keeps it alive.
    pub(crate) rooms: Option<Arc<dyn Keeps>>,
    /// If a worker computes the combinations: what it copies for the sample.
    pub(crate) copies: Option<Arc<CodedSample>>,
}

/// Copies of a measured call whose combinations a worker computes.
#[derive(Debug)]
pub(crate) struct CodedSample {
    /// Contributions, for the additional tensor.
    pub(crate) contributions: Arc<SampleCopies>,
    /// Results, in the order of their addresses.
    pub(crate) results: Vec<SampleCopy>,
}

/// Memory that a call keeps alive as long as any of its parts runs.
pub trait Keeps: Send + Sync + fmt::Debug {}

impl Probe {
    /// Creates a probe that adds its measurements to `stats`.
    pub fn new(stats: Arc<dyn Statistics>, one_in: u64) -> Self {
        Self { stats, one_in, gathered: None, rooms: None, copies: None }
    }
}

/// Measurements of one part of a call.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Measurements of each of the caller's tensors.
    pub(crate) rows: Vec<Measured>,
    /// Squares of each of these tensors.
    pub(crate) squares: Vec<Squares>,
}

impl Figures {
    /// Adds the figures of another part.
    pub fn add(&mut self, other: Figures) {
        self.rows.resize(self.rows.len().max(other.rows.len()), Measured::default());
        self.squares.resize(self.squares.len().max(other.squares.len()), Squares::default());
        for (mine, row) in self.rows.iter_mut().zip(&other.rows) {
            mine.add(row);
        }
        self.squares.iter_mut().zip(other.squares).for_each(|(mine, squares)| mine.add(squares));
    }
}

/// Place where the parts of a call leave their measurements, each under the lock of its own lane.
pub trait Gather: Send + Sync + fmt::Debug {
    /// Keeps the sample of the call for the part that is the last to add its figures.
    fn keep_sample(&self, sample: Arc<dyn Any + Send + Sync>);

    /// Adds the figures of a part whose results are final; each part does this once. Returns the figures of all parts to
    /// the last of them, and `None` to the others.
    fn add(&self, figures: Figures) -> Option<AllFigures>;
}

/// Measurements of all parts of a call.
#[derive(Debug, Default)]
pub struct AllFigures {
    /// Sum of the figures of the parts.
    pub figures: Figures,
    /// The sample that the first part has passed to [`Gather::keep_sample`]; `None` if the call has none.
    pub sample: Option<Arc<dyn Any + Send + Sync>>,
}

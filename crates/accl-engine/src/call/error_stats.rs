//! What encodings do to tensors, summed up over calls: error, residuals, buckets that become NaN, time.
//!
//! Owns the figures that callers read. How they are found is in `memory::error_probe`. Read [`ErrorStats`] first.

use std::sync::Arc;

use accl_kernels::codec::NonFinite;

use crate::sync::Mutex;

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
    fn add(&mut self, other: &Measured) {
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

/// Measurements of the tensors of one kind of call. Calls enter theirs when they are done.
#[derive(Debug)]
pub struct ErrorStats(Mutex<Vec<Measured>>);

impl ErrorStats {
    /// For calls with so many tensors in each block.
    pub fn new(tensors: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(vec![Measured::default(); tensors])))
    }

    /// What was measured of each tensor until now.
    pub fn read(&self) -> Vec<Measured> {
        self.0.lock().clone()
    }

    pub(crate) fn enter(&self, measured: &[Measured]) {
        self.0.lock().iter_mut().zip(measured).for_each(|(row, new)| row.add(new));
    }
}

/// That a call is measured, and how closely.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Where it is entered.
    pub stats: Arc<ErrorStats>,
    /// About one element in so many of a sum is compared with the exact result; 0: none.
    pub one_in: u64,
}

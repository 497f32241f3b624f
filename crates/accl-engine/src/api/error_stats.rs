//! Measurements of the error that encodings cause, summed up over calls.
//!
//! Owns the sums that callers read. Read [`ErrorStats`] first.

use std::sync::Arc;

use crate::sync::Mutex;
use accl_executor::call::{Measured, Statistics};

/// Measurements of the tensors of one kind of call. Each call adds its measurements when it completes.
#[derive(Debug)]
pub struct ErrorStats(Mutex<Vec<Measured>>);

impl ErrorStats {
    /// Creates empty measurements for calls with `tensors` tensors in each block.
    pub fn new(tensors: usize) -> Arc<Self> {
        Arc::new(Self(Mutex::new(vec![Measured::default(); tensors])))
    }

    /// Returns the measurements of each tensor so far.
    pub fn read(&self) -> Vec<Measured> {
        self.0.lock().clone()
    }
}

impl Statistics for ErrorStats {
    fn enter(&self, measured: &[Measured]) {
        self.0.lock().iter_mut().zip(measured).for_each(|(row, new)| row.add(new));
    }
}

//! What encodings do to tensors, summed up over calls.
//!
//! Owns the sums that callers read. Read [`ErrorStats`] first.

use std::sync::Arc;

use crate::sync::Mutex;
use accl_executor::call::{Measured, Statistics};

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
}

impl Statistics for ErrorStats {
    fn enter(&self, measured: &[Measured]) {
        self.0.lock().iter_mut().zip(measured).for_each(|(row, new)| row.add(new));
    }
}

//! Transports that exist to be tried: one over [`pipe`]s, one that [`sealed`] puts between a link and its bytes, and the example of one
//! from another package, in C.
//!
//! Each is a file and a row, as docs/adding-a-transport.md has it; here the rows are handed in while the tests run.

mod pipe;
mod sealed;

use std::sync::Once;

use accl_transport::{Transport, TransportV1, register, register_table};

unsafe extern "C" {
    /// In `examples/transport/datagrams.c`.
    safe fn datagrams_transport() -> *const TransportV1;
}

/// Names of the transports of this folder.
pub const TOYS: &[&str] = &["pipe", "sealed", "datagrams"];

/// Adds them to the table, once.
///
/// # Panics
/// Panics when one is refused: a test cannot go on.
pub fn register_toys() {
    static DONE: Once = Once::new();
    DONE.call_once(|| {
        let add = |row: Transport| register(row).unwrap_or_else(|why| panic!("{why}"));
        add(pipe::ROW);
        add(sealed::ROW);
        // SAFETY: the example keeps what its header promises, or the tests show it.
        unsafe { register_table(datagrams_transport()) }.unwrap_or_else(|why| panic!("{why}"));
    });
}

//! Transports for tests: one over [`pipe`]s, one that [`sealed`] puts between a link and its bytes, and the example in
//! C. The example also runs without descriptors and with a doorbell.
//!
//! Each transport is a file and a row of a table, as in docs/adding-a-transport.md. Here the rows are registered while
//! the tests run.

mod datagrams;
mod library;
mod pipe;
mod rung;
mod sealed;

use std::sync::Once;

use accl_transport::{Transport, TransportV1, register, register_table, transports};

use datagrams::datagrams_transport;
pub use library::{Library, library};

/// Transport whose links need a listener ([`accl_wire::Link::needs_listener`]). Engines have a listener; two links
/// alone do not.
pub const THRIFTY: &str = "rung_thriftily";

/// Returns the names of all transports whose links need no listener, including the transports of this folder.
///
/// # Panics
/// Panics if a transport is refused: a test cannot go on.
pub fn every_transport() -> Vec<&'static str> {
    static DONE: Once = Once::new();
    DONE.call_once(|| {
        let add = |row: Transport| register(row).unwrap_or_else(|why| panic!("{why}"));
        add(pipe::ROW);
        add(sealed::ROW);
        // SAFETY: the example keeps the contract of its header; the tests would show if it did not.
        unsafe { register_table(datagrams_transport()) }.unwrap_or_else(|why| panic!("{why}"));
        // The same transport without descriptors, like hardware that raises no event.
        // SAFETY: `datagrams_transport` returns the address of a static table.
        let polled = unsafe { *datagrams_transport() };
        let polled = TransportV1 { name: c"polled".as_ptr(), descriptors: None, poll_interval_us: 500, ..polled };
        // SAFETY: `polled` is a copy of the example's table, which keeps the contract of the header, without the
        // optional descriptors.
        unsafe { register_table(&raw const polled) }.unwrap_or_else(|why| panic!("{why}"));
        for is_thrifty in [false, true] {
            let rung = rung::table(is_thrifty);
            // SAFETY: the functions of `rung` pass their arguments on to the example, which keeps the contract of the
            // header.
            unsafe { register_table(&raw const rung) }.unwrap_or_else(|why| panic!("{why}"));
        }
    });
    transports().iter().map(|row| row.name).filter(|&name| name != THRIFTY).collect()
}

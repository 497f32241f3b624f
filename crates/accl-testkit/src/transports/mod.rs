//! Transports that exist to be tried: one over [`pipe`]s, one that [`sealed`] puts between a link and its bytes, and the example of one
//! from another package, in C, also without descriptors and with a doorbell.
//!
//! Each is a file and a row, as docs/adding-a-transport.md has it; here the rows are handed in while the tests run.

mod datagrams;
mod library;
mod pipe;
mod rung;
mod sealed;

use std::sync::Once;

use accl_transport::{Transport, TransportV1, register, register_table, transports};

use datagrams::datagrams_transport;
pub use library::{Library, library};

/// A transport whose links need somebody who sleeps on them ([`accl_wire::Link::needs_listener`]): engines have one, two links alone do not.
pub const THRIFTY: &str = "rung_thriftily";

/// Names of all transports whose links need nobody, with those of this folder.
///
/// # Panics
/// Panics when one of them is refused: a test cannot go on.
pub fn every_transport() -> Vec<&'static str> {
    static DONE: Once = Once::new();
    DONE.call_once(|| {
        let add = |row: Transport| register(row).unwrap_or_else(|why| panic!("{why}"));
        add(pipe::ROW);
        add(sealed::ROW);
        // SAFETY: the example keeps what its header promises, or the tests show it.
        unsafe { register_table(datagrams_transport()) }.unwrap_or_else(|why| panic!("{why}"));
        // The same without descriptors, as hardware has it that raises no event.
        // SAFETY: as above; and the function returns the address of a table.
        let polled = unsafe { *datagrams_transport() };
        let polled = TransportV1 { name: c"polled".as_ptr(), descriptors: None, poll_interval_us: 500, ..polled };
        // SAFETY: as above.
        unsafe { register_table(&raw const polled) }.unwrap_or_else(|why| panic!("{why}"));
        for is_thrifty in [false, true] {
            let rung = rung::table(is_thrifty);
            // SAFETY: it hands on what the example does.
            unsafe { register_table(&raw const rung) }.unwrap_or_else(|why| panic!("{why}"));
        }
    });
    transports().iter().map(|row| row.name).filter(|&name| name != THRIFTY).collect()
}

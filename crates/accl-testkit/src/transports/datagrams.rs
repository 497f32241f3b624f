//! The example of a transport from another package, in C.

use accl_transport::TransportV1;

unsafe extern "C" {
    /// In `examples/transport/datagrams.c`.
    pub(super) safe fn datagrams_transport() -> *const TransportV1;
}
